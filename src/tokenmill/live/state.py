"""Where a run of live text stands: three numbers a lane, as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.errors import ResumeError, nearest
from tokenmill.fingerprint import first_difference
from tokenmill.live.lanes import Cursor, Drawn
from tokenmill.live.mixed_state import LIVE, SKIPPED, check_skipped, is_check, is_count, merge_mixed
from tokenmill.live.source import Format, LiveSource, file_groups

if TYPE_CHECKING:
    from tokenmill.live.share import Share
    from tokenmill.live.windows import Windows

STATE_VERSION = 1
_KEYS = ("version", "step", "fingerprint", "made_of", "lanes")
_MID_STEP_KEYS = ("batches", "micro_batch", "world_size", "global_batch_size")
_EDITED = "use a state that was not edited"
_ANY = Format(1, "best_fit", "allow", "return")


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a rank stands."""

    step: int
    batch: int
    """Micro-batches of the step that were already drawn."""
    cursors: Mapping[int, Cursor]
    """Of each lane of the rank."""
    skipped: Mapping[str, int]
    """How much was left out, by reason."""


def save_state(source: LiveSource, standing: Standing, share: Share) -> dict[str, Any]:
    """Return the record of a rank: its lanes alone. Between steps it says nothing of ranks or micro-batches."""
    state: dict[str, Any] = {
        "version": STATE_VERSION,
        "step": standing.step,
        "fingerprint": source.fingerprint(share.lanes),
        "made_of": source.made_of(share.lanes),
        "lanes": {str(lane): _line(cursor) for lane, cursor in sorted(standing.cursors.items())},
    }
    if standing.skipped:
        state[SKIPPED] = dict(standing.skipped)
    if standing.batch:
        state |= {"batches": standing.batch, "micro_batch": share.micro_batch, "world_size": share.world_size}
        state["global_batch_size"] = share.global_batch_size
    return state


def _line(cursor: Cursor) -> list[int | str]:
    rows = sum(drawn.rows for drawn in cursor.drawn)
    return [cursor.epoch, cursor.turn, rows, cursor.check] if rows else [cursor.epoch, cursor.turn, 0]


def own_skipped(skipped: Mapping[str, int], rank: int, *, alone: bool) -> Mapping[str, int]:
    """Return what a rank goes on counting from: its own count, or, of that of all ranks, the first rank all."""
    return skipped if alone or not rank else {}


def load_state(
    state: Mapping[str, Any], source: LiveSource, share: Share, windows: Windows, steps: int
) -> Standing:
    """Return where a record says that this rank stands, or refuse it with the reason."""
    _check_shape(state)
    made_of = source.made_of(share.lanes)
    if state["fingerprint"] != source.fingerprint(share.lanes):
        raise ResumeError(_refusal(state["made_of"], made_of, source))
    batch = int(state.get("batches", 0))
    if state["step"] + (batch > 0) > steps:
        raise ResumeError(f"state: step must be at most steps {steps}, got {state['step']}; raise steps to go on")
    if batch:
        then = tuple(state[name] for name in _MID_STEP_KEYS[1:])
        now = (share.micro_batch, share.world_size, share.global_batch_size)
        if then != now:
            raise ResumeError(
                f"state: was saved in the middle of step {state['step']}, so micro_batch, world_size and "
                f"global_batch_size must stay {', '.join(map(str, then))}, got {', '.join(map(str, now))}; "
                "resume with those, or from a state saved between two steps"
            )
        if batch >= share.batches:
            raise ResumeError(f"state: batches must lie within step {state['step']}, got {batch}; {_EDITED}")
    missing = [lane for lane in share.own if str(lane) not in state["lanes"]]
    if missing:
        raise ResumeError(
            f"state: must have the lanes {share.own.start}:{share.own.stop} of rank {share.rank} of "
            f"{share.world_size}, got none of {missing}; join the states of all ranks with merge_states first"
        )
    cursors = {lane: _cursor(lane, state["lanes"][str(lane)], source.options.format) for lane in share.own}
    check_turns(cursors, windows)
    skipped = own_skipped(state.get(SKIPPED, {}), share.rank, alone=len(state["lanes"]) == len(cursors))
    return Standing(step=int(state["step"]), batch=batch, cursors=cursors, skipped=skipped)


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of all ranks, saved at the same step, into one that any world size can load."""
    if not states:
        raise ResumeError("states: must be those of all ranks, got none; gather state_dict() of every rank")
    if any(LIVE in state for state in states):
        return _merge_runs(states)
    lanes: dict[str, Any] = {}
    skipped: Counter[str] = Counter()
    first: dict[str, Any] | None = None
    for state in states:
        _check_shape(state)
        rest = {key: value for key, value in state.items() if key not in ("lanes", SKIPPED)}
        skipped.update(state.get(SKIPPED, {}))
        first = rest if first is None else first
        _check_same(first, rest)
        for lane, cursor in state["lanes"].items():
            if lanes.setdefault(lane, cursor) != cursor:
                raise ResumeError(
                    f"states: lane {lane} must stand at one place, got {lanes[lane]} and {cursor}; "
                    "save them after the same step of one run"
                )
    assert first is not None
    joined = {**first, "lanes": {lane: lanes[lane] for lane in sorted(lanes, key=int)}}
    return {**joined, SKIPPED: dict(sorted(skipped.items()))} if skipped else joined


def _merge_runs(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join states of a run that draws from live text beside stores."""
    rests = [{key: value for key, value in state.items() if key != LIVE} for state in states]
    for state, rest in zip(states, rests, strict=True):
        _check_same(rests[0], rest)
        if LIVE not in state:
            raise ResumeError("states: all must have lanes of live text, got one without; use states of one run")
    return {**rests[0], LIVE: merge_mixed(states)}


