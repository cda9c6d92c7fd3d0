"""The output of one unit of work: shards by route, counts, and checkpoints to go on from after a kill."""

from __future__ import annotations

import os
import re
import shutil
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from tokenmill.build.journal import RESULT, ROUTES, UnitCounts, UnitResult, read_signed, route_folder, write_signed
from tokenmill.documents import Unit
from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store import StoreSpec
from tokenmill.store.durable import sync_folder
from tokenmill.store.writer import ShardSeries
from tokenmill.tables import as_json, read_table
from tokenmill.types import AnyArray, Int64Array, Uint8Array

if TYPE_CHECKING:
    from tokenmill.encode.recipe import Recipe

_PROGRESS = struct.Struct("<3q")
_CHECKPOINT = "checkpoint.json"


class UnitWriter:
    """Writes a unit under a temporary name; `commit` gives it its own."""

    def __init__(self, units: Path, key: str, num_pieces: int, spec: StoreSpec) -> None:
        self.key = key
        self._final = units / key
        self._folder = units / f".tmp-{key}"
        self._spec = spec
        self._series: dict[str, ShardSeries] = {}
        self._latest: ShardSeries | None = None
        """The one whose files may be open."""
        self.counts = UnitCounts(lines=[0] * num_pieces)
        self._resume()
        self._progress = open(self._folder / "progress", "wb", buffering=0)  # noqa: SIM115 - closed by `close`
        self._saved = time.monotonic()

    def append(self, route: str, values: Mapping[str, AnyArray], offsets: Mapping[str, Int64Array]) -> None:
        """Add records to the shards of a route."""
        series = self._series.get(route)
        if series is None:
            # What stands there was begun after the checkpoint that this unit goes on from.
            shutil.rmtree(route_folder(self._folder, route), ignore_errors=True)
            series = self._series[route] = ShardSeries(route_folder(self._folder, route), self._spec)
        if self._latest is not None and self._latest is not series:
            self._latest.rest()
        self._latest = series
        series.append(values, offsets)

    def checkpoint(self, every_seconds: float) -> None:
        """Make all that was written so far durable, if the last time is long ago."""
        if time.monotonic() - self._saved < every_seconds:
            return
        state = {
            "counts": as_json(self.counts),
            "routes": {route: series.checkpoint() for route, series in self._series.items()},
        }
        write_signed(self._folder / _CHECKPOINT, state)
        self._saved = time.monotonic()

    def tell_progress(self, position: int) -> None:
        """Leave word of how far the unit has come, for whoever shows progress."""
        self._progress.seek(0)
        self._progress.write(_PROGRESS.pack(position, self.counts.documents, self.counts.tokens))

    def commit(self) -> UnitResult:
        """Finish all shards and give the unit its name: from here on it is done."""
        shards = {route: tuple(series.finish()) for route, series in sorted(self._series.items())}
        result = UnitResult(key=self.key, counts=self.counts, shards=shards)
        self.close()
        for name in ("progress", _CHECKPOINT):
            (self._folder / name).unlink(missing_ok=True)
        # Every folder on the way to a shard, as the name of each is kept in the one above.
        for folder, _, _ in os.walk(self._folder / ROUTES):
            sync_folder(Path(folder))
        write_signed(self._folder / RESULT, as_json(result))
        shutil.rmtree(self._final, ignore_errors=True)
        os.rename(self._folder, self._final)
        sync_folder(self._final.parent)
        return result

    def close(self) -> None:
        """Keep no file open; what was written stays as it is."""
        self._progress.close()
        if self._latest is not None:
            self._latest.rest()

    def _resume(self) -> None:
        """Go on from the last checkpoint, where it and the files are whole; else begin anew."""
        with suppress(StoreCorruptError, KeyError, TypeError, ValueError, OSError):
            state = read_signed(self._folder / _CHECKPOINT)
            if state is not None:
                self._series = {
                    route: ShardSeries.reopen(route_folder(self._folder, route), self._spec, saved)
                    for route, saved in state["routes"].items()
                }
                self.counts = read_table(UnitCounts, state["counts"], "counts", error=StoreCorruptError)
                return
        self._series = {}
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)


