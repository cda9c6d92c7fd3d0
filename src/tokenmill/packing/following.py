"""What a stage leaves of a source when the next one packs it otherwise: the rest, packed anew, then epochs.

What counts is which tokens are labels. A row that was not drawn still owes those of its spans; the owed
labels of a document that lie side by side are joined, and packed with the one token that must stand before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tokenmill.errors import ConfigError
from tokenmill.fingerprint import digest
from tokenmill.packing.concat import ConcatRows
from tokenmill.packing.holes import excluded_within
from tokenmill.packing.index import num_windows
from tokenmill.packing.packed import PackedRows, pack_rows
from tokenmill.packing.window import MAX_DOCUMENTS
from tokenmill.types import Fates, Spans

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from tokenmill.packing.index import WindowFragments
    from tokenmill.packing.policy import Policy
    from tokenmill.packing.window import Fragments
    from tokenmill.plan.rows import Held, RowIndex, Seen
    from tokenmill.store.reader import Store


@dataclass(frozen=True, kw_only=True)
class FollowingRows:
    """The rest of an earlier epoch, then whole epochs: rows 0.. are those of an epoch, the rest is behind them."""

    full: ConcatRows | PackedRows
    rest: PackedRows

    @property
    def store(self) -> Store:
        """Where the tokens are."""
        return self.full.store

    @property
    def seq_len(self) -> int:
        """How many tokens of a row are inputs."""
        return self.full.seq_len

    @property
    def row_slots(self) -> int:
        """How many input slots a row has."""
        return self.seq_len

    @property
    def cross_document_labels(self) -> bool:
        """Whether labels cross documents."""
        return self.full.cross_document_labels

    @property
    def num_rows(self) -> int:
        """How many rows an epoch has."""
        return self.full.num_rows

    @property
    def num_rest(self) -> int:
        """How many rows the rest has."""
        return self.rest.num_rows

    @cached_property
    def description(self) -> Mapping[str, int | str | bool]:
        """What decides the content of the rows."""
        return {**self.full.description, "rest": digest(dict(self.rest.description))}

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """What decides the rows of a whole epoch."""
        return self.full.description

    def fates(self) -> Fates:
        """Return what becomes of every token of the source in a whole epoch."""
        return self.full.fates()

    def following(self, previous: RowIndex, seen: Seen) -> RowIndex:
        """Return the rows of an epoch, preceded by what is left of another."""
        return self.full.following(previous, seen)

    def rows_of(self, document: int) -> npt.NDArray[np.int64]:
        """Return the rows that hold a token of a document, those of the rest last."""
        return np.concatenate([self.full.rows_of(document), self.rest.rows_of(document) + self.num_rows])

    def held(self, rows: npt.NDArray[np.int64]) -> Held:
        """Return what the given rows hold; reads their loss mask, where the store has one."""
        left = rows >= self.num_rows
        return self.full.held(rows[~left]) + self.rest.held(rows[left] - self.num_rows)

    def spans(self, rows: npt.NDArray[np.int64]) -> Spans:
        """Return what the given rows are made of, in the order given."""
        left = rows >= self.num_rows
        if not left.any():
            return self.full.spans(rows)
        parts = [(np.flatnonzero(~left), self.full.spans(rows[~left])) if not left.all() else None]
        parts.append((np.flatnonzero(left), self.rest.spans(rows[left] - self.num_rows)))
        return _join(rows.size, [part for part in parts if part])


def _join(number: int, parts: list[tuple[npt.NDArray[np.int64], Spans]]) -> Spans:
    """Put the spans of several sets of rows together."""
    first = np.empty(number, np.int64)
    count = np.empty(number, np.int64)
    filled = 0
    for chosen, spans in parts:
        first[chosen] = spans.first + filled
        count[chosen] = spans.count
        filled += spans.length.size
    columns = {
        name: np.concatenate([getattr(spans, name) for _, spans in parts])
        for name in ("document", "start", "length", "shard", "token")
    }
    return Spans(first=first, count=count, **columns)


def follow(full: ConcatRows | PackedRows, previous: RowIndex, seen: Seen, policy: Policy) -> RowIndex:
    """Return `full`, preceded by what is left of the epoch of `previous` that was under way."""
    before = cast("ConcatRows | PackedRows | FollowingRows", previous)
    if before.store.fingerprint != full.store.fingerprint:
        raise ConfigError(
            f"{full.store.path}: a source must keep its store from stage to stage, got another than "
            f"{before.store.path}; give the new store a name of its own, or use on_change = restart"
        )
    if full.cross_document_labels:
        raise ConfigError(
            f"{full.store.path}: labels that cross documents know no rest of an epoch, got cross_document_labels "
            "with a change of rows; use on_change = restart, or leave cross_document_labels out"
        )
    part = (before.rest if seen.rest else before.full) if isinstance(before, FollowingRows) else before
    rest = pack_rest(part, seen, seq_len=full.seq_len, policy=policy, excluded=full.excluded)
    return FollowingRows(full=full, rest=rest) if rest.num_rows else full


def pack_rest(
    part: ConcatRows | PackedRows,
    seen: Seen,
    *,
    seq_len: int,
    policy: Policy,
    excluded: npt.NDArray[np.int64] | None = None,
) -> PackedRows:
    """Pack what is left of an epoch, or of the rest of one, in another way."""
    return pack_rows(
        part.store,
        seq_len=seq_len,
        policy=policy,
        fragments_of=_unseen(part, seen, context=policy.name != "bos_best_fit"),
        after=digest({"rows": dict(part.description), "seen": dict(seen.describe())}),
        excluded=excluded,
    )


def rest_lengths(
    part: ConcatRows | PackedRows, seen: Seen, policy: Policy
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the document and the number of tokens of every piece that `pack_rest` would pack."""
    of = _unseen(part, seen, context=policy.name != "bos_best_fit")
    found = [(window * MAX_DOCUMENTS, of(window)[0]) for window in range(num_windows(part.store))]
    documents = [begin + pieces[0].astype(np.int64) for begin, pieces in found]
    return np.concatenate([_NONE, *documents]), np.concatenate([_NONE, *(pieces[2] for _, pieces in found)])


