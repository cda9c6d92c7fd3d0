from __future__ import annotations

import json
import os
from itertools import chain, islice

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.adapters.ranks import call_ranks
from torch.utils.data import DataLoader

from tokenmill.adapters.astrai import DatasetFactory, ResumableDistributedSampler
from tokenmill.errors import ConfigError, ResumeError


def sampler(size, *, rank=0, world=1, **options):
    return ResumableDistributedSampler(range(size), replica=(rank, world), **options)


def dealt(size, world, **options):
    """Return what all ranks are given, in the order of the positions."""
    ranks = [[*sampler(size, rank=rank, world=world, **options)] for rank in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    return [*chain(*zip(*ranks, strict=True))]


def test_every_item_comes_once_an_epoch_and_every_epoch_has_an_order_of_its_own():
    """[R1.d]"""
    each = sampler(100)
    orders = [[*each] for _ in range(3)]
    assert [sorted(order) for order in orders] == [[*range(100)]] * 3
    assert len({tuple(order) for order in orders}) == 3
    assert each.epoch == 3
    assert [*sampler(100, start_epoch=2)] == orders[2]
    assert [*sampler(100, seed=43)] != orders[0]
    # Where seed and epoch are added up, these two would be the same.
    assert [*sampler(100, seed=43)] != orders[1]


def test_without_shuffle_items_come_in_order():
    assert [*sampler(7, shuffle=False)] == [*range(7)]
    assert [*sampler(7, shuffle=False, rank=1, world=3)] == [1, 4, 0]
    assert [*sampler(7, shuffle=False, rank=1, world=3, drop_last=True)] == [1, 4]


@given(size=st.integers(1, 60), world=st.integers(1, 8), drop_last=st.booleans(), epoch=st.integers(0, 3))
def test_the_ranks_share_the_order_of_one(size, world, drop_last, epoch):
    """[C2.a] To fill up, the first items come once more; with drop_last the last ones are left out."""
    order = [*sampler(size, start_epoch=epoch)]
    if drop_last and size < world:
        with pytest.raises(
            ConfigError, match=f"every rank must get an item, got {size} for {world} ranks with drop_"
        ):
            sampler(size, world=world, drop_last=True)
        return
    each = sampler(size, world=world, drop_last=drop_last)
    expected = (order * (1 + world))[: each.total_size]
    assert dealt(size, world, drop_last=drop_last, start_epoch=epoch) == expected
    assert each.total_size == each.num_samples_per_replica * world
    assert abs(each.total_size - size) < world


@given(size=st.integers(2, 50), world=st.integers(1, 4), start=st.integers(0, 120), epoch=st.integers(0, 2))
def test_start_iter_skips_ahead_within_the_epoch(size, world, start, epoch):
    """[R1.a] It counts within the epoch or, as AstrAI's trainer does, through all; a contradiction is refused."""
    whole = [*sampler(size, rank=world - 1, world=world, start_epoch=epoch)]
    past = start // len(whole)
    if past not in (0, epoch):
        with pytest.raises(
            ConfigError, match=rf"in epoch {past} of {len(whole)} items a rank; give start_epoch={past}"
        ):
            sampler(size, rank=world - 1, world=world, start_epoch=epoch, start_iter=start)
        return
    each = sampler(size, rank=world - 1, world=world, start_epoch=epoch, start_iter=start)
    assert (each.epoch, each.iter) == (epoch, start % len(whole))
    assert len(each) == len(whole) - start % len(whole)
    assert [*each] == whole[start % len(whole) :]
    assert (each.epoch, each.iter, len(each)) == (epoch + 1, 0, len(whole))
    assert [*each] == [*sampler(size, rank=world - 1, world=world, start_epoch=epoch + 1)]


@given(
    size=st.integers(1, 60),
    worlds=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    taken=st.integers(0, 60),
)
def test_a_state_goes_on_with_any_number_of_ranks(size, worlds, taken):
    """[R1.a, E1.c] What was drawn before and after is the order of the epoch: nothing is lost, nothing repeated."""
    before, after = worlds
    order = [*sampler(size)]
    ranks = [sampler(size, rank=rank, world=before) for rank in range(before)]
    rounds = taken % (len(ranks[0]) + 1)
    drawn = [[*islice(rank, rounds)] for rank in ranks]
    states = [rank.state_dict() for rank in ranks]
    assert len({json.dumps(state) for state in states}) == 1
    resumed = [sampler(size, rank=rank, world=after) for rank in range(after)]
    for each in resumed:
        each.load_state_dict(json.loads(json.dumps(states[0])))
    if rounds == len(ranks[0]):
        assert {(each.epoch, len(each)) for each in resumed} == {
            (1, sampler(size, world=after).num_samples_per_replica)
        }
        return
    first = [*chain(*zip(*drawn, strict=True))]
    rest = [*chain(*zip(*resumed, strict=True))]
    assert first + rest[: size - len(first)] == order
    assert rest[size - len(first) :] == (order * 6)[: len(first) + len(rest) - size]


def test_a_state_is_small_json_and_the_same_on_every_rank(tmp_path, astrai):
    import numpy as np

    dataset = DatasetFactory.load("seq", astrai.save_bin(tmp_path, {"sequence": np.arange(90, dtype=np.int32)}), 4)
    each = ResumableDistributedSampler(dataset)
    assert next(iter(each)) in range(len(dataset))
    state = each.state_dict()
    assert state == {
        "version": 1,
        "epoch": 0,
        "position": 1,
        "seed": 42,
        "shuffle": True,
        "samples": 22,
        "data": dataset.fingerprint,
    }
    assert len(json.dumps(state)) < 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 43}, "seed must be that of the state, 43, got 42"),
        ({"shuffle": False}, "shuffle must be that of the state, False, got True"),
        ({"samples": 9}, "samples must be that of the state, 9, got 10"),
        ({"data": "other"}, "data must be that of the state, 'other', got ''"),
        ({"version": 2}, "version must be that of the state, 2, got 1"),
        ({"position": -1}, r"state.position: expected a whole number from 0 to 2\^40, got -1"),
        ({"position": 10}, "position must lie within 0:10, got 10"),
        ({"epoch": 1.5}, r"state.epoch: expected a whole number from 0 to 2\^40, got 1.5"),
        ({"epochs": 1}, "state: unknown key: 'epochs'"),
    ],
)
def test_a_state_of_another_order_is_refused(change, message):
    """[S.b]"""
    each = sampler(10)
    with pytest.raises(ResumeError, match=message):
        each.load_state_dict({**each.state_dict(), **change})
    with pytest.raises(ResumeError, match=r"state: missing key: version; use"):
        each.load_state_dict({"epoch": 0})
    with pytest.raises(ResumeError, match=r"state: expected a table, got None; use a state as state_dict"):
        each.load_state_dict(None)
    assert (each.epoch, each.iter) == (0, 0)


