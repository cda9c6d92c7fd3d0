"""What is known of a run before its first step: what its plan draws, what that costs, what is odd in it.

`plan/report.py` counts what follows from the plan alone; this file adds what the stores and the config know. No
token is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import numpy as np

from tokenmill.config.run import ATTENTION
from tokenmill.config.schedule import QuarantineConfig, ResolvedStage, limits, long_documents
from tokenmill.errors import ConfigError
from tokenmill.hooks import attached
from tokenmill.inspect.audit import Audit, audit
from tokenmill.loader import LoaderOptions
from tokenmill.loader.balance import balance, group_edges, step_costs, waiting
from tokenmill.loader.buffers import RECORD_ARRAYS, record_type, stage_shapes
from tokenmill.packing.concat import ConcatRows
from tokenmill.packing.holes import QUARANTINED, are_excluded
from tokenmill.packing.records import responses_of
from tokenmill.packing.stored import StoredRows, count_ones, stored_rows
from tokenmill.plan.plan import Plan
from tokenmill.plan.report import PlanReport, StageChange, report, step_of, warnings
from tokenmill.plan.rows import Rows
from tokenmill.plan.stages import Stage
from tokenmill.run.evals import Overlap, overlaps
from tokenmill.run.history import read_history
from tokenmill.run.run import Run
from tokenmill.run.specs import EpochCount, compile_run, stage_packing
from tokenmill.store import Store
from tokenmill.store.layout import token_keys
from tokenmill.store.locate import locate
from tokenmill.tables import as_json
from tokenmill.types import (
    MASK_KEYS,
    NO_DOCUMENTS,
    RECORD_TYPES,
    Fates,
    Int64Array,
    token_arrays,
)

AUDITED_ITEMS = 1 << 16
"""Items that are audited per array with a mask, so that a larger store takes no longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """Documents that a quarantine adds, at its step, to earlier quarantines of the source."""

    source: str
    from_step: int
    documents: int | None
    tokens: int | None
    """Tokens over all arrays. Both counts are None for live text."""
    whole: bool
    """Whether the whole source is quarantined."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalFacts:
    """Summary of one eval, and the documents that it shares with trained sources."""

    name: str
    sources: tuple[str, ...]
    documents: int
    """Number of documents that it names."""
    held_out: int
    """Number of documents that it takes from a source of the run."""
    rows: int
    seq_len: int
    tokens: int
    """Input slots of the rows that hold a token."""
    labels: int
    every: int | None
    """Number of steps between evaluations."""
    every_tokens: int | None
    """Number of input slots between evaluations, instead of steps."""
    overlaps: tuple[Overlap, ...]
    """Shared documents, for each source that is trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Bytes and seconds."""

    read_bytes: int
    """Tokens and masks of all steps that are trained on, over all ranks; live text is not among them."""
    read_bytes_exact: bool
    """Whether `read_bytes` is exact. Otherwise it is slightly too high, because partly filled rows count one token
    more."""
    read_bytes_a_step: Mapping[str, int]
    """Mean bytes per step, by stage."""
    index_bytes: int
    """Row indexes in memory."""
    mapped_index_bytes: int
    """Row indexes in files, which are mapped as they are needed."""
    loader_bytes: int
    """Micro-batches of one row that a loader keeps ready, and the one that is used; in the largest stage."""
    compile_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Imbalance:
    """Time of a step if ranks wait for each other at every micro-batch of one row."""

    stage: str
    ranks: int
    in_order: float
    """Time with rows in order, relative to equal work on all ranks."""
    dealt: float
    """Time with rows assigned by cost."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunReport(PlanReport):
    """Report of a run before its first step: everything that `tokenmill plan` shows."""

    horizon: int
    """Number of next tokens that are labels of an input."""
    segment_multiple: int
    """To a multiple of how many columns every segment is filled up."""
    fim: Mapping[str, float]
    """Source -> share of its documents that were cut to learn to fill in the middle; those without are left out."""
    imbalance: tuple[Imbalance, ...]
    """Waiting time for several numbers of ranks, by stage, sampled over steps. Empty unless rows are assigned by
    cost."""
    quarantined: tuple[Quarantined, ...]
    epochs: EpochCount | None
    """Rows and steps of the epochs, if the config sets its length in epochs."""
    evals: tuple[EvalFacts, ...]
    costs: Costs
    warnings: tuple[str, ...]
    """Sentences about settings that are legal but rarely intended, each with a way out."""
    history: tuple[str, ...]
    """The plans that the run was loaded with before, a line each."""
    supervision: Mapping[str, tuple[Audit, ...]]
    """Share of trained tokens of each source with a mask. EOS is not checked, because no token is read."""

    def _repr_html_(self) -> str | None:
        """Show all tables in a notebook."""
        html: str | None = attached("report_html")(self)
        return html

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dict(as_json(self))


