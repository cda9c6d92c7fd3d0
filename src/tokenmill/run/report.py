"""Report of a run before its first step: rows and tokens of its plan, costs, evals and quarantines.

`plan/report.py` counts what follows from the plan alone. This file adds facts of the stores and the config;
`warnings.py` adds warnings. No token is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import numpy as np

from tokenmill.config.run import ATTENTION
from tokenmill.config.schedule import limits
from tokenmill.hooks import attached
from tokenmill.inspect.audit import Audit, audit
from tokenmill.loader import LoaderOptions
from tokenmill.loader.balance import balance, group_edges, step_costs, waiting
from tokenmill.loader.buffers import RECORD_ARRAYS, record_type, stage_shapes
from tokenmill.packing.holes import QUARANTINED
from tokenmill.packing.records import responses_of
from tokenmill.plan.plan import Plan
from tokenmill.plan.report import PlanReport, StageChange, report, warnings
from tokenmill.plan.rows import Rows
from tokenmill.plan.stages import Stage
from tokenmill.run.history import read_history
from tokenmill.run.overlap import Overlap, overlaps
from tokenmill.run.run import Run
from tokenmill.run.specs import EpochCount
from tokenmill.run.warnings import run_warnings
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
            *run_warnings(run, {item.name: (item.documents, item.overlaps) for item in evals}),
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
