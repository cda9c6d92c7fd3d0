"""WebDataset archives: members of one name but for their endings are the fields of one record."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from tokenmill.documents import streams, units
from tokenmill.documents.lines import document_of, load, refuse_surrogates
from tokenmill.errors import DocumentError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The members of a tar archive as a stream: nothing is extracted, and no header is trusted before the data.

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
    """Members one after another; the data of each is read, or skipped, before the next.

    Reads what tar, GNU tar and Python write: ustar, GNU long names, pax. Sparse members are refused.
    """

    def __init__(self, stream: BinaryIO, path: str, *, num_bytes: int | None) -> None:
        self._stream = stream
        self._path = path
        self._num_bytes = num_bytes
        """Size of the archive; None for a compressed one, as it is unknown."""
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
                raise self._damaged("a size that is not a number")
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
            self._skip_rest()

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

    def _skip_rest(self) -> None:
        """Go to the next header."""
        if self._left and self._stream.seekable():
            # All but the last byte: a seek beyond the end would go unnoticed.
            self._stream.seek(self._left - 1, io.SEEK_CUR)
            self._position += self._left - 1
            self._left = 1
        while self._left:
            self._left -= len(self._exactly(min(self._left, _SKIP_BYTES)))

    def _small(self, size: int) -> bytes:
        """Return the data of a long name or a pax header, which is small."""
        if size > _MAX_HEADER_BYTES:
            raise self._damaged(f"a header of {size} bytes")
        self._begin(size)
        data = self._exactly(size)
        self._left -= size
        self._skip_rest()
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
    begin = 0
    while begin < len(data):
        digits = data[begin : data.find(b" ", begin, begin + 9)]
        length = int(digits) if digits.isdigit() and len(digits) < 9 else 0
        key, equals, value = data[begin + len(digits) + 1 : begin + length].partition(b"=")
        if not equals:
            break
        if key == b"path":
            name = value.removesuffix(b"\n").decode(errors="replace")
        elif key == b"size" and value.strip().isdigit() and len(value) < 20:
            size = int(value)
        begin += length
    return name, size


KEY = "__key__"
_JSON = "json"
_TEXT = ("txt", "text", "md")
_DEFAULT = "text"
"""This text field is also looked for in the member `txt`, as most archives call it."""
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
"""A key, which goes up to the first dot of the file name, and an ending."""
_RECORDS = 256


def _read(piece: units.Piece, options: units.ReadOptions) -> Iterator[units.Group]:
    """Read all records from the start of an archive; members that are neither text nor JSON are left out."""
    path = piece.file.path
    with streams.open_input(piece.file, exact=True) as file:
        blocks: Iterator[bytes] = iter(())
        tar = TarStream(file, path, num_bytes=piece.file.bytes)
        if piece.file.compression:
            blocks = streams.decompressed(file, piece.file, max_expansion=options.max_expansion)
            stream = io.BufferedReader(BlockStream(blocks), streams.BLOCK_BYTES)
            tar = TarStream(cast("BinaryIO", stream), path, num_bytes=None)
        group = units.Group()
        for sample in _samples(tar, options):
            try:
                group.documents.append(sample.document())
                group.size += sample.size
            except units.RecordError as error:
                group.bad.append(error.at(group.num_lines))
            group.position = file.tell()
            if group.num_lines >= min(_RECORDS, options.batch_documents) or group.size >= options.batch_bytes:
                yield group
                group = units.Group()
        for _ in blocks:
            pass  # what stands behind the end of the archive: a checksum, which may be cut off
        if group.num_lines:
            yield group


WEBDATASET = units.Format(counts="member", read=_read)


class _Sample:
    """The members of one key, as far as they have been read."""

    def __init__(self, key: str, options: units.ReadOptions) -> None:
        self.key = key
        self._options = options
        self.size = 0
        self._fields: dict[str, Any] = {KEY: key}
        self._spare: list[tuple[str, bytes | None]] = []
        """Members `json` that were not asked for but may hold fields: name, and the content of the first unless it
        is too long. At most two are kept, to tell that there are several."""
        self._name_bytes = 0
        self._error: units.RecordError | None = None

    def add(self, ending: str, member: Member, tar: TarStream) -> None:
        """Read a member, if it is needed and the record is still good."""
        kind = ending.rpartition(".")[2]
        if self._error is not None or (kind != "json" and kind not in _TEXT):
            return
        if not self._needs(ending):
            if ending == _JSON and len(self._spare) < 2:
                fits = not self._spare and member.bytes <= self._options.max_record_bytes
                self._spare.append((member.name, tar.read(member) if fits else None))
            return
        try:
            if ending in self._fields:
                raise units.RecordError("duplicate", f"two members {member.name!r}")
            self.size += member.bytes
            self._name_bytes += len(ending)
            if self.size + self._name_bytes > self._options.max_record_bytes:
                raise units.RecordError("too_long", f"{self.size} bytes up to {member.name!r}")
            self._fields[ending] = _value(tar.read(member), kind)
        except units.RecordError as error:
            is_named = repr(member.name) in error.detail
            detail = error.detail if is_named else f"{error.detail} in {member.name!r}"
            self._error = units.RecordError(error.reason, detail)
            self._fields.clear()

    def document(self) -> object:
        """Return the text or the record."""
        if self._error is not None:
            raise self._error
        field = self._options.text_field
        self._complete((field,) if field is not None else self._options.fields or ())
        if field is not None and field not in self._fields:
            self._complete((field.partition(".")[0],))
        try:
            return document_of(self._fields, self._options)
        except units.RecordError as error:
            raise units.RecordError(error.reason, f"{error.detail} of {self.key!r}") from None

    def _needs(self, ending: str) -> bool:
        field, fields = self._options.text_field, self._options.fields
        if field is not None:
            return ending in (field, field.partition(".")[0]) or (field == _DEFAULT and ending == "txt")
        return fields is None or ending in fields or (_DEFAULT in fields and ending == "txt")

    def _complete(self, names: Sequence[str]) -> None:
        """Look for fields that have no member of their own: `text` in `txt`, others in the object of `json`."""
        for name in names:
            if name == _DEFAULT and "txt" in self._fields:
                self._fields.setdefault(name, self._fields["txt"])
            if name not in self._fields and name != _JSON and isinstance(inner := self._inner(), dict):
                self._fields.update({name: inner[name]} if name in inner else {})

    def _inner(self) -> object:
        if self._spare and _JSON not in self._fields:
            (name, content), *others = self._spare
            if others:
                raise units.RecordError("duplicate", f"two members {name!r}")
            if content is None:
                raise units.RecordError("too_long", f"more than {self._options.max_record_bytes} bytes in {name!r}")
            self.size += len(content)
            self._spare.clear()
            try:
                self._fields[_JSON] = _value(content, _JSON)
            except units.RecordError as error:
                raise units.RecordError(error.reason, f"{error.detail} in {name!r}") from None
        return self._fields.get(_JSON)


def _samples(tar: TarStream, options: units.ReadOptions) -> Iterator[_Sample]:
    sample: _Sample | None = None
    for member in tar.members():
        parts = _NAME.fullmatch(member.name)
        if parts is None:  # a member without an ending, or a hidden one
            continue
        key, ending = parts.group(1), parts.group(2).lower()
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = _Sample(key, options)
        sample.add(ending, member, tar)
    if sample is not None:
        yield sample


def _value(data: bytes, kind: str) -> object:
    if kind == "json":
        value, is_unicode = load(data)
        if not is_unicode:
            refuse_surrogates(value)
        return value
    return units.decode_utf8(data)
