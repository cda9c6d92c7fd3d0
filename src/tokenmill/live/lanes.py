"""Lanes: streams of rows, each with a place of its own, and the windows that are held for them."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from tokenmill.errors import ConfigError, DocumentError, ResumeError, TokenizerError, met_in
from tokenmill.fingerprint import digest, key64
from tokenmill.live.source import Format, LiveOptions, open_live
from tokenmill.live.tokens import Beat, Skipped, Tokenized, in_order, no_documents, tokenize_window
from tokenmill.live.windows import Window, record_name
from tokenmill.loader.kernels import ADDRESS, SPAN_COLUMNS, describe_spans, point_spans
from tokenmill.packing.index import WindowIndex, build_index, num_windows, pack_one, whole_documents
from tokenmill.packing.rows import PackedRows, pack_rest, rest_lengths
from tokenmill.packing.window import FORBID
from tokenmill.plan.permute import permute_all
from tokenmill.plan.shuffle import Shuffle
from tokenmill.plan.stages import Seen
from tokenmill.store.layout import DOCUMENTS, OFFSET_DTYPE, key_file
from tokenmill.store.manifest import Manifest, ShardInfo
from tokenmill.store.maps import MemoryRequest
from tokenmill.store.reader import store_of
from tokenmill.types import Encoded, Fates, Int64Array

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.config.run import Config, SourceConfig
    from tokenmill.encode.tokenizer import Tokenizer, TokenizerIdentity
    from tokenmill.live.source import LiveSource
    from tokenmill.live.windows import Windows
    from tokenmill.packing.policy import Policy
    from tokenmill.store.reader import Store


# Threads that make windows before they are needed.

LONGEST_JOIN_SECONDS = 5.0
_LOOK_SECONDS = 0.25
"""How often who waits looks whether the thread still lives."""

Show: TypeAlias = Callable[[str], None]
"""Says what is being worked on; called whenever some of it is done."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Found:
    """The next window of a lane that has rows, and where it is."""

    epoch: int
    turn: int
    window: WindowRows
    skipped: tuple[Skipped, ...]
    """What was left out, of windows without rows that were passed over too."""
    format: Format
    """How its rows were made."""
    before: tuple[Drawn, ...] = ()
    """Rows of it that were delivered before they were made so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is asked for: the rows of a lane from a place on, made in one way."""

    lane: int
    cursor: Cursor
    format: Format


Find: TypeAlias = Callable[[Wanted, Show], Found]
"""Finds the first window with rows from a place on."""


@dataclass(kw_only=True, slots=True, eq=False)
class Task:
    """A window that was asked for."""

    wanted: Wanted
    cancelled: bool = False
    where: str = ""
    """What is being worked on; empty before the start."""
    beat: float = 0.0
    """When something was last done."""
    found: Found | None = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class _Unwanted(Exception):
    """Nobody waits for this window any more."""


class Ahead:
    """A few threads, and what they are asked for, in the order of asking.

    They are daemons, so that one that hangs in a read does not keep the process from ending; those that can are
    waited for, as an extension that is still at work when the interpreter goes may crash it.
    """

    def __init__(self, find: Find, threads: int, timeout: float) -> None:
        self._find = find
        self._timeout = timeout
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"tokenmill-live-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, wanted: Wanted) -> Task:
        """Ask for the next window of a lane that has rows."""
        task = Task(wanted=wanted, beat=time.monotonic())
        self._queue.put(task)
        return task

    def wait(self, task: Task) -> Found:
        """Return what was asked for; raise what the thread raised, or that it is dead or hangs."""
        begun = time.monotonic()
        while not task.done.wait(min(_LOOK_SECONDS, self._timeout)):
            quiet = time.monotonic() - max(begun, task.beat if task.where else self._last_beat)
            if quiet >= self._timeout or not any(thread.is_alive() for thread in self._threads):
                task.cancelled = True
                where = task.where or self._last_where or f"lane {task.wanted.lane}"
                raise DocumentError(
                    f"{where}: the thread that reads and tokenizes it must go on within {self._timeout:g} s, got "
                    f"nothing for {quiet:.1f} s; look at the disk or network it is on, or raise timeout"
                )
        if task.error is not None:
            raise task.error
        assert task.found is not None
        return task.found

    def stop(self) -> None:
        """End the threads, and wait a while for those that are at work."""
        self._stopped.set()
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + min(LONGEST_JOIN_SECONDS, self._timeout)
        for thread in self._threads:
            if thread is not threading.current_thread():  # the last reference may have gone in one of them
                thread.join(max(0.0, end - time.monotonic()))

    _last_beat = 0.0
    """When any thread last did something."""
    _last_where = ""

    def _work(self) -> None:
        while not self._stopped.is_set():
            task = self._queue.get()
            if task is None:
                return
            try:
                task.found = self._find(task.wanted, self._shows(task))
            except _Unwanted:
                pass
            except BaseException as error:  # handed on, whatever it is: the thread has no one else to tell
                task.error = error
            task.done.set()
            del task  # the window belongs to who asked for it

    def _shows(self, task: Task) -> Show:
        def show(where: str) -> None:
            if task.cancelled or self._stopped.is_set():
                raise _Unwanted
            task.where = self._last_where = where
            task.beat = self._last_beat = time.monotonic()

        return show


