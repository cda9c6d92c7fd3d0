"""One unit of work: read it, choose among its records, encode them, write its shards; go on from a checkpoint."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import filterfalse, repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import xxhash

from tokenmill.build import journal
from tokenmill.documents import BadRecord, DocumentBatch, ReadOptions, Unit, read_unit
from tokenmill.encode import Refusal
from tokenmill.encode.recipe import Reading, RecordEncoder
from tokenmill.encode.recipe.encoder import TOO_LONG
from tokenmill.encode.recipe.recipe import Preprocessing
from tokenmill.encode.tokenizer import Tokenizer, frame, with_second_bos
from tokenmill.errors import DocumentError, StoreCorruptError, StoreError
from tokenmill.fields import field_of
from tokenmill.store import StoreSpec
from tokenmill.store.files import make_folder, sync_folder, write_parts, write_parts_atomically
from tokenmill.store.lease import has_ended, this_process
from tokenmill.store.origins import OriginCheckpoint, OriginWriter
from tokenmill.store.writer import ShardSeries, token_starts
from tokenmill.tables import as_json, read_table
from tokenmill.types import RECORD_TYPES, AnyArray, Int64Array, Records, Refused, Uint8Array

T = TypeVar("T")
Record: TypeAlias = Mapping[str, Any]
MapRecord: TypeAlias = Callable[[dict[str, Any]], "Record | Sequence[Record] | bool | None"]
"""Function of the user that is called with every record. It returns the record to encode, or a list of records.
True keeps the record as it is. None, False and an empty list leave it out."""
LEFT_OUT_BY_MAP = "map"
"""Why a record is left out that the function made None of."""
TEXT_KEY = "sequence"
"""The array of a build whose records are nothing but a text."""
MAX_KEPT = 1000
"""Characters of a field that is kept."""
SECONDS_BETWEEN_NOTES = 0.2
_PROGRESS = struct.Struct("<32s6q")
FAILED = ".failed"
"""Ends the name of a file beside those of workers: the key of a unit, and why it failed."""
_CHECKPOINT = "checkpoint-2.json"
"""The number changes with the batches that a unit is read in: a checkpoint says after how many it was made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenJob:
    """What a process opens once to do all units of a job."""

    folder: Path
    """Where units are written."""
    stop: bool
    """Whether a bad record stops the build."""
    checkpoint_seconds: float
    keep_empty: bool
    """Whether a text without a character is a document as any other."""
    tokenizer: Tokenizer
    encoder: RecordEncoder | None
    """None where records are nothing but a text."""
    chosen: Preprocessing
    """Which records are taken."""
    keep: tuple[str, ...]
    """Fields of a record that are kept beside its document."""
    reading: ReadOptions
    spec: StoreSpec
    map: MapRecord | None
    """What the user's function makes of a record before anything else reads it."""
    key_fields: tuple[str, ...]
    """Fields that tell records apart; the domain is none of them. None where records are nothing but a text."""


def write_unit(
    opened: OpenJob, unit: Unit, key: str, fates: Uint8Array | None, tick: Callable[[], None]
) -> journal.UnitResult:
    """Turn a unit into finished shards, go on where an earlier attempt left off, or find that another has done it.

    Any number of processes may do the same unit at once. What goes wrong in one of them is of no account once
    another has done it, which also clears away what the others write.
    """
    known = journal.unit_result(opened.folder, key)
    if known is not None:
        return known
    try:
        with disk_errors_explained(unit, opened.folder):
            return _attempt(opened, unit, key, fates, tick)
    except Exception as error:  # a file that was cleared away under it may be missed anywhere
        known = journal.unit_result(opened.folder, key)
        if known is None:
            _note_failure(opened, key, str(error))
            raise
        shutil.rmtree(attempts_at(opened.folder, key), ignore_errors=True)
        return known


def _note_failure(opened: OpenJob, key: str, why: str) -> None:
    """Write why a unit failed, for those who look at the build; where it cannot be written, nothing is lost."""
    with suppress(OSError):
        (opened.folder.parent / journal.WORKERS / f"{key}{FAILED}").write_text(why[:1000], encoding="utf-8")


