"""A loader resumes at the exact batch, whatever was read ahead and however many ranks there are."""

import gc
import json
import weakref
from itertools import islice

import pytest
import torch
from torch.utils.data import DistributedSampler as TorchSampler

from tokenmill.adapters.kempnerforge import (
    DataConfig,
    DatasetSource,
    DistributedSampler,
    MixtureSampler,
    StatefulDataLoader,
    TrainingPhase,
)
from tokenmill.errors import ConfigError, ResumeError

INLINE = DataConfig(num_workers=0)
PHASED = DataConfig(
    num_workers=0,
    datasets=[DatasetSource(name="a", path="a", weight=3), DatasetSource(name="b", path="b", weight=1)],
    phases=[
        TrainingPhase(start_step=5, dataset_weights={"a": 0}, lr_scale=0.5),
        TrainingPhase(start_step=9, dataset_weights={"b": 3}),
    ],
)


def plain(dataset, batch_size=4, ranks=1, rank=0, config=INLINE, **options):
    return StatefulDataLoader(dataset, batch_size, DistributedSampler(dataset, ranks, rank), config, **options)


def mixing(dataset, batch_size=4, ranks=1, rank=0, config=INLINE, **options):
    sampler = MixtureSampler(dataset.cumulative_sizes, [3, 1], ranks, rank)
    return StatefulDataLoader(dataset, batch_size, sampler, config, **options)


def rows(batch):
    return batch["input_ids"][:, 0].tolist()


def draw(loader, count):
    """Draw batches from one epoch after another, as a training loop does."""
    drawn = []
    while len(drawn) < count:
        for batch in loader:
            drawn.append(rows(batch))
            if len(drawn) == count:
                return drawn
    return drawn


def saved(loader):
    return json.loads(json.dumps(loader.state_dict()))


def both(name, single, mixed):
    return (plain, single) if name == "plain" else (mixing, mixed)


@pytest.mark.parametrize("name", ["plain", "mixing"])
def test_every_resume_goes_on_with_the_next_batch(name, single, mixed):
    """[R1.a, R1.c]"""
    make, dataset = both(name, single, mixed)
    whole = draw(make(dataset), 94)  # more than two epochs
    walker = make(dataset)
    for step in range(90):
        state = saved(walker)
        again = make(dataset)
        again.load_state_dict(state)
        assert saved(again) == state
        assert draw(again, 4) == whole[step : step + 4]
        draw(walker, 1)


@pytest.mark.parametrize("name", ["plain", "mixing"])
@pytest.mark.parametrize("cuts", [[3, 0, 4, 18, 1, 25, 30], [25, 0, 0, 25, 31]])
def test_chains_of_resumes_lose_and_repeat_nothing(name, cuts, single, mixed):
    """[R1.b; KempnerForge loses its place on the second resume]"""
    make, dataset = both(name, single, mixed)
    whole = draw(make(dataset), sum(cuts))
    drawn, state = [], None
    for count in cuts:
        loader = make(dataset)
        if state is not None:
            loader.load_state_dict(state)
        drawn += draw(loader, count) if count else []
        state = saved(loader)
    assert drawn == whole


@pytest.mark.parametrize("name", ["plain", "mixing"])
def test_worker_processes_change_no_batch_and_may_be_others_after_a_resume(name, single, mixed):
    """[R1.a; KempnerForge must keep num_workers]"""
    make, dataset = both(name, single, mixed)
    whole = draw(make(dataset), 40)
    many = make(dataset, config=DataConfig(num_workers=2, prefetch_factor=3))
    drawn = draw(many, 7)
    state = saved(many)
    again = make(dataset, config=DataConfig(num_workers=1))
    again.load_state_dict(state)
    drawn += draw(again, 11)
    last = make(dataset)
    last.load_state_dict(saved(again))
    assert drawn + draw(last, 22) == whole


