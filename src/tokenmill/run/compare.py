"""Comparison of two plans: the first step whose batches differ, the first differing path, and the number of rows.

The descriptions of the plans give the first step at which batches may differ. From there on rows are computed,
block by block, because plans with different descriptions may have the same rows. Rows of one index are compared by
number, others by their spans. Rows with different spans count as different, even if they deliver the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from tokenmill.config.run import Config
from tokenmill.packing.stored import StoredRows, stored_rows
from tokenmill.plan.plan import Plan
from tokenmill.plan.stages import Stage, rows_at
from tokenmill.run.history import Change, PlanRecord, begins, cause, changes
from tokenmill.run.run import LIMIT_ROWS
from tokenmill.tables import as_json
from tokenmill.types import BoolArray, Int64Array

_BLOCK_ROWS = 1 << 16
"""Rows that are computed together."""

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of rows that have been compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Difference of two runs."""

    first_step: int | None
    """First step whose batches differ; None if none was found."""
    stage: str | None
    """Name of its stage, as the second run has it, or else the first."""
    begins: int | None
    """First step at which batches may differ, by the descriptions of the plans. None if all are the same."""
    cause: Change | None
    """First difference of the descriptions of the plans; None if they are the same."""
    changes: tuple[Change, ...]
    """Keys that differ between the configs, in the order of the config."""
    differing: int
    """Number of rows that differ."""
    compared: int
    """Number of compared rows, from the first difference, or from `begins` if none was found."""
    total: int
    """Number of rows to compare, to the end of the longer run."""
    end_step: int
    """Step before which all have been compared."""
    steps: int
    """Number of steps of the longer run."""

    @property
    def complete(self) -> bool:
        """Whether all rows were compared."""
        return self.compared == self.total

    @property
    def same(self) -> bool:
        """Whether all batches are known to be the same."""
        return self.first_step is None and self.complete

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "same": self.same,
            "first_step": self.first_step,
            "stage": self.stage,
            "begins": self.begins,
            "cause": as_json(self.cause),
            "changes": as_json(self.changes),
            "differing_rows": self.differing,
            "compared_rows": self.compared,
            "total_rows": self.total,
            "end_step": self.end_step,
            "complete": self.complete,
        }


