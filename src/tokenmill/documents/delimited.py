"""CSV and TSV: a header that names the columns, then a record a row, all values strings."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from tokenmill.documents.lines import Unread, split_lines
from tokenmill.documents.units import Format, Group, Piece, ReadOptions, RecordError, open_blocks
from tokenmill.errors import DocumentError, nearest

_ROWS = 256
_CARRIAGE_RETURN = re.compile(r"(?<=\r)(?!\n)")


def _read(piece: Piece, options: ReadOptions, *, delimiter: str) -> Iterator[Group]:
    """Read all rows below the header; a cell in quotes may hold newlines."""
    with open_blocks(piece, options.batch_bytes, options.max_expansion) as (blocks, tell):
        lines = split_lines(blocks, options.max_record_bytes)
        rows = _Rows(lines, options.delimiter or delimiter, options.max_record_bytes)
        header = _header(rows, piece.file.path)
        if header is None:
            return
        table = _Table(header, options, piece.file.path)
        while (group := _group(rows, table, options)).num_lines:
            group.position = tell()
            yield group


CSV = Format(counts="row", read=partial(_read, delimiter=","))
TSV = Format(counts="row", read=partial(_read, delimiter="\t"))


def _group(rows: _Rows, table: _Table, options: ReadOptions) -> Group:
    """Read some rows; none at the end."""
    group = Group()
    most = min(_ROWS, options.batch_documents)
    while (line := group.num_lines) < most and group.size < options.batch_bytes:
        try:
            row = next(rows, None)
            if row is None:
                break
            if row:
                group.documents.append(table.document(row, rows))
                group.size += sum(map(len, row)) if options.text_field is None else len(group.documents[-1])
            else:
                group.blank.append(line)
        except RecordError as error:
            group.bad.append(error.at(line))
    return group


class _Table:
    """Turns a row into a document: the cell that is the text, or the cells by name."""

    def __init__(self, header: list[str], options: ReadOptions, path: str) -> None:
        self._header = header
        self._fields = options.fields
        self._text: int | None = None
        wanted = header if options.text_field is None else [options.text_field]
        if options.text_field is not None and options.text_field not in header:
            raise DocumentError(
                f"{path}: must have a column {options.text_field!r}, got {', '.join(map(repr, header))}; "
                f"name it with text_field=..., {nearest(options.text_field, header)}"
            )
        twice = [name for name in dict.fromkeys(wanted) if header.count(name) > 1]
        if twice:
            raise DocumentError(
                f"{path}: must name each column once in its header, got {twice[0]!r} twice; rename one of them"
            )
        if options.text_field is not None:
            self._text = header.index(options.text_field)

    def document(self, row: list[str], rows: _Rows) -> str | Mapping[str, Any]:
        if len(row) != len(self._header):
            raise RecordError("columns", f"{len(row)} instead of {len(self._header)}{rows.lines_of_row}")
        if self._text is not None:
            return row[self._text]
        record = dict(zip(self._header, row, strict=True))
        if self._fields is None:
            return record
        return {name: record[name] for name in self._fields if name in record}


def _header(rows: _Rows, path: str) -> list[str] | None:
    try:
        return next((row for row in rows if row), None)
    except RecordError as error:
        raise DocumentError(
            f"{path}: must begin with a header row, got {error.reason}: {error.detail}; fix its first line"
        ) from None


class _Rows:
    """The rows of lines, one by one; a bad one raises RecordError, and the next call goes on after it."""

    def __init__(self, lines: Iterator[list[bytes]], delimiter: str, max_bytes: int) -> None:
        # The limit holds for the whole process, so it is only ever raised: other readers may need theirs.
        csv.field_size_limit(max(csv.field_size_limit(), max_bytes))
        self._lines = chain.from_iterable(lines)
        self._num_lines = 0
        self._max_bytes = max_bytes
        self._delimiter = delimiter
        self._renew()
        self._begin_record()

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> list[str]:
        self._begin_record()
        try:
            row = next(self._reader)
        except csv.Error as error:
            self._renew()
            raise RecordError("csv", str(error)) from None
        except RecordError:
            self._renew()
            raise
        if self._not_utf8 is not None:
            raise RecordError("utf8", self._not_utf8)
        return row

    @property
    def lines_of_row(self) -> str:
        """Lines of the last row, if it has several: a quote too many may have joined them."""
        first, last = self._first_line, self._num_lines
        return f" in lines {first} to {last}" if first < last else ""

    def _begin_record(self) -> None:
        self._size = 0
        self._first_line = self._num_lines + 1
        self._not_utf8: str | None = None

    def _renew(self) -> None:
        self._reader = csv.reader(self._record_lines(), delimiter=self._delimiter)

    def _next_line(self) -> bytes | None:
        line = next(self._lines, None)
        self._num_lines += line is not None
        return line

    def _record_lines(self) -> Iterator[str]:
        """Yield lines to the reader of CSV; raise when the record that it reads has become too long."""
        while (raw := self._next_line()) is not None:
            goes_on = self._size > 0
            if isinstance(raw, Unread):
                raise self._skip(raw.detail, goes_on ^ bool(raw.num_quotes % 2))
            if self._size + len(raw) > self._max_bytes:
                raise self._skip(f"more than {self._max_bytes} bytes", goes_on ^ bool(raw.count(b'"') % 2))
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                self._not_utf8 = f"{error.reason} at byte {error.start} of a line"
                line = raw.decode(errors="replace")
            if "\r" in line.removesuffix("\n").removesuffix("\r"):  # may end a row as well
                for part in _CARRIAGE_RETURN.split(line):
                    self._size += len(part)
                    yield part
            else:
                self._size += len(raw)
                yield line
        if self._size:
            raise self._unclosed()

    def _skip(self, detail: str, in_quotes: bool) -> RecordError:
        """Skip the rest of a record, up to the line with the quote that ends its cell; return its error."""
        while in_quotes and (raw := self._next_line()) is not None:
            quotes = raw.num_quotes if isinstance(raw, Unread) else raw.count(b'"')
            in_quotes ^= bool(quotes % 2)
        return self._unclosed() if in_quotes else RecordError("too_long", detail)

    def _unclosed(self) -> RecordError:
        """Return the error of a quote that is never closed: all lines after it are lost, as rows cannot be told."""
        lost = max(self._num_lines - self._first_line + 1, 1)
        detail = f"a quoted cell that begins in line {self._first_line} and does not end ({lost:,} lines are lost)"
        return RecordError("csv", detail, count=lost)
