"""Files of sections with a footer: the one format of everything that is derived from a store and kept in a file.

A file has its sections, then a footer in JSON that describes them, the size of the footer in 8 bytes, and the
XXH3-64 of the footer in 8 bytes. Such a file can be deleted at any time and made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store.files import new_file
from tokenmill.store.maps import FileRequest, MappedFile, map_file
from tokenmill.tables import read_json
from tokenmill.types import Uint8Array

T = TypeVar("T")

_END = 16
"""Bytes after a footer: its size, and its checksum."""


def write_index(file: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write an index: `write` writes its bytes, and returns its footer, a record or another JSON value."""
    with new_file(file) as descriptor, open(descriptor, "wb", buffering=1 << 20, closefd=False) as out:
        write_footed(out, write)


def write_footed(out: BinaryIO, write: Callable[[BinaryIO], object]) -> None:
    """Write the bytes of an index and its footer to a file that is open."""
    out.write(footer_bytes(write(out)))


def footer_bytes(footer: object) -> bytes:
    """Return what stands after the bytes of an index: its footer, the size and the checksum of that."""
    encoded = msgspec.json.encode(footer)
    return encoded + len(encoded).to_bytes(8, "little") + xxhash.xxh3_64_digest(encoded)


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
