import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.plan.permute import permute, permute_all, unpermute_all

KEY = np.uint64(0x5EED)


def test_is_a_bijection_with_an_inverse_for_every_size_up_to_5000():
    for size in range(1, 5001):
        indices = np.arange(size)
        images = permute_all(indices, size, KEY)
        assert np.array_equal(np.sort(images), indices), size
        assert np.array_equal(unpermute_all(images, size, KEY), indices), size


@pytest.mark.parametrize("size", [65_536, 65_537, 262_145, 1_048_575, 1_048_577])
def test_is_a_bijection_at_the_sizes_where_others_are_not(size):
    """Grain's index_shuffle repeats an index at 65,537, 262,145 and 1,048,577."""
    images = permute_all(np.arange(size), size, KEY)
    assert np.array_equal(np.sort(images), np.arange(size))


@pytest.mark.parametrize("size", [2**bits + d for bits in range(2, 34) for d in (-1, 0, 1)])
def test_inverse_inverts_around_powers_of_two_up_to_2_33(size):
    sample = np.unique(np.random.default_rng(size).integers(0, size, 2_000))
    images = permute_all(sample, size, KEY)
    assert images.min() >= 0
    assert images.max() < size
    assert np.unique(images).size == sample.size
    assert np.array_equal(unpermute_all(images, size, KEY), sample)


@given(size=st.integers(1, 2**62), index=st.integers(0, 2**62), key=st.integers(0, 2**64 - 1))
def test_inverse_inverts_for_any_size_and_key(size, index, key):
    index %= size
    image = permute(index, size, np.uint64(key))
    assert 0 <= image < size
    assert unpermute_all(np.array([image]), size, np.uint64(key)).tolist() == [index]


def test_is_the_same_on_every_machine():
    assert permute_all(np.arange(10), 10, KEY).tolist() == [2, 4, 9, 3, 0, 8, 6, 7, 5, 1]
    large = [42880611901, 882234577940, 582874358533, 989017274371, 698581939387]
    assert permute_all(np.arange(5), 10**12, KEY).tolist() == large


def test_every_permutation_of_four_is_reached_about_equally_often():
    counts: dict[tuple[int, ...], int] = {}
    draws = 24_000
    for key in range(draws):
        order = tuple(permute_all(np.arange(4), 4, np.uint64(key * 2_654_435_761)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    chi_square = sum((n - draws / 24) ** 2 / (draws / 24) for n in counts.values())
    assert chi_square < 60  # 23 degrees of freedom: 49.7 is the 99.9th percentile


def _variance_ratio(images: np.ndarray, classes: np.ndarray, num_classes: int, batch: int = 256) -> float:
    """Variance of the number of rows of a class in a batch, against that of a random permutation."""
    batches = images.size // batch
    table = np.zeros((batches, num_classes), np.int64)
    np.add.at(table, (np.repeat(np.arange(batches), batch), classes[: batches * batch]), 1)
    share = 1 / num_classes
    expected = batch * share * (1 - share) * (1 - (batch - 1) / (images.size - 1))
    return float(((table - batch * share) ** 2).mean() / expected)


SIZES = [2**20, 10**6]
SEEDS = range(1, 9)


def _mean_ratio(size, classify, num_classes):
    ratios = []
    for seed in SEEDS:
        images = permute_all(np.arange(size), size, np.uint64(seed * 0x9E3779B9))
        ratios.append(_variance_ratio(images, classify(images), num_classes))
    return float(np.mean(ratios))


@pytest.mark.parametrize("size", SIZES)
def test_batches_hold_contiguous_ranges_as_a_random_order_would(size):
    assert _mean_ratio(size, lambda images: images * 64 // size, 64) == pytest.approx(1.0, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [1, 3, 6, 10])
def test_batches_hold_residue_classes_as_a_random_order_would(size, bits):
    """Levanter's permutation has 17 to 26 times the variance at 6 bits."""
    ratio = _mean_ratio(size, lambda images: images % 2**bits, 2**bits)
    assert ratio == pytest.approx(1.0, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_neighbours_go_to_independent_places(size):
    images = permute_all(np.arange(size), size, KEY)
    gaps = np.diff(images) % size
    # Of n gaps between random places, about n * (1 - 1/e) are distinct.
    assert np.unique(gaps).size / size == pytest.approx(1 - np.exp(-1), abs=0.005)
    correlation = np.corrcoef(images[:-1], images[1:])[0, 1]
    assert abs(correlation) < 5 / np.sqrt(size)
    for bit in range(6):
        flags = (images >> bit) & 1
        assert abs(np.corrcoef(flags[:-1], flags[1:])[0, 1]) < 5 / np.sqrt(size)


@pytest.mark.parametrize("size", SIZES)
def test_epochs_are_independent_orders(size):
    first, second = (permute_all(np.arange(size), size, np.uint64(key)) for key in (1, 2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(size)
    # Two random permutations agree at about one place.
    assert int((first == second).sum()) <= 8
