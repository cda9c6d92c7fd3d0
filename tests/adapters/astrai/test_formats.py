from __future__ import annotations

import numpy as np
import pytest

from tokenmill.adapters.astrai import H5Store, MmapStore, Store, detect_format
from tokenmill.errors import StoreError, StoreMissingError

IDS = np.arange(6, dtype=np.int32)


def test_h5_and_bin_are_told_apart_at_any_depth(tmp_path, astrai):
    file = astrai.save_h5(tmp_path / "a" / "__default__" / "data_0000.h5", {"sequence": [IDS]})
    folder = astrai.save_bin(tmp_path / "b" / "__default__" / "shard_0000", {"sequence": IDS})
    assert [detect_format(path) for path in (tmp_path / "a", file, str(file))] == ["h5"] * 3
    assert [detect_format(path) for path in (tmp_path / "b", folder, folder / "meta.json")] == ["bin"] * 3


def test_hdf5_is_another_ending_of_h5(tmp_path, astrai):
    astrai.save_h5(tmp_path / "a.hdf5", {"sequence": [IDS]})
    assert detect_format(tmp_path) == "h5"
    store = H5Store()
    store.load(tmp_path)
    assert store.fetch(0, 6, "sequence").tolist() == IDS.tolist()


def test_where_both_are_h5_comes_first_and_bin_has_to_be_said(tmp_path, astrai):
    astrai.save_h5(tmp_path / "a.h5", {"sequence": [IDS]})
    astrai.save_bin(tmp_path / "shard", {"sequence": IDS + 10})
    assert detect_format(tmp_path) == "h5"
    for kind, expected in ((Store, 0), (H5Store, 0), (MmapStore, 10)):
        store = kind()
        store.load(tmp_path)
        assert store.fetch(0, 1, "sequence").tolist() == [expected]


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_stores_of_ours_are_of_either_type(ours, storage):
    path = ours["seq", storage]
    assert detect_format(path) == storage
    other = {"bin": H5Store, "h5": MmapStore}[storage]()
    with pytest.raises(StoreError, match=f"storage_type must be '{storage}', as the store is kept, got"):
        other.load(path)


def test_what_is_no_store_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no store at this path: .*nowhere"):
        detect_format(tmp_path / "nowhere")
    (tmp_path / "tokens.bin").write_bytes(b"1234")
    with pytest.raises(StoreMissingError, match=r"got \.bin; make a store of records with Pipeline"):
        detect_format(tmp_path)
    with pytest.raises(ValueError, match=r"got \.bin"):
        detect_format(tmp_path / "tokens.bin")


def test_records_are_jsonl_where_there_is_no_store(tmp_path, astrai):
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "tokens.bin").write_bytes(b"1234")
    assert [detect_format(path) for path in (tmp_path, tmp_path / "a.jsonl")] == ["jsonl"] * 2
    astrai.save_bin(tmp_path / "shard_0000", {"sequence": IDS})
    assert detect_format(tmp_path) == "bin"


def test_a_meta_without_arrays_is_no_store(tmp_path):
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(StoreMissingError, match=r"must hold \.h5 files, or \.bin files with a meta\.json"):
        detect_format(tmp_path)
