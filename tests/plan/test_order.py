import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ConfigError, StoreCorruptError
from tokenmill.plan.order import FULL, NONE, WINDOW, EpochOrder, Shuffle


def order_of(size, key, mode, block_rows, window_blocks, starts=None):
    return EpochOrder(size=size, key=np.uint64(key), numbers=(mode, block_rows, window_blocks), starts=starts)


def shuffle_rows(places, *options):
    return order_of(*options).rows(places)


@given(
    size=st.integers(1, 3_000),
    key=st.integers(0, 2**64 - 1),
    mode=st.sampled_from([NONE, FULL, WINDOW]),
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
def test_blocks_of_rows_keep_a_group_to_few_neighbourhoods(size):
    block_rows, window_blocks = 10, 4
    rows = shuffle_rows(np.arange(size), size, np.uint64(7), WINDOW, block_rows, window_blocks)
    for begin in range(0, size, block_rows * window_blocks):
        window = np.sort(rows[begin : begin + block_rows * window_blocks])
        runs = 1 + int((np.diff(window) > 1).sum())
        assert runs <= window_blocks + 1  # the shorter last block cuts one more


def test_blocks_of_rows_are_mixed_within_a_group():
    rows = shuffle_rows(np.arange(4096), 4096, np.uint64(7), WINDOW, 64, 8)
    blocks = rows[:512] // 64
    assert np.unique(blocks).size >= 8
    assert int((np.diff(blocks) == 0).sum()) < 512 / 4


def test_another_epoch_key_gives_other_groups():
    first, second = (shuffle_rows(np.arange(4096), 4096, np.uint64(key), WINDOW, 64, 8) for key in (1, 2))
    assert set(first[:512].tolist()) != set(second[:512].tolist())


def test_an_unknown_mode_names_the_nearest():
    with pytest.raises(ConfigError, match=r"must be full, window or none, got 'ful'; did you mean 'full'\?"):
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
    rows, arranged = order.rows(places), order.arranged(places)
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
    rows, arranged = order.rows(np.arange(order.size)), order.arranged(np.arange(order.size))
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
    first, second = (order_of(4096, key, WINDOW, 1024, 8, starts).rows(np.arange(512)) // 64 for key in (1, 2))
    assert np.unique(first).size == np.unique(second).size == 8
    assert int((np.diff(first) == 0).sum()) < 512 / 4
    assert set(first.tolist()) != set(second.tolist())
    assert int((np.diff(np.unique(first)) == 1).sum()) < 7  # they are no neighbours


@pytest.mark.parametrize("starts", [[0, 5, 3, 8], [1, 4, 8], [0, 4, 9]])
def test_windows_that_cannot_be_are_refused_before_they_are_searched(starts):
    with pytest.raises(StoreCorruptError, match=r"its windows must hold 8 rows, in ascending order"):
        order_of(8, 1, WINDOW, 1024, 2, np.array(starts))
