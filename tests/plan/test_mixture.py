from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ConfigError
from tokenmill.plan import Ramp
from tokenmill.plan.mixture import (
    MAX_TOTAL,
    STAIRS,
    build_mixture,
    build_ramp,
    in_order,
    integer_weights,
)

weights = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=200)


def mixture_of(values):
    named = {f"s{i}": value for i, value in enumerate(values)}
    return build_mixture(tuple(integer_weights(named).values()))


def period(mixture):
    """Return the number of positions after which every source has exactly its share."""
    return int(mixture.weights[0].sum())


@given(weights)
def test_any_prefix_is_within_two_rows_of_every_share(values):
    """[M1.a] for 1 to 200 sources."""
    mixture = mixture_of(values)
    positions = 3_000
    sources, _ = mixture.draw(np.arange(positions))
    counts = np.zeros((positions, len(values)), np.int64)
    counts[np.arange(positions), sources] = 1
    counts = np.cumsum(counts, axis=0)
    shares = mixture.weights[0] / period(mixture)
    errors = np.abs(counts - np.arange(1, positions + 1)[:, None] * shares)
    assert errors.max() < 2


@given(weights)
def test_whole_weights_keep_the_asked_shares_to_one_part_in_2_31(values):
    total = sum(Fraction(repr(float(value))) for value in values)
    mixture = mixture_of(values)
    for value, whole in zip(values, mixture.weights[0].tolist(), strict=True):
        asked = Fraction(repr(float(value))) / total
        assert abs(Fraction(whole, period(mixture)) - asked) <= Fraction(2 * len(values), MAX_TOTAL)
        assert whole >= 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 4))
def test_counts_are_exact_after_each_period(whole, periods):
    mixture = build_mixture(tuple(whole))
    sources, _ = mixture.draw(np.arange(period(mixture) * periods))
    assert np.bincount(sources, minlength=len(whole)).tolist() == [weight * periods for weight in whole]


@given(weights, st.integers(0, 10**15))
def test_positions_and_draws_are_inverse_anywhere(values, begin):
    mixture = mixture_of(values)
    positions = np.arange(begin, begin + 500)
    sources, drawn = mixture.draw(positions)
    for source in np.unique(sources).tolist():
        mine = sources == source
        assert np.array_equal(mixture.positions_of(source, drawn[mine]), positions[mine])
        assert np.array_equal(drawn[mine], drawn[mine][0] + np.arange(mine.sum()))


@given(weights, st.integers(0, 5_000))
def test_counts_in_closed_form_are_those_counted(values, positions):
    mixture = mixture_of(values)
    sources, _ = mixture.draw(np.arange(positions))
    assert mixture.counts(positions) == np.bincount(sources, minlength=len(values)).tolist()


def test_decimal_weights_are_exact_for_ever():
    mixture = mixture_of([0.7, 0.1999, 0.1001])
    assert mixture.weights.tolist() == [[7000, 1999, 1001]]
    counts = mixture.counts(10_000 * 10**12)
    assert counts == [7000 * 10**12, 1999 * 10**12, 1001 * 10**12]


def test_tiny_weights_are_still_drawn():
    """Levanter never draws a source whose weight is below 1/2048."""
    mixture = mixture_of([1.0, 1e-6])
    positions = period(mixture)
    assert mixture.counts(positions)[1] == 1
    assert mixture_of([1.0, 1e-300]).weights[0, 1] == 1


def test_blends_that_repeat_rows_elsewhere_do_not_here():
    """Fast-LLM repeats 9 of the first 1,000 draws of [47, 2, 8] and 14 of [27, 4, 44, 48, 18]."""
    for whole in ((47, 2, 8), (27, 4, 44, 48, 18)):
        mixture = build_mixture(whole)
        sources, drawn = mixture.draw(np.arange(1_000))
        assert len(set(zip(sources.tolist(), drawn.tolist(), strict=True))) == 1_000


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_names_the_source_and_the_way_out(bad):
    with pytest.raises(ConfigError, match=r"'math': .*leave a source out to give it no share"):
        integer_weights({"web": 1, "math": bad})


