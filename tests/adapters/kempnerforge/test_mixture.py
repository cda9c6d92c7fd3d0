"""Datasets are drawn by weight, exactly, and other weights hold from the next sample on."""

import json
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.adapters.kempnerforge import MixtureSampler
from tokenmill.adapters.kempnerforge.sampler import whole_weights
from tokenmill.errors import ConfigError, ResumeError

SIZES = [0, 1000, 1300, 1340]


def make(weights=(0.7, 0.2, 0.1), ranks=1, rank=0, sizes=SIZES, **options):
    return MixtureSampler(sizes, list(weights), ranks, rank, **options)


def source_of(index, sizes=SIZES):
    return next(number for number in range(len(sizes) - 1) if index < sizes[number + 1])


def run(sampler, count, epochs=50):
    """Draw from one epoch after another."""
    drawn = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for index in sampler:
            drawn.append(index)
            if len(drawn) == count:
                return drawn
    raise AssertionError("not enough epochs")


def weighed(**change):
    """Return weights as a state has them, with one thing changed."""
    return {"start": 0, "weights": [7, 2, 1], "drawn": [0, 0, 0], "ahead": [0, 0, 0], **change}


@given(
    weights=st.lists(st.floats(0.01, 10), min_size=2, max_size=6),
    count=st.integers(1, 3000),
    seed=st.integers(0, 50),
)
def test_after_any_number_of_samples_each_dataset_is_within_two_of_its_share(weights, count, seed):
    """[M1.a]"""
    sizes = [0, *(100 * (number + 1) for number in range(len(weights)))]
    drawn = run(MixtureSampler(sizes, weights, 1, 0, seed=seed), count)
    counts = Counter(source_of(index, sizes) for index in drawn)
    for source, weight in enumerate(weights):
        assert abs(counts[source] - count * weight / sum(weights)) < 2


