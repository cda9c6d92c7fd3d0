from dataclasses import replace
from math import cos, pi

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config.run import parse_config
from tokenmill.errors import ConfigError
from tokenmill.plan.lr import TokenSchedule
from tokenmill.run.run import Run

LENGTHS = [5, 9, 1, 30, 12, 8, 2, 17, 9, 4, 26, 11, 3]
RAMP = {"from": 2, "to": 8, "step": 2, "over_steps": 12}


@pytest.fixture
def make_run(tmp_path, make_store):
    make_store("web", LENGTHS)
    make_store("books", LENGTHS[::-1], seed=1)

    def make(stages=(), skip=(), **run):
        tables = {
            "run": {"steps": 40, "global_batch_size": 4, "seq_len": 8, "weights": {"web": 2, "books": 1}} | run,
            "sources": [{"name": name, "store": name} for name in ("web", "books")],
            "stages": list(stages),
            "skip": list(skip),
        }
        return Run(config=parse_config(tables), folder=tmp_path)

    return make


def counted(run):
    """Return (slots, labels) before each step, counted in the batches themselves."""
    plan = run.plan()
    loader = run.loader(micro_batch=1, threads=0)
    slots, labels = [0], [0]
    for step in range(plan.steps):
        seen = plan.stage(step).spec.skipped is None
        batch = loader[step]["labels"] if seen else np.full((0, 0), -100)
        slots.append(slots[-1] + batch.size)
        labels.append(labels[-1] + int((batch != -100).sum()))
    return slots, labels


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"global_batch_size": RAMP},
        {"global_batch_size": RAMP, "skip": [{"steps": "7:11"}]},
        {"stages": [{"name": "a", "start_step": 0}, {"name": "b", "start_step": 9, "seq_len": 20}]},
        {
            "global_batch_size": RAMP,
            "stages": [
                {"name": "a", "start_step": 0},
                {
                    "name": "b",
                    "start_step": 5,
                    "weights": {"web": 1, "books": 4},
                    "ramp": "cosine",
                    "ramp_steps": 20,
                },
            ],
        },
    ],
)
def test_tokens_seen_are_those_of_the_batches_before_a_step(make_run, options):
    """[M1.f]"""
    run = make_run(**options)
    slots, labels = counted(run)
    plan = run.plan()
    for step in (0, 1, 8, 23, 39):
        seen = plan.at(step).tokens_seen
        assert (seen.slots, seen.trained) == (slots[step], labels[step])
    # In any order, as each counts on from one that is known.
    fresh = make_run(**options).plan()
    assert [fresh.tokens_seen(step).trained for step in (40, 3, 17)] == [labels[40], labels[3], labels[17]]
    assert plan.tokens_seen(40).slots == slots[40]


def test_a_loader_tells_what_was_seen_before_its_step(make_run):
    run = make_run()
    loader = run.loader(micro_batch=2)
    stream = iter(loader)
    for _ in range(6):
        next(stream)
    assert loader.tokens_seen == run.plan().at(3).tokens_seen
    assert loader.tokens_seen.slots == 3 * 4 * 8


def test_the_global_batch_of_a_ramp_is_the_same_for_any_ranks(make_run):
    run = make_run(global_batch_size=RAMP)
    for step in (0, 5, 9, 39):
        whole = run.loader(micro_batch=1)[step]["input_ids"]
        parts = [run.loader(rank=rank, world_size=2)[step]["input_ids"] for rank in range(2)]
        assert np.array_equal(np.concatenate(parts), whole)
        assert len(whole) == run.plan().at(step).global_batch_size
    sizes = [run.plan().at(step).global_batch_size for step in range(40)]
    assert sizes == [2] * 4 + [4] * 4 + [6] * 4 + [8] * 28


def test_a_ramp_loses_and_repeats_no_row(make_run):
    run = make_run(global_batch_size=RAMP, weights={"web": 1})
    plan = run.plan()
    rows = [row for step in range(plan.steps) for row in plan.rows(step)[1].tolist()]
    size = plan.stages[0].rows["web"].num_rows
    epochs = [sorted(rows[begin : begin + size]) for begin in range(0, len(rows) - size + 1, size)]
    assert epochs == [list(range(size))] * len(epochs)


def test_a_state_within_a_ramp_resumes_exactly(make_run):
    run = make_run(global_batch_size=RAMP)
    loader = run.loader(micro_batch=2)
    straight = [batch["input_ids"].tolist() for batch in loader]
    loader = run.loader(micro_batch=2)
    stream = iter(loader)
    for _ in range(9):
        next(stream)
    state = loader.state_dict()
    again = make_run(global_batch_size=RAMP).loader(micro_batch=2)
    again.load_state_dict(state)
    assert [batch["input_ids"].tolist() for batch in again] == straight[9:]


# The learning rate


def test_a_schedule_rises_over_its_tokens_and_comes_to_its_end_with_the_last_step(make_run):
    """[M1.f]"""
    for batch in (4, RAMP, {"from": 8, "to": 2, "step": 2, "over_steps": 30}):
        schedule = make_run(global_batch_size=batch).lr_schedule(warmup_tokens=320, final=0.25)
        factors = schedule.table()
        assert factors[-1] == schedule(10**6) == pytest.approx(0.25, abs=1e-12)
        peak = int(np.argmax(factors))
        assert (np.diff(factors[:peak]) > 0).all()
        assert (np.diff(factors[peak:]) <= 0).all()
        assert factors[0] == pytest.approx(schedule.plan.at(0).global_batch_size * 8 / 320)


