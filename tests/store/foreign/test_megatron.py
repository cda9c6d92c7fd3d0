from __future__ import annotations

import struct

import numpy as np
import pytest

from tokenmill.errors import StoreCorruptError, StoreError, StoreMissingError
from tokenmill.store import import_store, open_store


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
    "moved": (edit(34 + 4 * 22 + 8, "<q", 2), "sequences must lie one behind the other to be read in place"),
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
