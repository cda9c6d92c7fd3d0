"""Live sources: how a loader reads lanes and saves their positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tokenmill.errors import ConfigError, PlanError, ResumeError
from tokenmill.loader.blocks import Block, RowsInMemory
from tokenmill.loader.state import EDITED, LanePosition, LiveState, Position, RowFormat, live_json
from tokenmill.plan.rows import ENDLESS_ROWS, EpochProgress, Rows, TokenCounts
from tokenmill.plan.stages import rows_at
from tokenmill.types import AnyArray, Batch, Fates, Int64Array, Spans

if TYPE_CHECKING:
    from tokenmill.loader.layout import RankSlice
    from tokenmill.loader.options import LoaderOptions
    from tokenmill.plan.plan import Plan
    from tokenmill.plan.stages import Stage

    class _PlanRows(Rows, ABC):
        """Rows of a plan."""
else:
    _PlanRows = ABC  # a property of a protocol would be the default of a field of its name

_SOME_STEPS = 256
"""Skipped steps whose rows are passed over at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """Something that was left out."""

    reason: str
    place: str


@dataclass(frozen=True, slots=True)
class SkippedText:
    """Records and windows that were left out."""

    counts: Counter[str] = field(default_factory=Counter)
    """Reason -> records, or windows for `broken`."""
    places: list[Skipped] = field(default_factory=list)
    """The first of them."""


class Lanes(Protocol):
    """The lanes of one source that one rank reads; each gives its rows in order."""

    numbers: range
    """Numbers of the lanes in the source."""
    waited: float
    """Seconds that the caller had to wait for rows."""
    skipped: SkippedText
    """Records and windows that were left out so far."""

    def draw(self, numbers: Sequence[int], format: RowFormat, chosen: Int64Array | None = None) -> RowsInMemory:
        """Return the next row of each of some lanes, in the order given; those are the `chosen` rows of a batch."""

    def mark(self, numbers: Collection[int]) -> Any:  # noqa: ANN401 - what `back` takes
        """Return what `back` needs to undo the draws from some of the lanes."""

    def back(self, mark: Any) -> None:  # noqa: ANN401 - what `mark` gave
        """Go back to where the lanes were: the next draws give the same rows again."""

    def positions(self) -> dict[int, LanePosition]:
        """Return where each lane stands."""

    def num_turns(self, number: int) -> int:
        """Return how many windows a lane reads in an epoch."""

    def move_to(
        self, positions: Mapping[int, LanePosition], left: Mapping[int, int], skipped: Mapping[str, int]
    ) -> None:
        """Go to some positions; the run still asks for `left` rows of each lane, and has counted `skipped`."""

    def restart(self) -> None:
        """Begin the next epoch in every lane that is within one."""

    def close(self) -> None:
        """Stop all threads and let go of all memory; the next draw starts them again."""