def test_sources_in_order_are_drawn_each_to_its_end():
    mixture = in_order([4, 0, 1], [3, 1, 3])
    assert [array.tolist() for array in mixture.draw(np.arange(7))] == [
        [1, 2, 2, 2, 0, 0, 0],
        [0, 0, 1, 2, 0, 1, 2],
    ]
    for positions in range(8):
        sources = [1, 2, 2, 2, 0, 0, 0][:positions]
        assert mixture.counts(positions) == [sources.count(source) for source in range(3)]
    assert mixture.positions_of(2, np.array([2, 0])).tolist() == [3, 1]
    assert mixture.shares(0, 7) == [Fraction(3, 7), Fraction(1, 7), Fraction(3, 7)]


# Weights that change over the steps of a ramp

ramp_ends = st.integers(1, 16).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 50), min_size=n, max_size=n)] * 2).filter(
        lambda ends: all(map(any, ends)) and all(map(any, zip(*ends, strict=True)))
    )
)
leads = st.lists(st.fractions(Fraction(-1, 2), Fraction(1, 2), max_denominator=100), min_size=16, max_size=16)
shapes = st.sampled_from(["linear", "cosine"])


def ramp_of(ends, leads, **values):
    leads = [lead - sum(leads[: len(ends[0])]) / len(ends[0]) for lead in leads[: len(ends[0])]]
    begin, end = ([Fraction(weight) for weight in side] for side in ends)
    return build_ramp(begin, end, leads=leads, **values), leads


@given(ramp_ends, leads, st.sampled_from([1, 2, 5, 40, STAIRS + 3]), st.sampled_from([1, 3, 8]), shapes)
def test_any_prefix_of_a_ramp_is_within_two_rows_of_every_share(ends, leads, steps, batch, shape):
    """[M1.a] for 1 to 16 sources."""
    ramp, leads = ramp_of(ends, leads, steps=range(steps), batch=batch, shape=shape)
    sources, _ = ramp.draw(np.arange(steps * batch))
    counts = np.cumsum(np.eye(len(ends[0]))[sources], axis=0)
    shares = np.array([ramp.shares(position, position + 1) for position in range(steps * batch)], np.float64)
    errors = np.array([float(lead) for lead in leads]) + counts - np.cumsum(shares, axis=0)
    assert np.abs(errors).max() < 2
    exact = [float(lead) for lead in ramp.leads(steps * batch, leads)]
    assert exact == pytest.approx(errors[-1].tolist(), abs=1e-6)


