"""Lanes: streams of rows, each with a place of its own, and the windows that are held for them."""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from tokenmill.errors import DocumentError, ResumeError, TokenizerError, met_in
from tokenmill.live.ahead import Ahead, Found, Show, Task, Wanted
from tokenmill.live.cursor import Cursor
from tokenmill.live.rows import Drawn, WindowRows, pack_window
from tokenmill.live.tokens import Skipped, tokenize_window

if TYPE_CHECKING:
    from tokenmill.live.options import Format
    from tokenmill.live.source import LiveSource
    from tokenmill.live.windows import Windows

MAX_PLACES = 100
TELL_SECONDS = 30.0
"""Between two lines that say that the run waits for text."""
TOLD_SECONDS = 0.1
"""A shorter wait, of all in that time together, is not told."""
MIN_TRIES = 256
"""Windows that a lane looks into before it is said to have no text: with hardly more documents than lanes,
shuffling may well leave a lane without any for several epochs."""
_log = logging.getLogger("tokenmill")


@dataclass(frozen=True, kw_only=True, slots=True)
class AheadOptions:
    """How windows are made before they are needed; none of it changes what a row holds."""

    threads: int = 1
    """Threads that read and tokenize; 0 does it when a row is asked for."""
    windows: int | None = None
    """Windows that are made before they are needed, beside the one that each lane holds; at least `threads`. None:
    one more, so that no thread stands still because what it made was not taken yet."""
    timeout: float = 30.0
    """Seconds after which a thread that does nothing is given up."""

    @property
    def most(self) -> int:
        """How many windows are made before they are needed."""
        return self.threads + 1 if self.windows is None else max(self.windows, self.threads)


@dataclass(frozen=True, slots=True)
class SkippedText:
    """What was left out of what was delivered."""

    counts: Counter[str] = field(default_factory=Counter)
    """Reason -> records, or windows for `broken`."""
    places: list[Skipped] = field(default_factory=list)
    """The first of them."""


Place: TypeAlias = "tuple[Cursor, Found | None, int]"
"""Where a lane stands, as `cursor_at` wants it: a cursor for every row would take longer than the row."""
Mark: TypeAlias = tuple[dict[int, Place], dict[str, int], int]


@dataclass(slots=True, eq=False)
class Lane:
    """Where a lane stands, and what is held for it."""

    begun: Cursor
    """Where it stands while no window is held."""
    held: Found | None = None
    """The window that it draws from, once it was needed."""
    row: int = 0
    """Of that window, the row that comes next."""
    task: Task | None = None
    """The window that is needed next."""

    @property
    def cursor(self) -> Cursor:
        """Where the next row is."""
        return cursor_at(self.place)

    @property
    def place(self) -> Place:
        """Where the lane stands, for `cursor_at`."""
        return self.begun, self.held, self.row

    def hold(self, found: Found) -> None:
        """Draw from a window, from the first row of it that was not delivered."""
        self.held, self.row = found, found.window.first

    def go(self, cursor: Cursor) -> None:
        """Stand at a cursor, with no window held."""
        self.begun, self.held, self.row = cursor, None, 0


def cursor_at(place: Place) -> Cursor:
    """Return where the next row is of a lane that stands at a place."""
    begun, found, row = place
    if found is None:
        return begun
    drawn = (*found.before, Drawn(found.format, row)) if row else found.before
    check = found.window.tokenized.check if drawn else ""
    return Cursor(epoch=found.epoch, turn=found.turn, drawn=drawn, check=check)


