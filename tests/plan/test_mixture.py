from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ConfigError
from tokenmill.plan.mixture import MAX_TOTAL, build_mixture, draw_all, integer_weights, positions_of

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