def test_loading_during_an_iteration_goes_on_from_there(single):
    """[R1.c]"""
    whole = draw(plain(single), 20)
    loader = plain(single)
    stream = iter(loader)
    start = saved(loader)
    assert [rows(batch) for batch in islice(stream, 5)] == whole[:5]
    loader.load_state_dict(start)
    assert [rows(batch) for batch in islice(stream, 5)] == whole[:5]
    assert [rows(batch) for batch in islice(loader, 3)] == whole[5:8], "a break loses and repeats nothing"


def test_an_epoch_ends_and_the_next_has_another_order(single):
    loader = plain(single)
    assert len(loader) == 25
    first = [rows(batch) for batch in loader]
    assert (len(first), loader.state_dict()["epoch"], loader.state_dict()["batches_yielded"]) == (25, 1, 0)
    with pytest.raises(StopIteration):
        next(loader)
    second = [rows(batch) for batch in loader]
    assert len(second) == 25
    assert first != second
    assert len({row for batch in first for row in batch}) == 100
    assert single.state_dict()["epoch"] == 2


@pytest.mark.parametrize("name", ["plain", "mixing"])
@pytest.mark.parametrize(
    ("ranks", "batch_size", "accumulate"), [(1, 24, 1), (2, 12, 1), (4, 3, 2), (3, 8, 1), (1, 2, 12)]
)
def test_the_samples_of_a_step_are_the_same_for_any_topology(name, ranks, batch_size, accumulate, single, mixed):
    make, dataset = both(name, single, mixed)
    whole = draw(make(dataset, 24, grad_accum_steps=1), 11)  # over the ends of epochs
    loaders = [make(dataset, batch_size, ranks, rank, grad_accum_steps=accumulate) for rank in range(ranks)]
    parts = [draw(loader, 11 * accumulate) for loader in loaders]
    for step in range(11):
        here = [parts[rank][step * accumulate : (step + 1) * accumulate] for rank in range(ranks)]
        places = [
            row
            for batch in range(accumulate)
            for turn in zip(*(here[rank][batch] for rank in range(ranks)), strict=True)
            for row in (turn if name == "plain" else sorted(turn))
        ]
        expected = whole[step]
        if name == "mixing":  # who begins a round of ranks changes; what is in it does not
            expected = [row for turn in range(0, 24, ranks) for row in sorted(expected[turn : turn + ranks])]
        assert places == expected
    assert {loader.step for loader in loaders} == {11}


def test_a_mixture_goes_through_the_ends_of_epochs_without_losing_a_sample(mixed):
    """[R1.d]"""
    one_by_one = [row for batch in draw(mixing(mixed, 1), 24 * 15) for row in batch]
    loader = mixing(mixed, 24)
    assert [row for batch in draw(loader, 15) for row in batch] == one_by_one
    assert loader.state_dict()["epoch"] == 2  # of 140 samples each: 5, 6 and 4 batches


@pytest.mark.parametrize("name", ["plain", "mixing"])
def test_a_resume_may_have_other_ranks_and_batches(name, single, mixed):
    """[R1.d]"""
    make, dataset = both(name, single, mixed)
    whole = [row for batch in draw(make(dataset, 1), 100) for row in batch]
    loader = make(dataset, 4, 2, 0)
    draw(loader, 5)
    parts = []
    for rank in range(3):
        again = make(dataset, 5, 3, rank)
        again.load_state_dict(saved(loader))
        parts.append([row for batch in draw(again, 4) for row in batch])
    turns = list(zip(*parts, strict=True))
    assert [sorted(turn) for turn in turns] == [sorted(whole[40 + 3 * n : 43 + 3 * n]) for n in range(20)]


@pytest.mark.parametrize("workers", [0, 2])
def test_other_weights_hold_from_the_next_batch_on(workers, mixed):
    """[M1.b; KempnerForge waits for the next epoch]"""
    before = draw(mixing(mixed), 10)
    loader = mixing(mixed, config=DataConfig(num_workers=workers, prefetch_factor=4))
    stream = iter(loader)
    drawn = [rows(next(stream)) for _ in range(6)]
    loader.sampler.update_weights([0, 1])
    state = saved(loader)
    drawn += [rows(next(stream)) for _ in range(4)]
    assert drawn[:6] == before[:6]
    assert all(row >= 1000 for batch in drawn[6:] for row in batch)
    own = [row for batch in drawn for row in batch if row >= 1000]
    assert len(set(own)) == len(own), "the second dataset goes on where it was"
    again = mixing(mixed)
    again.load_state_dict(state)
    assert draw(again, 4) == drawn[6:]


