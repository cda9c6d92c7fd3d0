"""What a worker is asked to do with a unit: write its shards, or hash its records to find duplicates."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.documents import Unit
from tokenmill.prepare.bench import Bench
from tokenmill.prepare.duplicates import scan_unit
from tokenmill.prepare.work import run_unit, unit_from_json, unit_to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One unit and what is to be done with it."""

    unit: Unit
    key: str
    """Name of what comes out."""
    scan: bool = False
    """Whether its records are hashed only."""
    fates: str | None = None
    """File that says what becomes of each record; None: all are taken."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {"unit": unit_to_json(self.unit), "key": self.key, "scan": self.scan, "fates": self.fates}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Task:
        """Read what `to_json` wrote."""
        return cls(**{**value, "unit": unit_from_json(value["unit"])})


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Let Python look for cycles seldom: records come and go by the thousand, and none is part of one.

    It takes a tenth of the time of a build else, much of it amid the tokenizer (benchmarks/prepare.py).
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run_task(bench: Bench, task: Task, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Do a task, and return what came out as a JSON object."""
    with seldom_collecting():
        if task.scan:
            return scan_unit(bench, task.unit, task.key, tick)
        fates = None if task.fates is None else np.frombuffer(Path(task.fates).read_bytes(), np.uint8)
        return run_unit(bench, task.unit, task.key, fates, tick).to_json()
