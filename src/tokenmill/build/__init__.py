"""Builds: files of text or records become stores.

1. In: paths, globs, folders or datasets, or records in memory (`records`); a tokenizer; a recipe; options.
2. Does: makes a job of the arguments (`job`). Reads the state of the folder and decides what to do (`state`). Cuts
   the input into a list of tasks (`cut`, `tasks`). Does them by any engine (`schedule`, `engines`), or part by part
   in separate processes (`parts`): each unit becomes shards (`unit`, `select`). Makes stores of the shards
   (`publish`). Memory does not grow with the input.
3. Out: a finished store, or one for each domain and split; a report. The bytes depend on the documents and the
   options only, and not on the number of workers or interruptions.

All state is in files (`journal`), and `docs/explanation/build.md` draws it. `progress` and `status` show it.
`staged` and `uploads` build from and for object storage. `cached` prepares the documents that a run names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.build.build import PrepareReport as PrepareReport
    from tokenmill.build.build import prepare as prepare
    from tokenmill.build.engines import Executor as Executor
    from tokenmill.build.engines import RayExecutor as RayExecutor
    from tokenmill.build.options import PrepareOptions as PrepareOptions
    from tokenmill.build.parts import PartReport as PartReport
    from tokenmill.build.parts import UnitsReport as UnitsReport
    from tokenmill.build.parts import plan_units as plan_units
    from tokenmill.build.parts import run_part as run_part
    from tokenmill.build.progress import Progress as Progress

# Late, so that `tokenmill --help` reads the options of `prepare` without loading what builds.
_HOMES = {
    "Executor": "engines",
    "PartReport": "parts",
    "PrepareOptions": "options",
    "PrepareReport": "build",
    "Progress": "progress",
    "RayExecutor": "engines",
    "UnitsReport": "parts",
    "plan_units": "parts",
    "prepare": "build",
    "run_part": "parts",
}

__all__ = [*_HOMES]  # noqa: PLE0604 - the names of one table, listed once


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokenmill.build' has no attribute {name!r}")
    value = getattr(import_module(f"tokenmill.build.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