@pytest.mark.parametrize(
    ("ranks", "batch_size", "accumulate", "workers"), [(1, 4, 1, 0), (1, 2, 2, 2), (2, 1, 2, 0)]
)
def test_phases_begin_at_their_step(ranks, batch_size, accumulate, workers, mixed):
    """[M1.b]"""
    config = DataConfig(num_workers=workers, datasets=PHASED.datasets, phases=PHASED.phases)
    loaders = [mixing(mixed, batch_size, ranks, rank, config, grad_accum_steps=accumulate) for rank in range(ranks)]
    scales, steps = [], []
    for _ in range(12):
        scales.append(loaders[0].lr_scale)
        batches = [batch for loader in loaders for batch in draw(loader, accumulate)]
        steps.append(sorted(row for batch in batches for row in batch))
    assert scales == [1.0] * 5 + [0.5] * 4 + [1.0] * 3
    seconds = [sum(row >= 1000 for row in step) for step in steps]
    assert seconds[5:9] == [4] * 4
    assert sum(seconds[:5]) == 5
    assert sum(seconds[9:]) in (5, 6, 7)  # three steps of 4 at 1 to 1
    alone = mixing(mixed, 4, config=PHASED, grad_accum_steps=1)
    assert steps == [sorted(batch) for batch in draw(alone, 12)]


@pytest.mark.parametrize("cut", [0, 4, 5, 6, 8, 9, 11])
def test_a_resume_is_in_the_right_phase(cut, mixed):
    """[R1.b]"""
    whole = draw(mixing(mixed, config=PHASED, grad_accum_steps=1), 14)
    loader = mixing(mixed, config=PHASED, grad_accum_steps=1)
    if cut:
        draw(loader, cut)
    again = mixing(mixed, config=PHASED, grad_accum_steps=1)
    again.load_state_dict(saved(loader))
    # A loop that says the weights of the phase itself, as KempnerForge's does after a resume, changes nothing.
    if cut > 5:
        again.sampler.update_weights([0, 1])
        again.sampler.update_weights(PHASED.weights_at(cut - 1))
    assert draw(again, 14 - cut) == whole[cut:]


def test_a_phase_may_be_added_later_but_not_before(mixed):
    """[M1.c]"""
    loader = mixing(mixed, config=PHASED, grad_accum_steps=1)
    draw(loader, 7)
    later = DataConfig(num_workers=0, datasets=PHASED.datasets, phases=PHASED.phases[:1])
    again = mixing(mixed, config=later, grad_accum_steps=1)
    again.load_state_dict(saved(loader))
    assert all(row >= 1000 for batch in draw(again, 5) for row in batch)
    none = DataConfig(num_workers=0, datasets=PHASED.datasets)
    with pytest.raises(
        ResumeError, match=r"phases that began before step 7 must be as they were, \[\[5, \[0, 1\]\]\], got"
    ):
        mixing(mixed, config=none, grad_accum_steps=1).load_state_dict(saved(loader))


def test_without_steps_phases_are_left_to_the_caller(mixed):
    loader = mixing(mixed, config=PHASED)
    assert draw(loader, 12) == draw(mixing(mixed), 12)
    with pytest.raises(ConfigError, match="grad_accum_steps must be given to know the step of a batch"):
        _ = loader.lr_scale
    assert mixing(mixed).lr_scale == 1.0


