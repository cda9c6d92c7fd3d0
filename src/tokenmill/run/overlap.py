"""Documents that an eval shares with the sources that are trained on, by number within a store, by content across.

Contents are compared by the 8-byte hashes that stores keep of their documents. Hashes of the evals are in memory;
those of the training stores are read once, in blocks, so memory does not grow with the training data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.packing.stored import StoredRows, stored_rows
from tokenmill.plan.plan import Plan
from tokenmill.run.evals import EvalPart
from tokenmill.store import Store
from tokenmill.store.hashes import EMPTY, hash_documents, read_hashes
from tokenmill.store.layout import is_ours
from tokenmill.types import NO_DOCUMENTS, BoolArray, Int64Array, Uint64Array

if TYPE_CHECKING:
    from tokenmill.run.run import Run

SHOWN = 5
"""Number of trained documents of an eval that are named. All are counted."""
_ROWS = 1 << 16
_HASHES = 1 << 20
_PREFIX_BITS = 20
"""Leading bits of a hash that rule out almost all documents that are not searched for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedDocument:
    """A document of an eval that a source of the run has, too."""

    part: str
    """Name of the eval's source."""
    document: int
    """Number of the document in that source."""
    trained: int
    """Number of the same document, or of one with the same tokens, in the source of the run."""
    step: int | None
    """First step that trains on the document. None if no step does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Documents that an eval shares with a source that is trained on."""

    source: str
    by_number: int | None
    """Documents of the eval that the run may read, by number. None if they are in another store."""
    by_content: int | None
    """Documents with the same tokens as one that the run may read. None if unknown."""
    first: tuple[SharedDocument, ...]
    unknown: str | None
    """Why it is not known whether contents differ, and the way out."""

    @property
    def documents(self) -> int:
        """Number of documents that are known to be in both."""
        return max(self.by_number or 0, self.by_content or 0)


def overlaps(run: Run) -> dict[str, tuple[Overlap, ...]]:
    """Return, for each eval of a run, what it has in common with each source that is trained on."""
    plan = run.plan()
    drawn = {name for stage in plan.trained_stages for name in stage.names}
    names = [name for name in run.config.source_names if name in drawn]
    evals = {name: [_Documents.of(part) for part in item.parts] for name, item in run.evals.items()}
    trained = [_trained(run, name, evals) for name in names]
    return {
        name: tuple(_overlap(plan, source, documents) for source in trained) for name, documents in evals.items()
    }


@dataclass(frozen=True, kw_only=True)
class _Documents:
    """The documents that the rows of a part of an eval hold, with their hashes."""

    part: EvalPart
    numbers: Int64Array
    hashes: Uint64Array

    @classmethod
    def of(cls, part: EvalPart) -> _Documents:
        blocks = (np.arange(begin, min(begin + _ROWS, part.taken)) for begin in range(0, part.taken, _ROWS))
        held = [np.unique(part.rows.spans(rows).document) for rows in blocks]
        numbers = np.unique(np.concatenate([NO_DOCUMENTS, *held]))
        return cls(part=part, numbers=numbers, hashes=_hashes_of(part.store, numbers))


def _hashes_of(store: Store, numbers: Int64Array) -> Uint64Array:
    """Return the hashes of documents. Hashes that the store does not keep are computed from tokens."""
    hashes = np.empty(numbers.size, np.uint64)
    shards = np.searchsorted(store.document_begins, numbers, side="right") - 1
    for shard in np.unique(shards).tolist():
        own = np.flatnonzero(shards == shard)
        kept = read_hashes(store, shard)
        if kept is not None:
            hashes[own] = kept[numbers[own] - store.document_begins[shard]]
            continue
        for run in np.split(own, np.flatnonzero(np.diff(numbers[own]) != 1) + 1):
            first, last = int(numbers[run[0]]), int(numbers[run[-1]]) + 1
            for begin in range(first, last, 1 << 16):
                end = min(begin + (1 << 16), last)
                hashes[run[0] + begin - first : run[0] + end - first] = hash_documents(store, begin, end)
    return hashes


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """A source that is trained on."""

    name: str
    store: Store | None
    """None: it is live text."""
    rows: Sequence[StoredRows]
    """The different rows of its stages that are trained on."""
    matches: tuple[Uint64Array, Int64Array] | None
    """The hashes of all evals, ascending, and its first document with each, -1 where none has it.

    None: it keeps no hashes.
    """
    unknown: str | None
    """Why there are no matches, and the way out."""

    def holds(self, documents: Int64Array) -> BoolArray:
        """Return for each document whether a row that the plan may read holds it."""
        held = np.zeros(documents.size, np.bool_)
        for rows in self.rows:
            held[~held] = rows.holds(documents[~held])
        return held


