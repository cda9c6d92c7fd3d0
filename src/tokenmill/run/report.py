"""What a run costs before it trains: bytes to read, memory of row indexes and of a loader, time to compile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import ConfigError
from tokenmill.plan.report import step_of
from tokenmill.store.layout import token_keys
from tokenmill.types import MASK_KEYS, STORED_ARRAYS, TOKEN_KEYS, AnyArray, BoolArray, Int64Array

if TYPE_CHECKING:
    from tokenmill.config.run import QuarantineConfig, ResolvedStage
    from tokenmill.encode.tokenizer import Tokenizer
    from tokenmill.loader.buffers import Layout
    from tokenmill.plan import Plan, Rows, Stage
    from tokenmill.plan.report import PlanReport, Quarantined, SourceShare
    from tokenmill.run.run import Run
    from tokenmill.store import Store

PREFETCH = 8
"""Micro-batches that a loader keeps ready, if nobody says otherwise."""


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

    def to_json(self) -> dict[str, Any]:
        """Return them as JSON values."""
        return asdict(self)


def costs(run: Run, facts: PlanReport, compile_seconds: float) -> Costs:
    """Return what a run costs, from what is known of its rows; nothing is read."""
    plan = run.plan()
    widths = {name: _token_bytes(store) for name, store in run.stores.items()}
    read: dict[str, int] = {stage.name: 0 for stage in facts.stages}
    for share in facts.shares:
        if share.source in widths:  # what live text takes to be read is not known
            read[share.stage] += _read_tokens(plan, share) * widths[share.source]
    memory = {id(rows): sizes for part in plan.stages for rows, sizes in _indexes(part)}
    return Costs(
        read_bytes=sum(read.values()),
        read_bytes_exact=all(_is_stream(index) for part in plan.stages for index in part.rows.values()),
        read_bytes_a_step={s.name: read[s.name] // s.steps if s.steps else 0 for s in facts.stages},
        index_bytes=sum(size for size, mapped in memory.values() if not mapped),
        mapped_index_bytes=sum(size for size, mapped in memory.values() if mapped),
        loader_bytes=(PREFETCH + 1) * max(_batch_bytes(run, part) for part in plan.stages),
        compile_seconds=compile_seconds,
    )


def _token_bytes(store: Store) -> int:
    """Return what a token takes on disk, with its mask."""
    keys = [key for key in store.keys if key in TOKEN_KEYS][:1]
    keys += [key for key in store.keys if key in MASK_KEYS][:1]
    return sum(np.dtype(store.manifest.keys[key]).itemsize for key in keys)


def _read_tokens(plan: Plan, share: SourceShare) -> int:
    """Return how many tokens the rows of a share have; those of sequences have one more than inputs."""
    from tokenmill.packing import RecordRows

    parts = [part for part in plan.stages if share.source in part.names]
    records = isinstance(parts[0].rows[share.source], RecordRows)
    return share.held + (0 if records else share.rows)


def _is_stream(rows: Rows) -> bool:
    from tokenmill.packing import ConcatRows

    return isinstance(rows, ConcatRows)


def _indexes(part: Stage) -> Iterator[tuple[Rows, tuple[int, bool]]]:
    """Yield what a part has of row indexes, each with its bytes and whether they are mapped."""
    from tokenmill.packing import PackedRows, RecordRows
    from tokenmill.packing.rows import FollowingRows

    waiting = list(part.rows.values())
    while waiting:
        rows = waiting.pop()
        if isinstance(rows, FollowingRows):
            waiting += [rows.full, rows.rest]
        elif isinstance(rows, PackedRows):
            yield rows, (rows.index.table.nbytes + rows.index.data.nbytes, rows.index.checked is not None)
        elif isinstance(rows, RecordRows):
            yield rows, (rows.rest.nbytes, False)


def _batch_bytes(run: Run, part: Stage) -> int:
    """Return how large the arrays of one row are in a batch."""
    from tokenmill.loader import RECORD_ARRAYS
    from tokenmill.loader.assemble import layout, record_layout
    from tokenmill.packing import RecordRows

    rows = list(part.rows.values())
    shapes: Layout
    if isinstance(rows[0], RecordRows):
        kind = rows[0].store.manifest.kind
        group = max(index.largest_group for index in rows if isinstance(index, RecordRows))
        shapes = record_layout(kind, RECORD_ARRAYS[kind], (1, group, part.spec.seq_len))
    else:
        shapes = layout(run.config.run.arrays, 1, part.spec.seq_len)
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())


# What a user should know of a run that its stores and its config must be asked for.

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
    from tokenmill.plan.report import warnings

    weigh_by = {stage.name: stage.weigh_by for stage in run.config.resolved_stages}
    return [*warnings(run.plan(), facts, weigh_by), *_vain_quarantines(run), *cut_records(run)]


def cut_records(run: Run) -> Iterator[str]:
    """Yield what a user should know of records with a loss mask that are cut, by stage and source.

    Reads document offsets, a part at a time. A text is used to being cut; an answer without its question is not.
    """
    for stage in run.config.resolved_stages:
        for name in stage.weights:
            store = run.stores.get(name)  # live text has no mask, and none here
            told = _cuts(stage, store, name) if store is not None and "loss_mask" in store.keys else None
            if told:
                yield f"stage {stage.name!r}: {told}"


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


def put_aside(run: Run) -> list[Quarantined]:
    """Return what each quarantine puts aside beside those before it, by step; reads lengths of these documents."""
    from tokenmill.plan.report import Quarantined

    gone: dict[str, Int64Array] = {}
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


def _tokens(store: Store, documents: Int64Array) -> int:
    """Return how many tokens some documents have, over all arrays of ids."""
    from tokenmill.store.locate import locate

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


# The supervision audit of a store: how much of it is trained on, and what that looks like.

MAX_ITEMS = 1 << 20
"""More items than this are not all looked at, but evenly spread blocks of them."""
_AUDIT_BLOCK = 1 << 12
EXAMPLE_TOKENS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What was found in one array of token ids."""

    key: str
    items: int
    """Documents, answers or responses."""
    audited: int
    """Those that were looked at."""
    tokens: int
    """Of those."""
    supervised: int
    """Tokens that are trained on; the first token of a document never is."""
    fully_masked: int | None
    """Items without such a token; None of prompts, which are never trained on."""
    without_eos: int | None
    """Items whose last trained token, or last where none is, is neither EOS nor another control token, such as the
    end of a turn; None of prompts, and where no such token is known."""
    truncated: int | None
    """Items that were cut when they were prepared; None where a store does not say."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object, with percentages."""
        return {
            **asdict(self),
            "supervised_percent": percent(self.supervised, self.tokens),
            "fully_masked_percent": share(self.fully_masked, self.audited),
            "without_eos_percent": share(self.without_eos, self.audited),
            "truncated_percent": share(self.truncated, self.items),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One item as text, in runs that are trained on or not."""

    key: str
    item: int
    tokens: int
    supervised: int
    runs: tuple[tuple[bool, str], ...]
    cut: bool
    """Whether more follows than is shown."""


def percent(part: int, whole: int) -> float:
    """Return a share in percent; 0 of nothing."""
    return 100 * part / whole if whole else 0.0


def share(part: int | None, whole: int) -> float | None:
    """Return a share in percent, None where the part is not known."""
    return None if part is None else percent(part, whole)


def has_chat_template(recipe: Mapping[str, Any]) -> bool:
    """Whether records were, or could be, written by a chat template, which places BOS and EOS itself."""
    return isinstance(recipe.get("recipe", {}).get("chat_template"), dict)


def audit(store: Store, tokenizer: Tokenizer | None) -> list[Audit]:
    """Audit every array of token ids of a store; at most `MAX_ITEMS` items of each are looked at."""
    identity = store.manifest.tokenizer
    ends: set[int] = set() if identity.get("eos_id") is None else {int(identity["eos_id"])}
    if tokenizer is not None:
        ends |= set(tokenizer.special_ids.values())
    elif has_chat_template(store.manifest.recipe):
        ends.clear()  # turns end with tokens that only the tokenizer knows
    return [_audit_key(store, key, np.array(sorted(ends), np.int64)) for key in token_keys(store.keys)]


def _audit_key(store: Store, key: str, ends: Int64Array) -> Audit:
    items = int(store.axes[store.axis(key)].items[-1])
    audited = tokens = supervised = fully_masked = without_eos = 0
    for begin, end in _blocks(items):
        offsets = store.offsets(store.axis(key), begin, end)
        ids, trained = _tokens_and_masks(store, key, offsets)
        lengths = np.diff(offsets)
        counts = np.diff(np.concatenate([[0], np.cumsum(trained)])[offsets - offsets[0]])
        audited += end - begin
        tokens += int(lengths.sum())
        supervised += int(counts.sum())
        fully_masked += int((counts == 0).sum())
        without_eos += int((lengths == 0).sum()) + int((~np.isin(ids[_last(offsets, trained, counts)], ends)).sum())
    return Audit(
        key=key,
        items=items,
        audited=audited,
        tokens=tokens,
        supervised=supervised,
        fully_masked=None if key == "prompts" else fully_masked,
        without_eos=None if key == "prompts" or not ends.size else without_eos,
        truncated=store.manifest.skipped.get("truncated", 0) if "name" in store.manifest.recipe else None,
    )


def _last(offsets: Int64Array, trained: BoolArray, counts: Int64Array) -> Int64Array:
    """Return where the last trained token of each item is, or the last one where none is; no place of empty items.

    What a template puts behind the end of a turn, such as a line break, is masked and says nothing of that end.
    """
    ends = offsets[1:] - offsets[0] - 1
    places = np.where(trained, np.arange(trained.size), -1)
    latest: Int64Array = np.maximum.accumulate(places)
    filled = np.diff(offsets) > 0
    found: Int64Array = np.where(counts[filled] > 0, latest[ends[filled]], ends[filled])
    return found


def _blocks(items: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of items to look at."""
    num_blocks = -(-items // _AUDIT_BLOCK)
    wanted = min(num_blocks, MAX_ITEMS // _AUDIT_BLOCK)
    for index in range(wanted):
        begin = index * num_blocks // wanted * _AUDIT_BLOCK
        yield begin, min(begin + _AUDIT_BLOCK, items)


def _tokens_and_masks(store: Store, key: str, offsets: Int64Array) -> tuple[AnyArray, BoolArray]:
    """Return the ids of some items, and which of them are labels."""
    begin, end = int(offsets[0]), int(offsets[-1])
    ids = store.fetch(begin, end, key)
    mask_key = STORED_ARRAYS[key].mask if key in STORED_ARRAYS else None
    if key == "prompts":
        return ids, np.zeros(ids.size, np.bool_)
    if mask_key in store.keys:
        trained = store.fetch(begin, end, mask_key).astype(np.bool_)
    else:
        trained = np.ones(ids.size, np.bool_)
    if key != "responses":  # before a response stands its prompt
        starts = offsets[:-1][np.diff(offsets) > 0] - begin
        trained[starts] = False
    return ids, trained


def examples(store: Store, tokenizer: Tokenizer | None) -> list[Example]:
    """Return the first, a middle and the last item of each array of token ids; none without a tokenizer."""
    if tokenizer is None:
        return []
    found: list[Example] = []
    keys = [key for key in token_keys(store.keys) if key != "prompts"]
    for key in keys:
        items = int(store.axes[store.axis(key)].items[-1])
        places = sorted({0, items // 2, items - 1}) if len(keys) == 1 else [0, items - 1]
        found += [_example(store, tokenizer, key, item) for item in dict.fromkeys(places) if 0 <= item < items]
    return found


def _example(store: Store, tokenizer: Tokenizer, key: str, item: int) -> Example:
    offsets = store.offsets(store.axis(key), item, item + 1)
    ids, trained = _tokens_and_masks(store, key, offsets)
    shown, flags = ids[:EXAMPLE_TOKENS], trained[:EXAMPLE_TOKENS]
    edges = [0, *(np.flatnonzero(np.diff(flags.astype(np.int8))) + 1).tolist(), shown.size]
    runs = tuple(
        (bool(flags[begin]), tokenizer.decode(shown[begin:end])) for begin, end in pairwise(edges) if end > begin
    )
    return Example(
        key=key,
        item=item,
        tokens=int(ids.size),
        supervised=int(trained.sum()),
        runs=runs,
        cut=ids.size > shown.size,
    )


def printable(text: str) -> str:
    """Return a text that cannot speak to the terminal: no escape sequences, no bells, no reversed text."""
    return "".join(c if c.isprintable() else "⏎\n" if c == "\n" else "→" if c == "\t" else "\ufffd" for c in text)