def test_in_the_middle_of_a_step_the_shape_of_steps_must_stay(single):
    loader = plain(single, 4, grad_accum_steps=3)
    draw(loader, 7)
    again = plain(single, 4, grad_accum_steps=3)
    again.load_state_dict(saved(loader))
    assert draw(again, 5) == draw(plain(single, 4, grad_accum_steps=3), 12)[7:]
    with pytest.raises(
        ResumeError, match=r"middle of step 2, so it must go on with 3 batches a step of 4 .* got 2 of 6"
    ):
        plain(single, 6, grad_accum_steps=2).load_state_dict(saved(loader))
    with pytest.raises(
        ResumeError, match="grad_accum_steps must be given or left out as when it was saved, 3, got None"
    ):
        plain(single).load_state_dict(saved(loader))
    draw(loader, 2)
    other = plain(single, 6, grad_accum_steps=2)
    other.load_state_dict(saved(loader))
    assert other.step == 3


def test_the_sampler_is_made_if_none_is_given_and_a_skip_of_it_counts(single):
    loader = StatefulDataLoader(single, 4, config=INLINE)
    assert isinstance(loader.sampler, DistributedSampler)
    loader.sampler.set_skip(8)
    assert draw(loader, 3) == draw(plain(single), 5)[2:]


def test_weights_that_nobody_can_ask_for_again_are_not_kept(mixed):
    loader = mixing(mixed)
    for turn in range(200):
        draw(loader, 1)
        loader.sampler.update_weights([1 + turn % 3, 1])
    assert len(loader.sampler._weighings) == 1


def test_what_cannot_be_loaded_is_refused(single):
    with pytest.raises(
        ConfigError, match="sampler: must be a DistributedSampler or MixtureSampler of this package"
    ):
        StatefulDataLoader(single, 4, TorchSampler(single, 1, 0), INLINE)
    with pytest.raises(ConfigError, match="a whole step of 104 samples, got 103"):
        plain(single, 104)
    with pytest.raises(ConfigError, match="must be at least 1, got 0 and None"):
        plain(single, 0)


def test_an_iteration_draws_nothing_from_the_generator_of_the_model(single):
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    draw(plain(single), 30)
    assert torch.rand(3).tolist() == expected


def test_a_loader_that_nobody_holds_is_gone_at_once_with_its_workers(single):
    loader = plain(single, config=DataConfig(num_workers=1))
    draw(loader, 2)
    workers, seen = loader._loader._iterator._workers, weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert seen() is None
        assert [worker.is_alive() for worker in workers] == [False]
    finally:
        gc.enable()


class Broken(torch.utils.data.Dataset):
    """A dataset of somebody else that fails now and then."""

    fails = True

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == self.culprit and self.fails:
            raise OSError("the disk is away")
        return {"input_ids": torch.tensor([index])}


def test_after_an_error_the_same_batch_comes_again():
    dataset = Broken()
    order = [
        index for batch in range(5) for index in list(DistributedSampler(dataset, 1, 0))[batch * 4 : batch * 4 + 4]
    ]
    dataset.culprit = order[9]
    loader = plain(dataset)
    stream = iter(loader)
    drawn = [rows(next(stream)), rows(next(stream))]
    with pytest.raises(OSError, match="the disk is away"):
        next(stream)
    dataset.fails = False
    drawn += [rows(batch) for batch in stream]
    assert [row for batch in drawn for row in batch] == order


# It goes where its sampler is told to go, and to the very end of an epoch.


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_and_skip_of_the_sampler_are_taken_over(single, workers):
    """[R1.c: the documented pair of a resume]"""
    epochs = [[rows(batch) for batch in plain(single)]]
    loader = plain(single)
    epochs += [[rows(batch) for batch in loader] for _ in range(4)][1:]
    loader = plain(single, config=DataConfig(num_workers=workers))
    loader.sampler.set_epoch(3)
    loader.sampler.set_skip(8)
    assert [rows(batch) for batch in loader] == epochs[3][2:]
    loader = plain(single)
    draw(loader, 3)
    loader.sampler.load_state_dict({"epoch": 2})
    assert draw(loader, 2) == epochs[2][:2]
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches_yielded"], len(loader)) == (2, 2, 25)