class Lanes:
    """The lanes that one rank reads of a source."""

    def __init__(
        self,
        source: LiveSource,
        windows: Windows,
        own: range,
        ahead: AheadOptions,
        left: Callable[[int], int] | None = None,
    ) -> None:
        """Stand at the start of the first epoch; `left` tells how many rows a lane has still to give."""
        self.source = source
        self.windows = windows
        self.waited = 0.0
        self.skipped = SkippedText()
        self.lanes = {number: Lane(Cursor()) for number in own}
        self._ahead = ahead
        self._find = partial(find_window, source, windows)  # holds no reference to this object, which ends threads
        self._left = left
        self._format = source.options.format
        """In which rows were last asked for: in this way those of windows ahead are made."""
        self._pool: Ahead | None = None
        self._finalizer: weakref.finalize[[], Lanes] | None = None
        self._told = (time.monotonic(), 0.0)
        self._told_skips = float("-inf")

    @property
    def cursors(self) -> dict[int, Cursor]:
        """Where the lanes stand."""
        return {number: lane.cursor for number, lane in self.lanes.items()}

    def stand(self, cursors: Mapping[int, Cursor]) -> None:
        """Go to where cursors say; windows that are held for these lanes are let go."""
        for number, cursor in cursors.items():
            lane = self.lanes[number]
            self._drop(lane)
            lane.go(cursor)

    def mark(self, numbers: Iterable[int]) -> Mark:
        """Return what `back` needs to undo the draws from some of the lanes."""
        places = {number: self.lanes[number].place for number in numbers}
        return places, dict(self.skipped.counts), len(self.skipped.places)

    def back(self, mark: Mark) -> None:
        """Be where the lanes were; whoever draws again gets the same rows, by other threads."""
        places, counts, told = mark
        self.close()
        self.stand({number: cursor_at(place) for number, place in places.items()})
        self.count_skipped(counts)
        del self.skipped.places[told:]

    def count_skipped(self, counts: Mapping[str, int]) -> None:
        """Have left out so much."""
        self.skipped.counts.clear()
        self.skipped.counts.update(counts)

    def restart(self) -> None:
        """Begin the next epoch in every lane that is within one."""
        self.stand(
            {
                number: Cursor(epoch=cursor.epoch + 1)
                for number, cursor in self.cursors.items()
                if cursor != Cursor(epoch=cursor.epoch)
            }
        )

    def close(self) -> None:
        """Stop the threads and let go of all windows; who goes on drawing starts them again."""
        for lane in self.lanes.values():
            self._drop(lane)
        if self._finalizer is not None:
            self._finalizer()
        self._pool = self._finalizer = None

    def next_row(self, number: int, format: Format) -> tuple[WindowRows, int]:
        """Return the next row of a lane, made in the given way, and go on to the one after it."""
        lane = self.lanes[number]
        found = lane.held
        if found is not None and found.format != format:
            found = self._repack(number, lane, found, format)
        if found is None:
            found = self._take(number, lane, format)
        row = lane.row
        lane.row += 1
        if lane.row == found.window.num_rows:
            lane.go(self._after(number, found))
            self.ask_ahead()
        return found.window, row

    def rows_held(self, lane: Lane) -> int:
        """Return how many rows are held for a lane."""
        return 0 if lane.held is None else lane.held.window.num_rows - lane.row

    def ask_ahead(self) -> None:
        """Ask for the windows that are needed first, as many as may be made ahead."""
        if not self._ahead.threads:
            return
        waiting = sum(lane.task is not None for lane in self.lanes.values())
        room = self._ahead.most - waiting
        if room <= 0:
            return
        needs = sorted(
            (self.rows_held(lane), number)
            for number, lane in self.lanes.items()
            if lane.task is None and (self._left is None or self.rows_held(lane) < self._left(number))
        )
        for _, number in needs[:room]:
            lane = self.lanes[number]
            cursor = lane.begun if lane.held is None else self._after(number, lane.held)
            lane.task = self._running().ask(Wanted(lane=number, cursor=cursor, format=self._format))

    def _take(self, number: int, lane: Lane, format: Format) -> Found:
        """Hold the window at the cursor of a lane, or the next one that has rows, and return it; waits for it."""
        begun = time.monotonic()
        self._format = format
        wanted = Wanted(lane=number, cursor=lane.cursor, format=format)
        if lane.task is not None and lane.task.wanted != wanted:
            self._drop(lane)
        if not self._ahead.threads:
            found = self._find(wanted, lambda _: None)
        else:
            pool = self._running()
            if lane.task is None:
                lane.task = pool.ask(wanted)
            self.ask_ahead()
            found = pool.wait(lane.task)
            lane.task = None
        self.waited += time.monotonic() - begun
        lane.hold(found)
        self._note_skipped(found.skipped)
        self._tell(number, found)
        self.ask_ahead()
        return found

    def _repack(self, number: int, lane: Lane, found: Found, format: Format) -> Found | None:
        """Pack what is left of the window that a lane holds in another way, without reading it again; hold that."""
        drawn = lane.cursor.drawn
        self._drop(lane)
        options = self.source.options.in_format(format)
        window = pack_window(found.window.tokenized, self.source.tokenizer.identity, options, drawn)
        self._note_skipped(window.skipped)
        if not window.num_rows:
            lane.go(self._after(number, found))
            return None
        made = replace(found, window=window, skipped=(), format=format, before=_before(drawn, format))
        lane.hold(made)
        return made

    def _after(self, number: int, found: Found) -> Cursor:
        epoch, turn = self.windows.after(number, found.epoch, found.turn)
        return Cursor(epoch=epoch, turn=turn)

    def _drop(self, lane: Lane) -> None:
        if lane.task is not None:
            lane.task.cancelled = True
        lane.go(lane.cursor)
        lane.task = None

    def _running(self) -> Ahead:
        if self._pool is None:
            # Compiled here where it never was, not in a thread that must answer in time.
            import tokenmill.encode.placing  # noqa: F401

            self._pool = Ahead(self._find, self._ahead.threads, self._ahead.timeout)
            self._finalizer = weakref.finalize(self, self._pool.stop)
        return self._pool

    def _note_skipped(self, new: Sequence[Skipped]) -> None:
        """Count what was left out, and log it now and then."""
        if not new:
            return
        self.skipped.counts.update(one.reason for one in new)
        self.skipped.places.extend(new[: MAX_PLACES - len(self.skipped.places)])
        if time.monotonic() - self._told_skips >= TELL_SECONDS:
            self._told_skips = time.monotonic()
            counts = ", ".join(f"{reason} {number:,}" for reason, number in sorted(self.skipped.counts.items()))
            _log.warning("left out so far: %s; the last: %s (%s)", counts, new[-1].place, new[-1].reason)

    def _tell(self, number: int, found: Found) -> None:
        """Log that the run waits for text, now and then."""
        since, waited = self._told
        now = time.monotonic()
        if now - since < TELL_SECONDS:
            return
        self._told = (now, self.waited)
        if self.waited - waited >= TOLD_SECONDS:
            _log.warning(
                "waited %.1f s of the last %.0f s for text: last for %s; "
                "more threads or a prepared store (eager) would help",
                self.waited - waited,
                now - since,
                self.windows.at(number, found.epoch, found.turn),
            )


