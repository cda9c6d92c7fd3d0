"""Readers of the formats of other projects: what a header claims is checked before it is believed."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ConfigError, StoreCorruptError, StoreError, StoreMissingError
from tokenmill.store import import_store, open_store

# Raw files: the dtype is given or proven, never guessed from a size.


def test_without_a_word_on_the_dtype_raw_files_are_refused(tmp_path):
    np.arange(8, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(StoreError, match="dtype of files without a header must be said, got none; say dtype="):
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


# Headers of numpy and llm.c, tables of OLMo.


def npy(folder, array, name="a.npy"):
    np.save(folder / name, array, allow_pickle=array.dtype == object)
    return folder / name


def test_every_row_of_two_dimensions_is_a_document(tmp_path):
    file = npy(tmp_path, np.arange(12, dtype=np.uint16).reshape(3, 4))
    store = open_store(file, eos_id=5)
    assert store.document_offsets(0, 3).tolist() == [0, 4, 8, 12]
    assert store.fetch(0, 12, "sequence").tolist() == list(range(12))


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.asfortranarray(np.arange(12, dtype=np.uint16).reshape(3, 4)), r"columns come first \(Fortran order\)"),
        (np.arange(12, dtype=">u2"), "big-endian"),
        (np.arange(12, dtype=np.int64), "its ids are int64, 8 bytes each"),
        (np.arange(12, dtype=np.uint64), "its ids are uint64, 8 bytes each"),
    ],
)
def test_what_cannot_be_mapped_is_pointed_to_import_which_reads_it(tmp_path, array, why):
    file = npy(tmp_path, array)
    with pytest.raises(
        StoreError, match=rf"must be mapped as it is, but .*{why}; convert it with `tokenmill import`"
    ):
        open_store(file)
    import_store(file, out=tmp_path / "ours")
    assert open_store(tmp_path / "ours").fetch(0, 12, "sequence").tolist() == list(range(12))


@pytest.mark.parametrize(
    "array",
    [
        np.array([{"a": 1}], object),
        np.zeros(4, np.float32),
        np.zeros((2, 2, 2), np.uint16),
        np.array(5, np.uint16),
        np.zeros(3, [("a", "<u2")]),
    ],
    ids=["objects", "floats", "three dimensions", "no dimension", "records"],
)
def test_what_is_no_array_of_ids_is_refused(tmp_path, array):
    """[S.a]"""
    with pytest.raises(StoreError, match="must be whole numbers in one or two dimensions, got"):
        open_store(npy(tmp_path, array))


def header(text: str) -> bytes:
    data = text.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(data).to_bytes(2, "little") + data


HOSTILE = {
    "cut header": b"\x93NUMPY\x01\x00\xff",
    "version 9": b"\x93NUMPY\x09\x00" + b"\0" * 100,
    "no dictionary": header("[1, 2]"),
    "a call": header("{'descr': __import__('os').system('touch owned'), 'fortran_order': False, 'shape': (1,)}"),
    "a billion ids": header("{'descr': '<u2', 'fortran_order': False, 'shape': (1000000000,)}") + b"\0\0",
    "more than 64 bits": header("{'descr': '<u2', 'fortran_order': False, 'shape': (4294967296, 4294967296)}"),
    "fewer ids than bytes": header("{'descr': '<u2', 'fortran_order': False, 'shape': (1,)}") + b"\0" * 8,
    "a negative size": header("{'descr': '<u2', 'fortran_order': False, 'shape': (-4,)}"),
    "deep brackets": b"\x93NUMPY\x02\x00" + (9000).to_bytes(4, "little") + b"(" * 9000,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_forged_header_of_numpy_is_refused(tmp_path, monkeypatch, data):
    """[S.d, S.e]"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(StoreError, match=r"a\.npy: .*got .*; "):
        open_store(tmp_path / "a.npy")
    assert not (tmp_path / "owned").exists()


def test_a_cut_file_of_numpy_is_refused(tmp_path):
    file = npy(tmp_path, np.arange(100, dtype=np.uint16))
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(
        StoreCorruptError, match=r"must hold 100 numbers of uint16 after 128 bytes .* got 197 bytes"
    ):
        open_store(file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda tools: tools.llmc_bytes([1, 2, 3])[:-2], "must hold 3 numbers of uint16 .* got 4 bytes there"),
        (lambda tools: tools.llmc_bytes([1, 2, 3]) + b"\0\0", "must hold 3 numbers of uint16 .* got 8 bytes there"),
        (
            lambda tools: tools.llmc_bytes([1, 2, 3])[:600],
            "must begin with the header of llm.c, got magic 20240520",
        ),
    ],
    ids=["cut", "longer", "cut header"],
)
def test_a_count_of_llmc_that_is_not_that_of_the_file_is_refused(tmp_path, tools, data, message):
    """[S.e]"""
    (tmp_path / "a.bin").write_bytes(data(tools))
    with pytest.raises(StoreCorruptError, match=message):
        open_store(tmp_path)


