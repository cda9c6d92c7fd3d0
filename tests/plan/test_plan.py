from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.conftest import NumberedRows

from tokenmill.errors import ConfigError, PlanError
from tokenmill.plan import Ramp, Shuffle, StageSpec, compile_plan
from tokenmill.plan.report import report
from tokenmill.plan.stages import rows_at

SIZES = {"web": 101, "books": 37}
STAGES = [(0, 12, {"web": 0.6, "books": 0.4}), (30, 8, {"web": 0.2, "books": 0.8})]


@pytest.mark.parametrize(("step", "name"), [(0, "stage0"), (29, "stage0"), (30, "stage1"), (59, "stage1")])
def test_boundary_belongs_to_the_new_stage(make_plan, step, name):
    """[M1.b]"""
    assert make_plan(SIZES, STAGES, steps=60).at(step).stage == name


def test_a_changed_future_leaves_batches_and_fingerprints_of_the_past_alone(make_plan):
    """[M1.c]"""
    old = make_plan(SIZES, STAGES, steps=60)
    edited = make_plan(SIZES, [STAGES[0], (30, 4, {"books": 1})], steps=60)
    added = make_plan(SIZES | {"new": 5}, [*STAGES, (50, 8, {"new": 1})], steps=90)
    for new, until in ((edited, 30), (added, 50)):
        for step in range(until):
            assert [a.tolist() for a in new.rows(step)] == [a.tolist() for a in old.rows(step)]
            assert new.fingerprint_at(step) == old.fingerprint_at(step)
        assert new.fingerprint_at(until) == old.fingerprint_at(until)
        assert new.fingerprint_at(until + 1) != old.fingerprint_at(until + 1)


@pytest.mark.parametrize(
    "stages",
    [
        [(0, 12, {"web": 0.6, "books": 0.5}), STAGES[1]],
        [(0, 6, {"web": 0.6, "books": 0.4}), STAGES[1]],
        [(0, 12, {"web": 0.6, "books": 0.4}, {"seed": 8}), STAGES[1]],
        [(0, 12, {"web": 1}), STAGES[1]],
    ],
)
def test_any_change_of_the_past_changes_the_fingerprint(make_plan, stages):
    assert make_plan(SIZES, stages, steps=60).fingerprint_at(1) != make_plan(
        SIZES, STAGES, steps=60
    ).fingerprint_at(1)


def test_other_rows_of_a_source_change_the_fingerprint(make_plan):
    one, other = make_plan(SIZES, STAGES, steps=60), make_plan(SIZES | {"web": 102}, STAGES, steps=60)
    assert one.fingerprint_at(1) != other.fingerprint_at(1)


