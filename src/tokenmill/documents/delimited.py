"""CSV and TSV: a header that names the columns, then one record per row, with strings as values."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from tokenmill.documents.lines import Unread, split_lines
from tokenmill.documents.streams import open_blocks
from tokenmill.documents.units import Format, Group, Piece, ReadOptions, RecordError
from tokenmill.errors import DocumentError, nearest

_ROWS = 256
_CARRIAGE_RETURN = re.compile(r"(?<=\r)(?!\n)")


def _read(piece: Piece, options: ReadOptions, *, delimiter: str) -> Iterator[Group]:
    """Read all rows below the header; a quoted cell may hold newlines."""
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
            row = rows.next()
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
    """Turns a row into a document: the cell that holds the text, or the cells by name."""

    def __init__(self, header: list[str], options: ReadOptions, path: str) -> None:
        self._header = header
        self._fields = options.fields
        self._text: int | None = None
        wanted = header if options.text_field is None else [options.text_field]
        if options.text_field is not None and options.text_field not in header:
            raise DocumentError(
                f"{path}: no column {options.text_field!r}, only {', '.join(map(repr, header))}; "
                f"name it with text_field=..., {nearest(options.text_field, header)}"
            )
        twice = [name for name in dict.fromkeys(wanted) if header.count(name) > 1]
        if twice:
            raise DocumentError(f"{path}: column {twice[0]!r} is in the header twice; rename one of the two")
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
        while (row := rows.next()) is not None:
            if row:
                return row
    except RecordError as error:
        raise DocumentError(f"{path}: the header row is bad: {error.reason}: {error.detail}; fix it") from None
    return None


class _Rows:
    """The rows of lines, one by one."""

    def __init__(self, lines: Iterator[list[bytes]], delimiter: str, max_bytes: int) -> None:
        # The limit holds for the whole process, so it is only ever raised: other readers may need theirs.
        csv.field_size_limit(max(csv.field_size_limit(), max_bytes))
        self._lines = chain.from_iterable(lines)
        self._delimiter = delimiter
        self._max_bytes = max_bytes
        self._num_lines = self._first_line = self._size = 0
        self._not_utf8: str | None = None
        self._reader = self._new_reader()

    def next(self) -> list[str] | None:
        """Return the next row, None at the end.

        A bad row raises RecordError. The next call continues after it.
        """
        self._size = 0
        self._first_line = self._num_lines + 1
        self._not_utf8 = None
        try:
            row = next(self._reader, None)
        except (csv.Error, RecordError) as error:
            self._reader = self._new_reader()
            raise error if isinstance(error, RecordError) else RecordError("csv", str(error)) from None
        if self._not_utf8 is not None:
            raise RecordError("utf8", self._not_utf8)
        return row

    @property
    def lines_of_row(self) -> str:
        """Lines of the last row, if it has several: an extra quote may have joined them."""
        first, last = self._first_line, self._num_lines
        return f" in lines {first} to {last}" if first < last else ""

    def _new_reader(self) -> Iterator[list[str]]:
        return csv.reader(self._texts(), delimiter=self._delimiter)

    def _texts(self) -> Iterator[str]:
        """Yield lines to the CSV reader, a line at a time as it asks for them."""
        for raw in self._lines:
            self._num_lines += 1
            is_continued = self._size > 0
            if isinstance(raw, Unread) and not is_continued and raw.num_quotes % 2 == 0:
                raise RecordError("too_long", raw.detail)
            if isinstance(raw, Unread) or self._size + len(raw) > self._max_bytes:
                raise self._unclosed(f"has more than {self._max_bytes} bytes")
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
            raise self._unclosed("does not end")

    def _unclosed(self, problem: str) -> RecordError:
        """Skip the rest of the file, as the start of the next row is unknown; return the error of its lines."""
        self._num_lines += sum(1 for _ in self._lines)
        lost = max(self._num_lines - self._first_line + 1, 1)
        detail = f"the quoted cell that begins in line {self._first_line} {problem} ({lost:,} lines are lost)"
        return RecordError("csv", detail, count=lost)