def report_run(run: Run) -> RunReport:
    """Compile a run, unless it is, and report what it will do. Reads masks and lengths, but no token."""
    plan = run.plan()
    counted = _split_held_out(run, report(plan, stops=limits(run.config)[1]))
    quarantined = tuple(_quarantined(run))
    changes = sorted((*counted.changes, *_quarantine_steps(plan, quarantined)), key=lambda change: change.step)
    counted = replace(counted, changes=tuple(changes))
    evals = tuple(_eval_facts(run))
    masked = {name: store for name, store in run.stores.items() if _masks(store)}
    return RunReport(
        **{item.name: getattr(counted, item.name) for item in fields(counted)},
        horizon=run.config.run.horizon,
        segment_multiple=run.config.run.segment_multiple,
        fim=_fim(run),
        imbalance=tuple(_imbalance(run)),
        quarantined=quarantined,
        epochs=run.epochs,
        evals=evals,
        costs=_costs(run, counted),
        warnings=(
            *warnings(
                plan,
                counted,
                {stage.name: stage.weigh_by for stage in run.config.resolved_stages},
                [*(edit.source for edit in quarantined if edit.whole), *run.config.held_whole],
            ),
            *_overlap_warnings(evals),
            *_unended_ramp(run),
            *_idle_quarantines(run),
            *long_records(run),
            *(sentence for item in run.evals.values() for sentence in item.long_records()),
        ),
        history=tuple(map(str, read_history(run.folder, run.name))),
        supervision={name: audit(store, max_items=AUDITED_ITEMS) for name, store in masked.items()},
    )


def _masks(store: Store) -> list[str]:
    return [key for key in store.keys if key in MASK_KEYS]


def _fim(run: Run) -> dict[str, float]:
    """Return the sources whose documents were cut to learn to fill in the middle."""
    cut = {name: store.manifest.recipe.get("recipe", {}).get("fim") for name, store in run.stores.items()}
    cut |= {source.name: source.fim for source in run.config.sources if source.live}
    return {name: float(fim["rate"]) for name, fim in cut.items() if fim}


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
    indexes = [rows for part in plan.stages for rows in part.rows.values()]
    arrays = [item for index in indexes for item in index.index_arrays]
    sizes = {id(array): (array.nbytes, mapped) for array, mapped in arrays}
    return Costs(
        read_bytes=sum(read.values()),
        read_bytes_exact=all(_is_stream(index) for index in indexes),
        read_bytes_a_step={s.name: read[s.name] // s.steps if s.steps else 0 for s in counted.stages},
        index_bytes=sum(size for size, mapped in sizes.values() if not mapped),
        mapped_index_bytes=sum(size for size, mapped in sizes.values() if mapped),
        loader_bytes=(LoaderOptions().prefetch + 1) * max(_row_bytes(run, part) for part in plan.stages),
        compile_seconds=run.compile_seconds,
    )


def _is_stream(index: Rows) -> bool:
    """Return whether rows are cut from one stream of tokens, so that each is full."""
    return index.has_epochs and index.description["packing"] == "concat" and not index.num_rest


def _row_bytes(run: Run, part: Stage) -> int:
    """Return how large the arrays of one row are in a batch."""
    shapes = stage_shapes(
        part, RECORD_ARRAYS.get(record_type(part) or "", run.config.run.arrays), 1, run.config.run.horizon
    )
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())


# What ranks wait for

_RANKS = (2, 8, 32, 128, 512)
_SOME_STEPS = 8


def _imbalance(run: Run) -> Iterator[Imbalance]:
    """Yield the waiting times in order and by cost. Reads document lengths of some steps."""
    price = run.config.run.balance
    if price is None:
        return
    price = ATTENTION if isinstance(price, str) else price
    for _, parts in groupby(run.plan().trained_stages, key=lambda part: part.spec.number):
        part = max(parts, key=lambda part: part.num_steps)
        batch, seq_len = part.spec.global_batch_size, part.spec.seq_len
        if not all(rows.has_epochs for rows in part.rows.values()):
            continue
        steps = np.unique(np.linspace(part.spec.start_step, part.end_step - 1, _SOME_STEPS).astype(int))
        squares = np.stack([step_costs(run.plan(), step) for step in steps.tolist()])
        costs = float(price.get("linear", 0)) * seq_len + float(price["quadratic"]) * squares.astype(np.float64)
        for ranks in _RANKS:
            if batch % ranks == 0:
                dealt = np.take_along_axis(costs, balance(squares, group_edges(part, ranks)), axis=1)
                yield Imbalance(
                    stage=part.spec.name,
                    ranks=ranks,
                    in_order=waiting(costs.reshape(steps.size, ranks, -1)),
                    dealt=waiting(dealt.reshape(steps.size, ranks, -1)),
                )


