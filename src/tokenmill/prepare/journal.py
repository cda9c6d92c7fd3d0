"""What a build leaves on disk as it goes, so that the next one can go on after any crash.

OUT/.prepare/
build.json        the build under way: what it was asked for, how inputs are cut
units/<key>/      a finished unit: its shards, and `result.json`; its name stands for what it was made from
units/.tmp-<key>/ a unit under way, perhaps with a `checkpoint.json`
scans/<key>       hashes of the records of a unit, where duplicates are looked for
publish.json      units are being moved into the store: whoever finds it goes on with that first
inputs.json       the finished store: what it was asked for, and which files are in it
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import xxhash

from tokenmill.documents import InputFile, Unit, file_digest
from tokenmill.errors import StoreCorruptError, StoreExistsError
from tokenmill.fingerprint import canonical, digest, first_difference
from tokenmill.store.durable import OWNER, write_atomically
from tokenmill.store.layout import MANIFEST, is_shard_name
from tokenmill.store.writer import JOURNAL_FOLDER, ROWS_FOLDER

RESULT = "result.json"
CHECKPOINT = "checkpoint.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file that is in a store."""

    name: str
    bytes: int
    digest: str
    """Of its size and a sample of its content."""
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What a finished build was asked for, and what it took."""

    identity: Mapping[str, Any]
    routes: Sequence[str]
    """Stores below `out`; the empty name is `out` itself."""
    inputs: Sequence[Entry]
    counts: Mapping[str, int]
    """Records that were left out, by reason."""
    listed: Sequence[Mapping[str, Any]]
    """The first bad ones of them."""
    truncated: int
    text_bytes: int
    scans: Sequence[str]
    """Hashes of the records that are in the store, where duplicates are looked for."""


class Journal:
    """The folder `.prepare` of a store or of a family of stores."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out / JOURNAL_FOLDER
        self.units = self.folder / "units"
        self.scans = self.folder / "scans"

    def build(self) -> dict[str, Any] | None:
        """Return what the build under way was asked for, None if there is none."""
        return read_signed(self.folder / "build.json")

    def begin(self, identity: Mapping[str, Any], chunk_bytes: int, *, rebuild: bool) -> None:
        """Note a new build; what another left is removed."""
        self.drop()
        self.units.mkdir(parents=True, exist_ok=True)
        value = {"identity": dict(identity), "chunk_bytes": chunk_bytes, "rebuild": rebuild}
        write_signed(self.folder / "build.json", value)

    def drop(self) -> None:
        """Forget the build under way and its units, not the finished store."""
        (self.folder / "build.json").unlink(missing_ok=True)
        shutil.rmtree(self.units, ignore_errors=True)

    def ledger(self) -> Ledger | None:
        """Return what is in the finished store, None if there is none that prepare made."""
        value = read_signed(self.folder / "inputs.json")
        if value is None:
            return None
        return Ledger(**{**value, "inputs": [Entry(**entry) for entry in value["inputs"]]})

    def result(self, key: str) -> dict[str, Any] | None:
        """Return the result of a finished unit, None if it is not finished."""
        return read_signed(self.units / key / RESULT)


def write_signed(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with a checksum, whole or not at all."""
    checksum = xxhash.xxh3_128_hexdigest(canonical(dict(value)))
    write_atomically(path, orjson.dumps({**value, "checksum": checksum}))


def read_signed(path: Path) -> dict[str, Any] | None:
    """Read what `write_signed` wrote, None if it is not there."""
    try:
        value = orjson.loads(path.read_bytes())
        checksum = value.pop("checksum")
    except FileNotFoundError:
        return None
    except (orjson.JSONDecodeError, KeyError, AttributeError, TypeError):
        value, checksum = {}, ""
    if checksum != xxhash.xxh3_128_hexdigest(canonical(value)):
        raise StoreCorruptError(
            f"{path}: must be as prepare wrote it, got other content; start over with --rebuild"
        )
    return dict(value)


def unit_key(unit: Unit, digests: Mapping[str, str], fates: str) -> str:
    """Return the name that stands for what a unit is made from; `fates` for what is left out of it."""
    pieces = [[digests[piece.file.path], piece.file.suffix, piece.begin, piece.end] for piece in unit.pieces]
    return digest([pieces, fates])


def digests_of(files: Sequence[InputFile]) -> dict[str, str]:
    """Return by path what tells a changed file from the same one: a sample of the content, and the name."""
    return {file.path: digest([file.name.rsplit("/", 1)[-1], file_digest(file)]) for file in files}


def refuse_difference(out: Path, old: Mapping[str, Any], new: Mapping[str, Any], *, finished: bool) -> None:
    """Raise if a build was asked for otherwise than the one that is there; say where they differ first."""
    found = first_difference(dict(old), dict(new))
    if found is None:
        return
    path, before, after = found
    what = "a store must be added to as it was made" if finished else "an unfinished build must go on as it began"
    raise StoreExistsError(
        f"{out}: {what}, got {path} {before!r} -> {after!r}; "
        "give what was given before, choose another path, or start over with --rebuild"
    )


def refuse_strangers(out: Path, routes: Sequence[str]) -> None:
    """Raise if the folder holds what no build put there: nothing of it may be lost, or taken for a store's."""
    folders = {out: {JOURNAL_FOLDER}} | {out / route: set() for route in routes if route}
    for route in routes:
        parts = route.split("/") if route else []
        for depth, part in enumerate(parts):
            folders.setdefault(out.joinpath(*parts[:depth]), set()).add(part)
    for folder, known in folders.items():
        for child in sorted(folder.iterdir()) if folder.is_dir() else []:
            ours = child.name in {MANIFEST, ROWS_FOLDER, OWNER} | known or child.name.startswith(".tmp-")
            if not ours and not is_shard_name(child.name):
                raise StoreExistsError(
                    f"{folder}: must be a folder of its own for the store, got {child.name!r} in it; "
                    "choose another path"
                )
