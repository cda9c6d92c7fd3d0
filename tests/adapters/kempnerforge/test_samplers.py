"""The order of an epoch is one permutation, dealt to ranks by strides, and nothing of it is kept."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.adapters.kempnerforge import DistributedSampler
from tokenmill.errors import ConfigError


def dealt(size, ranks, *, epoch=0, skip=0, **options):
    """Return what each rank takes."""
    samplers = [DistributedSampler(range(size), ranks, rank, **options) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
        sampler.set_skip(skip)
    return [list(sampler) for sampler in samplers]


def interleaved(parts):
    return [index for turn in zip(*parts, strict=True) for index in turn]


@given(size=st.integers(8, 5000), ranks=st.integers(1, 8), epoch=st.integers(0, 5), seed=st.integers(0, 99))
def test_rank_r_takes_places_r_r_plus_n_and_so_on_of_one_permutation(size, ranks, epoch, seed):
    whole = dealt(size, 1, epoch=epoch, seed=seed)[0]
    assert sorted(whole) == list(range(size))
    parts = dealt(size, ranks, epoch=epoch, seed=seed)
    kept = size // ranks * ranks
    assert parts == [whole[rank:kept:ranks] for rank in range(ranks)]


@pytest.mark.parametrize(("size", "ranks"), [(10, 4), (12, 4), (3, 4), (1, 4)])
def test_drop_last_leaves_out_and_padding_begins_again(size, ranks):
    whole = dealt(size, 1, seed=3)[0]
    padded = dealt(size, ranks, seed=3, drop_last=False)
    rounds = -(-size // ranks)
    assert interleaved(padded) == [whole[place % size] for place in range(rounds * ranks)]
    sampler = DistributedSampler(range(size), ranks, 0, drop_last=False)
    assert (len(sampler), sampler.num_samples, sampler.total_size) == (rounds, rounds, rounds * ranks)
    if size < ranks:
        with pytest.raises(ConfigError, match=rf"a sample for each of {ranks} ranks, got {size}"):
            DistributedSampler(range(size), ranks, 0)
    else:
        sampler = DistributedSampler(range(size), ranks, 0, seed=3)
        assert (len(sampler), sampler.total_size) == (size // ranks, size // ranks * ranks)
        assert interleaved(dealt(size, ranks, seed=3)) == whole[: size // ranks * ranks]


def test_without_shuffling_the_order_is_that_of_the_dataset():
    assert dealt(7, 2, shuffle=False) == [[0, 2, 4], [1, 3, 5]]
    assert dealt(7, 2, shuffle=False, drop_last=False) == [[0, 2, 4, 6], [1, 3, 5, 0]]


def test_every_epoch_and_seed_has_an_order_of_its_own():
    orders = {tuple(dealt(50, 1, epoch=epoch, seed=seed)[0]) for epoch in range(4) for seed in range(4)}
    assert len(orders) == 16


def test_skipping_ahead_holds_for_one_iteration():
    whole = dealt(5000, 3)
    assert dealt(5000, 3, skip=1200) == [part[1200:] for part in whole]
    sampler = DistributedSampler(range(5000), 3, 1)
    sampler.set_skip(10)
    assert [len(list(sampler)), len(list(sampler))] == [1656, 1666]
    with pytest.raises(ConfigError, match="skip: must be at least 0, got -1"):
        sampler.set_skip(-1)
    for epoch in (-1, "1", 10**30):
        with pytest.raises(ConfigError, match=r"epoch: must lie within 0 and .* got"):
            sampler.set_epoch(epoch)


def test_ranks_may_change_at_any_place_and_nothing_is_lost_or_repeated():
    """[R1.d]"""
    whole = dealt(1000, 1)[0]
    parts = [list(islice(DistributedSampler(range(1000), 4, rank).indices(0, 0, 1000), 50)) for rank in range(4)]
    assert interleaved(parts) == whole[:200]
    for drop_last, expected in ((True, whole[200:998]), (False, [*whole[200:], whole[0]])):
        samplers = [DistributedSampler(range(1000), 3, rank, drop_last=drop_last) for rank in range(3)]
        rest = [list(sampler.indices(0, 200, sampler.end(0, 200, 3))) for sampler in samplers]
        assert interleaved(rest) == expected


def test_no_list_of_indices_is_held():
    """[K1.a]"""
    size = 10**12
    sampler = DistributedSampler(range(size), 8, 3)
    sampler.set_skip(size // 16)
    begun = list(islice(iter(sampler), 3000))
    assert len(set(begun)) == 3000
    assert max(begun) > 9 * 10**11
    assert min(begun) < 10**11
    held = [value for value in vars(sampler).values() if isinstance(value, list | tuple | np.ndarray)]
    assert held == []


def test_rank_and_number_of_ranks_are_those_of_the_launcher_unless_they_are_given(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = DistributedSampler(range(100))
    given_ = DistributedSampler(range(100), 2, 1)
    assert [(s.rank, s.num_replicas) for s in (found, given_)] == [(2, 4), (1, 2)]
    with pytest.raises(ConfigError, match="rank: must lie within 0 and the 2 ranks, got 2"):
        DistributedSampler(range(100), 2)
    with pytest.raises(ConfigError, match="seed must lie within 0 and 2"):
        DistributedSampler(range(100), seed=-1)
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ConfigError, match="RANK and WORLD_SIZE must both be whole numbers"):
        DistributedSampler(range(100))


def test_a_state_restores_the_epoch_and_its_rank_is_of_no_concern():
    sampler = DistributedSampler(range(100), 4, 3, seed=5)
    sampler.set_epoch(7)
    state = sampler.state_dict()
    assert [state[key] for key in ("epoch", "seed", "num_replicas", "rank")] == [7, 5, 4, 3]
    other = DistributedSampler(range(100), 2, 0, seed=5)
    other.load_state_dict(state)
    assert (other.epoch, other.rank, other.num_replicas) == (7, 0, 2)
    other.load_state_dict({"epoch": 2})
    assert other.epoch == 2


@pytest.mark.parametrize(("key", "value"), [("seed", 6), ("size", 99), ("shuffle", False), ("drop_last", False)])
def test_a_state_of_another_order_restores_the_epoch_with_a_warning(caplog, key, value):
    """[S.b] As KempnerForge documents it: "only epoch is restored; rank info is local"."""
    sampler = DistributedSampler(range(100), 1, 0)
    before = sampler.state_dict()
    sampler.load_state_dict({**before, "epoch": 3, "rank": 5, "num_replicas": 8, key: value})
    assert sampler.state_dict() == {**before, "epoch": 3}
    (message,) = caplog.messages
    assert (
        message == f"state: {key} is {value!r}, and {before[key]!r} in this sampler: samples or their order differ"
    )
