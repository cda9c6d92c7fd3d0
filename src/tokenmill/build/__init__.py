"""From files of text to a store.

1. In: paths, globs, folders or datasets, or records in memory (`records`); a tokenizer; a recipe; options.
2. Does: makes a job of what was asked for (`job`), cuts the input into units of work (`build`), turns each into
   shards (`unit`) by any engine (`engines`), or part by part in separate processes (`parts`), with a journal from
   which any later call goes on (`journal`); then makes the shards a store. Memory does not grow with the input.
3. Out: a finished store, or one for each domain and split; a report. The bytes depend on the documents and the
   options, never on the number of workers, or on how often the build was interrupted.

Around it: `progress` shows how far a build is, `staged` copies inputs from object storage and stores to it, and
`cached` prepares the documents that a run names.
"""

from tokenmill.build.build import PrepareReport, prepare
from tokenmill.build.engines import Executor, RayExecutor
from tokenmill.build.job import PrepareOptions
from tokenmill.build.parts import PartReport, UnitsReport, plan_units, run_part
from tokenmill.build.progress import Progress

__all__ = [
    "Executor",
    "PartReport",
    "PrepareOptions",
    "PrepareReport",
    "Progress",
    "RayExecutor",
    "UnitsReport",
    "plan_units",
    "prepare",
    "run_part",
]
