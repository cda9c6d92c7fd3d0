"""Compressed files are read whole or refused, and never decompressed without bound."""

import gzip

import pytest
import zstandard
from tests.documents.corpora import CONTENTS, TEXTS, lines_of, read, texts_of

from tokenmill.documents.opening import gzip_blocks, zstd_blocks
from tokenmill.errors import DocumentError

KINDS = {".gz": (gzip.compress, gzip_blocks), ".zst": (zstandard.compress, zstd_blocks)}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_truncated_file_is_an_error_wherever_it_ends(tmp_path, kind):
    """Never a silent short read [C1]; cutting between two whole members leaves a whole file."""
    compress, _ = KINDS[kind]
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
    data = KINDS[kind][0](CONTENTS[suffix](TEXTS * 20))
    for end in (0, 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(DocumentError, match=rf"input\{suffix}\{kind}: must be (a whole|an intact)"):
            read(path)


def test_damaged_file_is_an_error_that_names_it(tmp_path, kind):
    data = lines_of([str(number) for number in range(1000)])
    path = tmp_path / f"input.jsonl{kind}"
    # zstd checks contents only if asked to, as its command line does.
    packed = gzip.compress(data) if kind == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress(data)
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
    compress, decompress = KINDS[kind]
    path = tmp_path / "bomb"
    path.write_bytes(compress(bytes(10 << 20)))
    with path.open("rb") as file:
        blocks = decompress(file, str(path), cap_bytes=1 << 20)
        sizes: list[int] = []
        with pytest.raises(DocumentError, match=r"bomb: must decompress to at most 1048576 bytes, got more"):
            sizes.extend(map(len, blocks))
        assert sum(sizes) <= 1 << 20
    with path.open("rb") as file:
        assert sum(map(len, decompress(file, str(path), cap_bytes=10 << 20))) == 10 << 20


def test_bomb_of_many_frames_is_refused_too(tmp_path, kind):
    """[S.e]"""
    compress, decompress = KINDS[kind]
    path = tmp_path / "bomb"
    path.write_bytes(compress(bytes(1000)) * 2000)
    with path.open("rb") as file, pytest.raises(DocumentError, match="must decompress to at most 100000 bytes"):
        list(decompress(file, str(path), cap_bytes=100_000))


def test_window_that_a_header_claims_is_not_allocated(tmp_path):
    """A frame may ask for gigabytes of memory before its first byte [S.e]."""
    path = tmp_path / "input.jsonl.zst"
    huge = zstandard.ZstdCompressionParameters(window_log=30)
    stream = zstandard.ZstdCompressor(compression_params=huge).compressobj()
    path.write_bytes(stream.compress(lines_of(TEXTS)) + stream.flush())
    with pytest.raises(DocumentError, match=r"input\.jsonl\.zst: must be an intact zstd file, got .*memory"):
        read(path)