# Evals

HELD_OUT = "held out"
"""The reason for which tokens of documents that evals take are dropped."""


def _split_held_out(run: Run, counted: PlanReport) -> PlanReport:
    """Return a report that counts tokens of evals apart from those in quarantine."""
    held_out = {
        name: _count_tokens(run.stores[name], numbers) for name, numbers in run.config.held_out(run.folder).items()
    }

    def split(name: str, dropped: Mapping[str, int]) -> Mapping[str, int]:
        tokens = min(held_out.get(name, 0), dropped.get(QUARANTINED, 0))
        if not tokens:
            return dropped
        reasons = {**dropped, QUARANTINED: dropped[QUARANTINED] - tokens, HELD_OUT: tokens}
        return {reason: number for reason, number in reasons.items() if number}

    def split_fates(name: str, fates: Fates | None) -> Fates | None:
        return fates and replace(fates, dropped=split(name, fates.dropped))

    return replace(
        counted,
        shares=tuple(replace(share, dropped=split(share.source, share.dropped)) for share in counted.shares),
        sources=tuple(replace(facts, fates=split_fates(facts.name, facts.fates)) for facts in counted.sources),
    )


def _eval_facts(run: Run) -> Iterator[EvalFacts]:
    """Yield what each eval is, and what of it is trained on; reads hashes of documents, and masks."""
    shared = overlaps(run) if run.evals else {}
    for name, item in run.evals.items():
        yield EvalFacts(
            name=name,
            sources=tuple(part.name for part in item.parts),
            documents=sum(part.num_documents for part in item.parts),
            held_out=sum(part.num_documents for part in item.parts if part.config.source is not None),
            rows=item.num_rows,
            seq_len=item.seq_len,
            tokens=item.held.tokens,
            labels=item.held.trained,
            every=item.every,
            every_tokens=item.every_tokens,
            overlaps=shared[name],
        )


def _overlap_warnings(evals: Sequence[EvalFacts]) -> Iterator[str]:
    for item in evals:
        for overlap in item.overlaps:
            where = f"eval {item.name!r}"
            if overlap.documents:
                shown = [
                    f"{shared.document} is document {shared.trained} there, "
                    + ("which no step comes to" if shared.step is None else f"at step {shared.step:,} first")
                    for shared in overlap.first
                ]
                more = " and so on" if overlap.documents > len(shown) else ""
                yield (
                    f"{where}: {overlap.documents:,} of its {item.documents:,} documents are among those of "
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


# Records with a mask that do not fit a row

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


# Quarantines


def _quarantined(run: Run) -> Iterator[Quarantined]:
    """Yield what each quarantine adds to those before it, by step; reads lengths of these documents."""
    quarantined: dict[str, Int64Array] = {}
    for edit in sorted(run.config.quarantine, key=lambda edit: edit.from_step):
        documents = tokens = None
        if edit.source in run.stores:
            store = run.stores[edit.source]
            before = quarantined.get(edit.source, NO_DOCUMENTS)
            numbers = np.arange(store.num_documents) if edit.whole else edit.numbers(run.folder)
            new = np.setdiff1d(numbers, before, assume_unique=True)
            quarantined[edit.source] = np.union1d(before, numbers)
            documents, tokens = int(new.size), _count_tokens(store, new)
        yield Quarantined(
            source=edit.source,
            from_step=edit.from_step,
            documents=documents,
            tokens=tokens,
            whole=edit.whole,
            reason=edit.reason,
        )


def _quarantine_steps(plan: Plan, quarantined: Sequence[Quarantined]) -> Iterator[StageChange]:
    """Yield the beginnings of quarantines after the first step."""
    for edit in quarantined:
        if edit.from_step:
            stage, tokens = plan.stage(edit.from_step), plan.slots_before(edit.from_step, skipped=True)
            what = f"quarantine of {edit.source!r}"
            yield StageChange(stage=stage.spec.name, step=edit.from_step, tokens=tokens, what=what)


def _count_tokens(store: Store, documents: Int64Array) -> int:
    """Return how many tokens some documents have, over all arrays of ids."""
    keys = token_keys(store.keys)
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
