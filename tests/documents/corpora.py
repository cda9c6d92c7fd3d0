"""What the tests of documents share: reading all of a path, and the same documents in every kind of file."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile

import zstandard

from tokenmill.documents import ReadOptions, cut_files, find_files, read_unit

COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
TEXTS = ["one", "zwei ä", "三", "🙂" * 50, 'quote " and \\ and \n', "a,b\tc\r\nd", " spaces ", "]}{["]


def lines_of(texts, field="text"):
    return b"".join(json.dumps({field: text}, ensure_ascii=False).encode() + b"\n" for text in texts)


def read(path, chunk_bytes=16 << 20, *, format=None, **options):
    """All batches of all units of what a path stands for."""
    reading = ReadOptions(**options)
    units = cut_files(find_files(path, format=format).files, chunk_bytes=chunk_bytes, text_unit=reading.text_unit)
    return [batch for unit in units for batch in read_unit(unit, reading)]


def texts_of(batches):
    texts = [text for batch in batches for text in batch.documents]
    assert all(isinstance(text, str) for text in texts)
    return texts


def records_of(batches):
    records = [record for batch in batches for record in batch.documents]
    assert all(isinstance(record, dict) for record in records)
    return records


def bad_of(batches):
    return [(bad.line, bad.reason, bad.detail) for batch in batches for bad in batch.bad]


def reasons_of(batches):
    return [(bad.line, bad.reason) for batch in batches for bad in batch.bad]


def num_lines_of(batches):
    return sum(batch.num_lines for batch in batches)


def csv_of(texts, delimiter=","):
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerow(["id", "text"])
    writer.writerows([str(index), text] for index, text in enumerate(texts))
    return out.getvalue().encode()


def tar_of(members, format=tarfile.PAX_FORMAT):
    """Pack (name, data) pairs."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


CONTENTS = {
    ".jsonl": lines_of,
    ".ndjson": lines_of,
    ".json": lambda texts: json.dumps([{"id": i, "text": text} for i, text in enumerate(texts)], indent=1).encode(),
    ".csv": csv_of,
    ".tsv": lambda texts: csv_of(texts, "\t"),
    ".tar": lambda texts: tar_of([(f"{i:04}.txt", text.encode()) for i, text in enumerate(texts)]),
}
"""Bytes of a file of each kind that can also be compressed, with the given texts in it."""
