from __future__ import annotations

import copy
import json
import pickle
import shutil

import numpy as np
import pytest
import torch

from tokenmill.adapters.astrai import (
    DatasetFactory,
    GRPODataset,
    H5Store,
    MmapStore,
    Pipeline,
    SEQDataset,
    Store,
    StoreFactory,
    load_bin,
    save_bin,
)
from tokenmill.errors import ConfigError, PlanError, StoreError
from tokenmill.store import open_store

LENGTHS = [5, 1, 9, 3]


@pytest.fixture
def parts(tmp_path, astrai):
    """Write the same four parts as .bin and as .h5, and return their numbers."""
    arrays = [
        {"sequence": ids, "loss_mask": ids % 2, "position_ids": np.arange(len(ids), dtype=np.int32)}
        for ids in astrai.documents(LENGTHS)
    ]
    for number, part in enumerate(arrays):
        astrai.save_bin(tmp_path / "bin" / f"shard_{number:04d}", part)
    astrai.save_h5(tmp_path / "h5" / "data_0000.h5", {key: [part[key] for part in arrays] for key in arrays[0]})
    return {key: np.concatenate([part[key] for part in arrays]) for key in arrays[0]}


def loaded(tmp_path, storage):
    store = StoreFactory.create(storage)
    store.load(tmp_path / storage)
    return store


@pytest.mark.parametrize("make", [Store, H5Store, MmapStore, lambda: StoreFactory.create("bin")])
def test_nothing_is_read_before_load(make):
    calls = [
        lambda store: store.fetch(0, 1, "sequence"),
        lambda store: store.fetch_record(0, "sequence"),
        lambda store: store.fetch_windows([0], 1, "sequence"),
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as error:
            call(make())
        assert str(error.value) == "Store not loaded"
    assert (make().keys, len(make()), make().num_records, make().token_count) == ([], 0, 0, 0)


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_any_run_across_any_number_of_shards_is_read(tmp_path, parts, storage):
    """Every run is the slice of the whole stream, for every key."""
    store = loaded(tmp_path, storage)
    assert (store.keys, len(store), store.num_records) == (["sequence", "loss_mask", "position_ids"], 18, 0)
    for begin in range(18):
        for end in range(begin, 19):
            found = store.fetch(begin, end, store.keys)
            assert {key: values.tolist() for key, values in found.items()} == {
                key: values[begin:end].tolist() for key, values in parts.items()
            }


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_one_key_gives_a_tensor_and_several_a_dict(tmp_path, parts, storage):
    store = loaded(tmp_path, storage)
    ids = store.fetch(2, 7, "sequence")
    assert (type(ids), ids.dtype, ids.tolist()) == (torch.Tensor, torch.int64, parts["sequence"][2:7].tolist())
    found = store.fetch(2, 7, ["loss_mask", "position_ids"])
    assert [(key, values.dtype) for key, values in found.items()] == [
        ("loss_mask", torch.bool),
        ("position_ids", torch.int64),
    ]


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_segments_and_their_ends_are_as_astrai_keeps_them(tmp_path, parts, storage):
    store = loaded(tmp_path, storage)
    assert store._cum == {key: [5, 6, 15, 18] for key in store.keys}
    for key, segments in store._data.items():
        assert [len(segment) for segment in segments] == LENGTHS
        assert torch.cat(segments).tolist() == parts[key].tolist()


@pytest.mark.usefixtures("parts")
def test_what_is_written_to_a_segment_does_not_reach_the_file(tmp_path):
    store = loaded(tmp_path, "bin")
    store._data["position_ids"][0][0] = 77
    assert store.fetch(0, 1, "position_ids").tolist() == [0]


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_windows_are_read_within_and_across_shards(tmp_path, parts, storage):
    store = loaded(tmp_path, storage)
    begins = [14, 0, 6, 4, 0, 11]
    for key, values in parts.items():
        rows = store.fetch_windows(begins, 4, key)
        assert rows.tolist() == [store.fetch(begin, begin + 4, key).tolist() for begin in begins]
        assert rows.tolist() == [values[begin : begin + 4].tolist() for begin in begins]
    assert store.fetch_windows([], 4, "sequence").shape == (0, 4)
    for begin in (-1, 15, 10**12):
        with pytest.raises(PlanError, match=f"a window must lie within 0:18, got {begin}:{begin + 4}; move it"):
            store.fetch_windows([0, begin], 4, "sequence")


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (0, 19), (5, 4), (18, 18), (19, 19)])
def test_a_range_outside_the_stream_is_refused(tmp_path, begin, end):
    with pytest.raises(ValueError, match="a range must lie within 0:18"):
        loaded(tmp_path, "bin").fetch(begin, end, "sequence")