# Where the next row of a lane is.


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """A window, and how many of its rows were delivered."""

    epoch: int = 0
    turn: int = 0
    """Among the windows of the lane in that epoch."""
    drawn: tuple[Drawn, ...] = ()
    """Nothing at the start of a window; several where a stage changed in its midst how rows are made."""
    check: str = ""
    """Digest of what the window held when rows of it were drawn."""


# A window as rows: its tokens, packed.

KEY = "sequence"
TOO_LONG = "too_many_tokens"
"""Why a document that must not be cut is left out, beside the reasons of records."""


class Drawn(NamedTuple):
    """How many rows of a window were delivered, made in one way."""

    format: Format
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class WindowRows:
    """The rows of a window, in the order in which they are delivered."""

    lines: list[bytes]
    """The spans of each row, as the kernels of the loader want them; they hold addresses within `ids`."""
    ids: npt.NDArray[np.unsignedinteger]
    fates: Fates
    skipped: tuple[Skipped, ...]
    """What is left out that was not when the rows before them were made."""
    tokenized: Tokenized
    first: int = 0
    """The first of them that was not delivered yet."""

    @property
    def num_rows(self) -> int:
        """How many rows there are; none where no document has a token."""
        return len(self.lines)


def window_rows(
    window: Window, epoch: int, tokenizer: Tokenizer, options: LiveOptions, beat: Beat = lambda: None
) -> WindowRows:
    """Turn a window into rows; the same documents, tokenizer and options give the same, whoever asks."""
    return pack_window(tokenize_window(window, epoch, tokenizer, options, beat), tokenizer.identity, options)


def pack_window(
    tokenized: Tokenized, identity: TokenizerIdentity, options: LiveOptions, drawn: Sequence[Drawn] = ()
) -> WindowRows:
    """Pack the documents of a window; or, where rows of it were delivered, those that are left.

    Where they were made in another way, what they have left is packed anew; the rows of `drawn` before the last are
    of ways before that one.
    """
    window, skipped = tokenized.window, [] if drawn else list(tokenized.skipped)
    ways = [options.in_format(format) for format, _ in drawn]
    if not ways or ways[-1] != options:
        ways.append(options)
    encoded, kept = tokenized.encoded, np.arange(tokenized.encoded.num_documents)
    if ways[0].policy.split_mode == FORBID:
        long = _too_long(kept, np.diff(encoded.offsets), tokenized, ways[0], skipped)
        skipped = [] if drawn else skipped
        encoded, kept = _without(encoded, long), np.delete(kept, long)
    packed = _pack(encoded, identity, window, ways[0])
    for turn, way in enumerate(ways[1:]):
        _check_row(drawn[turn].rows, packed, tokenized)
        seen = Seen(
            rest=turn > 0,
            size=packed.num_rows,
            drawn=drawn[turn].rows,
            key=int(_row_key(tokenized, options, turn)),
            shuffle=Shuffle(mode="full" if options.shuffle else "none"),
        )
        excluded, skipped = packed.excluded, []  # those of ways before this one were told
        if way.policy.split_mode == FORBID:
            documents, lengths = rest_lengths(packed, seen, way.policy)
            long = documents[_too_long(kept[documents], lengths, tokenized, way, skipped)]
            excluded = np.union1d(long, [] if excluded is None else excluded).astype(np.int64)
        packed = pack_rest(packed, seen, seq_len=way.seq_len, policy=way.policy, excluded=excluded)
    order = np.arange(packed.num_rows)
    if options.shuffle and order.size:
        order = permute_all(order, order.size, _row_key(tokenized, options, len(ways) - 1))
    first = drawn[-1].rows if len(drawn) == len(ways) else 0
    if first:
        _check_row(first, packed, tokenized)
        skipped = []
    return _pointed(packed, order, encoded, tuple(skipped), tokenized, first)


