"""Files of text or records in object storage, copied to a folder on this machine, from where they are read.

A copy is stored with the version of its object, and downloaded again when that has changed. One process of a
machine copies, and the others wait for it. A partial copy has another name. A journal has a line per copy.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tokenmill.errors import DocumentError, StoreCorruptError
from tokenmill.fingerprint import digest
from tokenmill.progress import display
from tokenmill.store.files import sync_folder, write_parts
from tokenmill.store.lease import locked
from tokenmill.store.remote.client import Address, Client, ObjectInfo, parse_address
from tokenmill.tables import is_address
from tokenmill.types import RemoteOptions

logger = logging.getLogger("tokenmill")
THREADS = 8
_JOURNAL = ".objects.jsonl"
"""A line of JSON per copy: name, size and version of the object. The last line of a name counts."""
_WILD = re.compile(r"[*\[]")
Progress = Callable[[int, int], None]
"""Called with the bytes that are here, and all there are."""


def copy_inputs(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    folder: Path,
    *,
    is_known: Callable[[str], bool],
    options: RemoteOptions | None = None,
    progress: Progress | None = None,
) -> list[str | os.PathLike[str]]:
    """Return inputs with local paths in place of addresses, whose objects are copied below `folder` first.

    An address is that of an object, of a folder of them, or has `*`, `**` and `[...]` in its path, as a glob has.
    Of a folder only objects are taken whose names `is_known` says can be read, as no others are. Where nobody asks
    for its `progress`, a line is logged every 30 s.
    """
    items = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    local: list[str | os.PathLike[str]] = []
    with display(lambda size: f"{size / 1e6:,.0f} MB", logger.warning) as show:
        progress = progress or partial(show, "inputs are copied from object storage")
        for item in items:
            if isinstance(item, str) and is_address(item):
                local += _copied(item, folder, is_known, options or RemoteOptions(), progress)
            else:
                local.append(item)
    return local


def _copied(
    text: str, folder: Path, is_known: Callable[[str], bool], options: RemoteOptions, progress: Progress
) -> list[str]:
    path, mark, query = text.partition("?")
    wild = _WILD.search(path)
    # What is listed is the folder above the first name that is no plain one.
    fixed = path[: path.rindex("/", 0, wild.start())] if wild else path
    address = parse_address(f"{fixed}{mark}{query}" if mark else fixed, options)
    pattern = path[len(fixed) :].strip("/") if wild else None
    root, objects = _objects(address, pattern, is_known, options)
    place = {"scheme": root.scheme, "bucket": root.bucket, "endpoint": root.endpoint, "key": root.key}
    copies = folder / f"{root.name}-{digest(place)[:12]}"
    client = Client(root, options)
    client.check_redirect(objects[0].name)
    copies.mkdir(parents=True, exist_ok=True)
    with locked(copies / ".lock"):
        known = _read_journal(copies)
        missing = [info for info in objects if not _is_here(copies, info, known)]
        total = sum(info.bytes for info in objects)
        done = total - sum(info.bytes for info in missing)
        free = shutil.disk_usage(copies).free
        if total - done > free:
            raise DocumentError(
                f"{copies}: must have room for {total - done:,} bytes of inputs that are copied there, got "
                f"{free:,} free; prepare fewer of them at a time, or name a larger disk with staging=..."
            )
        progress(done, total)
        with (
            _opened_journal(copies, [info for info in missing if info.name in known]) as journal,
            ThreadPoolExecutor(THREADS, thread_name_prefix="tokenmill-inputs") as executor,
        ):
            try:
                work = {executor.submit(_copy, client, copies, info): info for info in missing}
                for finished in as_completed(work):
                    finished.result()
                    info = work[finished]
                    journal.write(_line(info.name, info.bytes, info.etag))
                    done += info.bytes
                    progress(done, total)
            except BaseException:
                client.stop()
                executor.shutdown(wait=True, cancel_futures=True)
                raise
    return [str(copies / info.name) for info in objects]


def _objects(
    address: Address, pattern: str | None, is_known: Callable[[str], bool], options: RemoteOptions
) -> tuple[Address, list[ObjectInfo]]:
    """Return the folder of an address, and the objects in it."""
    if pattern is None:
        folder, _, name = address.key.rpartition("/")
        above = replace(address, key=folder)
        info = Client(above, options).head(name) if name else None
        if info is not None:
            return above, [info]
    chosen = _translated(pattern) if pattern is not None else None
    objects = [
        info
        for info in Client(address, options).list()
        if not _is_hidden(info.name) and (chosen.fullmatch(info.name) if chosen else is_known(info.name))
    ]
    if not objects:
        raise DocumentError(
            f"{address}{f'/{pattern}' if pattern else ''}: found no object that can be read, at this address, in "
            "this folder or for this glob; fix the address"
        )
    return address, objects


def _translated(pattern: str) -> re.Pattern[str]:
    """Return the expression of a glob: `*` stays within a name, `**` does not.

    >>> [bool(_translated("a/*.jsonl").fullmatch(name)) for name in ("a/b.jsonl", "a/b/c.jsonl", "a/b.txt")]
    [True, False, False]
    >>> bool(_translated("**/*.jsonl").fullmatch("c.jsonl")), bool(_translated("[ab].txt").fullmatch("b.txt"))
    (True, True)
    """
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}

    def parts() -> Iterator[str]:
        for piece in re.split(r"(\*\*/|\*\*|\*|\[[^\]/]+\])", pattern):
            if piece.startswith("[") and piece.endswith("]"):
                letters = piece[1:-1].lstrip("!^").replace("\\", "\\\\")
                yield f"[{'^' if piece[1] in '!^' else ''}{letters}]"
            else:
                yield tokens.get(piece) or re.escape(piece)

    return re.compile("".join(parts()))


def _is_hidden(name: str) -> bool:
    """Return whether an object is hidden, or has a name that no file may have; neither is an input."""
    return any(not part or part.startswith(".") for part in name.split("/"))


def _read_journal(copies: Path) -> dict[str, tuple[int, str | None]]:
    """Return size and version of the objects that were copied; a torn line of a killed process is ignored."""
    known: dict[str, tuple[int, str | None]] = {}
    try:
        lines = (copies / _JOURNAL).read_bytes().splitlines()
    except OSError:
        return {}
    for line in lines:
        with suppress(ValueError, TypeError):
            name, size, etag = json.loads(line)
            known[str(name)] = (int(size), etag)
    return known


@contextmanager
def _opened_journal(copies: Path, changed: Sequence[ObjectInfo]) -> Iterator[BinaryIO]:
    """Open the journal to append lines, each written at once; objects that have changed are no longer listed."""
    with (copies / _JOURNAL).open("ab", buffering=0) as journal:
        # A line break ends a torn line.
        journal.write(b"\n" * (journal.tell() > 0) + b"".join(_line(info.name, -1, None) for info in changed))
        os.fsync(journal.fileno())
        yield journal


def _line(name: str, size: int, etag: str | None) -> bytes:
    return json.dumps([name, size, etag]).encode() + b"\n"


def _is_here(copies: Path, info: ObjectInfo, known: dict[str, tuple[int, str | None]]) -> bool:
    file = copies / info.name
    same = info.etag is not None and known.get(info.name) == (info.bytes, info.etag)
    return same and file.is_file() and file.stat().st_size == info.bytes


def _copy(client: Client, copies: Path, info: ObjectInfo) -> None:
    file = copies / info.name
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".tmp-{file.name}")
    write_parts(partial, client.stream(info.name, info.etag))
    size = partial.stat().st_size
    if size != info.bytes:
        raise StoreCorruptError(
            f"{client.address / info.name}: must have {info.bytes} bytes, as it was listed with, got {size}; let "
            "nothing write to it and start again"
        )
    partial.replace(file)
    sync_folder(file.parent)  # the journal must not list it before its name is durable
