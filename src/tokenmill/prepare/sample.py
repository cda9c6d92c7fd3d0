"""A little of a corpus, from all over it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.documents import InputFile, ReadOptions, cut_files, read_unit

PLACES = 16
BYTES_PER_PLACE = 64 << 10


def sample_texts(files: Sequence[InputFile], text_field: str) -> list[str]:
    """Return the first documents at evenly spread places of the input, together about 1 MiB at most.

    The same files give the same sample, however the build cuts them. Bad records are left for the build to find.
    """
    options = ReadOptions(text_field=text_field, batch_bytes=BYTES_PER_PLACE, batch_documents=256)
    num_units = sum(1 for _ in cut_files(files))
    chosen = {place * num_units // PLACES for place in range(PLACES)}
    texts: list[str] = []
    for unit in cut_files(files):
        if unit.index not in chosen:
            continue
        batch = next(read_unit(unit, options), None)
        room = BYTES_PER_PLACE
        for text in batch.texts if batch else ():
            texts.append(text[:room])
            room -= len(texts[-1])
    return texts
