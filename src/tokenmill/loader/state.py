"""State of a run as small JSON: a step, and a position per lane for live text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from tokenmill.errors import ResumeError
from tokenmill.fingerprint import digest, first_difference
from tokenmill.tables import read_table

if TYPE_CHECKING:
    from tokenmill.loader.layout import RankSlice
    from tokenmill.plan.plan import Plan

STATE_VERSION = 1
CHECK_DIGITS = 8
"""Digits of the digest that a lane keeps of its window."""
EDITED = "use a state that was not edited"
_SAVED_TOGETHER = "save them after the same step of one run"
Count = Annotated[int, msgspec.Meta(ge=0)]


class RowFormat(NamedTuple):
    """Format of rows, which a stage of a run may change."""

    seq_len: Count
    packing: str
    split: str
    crop: str


class DrawnRows(NamedTuple):
    """Number of rows of a window that were read, in one format."""

    format: RowFormat
    rows: int


class LanePosition(NamedTuple):
    """Position of a lane: a window, and the number of its rows that were read."""

    epoch: int = 0
    turn: int = 0
    """Index of the window among those of the lane in that epoch."""
    drawn: tuple[DrawnRows, ...] = ()
    """Nothing at the start of a window; several where a stage changed in the middle of it how rows are made."""
    check: str = ""
    """Digest of what the window held when rows of it were drawn."""


class _Lane(NamedTuple):
    """A lane as JSON."""

    epoch: Count
    turn: Count
    drawn: tuple[tuple[Count, Count], ...] = ()
    """Pairs of a format, by its number, and rows."""
    check: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveState:
    """Positions of the lanes of live text, of one rank or of all, as JSON."""

    at: Count = 0
    """The first step of which they have not given all rows; after it steps may follow that are skipped."""
    batch: Count = 0
    """Micro-batches of that step that were drawn."""
    formats: tuple[RowFormat, ...] = ()
    """Formats that lanes refer to by index."""
    lanes: Mapping[str, Mapping[str, _Lane]] = field(default_factory=dict)
    """Source -> number of a lane -> where it stands."""
    skipped: Mapping[str, Mapping[str, Count]] = field(default_factory=dict)
    """Number of items left out of each source, by reason."""
    digest: str = ""
    """Digest of all fields above, which shows that a position was altered."""

    def __post_init__(self) -> None:
        for source, lanes in self.lanes.items():
            for number, lane in lanes.items():
                where = f"state.live.lanes.{source}.{number}"
                if not number.isdecimal():
                    raise ResumeError(f"{where}: a lane must be named by its number, got {number!r}; {EDITED}")
                if any(form >= len(self.formats) or not rows for form, rows in lane.drawn):
                    raise ResumeError(
                        f"{where}: drawn must be pairs of one of the {len(self.formats)} formats and a number of "
                        f"rows, got {list(lane.drawn)}; {EDITED}"
                    )
                if len(lane.check) != (CHECK_DIGITS if lane.drawn else 0):
                    raise ResumeError(
                        f"{where}: check must be the digest of a window of which rows were drawn, got "
                        f"{lane.check!r}; {EDITED}"
                    )

    def positions(self, source: str) -> dict[int, LanePosition]:
        """Return where the lanes of a source stand."""
        return {
            int(number): LanePosition(
                lane.epoch,
                lane.turn,
                tuple(DrawnRows(self.formats[form], rows) for form, rows in lane.drawn),
                lane.check,
            )
            for number, lane in self.lanes.get(source, {}).items()
        }


def live_json(
    at: int,
    batch: int,
    positions: Mapping[str, Mapping[int, LanePosition]],
    skipped: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Return where lanes stand as JSON, which `LiveState` reads."""
    formats: dict[RowFormat, int] = {}

    def line(position: LanePosition) -> list[Any]:
        epoch, turn, drawn, check = position
        if not drawn:
            return [epoch, turn]
        return [epoch, turn, [[formats.setdefault(form, len(formats)), rows] for form, rows in drawn], check]

    lines = {
        source: {str(number): line(position) for number, position in sorted(lanes.items())}
        for source, lanes in positions.items()
    }
    live: dict[str, Any] = {"at": at, "formats": [list(form) for form in formats], "lanes": lines}
    if batch:
        live["batch"] = batch
    counts = {source: dict(sorted(reasons.items())) for source, reasons in skipped.items() if reasons}
    return signed({**live, "skipped": counts} if counts else live)