def test_the_usual_loop_that_says_the_epoch_changes_nothing(single, mixed):
    for make, dataset in ((plain, single), (mixing, mixed)):
        loader, said = make(dataset, 24), make(dataset, 24)
        drawn = []
        for epoch in range(4):
            said.sampler.set_epoch(epoch)
            drawn += [rows(batch) for batch in said]
        assert drawn == [rows(batch) for _ in range(4) for batch in loader]
        again = make(dataset, 24)
        again.load_state_dict(saved(said))
        again.sampler.set_epoch(4)
        assert draw(again, 3) == draw(loader, 3)


def test_an_epoch_that_is_said_early_waits_for_the_next_iteration(mixed):
    loader = mixing(mixed, 4)
    stream = iter(loader)
    drawn = [rows(next(stream))]
    loader.sampler.set_epoch(5)
    loader.sampler.update_weights([1, 1])  # what was read ahead is read again
    drawn += [rows(next(stream)) for _ in range(34)]
    with pytest.raises(StopIteration):
        next(stream)
    assert all(len(batch) == 4 for batch in drawn)
    assert loader.state_dict()["epoch"] == 1
    assert loader.state_dict()["position"] == 140
    next(iter(loader))
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (5, 5 * 140 + 4)


def test_a_jump_is_counted_in_batches_and_resumes(single):
    loader = plain(single, 4, 2, 0, grad_accum_steps=2)
    draw(loader, 3)  # in the middle of a step
    loader.sampler.set_epoch(1)
    loader.sampler.set_skip(21)  # two steps of 8 samples of this rank, and 5 more
    iter(loader)
    state = saved(loader)
    assert [state[key] for key in ("position", "begin", "batches_yielded", "batches")] == [42, 10, 4, 4]
    assert (loader.step, len(loader)) == (2, 4 + 6)
    again = plain(single, 4, 2, 0, grad_accum_steps=2)
    again.load_state_dict(state)
    assert draw(again, 6) == draw(loader, 6)
    loader.sampler.set_skip(1000)
    assert list(loader) == []
    again.sampler.set_skip(1000)
    iter(again)
    last = plain(single, 4, 2, 1, grad_accum_steps=2)
    last.load_state_dict(saved(again))
    assert list(last) == []


def test_phases_that_begin_at_a_step_do_not_go_with_a_jump(mixed):
    loader = mixing(mixed, config=PHASED, grad_accum_steps=1)
    loader.sampler.set_skip(8)
    with pytest.raises(ConfigError, match=r"must not move a loader whose phases .* got epoch 0 and skip 8; resume"):
        iter(loader)


@pytest.mark.parametrize(("ranks", "batch_size", "accumulate"), [(1, 24, 1), (2, 4, 3), (4, 6, 1)])
def test_without_drop_last_the_last_step_is_filled_up_and_no_sample_is_lost(ranks, batch_size, accumulate, single):
    """[R1.d]"""
    order = list(DistributedSampler(single, 1, 0))
    expected = [*order, *order[: 5 * 24 - 103]]

    def make(rank):
        sampler = DistributedSampler(single, ranks, rank, drop_last=False)
        return StatefulDataLoader(single, batch_size, sampler, INLINE, grad_accum_steps=accumulate)

    loaders = [make(rank) for rank in range(ranks)]
    assert {len(loader) for loader in loaders} == {5 * accumulate}
    parts = [[row for batch in loader for row in rows(batch)] for loader in loaders]
    assert [row for turn in zip(*parts, strict=True) for row in turn] == expected
    for cut in range(5 * accumulate + 1):
        loader, again = make(0), make(0)
        if cut:
            draw(loader, cut)
        again.load_state_dict(saved(loader))
        assert [row for batch in again for row in rows(batch)] == parts[0][cut * batch_size :]
    whole = StatefulDataLoader(single, 24, DistributedSampler(single, 1, 0, drop_last=False), INLINE)
    draw(whole, 5)
    small = StatefulDataLoader(single, 1, DistributedSampler(single, 1, 0, drop_last=False), INLINE)
    small.load_state_dict(saved(whole))
    other = StatefulDataLoader(single, 2, DistributedSampler(single, 1, 0, drop_last=False), INLINE)
    other.load_state_dict(saved(small))
    assert list(other) == [], "the epoch was at its end, filled up"
