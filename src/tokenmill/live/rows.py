"""A window as rows: read, put in order, tokenized, packed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from tokenmill.documents import RULES, read_unit
from tokenmill.encode.frame import frame
from tokenmill.errors import DocumentError, ResumeError
from tokenmill.live.windows import Window, record_name
from tokenmill.loader.kernels import ADDRESS, describe_spans, point_spans
from tokenmill.packing.following import pack_rest, rest_lengths
from tokenmill.packing.index import WindowIndex, build_index, num_windows, pack_one, whole_documents
from tokenmill.packing.packed import PackedRows
from tokenmill.packing.window import FORBID
from tokenmill.plan.permute import permute_all
from tokenmill.plan.rows import Seen
from tokenmill.plan.shuffle import Shuffle
from tokenmill.store.layout import DOCUMENTS, OFFSET_DTYPE, key_file
from tokenmill.store.manifest import Manifest, ShardInfo
from tokenmill.store.maps import MemoryRequest
from tokenmill.store.reader import store_of
from tokenmill.types import Encoded, Fates

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.encode.tokenizer import Tokenizer, TokenizerIdentity
    from tokenmill.live.options import Format, LiveOptions
    from tokenmill.store.reader import Store

KEY = "sequence"
CHECK_DIGITS = 8
BATCH_CHARACTERS = 1 << 20
"""Texts that are tokenized together; more do not stay in the caches of a core."""
BROKEN, TOO_LONG = "broken", "too_many_tokens"
"""Why a window, and a document that must not be cut, are left out, beside the reasons of records."""
Beat = Callable[[], None]
"""Called whenever some work is done: it shows that a thread lives, and ends work that nobody wants any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """Something that was left out."""

    reason: str
    place: str


class Drawn(NamedTuple):
    """How many rows of a window were delivered, made in one way."""

    format: Format
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokenized:
    """The documents of a window as tokens, in the order of an epoch."""

    window: Window
    epoch: int
    encoded: Encoded
    places: npt.NDArray[np.int64]
    """(piece, line) of each document."""
    skipped: tuple[Skipped, ...]
    check: str
    """Digest of the tokens: a state has it, so that other text is not taken for that of a window."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class WindowRows:
    """The rows of a window, in the order in which they are delivered."""

    rows: npt.NDArray[np.int64]
    """(first span, number of spans) of each row."""
    spans: npt.NDArray[np.int64]
    """As the kernels of the loader want them; they hold addresses within `ids`."""
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
        return len(self.rows)


def window_rows(
    window: Window, epoch: int, tokenizer: Tokenizer, options: LiveOptions, beat: Beat = lambda: None
) -> WindowRows:
    """Turn a window into rows; the same documents, tokenizer and options give the same, whoever asks."""
    return pack_window(tokenize_window(window, epoch, tokenizer, options, beat), tokenizer.identity, options)


def tokenize_window(
    window: Window, epoch: int, tokenizer: Tokenizer, options: LiveOptions, beat: Beat = lambda: None
) -> Tokenized:
    """Read the documents of a window, put them in order and tokenize them; how they are packed does not matter."""
    skipped: list[Skipped] = []
    texts, found = _read(window, options, skipped, beat)
    places = np.array(found, np.int64).reshape(-1, 2)
    if options.shuffle and texts:
        order = permute_all(np.arange(len(texts)), len(texts), window.key(options.seed, epoch, "documents"))
        texts, places = [texts[index] for index in order.tolist()], places[order]
    encoded = _encode(texts, tokenizer, beat)
    return Tokenized(
        window=window,
        epoch=epoch,
        encoded=encoded,
        places=places,
        skipped=tuple(skipped),
        check=xxhash.xxh3_64_hexdigest(np.ascontiguousarray(encoded.ids).data)[:CHECK_DIGITS],
    )


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


def _read(
    window: Window, options: LiveOptions, skipped: list[Skipped], beat: Beat
) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the texts of a window, and (piece, line) of each.

    A file that is not there, or not as large as it was, ends the run whatever `on_error` says: with other files the
    rest of the run would not be the one that its state stands for.
    """
    _check_sizes(window)
    texts: list[str] = []
    places: list[tuple[int, int]] = []
    documents = bad = 0
    try:
        for batch in read_unit(window.unit, options.reading):
            beat()
            for record in batch.bad:
                where = record_name(window.unit.pieces[batch.piece], record.line)
                if options.on_error == "stop":
                    raise DocumentError(
                        f"{where}: {RULES[record.reason]}, got {record.detail}; mend it, or say on_error='skip'"
                    )
                if window.holds(bad):  # so that each is counted by one of the parts
                    skipped.append(Skipped(reason=record.reason, place=where))
                bad += 1
            held: Sequence[int] = range(len(batch.texts))
            if window.holds_all:
                texts += batch.texts
            else:
                held = [number for number in held if window.holds(documents + number)]
                texts += [batch.texts[number] for number in held]
            places += [(batch.piece, batch.lines[number]) for number in held]
            documents += len(batch.texts)
    except DocumentError as error:
        _check_sizes(window)
        if options.on_error == "stop":
            raise _placed(error, window) from None
        skipped[:] = [Skipped(reason=BROKEN, place=str(window))]
        return [], []
    return texts, places


