"""One unit of work: read it, choose among its records, encode them, write its shards; go on from a checkpoint."""

from __future__ import annotations

import gc
import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import filterfalse, repeat
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import xxhash

from tokenmill.build.job import TEXT_KEY, Job, OpenJob, open_job
from tokenmill.build.journal import (
    RESULT,
    ROUTES,
    Bad,
    UnitCounts,
    UnitResult,
    add_counts,
    read_signed,
    route_folder,
    write_signed,
)
from tokenmill.build.select import ROUTE, SURPLUS, select
from tokenmill.documents import DocumentBatch, ReadOptions, Unit, read_unit
from tokenmill.encode.frame import frame, with_second_bos
from tokenmill.encode.recipe import Reading
from tokenmill.errors import DocumentError, StoreCorruptError, StoreError
from tokenmill.store import StoreSpec
from tokenmill.store.durable import make_folder, sync_folder, write_parts_atomically
from tokenmill.store.layout import axis_of, token_keys
from tokenmill.store.writer import ShardSeries
from tokenmill.tables import as_json, read_table
from tokenmill.types import AnyArray, Int64Array, Records, Refused, Uint8Array

_PROGRESS = struct.Struct("<3q")
_CHECKPOINT = "checkpoint.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One unit and what is to be done with it."""

    unit: Unit
    key: str
    """Name of what comes out; no other task of a build has it."""
    scan: bool = False
    """Whether its records are hashed only."""
    fates: str | None = None
    """File that says what becomes of each record; None: all are taken."""


def run_unit(job: bytes, task: bytes) -> bytes:
    """Do a task of a job, in any process that sees its files: JSON in, JSON out.

    What it writes is a function of the input and the options alone. A process opens a job once.
    """
    return msgspec.json.encode(run_task(_opened(job), msgspec.json.decode(task, type=Task)))


@lru_cache(maxsize=1)
def _opened(job: bytes) -> OpenJob:
    return open_job(msgspec.json.decode(job, type=Job))


def run_task(opened: OpenJob, task: Task, tick: Callable[[], None] = lambda: None) -> UnitResult | None:
    """Do a task, and return what came of its unit; None where it was hashed only."""
    with seldom_collecting():
        if task.scan:
            scan_unit(opened, task.unit, task.key, tick)
            return None
        fates = None if task.fates is None else np.frombuffer(Path(task.fates).read_bytes(), np.uint8)
        return write_unit(opened, task.unit, task.key, fates, tick)


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Let Python look for cycles seldom: records come and go by the thousand, and none is part of one.

    It takes a tenth of the time of a build else, much of it amid the tokenizer (benchmarks/prepare.py).
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def write_unit(
    opened: OpenJob, unit: Unit, key: str, fates: Uint8Array | None, tick: Callable[[], None]
) -> UnitResult:
    """Turn a unit into finished shards, or go on where an earlier try left off."""
    folder, options = Path(opened.job.folder), opened.job.options
    with (
        disk_errors_explained(unit, folder),
        closing(UnitWriter(folder, key, len(unit.pieces), opened.spec)) as writer,
    ):
        counts = writer.counts
        done, wanted = counts.batches, _num_wanted(fates)
        for number, batch in enumerate(joined(unit, opened.reading)):
            if number < done:
                continue  # before the checkpoint that this unit goes on from
            if fates is not None and wanted < fates.size and counts.place >= wanted:
                # All that is left is beyond max_items: counted, and good or bad not looked at.
                add_counts(counts.skipped, {"max_items": batch.num_records + len(batch.bad)})
                continue
            counts.note_bad(_take(opened, batch, fates, writer))
            if counts.bad and options.on_error == "stop":
                return UnitResult(key=key, counts=counts, shards={}, finished=False)
            for _, part in batch.runs:
                counts.lines[part.piece] += part.num_lines
            counts.batches += 1
            writer.note_progress(min(batch.position, unit.bytes))
            writer.checkpoint(options.checkpoint_seconds)
            tick()
        if fates is not None and wanted < fates.size and counts.place >= wanted:
            counts.place = fates.size
        if fates is not None and counts.place != fates.size:
            raise DocumentError(
                f"{unit.pieces[0].file.path}: must have the {fates.size} records in which duplicates were looked "
                f"for, got {counts.place}; let nothing write to the input, and start over with --rebuild"
            )
        return writer.commit()


def _num_wanted(fates: Uint8Array | None) -> int:
    """Return how many records there are before those that are all beyond `max_items`."""
    if fates is None:
        return 0
    wanted = np.flatnonzero(fates != SURPLUS)
    return int(wanted[-1]) + 1 if wanted.size else 0


