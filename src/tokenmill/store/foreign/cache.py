"""What was found in foreign files, kept in files of ours: found once, mapped ever after.

A file is written under a name of its own, synced and renamed, so what has the final name is whole. Its name is a
digest of everything that decides its content: of sizes, samples and options. Where two processes make it at once,
the last rename wins, with the same bytes. Any of these files can be deleted at any time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import orjson
import xxhash

from tokenmill.errors import StoreError
from tokenmill.fingerprint import digest
from tokenmill.store.cache_folder import private_folder, private_path, writable
from tokenmill.store.durable import sync_folder
from tokenmill.store.maps import FileRequest, MemoryRequest, Request, map_file

if TYPE_CHECKING:
    import numpy.typing as npt

FORMAT = "tokenmill-foreign-1"
PURPOSE = "foreign"
FOLDER = ".tokenmill"
"""Stands beside the data, where that can be written to."""
CHECKED_BYTES = 1 << 26
"""A larger section is not read through when it is opened, so that opening costs the same for any corpus; `verify`
compares it with the data, and offsets are checked whenever they are used."""
_END = 16
"""Bytes at the end of a file: size of the footer, and its checksum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Sections of bytes, in memory or in a file, and what is known of them."""

    facts: Mapping[str, Any]
    requests: Mapping[str, Request]
    digests: Mapping[str, str]
    """XXH3-128 of each section."""


def in_memory(path: Path, facts: Mapping[str, Any], sections: Mapping[str, npt.NDArray[np.uint8]]) -> Kept:
    """Keep sections in this process alone."""
    return Kept(
        facts=facts,
        requests={name: MemoryRequest(path, data) for name, data in sections.items()},
        digests={name: xxhash.xxh3_128_hexdigest(data.data) for name, data in sections.items()},
    )


def read_kept(beside: Path, description: Mapping[str, Any]) -> Kept | None:
    """Return what is kept under a description; None where there is nothing, or something cut or changed."""
    name = f"{digest(dict(description))}.index"
    for folder in (beside.parent / FOLDER, private_path(PURPOSE)):
        found = _read(folder / name, description)
        if found is not None:
            return found
    return None


def keep(
    beside: Path,
    description: Mapping[str, Any],
    facts: Mapping[str, Any],
    sections: Mapping[str, Iterable[npt.NDArray[np.uint8]]],
) -> Kept:
    """Write sections, given in blocks, to a file beside the data or in a folder of this user's; return them."""
    folder = writable(beside.parent / FOLDER) or private_folder(PURPOSE)
    file = folder / f"{digest(dict(description))}.index"
    descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=folder)
    try:
        os.fchmod(descriptor, 0o644)  # others may read the data, so they may read its index
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as out:
            places = {name: _write(out, blocks) for name, blocks in sections.items()}
            footer = orjson.dumps(
                {"format": FORMAT, "description": dict(description), "facts": dict(facts), "sections": places}
            )
            out.write(footer)
            out.write(len(footer).to_bytes(8, "little") + xxhash.xxh3_64_digest(footer))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
        sync_folder(folder)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    found = _read(file, description)
    if found is None:
        raise StoreError(f"{file}: must be a whole index once it is written, got none; check the disk")
    return found


def _write(out: BinaryIO, blocks: Iterable[npt.NDArray[np.uint8]]) -> list[int | str]:
    out.write(b"\0" * (-out.tell() % 8))
    begin = out.tell()
    state = xxhash.xxh3_128()
    for block in blocks:
        state.update(block.data)
        out.write(block.data)
    return [begin, out.tell() - begin, state.hexdigest()]


def _read(file: Path, description: Mapping[str, Any]) -> Kept | None:
    try:
        real = Path(os.path.realpath(file))
        size = real.stat().st_size
        data = map_file(FileRequest(real, size)).data
    except (OSError, StoreError):
        return None
    length = int.from_bytes(data[-_END : -_END + 8].tobytes(), "little") if size >= _END else size
    text = data[max(0, size - _END - length) : -_END].tobytes()
    if len(text) != length or xxhash.xxh3_64_digest(text) != data[-8:].tobytes():
        return None
    footer = orjson.loads(text)
    if footer["format"] != FORMAT or footer["description"] != dict(description):
        return None
    for begin, wanted, checksum in footer["sections"].values():
        part = data[begin : begin + wanted]
        if part.size != wanted or (wanted <= CHECKED_BYTES and xxhash.xxh3_128_hexdigest(part.data) != checksum):
            return None
    return Kept(
        facts=footer["facts"],
        requests={
            name: FileRequest(real, size, begin, wanted) for name, (begin, wanted, _) in footer["sections"].items()
        },
        digests={name: checksum for name, (_, _, checksum) in footer["sections"].items()},
    )