def test_a_dataset_gives_all_its_samples_before_it_gives_one_again():
    """[R1.d]"""
    drawn = run(make(), 4000)
    for source, size in enumerate([1000, 300, 40]):
        own = [index for index in drawn if source_of(index) == source]
        turns = [own[begin : begin + size] for begin in range(0, len(own) - size + 1, size)]
        assert [sorted(turn) for turn in turns] == [list(range(SIZES[source], SIZES[source + 1]))] * len(turns)
        assert len({tuple(turn) for turn in turns}) == len(turns), "a new order each time"


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_together_draw_what_one_draws_alone(ranks):
    alone = list(make())
    parts = [list(make(ranks=ranks, rank=rank)) for rank in range(ranks)]
    assert {len(part) for part in parts} == {1000 // ranks + 300 // ranks + 40 // ranks}
    for number, turn in enumerate(zip(*parts, strict=True)):
        assert sorted(turn) == sorted(alone[number * ranks : (number + 1) * ranks])


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_always_gets_the_same_dataset(ranks):
    parts = [list(make((1, 1, 0), ranks, rank)) for rank in range(ranks)]
    for part in parts:
        share = sum(source_of(index) == 0 for index in part) / len(part)
        assert 0.4 < share < 0.6


def test_without_shuffling_each_dataset_is_read_in_its_order():
    drawn = list(islice(make(shuffle=False), 100))
    for source in range(3):
        own = [index for index in drawn if source_of(index) == source]
        assert own == list(range(SIZES[source], SIZES[source] + len(own)))


@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_has_what_every_rank_can_have_of_each_dataset(drop_last):
    sampler = make(ranks=3, drop_last=drop_last)
    expected = 333 + 100 + 13 if drop_last else 334 + 100 + 14
    assert len(sampler) == len(list(sampler)) == expected


@pytest.mark.parametrize("before", [0, 1, 500, 1340])
def test_other_weights_hold_from_the_next_sample_on(before):
    """[M1.b; KempnerForge waits for the next epoch]"""
    sampler, plain = make(), make()
    stream = iter(sampler)
    first = list(islice(stream, before))
    sampler.update_weights([0, 1, 0])
    rest = list(stream)
    whole = list(plain)
    assert first == whole[:before]
    assert [source_of(index) for index in rest] == [1] * (len(whole) - before)
    # Its samples go on where they were: none is given again before all were given.
    own = [index for index in [*first, *rest] if source_of(index) == 1][:300]
    assert sorted(own) == list(range(1000, 1300))[: len(own)] if len(own) == 300 else len(set(own)) == len(own)


def test_weights_that_change_all_the_time_starve_nobody():
    """[M1.a]"""
    sampler = make((0.98, 0.01, 0.01))
    stream = iter(sampler)
    drawn = []
    for turn in range(100):
        drawn += list(islice(stream, 10))
        sampler.update_weights([0.98, 0.01, 0.0100001 if turn % 2 else 0.01])
    counts = Counter(source_of(index) for index in drawn)
    assert abs(counts[1] - 10) < 3
    assert abs(counts[2] - 10) < 3


def test_the_same_weights_in_proportion_change_nothing():
    sampler = make((0.5, 0.25, 0.25))
    sampler.update_weights([4, 2, 2])
    assert not sampler.is_changing
    sampler.update_weights([1, 1, 1])
    assert sampler.is_changing
    sampler.update_weights([2, 1, 1])
    assert not sampler.is_changing
    assert list(sampler) == list(make((0.5, 0.25, 0.25)))


def test_temperature_brings_weights_closer_and_leaves_out_what_has_none():
    assert whole_weights([16, 1, 0], 2.0, [9, 9, 9]) == (4, 1, 0)
    assert whole_weights([16, 1], 1.0, [9, 9]) == (16, 1)
    assert whole_weights([1e200, 1e200, 0], 0.01, [9, 9, 9]) == (1, 1, 0), "no power is beyond all numbers"
    assert whole_weights([4, 2], 0.1, [9, 9]) == (1024, 1)
    drawn = Counter(source_of(index) for index in make((16, 1, 0), temperature=2.0))
    assert drawn[2] == 0
    assert abs(drawn[0] - 4 * drawn[1]) < 8
    sampler = make((1, 1, 1))
    sampler.update_weights([16, 1, 0], temperature=2.0)
    assert sampler.weights == (4, 1, 0)


def test_a_state_goes_on_in_the_weights_that_hold():
    """[R1.a]"""
    sampler = make()
    stream = iter(sampler)
    before = list(islice(stream, 100))
    sampler.update_weights([1, 1, 8])
    more = list(islice(stream, 77))
    state = json.loads(json.dumps(sampler.state_dict()))
    rest = list(stream)
    again = make()
    again.load_state_dict(state)
    again.set_skip(len(before) + len(more))
    assert list(again) == rest
    assert again.state_dict() == state
    with pytest.raises(ConfigError, match=r"places must not lie before 100, .* got 0; load a state"):
        list(again)


def test_new_weights_that_were_not_used_yet_are_in_the_state():
    """[R1.c]"""
    sampler = make()
    stream = iter(sampler)
    list(islice(stream, 50))
    sampler.update_weights([0, 0, 1])
    state = json.loads(json.dumps(sampler.state_dict()))
    again = make()
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.set_skip(50)
    assert list(again) == list(stream)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed must be that of this sampler, 0, got 1"),
        ({"sizes": [1, 2, 3]}, r"sizes must be that of this sampler, \[1000, 300, 40\]"),
        (
            {"initial_weights": [1, 1, 1]},
            r"initial_weights must be that of this sampler, \[7, 2, 1\], got \[1, 1, 1\]",
        ),
        ({"weighing": {"start": 0, "weights": [1, 2]}}, "weighing: missing key: drawn"),
        ({"weighing": None}, "weighing: expected a table, got None"),
        ({"weighing": weighed(start=-5)}, "weighing.start: expected a whole number .* got -5"),
        ({"weighing": weighed(start="5")}, "weighing.start: expected a whole number .* got '5'"),
        ({"weighing": weighed(start=5)}, "which is start together"),
        ({"weighing": weighed(drawn=[-7, 7, 0])}, r"weighing.drawn\[0\]: expected a whole number from 0 .* got -7"),
        ({"weighing": weighed(start=1 << 41, drawn=[1 << 41, 0, 0])}, "weighing.start: expected .* to 2.40, got"),
        ({"weighing": weighed(ahead=[10**12, 0, 0])}, "weighing must have"),
        ({"weighing": weighed(ahead=[0.5, 0, 0])}, "weighing.ahead: expected a list of whole numbers"),
        ({"weighing": weighed(weights=[1, 2, -1])}, r"weights\[2\]: expected a whole number from 0 .* got -1"),
        ({"weighing": weighed(weights=[1 << 40, 2, 1])}, "weighing must have the weights"),
        ({"weighing": {"start": 0, "weights": [1], "drawn": [0], "ahead": [0]}}, "weights of 3 sources, got 1"),
        ({"pending": [0, 0, 0]}, "pending must be weights of 3 sources"),
        ({"pending": [1, 1]}, "pending must be weights of 3 sources"),
        ({"pending": "no"}, "pending: expected a list of whole numbers, got 'no'"),
    ],
)
def test_a_state_of_another_mixture_is_refused(change, message):
    """[S.b]"""
    sampler = make()
    with pytest.raises(ResumeError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})


