"""The loader of live text: batches of one rank, in order, resumed exactly."""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenmill.errors import ConfigError, DocumentError, ResumeError, TokenizerError
from tokenmill.live.ahead import Ahead, Found, Show, Task
from tokenmill.live.assemble import Assembler, check_arrays
from tokenmill.live.rows import Skipped, WindowRows, padding_id, window_rows
from tokenmill.live.share import Share
from tokenmill.live.state import Cursor, Standing, load_state, save_state

if TYPE_CHECKING:
    from tokenmill.live.source import LiveSource
    from tokenmill.live.windows import Windows
    from tokenmill.types import Batch

MAX_PLACES = 100
TELL_SECONDS = 30.0
"""Between two lines that say that the run waits for text."""
TOLD_SECONDS = 0.1
"""A shorter wait, of all in that time together, is not told."""
MIN_TRIES = 256
"""Windows that a lane looks into before it is said to have no text: with hardly more documents than lanes,
shuffling may well leave a lane without any for several epochs."""
_log = logging.getLogger("tokenmill")


@dataclass(slots=True, eq=False)
class _Lane:
    """Where a lane stands, and what is held for it."""

    cursor: Cursor
    held: Found | None = None
    """The window of the cursor, once it was needed."""
    task: Task | None = None
    """The window that is needed next."""


@dataclass(frozen=True, slots=True)
class SkippedText:
    """What was left out of what this loader has delivered."""

    counts: Counter[str] = field(default_factory=Counter)
    """Reason -> records, or windows for `broken`."""
    places: list[Skipped] = field(default_factory=list)
    """The first of them."""


