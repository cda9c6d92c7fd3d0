"""Compressed files as a stream of blocks: whole, or an error, never a silent short read."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import zstandard

from tokenmill.errors import DocumentError

BLOCK_BYTES = 1 << 18

_ZSTD_FEED = 256
# A block of zstd takes at least 4 bytes and gives at most 128 KiB, so that one feed unfolds to 8 MiB at the very
# worst. Larger feeds are no faster: 650 MB/s against 700 on source code.


def gzip_blocks(file: BinaryIO, path: str) -> Iterator[bytes]:
    """Decompress a gzip file of any number of members; a truncated or damaged one raises DocumentError."""
    empty = True
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            while block := stream.read(BLOCK_BYTES):
                empty = False
                yield block
    except EOFError:
        raise _truncated(path) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, "gzip", error) from None
    if empty and file.tell() == 0:
        raise _truncated(path)


def zstd_blocks(file: BinaryIO, path: str) -> Iterator[bytes]:
    """Decompress a zstd file of any number of frames; a truncated or damaged one raises DocumentError."""
    context = zstandard.ZstdDecompressor()
    frame = context.decompressobj()
    started = False
    ready: list[bytes] = []
    size = 0
    try:
        while feed := file.read(_ZSTD_FEED):
            while feed:
                block = frame.decompress(feed)
                ready.append(block)
                size += len(block)
                started = True
                feed = b""
                if frame.eof:
                    feed = frame.unused_data
                    frame = context.decompressobj()
                    started = False
            if size >= BLOCK_BYTES:
                yield b"".join(ready)
                ready.clear()
                size = 0
    except zstandard.ZstdError as error:
        raise _damaged(path, "zstd", error) from None
    if started or file.tell() == 0:
        raise _truncated(path)
    if size:
        yield b"".join(ready)


def _truncated(path: str) -> DocumentError:
    return DocumentError(
        f"{path}: must be a whole compressed file, got one that ends too early; copy or download it again"
    )


def _damaged(path: str, kind: str, error: Exception) -> DocumentError:
    return DocumentError(
        f"{path}: must be an intact {kind} file, got {error}; copy or download it again, or fix its name"
    )
