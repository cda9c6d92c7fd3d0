"""One unit of work: read it, tokenize it, write its part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.documents import BadRecord, InputFile, ReadOptions, Unit, read_unit
from tokenmill.errors import StoreError
from tokenmill.prepare.part import PartWriter

if TYPE_CHECKING:
    from tokenmill.encode.tokenizer import Tokenizer
    from tokenmill.prepare.options import Job

MAX_LISTED = 1000
"""How many bad records are listed; all are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitResult:
    """What became of a unit; its tokens are in its part."""

    documents: int
    tokens: int
    text_bytes: int
    lines: int
    """Lines that start in the unit: documents, bad records and blank lines."""
    skipped: Mapping[str, int]
    """Bad records by reason."""
    bad: Sequence[BadRecord]
    """The first of them, at most `MAX_LISTED`. Where bad records stop a build the unit ends at the first."""


def part_folder(job: Job, unit: Unit) -> Path:
    """Return where the part of a unit is."""
    return Path(job.parts) / f"{unit.index:08d}"


def run_unit(
    job: Job, tokenizer: Tokenizer, unit: Unit, after_batch: Callable[[], None] = lambda: None
) -> UnitResult:
    """Read a unit batch by batch, tokenize it, write its part."""
    folder = part_folder(job, unit)
    try:
        with PartWriter(folder, job.keys) as part:
            return _run(job, tokenizer, unit, part, after_batch)
    except OSError as error:
        raise StoreError(
            f"{unit.file.path} to {folder}: reading and writing must work, got {error}; "
            "make room or mend the disk, and run again"
        ) from error


def _run(
    job: Job, tokenizer: Tokenizer, unit: Unit, part: PartWriter, after_batch: Callable[[], None]
) -> UnitResult:
    from tokenmill.encode.frame import frame

    documents = tokens = text_bytes = lines = 0
    skipped: Counter[str] = Counter()
    bad: list[BadRecord] = []
    (key,) = job.keys
    for batch in read_unit(unit, ReadOptions(text_field=job.options.text_field)):
        skipped.update(record.reason for record in batch.bad)
        bad.extend(batch.bad[: MAX_LISTED - len(bad)])
        if bad and job.options.on_error == "stop":
            break
        if batch.texts:
            encoded = frame(tokenizer.encode(batch.texts), tokenizer.identity)
            part.append({key: encoded.ids}, encoded.offsets)
            tokens += encoded.ids.size
        documents += len(batch.texts)
        text_bytes += sum(map(len, batch.texts))
        text_bytes += sum(len(text.encode()) - len(text) for text in batch.texts if not text.isascii())
        lines += batch.num_lines
        part.tell_progress(min(batch.position, unit.bytes), documents, tokens)
        after_batch()
    return UnitResult(
        documents=documents, tokens=tokens, text_bytes=text_bytes, lines=lines, skipped=dict(skipped), bad=bad
    )


def unit_from_json(value: dict[str, Any]) -> Unit:
    """Read a unit that was sent as JSON."""
    return Unit(**{**value, "file": InputFile(**value["file"])})


def result_from_json(value: dict[str, Any]) -> UnitResult:
    """Read a result that was sent as JSON."""
    return UnitResult(**{**value, "bad": [BadRecord(**record) for record in value["bad"]]})
