"""Token files give the samples that KempnerForge describes, token for token."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from tokenmill.adapters.kempnerforge import DistributedSampler, MemoryMappedDataset, MixtureDataset
from tokenmill.errors import ConfigError, PlanError, ResumeError, StoreError, StoreMissingError

EOS = 7


def described(files, seq_len, eos=None):
    """Cut arrays as the documents of KempnerForge say it, in the plainest way."""
    samples = []
    for ids in files:
        for begin in range(0, len(ids) - seq_len + 1, seq_len):
            chunk = [int(token) for token in ids[begin : begin + seq_len]]
            inputs, labels, documents, document = chunk[:-1], chunk[1:], [], 0
            for place, token in enumerate(inputs):
                documents.append(document)
                if eos is not None and token == eos:
                    labels[place] = -100
                    document += 1
            samples.append((inputs, labels, documents))
    return samples


def got(samples):
    return [
        (
            sample["input_ids"].tolist(),
            sample["labels"].tolist(),
            sample["doc_ids"].tolist() if "doc_ids" in sample else [0] * len(sample["input_ids"]),
        )
        for sample in samples
    ]


def ids_of(seed, count, dtype, bound=50_000):
    ids = np.random.default_rng(seed).integers(0, bound, count).astype(dtype)
    ids[np.random.default_rng(seed + 1).random(count) < 0.2] = EOS
    return ids


def write(folder, files, ending):
    folder.mkdir(exist_ok=True)
    for name, ids in files.items():
        if ending == ".npy":
            np.save(folder / f"{name}.npy", ids)
        else:
            ids.tofile(folder / f"{name}.bin")
    return str(folder)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("ending", [".npy", ".bin"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_an_unshuffled_read_is_what_is_described(tmp_path, dtype, ending, pack):
    """[P1.c]"""
    # In the order of names, not of numbers; the second is shorter than a sample.
    files = {
        name: ids_of(number, count, dtype)
        for number, (name, count) in enumerate([("s10", 100), ("s11", 7), ("s2", 96)])
    }
    folder = write(tmp_path / "tokens", files, ending)
    dataset = MemoryMappedDataset(
        folder, 9, f"*{ending}", pack, EOS if pack else None, dtype=None if ending == ".npy" else dtype
    )
    expected = described(files.values(), 9, EOS if pack else None)
    assert len(dataset) == 11 + 0 + 10
    assert got([dataset[index] for index in range(len(dataset))]) == expected
    assert got(dataset.__getitems__(range(len(dataset)))) == expected
    assert dataset.num_unused_tokens == 1 + 7 + 6
    kinds = {name: tensor.dtype for name, tensor in dataset[0].items()}
    assert kinds == dict.fromkeys(["input_ids", "labels", *["doc_ids"] * pack], torch.int64)


@pytest.mark.parametrize("count", [100, 101])
def test_a_file_of_16_bits_is_never_taken_for_one_of_32(tmp_path, count):
    """[KempnerForge takes a .bin of 16 bits whose size divides by 4 for one of 32]"""
    ids = ids_of(0, count, "uint16")
    folder = write(tmp_path / "tokens", {"a": ids}, ".bin")
    with pytest.raises(
        StoreError, match=r'a\.bin: the dtype of files without a header must be said.*dtype="uint16"'
    ):
        MemoryMappedDataset(folder, 10, "*.bin")
    proven = MemoryMappedDataset(folder, 10, "*.bin", vocab_size=50_000)
    said = MemoryMappedDataset(folder, 10, "*.bin", dtype="uint16")
    assert got(proven.__getitems__(range(10))) == got(said.__getitems__(range(10))) == described([ids], 10)
    with pytest.raises(StoreError, match=r"whole numbers of uint32|below the vocabulary size 50000"):
        MemoryMappedDataset(folder, 10, "*.bin", dtype="uint32", vocab_size=50_000)


def test_files_of_both_widths_are_read_side_by_side(tmp_path):
    files = {"a": ids_of(0, 50, "uint16"), "b": ids_of(1, 50, "uint32", 1 << 20)}
    dataset = MemoryMappedDataset(write(tmp_path / "tokens", files, ".npy"), 10)
    assert got(dataset.__getitems__(range(10))) == described(files.values(), 10)


def test_a_store_of_ours_is_read_as_one_stream_of_its_documents(make_store):
    path, tokens, _ = make_store("web", [30, 50, 21], max_tokens_per_shard=40)
    dataset = MemoryMappedDataset(str(path), 10)
    assert got(dataset.__getitems__(range(len(dataset)))) == described([tokens], 10)
    with pytest.raises(ConfigError, match="eos_token_id must be given with pack_sequences"):
        MemoryMappedDataset(str(path), 10, pack_sequences=True)


def test_labels_can_be_changed_without_changing_inputs(tmp_path):
    dataset = MemoryMappedDataset(write(tmp_path / "t", {"a": ids_of(0, 50, "uint16")}, ".npy"), 10)
    sample = dataset[0]
    before = sample["input_ids"].tolist()
    sample["labels"].fill_(-100)
    assert sample["input_ids"].tolist() == before


def test_what_cannot_be_is_refused_with_the_way_out(tmp_path):
    folder = write(tmp_path / "tokens", {"a": ids_of(0, 50, "uint16")}, ".npy")
    with pytest.raises(StoreMissingError, match=r"must hold files that match '\*\.bin', got none"):
        MemoryMappedDataset(folder, 10, "*.bin")
    with pytest.raises(FileNotFoundError):
        MemoryMappedDataset(str(tmp_path / "nowhere"), 10)
    with pytest.raises(ValueError, match="eos_token_id must be given with pack_sequences, got none"):
        MemoryMappedDataset(folder, 10, pack_sequences=True)
    with pytest.raises(ConfigError, match=r"below 65536, got 128009; give that of the tokenizer"):
        MemoryMappedDataset(folder, 10, pack_sequences=True, eos_token_id=128_009)
    with pytest.raises(ConfigError, match="at least 2 tokens, got 1"):
        MemoryMappedDataset(folder, 1)
    dataset = MemoryMappedDataset(folder, 10)
    for index in (5, -1):
        with pytest.raises(IndexError, match=rf"within 0:5, got {index}"):
            dataset[index]


def test_a_closed_dataset_holds_no_file(tmp_path):
    dataset = MemoryMappedDataset(write(tmp_path / "t", {"a": ids_of(0, 50, "uint16")}, ".npy"), 10)
    maps = dataset.stores[0]._maps
    dataset[0]
    assert len(maps._maps) == 1
    for _ in range(2):  # the second time there is nothing to close
        dataset.close()
    assert dataset.stores == []
    with pytest.raises(PlanError, match="within 0:0, got 0"):
        dataset[0]


def test_the_state_of_other_samples_restores_the_epoch_with_a_warning(tmp_path, caplog):
    """[S.b] As KempnerForge documents it: "only epoch is restored; sample count is derived"."""
    files = {"a": ids_of(0, 5000, "uint16")}
    dataset = MemoryMappedDataset(write(tmp_path / "t", files, ".npy"), 10)
    dataset.load_state_dict({"epoch": 3, "total_samples": 500})
    state = dataset.state_dict()
    assert state["epoch"] == 3
    files["a"][-1] += 1
    changed = MemoryMappedDataset(write(tmp_path / "t", files, ".npy"), 10)
    assert caplog.messages == []
    changed.load_state_dict(state)
    changed.load_state_dict({"epoch": 4, "total_samples": 499, "sample_idx": 8})
    assert (changed.epoch, changed.sample_idx) == (4, 0)
    assert [message.partition(" in this dataset")[0] for message in caplog.messages] == [
        f"state: fingerprint is {dataset.fingerprint!r}, and {changed.fingerprint!r}",
        "state: total_samples is 499, and 500",
    ]
    with pytest.raises(ResumeError, match=r"state.epoch: expected a whole number"):
        changed.load_state_dict({"epoch": -1})


@pytest.mark.parametrize("sampler", [SequentialSampler, RandomSampler, DistributedSampler])
def test_any_sampler_and_loader_of_torch_takes_it(tmp_path, sampler):
    files = {"a": ids_of(0, 80, "uint16"), "b": ids_of(1, 85, "uint16")}
    dataset = MemoryMappedDataset(write(tmp_path / "t", files, ".npy"), 8, "*.npy", True, EOS)
    batches = list(DataLoader(dataset, batch_size=5, sampler=sampler(dataset)))
    assert [batch["input_ids"].shape for batch in batches] == [(5, 7)] * 4
    rows = [row for batch in batches for row in batch["input_ids"].tolist()]
    expected = [inputs for inputs, _, _ in described(files.values(), 8)]
    assert rows == expected if sampler is SequentialSampler else sorted(rows) == sorted(expected)


def test_worker_processes_that_are_not_forked_open_the_files_again(tmp_path):
    files = {"a": ids_of(0, 80, "uint16")}
    dataset = MemoryMappedDataset(write(tmp_path / "t", files, ".npy"), 8, "*.npy", True, EOS)
    dataset.epoch = 4
    again = MemoryMappedDataset.__new__(MemoryMappedDataset)
    again.__setstate__(dataset.__getstate__())
    assert got(again.__getitems__(range(10))) == described(files.values(), 8, EOS)
    assert again.state_dict() == dataset.state_dict()
    dataset.close()
    again.__setstate__(dataset.__getstate__())
    assert again.stores == []


class Squares(torch.utils.data.Dataset):
    """A dataset of somebody else: no whole batches, no state."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"input_ids": torch.full((7,), index), "labels": torch.full((7,), index * index)}


