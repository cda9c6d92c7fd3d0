"""What a build leaves on disk as it goes, so that the next one can go on after any crash.

OUT/.prepare/
build.json        the build under way: what it was asked for, how inputs are cut
units/<key>/      a finished unit: its shards, and `result.json`; its name stands for what it was made from
units/.tmp-<key>/ a unit under way, perhaps with a `checkpoint.json`
scans/<key>       hashes of the records of a unit, where duplicates are looked for or only so many are taken
fates/<digest>    what becomes of each record of a unit, where that is not the same for all
publish.json      units are being moved into the store: whoever finds it goes on with that first
inputs.json       the finished store: what it was asked for, and which files are in it
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import xxhash

from tokenmill.documents import Unit
from tokenmill.errors import StoreCorruptError, StoreExistsError
from tokenmill.fingerprint import canonical, digest, first_difference
from tokenmill.store.durable import make_folder, write_atomically
from tokenmill.store.layout import MANIFEST, is_shard_name
from tokenmill.store.manifest import read_manifest
from tokenmill.store.writer import JOURNAL_FOLDER, ROWS_FOLDER, TEMPORARY

BUILD = "build.json"
PUBLISH = "publish.json"
LEDGER = "inputs.json"
RESULT = "result.json"
CHECKPOINT = "checkpoint.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file that is in a store."""

    name: str
    bytes: int
    digest: str
    """Of its name without folders, its size and a sample of its content."""
    taken: Mapping[str, Sequence[int]]
    """Route -> documents and tokens that it gave; routes to which it gave none are left out."""


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
    notes: Mapping[str, int]
    text_bytes: int
    scans: Sequence[str]
    """Names of the hashes of its records, in order, where duplicates are looked for or only so many are taken."""


class Journal:
    """The folder `.prepare` of a store or of a family of stores."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out / JOURNAL_FOLDER
        self.units = self.folder / "units"
        self.scans = self.folder / "scans"

    def build(self) -> dict[str, Any] | None:
        """Return what the build under way was asked for, None if there is none."""
        return read_signed(self.folder / BUILD)

    def begin(self, identity: Mapping[str, Any], chunk_bytes: int, *, rebuild: bool) -> None:
        """Note a new build; what another left is removed."""
        self.drop()
        make_folder(self.units)
        value = {"identity": dict(identity), "chunk_bytes": chunk_bytes, "rebuild": rebuild}
        write_signed(self.folder / BUILD, value)

    def drop(self) -> None:
        """Forget the build under way and its units, not the finished store."""
        (self.folder / BUILD).unlink(missing_ok=True)
        shutil.rmtree(self.units, ignore_errors=True)

    def has_finished_units(self) -> bool:
        """Whether the build under way has come so far that there is something to lose."""
        return self.units.is_dir() and any(not name.startswith(".") for name in os.listdir(self.units))

    def ledger(self) -> Ledger | None:
        """Return what is in the finished store, None if there is none that prepare made."""
        value = read_signed(self.folder / LEDGER)
        if value is None:
            return None
        try:
            return Ledger(**{**value, "inputs": [Entry(**entry) for entry in value["inputs"]]})
        except (TypeError, KeyError) as error:
            raise StoreCorruptError(
                f"{self.folder / LEDGER}: must be of this version of tokenmill, got other fields ({error}); "
                "start over with --rebuild"
            ) from None

    def drop_unreadable(self) -> None:
        """Remove those of its files that are not as they were written, for a store that is built anew."""
        for name in (PUBLISH, BUILD, LEDGER):
            try:
                self.ledger() if name == LEDGER else read_signed(self.folder / name)
            except StoreCorruptError:
                (self.folder / name).unlink()


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
            f"{path}: must be as prepare wrote it, got other content; start over with --rebuild, or at another path"
        )
    return dict(value)


def unit_key(unit: Unit, digests: Mapping[str, str], how: Sequence[str]) -> str:
    """Return the name that stands for what a unit is made from, and `how`; units with the same content have one."""
    pieces = [[digests[piece.file.path], piece.file.suffix, piece.begin, piece.end] for piece in unit.pieces]
    return digest([pieces, list(how)])


def entry_digest(name: str, content: str) -> str:
    """Return what tells a changed file from the same one: of its name without folders, and its `file_digest`."""
    return digest([name.rsplit("/", 1)[-1], content])


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
            ours = child.name in {MANIFEST, ROWS_FOLDER} | TEMPORARY | known
            if not ours and not is_shard_name(child.name):
                raise StoreExistsError(
                    f"{folder}: must be a folder of its own for the store, got {child.name!r} in it; "
                    "choose another path"
                )


def refuse_left_shards(out: Path, routes: Sequence[str]) -> None:
    """Raise if there are shards that no manifest lists: new ones would have their names."""
    for route in {"", *routes}:
        listed = {shard.name for shard in read_manifest(out / route).shards} if route in routes else set()
        left = [child.name for child in (out / route).iterdir() if is_shard_name(child.name)]
        if strange := sorted(set(left) - listed):
            raise StoreExistsError(
                f"{out / route}: must hold no shards but those of its manifest, got {strange[0]!r}; "
                "choose another path, or --rebuild if it may be deleted"
            )
