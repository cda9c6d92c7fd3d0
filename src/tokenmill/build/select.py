"""Selection of records, and the store of each: maps, filters, domains, splits, duplicates, limits."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from tokenmill.build.job import TEXT_KEY, MapRecord, OpenJob, Record
from tokenmill.documents import DocumentBatch, Unit
from tokenmill.encode import Refusal
from tokenmill.encode.recipe import Reading
from tokenmill.encode.recipe.encoder import TOO_LONG
from tokenmill.encode.recipe.recipe import Preprocessing
from tokenmill.encode.tokenizer import frame, with_second_bos
from tokenmill.fields import field_of
from tokenmill.types import RECORD_TYPES, AnyArray, Int64Array, Records, Refused, Uint8Array

T = TypeVar("T")
LEFT_OUT_BY_MAP = "map"
"""Reason of records that the user's function leaves out."""
MAX_KEPT = 1000
"""Maximum number of characters of a field that is kept with its document."""


def chosen_of(items: Sequence[T], indices: Int64Array | None) -> Sequence[T]:
    """Return items by index, all for None."""
    return items if indices is None else [items[index] for index in indices.tolist()]


class Documents:
    """Documents of a batch as a job reads them: texts, or records that its recipe reads."""

    def __init__(self, opened: OpenJob, batch: DocumentBatch, unit: Unit) -> None:
        self.opened = opened
        self.batch = batch
        self.unit = unit
        self.records: Sequence[Mapping[str, Any]] = ()
        """Empty if documents are texts."""
        self._readings: list[Reading] = []
        self.contents: Sequence[str | None] = batch.documents
        """Text of each document, for filters, hashes and splits; None if the recipe cannot read the record."""
        self._inputs: Int64Array | None = None
        """Index in the batch of the record that each record was mapped from; None without a map."""
        if opened.encoder:
            mapped = batch.documents
            if opened.map is not None:
                mapped, inputs = apply_map(opened.map, batch.documents)
                self._inputs = np.array(inputs, np.int64)
            self._readings = [
                Reading(record={}, reader=record) if isinstance(record, Refusal) else opened.encoder.read(record)
                for record in mapped
            ]
            self.records = [{} if isinstance(record, Refusal) else record for record in mapped]
            self.contents = [reading.content for reading in self._readings]

    def place(self, index: int) -> tuple[int, int]:
        """Return piece and line of one record."""
        return self.batch.place(index if self._inputs is None else int(self._inputs[index]))

    def _named(self, index: int) -> str:
        """Return the file and line of a record, for the limits of chat templates."""
        number, line = self.place(index)
        piece = self.unit.pieces[number]
        return f"{piece.file.path}:{line + 1}" + (f" from byte {piece.begin:,} on" if piece.begin else "")

    def places(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return pieces and lines of records."""
        return self.batch.places(indices if self._inputs is None else self._inputs[indices])

    def keys(self) -> list[bytes]:
        """Return the content by which each record is compared: its text, or all fields that the recipe may use.

        The texts of a conversation are not enough, because the roles are part of it.
        """
        names = self.opened.key_fields
        if not names:
            return [(text or "").encode(errors="surrogatepass") for text in self.contents]
        return [_canonical({name: record[name] for name in names if name in record}) for record in self.records]

    def kept_fields(self, indices: Int64Array) -> list[bytes]:
        """Return the fields to keep with documents, as JSON; an empty list if none are kept."""
        keep = self.opened.keep
        if not keep:
            return []
        # Kept fields of pairs, groups and prompts go into batches, so they must be whole.
        shortened = (lambda value: value) if self.opened.spec.kind in RECORD_TYPES else cut
        kept = ({name: field_of(self.records[index], name) for name in keep} for index in indices.tolist())
        return [
            _canonical({name: shortened(value) for name, value in each.items() if value is not None})
            for each in kept
        ]

    def num_without_kept(self, indices: Int64Array) -> int:
        """Return the number of records that lack a field to keep."""
        keep = self.opened.keep
        records = (self.records[index] for index in indices.tolist()) if keep else ()
        return sum(any(field_of(record, name) is None for name in keep) for record in records)

    def encode(self, indices: Int64Array | None) -> Records:
        """Encode documents by index, all for None."""
        if self.opened.encoder is not None:
            all_indices = range(len(self._readings)) if indices is None else indices.tolist()
            places = [self._named(index) for index in all_indices] if self.opened.encoder.chat else []
            return self.opened.encoder.encode(chosen_of(self._readings, indices), places)
        texts: Sequence[str] = chosen_of(self.batch.documents, indices)
        tokenizer, kept = self.opened.tokenizer, np.arange(len(texts))
        encoded = frame(tokenizer.encode(texts), tokenizer.identity)
        checked = self.opened.spec.ids_checked
        bad = [] if checked else with_second_bos(encoded.ids, encoded.offsets, tokenizer.identity)
        if bad:
            kept = np.delete(kept, bad)
            encoded = frame(tokenizer.encode([texts[index] for index in kept.tolist()]), tokenizer.identity)
        return Records(
            values={TEXT_KEY: encoded.ids},
            offsets={"documents": encoded.offsets},
            kept=kept,
            refused=[Refused(index=index, reason="second_bos", detail="two") for index in bad],
        )


def cut(value: object) -> object:
    """Return a value to keep; a long one is cut to its first characters, as text.

    >>> cut(7), cut("a" * 2000) == "a" * 1000 + "…", cut(["a"] * 999)[-1]
    (7, True, '…')
    """
    if isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else _canonical({"": value})[4:-1].decode()
    return value if len(text) <= MAX_KEPT else f"{text[:MAX_KEPT]}…"


def _canonical(record: Mapping[str, Any]) -> bytes:
    """Return equal bytes for equal records; values without a JSON type, such as dates, are written by `repr`."""
    try:
        return msgspec.json.encode(record, enc_hook=repr, order="sorted")
    except (TypeError, UnicodeEncodeError):  # a key that is no name, or half of a surrogate pair
        return json.dumps(record, sort_keys=True, default=repr).encode()


def apply_map(function: MapRecord, records: Sequence[Record]) -> tuple[list[Record | Refusal], list[int]]:
    """Return the records that a function makes of records, and the index of the input of each.

    A `Refusal` takes the place of a record that is left out, or for which the function fails.
    """
    mapped: list[Record | Refusal] = []
    inputs: list[int] = []
    for index, record in enumerate(records):
        made = _mapped(function, record)
        mapped += made
        inputs += [index] * len(made)
    return mapped, inputs


def _mapped(function: MapRecord, record: Record) -> Sequence[Record | Refusal]:
    """Return the records that a function makes of one record: at least one, or a refusal."""
    try:
        result = function(dict(record))
    except Exception as error:  # a function of the user may raise any exception
        return [Refusal("map_failed", f"{type(error).__name__}: {error}"[:200])]
    if result is None or isinstance(result, bool):
        result = [record] if result else []
    made: Sequence[Any] = result if isinstance(result, list | tuple) else [result]
    others = [type(item).__name__ for item in made if not isinstance(item, Mapping)]
    if others:
        return [Refusal("map_failed", f"{'a list with ' * (made is result)}{others[0]}, which is not a record")]
    return list(made) or [Refusal(LEFT_OUT_BY_MAP, "left out")]


# Selection and routing, by the content of a record and of the records before it.

ROUTE = ""
"""Route of a build with one store, which is `out` itself."""
SPLITS = ("train", "val")
TAKEN, DUPLICATE, SURPLUS = range(3)
_REASONS = (None, "duplicate", "max_items")
LEFT_OUT = frozenset({"duplicate", "max_items", "min_chars", "max_chars", "empty", TOO_LONG, LEFT_OUT_BY_MAP})
"""Reasons for which records are left out that are not bad."""
_SEED = 0x746F6B656E6D696C
"""Seed of the train/val split hash, which differs from every other hash of the content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Routes and reasons of the records of a batch."""

    routes: Mapping[str, Int64Array]
    """Route -> indices of its records, in order."""
    left_out: Mapping[str, int]
    """Reason -> number of records that were left out on purpose."""
    without_domain: Sequence[tuple[int, str]]
    """Records without a domain name: index, and the value that is not a name."""
    unfit: Int64Array
    """Indices of records that the recipe rejects."""
    num_eligible: int
    """Number of records that pass the filters by length and have a domain if they need one."""


def takes_all(chosen: Preprocessing) -> bool:
    """Return whether every record that is not empty is taken and goes to one store."""
    return not (chosen.min_chars or chosen.val_fraction or chosen.domain_key) and chosen.max_chars is None


def unwanted(content: str, opened: OpenJob) -> str | None:
    """Return the reason to leave out a record by its length; None to take it."""
    least, most = opened.chosen.min_chars, opened.chosen.max_chars
    if len(content) < least:
        return "min_chars"
    if most is not None and len(content) > most:
        return "max_chars"
    return None if content or opened.keep_empty else "empty"


def select(documents: Documents, fates: Uint8Array | None) -> Selection:
    """Select and route the records of a batch by their content.

    `fates` is `TAKEN`, `DUPLICATE` or `SURPLUS` for each eligible record, in order; None takes them all. The caller
    compares `num_eligible` with the number of fates.
    """
    chosen = documents.opened.chosen
    keys = documents.keys() if chosen.val_fraction else None
    routes: dict[str, list[int]] = {}
    left_out: Counter[str] = Counter()
    without_domain: list[tuple[int, str]] = []
    unfit: list[int] = []
    place = 0
    for index, content in enumerate(documents.contents):
        if content is None:
            unfit.append(index)
            continue
        record = documents.records[index] if documents.records else None
        reason = unwanted(content, documents.opened)
        if reason is None and not has_domain(record, chosen):
            without_domain.append((index, repr(_domain(record, chosen))[:80]))
            continue
        if reason is None:
            reason = _REASONS[TAKEN if fates is None or place >= fates.size else fates[place]]
            place += 1
        if reason is not None:
            left_out[reason] += 1
            continue
        route = [str(domain_name(_domain(record, chosen)))] if chosen.domain_key else []
        if keys is not None:
            route.append(SPLITS[is_validation(keys[index], chosen.val_fraction)])
        routes.setdefault("/".join(route), []).append(index)
    return Selection(
        routes={route: np.array(indices, np.int64) for route, indices in sorted(routes.items())},
        left_out=left_out,
        without_domain=without_domain,
        unfit=np.array(unfit, np.int64),
        num_eligible=place,
    )


def is_validation(key: bytes, fraction: float) -> bool:
    """Return whether a record belongs to `val`. Its content alone decides, so it stays when files are added."""
    return xxhash.xxh3_64_intdigest(key, _SEED) < fraction * 2**64


def domain_name(value: object) -> str | None:
    """Return the folder name of a domain; None for a value that is not a name.

    Characters other than letters, digits, `.`, `_` and `-` become `_`. A hash makes such names unique.

    >>> domain_name("web"), domain_name("a/b")[:4], domain_name("..")[:3], domain_name(3)
    ('web', 'a_b-', '_.-', '3')
    """
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return None
    name = str(value)
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name[:1]) + re.sub(r"[^A-Za-z0-9._-]", "_", name[1:64])
    if plain == name and not re.fullmatch(r"shard-[0-9]{5,}|manifest\.json", name):
        return name
    return f"{plain}-{xxhash.xxh3_64_hexdigest(name.encode(errors='surrogatepass'))[:8]}"


def has_domain(record: Mapping[str, Any] | None, chosen: Preprocessing) -> bool:
    """Return whether the domain of a record is a name, or no domain is needed."""
    return chosen.domain_key is None or domain_name(_domain(record, chosen)) is not None


def _domain(record: Mapping[str, Any] | None, chosen: Preprocessing) -> object:
    return None if record is None or chosen.domain_key is None else field_of(record, chosen.domain_key)


# Duplicates of earlier records, and records beyond `max_items`.
#
# Workers hash the records of all units first. The parent compares the hashes, part by part, so memory stays bounded
# except for one byte per record. Then the units are written, and each has the fate of its records in a file.

_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])
_HASHES_AT_ONCE = 1 << 22
"""Number of hashes that are compared at a time. Sorting them takes 100 MB."""


def with_checksum(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield all parts, and after them their XXH3-128, which has the size of a hash."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
        yield part
    yield state.digest()


def is_whole_scan(path: Path) -> bool:
    """Return whether the file with the hashes of a unit exists and is intact."""
    state = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size - _HASH.itemsize
            if left < 0 or left % _HASH.itemsize:
                return False
            while left and (block := file.read(min(left, 1 << 20))):
                state.update(block)
                left -= len(block)
            return state.digest() == file.read()
    except FileNotFoundError:
        return False


def fates_of(scans: Sequence[Path], *, deduplicate: bool, max_items: int | None) -> list[Uint8Array]:
    """Return the fates of the records of each scan. Later scans do not change those of earlier ones.

    The first record with a content is taken, later ones are duplicates. Of the records that are left, the first
    `max_items` are taken, all for None.
    """
    sizes = [path.stat().st_size // _HASH.itemsize - 1 for path in scans]
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
    """Compare the hashes of one part: those with `high % num_parts == part`."""
    hashes: list[AnyArray] = []
    places: list[Int64Array] = []
    for index, path in enumerate(scans):
        hashed = np.memmap(path, _HASH, "r")[: begins[index + 1] - begins[index]]
        in_part = np.flatnonzero(hashed["high"] % np.uint64(num_parts) == part)
        hashes.append(hashed[in_part])
        places.append(in_part + begins[index])
    if not hashes:
        return
    values, where = np.concatenate(hashes), np.concatenate(places)
    order = np.lexsort((where, values["low"], values["high"]))
    ordered = values[order]
    fates[where[order[1:][ordered[1:] == ordered[:-1]]]] = DUPLICATE