def test_a_source_goes_on_where_the_stage_before_left_it(make_plan):
    plan = make_plan({"web": 1000, "books": 1000}, STAGES, steps=60)
    first = plan.stages[0].draws
    assert plan.stages[1].carry("web") == first["web"]
    assert sum(first.values()) == 30 * 12


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "stages: the run has no stage; add"),
        ([(3, 4, {"web": 1})], "stage 'stage0': the first stage must start at step 0, got 3"),
        ([(0, 4, {"web": 1}), (0, 4, {"web": 1})], "start_step must be above 0 of stage 'stage0', got 0"),
        ([(0, 4, {"web": 1}), (60, 4, {"web": 1})], "start_step must be below run.steps 60, got 60"),
    ],
)
def test_stages_out_of_order_are_refused(make_plan, stages, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(SIZES, stages, steps=60)


def test_a_source_without_rows_is_refused(make_plan):
    with pytest.raises(ConfigError, match="must have at least one row of 9 tokens, got none from 'web'"):
        make_plan({"web": 0}, [(0, 1, {"web": 1})], steps=1)


def test_max_epochs_is_checked_with_the_deficit_in_tokens(make_plan):
    """[M1.d]"""
    with pytest.raises(ConfigError, match=r"got 1\.200 epochs against 1 .* 20 rows \(160 tokens\) too many"):
        make_plan({"web": 100}, [(0, 12, {"web": 1})], steps=10, max_epochs={"web": 1})
    make_plan({"web": 100}, [(0, 10, {"web": 1})], steps=10, max_epochs={"web": 1})


def test_the_report_counts_what_is_drawn(make_plan):
    plan = make_plan(SIZES, STAGES, steps=60)
    counted = np.zeros((2, 2), np.int64)
    seen: dict[str, set[int]] = {"web": set(), "books": set()}
    repeats: dict[str, int] = {}
    for step in range(60):
        sources, rows = plan.rows(step)
        counted[plan.at(step).index] += np.bincount(sources, minlength=2)
        for source, row in zip(sources.tolist(), rows.tolist(), strict=True):
            name = plan.sources[source]
            if row in seen[name]:
                repeats.setdefault(name, step)
            seen[name].add(row)
    facts = report(plan)
    found = {(share.stage, share.source): share.rows for share in facts.shares}
    assert found == {
        (f"stage{stage}", name): counted[stage, i] for stage in (0, 1) for i, name in enumerate(plan.sources)
    }
    assert {source.name: source.first_repeat for source in facts.sources} == repeats
    assert facts.rows == counted.sum()
    assert facts.tokens == counted.sum() * 8
    assert [round(source.epochs * source.rows) for source in facts.sources] == counted.sum(axis=0).tolist()


# Stages laid end to end, of eight sources.

EIGHT_NAMES = [f"s{i}" for i in range(8)]
EIGHT_SIZES = dict(zip(EIGHT_NAMES, (97, 31, 53, 11, 200, 64, 5, 128), strict=True))
weights = st.dictionaries(st.sampled_from(EIGHT_NAMES), st.sampled_from([1, 2, 0.5, 7, 100, 0.01]), min_size=1)


@st.composite
def schedules(draw, max_stages=6):
    """Return stages with random edges, weights and ramps: (start, batch, weights, ramp)."""
    stages, start, before = [], 0, None
    for _ in range(draw(st.integers(1, max_stages))):
        goal, steps = draw(weights), draw(st.integers(1, 25))
        batch = draw(st.sampled_from([1, 4, 12]))
        if before and draw(st.booleans()):
            ramp_steps = draw(st.integers(1, steps))
            shape = draw(st.sampled_from(["linear", "cosine"]))
            ramp = Ramp(shape=shape, begin=start, end=start + ramp_steps, weights=before)
            stages.append((start, batch, goal, ramp))
            if ramp_steps < steps:
                stages.append((start + ramp_steps, batch, goal, None))
        else:
            stages.append((start, batch, goal, None))
        start, before = start + steps, goal
    return stages, start


def plan_of(stages, steps, sizes=EIGHT_SIZES, **values):
    rows = {name: NumberedRows(size, name) for name, size in sizes.items()}
    specs = [
        StageSpec(
            name=f"stage{number}",
            number=number,
            start_step=start,
            global_batch_size=batch,
            seq_len=8,
            seed=3,
            shuffle=Shuffle(),
            weights=goal,
            rows=rows,
            ramp=ramp,
        )
        for number, (start, batch, goal, ramp) in enumerate(stages)
    ]
    return compile_plan(specs, sources=tuple(sizes), steps=steps, **values)


def rows_of(plan):
    return [[array.tolist() for array in plan.rows(step)] for step in range(plan.steps)]


@given(schedules())
def test_any_prefix_of_a_run_is_within_two_rows_of_every_share(given_stages):
    """[M1.a] across edges and ramps, for up to 8 sources."""
    stages, steps = given_stages
    plan = plan_of(stages, steps)
    counts, asked, worst = np.zeros(8), np.zeros(8), 0.0
    for step in range(steps):
        stage = plan.stage(step)
        shares = np.array([stage.shares(step).get(name, 0.0) for name in EIGHT_NAMES])
        batch = stage.spec.global_batch_size
        # In the order of the mixture, not as the batch is turned.
        for source in rows_at(stage, np.full(batch, step), np.arange(batch), rotate=False)[0].tolist():
            counts[source] += 1
            asked += shares
            worst = max(worst, np.abs(counts - asked).max())
    assert worst < 2


@given(schedules())
def test_every_row_is_drawn_once_an_epoch_across_edges_and_ramps(given_stages):
    """[M1.c]"""
    stages, steps = given_stages
    plan = plan_of(stages, steps)
    drawn = {name: [] for name in EIGHT_NAMES}
    for step in range(steps):
        stage = plan.stage(step)
        batch = stage.spec.global_batch_size
        found = rows_at(stage, np.full(batch, step), np.arange(batch), rotate=False)
        for source, row in zip(*found, strict=True):
            drawn[EIGHT_NAMES[source]].append(int(row))
    for name, rows in drawn.items():
        for begin in range(0, len(rows), EIGHT_SIZES[name]):
            epoch = rows[begin : begin + EIGHT_SIZES[name]]
            assert len(set(epoch)) == len(epoch)


@given(schedules(), st.data())
def test_a_cut_that_changes_nothing_leaves_all_batches_alone(given_stages, data):
    stages, steps = given_stages
    at = data.draw(st.integers(0, steps - 1))
    index = max(i for i, stage in enumerate(stages) if stage[0] <= at)
    cut = [*stages[: index + 1], (at, *stages[index][1:]), *stages[index + 1 :]]
    if at == stages[index][0]:
        cut = stages
    one, other = plan_of(stages, steps), plan_of(cut, steps)
    assert rows_of(one) == rows_of(other)
    assert one.fingerprint == other.fingerprint


@given(schedules(max_stages=3), st.data())
@settings(max_examples=40)
def test_documents_are_found_where_they_are_drawn(given_stages, data):
    stages, steps = given_stages
    plan = plan_of(stages, steps)
    name = data.draw(st.sampled_from(sorted(stages[0][2])))
    document = data.draw(st.integers(0, EIGHT_SIZES[name] - 1))
    wanted = [
        (step, slot)
        for step in range(steps)
        for slot, (source, row) in enumerate(zip(*plan.rows(step), strict=True))
        if (EIGHT_NAMES[source], row) == (name, document)
    ]
    assert [(use.step, use.slot) for use in plan.when(name, document)] == wanted


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([0.5, 1, 2]), st.sampled_from(["web", "books"]))
def test_a_source_that_stops_gives_all_its_rows_and_no_more(size, batch, limit, name):
    sizes = {"web": 60, "books": 45} | {name: size}
    stages = [(0, batch, {"web": 2, "books": 3}, None), (9, batch, {"web": 1, "books": 1}, None)]
    plan = plan_of(stages, 30, sizes, stops={name: limit})
    drawn = [row for step in plan_rows(plan) for source, row in step if plan.sources[source] == name]
    room = int(Fraction(limit) * size)
    ended = [stage for stage in plan.stages if name not in stage.names]
    assert len(drawn) == room if ended else len(drawn) <= room
    for begin in range(0, len(drawn), size):
        # The order within a step is turned, so an epoch may end within a batch.
        assert len(set(drawn[begin : begin + size])) >= len(drawn[begin : begin + size]) - batch
    counts = np.bincount(drawn, minlength=size)
    assert counts.max() - counts.min() <= 1
    assert all(len(step) == batch for step in plan_rows(plan))


