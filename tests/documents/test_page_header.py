"""Headers of Parquet pages: what Arrow writes is read, and nothing else is taken for one."""

from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.documents.page_header import (
    DATA,
    DATA_V2,
    DICTIONARY,
    PLAIN,
    RLE_DICTIONARY,
    NotUnderstood,
    read_header,
    varint,
)


def written(path, **options):
    """Write a file of one column; return its bytes from its first page on."""
    pq.write_table(pa.table({"text": ["a", None, "bcd"]}), path, compression="none", **options)
    return path.read_bytes()[4:]


def test_pages_of_the_first_version_are_told(tmp_path):
    data = written(tmp_path / "a.parquet", use_dictionary=False, write_page_checksum=True)
    header, size = read_header(data)
    assert (header.kind, header.values, header.encoding, header.levels) == (DATA, 3, PLAIN, None)
    assert header.stored == header.unfolded
    assert header.crc is not None
    assert data[size + header.stored - 3 :][:3] == b"bcd"


def test_pages_of_the_second_version_are_told(tmp_path):
    header, _ = read_header(written(tmp_path / "a.parquet", use_dictionary=False, data_page_version="2.0"))
    assert (header.kind, header.values, header.encoding, header.crc) == (DATA_V2, 3, PLAIN, None)
    assert header.levels


def test_dictionaries_and_what_uses_them_are_told(tmp_path):
    data = written(tmp_path / "a.parquet")
    words, size = read_header(data)
    assert (words.kind, words.values) == (DICTIONARY, 2)
    rows, _ = read_header(data[size + words.stored :])
    assert (rows.kind, rows.values, rows.encoding) == (DATA, 3, RLE_DICTIONARY)


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False, "data_page_version": "2.0"}], ids=str)
def test_a_header_that_is_cut_short_asks_for_more(tmp_path, options):
    data = written(tmp_path / "a.parquet", **options)
    _, size = read_header(data)
    for end in range(size):
        with pytest.raises(IndexError):
            read_header(data[:end])
    assert read_header(data[:size]) == read_header(data)


@given(st.binary(max_size=80))
def test_other_bytes_are_no_header_or_one_that_makes_sense(data):
    """[S.e]"""
    try:
        header, size = read_header(data)
    except (IndexError, NotUnderstood):
        return
    assert 0 < size <= len(data)
    assert min(header.stored, header.unfolded, header.values) >= 0


@given(place=st.integers(0, 10**6), value=st.integers(1, 255))
def test_a_damaged_header_raises_nothing_else(tmp_path_factory, place, value):
    """[S.e]"""
    data = bytearray(written(tmp_path_factory.mktemp("page") / "a.parquet")[:60])
    data[place % len(data)] ^= value
    with suppress(IndexError, NotUnderstood):
        read_header(bytes(data))


@given(st.integers(0, 2**63 - 1), st.binary(max_size=3))
def test_numbers_are_read_wherever_they_stand(number, before):
    left, data = number, bytearray(before)
    while left >= 128:
        data.append(left & 127 | 128)
        left >>= 7
    data.append(left)
    assert varint(bytes(data), len(before)) == (number, len(data))


def test_numbers_without_an_end_are_refused():
    with pytest.raises(NotUnderstood):
        varint(b"\xff" * 100, 0)
