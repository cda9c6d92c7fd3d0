import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.compiled import kernel
from tokenmill.errors import ConfigError
from tokenmill.plan.shuffle import BLOCK, FULL, NONE, Shuffle, shuffle_row, unshuffle_rows


@kernel
def shuffle_rows(places, size, key, mode, block_rows, window_blocks):
    out = np.empty_like(places)
    for i in range(places.size):
        out[i] = shuffle_row(places[i], size, key, mode, block_rows, window_blocks)
    return out


@given(
    size=st.integers(1, 3_000),
    key=st.integers(0, 2**64 - 1),
    mode=st.sampled_from([NONE, FULL, BLOCK]),
    block_rows=st.integers(1, 70),
    window_blocks=st.integers(1, 9),
)
def test_every_mode_reads_every_row_once_and_can_be_inverted(size, key, mode, block_rows, window_blocks):
    """Grain's window shuffle repeats and loses rows where the window does not divide the size."""
    options = (size, np.uint64(key), mode, block_rows, window_blocks)
    places = np.arange(size)
    rows = shuffle_rows(places, *options)
    assert np.array_equal(np.sort(rows), places)
    assert np.array_equal(unshuffle_rows(rows, *options), places)


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
    with pytest.raises(ConfigError, match=r"must be full, block or none, got 'ful'; did you mean 'full'\?"):
        Shuffle(mode="ful")


@pytest.mark.parametrize("name", ["block_rows", "window_blocks"])
def test_empty_blocks_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: must lie within 1 and 2\\^30, got 0"):
        Shuffle(**{name: 0})