def _attempt(
    opened: OpenJob, unit: Unit, key: str, fates: Uint8Array | None, tick: Callable[[], None]
) -> journal.UnitResult:
    (opened.folder.parent / journal.WORKERS / f"{key}{FAILED}").unlink(missing_ok=True)
    writer = UnitWriter(opened.folder, key, len(unit.pieces), opened.spec, keeps=bool(opened.keep))
    with closing(writer):
        counts = writer.counts
        done, wanted = counts.batches, _num_wanted(fates)
        progress = WorkerFile(opened.folder.parent / journal.WORKERS, unit.bytes, resumed=done > 0)
        if not done:
            progress.note(key, 0, counts)
        for number, batch in enumerate(read_unit(unit, opened.reading)):
            if number < done:
                continue  # before the checkpoint that this unit goes on from
            if fates is not None and wanted < fates.size and counts.place >= wanted:
                # All that is left is beyond max_items: counted, and good or bad not looked at.
                journal.add_counts(counts.skipped, {"max_items": len(batch.documents) + _num_lost(batch.bad)})
                continue
            counts.note_bad(_take(opened, batch, fates, writer))
            stopping = [bad for bad in counts.bad if opened.stop or bad.reason == TOO_LONG]
            if stopping:
                bad = stopping[0]
                _note_failure(opened, key, f"{unit.pieces[bad.piece].file.path}: {bad.reason}, {bad.detail}")
                return journal.UnitResult(key=key, counts=counts, shards={}, finished=False)
            for run in batch.runs:
                counts.lines[run.piece] += run.num_lines
            counts.batches += 1
            progress.note(key, min(batch.position, unit.bytes), counts)
            writer.checkpoint(opened.checkpoint_seconds)
            tick()
        if fates is not None and wanted < fates.size and counts.place >= wanted:
            counts.place = fates.size
        if fates is not None and counts.place != fates.size:
            raise DocumentError(
                f"{unit.pieces[0].file.path}: must have the {fates.size} records in which duplicates were looked "
                f"for, got {counts.place}; let nothing write to the input, and start over with rebuild=True"
            )
        return writer.commit()


def _num_lost(bad: Sequence[BadRecord]) -> int:
    return sum(record.count for record in bad)


def _num_wanted(fates: Uint8Array | None) -> int:
    """Return how many records there are before those that are all beyond `max_items`."""
    if fates is None:
        return 0
    wanted = np.flatnonzero(fates != SURPLUS)
    return int(wanted[-1]) + 1 if wanted.size else 0


def _take(opened: OpenJob, batch: DocumentBatch, fates: Uint8Array | None, writer: UnitWriter) -> list[BadRecord]:
    """Choose among the records of a batch, encode them, add them to the shards of their routes; return bad ones."""
    counts, bad = writer.counts, list(batch.bad)
    documents = _Documents(opened, batch)
    if fates is None and takes_all(opened.chosen) and (opened.keep_empty or "" not in documents.contents):
        return bad + _append(documents, ROUTE, None, writer)
    left = None if fates is None else fates[counts.place :]
    chosen = _select(documents, left)
    journal.add_counts(counts.skipped, chosen.left_out)
    counts.place += chosen.num_eligible
    for index, value in chosen.without_domain:
        piece, line = documents.place(index)
        bad.append(BadRecord(piece=piece, line=line, reason="domain", detail=value))
    for route, indices in chosen.routes.items():
        bad += _append(documents, route, indices, writer)
    if chosen.unfit.size:
        records = documents.encode(chosen.unfit)
        assert not records.kept.size, "a record without content must be refused"
        bad += _refused(documents, chosen.unfit, records, counts)
    last = max((int(indices[-1]) for indices in chosen.routes.values()), default=None)
    if left is not None and last is not None and SURPLUS in left[: chosen.num_eligible]:
        # Records that are not wanted may be bad.
        before = [record for record in bad if (record.piece, record.line) < documents.place(last)]
        journal.add_counts(counts.skipped, {"max_items": _num_lost(bad) - _num_lost(before)})
        bad = before
    return bad


