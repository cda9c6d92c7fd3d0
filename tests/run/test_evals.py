import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill
from tokenmill.config.run import parse_config
from tokenmill.errors import ConfigError
from tokenmill.loader.digests import row_digests, stack
from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter

WORLDS = (1, 2, 3, 4, 7)
RUN = {"steps": 12, "global_batch_size": 4, "seq_len": 8}
LENGTHS = [5, 9, 1, 30, 12, 8, 2, 17, 9, 4, 26, 11, 3]


@pytest.fixture
def make_run(tmp_path, make_store):
    def make(*evals, stores=("web", "val"), sources=None, **run):
        for seed, name in enumerate(stores):
            if not (tmp_path / name).exists():
                make_store(name, LENGTHS, seed=seed)
        tables = {
            "run": {key: value for key, value in (RUN | run).items() if value is not None},
            "sources": sources or [{"name": "web", "store": "web"}],
            "evals": list(evals),
        }
        return Run(config=parse_config(tables), folder=tmp_path)

    return make


def rows_of(run, name="val", world_size=1, micro_batch=1, **options):
    """Return the rows of an eval as all ranks deliver them, in order, and how many batches each rank had."""
    ranks = [
        list(run.evals[name].loader(rank=rank, world_size=world_size, micro_batch=micro_batch, **options))
        for rank in range(world_size)
    ]
    together = [stack(batches) for batches in zip(*ranks, strict=True)]
    return stack([{key: value for key, value in b.items() if key != "num_loss_tokens"} for b in together]), [
        len(rank) for rank in ranks
    ]


# What an eval delivers


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_labels_seen_by_the_end_are_those_of_the_rows_taken(make_run, packing, rows):
    run = make_run({"name": "val", "store": "val", "packing": packing, "seq_len": 30, "rows": rows})
    plan = run.evals["val"].loader(world_size=3).plan
    labels = rows_of(run, world_size=3)[0]["labels"]
    assert plan.tokens_seen(plan.steps).trained == (labels >= 0).sum()


def test_an_eval_has_every_document_once_in_order(make_run, make_store):
    _, tokens, offsets = make_store("val", LENGTHS, seed=1)
    run = make_run({"name": "val", "store": "val", "packing": "padded", "seq_len": 30})
    rows, _ = rows_of(run)
    wanted = [tokens[begin:end].tolist() for begin, end in pairwise(offsets)]
    got = [ids[doc >= 0].tolist() for ids, doc in zip(rows["input_ids"], rows["doc_ids"], strict=True)]
    assert got == wanted


