"""What is known of a run before its first step: what its plan draws, what that costs, what is odd in it.

What follows from the plan alone is counted in `plan/report.py`; here stands what stores and the config must be
asked for. No token is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from tokenmill.config.run import QuarantineConfig, ResolvedStage
from tokenmill.config.schedule import limits
from tokenmill.errors import ConfigError
from tokenmill.packing.records import responses_of
from tokenmill.packing.stored import locate
from tokenmill.plan.plan import Plan
from tokenmill.plan.report import PlanReport, report, step_of, warnings
from tokenmill.plan.stages import CountedRows, Stage
from tokenmill.run.history import lines, read_history
from tokenmill.run.inspect import Audit, audit
from tokenmill.run.run import Run
from tokenmill.store import Store
from tokenmill.store.layout import token_keys
from tokenmill.tables import as_json
from tokenmill.types import MASK_KEYS, RECORD_TYPES, TOKEN_KEYS, Int64Array

PREFETCH = 8
"""Micro-batches that a loader keeps ready, unless it is told otherwise."""
AUDITED_ITEMS = 1 << 16
"""Of each array with a mask, so that a report takes no longer for a larger store."""
_BLOCK = 1 << 20
"""Documents whose lengths are looked at together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """What is quarantined of a source at a step, beside what was before."""

    source: str
    from_step: int
    documents: int | None
    tokens: int | None
    """Over all arrays; both None of live text, which nobody has counted."""
    whole: bool
    """Whether nothing of the source is left."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Bytes and seconds."""

    read_bytes: int
    """Tokens and masks of all steps that are trained on, over all ranks; live text is not among them."""
    read_bytes_exact: bool
    """Otherwise a little more than will be read: rows that are not full are taken to have one token more."""
    read_bytes_a_step: Mapping[str, int]
    """Of each stage, in the mean."""
    index_bytes: int
    """Row indexes in memory."""
    mapped_index_bytes: int
    """Row indexes in files, which are mapped as they are needed."""
    loader_bytes: int
    """Micro-batches of one row that a loader keeps ready, and the one that is used; in the largest stage."""
    compile_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport(PlanReport):
    """What a run will do: all that `tokenmill plan` shows."""

    quarantined: tuple[Quarantined, ...]
    costs: Costs
    warnings: tuple[str, ...]
    """What is legal but seldom meant, a sentence each: where: what is odd; the way out."""
    history: tuple[str, ...]
    """The plans that the run was loaded with before, a line each."""
    supervision: Mapping[str, tuple[Audit, ...]]
    """How much is trained on, of each source with a mask. That of EOS is not asked for, as no token is read."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dict(as_json(self))


def report_run(run: Run) -> RunReport:
    """Compile a run, unless it is, and report what it will do. Reads masks and lengths, but no token."""
    plan = run.plan()
    counted = report(plan, stops=limits(run.config)[1])
    quarantined = tuple(_quarantined(run))
    masked = {name: store for name, store in run.stores.items() if _masks(store)}
    return RunReport(
        **{item.name: getattr(counted, item.name) for item in fields(counted)},
        quarantined=quarantined,
        costs=_costs(run, counted),
        warnings=(
            *warnings(
                plan,
                counted,
                {stage.name: stage.weigh_by for stage in run.config.resolved_stages},
                [edit.source for edit in quarantined if edit.whole],
            ),
            *_vain_quarantines(run),
            *_cut_records(run),
        ),
        history=tuple(lines(read_history(run.folder, run.name))),
        supervision={name: audit(store, max_items=AUDITED_ITEMS) for name, store in masked.items()},
    )


def _masks(store: Store) -> list[str]:
    return [key for key in store.keys if key in MASK_KEYS]


# What a run costs


def _costs(run: Run, counted: PlanReport) -> Costs:
    plan = run.plan()
    read = {stage.name: 0 for stage in counted.stages}
    for share in counted.shares:
        if share.source in run.stores:  # what live text takes to be read is not known
            store = run.stores[share.source]
            # A row of a sequence has one token more than it has inputs.
            tokens = share.held + (0 if store.manifest.kind in RECORD_TYPES else share.rows)
            keys = (token_keys(store.keys)[0], *_masks(store)[:1])
            read[share.stage] += tokens * sum(np.dtype(store.manifest.keys[key]).itemsize for key in keys)
    indexes = [rows.counted for part in plan.stages for rows in part.rows.values()]
    arrays = [item for index in indexes if index is not None for item in index.index_arrays]
    sizes = {id(array): (array.nbytes, mapped) for array, mapped in arrays}
    return Costs(
        read_bytes=sum(read.values()),
        read_bytes_exact=all(_is_stream(index) for index in indexes),
        read_bytes_a_step={s.name: read[s.name] // s.steps if s.steps else 0 for s in counted.stages},
        index_bytes=sum(size for size, mapped in sizes.values() if not mapped),
        mapped_index_bytes=sum(size for size, mapped in sizes.values() if mapped),
        loader_bytes=(PREFETCH + 1) * max(_row_bytes(run, part) for part in plan.stages),
        compile_seconds=run.compile_seconds,
    )


def _is_stream(index: CountedRows | None) -> bool:
    """Say whether rows are cut from one stream of tokens, so that each is full."""
    return index is not None and index.description["packing"] == "concat" and not index.num_rest


def _row_bytes(run: Run, part: Stage) -> int:
    """Return how large the arrays of one row are in a batch."""
    from tokenmill.loader.assemble import record_type, stage_layout
    from tokenmill.loader.batch import RECORD_ARRAYS

    shapes = stage_layout(part, RECORD_ARRAYS.get(record_type(part) or "", run.config.run.arrays), 1)
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())


# Quarantines


def _quarantined(run: Run) -> Iterator[Quarantined]:
    """Yield what each quarantine takes beside those before it, by step; reads lengths of these documents."""
    gone: dict[str, Int64Array] = {}
    for edit in sorted(run.config.quarantine, key=lambda edit: edit.from_step):
        documents = tokens = None
        if edit.source in run.stores:
            store = run.stores[edit.source]
            before = gone.get(edit.source, np.empty(0, np.int64))
            numbers = np.arange(store.num_documents) if edit.whole else edit.numbers(run.folder)
            new = np.setdiff1d(numbers, before, assume_unique=True)
            gone[edit.source] = np.union1d(before, numbers)
            documents, tokens = int(new.size), _count_tokens(store, new)
        yield Quarantined(
            source=edit.source,
            from_step=edit.from_step,
            documents=documents,
            tokens=tokens,
            whole=edit.whole,
            reason=edit.reason,
        )


def _count_tokens(store: Store, documents: Int64Array) -> int:
    """Return how many tokens some documents have, over all arrays of ids."""
    keys = [key for key in store.keys if key in TOKEN_KEYS]
    if documents.size == store.num_documents:
        return sum(int(store.axes[store.axis(key)].values[-1]) for key in keys)
    tokens = 0
    for key in keys:
        axis, items = store.axis(key), documents
        if axis == "responses":
            items, _ = responses_of(store, documents)
        tokens += int(locate(store, items, axis)[2].sum())
    return tokens


_MAX_EDITS = 16
"""Quarantines that are checked for an effect, the latest ones: each takes a plan without it."""
_MAX_DOCUMENTS = 1000
"""Documents of a quarantine that are looked for in the plan without it; one that is seen is enough."""


def _vain_quarantines(run: Run) -> Iterator[str]:
    """Yield those of the latest quarantines without which nothing else would be trained on."""
    for edit in sorted(run.config.quarantine, key=lambda edit: edit.from_step)[-_MAX_EDITS:]:
        others = tuple(other for other in run.config.quarantine if other is not edit)
        try:
            plan = replace(run, config=replace(run.config, quarantine=others)).plan()
        except ConfigError:
            continue  # a run that needs the quarantine would not be one without
        if not _is_seen(plan, run, edit):
            what = "the source" if edit.whole else "what it names"
            yield (
                f"quarantine of {edit.source!r}: {what} would not be seen from step {edit.from_step:,} on anyway; "
                "check from_step and the documents, or leave it out"
            )


def _is_seen(plan: Plan, run: Run, edit: QuarantineConfig) -> bool:
    """Say whether a plan trains on what an edit would quarantine, from its step on."""
    late = [part for part in plan.stages if part.end_step > edit.from_step and part.spec.skipped is None]
    if edit.whole:
        drawing = [part for part in late if part.draws.get(edit.source)]
        return any(step_of(part, edit.source, part.draws[edit.source] - 1) >= edit.from_step for part in drawing)
    documents = edit.numbers(run.folder)
    asked = documents if documents.size <= _MAX_DOCUMENTS else documents[:: documents.size // _MAX_DOCUMENTS]
    trained = {part.index for part in late}
    return any(
        use.step >= edit.from_step and plan.stage(use.step).index in trained
        for document in asked.tolist()
        for use in plan.when(edit.source, document)
    )


# Records with a loss mask that are cut: a text is used to it, an answer without its question is not

_LOST = "what follows a cut is trained without what stood before"
_GUIDE = "docs/guides/packing.md"


def _cut_records(run: Run) -> Iterator[str]:
    """Yield what a user should know of records that are cut, by stage and source. Reads document offsets."""
    for stage in run.config.resolved_stages:
        for name in stage.weights:
            store = run.stores.get(name)  # live text has no mask, and none here
            sentence = _cuts(stage, store, name) if store is not None and "loss_mask" in store.keys else None
            if sentence:
                yield f"stage {stage.name!r}: {sentence}"


def _cuts(stage: ResolvedStage, store: Store, name: str) -> str | None:
    """Say which records a stage cuts so that something is trained behind the cut; None if it cuts none so."""
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