def _append(documents: _Documents, route: str, indices: Int64Array | None, writer: UnitWriter) -> list[BadRecord]:
    """Encode some documents of a batch, None for all, and add them to a route; return those that are refused."""
    counts = writer.counts
    records = documents.encode(indices)
    chosen: Int64Array = np.arange(len(documents.contents)) if indices is None else indices
    if records.kept.size:
        kept, sizes = chosen[records.kept], np.diff(token_starts(documents.opened.spec, records.offsets))
        pieces, lines = documents.places(kept)
        if records.noted:
            before = sum(documents for _, documents, _ in counts.taken.get(route, ()))
            firsts = counts.noted.setdefault(route, {})
            for name, place in records.noted.items():
                firsts.setdefault(name, before + place)
        writer.append(route, records.values, records.offsets)
        writer.note_origins(route, pieces, lines, documents.kept_fields(kept))
        if pieces[0] == pieces[-1]:  # as nearly always
            counts.note_taken(route, int(pieces[0]), kept.size, int(sizes.sum()))
        else:
            numbers, of_piece = np.unique(pieces, return_inverse=True)
            taken = zip(numbers, np.bincount(of_piece), np.bincount(of_piece, sizes), strict=True)
            for piece, num_documents, num_tokens in taken:
                counts.note_taken(route, int(piece), int(num_documents), int(num_tokens))
        counts.text_bytes += _num_bytes(
            _chosen(documents.contents, None if kept.size == len(documents.contents) else kept)
        )
    counts.truncated += records.truncated
    journal.add_counts(counts.notes, records.notes)
    return _refused(documents, chosen, records, counts)


def _chosen(items: Sequence[T], indices: Int64Array | None) -> Sequence[T]:
    """Return some items, None for all."""
    return items if indices is None else [items[index] for index in indices.tolist()]


def _refused(
    documents: _Documents, indices: Int64Array, records: Records, counts: journal.UnitCounts
) -> list[BadRecord]:
    """Say where the records are that could not be encoded; those that are left out on purpose are counted."""
    on_purpose = {LEFT_OUT_BY_MAP} | ({TOO_LONG} if documents.opened.chosen.on_long == "drop" else set())
    bad = []
    for refused in records.refused:
        if refused.reason in on_purpose:
            journal.add_counts(counts.skipped, {refused.reason: 1})
            continue
        piece, line = documents.place(int(indices[refused.index]))
        bad.append(BadRecord(piece=piece, line=line, reason=refused.reason, detail=refused.detail))
    return bad


def _num_bytes(contents: Sequence[str | None]) -> int:
    """Return the size of texts as UTF-8, which Python has at hand once the tokenizer has asked for it."""
    texts = [text for text in contents if text is not None]
    return sum(map(len, texts)) + sum(
        len(text.encode(errors="surrogatepass")) - len(text) for text in filterfalse(str.isascii, texts)
    )


def scan_unit(opened: OpenJob, unit: Unit, key: str, tick: Callable[[], None]) -> None:
    """Write the hashes of the records of a unit that are eligible, in order (see `fates_of`)."""
    scans = opened.folder.parent / "scans"
    with disk_errors_explained(unit, scans):
        make_folder(scans)
        # Two attempts may be under way at once; they give the same.
        writer = f"-{this_process()}-{secrets.token_hex(4)}"
        write_parts_atomically(scans / key, _with_checksum(_hashes(opened, unit, key, tick)), writer=writer)


def _hashes(opened: OpenJob, unit: Unit, key: str, tick: Callable[[], None]) -> Iterator[bytes]:
    chosen, counts = opened.chosen, journal.UnitCounts(lines=[])
    progress = WorkerFile(opened.folder.parent / journal.WORKERS, unit.bytes, resumed=False)
    progress.note(key, 0, counts)
    for batch in read_unit(unit, opened.reading):
        progress.note(key, min(batch.position, unit.bytes), counts)
        documents = _Documents(opened, batch)
        records = documents.records or repeat(None)
        yield b"".join(
            xxhash.xxh3_128_digest(key)
            for content, key, record in zip(documents.contents, documents.keys(), records, strict=False)
            if content is not None and _unwanted(content, opened) is None and has_domain(record, chosen)
        )
        tick()