def test_a_mixture_gives_the_samples_of_each_with_its_number(tmp_path):
    ids = ids_of(0, 80, "uint16")
    ours = MemoryMappedDataset(write(tmp_path / "t", {"a": ids}, ".npy"), 8)
    mixture = MixtureDataset([ours, Squares()], ["web", "squares"])
    assert (len(mixture), mixture.cumulative_sizes, mixture.dataset_names) == (16, [0, 10, 16], ["web", "squares"])
    batch = mixture.__getitems__([15, 3, 10, 0])
    assert [sample["dataset_idx"].item() for sample in batch] == [1, 0, 1, 0]
    assert [sample["labels"].tolist() for sample in batch] == [
        [25] * 7,
        ours[3]["labels"].tolist(),
        [0] * 7,
        ours[0]["labels"].tolist(),
    ]
    assert mixture[15]["input_ids"].tolist() == [5] * 7
    assert mixture.state_dict() == {"dataset_0": ours.state_dict()}
    mixture.load_state_dict({"dataset_0": {"epoch": 2}, "dataset_1": {"epoch": 9}})
    assert ours.epoch == 2
    with pytest.raises(IndexError, match="within 0:16, got 16"):
        mixture[16]
    with pytest.raises(ConfigError, match="got 1 with 2 names"):
        MixtureDataset([ours], ["a", "b"])
    with pytest.raises(ConfigError, match="got 0 with 0 names"):
        MixtureDataset([], [])