def test_another_version_of_llmc_is_not_taken_for_it(tmp_path, tools):
    (tmp_path / "a.bin").write_bytes(tools.llmc_bytes([1, 2, 3], version=2))
    with pytest.raises(StoreError, match="dtype of files without a header must be said"):
        open_store(tmp_path)
    with pytest.raises(StoreCorruptError, match="got magic 20240520 version 2"):
        open_store(tmp_path, format="llmc")


def test_ids_of_llmc_that_say_16_bits_are_not_read_as_32(tmp_path, tools):
    (tmp_path / "a.bin").write_bytes(tools.llmc_bytes([1, 2, 3, 4]))
    with pytest.raises(ConfigError, match="dtype must be that of the file, uint16, got uint32"):
        open_store(tmp_path, dtype="uint32")


def olmo(folder, rows, size=10):
    np.arange(size, dtype=np.uint32).tofile(folder / "a.npy")
    with gzip.open(folder / "a.csv.gz", "wt") as table:
        table.write(rows)
    return folder / "a.npy"


@pytest.mark.parametrize(
    ("rows", "offsets"),
    [
        ("0,4\n4,10\n", [0, 4, 10]),
        ("start,end,id\n0,4,x\n4,4,y\n", [0, 4, 4, 10]),
        ('0,3,"a\nb",1\n', [0, 3, 10]),
        ("", [0, 10]),
    ],
    ids=["plain", "named columns, an empty document", "a line break inside quotes", "no rows"],
)
def test_rows_of_a_table_are_documents_and_the_rest_is_one_more(tmp_path, rows, offsets):
    store = open_store(olmo(tmp_path, rows), dtype="uint32")
    assert store.document_offsets(0, store.num_documents).tolist() == offsets


@pytest.mark.parametrize(
    "rows",
    ["0,11\n", "0,4\n5,10\n", "2,4\n", "0,4\n4,3\n", "0,x\n", "7\n", "-1,4\n", "0,4\n" + "x" * 70_000],
    ids=["past the end", "a gap", "not from 0", "backwards", "no number", "one column", "negative", "endless line"],
)
def test_a_table_that_cannot_be_right_is_refused(tmp_path, rows):
    """[S.e]"""
    with pytest.raises(
        StoreCorruptError, match=r"a\.csv\.gz: rows must be start, end, .* got .*remove it and give eos"
    ):
        open_store(olmo(tmp_path, rows), dtype="uint32")


@pytest.mark.parametrize("data", [b"no gzip", gzip.compress(b"0,4\n4,10\n")[:-9]], ids=["not gzip", "cut"])
def test_a_table_that_cannot_be_unpacked_is_refused(tmp_path, data):
    file = olmo(tmp_path, "")
    (tmp_path / "a.csv.gz").write_bytes(data)
    with pytest.raises(StoreCorruptError, match=r"a\.csv\.gz: rows must be"):
        open_store(file, dtype="uint32")


def test_without_a_table_documents_of_olmo_end_after_eos(tmp_path):
    np.array([5, 9, 6, 7, 9, 8], np.uint16).tofile(tmp_path / "a.npy")
    store = open_store(tmp_path, dtype="uint16", eos_id=9)
    assert store.document_offsets(0, 3).tolist() == [0, 2, 5, 6]


def test_a_file_with_a_header_is_not_read_as_one_without(tmp_path):
    file = npy(tmp_path, np.arange(4, dtype=np.uint16))
    with pytest.raises(StoreError, match="a file of OLMo must have no header, got one of numpy's"):
        open_store(file, format="olmo", dtype="uint16")


# Megatron.


@pytest.fixture
def pair(write):
    made = write("megatron-u2")
    return made.path.with_suffix(".bin"), made.path.with_suffix(".idx")


def test_sequences_behind_the_last_document_are_one_more(megatron, tools):
    """A builder that did not end its last document; no token is lost."""
    docs = tools.documents(9)
    store = open_store(megatron / "open")
    assert store.fetch(0, store.num_tokens, "sequence").tolist() == docs[0] + docs[1]
    assert store.document_offsets(0, 2).tolist() == [0, len(docs[0]), len(docs[0]) + len(docs[1])]


