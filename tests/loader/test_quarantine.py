"""Batches of a run that leaves documents out, from its first step or from a later one on."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tokenmill.loader import IGNORE, RECORD_ARRAYS, Layout, Loader, LoaderOptions, RankSlice
from tokenmill.packing import ConcatRows, Policy, RecordRows, pack_rows
from tokenmill.plan import Shuffle, StageSpec, compile_plan
from tokenmill.plan.report import report
from tokenmill.store import StoreSpec, StoreWriter, open_store
from tokenmill.types import ARRAYS

POLICIES = [
    Policy(name="concat"),
    Policy(),
    Policy(name="bos_best_fit"),
    Policy(name="padded", split="truncate_end"),
]
BOS = 1
LENGTHS = np.random.default_rng(5).integers(0, 45, 120).tolist()
OUT = sorted({0, 1, 40, 41, 42, 119, *np.random.default_rng(6).integers(0, 120, 15).tolist()})
KEPT = [number for number in range(120) if number not in OUT]


@pytest.fixture
def write_documents(tmp_path, tokenizer_identity):
    """Return a function that writes documents, whose tokens say which they are, and opens the store.

    Token k of document d is 2 + 60 d + k, but for the first one, which is BOS.
    """

    def write(numbers, *, lengths=LENGTHS, dtype="<u4", masked=False, size=10**9, name="web"):
        parts = [np.arange(lengths[number]) + 60 * number + 2 for number in numbers]
        ids = np.concatenate([np.where(part % 60 == 2, BOS, part) for part in parts])
        keys = {"sequence": dtype} | ({"loss_mask": "|u1"} if masked else {})
        values = {"sequence": ids.astype(dtype), "loss_mask": (ids % 3 > 0).astype("|u1")}
        if (tmp_path / name).exists():
            shutil.rmtree(tmp_path / name)
        spec = StoreSpec(
            kind="sft" if masked else "seq",
            keys=keys,
            tokenizer=tokenizer_identity(60_000) | {"add_bos": True, "bos_id": BOS},
            recipe={},
            max_tokens_per_shard=size,
        )
        with StoreWriter(tmp_path / name, spec) as writer:
            writer.append({key: values[key] for key in keys}, np.cumsum([0, *(part.size for part in parts)]))
            writer.commit()
        return open_store(tmp_path / name)

    return write


def rows_of_store(store, policy, excluded=(), *, seq_len=16, crossing=False):
    numbers = np.array(excluded, np.int64)
    if store.manifest.kind in RECORD_ARRAYS:
        return RecordRows(store=store, seq_len=seq_len, policy=policy, excluded=numbers)
    if policy.name == "concat":
        return ConcatRows(store=store, seq_len=seq_len, cross_document_labels=crossing, excluded=numbers)
    return pack_rows(store, seq_len=seq_len, policy=policy, cross_document_labels=crossing, excluded=numbers)


def plan_of(*stages, steps=40):
    """Compile stages, given as (start_step, rows)."""
    specs = [
        StageSpec(
            name=f"s{start}",
            start_step=start,
            global_batch_size=4,
            seq_len=rows.seq_len,
            seed=3,
            shuffle=Shuffle(),
            weights={"web": 1.0},
            rows={"web": rows},
        )
        for start, rows in stages
    ]
    return compile_plan(specs, sources=("web",), steps=steps)


def loader_of(plan, *, arrays=ARRAYS, rank=0, world_size=1, threads=0):
    part = RankSlice(layout=Layout(dp=(rank, world_size)), micro_batch=4 // world_size)
    return Loader(plan, part, LoaderOptions(arrays=arrays, threads=threads))


def drawn(loader):
    return [{name: array.tolist() for name, array in batch.items()} for batch in loader]


def documents_of(batches):
    """Return the documents that the inputs of batches are of, by what they say."""
    return {(token - 2) // 60 for batch in batches for row in batch["input_ids"] for token in row if token > BOS}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("crossing", [False, True])
@pytest.mark.parametrize(("masked", "size"), [(False, 10**9), (True, 100), (False, 5)])
def test_batches_are_those_of_a_store_that_never_had_the_documents(write_documents, policy, crossing, masked, size):
    """[O1.c, P1.c] Every array, over more than an epoch; labels cross a hole only where they cross documents."""
    rows = rows_of_store(write_documents(range(120), masked=masked, size=size), policy, OUT, crossing=crossing)
    without = rows_of_store(write_documents(KEPT, masked=masked, name="without"), policy, crossing=crossing)
    found, expected = (drawn(loader_of(plan_of((0, index)))) for index in (rows, without))
    assert found == expected
    assert documents_of(found) <= set(KEPT)
    assert rows.num_rows < 4 * 40
    assert len(rows.store._maps._maps) <= 64


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize(
    ("crossing", "labels"),
    [(False, [3, 4, IGNORE, 183, 184, 185, 186, 187]), (True, [3, 4, BOS, 183, 184, 185, 186, 187])],
)
def test_a_label_crosses_a_hole_only_where_it_crosses_documents(write_documents, dtype, crossing, labels):
    """[P1.c] Documents of 3, 4, 0 and 9 tokens, of which the second is left out: its place is closed."""
    store = write_documents(range(4), lengths=[3, 4, 0, 9], dtype=dtype)
    batch = loader_of(plan_of((0, rows_of_store(store, POLICIES[0], [1], seq_len=8, crossing=crossing)), steps=1))[
        0
    ]
    for slot in range(4):  # the only row, four times
        assert batch["input_ids"][slot].tolist() == [BOS, 3, 4, BOS, 183, 184, 185, 186]
        assert batch["labels"][slot].tolist() == labels
        assert batch["position_ids"][slot].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
        assert batch["doc_ids"][slot].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


def trained(batches):
    """Return the labels of batches, each of which says which token of which document it is."""
    return [label for batch in batches for row in batch["labels"] for label in row if label != IGNORE]


@pytest.mark.parametrize("policy", POLICIES[:3], ids=lambda policy: policy.name)
@pytest.mark.parametrize("late_seq_len", [16, 23])
def test_a_quarantine_changes_no_batch_before_it_and_every_one_after_it(write_documents, policy, late_seq_len):
    """[O1.c, M1.c] No token is trained on twice in the pass, and of the other documents each is."""
    store = write_documents(range(120), size=400)
    rows, fewer = rows_of_store(store, policy), rows_of_store(store, policy, OUT, seq_len=late_seq_len)
    steps = 60
    straight, plan = plan_of((0, rows), steps=steps), plan_of((0, rows), (13, fewer), steps=steps)
    before, after = (drawn(loader_of(made)) for made in (straight, plan))
    assert after[:13] == before[:13]
    assert set(OUT) & documents_of(before[13:])
    assert documents_of(after[13:]) <= set(KEPT)
    rest = plan.stages[1].rows["web"].num_rest
    assert rest > 0
    passed = trained(after[:13]) + trained(after[13 : 13 + rest // 4])
    assert len(passed) == len(set(passed))
    (source,) = report(plan).sources
    assert source.first_repeat == 13 + rest // 4
    whole = set(trained(after[:13]) + trained(after[13 : 13 + -(-rest // 4)]))
    every = {60 * number + 2 + k for number in KEPT for k in range(1, LENGTHS[number])}
    lost = every - whole
    assert len(lost) <= (16 if policy.name == "concat" else 0)  # of the last partial row of the stream


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_what_and_when_are_inverse_through_quarantines(write_documents, policy):
    """[O1.b, O1.c] One in the first epoch, one in its rest, one with another length."""
    store = write_documents(range(120), size=400)
    links = [(0, (), 16), (9, OUT[:6], 16), (15, OUT[:9], 16), (20, OUT, 23)]
    plan = plan_of(*((start, rows_of_store(store, policy, out, seq_len=n)) for start, out, n in links), steps=50)
    met: dict[int, list] = {}
    for step in range(50):
        for use in plan.what(step):
            for span in use.spans:
                met.setdefault(span.document, []).append((step, use.slot, use.row, span))
    for document in range(120):
        found = [(use.step, use.slot, use.row, span) for use in plan.when("web", document) for span in use.spans]
        assert found == met.get(document, [])
    for start, out, _ in links[1:]:
        assert [use.step for document in out for use in plan.when("web", document) if use.step >= start] == []


@pytest.mark.parametrize("policy", POLICIES[:2], ids=lambda policy: policy.name)
def test_ranks_threads_and_resumes_do_not_change_what_is_left(write_documents, policy):
    """[O1.c, E1.c]"""
    store = write_documents(range(120), masked=True, size=100)
    rows, fewer = rows_of_store(store, policy), rows_of_store(store, policy, OUT)
    plan = plan_of((0, rows), (13, fewer))
    arrays = ("input_ids", "labels", "position_ids", "doc_ids", "loss_mask", "source")
    whole = drawn(loader_of(plan, arrays=arrays))
    ranks = [drawn(loader_of(plan, arrays=arrays, rank=rank, world_size=2, threads=2)) for rank in range(2)]
    assert [{name: one[name] + two[name] for name in arrays} for one, two in zip(*ranks, strict=True)] == whole
    for step in (9, 13, 17):
        before = loader_of(plan, arrays=arrays)
        before.seek(step)
        resumed = loader_of(plan, arrays=arrays)
        resumed.load_state_dict(before.state_dict())
        assert drawn(resumed) == whole[step:]


def test_a_checkpoint_before_the_quarantine_goes_on_into_it(write_documents):
    """[O1.c] The run is edited at the step at which it stopped."""
    store = write_documents(range(120))
    rows, fewer = (rows_of_store(store, Policy(), out) for out in ((), OUT))
    stopped = loader_of(plan_of((0, rows)))
    stopped.seek(13)
    edited = loader_of(plan_of((0, rows), (13, fewer)))
    edited.load_state_dict(stopped.state_dict())
    assert edited.step == 13
    assert documents_of(drawn(edited)) <= set(KEPT)


@pytest.fixture
def write_records(tmp_path, tokenizer_identity):
    """Return a function that writes some of thirty random records, always the same ones, and opens the store."""

    def write(kind, numbers, name="records"):
        axes = {"dpo": ("chosen", "rejected"), "grpo": ("prompts", "groups", "responses")}[kind]
        ids, sizes = {axis: [] for axis in axes}, {axis: [] for axis in axes}
        for number in numbers:
            rng = np.random.default_rng(number)
            members = int(rng.integers(0, 4)) if number < 29 else 4  # the last one has the largest group
            for axis in axes:
                if axis == "groups":
                    sizes[axis].append(members)
                    ids[axis].append(rng.random(members))
                    continue
                lengths = rng.integers(0, 9, members if axis == "responses" else 1).tolist()
                sizes[axis] += lengths
                ids[axis] += [rng.integers(0, 300, length) for length in lengths]
        flat = {axis: np.concatenate(ids[axis]) for axis in axes}
        if kind == "dpo":
            arrays = {key: flat[key].astype("<u2") for key in axes}
            arrays |= {f"{key}_mask": (flat[key] % 2).astype("|u1") for key in axes}
        else:
            arrays = {key: flat[key].astype("<u2") for key in ("prompts", "responses")}
            arrays |= {"masks": (flat["responses"] % 2).astype("|u1"), "rewards": flat["groups"].astype("<f4")}
        spec = StoreSpec(
            kind=kind,
            keys={key: array.dtype.str for key, array in arrays.items()},
            tokenizer=tokenizer_identity(300),
            recipe={},
            max_tokens_per_shard=60,
        )
        with StoreWriter(tmp_path / name, spec) as writer:
            writer.append(arrays, {axis: np.cumsum([0, *sizes[axis]]) for axis in axes})
            writer.commit()
        return open_store(tmp_path / name)

    return write


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_batches_of_records_are_those_of_a_store_that_never_had_them(write_records, kind):
    """[O1.c]"""
    out = [0, 3, 4, 5, 17]
    kept = [number for number in range(30) if number not in out]
    rows = rows_of_store(write_records(kind, range(30)), POLICIES[3], out, seq_len=6)
    without = rows_of_store(write_records(kind, kept, "without"), POLICIES[3], seq_len=6)
    arrays = (*RECORD_ARRAYS[kind], "source")
    found, expected = (drawn(loader_of(plan_of((0, index)), arrays=arrays)) for index in (rows, without))
    assert found == expected


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_records_are_left_out_from_a_step_on_and_shapes_stay(write_records, kind):
    """[O1.c, M1.c] The largest group is among them."""
    store = write_records(kind, range(30))
    out = [0, 3, 4, 5, 17, 29]
    rows, fewer = (rows_of_store(store, POLICIES[3], gone, seq_len=6) for gone in ((), out))
    straight, plan = plan_of((0, rows), steps=20), plan_of((0, rows), (4, fewer), steps=20)
    arrays = (*RECORD_ARRAYS[kind], "source")
    before, after = (list(loader_of(made, arrays=arrays)) for made in (straight, plan))
    for one, other in zip(before[:4], after[:4], strict=True):
        assert {name: one[name].tolist() for name in arrays} == {name: other[name].tolist() for name in arrays}
    assert [{name: array.shape for name, array in batch.items()} for batch in after] == [
        {name: array.shape for name, array in after[0].items()}
    ] * 20
    met = [use.spans[0].document for step in range(20) for use in plan.what(step)]
    assert not set(out) & set(met[16:])
    rest = plan.stages[1].rows["web"].num_rest
    first_pass = met[: 16 + rest]
    assert sorted(set(first_pass) | set(out)) == list(range(30))
    assert len(first_pass) == len(set(first_pass))