def plan_rows(plan):
    return [list(zip(*(array.tolist() for array in plan.rows(step)), strict=True)) for step in range(plan.steps)]


def test_a_source_stops_within_a_ramp(make_plan):
    ramp = Ramp(shape="linear", begin=0, end=20, weights={"web": 1})
    plan = make_plan(
        {"web": 500, "books": 13}, [(0, 10, {"books": 1, "web": 1}, {"ramp": ramp})], steps=20, stops={"books": 1}
    )
    counts = [np.bincount(plan.rows(step)[0], minlength=2).tolist() for step in range(20)]
    assert sum(books for _, books in counts) == 13
    gone = next(step for step in range(20) if sum(books for _, books in counts[: step + 1]) == 13)
    assert all(books == 0 for _, books in counts[gone + 1 :])
    assert {plan.stage(step).spec.name for step in range(20)} == {"stage0"}


def test_two_sources_may_stop_in_the_same_step(make_plan):
    plan = make_plan(
        {"a": 7, "b": 7, "c": 500}, [(0, 6, {"a": 1, "b": 1, "c": 1})], steps=20, stops={"a": 1, "b": 1}
    )
    drawn = np.concatenate([plan.rows(step)[0] for step in range(20)])
    assert np.bincount(drawn).tolist() == [7, 7, 106]


