from __future__ import annotations

import numpy as np
import pytest

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store import open_store


@pytest.fixture
def tokenizer_file(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["<eos>", "the", "mill", "grinds", "grain", "slowly"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_the_whole_step_of_datatrove_is_read(datatrove, tokenizer_file, tmp_path):
    """DocumentTokenizer itself, with its shuffle, its EOS and its loss mask; a file a rank."""
    from datatrove.data import Document

    step = datatrove.DocumentTokenizer(
        str(tmp_path / "out"), str(tokenizer_file), eos_token="<eos>", seed=3, save_loss_metadata=True
    )
    texts = [["the mill grinds", "grain"], ["slowly the grain", "mill mill", "the"]]
    for rank, rank_texts in enumerate(texts):
        documents = [
            Document(text=text, id=str(i), metadata={"no_loss_ranges": [(0, 4)]} if text.startswith("the ") else {})
            for i, text in enumerate(rank_texts)
        ]
        step.run(iter(documents), rank)
    store = open_store(tmp_path / "out")
    assert [shard.name for shard in store.manifest.shards] == [
        "00000_00000_doc_shuffled.ds",
        "00001_00000_doc_shuffled.ds",
    ]
    found = [store.fetch_record(i, "sequence").tolist() for i in range(store.num_documents)]
    assert sorted(found[:2]) == [[1, 2, 3, 0], [4, 0]]
    assert sorted(found[2:]) == [[1, 0], [2, 2, 0], [5, 1, 4, 0]]
    masks = [store.fetch_record(i, "loss_mask").tolist() for i in range(store.num_documents)]
    assert masks[found.index([1, 2, 3, 0])] == [0, 1, 1, 1]
    assert store.manifest.kind == "sft"
    assert store.manifest.recipe["tokenizers"] == [str(tokenizer_file)]


def file_of(datatrove, folder, docs, *, name="00000_a.ds", **options):
    folder.mkdir(exist_ok=True)
    out = datatrove.TokenizedFile(str(folder), name, **({"save_final_metadata": True} | options))
    for doc in docs:
        out.write(doc, np.ones(len(doc)) if options.get("save_loss_metadata") else None)
    out.close()
    return folder / name


def test_tokens_of_four_bytes(datatrove, tmp_path):
    file = file_of(datatrove, tmp_path, [[1, 2], [100_000]], token_size=4)
    assert open_store(file).fetch(0, 3, "sequence").tolist() == [1, 2, 100_000]


def test_without_metadata_the_dtype_is_said_or_proven(datatrove, tmp_path):
    file = file_of(datatrove, tmp_path, [[1, 2], [300, 400]], save_final_metadata=False)
    with pytest.raises(StoreError, match="dtype of files without a header must be said"):
        open_store(file)
    assert open_store(file, dtype="uint16").fetch(0, 4, "sequence").tolist() == [1, 2, 300, 400]
    assert open_store(file, vocab_size=401).fetch(0, 4, "sequence").tolist() == [1, 2, 300, 400]


def test_without_an_index_documents_end_after_eos(datatrove, tmp_path):
    file = file_of(datatrove, tmp_path, [[1, 2, 0], [5, 0]], save_index=False)
    assert open_store(file, eos_id=0).document_offsets(0, 2).tolist() == [0, 3, 5]


def test_a_mask_for_some_files_only_is_refused(datatrove, tmp_path):
    file_of(datatrove, tmp_path / "d", [[1]], name="a.ds", save_loss_metadata=True)
    file_of(datatrove, tmp_path / "d", [[1]], name="b.ds")
    with pytest.raises(StoreError, match=r"b\.ds: all files must have a \.loss or none, got none here"):
        open_store(tmp_path / "d")


FORGED = {
    "token size": (".metadata", b"gpt2|3\n3\n3 T", "must be TOKENIZER|2"),
    "no count": (".metadata", b"gpt2|2\n", "must be TOKENIZER|2"),
    "a count that is none": (".metadata", "gpt2|2\n³\n".encode(), "must be TOKENIZER|2"),
    "nothing": (".metadata", b"", "must be TOKENIZER|2"),
    "another count": (
        ".metadata",
        b"gpt2|2\n4\n4 T",
        "must hold 4 numbers of uint16 behind 0 bytes .* got 6 bytes",
    ),
    "an endless count": (".metadata", b"gpt2|2\n" + b"9" * 5000, "must hold 99999999999999999999 numbers"),
    "cut index": (".index", b"\2\0\0\0\0\0\0", "must hold whole numbers of uint64"),
    "index past the end": (
        ".index",
        np.array([2, 4], "<u8").tobytes(),
        "must rise to the 3 tokens of the .ds, got 4",
    ),
    "index short of the end": (
        ".index",
        np.array([2], "<u8").tobytes(),
        "must rise to the 3 tokens of the .ds, got 2",
    ),
    "index backwards": (".index", np.array([3, 2, 3], "<u8").tobytes(), "ends of documents must rise"),
    "mask": (".loss", b"\1\1", "must hold 3 numbers of uint8 .* got 2 bytes"),
}


@pytest.mark.parametrize(("ending", "data", "message"), FORGED.values(), ids=FORGED)
def test_a_forged_file_is_refused(datatrove, tmp_path, ending, data, message):
    """[S.e]"""
    file = file_of(datatrove, tmp_path, [[1, 2], [3]], save_loss_metadata=True)
    (tmp_path / f"{file.name}{ending}").write_bytes(data)
    with pytest.raises(StoreCorruptError, match=message):
        open_store(file)
