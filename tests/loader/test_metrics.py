from collections import Counter

import numpy as np
import pytest

from tokenmill.config.run import parse_config
from tokenmill.loader import Layout, batch_digest, count_tokens, row_digests
from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter

LENGTHS = [5, 9, 1, 30, 12, 8, 2, 17, 9, 4, 26, 11, 3]
NAMES = ("web", "books", "code")
OF_THE_RANK = ("data/waited", "data/tokens_per_second")
STAGES = [
    {"name": "base", "start_step": 0, "weights": {"web": 2, "books": 1}},
    {"name": "long", "start_step": 9, "seq_len": 20, "weights": {"web": 1, "books": 2, "code": 2}},
    {"name": "end", "start_step": 20, "weights": {"code": 3, "books": 1}, "ramp": "linear", "ramp_steps": 6},
]
EDITS = {
    "plain": {},
    "batch ramp": {"global_batch_size": {"from": 4, "to": 12, "step": 4, "over_steps": 12}},
    "skips": {"skip": [{"steps": "0:2"}, {"steps": "7:11"}, {"steps": "28:30"}]},
    "quarantine": {"quarantine": [{"source": "books", "documents": [2, 4, 9], "from_step": 5}]},
    "best_fit": {"packing": "best_fit"},
}


@pytest.fixture
def make_run(tmp_path, make_store):
    for seed, name in enumerate(NAMES):
        make_store(name, LENGTHS[seed:] + LENGTHS[:seed], seed=seed)

    def make(stages=STAGES, skip=(), quarantine=(), evals=(), **run):
        tables = {
            "run": {"steps": 30, "global_batch_size": 4, "seq_len": 8} | run,
            "sources": [{"name": name, "store": name} for name in NAMES],
            "stages": list(stages),
            "skip": list(skip),
            "quarantine": list(quarantine),
            "evals": list(evals),
        }
        return Run(config=parse_config(tables), folder=tmp_path)

    return make


def counted(run):
    """Return the metrics before each step, counted in the batches themselves; epochs and shares left out."""
    plan = run.plan()
    loader = run.loader(micro_batch=1, threads=0, arrays=("input_ids", "labels", "doc_ids", "source"))
    rows, tokens, labels, full = Counter(), Counter(), Counter(), 0
    before = []
    for step in range(plan.steps + 1):
        slots = tokens.total()
        before.append(
            {
                "data/rows": rows.total(),
                "data/tokens": slots,
                "data/labels": labels.total(),
                "data/padding": 1 - full / slots if slots else 0.0,
                **{f"data/rows_by_source/{name}": rows[name] for name in NAMES},
                **{f"data/tokens_by_source/{name}": tokens[name] for name in NAMES},
                **{f"data/labels_by_source/{name}": labels[name] for name in NAMES},
            }
        )
        if step == plan.steps or plan.stage(step).spec.skipped is not None:
            continue
        batch = loader[step]
        full += int((batch["doc_ids"] >= 0).sum())
        for row, source in enumerate(batch["source"].tolist()):
            name = plan.sources[source]
            rows[name] += 1
            tokens[name] += batch["input_ids"][row].size
            labels[name] += int((batch["labels"][row] != -100).sum())
    return before


def closed(metrics):
    """Return the metrics that follow from plan and step."""
    return {name: value for name, value in metrics.items() if name not in OF_THE_RANK}


@pytest.mark.parametrize("edit", EDITS)
def test_metrics_are_those_of_the_batches_after_a_resume_at_any_step(make_run, edit):
    """[M1.f]"""
    run = make_run(**EDITS[edit])
    before, plan = counted(run), run.plan()
    straight, stream = run.loader(micro_batch=2), None
    for step in range(plan.steps + 1):
        if plan.next_trained(step) != step:
            continue
        if stream is None:
            stream = iter(straight)
        while straight.step < step:
            next(stream)
        metrics = straight.metrics()
        assert {name: metrics[name] for name in before[step]} == before[step]
        # A plan that was not asked before, at a step that no loader came to by itself.
        resumed = make_run(**EDITS[edit]).loader(rank=1, world_size=2)
        resumed.load_state_dict(straight.state_dict())
        assert resumed.metrics() == {**closed(metrics), "data/waited": 0.0}
    assert metrics["data/step"] == plan.steps