_NONE = np.empty(0, np.int64)


def _unseen(part: ConcatRows | PackedRows, seen: Seen, *, context: bool) -> WindowFragments:
    """Return what is still to be packed of each window; with the token before it where `context` is wanted."""
    store = part.store

    def of(window: int) -> tuple[Fragments, npt.NDArray[np.int32]]:
        begin = window * MAX_DOCUMENTS
        end = min(begin + MAX_DOCUMENTS, store.num_documents)
        offsets = store.document_offsets(begin, end)
        lengths = np.diff(offsets)
        rows = _rows_of_window(part, window, offsets)
        left = seen.unseen(rows)
        # What is no part of a rest was used up before it; of a whole epoch, what was not drawn is still to come.
        touched = np.full(lengths.size, seen.rest)
        touched[excluded_within(part.excluded, begin, end)] = True  # no part of that epoch, so not left of it
        drawn = part.spans(rows[~left]).document
        touched[drawn[(drawn >= begin) & (drawn < end)] - begin] = True
        documents, first, last = _merge(_owed(part.spans(rows[left]), begin, end, lengths), touched, lengths)
        start = np.where(first > 1, first - context, 0)
        fragments = (documents.astype(np.int32), start.astype(np.int32), (last - start).astype(np.int32))
        return fragments, lengths.astype(np.int32)

    return of


def _rows_of_window(
    part: ConcatRows | PackedRows, window: int, offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    if isinstance(part, PackedRows):
        table = part.index.table
        return np.arange(int(table[window, 0]), int(table[window + 1, 0]))
    # A row of `concat` may reach into the windows beside this one; each takes its own documents from it.
    return part.rows_within(int(offsets[0]), int(offsets[-1]))


def _owed(
    spans: Spans, begin: int, end: int, lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (document of the window, first label, end of labels) for the spans that lie in it."""
    order = np.repeat(spans.first, spans.count) + _counting(spans.count)
    document, start, length = spans.document[order], spans.start[order], spans.length[order]
    # Behind the BOS that was put before it, all tokens of a rest are labels.
    joined = spans.joined[order]
    inside = (document >= begin) & (document < end)
    local = document[inside] - begin
    first = (start + ~joined)[inside].astype(np.int64)
    last = (start + length)[inside]
    # No label is owed by a lone first token, unless it is all of its document.
    owing = (last > first) | (lengths[local] == 1)
    return local[owing], first[owing], last[owing]


def _counting(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return 0, 1, ... anew for each count."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(ends - counts, counts)


def _merge(
    labels: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]],
    touched: npt.NDArray[np.bool_],
    lengths: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Join labels that lie side by side in a document; of a document that was never drawn all are owed.

    The latter matters where rows do not hold whole documents: what truncation or cropping would have dropped of a
    document need not be dropped at another length.
    """
    whole = np.flatnonzero(~touched & (lengths > 0))
    mine = touched[labels[0]]
    added = (whole, np.ones_like(whole), np.maximum(1, lengths[whole]))
    document, first, last = (np.concatenate([a[mine], b]) for a, b in zip(labels, added, strict=True))
    order = np.lexsort((first, document))
    document, first, last = document[order], first[order], last[order]
    if not document.size:
        return document, first, last
    new = np.ones(document.size, np.bool_)
    new[1:] = (document[1:] != document[:-1]) | (first[1:] > last[:-1])
    starts = np.flatnonzero(new)
    return document[starts], first[starts], np.maximum.reduceat(last, starts)
