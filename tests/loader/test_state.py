import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.errors import ResumeError


def contents(batch):
    return {name: array.tobytes() for name, array in batch.items()}


def test_state_is_small_json_and_the_same_on_every_rank(make_run):
    """[S.b, E1.c]"""
    run = make_run()
    states = []
    for rank in range(4):
        loader = run.loader(rank=rank, world_size=4, micro_batch=1)
        stream = iter(loader)
        sizes = []
        for _ in range(3 * 20):
            next(stream)
            sizes.append(len(json.dumps(loader.state_dict())))
        assert max(sizes) <= 200
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    assert json.loads(json.dumps(states[0])) == states[0]


def test_between_steps_a_state_says_nothing_of_ranks(make_run):
    loader = make_run().loader(rank=1, world_size=2, micro_batch=3)
    stream = iter(loader)
    next(stream)
    assert set(loader.state_dict()) == {
        "version",
        "step",
        "fingerprint",
        "plan",
        "stage_idx",
        "stage_name",
        "batches",
        "micro_batch",
        "world_size",
    }
    next(stream)
    assert set(loader.state_dict()) == {"version", "step", "fingerprint", "plan", "stage_idx", "stage_name"}
    assert loader.state_dict()["step"] == 1


@given(
    cuts=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 3, 4, 6, 12])), min_size=5, max_size=9),
    threads=st.sampled_from([0, 1, 3]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_chains_of_resumes_at_other_world_sizes_give_the_same_stream(make_run, global_batches, cuts, threads):
    """[R1.b, E1.a] Draw some steps, save, load elsewhere at another world size, again and again."""
    run = make_run()
    reference = global_batches(run, micro_batch=12, threads=0)
    state = run.loader().state_dict()
    got = []
    for steps, world_size in cuts:
        loaders = [run.loader(rank=r, world_size=world_size, threads=threads) for r in range(world_size)]
        for loader in loaders:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
        streams = [iter(loader) for loader in loaders]
        for step in range(loaders[0].step, min(30, loaders[0].step + steps)):
            count = loaders[0].part.batches(loaders[0].plan.stage(step))
            drawn = [next(stream) for stream in streams for _ in range(count)]
            got.append({name: np.concatenate([batch[name] for batch in drawn]).tobytes() for name in drawn[0]})
        state = json.loads(json.dumps(loaders[-1].state_dict()))
    assert got == reference[: len(got)]


@pytest.mark.parametrize("threads", [0, 2])
def test_loading_before_and_after_iter_gives_the_same(make_run, threads):
    """[R1.c, A1.a]"""
    run = make_run()
    source = run.loader(micro_batch=6, threads=threads)
    stream = iter(source)
    for _ in range(7):
        next(stream)
    state = source.state_dict()
    rest = [contents(batch) for batch in stream]

    before = run.loader(micro_batch=6, threads=threads)
    before.load_state_dict(state)
    assert [contents(batch) for batch in before] == rest

    after = run.loader(micro_batch=6, threads=threads)
    running = iter(after)
    next(running)
    after.load_state_dict(state)
    assert after.state_dict() == state
    assert [contents(batch) for batch in running] == rest


@pytest.mark.parametrize("step", [0, 16, 17, 18, 29, 30])
def test_resume_on_and_beside_a_stage_edge_and_at_the_end(make_run, step):
    """[R1.b]"""
    run = make_run()
    loader = run.loader(micro_batch=12, threads=0)
    whole = [contents(batch) for batch in loader]
    again = run.loader(micro_batch=12)
    fingerprint = again.plan.fingerprint_at(step)
    again.load_state_dict({"version": 1, "step": step, "fingerprint": fingerprint, "plan": "0" * 16})
    assert again.step == step
    assert [contents(batch) for batch in again] == whole[step + max(0, step - 17) :]


def test_a_finished_loader_stays_finished(make_run):
    loader = make_run().loader(micro_batch=12)
    assert len(list(loader)) == 17 + 26
    assert list(loader) == []
    assert loader.state_dict()["step"] == 30


def test_a_changed_plan_is_refused_with_both_fingerprints_and_the_first_difference(make_run):
    """[S.b]"""
    old = make_run("old").loader(micro_batch=12)
    stream = iter(old)
    next(stream)
    state = old.state_dict()
    new = make_run("new", books=0.4).loader(micro_batch=12)
    with pytest.raises(ResumeError) as refused:
        new.load_state_dict(state)
    message = str(refused.value)
    assert f"made by plan {old.plan.fingerprint[:12]} and this run is {new.plan.fingerprint[:12]};" in message
    assert "first difference: stages[0].weights.books 0.3 -> 0.4" in message


def test_another_seed_is_named_as_the_difference(make_run):
    state_of = make_run("old").loader()
    next(iter(state_of))
    with pytest.raises(ResumeError, match=r"first difference: stages\[0\]\.seed 1 -> 2"):
        make_run("new", seed=2).loader().load_state_dict(state_of.state_dict())


def test_other_tokens_in_a_store_are_refused(make_run, make_store):
    old = make_run()
    loader = old.loader()
    next(iter(loader))
    state = loader.state_dict()
    import shutil

    shutil.rmtree(old.folder / "web")
    make_store("web", [20] * 150, seed=9)
    with pytest.raises(ResumeError, match=r"first difference: stages\[0\]\.sources\.web\.store"):
        make_run().loader().load_state_dict(state)


def test_a_changed_future_is_accepted(make_run):
    """[M1.c] The stage edge moves from 17 to 20: a state of step 9 goes on, one of step 18 does not."""
    old = make_run("old").loader(micro_batch=12, threads=0)
    states = {}
    stream = iter(old)
    for _ in range(20):
        next(stream)
        states.setdefault(old.step, old.state_dict())
    new = make_run("new", edge=20).loader(micro_batch=12, threads=0)
    new.load_state_dict(states[9])
    assert contents(next(iter(new))) == contents(old[9])
    new.load_state_dict(states[17])
    with pytest.raises(
        ResumeError, match=r"first difference: stages\[0\]\.weights\S* .* \(stages\[1\]\.start_step 17 -> 20\)"
    ):
        new.load_state_dict(states[18])


def test_a_state_of_mid_step_needs_the_same_cut(make_run):
    run = make_run()
    loader = run.loader(world_size=2, micro_batch=3)
    next(iter(loader))
    with pytest.raises(
        ResumeError, match="in the middle of step 0, so world_size and micro_batch must stay 2 and 3"
    ):
        run.loader(world_size=1, micro_batch=3).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, r"state\.step: expected a whole number that is at least 0, got -1"),
        ({"step": "3"}, r"state\.step: expected a whole number that is at least 0, got '3'"),
        ({"step": 31}, "step must be at most the 30 steps of the run, got 31"),
        ({"version": 2}, "version must be 1, got 2"),
        ({"stepp": 1}, r"unknown key: 'stepp'; did you mean 'step'\?"),
        ({"fingerprint": None}, r"state\.fingerprint: expected a string, got None"),
        ({"fingerprint": "0" * 32}, "made by plan 000000000000 and this run is"),
        ({"batches": 3}, "must have micro_batch and world_size in the middle of a step, got batches 3 without"),
    ],
)
def test_an_edited_state_is_refused(make_run, change, message):
    loader = make_run().loader()
    with pytest.raises(ResumeError, match=message):
        loader.load_state_dict(loader.state_dict() | change)


def test_a_state_that_lacks_a_key_is_refused(make_run):
    loader = make_run().loader()
    state = loader.state_dict()
    del state["fingerprint"]
    with pytest.raises(ResumeError, match="state: missing key: fingerprint"):
        loader.load_state_dict(state)
    with pytest.raises(ResumeError, match="must be the dict that state_dict"):
        loader.load_state_dict("state")


@pytest.mark.parametrize("threads", [0, 2])
def test_seek_goes_to_a_step_before_and_during_an_iteration(make_run, threads):
    loader = make_run().loader(micro_batch=12, threads=threads)
    stream = iter(loader)
    next(stream)
    loader.seek(9)
    assert contents(next(stream)) == contents(loader[9])
    assert loader.step == 10
    loader.seek(30)
    assert list(stream) == []
    with pytest.raises(IndexError, match="step: must lie within 0:30, got 31"):
        loader.seek(31)
