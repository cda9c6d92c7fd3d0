"""Opening an input file: as blocks of bytes, plain or decompressed, and as a digest of a little of it."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

import zstandard

from tokenmill.documents.units import InputFile, Piece
from tokenmill.errors import DocumentError

if TYPE_CHECKING:
    from typing_extensions import Buffer


# Compressed files as a stream of blocks: whole, or an error, never a silent short read.

COMPRESSED_BYTES = 1 << 18

CAP_BYTES = 4 << 30
CAP_RATIO = 256
"""A file may decompress to `CAP_BYTES`, or to `CAP_RATIO` times its size if that is more: far above what text comes
to, and a stop for a bomb, which has a thousandfold in gzip and thirty times that in zstd."""

_WINDOW_BYTES = 128 << 20
# What `zstd -d` takes without being asked for more; the window is memory that a frame's header may claim.
_ZSTD_FEED = 256
# A block of zstd takes at least 4 bytes and gives at most 128 KiB, so that one feed gives 8 MiB at the very
# worst. Larger feeds are no faster: 650 MB/s against 700 on source code.

Decompress = Callable[[BinaryIO, str], Iterator[bytes]]
"""Decompress an open file of the given path into blocks."""


def gzip_blocks(file: BinaryIO, path: str, *, cap_bytes: int | None = None) -> Iterator[bytes]:
    """Decompress a gzip file of any number of members; a truncated or damaged one raises DocumentError."""
    most = _most(file) if cap_bytes is None else cap_bytes
    size = 0
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            while block := stream.read(COMPRESSED_BYTES):
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
            if size >= COMPRESSED_BYTES:
                total += size
                if total > most:
                    raise _bomb(path, most)
                # What was compressed a thousandfold comes in large blocks, which are better not copied.
                yield from ready if size > 4 * COMPRESSED_BYTES else [b"".join(ready)]
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
        f"{path}: must decompress to at most {most} bytes, got more; decompress it first if that is meant"
    )


def _truncated(path: str) -> DocumentError:
    return DocumentError(
        f"{path}: must be a whole compressed file, got one that ends too early; copy or download it again"
    )


def _damaged(path: str, kind: str, error: Exception) -> DocumentError:
    return DocumentError(
        f"{path}: must be an intact {kind} file, got {error}; copy or download it again, or fix its name"
    )


BLOCK_BYTES = 1 << 17
_SAMPLE_BYTES = 64 << 10


def open_input(file: InputFile, *, exact: bool) -> BinaryIO:
    """Open a file that has not shrunk since it was listed; with `exact`, that has not changed its size at all."""
    stream = _open(file)
    size = os.fstat(stream.fileno()).st_size
    if size < file.bytes or (exact and size != file.bytes):
        stream.close()
        raise _changed(file)
    return stream


@contextmanager
def open_blocks(
    piece: Piece, decompress: Decompress | None, max_bytes: int
) -> Iterator[tuple[Iterator[bytes], Callable[[], int]]]:
    """Give the contents of a file in blocks of at most `max_bytes`, and how many of its bytes have been read."""
    with open_input(piece.file, exact=decompress is not None) as stream:
        if decompress is None:
            blocks = file_blocks(stream, piece.file, 0, piece.file.bytes, min(BLOCK_BYTES, max_bytes))
        else:
            blocks = _shorter(decompress(stream, piece.file.path), max_bytes)
        yield blocks, stream.tell


def _shorter(blocks: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    for block in blocks:
        for begin in range(0, len(block), max_bytes):
            yield block[begin : begin + max_bytes]  # the block itself, if it is as short


def file_blocks(stream: BinaryIO, file: InputFile, begin: int, end: int, block_bytes: int) -> Iterator[bytes]:
    """Yield the bytes from `begin` to `end`; raise if the file has become shorter."""
    stream.seek(begin)
    while begin < end:
        block = stream.read(min(block_bytes, end - begin))
        if not block:
            raise _changed(file)
        begin += len(block)
        yield block


def line_blocks(stream: BinaryIO, piece: Piece, block_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of the lines that start in a byte range; the last one may reach beyond it."""
    file, begin, end = piece.file, piece.begin, piece.end
    last = b"\n"
    # From the byte before: if it ends a line, the next line starts right at `begin`.
    blocks = file_blocks(stream, file, max(begin - 1, 0), end, block_bytes)
    if begin:
        for block in blocks:
            _, newline, last = block.partition(b"\n")
            if newline:
                break
        else:
            return  # a line that started earlier fills the whole range
        if last:
            yield last
        else:
            last = b"\n"
    for last in blocks:
        yield last
    if last.endswith(b"\n"):
        return
    for block in file_blocks(stream, file, end, file.bytes, block_bytes):
        line_end = block.find(b"\n") + 1
        yield block[:line_end] if line_end else block
        if line_end:
            return


class BlockStream(io.RawIOBase):
    """Blocks of any sizes as one file, for `io.BufferedReader` to read from."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Say that this can be read."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill the buffer as far as the current block goes; 0 at the end."""
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        target = memoryview(buffer)
        size = min(len(target), len(self._rest))
        target[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def file_digest(file: InputFile) -> str:
    """Return 32 hex digits that tell a changed file without reading it whole.

    They are of its size and of its first, middle and last 64 KiB, so a change of other bytes that keeps the size
    is not seen.
    """
    import xxhash

    with _open(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
        for begin in (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES):
            stream.seek(max(begin, 0))
            digest.update(stream.read(_SAMPLE_BYTES))
    return str(digest.hexdigest())


def _open(file: InputFile) -> BinaryIO:
    try:
        return open(file.path, "rb", buffering=BLOCK_BYTES)
    except OSError as error:
        raise DocumentError(
            f"{file.path}: must be readable, got {error.strerror}; fix the path or its rights"
        ) from None


def _changed(file: InputFile) -> DocumentError:
    return DocumentError(
        f"{file.path}: must keep its {file.bytes} bytes while it is read, got another size; "
        "let nothing write to it and start again"
    )