class LaneRows(_PlanRows):
    """Rows of live text: lanes deliver them in order, and their documents have no numbers."""

    if TYPE_CHECKING:

        @property
        def lanes(self) -> int:
            """Number of lanes of the source, over all ranks."""

        @property
        def format(self) -> RowFormat:
            """Sequence length and packing of the rows."""

    @property
    @abstractmethod
    def pad_id(self) -> int:
        """The id that fills rows."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Name of the text in errors."""

    @property
    def seq_len(self) -> int:
        """Number of input tokens of a row."""
        return self.format.seq_len

    @property
    def row_slots(self) -> int:
        """Number of input slots of a row."""
        return self.format.seq_len

    @property
    def segment_multiple(self) -> int:
        """One: rows of live text have padding only at their ends."""
        return 1

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """Description of the rows; the lanes keep what is left of a window."""
        return self.description

    @property
    def has_epochs(self) -> bool:
        """False: rows are known when they are read."""
        return False

    @property
    def num_rows(self) -> int:
        """More rows than a run can read."""
        return ENDLESS_ROWS

    @property
    def num_rest(self) -> int:
        """Zero: no row comes before the first epoch."""
        return 0

    @property
    def index_arrays(self) -> Sequence[tuple[AnyArray, bool]]:
        """None: no index is kept."""
        return ()

    def window_starts(self, *, rest: bool) -> Int64Array | None:  # noqa: ARG002 - as all rows have it
        """Return None: rows have no order of their own."""
        return None

    def following(self, previous: Rows, seen: EpochProgress) -> Rows:  # noqa: ARG002 - as all rows have it
        """Return these rows; the lanes keep what is left of a window."""
        return self

    def _unknown(self) -> PlanError:
        return PlanError(
            f"{self.where} is live text: the documents of a row are known only after it is read; remove "
            "live = true to prepare the text once"
        )

    def fates(self) -> Fates:
        """Raise: how many tokens there are is not known."""
        raise self._unknown()

    def held(self, rows: Int64Array) -> TokenCounts:  # noqa: ARG002 - as all rows have it
        """Raise: the tokens of a row are not known."""
        raise self._unknown()

    def spans(self, rows: Int64Array) -> Spans:  # noqa: ARG002 - as all rows have it
        """Raise: the documents of a row are not known."""
        raise self._unknown()

    def rows_of(
        self,
        documents: Int64Array,  # noqa: ARG002 - as all rows have it
    ) -> tuple[Int64Array, Int64Array]:
        """Raise: documents have no numbers."""
        raise self._unknown()

    @abstractmethod
    def open_lanes(self, numbers: range, options: LoaderOptions) -> Lanes:
        """Open some of the lanes, each at the start of its first epoch."""