@pytest.mark.parametrize(
    ("said", "fate"),
    [
        ({}, "are cut: what follows a cut is evaluated without what stood before"),
        ({"on_long": "drop"}, "are left out"),
        ({"on_long": "truncate_start"}, "lose their beginning"),
        ({"seq_len": 64}, None),
    ],
)
def test_conversations_of_an_eval_that_are_no_whole_rows_are_told_once_and_by_the_plan(
    tmp_path, caplog, said, fate
):
    texts = [{"prompt": "ab", "completion": "c" * length} for length in (2, 3, 40, 50)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    tokenmill.prepare(tmp_path / "chat.jsonl", out=tmp_path / "chat", recipe="completion", progress=False)
    tables = {
        "run": {"steps": 2, "global_batch_size": 2, "seq_len": 64},
        "sources": [{"name": "chat", "store": "chat"}],
        "evals": [{"name": "val", "store": "chat", "seq_len": 16, **said}],
    }
    run = Run(config=parse_config(tables), folder=tmp_path)
    wanted = [f"eval 'val': 2 of 4 records of 'val' are longer than a row of 16 tokens and {fate}; raise seq_len"]
    for _ in range(2):
        run.evals["val"].loader()
    for sentences in ([record.getMessage() for record in caplog.records], run.report().warnings):
        told = [sentence for sentence in sentences if "longer than a row of 16" in sentence]
        assert [sentence[: len(wanted[0])] for sentence in told] == (wanted if fate else [])


def test_long_documents_of_an_eval_are_cut_dropped_or_refused(make_run):
    longest = max(LENGTHS)
    table = {"name": "val", "store": "val", "packing": "padded", "seq_len": longest - 2}
    with pytest.raises(ConfigError, match='set on_long = "drop" or "truncate_end"'):
        make_run(table).evals["val"].loader()
    with pytest.raises(ConfigError, match="must have at most"):
        make_run({**table, "on_long": "stop"}).evals["val"].loader()
    with pytest.raises(ConfigError, match=r"eval 'val': on_long must be one of split, .*, got 'crop'"):
        make_run({**table, "on_long": "crop"})
    kept = sum(length < longest for length in LENGTHS)
    rows = {how: make_run({**table, "on_long": how}).evals["val"].num_rows for how in ("truncate_end", "drop")}
    assert rows == {"truncate_end": len(LENGTHS), "drop": kept}


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_rows_are_the_same_at_any_world_size_and_micro_batch(make_run, packing, world_size):
    run = make_run({"name": "val", "store": "val", "packing": packing, "seq_len": 30})
    alone, _ = rows_of(run)
    number = run.evals["val"].num_rows
    assert alone["labels"].shape == (number, 30)
    for micro_batch in (1, 2, 5):
        rows, batches = rows_of(run, world_size=world_size, micro_batch=micro_batch)
        assert batches == [-(-number // (world_size * micro_batch))] * world_size
        assert row_digests(rows)[:number] == row_digests(alone)
        assert (rows["labels"][number:] == -100).all()
        assert (rows["doc_ids"][number:] == -1).all()


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), world=st.sampled_from(WORLDS), data=st.data())
def test_mean_loss_is_exact_for_any_rows_and_ranks(make_run, make_store, lengths, world, data):
    """[V1.a] The loss of a token is made up of it and its label; summed as ranks do, in fp64."""
    make_store("val", lengths, seed=3)
    micro = data.draw(st.integers(1, 3))
    run = make_run({"name": "val", "store": "val"})

    def loss(batch):
        kept = batch["labels"] != -100
        return np.where(kept, np.sin(batch["input_ids"] * 0.1 + batch["labels"] * 0.7 + batch["position_ids"]), 0.0)

    def mean(world_size, micro_batch):
        loaders = [
            run.evals["val"].loader(rank=rank, world_size=world_size, micro_batch=micro_batch, threads=0)
            for rank in range(world_size)
        ]
        sums = [sum(float(loss(batch).sum()) for batch in loader) for loader in loaders]
        tokens = [sum(int(batch["num_loss_tokens"]) for batch in loader) for loader in loaders]
        assert tokens == [run.evals["val"].held.trained] * world_size
        return sum(sums) / max(1, tokens[0])

    assert mean(world, micro) == pytest.approx(mean(1, 1), rel=0, abs=1e-10)


def test_every_round_is_the_same_also_after_one_that_was_given_up(make_run):
    """[V1.a]"""
    run = make_run({"name": "val", "store": "val"})
    loader = run.evals["val"].loader(micro_batch=2)
    first = [row_digests(batch) for batch in loader]
    assert len(first) == len(loader) > 3
    stream = iter(loader)
    next(stream)
    next(stream)
    assert [row_digests(batch) for batch in loader] == first
    assert [row_digests(batch) for batch in loader] == first


def test_an_eval_beside_the_training_loader_does_not_move_it(make_run):
    run = make_run({"name": "val", "store": "val"})
    alone = [row_digests(batch) for batch in run.loader(micro_batch=2)]
    loader = run.loader(micro_batch=2)
    evals = run.evals["val"].loader(micro_batch=3)
    seen, rounds = [], []
    for batch in loader:
        seen.append(row_digests(batch))
        state = loader.state_dict()
        rounds.append([row_digests(other) for other in evals])
        assert loader.state_dict() == state
    assert seen == alone
    assert all(one == rounds[0] for one in rounds)


def test_rows_take_the_first_and_no_more_than_there_are(make_run):
    run = make_run({"name": "val", "store": "val", "rows": 5}, {"name": "all", "store": "val"})
    rows, _ = rows_of(run)
    whole, _ = rows_of(run, "all")
    assert row_digests(rows) == row_digests(whole)[:5]
    assert run.evals["val"].num_rows == 5
    with pytest.raises(ConfigError, match=r"eval 'val': rows must be at most the \d+ there are, got 1000"):
        _ = make_run({"name": "val", "store": "val", "rows": 1000}).evals["val"].num_rows


def test_sources_follow_one_another_in_the_order_of_the_config(make_run, make_store):
    make_store("zoo", LENGTHS, seed=5)
    parts = [{"store": "zoo"}, {"store": "val"}]
    run = make_run(
        {"name": "both", "sources": parts}, {"name": "zoo", "store": "zoo"}, {"name": "val", "store": "val"}
    )
    both, _ = rows_of(
        run, "both", world_size=2, arrays=("input_ids", "labels", "position_ids", "doc_ids", "source")
    )
    single = [row_digests(rows_of(run, name)[0]) for name in ("zoo", "val")]
    number = run.evals["both"].num_rows
    assert row_digests(both)[:number] == [*single[0], *single[1]]
    assert both["source"][:number].tolist() == [0] * len(single[0]) + [1] * len(single[1])


def test_weights_say_the_share_of_rows_and_no_row_is_taken_twice(make_run, make_store):
    make_store("zoo", LENGTHS[:4], seed=5)
    parts = [{"store": "val", "weight": 3}, {"store": "zoo", "weight": 1}]
    eight = make_run({"name": "mix", "sources": parts, "rows": 8}).evals["mix"]
    assert [part.taken for part in eight.parts] == [6, 2]
    most = make_run({"name": "mix", "sources": parts}).evals["mix"]
    sizes = [part.rows.num_rows for part in most.parts]
    taken = [part.taken for part in most.parts]
    assert all(number <= size for number, size in zip(taken, sizes, strict=True))
    assert all(abs(number - sum(taken) * share) < 1 for number, share in zip(taken, (0.75, 0.25), strict=True))
    assert any(number == size for number, size in zip(taken, sizes, strict=True))
    with pytest.raises(ConfigError, match=r"'val' must have 75 rows for its share of 100, got \d+; lower rows"):
        _ = make_run({"name": "mix", "sources": parts, "rows": 100}).evals["mix"].parts


def test_records_are_evaluated_once_each(tmp_path, tokenizer_identity):
    spec = StoreSpec(
        keys={"chosen": "<u2", "rejected": "<u2", "chosen_mask": "|u1", "rejected_mask": "|u1"},
        tokenizer=tokenizer_identity(100),
        recipe={"kind": "text"},
        kind="dpo",
    )
    lengths = np.array([3, 5, 2, 4, 6])
    offsets = np.cumsum([0, *lengths])
    for name in ("pairs", "held"):
        with StoreWriter(tmp_path / name, spec) as writer:
            ids = np.arange(offsets[-1]).astype("<u2")
            mask = np.ones(ids.size, "|u1")
            arrays = {"chosen": ids, "rejected": ids + 1, "chosen_mask": mask, "rejected_mask": mask}
            writer.append(arrays, {"chosen": offsets, "rejected": offsets})
            writer.commit()
    tables = {
        "run": {"steps": 2, "global_batch_size": 2, "seq_len": 8},
        "sources": [{"name": "pairs", "store": "pairs"}],
        "evals": [
            {"name": "held", "store": "held"},
            {"name": "some", "source": "pairs", "documents": [4, 1]},
        ],
    }
    run = Run(config=parse_config(tables), folder=tmp_path)
    rows, _ = rows_of(run, "held", world_size=3)
    assert rows["chosen_len"].tolist() == [3, 5, 2, 4, 6, 0]
    assert not rows["chosen_mask"][5].any()
    some, _ = rows_of(run, "some")
    assert some["chosen"][0, :5].tolist() == [3, 4, 5, 6, 7]
    assert some["chosen_len"].tolist() == [5, 6]
    assert {use.spans[0].document for step in range(2) for use in run.plan().what(step)} <= {0, 2, 3}


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 4), (2, 2), (8, 1)])
def test_groups_that_only_fill_a_batch_have_no_rewards(tmp_path, tokenizer_identity, world_size, micro_batch):
    """Some ranks have no others: nothing may be read for them."""
    keys = {"prompts": "<u2", "responses": "<u2", "masks": "|u1", "rewards": "<f4"}
    spec = StoreSpec(keys=keys, tokenizer=tokenizer_identity(100), recipe={"kind": "text"}, kind="grpo")
    sizes = {"prompts": 6, "responses": 18, "masks": 18, "rewards": 6}  # of three records of two responses
    offsets = {"prompts": 2, "groups": 2, "responses": 3}
    with StoreWriter(tmp_path / "val", spec) as writer:
        arrays = {key: np.arange(1, size + 1).astype(keys[key]) for key, size in sizes.items()}
        writer.append(arrays, {axis: np.arange(0, sizes.get(axis, 6) + 1, step) for axis, step in offsets.items()})
        writer.commit()
    tables = {
        "run": {"steps": 2, "global_batch_size": 1, "seq_len": 8},
        "sources": [{"name": "web", "store": "val"}],
        "evals": [{"name": "val", "store": "val"}],
    }
    run = Run(config=parse_config(tables), folder=tmp_path)
    rows, _ = rows_of(run, world_size=world_size, micro_batch=micro_batch)
    num_rows = 8 if world_size == 8 else 4
    assert rows["group_size"].tolist() == [2, 2, 2] + [0] * (num_rows - 3)
    assert rows["rewards"].tolist() == [[1, 2], [3, 4], [5, 6]] + [[0, 0]] * (num_rows - 3)


