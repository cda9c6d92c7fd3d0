"""Records with a mask that do not fit a row: how many there are, and what becomes of them.

Plain text may be cut anywhere. An answer that is cut from its question is trained on without it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tokenmill.config.schedule import ResolvedStage, long_documents
from tokenmill.loader.assemble import is_stored
from tokenmill.packing.records import responses_of
from tokenmill.packing.rows import StoredRows, count_ones, locate
from tokenmill.run.run import Run
from tokenmill.store import Store
from tokenmill.types import MASK_KEYS, RECORD_TYPES, token_arrays

_BLOCK = 1 << 20
"""Documents whose lengths are looked at together."""
_CUT = "what follows a cut is trained without what stood before"
_GUIDE = "docs/guides/packing.md"
_BEST_FIT = f'packing = "best_fit" cuts only longer ones, and none with on_long = "stop" or "drop" ({_GUIDE})'
_ENDS = {"truncate_end": "end", "truncate_start": "beginning"}
"""Split -> which part of a long record is lost."""


def long_records(run: Run, *, count: bool = True) -> Iterator[str]:
    """Yield a sentence for each stage and source that does not keep all records whole.

    To `count` what is lost, lengths and masks are read; without, the time does not grow with a store.
    """
    parts = {part.spec.number: part for part in reversed(run.plan().stages)}
    for number, stage in enumerate(run.config.resolved_stages):
        for name, rows in parts[number].rows.items():
            store = run.stores.get(name)
            if store is None or not is_stored(rows) or not any(key in MASK_KEYS for key in store.keys):
                continue  # text without a mask, live or stored
            packing = "padded" if store.manifest.kind in RECORD_TYPES else stage.packing
            records = f"{store.num_documents:,} records of {name!r}"
            if packing == "concat":
                sentence = _cut_anywhere(stage, store, records, count=count)
            elif packing == "bos_best_fit":
                sentence = _cropped(stage, store, records, rows, count=count)
            else:
                sentence = _longer(stage, store, records, rows, packing, count=count)
            if sentence:
                yield f"stage {stage.name!r}: {sentence}"


def _cut_anywhere(stage: ResolvedStage, store: Store, records: str, *, count: bool) -> str | None:
    """Say how many records `concat` cuts."""
    cut = _count_crossing(store, stage.seq_len) if count else None
    if cut == 0:
        return None
    some = "some" if cut is None else f"{cut:,}"
    return f"{some} of {records} are cut where a row of {stage.seq_len:,} tokens ends: {_CUT}; {_BEST_FIT}"


def _cropped(stage: ResolvedStage, store: Store, records: str, rows: StoredRows, *, count: bool) -> str | None:
    """Say how many records `bos_best_fit` cuts; where it discards the rest, no answer loses its question."""
    if stage.crop == "discard":
        return None
    longer = _count_long(store, stage.seq_len + 1, "allow")[0] if count else rows.num_long
    return (
        f"{longer:,} of {records} are longer than a row of {stage.seq_len:,} tokens and are cut, and others where "
        f"that fills a row: {_CUT}; {_BEST_FIT}"
    )


def _longer(
    stage: ResolvedStage, store: Store, records: str, rows: StoredRows, packing: str, *, count: bool
) -> str | None:
    """Say how many records are longer than a row of `best_fit` or `padded`, and what they lose."""
    split = long_documents(stage.on_long, stage.split, packing)
    if count:
        # A row of a sequence has one token more, the last label.
        room = stage.seq_len + (store.manifest.kind not in RECORD_TYPES)
        longer, labels = _count_long(store, room, split)
        lost = f", {labels:,} trained tokens with them"
    else:
        longer, lost = rows.num_long, ""
    if not longer:
        return None
    way_out = f'on_long = "drop" leaves them out, "stop" refuses them ({_GUIDE})'
    if split == "drop":
        fate = f"are dropped{lost}"
        way_out = f'raise seq_len to keep them, or on_long = "stop" refuses them ({_GUIDE})'
    elif split in _ENDS:
        fate = f"lose their {_ENDS[split]}{lost}"
    else:
        fate = f"are cut: {_CUT}"
    return f"{longer:,} of {records} are longer than a row of {stage.seq_len:,} tokens and {fate}; {way_out}"


def _count_long(store: Store, room: int, split: str) -> tuple[int, int]:
    """Count the records longer than a row, and the trained tokens of them that no row holds. Reads their masks."""
    longer = labels = 0
    arrays = token_arrays(store.manifest.kind)
    for begin in range(0, store.num_documents, _BLOCK):
        records = np.arange(begin, min(begin + _BLOCK, store.num_documents))
        is_long = np.zeros(records.size, np.bool_)
        masked = []
        for key, mask in arrays.items():
            items, owner = records, np.arange(records.size)
            if store.axis(key) == "responses":
                items, owner = responses_of(store, records)
            shard, first, length = locate(store, items, store.axis(key))
            is_long[owner[length > room]] = True
            if mask in store.keys:
                masked.append((mask, owner, shard, first, length))
        longer += int(is_long.sum())
        for mask, owner, shard, first, length in masked if is_long.any() else ():
            lost = length if split == "drop" else np.maximum(0, length - room) if split in _ENDS else length * 0
            chosen = is_long[owner] & (lost > 0)
            begins = first + (length - lost) * (split == "truncate_end")
            labels += count_ones(store, mask, shard[chosen], begins[chosen], lost[chosen])
    return longer, labels


def _count_crossing(store: Store, seq_len: int) -> int:
    """Count the documents that the end of a row cuts where `concat` makes rows."""
    crossing = 0
    last_row = (store.num_tokens - 1) // seq_len - 1  # what stands behind it is dropped, not cut
    for begin in range(0, store.num_documents, _BLOCK):
        offsets = store.document_offsets(begin, min(begin + _BLOCK, store.num_documents))
        first, last = offsets[:-1], offsets[1:] - 1
        # A token is the label of the one before it, and is in that one's row.
        crossing += int((first // seq_len < np.minimum((last - 1) // seq_len, last_row)).sum())
    return crossing
