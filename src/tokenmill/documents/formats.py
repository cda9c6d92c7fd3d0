"""Which kinds of files are known, by the ending of their names, and how units are cut and read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tokenmill.documents.columns import Arrow, Parquet
from tokenmill.documents.delimited import Delimited
from tokenmill.documents.json_file import JsonFile
from tokenmill.documents.lines import JsonLines, PlainText
from tokenmill.documents.opening import Decompress, gzip_blocks, zstd_blocks
from tokenmill.documents.units import DocumentBatch, Format, InputFile, Piece, ReadOptions, Unit
from tokenmill.documents.webdataset import WebDataset
from tokenmill.errors import ConfigError, DocumentError, nearest

COMPRESSIONS: Mapping[str, Decompress] = {".gz": gzip_blocks, ".zst": zstd_blocks}


def _formats(ending: str, decompress: Decompress | None) -> dict[str, Format]:
    """Return the formats whose files may be compressed as a whole, by their suffixes with `ending`."""
    return {
        f".jsonl{ending}": JsonLines(decompress),
        f".json{ending}": JsonFile(decompress),
        f".txt{ending}": PlainText(decompress),
        f".csv{ending}": Delimited(",", decompress),
        f".tsv{ending}": Delimited("\t", decompress),
        f".tar{ending}": WebDataset(decompress),
    }


FORMATS: Mapping[str, Format] = {
    **_formats("", None),
    **_formats(".gz", gzip_blocks),
    **_formats(".zst", zstd_blocks),
    ".parquet": Parquet(),
    ".arrow": Arrow(),
}

NAMES: Mapping[str, str] = {
    "jsonl": ".jsonl",
    "json": ".json",
    "parquet": ".parquet",
    "arrow": ".arrow",
    "text": ".txt",
    "csv": ".csv",
    "tsv": ".tsv",
    "tar": ".tar",
}
"""What a user may call a format, whatever the endings of the files."""

ENDINGS: Mapping[str, str] = {
    **{suffix: suffix for suffix in NAMES.values()},
    ".ndjson": ".jsonl",
    ".feather": ".arrow",
    ".text": ".txt",
    ".md": ".txt",
    ".tgz": ".tar.gz",
}
"""Endings of file names, before that of a compression, and the formats that they stand for."""

MAX_PIECES = 16_384
"""Of a unit: it is sent to a worker, and a folder may hold millions of empty files."""


def known_suffix(name: str) -> str | None:
    """Return the key of `FORMATS` that the ending of a file name stands for, None if it is not known.

    >>> known_suffix("part-0.NDJSON.gz"), known_suffix("part-0.gz")
    ('.jsonl.gz', None)
    """
    name, compression = _without_compression(name.lower())
    suffix = next((suffix for ending, suffix in ENDINGS.items() if name.endswith(ending)), None)
    return None if suffix is None or suffix + compression not in FORMATS else suffix + compression


def forced_suffix(name: str, format: str) -> str:
    """Return the key of `FORMATS` for a file that is read as `format`; its name says how it is compressed."""
    if format not in NAMES:
        raise ConfigError(f"format: must be one of {', '.join(NAMES)}, got {format!r}; {nearest(format, NAMES)}")
    stem, compression = _without_compression(name.lower())
    suffix = NAMES[format] + (".gz" if stem.endswith(".tgz") else compression)
    return suffix if suffix in FORMATS else NAMES[format]


def _without_compression(name: str) -> tuple[str, str]:
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    return name.removesuffix(compression), compression


def cut_files(files: Iterable[InputFile], *, chunk_bytes: int) -> Iterator[Unit]:
    """Cut files into units of work, in input order: consecutive pieces until they have `chunk_bytes`.

    A plain `.jsonl` is cut into ranges of `chunk_bytes`, Parquet and Arrow files into runs of row groups and of
    record batches; other files are one piece. The units depend on the files and `chunk_bytes` alone. A file is
    looked into only when the iterator comes to it.
    """
    if chunk_bytes < 1:
        raise ConfigError(f"chunk_bytes: must be at least 1, got {chunk_bytes}; leave it out")
    index = size = 0
    pieces: list[Piece] = []
    for file in files:
        for begin, end, num_bytes in FORMATS[file.suffix].ranges(file, chunk_bytes):
            pieces.append(Piece(file=file, begin=begin, end=end, bytes=num_bytes))
            size += num_bytes
            if size >= chunk_bytes or len(pieces) >= MAX_PIECES:
                yield Unit(index=index, pieces=tuple(pieces))
                index += 1
                size = 0
                pieces = []
    if pieces:
        yield Unit(index=index, pieces=tuple(pieces))


def read_unit(unit: Unit, options: ReadOptions) -> Iterator[DocumentBatch]:
    """Read a unit as a stream of batches, in order; they are the same every time."""
    batch = DocumentBatch()
    before = 0
    for index, piece in enumerate(unit.pieces):
        first = 0
        try:
            for group in FORMATS[piece.file.suffix].read(piece, options):
                batch.add(group, index, first)
                first += group.num_lines
                batch.position = before + min(group.position, piece.bytes)
                if batch.size >= options.batch_bytes or batch.num_lines >= options.batch_documents:
                    yield batch
                    batch = DocumentBatch()
        except DocumentError:
            if batch.num_lines:
                yield batch  # a bad record before it comes first
            raise
        before += piece.bytes
    if batch.num_lines:
        yield batch


def place(piece: Piece, line: int) -> str:
    """Name a record for people: `path:17` or `path row 17`, counted from 1.

    `line` is counted from 0 at the start of the file: add the `num_lines` of its pieces before this one.
    """
    counts = FORMATS[piece.file.suffix].counts
    return f"{piece.file.path}:{line + 1}" if counts == "line" else f"{piece.file.path} {counts} {line + 1}"


# A little of a corpus, from all over it.

_SAMPLE_PLACES = 16
_SAMPLE_BYTES = 64 << 10
"""Of each place."""
_SAMPLE_CHUNK_BYTES = 16 << 20
_SAMPLE_RECORD_BYTES = 4 << 20
"""Larger records are left out of a sample: the process that takes it should stay small."""


def sample_texts(files: Sequence[InputFile], text_field: str | None) -> list[str]:
    """Return the first documents at evenly spread places of the input, together about 1 MiB at most.

    The same files give the same sample, however a build cuts them. Bad records are left for who reads all.
    Of whole records all texts are taken, wherever they stand.
    """
    options = ReadOptions(
        text_field=text_field, batch_bytes=_SAMPLE_BYTES, batch_documents=256, max_record_bytes=_SAMPLE_RECORD_BYTES
    )
    num_units = sum(1 for _ in cut_files(files, chunk_bytes=_SAMPLE_CHUNK_BYTES))
    chosen = {place * num_units // _SAMPLE_PLACES for place in range(_SAMPLE_PLACES)}
    texts: list[str] = []
    for unit in cut_files(files, chunk_bytes=_SAMPLE_CHUNK_BYTES):
        if unit.index not in chosen:
            continue
        batch = next(read_unit(unit, options), None)
        if batch is None:
            continue
        room = _SAMPLE_BYTES
        for text in _strings(batch.documents):
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