# What is held out of training


def documents_trained(run, source="web"):
    plan = run.plan()
    uses = [use for step in range(plan.steps) for use in plan.what(step) if use.source == source]
    return {span.document for use in uses for span in use.spans}


@pytest.mark.parametrize("documents", ["2:5", [4, 2, 3, 3]])
def test_documents_of_a_source_are_evaluated_and_never_trained_on(make_run, make_store, documents):
    """[V1.b]"""
    _, tokens, offsets = make_store("web", LENGTHS, seed=0)
    run = make_run({"name": "val", "source": "web", "documents": documents, "packing": "padded", "seq_len": 32})
    assert documents_trained(run) == set(range(len(LENGTHS))) - {2, 3, 4}
    rows, _ = rows_of(run)
    got = [ids[doc >= 0].tolist() for ids, doc in zip(rows["input_ids"], rows["doc_ids"], strict=True)]
    assert got == [tokens[offsets[n] : offsets[n + 1]].tolist() for n in (2, 3, 4)]


def test_a_file_names_documents_and_two_evals_hold_out_both(make_run, tmp_path):
    (tmp_path / "held.txt").write_text("0\n12 # the last\n")
    run = make_run(
        {"name": "val", "source": "web", "file": "held.txt"}, {"name": "more", "source": "web", "documents": [5]}
    )
    assert documents_trained(run) == set(range(len(LENGTHS))) - {0, 5, 12}


