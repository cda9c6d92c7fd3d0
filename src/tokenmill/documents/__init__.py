"""Raw text from files.

1. In: paths, globs and folders; which field of a record holds the text.
2. Does: lists the files in an order that any machine agrees on; cuts them into units of work that can be read
   apart from each other; reads a unit as a stream, so that memory is bounded by a batch and the longest line.
3. Out: batches of texts in input order, and the records that could not be read, by line and reason.
4. Must not know: tokenizers, stores, processes.

A new kind of file is one `Format` (see `units`) and its line in `formats`.
"""

from tokenmill.documents.formats import FORMATS, cut_files, read_unit
from tokenmill.documents.inputs import Inputs, find_files
from tokenmill.documents.units import REASONS, BadRecord, DocumentBatch, InputFile, ReadOptions, Unit

__all__ = [
    "FORMATS",
    "REASONS",
    "BadRecord",
    "DocumentBatch",
    "InputFile",
    "Inputs",
    "ReadOptions",
    "Unit",
    "cut_files",
    "find_files",
    "read_unit",
]
