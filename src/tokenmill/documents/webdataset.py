"""WebDataset archives: members of one name but for their endings are the fields of one record."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, cast

from tokenmill.documents.compressed import Unfold
from tokenmill.documents.json_values import RecordError, document_of, load, refuse_surrogates, utf8_detail
from tokenmill.documents.opening import BLOCK_BYTES, BlockStream, open_input
from tokenmill.documents.tar import Member, TarStream
from tokenmill.documents.units import BadRecord, Group, InputFile, Piece, ReadOptions, whole

KEY = "__key__"
_JSON = "json"
_TEXT = ("txt", "text", "md")
_DEFAULT = "text"
"""The text field that stands for `txt` as well, which archives of this kind call it."""
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
"""A key, which is all up to the first dot of the last part, and an ending."""
_RECORDS = 256


class WebDataset:
    """A tar archive, plain or compressed, read from its start."""

    counts = "member"

    def __init__(self, unfold: Unfold | None = None) -> None:
        self._unfold = unfold

    def ranges(self, file: InputFile, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:  # noqa: ARG002
        """Take the file whole."""
        return whole(file)

    def read(self, piece: Piece, options: ReadOptions) -> Iterator[Group]:
        """Read all records; members of other kinds than text and JSON are left out of them."""
        path = piece.file.path
        with open_input(piece.file, exact=True) as file:
            if self._unfold is None:
                tar = TarStream(file, path, num_bytes=piece.file.bytes)
            else:
                raw = BlockStream(self._unfold(file, path))
                tar = TarStream(cast("BinaryIO", io.BufferedReader(raw, BLOCK_BYTES)), path, num_bytes=None)
            documents: list[Any] = []
            bad: list[BadRecord] = []
            size = num_lines = 0
            for sample in _samples(tar, options):
                try:
                    documents.append(sample.document())
                    size += sample.size
                except RecordError as error:
                    bad.append(error.at(num_lines))
                num_lines += 1
                if num_lines >= min(_RECORDS, options.batch_documents) or size >= options.batch_bytes:
                    yield Group(
                        documents=documents, bad=bad, blank=(), num_lines=num_lines, size=size, position=file.tell()
                    )
                    documents, bad, size, num_lines = [], [], 0, 0
            if num_lines:
                yield Group(
                    documents=documents, bad=bad, blank=(), num_lines=num_lines, size=size, position=file.tell()
                )


class _Sample:
    """The members of one key, as far as they have been read."""

    def __init__(self, key: str, options: ReadOptions) -> None:
        self.key = key
        self._options = options
        self.size = 0
        self._fields: dict[str, Any] = {KEY: key}
        self._spare: list[tuple[str, bytes | None]] = []
        """Members `json` that were not asked for but may hold fields: name, and content unless it is too long."""
        self._error: RecordError | None = None

    def add(self, ending: str, member: Member, tar: TarStream) -> None:
        """Read a member, if it is needed and the record is still good."""
        kind = ending.rpartition(".")[2]
        if self._error is not None or (kind != "json" and kind not in _TEXT):
            return
        if not self._needs(ending):
            if ending == _JSON:
                fits = member.bytes <= self._options.max_record_bytes
                self._spare.append((member.name, tar.read(member) if fits else None))
            return
        try:
            if ending in self._fields:
                raise RecordError("duplicate", f"two members {member.name!r}")
            self.size += member.bytes
            if self.size > self._options.max_record_bytes:
                raise RecordError("too_long", f"{self.size} bytes up to {member.name!r}")
            self._fields[ending] = _value(tar.read(member), kind)
        except RecordError as error:
            named = error.detail if repr(member.name) in error.detail else f"{error.detail} in {member.name!r}"
            self._error = RecordError(error.reason, named)
            self._fields.clear()

    def document(self) -> object:
        """Return the text or the record."""
        if self._error is not None:
            raise self._error
        field = self._options.text_field
        self._complete((field.partition(".")[0],) if field is not None else self._options.fields or ())
        if field is not None and isinstance(found := self._fields.get(field), str):
            return found
        try:
            return document_of(self._fields, self._options)
        except RecordError as error:
            raise RecordError(error.reason, f"{error.detail} of {self.key!r}") from None

    def _needs(self, ending: str) -> bool:
        field, fields = self._options.text_field, self._options.fields
        if field is not None:
            return ending in (field, field.partition(".")[0]) or (field == _DEFAULT and ending == "txt")
        return fields is None or ending in fields or (_DEFAULT in fields and ending == "txt")

    def _complete(self, names: Sequence[str]) -> None:
        """Look for fields that no member is named after: the text in `txt`, any other in the object of `json`."""
        for name in names:
            if name == _DEFAULT and "txt" in self._fields:
                self._fields.setdefault(name, self._fields["txt"])
            if name not in self._fields and name != _JSON and isinstance(inner := self._inner(), dict):
                self._fields.update({name: inner[name]} if name in inner else {})

    def _inner(self) -> object:
        if self._spare and _JSON not in self._fields:
            (name, content), *others = self._spare
            if others:
                raise RecordError("duplicate", f"two members {name!r}")
            if content is None:
                raise RecordError("too_long", f"more than {self._options.max_record_bytes} bytes in {name!r}")
            self.size += len(content)
            self._spare.clear()
            try:
                self._fields[_JSON] = _value(content, _JSON)
            except RecordError as error:
                raise RecordError(error.reason, f"{error.detail} in {name!r}") from None
        return self._fields.get(_JSON)


def _samples(tar: TarStream, options: ReadOptions) -> Iterator[_Sample]:
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
        value, checked = load(data)
        if not checked:
            refuse_surrogates(value)
        return value
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RecordError("utf8", utf8_detail(error)) from None
