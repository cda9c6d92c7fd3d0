"""Headers of numpy and llm.c, tables of OLMo: what they claim is checked before it is believed."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from tokenmill.errors import ConfigError, StoreCorruptError, StoreError
from tokenmill.store import import_store, open_store


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
        StoreCorruptError, match=r"must hold 100 numbers of uint16 behind 128 bytes .* got 197 bytes"
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
