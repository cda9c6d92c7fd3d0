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
from dataclasses import dataclass
from functools import lru_cache
from itertools import filterfalse, repeat
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from tokenmill.build.job import TEXT_KEY, Job, OpenJob, open_job
from tokenmill.build.journal import (
    RESULT,
    ROUTES,
    UnitCounts,
    UnitResult,
    add_counts,
    read_signed,
    route_folder,
    write_signed,
)
from tokenmill.build.select import ROUTE, SURPLUS, select
from tokenmill.documents import BadRecord, DocumentBatch, Unit, read_unit
from tokenmill.encode.tokenizer import frame, with_second_bos
from tokenmill.errors import DocumentError, StoreCorruptError, StoreError
from tokenmill.store import StoreSpec
from tokenmill.store.durable import make_folder, sync_folder, write_parts_atomically
from tokenmill.store.layout import axis_of, token_keys
from tokenmill.store.writer import ShardSeries
from tokenmill.tables import as_json, read_table
from tokenmill.types import AnyArray, Int64Array, Records, Refused, Uint8Array

T = TypeVar("T")
_PROGRESS = struct.Struct("<3q")
_CHECKPOINT = "checkpoint-2.json"
"""The number changes with the batches that a unit is read in: a checkpoint says after how many it was made."""


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
        for number, batch in enumerate(read_unit(unit, opened.reading)):
            if number < done:
                continue  # before the checkpoint that this unit goes on from
            if fates is not None and wanted < fates.size and counts.place >= wanted:
                # All that is left is beyond max_items: counted, and good or bad not looked at.
                add_counts(counts.skipped, {"max_items": len(batch.documents) + len(batch.bad)})
                continue
            counts.note_bad(_take(opened, batch, fates, writer))
            if counts.bad and options.on_error == "stop":
                return UnitResult(key=key, counts=counts, shards={}, finished=False)
            for run in batch.runs:
                counts.lines[run.piece] += run.num_lines
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


def _take(opened: OpenJob, batch: DocumentBatch, fates: Uint8Array | None, writer: UnitWriter) -> list[BadRecord]:
    """Choose among the records of a batch, encode them, add them to the shards of their routes; return bad ones."""
    counts, rules, bad = writer.counts, opened.rules, list(batch.bad)
    documents = _Documents(opened, batch)
    if rules.take_all and fates is None:
        return bad + _append(documents, ROUTE, None, writer)
    left = None if fates is None else fates[counts.place :]
    keys = documents.keys() if rules.val_fraction else None
    chosen = select(documents.contents, documents.records, rules, left, keys)
    add_counts(counts.skipped, chosen.left_out)
    counts.place += chosen.num_eligible
    for index, value in chosen.without_domain:
        piece, line = batch.place(index)
        bad.append(BadRecord(piece=piece, line=line, reason="domain", detail=value))
    for route, indices in chosen.routes.items():
        bad += _append(documents, route, indices, writer)
    if chosen.unfit.size:
        records = documents.encode(chosen.unfit)
        assert not records.kept.size, "a record without content must be refused"
        bad += _refused(batch, chosen.unfit, records)
    last = max((int(indices[-1]) for indices in chosen.routes.values()), default=None)
    if left is not None and last is not None and SURPLUS in left[: chosen.num_eligible]:
        # What is wrong with records that are not wanted is nobody's trouble.
        before = [record for record in bad if (record.piece, record.line) < batch.place(last)]
        add_counts(counts.skipped, {"max_items": len(bad) - len(before)})
        bad = before
    return bad


def _append(documents: _Documents, route: str, indices: Int64Array | None, writer: UnitWriter) -> list[BadRecord]:
    """Encode some documents of a batch, None for all, and add them to a route; return those that are refused."""
    batch, counts = documents.batch, writer.counts
    records = documents.encode(indices)
    chosen: Int64Array = np.arange(len(batch.documents)) if indices is None else indices
    if records.kept.size:
        writer.append(route, records.values, records.offsets)
        kept, sizes = chosen[records.kept], _num_tokens(records, documents.opened.spec)
        first = batch.runs[0].piece
        if batch.runs[-1].piece == first:  # as nearly always
            counts.note_taken(route, first, kept.size, int(sizes.sum()))
        else:
            pieces, of_piece = np.unique(np.array(batch.pieces)[kept], return_inverse=True)
            taken = zip(pieces, np.bincount(of_piece), np.bincount(of_piece, sizes), strict=True)
            for piece, num_documents, num_tokens in taken:
                counts.note_taken(route, int(piece), int(num_documents), int(num_tokens))
        counts.text_bytes += _num_bytes(
            _chosen(documents.contents, None if kept.size == len(batch.documents) else kept)
        )
    counts.truncated += records.truncated
    add_counts(counts.notes, records.notes)
    return _refused(batch, chosen, records)


