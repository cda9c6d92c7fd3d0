"""A state that was edited or damaged, or is of something else, is refused and changes nothing."""

import json
from itertools import islice

import numpy as np
import pytest

from tokenmill.adapters.kempnerforge import (
    DataConfig,
    DistributedSampler,
    MemoryMappedDataset,
    MixtureDataset,
    MixtureSampler,
    StatefulDataLoader,
)
from tokenmill.errors import ResumeError

INLINE = DataConfig(num_workers=0)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Make two datasets of 60 samples each."""
    folder = tmp_path_factory.mktemp("tokens")
    np.save(folder / "x.npy", np.repeat(np.arange(60), 4).astype(np.uint16))
    one = MemoryMappedDataset(str(folder), 4)
    return MixtureDataset([one, one], ["a", "b"])


def plain(dataset, batch_size=4, **options):
    return StatefulDataLoader(dataset, batch_size, DistributedSampler(dataset, 1, 0), INLINE, **options)


def mixing(dataset, batch_size=4, **options):
    sampler = MixtureSampler(dataset.cumulative_sizes, [3, 1], 1, 0)
    return StatefulDataLoader(dataset, batch_size, sampler, INLINE, **options)


def saved(loader, batches=3):
    """Draw some batches, and return the state after them."""
    for _ in islice(loader, batches):
        pass
    return json.loads(json.dumps(loader.state_dict()))


WHOLE = r"expected a whole number from 0 to 2\^40, got"


@pytest.mark.parametrize("make", [plain, mixing])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version must be 2, got 1"),
        ({"position": -1}, f"state.position: {WHOLE} -1"),
        ({"position": 10**30}, f"state.position: {WHOLE} 10000"),
        ({"epoch": "1"}, f"state.epoch: {WHOLE} '1'"),
        ({"epoch": 10**30}, f"state.epoch: {WHOLE} 10000"),
        ({"epoch": True}, f"state.epoch: {WHOLE} True"),
        ({"batches": 1.5}, f"state.batches: {WHOLE} 1.5"),
        ({"batch_size": "x"}, "state.batch_size: expected a whole number from 1 .* got 'x'"),
        ({"batch_size": 0}, "state.batch_size: expected a whole number from 1 .* got 0"),
        ({"grad_accum_steps": 0}, "state.grad_accum_steps: expected a whole number from 1 .* got 0"),
        ({"position": 3}, "position must be 3 batches of 4 samples behind 0, .* got 3 and 3"),
        ({"position": 1000}, "position must be 3 batches .* got 1000"),
        ({"batches_yielded": 99}, "position must be 99 batches .* got 12"),
        ({"begin": 1000, "position": 1012}, "position must lie within 0 and 120, which epoch 0 has, got 1012"),
        ({"dataset": "0" * 32}, "samples must be those of dataset '000000000000', got '"),
        ({"dataset": None}, "samples must be those of dataset None, got '"),
        ({"dataset": 5}, "state.dataset: expected a string, got 5"),
        ({"sampler": {}}, "kind must be that of this sampler, '.*', got None"),
        ({"sampler": None}, "state.sampler: expected a table, got None"),
        (
            {"sampler": {"num_replicas": "q"}},
            "state.sampler.num_replicas: expected a whole number from 1 .* got 'q'",
        ),
        ({"sampler": {"num_replicas": 1}}, "kind must be that of this sampler, '.*', got None"),
        ({"phases": None}, "state.phases: expected a list of values, got None"),
        ({"phases": [[0, [1, 1]]]}, r"phases that began before step 3 must be as they were, \[\[0, \[1, 1\]\]\]"),
        ({"place": 3}, "unknown key: 'place'"),
    ],
)
def test_a_state_that_cannot_be_is_refused_and_changes_nothing(change, message, make, dataset):
    """[S.b]"""
    loader = make(dataset)
    state = saved(loader)
    with pytest.raises(ResumeError, match=message):
        loader.load_state_dict({**state, **change})
    assert loader.state_dict() == state


@pytest.mark.parametrize("state", [None, [], "x", 5])
def test_what_is_no_dict_is_refused(state, dataset):
    loader = mixing(dataset)
    for thing in (loader, loader.sampler, plain(dataset).sampler, dataset, dataset.datasets[0]):
        with pytest.raises(
            ResumeError, match=r"state: expected a table, got .*; use a state as state_dict\(\) gave it"
        ):
            thing.load_state_dict(state)


@pytest.mark.parametrize("make", [plain, mixing])
def test_every_key_of_a_state_is_needed(make, dataset):
    state = saved(make(dataset))
    for key in state:
        message = "samples must be those of dataset None" if key == "dataset" else f"missing key: {key}"
        with pytest.raises(ResumeError, match=f"state: .*{message}"):
            make(dataset).load_state_dict({name: value for name, value in state.items() if name != key})
    for key in state["sampler"]:
        if key not in ("rank", "epoch"):  # the rank is of no concern, the epoch is the loader's
            rest = {name: value for name, value in state["sampler"].items() if name != key}
            with pytest.raises(ResumeError, match="state: "):
                make(dataset).load_state_dict({**state, "sampler": rest})


@pytest.mark.parametrize("makes", [(plain, mixing), (mixing, plain)])
def test_a_state_of_the_other_kind_of_sampler_is_refused(makes, dataset):
    """[S.b]"""
    one, other = (make(dataset) for make in makes)
    message = r"kind must be that of this sampler, '\w+', got '\w+'; resume with what made it"
    with pytest.raises(ResumeError, match=message):
        other.load_state_dict(saved(one))


def test_a_mixture_refuses_the_state_of_another_sampler_which_restores_an_epoch_elsewhere(dataset, caplog):
    """[S.b]"""
    one, other = mixing(dataset).sampler, plain(dataset).sampler
    with pytest.raises(ResumeError, match="kind must be that of this sampler, 'mixture', got 'distributed'"):
        one.load_state_dict(other.state_dict())
    other.load_state_dict({**one.state_dict(), "epoch": 2})
    assert other.epoch == 2
    assert caplog.messages[0].startswith("state: kind is 'mixture', and 'distributed' in this sampler")


def test_the_epoch_of_a_sampler_in_a_state_must_be_one(dataset):
    state = saved(plain(dataset))
    state["sampler"]["epoch"] = "zz"
    with pytest.raises(ResumeError, match=f"state.sampler.epoch: {WHOLE} 'zz'"):
        plain(dataset).load_state_dict(state)


def test_weights_must_have_begun_where_the_loader_stands(dataset):
    state = saved(mixing(dataset))
    state["sampler"]["weighing"] |= {"start": 16, "drawn": [12, 4]}
    with pytest.raises(ResumeError, match="weighing must begin by position 12, got start 16"):
        mixing(dataset).load_state_dict(state)


def test_the_batches_of_a_step_must_be_those_of_the_run(dataset):
    state = saved(plain(dataset, grad_accum_steps=2))
    with pytest.raises(ResumeError, match="batches as far in a step of 2, got 12 and 4"):
        plain(dataset, grad_accum_steps=2).load_state_dict({**state, "batches": 4})


@pytest.mark.parametrize("make", [plain, mixing])
def test_batches_are_counted_anew_where_their_size_is_another(make, dataset):
    """[R1.d]"""
    other = make(dataset, 5)
    other.load_state_dict(saved(make(dataset)))
    state = other.state_dict()
    assert [state[key] for key in ("position", "begin", "batches_yielded")] == [12, 2, 2]
    assert len(other) == 2 + (120 - 12) // 5
    again = make(dataset, 5)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert len(list(again)) == 21


def test_a_state_of_kempnerforge_itself_is_refused(dataset):
    theirs = {"epoch": 1, "batches_yielded": 3, "sampler": {"epoch": 1, "seed": 0, "num_replicas": 1, "rank": 0}}
    with pytest.raises(ResumeError, match=r"missing key: version; .*order of KempnerForge's own is another"):
        plain(dataset).load_state_dict(theirs)
