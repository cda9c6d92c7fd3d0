"""Which kinds of files are known, by the ending of their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tokenmill.documents.compressed import gzip_blocks, zstd_blocks
from tokenmill.documents.jsonl import CompressedJsonl, PlainJsonl
from tokenmill.documents.units import DocumentBatch, Format, InputFile, ReadOptions, Unit
from tokenmill.errors import ConfigError

CHUNK_BYTES = 16 << 20

FORMATS: Mapping[str, Format] = {
    ".jsonl": PlainJsonl(),
    ".jsonl.gz": CompressedJsonl(gzip_blocks),
    ".jsonl.zst": CompressedJsonl(zstd_blocks),
}


def known_suffix(name: str) -> str | None:
    """Return the ending of a file name that says what is in it, None if no format has it.

    >>> known_suffix("part-0.JSONL.gz"), known_suffix("part-0.gz")
    ('.jsonl.gz', None)
    """
    return next((suffix for suffix in FORMATS if name.lower().endswith(suffix)), None)


def cut_files(files: Iterable[InputFile], *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Unit]:
    """Cut files into units of work, in input order; a plain `.jsonl` into ranges of `chunk_bytes`."""
    if chunk_bytes < 1:
        raise ConfigError(f"chunk_bytes: must be at least 1, got {chunk_bytes}; leave it out")
    index = 0
    for file in files:
        for begin, end, size in FORMATS[file.suffix].ranges(file, chunk_bytes):
            yield Unit(index=index, file=file, begin=begin, end=end, bytes=size)
            index += 1


def read_unit(unit: Unit, options: ReadOptions) -> Iterator[DocumentBatch]:
    """Read a unit as a stream of batches, in order."""
    return FORMATS[unit.file.suffix].read(unit, options)