def _check_sizes(window: Window) -> None:
    for file in {piece.file.path: piece.file for piece in window.unit.pieces}.values():
        try:
            size = os.stat(file.path).st_size
        except OSError as error:
            raise DocumentError(
                f"{file.path}: must stay readable while it is trained on, got {error.strerror}; put it back"
            ) from None
        if size != file.bytes:
            raise DocumentError(
                f"{file.path}: must keep its {file.bytes} bytes while it is trained on, got {size}; "
                "let nothing write to it, and put it back as it was"
            )


def _placed(error: DocumentError, window: Window) -> DocumentError:
    """Say which part of a file was being read, where the error names the file alone."""
    for path in {piece.file.path for piece in window.unit.pieces}:
        if str(error).startswith(f"{path}: "):
            return DocumentError(f"{window}{str(error).removeprefix(path)}")
    return error


def _encode(texts: Sequence[str], tokenizer: Tokenizer, beat: Beat) -> Encoded:
    """Tokenize texts in batches and put BOS and EOS where they belong."""
    parts: list[Encoded] = []
    behind = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    begin = size = 0
    while begin < len(texts):
        end = min(int(np.searchsorted(behind, size + BATCH_CHARACTERS)) + 1, len(texts))
        parts.append(frame(tokenizer.encode(texts[begin:end]), tokenizer.identity))
        begin, size = end, int(behind[end - 1])
        beat()
    if len(parts) == 1:
        return parts[0]
    ends = [part.offsets[1:] for part in parts]
    bases = np.cumsum([0, *(part.ids.size for part in parts)])
    offsets = np.concatenate([np.zeros(1, np.int64), *(end + base for end, base in zip(ends, bases, strict=False))])
    if not parts:
        return frame(Encoded(ids=np.empty(0, np.uint32), offsets=offsets), tokenizer.identity)
    return Encoded(ids=np.concatenate([part.ids for part in parts]), offsets=offsets)


def _too_long(
    documents: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    tokenized: Tokenized,
    options: LiveOptions,
    skipped: list[Skipped],
) -> npt.NDArray[np.int64]:
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


def _without(encoded: Encoded, documents: npt.NDArray[np.int64]) -> Encoded:
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
    order: npt.NDArray[np.int64],
    encoded: Encoded,
    skipped: tuple[Skipped, ...],
    tokenized: Tokenized,
    first: int = 0,
) -> WindowRows:
    """Find the spans of all rows, and where their tokens are in memory."""
    ids = np.ascontiguousarray(encoded.ids)
    rows, spans = np.empty((order.size, 2), np.int64), np.empty((0, 5), np.int64)
    if order.size:
        found = packed.spans(order)
        rows[:, 0], rows[:, 1] = found.first, found.count
        spans = np.empty((found.length.size, 5), np.int64)
        width = ids.dtype.itemsize
        describe_spans(spans, found.joined, found.length, width)
        address = np.array([ids.ctypes.data], np.int64)
        point_spans(spans, (found.shard, found.token), np.zeros(1, np.int64), address, ADDRESS, width)
    return WindowRows(
        rows=rows,
        spans=spans,
        ids=ids,
        fates=packed.fates(),
        skipped=skipped,
        tokenized=tokenized,
        first=first,
    )
