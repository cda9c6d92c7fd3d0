"""A window as rows: its tokens, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenmill.errors import DocumentError, ResumeError
from tokenmill.live.tokens import Beat, Skipped, Tokenized, tokenize_window
from tokenmill.live.windows import Window, record_name
from tokenmill.loader.kernels import ADDRESS, SPAN_COLUMNS, describe_spans, point_spans
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
