"""Lines of JSON by way of the kernel, in the very groups that the parser alone would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from tokenmill.documents.lines import LARGE_BYTES, LineRun, Unread, Values, line_runs, read_values
from tokenmill.documents.scan import scan_lines
from tokenmill.documents.units import Group, ReadOptions
from tokenmill.types import BoolArray, Int64Array, Uint8Array

_SHORT = 512
"""Texts below this are cut from one string; longer ones are decoded one by one, which copies them once less."""

_MANY_BYTES, _RUNS_TO_PARSE = 2.5, 31
"""So many bytes a character mean Chinese, Japanese and the like, which Python decodes more slowly than the parser:
after a run of them so many runs are left to it, which is a fifth faster."""


def scanned_groups(
    blocks: Iterator[bytes], options: ReadOptions, text_field: str, tell: Callable[[], int]
) -> Iterator[Group]:
    """Read the texts of lines, those of a block at a time; `text_field` is a plain name."""
    scanner = _Scanner(options, text_field)
    for run in line_runs(blocks, options.max_record_bytes):
        for num_lines, values in scanner.read(run):
            size = sum(map(len, values.documents))
            yield Group(
                documents=values.documents,
                bad=values.bad,
                blank=values.blank,
                num_lines=num_lines,
                size=size,
                position=tell(),
            )


class _Scanner:
    """The memory that the kernel works in, used again for every block."""

    def __init__(self, options: ReadOptions, text_field: str) -> None:
        self._options = options
        # A field whose name is no Unicode is in no line that the kernel takes.
        self._name = np.frombuffer(text_field.encode(errors="surrogatepass"), np.uint8)
        self._out: Uint8Array = np.empty(0, np.uint8)
        self._lines = self._make_lines(0)
        self._runs_to_parse = 0

    def _make_lines(self, size: int) -> tuple[Int64Array, Int64Array, BoolArray]:
        return np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.bool_)

    def _make_room(self, num_bytes: int) -> None:
        """Have room for the texts of so many bytes, and for as many lines as there can be of them in a group."""
        if self._out.size < num_bytes:
            self._out = np.empty(num_bytes, np.uint8)
        num_lines = min(num_bytes, self._options.batch_documents)
        if self._lines[0].size < num_lines:
            self._lines = self._make_lines(num_lines)

    def read(self, run: LineRun) -> Iterator[tuple[int, Values]]:
        """Read the lines of a run in groups of at most `batch_documents`: how many, and what they are."""
        if self._runs_to_parse or len(run.apart) > 1:  # many lines are apart in blocks larger than a record may be
            self._runs_to_parse = max(self._runs_to_parse - 1, 0)
            yield from self._parsed(run)
            return
        rest = np.frombuffer(run.block, np.uint8)[: run.end]
        begin = run.begin
        while run.apart or begin < run.end:
            head = run.apart.pop() if run.apart else None
            count, filled, wide = self._scan_head(head, run.end - begin)
            count, end, filled, also = scan_lines(rest, begin, self._name, self._out, filled, self._lines, count)
            values = self._values(head, run.block, begin, count, wide=wide or also)
            head = None  # a line may be as large as its text, which is what the caller works on now
            begin = end
            if filled > _MANY_BYTES * sum(map(len, values.documents)):
                self._runs_to_parse = _RUNS_TO_PARSE
            yield count, values

    def _parsed(self, run: LineRun) -> Iterator[tuple[int, Values]]:
        """Leave a whole run to the parser."""
        most = self._options.batch_documents
        lines = run.lines()
        run.apart.clear()
        groups = [lines] if len(lines) <= most else [lines[i : i + most] for i in range(0, len(lines), most)]
        for raws in groups:
            count, values = len(raws), read_values(raws, self._options)
            raws.clear()
            yield count, values

    def _scan_head(self, head: bytes | None, num_more: int) -> tuple[int, int, bool]:
        """Begin a group, with a line that stands by itself if there is one, and `num_more` bytes to come."""
        if head is None:
            self._make_room(num_more)
            return 0, 0, False
        if not 0 < len(head) <= LARGE_BYTES or isinstance(head, Unread):
            self._make_room(num_more + 1)
            for array in self._lines:
                array[0] = 0  # the line is left to the parser
            return 1, 0, False
        self._make_room(num_more + len(head))
        data = np.frombuffer(head, np.uint8)
        count, _, filled, wide = scan_lines(data, 0, self._name, self._out, 0, self._lines, 0)
        assert count == 1
        return count, filled, wide

    def _values(self, head: bytes | None, block: bytes, begin: int, count: int, *, wide: bool) -> Values:
        """Return what the lines of a group are, of which the first may be `head`."""
        line_ends, _, taken = self._lines
        texts = self._texts(count, wide=wide)
        left = [] if taken[:count].all() else np.flatnonzero(~taken[:count]).tolist()
        if not left:
            return Values(texts, [], [])
        starts = [begin, *line_ends[: count - 1].tolist()]
        if head is not None:
            starts[:2] = [0, begin]
        raws = [
            head if head is not None and line == 0 else block[starts[line] : int(line_ends[line])] for line in left
        ]
        return _joined(texts, left, read_values(raws, self._options))

    def _texts(self, count: int, *, wide: bool) -> list[str]:
        """Return the text of each line, anything for one that is not taken; one that is not UTF-8 is not."""
        ends = self._lines[1][:count].tolist()
        memory = self._out.data
        if not wide and ends[-1] < _SHORT * count:
            whole = str(memory[: ends[-1]], "ascii")
            return [whole[begin:end] for begin, end in pairwise([0, *ends])]
        try:
            return [str(memory[begin:end], "utf-8") for begin, end in pairwise([0, *ends])]
        except UnicodeDecodeError:
            pass
        texts: list[str] = []
        for line, (begin, end) in enumerate(pairwise([0, *ends])):
            try:
                texts.append(str(memory[begin:end], "utf-8"))
            except UnicodeDecodeError:
                texts.append("")
                self._lines[2][line] = False
        return texts


def _joined(texts: list[str], left: list[int], values: Values) -> Values:
    """Put what the parser read of the lines that were left to it between the texts of the others."""
    others = {*(record.line for record in values.bad), *values.blank}
    found = iter(values.documents)
    for place, line in enumerate(left):
        if place not in others:
            text = next(found)
            assert isinstance(text, str)
            texts[line] = text
    lost = {left[place] for place in others}
    return Values(
        [text for line, text in enumerate(texts) if line not in lost],
        [replace(record, line=left[record.line]) for record in values.bad],
        [left[place] for place in values.blank],
    )