@dataclass(eq=False, repr=False)
class LiveLoader:
    """Batches of one rank.

    `for batch in loader` goes on from where the loader stands to the end of the run, one micro-batch at a time;
    `state_dict` and `load_state_dict` may be called at any time, before or during an iteration.
    """

    source: LiveSource
    steps: int = field(kw_only=True)
    """The run ends after so many; sources repeat, epoch after epoch."""
    global_batch_size: int = field(kw_only=True)
    """Rows of one step, over all ranks; each is given by one of the lanes."""
    rank: int = field(default=0, kw_only=True)
    world_size: int = field(default=1, kw_only=True)
    micro_batch: int = field(default=1, kw_only=True)
    threads: int = field(default=1, kw_only=True)
    """Threads that read and tokenize; 0 does it when a row is asked for."""
    ahead: int = field(default=2, kw_only=True)
    """Windows that are made before they are needed, beside the one that each lane holds; at least `threads`."""
    arrays: tuple[str, ...] = field(default=("input_ids", "labels", "position_ids", "doc_ids"), kw_only=True)
    timeout: float = field(default=30.0, kw_only=True)
    """Seconds after which a thread that does nothing is given up."""
    epochs: int | None = field(default=None, kw_only=True)
    """Refused: see the message."""
    waited: float = field(default=0.0, init=False)
    """Seconds that the caller had to wait for text."""
    skipped: SkippedText = field(default_factory=SkippedText, init=False)

    def __post_init__(self) -> None:
        self._check()
        options = self.source.options
        self.share = Share(
            lanes=options.lanes or self.global_batch_size,
            global_batch_size=self.global_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            micro_batch=self.micro_batch,
        )
        self.windows = self.source.windows(self.share.lanes)
        self._find = partial(find_window, self.source, self.windows)
        self._assembler = Assembler(
            arrays=self.arrays,
            rows=self.micro_batch,
            seq_len=options.seq_len,
            pad=padding_id(self.source.tokenizer.identity),
        )
        self._drawn = 0
        self._picked = 0
        """Rows of the batch that is being drawn."""
        self._lanes = {lane: _Lane((0, 0, 0)) for lane in self.share.own}
        self._pool: Ahead | None = None
        self._finalizer: weakref.finalize[[], LiveLoader] | None = None
        self._counted: set[tuple[int, int, int]] = set()
        self._iterations = 0
        self._told = (time.monotonic(), 0.0)

    def _check(self) -> None:
        if self.epochs is not None:
            raise ConfigError(
                f"epochs: must be left out for live text, got {self.epochs}: no rank knows how many rows the lanes "
                "of the others have, so it could not end where they end; say steps, or give the documents and the "
                "tokenizer as a source of a run, which prepares them once (eager)"
            )
        if self.steps < 1 or self.threads < 0 or self.ahead < 1 or not self.timeout > 0:
            raise ConfigError(
                "loader: steps and ahead must be at least 1, threads at least 0 and timeout more than 0, got "
                f"{self.steps}, {self.ahead}, {self.threads} and {self.timeout}; raise them"
            )
        check_arrays(self.arrays)

    def __len__(self) -> int:
        """Return the number of micro-batches of the whole run; the same on every rank."""
        return self.steps * self.share.batches

    def __iter__(self) -> Iterator[Batch]:
        self._iterations += 1
        return _Batches(self, self._iterations)

    @property
    def step(self) -> int:
        """The step that the next batch belongs to."""
        return self._drawn // self.share.batches

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands: its lanes, as JSON; `merge_states` joins those of all ranks."""
        step, batch = divmod(self._drawn, self.share.batches)
        cursors = {number: lane.cursor for number, lane in self._lanes.items()}
        return save_state(self.source, Standing(step=step, batch=batch, cursors=cursors), self.share)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state says; a running iteration goes on from there."""
        standing = load_state(state, self.source, self.share, self.windows, self.steps)
        self._drop()
        for number, cursor in standing.cursors.items():
            self._lanes[number].cursor = cursor
        self._drawn = standing.step * self.share.batches + standing.batch

    def close(self) -> None:
        """Stop the threads and let go of all windows; who goes on drawing starts them again."""
        self._drop()
        if self._finalizer is not None:
            self._finalizer()
        self._pool = self._finalizer = None

    def _drop(self) -> None:
        for lane in self._lanes.values():
            if lane.task is not None:
                lane.task.cancelled = True
            lane.held = lane.task = None

    def _draw(self) -> Batch:
        """Return the next micro-batch; if that fails, nothing has been drawn."""
        lanes = self.share.lanes_of(self._drawn % self.share.batches)
        before = {number: self._lanes[number].cursor for number in lanes}
        try:
            rows = []
            for self._picked, number in enumerate(
                lanes, 1
            ):  # before the row is taken: a lane then asks for its next
                rows.append(self._next_row(number))
            batch = self._assembler.batch(rows)
        except BaseException:
            self.close()  # a thread may hang: who tries again gets others
            for number, cursor in before.items():
                self._lanes[number].cursor = cursor
            raise
        finally:
            self._picked = 0
        self._drawn += 1
        return batch

    def _next_row(self, number: int) -> tuple[WindowRows, int]:
        """Return the next row of a lane, and go on to the one after it."""
        lane = self._lanes[number]
        found, row = lane.held or self._take(number, lane), lane.cursor[2]
        if row and ((found.epoch, found.turn) != lane.cursor[:2] or row >= found.window.num_rows):
            raise ResumeError(
                f"state: lane {number} must be at a row of window {lane.cursor[1]} of epoch {lane.cursor[0]}, got "
                f"row {row}, which it does not have; use a state that was not edited"
            )
        if row + 1 < found.window.num_rows:
            lane.cursor = (found.epoch, found.turn, row + 1)
        else:
            lane.cursor = (*self.windows.after(number, found.epoch, found.turn), 0)
            lane.held = None
            self._ask_ahead()
        return found.window, row

    def _take(self, number: int, lane: _Lane) -> Found:
        """Hold the window at the cursor of a lane, or the next one that has rows, and return it; waits for it."""
        begun = time.monotonic()
        if not self.threads:
            found = self._find(number, lane.cursor[0], lane.cursor[1], lambda _: None)
        else:
            pool = self._running()
            if lane.task is None:
                lane.task = pool.ask(number, *lane.cursor[:2])
            self._ask_ahead()
            found = pool.wait(lane.task)
            lane.task = None
        self.waited += time.monotonic() - begun
        lane.held = found
        self._note_skipped(number, found)
        self._tell(number, found)
        self._ask_ahead()
        return found

    def _ask_ahead(self) -> None:
        """Ask for the windows that are needed first, as many as may be made ahead."""
        if not self.threads:
            return
        waiting = sum(lane.task is not None for lane in self._lanes.values())
        room = max(self.ahead, self.threads) - waiting
        if room <= 0:
            return
        needs = sorted(
            (self._rows_held(lane), number)
            for number, lane in self._lanes.items()
            if lane.task is None and self._rows_held(lane) < self._rows_left(number)
        )
        for _, number in needs[:room]:
            lane = self._lanes[number]
            place = lane.cursor[:2]
            if lane.held is not None:
                place = self.windows.after(number, lane.held.epoch, lane.held.turn)
            lane.task = self._running().ask(number, *place)

    def _rows_held(self, lane: _Lane) -> int:
        return 0 if lane.held is None else lane.held.window.num_rows - lane.cursor[2]

    def _rows_left(self, number: int) -> int:
        """Return how many rows a lane has still to give to this run."""
        each = self.share.rows_per_lane
        taken = self._drawn % self.share.batches * self.micro_batch + self._picked
        given = min(max(0, taken - (number - self.share.own.start) * each), each)
        return (self.steps - self.step) * each - given

    def _running(self) -> Ahead:
        if self._pool is None:
            self._pool = Ahead(self._find, self.threads, self.timeout)
            self._finalizer = weakref.finalize(self, self._pool.stop)
        return self._pool

    def _note_skipped(self, number: int, found: Found) -> None:
        """Count what was left out, once for each window of an epoch, also where one is read again."""
        for place, skipped in found.skipped.items():
            if (number, *place) in self._counted:
                continue
            self._counted.add((number, *place))
            self.skipped.counts.update(one.reason for one in skipped)
            self.skipped.places.extend(skipped[: MAX_PLACES - len(self.skipped.places)])

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


