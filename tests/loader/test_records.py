"""Runs over stores of DPO pairs and GRPO groups keep every promise that runs over sequences keep."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import numpy as np
import pytest

from tokenmill.config.run import parse_config
from tokenmill.errors import ConfigError, PlanError, ResumeError
from tokenmill.loader import (
    RECORD_ARRAYS,
    Layout,
    Loader,
    RankSlice,
    batch_digest,
    count_tokens,
    row_digests,
    stack,
)
from tokenmill.plan.report import report
from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter

VOCAB, PAD = 300, 7


@dataclass(frozen=True, kw_only=True)
class Made:
    """What was written into a store, record by record."""

    kind: str
    records: list[dict]

    def __len__(self):
        return len(self.records)


def random_record(rng, kind, longest):
    def ids(most):
        return rng.integers(0, VOCAB, rng.integers(0, most + 1)).astype("<u2")

    def mask(values):
        return rng.integers(0, 2, values.size).astype("|u1")

    if kind == "dpo":
        chosen, rejected = ids(longest), ids(longest)
        return {
            "chosen": chosen,
            "rejected": rejected,
            "chosen_mask": mask(chosen),
            "rejected_mask": mask(rejected),
        }
    responses = [ids(longest) for _ in range(rng.integers(0, 5))]
    return {
        "prompts": ids(longest),
        "responses": responses,
        "masks": [mask(response) for response in responses],
        "rewards": rng.normal(size=len(responses)).astype("<f4"),
    }


def starts_of(arrays):
    return np.cumsum([0, *(array.size for array in arrays)])


def joined(arrays, dtype):
    return np.concatenate([np.empty(0, dtype), *arrays])


DTYPES = {
    "dpo": {"chosen": "<u2", "rejected": "<u2", "chosen_mask": "|u1", "rejected_mask": "|u1"},
    "grpo": {"prompts": "<u2", "responses": "<u2", "masks": "|u1", "rewards": "<f4"},
}


@pytest.fixture
def write_records(tmp_path, tokenizer_identity):
    """Return a function that writes records as a store of their kind, in small shards."""

    def write(name, made, *, max_tokens_per_shard=60, storage="bin", leave_out=()):
        keys = {key: dtype for key, dtype in DTYPES[made.kind].items() if key not in leave_out}
        if (tmp_path / name).exists():
            shutil.rmtree(tmp_path / name)
        spec = StoreSpec(
            kind=made.kind,
            keys=keys,
            tokenizer=tokenizer_identity(VOCAB) | {"pad_id": PAD},
            recipe={},
            max_tokens_per_shard=max_tokens_per_shard,
            storage=storage,
        )
        columns = {key: [record[key] for record in made.records] for key in keys}
        if made.kind == "dpo":
            offsets = {axis: starts_of(columns[axis]) for axis in ("chosen", "rejected")}
        else:
            offsets = {"prompts": starts_of(columns["prompts"]), "groups": starts_of(columns["rewards"])}
            columns |= {
                key: [r for group in columns[key] for r in group] for key in ("responses", "masks") if key in keys
            }
            offsets["responses"] = starts_of(columns["responses"])
        with StoreWriter(tmp_path / name, spec) as writer:
            writer.append({key: joined(columns[key], dtype) for key, dtype in keys.items()}, offsets)
            writer.commit()
        return made

    return write


def random_records(kind, count, seed=0, longest=12):
    rng = np.random.default_rng(seed)
    return Made(kind=kind, records=[random_record(rng, kind, longest) for _ in range(count)])


@pytest.fixture
def make_run(tmp_path):
    """Return a function that makes a run over stores of the names given."""

    def make(*sources, stages=None, weights=None, **run):
        tables = {
            "run": {"steps": 20, "global_batch_size": 4, "seq_len": 12, "seed": 3} | run,
            "sources": [{"name": name, "store": name} for name in sources],
        }
        tables["run"]["weights"] = weights or dict.fromkeys(sources, 1)
        if stages:
            tables["stages"] = stages
        return Run(config=parse_config(tables), folder=tmp_path, records_plans=True)

    return make


def padded(values, size, fill):
    kept = list(values)[:size]
    return kept + [fill] * (size - len(kept))


def row_by_hand(kind, record, seq_len, group, cut=slice(None)):
    """Return what a batch must deliver of a record; `cut` says which tokens are left of an array."""
    if kind == "dpo":
        out = {}
        for name in ("chosen", "rejected"):
            ids, mask = record[name][cut], record[f"{name}_mask"][cut]
            out[name] = padded(ids.tolist(), seq_len, PAD)
            out[f"{name}_mask"] = padded(mask.astype(bool).tolist(), seq_len, False)
            out[f"{name}_len"] = len(ids)
        return out
    responses = [response[cut] for response in record["responses"]]
    masks = [mask[cut].astype(bool).tolist() for mask in record["masks"]]
    empty = group - len(responses)
    return {
        "prompts": padded(record["prompts"][cut].tolist(), seq_len, PAD),
        "prompt_len": len(record["prompts"][cut]),
        "responses": [padded(r.tolist(), seq_len, PAD) for r in responses] + [[PAD] * seq_len] * empty,
        "masks": [padded(mask, seq_len, False) for mask in masks] + [[False] * seq_len] * empty,
        "response_len": padded([len(r) for r in responses], group, 0),
        "rewards": padded(record["rewards"].tolist(), group, 0.0),
        "group_size": len(responses),
    }


def rows_of_batch(batch, names):
    return [{name: batch[name][i].tolist() for name in names} for i in range(batch[names[0]].shape[0])]


def bytes_of(batches):
    return [{name: (array.dtype.str, array.shape, array.tobytes()) for name, array in b.items()} for b in batches]


KINDS = ["dpo", "grpo"]


@pytest.mark.parametrize("storage", ["bin", "h5"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard_tokens", [1, 200, 10**9])
def test_every_array_is_what_the_record_says_and_padding_is_no_token(
    write_records, make_run, kind, storage, shard_tokens
):
    """Ids, masks, lengths and rewards, each record in its row; in one shard, a few, and more than may be mapped."""
    made = write_records("data", random_records(kind, 36), storage=storage, max_tokens_per_shard=shard_tokens)
    run = make_run("data", steps=12)
    group = max((len(record.get("responses", ())) for record in made.records), default=0)
    loader = run.loader(micro_batch=4)
    drawn = list(loader)
    assert len(run.stores["data"]._maps._maps) <= 64
    for step, batch in enumerate(drawn):
        assert list(batch) == list(RECORD_ARRAYS[kind])
        expected = [
            row_by_hand(kind, made.records[use.spans[0].document], 12, group) for use in run.plan().what(step)
        ]
        assert rows_of_batch(batch, RECORD_ARRAYS[kind]) == expected
        assert bytes_of([loader[step]]) == bytes_of([batch])


@pytest.mark.parametrize(
    ("kind", "names"),
    [("dpo", ["chosen_len", "rejected_len"]), ("grpo", ["prompt_len", "response_len", "group_size"])],
)
def test_bounds_of_records_are_their_lengths_and_read_no_token(write_records, make_run, kind, names):
    write_records("data", random_records(kind, 9))
    run = make_run("data")
    whole = list(run.loader(micro_batch=4))
    lengths = run.loader(layout=Layout(pp=(1, 3), needs="bounds"), micro_batch=4)
    for key in run.stores["data"].keys:
        for file in run.stores["data"].path.glob(f"shard-*/{key}.bin"):
            file.unlink()
    batches = [{name: array.tolist() for name, array in batch.items()} for batch in lengths]
    assert batches == [{name: batch[name].tolist() for name in names} for batch in whole]


def test_the_dtypes_and_shapes_are_those_of_the_guide(write_records, make_run):
    write_records("pairs", random_records("dpo", 5))
    write_records("groups", random_records("grpo", 8))
    pairs, groups = make_run("pairs").loader(micro_batch=2)[0], make_run("groups").loader(micro_batch=2)[0]
    assert {name: (array.dtype.name, array.shape) for name, array in pairs.items()} == {
        "chosen": ("int64", (4, 12)),
        "rejected": ("int64", (4, 12)),
        "chosen_mask": ("bool", (4, 12)),
        "rejected_mask": ("bool", (4, 12)),
        "chosen_len": ("int64", (4,)),
        "rejected_len": ("int64", (4,)),
    }
    assert {name: (array.dtype.name, array.shape) for name, array in groups.items()} == {
        "prompts": ("int64", (4, 12)),
        "prompt_len": ("int64", (4,)),
        "responses": ("int64", (4, 4, 12)),
        "masks": ("bool", (4, 4, 12)),
        "response_len": ("int64", (4, 4)),
        "rewards": ("float32", (4, 4)),
        "group_size": ("int64", (4,)),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", ["full", "window", "none"])
@pytest.mark.parametrize("count", [1, 7, 24])
def test_an_epoch_has_every_record_once(write_records, make_run, kind, shuffle, count):
    """[R1.d] Whatever the order."""
    made = write_records("data", random_records(kind, count, seed=count), max_tokens_per_shard=200)
    run = make_run("data", steps=2 * count, global_batch_size=1, shuffle=shuffle, block_rows=3, window_blocks=2)
    plan = run.plan()
    documents = [use.spans[0].document for step in range(2 * count) for use in plan.what(step)]
    for epoch in (documents[:count], documents[count:]):
        assert sorted(epoch) == list(range(len(made)))
    if shuffle == "none":
        assert documents == [*range(count), *range(count)]


def global_batches(run, world_size, micro_batch, steps, **options):
    loaders = [
        run.loader(rank=rank, world_size=world_size, micro_batch=micro_batch, **options)
        for rank in range(world_size)
    ]
    streams = [iter(loader) for loader in loaders]
    out = []
    for step in range(steps):
        count = loaders[0].part.batches(loaders[0].plan.stage(step))
        out.append(stack([next(stream) for stream in streams for _ in range(count)]))
    return bytes_of(out)


TWO_STAGES = [
    {"name": "base", "start_step": 0, "weights": {"a": 0.7, "b": 0.3}},
    {"name": "late", "start_step": 9, "weights": {"a": 0.2, "b": 0.8}, "seq_len": 16, "global_batch_size": 8},
]


@pytest.fixture
def mixed_run(write_records, make_run):
    """Return a function that makes a run of two sources and two stages, the second longer."""
    written = set()

    def make(kind, **run):
        for name, count, seed in (("a", 40, 1), ("b", 17, 2)):
            if name not in written:
                write_records(name, random_records(kind, count, seed=seed))
                written.add(name)
        return make_run("a", "b", stages=TWO_STAGES, **run)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_global_batches_are_the_same_for_any_world_micro_batch_and_threads(mixed_run, kind):
    """[E1.a]"""
    run = mixed_run(kind)
    whole = global_batches(run, 1, 4, 20)
    for world_size, micro_batch, threads in [(1, 1, 0), (2, 2, 1), (2, 1, 2), (4, 1, 1)]:
        assert global_batches(run, world_size, micro_batch, 20, threads=threads) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_resume_from_any_step_gives_the_rest_of_the_run(mixed_run, kind):
    """[R1.a, R1.c] Into a fresh run, at another world size; the state says nothing of ranks."""
    whole = global_batches(mixed_run(kind), 1, 4, 20)
    for step in range(20):
        loader = mixed_run(kind).loader(micro_batch=4)
        stream = iter(loader)
        for _ in range(sum(1 if s < 9 else 2 for s in range(step))):
            next(stream)
        state = loader.state_dict()
        assert state["step"] == step
        again = [mixed_run(kind).loader(rank=rank, world_size=2, micro_batch=2) for rank in range(2)]
        for fresh in again:
            fresh.load_state_dict(state)
            assert fresh.state_dict() == state
        streams = [iter(fresh) for fresh in again]
        count = again[0].part.batches(again[0].plan.stage(step))
        assert bytes_of([stack([next(s) for s in streams for _ in range(count)])]) == [whole[step]]


def test_a_state_of_another_length_is_refused_with_the_difference(write_records, make_run):
    """[S.b]"""
    write_records("data", random_records("dpo", 9))
    loader = make_run("data").loader(micro_batch=4)
    next(iter(loader))
    with pytest.raises(ResumeError, match=r"first difference: stages\[0\]\.seq_len 12 -> 13"):
        make_run("data", seq_len=13).loader(micro_batch=4).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_has_its_shares_and_names_its_sources(mixed_run, kind):
    """[M1.a]"""
    run = mixed_run(kind)
    loader = run.loader(arrays=(*RECORD_ARRAYS[kind], "source"))
    drawn = np.concatenate([loader[step]["source"] for step in range(9)])
    assert abs(int((drawn == 0).sum()) - 0.7 * 36) <= 1
    for step in (3, 12):
        names = [run.plan().sources[source] for source in loader[step]["source"]]
        assert names == [use.source for use in run.plan().what(step)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_of_another_length_goes_on_with_what_is_unseen(mixed_run, kind):
    """[M1.c] No record comes again before all have been seen, and `when` finds them through both stages."""
    plan = mixed_run(kind).plan()
    uses = [use for step in range(20) for use in plan.what(step)]
    for name, count in (("a", 40), ("b", 17)):
        documents = [use.spans[0].document for use in uses if use.source == name]
        assert len(documents) > count
        assert sorted(documents[:count]) == list(range(count))
        for document in range(count):
            own = [(use.step, use.slot) for use in uses if (use.source, use.spans[0].document) == (name, document)]
            assert [(use.step, use.slot) for use in plan.when(name, document)] == own


def test_what_is_left_is_left_through_a_third_stage(write_records, make_run):
    """[M1.c] Also where a stage ends within the rest that the stage before it left."""
    write_records("a", random_records("dpo", 40))
    stages = [
        {"name": name, "start_step": start, "seq_len": seq_len}
        for name, start, seq_len in (("x", 0, 12), ("y", 4, 13), ("z", 7, 14))
    ]
    plan = make_run("a", stages=stages).plan()
    documents = [use.spans[0].document for step in range(20) for use in plan.what(step)]
    assert sorted(documents[:40]) == sorted(documents[40:]) == list(range(40))
    restart = make_run("a", stages=[*stages[:2], stages[2] | {"on_change": "restart"}]).plan()
    later = [use.spans[0].document for step in range(7, 17) for use in restart.what(step)]
    assert sorted(later) == list(range(40))


def expected_fates(made, seq_len, cut):
    tokens = trained = dropped = held = 0
    group = max((len(record.get("responses", ())) for record in made.records), default=0)
    for record in made.records:
        if made.kind == "dpo":
            arrays = [
                (record["chosen"], record["chosen_mask"], 1),
                (record["rejected"], record["rejected_mask"], 1),
            ]
        else:
            skip = int(len(record["prompts"]) == 0)
            arrays = [(record["prompts"], np.zeros(len(record["prompts"])), 0)]
            arrays += [(r, m, skip) for r, m in zip(record["responses"], record["masks"], strict=True)]
        for ids, mask, skip in arrays:
            tokens += len(ids)
            trained += int((mask[cut][skip:] != 0).sum())
            dropped += len(ids) - len(ids[cut])
            held += len(ids[cut])
    slots = 2 if made.kind == "dpo" else 1 + group
    return tokens, trained, dropped, len(made) * slots * seq_len - held


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("on_long", "cut"),
    [("truncate_end", slice(None, 5)), ("truncate_start", slice(-5, None)), ("stop", slice(None))],
)
def test_what_is_cut_is_counted_and_every_token_has_one_fate(write_records, make_run, kind, on_long, cut):
    """[P2.a]"""
    made = write_records("data", random_records(kind, 80))
    run = make_run("data", seq_len=12 if on_long == "stop" else 5, on_long=on_long)
    [source] = report(run.plan()).sources
    tokens, trained, dropped, padding = expected_fates(made, run.config.run.seq_len, cut)
    fates = source.fates
    assert (fates.rows, fates.tokens, fates.trained) == (80, tokens, trained)
    assert fates.dropped == ({"truncated": dropped} if dropped else {})
    assert fates.masked == tokens - trained - dropped
    assert fates.padding == padding
    group = max((len(record.get("responses", ())) for record in made.records), default=0)
    for step in range(20):
        expected = [
            row_by_hand(kind, made.records[use.spans[0].document], run.config.run.seq_len, group, cut)
            for use in run.plan().what(step)
        ]
        assert rows_of_batch(run.loader()[step], RECORD_ARRAYS[kind]) == expected
    # The 20 steps are an epoch: its batches have room for all that was counted, and train on as much.
    counted = [count_tokens(run.loader()[step]) for step in range(20)]
    assert sum(trained for _, trained in counted) == fates.trained
    assert sum(room for room, _ in counted) == fates.tokens - dropped + fates.padding


@pytest.mark.parametrize("options", [{}, {"on_long": "stop"}], ids=["default", "stop"])
@pytest.mark.parametrize(("kind", "key"), [("dpo", "rejected"), ("grpo", "responses")])
def test_a_record_that_is_too_long_is_refused_by_name_unless_cutting_is_asked_for(
    write_records, make_run, kind, key, options
):
    """[P2.b, A1.a]"""
    made = random_records(kind, 30, longest=9)
    long, mask = np.arange(13, dtype="<u2"), np.ones(13, "|u1")
    made.records[21] |= (
        {"rejected": long, "rejected_mask": mask}
        if kind == "dpo"
        else {"responses": [long[:2], long], "masks": [mask[:2], mask], "rewards": np.ones(2, "<f4")}
    )
    write_records("data", made)
    with pytest.raises(
        ConfigError, match=rf"{key} must have at most seq_len = 12 tokens, got 13 in record 21; raise"
    ):
        make_run("data", **options).plan()
    make_run("data", seq_len=13, **options).plan()
    with pytest.raises(ConfigError, match=r'raise seq_len, or set on_long = "drop" or "truncate_end"'):
        make_run("data", on_long="stop").plan()
    assert make_run("data", on_long="truncate_end").plan().stages[0].rows["data"].num_rows == 30


@pytest.mark.parametrize("kind", KINDS)
def test_records_that_are_too_long_are_dropped_whole_and_counted(write_records, make_run, kind):
    made = write_records("data", random_records(kind, 40, longest=9))

    def longest(record):
        arrays = [record[key] for key in DTYPES[kind] if DTYPES[kind][key] == "<u2" and key != "responses"]
        return max(array.size for array in [*arrays, *record.get("responses", ())])

    kept = [number for number, record in enumerate(made.records) if longest(record) <= 7]
    run = make_run("data", on_long="drop", seq_len=7, shuffle="none", steps=1, global_batch_size=len(kept))
    assert 0 < len(kept) < 40
    rows = run.plan().stages[0].rows["data"]
    assert [use.spans[0].document for use in run.plan().what(0)] == kept
    assert [number for number in range(40) if rows.rows_of(np.array([number]))[0].size] == kept
    fates, whole = rows.fates(), make_run("data", seq_len=9).plan().stages[0].rows["data"].fates()
    assert (rows.num_rows, rows.num_long, fates.tokens) == (len(kept), 40 - len(kept), whole.tokens)
    assert fates.tokens == fates.trained + fates.masked + fates.dropped["too_long"]
    group = max(len(record.get("responses", ())) for record in made.records)
    expected = [row_by_hand(kind, made.records[number], 7, group) for number in kept]
    assert rows_of_batch(run.loader()[0], RECORD_ARRAYS[kind]) == expected
    (warning,) = [one for one in run.report().warnings if " records of " in one]
    assert warning.startswith(f"stage 'main': {40 - len(kept)} of 40 records of 'data' are longer than a row of 7")


@pytest.mark.parametrize("kind", KINDS)
def test_records_may_be_padded_to_the_longest_of_their_batch(write_records, make_run, kind):
    write_records("data", random_records(kind, 30))
    for full, batch in zip(
        make_run("data").loader(micro_batch=2), make_run("data", pad_to="batch").loader(micro_batch=2), strict=True
    ):
        lengths = {"chosen": "chosen_len", "rejected": "rejected_len"}
        if kind == "grpo":
            lengths = {"prompts": "prompt_len", "responses": "response_len"}
        masks = {"chosen": "chosen_mask", "rejected": "rejected_mask", "responses": "masks"}
        longest = {key: max(1, int(full[length].max())) for key, length in lengths.items()}
        longest |= {masks[key]: longest[key] for key in lengths if key in masks}
        assert {name: array.shape[-1] for name, array in batch.items() if name in longest} == longest
        for name, array in batch.items():
            assert np.array_equal(array, full[name][..., : longest[name]] if name in longest else full[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_without_masks_every_token_is_trained_on(write_records, make_run, kind):
    names = {"dpo": ("chosen_mask", "rejected_mask"), "grpo": ("masks",)}[kind]
    lengths = {"dpo": ("chosen_len", "rejected_len"), "grpo": ("response_len",)}[kind]
    write_records("data", random_records(kind, 9), leave_out=names)
    run = make_run("data")
    batch = run.loader()[0]
    for name, length in zip(names, lengths, strict=True):
        assert np.array_equal(batch[name], np.arange(12) < batch[length][..., None])
    fates = run.plan().stages[0].rows["data"].fates()
    assert fates.tokens == fates.trained + fates.masked


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_in_memory_that_was_used_before_shows_nothing_of_it(write_records, make_run, kind):
    """What an earlier batch left behind the end of a record is overwritten."""
    write_records("data", random_records(kind, 40))
    run = make_run("data")
    seen = []
    for batch in run.loader(micro_batch=4, threads=0):
        seen += bytes_of([batch])
        for array in batch.values():
            array[:] = 1
        del array, batch
    assert seen == bytes_of(run.loader()[step] for step in range(20))


def test_a_group_without_responses_and_a_record_without_tokens_are_rows(write_records, make_run):
    empty = {"prompts": np.empty(0, "<u2"), "responses": [], "masks": [], "rewards": np.empty(0, "<f4")}
    full = {
        "prompts": np.array([5], "<u2"),
        "responses": [np.empty(0, "<u2"), np.array([8, 9], "<u2")],
        "masks": [np.empty(0, "|u1"), np.array([1, 0], "|u1")],
        "rewards": np.array([-1.5, 2.5], "<f4"),
    }
    write_records("data", Made(kind="grpo", records=[empty, full]))
    batch = make_run("data", shuffle="none", global_batch_size=2, seq_len=3).loader()[0]
    assert {name: array.tolist() for name, array in batch.items()} == {
        "prompts": [[PAD] * 3, [5, PAD, PAD]],
        "prompt_len": [0, 1],
        "responses": [[[PAD] * 3] * 2, [[PAD] * 3, [8, 9, PAD]]],
        "masks": [[[False] * 3] * 2, [[False] * 3, [True, False, False]]],
        "response_len": [[0, 0], [0, 2]],
        "rewards": [[0.0, 0.0], [-1.5, 2.5]],
        "group_size": [0, 2],
    }
    write_records("data", Made(kind="grpo", records=[empty, empty]))
    batch = make_run("data", shuffle="none", global_batch_size=2, seq_len=3).loader(micro_batch=2)[0]
    assert (batch["responses"].shape, batch["rewards"].shape) == ((2, 0, 3), (2, 0))


def test_the_room_for_responses_is_that_of_the_stage(write_records, make_run):
    """A source of larger groups that joins later changes no shape before it does."""
    write_records(
        "small",
        Made(kind="grpo", records=[r for r in random_records("grpo", 60).records if len(r["responses"]) < 3]),
    )
    write_records("large", random_records("grpo", 60))
    stages = [
        {"name": "one", "start_step": 0, "weights": {"small": 1}},
        {"name": "two", "start_step": 10, "weights": {"small": 1, "large": 1}},
    ]
    loader = make_run("small", "large", stages=stages).loader(micro_batch=4)
    assert [batch["rewards"].shape for batch in loader] == [(4, 2)] * 10 + [(4, 4)] * 10
    alone = make_run("small", steps=10).loader(micro_batch=4)
    assert bytes_of([alone[9]]) == bytes_of([loader[9]])


@pytest.mark.parametrize("kind", KINDS)
def test_digests_tell_batches_apart_and_not_how_they_were_drawn(mixed_run, kind):
    run = mixed_run(kind)
    whole = [row_digests(run.loader()[step]) for step in range(6)]
    parts = [
        [d for rank in range(2) for d in row_digests(run.loader(rank=rank, world_size=2)[step])]
        for step in range(6)
    ]
    assert parts == whole
    assert len({batch_digest(rows) for rows in whole}) == 6
    batch = run.loader()[0]
    for name in RECORD_ARRAYS[kind]:
        changed = {key: array.copy() for key, array in batch.items()}
        flat = changed[name].reshape(-1)
        flat[-1] = not flat[-1] if flat.dtype == bool else flat[-1] + 1
        assert row_digests(changed)[:-1] == whole[0][:-1]
        assert row_digests(changed)[-1] != whole[0][-1]


def test_sources_of_two_training_types_are_refused(write_records, make_run, tmp_path, tokenizer_identity):
    write_records("pairs", random_records("dpo", 5))
    write_records("groups", random_records("grpo", 5))
    with pytest.raises(ConfigError, match="'pairs' of dpo and 'groups' of grpo cannot be combined"):
        make_run("pairs", "groups").plan()
    identity = tokenizer_identity(VOCAB) | {"pad_id": PAD}
    with StoreWriter(
        tmp_path / "web", StoreSpec(keys={"sequence": "<u2"}, tokenizer=identity, recipe={})
    ) as writer:
        writer.append({"sequence": np.ones(50, "<u2")}, np.array([0, 50]))
        writer.commit()
    with pytest.raises(ConfigError, match="'web' of seq and 'pairs' of dpo cannot be combined"):
        make_run("web", "pairs").plan()


@pytest.mark.parametrize("packing", ["concat", "bos_best_fit"])
def test_records_are_not_packed(write_records, make_run, packing):
    write_records("pairs", random_records("dpo", 5))
    with pytest.raises(ConfigError, match="packing cannot be combined with stores of dpo; remove packing"):
        make_run("pairs", packing=packing).plan()
    same = [make_run("pairs", packing=name).plan().fingerprint for name in ("best_fit", "padded")]
    assert same[0] == same[1]


@pytest.mark.parametrize("asked", [{"horizon": 2}, {"balance": "attention"}, {"segment_multiple": 8}])
def test_what_records_do_not_have_is_refused_before_step_0(write_records, make_run, asked):
    write_records("pairs", random_records("dpo", 5))
    (key,) = asked
    with pytest.raises(ConfigError, match=f"{key} cannot be combined with stores of dpo; remove one"):
        make_run("pairs", **asked).plan()


def test_arrays_that_the_training_type_does_not_have_are_refused(write_records, make_run):
    write_records("pairs", random_records("dpo", 5))
    with pytest.raises(ConfigError, match=r"arrays = .*'labels'.* cannot be combined with these stores"):
        make_run("pairs", arrays=["labels"]).loader()
    with pytest.raises(
        ConfigError, match=r"arrays: must be among chosen, .*, got 'chosen_ids'; did you mean 'chosen_mask'"
    ):
        make_run("pairs").loader(arrays=("chosen_ids",))
    with pytest.raises(ConfigError, match="must name each array once"):
        make_run("pairs").loader(arrays=("chosen", "chosen"))
    assert list(make_run("pairs").loader(arrays=("rejected_len",))[0]) == ["rejected_len"]
    plan = make_run("pairs").plan()
    assert list(Loader(plan, RankSlice(micro_batch=4))[0]) == list(RECORD_ARRAYS["dpo"])


def test_a_mask_or_reward_of_another_dtype_is_refused(tmp_path, tokenizer_identity, make_run):
    """[T2.a]"""
    spec = StoreSpec(
        kind="dpo", keys=DTYPES["dpo"] | {"chosen_mask": "<u4"}, tokenizer=tokenizer_identity(VOCAB), recipe={}
    )
    values = {key: np.ones(2, dtype) for key, dtype in spec.keys.items()}
    with StoreWriter(tmp_path / "pairs", spec) as writer:
        writer.append(values, {"chosen": np.array([0, 2]), "rejected": np.array([0, 2])})
        writer.commit()
    with pytest.raises(ConfigError, match=r"expected chosen_mask of \|u1 for training, got <u4; prepare"):
        make_run("pairs").plan()


def test_a_record_outside_is_refused(write_records, make_run):
    write_records("pairs", random_records("dpo", 5))
    plan = make_run("pairs").plan()
    with pytest.raises(PlanError, match="document out of range: 5; count from 0"):
        plan.when("pairs", document=5)
    with pytest.raises(PlanError, match="rows must lie within 0:5"):
        plan.stages[0].rows["pairs"].spans(np.array([5]))


def test_compiling_reads_no_token_of_records(write_records, make_run, tmp_path):
    """[A1.a]"""
    write_records("groups", random_records("grpo", 30))
    for file in (tmp_path / "groups").glob("shard-*/*.bin"):
        if not file.name.endswith("-index.bin"):
            file.unlink()
    assert make_run("groups").plan().rows(9)[1].size == 4