@given(ramp_ends, leads, st.sampled_from([1, 7, STAIRS, 2 * STAIRS + 1]), st.sampled_from([1, 5]), shapes)
def test_draws_positions_and_counts_of_a_ramp_agree(ends, leads, steps, batch, shape):
    ramp, _ = ramp_of(ends, leads, steps=range(steps), batch=batch, shape=shape)
    sources, drawn = ramp.draw(np.arange(steps * batch))
    for source in range(len(ends[0])):
        mine = np.flatnonzero(sources == source)
        assert np.array_equal(drawn[mine], np.arange(mine.size))
        assert np.array_equal(ramp.positions_of(source, np.arange(mine.size)[::-1].copy()), mine[::-1])
    for positions in {0, 1, batch, steps * batch // 2, steps * batch}:
        assert ramp.counts(positions) == np.bincount(sources[:positions], minlength=len(ends[0])).tolist()


FROM_ONE_TO_THE_OTHER = [Fraction(1), Fraction(0)], [Fraction(0), Fraction(1)]


def test_a_linear_ramp_asks_for_the_middle_of_every_step():
    ramp = build_ramp(*FROM_ONE_TO_THE_OTHER, steps=range(4), batch=8, shape="linear", leads=[Fraction(0)] * 2)
    asked = [ramp.shares(8 * step, 8 * step + 8)[1] for step in range(4)]
    assert asked == [Fraction(1, 8), Fraction(3, 8), Fraction(5, 8), Fraction(7, 8)]
    assert ramp.shares(0, 32) == [Fraction(1, 2), Fraction(1, 2)]
    assert ramp.counts(32) == [16, 16]


@pytest.mark.parametrize("steps", [1_000, 10**6])
def test_a_long_ramp_has_256_stairs_within_half_a_stair_of_its_line(steps):
    ramp = build_ramp(*FROM_ONE_TO_THE_OTHER, steps=range(steps), batch=3, shape="linear", leads=[Fraction(0)] * 2)
    assert ramp.starts.tolist() == [3 * (stair * steps // STAIRS) for stair in range(STAIRS)]
    for step in range(0, steps, steps // 500):
        share = float(ramp.shares(3 * step, 3 * step + 3)[1])
        assert abs(share - (step + 0.5) / steps) <= 0.5 / STAIRS + 1 / steps


def test_a_cosine_ramp_follows_the_cosine():
    ramp = build_ramp(*FROM_ONE_TO_THE_OTHER, steps=range(200), batch=1, shape="cosine", leads=[Fraction(0)] * 2)
    found = np.array([ramp.shares(step, step + 1)[1] for step in range(200)], np.float64)
    wanted = (1 - np.cos(np.pi * (np.arange(200) + 0.5) / 200)) / 2
    assert np.abs(found - wanted).max() < 1e-9
    assert (np.diff(found) > 0).all()


def test_no_digit_of_a_cosine_depends_on_the_machine():
    """Libraries differ in the last bit, 2^-53; no way of any ramp is as near to where its digits would change."""
    middles = np.unique(np.concatenate([(2 * np.arange(n) + 1) / (2 * n) for n in range(1, STAIRS + 1)]))
    ways = (1 - np.cos(np.pi * middles)) / 2 * 10**9
    assert np.abs(np.abs(ways - np.round(ways)) - 0.5).min() > 4 * 2**-53 * 10**9


@pytest.mark.parametrize("first", [1, 77, 400, 998])
def test_weights_at_a_step_do_not_depend_on_where_a_ramp_was_cut(first):
    ends = [Fraction(9), Fraction(1), Fraction(0)], [Fraction(1), Fraction(1), Fraction(8)]
    built = {"batch": 5, "shape": "cosine", "leads": [Fraction(0)] * 3}
    whole = build_ramp(*ends, steps=range(999), **built)
    cut = build_ramp(*ends, steps=range(first, 999), **built)
    for step in range(first, 999, 13):
        at, then = 5 * step, 5 * (step - first)
        assert cut.shares(then, then + 5) == whole.shares(at, at + 5)


def test_a_ramp_of_a_million_steps_ends_within_two_rows_of_every_share():
    ends = [Fraction(9), Fraction(1), Fraction(0)], [Fraction(1), Fraction(1), Fraction(8)]
    ramp = build_ramp(*ends, steps=range(10**6), batch=1024, shape="cosine", leads=[Fraction(0)] * 3)
    end = ramp.counts(10**6 * 1024)
    assert sum(end) == 10**6 * 1024
    assert all(abs(lead) < 2 for lead in ramp.leads(10**6 * 1024, [Fraction(0)] * 3))
    assert sum(array.nbytes for array in (ramp.nodes, ramp.bases, ramp.weights)) < 100_000


SIZES = {"web": 500, "books": 300, "code": 200}


def test_a_ramp_within_a_plan_starts_and_ends_at_the_declared_steps(make_plan):
    """[M1.b]"""
    ramp = Ramp(shape="linear", begin=20, end=40, weights={"web": 1})
    plan = make_plan(
        SIZES,
        [(0, 10, {"web": 1}), (20, 10, {"code": 1}, {"ramp": ramp}), (40, 10, {"code": 1}, {"number": 1})],
        steps=60,
    )
    shares = [np.bincount(plan.rows(step)[0], minlength=3)[2] for step in range(60)]
    assert shares[:20] == [0] * 20
    assert shares[40:] == [10] * 20
    assert sum(shares[20:40]) == 100
    assert [plan.at(step).shares.get("code", 0.0) for step in (19, 20, 39, 40)] == [0.0, 0.025, 0.975, 1.0]
    assert [plan.at(step).index for step in (19, 20, 39, 40, 59)] == [0, 1, 1, 1, 1]
    assert [plan.at(step).progress for step in (20, 40, 59)] == [0.0, 0.5, 39 / 40]


def test_a_ramp_that_is_cut_in_two_goes_on_as_it_was(make_plan):
    ramp = Ramp(shape="cosine", begin=5, end=45, weights={"web": 3, "books": 1})
    whole = [(0, 7, {"web": 3, "books": 1}), (5, 7, {"code": 2, "web": 1}, {"ramp": ramp}), (45, 7, {"code": 1})]
    cut = [*whole[:2], (23, 7, {"code": 2, "web": 1}, {"ramp": ramp}), whole[2]]
    one, other = make_plan(SIZES, whole, steps=60), make_plan(SIZES, cut, steps=60)
    for step in range(60):
        assert [array.tolist() for array in one.rows(step)] == [array.tolist() for array in other.rows(step)]
    assert one.fingerprint == other.fingerprint