@contextmanager
def disk_errors_told(unit: Unit, folder: Path) -> Iterator[None]:
    """Say of an error of the system amid a unit what it means for the build."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{unit.pieces[0].file.path} to {folder}: reading and writing must work, got {error}; "
            "make room or mend the disk, and run again: it goes on from there"
        ) from error


def read_progress(folder: Path) -> tuple[int, int, int]:
    """Return (position, documents, tokens) that a unit has come to; zeros before its first batch."""
    try:
        data = (folder / "progress").read_bytes()
    except OSError:
        data = b""
    if len(data) != _PROGRESS.size:
        return 0, 0, 0
    position, documents, tokens = _PROGRESS.unpack(data)
    return position, documents, tokens


# Which records are taken, and which store each goes to.

ROUTE = ""
"""The route of a build with one store: `out` itself."""
SPLITS = ("train", "val")
TAKEN, DUPLICATE, SURPLUS = range(3)
_REASONS = (None, "duplicate", "max_items")
LEFT_OUT = frozenset({"duplicate", "max_items", "min_chars", "max_chars"})
"""Why a record is left out that is not a bad one."""
_SEED = 0x746F6B656E6D696C
"""Of the hash that sets records apart for validation, so that it is no other hash of the same content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What became of some records."""

    routes: Mapping[str, Int64Array]
    """Store below `out` -> which records go there, in order."""
    left_out: Mapping[str, int]
    """Records that were left out on purpose, by reason."""
    lost: Sequence[tuple[int, str]]
    """Records that cannot be routed: index and what their domain is instead of a name."""
    unfit: Int64Array
    """Records that the recipe will refuse."""
    num_eligible: int
    """Records that are long and short enough, and have a domain where one is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What decides over a record."""

    min_chars: int
    max_chars: int | None
    val_fraction: float
    domain: tuple[str, ...] | None
    """Names of the fields to go down by."""

    @classmethod
    def of(cls, recipe: Recipe) -> Rules:
        """Take them from a recipe."""
        chosen = recipe.preprocessing
        return cls(
            min_chars=chosen.min_chars,
            max_chars=chosen.max_chars,
            val_fraction=chosen.val_fraction,
            domain=tuple(chosen.domain_key.split(".")) if chosen.domain_key else None,
        )

    @property
    def trivial(self) -> bool:
        """Whether every record is taken and goes to one store."""
        return self.min_chars <= 0 and self.max_chars is None and not self.val_fraction and self.domain is None

    def too_short_or_long(self, content: str) -> str | None:
        """Return why a record is left out, None if it is taken."""
        if len(content) < self.min_chars:
            return "min_chars"
        return "max_chars" if self.max_chars is not None and len(content) > self.max_chars else None

    def has_domain(self, record: Mapping[str, Any] | None) -> bool:
        """Whether the domain of a record is a name, where one is asked for."""
        return self.domain is None or domain_name(_at(record, self.domain)) is not None

    def route(self, key: bytes, record: Mapping[str, Any] | None) -> str:
        """Return the store of a record that has a domain; `key` tells it from others."""
        parts = [] if self.domain is None else [str(domain_name(_at(record, self.domain)))]
        if self.val_fraction:
            parts.append(SPLITS[is_validation(key, self.val_fraction)])
        return "/".join(parts)


def select(
    contents: Sequence[str | None],
    records: Sequence[Mapping[str, Any]],
    rules: Rules,
    fates: Uint8Array | None,
    keys: Sequence[bytes] | None = None,
) -> Selection:
    """Decide over records by their content, which is None for those that will be refused.

    `keys` tell records apart, for the validation split.

    `fates` is `TAKEN`, `DUPLICATE` or `SURPLUS` for each eligible record, in order; None takes them all. That there
    are too few of them is for the caller to see, by `num_eligible`.
    """
    routes: dict[str, list[int]] = {}
    left_out: Counter[str] = Counter()
    lost: list[tuple[int, str]] = []
    unfit: list[int] = []
    place = 0
    for index, content in enumerate(contents):
        if content is None:
            unfit.append(index)
            continue
        record = records[index] if records else None
        reason = rules.too_short_or_long(content)
        if reason is None and not rules.has_domain(record):
            lost.append((index, repr(_at(record, rules.domain or ()))[:80]))
            continue
        if reason is None:
            reason = _REASONS[TAKEN if fates is None or place >= fates.size else fates[place]]
            place += 1
        if reason is not None:
            left_out[reason] += 1
            continue
        routes.setdefault(rules.route(keys[index] if keys else b"", record), []).append(index)
    return Selection(
        routes={route: np.array(indices, np.int64) for route, indices in sorted(routes.items())},
        left_out=left_out,
        lost=lost,
        unfit=np.array(unfit, np.int64),
        num_eligible=place,
    )


def is_validation(key: bytes, fraction: float) -> bool:
    """Say whether a record is set apart: by its content alone, so that it stays when files are added."""
    return xxhash.xxh3_64_intdigest(key, _SEED) < fraction * 2**64


def domain_name(value: object) -> str | None:
    """Return the name of the folder for a domain, None for what is no name.

    Other characters than letters, digits, `.`, `_` and `-` become `_`, and a hash tells such names apart.

    >>> domain_name("web"), domain_name("a/b")[:4], domain_name("..")[:3], domain_name(3)
    ('web', 'a_b-', '_.-', '3')
    """
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return None
    name = str(value)
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name[:1]) + re.sub(r"[^A-Za-z0-9._-]", "_", name[1:64])
    if plain == name and not re.fullmatch(r"shard-[0-9]{5,}(\.h5)?|manifest\.json", name):
        return name
    return f"{plain}-{xxhash.xxh3_64_hexdigest(name.encode(errors='surrogatepass'))[:8]}"


def _at(record: Mapping[str, Any] | None, path: tuple[str, ...]) -> object:
    value: object = record
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
