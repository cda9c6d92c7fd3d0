"""A little of a corpus, from all over it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tokenmill.documents import InputFile, ReadOptions, cut_files, read_unit

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