def test_held_out_documents_stay_out_whatever_else_is_quarantined(make_run):
    run = make_run({"name": "val", "source": "web", "documents": [1]})
    tables = {
        "run": {"steps": 12, "global_batch_size": 4, "seq_len": 8},
        "sources": [{"name": "web", "store": "web"}],
        "evals": [{"name": "val", "source": "web", "documents": [1]}],
        "quarantine": [{"source": "web", "from_step": 0, "documents": [2]}],
    }
    both = Run(config=parse_config(tables), folder=run.folder)
    assert documents_trained(both) == set(range(len(LENGTHS))) - {1, 2}


def test_a_source_that_an_eval_takes_whole_needs_no_weight_and_may_have_none(make_run):
    sources = [{"name": "web", "store": "web"}, {"name": "held", "store": "val"}]
    run = make_run({"name": "val", "source": "held"}, sources=sources)
    assert {run.plan().sources[n] for step in range(12) for n in run.plan().rows(step)[0]} == {"web"}
    assert run.evals["val"].num_rows > 5
    with pytest.raises(ConfigError, match="weights must name sources that are trained on, got 'held'"):
        make_run({"name": "val", "source": "held"}, sources=sources, weights={"web": 1, "held": 1}).plan()
    with pytest.raises(ConfigError, match="a source must be left to train on, got all held out by evals"):
        make_run({"name": "val", "source": "web"}).plan()


