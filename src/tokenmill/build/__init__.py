"""From files of text to a store.

1. In: paths, globs, folders or datasets; the name of a tokenizer; a recipe; options.
2. Does: cuts the input into units of work, each of which becomes a shard in a worker process, with a journal from
   which any later call goes on; then makes the shards a store. Memory does not grow with the input.
3. Out: a finished store, or one for each domain and split; a report. The bytes depend on the documents and the
   options, never on the number of workers, or on how often the build was interrupted.
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
