"""Compressed files as a stream of blocks: whole, or an error, never a silent short read."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

import zstandard

from tokenmill.errors import DocumentError

BLOCK_BYTES = 1 << 18

CAP_BYTES = 4 << 30
CAP_RATIO = 256
"""A file may unfold to `CAP_BYTES`, or to `CAP_RATIO` times its size if that is more: far above what text comes to,
and a stop for a bomb, which has a thousandfold in gzip and thirty times that in zstd."""

_WINDOW_BYTES = 128 << 20
# What `zstd -d` takes without being asked for more; the window is memory that a frame's header may claim.
_ZSTD_FEED = 256
# A block of zstd takes at least 4 bytes and gives at most 128 KiB, so that one feed unfolds to 8 MiB at the very
# worst. Larger feeds are no faster: 650 MB/s against 700 on source code.

Unfold = Callable[[BinaryIO, str], Iterator[bytes]]
"""Decompress an open file of the given path into blocks."""


def gzip_blocks(file: BinaryIO, path: str, *, cap_bytes: int | None = None) -> Iterator[bytes]:
    """Decompress a gzip file of any number of members; a truncated or damaged one raises DocumentError."""
    most = _most(file) if cap_bytes is None else cap_bytes
    size = 0
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            while block := stream.read(BLOCK_BYTES):
                size += len(block)
                if size > most:
                    raise _bomb(path, most)
                yield block
    except EOFError:
        raise _truncated(path) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, "gzip", error) from None
    if not size and file.tell() == 0:
        raise _truncated(path)


def zstd_blocks(file: BinaryIO, path: str, *, cap_bytes: int | None = None) -> Iterator[bytes]:
    """Decompress a zstd file of any number of frames; a truncated or damaged one raises DocumentError."""
    most = _most(file) if cap_bytes is None else cap_bytes
    context = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    frame = context.decompressobj()
    started = False
    ready: list[bytes] = []
    size = total = 0
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
                total += size
                if total > most:
                    raise _bomb(path, most)
                # What unfolds a thousandfold comes in large blocks, which are better not copied.
                yield from ready if size > 4 * BLOCK_BYTES else [b"".join(ready)]
                ready.clear()
                size = 0
    except zstandard.ZstdError as error:
        raise _damaged(path, "zstd", error) from None
    if started or file.tell() == 0:
        raise _truncated(path)
    if total + size > most:
        raise _bomb(path, most)
    if size:
        yield b"".join(ready)


def _most(file: BinaryIO) -> int:
    return max(CAP_BYTES, CAP_RATIO * os.fstat(file.fileno()).st_size)


def _bomb(path: str, most: int) -> DocumentError:
    return DocumentError(
        f"{path}: must unfold to at most {most} bytes, got more; decompress it first if that is meant"
    )


def _truncated(path: str) -> DocumentError:
    return DocumentError(
        f"{path}: must be a whole compressed file, got one that ends too early; copy or download it again"
    )


def _damaged(path: str, kind: str, error: Exception) -> DocumentError:
    return DocumentError(
        f"{path}: must be an intact {kind} file, got {error}; copy or download it again, or fix its name"
    )