@pytest.mark.parametrize(
    ("weights", "temperature", "message"),
    [
        ([1, 2], 1.0, "one for each of 3 datasets, got 2"),
        ([1, 2, -1], 1.0, "got -1 for dataset 2 with 40 samples"),
        ([0, 0, 0], 1.0, "must leave a dataset to draw from"),
        ([1, 1, float("nan")], 1.0, "got nan for dataset 2"),
        ([1, 1, 1], 0.0, "temperature: must be positive, got 0.0"),
        ([0.9, 0.1, 0], 0.001, "got 0.001, which makes weight 0.1 of dataset 1 beside 0.9 nothing; raise temp"),
        ([100, 1, 1], 0.001, "got 0.001, which makes weight 1 of dataset 1 beside 100 nothing; raise temperature"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights, temperature, message):
    with pytest.raises(ConfigError, match=message):
        make(weights, temperature=temperature)
    with pytest.raises(ConfigError, match=message):
        make().update_weights(weights, temperature)


@pytest.mark.parametrize("sizes", [[0, 10, 5], [10, 20], []])
def test_sizes_that_fall_or_do_not_begin_with_0_are_refused(sizes):
    with pytest.raises(ConfigError, match=r"cumulative_sizes: must begin with 0 and never fall, got \["):
        MixtureSampler(sizes, [1] * max(0, len(sizes) - 1), 1, 0)


@given(st.data())
def test_whatever_the_weights_did_the_state_is_accepted(data):
    """[R1.a]"""
    sampler = make((1, 1, 1))
    weights = st.lists(st.sampled_from([0, 0.001, 1, 50]), min_size=3, max_size=3).filter(any)
    position = 0
    for _ in range(data.draw(st.integers(1, 12))):
        position += data.draw(st.integers(1, 3000))
        sampler.update_weights(data.draw(weights))
        sampler.begin_change(position)
        make((1, 1, 1)).load_state_dict(json.loads(json.dumps(sampler.state_dict())))


def test_weights_of_past_epochs_are_not_kept_but_an_epoch_can_be_drawn_again():
    sampler = make()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        stream = iter(sampler)
        drawn = []
        for turn in range(5):
            drawn += list(islice(stream, 100))
            sampler.update_weights([1 + turn, 1, 1])
        drawn += list(stream)
        assert len(sampler._weighings) <= 6
        assert list(sampler) == drawn
    sampler.set_epoch(0)
    with pytest.raises(ConfigError, match="as the weights there are not kept, got 0; load a state to go back"):
        list(sampler)


def test_a_dataset_without_samples_cannot_have_a_weight():
    with pytest.raises(ConfigError, match="got 1 for dataset 1 with 0 samples"):
        MixtureSampler([0, 10, 10], [1, 1], 1, 0)
    assert len(list(MixtureSampler([0, 10, 10], [1, 0], 1, 0))) == 10
    with pytest.raises(ConfigError, match=r"a sample for each of 20 ranks, got sizes \[10\]"):
        MixtureSampler([0, 10], [1], 20, 0)