def signed(live: Mapping[str, Any]) -> dict[str, Any]:
    """Return where lanes stand with the digest of that."""
    content = {name: value for name, value in live.items() if name != "digest"}
    return {**content, "digest": digest(content)[:16]}


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Position of a run and the plan that made it, as JSON."""

    version: int
    step: Count
    fingerprint: str
    """Digest of everything that decides the earlier batches."""
    plan: str = ""
    """Digest of the plan that made the state, to look up its record."""
    stage_idx: Count | None = None
    stage_name: str | None = None
    """Index and name of the stage, for people."""
    batches: Count = 0
    """Micro-batches of the step that were drawn; where there are any, how the step was cut must stay."""
    micro_batch: Count = 0
    world_size: Count = 0
    global_batch_size: Count = 0
    made_of: Mapping[str, Any] | None = None
    """Files, tokenizer and options, where there is no plan on record."""
    live: LiveState | None = None
    """Lanes of live text, if the run draws from any."""

    def __post_init__(self) -> None:
        if self.version != STATE_VERSION:
            raise ResumeError(
                f"state: version must be {STATE_VERSION}, got {self.version}; resume where it was saved"
            )
        if self.batches and not (self.micro_batch and self.world_size):
            raise ResumeError(
                f"state: must have micro_batch and world_size in the middle of a step, got batches {self.batches} "
                f"without; {EDITED}"
            )

    @property
    def position(self) -> Position:
        """The next batch of a rank."""
        return Position(step=self.step, batch=self.batches)


def read_state(state: Mapping[str, Any]) -> State:
    """Return what a record says, or refuse it with the reason."""
    if not isinstance(state, Mapping):
        raise ResumeError(f"state: must be the dict that state_dict() gave, got {type(state).__name__}; pass that")
    _check_names(state, "state")
    saved = read_table(State, state, "state", error=ResumeError)
    if saved.live is not None and saved.live.digest != signed(state["live"])["digest"]:
        raise ResumeError(
            "state: live must be as it was saved, got lanes that its digest "
            f"{saved.live.digest!r} does not stand for; {EDITED}"
        )
    return saved


def _check_names(value: object, where: str) -> None:
    """Raise if a key is not a string, in nested tables too."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ResumeError(f"{where}: names must be strings, got {name!r}; {EDITED}")
            _check_names(item, f"{where}.{name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The next batch of a rank."""

    step: int
    batch: int = 0
    """Micro-batches of the step that were already drawn."""

    @property
    def covered(self) -> int:
        """The step before which all batches must be those of the state: the next one, if this one has begun."""
        return self.step + (self.batch > 0)


def save_state(position: Position, part: RankSlice, made_by: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record for a position. Between steps it says nothing of ranks or micro-batches."""
    state = {"version": STATE_VERSION, "step": position.step, **made_by}
    if position.batch:
        state |= {"batches": position.batch, "micro_batch": part.micro_batch, "world_size": part.world_size}
    return state


def check_position(state: State, plan: Plan, part: RankSlice) -> None:
    """Raise if a state is past the end of the run, or within a step that is divided differently now."""
    if state.position.covered > plan.steps:
        raise ResumeError(
            f"state: step must be at most the {plan.steps} steps of the run, got {state.step}; raise steps to go on"
        )
    if not state.batches:
        return
    then, now = (state.world_size, state.micro_batch), (part.world_size, part.micro_batch)
    if then != now:
        raise ResumeError(
            f"state: was saved in the middle of step {state.step}, so world_size and micro_batch must stay "
            f"{then[0]} and {then[1]}, got {now[0]} and {now[1]}; "
            "resume with those, or from a state saved between two steps"
        )
    if state.batches >= part.batches(plan.stage(state.step)):
        raise ResumeError(f"state: batches must lie within step {state.step}, got {state.batches}; {EDITED}")


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of all ranks, saved at the same step, into one that any world size can load."""
    if not states:
        raise ResumeError("states: no state to merge; gather state_dict() of every rank")
    lives = [read_state(state).live for state in states]
    common = [{key: value for key, value in state.items() if key != "live"} for state in states]
    for other in common[1:]:
        difference = first_difference(common[0], other)
        if difference is not None:
            path, first, second = difference
            raise ResumeError(
                f"states: {path} must be the same on all ranks, got {first!r} and {second!r}; {_SAVED_TOGETHER}"
            )
    joined = [live for live in lives if live is not None]
    if not joined:
        return common[0]
    if len(joined) < len(states):
        raise ResumeError("states: one has no lanes of live text, and others have some; use states of one run")
    return {**common[0], "live": _merge_lanes(joined)}


def _merge_lanes(states: Sequence[LiveState]) -> dict[str, Any]:
    positions: dict[str, dict[int, LanePosition]] = {}
    skipped: dict[str, Counter[str]] = {}
    for state in states:
        if (state.at, state.batch) != (states[0].at, states[0].batch):
            raise ResumeError(
                f"states: live.at must be the same on all ranks, got {states[0].at} and {state.at}; "
                f"{_SAVED_TOGETHER}"
            )
        for source, reasons in state.skipped.items():
            skipped.setdefault(source, Counter()).update(reasons)
        for source in state.lanes:
            lanes = positions.setdefault(source, {})
            for number, position in state.positions(source).items():
                if lanes.setdefault(number, position) != position:
                    raise ResumeError(
                        f"states: lane {number} of {source!r} must stand at one place, got epoch, window and rows "
                        f"{_shown(lanes[number])} and {_shown(position)}; {_SAVED_TOGETHER}"
                    )
    return live_json(states[0].at, states[0].batch, positions, skipped)


def _shown(position: LanePosition) -> str:
    return f"{position.epoch}, {position.turn}, {sum(drawn.rows for drawn in position.drawn)}"
