"""One unit of work: read it, choose, tokenize, write its shards."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import filterfalse, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import xxhash

from tokenmill.build.job import TEXT_KEY, Job
from tokenmill.build.journal import Bad, UnitResult, add_counts
from tokenmill.build.unit import (
    DUPLICATE,
    ROUTE,
    SURPLUS,
    TAKEN,
    Rules,
    UnitWriter,
    disk_errors_told,
    select,
)
from tokenmill.documents import DocumentBatch, InputFile, ReadOptions, Unit, cut_files, read_unit
from tokenmill.errors import DocumentError
from tokenmill.store import StoreSpec
from tokenmill.store.durable import make_folder, write_parts_atomically
from tokenmill.store.layout import axis_of, token_keys
from tokenmill.tables import read_json
from tokenmill.types import AnyArray, Int64Array, Records, Refused, Uint8Array

if TYPE_CHECKING:
    from tokenmill.encode.recipe import Recipe, RecordEncoder
    from tokenmill.encode.tokenizer import Tokenizer


# What a worker opens once and uses for all its units.

COMPILED_BYTES = 32 << 20
"""Units from this size on are read and framed by compiled kernels, where there are some: the input is then 24 times
as large, and what they save is more than the 0.4 s and 100 MB that they take to load in every worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The tools of a worker."""

    job: Job
    tokenizer: Tokenizer
    encoder: RecordEncoder | None
    """None where records are nothing but a text."""
    rules: Rules
    reading: ReadOptions
    spec: StoreSpec
    key_fields: tuple[str, ...]
    """Fields that tell records apart; the domain is none of them."""

    def encode(self, batch: Joined, chosen: Int64Array | None) -> Records:
        """Turn the chosen records of a batch into arrays; None chooses all."""
        if self.encoder is not None:
            records = batch.records if chosen is None else [batch.records[index] for index in chosen.tolist()]
            return self.encoder.encode(records)
        from tokenmill.encode.frame import frame, with_second_bos

        texts = batch.texts if chosen is None else [batch.texts[index] for index in chosen.tolist()]
        identity = self.tokenizer.identity
        encoded = frame(self.tokenizer.encode(texts), identity)
        kept = np.arange(len(texts))
        bad = [] if self.spec.ids_checked else with_second_bos(encoded.ids, encoded.offsets, identity)
        if bad:
            kept = np.delete(kept, bad)
            encoded = frame(self.tokenizer.encode([texts[index] for index in kept.tolist()]), identity)
        return Records(
            values={TEXT_KEY: encoded.ids},
            offsets={"documents": encoded.offsets},
            kept=kept,
            refused=[Refused(index=index, reason="second_bos", detail="two") for index in bad],
        )

    def contents(self, batch: Joined) -> Sequence[str | None]:
        """Return of each record the text that filters, hashes and splits go by; None where it fits no recipe."""
        if self.encoder is None:
            return batch.texts
        return [self.encoder.content(record) for record in batch.records]

    def keys(self, batch: Joined) -> Sequence[bytes]:
        """Return of each record what tells it from others: its text, or all fields that the recipe may use.

        The texts of a conversation alone would not do: who said what is part of it.
        """
        if self.encoder is None:
            return [text.encode(errors="surrogatepass") for text in batch.texts]
        return [_canonical({name: r[name] for name in self.key_fields if name in r}) for r in batch.records]


def open_bench(job: Job, tokenizer: Tokenizer | None = None, recipe: Recipe | None = None) -> Bench:
    """Open the tools of a worker; the process that made the job hands in what it has opened already."""
    from tokenmill.encode.recipe import load_recipe
    from tokenmill.encode.tokenizer import with_policy

    recipe = recipe or load_recipe(job.recipe)
    reading = job.reading(recipe)
    opened = with_policy(tokenizer or job.open_tokenizer(), recipe.control_strings)
    # What `encode` gives is bare, so that BOS stands nowhere but where it is placed; templates may place two.
    bare = reading.text_field is not None and recipe.control_strings != "encode"
    bos_is_control = opened.identity.bos_id in opened.special_ids.values()
    return Bench(
        job=job,
        tokenizer=opened,
        encoder=job.open_encoder(recipe, opened) if reading.text_field is None else None,
        rules=Rules.of(recipe),
        reading=reading,
        spec=replace(job.spec(recipe), ids_checked=bare and (bos_is_control or not opened.identity.add_bos)),
        key_fields=replace(recipe, preprocessing=replace(recipe.preprocessing, domain_key=None)).fields or (),
    )


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
    bad: list[Bad] = field(default_factory=list)
    runs: list[tuple[int, DocumentBatch]] = field(default_factory=list)
    """Where each batch begins among the records, and the batch."""
    position: int = 0
    compiled: bool = False
    """Whether compiled kernels work on it."""

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
    compiled = unit.bytes >= COMPILED_BYTES
    held = Joined(compiled=compiled)
    size = 0
    before = 0
    for batch in read_unit(unit, replace(reading, compiled=compiled)):
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
            held, size = Joined(compiled=compiled), 0
    if held.runs:
        yield held


def write_unit(
    bench: Bench,
    unit: Unit,
    key: str,
    fates: Uint8Array | None,
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
    fates: Uint8Array | None,
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
            add_counts(counts.skipped, {"max_items": batch.num_records + len(batch.bad)})
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


def _num_wanted(fates: Uint8Array | None) -> int:
    """Return how many records there are before those that are all beyond `max_items`."""
    if fates is None:
        return 0
    wanted = np.flatnonzero(fates != SURPLUS)
    return int(wanted[-1]) + 1 if wanted.size else 0


def _take(bench: Bench, batch: Joined, fates: Uint8Array | None, writer: UnitWriter) -> list[Bad]:
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
        add_counts(counts.skipped, chosen.left_out)
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
            add_counts(counts.skipped, {"max_items": len(bad) - len(before)})
            bad = before
    return bad


def _append(
    bench: Bench,
    batch: Joined,
    contents: Sequence[str | None],
    route: str,
    indices: Int64Array | None,
    writer: UnitWriter,
) -> list[Bad]:
    """Encode some records of a batch for a route, None for all, and add them; return those that are refused."""
    records = bench.encode(batch, indices)
    chosen: Int64Array = np.arange(batch.num_records) if indices is None else indices
    if records.kept.size:
        writer.append(route, records.values, records.offsets)
        kept = chosen[records.kept]
        _note_taken(bench, batch, kept, route, records, writer)
        texts = contents if kept.size == len(contents) else [contents[index] for index in kept.tolist()]
        if bench.encoder is not None:
            texts = [text for text in texts if text is not None]
        writer.counts.text_bytes += _num_bytes(cast("Sequence[str]", texts))
    writer.counts.truncated += records.truncated
    add_counts(writer.counts.notes, records.notes)
    return _refused(batch, chosen, records)


def _note_taken(
    bench: Bench,
    batch: Joined,
    kept: Int64Array,
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


def _refused(batch: Joined, chosen: Int64Array, records: Records) -> list[Bad]:
    return [_bad(batch, int(chosen[one.index]), one.reason, one.detail) for one in records.refused]


def _num_bytes(texts: Sequence[str]) -> int:
    """Return the size of texts as UTF-8, which Python has at hand once the tokenizer has asked for it."""
    odd = filterfalse(str.isascii, texts)
    return sum(map(len, texts)) + sum(len(text.encode(errors="surrogatepass")) - len(text) for text in odd)


def tokens_of(records: Records, bench: Bench) -> Int64Array:
    """Return how many token ids each record has, over all its arrays."""
    total: Int64Array = np.zeros(records.kept.size, np.int64)
    for name in token_keys(bench.spec.keys):
        offsets = records.offsets[axis_of(bench.spec.kind, name)]
        if "groups" in records.offsets and name == "responses":
            offsets = offsets[records.offsets["groups"]]
        total += np.diff(offsets)
    return total


def _bad(batch: Joined, index: int, reason: str, detail: str) -> Bad:
    piece, line = batch.place(index)
    return Bad(piece=piece, line=line, reason=reason, detail=detail)


# Which records have the same content as an earlier one, and which are beyond the number that is wanted.
#
# Records are hashed in the workers first; the hashes of all are compared here, part by part, so that memory stays
# bounded but for one byte a record; then the units are run knowing the fate of each of their records.

_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])
_HASHES_AT_ONCE = 1 << 22
"""How many hashes are compared at a time: 100 MB with what sorting them takes."""


def scan_unit(bench: Bench, unit: Unit, key: str, tick: Callable[[], None]) -> None:
    """Write the hashes of the records of a unit that are eligible, in order (see `select`)."""
    scans = Path(bench.job.folder).parent / "scans"
    with disk_errors_told(unit, scans):
        make_folder(scans)
        write_parts_atomically(scans / key, _hashes(bench, unit, tick))


def _hashes(bench: Bench, unit: Unit, tick: Callable[[], None]) -> Iterator[bytes]:
    rules = bench.rules
    for batch in joined(unit, bench.reading):
        records = batch.records or repeat(None)
        yield b"".join(
            xxhash.xxh3_128_digest(name)
            for content, name, record in zip(bench.contents(batch), bench.keys(batch), records, strict=False)
            if content is not None and rules.too_short_or_long(content) is None and rules.has_domain(record)
        )
        tick()


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
        found = np.memmap(path, _HASH, "r")
        mine = np.flatnonzero(found["high"] % np.uint64(num_parts) == part)
        hashes.append(found[mine])
        places.append(mine + begins[index])
    if not hashes:
        return
    values, where = np.concatenate(hashes), np.concatenate(places)
    order = np.lexsort((where, values["low"], values["high"]))
    ordered = values[order]
    fates[where[order[1:][ordered[1:] == ordered[:-1]]]] = DUPLICATE


# What a worker is asked to do with a unit: write its shards, or hash its records to find duplicates.


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
    return msgspec.json.encode(run_task(_opened(job), read_json(Task, task, "task")))


@lru_cache(maxsize=1)
def _opened(job: bytes) -> Bench:
    return open_bench(read_json(Job, job, "job"))


def run_task(bench: Bench, task: Task, tick: Callable[[], None] = lambda: None) -> UnitResult | None:
    """Do a task, and return what came of its unit; None where it was hashed only."""
    with seldom_collecting():
        if task.scan:
            scan_unit(bench, task.unit, task.key, tick)
            return None
        fates = None if task.fates is None else np.frombuffer(Path(task.fates).read_bytes(), np.uint8)
        return write_unit(bench, task.unit, task.key, fates, tick)


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


# A little of a corpus, from all over it.

PLACES = 16
BYTES_PER_PLACE = 64 << 10
SAMPLE_CHUNK_BYTES = 16 << 20
MAX_RECORD_BYTES = 4 << 20
"""Larger records are left to the build: this process should stay small."""


def sample_texts(files: Sequence[InputFile], text_field: str | None) -> list[str]:
    """Return the first documents at evenly spread places of the input, together about 1 MiB at most.

    The same files give the same sample, however the build cuts them. Bad records are left for the build to find.
    Of whole records all texts are taken, wherever they stand.
    """
    options = ReadOptions(
        text_field=text_field, batch_bytes=BYTES_PER_PLACE, batch_documents=256, max_record_bytes=MAX_RECORD_BYTES
    )
    num_units = sum(1 for _ in cut_files(files, chunk_bytes=SAMPLE_CHUNK_BYTES))
    chosen = {place * num_units // PLACES for place in range(PLACES)}
    texts: list[str] = []
    for unit in cut_files(files, chunk_bytes=SAMPLE_CHUNK_BYTES):
        if unit.index not in chosen:
            continue
        batch = next(read_unit(unit, options), None)
        if batch is None:
            continue
        room = BYTES_PER_PLACE
        for text in (*batch.texts, *(text for record in batch.records for text in _strings(record))):
            if room <= 0:
                break
            texts.append(text[:room])
            room -= len(texts[-1])
    return texts


def _strings(value: object) -> Iterator[str]:
    """Yield all strings of a JSON value but the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