class _Batches(Iterator["Batch"]):
    """One iteration over a loader; follows it when a state is loaded meanwhile."""

    def __init__(self, loader: LiveLoader, number: int) -> None:
        self._loader = loader
        self._number = number

    def __next__(self) -> Batch:
        loader = self._loader
        if self._number != loader._iterations:
            raise ConfigError(
                "loader: there must be one iteration at a time, got a newer one; "
                "go on with that, or make a second loader"
            )
        if loader._drawn == len(loader):
            loader.close()
            raise StopIteration
        return loader._draw()


def find_window(source: LiveSource, windows: Windows, lane: int, epoch: int, turn: int, show: Show) -> Found:
    """Return the first window of a lane from a turn on that has rows.

    A lane without any would look for ever: it is given up after as many windows as there are, or, where every epoch
    is the same, after one epoch.
    """
    limit = max(windows.num_windows + windows.lanes, MIN_TRIES) if windows.shuffle else windows.num_turns(lane)
    skipped: dict[tuple[int, int], tuple[Skipped, ...]] = {}
    for _ in range(limit):
        window = windows.at(lane, epoch, turn)
        name = str(window)
        show(name)
        try:
            made = window_rows(window, epoch, source.tokenizer, source.options, partial(show, name))
        except TokenizerError as error:
            raise _placed(error, name) from error
        if made.skipped:
            skipped[epoch, turn] = made.skipped
        if made.num_rows:
            return Found(epoch=epoch, turn=turn, window=made, skipped=skipped)
        epoch, turn = windows.after(lane, epoch, turn)
    raise DocumentError(
        f"{source.files[0].path}: every one of the {windows.lanes} lanes must find text, got none for lane {lane} "
        f"in {limit} windows; add text, or use fewer lanes"
    )


def _placed(error: TokenizerError, window: str) -> TokenizerError:
    """Say which texts a tokenizer failed on."""
    return TokenizerError(f"{window}: {error}")