def test_a_chain_of_resumes_gives_the_straight_order():
    """[R1.b, R1.c] Also on the edges of epochs, with nothing drawn, and with other numbers of ranks."""
    straight = sampler(24)
    expected = [*straight, *straight, *straight]
    found, state = [], sampler(24).state_dict()
    for world, rounds in ((1, 5), (3, 1), (2, 0), (4, 4), (1, 0), (6, 2), (2, 6), (1, 23), (1, 1)):
        ranks = [sampler(24, rank=rank, world=world) for rank in range(world)]
        for each in ranks:
            each.load_state_dict(state)
            assert each.state_dict() == state
        found += chain(*zip(*(islice(each, rounds) for each in ranks), strict=True))
        state = json.loads(json.dumps(ranks[-1].state_dict()))
    assert found == expected[: len(found)]
    assert (len(found), state["epoch"], state["position"]) == (72, 3, 0)


@pytest.mark.parametrize("drawn", [0, 1, 9, 10])
def test_a_running_pass_goes_where_a_state_says(drawn):
    """[R1.c] Whether it was loaded before or after iter()."""
    other = sampler(10, start_epoch=5, start_iter=7)
    expected = [*sampler(10, start_epoch=5)][7:]
    each = sampler(10)
    passing = iter(each)
    assert [*islice(passing, drawn)] == [*sampler(10)][:drawn]
    each.load_state_dict(other.state_dict())
    assert [*passing] == expected
    assert (each.epoch, each.iter) == (6, 0)