def test_with_equal_batches_it_is_the_schedule_of_steps(make_run):
    factors = make_run().lr_schedule(final=0.0).table()
    assert factors == pytest.approx([(1 + cos(pi * step / 39)) / 2 for step in range(40)])
    stable = make_run().lr_schedule(decay="linear", decay_tokens=10 * 32, final=0.0).table()
    assert stable == pytest.approx([1.0] * 29 + [1 - step / 10 for step in range(11)])


def test_the_scale_of_stages_is_in_it_and_a_skip_moves_nothing(make_run):
    stages = [{"name": "a", "start_step": 0}, {"name": "b", "start_step": 20, "lr_scale": 0.5}]
    plain, scaled = (make_run(each).lr_schedule(warmup_tokens="0.1K").table() for each in ((), stages))
    assert scaled == pytest.approx(plain * np.repeat([1, 0.5], 20))
    schedule = make_run(skip=[{"steps": "3:9"}]).lr_schedule(warmup_tokens="0.1K")
    skipped = schedule.table()
    assert [schedule.nth(number) for number in range(34)] == skipped.tolist()
    assert schedule.nth(99) == skipped[-1]
    assert (skipped == np.delete(plain, np.arange(3, 9))).all()


class Counted(tuple):
    """Items that count how often they are looked at."""

    __slots__ = ()
    looks = 0

    def __iter__(self):
        for item in super().__iter__():
            Counted.looks += 1
            yield item

    def __getitem__(self, index):
        Counted.looks += 1
        return super().__getitem__(index)


def slots_one_by_one(plan, step):
    return sum(
        (min(step, part.end_step) - part.spec.start_step) * part.spec.global_batch_size * part.row_slots
        for part in plan.stages
        if part.spec.start_step < step
    )


@pytest.mark.parametrize("decay", ["cosine", "linear", "none"])
def test_a_table_takes_time_for_steps_and_parts_and_not_for_their_product(make_run, decay):
    skip = [{"steps": f"{step}:{step + 1}"} for step in range(1, 39, 2)]
    stages = [{"name": "a", "start_step": 0}, {"name": "b", "start_step": 20, "lr_scale": 0.5}]
    plan = make_run(stages, skip=skip, global_batch_size=RAMP).plan()
    parts = len(plan.stages)
    assert parts > 30
    counted = replace(plan, stages=Counted(plan.stages))
    schedule = TokenSchedule(plan=counted, warmup=300, decay=decay, decay_tokens=500)
    Counted.looks = 0
    table = schedule.table()
    assert Counted.looks < 6 * parts < plan.steps * parts / 4
    trained = [step for step in range(plan.steps) if plan.stage(step).spec.skipped is None]
    assert table.tolist() == [schedule(step) for step in trained]
    # The straightforward sum over all parts gives the same tokens, and they give the same factors.
    for step in range(plan.steps + 1):
        assert plan.slots_before(step, skipped=True) == slots_one_by_one(plan, step)
        assert plan.slots_before(step, skipped=False) == slots_one_by_one(plan, step) - sum(
            slots_one_by_one(plan, skipped + 1) - slots_one_by_one(plan, skipped)
            for skipped in range(step)
            if skipped not in trained
        )
    assert table.tolist() == [factor_one_by_one(plan, step, decay) for step in trained]


def factor_one_by_one(plan, step, decay):
    """Return the factor with 300 tokens of warm-up and 500 of decay."""
    before, after, end = (slots_one_by_one(plan, at) for at in (step, step + 1, plan.steps - 1))
    scale, rise, begin = plan.stage(step).spec.lr_scale, min(1.0, after / 300), max(300, end - 500)
    if decay == "none" or before < begin:
        return rise * scale
    way = (before - begin) / (end - begin)
    left = (1 + cos(pi * way)) / 2 if decay == "cosine" else 1 - way
    return min(rise, 0.1 + (1 - 0.1) * left) * scale


@given(warmup=st.integers(0, 700), decay=st.integers(1, 500), shape=st.sampled_from(["cosine", "linear"]))
def test_factors_lie_between_nothing_and_one(make_run, warmup, decay, shape):
    factors = make_run(global_batch_size=RAMP).lr_schedule(
        warmup_tokens=warmup, decay_tokens=decay, decay=shape, final=0.0
    )
    assert all(0 <= factors(step) <= 1 for step in range(40))
    assert factors(39) == pytest.approx(0, abs=1e-12)


def test_a_schedule_that_does_not_fit_is_refused(make_run):
    with pytest.raises(ConfigError, match="decay must be one of cosine, linear, none, got 'cosin'; did you mean"):
        make_run().lr_schedule(decay="cosin")
    with pytest.raises(ConfigError, match=r"must fit the 1280 tokens of the run.* got 2000, None and 0.1; shorten"):
        make_run().lr_schedule(warmup_tokens="2K")
