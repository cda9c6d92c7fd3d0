from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ConfigError
from tokenmill.plan import Ramp
from tokenmill.plan.mixture import (
    KEPT,
    MAX_TOTAL,
    PARTS,
    build_mixture,
    build_ramp,
    draw_all,
    integer_weights,
    positions_of,
)

weights = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=200)


def mixture_of(values):
    named = {f"s{i}": value for i, value in enumerate(values)}
    return build_mixture(tuple(integer_weights(named).values()))


@given(weights)
def test_any_prefix_is_within_two_rows_of_every_share(values):
    """[M1.a] for 1 to 200 sources."""
    mixture = mixture_of(values)
    positions = 3_000
    sources, _ = draw_all(np.arange(positions), mixture.nodes)
    counts = np.zeros((positions, len(values)), np.int64)
    counts[np.arange(positions), sources] = 1
    counts = np.cumsum(counts, axis=0)
    shares = np.array(mixture.weights) / mixture.period
    errors = np.abs(counts - np.arange(1, positions + 1)[:, None] * shares)
    assert errors.max() < 2


@given(weights)
def test_whole_weights_keep_the_asked_shares_to_one_part_in_2_31(values):
    total = sum(Fraction(repr(float(value))) for value in values)
    mixture = mixture_of(values)
    for value, whole in zip(values, mixture.weights, strict=True):
        asked = Fraction(repr(float(value))) / total
        assert abs(Fraction(whole, mixture.period) - asked) <= Fraction(2 * len(values), MAX_TOTAL)
        assert whole >= 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 4))
def test_counts_are_exact_after_each_period(whole, periods):
    mixture = build_mixture(tuple(whole))
    sources, _ = draw_all(np.arange(mixture.period * periods), mixture.nodes)
    assert np.bincount(sources, minlength=len(whole)).tolist() == [weight * periods for weight in whole]


@given(weights, st.integers(0, 10**15))
def test_positions_and_draws_are_inverse_anywhere(values, begin):
    mixture = mixture_of(values)
    positions = np.arange(begin, begin + 500)
    sources, drawn = draw_all(positions, mixture.nodes)
    for source in np.unique(sources).tolist():
        mine = sources == source
        assert np.array_equal(
            positions_of(source, drawn[mine], mixture.nodes, mixture.leaf_parent), positions[mine]
        )
        assert np.array_equal(drawn[mine], drawn[mine][0] + np.arange(mine.sum()))


@given(weights, st.integers(0, 5_000))
def test_counts_in_closed_form_are_those_counted(values, positions):
    mixture = mixture_of(values)
    sources, _ = draw_all(np.arange(positions), mixture.nodes)
    assert mixture.counts(positions) == np.bincount(sources, minlength=len(values)).tolist()


def test_decimal_weights_are_exact_for_ever():
    mixture = mixture_of([0.7, 0.1999, 0.1001])
    assert mixture.weights == (7000, 1999, 1001)
    counts = mixture.counts(10_000 * 10**12)
    assert counts == [7000 * 10**12, 1999 * 10**12, 1001 * 10**12]


def test_tiny_weights_are_still_drawn():
    """Levanter never draws a source whose weight is below 1/2048."""
    mixture = mixture_of([1.0, 1e-6])
    positions = mixture.period
    assert mixture.counts(positions)[1] == 1
    assert mixture_of([1.0, 1e-300]).weights[1] == 1


def test_blends_that_repeat_rows_elsewhere_do_not_here():
    """Fast-LLM repeats 9 of the first 1,000 draws of [47, 2, 8] and 14 of [27, 4, 44, 48, 18]."""
    for whole in ((47, 2, 8), (27, 4, 44, 48, 18)):
        mixture = build_mixture(whole)
        sources, drawn = draw_all(np.arange(1_000), mixture.nodes)
        assert len(set(zip(sources.tolist(), drawn.tolist(), strict=True))) == 1_000


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_names_the_source_and_the_way_out(bad):
    with pytest.raises(ConfigError, match=r"'math': .*leave a source out to give it no share"):
        integer_weights({"web": 1, "math": bad})


# Weights that change from step to step

ramp_ends = st.integers(1, 16).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 50), min_size=n, max_size=n)] * 2).filter(
        lambda ends: all(map(any, ends)) and all(map(any, zip(*ends, strict=True)))
    )
)
leads = st.lists(st.fractions(Fraction(-1, 2), Fraction(1, 2), max_denominator=100), min_size=16, max_size=16)


def ramp_of(ends, leads, **values):
    ahead = [lead - sum(leads[: len(ends[0])]) / len(ends[0]) for lead in leads[: len(ends[0])]]
    begin, end = ([Fraction(weight) for weight in side] for side in ends)
    return build_ramp(begin, end, ahead=ahead, **values), ahead


