"""Files are opened as listed, read whole or refused, and never decompressed without bound."""

import bz2
import gzip
import lzma
import os

import pytest
import zstandard
from tests.documents.corpora import CONTENTS, TEXTS, lines_of, read, texts_of

from tokenmill.documents import file_digest, find_files
from tokenmill.documents.streams import decompressed
from tokenmill.errors import DocumentError

KIB = 1 << 10
KINDS = {".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


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
    with pytest.raises(DocumentError, match=r"a\.jsonl: cannot be read: No such file.*; fix the path"):
        file_digest(listed)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_truncated_file_is_an_error_wherever_it_ends(tmp_path, kind):
    """Never a silent short read [C1]; cutting between two whole members leaves a whole file."""
    compress = KINDS[kind]
    first, second = compress(lines_of(TEXTS)), compress(lines_of(TEXTS))
    path = tmp_path / f"input.jsonl{kind}"
    for end in range(len(first + second)):
        path.write_bytes((first + second)[:end])
        if end == len(first):
            assert texts_of(read(path)) == TEXTS
        else:
            with pytest.raises(DocumentError, match=rf"input\.jsonl\{kind}: must be"):
                read(path)


@pytest.mark.parametrize("suffix", CONTENTS)
def test_truncated_file_of_any_format_is_an_error(tmp_path, suffix, kind):
    """[C1]"""
    path = tmp_path / f"input{suffix}{kind}"
    data = KINDS[kind](CONTENTS[suffix](TEXTS * 20))
    for end in (0, 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(DocumentError, match=rf"input\{suffix}\{kind}: must be (a whole|an intact)"):
            read(path)


def test_damaged_file_is_an_error_that_names_it(tmp_path, kind):
    data = lines_of([str(number) for number in range(1000)])
    path = tmp_path / f"input.jsonl{kind}"
    # zstd checks contents only if asked to, as its command line does.
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(data) if kind == ".zst" else KINDS[kind](data)
    for place in (0, len(packed) // 2, len(packed) - 1):
        broken = bytearray(packed)
        broken[place] ^= 0x55
        path.write_bytes(broken)
        with pytest.raises(DocumentError, match=rf"input\.jsonl\{kind}: must be"):
            read(path)
    path.write_bytes(packed + b"garbage")
    with pytest.raises(DocumentError, match=rf"input\.jsonl\{kind}: must be an intact"):
        read(path)


def test_file_that_decompresses_beyond_the_cap_is_refused_and_up_to_it_is_read(tmp_path, kind):
    """[S.e]"""
    compress = KINDS[kind]
    path = tmp_path / f"bomb.txt{kind}"
    path.write_bytes(compress(bytes(10 << 20)))
    (listed,) = find_files(path).files
    with path.open("rb") as file:
        blocks = decompressed(file, listed, cap_bytes=1 << 20)
        sizes: list[int] = []
        with pytest.raises(DocumentError, match=rf"\{kind}: must hold at most 1048576 bytes, compressed"):
            sizes.extend(map(len, blocks))
        assert sum(sizes) <= 1 << 20
    with path.open("rb") as file:
        assert sum(map(len, decompressed(file, listed, cap_bytes=10 << 20))) == 10 << 20


def test_bomb_of_many_frames_is_refused_too(tmp_path, kind):
    """[S.e]"""
    compress = KINDS[kind]
    path = tmp_path / f"bomb.txt{kind}"
    path.write_bytes(compress(bytes(1000)) * 2000)
    (listed,) = find_files(path).files
    with path.open("rb") as file, pytest.raises(DocumentError, match="must hold at most 100000 bytes"):
        list(decompressed(file, listed, cap_bytes=100_000))


def test_padding_between_streams_of_xz_is_passed_over(tmp_path):
    """[C1] However long; what is no stream behind it is refused."""
    path = tmp_path / "input.jsonl.xz"
    packed = lzma.compress(lines_of(TEXTS))
    path.write_bytes(packed + bytes(4) + packed + bytes(600 * KIB) + packed)
    assert texts_of(read(path)) == TEXTS * 3
    path.write_bytes(packed + bytes(600 * KIB) + b"x" + packed)
    with pytest.raises(DocumentError, match=r"input\.jsonl\.xz: must be an intact \.xz file"):
        read(path)


def test_window_that_a_header_claims_is_not_allocated(tmp_path):
    """A frame may ask for gigabytes of memory before its first byte [S.e]."""
    path = tmp_path / "input.jsonl.zst"
    huge = zstandard.ZstdCompressionParameters(window_log=30)
    stream = zstandard.ZstdCompressor(compression_params=huge).compressobj()
    path.write_bytes(stream.compress(lines_of(TEXTS)) + stream.flush())
    with pytest.raises(DocumentError, match=r"input\.jsonl\.zst: must be an intact .zst file, got .*memory"):
        read(path)
