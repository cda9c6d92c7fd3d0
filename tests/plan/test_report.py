"""What the report says of every stage and source is what counting over the real batches gives."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config.run import parse_config
from tokenmill.loader import IGNORE, RECORD_ARRAYS
from tokenmill.plan import Ramp
from tokenmill.plan import report as report_module
from tokenmill.plan.report import report, warnings
from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter
from tokenmill.view.tables import plan_tables

VOCAB = 300
PACKINGS = [
    {"packing": "best_fit"},
    {"packing": "best_fit", "on_long": "truncate_start"},
    {"packing": "best_fit", "on_long": "truncate_end"},
    {"packing": "bos_best_fit"},
    {"packing": "bos_best_fit", "crop": "discard"},
    {"packing": "padded", "on_long": "truncate_start"},
    {"packing": "padded", "on_long": "truncate_end"},
    {"packing": "concat"},
    {"packing": "concat", "cross_document_labels": True},
]
CUTS = [{"on_long": "truncate_end"}, {"on_long": "truncate_start"}, {}]
LONGEST = 14
"""Tokens of an array of a record; a row of a run that cuts none has room for them."""


@pytest.fixture
def write(tmp_path, tokenizer_identity):
    """Return a function that writes a store of random records of a kind; half of its mask is 0, if it has one."""

    def make(name, kind, seed, *, masked=True):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(1, 15))
        values, offsets = random_arrays(rng, kind, count, masked)
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        spec = StoreSpec(
            kind="sft" if "loss_mask" in values else kind,
            keys={key: array.dtype.str for key, array in values.items()},
            tokenizer=tokenizer_identity(VOCAB) | {"add_bos": True, "bos_id": 1},
            recipe={},
            max_tokens_per_shard=int(rng.choice([40, 10**6, 10**6])),
        )
        with StoreWriter(tmp_path / name, spec) as writer:
            writer.append(values, offsets)
            writer.commit()

    return make


def random_arrays(rng, kind, count, masked):
    """Return (values, offsets) as a store's writer takes them."""
    starts = {}

    def ids(axis, lengths):
        starts[axis] = np.cumsum([0, *lengths])
        made = rng.integers(2, VOCAB, starts[axis][-1]).astype("<u2")
        made[starts[axis][:-1][np.diff(starts[axis]) > 0]] = 1
        return made

    def mask(name, array):
        return {name: rng.integers(0, 2, array.size).astype("|u1")} if masked else {}

    if kind == "seq":
        # Some longer than a row, some empty, and one that fills a row by itself.
        sequence = ids("documents", [*rng.integers(0, rng.choice([5, 70]), count), 40])
        return {"sequence": sequence, **mask("loss_mask", sequence)}, starts["documents"]
    if kind == "dpo":
        chosen, rejected = (ids(axis, rng.integers(0, LONGEST + 1, count)) for axis in ("chosen", "rejected"))
        masks = mask("chosen_mask", chosen) | mask("rejected_mask", rejected)
        return {"chosen": chosen, "rejected": rejected, **masks}, starts
    sizes = rng.integers(0, rng.integers(1, 6), count)
    starts["groups"] = np.cumsum([0, *sizes])
    prompts = ids("prompts", rng.integers(0, LONGEST + 1, count))
    responses = ids("responses", rng.integers(0, LONGEST + 1, sizes.sum()))
    rewards = np.ones(sizes.sum(), "<f4")
    return {"prompts": prompts, "responses": responses, "rewards": rewards, **mask("masks", responses)}, starts


def make_run(folder, stages, *, sources=("a", "b"), steps, **run):
    tables = {
        "run": {"steps": steps, "global_batch_size": 3, "seq_len": 16, "seed": 5} | run,
        "sources": [{"name": name, "store": name} for name in sources],
        "stages": stages,
    }
    return Run(config=parse_config(tables), folder=folder)


def rows_by_hand(batch):
    """Return (trained, tokens, slots) of every row of a batch."""
    if "labels" in batch:
        slots = np.full(batch["labels"].shape[0], batch["labels"].shape[1])
        return (batch["labels"] != IGNORE).sum(axis=1), (batch["doc_ids"] >= 0).sum(axis=1), slots
    if "chosen" in batch:
        trained = batch["chosen_mask"][:, 1:].sum(axis=1) + batch["rejected_mask"][:, 1:].sum(axis=1)
        slots = np.full(trained.size, 2 * batch["chosen"].shape[1])
        return trained, batch["chosen_len"] + batch["rejected_len"], slots
    masks = batch["masks"].copy()
    masks[batch["prompt_len"] == 0, :, 0] = False  # nothing stands before it
    rows, group, seq_len = masks.shape
    tokens = batch["prompt_len"] + batch["response_len"].sum(axis=1)
    return masks.sum(axis=(1, 2)), tokens, np.full(rows, (1 + group) * seq_len)


