from __future__ import annotations

import json

import numpy as np
import pytest

from tokenmill.adapters.astrai import DatasetFactory, Store
from tokenmill.errors import StoreError

POSITIONS = np.array([0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 0, 1], np.int32)
IDS = np.arange(12, dtype=np.int32)
MASK = np.ones(12, np.int32)


def positions_of(path):
    store = Store()
    store.load(path)
    return store.fetch(0, len(store), "position_ids").tolist()


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16", "uint8"])
def test_written_positions_are_delivered_as_they_are(tmp_path, astrai, dtype):
    arrays = {"sequence": IDS, "loss_mask": MASK, "position_ids": POSITIONS.astype(dtype)}
    astrai.save_bin(tmp_path / "bin", arrays)
    astrai.save_h5(tmp_path / "h5" / "a.h5", {key: [values[:5], values[5:]] for key, values in arrays.items()})
    assert positions_of(tmp_path / "bin") == positions_of(tmp_path / "h5") == POSITIONS.tolist()


def test_positions_of_a_whole_file_serve_all_its_datasets(tmp_path, astrai):
    """As AstrAI writes them with position_ids_mode continuous."""
    ids, mask = [IDS[:5], IDS[5:6], IDS[6:]], [MASK[:5], MASK[5:6], MASK[6:]]
    for number in range(2):
        positions = [np.arange(12, dtype=np.int32) + 100 * number]
        astrai.save_h5(
            tmp_path / f"data_{number:04d}.h5", {"sequence": ids, "loss_mask": mask, "position_ids": positions}
        )
    assert positions_of(tmp_path) == [*range(12), *range(100, 112)]


def test_positions_cut_elsewhere_than_tokens_are_refused(tmp_path, astrai):
    arrays = {
        "sequence": [IDS[:5], IDS[5:]],
        "loss_mask": [MASK[:5], MASK[5:]],
        "position_ids": [POSITIONS[:4], POSITIONS[4:]],
    }
    astrai.save_h5(tmp_path / "a.h5", arrays)
    with pytest.raises(StoreError, match="got one that ends at 4 within 0:5"):
        positions_of(tmp_path)


def test_too_few_positions_are_refused(tmp_path, astrai):
    astrai.save_bin(tmp_path, {"sequence": IDS, "loss_mask": MASK, "position_ids": POSITIONS[:-1]})
    with pytest.raises(StoreError, match="position_ids must be as many as tokens, 12, got 11"):
        positions_of(tmp_path)


def test_positions_in_some_parts_only_are_refused(tmp_path, astrai):
    arrays = {"sequence": IDS, "loss_mask": MASK}
    astrai.save_bin(tmp_path / "shard_0000", arrays)
    astrai.save_bin(tmp_path / "shard_0001", {**arrays, "position_ids": POSITIONS})
    with pytest.raises(StoreError, match=r"all parts must have position_ids of one dtype, got 1 of 2"):
        positions_of(tmp_path)


@pytest.mark.parametrize(
    "change", [{"dtype": "float32"}, {"dtype": "object"}, {"shape": [3, 4]}, {"shape": [True]}, {"shape": None}]
)
def test_a_forged_description_of_positions_is_refused(tmp_path, astrai, change):
    """[S.e]"""
    astrai.save_bin(tmp_path, {"sequence": IDS, "loss_mask": MASK, "position_ids": POSITIONS})
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["position_ids"] |= change
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(StoreError, match=r"position_ids.* must have .*whole numbers"):
        positions_of(tmp_path)


@pytest.mark.parametrize("options", [{"chunks": (4,)}, {"compression": "gzip"}])
def test_chunked_positions_are_refused(tmp_path, astrai, options):
    import h5py

    astrai.save_h5(tmp_path / "a.h5", {"sequence": [IDS], "loss_mask": [MASK]})
    with h5py.File(tmp_path / "a.h5", "a") as opened:
        opened.create_group("position_ids").create_dataset("data_0", data=POSITIONS, **options)
    with pytest.raises(StoreError, match="must be whole numbers as they are, but it is chunked"):
        positions_of(tmp_path)


def test_without_positions_there_is_no_such_key_and_sft_says_so(tmp_path, astrai):
    astrai.save_bin(tmp_path, {"sequence": IDS, "loss_mask": MASK})
    with pytest.raises(
        StoreError, match=r"SFTDataset must have keys .*position_ids, got sequence, loss_mask; choose"
    ):
        DatasetFactory.load("sft", tmp_path, 4)
    assert DatasetFactory.load("seq", tmp_path, 4)[0]["input_ids"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("suffix", ["bin", "h5"])
def test_windows_of_plain_text_have_the_positions_that_were_written_and_no_target_at_a_start(
    tmp_path, astrai, suffix
):
    """As in AstrAI's newest version: no document is trained to predict the first token of the next."""
    if suffix == "bin":
        astrai.save_bin(tmp_path, {"sequence": IDS, "position_ids": POSITIONS})
    else:
        astrai.save_h5(tmp_path / "a.h5", {"sequence": [IDS], "position_ids": [POSITIONS]})
    item = DatasetFactory.load("seq", tmp_path, 6, stride=5)[1]
    assert {key: values.tolist() for key, values in item.items()} == {
        "input_ids": [5, 6, 7, 8, 9, 10],
        "target_ids": [6, 7, 8, 9, 10, 11],
        "position_ids": [0, 1, 2, 3, 0, 0],
        "loss_mask": [True, True, True, False, False, True],
    }