@pytest.mark.usefixtures("parts")
def test_an_unknown_key_names_the_nearest(tmp_path):
    with pytest.raises(StoreError, match="no such array: 'sequences'; did you mean 'sequence'"):
        loaded(tmp_path, "bin").fetch(0, 1, "sequences")


@pytest.mark.parametrize("storage", ["bin", "h5"])
@pytest.mark.parametrize("kind", ["seq", "sft", "dpo", "grpo"])
def test_records_are_those_of_the_engine(ours, kind, storage):
    path = ours[kind, storage]
    opened, store = open_store(path), StoreFactory.create(storage)
    store.load(path)
    assert opened.num_shards > 1
    assert store.num_records == opened.num_documents

    def plain(values):
        return [each.tolist() for each in values] if isinstance(values, list) else values.tolist()

    order = [*reversed(range(store.num_records)), 0, 0]
    expected = [{key: plain(values) for key, values in opened.fetch_record(index).items()} for index in order]
    found = store.fetch_records(order, store.keys)
    assert [{key: plain(values) for key, values in record.items()} for record in found] == expected
    assert plain(store.fetch_record(1, store.keys[0])) == plain(opened.fetch_record(1, store.keys[0]))
    for index in (-1, store.num_records):
        with pytest.raises(ValueError, match=f"records must lie within 0:{store.num_records}, got {index}"):
            store.fetch_record(index, store.keys)


def test_the_length_of_a_store_of_pairs_is_that_of_the_shorter_stream(ours):
    store = MmapStore()
    store.load(ours["dpo", "bin"])
    assert len(store) == min(store._cum["chosen"][-1], store._cum["rejected"][-1])


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_a_worker_process_opens_the_store_itself(tmp_path, parts, storage):
    store = loaded(tmp_path, storage)
    sent = pickle.dumps(store)
    assert len(sent) < 400
    assert type(pickle.loads(sent)) is type(store)
    assert pickle.loads(sent).fetch(3, 9, "sequence").tolist() == parts["sequence"][3:9].tolist()
    windowed = type(store)(4, 2)
    windowed.load(tmp_path / storage)
    assert pickle.loads(pickle.dumps(windowed))[1]["sequence"].tolist() == parts["sequence"][2:6].tolist()
    with pytest.raises(RuntimeError, match="Store not loaded"):
        copy.copy(type(store)()).fetch(0, 1, "sequence")


