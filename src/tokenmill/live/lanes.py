"""Lanes: streams of rows with a position each, as a source of a plan and as a loader of one source.

A lane keeps the window that it reads from. Threads prepare windows ahead, first for the lanes with the fewest rows
left.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np

from tokenmill.errors import ConfigError, DocumentError, ResumeError, TokenizerError, met_in
from tokenmill.fingerprint import digest
from tokenmill.live.source import LiveSource, Windows
from tokenmill.live.tokens import EMPTY, WindowRows, in_order, no_documents, pack_window, tokenize_window
from tokenmill.loader.blocks import RowsInMemory
from tokenmill.loader.buffers import pad_id
from tokenmill.loader.drawn import LaneRows, Skipped, SkippedText
from tokenmill.loader.kernels import SPAN_COLUMNS
from tokenmill.loader.layout import Layout, RankSlice
from tokenmill.loader.loader import Loader
from tokenmill.loader.options import LoaderOptions
from tokenmill.loader.state import DrawnRows, LanePosition, Position, RowFormat, State
from tokenmill.packing.packers import Policy
from tokenmill.plan.compile import compile_plan
from tokenmill.plan.order import Shuffle
from tokenmill.plan.stages import StageSpec
from tokenmill.types import Int64Array

LONGEST_JOIN_SECONDS = 5.0
_LOOK_SECONDS = 0.25
"""Seconds between two checks of a waiting caller that the thread is alive."""
MAX_PLACES = 100
LOG_SECONDS = 30.0
"""Between two lines that say that the run waits for text."""
MIN_LOGGED_SECONDS = 0.1
"""A shorter wait, of all in that time together, is not logged."""
MIN_TRIES = 256
"""Windows that a lane looks into before it is said to have no text: with hardly more documents than lanes,
shuffling may well leave a lane without any for several epochs."""
_SPAN_BYTES = 8 * SPAN_COLUMNS
_log = logging.getLogger("tokenmill")

Show: TypeAlias = Callable[[str], None]
"""Says what is being worked on; called whenever some of it is done."""


# Windows of a lane, and threads that make them.


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRequest:
    """Request for the rows of a lane from a position on, in one format."""

    lane: int
    position: LanePosition
    format: RowFormat


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaneWindow:
    """A window of a lane that has rows."""

    epoch: int
    turn: int
    rows: WindowRows
    format: RowFormat
    """Format of its rows."""
    before: tuple[DrawnRows, ...] = ()
    """Rows of the window that were drawn in earlier formats."""
    skipped: tuple[Skipped, ...] = ()
    """Items that were left out, also of windows without rows."""


def find_window(source: LiveSource, windows: Windows, request: WindowRequest, show: Show) -> LaneWindow:
    """Return the first window of a lane, from a position on, that has rows left.

    The search ends after all windows, or after one epoch if every epoch is the same. Without text it would not end.
    """
    lane, position = request.lane, request.position
    options = source.options.in_format(request.format)
    limit = max(windows.num_windows + windows.lanes, MIN_TRIES) if windows.shuffle else windows.num_turns(lane)
    skipped: tuple[Skipped, ...] = ()
    for _ in range(limit):
        epoch, turn, drawn = position.epoch, position.turn, position.drawn
        window = windows.at(lane, epoch, turn)
        name = str(window)
        show(name)
        try:
            tokenized = tokenize_window(window, epoch, source.tokenizer, options, partial(show, name))
        except TokenizerError as error:
            raise met_in(name, error) from error
        if drawn and position.check not in ("", tokenized.check):
            raise ResumeError(
                f"{name}: must hold what it held when the state was saved, got other text; put the file back, or "
                "start at step 0"
            )
        rows = pack_window(tokenized, options, drawn)
        show(name)
        skipped += rows.skipped
        if rows.num_rows:
            before = _before(drawn, request.format)
            return LaneWindow(
                epoch=epoch, turn=turn, rows=rows, format=request.format, before=before, skipped=skipped
            )
        position = _after(windows, lane, epoch, turn)
    raise DocumentError(
        f"{source.files[0].path}: no text for lane {lane} of {windows.lanes} in {limit} windows; add text, or use "
        "fewer lanes"
    )


def _before(drawn: tuple[DrawnRows, ...], format: RowFormat) -> tuple[DrawnRows, ...]:
    """Return the rows of a window that were drawn before its rows were made in a format."""
    return drawn[:-1] if drawn and drawn[-1].format == format else drawn


def _after(windows: Windows, lane: int, epoch: int, turn: int) -> LanePosition:
    """Return the start of the window that a lane reads next."""
    return LanePosition(*windows.after(lane, epoch, turn))


@dataclass(kw_only=True, slots=True, eq=False)
class WindowTask:
    """A window that was asked for."""

    request: WindowRequest
    cancelled: bool = False
    where: str = ""
    """Window in work; empty before the start."""
    beat: float = 0.0
    """When something was last done."""
    window: LaneWindow | None = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class _Unwanted(Exception):
    """Signal that a window was canceled."""


class WindowThreads:
    """A few threads, and their requests in order.

    They are daemons, so that a thread that hangs in a read does not keep the process alive. `stop` joins the
    others, because an extension that runs during shutdown may crash the interpreter.
    """

    def __init__(self, find: Callable[[WindowRequest, Show], LaneWindow], threads: int, timeout: float) -> None:
        self._find = find
        self._timeout = timeout
        self._queue: SimpleQueue[WindowTask | None] = SimpleQueue()
        self._stopped = threading.Event()
        self._last_beat = 0.0
        """When any thread last did something."""
        self._last_where = ""
        self._threads = [
            threading.Thread(target=self._work, name=f"tokenmill-live-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, request: WindowRequest) -> WindowTask:
        """Ask for the next window of a lane that has rows."""
        task = WindowTask(request=request, beat=time.monotonic())
        self._queue.put(task)
        return task

    def wait(self, task: WindowTask) -> LaneWindow:
        """Return what was asked for; raise what the thread raised, or that it is dead or hangs."""
        begun = time.monotonic()
        while not task.done.wait(min(_LOOK_SECONDS, self._timeout)):
            quiet = time.monotonic() - max(begun, task.beat if task.where else self._last_beat)
            if quiet >= self._timeout or not any(thread.is_alive() for thread in self._threads):
                task.cancelled = True
                where = task.where or self._last_where or f"lane {task.request.lane}"
                raise DocumentError(
                    f"{where}: no progress in reading and tokenizing for {quiet:.1f} s "
                    f"(timeout {self._timeout:g} s); check its disk or network, or raise timeout"
                )
        if task.error is not None:
            raise task.error
        assert task.window is not None
        return task.window

    def stop(self) -> None:
        """End the threads, and wait a while for those that are at work."""
        self._stopped.set()
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + min(LONGEST_JOIN_SECONDS, self._timeout)
        for thread in self._threads:
            if thread is not threading.current_thread():  # the last reference may have gone in one of them
                thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while not self._stopped.is_set():
            task = self._queue.get()
            if task is None:
                return
            try:
                task.window = self._find(task.request, partial(self._show, task))
            except _Unwanted:
                pass
            except BaseException as error:  # handed on, whatever it is: the thread has no one else to tell
                task.error = error
            task.done.set()
            del task  # the window belongs to the caller that asked for it

    def _show(self, task: WindowTask, where: str) -> None:
        if task.cancelled or self._stopped.is_set():
            raise _Unwanted
        task.where = self._last_where = where
        task.beat = self._last_beat = time.monotonic()


# Lanes.

LanePlace: TypeAlias = tuple[LanePosition, LaneWindow | None, int, int]
"""Place of a lane, for `position_at`. Building a position for every row would take longer than the row."""
LanesMark: TypeAlias = tuple[list[tuple[int, LanePlace]], dict[str, int], int]


@dataclass(slots=True, eq=False)
class Lane:
    """Position of a lane, and its window."""

    begun: LanePosition
    """Position while it has no window."""
    window: LaneWindow | None = None
    """Window that rows are read from; None until it is needed."""
    row: int = 0
    """Index of the next row in the window."""
    left: int = 0
    """Rows at most that the run still asks for."""
    task: WindowTask | None = None
    """The window that is needed next."""

    @property
    def position(self) -> LanePosition:
        """Position of the next row."""
        return position_at(self.place)

    @property
    def place(self) -> LanePlace:
        """Place of the lane, for `position_at`."""
        return self.begun, self.window, self.row, self.left

    @property
    def rows_held(self) -> int:
        """Number of rows left in its window."""
        return 0 if self.window is None else self.window.rows.num_rows - self.row

    def use_window(self, window: LaneWindow) -> None:
        """Draw from a window, from the first row of it that was not delivered."""
        self.window, self.row = window, window.rows.first

    def move_to(self, position: LanePosition) -> None:
        """Stand at a position, with no window held."""
        self.begun, self.window, self.row = position, None, 0

    def release(self) -> None:
        """Release the window and cancel the request for the next one."""
        if self.task is not None:
            self.task.cancelled = True
        self.move_to(self.position)
        self.task = None


def position_at(place: LanePlace) -> LanePosition:
    """Return where the next row is of a lane that stands at a place."""
    begun, window, row, _ = place
    if window is None:
        return begun
    drawn = (*window.before, DrawnRows(window.format, row)) if row else window.before
    check = window.rows.tokenized.check if drawn else ""
    return LanePosition(window.epoch, window.turn, drawn, check)


class LiveLanes:
    """The lanes that one rank reads of a source of live text."""

    def __init__(self, source: LiveSource, windows: Windows, numbers: range, options: LoaderOptions) -> None:
        """Stand at the start of the first epoch; of the options those count that say how to work ahead."""
        self.source = source
        self.windows = windows
        self.numbers = numbers
        self.waited = 0.0
        self.skipped = SkippedText()
        self.lanes = {number: Lane(LanePosition()) for number in numbers}
        self._num_threads, self._timeout = options.threads, options.timeout
        most = options.threads + 1 if options.ahead is None else max(options.ahead, options.threads)
        self._num_ahead = most if options.threads else 0
        """Windows that are made before they are needed."""
        # Holds no reference to this object, which ends threads.
        self._find = partial(find_window, source, windows)
        self._format = source.options.format
        """In which rows were last asked for: in this format those of windows ahead are made."""
        self._threads: WindowThreads | None = None
        self._finalizer: weakref.finalize[[], LiveLanes] | None = None
        self._logged = (time.monotonic(), 0.0)
        self._logged_skips = float("-inf")

    def draw(self, numbers: Sequence[int], format: RowFormat, chosen: Int64Array | None = None) -> RowsInMemory:
        """Return the next row of each of some lanes, in the order given; those are the `chosen` rows of a batch."""
        windows, lines = [], []
        rows: list[int] = []  # numbers of Python: there are few, and numpy takes longer to begin
        end = 0
        for number in numbers:
            window, row = self.next_row(number, format)
            line = window.lines[row]
            count = len(line) // _SPAN_BYTES
            windows.append(window)
            lines.append(line)
            rows += (end, count)
            end += count
        spans = np.frombuffer(bytearray().join(lines), np.int64).reshape(-1, SPAN_COLUMNS)
        return RowsInMemory(np.array(rows, np.int64).reshape(-1, 2), spans, windows, chosen)

    def next_row(self, number: int, format: RowFormat) -> tuple[WindowRows, int]:
        """Return the next row of a lane, made in the given format, and go on to the one after it."""
        lane = self.lanes[number]
        lane.left -= 1
        window = lane.window
        if window is not None and window.format != format:
            window = self._repack(number, lane, window, format)
        if window is None:
            window = self._next_window(number, lane, format)
        row = lane.row
        lane.row += 1
        if lane.row == window.rows.num_rows:
            lane.move_to(_after(self.windows, number, window.epoch, window.turn))
            self._ask_ahead()
        return window.rows, row

    def mark(self, numbers: Collection[int]) -> LanesMark:
        """Return what `back` needs to undo the draws from some of the lanes."""
        places = [(number, self.lanes[number].place) for number in numbers]
        return places, dict(self.skipped.counts), len(self.skipped.places)

    def back(self, mark: LanesMark) -> None:
        """Go back to where the lanes were: the next draws give the same rows again, by other threads."""
        places, counts, num_skipped = mark
        self.close()
        positions = {number: position_at(place) for number, place in places}
        self.move_to(positions, {number: place[3] for number, place in places}, counts)
        del self.skipped.places[num_skipped:]

    def positions(self) -> dict[int, LanePosition]:
        """Return where each lane stands."""
        return {number: lane.position for number, lane in self.lanes.items()}

    def num_turns(self, number: int) -> int:
        """Return how many windows a lane reads in an epoch."""
        return self.windows.num_turns(number)

    def move_to(
        self, positions: Mapping[int, LanePosition], left: Mapping[int, int], skipped: Mapping[str, int]
    ) -> None:
        """Go to where positions say; windows that are held for these lanes are let go."""
        for number, position in positions.items():
            lane = self.lanes[number]
            lane.release()
            lane.move_to(position)
            lane.left = left[number]
        self.skipped.counts.clear()
        self.skipped.counts.update(skipped)

    def restart(self) -> None:
        """Begin the next epoch in every lane that is within one."""
        for lane in self.lanes.values():
            position = lane.position
            if position != LanePosition(epoch=position.epoch):
                lane.release()
                lane.move_to(LanePosition(epoch=position.epoch + 1))

    def close(self) -> None:
        """Stop the threads and let go of all windows; the next draw starts them again."""
        for lane in self.lanes.values():
            lane.release()
        if self._finalizer is not None:
            self._finalizer()
        self._threads = self._finalizer = None

    def _next_window(self, number: int, lane: Lane, format: RowFormat) -> LaneWindow:
        """Hold the window at the position of a lane, or the next one that has rows, and return it; waits for it."""
        begun = time.monotonic()
        self._format = format
        request = WindowRequest(lane=number, position=lane.position, format=format)
        if lane.task is not None and lane.task.request != request:
            lane.release()
        if not self._num_threads:
            window = self._find(request, lambda _: None)
        else:
            threads = self._running()
            if lane.task is None:
                lane.task = threads.ask(request)
            self._ask_ahead()
            window = threads.wait(lane.task)
            lane.task = None
        self.waited += time.monotonic() - begun
        lane.use_window(window)
        self._note_skipped(window.skipped)
        self._log_waits(number, window)
        self._ask_ahead()
        return window

    def _repack(self, number: int, lane: Lane, window: LaneWindow, format: RowFormat) -> LaneWindow | None:
        """Pack what is left of the window that a lane holds in another format, without reading it; hold that."""
        drawn = lane.position.drawn
        lane.release()
        rows = pack_window(window.rows.tokenized, self.source.options.in_format(format), drawn)
        self._note_skipped(rows.skipped)
        if not rows.num_rows:
            lane.move_to(_after(self.windows, number, window.epoch, window.turn))
            return None
        repacked = replace(window, rows=rows, skipped=(), format=format, before=_before(drawn, format))
        lane.use_window(repacked)
        return repacked

    def _ask_ahead(self) -> None:
        """Ask for the windows that are needed first, as many as may be made ahead."""
        room = self._num_ahead - sum(lane.task is not None for lane in self.lanes.values())
        if room <= 0:
            return
        needs = sorted(
            (lane.rows_held, number)
            for number, lane in self.lanes.items()
            if lane.task is None and lane.rows_held < lane.left
        )
        for _, number in needs[:room]:
            lane = self.lanes[number]
            position, window = lane.begun, lane.window
            if window is not None:
                position = _after(self.windows, number, window.epoch, window.turn)
            lane.task = self._running().ask(WindowRequest(lane=number, position=position, format=self._format))

    def _running(self) -> WindowThreads:
        if self._threads is None:
            # Compiled here where it never was, not in a thread that must answer in time.
            in_order([no_documents(self.source.tokenizer)], np.empty(0, np.int64))
            self._threads = WindowThreads(self._find, self._num_threads, self._timeout)
            self._finalizer = weakref.finalize(self, self._threads.stop)
        return self._threads

    def _note_skipped(self, new: Sequence[Skipped]) -> None:
        """Count what was left out, and log it now and then."""
        if not new:
            return
        self.skipped.counts.update(skipped.reason for skipped in new)
        self.skipped.places.extend(new[: MAX_PLACES - len(self.skipped.places)])
        if time.monotonic() - self._logged_skips >= LOG_SECONDS:
            self._logged_skips = time.monotonic()
            counts = ", ".join(f"{reason} {number:,}" for reason, number in sorted(self.skipped.counts.items()))
            level = logging.INFO if set(self.skipped.counts) == {EMPTY} else logging.WARNING
            _log.log(level, "left out so far: %s; the last: %s (%s)", counts, new[-1].place, new[-1].reason)

    def _log_waits(self, number: int, window: LaneWindow) -> None:
        """Log that the run waits for text, now and then."""
        since, waited = self._logged
        now = time.monotonic()
        if now - since < LOG_SECONDS:
            return
        self._logged = (now, self.waited)
        if self.waited - waited >= MIN_LOGGED_SECONDS:
            _log.warning(
                "waited %.1f s of the last %.0f s for text: last for %s; "
                "more threads or a prepared store (eager) would help",
                self.waited - waited,
                now - since,
                self.windows.at(number, window.epoch, window.turn),
            )


# Live text as a source of a plan, and as a plan of one source.


@dataclass(frozen=True, kw_only=True)
class LiveRows(LaneRows):
    """Live text as the rows of a source."""

    source: LiveSource
    lanes: int
    format: RowFormat
    cross_document_labels: bool = False

    @property
    def where(self) -> str:
        """First file of the text, for errors."""
        return self.source.files[0].path

    @cached_property
    def description(self) -> Mapping[str, int | str | bool]:
        """Description of the rows of every lane, as JSON."""
        made_of = self.source.made_of(self.lanes)
        return {
            "live": self.source.fingerprint(self.lanes, formats=False),
            "files": digest(made_of["files"])[:16],
            "tokenizer": str(made_of["tokenizer"]["content"])[:16],
            **self.source.options.in_format(self.format).describe(self.lanes),
            "cross_document_labels": self.cross_document_labels,
        }

    @property
    def pad_id(self) -> int:
        """The id that fills rows."""
        return pad_id(self.source.tokenizer.identity.to_json())

    def open_lanes(self, numbers: range, options: LoaderOptions) -> LiveLanes:
        """Open some of the lanes, each at the start of its first epoch."""
        return LiveLanes(self.source, self.source.windows(self.lanes), numbers, options)

    def in_format(self, seq_len: int, policy: Policy) -> LiveRows:
        """Return the same text with rows of another format."""
        if policy.name == "bos_best_fit" and not self.source.tokenizer.identity.add_bos:
            raise ConfigError(
                f"{self.source.files[0].path}: packing bos_best_fit needs documents that start with BOS, got a "
                "tokenizer that adds none; use packing = best_fit"
            )
        format = RowFormat(seq_len, policy.name, policy.split, policy.crop)
        return self if format == self.format else replace(self, format=format)


class LiveLoader(Loader):
    """Batches of one rank from one source of live text, without a config.

    Its states depend on files, tokenizer and options. With the same lanes they resume with another batch size.
    """

    def __init__(
        self,
        source: LiveSource,
        *,
        steps: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        micro_batch: int = 1,
        options: LoaderOptions | None = None,
        epochs: int | None = None,
    ) -> None:
        """Make a plan of `steps` with `global_batch_size` rows each, over all ranks; `epochs` raises an error."""
        if epochs is not None:
            raise ConfigError(
                f"epochs: {epochs} cannot be combined with live text, because no rank knows the rows of the "
                "others; pass steps, or make the documents a source of a run, which prepares them once (eager)"
            )
        if steps < 1 or global_batch_size < 1:
            raise ConfigError(
                f"loader: steps and global_batch_size must be at least 1, got {steps} and {global_batch_size}; "
                "raise them"
            )
        live = source.options
        rows = LiveRows(source=source, lanes=live.lanes or global_batch_size, format=live.format)
        stage = StageSpec(
            name="live",
            start_step=0,
            global_batch_size=global_batch_size,
            seq_len=live.seq_len,
            seed=live.seed,
            shuffle=Shuffle(),
            weights={"text": 1},
            rows={"text": rows},
        )
        self.source = source
        self.rows = rows
        super().__init__(
            compile_plan([stage], sources=("text",), steps=steps),
            RankSlice(layout=Layout(dp=(rank, world_size)), micro_batch=micro_batch),
            options or LoaderOptions(),
        )

    @property
    def text(self) -> LiveLanes:
        """The lanes of this rank."""
        lanes = self.lanes["text"]
        assert isinstance(lanes, LiveLanes)
        return lanes

    @property
    def skipped(self) -> SkippedText:
        """Items that were left out of the batches so far."""
        return self.text.skipped

    def describe(self) -> dict[str, Any]:
        """Return what the loaders of all ranks must have in common, as JSON, with every file."""
        files = {file.name: seen for file, seen in zip(self.source.files, self.source.digests, strict=True)}
        return {"files": files, **super().describe()}

    def _made_by(self, position: Position) -> dict[str, Any]:
        lanes = self.rows.lanes
        made_by = {"fingerprint": self.source.fingerprint(lanes), "made_of": self.source.made_of(lanes)}
        batch = {"global_batch_size": self.plan.stages[0].spec.global_batch_size} if position.batch else {}
        return made_by | batch

    def _check_made_by(self, state: State) -> None:
        if state.fingerprint != self.source.fingerprint(self.rows.lanes):
            raise ResumeError(self.source.refusal(state.made_of or {}, self.rows.lanes))
        batch = self.plan.stages[0].spec.global_batch_size
        if state.batches and state.global_batch_size != batch:
            raise ResumeError(
                f"state: was saved in the middle of step {state.step}, so global_batch_size must stay "
                f"{state.global_batch_size}, got {batch}; resume with that, or from a state saved between two steps"
            )