def test_a_run_whose_sources_all_stop_is_refused_with_the_step(make_plan):
    with pytest.raises(ConfigError) as error:
        make_plan({"web": 25}, [(0, 10, {"web": 1})], steps=5, stops={"web": 1})
    assert str(error.value) == (
        "stage 'stage0', step 2: all sources are used up (on_exhausted = stop), with 5 of 10 rows too few; "
        "end the run before that step, or add documents"
    )
    with pytest.raises(ConfigError) as error:
        make_plan({"web": 20}, [(0, 10, {"web": 1})], steps=5, stops={"web": 1})
    assert str(error.value) == (
        "stage 'stage0': its sources must last until it ends, got all of them used up (on_exhausted = stop) "
        "at step 2; end the run there, or add documents"
    )


def test_skipped_steps_count_as_read_and_leave_all_others_alone(make_plan):
    sizes = {"web": 101, "books": 37}
    stages = [(0, 12, {"web": 0.6, "books": 0.4}), (30, 8, {"web": 0.2, "books": 0.8})]
    skipped = [
        stages[0],
        (10, 12, stages[0][2], {"number": 0, "skipped": "a spike"}),
        (14, 12, stages[0][2], {"number": 0}),
        (30, 8, stages[1][2], {"number": 1}),
    ]
    whole, edited = make_plan(sizes, stages, steps=60), make_plan(sizes, skipped, steps=60)
    for step in [*range(10), *range(14, 60)]:
        assert [a.tolist() for a in whole.rows(step)] == [a.tolist() for a in edited.rows(step)]
    for ask in (edited.rows, edited.what):
        with pytest.raises(PlanError) as error:
            ask(11)
        assert str(error.value) == (
            "step: must be one that is trained on, got 11, which the run skips (a spike); the next one is 14"
        )
    assert edited.at(11).skipped == "a spike"
    assert [edited.next_trained(step) for step in (9, 10, 13, 14)] == [9, 14, 14, 14]
    assert {use.step for document in range(101) for use in edited.when("web", document)}.isdisjoint(range(10, 14))
    assert edited.fingerprint_at(10) == whole.fingerprint_at(10)
    assert edited.fingerprint_at(11) != whole.fingerprint_at(11)


def test_a_stage_has_its_learning_rate_scale_at_every_step(make_plan):
    stages = [(0, 4, {"web": 1}), (6, 4, {"web": 1}, {"lr_scale": 0.5})]
    plan = make_plan({"web": 9}, stages, steps=10)
    assert [plan.at(step).lr_scale for step in range(10)] == [1.0] * 6 + [0.5] * 4
    assert [plan.at(step).progress for step in (0, 3, 6, 9)] == [0.0, 0.5, 0.0, 0.75]
    # It decides no batch, and neither does the name of a stage.
    assert plan.fingerprint == make_plan({"web": 9}, stages[:1], steps=10).fingerprint