def _take(opened: OpenJob, batch: Joined, fates: Uint8Array | None, writer: UnitWriter) -> list[Bad]:
    """Choose among the records of a batch, encode them, add them to the shards of their routes; return bad ones."""
    counts = writer.counts
    bad = list(batch.bad)
    if not batch.num_records:
        return bad
    contents = _contents(opened, batch)
    if opened.rules.take_all and fates is None:
        bad += _append(opened, batch, contents, ROUTE, None, writer)
    else:
        left = None if fates is None else fates[counts.place :]
        keys = _keys(opened, batch) if opened.rules.val_fraction else None
        chosen = select(contents, batch.records, opened.rules, left, keys)
        add_counts(counts.skipped, chosen.left_out)
        counts.place += chosen.num_eligible
        bad += [_bad(batch, index, "domain", f"{value}") for index, value in chosen.without_domain]
        for route, indices in chosen.routes.items():
            bad += _append(opened, batch, contents, route, indices, writer)
        if chosen.unfit.size:
            refused = _encode(opened, batch, chosen.unfit)
            assert not refused.kept.size, "a record without content must be refused"
            bad += _refused(batch, chosen.unfit, refused)
        last = max((int(indices[-1]) for indices in chosen.routes.values()), default=None)
        if left is not None and last is not None and SURPLUS in left[: chosen.num_eligible]:
            # What is wrong with records that are not wanted is nobody's trouble.
            before = [one for one in bad if (one.piece, one.line) < batch.place(last)]
            add_counts(counts.skipped, {"max_items": len(bad) - len(before)})
            bad = before
    return bad


def _append(
    opened: OpenJob,
    batch: Joined,
    contents: Sequence[str | None],
    route: str,
    indices: Int64Array | None,
    writer: UnitWriter,
) -> list[Bad]:
    """Encode some records of a batch for a route, None for all, and add them; return those that are refused."""
    records = _encode(opened, batch, indices)
    chosen: Int64Array = np.arange(batch.num_records) if indices is None else indices
    if records.kept.size:
        writer.append(route, records.values, records.offsets)
        kept = chosen[records.kept]
        _note_taken(opened, batch, kept, route, records, writer)
        texts = contents if kept.size == len(contents) else [contents[index] for index in kept.tolist()]
        if opened.encoder is not None:
            texts = [text for text in texts if text is not None]
        writer.counts.text_bytes += _num_bytes(cast("Sequence[str]", texts))
    writer.counts.truncated += records.truncated
    add_counts(writer.counts.notes, records.notes)
    return _refused(batch, chosen, records)


def _note_taken(
    opened: OpenJob,
    batch: Joined,
    kept: Int64Array,
    route: str,
    records: Records,
    writer: UnitWriter,
) -> None:
    """Count what each piece gave to a route; nearly always there is one."""
    if len(batch.runs) == 1:
        tokens = sum(records.values[name].size for name in token_keys(opened.spec.keys))
        writer.counts.note_taken(route, batch.runs[0][1].piece, kept.size, tokens)
        return
    pieces, at = np.unique(batch.pieces_of(kept), return_inverse=True)
    documents, sizes = np.bincount(at), np.bincount(at, tokens_of(records, opened))
    for piece, number, size in zip(pieces.tolist(), documents.tolist(), sizes.tolist(), strict=True):
        writer.counts.note_taken(route, piece, number, int(size))


def _refused(batch: Joined, chosen: Int64Array, records: Records) -> list[Bad]:
    return [_bad(batch, int(chosen[one.index]), one.reason, one.detail) for one in records.refused]


def _num_bytes(texts: Sequence[str]) -> int:
    """Return the size of texts as UTF-8, which Python has at hand once the tokenizer has asked for it."""
    odd = filterfalse(str.isascii, texts)
    return sum(map(len, texts)) + sum(len(text.encode(errors="surrogatepass")) - len(text) for text in odd)


def tokens_of(records: Records, opened: OpenJob) -> Int64Array:
    """Return how many token ids each record has, over all its arrays."""
    total: Int64Array = np.zeros(records.kept.size, np.int64)
    for name in token_keys(opened.spec.keys):
        offsets = records.offsets[axis_of(opened.spec.kind, name)]
        if "groups" in records.offsets and name == "responses":
            offsets = offsets[records.offsets["groups"]]
        total += np.diff(offsets)
    return total


def _bad(batch: Joined, index: int, reason: str, detail: str) -> Bad:
    piece, line = batch.place(index)
    return Bad(piece=piece, line=line, reason=reason, detail=detail)


def scan_unit(opened: OpenJob, unit: Unit, key: str, tick: Callable[[], None]) -> None:
    """Write the hashes of the records of a unit that are eligible, in order (see `select`)."""
    scans = Path(opened.job.folder).parent / "scans"
    with disk_errors_explained(unit, scans):
        make_folder(scans)
        write_parts_atomically(scans / key, _hashes(opened, unit, tick))


def _hashes(opened: OpenJob, unit: Unit, tick: Callable[[], None]) -> Iterator[bytes]:
    rules = opened.rules
    for batch in joined(unit, opened.reading):
        records = batch.records or repeat(None)
        yield b"".join(
            xxhash.xxh3_128_digest(name)
            for content, name, record in zip(_contents(opened, batch), _keys(opened, batch), records, strict=False)
            if content is not None and rules.too_short_or_long(content) is None and rules.has_domain(record)
        )
        tick()