def test_a_pass_that_was_not_finished_begins_again_at_its_place():
    each = sampler(10, start_iter=4)
    expected = [*sampler(10)][4:]
    passing = iter(each)
    assert [next(passing), next(passing)] == expected[:2]
    assert (each.iter, len(each)) == (6, 6)
    assert [*each] == expected


def test_set_epoch_keeps_the_place_in_the_current_one():
    each = sampler(10, start_epoch=1, start_iter=3)
    each.set_epoch(1)
    assert each.iter == 3
    each.set_epoch(2)
    assert [*each] == [*sampler(10, start_epoch=2)]


def test_no_list_of_indices_is_held():
    """[R2.a] 10^15 items cost nothing, and any of them is found at once."""
    each = sampler(10**15, start_iter=123_456_789_012_345)
    assert (len(each), each.iter) == (10**15 - 123_456_789_012_345, 123_456_789_012_345)
    passing = iter(each)
    found = [next(passing) for _ in range(5000)]  # more than are computed together
    assert len(set(found)) == 5000
    assert all(0 <= index < 10**15 for index in found)
    beyond = sampler(10**15, start_iter=123_456_789_012_345 + 4998)
    assert [next(passing) for passing in [iter(beyond)] * 2] == found[4998:]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_items_of_a_step_are_the_same_for_any_number_of_ranks(world):
    """[E1.a] One global batch of 8 items, whatever it is divided by; a trainer's step is all that resume needs."""
    for step in range(3):
        batches = []
        for rank in range(world):
            each = sampler(64, rank=rank, world=world, start_iter=step * 8 // world)
            batches.append(next(iter(DataLoader(range(64), batch_size=8 // world, sampler=each))).tolist())
        found = [*chain(*zip(*batches, strict=True))]
        assert found == [*sampler(64)][8 * step : 8 * step + 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "every rank must get an item, got 0 for 1 ranks; use fewer ranks"),
        ({"size": 3, "start_iter": -1}, "start_iter must be at least 0, got -1"),
        ({"size": 3, "start_epoch": -1}, "start_epoch must be at least 0, got -1"),
        ({"size": 3, "seed": -1}, "seed must lie within"),
        ({"size": 3, "rank": 2, "world": 2}, "rank: must lie within 0 and the 2 ranks, got 2"),
        ({"size": 3, "rank": -1, "world": 2}, "rank: must lie within 0 and the 2 ranks, got -1"),
    ],
)
def test_what_cannot_be_right_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        sampler(**options)


def test_the_environment_says_rank_and_number_of_ranks(monkeypatch):
    assert (ResumableDistributedSampler(range(5)).rank, ResumableDistributedSampler(range(5)).num_replicas) == (
        0,
        1,
    )
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    each = ResumableDistributedSampler(range(5))
    assert (each.rank, each.num_replicas) == (1, 3)
    assert [*each] == [*sampler(5, rank=1, world=3)]
    explicit = ResumableDistributedSampler(range(5), replica=(0, 2))
    assert (explicit.rank, explicit.num_replicas) == (0, 2)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="RANK and WORLD_SIZE must both be whole numbers"):
        ResumableDistributedSampler(range(5))


def samplers_of_rank():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    samplers = [
        ResumableDistributedSampler(range(11), start_iter=2),
        ResumableDistributedSampler(range(11), process_group=alone),
        ResumableDistributedSampler(range(11), process_group=alone, replica=(1 - rank, 2)),
    ]
    drawn = [[each.rank, each.num_replicas, [*each]] for each in samplers]
    dist.destroy_process_group()
    return drawn


def test_process_groups_say_rank_and_number_of_ranks():
    """Two processes with gloo; no variable of the environment names a rank."""
    for rank, samplers in enumerate(call_ranks(2, samplers_of_rank)):
        assert samplers == [
            [rank, 2, [*sampler(11, rank=rank, world=2)][2:]],
            [0, 1, [*sampler(11)]],
            [1 - rank, 2, [*sampler(11, rank=1 - rank, world=2)]],
        ]