@pytest.mark.parametrize("edit", EDITS)
def test_counts_are_the_same_in_any_order_of_steps(make_run, edit):
    run = make_run(**EDITS[edit])
    before, loader = counted(run), make_run(**EDITS[edit]).loader()
    for step in (30, 3, 17, 18, 9, 0, 29, 12, 20, 19, 21):
        loader.seek(step)
        at = loader.step
        metrics = loader.metrics()
        assert {name: metrics[name] for name in before[at]} == before[at]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_have_the_same_metrics_between_steps_and_within_one(make_run, world_size):
    run = make_run(stages=STAGES[:2])
    loaders = [run.loader(rank=rank, world_size=world_size, threads=0) for rank in range(world_size)]
    streams = [iter(loader) for loader in loaders]
    for _ in range(11):
        for stream in streams:
            next(stream)
        ours = [closed(loader.metrics(digest=True, texts=True)) for loader in loaders]
        assert ours == [ours[0]] * world_size


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_records_count_their_arrays_and_masks(tmp_path, tokenizer_identity, kind):
    write_records(tmp_path / "pairs", kind, tokenizer_identity(300))
    tables = {
        "run": {"steps": 9, "global_batch_size": 4, "seq_len": 12},
        "sources": [{"name": "pairs", "store": "pairs"}],
    }
    run = Run(config=parse_config(tables), folder=tmp_path)
    whole, loader = run.loader(), run.loader(rank=1, world_size=2)
    slots = labels = full = rows = 0
    for step in range(10):
        loader.seek(step)
        metrics = loader.metrics()
        assert (metrics["data/rows"], metrics["data/tokens"], metrics["data/labels"]) == (rows, slots, labels)
        assert metrics["data/labels_by_source/pairs"] == labels
        assert metrics["data/padding"] == (1 - full / slots if slots else 0.0)
        if step < 9:
            batch = whole[step]
            more, trained = count_tokens(batch)
            slots, labels, rows = slots + more, labels + trained, rows + 4
            lengths = [
                name for name in ("chosen_len", "rejected_len", "prompt_len", "response_len") if name in batch
            ]
            full += sum(int(batch[name].sum()) for name in lengths)


def write_records(path, kind, identity):
    """Write seven records of a kind, with masks that leave some tokens out."""
    rng = np.random.default_rng(0)
    starts = {"dpo": [("chosen", 7), ("rejected", 7)], "grpo": [("prompts", 7), ("responses", 14)]}[kind]
    offsets = {axis: np.cumsum([0, *rng.integers(1, 13, count)]) for axis, count in starts}
    values = {axis: rng.integers(2, 300, offsets[axis][-1]).astype("<u2") for axis in offsets}
    if kind == "grpo":
        values |= {"masks": values["responses"], "rewards": np.ones(14, "<f4")}
        offsets["groups"] = np.arange(0, 15, 2)
    else:
        values |= {f"{axis}_mask": values[axis] for axis in offsets}
    values |= {key: (array % 2).astype("|u1") for key, array in values.items() if "mask" in key}
    keys = {key: array.dtype.str for key, array in values.items()}
    spec = StoreSpec(kind=kind, keys=keys, tokenizer=identity, recipe={}, max_tokens_per_shard=60)
    with StoreWriter(path, spec) as writer:
        writer.append(values, offsets)
        writer.commit()


def test_epochs_count_what_was_read_and_shares_are_those_of_the_step(make_run):
    run = make_run(**EDITS["skips"])
    plan, loader = run.plan(), run.loader()
    drawn = Counter()
    for step in range(9):  # skipped steps read, too
        stage = plan.stage(step)
        names = [plan.sources[source] for source in replaced_rows(make_run, step)]
        if plan.next_trained(step) == step:
            loader.seek(step)
            metrics = loader.metrics()
            assert {name: metrics[f"data/epochs/{name}"] for name in NAMES} == {
                name: drawn[name] / stage.rows[name].num_rows if drawn[name] else 0.0 for name in NAMES
            }
            assert {name: metrics[f"data/share/{name}"] for name in NAMES} == {"code": 0.0, **stage.shares(step)}
        drawn.update(names)
    loader.seek(30)
    metrics = loader.metrics(texts=True)
    last = plan.stages[-1]
    assert metrics["data/epochs/code"] == float(last.epochs("code"))
    assert metrics["data/share/web"] == 0.0
    assert (metrics["data/stage"], metrics["data/stage_name"], metrics["data/step"]) == (2, "end", 30)
    web = [part for part in plan.stages if "web" in part.names][-1]
    assert metrics["data/epochs/web"] == float(web.epochs("web"))


