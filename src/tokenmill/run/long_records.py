"""Records with a mask that are longer than a row: texts are used to cuts, an answer without its question is not.

`tokenmill plan` counts what they lose; a loader says it without counting, as its start must not grow with a store.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tokenmill.config.run import ResolvedStage
from tokenmill.packing.records import responses_of
from tokenmill.packing.stored import StoredRows, count_ones, is_stored, locate
from tokenmill.run.run import Run
from tokenmill.store import Store
from tokenmill.types import MASK_KEYS, RECORD_TYPES, token_arrays

_BLOCK = 1 << 20
"""Documents whose lengths are looked at together."""
_CUT = "what follows a cut is trained without what stood before"
_GUIDE = "docs/guides/packing.md"
_ENDS = {"truncate_end": "end", "truncate_start": "beginning"}


def long_records(run: Run, *, count: bool = True) -> Iterator[str]:
    """Yield what becomes of records that are longer than a row, or cut by one, by stage and source.

    To `count` what is lost, lengths and masks are read; else it takes no time that grows with a store.
    """
    parts = {part.spec.number: part for part in reversed(run.plan().stages)}
    for number, stage in enumerate(run.config.resolved_stages):
        for name, rows in parts[number].rows.items():
            store = run.stores.get(name)
            if store is None or not is_stored(rows) or not any(key in MASK_KEYS for key in store.keys):
                continue  # live text has no mask, and none here
            sentence = _long_records(stage, store, name, None if count else rows)
            if sentence:
                yield f"stage {stage.name!r}: {sentence}"


def _long_records(stage: ResolvedStage, store: Store, name: str, rows: StoredRows | None) -> str | None:
    """Say which records a stage does not keep whole; None if it keeps all. `rows` know some of it uncounted."""
    is_record = store.manifest.kind in RECORD_TYPES
    packing, records = "padded" if is_record else stage.packing, f"{store.num_documents:,} records of {name!r}"
    split = stage.long_documents(packing)
    if packing == "bos_best_fit" and stage.crop == "discard":
        return None
    way_out = f'packing = "best_fit" cuts only longer ones, and none with on_long = "stop" or "drop" ({_GUIDE})'
    if packing == "concat":
        crossing = _count_crossing(store, stage.seq_len) if rows is None else None
        of = f"some of {records}" if crossing is None else f"{crossing:,} of {records}"
        cut = f"{of} are cut where a row of {stage.seq_len:,} tokens ends"
        return None if crossing == 0 else f"{cut}: {_CUT}; {way_out}"
    room = stage.seq_len + (not is_record)  # a row of a sequence has one token more, the last label
    longer, labels = _count_long(store, room, split) if rows is None else (rows.num_long, None)
    long = f"{longer:,} of {records} are longer than a row of {stage.seq_len:,} tokens and"
    if packing == "bos_best_fit":
        return f"{long} are cut, and others where that fills a row: {_CUT}; {way_out}"
    if not longer:
        return None
    lost = "" if labels is None else f", {labels:,} trained tokens with them"
    ways = f'on_long = "drop" leaves them out, "stop" refuses them ({_GUIDE})'
    if split == "drop":
        fate, ways = (
            f"are dropped{lost}",
            f'raise seq_len to keep them, or on_long = "stop" refuses them ({_GUIDE})',
        )
    else:
        fate = f"lose their {_ENDS[split]}{lost}" if split in _ENDS else f"are cut: {_CUT}"
    return f"{long} {fate}; {ways}"


def _count_long(store: Store, room: int, split: str) -> tuple[int, int]:
    """Count the records longer than a row, and the trained tokens of them that no row holds. Reads their masks."""
    longer = labels = 0
    arrays = token_arrays(store.manifest.kind)
    for begin in range(0, store.num_documents, _BLOCK):
        records = np.arange(begin, min(begin + _BLOCK, store.num_documents))
        is_long = np.zeros(records.size, np.bool_)
        runs = []
        for key, mask in arrays.items():
            items, owner = records, np.arange(records.size)
            if store.axis(key) == "responses":
                items, owner = responses_of(store, records)
            shard, first, length = locate(store, items, store.axis(key))
            is_long[owner[length > room]] = True
            if mask in store.keys:
                runs.append((mask, owner, shard, first, length))
        longer += int(is_long.sum())
        for mask, owner, shard, first, length in runs if is_long.any() else ():
            lost = length if split == "drop" else np.maximum(0, length - room) if split in _ENDS else length * 0
            chosen = is_long[owner] & (lost > 0)
            begins = first + (length - lost) * (split == "truncate_end")
            labels += count_ones(store, mask, shard[chosen], begins[chosen], lost[chosen])
    return longer, labels


def _count_crossing(store: Store, seq_len: int) -> int:
    """Count the documents that an edge of a row cuts where `concat` makes rows."""
    crossing = 0
    last_row = (store.num_tokens - 1) // seq_len - 1  # what stands behind it is dropped, not cut
    for begin in range(0, store.num_documents, _BLOCK):
        offsets = store.document_offsets(begin, min(begin + _BLOCK, store.num_documents))
        first, last = offsets[:-1], offsets[1:] - 1
        # A token is the label of the one before it, and is in that one's row.
        crossing += int((first // seq_len < np.minimum((last - 1) // seq_len, last_row)).sum())
    return crossing