def test_memory_is_kept_for_few_sizes_of_batches_only(tmp_path):
    """[A mixture asks for another number of samples each time]"""
    folder = write(tmp_path / "tokens", {"a": ids_of(0, 900, "uint16")}, ".npy")
    dataset = MemoryMappedDataset(folder, 9)
    for rows in [*range(1, 101), 3, 77, 50]:
        assert got(dataset.__getitems__(range(rows))) == described([np.load(f"{folder}/a.npy")], 9)[:rows]
    assert dataset.__getitems__([]) == []
    held = [buffer.nbytes for pool in dataset._pools.values() for buffer in pool._buffers]
    assert sum(held) <= 2 * 2 * (2 * 128 * 8 * 8), "two batches of the largest, and of all smaller ones as much"
    kept = dataset.__getitems__(range(50))
    dataset.__getitems__(range(60, 100))
    assert got(kept) == described([np.load(f"{folder}/a.npy")], 9)[:50], "what is held is not written over"


@pytest.mark.parametrize("pattern", ["*.npy", "*_token.npy"])
def test_labels_next_to_ids_mask_the_samples_and_are_not_samples(tmp_path, pattern):
    """The torchtitan fork's X_mask.npy and X_index.npy lie next to X_token.npy; all three match `*.npy`."""
    ids = np.arange(50, 70, dtype=np.int32)
    labels = np.where(np.arange(20) % 3 == 0, -100, ids).astype(np.int32)
    for part, array in (("token", ids), ("mask", labels), ("index", np.array([12, 20]))):
        np.save(tmp_path / f"X_{part}.npy", array)
    dataset = MemoryMappedDataset(str(tmp_path), 5, pattern)
    assert [sample["input_ids"].tolist() for sample in dataset] == ids.reshape(4, 5)[:, :-1].tolist()
    assert [sample["labels"].tolist() for sample in dataset] == labels.reshape(4, 5)[:, 1:].tolist()
