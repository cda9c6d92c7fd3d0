"""Text of Hugging Face becomes samples: prepared once, documents end to end, EOS behind each."""

import msgspec
import numpy as np
import pytest

from tokenmill.adapters.kempnerforge import DataConfig, DistributedSampler, HuggingFaceDataset, StatefulDataLoader
from tokenmill.encode.engines import open_tokenizer
from tokenmill.errors import ConfigError, StoreExistsError, TokenizerError

TEXTS = [f"document {number} of the mill, with {'grain ' * (number % 7)}" for number in range(40)]


@pytest.fixture
def folder(tmp_path, hub):  # noqa: ARG001 - it keeps the library off the network
    place = tmp_path / "text"
    place.mkdir()
    (place / "train.jsonl").write_bytes(b"".join(msgspec.json.encode({"words": text}) + b"\n" for text in TEXTS))
    return place


def make(folder, **options):
    return HuggingFaceDataset(
        str(folder), "train", "words", 16, "bytes", cache_dir=str(folder.parent / "stores"), **options
    )


def stream():
    """Return all documents end to end, framed as the tokenizer has it."""
    identity = open_tokenizer("bytes").identity
    return [token for text in TEXTS for token in (identity.bos_id, *text.encode(), identity.eos_id)]


def test_samples_are_the_stream_cut_every_seq_len_plus_one_tokens(folder):
    dataset, tokens = make(folder), stream()
    assert len(dataset) == len(tokens) // 17
    samples = dataset.__getitems__(range(len(dataset)))
    assert [sample["input_ids"].tolist() for sample in samples] == [
        tokens[17 * n : 17 * n + 16] for n in range(len(dataset))
    ]
    assert [sample["labels"].tolist() for sample in samples] == [
        tokens[17 * n + 1 : 17 * n + 17] for n in range(len(dataset))
    ]
    assert dataset.num_unused_tokens == len(tokens) % 17


def test_samples_are_stacked_as_kempnerforges_evaluation_stacks_them(folder):
    """It takes `np.stack(dataset._packed_sequences)` for one tensor of all samples."""
    dataset, tokens = make(folder), stream()
    packed = np.stack(dataset._packed_sequences)
    assert (packed.dtype, packed.shape) == (np.int64, (len(dataset), 17))
    assert packed.ravel().tolist() == tokens[: packed.size]


def test_a_state_restores_epoch_and_sample_and_warns_of_other_sequences(folder, caplog):
    """[S.b] As KempnerForge documents it: "restores epoch and sample_idx"."""
    dataset = make(folder)
    dataset.load_state_dict({"epoch": 2, "sample_idx": 5, "total_sequences": 7})
    assert (dataset.epoch, dataset.sample_idx) == (2, 5)
    assert [message.partition(":")[2] for message in caplog.messages] == [
        f" total_sequences is 7, and {len(dataset)} in this dataset: samples or their order differ"
    ]


def test_packed_samples_tell_documents_apart(folder):
    """[P1.c]"""
    dataset, tokens = make(folder, pack_sequences=True), np.array(stream())
    eos = open_tokenizer("bytes").identity.eos_id
    for number in range(len(dataset)):
        sample, chunk = dataset[number], tokens[17 * number : 17 * number + 17]
        documents = np.cumsum(np.concatenate([[0], chunk[:-1] == eos]))[:-1]
        assert sample["doc_ids"].tolist() == documents.tolist()
        assert sample["labels"].tolist() == np.where(chunk[:-1] == eos, -100, chunk[1:]).tolist()


def test_a_saved_dataset_and_its_split_can_be_named(tmp_path, hub):
    parts = {name: hub.Dataset.from_dict({"text": [name * 30] * 20}) for name in ("train", "test")}
    hub.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    for name in parts:
        dataset = HuggingFaceDataset(
            str(tmp_path / "saved"), name, "text", 16, "bytes", cache_dir=str(tmp_path / "stores")
        )
        letters = {chr(token) for token in dataset[1]["input_ids"].tolist() if token < 256}
        assert letters <= set(name)


def test_text_is_prepared_once_and_must_stay_as_it_was(folder):
    """[T2.c]"""
    first = make(folder)
    store = next((folder.parent / "stores").iterdir())
    written = {file: file.stat().st_mtime_ns for file in store.rglob("*") if file.is_file()}
    again = make(folder)
    assert {file: file.stat().st_mtime_ns for file in store.rglob("*") if file.is_file()} == written
    assert again.fingerprint == first.fingerprint
    with (folder / "train.jsonl").open("ab") as file:
        file.write(b'{"words": "one more"}\n')
    with pytest.raises(StoreExistsError, match="documents must stay as they were when they were prepared"):
        make(folder)


def test_the_state_says_where_the_loader_stands(folder):
    dataset = make(folder)
    loader = StatefulDataLoader(dataset, 4, DistributedSampler(dataset, 2, 0), DataConfig(num_workers=0))
    stream = iter(loader)
    for _ in range(3):
        next(stream)
    state = dataset.state_dict()
    assert [state[key] for key in ("epoch", "sample_idx", "total_sequences")] == [0, 24, len(dataset)]
    other = make(folder)
    other.load_state_dict(state)
    assert other.state_dict() == state


def test_worker_processes_that_are_not_forked_open_the_store_again(folder):
    dataset = make(folder, pack_sequences=True)
    dataset.mark(2, 9)
    again = HuggingFaceDataset.__new__(HuggingFaceDataset)
    again.__setstate__(dataset.__getstate__())
    assert again.state_dict() == dataset.state_dict()
    assert (again.seq_len, again.text_field) == (16, "words")
    assert again[3]["doc_ids"].tolist() == dataset[3]["doc_ids"].tolist()


def test_a_tokenizer_is_not_downloaded_and_must_have_an_eos(folder, tmp_path):
    with pytest.raises(TokenizerError, match="did you mean 'hf:gpt2'"):
        HuggingFaceDataset(str(folder), "train", "words", 16, "gpt2", cache_dir=str(tmp_path / "stores"))
    plain = tmp_path / "tokenizer.json"
    plain.write_bytes(msgspec.json.encode(_without_eos()))
    with pytest.raises(ConfigError, match="the tokenizer must have an EOS"):
        HuggingFaceDataset(str(folder), "train", "words", 16, str(plain), cache_dir=str(tmp_path / "stores"))


def _without_eos():
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    native = Tokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    native.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return msgspec.json.decode(native.to_str())