class _Documents:
    """The documents of a batch as a job takes them: texts, or records that its recipe reads."""

    def __init__(self, opened: OpenJob, batch: DocumentBatch) -> None:
        self.opened = opened
        self.batch = batch
        self.records: Sequence[Mapping[str, Any]] = ()
        """None where documents are texts."""
        self._readings: list[Reading] = []
        self.contents: Sequence[str | None] = batch.documents
        """Of each the text that filters, hashes and splits go by; None where it fits no recipe."""
        self._inputs: Int64Array | None = None
        """For each record, the index in the batch of the record that it was made from; None: it is its own."""
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
        """Return the piece and the line of one record."""
        return self.batch.place(index if self._inputs is None else int(self._inputs[index]))

    def places(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the piece and the line of each of some records."""
        return self.batch.places(indices if self._inputs is None else self._inputs[indices])

    def keys(self) -> list[bytes]:
        """Return of each what tells it from others: its text, or all fields that the recipe may use.

        The texts of a conversation alone would not do: who said what is part of it.
        """
        names = self.opened.key_fields
        if not names:
            return [(text or "").encode(errors="surrogatepass") for text in self.contents]
        return [_canonical({name: record[name] for name in names if name in record}) for record in self.records]

    def kept_fields(self, indices: Int64Array) -> list[bytes]:
        """Return of some of them the fields that are kept, as JSON; nothing where none are."""
        keep = self.opened.keep
        if not keep:
            return []
        # What records of pairs, groups and prompts keep goes into batches: it must be whole.
        shortened = (lambda value: value) if self.opened.spec.kind in RECORD_TYPES else cut
        kept = ({name: field_of(self.records[index], name) for name in keep} for index in indices.tolist())
        return [
            _canonical({name: shortened(value) for name, value in each.items() if value is not None})
            for each in kept
        ]

    def encode(self, indices: Int64Array | None) -> Records:
        """Turn some of them into arrays, None for all."""
        if self.opened.encoder is not None:
            return self.opened.encoder.encode(_chosen(self._readings, indices))
        texts: Sequence[str] = _chosen(self.batch.documents, indices)
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
    """Return a value that is kept; of a long one the first characters, as text.

    >>> cut(7), cut("a" * 2000) == "a" * 1000 + "…", cut(["a"] * 999)[-1]
    (7, True, '…')
    """
    if isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else _canonical({"": value})[4:-1].decode()
    return value if len(text) <= MAX_KEPT else f"{text[:MAX_KEPT]}…"


def _canonical(record: Mapping[str, Any]) -> bytes:
    """Return one text for equal records; what JSON does not know, such as a date of a Parquet file, by its name."""
    try:
        return msgspec.json.encode(record, enc_hook=repr, order="sorted")
    except (TypeError, UnicodeEncodeError):  # a key that is no name, or half of a surrogate pair
        return json.dumps(record, sort_keys=True, default=repr).encode()


def apply_map(function: MapRecord, records: Sequence[Record]) -> tuple[list[Record | Refusal], list[int]]:
    """Return the records that a function makes of records, and the index of the input of each.

    A record that is left out, or for which the function fails, is a `Refusal` in its place.
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


# Which records are taken, and which store each goes to: by their own content, and by that of those before them.

ROUTE = ""
"""The route of a build with one store: `out` itself."""
SPLITS = ("train", "val")
TAKEN, DUPLICATE, SURPLUS = range(3)
_REASONS = (None, "duplicate", "max_items")
LEFT_OUT = frozenset({"duplicate", "max_items", "min_chars", "max_chars", "empty", TOO_LONG, LEFT_OUT_BY_MAP})
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
    """Records of the lengths that are wanted, with a domain where one is asked for."""


def takes_all(chosen: Preprocessing) -> bool:
    """Whether every record that is not empty is taken and goes to one store."""
    return not (chosen.min_chars or chosen.val_fraction or chosen.domain_key) and chosen.max_chars is None


def _unwanted(content: str, opened: OpenJob) -> str | None:
    """Return why a record is left out by its length, None if it is not."""
    least, most = opened.chosen.min_chars, opened.chosen.max_chars
    if len(content) < least:
        return "min_chars"
    if most is not None and len(content) > most:
        return "max_chars"
    return None if content or opened.keep_empty else "empty"


def _select(documents: _Documents, fates: Uint8Array | None) -> Selection:
    """Decide over the records of a batch by their content, which is None for those that will be refused.

    `fates` is `TAKEN`, `DUPLICATE` or `SURPLUS` for each eligible record, in order; None takes them all. That there
    are too few of them is for the caller to see, by `num_eligible`.
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
        reason = _unwanted(content, documents.opened)
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


def has_domain(record: Mapping[str, Any] | None, chosen: Preprocessing) -> bool:
    """Whether the domain of a record is a name, where one is asked for."""
    return chosen.domain_key is None or domain_name(_domain(record, chosen)) is not None


def _domain(record: Mapping[str, Any] | None, chosen: Preprocessing) -> object:
    return None if record is None or chosen.domain_key is None else field_of(record, chosen.domain_key)


# Which records have the same content as an earlier one, and which are beyond the number that is wanted.
#
# Records are hashed in the workers first; the hashes of all are compared here, part by part, so that memory stays
# bounded but for one byte a record; then the units are run knowing the fate of each of their records.

_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])
_HASHES_AT_ONCE = 1 << 22
"""How many hashes are compared at a time: 100 MB with what sorting them takes."""


def _with_checksum(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Put the XXH3-128 of all parts behind them: as many bytes as a hash has."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
        yield part
    yield state.digest()


def is_whole_scan(path: Path) -> bool:
    """Tell whether the hashes of a unit are there, as they were written."""
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
    """Return for each scan what becomes of its records; those of scans that come first do not depend on later ones.

    The first record in order with a content is taken, later ones are duplicates; of those taken only the first
    `max_items` are, None for all.
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
    """Compare the hashes of one part: those whose upper half leaves this rest."""
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


# The files of a unit.


def attempts_at(units: Path, key: str) -> Path:
    """Return the folder of the attempts at a unit: they are gone when it is done."""
    return units / f".tmp-{key}"


class UnitWriter:
    """One attempt at a unit, in a folder of its own; `commit` makes it the unit, unless another attempt is already.

    What an attempt writes is a function of the unit alone, so it does not matter which of several comes first. One
    goes on from the checkpoint of another: of one whose process has ended in its place, else in a copy of it.
    """

    def __init__(self, units: Path, key: str, num_pieces: int, spec: StoreSpec, *, keeps: bool = False) -> None:
        self.key = key
        self._keeps = keeps
        self._units = units
        self._attempts = attempts_at(units, key)
        self._folder = self._attempts / f"{this_process()}-{secrets.token_hex(4)}"
        self._spec = spec
        self._series: dict[str, ShardSeries] = {}
        self._origins: dict[str, OriginWriter] = {}
        self._latest = ""
        """The route whose files may be open."""
        self.counts = journal.UnitCounts(lines=[0] * num_pieces)
        self._attempts.mkdir(exist_ok=True)  # not those above: where they are gone, the build is over
        self._resume()
        self._saved = time.monotonic()

    def append(self, route: str, values: Mapping[str, AnyArray], offsets: Mapping[str, Int64Array]) -> None:
        """Add records to the shards of a route."""
        series = self._series.get(route)
        if series is None:
            # What stands there was begun after the checkpoint that this unit goes on from.
            shutil.rmtree(journal.route_folder(self._folder, route), ignore_errors=True)
            series = self._series[route] = ShardSeries(journal.route_folder(self._folder, route), self._spec)
        if self._latest != route:
            self.close()  # a build may have thousands of routes, and write to them in turn
        self._latest = route
        series.append(values, offsets)

    def note_origins(self, route: str, pieces: Int64Array, lines: Int64Array, kept: Sequence[bytes]) -> None:
        """Note where records come from that were added to a route just now."""
        if route not in self._origins:
            self._origins[route] = OriginWriter(journal.route_folder(self._folder, route), keeps=self._keeps)
        self._origins[route].append(pieces, lines, kept)

    def checkpoint(self, every_seconds: float) -> None:
        """Make all that was written so far durable, if the last time is long ago."""
        if time.monotonic() - self._saved < every_seconds:
            return
        state = {
            "counts": as_json(self.counts),
            "routes": {route: series.checkpoint() for route, series in self._series.items()},
            "origins": {route: as_json(origins.sync()) for route, origins in self._origins.items()},
        }
        journal.write_signed(self._folder / _CHECKPOINT, state)
        self._saved = time.monotonic()

    def commit(self) -> journal.UnitResult:
        """Finish all shards and make this attempt the unit: from here on it is done."""
        shards = {route: tuple(series.finish()) for route, series in sorted(self._series.items())}
        origins = {route: each.sync().files for route, each in sorted(self._origins.items())}
        result = journal.UnitResult(key=self.key, counts=self.counts, shards=shards, origins=origins)
        self.close()
        (self._folder / _CHECKPOINT).unlink(missing_ok=True)
        # Every folder on the way to a shard, as the name of each is kept in the one above.
        for folder, _, _ in os.walk(self._folder / journal.ROUTES):
            sync_folder(Path(folder))
        # By its own name: the folder has a temporary one still.
        write_parts(self._folder / journal.RESULT, (journal.signed(as_json(result)),))
        sync_folder(self._folder)
        # A build that is over was cleared away, perhaps while this one was paused.
        journal.check_unit(self._folder, result)
        final = self._units / self.key
        try:
            os.rename(self._folder, final)
        except OSError:
            # Another attempt was first: the same bytes. Unless its files were damaged since: then it makes room.
            known = journal.unit_result(self._units, self.key)
            if known is None:
                os.rename(final, self._folder.with_name(f"{self._folder.name}-damaged"))
                os.rename(self._folder, final)
        sync_folder(self._units)
        shutil.rmtree(self._attempts, ignore_errors=True)
        return result

    def close(self) -> None:
        """Keep no file open; what was written stays as it is."""
        for writers in (self._series, self._origins):
            if self._latest in writers:
                writers[self._latest].close_files()

    def _resume(self) -> None:
        """Go on from the checkpoint of another attempt that has come furthest and is whole; else begin anew."""
        checkpoints: list[tuple[int, Path]] = []
        for attempt in self._attempts.iterdir():
            with suppress(StoreCorruptError, KeyError, TypeError, OSError):
                state = journal.read_signed(attempt / _CHECKPOINT)
                if state is not None:
                    checkpoints.append((int(state["counts"]["batches"]), attempt))
        for _, attempt in sorted(checkpoints, reverse=True):
            with suppress(StoreCorruptError, KeyError, TypeError, ValueError, OSError, shutil.Error):
                if has_ended(attempt.name.rpartition("-")[0]):
                    os.rename(attempt, self._folder)
                else:
                    shutil.copytree(attempt, self._folder)
                self._reopen()
                return
            self._series, self._origins = {}, {}
            self.counts = journal.UnitCounts(lines=[0] * len(self.counts.lines))
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()

    def _reopen(self) -> None:
        """Go on from the checkpoint in the folder; raise where it or the files are not whole."""
        state = journal.read_signed(self._folder / _CHECKPOINT)
        if state is None:
            raise KeyError(_CHECKPOINT)
        self._series = {
            route: ShardSeries.reopen(journal.route_folder(self._folder, route), self._spec, saved)
            for route, saved in state["routes"].items()
        }
        for route, saved in state["origins"].items():
            origin = read_table(OriginCheckpoint, saved, "origins", error=StoreCorruptError)
            folder = journal.route_folder(self._folder, route)
            self._origins[route] = OriginWriter(folder, keeps=self._keeps, saved=origin)
        self.counts = read_table(journal.UnitCounts, state["counts"], "counts", error=StoreCorruptError)


class WorkerFile:
    """The file in which a worker says how far it is with its unit, for whoever shows progress.

    A worker has one, whatever it does, so that nobody has to look for units under way among thousands.
    """

    def __init__(self, folder: Path, unit_bytes: int, *, resumed: bool) -> None:
        self._path = folder / f"{this_process()}-{threading.get_native_id()}"
        self._unit_bytes = unit_bytes
        self._last = 0.0
        self._first = None if resumed else (time.monotonic(), 0)
        """Since when it works at the unit, and from where on: if a checkpoint was before, both are noted first."""

    def note(self, key: str, position: int, counts: journal.UnitCounts) -> None:
        """Say how far a unit is, if the last time is a while ago; where it cannot be said, nothing is lost."""
        now = time.monotonic()
        if now - self._last < SECONDS_BETWEEN_NOTES:
            return
        self._last = now
        self._first = self._first or (now, position)
        took = (round(1000 * (now - self._first[0])), position - self._first[1])
        note = (key.encode(), position, counts.documents, counts.tokens, self._unit_bytes, *took)
        with suppress(OSError):
            self._path.write_bytes(_PROGRESS.pack(*note))


class WorkerNote(NamedTuple):
    """What a worker says of its unit."""

    key: str
    position: int
    """Bytes of input that are done, and documents and tokens of them."""
    documents: int
    tokens: int
    unit_bytes: int
    """Of all its input."""
    milliseconds: int
    """For which it has worked at it, and the bytes that were done in them."""
    bytes: int


def read_worker_file(path: Path) -> WorkerNote | None:
    """Return what a worker says of the unit that it is at."""
    try:
        key, *numbers = _PROGRESS.unpack(path.read_bytes())
        return WorkerNote(key.decode(), *numbers)
    except (OSError, struct.error, UnicodeDecodeError):
        return None


def read_worker_files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return of each unit that a worker is at, by its key: the bytes of input, documents and tokens it has done."""
    done: dict[str, tuple[int, int, int]] = {}
    with suppress(OSError):
        for entry in os.scandir(folder):
            note = read_worker_file(Path(entry.path))
            if note is not None:
                done[note.key] = max(done.get(note.key, (0, 0, 0)), note[1:4])
    return done


@contextmanager
def disk_errors_explained(unit: Unit, folder: Path) -> Iterator[None]:
    """Turn an error of the system during a unit into one that says what to do."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{unit.pieces[0].file.path} to {folder}: reading and writing must work, got {error}; "
            "make room or mend the disk, and run again: it goes on from there"
        ) from error
