"""One unit of work: read it, select its records, encode them, and write its shards.

A unit is written in segments. Each segment is a folder that is renamed once it is whole, so a finished one is never
written again. Most units have one segment. A file that cannot be cut, such as a `.gz`, has one per 256 MiB of text,
and after a kill the next attempt continues after the last finished segment.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import filterfalse, repeat
from pathlib import Path

import numpy as np
import xxhash

from tokenmill.build import journal
from tokenmill.build.counts import UnitCounts, add_counts
from tokenmill.build.job import OpenJob
from tokenmill.build.notes import WorkerNotes, note_failure
from tokenmill.build.select import (
    LEFT_OUT_BY_MAP,
    ROUTE,
    SURPLUS,
    Documents,
    chosen_of,
    has_domain,
    select,
    takes_all,
    unwanted,
    with_checksum,
)
from tokenmill.documents import BadRecord, DocumentBatch, Unit, format_of, read_unit
from tokenmill.documents.units import whole
from tokenmill.encode.recipe.encoder import TOO_LONG
from tokenmill.errors import DocumentError, StoreError
from tokenmill.store import StoreSpec
from tokenmill.store.files import make_folder, sync_folder, write_atomically, write_parts
from tokenmill.store.lease import has_ended, this_process
from tokenmill.store.origins import OriginWriter
from tokenmill.store.writer import ShardSeries, token_starts
from tokenmill.tables import as_json
from tokenmill.types import AnyArray, Int64Array, Records, Uint8Array

SEGMENT_BYTES = 256 << 20
"""Text of a file that is one piece, after which a segment of its unit ends."""


def write_unit(opened: OpenJob, unit: Unit, key: str, fates: Uint8Array | None, tick: Callable[[], None]) -> None:
    """Write the segments of a unit that are not finished.

    Any number of processes may do the same unit at once. If another process has finished the unit, errors of this
    attempt are ignored and its files deleted. If a bad record stops the unit, a note says so.
    """
    results = journal.unit_results(opened.folder, key)
    if results and results[-1].is_last:
        return
    try:
        with _disk_errors_explained(unit, opened.folder):
            _write_segments(opened, unit, key, fates, tick, results)
    except Exception:  # another process may have deleted any file of this attempt
        results = journal.unit_results(opened.folder, key)
        if not results or not results[-1].is_last:
            raise
        shutil.rmtree(attempts_at(opened.folder, key), ignore_errors=True)


def _write_segments(
    opened: OpenJob,
    unit: Unit,
    key: str,
    fates: Uint8Array | None,
    tick: Callable[[], None],
    results: tuple[journal.UnitResult, ...],
) -> None:
    """Continue a unit after its finished segments."""
    _clear_attempts(attempts_at(opened.folder, key))
    finished, notes = list(results), WorkerNotes(opened.folder.parent, key, unit.bytes)
    first_batch, place = (results[-1].batches, results[-1].place) if results else (0, 0)
    wanted, text_size = _num_wanted(fates), 0
    segment = SegmentWriter(opened, key, len(finished), len(unit.pieces))
    try:
        notes.write(0, *_sums(finished, segment))
        for number, batch in enumerate(read_unit(unit, opened.reading), 1):
            if number <= first_batch:
                continue
            if fates is not None and wanted < fates.size and place >= wanted:
                # All that is left is beyond max_items: it is counted, and not checked.
                add_counts(segment.counts.skipped, {"max_items": len(batch.documents) + _num_lost(batch.bad)})
                continue
            bad, num_eligible = _take(opened, unit, batch, None if fates is None else fates[place:], segment)
            place += num_eligible
            segment.counts.add_bad(bad)
            if any(opened.stop or record.reason == TOO_LONG for record in bad):
                _note_stop(opened, unit, key, segment)
                return
            for run in batch.runs:
                segment.counts.lines[run.piece] += run.num_lines
            notes.write(min(batch.position, unit.bytes), *_sums(finished, segment))
            tick()
            text_size += batch.size
            if text_size >= SEGMENT_BYTES and _is_one_piece(unit, batch, opened.reading.text_unit):
                finished.append(segment.commit(batches=number, place=place, is_last=False))
                segment, text_size = SegmentWriter(opened, key, len(finished), len(unit.pieces)), 0
        if fates is not None and wanted < fates.size and place >= wanted:
            place = fates.size
        if fates is not None and place != fates.size:
            raise DocumentError(
                f"{unit.pieces[0].file.path}: expected the {fates.size} records of the search for duplicates, got "
                f"{place}; let no other process write to the input, and start over with rebuild=True"
            )
        segment.commit(batches=0, place=place, is_last=True)
    finally:
        segment.close()


def _clear_attempts(attempts: Path) -> None:
    """Make the folder of the attempts at a unit, and remove those whose process has ended."""
    attempts.mkdir(exist_ok=True)  # not its parents: if they are gone, the build is over
    for attempt in list(attempts.iterdir()):
        if has_ended(attempt.name.rpartition("-")[0]):
            shutil.rmtree(attempt, ignore_errors=True)


def _sums(finished: Sequence[journal.UnitResult], segment: SegmentWriter) -> tuple[int, int]:
    """Return documents and tokens of a unit so far."""
    counts = [*(result.counts for result in finished), segment.counts]
    return sum(each.documents for each in counts), sum(each.tokens for each in counts)


def _note_stop(opened: OpenJob, unit: Unit, key: str, segment: SegmentWriter) -> None:
    """Write which bad record stops a unit."""
    bad = next(record for record in segment.counts.bad if opened.stop or record.reason == TOO_LONG)
    message = f"{unit.pieces[bad.piece].file.path}: {bad.reason}, {bad.detail}"
    if not note_failure(opened.folder.parent, key, "DocumentError", message, bad):
        raise DocumentError(message)


def _is_one_piece(unit: Unit, batch: DocumentBatch, text_unit: str) -> bool:
    """Return whether the file that a batch ends in cannot be cut into pieces."""
    file = unit.pieces[batch.runs[-1].piece].file
    return bool(file.compression) or format_of(file.suffix, text_unit).ranges is whole


def _num_lost(bad: Sequence[BadRecord]) -> int:
    return sum(record.count for record in bad)


def _num_wanted(fates: Uint8Array | None) -> int:
    """Return the number of records before the first from which on all are beyond `max_items`."""
    if fates is None:
        return 0
    wanted = np.flatnonzero(fates != SURPLUS)
    return int(wanted[-1]) + 1 if wanted.size else 0


def _take(
    opened: OpenJob, unit: Unit, batch: DocumentBatch, fates: Uint8Array | None, segment: SegmentWriter
) -> tuple[list[BadRecord], int]:
    """Select records of a batch and add them to the shards of their routes.

    Return bad records, and the number of records that have a fate.
    """
    counts, bad = segment.counts, list(batch.bad)
    documents = Documents(opened, batch, unit)
    if fates is None and takes_all(opened.chosen) and (opened.keep_empty or "" not in documents.contents):
        return bad + _append(documents, ROUTE, None, segment), 0
    chosen = select(documents, fates)
    add_counts(counts.skipped, chosen.left_out)
    for index, value in chosen.without_domain:
        piece, line = documents.place(index)
        bad.append(BadRecord(piece=piece, line=line, reason="domain", detail=value))
    for route, indices in chosen.routes.items():
        bad += _append(documents, route, indices, segment)
    if chosen.unfit.size:
        records = documents.encode(chosen.unfit)
        assert not records.kept.size, "a record without content must be refused"
        bad += _refused(documents, chosen.unfit, records, counts)
    last = max((int(indices[-1]) for indices in chosen.routes.values()), default=None)
    if fates is not None and last is not None and SURPLUS in fates[: chosen.num_eligible]:
        # Records after the last one that is wanted may be bad.
        before = [record for record in bad if (record.piece, record.line) < documents.place(last)]
        add_counts(counts.skipped, {"max_items": _num_lost(bad) - _num_lost(before)})
        bad = before
    return bad, chosen.num_eligible


def _append(
    documents: Documents, route: str, indices: Int64Array | None, segment: SegmentWriter
) -> list[BadRecord]:
    """Encode documents of a batch, all for None, and add them to a route; return those that are refused."""
    counts = segment.counts
    records = documents.encode(indices)
    chosen: Int64Array = np.arange(len(documents.contents)) if indices is None else indices
    if records.kept.size:
        kept, sizes = chosen[records.kept], np.diff(token_starts(documents.opened.spec, records.offsets))
        pieces, lines = documents.places(kept)
        if records.noted:
            counts.note_first(route, records.noted)
        segment.append(route, records.values, records.offsets)
        segment.append_origins(route, pieces, lines, documents.kept_fields(kept))
        if pieces[0] == pieces[-1]:  # nearly always
            counts.take_from(int(pieces[0]), route, kept.size, int(sizes.sum()))
        else:
            numbers, of_piece = np.unique(pieces, return_inverse=True)
            taken = zip(numbers, np.bincount(of_piece), np.bincount(of_piece, sizes), strict=True)
            for piece, num_documents, num_tokens in taken:
                counts.take_from(int(piece), route, int(num_documents), int(num_tokens))
        counts.text_bytes += _num_bytes(
            chosen_of(documents.contents, None if kept.size == len(documents.contents) else kept)
        )
    counts.truncated += records.truncated
    add_counts(counts.notes, records.notes)
    num_missing = documents.num_without_kept(chosen[records.kept])
    if num_missing:
        add_counts(counts.notes, {"kept_field_missing": num_missing})
    return _refused(documents, chosen, records, counts)


def _refused(documents: Documents, indices: Int64Array, records: Records, counts: UnitCounts) -> list[BadRecord]:
    """Return the records that could not be encoded, with their lines; count those that are left out on purpose."""
    on_purpose = {LEFT_OUT_BY_MAP} | ({TOO_LONG} if documents.opened.chosen.on_long == "drop" else set())
    bad = []
    for refused in records.refused:
        if refused.reason in on_purpose:
            add_counts(counts.skipped, {refused.reason: 1})
            continue
        piece, line = documents.place(int(indices[refused.index]))
        bad.append(BadRecord(piece=piece, line=line, reason=refused.reason, detail=refused.detail))
    return bad


def _num_bytes(contents: Sequence[str | None]) -> int:
    """Return the size of texts as UTF-8, which Python has cached once the tokenizer has asked for it."""
    texts = [text for text in contents if text is not None]
    return sum(map(len, texts)) + sum(
        len(text.encode(errors="surrogatepass")) - len(text) for text in filterfalse(str.isascii, texts)
    )


def scan_unit(opened: OpenJob, unit: Unit, key: str, tick: Callable[[], None]) -> None:
    """Write the hashes of the eligible records of a unit, in order (see `select.fates_of`)."""
    scans = opened.folder.parent / "scans"
    with _disk_errors_explained(unit, scans):
        make_folder(scans)
        # Two attempts may run at once; they write the same bytes.
        writer = f"-{this_process()}-{secrets.token_hex(4)}"
        write_atomically(scans / key, with_checksum(_hashes(opened, unit, key, tick)), writer=writer)


def _hashes(opened: OpenJob, unit: Unit, key: str, tick: Callable[[], None]) -> Iterator[bytes]:
    chosen = opened.chosen
    notes = WorkerNotes(opened.folder.parent, key, unit.bytes)
    notes.write(0, 0, 0)
    for batch in read_unit(unit, opened.reading):
        notes.write(min(batch.position, unit.bytes), 0, 0)
        documents = Documents(opened, batch, unit)
        records = documents.records or repeat(None)
        yield b"".join(
            xxhash.xxh3_128_digest(key)
            for content, key, record in zip(documents.contents, documents.keys(), records, strict=False)
            if content is not None and unwanted(content, opened) is None and has_domain(record, chosen)
        )
        tick()


# The files of a unit.


def attempts_at(units: Path, key: str) -> Path:
    """Return the folder of the attempts at a unit, which is removed when the unit is done."""
    return units / f".tmp-{key}"


class SegmentWriter:
    """One attempt at a segment, in a folder of its own; `commit` renames it, unless another attempt was first.

    The bytes of a segment depend on the unit alone, so either of two attempts may win.
    """

    def __init__(self, opened: OpenJob, key: str, index: int, num_pieces: int) -> None:
        self.name = journal.segment_name(key, index)
        self.counts = UnitCounts(lines=[0] * num_pieces)
        self._units = opened.folder
        self._attempts = attempts_at(opened.folder, key)
        self._folder = self._attempts / f"{this_process()}-{secrets.token_hex(4)}"
        self._spec: StoreSpec = opened.spec
        self._keeps = bool(opened.keep)
        self._series: dict[str, ShardSeries] = {}
        self._origins: dict[str, OriginWriter] = {}
        self._latest = ""
        """Route whose files may be open."""
        self._folder.mkdir()

    def append(self, route: str, values: Mapping[str, AnyArray], offsets: Mapping[str, Int64Array]) -> None:
        """Add records to the shards of a route."""
        if route not in self._series:
            self._series[route] = ShardSeries(journal.route_folder(self._folder, route), self._spec)
        if self._latest != route:
            self.close()  # a build may have thousands of routes, and write to them in turn
        self._latest = route
        self._series[route].append(values, offsets)

    def append_origins(self, route: str, pieces: Int64Array, lines: Int64Array, kept: Sequence[bytes]) -> None:
        """Add the origins of the records that were just added to a route."""
        if route not in self._origins:
            self._origins[route] = OriginWriter(journal.route_folder(self._folder, route), keeps=self._keeps)
        self._origins[route].append(pieces, lines, kept)

    def commit(self, *, batches: int, place: int, is_last: bool) -> journal.UnitResult:
        """Finish all shards and make this attempt the segment: from here on it is done."""
        shards = {route: tuple(series.finish()) for route, series in sorted(self._series.items())}
        origins = {route: each.sync() for route, each in sorted(self._origins.items())}
        result = journal.UnitResult(
            key=self.name,
            counts=self.counts,
            shards=shards,
            origins=origins,
            batches=batches,
            place=place,
            is_last=is_last,
        )
        self.close()
        # Every folder on the way to a shard, because its name is stored in the one above.
        for folder, _, _ in os.walk(self._folder / journal.ROUTES):
            sync_folder(Path(folder))
        # Without a temporary name, because the folder has one.
        write_parts(self._folder / journal.RESULT, (journal.signed(as_json(result)),))
        sync_folder(self._folder)
        # If the build is over, its folder was removed, perhaps while this process was paused.
        journal.check_unit(self._folder, result)
        final = self._units / self.name
        try:
            os.rename(self._folder, final)
        except OSError:
            # Another attempt was first, with the same bytes. If they were damaged since, they are replaced.
            if journal.unit_result(self._units, self.name) is None:
                os.rename(final, self._folder.with_name(f"{self._folder.name}-damaged"))
                os.rename(self._folder, final)
            else:
                shutil.rmtree(self._folder, ignore_errors=True)
        sync_folder(self._units)
        if is_last:
            shutil.rmtree(self._attempts, ignore_errors=True)
        return result

    def close(self) -> None:
        """Close all files; what was written stays as it is."""
        for writers in (self._series, self._origins):
            if self._latest in writers:
                writers[self._latest].close_files()


@contextmanager
def _disk_errors_explained(unit: Unit, folder: Path) -> Iterator[None]:
    """Raise an error of the system during a unit as one that names the way out."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{unit.pieces[0].file.path} to {folder}: reading and writing must work, got {error}; "
            "make room or mend the disk, and run again: it goes on from there"
        ) from error
