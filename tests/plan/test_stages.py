import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.plan import Shuffle
from tokenmill.plan.stages import rows_at

SIZES = {"web": 101, "books": 37, "code": 64}
STAGES = [
    (0, 12, {"web": 0.6, "books": 0.4}),
    (30, 8, {"web": 0.2, "code": 0.8}),
    (75, 12, {"web": 1, "books": 1, "code": 1}),
]


def drawn_rows(plan, source):
    """All rows of a source in the order of the positions of the run."""
    out = []
    for step in range(plan.steps):
        sources, rows = plan.rows(step)
        out += rows[sources == plan.sources.index(source)].tolist()
    return out


@pytest.mark.parametrize("shuffle", ["full", "window", "none"])
def test_every_row_appears_once_an_epoch_across_stages(make_plan, shuffle):
    """[R1.d] The multiset of rows is what the plan says, over stage edges and epoch edges."""
    plan = make_plan(SIZES, STAGES, steps=120, shuffle=shuffle)
    for source, size in SIZES.items():
        rows = drawn_rows(plan, source)
        counts = np.bincount(rows, minlength=size)
        whole = len(rows) // size
        assert set(counts.tolist()) <= {whole, whole + 1}
        assert len(rows) == sum(stage.draws.get(source, 0) for stage in plan.stages)


@given(
    edges=st.lists(st.integers(1, 99), min_size=1, max_size=6, unique=True),
    seeds=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    modes=st.lists(st.sampled_from(["full", "window", "none"]), min_size=7, max_size=7),
    size=st.integers(1, 90),
    windows=st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any),
    packed=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_change_of_seed_or_shuffle_loses_and_repeats_nothing(
    make_plan, edges, seeds, modes, size, windows, packed
):
    stages = [
        (start, 3, {"web": 1}, {"seed": seed, "shuffle": Shuffle(mode=mode, block_rows=4, window_blocks=2)})
        for start, seed, mode in zip([0, *sorted(edges)], seeds, modes, strict=False)
    ]
    plan = make_plan({"web": tuple(windows) if packed else size}, stages, steps=100)
    size = sum(windows) if packed else size
    rows = drawn_rows(plan, "web")
    for begin in range(0, len(rows) - size + 1, size):
        assert sorted(rows[begin : begin + size]) == list(range(size))
    counts = np.bincount(rows, minlength=size)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 300, 513])
def test_rows_drawn_together_are_those_of_each_step_alone(make_plan, size):
    """Many steps at once, over several epochs of two sources."""
    plan = make_plan({"a": size, "b": 77}, [(0, 60, {"a": 2, "b": 1})], steps=30)
    steps, slots = np.repeat(np.arange(30), 60), np.tile(np.arange(60), 30)
    sources, rows = rows_at(plan.stages[0], steps, slots)
    assert sources.tolist() == [source for step in range(30) for source in plan.rows(step)[0].tolist()]
    assert rows.tolist() == [row for step in range(30) for row in plan.rows(step)[1].tolist()]


def test_epochs_are_new_orders(make_plan):
    plan = make_plan({"web": 50}, [(0, 10, {"web": 1})], steps=10)
    rows = drawn_rows(plan, "web")
    assert rows[:50] != rows[50:]


def test_sources_are_keyed_by_name_not_by_place(make_plan):
    """Adding a source or listing them in another order leaves the order of the others alone."""
    stages = [(0, 4, {"web": 1})]
    alone = make_plan({"web": 50}, stages, steps=20)
    beside = make_plan({"aaa": 9, "web": 50}, stages, steps=20)
    assert drawn_rows(alone, "web") == drawn_rows(beside, "web")
    weights = {"web": 2, "books": 1}
    one = make_plan({"web": 50, "books": 30}, [(0, 6, weights)], steps=20)
    other = make_plan({"books": 30, "web": 50}, [(0, 6, dict(reversed(weights.items())))], steps=20)
    for step in range(20):
        names = [[plan.sources[i] for i in plan.rows(step)[0]] for plan in (one, other)]
        assert names[0] == names[1]
        assert np.array_equal(one.rows(step)[1], other.rows(step)[1])


