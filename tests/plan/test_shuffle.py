import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.compiled import kernel
from tokenmill.errors import ConfigError, StoreCorruptError
from tokenmill.plan.shuffle import (
    BLOCK,
    FULL,
    NONE,
    WINDOW,
    EpochOrder,
    Shuffle,
    permute,
    permute_all,
    unpermute,
)

KEY = np.uint64(0x5EED)


@kernel
def unpermute_all(images, size, key):
    out = np.empty_like(images)
    for i in range(images.size):
        out[i] = unpermute(images[i], size, key)
    return out


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


def order_of(size, key, mode, block_rows, window_blocks, starts=None):
    return EpochOrder(size=size, key=np.uint64(key), numbers=(mode, block_rows, window_blocks), starts=starts)


def shuffle_rows(places, *options):
    return order_of(*options).rows(places)[0]


@given(
    size=st.integers(1, 3_000),
    key=st.integers(0, 2**64 - 1),
    mode=st.sampled_from([NONE, FULL, BLOCK, WINDOW]),
    block_rows=st.integers(1, 70),
    window_blocks=st.integers(1, 9),
)
def test_every_mode_reads_every_row_once_and_can_be_inverted(size, key, mode, block_rows, window_blocks):
    """Grain's window shuffle repeats and loses rows where the window does not divide the size."""
    options = (size, np.uint64(key), mode, block_rows, window_blocks)
    places = np.arange(size)
    rows = shuffle_rows(places, *options)
    assert np.array_equal(np.sort(rows), places)
    assert np.array_equal(order_of(*options).places(rows), places)


def test_none_keeps_the_order_on_disk():
    assert shuffle_rows(np.arange(7), 7, np.uint64(1), NONE, 2, 2).tolist() == list(range(7))


@pytest.mark.parametrize("size", [1_000, 1_003])
def test_block_keeps_a_window_to_few_neighbourhoods(size):
    block_rows, window_blocks = 10, 4
    rows = shuffle_rows(np.arange(size), size, np.uint64(7), BLOCK, block_rows, window_blocks)
    for begin in range(0, size, block_rows * window_blocks):
        window = np.sort(rows[begin : begin + block_rows * window_blocks])
        runs = 1 + int((np.diff(window) > 1).sum())
        assert runs <= window_blocks + 2  # the shorter last block and the turn at the end cut two more


def test_block_mixes_within_a_window():
    rows = shuffle_rows(np.arange(4096), 4096, np.uint64(7), BLOCK, 64, 8)
    blocks = rows[:512] // 64
    assert np.unique(blocks).size >= 8
    assert int((np.diff(blocks) == 0).sum()) < 512 / 4


def test_another_epoch_key_gives_other_windows():
    first, second = (shuffle_rows(np.arange(4096), 4096, np.uint64(key), BLOCK, 64, 8) for key in (1, 2))
    assert set(first[:512].tolist()) != set(second[:512].tolist())


def test_an_unknown_mode_names_the_nearest():
    with pytest.raises(ConfigError, match=r"must be full, block, window or none, got 'ful'; did you mean 'full'\?"):
        Shuffle(mode="ful")


@pytest.mark.parametrize("name", ["block_rows", "window_blocks"])
def test_empty_blocks_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: must lie within 1 and 2\\^30, got 0"):
        Shuffle(**{name: 0})


@given(
    windows=st.lists(st.integers(0, 70), min_size=1, max_size=40).filter(any),
    key=st.integers(0, 2**64 - 1),
    window_blocks=st.integers(1, 9),
)
def test_packing_windows_of_any_sizes_are_read_once_and_can_be_inverted(windows, key, window_blocks):
    starts = np.array([0, *np.cumsum(windows)])
    order = order_of(int(starts[-1]), key, WINDOW, 1024, window_blocks, starts)
    places = np.arange(order.size)
    rows, arranged = order.rows(places)
    assert np.array_equal(np.sort(rows), places)
    assert np.array_equal(np.sort(arranged), places)
    assert np.array_equal(order.places(rows), places)


@given(
    windows=st.lists(st.integers(1, 70), min_size=1, max_size=40),
    key=st.integers(0, 2**64 - 1),
    window_blocks=st.integers(1, 9),
)
def test_a_group_holds_whole_packing_windows(windows, key, window_blocks):
    """Rows that are shuffled together are those of at most `window_blocks` windows, and of each all."""
    starts = np.array([0, *np.cumsum(windows)])
    order = order_of(int(starts[-1]), key, WINDOW, 1024, window_blocks, starts)
    rows, arranged = order.rows(np.arange(order.size))
    begin, groups = 0, 0
    while begin < order.size:
        end = order.group_end(begin)
        used = np.unique(np.searchsorted(starts, rows[begin:end], side="right") - 1)
        assert used.size <= window_blocks
        assert sum(windows[window] for window in used) == end - begin
        assert np.array_equal(np.sort(arranged[begin:end]), np.arange(begin, end))
        begin, groups = end, groups + 1
    assert groups == -(-len(windows) // window_blocks)
    # Arranged, the rows of a window stand side by side.
    arranged_windows = np.searchsorted(starts, rows[np.argsort(arranged)], side="right") - 1
    assert int((np.diff(arranged_windows) != 0).sum()) == len(windows) - 1


def test_windows_are_mixed_and_every_epoch_groups_others():
    starts = np.arange(0, 4097, 64)
    first, second = (order_of(4096, key, WINDOW, 1024, 8, starts).rows(np.arange(512))[0] // 64 for key in (1, 2))
    assert np.unique(first).size == np.unique(second).size == 8
    assert int((np.diff(first) == 0).sum()) < 512 / 4
    assert set(first.tolist()) != set(second.tolist())
    assert int((np.diff(np.unique(first)) == 1).sum()) < 7  # they are no neighbours


@pytest.mark.parametrize("starts", [[0, 5, 3, 8], [1, 4, 8], [0, 4, 9]])
def test_windows_that_cannot_be_are_refused_before_they_are_searched(starts):
    with pytest.raises(StoreCorruptError, match=r"its windows must hold 8 rows, in ascending order"):
        order_of(8, 1, WINDOW, 1024, 2, np.array(starts))
