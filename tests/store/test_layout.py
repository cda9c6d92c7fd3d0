"""How a store is told by the names of its files, and how large they are."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.errors import StoreMissingError
from tokenmill.store import detect_format, import_store, open_store, verify
from tokenmill.store.layout import document_file_bytes, is_ours, num_anchors, stores_below


@pytest.mark.parametrize(("tokens", "anchors"), [(0, 0), (1, 1), (1024, 1), (1025, 2), (2048, 2), (2049, 3)])
def test_there_is_an_anchor_for_every_1024th_token(tokens, anchors):
    assert num_anchors(tokens) == anchors
    assert document_file_bytes(3, tokens) == 4 * 8 + anchors * 4


@pytest.mark.parametrize("left", [".prepare", ".tmp-shards", ".tmp-pid", ".tmp-manifest.json", "shard-00000"])
def test_what_a_build_leaves_makes_a_folder_a_store_that_was_begun(tmp_path, left):
    (tmp_path / "web" / left).mkdir(parents=True)
    (tmp_path / "web" / ".notes").touch()
    assert is_ours(tmp_path / "web")
    with pytest.raises(StoreMissingError, match=r"got none; if `tokenmill prepare` was interrupted there"):
        open_store(tmp_path / "web")
    (tmp_path / "web" / "a.npy").touch()
    assert not is_ours(tmp_path / "web")


@pytest.mark.parametrize("hidden", [None, ".rows", ".git"])
def test_an_empty_folder_is_no_store_and_holds_no_token_files(tmp_path, hidden):
    (tmp_path / "web" / (hidden or "")).mkdir(parents=True)
    assert not is_ours(tmp_path / "web")
    for look in (open_store, detect_format, verify, lambda path: import_store(path, out=tmp_path / "out")):
        with pytest.raises(
            StoreMissingError,
            match=r"web: a store must be a folder with manifest\.json, or token files of another project, "
            r"got an empty folder; run `tokenmill prepare` or fix the path",
        ):
            look(tmp_path / "web")


def test_a_manifest_makes_a_folder_a_store_whatever_stands_beside_it(make_store):
    path, _, _ = make_store("web", [3])
    (path / "README").touch()
    assert is_ours(path)
    assert open_store(path).num_tokens == 3


def test_stores_that_were_not_finished_count_only_beside_finished_ones(make_store, tmp_path):
    for name in ("train", "val"):
        make_store(f"out/{name}", [3])
    (tmp_path / "out" / "val" / "manifest.json").unlink()
    assert [store.name for store in stores_below(tmp_path / "out")] == ["train", "val"]
    (tmp_path / "out" / "train" / "manifest.json").unlink()
    assert stores_below(tmp_path / "out") == []


def test_hidden_folders_hold_no_stores(make_store, tmp_path):
    make_store("out/.old/train", [3])
    np.save(tmp_path / "out" / "a.npy", np.array([1, 2], np.uint16))
    assert stores_below(tmp_path / "out") == []
    assert open_store(tmp_path / "out").num_tokens == 2
