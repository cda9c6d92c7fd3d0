"""Where the lanes of a run stand that draws from live text, beside the state of every run, as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from tokenmill.errors import ResumeError
from tokenmill.live.lanes import Cursor, Drawn
from tokenmill.live.source import Format
from tokenmill.live.tokens import CHECK_DIGITS

LIVE = "live"
"""Key of a state that has the lanes of a rank."""
SKIPPED = "skipped"
"""Key of how much was left out, by reason."""
_KEYS = {"at", "formats", "lanes"}
_EDITED = "use a state that was not edited"


@dataclass(frozen=True, kw_only=True, slots=True)
class LanePlaces:
    """Where lanes stand."""

    at: int
    """The first step of which they have not given all rows; behind it steps may follow that are skipped."""
    cursors: Mapping[str, Mapping[int, Cursor]]
    """Of the lanes of each source."""
    skipped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """How much was left out of each source, by reason."""

    def to_json(self) -> dict[str, Any]:
        """Return them as JSON.

        A lane is its epoch and window, then numbers of formats with rows given in each, and a digest of the window.
        """
        used = {drawn.format for lanes in self.cursors.values() for one in lanes.values() for drawn in one.drawn}
        formats = sorted(used)
        found: dict[str, Any] = {
            "at": self.at,
            "formats": [list(format) for format in formats],
            "lanes": {
                source: {str(lane): _line(cursor, formats) for lane, cursor in sorted(lanes.items())}
                for source, lanes in self.cursors.items()
            },
        }
        skipped = {source: dict(sorted(counts.items())) for source, counts in self.skipped.items() if counts}
        return {**found, SKIPPED: skipped} if skipped else found


def read_places(value: object) -> LanePlaces:
    """Return what a state says of lanes, or refuse it with the reason."""
    if not isinstance(value, Mapping) or set(value) - {SKIPPED} != _KEYS:
        raise ResumeError(f"state: live must have {', '.join(sorted(_KEYS))}, got {value!r}; {_EDITED}")
    at, lanes = value["at"], value["lanes"]
    if (
        not is_count(at)
        or not isinstance(lanes, Mapping)
        or not all(isinstance(v, Mapping) for v in lanes.values())
    ):
        raise ResumeError(f"state: live.at must be a step and live.lanes a dict a source, got {value!r}; {_EDITED}")
    formats = [_format(one) for one in value["formats"]] if isinstance(value["formats"], list | tuple) else []
    skipped = value.get(SKIPPED, {})
    if not isinstance(skipped, Mapping):
        raise ResumeError(f"state: live.skipped must be a dict a source, got {skipped!r}; {_EDITED}")
    for counts in skipped.values():
        check_skipped(counts)
    return LanePlaces(
        at=at,
        skipped=skipped,
        cursors={
            str(source): {_number(lane): _cursor(source, lane, line, formats) for lane, line in lines.items()}
            for source, lines in lanes.items()
        },
    )


def merge_mixed(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the lanes of all ranks, saved at the same step, into one record."""
    found = [read_places(state[LIVE]) for state in states]
    joined: dict[str, dict[int, Cursor]] = {}
    skipped: dict[str, Counter[str]] = {}
    for places in found:
        for source, counts in places.skipped.items():
            skipped.setdefault(source, Counter()).update(counts)
        if places.at != found[0].at:
            raise ResumeError(
                f"states: live.at must be the same on all ranks, got {found[0].at} and {places.at}; "
                "save them after the same step of one run"
            )
        for source, cursors in places.cursors.items():
            lanes = joined.setdefault(source, {})
            for lane, cursor in cursors.items():
                if lanes.setdefault(lane, cursor) != cursor:
                    raise ResumeError(
                        f"states: lane {lane} of {source!r} must stand at one place, got two; "
                        "save them after the same step of one run"
                    )
    return LanePlaces(at=found[0].at, cursors=joined, skipped=skipped).to_json()


def _line(cursor: Cursor, formats: Sequence[Format]) -> list[int | str]:
    drawn = [number for one in cursor.drawn for number in (formats.index(one.format), one.rows)]
    return [cursor.epoch, cursor.turn, *drawn, *([cursor.check] if drawn else [])]


def _cursor(source: str, lane: str, line: object, formats: Sequence[Format]) -> Cursor:
    told = list(line) if isinstance(line, list | tuple) else []
    numbers, check = (told[:-1], told[-1:]) if len(told) > 2 else (told, [])
    pairs = list(zip(numbers[2::2], numbers[3::2], strict=False))
    known = all(map(is_count, numbers)) and all(format < len(formats) and rows for format, rows in pairs)
    if len(numbers) < 2 or len(numbers) % 2 or not known or not is_check(check, needed=bool(pairs)):
        raise ResumeError(
            f"state: lane {lane} of {source!r} must be at [epoch, window], pairs of a format and rows, and a "
            f"digest, got {line!r}; {_EDITED}"
        )
    return Cursor(
        epoch=numbers[0],
        turn=numbers[1],
        drawn=tuple(Drawn(formats[format], rows) for format, rows in pairs),
        check=check[0] if check else "",
    )


def _format(value: object) -> Format:
    match value:
        case [int(seq_len), str(packing), str(split), str(crop)]:
            return Format(seq_len, packing, split, crop)
    raise ResumeError(f"state: a format must be [seq_len, packing, split, crop], got {value!r}; {_EDITED}")


def _number(lane: object) -> int:
    if not isinstance(lane, str) or not lane.isdecimal():
        raise ResumeError(f"state: lanes must be named by numbers, got {lane!r}; {_EDITED}")
    return int(lane)


def check_skipped(counts: object) -> None:
    """Refuse what is no count by reason."""
    if not isinstance(counts, Mapping) or not all(map(is_count, counts.values())):
        raise ResumeError(f"state: skipped must be a number for each reason, got {counts!r}; {_EDITED}")


def is_count(value: object) -> TypeGuard[int]:
    """Say whether a value of a state is a whole number, and not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_check(found: Sequence[object], *, needed: bool) -> bool:
    """Say whether a lane has the digest of its window where it needs one, and else none."""
    return len(found) == needed and all(isinstance(one, str) and len(one) == CHECK_DIGITS for one in found)
