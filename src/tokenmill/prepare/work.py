"""One unit of work: read it, choose, tokenize, write its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.documents import InputFile, Piece, Unit
from tokenmill.errors import StoreError
from tokenmill.prepare.bench import Bench, Joined, joined
from tokenmill.prepare.select import ROUTE, select
from tokenmill.prepare.unit import Bad, UnitResult, UnitWriter

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
    try:
        writer = UnitWriter(units, key, len(unit.pieces), bench.spec)
        try:
            return _run(bench, unit, fates, writer, after_batch)
        finally:
            writer.close()
    except OSError as error:
        raise StoreError(
            f"{unit.pieces[0].file.path} to {units}: reading and writing must work, got {error}; "
            "make room or mend the disk, and run again: it goes on from there"
        ) from error


def _run(
    bench: Bench,
    unit: Unit,
    fates: npt.NDArray[np.uint8] | None,
    writer: UnitWriter,
    after_batch: Callable[[], None],
) -> UnitResult:
    counts, options = writer.counts, bench.job.options
    done = counts.batches
    for number, batch in enumerate(joined(unit, bench.reading)):
        if number < done:
            continue  # before the checkpoint that this unit goes on from
        counts.note_bad(batch.bad)
        if not (counts.bad and options.on_error == "stop"):
            _take(bench, batch, fates, writer)
        if counts.bad and options.on_error == "stop":
            return UnitResult(key=writer.key, counts=counts, shards={}, finished=False)
        for _, part in batch.runs:
            counts.pieces[part.piece][0] += part.num_lines
        counts.batches += 1
        writer.tell_progress(min(batch.position, unit.bytes))
        writer.checkpoint(options.checkpoint_seconds)
        after_batch()
    return writer.commit()


def _take(bench: Bench, batch: Joined, fates: npt.NDArray[np.uint8] | None, writer: UnitWriter) -> None:
    """Choose among the records of a batch, encode them, and add them to the shards of their routes."""
    counts = writer.counts
    lengths: npt.NDArray[np.int64] = np.full(batch.num_records, -1)
    if not batch.num_records:
        return
    contents = bench.contents(batch)
    if bench.rules.trivial and fates is None:
        _append(bench, batch, ROUTE, None, writer, lengths)
    else:
        chosen = select(contents, batch.records, bench.rules, None if fates is None else fates[counts.place :])
        counts.skipped.update(chosen.left_out)
        counts.place += chosen.num_eligible
        counts.note_bad([_bad(batch, index, "domain", f"{value}") for index, value in chosen.lost])
        for route, indices in chosen.routes.items():
            _append(bench, batch, route, indices, writer, lengths)
        if chosen.unfit.size:
            refused = bench.encode(batch, chosen.unfit)
            assert not refused.kept.size, "a record without content must be refused"
            _note_refused(batch, chosen.unfit, refused, writer)
    # Last, as Python then has the UTF-8 of the texts at hand that the tokenizer asked for.
    texts = [text for text in contents if text is not None]
    odd = [text for text in texts if not text.isascii()]
    counts.text_bytes += sum(map(len, texts)) + sum(len(utf8(text)) - len(text) for text in odd)
    for piece, documents, tokens in batch.by_piece(lengths):
        counts.pieces[piece][1] += documents
        counts.pieces[piece][2] += tokens
        counts.documents += documents
        counts.tokens += tokens


def _append(
    bench: Bench,
    batch: Joined,
    route: str,
    indices: npt.NDArray[np.int64] | None,
    writer: UnitWriter,
    lengths: npt.NDArray[np.int64],
) -> None:
    """Encode some records of a batch for a route, and note how many tokens each has."""
    records = bench.encode(batch, indices)
    if records.kept.size:
        writer.append(route, records.values, records.offsets)
    chosen: npt.NDArray[np.int64] = np.arange(batch.num_records) if indices is None else indices
    lengths[chosen[records.kept]] = tokens_of(records, bench)
    writer.counts.truncated += records.truncated
    _note_refused(batch, chosen, records, writer)


def _note_refused(batch: Joined, chosen: npt.NDArray[np.int64], records: Records, writer: UnitWriter) -> None:
    writer.counts.note_bad([_bad(batch, int(chosen[one.index]), one.reason, one.detail) for one in records.refused])


def utf8(text: str) -> bytes:
    """Return a text as UTF-8; halves of surrogate pairs, which the tokenizer will refuse, are let pass here."""
    return text.encode(errors="surrogatepass")


def tokens_of(records: Records, bench: Bench) -> npt.NDArray[np.int64]:
    """Return how many token ids each record has, over all its arrays."""
    from tokenmill.store.layout import axis_of, token_keys

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
