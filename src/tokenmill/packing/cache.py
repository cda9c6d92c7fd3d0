"""Row indexes kept in files: built once, by one of many processes, and mapped by all.

The name of a file is a digest of everything that decides its content. A lock keeps other processes from building
the same index again. Where locks do not work, each process builds it and the last rename wins, with the same bytes.
The lock ends with its process, so a killed builder leaves nothing to clean up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
import numpy as np
import xxhash

from tokenmill.caches import private_folder, writable
from tokenmill.errors import TokenmillError
from tokenmill.fingerprint import digest
from tokenmill.packing.index import (
    BYTE,
    CHECK,
    CUTS,
    PIECES,
    ROW,
    PackedWindow,
    WindowIndex,
    build_index,
    index_in_memory,
)
from tokenmill.packing.packers import CROPPED, EXCLUDED, FIRST, NUM_COUNTS, ROWS, TOKENS, TRAINED, TRUNCATED
from tokenmill.store.layout import ROWS_FOLDER
from tokenmill.store.lease import locked
from tokenmill.store.sections import read_index, write_index
from tokenmill.types import Int64Array

T = TypeVar("T")
logger = logging.getLogger("tokenmill")
FORMAT = "tokenmill-rows-1"


def cached_index(
    store: Path,
    description: Mapping[str, Any],
    packed: Callable[[], Iterator[PackedWindow]],
    windows: int,
    *,
    damaged: bool = False,
) -> WindowIndex:
    """Return the index that `description` stands for, from its file; build that if there is none, or a damaged one.

    Where it cannot be kept, it is held in memory.
    """
    index = kept_file(
        store,
        f"{digest(dict(description))}.rows",
        "an index of rows",
        read=lambda file: _read(file, description, windows),
        build=lambda file: _build(file, description, packed),
        damaged=damaged,
    )
    if index is None:
        return index_in_memory(packed())
    index.build_again = partial(cached_index, store, description, packed, windows, damaged=True)
    return index


def kept_file(
    store: Path,
    name: str,
    what: str,
    *,
    read: Callable[[Path], T | None],
    build: Callable[[Path], None],
    damaged: bool = False,
) -> T | None:
    """Return what is kept of a store's rows under a name; it is built where there is none, or a `damaged` one.

    None where no folder can be written to, or the disk is full.
    """
    for folder in (store / ROWS_FOLDER, private_folder("rows", make=False)) if not damaged else ():
        kept = read(folder / name) if folder else None
        if kept is not None:
            return kept
    folder = writable(store / ROWS_FOLDER) or private_folder("rows")
    if folder is None:
        return None
    file = folder / name
    try:
        with locked(file.with_name(f".{file.name}.lock")) as alone:
            kept = None if damaged else read(file)
            if kept is None:
                for left in folder.glob(f".tmp-{file.stem}-*") if alone else ():
                    left.unlink()  # what a killed builder left
                build(file)
                kept = read(file)
            return kept
    except OSError as error:
        if isinstance(error, TokenmillError):
            raise
        logger.warning("%s: %s cannot be kept, each process makes its own: %s", folder, what, error)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Footer:
    """Footer of an index file, as JSON."""

    format: str
    description: Mapping[str, Any]
    windows: int
    counts: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)], ...]
    table: str
    """XXH3-64 of the table, which stands before the footer."""


def _build(file: Path, description: Mapping[str, Any], packed: Callable[[], Iterator[PackedWindow]]) -> None:
    def write(out: BinaryIO) -> _Footer:
        table, counts = build_index(packed(), out.write)
        out.write(b"\0" * (-out.tell() % 8))
        out.write(table.tobytes())
        return _Footer(
            format=FORMAT,
            description=dict(description),
            windows=len(table) - 1,
            # The last count came later than the format: it is written only where it says something.
            counts=tuple(counts[: NUM_COUNTS if counts[EXCLUDED] else EXCLUDED].tolist()),
            table=xxhash.xxh3_64_hexdigest(table.tobytes()),
        )

    write_index(file, write)


def _read(file: Path, description: Mapping[str, Any], windows: int) -> WindowIndex | None:
    """Map an index; None where there is none, or one that is cut or changed: it is only a cache, and made again."""
    kept = read_index(file, _Footer)
    if kept is None or (kept[1].format, kept[1].description) != (FORMAT, dict(description)):
        return None
    mapped, footer = kept
    begin = mapped.data.size - 40 * (windows + 1)
    if begin < 0 or begin % 8 or footer.windows != windows or len(footer.counts) not in (EXCLUDED, NUM_COUNTS):
        return None
    raw = mapped.data[begin:].tobytes()
    table = np.frombuffer(raw, np.int64).reshape(-1, 5)
    counts = np.zeros(NUM_COUNTS, np.int64)
    counts[: len(footer.counts)] = footer.counts
    if xxhash.xxh3_64_hexdigest(raw) != footer.table or not _is_sound(table, begin, counts):
        return None
    return WindowIndex(
        table=table, data=mapped.data[:begin], counts=counts, checked=np.zeros(windows, np.bool_), file=mapped
    )


def _is_sound(table: Int64Array, size: int, counts: Int64Array) -> bool:
    """Return whether a table fits `size` bytes and the counts; kernels index with it."""
    if ((table[:, :CHECK] < 0) | (table[:, :CHECK] >= 1 << 48)).any() or table[0, ROW] or table[0, BYTE]:
        return False
    rows, sizes = np.diff(table[:, ROW]), np.diff(table[:, BYTE])
    pieces, cuts = table[:-1, PIECES], table[:-1, CUTS]
    balanced = counts[TOKENS] == counts[[TRAINED, FIRST, TRUNCATED, CROPPED, EXCLUDED]].sum()
    return bool(
        (rows >= 0).all()
        and (sizes == 4 * rows + 2 * (pieces + pieces % 2) + 12 * cuts).all()
        and size - int(table[-1, BYTE]) in range(8)
        and counts[ROWS] == table[-1, ROW]
        and balanced
    )
