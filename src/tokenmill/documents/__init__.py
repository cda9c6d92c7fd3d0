"""Raw text from files.

1. In: paths, globs, folders and Hugging Face datasets; which field of a record holds the text.
2. Does: lists the files in the same order on every machine; cuts them into units of work that are read
   independently; reads a unit as a stream, so that memory is bounded by a batch and the longest record.
3. Out: batches of texts or records in input order, and the records that could not be read, by line and reason.

A new kind of file is one `Format` (see `units`) and its line in `inputs.FORMATS`. Formats share how files are
opened (`streams`) and how lines and JSON values become documents (`lines`).
"""

from tokenmill.documents.inputs import (
    Inputs,
    chunk_size,
    cut_files,
    find_files,
    format_of,
    place,
    read_unit,
    sample_texts,
)
from tokenmill.documents.streams import content_digest, file_digest
from tokenmill.documents.units import BadRecord, DocumentBatch, InputFile, Piece, ReadOptions, Unit

__all__ = [
    "BadRecord",
    "DocumentBatch",
    "InputFile",
    "Inputs",
    "Piece",
    "ReadOptions",
    "Unit",
    "chunk_size",
    "content_digest",
    "cut_files",
    "file_digest",
    "find_files",
    "format_of",
    "place",
    "read_unit",
    "sample_texts",
]
