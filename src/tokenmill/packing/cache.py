"""Row indexes kept in files: built once, by one of many processes, and mapped by all.

A file is written under a name of its own, synced and renamed, so what has the final name is whole. Its
name is a digest of everything that decides its content. A lock keeps other processes from building the same
again; where locks do not work, they build it and the last rename wins, with the same bytes. The lock goes with its
process, so a killed builder leaves nothing that needs to be cleaned up.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import orjson
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.fingerprint import digest
from tokenmill.packing.index import PackedWindow, WindowIndex, build_index
from tokenmill.packing.window import EXCLUDED, NUM_COUNTS
from tokenmill.store.cache_folder import private_folder, writable
from tokenmill.store.durable import sync_folder
from tokenmill.store.maps import FileRequest, map_file
from tokenmill.store.writer import ROWS_FOLDER

if TYPE_CHECKING:
    import numpy.typing as npt

FORMAT = "tokenmill-rows-1"
_END = 16
"""Bytes at the end of a file: size of the footer, and its checksum."""


def cached_index(
    store: Path, description: Mapping[str, Any], packed: Callable[[], Iterator[PackedWindow]]
) -> WindowIndex:
    """Return the index that `description` stands for, from its file; build the file if there is none."""
    name = f"{digest(dict(description))}.rows"
    for folder in (store / ROWS_FOLDER, private_folder("rows")):
        found = _read(folder / name, description)
        if found:
            return found
    folder = writable(store / ROWS_FOLDER) or private_folder("rows")
    file = folder / name
    with _lock(file) as alone:
        if not _read(file, description):
            if alone:
                for left in folder.glob(f".tmp-{file.stem}-*"):
                    left.unlink()  # what a killed builder left
            _build(file, description, packed)
    built = _read(file, description)
    if built is None:
        raise StoreCorruptError(f"{file}: must be a whole index of rows once it is built, got none; check the disk")
    return built


def _build(file: Path, description: Mapping[str, Any], packed: Callable[[], Iterator[PackedWindow]]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".tmp-{file.stem}-", dir=file.parent)
    try:
        os.fchmod(descriptor, 0o644)  # others may read the store, so they may read its index
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as out:
            table, counts = build_index(packed(), out.write)
            out.write(b"\0" * (-out.tell() % 8))
            _write_footer(out, description, table, counts)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
        sync_folder(file.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _write_footer(
    out: BinaryIO, description: Mapping[str, Any], table: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> None:
    out.write(table.tobytes())
    footer = orjson.dumps(
        {
            "format": FORMAT,
            "description": dict(description),
            "windows": len(table) - 1,
            # The last count came later than the format: it is written only where it says something.
            "counts": counts[: NUM_COUNTS if counts[EXCLUDED] else EXCLUDED].tolist(),
            "table": xxhash.xxh3_64_hexdigest(table.tobytes()),
        }
    )
    out.write(footer)
    out.write(len(footer).to_bytes(8, "little") + xxhash.xxh3_64_digest(footer))


def _read(file: Path, description: Mapping[str, Any]) -> WindowIndex | None:
    """Map an index; None where there is none, or one that is cut or changed: it is only a cache, and made again."""
    try:
        data = map_file(FileRequest(file, file.stat().st_size)).data
    except (OSError, StoreError):
        return None
    size = int.from_bytes(data[-_END : -_END + 8].tobytes(), "little")
    text = data[max(0, data.size - _END - size) : -_END].tobytes()
    if data.size < _END or len(text) != size or xxhash.xxh3_64_digest(text) != data[-8:].tobytes():
        return None
    footer = orjson.loads(text)
    if footer["format"] != FORMAT or footer["description"] != dict(description):
        return None
    begin = data.size - _END - size - 40 * (footer["windows"] + 1)
    raw = data[max(0, begin) : data.size - _END - size].tobytes()
    if begin < 0 or xxhash.xxh3_64_hexdigest(raw) != footer["table"]:
        return None
    table = np.frombuffer(raw, np.int64).reshape(-1, 5)
    if begin - int(table[-1, 1]) not in range(8):
        return None
    counts = np.zeros(NUM_COUNTS, np.int64)
    counts[: len(footer["counts"])] = footer["counts"]
    return WindowIndex(
        table=table,
        data=data[:begin],
        counts=counts,
        checked=np.zeros(footer["windows"], np.bool_),
    )


@contextmanager
def _lock(file: Path) -> Iterator[bool]:
    """Hold the right to build a file; False where the file system has no locks."""
    with (file.parent / f".{file.name}.lock").open("wb") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
            alone = True
        except (ImportError, OSError):
            alone = False
        yield alone
