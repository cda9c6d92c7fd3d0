"""Contents of a step: the tokens and documents of its rows, and which tokens are trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tokenmill.encode.tokenizer import TOKENS_AROUND, Tokenizer, TokenTexts, token_texts
from tokenmill.errors import PlanError
from tokenmill.inspect.examples import span_ids
from tokenmill.inspect.stores import bins_of, named_bins
from tokenmill.loader import LoaderOptions, blocks, buffers
from tokenmill.loader.balance import balance, group_edges, step_costs, waiting
from tokenmill.loader.layout import Layout, RankSlice
from tokenmill.packing import RecordRows
from tokenmill.packing.stored import StoredRows, stored_rows
from tokenmill.plan.stages import Stage
from tokenmill.plan.uses import RowUse
from tokenmill.run.run import Run
from tokenmill.store import Store
from tokenmill.types import AnyArray, Batch, BoolArray, Int64Array, Span, token_arrays

MAX_ROWS = 512
"""Rows of a step that are looked at together."""
_ROWS_AT_ONCE = 32
"""Rows whose arrays are made at once. Memory is then used again instead of requested (benchmarks/view.py)."""
MAX_TOKENS = 4096
"""Tokens of a strip that are spelled out together."""
SAMPLED_ROWS = 4096
"""Rows of a source that are measured, evenly spread, so that a larger store takes no longer."""
ROW_ARRAYS = ("input_ids", "labels", "position_ids", "doc_ids", "loss_mask")
TOKENS = "tokens"
"""The one strip of a row of a sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """One sequence of tokens of a row: all of it, one side of a pair, a prompt or a response."""

    key: str
    """`tokens`, or the array of a record."""
    room: int
    """Columns: tokens that it has room for."""
    spans: tuple[Span, ...]
    """Documents of the row, in order."""
    places: tuple[int, ...]
    """Column of the first token of each: what no span covers is padding, also between two (`segment_multiple`)."""
    trained: tuple[tuple[int, int], ...]
    """Runs of columns whose tokens are labels: (first, end)."""
    bos: tuple[int, ...] = ()
    """Columns that hold BOS."""
    eos: tuple[int, ...] = ()
    reward: float | None = None
    """Reward of a response."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return sum(span.length for span in self.spans)

    @property
    def num_trained(self) -> int:
        """Number of tokens that are labels."""
        return sum(end - begin for begin, end in self.trained)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """One row of the global batch of a step."""

    slot: int
    source: str
    row: int
    """Index of the row in its source."""
    strips: tuple[Strip, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContents:
    """The global batch of a step, or some of its rows."""

    step: int
    steps: int
    """Number of steps of the run."""
    stage: str
    progress: float
    """Share of the stage before this step."""
    lr_scale: float
    shares: Mapping[str, float]
    """Share of rows that the weights ask for from each source."""
    seq_len: int
    global_batch_size: int
    first: int
    """Slot of the first of these rows."""
    rows: tuple[StepRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StripToken:
    """One token of a strip."""

    id: int
    text: str | None
    """None without the tokenizer."""
    document: int
    position: int
    """Index of the token in its document, from 0."""
    trained: bool
    continues: bool = False
    """Whether the token continues the character of the previous one. Its text is then empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StripTokens:
    """A part of a strip, token by token."""

    step: int
    slot: int
    source: str
    strip: int
    """Index of the strip in its row."""
    key: str
    room: int
    length: int
    first: int
    """Place of the first of these tokens in the strip."""
    tokens: tuple[StripToken, ...]


