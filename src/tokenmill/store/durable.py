"""Files and names that survive a crash, and indexes that are kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store.maps import FileRequest, MappedFile, map_file
from tokenmill.tables import read_json
from tokenmill.types import Uint8Array

T = TypeVar("T")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that a reader sees the old one or the whole new one, whatever happens."""
    write_parts_atomically(path, (data,))


def write_parts_atomically(path: Path, parts: Iterable[bytes], *, writer: str = "") -> None:
    """Write a file part by part, as `write_atomically` does; one part is held in memory at a time.

    Where several may write the same file at once, each names itself as its `writer`.
    """
    temporary = path.with_name(f".tmp-{path.name}{writer}")
    with temporary.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are not there, so that their names survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


# Indexes that can always be made again, kept in files beside the data or in a folder of the user's.
#
# A file holds bytes, then a footer in JSON that says what they are, its size and its checksum. It is written
# under a name of its own, synced and renamed, so what has the final name is whole. Any of them can be deleted.

_END = 16
"""Bytes behind a footer: its size, and its checksum."""


def write_index(file: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write an index: `write` writes its bytes, and returns its footer, a record or another JSON value."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".tmp-{file.stem}-", dir=file.parent)
    try:
        os.fchmod(descriptor, 0o644)  # others may read the data, so they may read its index
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as out:
            footer = msgspec.json.encode(write(out))
            out.write(footer + len(footer).to_bytes(8, "little") + xxhash.xxh3_64_digest(footer))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
        sync_folder(file.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_section(out: BinaryIO, blocks: Iterable[Uint8Array]) -> tuple[int, int, str]:
    """Write a part of an index, given in blocks, at a multiple of 8; return first byte, size and XXH3-128."""
    out.write(b"\0" * (-out.tell() % 8))
    begin = out.tell()
    state = xxhash.xxh3_128()
    for block in blocks:
        state.update(block.data)
        out.write(block.data)
    return begin, out.tell() - begin, state.hexdigest()


def read_index(file: Path, kind: type[T]) -> tuple[MappedFile, T] | None:
    """Map an index: its bytes, and its footer as a record; None where there is none, or one cut or changed."""
    try:
        mapped = map_file(FileRequest(file, file.stat().st_size))
        data = mapped.data
        size = int.from_bytes(data[-_END : -_END + 8].tobytes(), "little") if data.size >= _END else data.size
        end = max(0, data.size - _END - size)
        footer = data[end:-_END].tobytes()
        if len(footer) != size or xxhash.xxh3_64_digest(footer) != data[-8:].tobytes():
            return None
        mapped.check()
        mapped.data = data[:end]
        return mapped, read_json(kind, footer, f"{file}:", error=StoreCorruptError)
    except (OSError, StoreError):
        return None
