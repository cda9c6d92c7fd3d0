"""A loader goes where its sampler is told to go, and to the very end of an epoch."""

import json

import pytest

from tokenmill.adapters.kempnerforge import (
    DataConfig,
    DatasetSource,
    DistributedSampler,
    MixtureSampler,
    StatefulDataLoader,
    TrainingPhase,
)
from tokenmill.errors import ConfigError

INLINE = DataConfig(num_workers=0)
PHASED = DataConfig(
    num_workers=0,
    datasets=[DatasetSource(name="a", path="a", weight=3), DatasetSource(name="b", path="b", weight=1)],
    phases=[TrainingPhase(start_step=5, dataset_weights={"a": 0}, lr_scale=0.5)],
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