def test_an_eval_by_store_leaves_the_plan_as_it_is(make_run):
    plain = make_run()
    run = make_run({"name": "val", "store": "val", "every": 3})
    assert run.plan().fingerprint == plain.plan().fingerprint
    assert run.evals["val"].every == 3


def test_val_stores_of_prepare_are_evals(tmp_path):
    texts = [f"document number {n} of the mill" for n in range(60)]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = tokenmill.PrepareOptions(val_fraction=0.2)
    tokenmill.prepare(
        tmp_path / "web.jsonl", out=tmp_path / "web", tokenizer="bytes", progress=False, options=options
    )
    tables = {
        "run": {"steps": 5, "global_batch_size": 2, "seq_len": 64},
        "sources": [{"name": "web", "store": "web/train"}],
        "evals": [{"name": "val", "store": "web/val", "packing": "padded"}],
    }
    run = Run(config=parse_config(tables), folder=tmp_path)
    assert 0 < run.evals["val"].num_rows < 60


# What is refused


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "v"}, r"eval 'v': must have a store, or a source of the run, got neither"),
        ({"name": "v", "store": "a", "source": "web"}, r"got both; for example store"),
        (
            {"name": "v", "store": "a", "packing": "concat"},
            r"packing must be one of padded, best_fit, got 'concat'",
        ),
        ({"name": "v", "store": "a", "rows": 0}, r"eval 'v': rows must be at least 1, got 0"),
        ({"name": "v", "source": "wbe", "documents": [1]}, r"source must be one of the run's, got 'wbe'; did you"),
        ({"name": "v", "source": "web", "documents": "5:2"}, r"documents must be a:b with a below b.*got '5:2'"),
        (
            {"name": "v", "source": "web", "documents": "0:1000000000000"},
            r"documents must be at most 268,435,456, got '0:1000000000000', which are 1,000,000,000,000; name",
        ),
        ({"name": "v", "source": "web", "documents": [-1]}, r"numbers from 0 on, got \(-1,\)"),
        ({"name": "v", "store": "a", "sources": [{"store": "b"}]}, r"store is for one source, got sources as well"),
        (
            {"name": "v", "sources": [{"store": "a"}, {"store": "b/a"}]},
            r"names of sources must differ, got 'a' twice",
        ),
        ({"name": "v", "sources": [{"store": "a", "weight": 1}, {"store": "b"}]}, r"must have a weight, or none"),
        ({"name": "v", "sources": [{"stroe": "a"}]}, r"evals\[0\].sources\[0\]: unknown key: 'stroe'"),
        ({"name": "a b", "store": "a"}, r"evals.name: must be letters, digits"),
    ],
)
def test_an_eval_that_does_not_fit_is_refused_with_the_way_out(make_run, table, message):
    with pytest.raises(ConfigError, match=message):
        make_run(table)


def test_what_only_stores_know_is_refused_when_they_are_opened(make_run, make_store):
    run = make_run({"name": "val", "source": "web", "documents": "0:99"})
    with pytest.raises(ConfigError, match=r"documents must be among the 13 of .*web, got 98; count from 0"):
        _ = run.evals["val"].parts
    with pytest.raises(ConfigError, match="evals: name must be one of the run's, got 'vla'; did you mean 'val'"):
        run.evals["vla"]
    with pytest.raises(ConfigError, match=r"evals: must be in the config, got 'val' and no \[\[evals\]\]"):
        make_run().evals["val"]
    make_store("other", [5], vocab_size=77)
    with pytest.raises(ConfigError, match="differ in vocab_size: 50000 and 77"):
        _ = make_run({"name": "val", "store": "other"}).evals["val"].parts


