"""Warnings about a run before its first step: settings that are legal but rarely intended, each with a way out.

Warnings that follow from the plan alone are in `plan/report.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tokenmill.config.schedule import QuarantineConfig, ResolvedStage, long_documents
from tokenmill.errors import ConfigError
from tokenmill.packing.concat import ConcatRows
from tokenmill.packing.holes import are_excluded
from tokenmill.packing.records import responses_of
from tokenmill.packing.stored import StoredRows, count_ones, stored_rows
from tokenmill.plan.plan import Plan
from tokenmill.plan.report import step_of
from tokenmill.run.overlap import Overlap
from tokenmill.run.run import Run
from tokenmill.run.specs import compile_run, stage_packing
from tokenmill.store import Store
from tokenmill.store.locate import locate
from tokenmill.types import MASK_KEYS, RECORD_TYPES, Int64Array, token_arrays


def run_warnings(run: Run, evals: Mapping[str, tuple[int, Sequence[Overlap]]]) -> Iterator[str]:
    """Yield the warnings of a run; `evals` are the number of documents and the overlaps of each eval."""
    yield from _overlap_warnings(evals)
    yield from _unended_ramp(run)
    yield from _idle_quarantines(run)
    yield from long_records(run)
    for item in run.evals.values():
        yield from item.long_records()


def _overlap_warnings(evals: Mapping[str, tuple[int, Sequence[Overlap]]]) -> Iterator[str]:
    for name, (num_documents, overlaps) in evals.items():
        for overlap in overlaps:
            where = f"eval {name!r}"
            if overlap.documents:
                shown = [
                    f"{shared.document} is document {shared.trained} there, "
                    + ("which no step comes to" if shared.step is None else f"at step {shared.step:,} first")
                    for shared in overlap.first
                ]
                more = " and so on" if overlap.documents > len(shown) else ""
                yield (
                    f"{where}: {overlap.documents:,} of its {num_documents:,} documents are among those of "
                    f"{overlap.source!r}, which is trained on: {', '.join(shown)}{more}; hold them out by source "
                    "and documents, or quarantine them from step 0"
                )
            if overlap.unknown is not None:
                yield (
                    f"{where}: whether its documents are among those of {overlap.source!r} is not known, as "
                    f"{overlap.unknown}"
                )


def _unended_ramp(run: Run) -> Iterator[str]:
    """Warn of a batch ramp that the run ends too early for."""
    clock, steps = run.config.clock, run.config.steps
    ahead = [stretch for stretch in clock.stretches if stretch.step >= steps]
    if ahead:
        reached = clock.batches(0, steps)[-1][1]
        yield (
            f"global_batch_size: must come to {ahead[-1].batch}, got {reached} at the last step: that would begin "
            f"with step {ahead[-1].step:,} of {steps:,}; shorten over_steps or over_tokens, or lower to"
        )


# Quarantines without an effect

_MAX_EDITS = 16
"""Latest quarantines that are checked for an effect. Each check compiles a plan over the open stores."""
_MAX_DOCUMENTS = 1000
"""Documents of a quarantine that are looked for in the plan without it; one that is seen is enough."""


def _idle_quarantines(run: Run) -> Iterator[str]:
    """Warn of recent quarantines without an effect, because what they name is not trained on anyway."""
    for edit in sorted(run.config.quarantine, key=lambda edit: edit.from_step)[-_MAX_EDITS:]:
        others = tuple(other for other in run.config.quarantine if other is not edit)
        try:
            plan = compile_run(replace(run.config, quarantine=others), run.sources)
        except ConfigError:
            continue  # the run cannot be compiled without this quarantine
        if not _is_seen(plan, run, edit):
            what = "the source" if edit.whole else "what it names"
            yield (
                f"quarantine of {edit.source!r}: {what} would not be seen from step {edit.from_step:,} on anyway; "
                "check from_step and the documents, or leave it out"
            )


def _is_seen(plan: Plan, run: Run, edit: QuarantineConfig) -> bool:
    """Return whether a plan trains on what an edit would quarantine, from its step on."""
    late = [part for part in plan.trained_stages if part.end_step > edit.from_step]
    if edit.whole:
        drawing = [part for part in late if part.draws.get(edit.source)]
        return any(step_of(part, edit.source, part.draws[edit.source] - 1) >= edit.from_step for part in drawing)
    documents = edit.numbers(run.folder)
    some = documents if documents.size <= _MAX_DOCUMENTS else documents[:: documents.size // _MAX_DOCUMENTS]
    trained = {part.index for part in late}
    return any(
        use.step >= edit.from_step and plan.stage(use.step).index in trained
        for document in some.tolist()
        for use in plan.when(edit.source, document)
    )


# Records with a mask that do not fit a row. Plain text may be cut anywhere; an answer that is cut from its question
# is trained on without it.

_CUT = "what follows a cut is trained without what stood before"
_GUIDE = "docs/reference/config.md"
_BEST_FIT = f'packing = "best_fit" cuts only longer ones, and none with on_long = "stop" or "drop" ({_GUIDE})'
CUT_ENDS = {"truncate_end": "end", "truncate_start": "beginning"}
"""Split -> which part of a long record is lost."""


def long_records(run: Run, *, count: bool = True) -> Iterator[str]:
    """Yield a sentence for each stage and source that does not keep all records whole.

    To `count` what is lost, lengths and masks are read; without, the time does not grow with a store.
    """
    parts = {part.spec.number: part for part in reversed(run.plan().stages)}
    for number, stage in enumerate(run.config.resolved_stages):
        packing = stage_packing(run.sources, stage)
        for name, rows in stored_rows(parts[number]).items():
            store = run.stores[name]
            if not any(key in MASK_KEYS for key in store.keys):
                continue  # text without a mask
            full = rows.whole_epoch
            # Records that evals hold out, or that are in quarantine when the stage begins, lose nothing.
            records = f"{store.num_documents - full.excluded.size:,} records of {name!r}"
            if packing == "concat":
                sentence = _cut_anywhere(stage, full, records, count=count)
            elif packing == "bos_best_fit":
                sentence = _cropped(stage, full, records, count=count)
            else:
                sentence = _longer(stage, full, records, packing, count=count)
            if sentence:
                yield f"stage {stage.name!r}: {sentence}"


def _cut_anywhere(stage: ResolvedStage, rows: StoredRows, records: str, *, count: bool) -> str | None:
    """Return a sentence about records that `concat` cuts."""
    some = "some"
    if count:
        assert isinstance(rows, ConcatRows)
        cut = count_crossing(rows)
        if not cut:
            return None
        some = f"{cut:,}"
    return f"{some} of {records} are cut where a row of {stage.seq_len:,} tokens ends: {_CUT}; {_BEST_FIT}"


def _cropped(stage: ResolvedStage, rows: StoredRows, records: str, *, count: bool) -> str | None:
    """Say how many records `bos_best_fit` cuts; where it discards the rest, no answer loses its question."""
    if stage.crop == "discard":
        return None
    longer = rows.num_long
    if count:
        longer, _ = count_long(rows.store, stage.seq_len + 1, "allow", rows.excluded)
    return (
        f"{longer:,} of {records} are longer than a row of {stage.seq_len:,} tokens and are cut, and others where "
        f"that fills a row: {_CUT}; {_BEST_FIT}"
    )


def _longer(stage: ResolvedStage, rows: StoredRows, records: str, packing: str, *, count: bool) -> str | None:
    """Return a sentence about records that are longer than a row of `best_fit` or `padded`, and their loss."""
    split = long_documents(f"stage {stage.name!r}", stage.on_long, packing)
    if count:
        # A row of a sequence has one token more, the last label.
        room = stage.seq_len + (rows.store.manifest.kind not in RECORD_TYPES)
        longer, labels = count_long(rows.store, room, split, rows.excluded)
        lost = f", {labels:,} trained tokens with them"
    else:
        longer, lost = rows.num_long, ""
    if not longer:
        return None
    way_out = f'on_long = "drop" leaves them out, "stop" refuses them ({_GUIDE})'
    if split == "drop":
        fate = f"are dropped{lost}"
        way_out = f'raise seq_len to keep them, or on_long = "stop" refuses them ({_GUIDE})'
    elif split in CUT_ENDS:
        fate = f"lose their {CUT_ENDS[split]}{lost}"
    else:
        fate = f"are cut: {_CUT}"
    return f"{longer:,} of {records} are longer than a row of {stage.seq_len:,} tokens and {fate}; {way_out}"


_BLOCK = 1 << 20
"""Documents whose lengths are looked at together."""


def count_long(store: Store, room: int, split: str, excluded: Int64Array) -> tuple[int, int]:
    """Count the records longer than a row, and the trained tokens of them that no row holds. Reads their masks.

    Excluded records do not count.
    """
    longer = labels = 0
    arrays = token_arrays(store.manifest.kind)
    for begin in range(0, store.num_documents, _BLOCK):
        records = np.arange(begin, min(begin + _BLOCK, store.num_documents))
        records = records[~are_excluded(excluded, records)]
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
            lost = length if split == "drop" else np.maximum(0, length - room) if split in CUT_ENDS else length * 0
            chosen = is_long[owner] & (lost > 0)
            begins = first + (length - lost) * (split == "truncate_end")
            labels += count_ones(store, mask, shard[chosen], begins[chosen], lost[chosen])
    return longer, labels


def count_crossing(rows: ConcatRows) -> int:
    """Count the documents that the end of a row cuts where `concat` makes rows."""
    crossing = 0
    store, seq_len, last_row = rows.store, rows.seq_len, rows.num_rows - 1  # the rest after it is dropped, not cut
    for begin in range(0, store.num_documents, _BLOCK):
        offsets = rows.holes.closed(store.document_offsets(begin, min(begin + _BLOCK, store.num_documents)))
        first, last = offsets[:-1], offsets[1:] - 1
        # A token is the label of the one before it, and is in that one's row.
        crossing += int((first // seq_len < np.minimum((last - 1) // seq_len, last_row)).sum())
    return crossing
