"""Input files as blocks of bytes, and digests of their content.

A compressed file is read to its end or raises an error: it never ends early without one.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import BufferedReader, FileIO
from typing import BinaryIO

import zstandard

from tokenmill.documents.units import MAX_EXPANSION, InputFile, Piece
from tokenmill.errors import DocumentError

BLOCK_BYTES = 1 << 17
_SAMPLE_BYTES = 64 << 10
_DIGEST_BLOCK_BYTES = 1 << 20
_COMPRESSED_BYTES = 1 << 18
_CAP_BYTES = 4 << 30
"""Decompressed size that every file may reach, however small it is; larger files get `max_expansion` times their
size."""
_WINDOW_BYTES = 128 << 20
# What `zstd -d` takes without being asked for more; the window is memory that a frame's header may claim.
_ZSTD_FEED = 256
# A block of zstd takes at least 4 bytes and gives at most 128 KiB, so that one feed gives 8 MiB at the very
# worst. Larger feeds are no faster: 650 MB/s against 700 on source code.


def most_bytes(size: int, max_expansion: int) -> int:
    """Return the limit of decompressed bytes for a file of this size."""
    return max(_CAP_BYTES, max_expansion * size)


def too_much(path: str, most: int) -> DocumentError:
    """Return the error of a file that holds more."""
    return DocumentError(
        f"{path}: must hold at most {most} bytes, compressed or encoded, got more; "
        "raise max_expansion, or decompress it first, if that is meant"
    )


def decompressed(
    stream: BinaryIO, file: InputFile, *, cap_bytes: int | None = None, max_expansion: int = MAX_EXPANSION
) -> Iterator[bytes]:
    """Decompress an open file, of any number of members or frames, into blocks."""
    most = most_bytes(os.fstat(stream.fileno()).st_size, max_expansion) if cap_bytes is None else cap_bytes
    size = 0
    try:
        for block in _DECOMPRESS[file.compression](stream):
            size += len(block)
            if size > most:
                raise too_much(file.path, most)
            yield block
        if stream.tell() == 0:
            raise EOFError
    except EOFError:
        raise DocumentError(
            f"{file.path}: must be a whole compressed file, got one that ends too early; copy or download it again"
        ) from None
    except (OSError, zlib.error, zstandard.ZstdError, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of what is on it
            raise
        raise DocumentError(
            f"{file.path}: must be an intact {file.compression} file, got {error}; "
            "copy or download it again, or fix its name"
        ) from None


def _gzip_blocks(stream: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=stream) as members:
        while block := members.read(_COMPRESSED_BYTES):
            yield block


def _stream_blocks(
    stream: BinaryIO, new: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]
) -> Iterator[bytes]:
    """Decompress bzip2 or xz; unlike the file classes of the standard library, reject garbage after a stream."""
    decompressor = new()
    while True:
        feed = b""
        if decompressor.eof:  # another stream may follow, after a padding of zeros
            feed = decompressor.unused_data.lstrip(b"\0")
            while not feed:
                if not (block := stream.read(_COMPRESSED_BYTES)):
                    return
                feed = block.lstrip(b"\0")
            decompressor = new()
        elif decompressor.needs_input and not (feed := stream.read(_COMPRESSED_BYTES)):
            raise EOFError
        yield decompressor.decompress(feed, _COMPRESSED_BYTES)


def _zstd_blocks(stream: BinaryIO) -> Iterator[bytes]:
    context = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    frame = context.decompressobj()
    started = False
    ready: list[bytes] = []
    size = 0
    while feed := stream.read(_ZSTD_FEED):
        while feed:
            block = frame.decompress(feed)
            ready.append(block)
            size += len(block)
            started, feed = not frame.eof, b""
            if frame.eof:
                feed, frame = frame.unused_data, context.decompressobj()
        if size >= _COMPRESSED_BYTES:
            # What was compressed a thousandfold comes in large blocks, which are better not copied.
            yield from ready if size > 4 * _COMPRESSED_BYTES else [b"".join(ready)]
            ready.clear()
            size = 0
    if started:
        raise EOFError
    yield b"".join(ready)


_DECOMPRESS: Mapping[str, Callable[[BinaryIO], Iterator[bytes]]] = {
    ".gz": _gzip_blocks,
    ".zst": _zstd_blocks,
    ".bz2": partial(_stream_blocks, new=bz2.BZ2Decompressor),
    ".xz": partial(_stream_blocks, new=partial(lzma.LZMADecompressor, memlimit=_WINDOW_BYTES)),
}
"""Ending of a file's name -> what decompresses it; one that is cut off raises EOFError."""


