"""Rows assigned to ranks by their cost."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ConfigError, ResumeError
from tokenmill.loader import Layout, row_digests
from tokenmill.loader.balance import balance, count_costs, group_edges, step_costs
from tokenmill.run.run import Run


def balanced(run, costs="attention"):
    """Return a run whose rows are dealt by cost."""
    settings = replace(run.config.run, balance=costs)
    return Run(config=replace(run.config, run=settings), folder=run.folder, name=run.name)


def shares(costs, ranks, micro_batch):
    """Return what each (rank, micro-batch) costs, of one line of costs."""
    dealt = balance(np.array([costs]), [0, ranks])[0]
    return np.array(costs)[dealt].reshape(ranks, -1, micro_batch).sum(axis=2)


@given(
    cells=st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)),
    seed=st.integers(0, 99),
    top=st.integers(0, 65535),
)
def test_every_row_is_dealt_once(cells, seed, top):
    ranks, batches, micro_batch = cells
    costs = np.random.default_rng(seed).integers(0, top + 1, (3, ranks * batches * micro_batch))
    for edges in ([0, ranks], list(range(ranks + 1))):
        order = balance(costs, edges)
        assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(costs.shape[1]), (3, 1)))
        assert np.array_equal(balance(costs[1:2], edges)[0], order[1])


def test_the_dearest_rows_are_shared_out():
    """One long document for each rank, and one for each micro-batch."""
    assert shares([9, 9, 9, 9, 1, 1, 1, 1], 4, 2).tolist() == [[10]] * 4
    assert shares([1, 1, 9, 9, 1, 9, 1, 9], 2, 2).tolist() == [[18, 2]] * 2
    # Where a micro-batch is one row, those of all ranks at one time are alike, and the ranks in the end.
    assert shares([1, 8, 2, 9, 3, 7, 4, 6], 2, 1).T.tolist() == [[9, 8], [6, 7], [4, 3], [1, 2]]


@given(seed=st.integers(0, 30), ranks=st.sampled_from([2, 4, 8]), micro_batch=st.sampled_from([1, 2, 4]))
def test_a_deal_is_no_worse_than_taking_rows_in_order(seed, ranks, micro_batch):
    costs = np.random.default_rng(seed).pareto(1.1, 64).clip(0, 60).astype(int) * 1000
    dealt, planned = shares(costs.tolist(), ranks, micro_batch), costs.reshape(ranks, -1, micro_batch).sum(axis=2)
    assert dealt.max(axis=0).sum() <= planned.max(axis=0).sum()


@pytest.mark.parametrize("shuffle", ["full", "window"])
@pytest.mark.parametrize(
    ("seq_len", "ranks", "sources", "sizes"),
    [
        (16, 5, 1, {"full": [1, 2, 2]}),
        (8192, 8, 1, {"full": [8]}),
        (8192, 8, 2, {"full": [4, 4]}),
        (8192, 67, 1, {"full": [7, 7, 8, 7, 8, 7, 8, 7, 8]}),
        (32768, 64, 1, {"full": [32] * 2, "window": [8] * 8}),
        (131072, 192, 1, {"full": [96] * 2, "window": [8] * 24}),
    ],
)
def test_a_rank_looks_at_the_rows_of_its_group_alone(make_run, shuffle, seq_len, ranks, sources, sizes):
    """Groups grow with the length of rows, and differ by one rank; rows that are read together stay together."""
    stage = make_run().plan().stages[0]
    spec = replace(stage.spec, seq_len=seq_len, shuffle=replace(stage.spec.shuffle, mode=shuffle))
    edges = group_edges(replace(stage, spec=spec, names=stage.names[:sources]), ranks)
    assert np.diff(edges).tolist() == sizes.get(shuffle, sizes["full"])


@pytest.mark.parametrize("shuffle", ["full", "window"])
def test_rows_stay_within_their_group(make_run, shuffle):
    """[E1.a] A group has the rows that its ranks would take in order, and every rank finds its own of them."""
    run = balanced(make_run(packing="best_fit", shuffle=shuffle))
    plan, ranks = run.plan(), 6
    edges = group_edges(plan.stage(3), ranks)
    assert edges == [0, 2, 4, 6]
    slots = np.stack([run.loader(rank=rank, world_size=ranks).slots(3) for rank in range(ranks)])
    whole = balance(step_costs(plan, 3)[None], edges)[0]
    assert slots.ravel().tolist() == whole.tolist()
    for begin, end in pairwise(edges):
        assert sorted(slots[begin:end].ravel().tolist()) == list(range(begin * 2, end * 2))


@pytest.mark.parametrize("packing", ["concat", "best_fit", "bos_best_fit"])
def test_costs_are_the_squares_of_segments(make_run, packing):
    """Of the segments that cu_seqlens say, those of padding among them; also of what a stage before left."""
    run = make_run(packing=packing, late_seq_len=24, add_bos=True)
    plan = run.plan()
    for step in (0, 16, 17, 29):
        stage = plan.stage(step)
        loader = run.loader(arrays=("input_ids", "cu_seqlens"))
        for slot, (source, row) in enumerate(zip(*plan.rows(step), strict=True)):
            rows = stage.rows[plan.sources[source]]
            loader.seek(step)
            cost = int(count_costs(rows, np.array([row]))[0])
            if slot in (0, 5, 11):
                batch = run.loader(arrays=("input_ids", "cu_seqlens"))
                batch.seek(step)
                stream = iter(batch)
                for _ in range(slot):
                    next(stream)
                segments = np.diff(next(stream)["cu_seqlens"].astype(int))
                assert cost == (segments**2).sum()


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 1), (1, 12), (2, 2), (3, 1), (4, 3), (12, 1)])
def test_a_step_has_the_same_rows_for_every_world_size(make_run, packing, world_size, micro_batch):
    """[E1.a] As a set: which rank and micro-batch has a row is a function of plan, step and layout."""
    plain = make_run(packing=packing, late_seq_len=24)
    run = balanced(plain)
    assert run.plan().fingerprint == plain.plan().fingerprint
    loaders = [run.loader(rank=rank, world_size=world_size, micro_batch=micro_batch) for rank in range(world_size)]
    for step in (0, 3, 17, 29):
        reference = plain.loader()[step]
        expected = row_digests(reference)
        slots = np.concatenate([loader.slots(step) for loader in loaders])
        assert np.array_equal(np.sort(slots), np.arange(len(expected)))
        found = [digest for loader in loaders for digest in row_digests(loader[step])]
        assert found == [expected[slot] for slot in slots]


@pytest.mark.parametrize("shuffle", ["full", "window"])
def test_iteration_resume_and_threads_give_the_deal(make_run, shuffle):
    """[R1.a] From every micro-batch on; steps that follow each other are dealt together, others alone."""
    run = balanced(make_run(packing="best_fit", shuffle=shuffle))
    loader = run.loader(rank=1, world_size=2, micro_batch=2, threads=0)
    whole = [row_digests(batch) for batch in loader]
    assert [row_digests(batch) for batch in run.loader(rank=1, world_size=2, micro_batch=2, threads=3)] == whole
    alone = [run.loader(rank=1, world_size=2, micro_batch=2).slots(step) for step in range(30)]
    again = run.loader(rank=1, world_size=2, micro_batch=2)
    for step in (*range(30), *range(29, -1, -2)):
        assert np.array_equal(again.slots(step), alone[step])
    first = run.loader(rank=1, world_size=2, micro_batch=2)
    stream = iter(first)
    for drawn in range(1, 8):
        next(stream)
        again = run.loader(rank=1, world_size=2, micro_batch=2, threads=0)
        again.load_state_dict(first.state_dict())
        assert row_digests(next(iter(again))) == whole[drawn]


def test_a_balance_may_begin_between_two_steps_but_not_within_one(make_run):
    plain = make_run(packing="best_fit")
    run = balanced(plain)
    loader = plain.loader(micro_batch=4)
    stream = iter(loader)
    next(stream)
    within = loader.state_dict()
    with pytest.raises(ResumeError, match="rows must be dealt as they were, got a balance now and none then"):
        run.loader(micro_batch=4).load_state_dict(within)
    next(stream), next(stream)
    between = run.loader(micro_batch=4)
    between.load_state_dict(loader.state_dict())
    assert between.step == 1
    next(iter(between))
    with pytest.raises(ResumeError, match="got none now and one then"):
        loader.load_state_dict(between.state_dict())


def test_all_members_of_a_group_have_the_rows_of_their_rank(make_run):
    run = balanced(make_run(packing="best_fit"))
    slots = run.loader(rank=1, world_size=2, micro_batch=3).slots(4).tolist()
    for layout in (Layout(dp=(1, 2), cp=(1, 2)), Layout(dp=(1, 2), tp=(1, 4)), Layout(dp=(1, 2), pp=(0, 2))):
        assert run.loader(layout=layout, micro_batch=3).slots(4).tolist() == slots


def test_live_text_is_refused(tmp_path):
    (tmp_path / "web.jsonl").write_text('{"text": "the mill"}\n' * 9)
    tables = {
        "run": {"steps": 2, "global_batch_size": 2, "seq_len": 8, "balance": "attention"},
        "sources": [{"name": "web", "documents": ["web.jsonl"], "tokenizer": "bytes", "live": True}],
    }
    with pytest.raises(ConfigError, match="balance cannot be combined with live text in"):
        Run.from_tables(tables, folder=tmp_path).plan()


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        ("attenton", r"run.balance: expected .*, got 'attenton'; did you mean 'attention'\?"),
        ({"linear": 1, "quadratc": 2}, "unknown key: 'quadratc'; did you mean 'quadratic'"),
        ({"linear": 1}, "and a quadratic one above, got {'linear': 1}; for example balance = \"attention\""),
        ({"linear": -1, "quadratic": 1}, "costs of at least 0"),
    ],
)
def test_costs_that_cannot_be_are_refused(balance, message):
    tables = {
        "run": {"steps": 2, "global_batch_size": 2, "seq_len": 8, "balance": balance},
        "sources": [{"name": "web", "store": "web"}],
    }
    with pytest.raises(ConfigError, match=message):
        Run.from_tables(tables)
