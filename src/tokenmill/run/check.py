"""Records of the coming batches of a run, and the check that today's code, stores and config still give them.

A record holds a digest per step and source, with what the batches depend on: the plan, which has the fingerprints
of the stores, and the versions of packages. Checking computes the digests again. It stops at the first step that
differs, and names the cause.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import tokenmill
from tokenmill.errors import ConfigError, PlanError, whole
from tokenmill.fingerprint import first_difference
from tokenmill.loader import row_digests, usual_arrays
from tokenmill.loader.digests import batch_digest
from tokenmill.store.files import write_atomically
from tokenmill.tables import path_of, read_bytes, read_json

if TYPE_CHECKING:
    from tokenmill.run.run import Run

Progress = Callable[[int, int], None]
"""Called with the number of steps done and the number of steps in all."""
FORMAT = 1
NUM_STEPS = 1000
"""Steps that are recorded by default."""
MAX_BYTES = 1 << 30
_MAX_SHOWN = 80
"""Characters of a value that are printed."""
_PACKAGES = ("numpy", "numba", "fastokens", "tokenizers", "pyarrow")
"""Packages besides tokenmill that take part in making batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRecord:
    """Digests of the batches of some steps, and what the batches depend on."""

    format: int
    versions: Mapping[str, str]
    """Package -> version. `python` is among the packages."""
    plan: Mapping[str, Any]
    """Description of the plan up to the last recorded step, with the fingerprints of its stores."""
    first_step: int
    steps: tuple[Mapping[str, str], ...]
    """Source -> digest of its rows, for each step from `first_step`. Empty for a step that is skipped."""

    def __post_init__(self) -> None:
        """Reject a record of another format."""
        if self.format != FORMAT:
            raise ConfigError(f"record: unknown format {self.format}; this version reads {FORMAT}, so record again")

    @property
    def end_step(self) -> int:
        """Step after the last recorded one."""
        return self.first_step + len(self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCheck:
    """Result of comparing the batches of a run with a record."""

    first_step: int
    end_step: int
    """Step after the last recorded one."""
    differing_step: int | None
    """First step whose batch differs. None if all batches are the same."""
    differing_sources: tuple[str, ...]
    """Sources whose rows differ at that step."""
    cause: str | None
    """Most likely cause of the difference."""
    versions: tuple[str, ...]
    """Packages whose version differs, such as `numpy 2.1.0 -> 2.2.0`. They alone are no difference."""

    @property
    def same(self) -> bool:
        """Whether all recorded batches are the same."""
        return self.differing_step is None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return {"same": self.same, **asdict(self)}


def record_batches(
    run: Run,
    path: str | os.PathLike[str],
    first_step: int = 0,
    end_step: int | None = None,
    progress: Progress | None = None,
) -> BatchRecord:
    """Write a record of the steps from `first_step` to `end_step`, exclusive: 1,000 steps by default."""
    file, plan = Path(path_of("path", path)).absolute(), run.plan()
    first_step = whole("first_step", first_step, PlanError, "count from 0")
    end = min(first_step + NUM_STEPS, plan.steps)
    if end_step is not None:
        end = whole("end_step", end_step, PlanError, "leave it out for 1,000 steps")
    if not 0 <= first_step < end <= plan.steps:
        raise ConfigError(f"steps out of range: {first_step}:{end}; this run has the steps 0:{plan.steps}")
    record = BatchRecord(
        format=FORMAT,
        versions=_versions(),
        plan=plan.describe(end),
        first_step=first_step,
        steps=tuple(_step_digests(run, first_step, end, progress)),
    )
    write_atomically(file, msgspec.json.encode(record))
    return record


def read_record(path: str | os.PathLike[str]) -> BatchRecord:
    """Read a record of batches."""
    file = Path(path_of("path", path))
    return read_json(BatchRecord, read_bytes(file, MAX_BYTES), str(file))


def check_batches(run: Run, record: BatchRecord, progress: Progress | None = None) -> BatchCheck:
    """Compute the recorded batches again, and compare; stops at the first step that differs."""
    before, now = record.versions, _versions()
    versions = tuple(
        f"{name} {before.get(name, 'not installed')} -> {now.get(name, 'not installed')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    )
    plan, first = run.plan(), record.first_step
    end = max(first, min(record.end_step, plan.steps))
    differing = end if end < record.end_step else None  # a run that ends before the record
    sources: list[str] = []
    pairs = zip(record.steps[: end - first], _step_digests(run, first, end, progress), strict=True)
    for step, (then_rows, now_rows) in enumerate(pairs, first):
        if then_rows != now_rows:
            differing = step
            sources = [
                name for name in sorted({*then_rows, *now_rows}) if then_rows.get(name) != now_rows.get(name)
            ]
            break
    return BatchCheck(
        first_step=first,
        end_step=record.end_step,
        differing_step=differing,
        differing_sources=tuple(sources),
        cause=None if differing is None else _cause(run, record, differing, sources, versions),
        versions=versions,
    )


def _cause(run: Run, record: BatchRecord, step: int, sources: Sequence[str], versions: Sequence[str]) -> str:
    """Return the most likely cause of a difference at a step."""
    plan = run.plan()
    described = first_difference(record.plan, plan.describe(record.end_step))
    if step >= plan.steps:
        return f"the run has {plan.steps} steps, and the record goes to step {record.end_step}"
    if described is not None:
        path, then, now = described
        return f"{path}: {_short(then)} -> {_short(now)}"
    if versions:
        return f"the plan is the same, but versions differ: {', '.join(versions)}"
    return (
        f"the plan and all versions are the same, so tokens of {', '.join(sources)} changed on disk; "
        "run `tokenmill verify` on the stores"
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _step_digests(run: Run, first: int, end: int, progress: Progress | None) -> Iterator[dict[str, str]]:
    """Yield, for each step, the digest of each source's rows; it is empty for a step that is skipped."""
    if first == end:
        return
    plan = run.plan()
    loader = run.loader(
        micro_batch=gcd(*(stage.spec.global_batch_size for stage in plan.stages)),
        arrays=usual_arrays(plan),
        pad_to="row",  # or digests would depend on the micro-batch
    )
    loader.seek(first)
    stream = iter(loader)
    try:
        for step in range(first, end):
            stage = plan.stage(step)
            rows: dict[str, list[bytes]] = defaultdict(list)
            if stage.is_trained:
                sources = plan.rows(step)[0][loader.slots(step)].tolist()
                digests = (
                    each for batch in islice(stream, loader.part.batches(stage)) for each in row_digests(batch)
                )
                for source, row in zip(sources, digests, strict=True):
                    rows[plan.sources[source]].append(row)
            yield {name: batch_digest(rows[name]) for name in sorted(rows)}
            if progress:
                progress(step + 1 - first, end - first)
    finally:
        loader.close()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "tokenmill": tokenmill.__version__}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
