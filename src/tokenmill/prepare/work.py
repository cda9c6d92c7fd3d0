"""One unit of work: read it, choose, tokenize, write its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tokenmill.documents import InputFile, Piece, Unit
from tokenmill.errors import DocumentError
from tokenmill.prepare.bench import Bench, Joined, joined
from tokenmill.prepare.select import ROUTE, SURPLUS, select
from tokenmill.prepare.unit import Bad, UnitResult, UnitWriter, disk_errors_told
from tokenmill.store.layout import axis_of, token_keys

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.types import Records


def run_unit(
    bench: Bench,
    unit: Unit,
    key: str,
    fates: npt.NDArray[np.uint8] | None,
    after_batch: Callable[[], None] = lambda: None,
) -> UnitResult:
    """Turn a unit into finished shards, or go on where an earlier try left off."""
    units = Path(bench.job.folder)
    with disk_errors_told(unit, units):
        writer = UnitWriter(units, key, len(unit.pieces), bench.spec)
        try:
            return _run(bench, unit, fates, writer, after_batch)
        finally:
            writer.close()


def _run(
    bench: Bench,
    unit: Unit,
    fates: npt.NDArray[np.uint8] | None,
    writer: UnitWriter,
    after_batch: Callable[[], None],
) -> UnitResult:
    counts, options = writer.counts, bench.job.options
    done, wanted = counts.batches, _num_wanted(fates)
    for number, batch in enumerate(joined(unit, bench.reading)):
        if number < done:
            continue  # before the checkpoint that this unit goes on from
        if fates is not None and wanted < fates.size and counts.place >= wanted:
            # All that is left is beyond max_items: counted, and good or bad not looked at.
            counts.skipped["max_items"] += batch.num_records + len(batch.bad)
            continue
        counts.note_bad(_take(bench, batch, fates, writer))
        if counts.bad and options.on_error == "stop":
            return UnitResult(key=writer.key, counts=counts, shards={}, finished=False)
        for _, part in batch.runs:
            counts.lines[part.piece] += part.num_lines
        counts.batches += 1
        writer.tell_progress(min(batch.position, unit.bytes))
        writer.checkpoint(options.checkpoint_seconds)
        after_batch()
    if fates is not None and wanted < fates.size and counts.place >= wanted:
        counts.place = fates.size
    if fates is not None and counts.place != fates.size:
        raise DocumentError(
            f"{unit.pieces[0].file.path}: must have the {fates.size} records in which duplicates were looked for, "
            f"got {counts.place}; let nothing write to the input, and start over with --rebuild"
        )
    return writer.commit()


def _num_wanted(fates: npt.NDArray[np.uint8] | None) -> int:
    """Return how many records there are before those that are all beyond `max_items`."""
    if fates is None:
        return 0
    wanted = np.flatnonzero(fates != SURPLUS)
    return int(wanted[-1]) + 1 if wanted.size else 0


def _take(bench: Bench, batch: Joined, fates: npt.NDArray[np.uint8] | None, writer: UnitWriter) -> list[Bad]:
    """Choose among the records of a batch, encode them, add them to the shards of their routes; return bad ones."""
    counts = writer.counts
    bad = list(batch.bad)
    if not batch.num_records:
        return bad
    contents = bench.contents(batch)
    if bench.rules.trivial and fates is None:
        bad += _append(bench, batch, contents, ROUTE, None, writer)
    else:
        left = None if fates is None else fates[counts.place :]
        keys = bench.keys(batch) if bench.rules.val_fraction else None
        chosen = select(contents, batch.records, bench.rules, left, keys)
        counts.skipped.update(chosen.left_out)
        counts.place += chosen.num_eligible
        bad += [_bad(batch, index, "domain", f"{value}") for index, value in chosen.lost]
        for route, indices in chosen.routes.items():
            bad += _append(bench, batch, contents, route, indices, writer)
        if chosen.unfit.size:
            refused = bench.encode(batch, chosen.unfit)
            assert not refused.kept.size, "a record without content must be refused"
            bad += _refused(batch, chosen.unfit, refused)
        last = max((int(indices[-1]) for indices in chosen.routes.values()), default=None)
        if left is not None and last is not None and SURPLUS in left[: chosen.num_eligible]:
            # What is wrong with records that are not wanted is nobody's trouble.
            before = [one for one in bad if (one.piece, one.line) < batch.place(last)]
            counts.skipped["max_items"] += len(bad) - len(before)
            bad = before
    return bad


def _append(
    bench: Bench,
    batch: Joined,
    contents: Sequence[str | None],
    route: str,
    indices: npt.NDArray[np.int64] | None,
    writer: UnitWriter,
) -> list[Bad]:
    """Encode some records of a batch for a route, None for all, and add them; return those that are refused."""
    records = bench.encode(batch, indices)
    chosen: npt.NDArray[np.int64] = np.arange(batch.num_records) if indices is None else indices
    if records.kept.size:
        writer.append(route, records.values, records.offsets)
        kept = chosen[records.kept]
        _note_taken(bench, batch, kept, route, records, writer)
        texts = contents if kept.size == len(contents) else [contents[index] for index in kept.tolist()]
        if bench.encoder is not None:
            texts = [text for text in texts if text is not None]
        writer.counts.text_bytes += _num_bytes(cast("Sequence[str]", texts))
    writer.counts.truncated += records.truncated
    writer.counts.notes.update(records.notes)
    return _refused(batch, chosen, records)


def _note_taken(
    bench: Bench,
    batch: Joined,
    kept: npt.NDArray[np.int64],
    route: str,
    records: Records,
    writer: UnitWriter,
) -> None:
    """Count what each piece gave to a route; nearly always there is one."""
    if len(batch.runs) == 1:
        tokens = sum(records.values[name].size for name in token_keys(bench.spec.keys))
        writer.counts.note_taken(route, batch.runs[0][1].piece, kept.size, tokens)
        return
    pieces, at = np.unique(batch.pieces_of(kept), return_inverse=True)
    documents, sizes = np.bincount(at), np.bincount(at, tokens_of(records, bench))
    for piece, number, size in zip(pieces.tolist(), documents.tolist(), sizes.tolist(), strict=True):
        writer.counts.note_taken(route, piece, number, int(size))


def _refused(batch: Joined, chosen: npt.NDArray[np.int64], records: Records) -> list[Bad]:
    return [_bad(batch, int(chosen[one.index]), one.reason, one.detail) for one in records.refused]


def _num_bytes(texts: Sequence[str]) -> int:
    """Return the size of texts as UTF-8, which Python has at hand once the tokenizer has asked for it."""
    odd = filterfalse(str.isascii, texts)
    return sum(map(len, texts)) + sum(len(text.encode(errors="surrogatepass")) - len(text) for text in odd)


def tokens_of(records: Records, bench: Bench) -> npt.NDArray[np.int64]:
    """Return how many token ids each record has, over all its arrays."""
    total: npt.NDArray[np.int64] = np.zeros(records.kept.size, np.int64)
    for name in token_keys(bench.spec.keys):
        offsets = records.offsets[axis_of(bench.spec.kind, name)]
        if "groups" in records.offsets and name == "responses":
            offsets = offsets[records.offsets["groups"]]
        total += np.diff(offsets)
    return total


def _bad(batch: Joined, index: int, reason: str, detail: str) -> Bad:
    piece, line = batch.place(index)
    return Bad(piece=piece, line=line, reason=reason, detail=detail)


def unit_from_json(value: Mapping[str, Any]) -> Unit:
    """Read a unit that was sent as JSON: files once, pieces by the number of their file."""
    files = [InputFile(**file) for file in value["files"]]
    return Unit(
        index=value["index"],
        pieces=tuple(
            Piece(file=files[file], begin=begin, end=end, bytes=size) for file, begin, end, size in value["pieces"]
        ),
    )


def unit_to_json(unit: Unit) -> dict[str, Any]:
    """Return what `unit_from_json` reads."""
    files = {piece.file.path: piece.file for piece in unit.pieces}
    numbers = {path: number for number, path in enumerate(files)}
    return {
        "index": unit.index,
        "files": [
            {"path": file.path, "name": file.name, "bytes": file.bytes, "suffix": file.suffix}
            for file in files.values()
        ],
        "pieces": [[numbers[p.file.path], p.begin, p.end, p.bytes] for p in unit.pieces],
    }
