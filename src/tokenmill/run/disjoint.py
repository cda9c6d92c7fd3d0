"""Whether documents of an eval are trained on: by their numbers within a store, by their content across stores.

Content goes by the 8-byte hashes that stores keep of their documents. Those of the evals are held in memory, those
of the training stores are read once, in blocks, so that it takes no memory for each document that is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.config.evals import held_whole
from tokenmill.packing.rows import FollowingRows
from tokenmill.packing.stored import are_excluded
from tokenmill.store.layout import is_ours
from tokenmill.store.notes import EMPTY, hash_documents, read_hashes
from tokenmill.types import BoolArray, Int64Array, Uint64Array

if TYPE_CHECKING:
    from tokenmill.plan import Plan, Rows
    from tokenmill.run.evals import EvalPart
    from tokenmill.run.run import Run
    from tokenmill.store import Store

SHOWN = 5
"""Documents of an eval that are trained on, which are named; all are counted."""
_BLOCK = 1 << 20
_PREFIX_BITS = 20
"""Of a hash, by which almost all that are not looked for are passed over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedDocument:
    """A document of an eval that a source of the run has, too."""

    part: str
    """Name of the eval's source."""
    document: int
    """Its number there."""
    trained: int
    """Its number, or that of a document with the same tokens, in the source of the run."""
    step: int | None
    """First step that trains on it; None: the run does not come to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """What an eval has in common with a source that is trained on."""

    source: str
    by_number: int | None
    """Documents of the eval that the run may draw, by their numbers; None: they stand in another store."""
    by_content: int | None
    """Documents whose tokens are those of a document that the run may draw; None: not known."""
    first: tuple[SharedDocument, ...]
    unknown: str | None
    """Why it is not known whether contents differ, and the way out."""

    @property
    def documents(self) -> int:
        """How many are known to be in both."""
        return max(self.by_number or 0, self.by_content or 0)


def overlaps(run: Run) -> dict[str, tuple[Overlap, ...]]:
    """Return, for each eval of a run, what it has in common with each source that is trained on."""
    plan = run.plan()
    drawn = {name for stage in plan.stages if stage.spec.skipped is None for name in stage.names}
    names = [name for name in run.config.source_names if name in drawn - held_whole(run.config.evals)]
    items = {name: [_Documents.of(part) for part in item.parts] for name, item in run.evals.items()}
    found: dict[str, list[Overlap]] = {name: [] for name in items}
    for source in names:
        store = run.stores.get(source)
        matches = None if store is None else _find(store, items, _never_drawn(plan, source))
        unknown = None
        if store is None:
            unknown = f"{source!r} is live text, of which documents have no hashes; prepare it"
        elif matches is None:
            ours = is_ours(store.path)
            way_out = f"run `tokenmill verify --hashes {store.path}`" if ours else "`tokenmill import` it"
            unknown = f"{store.path} has no hashes of its documents; {way_out}"
        for name, documents in items.items():
            found[name].append(_overlap(plan, source, store, documents, matches, unknown))
    return {name: tuple(each) for name, each in found.items()}


@dataclass(frozen=True, kw_only=True)
class _Documents:
    """The documents of a part of an eval, with their hashes."""

    part: EvalPart
    numbers: Int64Array
    hashes: Uint64Array

    @classmethod
    def of(cls, part: EvalPart) -> _Documents:
        numbers = np.arange(part.store.num_documents) if part.documents is None else part.documents
        return cls(part=part, numbers=numbers, hashes=_hashes_of(part.store, numbers))


def _hashes_of(store: Store, numbers: Int64Array) -> Uint64Array:
    """Return the hashes of some documents; those that the store does not keep are made of their tokens."""
    found = np.empty(numbers.size, np.uint64)
    shards = np.searchsorted(store.document_begins, numbers, side="right") - 1
    for shard in np.unique(shards).tolist():
        own = np.flatnonzero(shards == shard)
        kept = read_hashes(store, shard)
        if kept is not None:
            found[own] = kept[numbers[own] - store.document_begins[shard]]
            continue
        for run in np.split(own, np.flatnonzero(np.diff(numbers[own]) != 1) + 1):
            first, last = int(numbers[run[0]]), int(numbers[run[-1]]) + 1
            for begin in range(first, last, 1 << 16):
                end = min(begin + (1 << 16), last)
                found[run[0] + begin - first : run[0] + end - first] = hash_documents(store, begin, end)
    return found


def _never_drawn(plan: Plan, source: str) -> Int64Array:
    """Return the documents of a source that no step draws, as every stage leaves them out."""
    left_out = [
        _excluded(stage.rows[source])
        for stage in plan.stages
        if source in stage.names and stage.spec.skipped is None
    ]
    return reduce(np.intersect1d, left_out)


def _excluded(rows: Rows) -> Int64Array:
    full = rows.full if isinstance(rows, FollowingRows) else rows
    excluded: Int64Array | None = getattr(full, "excluded", None)
    return np.empty(0, np.int64) if excluded is None else excluded


@dataclass(frozen=True, kw_only=True)
class _Matches:
    """Hashes of the evals, and where a training store has them."""

    hashes: Uint64Array
    """Ascending, each once."""
    first: Int64Array
    """First document of the training store with that hash; -1: none."""

    def of(self, hashes: Uint64Array) -> Int64Array:
        """Return the first document of the training store that has each of the given hashes; -1: none has."""
        return self.first[np.searchsorted(self.hashes, hashes)]


def _find(store: Store, items: Mapping[str, Sequence[_Documents]], never: Int64Array) -> _Matches | None:
    """Look for the documents of all evals among those of a store but `never`; None where it keeps no hashes."""
    wanted = np.unique(np.concatenate([part.hashes for parts in items.values() for part in parts]))
    first = np.full(wanted.size, -1, np.int64)
    shift = np.uint64(64 - _PREFIX_BITS)
    prefixes = np.zeros(1 << _PREFIX_BITS, np.bool_)
    prefixes[wanted >> shift] = True
    for shard in range(store.num_shards):
        kept = read_hashes(store, shard)
        if kept is None:
            return None
        for begin in range(0, kept.size, _BLOCK):
            block = kept[begin : begin + _BLOCK]
            likely = np.flatnonzero(prefixes[block >> shift])
            place = np.minimum(np.searchsorted(wanted, block[likely]), wanted.size - 1)
            documents = likely + begin + int(store.document_begins[shard])
            # A document without a token is no content that could be known.
            same = (wanted[place] == block[likely]) & (block[likely] != EMPTY) & (first[place] < 0)
            same &= ~are_excluded(never, documents)
            first[place[same][::-1]] = documents[same][::-1]
    return _Matches(hashes=wanted, first=first)


def _overlap(
    plan: Plan,
    source: str,
    store: Store | None,
    parts: Sequence[_Documents],
    matches: _Matches | None,
    unknown: str | None,
) -> Overlap:
    never = np.empty(0, np.int64) if store is None else _never_drawn(plan, source)
    own = [part for part in parts if store is not None and part.part.store.fingerprint == store.fingerprint]
    by_number = sum(int((~are_excluded(never, part.numbers)).sum()) for part in own) if own else None
    shared: list[tuple[str, int, int]] = []
    by_content = None
    if matches is not None:
        by_content = 0
        for part in parts:
            trained = matches.of(part.hashes)
            by_content += int((trained >= 0).sum())
            shared += _shown(part, trained >= 0, trained)
    else:
        for part in own:
            shared += _shown(part, ~are_excluded(never, part.numbers), part.numbers)
    return Overlap(
        source=source,
        by_number=by_number,
        by_content=by_content,
        first=tuple(_shared(plan, source, shared[:SHOWN])),
        unknown=unknown,
    )


def _shown(part: _Documents, chosen: BoolArray, trained: Int64Array) -> list[tuple[str, int, int]]:
    some = np.flatnonzero(chosen)[:SHOWN]
    return [(part.part.name, int(part.numbers[n]), int(trained[n])) for n in some]


def _shared(plan: Plan, source: str, documents: Sequence[tuple[str, int, int]]) -> Iterator[SharedDocument]:
    for part, document, trained in documents:
        uses = plan.when(source, trained)
        step = min((use.step for use in uses), default=None)
        yield SharedDocument(part=part, document=document, trained=trained, step=step)
