"""Opening an input file: as blocks of bytes, plain or unfolded, and as a digest of a little of it."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from tokenmill.documents.compressed import Unfold
from tokenmill.documents.units import InputFile, Piece
from tokenmill.errors import DocumentError

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
    piece: Piece, unfold: Unfold | None, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[Iterator[bytes], Callable[[], int]]]:
    """Give the contents of a whole file in blocks, and how many of its bytes have been read."""
    with open_input(piece.file, exact=unfold is not None) as stream:
        if unfold is None:
            yield file_blocks(stream, piece.file, 0, piece.file.bytes, block_bytes), stream.tell
        else:
            yield unfold(stream, piece.file.path), stream.tell


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