def _encode(opened: OpenJob, batch: Joined, chosen: Int64Array | None) -> Records:
    """Turn the chosen records of a batch into arrays; None chooses all."""
    if opened.encoder is not None:
        readings = batch.readings if chosen is None else [batch.readings[index] for index in chosen.tolist()]
        return opened.encoder.encode(readings)
    texts = batch.texts if chosen is None else [batch.texts[index] for index in chosen.tolist()]
    identity = opened.tokenizer.identity
    encoded = frame(opened.tokenizer.encode(texts), identity)
    kept = np.arange(len(texts))
    bad = [] if opened.spec.ids_checked else with_second_bos(encoded.ids, encoded.offsets, identity)
    if bad:
        kept = np.delete(kept, bad)
        encoded = frame(opened.tokenizer.encode([texts[index] for index in kept.tolist()]), identity)
    return Records(
        values={TEXT_KEY: encoded.ids},
        offsets={"documents": encoded.offsets},
        kept=kept,
        refused=[Refused(index=index, reason="second_bos", detail="two") for index in bad],
    )


def _contents(opened: OpenJob, batch: Joined) -> Sequence[str | None]:
    """Return of each record the text that filters, hashes and splits go by; None where it fits no recipe."""
    if opened.encoder is None:
        return batch.texts
    batch.readings = [opened.encoder.read(record) for record in batch.records]
    return [reading.content for reading in batch.readings]


def _keys(opened: OpenJob, batch: Joined) -> Sequence[bytes]:
    """Return of each record what tells it from others: its text, or all fields that the recipe may use.

    The texts of a conversation alone would not do: who said what is part of it.
    """
    if opened.encoder is None:
        return [text.encode(errors="surrogatepass") for text in batch.texts]
    return [_canonical({name: r[name] for name in opened.key_fields if name in r}) for r in batch.records]


def _canonical(record: Mapping[str, Any]) -> bytes:
    """Return one text for equal records; what JSON does not know, such as a date of a Parquet file, by its name."""
    try:
        return msgspec.json.encode(record, enc_hook=repr, order="sorted")
    except (TypeError, UnicodeEncodeError):  # a key that is no name, or half of a surrogate pair
        return json.dumps(record, sort_keys=True, default=repr).encode()


@dataclass(kw_only=True, slots=True)
class Joined:
    """Consecutive batches as one: enough for the tokenizer, whatever the sizes of files."""

    texts: list[str] = field(default_factory=list)
    records: list[Mapping[str, Any]] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    """Which variant of the recipe reads each record, once `_contents` has asked."""
    bad: list[Bad] = field(default_factory=list)
    runs: list[tuple[int, DocumentBatch]] = field(default_factory=list)
    """Where each batch begins among the records, and the batch."""
    position: int = 0

    @property
    def num_records(self) -> int:
        """Records that could be read."""
        return len(self.texts) + len(self.records)

    def add(self, batch: DocumentBatch) -> None:
        """Put a batch behind the others."""
        self.runs.append((self.num_records, batch))
        self.texts += batch.texts
        self.records += batch.records
        self.bad += [Bad(piece=batch.piece, line=b.line, reason=b.reason, detail=b.detail) for b in batch.bad]
        self.position = batch.position

    def place(self, index: int) -> tuple[int, int]:
        """Return the piece of a record, and its line there."""
        begin, batch = next(run for run in reversed(self.runs) if run[0] <= index)
        return batch.piece, batch.lines[index - begin]

    def pieces_of(self, indices: Int64Array) -> Int64Array:
        """Return the piece of each of these records."""
        begins: Int64Array = np.array([begin for begin, _ in self.runs])
        pieces: Int64Array = np.array([batch.piece for _, batch in self.runs])
        return pieces[np.searchsorted(begins, indices, side="right") - 1]


def joined(unit: Unit, reading: ReadOptions) -> Iterator[Joined]:
    """Read a unit in batches that are large enough, also where its files are small.

    They are the same every time, so that a unit can go on after some of them.
    """
    held = Joined()
    size = 0
    before = 0
    for batch in read_unit(unit, reading):
        held.add(batch)
        # Of whole records it is not known how large they are, but how much of the input they take.
        size += sum(map(len, batch.texts)) or batch.position - before
        before = batch.position
        if (
            size >= reading.batch_bytes
            or max(held.num_records + len(held.bad), len(held.runs)) >= reading.batch_documents
            or (batch.records and len(unit.pieces) == 1)
        ):
            yield held
            held, size = Joined(), 0
    if held.runs:
        yield held


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
            self._latest.close_files()
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

    def note_progress(self, position: int) -> None:
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
            self._latest.close_files()

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
def disk_errors_explained(unit: Unit, folder: Path) -> Iterator[None]:
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
