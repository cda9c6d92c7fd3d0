"""Which records are taken, and which store each goes to: by their own content, and by that of those before them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tokenmill.encode.recipe.recipe import Preprocessing
from tokenmill.types import AnyArray, Int64Array, Uint8Array

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
    without_domain: Sequence[tuple[int, str]]
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
    def of(cls, chosen: Preprocessing) -> Rules:
        """Take them from a recipe."""
        return cls(
            min_chars=chosen.min_chars,
            max_chars=chosen.max_chars,
            val_fraction=chosen.val_fraction,
            domain=tuple(chosen.domain_key.split(".")) if chosen.domain_key else None,
        )

    @property
    def take_all(self) -> bool:
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
    without_domain: list[tuple[int, str]] = []
    unfit: list[int] = []
    place = 0
    for index, content in enumerate(contents):
        if content is None:
            unfit.append(index)
            continue
        record = records[index] if records else None
        reason = rules.too_short_or_long(content)
        if reason is None and not rules.has_domain(record):
            without_domain.append((index, repr(_at(record, rules.domain or ()))[:80]))
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
        without_domain=without_domain,
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


# Which records have the same content as an earlier one, and which are beyond the number that is wanted.
#
# Records are hashed in the workers first; the hashes of all are compared here, part by part, so that memory stays
# bounded but for one byte a record; then the units are run knowing the fate of each of their records.

_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])
_HASHES_AT_ONCE = 1 << 22
"""How many hashes are compared at a time: 100 MB with what sorting them takes."""


def fates_of(scans: Sequence[Path], *, deduplicate: bool, max_items: int | None) -> list[Uint8Array]:
    """Return for each scan what becomes of its records; those of scans that come first do not depend on later ones.

    The first record in order with a content is taken, later ones are duplicates; of those taken only the first
    `max_items` are, None for all.
    """
    sizes = [path.stat().st_size // _HASH.itemsize for path in scans]
    begins = np.cumsum([0, *sizes])
    fates: Uint8Array = np.full(int(begins[-1]), TAKEN, np.uint8)
    if deduplicate:
        num_parts = max(1, -(-int(begins[-1]) // _HASHES_AT_ONCE))
        for part in range(num_parts):
            _mark_duplicates(scans, begins, fates, part, num_parts)
    parts = [fates[int(begins[i]) : int(begins[i + 1])] for i in range(len(scans))]
    if max_items is not None:
        room = max_items
        for each in parts:
            taken = np.flatnonzero(each == TAKEN)
            each[taken[room:]] = SURPLUS
            room = max(0, room - taken.size)
    return parts


def _mark_duplicates(
    scans: Sequence[Path],
    begins: Int64Array,
    fates: Uint8Array,
    part: int,
    num_parts: int,
) -> None:
    """Compare the hashes of one part: those whose upper half leaves this rest."""
    hashes: list[AnyArray] = []
    places: list[Int64Array] = []
    for index, path in enumerate(scans):
        if not path.stat().st_size:
            continue
        hashed = np.memmap(path, _HASH, "r")
        in_part = np.flatnonzero(hashed["high"] % np.uint64(num_parts) == part)
        hashes.append(hashed[in_part])
        places.append(in_part + begins[index])
    if not hashes:
        return
    values, where = np.concatenate(hashes), np.concatenate(places)
    order = np.lexsort((where, values["low"], values["high"]))
    ordered = values[order]
    fates[where[order[1:][ordered[1:] == ordered[:-1]]]] = DUPLICATE