def test_a_worker_process_refuses_a_store_that_has_changed(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n')
    Pipeline("text", [tmp_path / "a.jsonl"], tmp_path / "store", "bytes").run(workers=1)
    store = MmapStore()
    store.load(tmp_path / "store")
    sent = pickle.dumps(store)
    shutil.rmtree(tmp_path / "store")
    Pipeline("text", [tmp_path / "b.jsonl"], tmp_path / "store", "bytes").run(workers=1)
    with pytest.raises(StoreError, match=r"must be the store that was loaded, \w{8}, got \w{8}; load it again"):
        pickle.loads(sent)


@pytest.mark.usefixtures("parts")
def test_h5_needs_no_copy_to_be_shared(tmp_path):
    store = loaded(tmp_path, "h5")
    assert store.share_memory_() is store
    files = {store.opened.file(shard, "sequence.bin").path for shard in range(4)}
    assert files == {tmp_path / "h5" / "data_0000.h5"}


# Names of AstrAI's newest version.


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_a_store_with_a_window_size_has_windows_as_items(tmp_path, parts, storage):
    store = StoreFactory.create(storage, window_size=4, stride=3)
    store.load(tmp_path / storage)
    assert (len(store), store.num_samples, store.token_count, store.window_size, store.stride) == (5, 5, 18, 4, 3)
    for index in range(5):
        assert store.sample_window(index) == (3 * index, 3 * index + 4)
        assert store[index]["sequence"].tolist() == parts["sequence"][3 * index : 3 * index + 4].tolist()
    assert store[-1]["sequence"].tolist() == store[4]["sequence"].tolist()
    dataset = DatasetFactory.load("sft", store=store)
    assert (dataset.window_size, dataset.stride, len(dataset), dataset.store) == (4, 3, 5, store)
    assert SEQDataset(store)[2]["target_ids"].tolist() == parts["sequence"][7:11].tolist()
    for call in (lambda: store[5], lambda: store.sample_window(-1)):
        with pytest.raises(IndexError, match="an index must lie within 0:5"):
            call()
    with pytest.raises(RuntimeError, match="window_size must be given"):
        loaded(tmp_path, storage).sample_window(0)


def test_a_store_without_one_has_records_as_items(ours):
    store = MmapStore()
    store.load(ours["grpo", "bin"])
    assert (store.num_samples, store.num_records) == (7, 7)
    record = GRPODataset(store=store)[6]
    assert record["rewards"].tolist() == store[-1]["rewards"].tolist()
    assert [each.tolist() for each in record["responses"]] == [each.tolist() for each in store[6]["responses"]]


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("share_memory", [True, False])
def test_share_memory_is_taken_and_changes_nothing(tmp_path, share_memory):
    store = H5Store()
    store.load(tmp_path / "h5", share_memory=share_memory)
    assert store.share_memory_() is store
    dataset = DatasetFactory.load("seq", tmp_path / "h5", 4, share_memory=share_memory)
    assert dataset[0]["input_ids"].tolist() == store.fetch(0, 4, "sequence").tolist()


def test_records_of_a_meta_are_records_and_a_stream_has_none(tmp_path, astrai):
    ids = {"sequence": np.arange(6, dtype=np.int32)}
    astrai.save_bin(tmp_path / "stream", ids)
    astrai.save_bin(tmp_path / "records", ids, offsets={"sequence": [0, 2, 6]})
    counts = []
    for name in ("stream", "records"):
        store = MmapStore()
        store.load(tmp_path / name)
        counts.append(store.num_records)
    assert counts == [0, 2]
    assert store.fetch_record(1, "sequence").tolist() == [2, 3, 4, 5]


def test_jsonl_is_a_store_of_its_records(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1 + 1 = ", "response": "2"}\n' * 3)
    config = {"preset": "instruction", "tokenizer_path": "bytes"}
    (tmp_path / "dataset_config.json").write_text(json.dumps(config))
    store = StoreFactory.create("jsonl")
    store.load(tmp_path)
    assert (store.num_records, store.keys) == (3, ["sequence", "loss_mask", "position_ids"])
    assert pickle.loads(pickle.dumps(store)).fetch_record(2, "loss_mask").tolist()[-2:] == [True, True]
    with pytest.raises(StoreError, match=r"must be a \.jsonl file or a folder with some"):
        StoreFactory.create("jsonl").load(tmp_path / "dataset_config.json")


def test_save_bin_and_load_bin_keep_tensors(tmp_path):
    group = {"sequence": [torch.arange(3, dtype=torch.int32), torch.arange(4, dtype=torch.int32)]}
    group |= {"loss_mask": [torch.ones(7, dtype=torch.bool)], "rewards": [torch.tensor([0.5, 1.0])]}
    save_bin(tmp_path / "out", group, record_keys=["sequence"])
    found = load_bin(tmp_path / "out")
    assert {key: [each.tolist() for each in values] for key, values in found.items()} == {
        key: [torch.cat(values).tolist()] for key, values in group.items()
    }
    assert {key: values[0].dtype for key, values in found.items()} == {
        key: each[0].dtype for key, each in group.items()
    }
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["sequence"]["offsets"] == [0, 3, 7]
    with pytest.raises(ConfigError, match="'responses' must be the name of a list of tensors; keep groups as"):
        save_bin(tmp_path / "out", {"responses": [[torch.ones(1)]]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a table of arrays"),
        ('{"../a": {"shape": [1], "dtype": "int32"}}', "must hold an array of bool"),
        ('{"a": {"shape": [1], "dtype": "object"}}', "must hold an array of bool"),
        ('{"a": {"shape": [3], "dtype": "int32"}}', "must hold 3 numbers of int32, got 4 bytes"),
        ('{"a": {"shape": [-1], "dtype": "int32"}}', "expected a table of arrays"),
    ],
)
def test_a_forged_meta_is_refused_by_load_bin(tmp_path, text, message):
    (tmp_path / "a.bin").write_bytes(b"1234")
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(StoreError, match=message):
        load_bin(tmp_path)
