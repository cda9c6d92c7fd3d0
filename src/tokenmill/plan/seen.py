"""Counts of what a run has seen before a step, by source: rows, tokens, labels and epochs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.plan.rows import NOTHING, Rows, TokenCounts
from tokenmill.plan.stages import Stage, drawn_rows

_SORTED, _BLOCK = 1 << 20, 1 << 16
"""Rows that are put in ascending order, so that neighbours on disk are read together, and of these rows that are
counted together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSeen:
    """Counts of one source before a step. Skipped steps count in `epochs` only."""

    rows: int
    slots: int
    """Input slots of its rows, over all their arrays, padding among them."""
    tokens: int | None
    """Input slots that hold a token; None if rows are live text, or were not counted."""
    trained: int | None
    """Labels that masks leave; None if rows are live text, or were not counted."""
    epochs: float | None
    """Times that the source was read, those of skipped steps included; None for live text."""


def total(counts: Iterable[int | None]) -> int | None:
    """Return the sum of counts, or None if one of them is not known.

    >>> total([1, 2]), total([1, None]), total([])
    (3, None, 0)
    """
    summed = 0
    for count in counts:
        if count is None:
            return None
        summed += count
    return summed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Edge:
    """Counts by source before a part of a stage; a source that was not drawn has none."""

    rows: Mapping[str, int]
    slots: Mapping[str, int]
    epochs: Mapping[str, float | None]


class SourceCounts:
    """Counts by source before any step of a plan.

    Rows, slots and epochs follow from the plan. Tokens and labels are counted row by row, from the last step
    that was asked for or from the last start of a stage: a loop that asks at every step counts each row once.
    """

    def __init__(self, sources: Sequence[str], stages: Sequence[Stage]) -> None:
        self._sources, self._stages = sources, stages
        self._starts = [stage.spec.start_step for stage in stages]
        self._live = {name for stage in stages for name, rows in stage.rows.items() if not rows.has_epochs}
        self._edges = [_Edge(rows={}, slots={}, epochs={})]
        """Counts before each part of a stage, as far as they were needed."""
        self._held: dict[int, Mapping[str, TokenCounts]] = {0: {}}
        """Tokens and labels of each source before parts of stages that were counted, by index."""
        self._last: tuple[int, Mapping[str, TokenCounts]] = (0, {})
        """The step that was counted last, and its tokens and labels."""

    def before(self, step: int, *, held: bool = True) -> dict[str, SourceSeen]:
        """Return the counts of every source before a step, or by the end of the run."""
        part = self._part(step)
        while len(self._edges) <= part:
            number = len(self._edges) - 1
            self._edges.append(self._after(number, self._stages[number].end_step))
        edge = self._after(part, step)
        counted = self._count(step) if held else {}
        seen = {}
        for name in self._sources:
            has_counts = held and name not in self._live
            own = counted.get(name, NOTHING)
            seen[name] = SourceSeen(
                rows=edge.rows.get(name, 0),
                slots=edge.slots.get(name, 0),
                tokens=own.tokens if has_counts else None,
                trained=own.trained if has_counts else None,
                epochs=None if name in self._live else edge.epochs.get(name, 0.0),
            )
        return seen

    def _part(self, step: int) -> int:
        """Return the index of the last part of a stage that has steps before `step`."""
        return max(0, bisect_left(self._starts, step) - 1)

    def _after(self, part: int, step: int) -> _Edge:
        """Return the counts before a step of a part of a stage."""
        edge, stage = self._edges[part], self._stages[part]
        drawn = stage.drawn(step)
        read = {name: float(stage.epochs(name, number)) for name, number in drawn.items() if name not in self._live}
        if not stage.is_trained:
            return _Edge(rows=edge.rows, slots=edge.slots, epochs={**edge.epochs, **read})
        rows = {name: edge.rows.get(name, 0) + number for name, number in drawn.items()}
        slots = {name: edge.slots.get(name, 0) + number * stage.row_slots for name, number in drawn.items()}
        return _Edge(rows={**edge.rows, **rows}, slots={**edge.slots, **slots}, epochs={**edge.epochs, **read})

    def _count(self, step: int) -> Mapping[str, TokenCounts]:
        """Return tokens and labels of each source before a step, counted on from the nearest step that is known."""
        part, (begin, held) = self._part(step), self._last
        if not self._starts[part] <= begin <= step:
            known = max(number for number in self._held if number <= part)
            if begin > step or begin < self._starts[known]:
                begin, held = self._starts[known], self._held[known]
        for number in range(self._part(begin), part + 1):
            stage = self._stages[number]
            first, last = max(stage.spec.start_step, begin), min(stage.end_step, step)
            if first == stage.spec.start_step:
                self._held[number] = held
            if stage.is_trained and first < last:
                drawn, drawn_after = stage.drawn(first), stage.drawn(last)
                more = {
                    name: held_rows(stage, name, range(drawn[name], drawn_after[name]))[0]
                    for name in stage.names
                    if name not in self._live and drawn[name] < drawn_after[name]
                }
                held = {**held, **{name: held.get(name, NOTHING) + count for name, count in more.items()}}
        self._last = step, held
        return held


def held_rows(stage: Stage, name: str, draws: range, most: int | None = None) -> tuple[TokenCounts, bool]:
    """Return what the rows of some draws of a source hold, and whether all of it was counted.

    Draws are counted from the first of the stage. Whole epochs are counted at once; if the other rows are more than
    `most`, all are taken to be like those of an epoch.
    """
    index = stage.rows[name]
    size, first = index.num_rows, index.num_rest - stage.carry(name)  # draw at which the first whole epoch begins
    epochs = range(-((first - max(draws.start, first)) // size), (draws.stop - first) // size)
    parts = [draws]
    if epochs:
        parts = [range(draws.start, first + epochs.start * size), range(first + epochs.stop * size, draws.stop)]
    rows = sum(len(part) for part in parts)
    if most is not None and rows > most:
        return _mean(index, len(draws)), False
    held = _mean(index, len(epochs) * size) if epochs else NOTHING
    for some in (part[begin : begin + _SORTED] for part in parts for begin in range(0, len(part), _SORTED)):
        drawn = np.sort(drawn_rows(stage, name, some))
        held += sum((index.held(drawn[begin : begin + _BLOCK]) for begin in range(0, len(some), _BLOCK)), NOTHING)
    return held, True


def _mean(index: Rows, rows: int) -> TokenCounts:
    """Return what a number of rows hold if they are like those of an epoch: exact for whole epochs."""
    fates = index.fates()
    tokens = fates.rows * index.row_slots - fates.padding
    return TokenCounts(tokens=rows * tokens // fates.rows, trained=rows * fates.trained // fates.rows)