def counted_by_hand(run):
    """Return (rows, trained, unlabelled, padding) by (stage, source), counted over all batches of a run."""
    plan = run.plan()
    kind = next(iter(run.stores.values())).manifest.kind
    arrays = (*RECORD_ARRAYS.get(kind, ("labels", "doc_ids")), "source")
    loader = run.loader(micro_batch=1, arrays=arrays)
    found = {
        (stage.spec.name, name): np.zeros(4, np.int64)
        for stage in plan.stages
        for name in sorted(stage.spec.weights)
    }
    for step in range(plan.steps):
        batch = loader[step]
        trained, tokens, slots = rows_by_hand(batch)
        for row, source in enumerate(batch["source"]):
            line = found[plan.at(step).stage, plan.sources[source]]
            line += [1, trained[row], tokens[row] - trained[row], slots[row] - tokens[row]]
    return {key: tuple(int(number) for number in line) for key, line in found.items()}


def said_by(facts):
    return {
        (share.stage, share.source): (share.rows, share.trained, share.unlabelled, share.padding)
        for share in facts.shares
    }


stage_choices = st.lists(
    st.tuples(
        st.integers(1, 12),  # its steps
        st.sampled_from([16, 20, 24]),
        st.integers(1, 5),  # its batch
        st.sampled_from([{"a": 1}, {"b": 1}, {"a": 0.8, "b": 0.2}, {"a": 1e-6, "b": 1}]),
        st.sampled_from(["unseen", "restart"]),
    ),
    min_size=1,
    max_size=3,
)


def stages_of(chosen, **changes):
    starts = np.cumsum([0, *(steps for steps, *_ in chosen)]).tolist()
    stages = [
        {
            "name": f"s{start}",
            "start_step": start,
            "seq_len": seq_len,
            "global_batch_size": batch,
            "weights": weights,
            "on_change": on_change,
        }
        | changes
        for start, (_, seq_len, batch, weights, on_change) in zip(starts, chosen, strict=False)
    ]
    return stages, starts[-1]


def check(run):
    facts = report(run.plan())
    assert said_by(facts) == counted_by_hand(run)
    assert all(share.counted for share in facts.shares)
    for stage in facts.stages:
        shares = [share for share in facts.shares if share.stage == stage.name]
        assert stage.rows == sum(share.rows for share in shares)
        assert stage.tokens == sum(share.tokens for share in shares)
        for share in shares:
            assert share.tokens == share.trained + share.unlabelled + share.padding
    assert facts.tokens == sum(stage.tokens for stage in facts.stages)


@pytest.mark.slow
@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: "-".join(map(str, packing.values())))
@given(chosen=stage_choices, seed=st.integers(0, 999), masked=st.tuples(st.booleans(), st.booleans()))
def test_sequences_with_and_without_masks_are_counted_to_the_token(write, tmp_path, packing, chosen, seed, masked):
    """[P2.a]"""
    for number, name in enumerate("ab"):
        write(name, "seq", 2 * seed + number, masked=masked[number])
    crossing = packing.get("cross_document_labels", False)
    stages, steps = stages_of(chosen, **({"on_change": "restart"} if crossing else {}))
    check(make_run(tmp_path, stages, steps=steps, **packing))


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.get("on_long", "stop"))
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
@given(chosen=stage_choices, seed=st.integers(0, 999), masked=st.tuples(st.booleans(), st.booleans()))
def test_records_are_counted_over_all_their_arrays(write, tmp_path, kind, cut, chosen, seed, masked):
    """[P2.a]"""
    for number, name in enumerate("ab"):
        write(name, kind, 2 * seed + number, masked=masked[number])
    stages, steps = stages_of(chosen)
    if cut:
        stages = [stage | {"seq_len": stage["seq_len"] - LONGEST} for stage in stages]
    check(make_run(tmp_path, stages, steps=steps, **cut))


KINDS = [*(("seq", packing) for packing in PACKINGS), *((kind, cut) for kind in ("dpo", "grpo") for cut in CUTS)]


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize(("kind", "packing"), KINDS, ids=str)
def test_whole_epochs_have_the_fates_of_an_epoch(write, tmp_path, monkeypatch, kind, packing, epochs):
    """[P2.a] And need no row to be counted by itself."""
    write("a", kind, 8)
    rows = make_run(tmp_path, [], sources="a", steps=1, **packing).plan().stages[0].rows["a"].num_rows
    monkeypatch.setattr(report_module, "COUNTED_ROWS", 0)
    run = make_run(tmp_path, [], sources="a", steps=epochs * rows, **packing | {"global_batch_size": 1})
    facts = report(run.plan())
    [share], [source] = facts.shares, facts.sources
    assert share.counted
    assert (share.trained, share.padding) == (epochs * source.fates.trained, epochs * source.fates.padding)
    assert said_by(facts) == counted_by_hand(run)