def compare(
    old: Plan,
    new: Plan,
    *,
    configs: tuple[Config, Config],
    limit_rows: int = LIMIT_ROWS,
    progress: Progress | None = None,
) -> Difference:
    """Compare two plans, which were compiled from `configs`.

    At most `limit_rows` rows, and the rest of a step, are computed to find the first difference, and as many from
    there on. Rows of steps at which both plans stand at the same place of the same order need not be computed.
    """
    left, right = PlanRecord.of(old, configs[0]), PlanRecord.of(new, configs[1])
    start = begins(left, right)
    first = None
    differing = compared = total = 0
    end = old.steps
    if start is not None:
        blocks = _blocks(old, new, start, limit_rows, None)
        first = next((block.first_differing for block in blocks if block.differs), None)
        end = start if first is None else first
        total = sum((run.end - run.first) * run.rows for run in _runs(old, new, end))
        for block in _blocks(old, new, end, limit_rows, progress):
            differing, compared, end = differing + block.total_differing, compared + block.num_rows, block.end
    return Difference(
        first_step=first,
        stage=None if first is None else (new if first < new.steps else old).at(first).stage,
        begins=start,
        cause=cause(left, right),
        changes=tuple(changes(left, right)),
        differing=differing,
        compared=compared,
        total=total,
        end_step=end,
        steps=max(old.steps, new.steps),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Steps:
    """Steps at which each plan draws by one stage; None where it draws nothing: it has ended, or skips them."""

    first: int
    end: int
    old: Stage | None
    new: Stage | None

    @property
    def rows(self) -> int:
        """Rows of a step, of the plan that has more."""
        return max(stage.spec.global_batch_size if stage else 0 for stage in (self.old, self.new))


def _runs(old: Plan, new: Plan, start: int) -> Iterator[_Steps]:
    """Cut the steps from `start` on wherever one of the plans begins a stage or ends."""
    cuts = {start, *(stage.spec.start_step for plan in (old, new) for stage in plan.stages), old.steps, new.steps}
    for first, end in pairwise(sorted(cut for cut in cuts if cut >= start)):
        stages = [plan.stage(first) if first < plan.steps else None for plan in (old, new)]
        drawn = [stage if stage and stage.is_trained else None for stage in stages]
        yield _Steps(first=first, end=end, old=drawn[0], new=drawn[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """Steps that have been compared."""

    first: int
    end: int
    rows: int
    """Number of rows of a step."""
    differing: Int64Array | int
    """Number of differing rows of each step; one number if it is the same for all steps."""

    @property
    def num_rows(self) -> int:
        return (self.end - self.first) * self.rows

    @property
    def differs(self) -> bool:
        return bool(np.any(self.differing))

    @property
    def total_differing(self) -> int:
        if isinstance(self.differing, int):
            return (self.end - self.first) * self.differing
        return int(self.differing.sum())

    @property
    def first_differing(self) -> int:
        return self.first + (0 if isinstance(self.differing, int) else int(np.flatnonzero(self.differing)[0]))


def _blocks(old: Plan, new: Plan, start: int, limit_rows: int, progress: Progress | None) -> Iterator[_Block]:
    """Compare from a step on, until `limit_rows` rows have been computed."""
    left = limit_rows
    same_contract = old.contract == new.contract
    for run in _runs(old, new, start):
        if run.old is None or run.new is None:
            # Neither draws, or all that one of them draws is not in the other.
            yield _Block(first=run.first, end=run.end, rows=run.rows, differing=run.rows)
            continue
        # What a row of live text holds depends on all that were drawn before it.
        is_known = all(rows.has_epochs for rows in run.old.rows.values())
        if same_contract and is_known and run.old.draws_like(run.new):
            yield _Block(first=run.first, end=run.end, rows=run.rows, differing=0)
            continue
        sides = ((run.old, old.sources), (run.new, new.sources))
        first = run.first
        while first < run.end:
            if left <= 0:
                return
            end = min(run.end, first + max(1, -(-min(left, _BLOCK_ROWS) // run.rows)))
            same = _same_slots(sides, first, end, same_contract=same_contract)
            block = _Block(first=first, end=end, rows=run.rows, differing=run.rows - same)
            left, first = left - block.num_rows, end
            if progress:
                progress(limit_rows - left)
            yield block


_Sides: TypeAlias = tuple[tuple[Stage, tuple[str, ...]], tuple[Stage, tuple[str, ...]]]
"""A stage of both plans, and the names of all sources."""


def _same_slots(sides: _Sides, first: int, end: int, *, same_contract: bool) -> Int64Array:
    """Return how many slots hold the same row in each of the steps from `first` to `end`."""
    shared = min(stage.spec.global_batch_size for stage, _ in sides)
    steps = np.repeat(np.arange(first, end), shared)
    slots = np.tile(np.arange(shared), end - first)
    (old_sources, old_rows), (new_sources, new_rows) = (rows_at(stage, steps, slots) for stage, _ in sides)
    same = np.zeros(steps.size, np.bool_)
    for old_source in np.unique(old_sources).tolist():
        for new_source in np.unique(new_sources).tolist():
            chosen = np.flatnonzero((old_sources == old_source) & (new_sources == new_source))
            if chosen.size:
                (stage, names), (new_stage, new_names) = sides
                old = stored_rows(stage).get(names[old_source])
                new = stored_rows(new_stage).get(new_names[new_source])
                same[chosen] = _same_rows(old, old_rows[chosen], new, new_rows[chosen], same_contract=same_contract)
    counts: Int64Array = same.reshape(end - first, shared).sum(axis=1)
    return counts


def _same_rows(
    old: StoredRows | None,
    old_rows: Int64Array,
    new: StoredRows | None,
    new_rows: Int64Array,
    *,
    same_contract: bool,
) -> BoolArray:
    """Return which rows are the same: those with the same spans, delivered in the same way.

    Live rows after a difference are reported as different.
    """
    nothing = np.zeros(old_rows.size, np.bool_)
    if old is None or new is None or not same_contract:
        return nothing
    if dict(old.description) == dict(new.description):
        same: BoolArray = old_rows == new_rows
        return same
    ways = [
        (rows.description["store"], rows.seq_len, rows.cross_document_labels, rows.segment_multiple)
        for rows in (old, new)
    ]
    if ways[0] != ways[1]:
        return nothing
    return old.same_rows(old_rows, new, new_rows)