def inspect_step(run: Run, step: int, *, first: int = 0, count: int = MAX_ROWS) -> StepContents:
    """Look at the rows of a step from slot `first` on, `count` of them at most.

    What is trained on is read off the labels, and the masks, that the loader makes.
    """
    plan = run.plan()
    moment = plan.at(step)
    _stored(run, step)
    _check_within("slot", first, moment.global_batch_size)
    uses = plan.what(step)[first : first + max(1, min(count, MAX_ROWS))]
    return StepContents(
        step=step,
        steps=plan.steps,
        stage=moment.stage,
        progress=moment.progress,
        lr_scale=moment.lr_scale,
        shares=dict(moment.shares),
        seq_len=moment.seq_len,
        global_batch_size=moment.global_batch_size,
        first=first,
        rows=tuple(
            row
            for first_use in range(0, len(uses), _ROWS_AT_ONCE)
            for row in _rows(run, step, uses[first_use : first_use + _ROWS_AT_ONCE])
        ),
    )


def same_rows(run: Run, step: StepContents, other: Run, other_step: StepContents) -> tuple[tuple[int, int], ...]:
    """Return the slots of rows of two runs that hold the same tokens of the same stores, and train on the same."""

    def content(run: Run, row: StepRow) -> tuple[str, tuple[Strip, ...]]:
        return run.stores[row.source].fingerprint, row.strips

    slots = {content(other, row): row.slot for row in reversed(other_step.rows)}
    return tuple((row.slot, slots[content(run, row)]) for row in step.rows if content(run, row) in slots)


def inspect_strip(
    run: Run,
    step: int,
    slot: int,
    strip: int = 0,
    *,
    first: int = 0,
    count: int = MAX_TOKENS,
    tokenizer: Tokenizer | None = None,
) -> StripTokens:
    """Spell out tokens of one strip of a row, from the `first` on, `count` of them at most."""
    (row,) = inspect_step(run, step, first=slot, count=1).rows
    _check_within("strip", strip, len(row.strips))
    chosen, store = row.strips[strip], run.stores[row.source]
    first, last = max(0, first), min(chosen.length, first + max(1, min(count, MAX_TOKENS)))
    ids, documents, positions = _tokens(store, row, strip)
    labelled = np.zeros(chosen.room, np.bool_)
    for begin, end in chosen.trained:
        labelled[begin:end] = True
    trained = np.concatenate([labelled[c : c + s.length] for c, s in zip(chosen.places, chosen.spans, strict=True)])
    texts = None if tokenizer is None else _texts(tokenizer, ids, chosen.spans, range(first, last))
    return StripTokens(
        step=step,
        slot=slot,
        source=row.source,
        strip=strip,
        key=chosen.key,
        room=chosen.room,
        length=chosen.length,
        first=first,
        tokens=tuple(
            StripToken(
                id=int(ids[place]),
                text=None if texts is None else texts.texts[place - first],
                document=int(documents[place]),
                position=int(positions[place]),
                trained=bool(trained[place]),
                continues=texts is not None and texts.continues[place - first],
            )
            for place in range(first, last)
        ),
    )