def _trained(run: Run, name: str, evals: Mapping[str, Sequence[_Documents]]) -> _Trained:
    store = run.stores.get(name)
    if store is None:
        unknown = f"{name!r} is live text, of which documents have no hashes; prepare it"
        return _Trained(name=name, store=None, rows=(), matches=None, unknown=unknown)
    stages = [stage for stage in run.plan().trained_stages if name in stage.names]
    rows = {id(rows): rows for rows in (stored_rows(stage)[name] for stage in stages)}
    trained = _Trained(name=name, store=store, rows=tuple(rows.values()), matches=None, unknown=None)
    matches = _find(trained, store, evals)
    if matches is not None:
        return replace(trained, matches=matches)
    way_out = (
        f"run `tokenmill verify --add-hashes {store.path}`" if is_ours(store.path) else "`tokenmill import` it"
    )
    return replace(trained, unknown=f"{store.path} has no hashes of its documents; {way_out}")


def _find(
    trained: _Trained, store: Store, evals: Mapping[str, Sequence[_Documents]]
) -> tuple[Uint64Array, Int64Array] | None:
    """Search the trained documents for those of all evals, and return `matches`."""
    wanted = np.unique(np.concatenate([part.hashes for parts in evals.values() for part in parts]))
    first = np.full(wanted.size, -1, np.int64)
    shift = np.uint64(64 - _PREFIX_BITS)
    prefixes = np.zeros(1 << _PREFIX_BITS, np.bool_)
    prefixes[wanted >> shift] = True
    for shard in range(store.num_shards):
        kept = read_hashes(store, shard)
        if kept is None:
            return None
        for begin in range(0, kept.size, _HASHES):
            block = kept[begin : begin + _HASHES]
            likely = np.flatnonzero(prefixes[block >> shift])
            place = np.minimum(np.searchsorted(wanted, block[likely]), wanted.size - 1)
            documents = likely + begin + int(store.document_begins[shard])
            # A document without a token has no content to recognise.
            same = (wanted[place] == block[likely]) & (block[likely] != EMPTY) & (first[place] < 0)
            same[same] = trained.holds(documents[same])
            first[place[same][::-1]] = documents[same][::-1]
    return wanted, first


def _overlap(plan: Plan, source: _Trained, parts: Sequence[_Documents]) -> Overlap:
    """Compare the documents of an eval with those of a source."""
    store = source.store
    of_this_store = [part for part in parts if store and part.part.store.fingerprint == store.fingerprint]
    drawable = [source.holds(part.numbers) for part in of_this_store]
    shared: list[tuple[str, int, int]] = []
    by_content = None
    if source.matches is not None:
        hashes, first = source.matches
        by_content = 0
        for part in parts:
            trained = first[np.searchsorted(hashes, part.hashes)]
            by_content += int((trained >= 0).sum())
            shared += _shown(part, trained >= 0, trained)
    else:
        for part, is_drawable in zip(of_this_store, drawable, strict=True):
            shared += _shown(part, is_drawable, part.numbers)
    return Overlap(
        source=source.name,
        by_number=sum(int(is_drawable.sum()) for is_drawable in drawable) if drawable else None,
        by_content=by_content,
        first=tuple(_shared(plan, source.name, shared[:SHOWN])),
        unknown=source.unknown,
    )


def _shown(part: _Documents, chosen: BoolArray, trained: Int64Array) -> list[tuple[str, int, int]]:
    some = np.flatnonzero(chosen)[:SHOWN]
    return [(part.part.name, int(part.numbers[n]), int(trained[n])) for n in some]


def _shared(plan: Plan, source: str, documents: Sequence[tuple[str, int, int]]) -> Iterator[SharedDocument]:
    for part, document, trained in documents:
        uses = plan.when(source, trained)
        step = min((use.step for use in uses), default=None)
        yield SharedDocument(part=part, document=document, trained=trained, step=step)