def test_live_text_cannot_be_held_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    live = {"name": "web", "documents": ["a.jsonl"], "tokenizer": "bytes", "live": True}
    tables = {
        "run": {"steps": 5, "global_batch_size": 2, "seq_len": 64},
        "sources": [live],
        "evals": [{"name": "val", "source": "web", "documents": [0]}],
    }
    with pytest.raises(ConfigError, match="documents must have numbers, got live text in 'web'"):
        parse_config(tables)


# A run with evals, over time


def test_a_fork_in_another_folder_has_the_same_evals(make_run, tmp_path):
    (tmp_path / "held.txt").write_text("1\n")
    parts = [{"store": "val", "weight": 1}, {"source": "web", "documents": [2], "weight": 2}]
    run = make_run({"name": "val", "source": "web", "file": "held.txt"}, {"name": "mix", "sources": parts})
    (tmp_path / "forks").mkdir()
    run.fork(at=6, to=tmp_path / "forks" / "other.toml")
    other = Run.from_toml(tmp_path / "forks" / "other.toml")
    for name in ("val", "mix"):
        assert row_digests(rows_of(other, name)[0]) == row_digests(rows_of(run, name)[0])
    assert other.plan().fingerprint == run.plan().fingerprint


def test_a_diff_names_what_an_eval_holds_out(make_run):
    old, new = make_run(), make_run({"name": "val", "source": "web", "documents": [3]})
    difference = old.diff(new)
    assert difference.first_step == 0
    assert "evals[0].source" in str(difference.changes[0])
    aside = make_run({"name": "val", "store": "val", "rows": 3})
    assert old.diff(aside).first_step is None


def test_an_eval_is_due_every_so_many_steps_or_tokens(make_run):
    ramp = {"from": 2, "to": 4, "step": 2, "over_steps": 6}
    evals = [
        {"name": "steps", "store": "val", "every": 5},
        {"name": "tokens", "store": "val", "every_tokens": 64},
        {"name": "never", "store": "val"},
    ]
    run = make_run(*evals, global_batch_size=ramp)
    due = {name: [step for step in range(13) if item.due(step)] for name, item in run.evals.items()}
    # Steps of 16 tokens up to the sixth, of 32 from there on: 64 are passed after 4, 7, 9 and 11 steps.
    assert due == {"steps": [5, 10], "tokens": [4, 7, 9, 11], "never": []}


def test_a_run_in_tokens_forks_in_steps(make_run, tmp_path):
    run = make_run(steps=None, tokens="1K", global_batch_size={"from": 2, "to": 4, "step": 2, "over_tokens": 200})
    run.fork(at=20, to=tmp_path / "other.toml")
    other = Run.from_toml(tmp_path / "other.toml")
    assert other.plan().fingerprint == run.plan().fingerprint
    assert "1K" not in (tmp_path / "other.toml").read_text()


def test_members_of_a_group_get_their_part_of_every_row(make_run):
    """And labels of as many tokens as those that the run trains on."""
    run = make_run({"name": "val", "store": "val"}, horizon=2, segment_multiple=4)
    whole = list(run.evals["val"].loader(micro_batch=2))
    parts = [
        list(run.evals["val"].loader(layout=tokenmill.Layout(cp=(rank, 2), cut="segments"), micro_batch=2))
        for rank in range(2)
    ]
    for batch, *members in zip(whole, *parts, strict=True):
        assert (batch["labels"].shape, members[0]["labels"].shape) == ((2, 8, 2), (2, 4, 2))
        together = np.concatenate([member["labels"].reshape(-1, 2) for member in members])
        assert sorted(together.tolist()) == sorted(batch["labels"].reshape(-1, 2).tolist())
        assert all(np.array_equal(m["num_loss_tokens"], batch["num_loss_tokens"]) for m in members)
