"""Tables and sentences as text of a given width: what does not fit is wrapped at words, shortened or left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from tokenmill.errors import without_secrets
from tokenmill.view.tables import FACTS, Bar, Table, cell, is_numeric

GAP = 2
"""Blanks between two columns."""
MIN_TEXT = 12
"""Cells to which a column of texts may shrink."""
MAX_BAR = 40
_FIGURE = re.compile(r"((about )?[0-9][0-9,.]*( ?([kMGT]?B|%|[MBT]))?|–)?")
"""Cells that are shown whole, to the right of their column."""


def printable(text: str) -> str:
    """Return a text that cannot control the terminal: no escape sequences, no bells, no reversed text."""
    return "".join(c if c.isprintable() else "⏎\n" if c == "\n" else "→" if c == "\t" else "\ufffd" for c in text)


def shortened(text: str, width: int, *, middle: bool = False) -> str:
    """Return a text of at most `width` cells: its first words and …, or its two ends around it.

    >>> shortened("the mill grinds", 9), shortened("corpus/web-00017.parquet:123", 16, middle=True)
    ('the mill…', 'corpus/…quet:123')
    """
    if cell_len(text) <= width:
        return text
    behind = _cut(text[::-1], width // 2)[::-1] if middle else ""
    before = _cut(text, width - 1 - cell_len(behind))
    if not middle:
        words = before.rpartition(" ")[0]
        before = words.rstrip() if 2 * cell_len(words) > width else before.rstrip()
    return f"{before}…{behind}"


def _cut(text: str, width: int) -> str:
    """Return the first characters that fit."""
    kept = text[: max(0, width)]
    while cell_len(kept) > width:
        kept = kept[:-1]
    return kept


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text that is wrapped between words; a longer word is a line of its own.

    A command in backticks counts as one word, so that it can be copied.

    >>> wrapped("use batches of 1,024 rows", 10)
    ['use', 'batches of', '1,024 rows']
    """
    if cell_len(text) <= width:
        return [text]
    lines: list[str] = []
    for word in re.findall(r"(?:`[^`\n]*`|\S)+", text):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines or [""]


@dataclass(slots=True)
class _Column:
    """A column, and the width that it is given."""

    header: str
    cells: list[str]
    style: list[str]
    is_right: bool
    is_text: bool
    """Whether its cells may be wrapped or shortened; a number is shown whole."""
    is_bar: bool
    width: int = 0

    @property
    def least_header(self) -> int:
        """Width of the longest word of the header."""
        return max(map(cell_len, self.header.split()), default=0)

    @property
    def least_word(self) -> int:
        """Width at which no word is shortened."""
        if self.is_bar:
            return 1
        words = (word for text in self.cells for word in text.split())
        return max(self.least_header, *map(cell_len, words), 1)

    def lines(self, row: int, *, clip: bool) -> list[str]:
        """Return the lines of a cell."""
        text = self.cells[row]
        if self.is_bar:
            return ["█" * round(len(text) * self.width / MAX_BAR)]
        if not self.is_text:
            return [text]
        if clip:
            return [shortened(text, self.width, middle=" " not in text)]
        return [shortened(line, self.width, middle=True) for line in wrapped(text, self.width)]


def _column(header: str, values: Sequence[object]) -> _Column:
    is_bar = bool(values) and all(isinstance(value, Bar) for value in values)
    texts = [_text(value) for value in values]
    is_figure = not is_bar and (is_numeric(values) or (any(texts) and all(map(_FIGURE.fullmatch, texts))))
    return _Column(
        header=header,
        cells=texts,
        style=[str(value.style) if isinstance(value, Text) else "" for value in values],
        is_right=is_figure,
        is_text=not is_figure,
        is_bar=is_bar,
    )


def _text(value: object) -> str:
    if isinstance(value, Bar):
        return "█" * round(MAX_BAR * value.share)
    text = value.plain if isinstance(value, Text) else cell(value)
    return without_secrets(printable(text)).replace("\n", "")


def _fit(columns: list[_Column], width: int, names: int) -> list[str]:
    """Set the widths of columns so that they fit; return the headers of those that are left out, the last ones."""
    left_out: list[str] = []
    while True:
        for column in columns:
            column.width = max(map(cell_len, (column.header, *column.cells)))
        excess = sum(column.width for column in columns) + GAP * (len(columns) - 1) - width
        # Headers are wrapped first, then texts: down to their longest words, then below.
        for column in columns:
            least = max(column.least_header, *map(cell_len, column.cells), 0)
            taken = max(0, min(excess, column.width - least))
            column.width, excess = column.width - taken, excess - taken
        texts = [column for column in columns if column.is_text]
        for limits in (
            {id(column): max(column.least_word, MIN_TEXT) for column in texts},
            {id(column): max(column.least_header, MIN_TEXT) for column in texts},
        ):
            while excess > 0 and (wide := [column for column in texts if column.width > limits[id(column)]]):
                max(wide, key=lambda column: column.width).width -= 1
                excess -= 1
        if excess <= 0 or len(columns) <= names:
            return left_out[::-1]
        left_out.append(columns.pop().header)


def table_lines(table: Table, width: int) -> Iterator[list[Text]]:
    """Yield the lines of a table: of its header, then of each row.

    Columns that do not fit are left out, the last ones first; the last item then is a line that names them.
    """
    columns = [_column(name, [row[index] for row in table.rows]) for index, name in enumerate(table.columns)]
    left_out = _fit(columns, width, table.names)
    if tuple(table.columns) != FACTS:
        yield _joined(columns, [wrapped(column.header, column.width) for column in columns], header=True)
    for row in range(len(table.rows)):
        yield _joined(columns, [column.lines(row, clip=table.clipped) for column in columns], row=row)
    if left_out:
        sentence = f"not shown at this width: {', '.join(filter(None, left_out))}"
        yield [Text(line, "dim") for line in wrapped(sentence, width)]


def _joined(
    columns: Sequence[_Column], cells: Sequence[list[str]], *, header: bool = False, row: int = 0
) -> list[Text]:
    """Put the lines of cells next to each other; those of a header end at its last line."""
    height = max(map(len, cells))
    lines = []
    for number in range(height):
        line = Text()
        for column, texts in zip(columns, cells, strict=True):
            at = number - (height - len(texts)) if header else number
            text = texts[at] if 0 <= at < len(texts) else ""
            pad = " " * (column.width - cell_len(text))
            line.append(" " * GAP if line else "")
            style = "bold" if header else column.style[row]
            line.append(pad if column.is_right else "").append(text, style).append("" if column.is_right else pad)
        line.rstrip()
        lines.append(line)
    return lines
