"""The members of a tar archive as a stream: nothing is extracted, and no header is believed before the data."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from tokenmill.errors import DocumentError

_BLOCK = 512
_MAX_HEADER_BYTES = 1 << 20
_SKIP_BYTES = 1 << 20
_REGULAR = (b"0", b"\0", b"7")
_LONG_NAME, _EXTENDED, _SPARSE = b"L", b"x", b"S"


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A regular file in an archive."""

    name: str
    bytes: int


class TarStream:
    """Members one after another; the data of one is read, or passed over, before the next.

    Reads what tar, GNU tar and Python write: ustar, GNU long names, pax. Sparse members are refused.
    """

    def __init__(self, stream: BinaryIO, path: str, *, num_bytes: int | None) -> None:
        self._stream = stream
        self._path = path
        self._num_bytes = num_bytes
        """Size of the archive, if that is known: of a compressed one it is not."""
        self._position = 0
        self._left = 0
        """Bytes up to the next header."""

    def members(self) -> Iterator[Member]:
        """Yield the regular files; raise DocumentError if the archive is damaged or ends too early."""
        name: str | None = None
        size: int | None = None
        while header := self._header():
            kind, own_size = header[156:157], _number(header[124:136])
            if own_size is None:
                raise self._damaged("a size that is no number")
            if kind in (_LONG_NAME, _EXTENDED):
                data = self._small(own_size)
                if kind == _LONG_NAME:
                    name = _text(data)
                else:
                    name, size = _extended(data, name, size)
                continue
            if kind == _SPARSE:
                raise self._damaged("a sparse member")
            member = Member(name=name or _name(header), bytes=own_size if size is None else size)
            name = size = None
            self._begin(member.bytes)
            if kind in _REGULAR:
                yield member
            self._pass_over()

    def read(self, member: Member) -> bytes:
        """Return the data of the member that was yielded last."""
        parts: list[bytes] = []
        left = member.bytes
        while left:  # in blocks: what a header claims is not allocated before it is there
            parts.append(self._exactly(min(left, _SKIP_BYTES)))
            left -= len(parts[-1])
        self._left -= member.bytes
        return b"".join(parts)

    def _header(self) -> bytes:
        """Return the next header, nothing at the end of the archive."""
        header = self._exactly(_BLOCK)
        if not header.strip(b"\0"):
            return b""
        stored = _number(header[148:156])
        summed = header[:148] + b" " * 8 + header[156:]
        # Some programs have summed bytes above 127 as negative numbers.
        if stored != sum(summed) and stored != sum(summed) - 256 * sum(byte > 127 for byte in summed):
            raise self._damaged("a header with a wrong checksum")
        return header

    def _begin(self, size: int) -> None:
        if self._num_bytes is not None and size > self._num_bytes - self._position:
            raise self._damaged(f"a member of {size} bytes where {self._num_bytes - self._position} are left")
        self._left = -(-size // _BLOCK) * _BLOCK

    def _pass_over(self) -> None:
        if self._left and self._stream.seekable():
            # All but the last byte: a seek beyond the end would go unnoticed.
            self._stream.seek(self._left - 1, io.SEEK_CUR)
            self._position += self._left - 1
            self._left = 1
        while self._left:
            self._left -= len(self._exactly(min(self._left, _SKIP_BYTES)))

    def _small(self, size: int) -> bytes:
        """Return the data of a header that goes on; such are small."""
        if size > _MAX_HEADER_BYTES:
            raise self._damaged(f"a header of {size} bytes")
        self._begin(size)
        data = self._exactly(size)
        self._left -= size
        self._pass_over()
        return data

    def _exactly(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._position += len(data)
        if len(data) < size:
            raise DocumentError(
                f"{self._path}: must be a whole tar archive, got one that ends too early; copy or download it again"
            )
        return data

    def _damaged(self, what: str) -> DocumentError:
        return DocumentError(
            f"{self._path}: must be an intact tar archive of regular files, got {what} before byte "
            f"{self._position}; copy or download it again, or pack it anew"
        )


def _number(field: bytes) -> int | None:
    """Return a number of a header: octal digits, or 256-based where the first bit is set; None if negative."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip()
    return int(digits, 8) if digits and not digits.strip(b"01234567") else None if digits else 0


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode(errors="replace")


def _extended(data: bytes, name: str | None, size: int | None) -> tuple[str | None, int | None]:
    """Read the path and size of a pax header: lines of `length key=value`."""
    while data:
        digits, _, _ = data.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 9 else 0
        key, equals, value = data[len(digits) + 1 : length].partition(b"=")
        if not equals:
            break
        if key == b"path":
            name = value.removesuffix(b"\n").decode(errors="replace")
        elif key == b"size" and value.strip().isdigit() and len(value) < 20:
            size = int(value)
        data = data[length:]
    return name, size
