"""Files are opened as listed, and a digest tells when they have changed."""

import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.documents import file_digest, find_files
from tokenmill.documents.opening import BlockStream
from tokenmill.errors import DocumentError

KIB = 1 << 10


@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(1, 50))
def test_lines_do_not_see_where_blocks_end(blocks, buffer_bytes):
    with io.BufferedReader(BlockStream(iter(blocks)), buffer_bytes) as stream:
        assert list(stream) == list(io.BytesIO(b"".join(blocks)))


@pytest.fixture
def big(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(os.urandom(1000 * KIB))
    return path


def digest_of(path):
    return file_digest(find_files(path).files[0])


def test_digest_is_32_hex_digits_and_depends_on_contents_alone(big, tmp_path):
    copy = tmp_path / "elsewhere.txt"
    copy.write_bytes(big.read_bytes())
    assert digest_of(copy) == digest_of(big)
    assert len(digest_of(big)) == 32
    assert int(digest_of(big), 16) >= 0


@pytest.mark.parametrize("place", [0, 64 * KIB - 1, 500 * KIB, 936 * KIB, 1000 * KIB - 1])
def test_digest_tells_a_change_at_the_start_middle_and_end(big, place):
    before = digest_of(big)
    data = bytearray(big.read_bytes())
    data[place] ^= 1
    big.write_bytes(data)
    assert digest_of(big) != before


@pytest.mark.parametrize("size", [0, 1, 64 * KIB, 100 * KIB])
def test_digest_tells_a_change_of_size(tmp_path, size):
    path = tmp_path / "a.jsonl"
    path.write_bytes(bytes(size))
    (listed,) = find_files(path).files
    before = file_digest(listed)
    path.write_bytes(bytes(size + 1))
    assert file_digest(listed) != before


def test_missing_file_is_an_error_with_the_way_out(big):
    (listed,) = find_files(big).files
    big.unlink()
    with pytest.raises(DocumentError, match=r"a\.jsonl: must be readable, got No such file.*; fix the path"):
        file_digest(listed)
