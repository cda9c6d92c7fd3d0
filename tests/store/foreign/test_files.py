from __future__ import annotations

import os

import numpy as np
import pytest

from tokenmill.errors import StoreError, StoreMissingError
from tokenmill.store import StoreSpec, StoreWriter, detect_format, open_store
from tokenmill.store.foreign.files import files_of
from tokenmill.store.layout import stores_below


def test_a_store_of_ours_is_told_apart(make_store):
    path, _, _ = make_store("web", [3])
    assert detect_format(path) == "tokenmill"


def test_a_store_that_was_not_finished_is_not_taken_for_raw_files(make_store):
    path, _, _ = make_store("web", [3])
    (path / "manifest.json").unlink()
    with pytest.raises(StoreMissingError, match=r"\(no manifest.json\); if `tokenmill prepare` was interrupted"):
        open_store(path, dtype="uint16")


def test_a_folder_of_our_stores_is_not_taken_for_raw_files(make_store, tmp_path):
    path, _, _ = make_store("out/web", [3])
    with pytest.raises(
        StoreError, match=rf"out: must be one store, got the store web in it; name one of them, such as {path}$"
    ):
        open_store(tmp_path / "out", dtype="uint16")


@pytest.mark.parametrize("given", ["", "*", "**"])
def test_several_stores_are_not_taken_for_one(make_store, tmp_path, given):
    names = ["train", "val", "deep/part2", "deep/part10"]
    for name in names:
        make_store(f"out/{name}", [3])
    out = tmp_path / "out"
    inside = ["deep/part2", "deep/part10", "train", "val"]
    matched = [r"\S+"] * len(inside)  # a glob matches in the order of the folder
    listed = ", ".join(matched if given else inside)
    with pytest.raises(
        StoreError, match=rf": must be one store, got the stores {listed} in it; name one of them, "
    ):
        open_store(out / given if given else out)
    assert [os.fspath(store.relative_to(out)) for store in stores_below(out)] == inside


def test_many_stores_are_not_all_listed(make_store, tmp_path):
    for number in range(11):
        make_store(f"out/d{number}", [1])
    with pytest.raises(StoreError, match=r"got the stores d0, d1, d2, d3, d4, d5, d6, d7, 3 more in it; name one"):
        detect_format(tmp_path / "out")


def test_a_store_of_hdf5_is_told_below_a_folder_too(tmp_path, tokenizer_identity):
    keys, identity = {"sequence": "<u2"}, tokenizer_identity(300)
    spec = StoreSpec(keys=keys, tokenizer=identity, recipe={}, storage="h5")
    with StoreWriter(tmp_path / "out" / "train", spec) as writer:
        writer.append({"sequence": np.arange(3, dtype="<u2")}, np.array([0, 3]))
        writer.commit()
    assert [path.name for path in (tmp_path / "out" / "train").glob("shard-*")] == ["shard-00000"]
    with pytest.raises(StoreError, match="must be one store, got the store train in it"):
        open_store(tmp_path / "out")


@pytest.mark.parametrize("missing", ["no.npy", "*.npy", "no.bin"])
def test_token_files_that_are_not_there_are_not_called_a_store(tmp_path, missing):
    with pytest.raises(StoreMissingError) as caught:
        open_store(tmp_path / missing)
    assert str(caught.value) == (f"no store or token file at this path: {tmp_path / missing}; fix the path")


def test_a_folder_that_is_not_there_may_be_a_store_to_prepare(tmp_path):
    with pytest.raises(StoreMissingError, match=r"no store at this path: .*no \(the folder does not exist\)"):
        detect_format(tmp_path / "no")


def test_what_is_not_known_is_listed_with_what_is(tmp_path):
    for name in ("a.parquet", "b.parquet", "README"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(StoreError, match=r"got 2 of \.parquet, 1 of README; known: tokenmill, npy, bin,"):
        detect_format(tmp_path)


def test_two_formats_in_a_folder_are_refused_unless_one_is_named(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2], np.uint16))
    np.array([3, 4], np.uint16).tofile(tmp_path / "b.bin")
    with pytest.raises(StoreError, match="files of one format, got bin, npy; name a file, a glob, or the format"):
        detect_format(tmp_path)
    assert open_store(tmp_path, format="npy").fetch(0, 2, "sequence").tolist() == [1, 2]
    assert open_store(tmp_path, format="bin", dtype="uint16").fetch(0, 2, "sequence").tolist() == [3, 4]


def test_both_splits_of_nanogpt_are_never_read_together(tmp_path):
    for name in ("train.bin", "val.bin"):
        np.array([1, 2], np.uint16).tofile(tmp_path / name)
    with pytest.raises(StoreError, match=r"must name one split of nanoGPT.*got train.bin, val.bin; name the file"):
        open_store(tmp_path, dtype="uint16")
    assert detect_format(tmp_path / "val.bin") == "nanogpt"


def test_the_pickle_beside_nanogpt_is_never_opened(write, tmp_path, monkeypatch):
    """[S.a]"""
    made = write("nanogpt")
    monkeypatch.chdir(tmp_path)
    (made.path.parent / "meta.pkl").chmod(0)
    open_store(made.path, **made.options)
    assert not (tmp_path / "owned").exists()


def test_a_raw_file_of_any_name_can_be_read_on_the_users_word(tmp_path):
    np.array([1, 2, 3], np.uint16).tofile(tmp_path / "tokens.u16")
    with pytest.raises(StoreError, match=r"known format, got 1 of \.u16"):
        open_store(tmp_path / "tokens.u16", dtype="uint16")
    assert open_store(tmp_path / "tokens.u16", dtype="uint16", format="bin").num_tokens == 3


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_megatron_is_named_by_prefix_or_either_file(write, ending):
    made = write("megatron-u2")
    store = open_store(f"{made.path}{ending}")
    assert store.fetch(0, store.num_tokens, "sequence").tolist() == made.tokens


def test_files_come_in_natural_order(tmp_path):
    for number in (10, 9, 1):
        np.save(tmp_path / f"part{number}.npy", np.array([number], np.uint16))
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a" / "part2.npy", np.array([2], np.uint16))
    assert open_store(tmp_path).fetch(0, 4, "sequence").tolist() == [2, 1, 9, 10]
    assert open_store(tmp_path / "**" / "*.npy").fetch(0, 4, "sequence").tolist() == [2, 1, 9, 10]
    assert open_store(tmp_path).manifest.shards[0].name == "a/part2.npy"


def test_an_address_is_refused(tmp_path):
    with pytest.raises(StoreError, match="expected a path on this machine, got an address"):
        files_of(tmp_path.__class__("s3://bucket/a"))