def open_input(file: InputFile, *, exact: bool) -> BinaryIO:
    """Open a file that has not shrunk since it was listed; with `exact`, its size must be the same."""
    stream = _open(file)
    size = os.fstat(stream.fileno()).st_size
    if size < file.bytes or (exact and size != file.bytes):
        stream.close()
        raise _changed(file)
    return stream


@contextmanager
def open_blocks(
    piece: Piece, max_bytes: int, max_expansion: int = MAX_EXPANSION
) -> Iterator[tuple[Iterator[bytes], Callable[[], int]]]:
    """Open a file: its content in blocks of at most `max_bytes`, and a function for the bytes read so far."""
    file = piece.file
    with open_input(file, exact=bool(file.compression)) as stream:
        blocks: Iterator[bytes]
        if file.compression:
            blocks = (
                block[begin : begin + max_bytes]  # the block itself, if it is as short
                for block in decompressed(stream, file, max_expansion=max_expansion)
                for begin in range(0, len(block), max_bytes)
            )
        else:
            blocks = file_blocks(stream, file, 0, file.bytes, min(BLOCK_BYTES, max_bytes))
        yield blocks, stream.tell


def file_blocks(stream: BinaryIO, file: InputFile, begin: int, end: int, block_bytes: int) -> Iterator[bytes]:
    """Yield the bytes from `begin` to `end`; raise if the file has become shorter."""
    stream.seek(begin)
    while begin < end:
        block = stream.read(min(block_bytes, end - begin))
        if not block:
            raise _changed(file)
        begin += len(block)
        yield block


def file_digest(file: InputFile) -> str:
    """Return 32 hex digits of the size of a file and of its first, middle and last 64 KiB.

    A change of other bytes that keeps the size is not detected, so builds use the mtime and `content_digest` too.
    """
    import xxhash

    with _open(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
        for begin in (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES):
            stream.seek(max(begin, 0))
            digest.update(stream.read(_SAMPLE_BYTES))
    return str(digest.hexdigest())


def content_digest(file: InputFile, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Return 32 hex digits of all bytes of a file; `on_bytes` is called with the number of bytes read so far."""
    import xxhash

    digest, done, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_DIGEST_BLOCK_BYTES))
    with _open(file) as stream:
        while size := stream.raw.readinto(buffer):
            digest.update(buffer[:size])
            done += size
            on_bytes(done)
    return str(digest.hexdigest())


def _open(file: InputFile) -> BufferedReader:
    try:
        return BufferedReader(FileIO(file.path), BLOCK_BYTES)
    except OSError as error:
        raise _unreadable(file, error) from None


def status_of(file: InputFile) -> os.stat_result:
    """Return the status of a file that still has the size it was listed with; raises DocumentError."""
    try:
        status = os.stat(file.path)
    except OSError as error:
        raise _unreadable(file, error) from None
    if status.st_size != file.bytes:
        raise _changed(file)
    return status


def is_changed(file: InputFile) -> bool:
    """Return whether a file is gone, or its size is not the one it was listed with."""
    try:
        return os.stat(file.path).st_size != file.bytes
    except OSError:
        return True


def _unreadable(file: InputFile, error: OSError) -> DocumentError:
    return DocumentError(f"{file.path}: cannot be read: {error.strerror}; fix the path or its permissions")


def _changed(file: InputFile) -> DocumentError:
    return DocumentError(
        f"{file.path}: must keep its {file.bytes} bytes while it is read, got another size; "
        "let nothing write to it and start again"
    )