def find_window(source: LiveSource, windows: Windows, wanted: Wanted, show: Show) -> Found:
    """Return the first window of a lane from a cursor on that has rows left.

    A lane without any would look for ever: it is given up after as many windows as there are, or, where every epoch
    is the same, after one epoch.
    """
    lane, epoch, turn, drawn = wanted.lane, wanted.cursor.epoch, wanted.cursor.turn, wanted.cursor.drawn
    options, identity = source.options.in_format(wanted.format), source.tokenizer.identity
    limit = max(windows.num_windows + windows.lanes, MIN_TRIES) if windows.shuffle else windows.num_turns(lane)
    skipped: tuple[Skipped, ...] = ()
    for _ in range(limit):
        window = windows.at(lane, epoch, turn)
        name = str(window)
        show(name)
        try:
            tokenized = tokenize_window(window, epoch, source.tokenizer, options, lambda: show(name))  # noqa: B023
        except TokenizerError as error:
            raise met_in(name, error) from error
        if drawn and wanted.cursor.check not in ("", tokenized.check):
            raise ResumeError(
                f"{name}: must hold what it held when the state was saved, got other text; put the file back, or "
                "start at step 0"
            )
        made = pack_window(tokenized, identity, options, drawn)
        show(name)
        skipped += made.skipped
        if made.num_rows:
            before = _before(drawn, wanted.format)
            return Found(epoch=epoch, turn=turn, window=made, skipped=skipped, format=wanted.format, before=before)
        epoch, turn = windows.after(lane, epoch, turn)
        drawn = ()
    raise DocumentError(
        f"{source.files[0].path}: every one of the {windows.lanes} lanes must find text, got none for lane {lane} "
        f"in {limit} windows; add text, or use fewer lanes"
    )


def _before(drawn: tuple[Drawn, ...], format: Format) -> tuple[Drawn, ...]:
    """Return the rows of a window that were drawn before its rows were made in a way."""
    return drawn[:-1] if drawn and drawn[-1].format == format else drawn