def test_64_bit_ids_are_imported(megatron, tools, tmp_path):
    with pytest.raises(StoreError, match="its ids are int64, 8 bytes each; convert it with `tokenmill import`"):
        open_store(megatron / "i8")
    import_store(megatron / "i8", out=tmp_path / "ours")
    store = open_store(tmp_path / "ours")
    tokens, offsets = tools.joined(tools.documents(9))
    assert store.fetch(0, store.num_tokens, "sequence").tolist() == tokens
    assert store.document_offsets(0, store.num_documents).tolist() == offsets
    assert store.manifest.keys == {"sequence": "<u2"}


def test_multimodal_datasets_are_refused(megatron):
    with pytest.raises(StoreError, match=r"must be of text alone, got a mode for each sequence \(multimodal\)"):
        open_store(megatron / "multi")


def test_a_missing_half_is_named(pair):
    tokens, index = pair
    data = tokens.read_bytes()
    tokens.unlink()
    with pytest.raises(StoreMissingError, match=r"u2\.bin: must stand beside u2\.idx, got nothing there"):
        open_store(index)
    tokens.write_bytes(data)
    index.unlink()
    with pytest.raises(StoreMissingError, match=r"u2\.idx: must stand beside the \.bin, got nothing there"):
        open_store(tokens, format="megatron")


def edit(place, form, value):
    def change(data):
        struct.pack_into(form, data, place, value)
        return data

    return change


SEQUENCES, DOCUMENTS = 18, 26
FORGED = {
    "cut header": (lambda data: data[:20], "must begin with the header of Megatron"),
    "version": (edit(9, "<Q", 2), "must be version 1 with a known dtype, got version 2"),
    "dtype": (edit(17, "<B", 99), "got version 1, dtype code 99"),
    "more sequences": (edit(SEQUENCES, "<Q", 23), r"must have \d+ bytes for 23 sequences"),
    "endless sequences": (edit(SEQUENCES, "<Q", 2**63), r"bytes for 9223372036854775808 sequences"),
    "endless documents": (edit(DOCUMENTS, "<Q", 2**64 - 1), r"18446744073709551615 marks of documents"),
    "cut": (lambda data: data[:-1], r"must have \d+ bytes for 22 sequences and 12 marks of documents, got"),
    "a longer sequence": (edit(34, "<i", 8), "sequences must have the 303 tokens of the .bin together, got"),
    "a negative length": (edit(34, "<i", -3), "lengths of sequences must not be negative, got -3"),
    "moved": (edit(34 + 4 * 22 + 8, "<q", 2), "sequences must lie one after the other to be read in place"),
    "documents backwards": (edit(34 + 12 * 22 + 8, "<q", 9), "marks of documents must rise from 0 to at most 22"),
    "document past the end": (
        edit(34 + 12 * 22 + 8 * 11, "<q", 23),
        "marks of documents must rise from 0 to at most 22",
    ),
    "document before": (edit(34 + 12 * 22, "<q", -1), "marks of documents must rise from 0"),
}


@pytest.mark.parametrize(("change", "message"), FORGED.values(), ids=FORGED)
def test_a_forged_index_is_refused(pair, change, message):
    """[S.e]"""
    _, index = pair
    index.write_bytes(change(bytearray(index.read_bytes())))
    with pytest.raises(StoreError, match=message):
        open_store(index, format="megatron")


def test_tokens_cut_short_are_refused(pair):
    tokens, index = pair
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(
        StoreCorruptError, match=r"sequences must have the 302 tokens of the \.bin together, got 303"
    ):
        open_store(index)
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(StoreCorruptError, match="whole numbers of uint16"):
        open_store(index)


def test_floats_are_refused(pair):
    tokens, index = pair
    np.zeros(303, np.float32).tofile(tokens)
    data = bytearray(index.read_bytes())
    data[17] = 7
    index.write_bytes(data)
    with pytest.raises(StoreError, match="its ids are float32"):
        open_store(index)


# Datatrove.


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
        "must hold 4 numbers of uint16 after 0 bytes .* got 6 bytes",
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
    "index without end": (".index", bytes(8 * 1031), "not be many more documents than the 3 tokens, got 1031"),
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


@pytest.mark.parametrize(
    ("content", "got"), [(b"no array at all, just text", r"b'no array at all,'"), (b"", "an empty")]
)
def test_a_file_named_npy_that_is_none_is_told_as_such(tmp_path, content, got):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(
        StoreError, match=rf"a\.npy: must begin with the header of numpy, got {got}.*np\.save.*say dtype"
    ):
        open_store(tmp_path / "a.npy")