def replaced_rows(make_run, step):
    """Return the sources of a step as a run without skips draws them."""
    return make_run().plan().rows(step)[0].tolist()


def test_values_are_numbers_unless_texts_are_asked_for(make_run):
    loader = make_run().loader()
    next(iter(loader))
    metrics = loader.metrics()
    assert {type(value) for value in metrics.values()} == {int, float}
    assert {type(key) for key in metrics} == {str}
    assert "data/tokens_per_second" in metrics
    texts = loader.metrics(texts=True).keys() - metrics.keys()
    assert texts == {"data/stage_name", "data/plan"}
    assert loader.metrics(prefix="train.")["train.step"] == 0
    # A name is no folder of another one: MLflow keeps metrics as files.
    assert not [one for one in metrics for other in metrics if other.startswith(f"{one}/")]


def test_without_labels_nothing_is_counted_by_row(make_run):
    loader = make_run().loader()
    loader.seek(12)
    metrics, less = loader.metrics(), loader.metrics(labels=False)
    gone = {"data/labels", "data/padding", *(f"data/labels_by_source/{name}" for name in NAMES)}
    assert less == {name: value for name, value in metrics.items() if name not in gone}


@pytest.mark.parametrize("pad_to", ["row", "batch"])
def test_the_digest_is_that_of_the_last_global_batch(make_run, pad_to):
    run = make_run(stages=STAGES[:1], seq_len=32, packing="padded", skip=[{"steps": "3:6"}], pad_to=pad_to)
    whole = run.loader(pad_to="row")
    loader = run.loader(rank=1, world_size=2)
    stream = iter(loader)
    assert "data/digest" not in loader.metrics(digest=True)
    for _ in range(2 * 3):
        next(stream)
    assert loader.step == 6
    assert loader.metrics(digest=True)["data/digest"] == batch_digest(row_digests(whole[2]))
    next(stream)  # within a step it is that of the step before
    assert loader.metrics(digest=True)["data/digest"] == batch_digest(row_digests(whole[2]))


@pytest.mark.parametrize("threads", [0, 1])
def test_waiting_for_local_stores_is_counted(make_run, threads):
    loader = make_run().loader(threads=threads)
    assert loader.waited == 0.0
    stream = iter(loader)
    next(stream)
    first = loader.waited
    assert first > 0.0
    assert loader.metrics()["data/waited"] == first
    for _ in stream:
        pass
    assert loader.waited > first


def test_the_rate_is_of_this_rank_since_the_last_call(make_run, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tokenmill.loader.metrics.monotonic", lambda: now[0])
    run = make_run()
    for layout, slots in ((Layout(dp=(1, 2)), 8), (Layout(dp=(0, 2), cp=(1, 2)), 4)):
        loader = run.loader(layout=layout, micro_batch=2, threads=0)
        assert "data/tokens_per_second" not in loader.metrics()
        stream = iter(loader)
        for _ in range(8):
            next(stream)
        now[0] += 4.0
        assert loader.metrics()["data/tokens_per_second"] == 8 * 2 * slots / 4.0
        next(stream)
        next(stream)  # the second stage has rows of 20 tokens
        now[0] += 2.0
        assert loader.metrics()["data/tokens_per_second"] == (2 * slots + 2 * slots * 20 / 8) / 2.0
        loader.seek(3)
        now[0] += 1.0
        assert "data/tokens_per_second" not in loader.metrics()


def test_metrics_of_an_eval_have_names_of_their_own(make_run):
    run = make_run(evals=[{"name": "held", "store": "web"}])
    loader = run.evals["held"].loader(micro_batch=4)
    for _ in range(2):
        batches = list(loader)
        metrics = loader.metrics()
        assert metrics["eval/held/step"] == len(batches)
        assert metrics["eval/held/tokens"] == sum(batch["input_ids"].size for batch in batches)
        assert metrics["eval/held/labels"] == sum(int((batch["labels"] != -100).sum()) for batch in batches)
        assert metrics["eval/held/epochs/held"] == 1.0


def test_by_source_adds_up_to_tokens_seen(make_run):
    plan = make_run().plan()
    for step in (0, 9, 17, 30):
        seen = plan.tokens_seen(step)
        assert seen.slots == sum(source.slots for source in seen.by_source.values())
        assert seen.trained == sum(source.trained for source in seen.by_source.values())
    assert [source.rows for source in plan.seen(np.int64(9)).values()] == [24, 12, 0]
