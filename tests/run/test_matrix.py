"""Packing x fate of long documents x kind of store: all that names tokens names those that are delivered.

A token has an id of its own, so every id that a batch holds tells its array, its document and its position.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from tokenmill.config.schedule import ON_LONG
from tokenmill.errors import ConfigError
from tokenmill.inspect.steps import inspect_step, inspect_strip, row_arrays, same_rows
from tokenmill.run.overlap import overlaps
from tokenmill.run.run import Run
from tokenmill.run.warnings import long_records
from tokenmill.store import StoreSpec, StoreWriter
from tokenmill.types import RECORD_TYPES, token_arrays

KINDS = ("seq", "sft", "dpo", "grpo", "prompts")
PACKINGS = ("concat", "best_fit", "bos_best_fit", "padded")
WHOLE = ("best_fit", "padded")
FATES = {"default": {}} | {fate: {"on_long": fate} for fate in ON_LONG}
SHORT, LONG = 12, 40
"""Sequence lengths: at the first, 4 of 24 documents are longer than a row, at the second none is."""
BOS = 1
DTYPE = "<u4"
HELD, LISTED, QUARANTINED = "5:10", [0, 12, 13, 14], [2, 11]
LONG_TOO = [1, 3, 10, 15, 16, 18, 19]
"""Documents that nothing holds out, some longer than a row."""
LENGTHS = [5, 17, 3, 30, 12, 8, 19, 7, 2, 4, 11, 9, 25, 3, 6, 12, 13, 1, 8, 5, 10, 7, 4, 9]
OTHERS = {"rejected": 3, "responses": 5}
"""Arrays whose items have other lengths than those above, from so many places further on."""


def unique_ids(number, length):
    return (np.arange(length) + 100 * number + 1000).astype(DTYPE)


@dataclass
class Made:
    """What a store was written from."""

    kind: str
    ids: dict[str, list[list[np.ndarray]]] = field(default_factory=dict)
    """Array -> record -> items: one, or the responses of a group."""
    masks: dict[str, list[list[np.ndarray]]] = field(default_factory=dict)

    @property
    def first(self):
        return next(iter(self.ids))

    def record_of(self):
        """Return the record of every id but BOS."""
        return {
            int(token): record
            for records in self.ids.values()
            for record, items in enumerate(records)
            for item in items
            for token in item
            if token != BOS
        }


def make(kind, shift=0):
    """Make records of ids that no other array, document or place has, nor another `shift`."""
    made, number = Made(kind), 10_000 * shift
    stored = "grpo" if kind == "prompts" else kind
    for key, mask in token_arrays(stored).items():
        records, masks = [], []
        for record in range(len(LENGTHS)):
            # Groups of 0 to 3 responses, and none where prompts are alone.
            items = 1 if key != "responses" else 0 if kind == "prompts" else (record + 1) % 4
            lengths = [LENGTHS[(record + OTHERS.get(key, 0) + 7 * i) % len(LENGTHS)] for i in range(items)]
            records.append([unique_ids(number + i, length) for i, length in enumerate(lengths)])
            masks.append([np.arange(length) % 3 != 1 for length in lengths])
            number += max(1, items)
        if key == "sequence":
            for ((ids,),) in zip(records, strict=True):
                ids[0] = BOS
        made.ids[key] = records
        if mask is not None and kind != "seq":
            made.masks[key] = masks
    return made


def write(made, path, identity):
    kind = "grpo" if made.kind == "prompts" else made.kind
    columns, keys = {}, {}
    for key, mask in token_arrays(kind).items():
        columns[key], keys[key] = made.ids[key], DTYPE
        if key in made.masks:
            columns[mask], keys[mask] = made.masks[key], "|u1"
    offsets = {}
    for key, axis in (("sequence", "documents"), *((key, key) for key in ("chosen", "rejected", "prompts"))):
        if key in columns:
            offsets[axis] = np.cumsum([0, *(item.size for items in columns[key] for item in items)])
    arrays = {
        key: np.concatenate([np.empty(0), *(item for items in column for item in items)]).astype(keys[key])
        for key, column in columns.items()
    }
    if kind == "grpo":
        keys["rewards"] = "<f4"
        offsets["groups"] = np.cumsum([0, *map(len, made.ids["responses"])])
        offsets["responses"] = np.cumsum([0, *(i.size for items in made.ids["responses"] for i in items)])
        arrays["rewards"] = np.arange(offsets["groups"][-1], dtype="<f4")
    tokenizer = identity | {"bos_id": BOS, "add_bos": kind in ("seq", "sft")}
    spec = StoreSpec(kind=kind, keys=keys, tokenizer=tokenizer, recipe={}, max_tokens_per_shard=130)
    with StoreWriter(path, spec) as writer:
        writer.append(arrays, offsets)
        writer.commit()


@pytest.fixture(scope="module")
def stores(tmp_path_factory, tokenizer_identity):
    """Return a folder with two stores of each kind, and what they were written from."""
    folder = tmp_path_factory.mktemp("matrix")
    made = {}
    for kind in KINDS:
        for shift, name in enumerate((kind, f"{kind}-other")):
            made[name] = make(kind, shift)
            write(made[name], folder / name, tokenizer_identity(1 << 22))
    return folder, made


def make_run(folder, kind, packing, fate, seq_len):
    """Make a run of one epoch with evals of all kinds; what an eval cannot have is left out."""
    records = kind in (*RECORD_TYPES, "prompts")
    of_eval = {"seq_len": seq_len, **({"packing": packing} | FATES[fate] if packing in WHOLE else {})}
    tables = {
        "run": {
            "epochs": 1,
            "global_batch_size": 3,
            "seq_len": seq_len,
            **({} if records and packing == "best_fit" else {"packing": packing}),
            **FATES[fate],
        },
        "sources": [{"name": "main", "store": kind}],
        "quarantine": [{"source": "main", "from_step": 0, "documents": QUARANTINED}],
        "evals": [
            {"name": "range", "source": "main", "documents": HELD, **of_eval},
            {"name": "rows", "source": "main", "documents": LISTED, "rows": 1, **of_eval},
            {"name": "other", "store": f"{kind}-other", **of_eval},
            # Not held out: what of it is trained on must be known.
            {"name": "trained", "store": kind, "documents": LONG_TOO, "rows": 2, **of_eval},
        ],
    }
    return Run.from_tables(tables, folder=folder)


# What the documentation says becomes of a document, with no more than its length


def delivered_part(fate, length, seq_len):
    """Return begin and end of what a row delivers of an array of a record; None for a record that has no row."""
    if length <= seq_len:
        return 0, length
    if fate == "drop":
        return None
    return (length - seq_len, length) if fate == "truncate_start" else (0, seq_len)


def expected_record(made, record, fate, seq_len):
    """Return array -> (start, ids, mask) of each item of a record; None where the record is dropped."""
    expected = {}
    for key, records in made.ids.items():
        expected[key] = []
        for number, item in enumerate(records[record]):
            part = delivered_part(fate, item.size, seq_len)
            if part is None:
                return None
            mask = made.masks[key][record][number] if key in made.masks else None
            expected[key].append((part[0], item[slice(*part)], None if mask is None else mask[slice(*part)]))
    return expected


def expected_sequence(made, spans, seq_len):
    """Return inputs, labels and documents of a row of these spans, -1 where nothing is."""
    tokens, documents, joins, masks = [], [], [], []
    before = None
    for span in spans:
        ids = made.ids["sequence"][span.document][0][span.start : span.start + span.length]
        assert ids.size == span.length, "a span lies within its document"
        mask = made.masks["sequence"][span.document][0] if made.masks else np.ones(10**3, bool)
        joined = (
            before is not None
            and span.start > 0
            and (before.document, before.start, before.length)
            == (
                span.document,
                0,
                1,
            )
        )
        tokens += ids.tolist()
        documents += [span.document] * span.length
        joins += [joined, *[True] * (span.length - 1)]
        masks += mask[span.start : span.start + span.length].tolist()
        before = span
    assert len(tokens) <= seq_len + 1
    labels = [
        token if join and mask else -100 for token, join, mask in zip(tokens[1:], joins[1:], masks[1:], strict=True)
    ]

    def filled(values, missing):
        return [*values, *[missing] * seq_len][:seq_len]

    return filled(tokens, -1), filled(labels, -100), filled(documents, -1)


# What a loader delivers


def check_sequences(made, plan, loader):
    """Compare all batches of a loader with what its plan names; return the spans of all steps, and ids."""
    named, ids = [], Counter()
    for step in range(plan.steps):
        uses, batch, seq_len = plan.what(step), loader[step], plan.at(step).seq_len
        assert [use.slot for use in uses] == list(range(len(batch["input_ids"])))
        for use in uses:
            inputs, labels, documents = expected_sequence(made, use.spans, seq_len)
            is_token = batch["doc_ids"][use.slot] >= 0
            assert is_token.tolist() == [document >= 0 for document in documents]
            assert np.where(is_token, batch["input_ids"][use.slot], -1).tolist() == inputs
            assert batch["labels"][use.slot].tolist() == labels
            row = {*batch["input_ids"][use.slot][is_token].tolist(), *batch["labels"][use.slot].tolist()}
            ids.update(row - {BOS, -100})
            named += [(step, use.slot, use.row, span) for span in use.spans]
    return named, ids


def check_records(made, plan, loader, fate):
    """Do the same for pairs, groups and prompts."""
    lengths = {"chosen": "chosen_len", "rejected": "rejected_len", "prompts": "prompt_len"}
    named, ids = [], Counter()
    for step in range(plan.steps):
        batch = loader[step]
        for use in plan.what(step):
            (span,) = use.spans
            expected = expected_record(made, span.document, fate, plan.at(step).seq_len)
            assert expected is not None, f"record {span.document} is longer than a row, and dropped"
            start, tokens, _ = expected[made.first][0]
            assert (span.start, span.length) == (start, tokens.size)
            for key, items in expected.items():
                if key == "responses":
                    assert int(batch["group_size"][use.slot]) == len(items)
                    counts = batch["response_len"][use.slot][: len(items)]
                else:
                    counts = [batch[lengths[key]][use.slot]]
                got = np.atleast_2d(batch[key][use.slot])
                assert [int(count) for count in counts] == [tokens.size for _, tokens, _ in items]
                for line, (_, tokens, _) in zip(got, items, strict=False):
                    assert line[: tokens.size].tolist() == tokens.tolist()
                    ids.update(tokens.tolist())
            named.append((step, use.slot, use.row, span))
    return named, ids


def check(made, plan, loader, fate):
    if "sequence" in made.ids:
        return check_sequences(made, plan, loader)
    return check_records(made, plan, loader, fate)


# What people look at


def check_strips(made, run, step, fate):
    """Compare what the viewer shows of a step with what the loader delivers."""
    contents, uses = inspect_step(run, step), run.plan().what(step)
    assert all(
        strip.room == contents.seq_len + ("sequence" in made.ids) for row in contents.rows for strip in row.strips
    )
    first = {use.spans: use.slot for use in reversed(uses)}  # a step may hold a document twice
    assert same_rows(run, contents, run, contents) == tuple((use.slot, first[use.spans]) for use in uses)
    for row, use in zip(contents.rows, uses, strict=True):
        assert (row.slot, row.source, row.row) == (use.slot, use.source, use.row)
        arrays = row_arrays(run, step, row.slot)
        strips = [inspect_strip(run, step, row.slot, number) for number in range(len(row.strips))]
        if "sequence" in made.ids:
            assert row.strips[0].spans == use.spans
            check_sequence_strip(made, strips[0], arrays)
            continue
        document = use.spans[0].document
        expected = expected_record(made, document, fate, contents.seq_len)
        wanted = [(key, *item) for key, items in expected.items() for item in items]
        assert [strip.key for strip in strips] == [key for key, *_ in wanted]
        for strip, tokens, (_, start, ids, mask) in zip(row.strips, strips, wanted, strict=True):
            assert [(span.document, span.start, span.length) for span in strip.spans] == [
                (document, start, ids.size)
            ]
            assert [token.id for token in tokens.tokens] == ids.tolist()
            assert [token.document for token in tokens.tokens] == [document] * ids.size
            assert [token.position for token in tokens.tokens] == list(range(start, start + ids.size))
            if mask is not None:
                # The first token of a side follows nothing; a response follows its prompt.
                follows = mask.copy()
                follows[:1] &= strip.key == "responses"
                assert [token.trained for token in tokens.tokens] == follows.tolist()


def check_sequence_strip(made, strip, arrays):
    """Compare a row of a sequence, token by token, with the arrays of the batch."""
    tokens = strip.tokens
    inputs = [
        token for token, document in zip(arrays["input_ids"], arrays["doc_ids"], strict=True) if document >= 0
    ]
    assert [token.id for token in tokens][: len(inputs)] == inputs
    assert len(tokens) - len(inputs) in (0, 1)
    for token in tokens:
        assert token.id == made.ids["sequence"][token.document][0][token.position]
    assert [token.id for token in tokens if token.trained] == [label for label in arrays["labels"] if label >= 0]


# The matrix


def rejection(kind, packing, fate, seq_len):
    """Return what the error says of a combination that cannot be; None for one that can."""
    is_record = kind not in ("seq", "sft")
    if packing not in WHOLE and fate != "default":
        return "on_long = .* cannot be combined with packing = "
    if packing not in WHOLE and is_record:
        return "cannot be combined with stores of"
    alone = is_record or packing == "padded"
    if fate == "split" and alone:
        return "on_long = 'split' cannot be combined with"
    if seq_len == SHORT and (fate == "stop" or (fate == "default" and alone)):
        return "must have at most"
    return None


CASES = [
    (kind, packing, fate, seq_len)
    for kind in KINDS
    for packing in PACKINGS
    for fate in FATES
    for seq_len in (SHORT, LONG)
]
LEGAL = [case for case in CASES if rejection(*case) is None]
ILLEGAL = [case for case in CASES if rejection(*case) is not None]


@pytest.mark.parametrize(("kind", "packing", "fate", "seq_len"), ILLEGAL)
def test_what_cannot_be_is_rejected_before_the_first_step(stores, kind, packing, fate, seq_len):
    with pytest.raises(ConfigError, match=rejection(kind, packing, fate, seq_len)):
        make_run(stores[0], kind, packing, fate, seq_len).loader()


@pytest.mark.parametrize(("kind", "packing", "fate", "seq_len"), LEGAL)
def test_what_is_delivered_is_what_is_named(stores, kind, packing, fate, seq_len):
    """[O1.a, O1.b, V1.b]"""
    folder, made = stores
    check_run(made, make_run(folder, kind, packing, fate, seq_len), kind, packing, fate)


@pytest.mark.parametrize(
    ("kind", "packing", "fate"),
    [
        *(
            (kind, packing, "default")
            for kind in ("seq", "sft")
            for packing in ("concat", "best_fit", "bos_best_fit")
        ),
        *((kind, "padded", fate) for kind in KINDS for fate in ("drop", "truncate_start")),
    ],
)
def test_edits_and_changes_of_length_keep_names_and_evals_apart(stores, kind, packing, fate):
    """[O1.a, O1.b, V1.b] Rows that were not drawn come first in the next stage, and a quarantine begins amid it."""
    folder, made = stores
    run = make_run(folder, kind, packing, fate, SHORT)
    stages = [{"name": "short", "start_step": 0}, {"name": "long", "start_step": 3, "seq_len": LONG}]
    tables = run.translation.tables
    late = {"source": "main", "from_step": 5, "documents": [3, 18, 20]}
    settings = {key: value for key, value in tables["run"].items() if key != "epochs"} | {"steps": 12}
    tables = tables | {"run": settings, "stages": stages, "quarantine": [*tables["quarantine"], late]}
    check_run(made, Run.from_tables(tables, folder=folder), kind, packing, fate)


def check_when_many(plan, named):
    """Compare uses of token ranges, several per document, with the spans of all steps."""
    documents = np.repeat(np.arange(len(LENGTHS)), 3)
    starts = np.tile([0, 2, 9], len(LENGTHS))
    ends = starts + np.tile([2, 7, 100], len(LENGTHS))
    uses = plan.when_many("main", documents, starts, ends)
    columns = (uses.query, uses.step, uses.slot, uses.row, uses.document, uses.start, uses.length)
    wanted = [
        (query, step, slot, row, document, max(start, span.start), min(end, span.start + span.length))
        for query, (document, start, end) in enumerate(zip(documents.tolist(), starts, ends, strict=True))
        for step, slot, row, span in named
        if span.document == document
    ]
    wanted = [(*rest, begin, end - begin) for *rest, begin, end in wanted if begin < end]
    assert sorted(zip(*(column.tolist() for column in columns), strict=True)) == sorted(wanted)
    order = np.lexsort((uses.slot, uses.step, uses.query))
    assert order.tolist() == list(range(len(uses)))


def check_attribution(run):
    """Compare the attribution of each rank with what the plan names, and segments with those of the batch."""
    plan, world_size = run.plan(), 3
    for rank in range(world_size):
        loader = run.loader(rank=rank, world_size=world_size, threads=0)
        for step in range(plan.steps):
            part, batch = loader.attribution(step), loader[step]
            uses = [plan.what(step)[slot] for slot in loader.slots(step)]
            entries = list(zip(part.batch_row, part.slot, part.document, part.start, part.length, strict=True))
            assert entries == [
                (row, use.slot, span.document, span.start, span.length)
                for row, use in enumerate(uses)
                for span in use.spans
            ]
            assert not part.source.any()
            for row in range(len(uses)) if "doc_ids" in batch else ():
                own = part.batch_row == row
                columns = np.repeat(part.segment[own], part.length[own])[: batch["doc_ids"].shape[1]]
                assert batch["doc_ids"][row][batch["doc_ids"][row] >= 0].tolist() == columns.tolist()


def check_run(made, run, kind, packing, fate):
    plan = run.plan()
    main, other = made[kind], made[f"{kind}-other"]
    named, trained = check(main, plan, run.loader(threads=0), fate)
    # `when` is the inverse of `what`.
    inverse = [
        (use.step, use.slot, use.row, span)
        for document in range(len(LENGTHS))
        for use in plan.when("main", document)
        for span in use.spans
    ]
    assert sorted(inverse, key=repr) == sorted(named, key=repr)
    check_when_many(plan, named)
    check_attribution(run)
    for step in range(plan.steps):
        check_strips(main, run, step, fate)
    # Evals deliver what they name, of documents that they may have, and no step trains on what is held out.
    record_of = main.record_of()
    is_trained = {record_of[token] for token in trained}
    assert is_trained.isdisjoint([*range(5, 10), *LISTED, *QUARANTINED])
    allowed = {"range": set(range(5, 10)), "rows": set(LISTED), "trained": set(LONG_TOO), "other": None}
    shared = overlaps(run)
    for name, documents in allowed.items():
        item, of = run.evals[name], other if name == "other" else main
        _, evaluated = check(of, item.plan(), item.loader(threads=0), fate if packing in WHOLE else "default")
        numbers = {of.record_of()[token] for token in evaluated}
        (overlap,) = shared[name]
        if name == "other":
            assert (overlap.by_number, overlap.by_content) == (None, 0)
            continue
        assert numbers
        assert numbers <= documents
        in_both = len(numbers & is_trained)
        assert (overlap.by_number, overlap.by_content) == (in_both, in_both)
        assert (in_both > 0) == (name == "trained")
        assert name == "trained" or not evaluated.keys() & trained.keys()


@pytest.mark.parametrize("kind", ["dpo", "grpo", "prompts"])
def test_long_records_that_an_eval_does_not_take_are_not_its_concern(stores, kind):
    folder, made = stores
    short = [
        record
        for record in range(len(LENGTHS))
        if all(item.size <= SHORT for records in made[kind].ids.values() for item in records[record])
    ][:2]
    run = make_run(folder, kind, "padded", "drop", SHORT)
    tables = run.translation.tables | {
        "evals": [{"name": "short", "source": "main", "documents": short, "on_long": "stop"}]
    }
    item = Run.from_tables(tables, folder=folder).evals["short"]
    assert [use.spans[0].document for step in range(item.plan().steps) for use in item.plan().what(step)] == short


@pytest.mark.parametrize("fate", ["drop", "truncate_end", "truncate_start"])
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_long_records_that_are_not_trained_on_are_not_counted_as_lost(stores, kind, fate):
    """Held-out and quarantined records are among neither the long ones nor all."""
    folder, made = stores
    kept = sorted({*range(len(LENGTHS))} - {*range(5, 10), *LISTED, *QUARANTINED})
    room = SHORT + (kind == "sft")
    longer = lost = 0
    for record in kept:
        items = [(item, mask) for key in made[kind].masks for item, mask in pairs(made[kind], key, record)]
        ids = [item for records in made[kind].ids.values() for item in records[record]]
        if max(item.size for item in ids) > room:
            longer += 1
            for item, mask in items:
                begin, end = delivered_part(fate, item.size, room) or (0, 0)
                lost += int(mask.sum() - (0 if fate == "drop" else mask[begin:end].sum()))
    assert longer
    (sentence,) = long_records(make_run(folder, kind, "padded", fate, SHORT))
    fates = {"drop": "are dropped", "truncate_end": "lose their end", "truncate_start": "lose their beginning"}
    assert sentence.startswith(
        f"stage 'main': {longer} of {len(kept)} records of 'main' are longer than a row of {SHORT} tokens and "
        f"{fates[fate]}, {lost} trained tokens with them; "
    )


def pairs(made, key, record):
    return zip(made.ids[key][record], made.masks[key][record], strict=True)


def test_held_out_records_are_cut_by_no_row_of_a_stream(stores):
    run = make_run(stores[0], "sft", "concat", "default", SHORT)
    rows = run.plan().stages[0].rows["main"]
    spans = rows.spans(np.arange(rows.num_rows))
    cut = int((np.bincount(spans.document[spans.length > 1]) > 1).sum())
    (sentence,) = long_records(run)
    assert sentence.startswith(f"stage 'main': {cut} of 13 records of 'main' are cut where a row of 12 tokens ends")


# Old spellings: `split` beside `on_long`, and what both meant

RESPELLED = {
    # split, on_long -> new value under best_fit, and under padded and for pairs and groups; None: the default.
    (None, None): (None, None),
    ("allow", None): (None, None),
    ("forbid", None): ("stop", "stop"),
    ("truncate_start", None): ("truncate_start", "truncate_start"),
    ("truncate_end", None): ("truncate_end", "truncate_end"),
    (None, "cut"): ("split", "truncate_end"),
    ("allow", "cut"): ("split", "truncate_end"),
    ("truncate_start", "cut"): ("truncate_start", "truncate_start"),
    ("truncate_end", "cut"): ("truncate_end", "truncate_end"),
    (None, "drop"): ("drop", "drop"),
    ("allow", "drop"): ("drop", "drop"),
    (None, "stop"): ("stop", "stop"),
    ("allow", "stop"): ("stop", "stop"),
}
"""The table of docs/reference/config.md; every other pair was an error, and is."""
CONTRADICTIONS = [
    (split, on_long)
    for split in ("allow", "forbid", "truncate_start", "truncate_end")
    for on_long in ("cut", "drop", "stop")
    if (split, on_long) not in RESPELLED
]
DEFAULTS = ("split", "stop")
DIGESTS = {
    ("seq", "best_fit", "split"): "966edda22daf9c5f",
    ("seq", "best_fit", "truncate_end"): "c63f5c11b18baf1c",
    ("seq", "best_fit", "truncate_start"): "0b39bdbdbc670ccd",
    ("seq", "best_fit", "drop"): "c900393fc7a1de35",
    ("seq", "best_fit", "stop"): "a29a46c823eab58a",
    ("seq", "padded", "truncate_end"): "35c26cd9eb60053a",
    ("seq", "padded", "truncate_start"): "61ac4cba732d52f8",
    ("seq", "padded", "drop"): "5cf0debc1d704ca4",
    ("seq", "padded", "stop"): "a0dab055813a624b",
    ("dpo", None, "truncate_end"): "3a6b0e700720ef12",
    ("dpo", None, "truncate_start"): "590016c662f5a44c",
    ("dpo", None, "drop"): "7253130b405bd0b6",
    ("dpo", None, "stop"): "f057ae82d8eed739",
}
"""Fingerprint and batches of runs as they were while `split` was a key; `stop` with rows of `LONG`."""


def keys_of(packing, **keys):
    return {key: value for key, value in {"packing": packing, **keys}.items() if value is not None}


def tables_at(level, kind, keys, of_run):
    """Return the tables of a run that has keys in [run], in its second stage, or in an eval."""
    run = {"steps": 4, "global_batch_size": 3, "seq_len": LONG if level == "eval" else SHORT}
    tables = {"run": run | (keys if level == "run" else of_run), "sources": [{"name": "main", "store": kind}]}
    if level == "stage":
        first = {"name": "a", "start_step": 0, "on_long": "truncate_end"}
        return tables | {"stages": [first, {"name": "b", "start_step": 2, **keys}]}
    if level == "eval":
        return tables | {"evals": [{"name": "e", "store": f"{kind}-other", "seq_len": SHORT, **keys}]}
    return tables


def outcome(tables, folder):
    """Return fingerprint and all batches of a run, or of its eval; of one that cannot be, the error."""
    run = Run.from_tables(tables, folder=folder)
    try:
        item = run.evals["e"] if "evals" in tables else run
        plan, loader = item.plan(), item.loader(threads=0)
    except ConfigError as error:
        return run, str(error)
    batches = [{name: array.tolist() for name, array in loader[step].items()} for step in range(plan.steps)]
    return run, (plan.fingerprint, batches)


@pytest.mark.parametrize("level", ["run", "stage", "eval"])
@pytest.mark.parametrize("packing", [None, *WHOLE])
@pytest.mark.parametrize("kind", ["seq", "sft", "dpo", "grpo"])
def test_old_spellings_mean_what_they_meant(stores, kind, packing, level):
    """Same fingerprint and batches, or the same error, as with the new value."""
    folder, _ = stores
    is_alone = packing == "padded" or kind not in ("seq", "sft")
    # What [run] says, for a stage to override or to take over.
    of_runs = [{}, *({"on_long": value} for value in ("drop", "stop", "truncate_start")[: 3 * (level == "stage")])]
    for of_run in of_runs:
        found = {}
        for value in (None, *ON_LONG):
            tables = tables_at(level, kind, keys_of(packing, on_long=value), of_run)
            found[value] = None if value == "split" and is_alone else outcome(tables, folder)[1]
        if not of_run:
            assert found[None] == found[DEFAULTS[is_alone]]
        for (split, on_long), meanings in RESPELLED.items():
            old = tables_at(level, kind, keys_of(packing, split=split, on_long=on_long), of_run)
            new = meanings[is_alone]
            if new is None and split is not None and of_run:
                new = DEFAULTS[is_alone]
            if (split, on_long) == (None, "cut") and of_run.get("on_long") == "truncate_start":
                new = "truncate_start"  # `cut` as the run says
            run, got = outcome(old, folder)
            assert got == found[new], (split, on_long, of_run)
            if isinstance(got, tuple):
                written = tables_at(level, kind, keys_of(packing, on_long=new), of_run)
                assert run.diff(Run.from_tables(written, folder=folder)).changes == ()


@pytest.mark.parametrize(("kind", "packing", "on_long"), DIGESTS)
def test_new_spellings_give_the_plans_and_batches_of_before(stores, kind, packing, on_long):
    tables = tables_at("run", kind, keys_of(packing, on_long=on_long), {})
    tables["run"]["seq_len"] = LONG if on_long == "stop" else SHORT
    run = Run.from_tables(tables, folder=stores[0])
    plan, loader = run.plan(), run.loader(threads=0)
    digest = hashlib.sha256(plan.fingerprint.encode())
    for step in range(plan.steps):
        for name, array in sorted(loader[step].items()):
            digest.update(name.encode() + array.tobytes())
    assert digest.hexdigest()[:16] == DIGESTS[kind, packing, on_long]


@pytest.mark.parametrize("level", ["run", "stage", "eval"])
@pytest.mark.parametrize(("split", "on_long"), CONTRADICTIONS)
def test_old_keys_that_contradict_each_other_are_rejected(stores, split, on_long, level):
    tables = tables_at(level, "seq", {"split": split, "on_long": on_long}, {})
    with pytest.raises(ConfigError, match=rf"got '{split}' with on_long = '{on_long}'; remove split"):
        Run.from_tables(tables, folder=stores[0])


@pytest.mark.parametrize("level", ["run", "stage", "eval"])
@pytest.mark.parametrize(
    ("kind", "packing", "message"),
    [
        ("seq", "padded", "packing = 'padded'"),
        ("dpo", None, "stores of dpo"),
        ("grpo", "best_fit", "stores of grpo"),
    ],
)
def test_a_record_that_is_a_row_cannot_be_split(stores, kind, packing, message, level):
    tables = tables_at(level, kind, keys_of(packing, on_long="split"), {})
    wanted = f"on_long = 'split' cannot be combined with {message}.*; use truncate_end"
    with pytest.raises(ConfigError, match=wanted):
        open_loader(tables, stores[0])


def open_loader(tables, folder):
    run = Run.from_tables(tables, folder=folder)
    return (run.evals["e"] if "evals" in tables else run).loader()