def test_the_fates_are_padded_to_the_shape_that_sources_share(write, tmp_path):
    """[P2.a] The groups of one source are padded to the largest of the other."""
    for seed, name in ((3, "a"), (6, "b")):
        write(name, "grpo", seed)
    stores = make_run(tmp_path, [], steps=1, weights={"a": 1, "b": 1}).plan().stages[0].rows
    assert len({rows.largest_group for rows in stores.values()}) == 2
    weights = {name: rows.num_rows for name, rows in stores.items()}
    run = make_run(tmp_path, [], steps=1, weights=weights, global_batch_size=sum(weights.values()))
    facts = report(run.plan())
    assert {share.source: (share.rows, share.trained, share.padding) for share in facts.shares} == {
        source.name: (source.fates.rows, source.fates.trained, source.fates.padding) for source in facts.sources
    }
    for source in facts.sources:
        own = stores[source.name].fates()
        assert replace(source.fates, padding=own.padding) == own


@pytest.mark.parametrize(("kind", "packing"), KINDS, ids=str)
@pytest.mark.parametrize("steps", [1, 7, 61])
def test_an_estimate_is_said_to_be_one_and_balances(write, tmp_path, monkeypatch, kind, packing, steps):
    """[P2.a] Where more rows would have to be counted than are; of whole epochs in between nothing is guessed."""
    write("a", kind, 8)
    stages = [{"name": "x", "start_step": 0}, {"name": "y", "start_step": 1, "global_batch_size": 7}]
    run = make_run(tmp_path, stages, sources="a", steps=1 + steps, **packing)
    exact = report(run.plan())
    monkeypatch.setattr(report_module, "COUNTED_ROWS", 0)
    guessed, num_rows = report(run.plan()), exact.sources[0].rows
    assert [asdict(stage) for stage in guessed.stages] == [asdict(stage) for stage in exact.stages]
    for share, right in zip(guessed.shares, exact.shares, strict=True):
        begin = run.plan().stage(0 if share.stage == "x" else 1).carry("a")
        assert share.counted == (begin % num_rows == 0 and (begin + share.rows) % num_rows == 0)
        assert (share.rows, share.tokens) == (right.rows, right.tokens)
        assert share.tokens == share.trained + share.unlabelled + share.padding
        assert min(share.trained, share.unlabelled, share.padding) >= 0
        # At most the rows of two epochs are guessed.
        assert abs(share.trained - right.trained) <= min(share.rows, 2 * num_rows) * share.tokens // share.rows


def test_a_source_of_which_a_stage_draws_nothing_holds_nothing(write, tmp_path):
    write("a", "dpo", 1)
    write("b", "dpo", 2)
    facts = report(make_run(tmp_path, [], steps=2, weights={"a": 1e-6, "b": 1}).plan())
    share = facts.shares[0]
    assert (share.source, share.rows, share.tokens, share.trained, share.padding) == ("a", 0, 0, 0, 0)
    assert share.counted


@pytest.mark.parametrize("kind", ["seq", "dpo", "grpo"])
def test_masks_are_read_and_no_token(write, tmp_path, kind):
    """[A1.a]"""
    write("a", kind, 8)
    run = make_run(tmp_path, [], sources="a", steps=5)
    before = report(make_run(tmp_path, [], sources="a", steps=5).plan())
    tokens = ("sequence.bin", "chosen.bin", "rejected.bin", "prompts.bin", "responses.bin")
    gone = [file.unlink() for name in tokens for file in tmp_path.glob(f"a/shard-*/{name}")]
    assert gone
    assert report(run.plan()) == before
    assert before.shares[0].trained > 0


# What is odd in a plan is told in one sentence with the way out, and nothing else is.

SIZES = {"web": 1000, "books": 1000}
HALF = {"web": 1, "books": 1}
MOST = {"web": 3, "books": 1}


@pytest.fixture
def warn(make_plan):
    """Return a function that compiles stages as `make_plan` does and gives the warnings."""

    def found(stages, *, sizes=SIZES, steps=40, weigh_by="rows", quarantined=()):
        plan = make_plan(sizes, stages, steps=steps)
        facts = report(plan)
        return warnings(plan, facts, {stage.name: weigh_by for stage in facts.stages}, quarantined)

    return found


