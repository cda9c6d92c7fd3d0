from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset

from tokenmill.adapters.astrai import DatasetFactory, MmapStore, SEQDataset, SFTDataset, StoreFactory
from tokenmill.errors import ConfigError, StoreError
from tokenmill.store import open_store


@pytest.fixture(scope="module")
def made(tmp_path_factory, astrai):
    """Return a function that gives files of AstrAI with so many tokens, 0, 1, 2, ..., in three shards."""
    root = tmp_path_factory.mktemp("made")

    def make(size):
        if not (root / str(size)).exists():
            for number, ids in enumerate(np.array_split(np.arange(size, dtype=np.int32), 3)):
                astrai.save_bin(root / str(size) / f"shard_{number:04d}", {"sequence": ids})
        return root / str(size)

    return make


@given(size=st.integers(3, 24), window=st.integers(1, 12), stride=st.integers(1, 15))
def test_windows_are_those_of_the_definition(made, size, window, stride):
    """[P2.a] Each is `window_size` tokens and the next one, `stride` apart, as many as fit whole."""
    if size <= window:
        with pytest.raises(
            StoreError, match=f"must have more tokens than window_size, {window}, got {size}; lower"
        ):
            DatasetFactory.load("seq", made(size), window, stride)
        return
    dataset = DatasetFactory.load("seq", made(size), window, stride)
    expected = [begin for begin in range(0, size, stride) if begin + window + 1 <= size]
    assert len(dataset) == len(expected) == (size - 1 - window) // stride + 1
    assert [dataset.get_index(index) for index in range(len(dataset))] == [
        (begin, begin + window) for begin in expected
    ]
    items = dataset.__getitems__(range(len(dataset)))
    assert [item["input_ids"].tolist() for item in items] == [[*range(begin, begin + window)] for begin in expected]
    assert [item["target_ids"].tolist() for item in items] == [
        [*range(begin + 1, begin + window + 1)] for begin in expected
    ]
    targets = {target for item in items for target in item["target_ids"].tolist()}
    assert dataset.num_unused == size - 1 - len(targets)


def test_the_stride_is_the_window_unless_it_is_said(made):
    assert [DatasetFactory.load("seq", made(21), 4, stride).stride for stride in (None, 4, 2)] == [4, 4, 2]
    assert [len(DatasetFactory.load("seq", made(21), 4, stride)) for stride in (None, 4, 2)] == [5, 5, 9]


def test_items_of_seq_are_inputs_and_targets(made):
    item = DatasetFactory.load("seq", made(9), 4)[1]
    assert {key: (values.dtype, values.tolist()) for key, values in item.items()} == {
        "input_ids": (torch.int64, [4, 5, 6, 7]),
        "target_ids": (torch.int64, [5, 6, 7, 8]),
    }