def _chosen(items: Sequence[T], indices: Int64Array | None) -> Sequence[T]:
    """Return some items, None for all."""
    return items if indices is None else [items[index] for index in indices.tolist()]


def _refused(batch: DocumentBatch, indices: Int64Array, records: Records) -> list[BadRecord]:
    """Say where the records are that could not be encoded."""
    bad = []
    for refused in records.refused:
        piece, line = batch.place(int(indices[refused.index]))
        bad.append(BadRecord(piece=piece, line=line, reason=refused.reason, detail=refused.detail))
    return bad


def _num_bytes(contents: Sequence[str | None]) -> int:
    """Return the size of texts as UTF-8, which Python has at hand once the tokenizer has asked for it."""
    texts = [text for text in contents if text is not None]
    return sum(map(len, texts)) + sum(
        len(text.encode(errors="surrogatepass")) - len(text) for text in filterfalse(str.isascii, texts)
    )


def _num_tokens(records: Records, spec: StoreSpec) -> Int64Array:
    """Return how many token ids each record has, over all its arrays."""
    total: Int64Array = np.zeros(records.kept.size, np.int64)
    for name in token_keys(spec.keys):
        offsets = records.offsets[axis_of(spec.kind, name)]
        if "groups" in records.offsets and name == "responses":
            offsets = offsets[records.offsets["groups"]]
        total += np.diff(offsets)
    return total


def scan_unit(opened: OpenJob, unit: Unit, key: str, tick: Callable[[], None]) -> None:
    """Write the hashes of the records of a unit that are eligible, in order (see `select`)."""
    scans = Path(opened.job.folder).parent / "scans"
    with disk_errors_explained(unit, scans):
        make_folder(scans)
        write_parts_atomically(scans / key, _hashes(opened, unit, tick))


def _hashes(opened: OpenJob, unit: Unit, tick: Callable[[], None]) -> Iterator[bytes]:
    rules = opened.rules
    for batch in read_unit(unit, opened.reading):
        documents = _Documents(opened, batch)
        records = documents.records or repeat(None)
        yield b"".join(
            xxhash.xxh3_128_digest(key)
            for content, key, record in zip(documents.contents, documents.keys(), records, strict=False)
            if content is not None and rules.too_short_or_long(content) is None and rules.has_domain(record)
        )
        tick()


class _Documents:
    """The documents of a batch as a job takes them: texts, or records that its recipe reads."""

    def __init__(self, opened: OpenJob, batch: DocumentBatch) -> None:
        self.opened = opened
        self.batch = batch
        self.records: Sequence[Mapping[str, Any]] = batch.documents if opened.encoder else ()
        self._readings = [opened.encoder.read(record) for record in self.records] if opened.encoder else []
        self.contents: Sequence[str | None] = batch.documents
        """Of each the text that filters, hashes and splits go by; None where it fits no recipe."""
        if opened.encoder:
            self.contents = [reading.content for reading in self._readings]

    def keys(self) -> list[bytes]:
        """Return of each what tells it from others: its text, or all fields that the recipe may use.

        The texts of a conversation alone would not do: who said what is part of it.
        """
        names = self.opened.key_fields
        if self.opened.encoder is None:
            return [text.encode(errors="surrogatepass") for text in self.batch.documents]
        return [_canonical({name: record[name] for name in names if name in record}) for record in self.records]

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


def _canonical(record: Mapping[str, Any]) -> bytes:
    """Return one text for equal records; what JSON does not know, such as a date of a Parquet file, by its name."""
    try:
        return msgspec.json.encode(record, enc_hook=repr, order="sorted")
    except (TypeError, UnicodeEncodeError):  # a key that is no name, or half of a surrogate pair
        return json.dumps(record, sort_keys=True, default=repr).encode()


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