def test_steps_that_drain_a_source_have_a_fingerprint_of_their_own():
    """Equal digests must mean equal batches: what leads the others have after it depends on who was drained."""
    sizes = {"a": 500, "b": 500, "c": 16, "d": 60}
    stages = [(0, 8, {"a": 2, "b": 6, "c": 5, "d": 1}, None), (6, 8, {"a": 2, "b": 6}, None)]
    one = plan_of(stages, 18, sizes, stops={"c": 1.0, "d": 4 / 60})
    other = plan_of(stages, 18, sizes, stops={"c": 1.0, "d": 34 / 60})
    assert rows_of(one) != rows_of(other)
    assert one.fingerprint != other.fingerprint
    sizes = {"a": 500, "b": 500, "c": 5}
    drained = plan_of([(0, 8, {"a": 1, "b": 7, "c": 7}, None)], 60, sizes, stops={"c": 1.0})
    plain = [(0, 8, {"a": 1, "b": 7, "c": 7}, None), (1, 8, {"a": 1, "b": 6, "c": 1}, None)]
    staged = plan_of([*plain, (2, 8, {"a": 1, "b": 7}, None)], 60, sizes)
    assert rows_of(drained) != rows_of(staged)
    assert drained.fingerprint != staged.fingerprint


def test_a_very_long_ramp_to_several_new_sources_compiles():
    ramp = Ramp(shape="linear", begin=0, end=524_289, weights={"a": 1.0})
    plan = plan_of([(0, 4, {"a": 1, "b": 0.01, "c": 0.01}, ramp)], 524_289, {"a": 10**6, "b": 10**6, "c": 10**6})
    assert plan.rows(524_288)[0].size == 4
    assert sum(plan.stages[0].draws.values()) == 4 * 524_289


def test_a_run_of_more_rows_than_64_bits_can_count_is_refused():
    with pytest.raises(ConfigError) as error:
        plan_of([(0, 1 << 40, {"a": 1}, None)], 1 << 30, {"a": 10})
    assert str(error.value) == (
        f"run: steps * global_batch_size must be below 2^62, got {1 << 70}; lower one of the two"
    )
    with pytest.raises(ConfigError, match="global_batch_size must be at most 2147483648 where a source stops"):
        plan_of([(0, (1 << 33) + 1, {"a": 1, "b": 2}, None)], 10, {"a": 10**13, "b": 10**10}, stops={"b": 1.0})


def test_what_is_left_of_an_epoch_counts_as_what_it_is_after_a_restart():
    """A source is read 0.9 times, starts again, and is read to 0.04 of that; 0.96 are left, not 0.06."""

    class Changing(NumberedRows):
        def following(self, _, seen):
            return Changing(self.num_rows, self.name, self.seq_len, seen.size - seen.drawn)

        @property
        def epoch_description(self):
            return {"store": self.name, "rows": self.num_rows}

        @property
        def description(self):
            return {**self.epoch_description, **({"rest": self.num_rest} if self.num_rest else {})}

    def spec(number, start, name, on_change):
        return StageSpec(
            name=f"stage{number}",
            number=number,
            start_step=start,
            global_batch_size=1,
            seq_len=8,
            seed=3,
            shuffle=Shuffle(),
            weights={"a": 1},
            rows={"a": Changing(100, name)},
            on_change=on_change,
        )

    specs = [spec(0, 0, "x", "unseen"), spec(1, 90, "y", "restart"), spec(2, 94, "z", "unseen")]
    plan = compile_plan(specs, sources=("a",), steps=200)
    assert [stage.epochs("a") for stage in plan.stages] == [
        Fraction(9, 10),
        Fraction(94, 100),
        Fraction(94, 100) + Fraction(96, 100) + Fraction(10, 100),
    ]
    with pytest.raises(ConfigError, match=r"all of them used up \(on_exhausted = stop\) at step 100"):
        compile_plan(specs, sources=("a",), steps=200, stops={"a": 1.0})
