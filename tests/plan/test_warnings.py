"""What is odd in a plan is told in one sentence with the way out, and nothing else is."""

from __future__ import annotations

import re

import pytest

from tokenmill.plan import Ramp
from tokenmill.plan.report import report, warnings

SIZES = {"web": 1000, "books": 1000}
HALF = {"web": 1, "books": 1}
MOST = {"web": 3, "books": 1}


@pytest.fixture
def warn(make_plan):
    """Return a function that compiles stages as `make_plan` does and gives the warnings."""

    def found(stages, *, sizes=SIZES, steps=40, weigh_by="rows", quarantined=()):
        plan = make_plan(sizes, stages, steps=steps)
        facts = report(plan)
        return warnings(plan, facts, {stage.name: weigh_by for stage in facts.stages}, quarantined)

    return found


def test_a_plan_with_nothing_odd_has_no_warning(warn):
    """[A1.a]"""
    changed = {"lr_scale": 0.5, "ramp": Ramp(shape="linear", begin=20, end=22, weights=HALF)}
    parts = [(0, 4, HALF), (20, 4, MOST, changed), (22, 4, MOST, {"number": 1, "lr_scale": 0.5})]
    assert warn(parts) == []


def test_more_than_four_epochs_are_told_with_the_stage_that_passes_them(warn):
    """[M1.d]"""
    stages = [(0, 4, {"web": 1}), (20, 4, {"web": 1, "books": 3})]
    assert warn(stages, sizes={"web": 20, "books": 99}) == [
        "source 'web': it is read 5.00 times, more than 4 times from stage 'stage1' on; lower its weight, add "
        'documents, or set max_epochs with on_exhausted = "stop"'
    ]
    assert warn(stages, sizes={"web": 25, "books": 99}) == []  # just 4 times


@pytest.mark.parametrize(("start", "told"), [(39, "1 step"), (31, "9 steps"), (30, None)])
def test_a_stage_of_fewer_than_ten_steps_is_told(warn, start, told):
    expected = f"stage 'stage1': it has only {told}; check its start_step and that of the stage after it"
    assert warn([(0, 4, HALF), (start, 4, MOST)]) == ([expected] if told else [])


def test_a_short_run_of_one_stage_is_as_short_as_it_was_meant(warn):
    assert warn([(0, 4, HALF)], steps=3) == []


def test_a_stage_that_is_skipped_in_part_is_as_long_as_it_is(warn):
    parts = [(0, 4, HALF), (6, 4, HALF, {"number": 0, "skipped": ""}), (20, 4, MOST, {"number": 1})]
    assert warn(parts) == []


SCALED = "stage 'stage1': lr_scale goes from 1 to 0.5 and the data stays as it is; leave that to the schedule"


@pytest.mark.parametrize(
    ("batch", "weights", "changes", "told"),
    [
        (4, HALF, {}, True),
        (4, {"web": 2, "books": 2}, {}, True),
        (8, HALF, {}, False),
        (4, MOST, {}, False),
        (4, {"web": 1}, {}, False),
        (4, HALF, {"seed": 8}, False),
    ],
)
def test_a_scale_without_a_change_of_the_data_is_told(warn, batch, weights, changes, told):
    """[M2.b]"""
    found = warn([(0, 4, HALF), (20, batch, weights, {"lr_scale": 0.5} | changes)])
    assert [one[: len(SCALED)] for one in found] == [SCALED][:told]


def test_a_scale_of_the_first_stage_is_told(warn):
    assert warn([(0, 4, HALF, {"lr_scale": 0.1})]) == [
        "stage 'stage0': lr_scale 0.1 scales the run from its first step; set the learning "
        "rate of the trainer instead"
    ]


def test_a_source_that_no_stage_uses_is_told_unless_it_is_quarantined(warn):
    stages = [(0, 4, {"web": 1})]
    assert warn(stages) == ["source 'books': no stage uses it; give it a weight, or remove it from the run"]
    assert warn(stages, quarantined=["books"]) == []


def test_a_ramp_of_one_step_is_told(warn):
    ramp = Ramp(shape="linear", begin=20, end=21, weights=HALF)
    parts = [(0, 4, HALF), (20, 4, MOST, {"ramp": ramp}), (21, 4, MOST, {"number": 1})]
    assert warn(parts) == [
        "stage 'stage1': a ramp of 1 step is a switch with one odd step; raise ramp_steps, or leave the ramp out"
    ]


def test_every_warning_says_where_what_and_the_way_out(warn):
    ramp = Ramp(shape="linear", begin=35, end=36, weights={"web": 1})
    parts = [
        (0, 4, {"web": 1}, {"lr_scale": 0.5}),
        (20, 4, {"web": 1}),
        (35, 4, {"web": 1, "books": 1}, {"ramp": ramp}),
        (36, 4, {"web": 1, "books": 1}, {"number": 2}),
    ]
    found = warn(parts, sizes={"web": 9, "books": 9, "code": 9})
    assert len(found) == 6
    assert [one for one in found if not re.fullmatch(r"(stage|source) '\w+': [^;]+; [^;]+[^.;]", one)] == []
