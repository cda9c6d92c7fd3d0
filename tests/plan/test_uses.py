import numpy as np
import pytest

from tokenmill.errors import PlanError


@pytest.fixture
def plan(make_plan):
    stages = [
        (0, 6, {"web": 2, "books": 1}),
        (20, 4, {"web": 1}),
        (30, 6, {"web": 1}, {"skipped": "spike"}),
        (35, 6, {"web": 1, "books": 3}),
    ]
    return make_plan({"web": 40, "books": 9}, stages, steps=60)


def test_uses_of_many_ranges_are_those_of_each_document_clipped(plan):
    documents, starts, ends = np.array([7, 3, 7, 39]), np.array([0, 2, 5, 8]), np.array([9, 4, 6, 100])
    uses = plan.when_many("web", documents, starts, ends)
    wanted = [
        (query, use.step, use.slot, use.row, document, start, min(end, 9) - start)
        for query, (document, start, end) in enumerate(
            zip(documents.tolist(), starts.tolist(), ends.tolist(), strict=True)
        )
        for use in plan.when("web", document)
    ]
    columns = (uses.query, uses.step, uses.slot, uses.row, uses.document, uses.start, uses.length)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == wanted
    assert len(uses) == len(wanted) > 10
    assert not set(uses.step.tolist()) & set(range(30, 35)), "skipped steps use nothing"


def test_a_range_past_the_end_of_a_document_has_no_use(plan):
    assert len(plan.when_many("web", np.array([3]), np.array([9]), np.array([12]))) == 0
    assert len(plan.when_many("web", np.array([], np.int64))) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("web", [3], [4], [4]), "range 0 is not valid: tokens 4:4 of document 3; count from 0"),
        (("web", [3, 4], [0, -1], [1, 1]), "range 1 is not valid: tokens -1:1 of document 4"),
        (("web", [3, 4], [0]), r"starts: expected 2 integers in one dimension, got shape \(1,\)"),
        (("web", [0.5]), r"documents: expected 1 integers .* float64; pass one entry per range"),
        (("wep", [3]), "unknown source: 'wep'; did you mean 'web'"),
    ],
)
def test_wrong_ranges_are_rejected(plan, arguments, message):
    source, *columns = arguments
    with pytest.raises(PlanError, match=message):
        plan.when_many(source, *map(np.array, columns))
