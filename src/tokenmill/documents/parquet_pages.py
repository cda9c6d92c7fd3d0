"""The cells of a column of texts straight from the pages of a Parquet file.

Arrow copies every page into a column, from which the texts are then copied again. Here they are taken from the
page, which saves a sixth of the time and more (docs/decisions/0013). What is not understood is left to Arrow.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias
from zlib import crc32

from tokenmill.documents.page_header import (
    DATA_V2,
    DICTIONARY,
    INDEX,
    PLAIN,
    PLAIN_DICTIONARY,
    RLE_DICTIONARY,
    NotUnderstood,
    PageHeader,
    read_header,
    varint,
)

Cells: TypeAlias = "list[memoryview | None]"
Unfold: TypeAlias = "Callable[[memoryview, int], memoryview]"

_HEADER_BYTES = (512, 64 << 10)
"""What is read for a header: nearly always enough, and always, but for statistics of huge texts."""
_MAX_PAGE_BYTES = 64 << 20
_MAX_PAGE_VALUES = 1 << 18
"""A few bytes may stand for a thousand million rows that are equal. Writers end a page at a megabyte."""
_MAX_WIDTH = 32
_SIZE = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnChunk:
    """The pages of one column in one row group."""

    begin: int
    """Place in the file."""
    end: int
    values: int
    """Nulls are counted."""
    codec: str
    """As Arrow names it; a key of `CODECS`."""
    nullable: bool


def page_cells(descriptor: int, chunk: ColumnChunk) -> Iterator[Cells]:
    """Yield the cells of each page, None for nulls; raise NotUnderstood at a page that is not read here."""
    unfold = CODECS[chunk.codec]()
    at, left = chunk.begin, chunk.values
    words: Cells | None = None
    while left:
        try:
            header, at = _header(descriptor, at, chunk.end)
            body = memoryview(os.pread(descriptor, header.stored, at))
            at += header.stored
            if header.kind == DICTIONARY:
                if words is not None or left < chunk.values:
                    raise NotUnderstood
                words = _plain(_page(header, body, unfold), header.values)
                continue
            if header.kind == INDEX:
                continue
            if header.values > left:
                raise NotUnderstood
            cells = _cells(header, body, unfold, words, nullable=chunk.nullable)
        except (struct.error, IndexError, ValueError, OSError) as error:
            raise NotUnderstood from error
        left -= header.values
        yield cells


def _header(descriptor: int, at: int, end: int) -> tuple[PageHeader, int]:
    """Return the header at a place, and where its page begins."""
    for size in _HEADER_BYTES:
        try:
            header, used = read_header(os.pread(descriptor, min(size, end - at), at))
        except IndexError:
            continue
        if max(header.stored, header.unfolded) > _MAX_PAGE_BYTES or header.values > _MAX_PAGE_VALUES:
            break
        if used + header.stored <= end - at:
            return header, at + used
        break
    raise NotUnderstood


def _page(header: PageHeader, body: memoryview, unfold: Unfold) -> memoryview:
    """Return what a page holds, behind levels that are not compressed."""
    if len(body) != header.stored or (header.crc is not None and crc32(body) != header.crc):
        raise NotUnderstood
    levels = header.levels or 0
    size = header.unfolded - levels
    page = unfold(body[levels:], size) if header.compressed else body[levels:]
    if len(page) != size:
        raise NotUnderstood
    return page


def _cells(header: PageHeader, body: memoryview, unfold: Unfold, words: Cells | None, *, nullable: bool) -> Cells:
    page = _page(header, body, unfold)
    begin, levels = 0, body[: header.levels or 0]
    if header.kind != DATA_V2 and nullable:
        begin = 4 + _SIZE.unpack_from(page)[0]
        levels = page[4:begin]
        if begin > len(page):
            raise NotUnderstood
    there = _present(levels, header.values) if nullable else None
    count = header.values if there is None else sum(there)
    if header.encoding == PLAIN:
        cells = _plain(page[begin:], count)
    elif words is not None and header.encoding in (PLAIN_DICTIONARY, RLE_DICTIONARY):
        cells = [words[index] for index in _indices(page[begin:], count)]
    else:
        raise NotUnderstood
    if there is None:
        return cells
    given = iter(cells)
    return [next(given) if present else None for present in there]


def _plain(page: memoryview, count: int) -> Cells:
    """Cut values that each stand behind their size, and must fill the page."""
    cells: Cells = []
    end = 0
    for _ in range(count):
        begin = end + 4
        end = begin + _SIZE.unpack_from(page, end)[0]
        cells.append(page[begin:end])
    if end != len(page):
        raise NotUnderstood
    return cells


def _present(levels: memoryview, count: int) -> list[int] | None:
    """Return 1 for values and 0 for nulls, None where there are no nulls."""
    if not count:
        return None
    head, at = varint(levels, 0)
    if head == 2 * count and bytes(levels[at:]) == b"\1":
        return None
    return _numbers(levels, 1, count)


def _indices(data: memoryview, count: int) -> list[int]:
    """Read numbers behind their width; where a page has nulls only there are none, and perhaps no width."""
    if not count and (not data or (len(data) == 1 and data[0] <= _MAX_WIDTH)):
        return []
    return _numbers(data[1:], data[0], count)


def _numbers(data: memoryview, width: int, count: int) -> list[int]:
    """Unfold numbers of `width` bits, which fill `data`: runs of one of them, and of eights that are packed."""
    import numpy as np

    if width > _MAX_WIDTH:
        raise NotUnderstood
    numbers = np.zeros(count, np.int64)
    at = done = 0
    while done < count:
        head, at = varint(data, at)
        size = (head >> 1) * width if head & 1 else (width + 7) // 8
        run = (head >> 1) * (8 if head & 1 else 1)
        # Eights may go beyond the end, and then by how many their bytes limit, if they have some.
        beyond = run - (count - done)
        if not run or size > len(data) - at or (beyond > 7 * (head & 1) and not (size and head & 1)):
            raise NotUnderstood
        if head & 1:
            bits = np.unpackbits(np.frombuffer(data[at : at + size], np.uint8), bitorder="little")
            packed = (bits.reshape(run, width) @ (1 << np.arange(width)))[: count - done]
            numbers[done : done + packed.size] = packed
        else:
            numbers[done : done + run] = int.from_bytes(data[at : at + size], "little")
        at += size
        done += run
    if at != len(data) or (count and int(numbers.max()) >> width):
        raise NotUnderstood
    unfolded: list[int] = numbers.tolist()
    return unfolded


def _as_it_is() -> Unfold:
    return lambda body, _size: body


def _snappy() -> Unfold:
    import cramjam

    def unfold(body: memoryview, size: int) -> memoryview:
        if varint(body, 0)[0] != size:  # what it would reserve
            raise NotUnderstood
        try:
            return memoryview(cramjam.snappy.decompress_raw(body))
        except cramjam.DecompressionError as error:
            raise NotUnderstood from error

    return unfold


def _zstd() -> Unfold:
    import pyarrow as pa
    import zstandard

    codec = pa.Codec("zstd")

    def unfold(body: memoryview, size: int) -> memoryview:
        try:
            told = zstandard.get_frame_parameters(body).content_size
            if told == size:
                return memoryview(codec.decompress(body, size)).cast("B")
            if told != zstandard.CONTENTSIZE_UNKNOWN or not size:
                raise NotUnderstood
            return memoryview(zstandard.ZstdDecompressor().decompress(body, max_output_size=size))
        except zstandard.ZstdError as error:
            raise NotUnderstood from error

    return unfold


CODECS: dict[str, Callable[[], Unfold]] = {"UNCOMPRESSED": _as_it_is, "SNAPPY": _snappy, "ZSTD": _zstd}
"""Opens what unfolds a page; the others are rare."""
