"""Which part of a batch a process gets."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ConfigError
from tokenmill.loader import Layout, RankSlice
from tokenmill.loader.layout import _divisors
from tokenmill.tables import MAX_NUMBER

ARRAYS = ("input_ids", "labels", "position_ids", "doc_ids", "loss_mask", "source", "cu_seqlens", "max_seqlen")
LINES = ARRAYS[:5]


def joined(parts, cut):
    """Put the parts of context-parallel members together."""
    if cut == "contiguous":
        return np.concatenate(parts, axis=1)
    halves = [np.split(part, 2, axis=1) for part in parts]
    return np.concatenate([head for head, _ in halves] + [tail for _, tail in reversed(halves)], axis=1)


@pytest.mark.parametrize("cut", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_the_parts_of_all_members_are_the_row(make_run, packing, size, cut):
    """Inputs, labels, positions and documents; cu_seqlens are those of the whole rows."""
    run = make_run(packing=packing, late_seq_len=32)
    whole = run.loader(rank=1, world_size=2, micro_batch=6, arrays=ARRAYS)
    loaders = [
        run.loader(layout=Layout(dp=(1, 2), cp=(rank, size), cut=cut), micro_batch=6, arrays=ARRAYS)
        for rank in range(size)
    ]
    for number, (batch, *parts) in enumerate(zip(whole, *loaders, strict=True)):
        if number % 7:
            continue
        for name in LINES:
            assert parts[0][name].shape[1] == batch[name].shape[1] // size
            assert np.array_equal(joined([part[name] for part in parts], cut), batch[name])
        for name in ("source", "cu_seqlens", "max_seqlen"):
            assert all(np.array_equal(part[name], batch[name]) for part in parts)


@given(number=st.integers(1, 500))
def test_divisors_are_all_numbers_that_divide(number):
    assert _divisors(number) == [size for size in range(1, number + 1) if number % size == 0]


def test_the_way_out_of_the_largest_batch_is_found_without_trying_every_number(make_run):
    plan = make_run().plan()
    spec = replace(plan.stages[0].spec, global_batch_size=MAX_NUMBER)
    large = replace(plan, stages=(replace(plan.stages[0], spec=spec),))
    with pytest.raises(ConfigError, match=r"got 1099511627776 and 1 \* 1000; use .*, or micro_batch 512 or 1024"):
        RankSlice(micro_batch=1000).check(large)


@given(size=st.integers(1, 9), chunk=st.integers(1, 5), cut=st.sampled_from(["zigzag", "contiguous"]))
def test_every_column_belongs_to_one_member(size, chunk, cut):
    seq_len = 2 * size * chunk
    columns = [
        column
        for rank in range(size)
        for part in Layout(cp=(rank, size), cut=cut).columns(seq_len)
        for column in range(*part.indices(seq_len))
    ]
    assert sorted(columns) == list(range(seq_len))
    widths = {Layout(cp=(rank, size), cut=cut).width(seq_len) for rank in range(size)}
    assert widths == {len(columns) // size}


def test_zigzag_gives_every_member_the_same_attention():
    """Sums of positions are the pairs of a causal mask: those of head and tail together are the same for all."""
    pairs = [
        sum(sum(range(part.start, part.stop)) for part in Layout(cp=(rank, 4)).columns(64)) for rank in range(4)
    ]
    assert len(set(pairs)) == 1


def test_tensor_and_pipeline_ranks_get_the_same_batch(make_run):
    run = make_run()
    reference = run.loader(rank=1, world_size=3, micro_batch=4)[2]
    for layout in (Layout(dp=(1, 3), tp=(3, 4)), Layout(dp=(1, 3), pp=(1, 2), tp=(0, 2))):
        batch = run.loader(layout=layout, micro_batch=4)[2]
        assert batch.keys() == reference.keys()
        assert all(np.array_equal(batch[name], reference[name]) for name in reference)


@pytest.mark.parametrize(
    ("needs", "names"),
    [
        ("inputs", ["input_ids", "position_ids", "doc_ids"]),
        ("labels", ["labels", "position_ids", "doc_ids"]),
        ("bounds", ["position_ids", "doc_ids"]),
        ("nothing", []),
    ],
)
def test_a_rank_gets_what_it_needs(make_run, needs, names):
    run = make_run()
    whole = run.loader(micro_batch=12)
    loader = run.loader(layout=Layout(pp=(1, 3), needs=needs), micro_batch=12)
    count = 0
    for batch, part in zip(whole, loader, strict=True):
        assert list(part) == names
        assert all(np.array_equal(part[name], batch[name]) for name in names)
        assert loader.state_dict() == whole.state_dict()
        count += 1
    assert count == len(loader) == len(whole)
    assert list(loader[3]) == names


@pytest.mark.parametrize("options", [{}, {"cp": (1, 2)}])
def test_a_middle_pipeline_stage_gets_bounds_without_opening_token_files(make_run, options):
    run = make_run()
    arrays = ["input_ids", "labels", "position_ids", "doc_ids", "cu_seqlens", "max_seqlen", "num_loss_tokens"]
    names = ["position_ids", "doc_ids", "cu_seqlens", "max_seqlen"]
    whole = list(run.loader(layout=Layout(**options), micro_batch=6, arrays=arrays))
    middle = run.loader(layout=Layout(pp=(1, 3), needs="bounds", **options), micro_batch=6, arrays=arrays)
    for store in run.stores.values():
        for file in store.path.glob("shard-*/sequence.bin"):
            file.unlink()
    batches = list(middle)
    assert [list(batch) for batch in batches] == [names] * len(whole)
    for batch, part in zip(whole, batches, strict=True):
        assert {name: part[name].tolist() for name in names} == {name: batch[name].tolist() for name in names}


def test_bounds_without_an_array_per_row_name_the_arrays_to_add(make_run):
    with pytest.raises(ConfigError, match=r"arrays: .* got \['max_seqlen'\]"):
        make_run().loader(layout=Layout(needs="bounds"), arrays=["input_ids", "labels", "max_seqlen"])


def test_a_rank_that_needs_nothing_reads_no_store(make_run):
    """It iterates, saves and resumes as the others do."""
    run = make_run()
    loader = run.loader(layout=Layout(tp=(1, 2), needs="nothing"), micro_batch=6)
    for store in run.stores.values():
        for file in store.path.glob("shard-*/sequence.bin"):
            file.unlink()
    stream = iter(loader)
    assert [next(stream) for _ in range(5)] == [{}] * 5
    state = loader.state_dict()
    assert (state["step"], state["batches"]) == (2, 1)
    loader.seek(29)
    assert list(stream) == [{}] * 4
    loader.load_state_dict(state)
    assert (loader.step, len(list(stream))) == (2, len(loader) - 5)


def test_only_the_first_process_records_the_plan(make_run):
    run = make_run()
    for layout in (Layout(tp=(1, 2)), Layout(pp=(1, 2)), Layout(cp=(1, 2)), Layout(dp=(1, 2))):
        run.loader(layout=layout)
    assert not (run.folder / ".tokenmill").exists()
    run.loader(layout=Layout(dp=(0, 2), cp=(0, 2)))
    assert (run.folder / ".tokenmill").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cp": (2, 2)},
            "cp: must lie within 0:world_size, got rank 2 of 2; pass the .* context-parallel",
        ),
        ({"dp": (0, 0)}, "rank: must lie within 0:world_size, got rank 0 of 0"),
        ({"dp": 3}, r"layout: dp must be a rank and the number of members, got 3; write dp=\(0, 2\)"),
        ({"tp": (0, "2")}, r"layout: tp must be a rank and the number of members, got \(0, '2'\)"),
        ({"pp": (0, 1, 2)}, r"layout: pp must be a rank and the number of members, got \(0, 1, 2\)"),
        ({"cut": "zig"}, "cut must be one of zigzag, contiguous, segments, got 'zig'; did you mean 'zigzag'"),
        ({"needs": "input"}, "needs must be one of everything, inputs, labels, bounds, nothing, got 'input'"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Layout(**options)


def test_rows_that_cannot_be_cut_evenly_are_refused(make_run):
    run = make_run(late_seq_len=20)
    assert run.loader(layout=Layout(cp=(0, 2)))
    with pytest.raises(
        ConfigError, match=r"'talk': seq_len must be divisible by 8 .*zigzag.*, got 20; use .*16 or 24"
    ):
        run.loader(layout=Layout(cp=(0, 4)))
    assert run.loader(layout=Layout(cp=(0, 4), cut="contiguous"))


def test_a_layout_and_a_rank_are_refused_together(make_run):
    with pytest.raises(ConfigError, match=r"layout cannot be combined with rank 1 of 2; set dp=\(1, 2\)"):
        make_run().loader(layout=Layout(), rank=1, world_size=2)


def test_a_state_does_not_know_of_the_layout(make_run):
    run = make_run()
    states = []
    for layout in (Layout(), Layout(dp=(1, 2), cp=(1, 2)), Layout(dp=(2, 3), tp=(1, 2))):
        loader = run.loader(layout=layout, micro_batch=4 if layout.dp[1] == 3 else 6)
        stream = iter(loader)
        while loader.step < 5:
            next(stream)
        states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]


def test_horizon_and_context_parallel_go_together(make_run):
    run = make_run(packing="best_fit")
    run = replace(run, config=replace(run.config, run=replace(run.config.run, horizon=3)))
    whole = run.loader(micro_batch=12)[4]["labels"]
    parts = [run.loader(layout=Layout(cp=(rank, 2)), micro_batch=12)[4]["labels"] for rank in range(2)]
    assert np.array_equal(joined(parts, "zigzag"), whole)


def test_the_way_out_of_a_large_batch_is_found_by_few_divisions():
    """Trying every number up to the batch took minutes."""
    part = RankSlice(layout=Layout(dp=(0, 7)), micro_batch=3)
    batch = 7 * 10**12
    assert part._way_out(batch) == f"use global_batch_size {batch - 7} or {batch + 14}, or micro_batch 2 or 4"


def test_no_arrays_at_all_are_rejected(make_run):
    with pytest.raises(ConfigError, match=r"arrays: must name each array once.*got \[\]"):
        make_run().loader(arrays=[])
