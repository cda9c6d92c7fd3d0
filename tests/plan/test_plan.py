import numpy as np
import pytest

from tokenmill.errors import ConfigError
from tokenmill.plan.report import report

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
        ([], "stages: a run must have at least one, got none"),
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