def test_the_rows_of_an_epoch_say_of_which_length_they_are(write, tmp_path):
    write("a", "seq", seed=0)
    write("b", "seq", seed=1)
    stages = [
        {"name": "one", "start_step": 0, "weights": {"a": 1, "b": 1}},
        {"name": "two", "start_step": 10, "weights": {"a": 1}, "seq_len": 20},
    ]
    run = make_run(tmp_path, stages, steps=20)
    facts = {source.name: source for source in report(run.plan()).sources}
    assert {name: source.seq_len for name, source in facts.items()} == {"a": 20, "b": 16}
    first, second = run.plan().stages
    assert facts["a"].rows == second.rows["a"].num_rows != first.rows["a"].num_rows
    (table,) = [table for table in plan_tables(run.report()) if table.title == "Sources"]
    column = table.columns.index("at seq_len")
    assert table.columns[column - 1] == "rows per epoch"
    assert [row[column] for row in table.rows] == [20, 16]


def test_a_plan_with_nothing_odd_has_no_warning(warn):
    """[A1.a]"""
    changed = {"lr_scale": 0.5, "ramp": Ramp(shape="linear", begin=20, end=22, weights=HALF)}
    parts = [(0, 4, HALF), (20, 4, MOST, changed), (22, 4, MOST, {"number": 1, "lr_scale": 0.5})]
    assert warn(parts) == []


def test_more_than_four_epochs_are_told_with_the_stage_that_passes_them(warn):
    """[M1.d]"""
    stages = [(0, 4, {"web": 1}), (20, 4, {"web": 1, "books": 3})]
    assert warn(stages, sizes={"web": 20, "books": 99}) == [
        "source 'web': it is read 5.00 times, more than 4 times from stage 'stage1' on; lower its weight, add "
        'documents, or set max_epochs with on_exhausted = "stop"'
    ]
    assert warn(stages, sizes={"web": 25, "books": 99}) == []  # just 4 times


@pytest.mark.parametrize(("start", "told"), [(39, "1 step"), (31, "9 steps"), (30, None)])
def test_a_stage_of_fewer_than_ten_steps_is_told(warn, start, told):
    expected = f"stage 'stage1': it has only {told}; check its start_step and that of the stage after it"
    assert warn([(0, 4, HALF), (start, 4, MOST)]) == ([expected] if told else [])


def test_a_short_run_of_one_stage_is_as_short_as_it_was_meant(warn):
    assert warn([(0, 4, HALF)], steps=3) == []


def test_a_stage_that_is_skipped_in_part_is_as_long_as_it_is(warn):
    parts = [(0, 4, HALF), (6, 4, HALF, {"number": 0, "skipped": ""}), (20, 4, MOST, {"number": 1})]
    assert warn(parts) == []


SCALED = "stage 'stage1': lr_scale goes from 1 to 0.5 and the data stays as it is; leave that to the schedule"


@pytest.mark.parametrize(
    ("batch", "weights", "changes", "told"),
    [
        (4, HALF, {}, True),
        (4, {"web": 2, "books": 2}, {}, True),
        (8, HALF, {}, False),
        (4, MOST, {}, False),
        (4, {"web": 1}, {}, False),
        (4, HALF, {"seed": 8}, False),
    ],
)
def test_a_scale_without_a_change_of_the_data_is_told(warn, batch, weights, changes, told):
    """[M2.b]"""
    found = warn([(0, 4, HALF), (20, batch, weights, {"lr_scale": 0.5} | changes)])
    assert [one[: len(SCALED)] for one in found] == [SCALED][:told]


def test_a_scale_of_the_first_stage_is_told(warn):
    assert warn([(0, 4, HALF, {"lr_scale": 0.1})]) == [
        "stage 'stage0': lr_scale 0.1 scales the run from its first step; set the learning "
        "rate of the trainer instead"
    ]


def test_a_source_that_no_stage_uses_is_told_unless_it_is_quarantined(warn):
    stages = [(0, 4, {"web": 1})]
    assert warn(stages) == ["source 'books': no stage uses it; give it a weight, or remove it from the run"]
    assert warn(stages, quarantined=["books"]) == []


def test_a_ramp_of_one_step_is_told(warn):
    ramp = Ramp(shape="linear", begin=20, end=21, weights=HALF)
    parts = [(0, 4, HALF), (20, 4, MOST, {"ramp": ramp}), (21, 4, MOST, {"number": 1})]
    assert warn(parts) == [
        "stage 'stage1': a ramp of 1 step is a switch with one odd step; raise ramp_steps, or leave the ramp out"
    ]


def test_every_warning_says_where_what_and_the_way_out(warn):
    ramp = Ramp(shape="linear", begin=35, end=36, weights={"web": 1})
    parts = [
        (0, 4, {"web": 1}, {"lr_scale": 0.5}),
        (20, 4, {"web": 1}),
        (35, 4, {"web": 1, "books": 1}, {"ramp": ramp}),
        (36, 4, {"web": 1, "books": 1}, {"number": 2}),
    ]
    found = warn(parts, sizes={"web": 9, "books": 9, "code": 9})
    assert len(found) == 6
    assert [one for one in found if not re.fullmatch(r"(stage|source) '\w+': [^;]+; [^;]+[^.;]", one)] == []