def drawn_by(ramp, steps):
    """Return source and earlier draws at every position, step by step."""
    found = ramp.segments(0, steps * ramp.batch)
    parts = [draw_all(np.arange(ramp.batch), nodes) for nodes in found.nodes]
    sources = np.concatenate([part[0] for part in parts])
    bases = np.repeat(found.bases, ramp.batch, axis=0)[np.arange(sources.size), sources]
    return sources, np.concatenate([part[1] for part in parts]) + bases


@given(ramp_ends, leads, st.sampled_from([1, 2, 5, 40, KEPT + 3]), st.sampled_from([1, 3, 8]), st.booleans())
def test_any_prefix_of_a_ramp_is_within_two_rows_of_every_share(ends, leads, steps, batch, cosine):
    """[M1.a] for 1 to 16 sources."""
    ramp, ahead = ramp_of(ends, leads, steps=range(steps), batch=batch, cosine=cosine)
    sources, _ = drawn_by(ramp, steps)
    counts = np.cumsum(np.eye(len(ends[0]))[sources], axis=0)
    shares = np.repeat(np.array([ramp.asked(step, step + 1) for step in range(steps)], np.float64), batch, axis=0)
    errors = np.array([float(lead) for lead in ahead]) + counts - np.cumsum(shares, axis=0)
    assert np.abs(errors).max() < 2
    exact = [float(lead) for lead in ramp.ahead(steps * batch, ahead)]
    assert exact == pytest.approx(errors[-1].tolist(), abs=1e-6)


@given(ramp_ends, leads, st.sampled_from([1, 7, KEPT, 2 * KEPT + 1]), st.sampled_from([1, 5]), st.booleans())
def test_draws_positions_and_counts_of_a_ramp_agree(ends, leads, steps, batch, cosine):
    ramp, _ = ramp_of(ends, leads, steps=range(steps), batch=batch, cosine=cosine)
    sources, drawn = drawn_by(ramp, steps)
    for source in range(len(ends[0])):
        mine = np.flatnonzero(sources == source)
        assert np.array_equal(drawn[mine], np.arange(mine.size))
        assert np.array_equal(ramp.positions_of(source, np.arange(mine.size)[::-1].copy()), mine[::-1])
    for positions in {0, 1, batch, steps * batch // 2, steps * batch}:
        assert ramp.counts(positions) == np.bincount(sources[:positions], minlength=len(ends[0])).tolist()


@given(ramp_ends, leads, st.integers(0, 2 * KEPT), st.booleans())
def test_a_step_is_found_as_it_is_reached_from_the_first(ends, leads, step, cosine):
    ramp, _ = ramp_of(ends, leads, steps=range(2 * KEPT + 5), batch=3, cosine=cosine)
    whole, alone = ramp.segments(0, 3 * (2 * KEPT + 5)), ramp.segments(3 * step, 3 * step + 3)
    assert np.array_equal(whole.nodes[step], alone.nodes[0])
    assert np.array_equal(whole.bases[step], alone.bases[0])
    assert alone.starts.tolist() == [3 * step]


def test_a_linear_ramp_asks_for_the_middle_of_every_step():
    ramp = build_ramp(
        [Fraction(1), Fraction(0)],
        [Fraction(0), Fraction(1)],
        steps=range(4),
        batch=8,
        cosine=False,
        ahead=[Fraction(0)] * 2,
    )
    assert [ramp.asked(step, step + 1)[1] for step in range(4)] == [1 / 8, 3 / 8, 5 / 8, 7 / 8]
    assert ramp.asked(0, 4) == [Fraction(1, 2), Fraction(1, 2)]
    assert ramp.counts(32) == [16, 16]


def test_a_cosine_ramp_follows_the_cosine():
    ends = [Fraction(1), Fraction(0)], [Fraction(0), Fraction(1)]
    ramp = build_ramp(*ends, steps=range(1000), batch=1, cosine=True, ahead=[Fraction(0)] * 2)
    found = np.array([ramp.asked(step, step + 1)[1] for step in range(1000)], np.float64)
    wanted = (1 - np.cos(np.pi * (np.arange(1000) + 0.5) / 1000)) / 2
    assert np.abs(found - wanted).max() < 2 / PARTS
    assert (np.diff(found) >= 0).all()


def test_a_ramp_of_a_million_steps_is_reached_anywhere():
    ends = [Fraction(9), Fraction(1), Fraction(0)], [Fraction(1), Fraction(1), Fraction(8)]
    ramp = build_ramp(*ends, steps=range(10**6), batch=1024, cosine=True, ahead=[Fraction(0)] * 3)
    end = ramp.counts(10**6 * 1024)
    assert sum(end) == 10**6 * 1024
    assert all(abs(lead) < 2 for lead in ramp.ahead(10**6 * 1024, [Fraction(0)] * 3))
    assert sum(array.nbytes for array in ramp._kept) < 400_000


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