def test_what_is_written_to_inputs_does_not_reach_the_targets(made):
    dataset = DatasetFactory.load("seq", made(9), 4)
    for item in (dataset[0], dataset.__getitems__([0, 1])[0]):
        item["input_ids"][:] = -1
        assert item["target_ids"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_items_of_sft_have_positions_of_inputs_and_masks_of_targets(ours, storage):
    path = ours["sft", storage]
    opened = open_store(path)
    stream = opened.fetch(0, opened.num_tokens, ["sequence", "loss_mask", "position_ids"])
    dataset = DatasetFactory.load("sft", path, 16, 5)
    assert len(dataset) > 50
    for index in range(len(dataset)):
        begin, end = dataset.get_index(index)
        assert {key: (values.dtype, values.tolist()) for key, values in dataset[index].items()} == {
            "input_ids": (torch.int64, stream["sequence"][begin:end].tolist()),
            "target_ids": (torch.int64, stream["sequence"][begin + 1 : end + 1].tolist()),
            "position_ids": (torch.int64, stream["position_ids"][begin:end].tolist()),
            "loss_mask": (torch.bool, stream["loss_mask"][begin + 1 : end + 1].astype(bool).tolist()),
        }
    assert sum(int(dataset[index]["loss_mask"].sum()) for index in range(len(dataset))) > 0


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_items_of_dpo_are_whole_pairs(ours, storage, astrai):
    """[T1.a]"""
    dataset = DatasetFactory.load("dpo", ours["dpo", storage], 64)
    records = astrai.RECORDS["dpo"][1]
    assert (len(dataset), dataset.count, dataset.num_unused) == (9, 9, 0)
    for item, record in zip(dataset, records, strict=True):
        assert [(key, values.dtype, values.ndim) for key, values in item.items()] == [
            ("chosen", torch.int64, 1),
            ("rejected", torch.int64, 1),
            ("chosen_mask", torch.bool, 1),
            ("rejected_mask", torch.bool, 1),
        ]
        for side in ("chosen", "rejected"):
            text = bytes(item[side][item[side] < 256].tolist()).decode()
            trained = item[side][item[f"{side}_mask"]]
            assert text == record["prompt"] + record[side]
            assert bytes(trained[trained < 256].tolist()).decode() == record[side]


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_items_of_grpo_are_whole_groups(ours, storage, astrai):
    dataset = DatasetFactory.load("grpo", ours["grpo", storage], 64)
    records = astrai.RECORDS["grpo"][1]
    for item, record in zip(dataset, records, strict=True):
        assert list(item) == ["prompts", "responses", "masks", "rewards"]
        assert (item["prompts"].dtype, item["rewards"].dtype) == (torch.int64, torch.float32)
        assert {each.dtype for each in item["responses"]} == {torch.int64}
        assert {each.dtype for each in item["masks"]} == {torch.bool}
        assert [len(each) for each in item["masks"]] == [len(each) for each in item["responses"]]
        assert bytes(item["prompts"][item["prompts"] < 256].tolist()).decode() == record["prompt"]
        texts = [bytes(each[each < 256].tolist()).decode() for each in item["responses"]]
        assert (texts, item["rewards"].tolist()) == (record["responses"], record["rewards"])


def test_pairs_of_astrai_are_read(tmp_path, astrai):
    arrays = {
        "chosen": np.arange(5, dtype=np.int32),
        "rejected": np.arange(10, 14, dtype=np.int32),
        "chosen_mask": np.array([0, 1, 0, 1, 1], np.int32),
        "rejected_mask": np.array([0, 0, 1, 1], np.int32),
    }
    offsets = {"chosen": [0, 2, 5], "rejected": [0, 3, 4]}
    astrai.save_bin(tmp_path / "bin", arrays, {key: offsets[key.removesuffix("_mask")] for key in arrays})
    pairs = {key: np.split(values, offsets[key.removesuffix("_mask")][1:-1]) for key, values in arrays.items()}
    astrai.save_h5(tmp_path / "h5" / "data_0000.h5", pairs)
    expected = {"chosen": [2, 3, 4], "rejected": [13], "chosen_mask": [False, True, True], "rejected_mask": [True]}
    for storage in ("bin", "h5"):
        dataset = DatasetFactory.load("dpo", tmp_path / storage, 3, storage_type=storage)
        assert len(dataset) == 2
        assert {key: values.tolist() for key, values in dataset[1].items()} == expected


def test_a_longer_record_than_the_window_is_refused_before_training(ours):
    assert len(DatasetFactory.load("dpo", ours["dpo", "bin"], 0)) == 9
    for kind, key in (("dpo", "chosen"), ("grpo", "prompts")):
        store = MmapStore()
        store.load(ours[kind, "bin"])
        longest = max(len(store.fetch_record(index, key)) for index in range(store.num_records))
        assert len(DatasetFactory.load(kind, ours[kind, "bin"], longest)) == store.num_records
        with pytest.raises(
            StoreError, match=f"{key} of a record must have at most window_size tokens, .* got {longest}"
        ):
            DatasetFactory.load(kind, ours[kind, "bin"], longest - 1)


def test_records_take_no_stride(ours):
    assert len(DatasetFactory.load("dpo", ours["dpo", "bin"], 64, 64)) == 9
    with pytest.raises(
        ConfigError, match="DPODataset: window_size must be at least 0 and stride left out, got 64 and 8"
    ):
        DatasetFactory.load("dpo", ours["dpo", "bin"], 64, 8)


@pytest.mark.parametrize(("window", "stride"), [(0, None), (-1, None), (4, 0), (4, -2)])
def test_windows_and_strides_are_positive(window, stride):
    with pytest.raises(ConfigError, match=r"SEQDataset: (window_size|stride) must be at least 1"):
        SEQDataset(window, stride)


@pytest.mark.parametrize(("kind", "store"), [("sft", "seq"), ("dpo", "sft"), ("grpo", "dpo"), ("seq", "grpo")])
def test_a_store_of_another_training_type_names_the_keys(ours, kind, store):
    with pytest.raises(StoreError, match=r"must have keys .*, got .*; choose another training type"):
        DatasetFactory.load(kind, ours[store, "bin"], 4)


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_a_dataset_loads_what_is_at_a_path_or_a_storage_type(ours, storage):
    """By `detect_format`, `StoreFactory.create` and `Store.load`."""
    path, items = ours["seq", storage], []
    for named in (None, storage):
        dataset = SEQDataset(8, 4)
        dataset.load(path, named)
        items.append([item["target_ids"].tolist() for item in dataset])
        assert type(dataset.storage) is StoreFactory.stores[storage]
    assert items[0] == items[1] == [item["target_ids"].tolist() for item in DatasetFactory.load("seq", path, 8, 4)]
    with pytest.raises(StoreError, match=f"storage_type must be '{storage}', as the store is kept, got"):
        SEQDataset(8).load(path, {"bin": "h5", "h5": "bin"}[storage])


def test_a_dataset_that_is_not_loaded_says_so():
    for call in (lambda dataset: dataset[0], lambda dataset: dataset.get_index(0)):
        with pytest.raises(RuntimeError) as error:
            call(SFTDataset(4))
        assert str(error.value) == "Store not loaded"
    dataset = SFTDataset(4)
    assert (len(dataset), dataset.keys, dataset.count, dataset.token_count, dataset.store) == (0, [], 0, 0, None)


def test_an_index_outside_ends_an_iteration_and_never_repeats_the_last_window(made):
    """[R1.d] AstrAI gives the last window for any larger index."""
    dataset = DatasetFactory.load("seq", made(9), 4)
    assert len(list(dataset)) == 2
    for index in (-1, 2, 10**9):
        with pytest.raises(IndexError, match=f"an index must lie within 0:2, got {index}"):
            dataset[index]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*", "ignore:.*pin_memory.*")
def test_a_plain_dataloader_with_any_sampler_gives_the_items(made, workers):
    dataset = DatasetFactory.load("seq", made(24), 3, 2)
    shuffled = [*RandomSampler(dataset, generator=torch.Generator().manual_seed(1))]
    ahead = {"pin_memory": True, "prefetch_factor": 3 if workers else None}
    for options, order in (
        ({"batch_size": 4, "shuffle": False}, [*range(len(dataset))]),
        (
            {"batch_size": 4, "sampler": RandomSampler(dataset, generator=torch.Generator().manual_seed(1))},
            shuffled,
        ),
        ({"batch_sampler": BatchSampler(shuffled, 5, drop_last=False)}, shuffled),
        ({"batch_size": None, "sampler": shuffled}, shuffled),
    ):
        batches = list(DataLoader(dataset, num_workers=workers, **ahead, **options))
        rows = torch.cat([batch["input_ids"].reshape(-1, 3) for batch in batches])
        assert rows.tolist() == [[2 * index, 2 * index + 1, 2 * index + 2] for index in order]


def test_a_batch_is_read_whole_and_is_that_of_its_items(ours):
    for kind in ("seq", "sft", "dpo", "grpo"):
        dataset = DatasetFactory.load(kind, ours[kind, "h5"], 64 if kind in ("dpo", "grpo") else 7)
        indices = [3, 0, 3, torch.tensor(5), np.int64(1)]
        for whole, index in zip(dataset.__getitems__(indices), indices, strict=True):
            single = dataset[index]
            assert list(whole) == list(single)
            for key, values in whole.items():
                torch.testing.assert_close(values, single[key], rtol=0, atol=0)
        assert Subset(dataset, [2, 0]).__getitems__([1])[0].keys() == dataset[0].keys()


def test_a_dataset_can_be_sent_to_a_worker_process(ours):
    dataset = DatasetFactory.load("grpo", ours["grpo", "bin"], 64)
    sent = pickle.loads(pickle.dumps(dataset))
    assert (len(sent), sent.fingerprint) == (7, dataset.fingerprint)
    torch.testing.assert_close(sent[2], dataset[2], rtol=0, atol=0)


@pytest.mark.deep
def test_workers_that_are_spawned_give_the_items(ours):
    """Each opens the store by itself; slow, as each imports torch."""
    dataset = DatasetFactory.load("sft", ours["sft", "h5"], 16)
    options = {"batch_size": 5, "num_workers": 2, "multiprocessing_context": "spawn"}
    torch.testing.assert_close(
        [*DataLoader(dataset, **options)], [*DataLoader(dataset, batch_size=5)], rtol=0, atol=0
    )


def test_what_the_items_are_has_a_fingerprint(made):
    prints = [
        DatasetFactory.load("seq", made(size), window, stride).fingerprint
        for size, window, stride in ((21, 4, None), (21, 4, 4), (21, 4, 2), (21, 5, None), (24, 4, None))
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4