def _check_row(row: int, packed: PackedRows, tokenized: Tokenized) -> None:
    """Refuse a place behind the last row of a window: where all were delivered, a lane is at the next window."""
    if not 0 < row < packed.num_rows:
        raise ResumeError(
            f"state: a lane must be at a row of {tokenized.window}, got row {row} of {packed.num_rows} in epoch "
            f"{tokenized.epoch}; use a state that was not edited"
        )


def _row_key(tokenized: Tokenized, options: LiveOptions, turn: int) -> np.uint64:
    """Return the key of the order of rows; each time that they are packed they have one of their own."""
    return tokenized.window.key(options.seed, tokenized.epoch, f"rows {turn}" if turn else "rows")


def padding_id(identity: TokenizerIdentity) -> int:
    """Return the id that fills rows: PAD, else EOS, else 0. It is never trained on."""
    return next((number for number in (identity.pad_id, identity.eos_id) if number is not None), 0)


def _too_long(
    documents: Int64Array,
    lengths: Int64Array,
    tokenized: Tokenized,
    options: LiveOptions,
    skipped: list[Skipped],
) -> Int64Array:
    """Return which of some documents do not fit a row, to be left out, or refuse them; they must not be cut."""
    long = np.flatnonzero(lengths > options.seq_len + 1)
    for index in long.tolist():
        piece, line = tokenized.places[documents[index]].tolist()
        where = record_name(tokenized.window.unit.pieces[piece], line)
        if options.on_error == "stop":
            raise DocumentError(
                f"{where}: with packing = {options.packing!r} and split = {options.split!r} a document must have "
                f"at most {options.seq_len + 1} tokens, got {lengths[index]}; raise seq_len, or use split = "
                "truncate_end, or on_error='skip'"
            )
        skipped.append(Skipped(reason=TOO_LONG, place=where))
    return long


def _without(encoded: Encoded, documents: Int64Array) -> Encoded:
    """Leave out some documents."""
    if not documents.size:
        return encoded
    lengths = np.diff(encoded.offsets)
    kept = np.ones(lengths.size, np.bool_)
    kept[documents] = False
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[kept])])
    return Encoded(ids=encoded.ids[np.repeat(kept, lengths)], offsets=offsets)


def _store(encoded: Encoded, identity: TokenizerIdentity, path: Path) -> Store:
    """Return tokens in memory as a store."""
    ids = np.ascontiguousarray(encoded.ids)
    manifest = Manifest(
        kind="seq",
        keys={KEY: ids.dtype.str},
        tokenizer=identity.to_json(),
        recipe={"kind": "live"},
        shards=(ShardInfo(name="live", documents=encoded.num_documents, tokens=ids.size, files={}),),
    )
    offsets = encoded.offsets.astype(OFFSET_DTYPE)
    return store_of(
        path,
        manifest,
        None,
        {
            (0, key_file(KEY)): MemoryRequest(path, ids.view(np.uint8)),
            (0, DOCUMENTS): MemoryRequest(path, offsets.view(np.uint8)),
        },
    )


def _pack(encoded: Encoded, identity: TokenizerIdentity, window: Window, options: LiveOptions) -> PackedRows:
    """Pack the documents of a window. `concat` fills its last row with padding, so that no token is lost."""
    policy = options.policy
    store = _store(encoded, identity, Path(window.unit.pieces[0].file.path))
    fragments = whole_documents(store)
    parts: list[bytes] = []
    table, counts = build_index(
        (
            pack_one(number, fragments, options.seq_len, policy, str(window), None)
            for number in range(num_windows(store))
        ),
        parts.append,
    )
    index = WindowIndex(table=table, data=np.frombuffer(b"".join(parts), np.uint8), counts=counts)
    return PackedRows(store=store, seq_len=options.seq_len, policy=policy, index=index, description={})


