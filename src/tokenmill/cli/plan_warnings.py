"""What a user should know of a run that its stores and its config must be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import ConfigError
from tokenmill.plan.report_count import step_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.config import StageConfig
    from tokenmill.edits import QuarantineConfig
    from tokenmill.plan import Plan, Stage
    from tokenmill.plan.report import PlanReport, Quarantined
    from tokenmill.run import Run
    from tokenmill.store import Store

_BLOCK = 1 << 20
"""Documents whose lengths are looked at together."""
_ASKED = 1000
"""Documents of a quarantine that are looked for in the plan without it; one that is found is enough."""
_EDITS = 16
"""Quarantines that are looked at, the latest ones: each takes a plan without it."""
_LOST = "what follows a cut is trained without what stood before"
_GUIDE = "docs/guides/packing.md"


def all_warnings(run: Run, facts: PlanReport) -> list[str]:
    """Return everything that is odd in a run; an empty list if nothing is."""
    from tokenmill.plan.warnings import warnings

    weigh_by = {stage.name: stage.weigh_by or "rows" for stage in run.config.resolved_stages()}
    return [*warnings(run.plan(), facts, weigh_by), *_vain_quarantines(run), *cut_records(run)]


def cut_records(run: Run) -> Iterator[str]:
    """Yield what a user should know of records with a loss mask that are cut, by stage and source.

    Reads document offsets, a part at a time. A text is used to being cut; an answer without its question is not.
    """
    for stage in run.config.resolved_stages():
        for name in stage.weights or ():
            store = run.stores.get(name)  # live text has no mask, and none here
            told = _cuts(stage, store, name) if store is not None and "loss_mask" in store.keys else None
            if told:
                yield f"stage {stage.name!r}: {told}"


def _cuts(stage: StageConfig, store: Store, name: str) -> str | None:
    """Say which records a stage cuts so that something is trained behind the cut; None if it cuts none so."""
    assert stage.seq_len is not None  # resolved_stages() has filled it in
    longer, crossing = _count_cut(store, stage.seq_len)
    total = f"{store.num_documents:,} records of {name!r}"
    if stage.packing == "best_fit" and stage.split == "allow" and longer:
        return (
            f"{longer:,} of {total} are longer than a row of {stage.seq_len:,} tokens and are cut: {_LOST}; "
            f'split = "forbid" refuses them, "truncate_end" cuts them off ({_GUIDE})'
        )
    way_out = f'packing = "best_fit" cuts only longer ones, and none with split = "forbid" ({_GUIDE})'
    if stage.packing == "concat" and crossing:
        return f"{crossing:,} of {total} are cut where a row of {stage.seq_len:,} tokens ends: {_LOST}; {way_out}"
    if stage.packing == "bos_best_fit" and stage.crop == "return":
        return (
            f"{longer:,} of {total} are longer than a row of {stage.seq_len:,} tokens and are cut, and others "
            f"where that fills a row: {_LOST}; {way_out}"
        )
    return None


def _count_cut(store: Store, seq_len: int) -> tuple[int, int]:
    """Count the documents longer than a row, and those that an edge of a row cuts where `concat` makes rows."""
    longer = crossing = 0
    last_row = (store.num_tokens - 1) // seq_len - 1  # what stands behind it is dropped, not cut
    for begin in range(0, store.num_documents, _BLOCK):
        offsets = store.document_offsets(begin, min(begin + _BLOCK, store.num_documents))
        first, last = offsets[:-1], offsets[1:] - 1
        longer += int((np.diff(offsets) > seq_len + 1).sum())  # a row has one token more, the last label
        # A token is the label of the one before it, and is in that one's row.
        crossing += int((first // seq_len < np.minimum((last - 1) // seq_len, last_row)).sum())
    return longer, crossing


def put_aside(run: Run) -> list[Quarantined]:
    """Return what each quarantine puts aside beside those before it, by step; reads lengths of these documents."""
    from tokenmill.plan.report import Quarantined

    gone: dict[str, npt.NDArray[np.int64]] = {}
    found = []
    for edit in sorted(run.config.quarantine, key=lambda edit: edit.from_step):
        if edit.source not in run.stores:
            found.append(
                Quarantined(
                    source=edit.source,
                    from_step=edit.from_step,
                    documents=None,
                    tokens=None,
                    whole=True,
                    reason=edit.reason,
                )
            )
            continue
        store = run.stores[edit.source]
        before = gone.get(edit.source, np.empty(0, np.int64))
        numbers = np.arange(store.num_documents) if edit.whole else edit.numbers(run.folder)
        new = np.setdiff1d(numbers, before, assume_unique=True)
        gone[edit.source] = np.union1d(before, numbers)
        found.append(
            Quarantined(
                source=edit.source,
                from_step=edit.from_step,
                documents=int(new.size),
                tokens=_tokens(store, new),
                whole=edit.whole,
                reason=edit.reason,
            )
        )
    return found


def _tokens(store: Store, documents: npt.NDArray[np.int64]) -> int:
    """Return how many tokens some documents have, over all arrays of ids."""
    from tokenmill.store.locate import locate
    from tokenmill.types import TOKEN_KEYS

    if documents.size == store.num_documents:
        return sum(int(store.axes[store.axis(key)].values[-1]) for key in store.keys if key in TOKEN_KEYS)
    found = 0
    for key in (key for key in store.keys if key in TOKEN_KEYS):
        axis, items = store.axis(key), documents
        if axis == "responses":
            shard, first, number = locate(store, documents, "groups")
            begins = store.axes["groups"].values[shard] + first
            inside = np.arange(int(number.sum())) - np.repeat(np.cumsum(number) - number, number)
            items = np.repeat(begins, number) + inside
        found += int(locate(store, items, axis)[2].sum())
    return found


def _vain_quarantines(run: Run) -> Iterator[str]:
    """Yield those of the latest quarantines without which nothing else would be trained on."""
    for edit in sorted(run.config.quarantine, key=lambda edit: edit.from_step)[-_EDITS:]:
        others = tuple(other for other in run.config.quarantine if other is not edit)
        try:
            plan = replace(run, config=replace(run.config, quarantine=others)).plan()
        except ConfigError:
            continue  # a run that needs the quarantine would not be one without
        if not _is_seen(plan, run, edit):
            what = "the source" if edit.whole else "what it puts aside"
            yield (
                f"quarantine of {edit.source!r}: {what} would not be seen from step {edit.from_step:,} on anyway; "
                "check from_step and the documents, or leave it out"
            )


def _is_seen(plan: Plan, run: Run, edit: QuarantineConfig) -> bool:
    """Say whether a plan trains on what an edit would put aside, from its step on."""
    late = [part for part in plan.stages if part.end_step > edit.from_step and part.spec.skipped is None]
    if edit.whole:
        return any(_last_draw(part, edit.source) >= edit.from_step for part in late)
    documents = edit.numbers(run.folder)
    asked = documents if documents.size <= _ASKED else documents[:: documents.size // _ASKED]
    trained = {part.index for part in late}
    return any(
        use.step >= edit.from_step and plan.stage(use.step).index in trained
        for document in asked.tolist()
        for use in plan.when(edit.source, document)
    )


def _last_draw(part: Stage, source: str) -> int:
    """Return the last step in which a part draws from a source, or -1."""
    drawn = part.draws.get(source, 0)
    return step_of(part, source, drawn - 1) if drawn else -1