def _texts(tokenizer: Tokenizer, ids: AnyArray, spans: Sequence[Span], shown: range) -> TokenTexts:
    """Return the texts of tokens of a strip. A character does not continue across spans."""
    texts: list[str] = []
    continues: list[bool] = []
    end = 0
    for span in spans:
        begin, end = end, end + span.length
        inside = range(max(begin, shown.start), min(end, shown.stop))
        if inside:
            first, last = max(begin, inside.start - TOKENS_AROUND), min(end, inside.stop + TOKENS_AROUND)
            spelled = token_texts(tokenizer, ids[first:last])
            texts += spelled.texts[inside.start - first : inside.stop - first]
            continues += spelled.continues[inside.start - first : inside.stop - first]
    return TokenTexts(texts=tuple(texts), continues=tuple(continues))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMember:
    """The rows of a step that one rank takes in one micro-batch."""

    rank: int
    micro_batch: int
    slots: tuple[int, ...]
    cost: float
    """Cost of attention over these rows, relative to the mean over all ranks and micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDeal:
    """Assignment of the rows of a step to ranks, in order and by cost."""

    ranks: int
    micro_batch: int
    balanced: bool
    """Whether the run assigns rows by cost. Otherwise ranks take them in order."""
    in_order: tuple[StepMember, ...]
    dealt: tuple[StepMember, ...]
    waiting_in_order: float
    """Time of the step relative to the mean rank, if ranks wait for each other at every micro-batch."""
    waiting_dealt: float

    @property
    def used(self) -> tuple[StepMember, ...]:
        """Assignment that the run uses."""
        return self.dealt if self.balanced else self.in_order


def deal_step(run: Run, step: int, ranks: int, micro_batch: int) -> StepDeal:
    """Deal the rows of a step to ranks and micro-batches, in order and by cost."""
    stage, _ = _stored(run, step)
    RankSlice(layout=Layout(dp=(0, ranks)), micro_batch=micro_batch).check(run.plan())
    costs = step_costs(run.plan(), step)
    orders = (np.arange(costs.size), balance(costs[None], group_edges(stage, ranks))[0])
    in_order, dealt = (order.reshape(ranks, -1, micro_batch) for order in orders)
    return StepDeal(
        ranks=ranks,
        micro_batch=micro_batch,
        balanced=run.config.run.balance is not None,
        in_order=tuple(_members(costs, in_order)),
        dealt=tuple(_members(costs, dealt)),
        waiting_in_order=waiting(costs[in_order].sum(axis=2)[None]),
        waiting_dealt=waiting(costs[dealt].sum(axis=2)[None]),
    )


def _members(costs: Int64Array, slots: Int64Array) -> Iterator[StepMember]:
    """Yield who takes which slots, of a table of them by rank and micro-batch."""
    sums = costs[slots].sum(axis=2)
    mean = float(sums.mean()) or 1.0
    for rank, number in np.ndindex(sums.shape):
        yield StepMember(
            rank=rank,
            micro_batch=number,
            slots=tuple(slots[rank, number].tolist()),
            cost=float(sums[rank, number]) / mean,
        )


def _check_within(what: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise PlanError(f"{what}: must lie within 0:{count}, got {number}; choose one of these")


def _stored(run: Run, step: int) -> tuple[Stage, dict[int, StoredRows]]:
    """Return the stage of a step, and the rows of its stored sources."""
    plan = run.plan()
    stage = plan.trained_stage(step)
    stored = stored_rows(stage)
    live = sorted(stage.rows.keys() - stored.keys())
    if live:
        raise PlanError(
            f"step {step}: which rows it holds must be known before they are read, got live text of {live[0]!r}; "
            "leave out live = true, and the text is prepared once"
        )
    return stage, {plan.sources.index(name): rows for name, rows in stored.items()}


def _rows(run: Run, step: int, uses: Sequence[RowUse]) -> Iterator[StepRow]:
    stage, stored = _stored(run, step)
    slots = np.array([use.slot for use in uses])
    places, kind = (np.full_like(slots, step), slots), buffers.record_type(stage)
    ends = {name: _framing(run.stores[name]) for name in {use.source for use in uses}}
    if kind is None:
        room, multiple = stage.spec.seq_len + 1, stage.segment_multiple
        # No id is -1, so that padding is taken for none.
        batch = _arrays(blocks.SequenceBlock(stage, stored, places, ("input_ids", "labels"), pad=-1))
        columns = [_columns(use.spans, multiple) for use in uses]
        ids = np.concatenate([batch["input_ids"], batch["labels"][:, -1:]], axis=1)
        for line in np.flatnonzero(ids[:, -1] < 0).tolist():  # the last token of a row stands in its labels alone
            (span, begin), use = (uses[line].spans[-1], columns[line][-1]), uses[line]
            if begin + span.length == room:
                ids[line, -1] = span_ids(run.stores[use.source], span)[-1]
        framing = np.array([ends[use.source] for use in uses])
        bos, eos = (_marked(ids == framing[:, which, None]) for which in (0, 1))
        # A label is the token behind its input, so the first token of a row is none.
        runs = _runs(batch["labels"] >= 0, shift=1)
        for line, use in enumerate(uses):
            strip = Strip(
                key=TOKENS,
                room=room,
                spans=use.spans,
                places=columns[line],
                trained=runs[line],
                bos=bos[line],
                eos=eos[line],
            )
            yield StepRow(slot=use.slot, source=use.source, row=use.row, strips=(strip,))
        return
    batch = _arrays(blocks.RecordBlock(stage, stored, places, buffers.RECORD_ARRAYS[kind], kind))
    for number, use in enumerate(uses):
        rows = stage.rows[use.source]
        assert isinstance(rows, RecordRows)
        document, starts = use.spans[0].document, rows.starts(use.row)
        strips = tuple(_record_strips(kind, batch, number, (document, starts), ends[use.source]))
        yield StepRow(slot=use.slot, source=use.source, row=use.row, strips=strips)


def _framing(store: Store) -> tuple[int, int]:
    """Return the ids of BOS and EOS; -2, which is no id, for one that there is not."""
    known = store.manifest.tokenizer
    bos, eos = (known.get(name) for name in ("bos_id", "eos_id"))
    return -2 if bos is None else int(bos), -2 if eos is None else int(eos)


def _columns(spans: Sequence[Span], multiple: int) -> tuple[int, ...]:
    """Return the column of the first token of each span, as the loader places them.

    Every segment begins at a multiple; the rest of a document goes on behind the BOS that was put before it.
    """
    columns, column, opened = [], 0, -1
    for span in spans:
        if not (span.start and span.document == opened):
            column = -(-column // multiple) * multiple
        opened = span.document if (span.start, span.length) == (0, 1) else -1
        columns.append(column)
        column += span.length
    return tuple(columns)


def _arrays(block: blocks.Block) -> Batch:
    try:
        return block.batch(0, {name: np.empty(*kind) for name, kind in block.shapes(block.num_rows).items()})
    finally:
        block.release()


def _runs(flags: BoolArray, *, shift: int = 0) -> list[tuple[tuple[int, int], ...]]:
    """Return the runs of flags that are set, (first, end) each, of every line."""
    framed = np.zeros((flags.shape[0], flags.shape[1] + 2), np.bool_)
    framed[:, 1:-1] = flags
    edges = framed[:, 1:] != framed[:, :-1]
    return [tuple(zip(line[::2], line[1::2], strict=True)) for line in _marked(edges, shift=shift)]


def _marked(flags: BoolArray, *, shift: int = 0) -> list[tuple[int, ...]]:
    """Return the columns of the flags that are set, of every line."""
    lines, columns = np.divmod(np.flatnonzero(flags), flags.shape[1])
    bounds, places = np.searchsorted(lines, np.arange(flags.shape[0] + 1)).tolist(), (columns + shift).tolist()
    return [tuple(places[begin:end]) for begin, end in pairwise(bounds)]


def _record_strips(
    kind: str, batch: Batch, number: int, record: tuple[int, Mapping[str, Sequence[int]]], framing: tuple[int, int]
) -> Iterator[Strip]:
    """Yield the arrays of token ids of a record, each response separately.

    `record` is its number, and the first token of each item of its arrays that the row delivers.
    """
    document, starts = record
    for key, mask in token_arrays(kind).items():
        seq_len = batch[key].shape[-1]
        lengths = np.atleast_1d(batch[buffers.LENGTHS[key]][number])
        count = int(batch["group_size"][number]) if key == "responses" else 1
        flags = np.zeros((count, seq_len), np.bool_)
        if mask is not None:
            flags = np.atleast_2d(batch[mask][number])[:count].copy()
        if key != "responses" or (kind == "grpo" and int(batch["prompt_len"][number]) == 0):
            flags[:, 0] = False  # nothing stands before it that it could follow
        ids = np.atleast_2d(batch[key][number])[:count]
        ids = np.where(np.arange(ids.shape[1]) < lengths[:count, None], ids, -1)
        bos, eos = (_marked(ids == which) for which in framing)
        for item, trained in enumerate(_runs(flags)):
            yield Strip(
                key=key,
                room=seq_len,
                spans=(Span(document=document, start=starts[key][item], length=int(lengths[item])),),
                places=(0,),
                trained=trained,
                bos=bos[item],
                eos=eos[item],
                reward=float(batch[buffers.REWARDS][number, item]) if key == "responses" else None,
            )


def _tokens(store: Store, row: StepRow, strip: int) -> tuple[AnyArray, Int64Array, Int64Array]:
    """Return the ids of a strip, and the document and the place in it of each."""
    chosen = row.strips[strip]
    key = chosen.key
    before = [each.key for each in row.strips[:strip]].count(chosen.key)
    parts, documents, positions = [], [], []
    for span in chosen.spans:
        if chosen.key == TOKENS:
            parts.append(span_ids(store, span))
        else:
            axis, item = store.axis(key), span.document
            if axis == "responses":
                item = int(store.offsets("groups", item, item + 1)[0]) + before
            begin = int(store.offsets(axis, item, item + 1)[0]) + span.start
            parts.append(store.fetch(begin, begin + span.length, key))
        documents.append(np.full(span.length, span.document))
        positions.append(np.arange(span.start, span.start + span.length))
    return np.concatenate(parts), np.concatenate(documents), np.concatenate(positions)


def row_arrays(run: Run, step: int, slot: int) -> dict[str, list[Any]]:
    """Return the arrays of a batch that have one entry per row, for one row, as numbers."""
    stage, stored = _stored(run, step)
    _check_within("slot", slot, stage.spec.global_batch_size)
    places, kind = (np.array([step]), np.array([slot])), buffers.record_type(stage)
    if kind is not None:
        batch = _arrays(blocks.RecordBlock(stage, stored, places, buffers.RECORD_ARRAYS[kind], kind))
    else:
        options = LoaderOptions(positions=run.config.run.positions, horizon=run.config.run.horizon)
        block = blocks.SequenceBlock(stage, stored, places, ROW_ARRAYS, options=options)
        batch = _arrays(block)
    return {name: array[0].tolist() if array[0].ndim else [array[0].item()] for name, array in batch.items()}


# How rows are filled


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePacking:
    """Fill of the rows of a source in a stage, and their documents."""

    stage: str
    source: str
    packing: str
    rows: int
    """Number of rows per epoch."""
    sampled: int
    """Number of rows that were measured."""
    fill: tuple[int, ...]
    """Number of measured rows filled to 0 to 10%, 10 to 20%, and so on. The last entry counts full rows."""
    spans: Mapping[str, int]
    """Spans a row -> how many rows; `8 to 15` for several numbers."""
    lengths: Mapping[str, int]
    """Tokens a span -> how many spans."""


def inspect_packing(run: Run) -> tuple[SourcePacking, ...]:
    """Measure some rows of every source in every stage, but live text, which has none before it is read."""
    plan = run.plan()
    measured: dict[tuple[str, str], SourcePacking] = {}
    for part in plan.stages:
        for name, index in stored_rows(part).items():
            if not index.num_rows or (part.spec.name, name) in measured:
                continue
            chosen = np.unique(np.linspace(0, index.num_rows - 1, SAMPLED_ROWS).astype(np.int64))
            spans = index.spans(chosen)
            filled = np.bincount(np.repeat(np.arange(chosen.size), spans.count), spans.length, chosen.size)
            # A row of a sequence has one token more, the last label.
            share = np.minimum(filled / (part.spec.seq_len + (buffers.record_type(part) is None)), 1)
            measured[part.spec.name, name] = SourcePacking(
                stage=part.spec.name,
                source=name,
                packing=str(index.description["packing"]),
                rows=index.num_rows,
                sampled=int(chosen.size),
                fill=tuple(np.bincount((share * 10).astype(np.int64), minlength=11).tolist()),
                spans=named_bins(np.bincount(bins_of(spans.count))),
                lengths=named_bins(np.bincount(bins_of(spans.length))),
            )
    return tuple(measured.values())