def _pointed(
    packed: PackedRows,
    order: Int64Array,
    encoded: Encoded,
    skipped: tuple[Skipped, ...],
    tokenized: Tokenized,
    first: int = 0,
) -> WindowRows:
    """Find the spans of all rows, and where their tokens are in memory."""
    ids = np.ascontiguousarray(encoded.ids)
    lines: list[bytes] = []
    if order.size:
        found = packed.spans(order)
        spans = np.empty((found.length.size, SPAN_COLUMNS), np.int64)
        width = ids.dtype.itemsize
        describe_spans(spans, found.joined, found.length, width)
        address = np.array([ids.ctypes.data], np.int64)
        point_spans(spans, (found.shard, found.token), np.zeros(1, np.int64), address, ADDRESS, width)
        data, each = spans.tobytes(), spans.strides[0]
        begins, ends = (each * found.first).tolist(), (each * (found.first + found.count)).tolist()
        lines = [data[begin:end] for begin, end in zip(begins, ends, strict=True)]
    return WindowRows(
        lines=lines,
        ids=ids,
        fates=packed.fates(),
        skipped=skipped,
        tokenized=tokenized,
        first=first,
    )


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
            in_order([no_documents(self.source.tokenizer)], np.empty(0, np.int64))
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


# Live text as a source of a plan: rows that are told apart only when they are drawn.


@dataclass(frozen=True, kw_only=True)
class LiveRows:
    """What a plan is told of live text: when rows of it are drawn, not which."""

    source: LiveSource
    lanes: int
    format: Format
    cross_document_labels: bool
    counted: None = None
    """Nobody knows the rows of an epoch before they are read."""

    @property
    def seq_len(self) -> int:
        """How many tokens of a row are inputs."""
        return self.format.seq_len

    @property
    def row_slots(self) -> int:
        """How many input slots a row has."""
        return self.format.seq_len

    @cached_property
    def description(self) -> Mapping[str, int | str | bool]:
        """What decides the rows of every lane, as JSON."""
        made_of = self.source.made_of(self.lanes)
        return {
            "live": self.source.fingerprint(self.lanes, formats=False),
            "files": digest(made_of["files"])[:16],
            "tokenizer": str(made_of["tokenizer"]["content"])[:16],
            **self.source.options.in_format(self.format).describe(self.lanes),
            "cross_document_labels": self.cross_document_labels,
        }

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """What decides the rows."""
        return self.description

    def made(self, seq_len: int, policy: Policy) -> LiveRows:
        """Return the same text with rows made in another way."""
        if policy.name == "bos_best_fit" and not self.source.tokenizer.identity.add_bos:
            raise ConfigError(
                f"{self.source.files[0].path}: packing bos_best_fit needs documents that start with BOS, got a "
                "tokenizer that adds none; use packing = best_fit"
            )
        format = Format(seq_len, policy.name, policy.split, policy.crop)
        return self if format == self.format else replace(self, format=format)


def open_rows(config: Config, source: SourceConfig, texts: list[str], tokenizer: str) -> LiveRows:
    """List the files of a source and open its tokenizer; rows are made as [run] says, unless a stage says more."""
    run = config.run
    lanes = config.num_lanes(source)
    options = LiveOptions(
        seq_len=run.seq_len,
        packing=run.packing,
        split=run.split,
        crop=run.crop,
        seed=key64(run.seed, "live", source.name) >> 1,  # or sources of one size would be walked in step
        shuffle=run.shuffle != "none",
        text_field=source.text_field,
        lanes=lanes,
        on_error=source.on_error or "stop",
        window_bytes=source.window_bytes,
    )
    return LiveRows(
        source=open_live(texts, tokenizer=tokenizer, options=options),
        lanes=lanes,
        format=options.format,
        cross_document_labels=run.cross_document_labels,
    )