def live_rows(stage: Stage) -> dict[str, LaneRows]:
    """Return the sources of a stage that are live text, by name; the others are in stores."""
    return {name: rows for name, rows in stage.rows.items() if isinstance(rows, LaneRows)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draws:
    """Rows that the batches of a block read from one source."""

    lanes: Lanes
    format: RowFormat
    numbers: list[int]
    """The lane of each row of the source, in order."""
    chosen: Int64Array | None
    """Index of each row in its batch; None if all rows are of this source."""
    begins: list[int]
    """First row of each batch, and the end."""


class DrawnSources:
    """Live sources of a loader.

    Slot s of a batch of B rows reads from lane s * L // B of each of its sources. A rank has the same part of the
    lanes as of the batch, so no other rank reads from them, for any number of ranks. Lanes are read in order, so
    only a state leads to another step.
    """

    def __init__(self, plan: Plan, part: RankSlice, options: LoaderOptions) -> None:
        self._plan, self._part = plan, part
        sources: dict[str, LaneRows] = {}
        for stage in plan.stages:
            for name, rows in live_rows(stage).items():
                sources.setdefault(name, rows)
        self.lanes = {name: self._open(name, rows, options) for name, rows in sources.items()}
        self.pad = next(rows.pad_id for rows in sources.values())
        self._at = 0
        """The first step of which the lanes have not given all rows."""
        self._block: Block | None = None
        self._draws: list[_Draws] = []
        self._places: list[tuple[int, bool, int]] = []
        """For each batch of the block: its step, whether it is the first of that, and where `_at` is after it."""
        self.begin()

    def _open(self, name: str, rows: LaneRows, options: LoaderOptions) -> Lanes:
        batches = [stage.spec.global_batch_size for stage in self._plan.stages if name in stage.names]
        if any(batch % rows.lanes for batch in batches):
            raise ConfigError(
                f"source {name!r}: lanes must divide the global_batch_size of every stage that draws from it, got "
                f"{rows.lanes} lanes and {', '.join(map(str, sorted(set(batches))))}; use {gcd(*batches)} or a "
                "divisor of it, or leave it out"
            )
        if rows.lanes % self._part.world_size:
            raise ConfigError(
                f"source {name!r}: world_size must divide its {rows.lanes} lanes, got {self._part.world_size}; use "
                "another number of ranks, or say lanes at the start of a run"
            )
        each = rows.lanes // self._part.world_size
        return rows.open_lanes(range(self._part.rank * each, (self._part.rank + 1) * each), options)

    def close(self) -> None:
        """Stop the threads and let go of all windows; the next draw starts them again."""
        for lanes in self.lanes.values():
            lanes.close()

    # Drawing.

    def batch(self, block: Block, number: int, out: Batch) -> Batch:
        """Draw the rows of the `number`-th batch of a block and fill it; if that fails, nothing has been drawn."""
        if block is not self._block:
            self._find_draws(block, next(iter(out.values())).shape[0])
        step, begins, after = self._places[number]
        if begins:
            self._reach(block.stage, step)
        marks = []
        try:
            drawn = []
            for draws in self._draws:
                begin, end = draws.begins[number], draws.begins[number + 1]
                if begin < end:
                    numbers = draws.numbers[begin:end]
                    marks.append((draws.lanes, draws.lanes.mark(numbers)))
                    chosen = None if draws.chosen is None else draws.chosen[begin:end]
                    drawn.append(draws.lanes.draw(numbers, draws.format, chosen))
            block.batch(number, out, drawn)
        except BaseException:
            for lanes, mark in marks:
                lanes.back(mark)  # a thread may hang: the next draw has others
            raise
        self._at = after
        return out

    def _find_draws(self, block: Block, count: int) -> None:
        """Find out which lanes give the rows of the batches of a block, each of `count` rows."""
        stage, self._draws = block.stage, []
        last = self._part.batches(stage) - 1
        index = (block.slots[::count] - self._part.rank * self._part.rows(stage)) // count
        steps = block.steps[::count]
        self._places = list(
            zip(steps.tolist(), (index == 0).tolist(), (steps + (index == last)).tolist(), strict=True)
        )
        edges = np.arange(0, block.num_rows + 1, count)
        for name, rows in live_rows(stage).items():
            lanes = self.lanes[name]
            places = np.flatnonzero(block.sources == self._plan.sources.index(name))
            numbers = block.slots[places] * rows.lanes // stage.spec.global_batch_size
            self._draws.append(
                _Draws(
                    lanes=lanes,
                    format=rows.format,
                    numbers=numbers.tolist(),
                    chosen=places % count if len(stage.names) > 1 else None,
                    begins=np.searchsorted(places, edges).tolist(),
                )
            )
        self._block = block

    def _reach(self, stage: Stage, step: int) -> None:
        """Pass over the rows of skipped steps that lie before a step; start sources again where a stage does."""
        while self._at < step:
            skipped = self._plan.stage(self._at)
            self._restart(skipped, self._at)
            end = min(skipped.end_step, step, self._at + _SOME_STEPS)
            rows = self._part.rows(skipped)
            steps = np.repeat(np.arange(self._at, end), rows)
            slots = np.tile(np.arange(rows) + self._part.rank * rows, end - self._at)
            self._pass_over(skipped, slots, rows_at(skipped, steps, slots)[0])
            self._at = end
        self._restart(stage, step)

    def _restart(self, stage: Stage, step: int) -> None:
        if step == stage.spec.start_step:
            for name in stage.restarted & self.lanes.keys():
                self.lanes[name].restart()

    def _pass_over(self, stage: Stage, slots: Int64Array, sources: Int64Array) -> None:
        marks = []
        try:
            for name, rows in live_rows(stage).items():
                lanes, chosen = self.lanes[name], slots[sources == self._plan.sources.index(name)]
                marks.append((lanes, lanes.mark(lanes.numbers)))
                lanes.draw((chosen * rows.lanes // stage.spec.global_batch_size).tolist(), rows.format)
        except BaseException:
            for lanes, mark in marks:
                lanes.back(mark)
            raise

    # States.

    def state(self, batch: int) -> dict[str, Any]:
        """Return where the lanes of this rank stand after the first `batch` micro-batches of a step, as JSON."""
        return live_json(
            self._at,
            batch,
            {name: lanes.positions() for name, lanes in self.lanes.items()},
            {name: lanes.skipped.counts for name, lanes in self.lanes.items()},
        )

    def begin(self) -> None:
        """Go back to the start of the run."""
        self._move_to(Position(step=0), 0, {}, {})

    def load(self, position: Position, state: LiveState | None) -> None:
        """Go to where a state says, or refuse it with the reason."""
        state = self._before_the_first(position) if state is None else state
        plan = self._plan
        if plan.next_trained(state.at) != plan.next_trained(position.step) or state.at > position.step:
            raise ResumeError(
                f"state: live.at must be its step {position.step}, or have skipped steps alone up to it, got "
                f"{state.at}; {EDITED}"
            )
        if state.batch != position.batch:
            raise ResumeError(
                f"state: batches must be its live.batch, {state.batch}, got {position.batch}; {EDITED}"
            )
        positions = {name: state.positions(name) for name in self.lanes}
        for name in self.lanes:
            self._check_lanes(name, positions[name], position)
        self._move_to(position, state.at, positions, state.skipped)

    def _check_lanes(self, name: str, positions: Mapping[int, LanePosition], position: Position) -> None:
        """Raise if a state lacks lanes of this rank, or has a lane where no window is."""
        lanes = self.lanes[name]
        missing = [number for number in lanes.numbers if number not in positions]
        # A source that is new, or comes later, stands at its start.
        if missing and (positions or _drawn_before(self._plan, name, position.covered)):
            raise ResumeError(
                f"state: must have the lanes {lanes.numbers.start}:{lanes.numbers.stop} of {name!r} for rank "
                f"{self._part.rank} of {self._part.world_size}, got none of {missing}; join the states of all "
                "ranks with merge_states first"
            )
        for number in lanes.numbers:
            turns = lanes.num_turns(number)
            if number in positions and positions[number].turn >= turns:
                raise ResumeError(
                    f"state: lane {number} of {name!r} must be at one of its {turns} windows, got "
                    f"{positions[number].turn}; {EDITED}"
                )

    def _before_the_first(self, position: Position) -> LiveState:
        """Return where lanes stand for a state that has none: at their starts, if nothing was drawn before it."""
        if any(_drawn_before(self._plan, name, position.covered) for name in self.lanes):
            raise ResumeError(
                f"state: must have the lanes of live text, which is drawn before step {position.covered}, got "
                f"none; {EDITED}"
            )
        last = self._plan.last_trained(position.step)
        return LiveState(at=0 if last is None else last + 1, batch=position.batch)

    def _move_to(
        self,
        position: Position,
        at: int,
        positions: Mapping[str, Mapping[int, LanePosition]],
        skipped: Mapping[str, Mapping[str, int]],
    ) -> None:
        """Go to where lanes stood when `at` was the first step not drawn whole; lanes not named begin anew."""
        for name, lanes in self.lanes.items():
            saved = positions.get(name, {})
            own = {number: saved.get(number, LanePosition()) for number in lanes.numbers}
            # A rank goes on counting from its own numbers, or, of those of all ranks, the first rank from all.
            counts_here = len(saved) <= len(own) or not self._part.rank
            left = self._rows_left(name, lanes.numbers, at, position)
            lanes.move_to(own, left, skipped.get(name, {}) if counts_here else {})
        self._at = at
        self._block = None

    def _rows_left(self, name: str, numbers: range, at: int, position: Position) -> dict[int, int]:
        """Return how many rows at most the run asks of each lane from a place on: all of its slots."""
        left = dict.fromkeys(numbers, 0)
        for stage in self._plan.stages:
            if name not in stage.names or stage.end_step <= at:
                continue
            each = stage.spec.global_batch_size // (len(numbers) * self._part.world_size)
            for number in numbers:
                left[number] += (stage.end_step - max(at, stage.spec.start_step)) * each
            if position.batch and position.step < stage.end_step and stage.spec.start_step <= position.step:
                for index, number in enumerate(numbers):
                    left[number] -= min(max(0, position.batch * self._part.micro_batch - index * each), each)
        return left


def _drawn_before(plan: Plan, name: str, step: int) -> int:
    """Return how many rows of a source all batches before a step hold."""
    stages = [stage for stage in plan.stages if name in stage.names and stage.spec.start_step < step]
    return sum(stage.drawn(min(step, stage.end_step))[name] for stage in stages)