def _check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    found = first_difference(one, other)
    if found is not None:
        raise ResumeError(
            f"states: {found[0]} must be the same on all ranks, got {found[1]!r} and {found[2]!r}; "
            "save them after the same step of one run"
        )


def _refusal(old: Mapping[str, Any], new: Mapping[str, Any], source: LiveSource) -> str:
    """Say what is not as it was when a state was saved."""
    found = first_difference(dict(old), dict(new))
    way_out = "resume with what made it, or start at step 0"
    if found is None:
        return f"state: files must be those that made it, got others of the same names and sizes; {way_out}"
    path, then, now = found
    if path.startswith("files.samples["):
        begin, end = file_groups(len(source.files))[int(path.removeprefix("files.samples[").removesuffix("]"))]
        names = [file.name for file in source.files[begin:end]]
        which = names[0] if len(names) == 1 else f"one of {names[0]} to {names[-1]}"
        return f"state: files must be those that made it, got {which} with other content; put it back, or {way_out}"
    if path == "files.names":
        return f"state: files must be those that made it, got other names; put them back, or {way_out}"
    return f"state: {path} must be as when it was saved, {then!r}, got {now!r}; {way_out}"


def _check_shape(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise ResumeError(f"state: must be the dict that state_dict() gave, got {type(state).__name__}; pass that")
    known = (*_KEYS, SKIPPED, *_MID_STEP_KEYS)
    for key in state:
        if key not in known:
            raise ResumeError(f"state: keys must be known, got {key!r}; {nearest(str(key), known)}")
    missing = [key for key in _KEYS if key not in state]
    missing += [key for key in _MID_STEP_KEYS if key not in state and "batches" in state]
    if missing:
        raise ResumeError(
            f"state: must have {', '.join(_KEYS)}, got none of {missing}; use a state of a live loader"
        )
    if state["version"] != STATE_VERSION:
        raise ResumeError(
            f"state: version must be {STATE_VERSION}, got {state['version']!r}; resume where it was saved"
        )
    for key in ("step", *_MID_STEP_KEYS):
        if not is_count(state.get(key, 0)):
            raise ResumeError(f"state: {key} must be a whole number, got {state[key]!r}; {_EDITED}")
    for key in ("made_of", "lanes", SKIPPED):
        if not isinstance(state.get(key, {}), Mapping):
            raise ResumeError(f"state: {key} must be a dict, got {type(state[key]).__name__}; {_EDITED}")
    check_skipped(state.get(SKIPPED, {}))
    for lane, cursor in state["lanes"].items():
        if not isinstance(lane, str) or not lane.isdecimal():
            raise ResumeError(f"state: lanes must be named by numbers, got {lane!r}; {_EDITED}")
        _cursor(int(lane), cursor, _ANY)


def check_turns(cursors: Mapping[int, Cursor], windows: Windows) -> None:
    """Refuse lanes at windows that they do not have."""
    for lane, cursor in cursors.items():
        turns = windows.num_turns(lane)
        if cursor.turn >= turns:
            raise ResumeError(
                f"state: lane {lane} must be at one of its {turns} windows, got {cursor.turn}; {_EDITED}"
            )


def _cursor(lane: int, value: object, format: Format) -> Cursor:
    numbers, check = (value[:3], value[3:]) if isinstance(value, list | tuple) else ([], [])
    if len(numbers) != 3 or not all(map(is_count, numbers)) or not is_check(check, needed=bool(numbers[2])):
        raise ResumeError(f"state: lane {lane} must be at [epoch, window, row, digest], got {value!r}; {_EDITED}")
    epoch, turn, row = numbers
    if not row:
        return Cursor(epoch=epoch, turn=turn)
    return Cursor(epoch=epoch, turn=turn, drawn=(Drawn(format, row),), check=check[0])
