"""The dtype of raw files is given or proven, never guessed from a size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import StoreError
from tokenmill.store import open_store


def test_without_a_word_on_the_dtype_raw_files_are_refused(tmp_path):
    np.arange(8, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(StoreError, match="dtype of files without a header must be said, got none; add dtype ="):
        open_store(tmp_path)


@given(count=st.integers(50, 400), seed=st.integers(0, 9))
def test_16_bit_ids_of_any_number_are_proven_by_their_vocabulary(tmp_path, count, seed):
    """The known defect: a file of 2n ids is as long as one of n ids of 32 bits."""
    tokens = np.random.default_rng(seed).integers(0, 50_257, count).astype(np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    store = open_store(tmp_path / "a.bin", vocab_size=50_257)
    assert store.fetch(0, store.num_tokens, "sequence").tolist() == tokens.tolist()


@pytest.mark.parametrize("vocab_size", [65_537, 128_256])
def test_a_vocabulary_that_16_bits_cannot_hold_proves_32(tmp_path, vocab_size):
    tokens = np.array([1, 2, 3, vocab_size - 1], np.uint32)
    tokens.tofile(tmp_path / "a.bin")
    assert open_store(tmp_path, vocab_size=vocab_size).fetch(0, 4, "sequence").tolist() == tokens.tolist()


def test_32_bit_ids_of_a_small_vocabulary_prove_nothing(tmp_path):
    """As 16 bits every second id would be 0, which is below any bound: no proof, so no guess."""
    np.arange(1, 9, dtype=np.uint32).tofile(tmp_path / "a.bin")
    with pytest.raises(
        StoreError, match=r"got 2 \(uint8 cannot hold .*; uint16 is possible; uint32 is possible\); say"
    ):
        open_store(tmp_path, vocab_size=50_257)
    assert open_store(tmp_path, vocab_size=50_257, dtype="uint32").num_tokens == 8


def test_a_file_that_fits_no_dtype_is_refused(tmp_path):
    np.full(9, 60_000, np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(StoreError, match=r"got 0 \(.*uint16 gives id 60000 at byte 0.*uint32 does not divide"):
        open_store(tmp_path, vocab_size=50_257)


def test_all_files_of_a_folder_count_together(tmp_path):
    np.zeros(8, np.uint16).tofile(tmp_path / "a.bin")  # proves nothing by itself
    with pytest.raises(StoreError, match="got 2"):
        open_store(tmp_path, vocab_size=50_257)
    np.full(8, 50_000, np.uint16).tofile(tmp_path / "b.bin")
    assert open_store(tmp_path, vocab_size=50_257).num_tokens == 16


def test_an_id_that_the_sample_misses_is_found_all_the_same(tmp_path):
    """[T2.a] A sample proves the dtype; the bound holds for every id."""
    tokens = np.full(1 << 18, 40_000, np.uint16)
    tokens[2_500] = 60_000  # between the first two blocks of the sample
    tokens.tofile(tmp_path / "a.bin")
    with pytest.raises(StoreError, match="below the vocabulary size 50257, got 60000"):
        open_store(tmp_path, vocab_size=50_257)


@pytest.mark.parametrize("dtype", ["uint32", "int32"])
def test_a_size_that_the_dtype_does_not_divide_is_refused(tmp_path, dtype):
    np.arange(7, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(StoreError, match=rf"whole numbers of {dtype} .*got 14 bytes there"):
        open_store(tmp_path, dtype=dtype)