@pytest.mark.parametrize("step", [0, 29, 30, 74, 75, 119])
def test_any_slots_of_any_steps_are_those_of_the_whole_batch(make_plan, step):
    plan = make_plan(SIZES, STAGES, steps=120)
    sources, rows = plan.rows(step)
    picked = np.random.default_rng(step).permutation(rows.size)
    found = rows_at(plan.stage(step), np.full(rows.size, step), picked)
    assert np.array_equal(found[0], sources[picked])
    assert np.array_equal(found[1], rows[picked])


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("weights", [{"a": 0.9, "b": 0.1}, {"a": 3, "b": 1}, {"a": 0.5, "b": 0.25, "c": 0.25}])
def test_no_rank_is_tied_to_a_source(make_plan, world_size, weights):
    """Batch sizes that are multiples of the mixture's period would give a rank the same slots of it for ever."""
    batch = 192
    steps = 400
    plan = make_plan({"a": 10**6, "b": 10**6, "c": 10**6}, [(0, batch, weights)], steps=steps)
    share = batch // world_size
    sources = np.stack([plan.rows(step)[0] for step in range(steps)]).reshape(steps, world_size, share)
    total = sum(weights.values())
    for index, name in enumerate(["a", "b", "c"]):
        expected = weights.get(name, 0) / total
        found = (sources == index).mean(axis=(0, 2))
        # A rank whose rows were drawn at random would stray by this standard deviation.
        deviation = np.sqrt(expected * (1 - expected) / (steps * share))
        assert np.abs(found - expected).max() <= 5 * deviation


def test_every_batch_is_within_two_rows_of_the_shares_at_each_step(make_plan):
    plan = make_plan(SIZES, STAGES, steps=120)
    for stage in plan.stages:
        drawn = np.zeros(len(SIZES))
        total = sum(stage.spec.weights.values())
        for step in range(stage.spec.start_step, stage.end_step):
            drawn += np.bincount(plan.rows(step)[0], minlength=len(SIZES))
            for name, weight in stage.spec.weights.items():
                rows = (step + 1 - stage.spec.start_step) * stage.spec.global_batch_size
                assert abs(drawn[plan.sources.index(name)] - rows * weight / total) < 2


def test_order_is_the_same_on_every_machine(make_plan):
    plan = make_plan(SIZES, STAGES, steps=120)
    assert [array.tolist() for array in plan.rows(31)] == GOLDEN_STEP_31


GOLDEN_STEP_31 = [[2, 2, 2, 2, 0, 2, 2, 2], [34, 60, 38, 26, 31, 5, 28, 13]]


WINDOWS = {"web": (40, 1, 0, 33, 27), "books": (5, 5, 5, 22), "code": 64}


def test_packing_windows_are_read_once_an_epoch_across_stages(make_plan):
    plan = make_plan(WINDOWS, STAGES, steps=120, shuffle="window")
    for source, size in SIZES.items():
        counts = np.bincount(drawn_rows(plan, source), minlength=size)
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("step", [0, 29, 30, 74, 75, 119])
def test_any_slots_are_those_of_the_whole_batch_by_window(make_plan, step):
    plan = make_plan(WINDOWS, STAGES, steps=120, shuffle="window")
    sources, rows = plan.rows(step)
    picked = np.random.default_rng(step).permutation(rows.size)
    found = rows_at(plan.stage(step), np.full(rows.size, step), picked)
    assert np.array_equal(found[0], sources[picked])
    assert np.array_equal(found[1], rows[picked])


@pytest.mark.parametrize("sizes", [WINDOWS, SIZES])
def test_when_finds_every_slot_of_batches_ordered_by_block(make_plan, sizes):
    """Row r of these sources is document r."""
    changed = {"shuffle": Shuffle(mode="full"), "seed": 9}
    stages = [STAGES[0], (30, *STAGES[1][1:], changed), STAGES[2]]
    plan = make_plan(sizes, stages, steps=120, shuffle="window")
    uses = {name: {} for name in sizes}
    for step in range(120):
        sources, rows = plan.rows(step)
        for slot, (source, row) in enumerate(zip(sources, rows, strict=True)):
            uses[plan.sources[source]].setdefault(int(row), []).append((step, slot))
    for name, size in SIZES.items():
        for row in range(size):
            found = [(use.step, use.slot) for use in plan.when(name, row)]
            assert found == uses[name].get(row, [])


def test_a_batch_by_window_has_the_sources_of_the_mixture_in_their_slots(make_plan):
    """Only which row of a source stands in which of its slots is ordered; the slots are those of any shuffle."""
    by_window, full = (make_plan(WINDOWS, STAGES, steps=120, shuffle=mode) for mode in ("window", "full"))
    for step in range(120):
        assert np.array_equal(by_window.rows(step)[0], full.rows(step)[0])


def test_ranks_share_few_windows(make_plan):
    """8 ranks over 64 windows: unordered every rank touches all of them, ordered its own and few beside them."""
    starts = np.arange(0, 64 * 500, 500)
    plan = make_plan({"web": (500,) * 64}, [(0, 1000, {"web": 1}, {"shuffle": Shuffle(mode="window")})], steps=32)
    touched = [set() for _ in range(8)]
    for step in range(32):
        windows = np.searchsorted(starts, plan.rows(step)[1], side="right") - 1
        for rank in range(8):
            touched[rank] |= set(windows[rank * 125 : (rank + 1) * 125].tolist())
    assert sum(map(len, touched)) / 64 < 1.6
    assert set().union(*touched) == set(range(64))
