"""Input files in an order that is the same on every machine, units of work, and batches of documents."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from glob import glob
from importlib import import_module
from pathlib import PurePath

from tokenmill.documents.hugging_face import PREFIX, dataset_files, is_saved_note
from tokenmill.documents.streams import decompressed, is_changed, most_bytes, too_much
from tokenmill.documents.units import (
    COMPRESSED,
    BadRecord,
    DocumentBatch,
    Format,
    Group,
    InputFile,
    Piece,
    ReadOptions,
    Unit,
    whole,
)
from tokenmill.errors import ConfigError, DocumentError, InputMissingError
from tokenmill.tables import check_option, path_of
from tokenmill.types import natural_key

# Known kinds of files, by the endings of their names.

FORMATS: Mapping[str, tuple[str, str]] = {
    ".jsonl": ("lines", "JSON_LINES"),
    ".json": ("json_file", "JSON_FILE"),
    ".parquet": ("columns", "PARQUET"),
    ".arrow": ("columns", "ARROW"),
    ".txt": ("lines", "TEXT_FILE"),
    ".csv": ("delimited", "CSV"),
    ".tsv": ("delimited", "TSV"),
    ".tar": ("webdataset", "WEBDATASET"),
}
"""Suffix -> module of this room, and the `Format` in it: loaded when the first such file is met."""
_TEXT_LINES = ("lines", "TEXT_LINES")
_IN_MEMORY: Mapping[str, tuple[str, str]] = {".items": ("lines", "ITEMS"), ".table": ("columns", "TABLE")}

NAMES: Mapping[str, str] = {"text" if suffix == ".txt" else suffix[1:]: suffix for suffix in FORMATS}
"""What a user may call a format, whatever the endings of the files."""

ENDINGS: Mapping[str, str] = {
    **{suffix: suffix for suffix in FORMATS},
    ".ndjson": ".jsonl",
    ".feather": ".arrow",
    ".text": ".txt",
    ".md": ".txt",
}
"""Endings of file names, without that of a compression -> the suffix of their format."""
_COMPRESSED_WITHIN = (".parquet", ".arrow")


@cache
def format_of(suffix: str, text_unit: str = "file") -> Format:
    """Return the format of files with a suffix such as `.jsonl.gz`; `text_unit` is that of `ReadOptions`."""
    ending = "." + suffix.split(".")[1]
    is_lines = ending == _TEXT and text_unit == "line"
    module, name = _TEXT_LINES if is_lines else {**FORMATS, **_IN_MEMORY}[ending]
    format: Format = getattr(import_module(f"tokenmill.documents.{module}"), name)
    return format


def suffix_of(name: str, format: str | None = None) -> str | None:
    """Return the suffix by which a file is read: that of its name, or that of `format`; None: not known.

    >>> suffix_of("part-0.NDJSON.gz"), suffix_of("part-0.gz"), suffix_of("part-0.gz", "csv")
    ('.jsonl.gz', None, '.csv.gz')
    """
    if format is not None:
        check_option("format", format, NAMES)
    name = re.sub(r"\.tgz$", ".tar.gz", name.lower())
    compression = next((ending for ending in COMPRESSED if name.endswith(ending)), "")
    stem = name.removesuffix(compression)
    if format is not None:
        return NAMES[format] if NAMES[format] in _COMPRESSED_WITHIN else NAMES[format] + compression
    suffix = next((suffix for ending, suffix in ENDINGS.items() if stem.endswith(ending)), None)
    if suffix is None or (suffix in _COMPRESSED_WITHIN and compression):
        return None
    return suffix + compression


# Paths, globs and folders as a list of files.

_NOTES = ("readme", "license", "licence")
"""Names of text files that describe the data next to them."""
_TEXT, _ARROW = ".txt", ".arrow"
_SNIFFED_BYTES = 8192
_MOST_SHOWN = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The files to read, in order."""

    files: tuple[InputFile, ...]
    passed_over: tuple[str, ...]
    """Files in the input folders that are skipped: unknown kinds, notes next to data, binary files with `text`."""


def find_files(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, format: str | None = None
) -> Inputs:
    """List the files of paths, globs, folders with everything below, and `hf:name[:config[:split]]`.

    Files are ordered by their whole paths, digits compared as numbers, whatever the order of the inputs: a glob
    expanded by the shell gives the same as one expanded here. A file that is named twice is read once. Hidden files
    of a folder are not read. `format` says how files are read, whatever their endings: with `text`, every file of a
    folder that is UTF-8 is a document.
    """
    listed = [inputs] if isinstance(inputs, str) or not isinstance(inputs, Iterable) else inputs
    items = [path_of("inputs", item) for item in listed]
    if not items:
        raise DocumentError("inputs: must name at least one file, got an empty list; give a path, glob or folder")
    suffix_of("", format)  # an unknown format is refused before anything is looked for
    suffixes: dict[str, str] = {}
    passed_over: list[str] = []
    for item in items:
        item_suffixes, item_passed_over = _files_of(item, format)
        suffixes |= item_suffixes
        passed_over += item_passed_over
    if not suffixes:
        others = f"{len(passed_over)} others" if passed_over else "no file at all"
        raise DocumentError(
            f"{', '.join(items)}: must hold files that end in {_known_endings()}, "
            f"got {others}; fix the path, convert or rename the files, or say their format"
        )
    folder = os.path.commonpath([os.path.dirname(path) for path in suffixes])
    paths = sorted(suffixes, key=lambda path: natural_key(os.path.relpath(path, folder)))
    files = tuple(
        InputFile(
            path=path,
            name=PurePath(os.path.relpath(path, folder)).as_posix(),
            bytes=os.path.getsize(path),
            suffix=suffixes[path],
        )
        for path in paths
    )
    return Inputs(files=files, passed_over=tuple(passed_over))


def _files_of(item: str, format: str | None) -> tuple[dict[str, str], list[str]]:
    """Return the files of one input as path -> suffix, and the files that are skipped."""
    if item.startswith(PREFIX):
        return {os.path.abspath(path): _ARROW for path in dataset_files(item)}, []
    suffixes: dict[str, str] = {}
    passed_over: list[str] = []
    notes: list[str] = []
    for path, is_named in _expand(item):
        suffix = suffix_of(path, format)
        if is_named and suffix is None:
            raise DocumentError(
                f"{path}: must end in {_known_endings()}, got another ending; "
                "convert or rename it, or say its format"
            )
        if suffix is None or (not is_named and not _is_input(path, suffix, format)):
            passed_over.append(path)
            continue
        suffixes[os.path.abspath(path)] = suffix
        stem = os.path.basename(path).partition(".")[0].lower()
        if not is_named and stem in _NOTES and suffix.startswith(_TEXT):
            notes.append(path)
    if format is None and any(not suffix.startswith(_TEXT) for suffix in suffixes.values()):
        for path in notes:
            suffixes.pop(os.path.abspath(path), None)  # a glob may match it twice
        passed_over += notes
    return suffixes, passed_over


def _expand(item: str) -> Iterator[tuple[str, bool]]:
    """Yield the files of an input: path, and whether the user named the file itself and not a folder."""
    if "://" in item:
        raise DocumentError(f"{item}: expected a path on this machine, got an address; download the files first")
    item = os.path.expanduser(item)
    if os.path.isfile(item):
        yield item, True
    elif os.path.isdir(item):
        for folder, folders, names in os.walk(item):
            if "manifest.json" in names and any(name.startswith("shard-") for name in (*folders, *names)):
                if folder == item:
                    raise DocumentError(
                        f"{item}: must hold texts or records, got a store, whose tokens are ready; "
                        "name it as the store of a source"
                    )
                folders[:], names[:] = [], []  # a store that was prepared from files beside it
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                if not name.startswith("."):
                    yield os.path.join(folder, name), False
    elif os.path.exists(item):
        raise DocumentError(f"{item}: must be a file or folder, got something else; write it to a file first")
    else:
        for match in glob(item, recursive=True) or _no_match(item):
            yield from ((path, is_named and not _is_marker(path)) for path, is_named in _expand(match))


def _no_match(item: str) -> list[str]:
    # In Python, a list of texts may have been meant.
    is_like_text = any(map(str.isspace, item)) or not os.path.splitext(item)[1]
    other = ", or pass a text as a record in Python: [{'text': ...}]" if is_like_text else ""
    shown = item if len(item) <= _MOST_SHOWN else f"{item[:_MOST_SHOWN]}..."
    raise InputMissingError(
        f"no such file or folder: {shown}; fix the path (working directory: {os.getcwd()}){other}"
    )


def _is_marker(path: str) -> bool:
    """Return whether a file that a glob matches is a marker such as `_SUCCESS`, and not data of an unknown kind."""
    return suffix_of(path) is None and (os.path.basename(path).startswith("_") or not os.path.getsize(path))


def _is_input(path: str, suffix: str, format: str | None) -> bool:
    """Return whether a file in a folder is read: broken symlinks, pipes and notes of a saved dataset are not."""
    if not os.path.isfile(path):
        return False
    return _is_text(path, suffix) if format == "text" else not is_saved_note(path)


def _is_text(path: str, suffix: str) -> bool:
    """Return whether the start of a file is UTF-8 text."""
    file = InputFile(path=path, name=path, bytes=0, suffix=suffix)
    try:
        with open(path, "rb") as stream:
            start = next(decompressed(stream, file), b"") if file.compression else stream.read(_SNIFFED_BYTES)
    except (OSError, DocumentError):
        return False
    start = start[:_SNIFFED_BYTES]
    try:
        start.decode()
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data" or len(start) < _SNIFFED_BYTES:
            return False
    return b"\0" not in start


def _known_endings() -> str:
    return f"{', '.join(ENDINGS)}, .tgz (but for columns also with {', '.join(COMPRESSED)})"


# Files as units of work, and a unit as batches of documents.

MAX_PIECES = 16_384
"""Upper limit of pieces in a unit. Units are sent to workers, and a folder may hold millions of empty files."""
_FEW_UNITS, _MANY_UNITS = 24, 256
_MIB = 1 << 20


def chunk_size(files: Sequence[InputFile]) -> int:
    """Return the size that units of an input should have: 4 to 256 MiB.

    A small input is cut into 24 units, which keep the cores of a small machine busy to the end. Above 64 MiB per
    unit the number grows, up to 256 units for 16 GiB, so that a cluster has enough work. Then the units grow to
    256 MiB, and above 64 GiB the number grows again. Each unit becomes a shard, so units are large. The size
    depends on the input alone, so the same files give the same units on every machine. If all files are compressed,
    units have a quarter of these sizes, because they hold about four times as much text.
    """
    compressed = all(file.compression or file.suffix == ".parquet" for file in files)
    step = _MIB // 4 if compressed else _MIB
    total = sum(file.bytes for file in files)
    few, many = (-(-(total // units) // step) for units in (_FEW_UNITS, _MANY_UNITS))
    return max(4, min(few, 64), min(many, 256)) * step


def cut_files(
    files: Iterable[InputFile], *, chunk_bytes: int, skip_broken: bool = False, text_unit: str = "file"
) -> Iterator[Unit]:
    """Cut files into units of work, in input order: consecutive pieces until they have `chunk_bytes`.

    Uncompressed files of lines are cut into ranges of `chunk_bytes`: `.jsonl`, and text with `text_unit` "line".
    Parquet and Arrow files are cut into ranges of row groups and of record batches. Other files are one piece. The
    units depend on the files and the arguments alone. A file is opened only when the iterator reaches it. With
    `skip_broken`, a file that cannot be opened is one piece, and reading it raises the error.
    """
    if chunk_bytes < 1:
        raise ConfigError(f"chunk_bytes: must be at least 1, got {chunk_bytes}; leave it out")
    index = size = 0
    pieces: list[Piece] = []
    for file in files:
        for begin, end, num_bytes in _ranges(file, chunk_bytes, skip_broken, text_unit):
            pieces.append(Piece(file=file, begin=begin, end=end, bytes=num_bytes))
            size += num_bytes
            if size >= chunk_bytes or len(pieces) >= MAX_PIECES:
                yield Unit(index=index, pieces=tuple(pieces))
                index += 1
                size = 0
                pieces = []
    if pieces:
        yield Unit(index=index, pieces=tuple(pieces))


def _ranges(file: InputFile, chunk_bytes: int, skip_broken: bool, text_unit: str) -> Iterator[tuple[int, int, int]]:
    try:
        return format_of(file.suffix, text_unit).ranges(file, chunk_bytes)
    except DocumentError:
        if not skip_broken:
            raise
        return whole(file, chunk_bytes)


def read_unit(unit: Unit, options: ReadOptions) -> Iterator[DocumentBatch]:
    """Read a unit as a stream of batches, in order; they are the same every time."""
    batch = DocumentBatch()
    before = 0
    for index, piece in enumerate(unit.pieces):
        first = size = 0
        most = most_bytes(piece.file.bytes, options.max_expansion)
        try:
            for group in format_of(piece.file.suffix, options.text_unit).read(piece, options):
                size += group.size
                if size > most:
                    raise too_much(piece.file.path, most)
                batch.add(group, index, first)
                first += group.num_lines
                batch.position = before + min(group.position, piece.bytes)
                if batch.size >= options.batch_bytes or batch.num_lines >= options.batch_documents:
                    yield batch
                    batch = DocumentBatch()
        except DocumentError as error:
            if not options.skip_broken or is_changed(piece.file):
                if batch.num_lines:
                    yield batch  # a bad record before it comes first
                raise
            bad = BadRecord(line=0, reason="broken", detail=str(error))
            batch.add(Group(bad=[bad]), index, first)
        before += piece.bytes
    if batch.num_lines:
        yield batch


def place(piece: Piece, line: int) -> str:
    """Name a record for people: `path:17`, `path row 17`, or `item 17` of objects in memory, counted from 1.

    `line` is counted from 0 at the start of the file, not of the piece.
    """
    counts = format_of(piece.file.suffix).counts
    if piece.file.suffix in _IN_MEMORY:
        return f"{counts} {line + 1}"
    return f"{piece.file.path}:{line + 1}" if counts == "line" else f"{piece.file.path} {counts} {line + 1}"


# A sample from all over a corpus.

_SAMPLE_PLACES = 16
_SAMPLE_BYTES = 64 << 10
"""Characters of the sample per place."""
_SAMPLE_CHUNK_BYTES = 16 << 20
_SAMPLE_RECORD_BYTES = 4 << 20
"""Size limit of a record in a sample, because the process that takes it should stay small."""


def sample_texts(
    files: Sequence[InputFile],
    text_field: str | None,
    *,
    delimiter: str | None = None,
    skip_broken: bool = False,
) -> list[str]:
    """Return the first documents at evenly spread places of the input, together about 1 MiB at most.

    The same files give the same sample, however a build cuts them. Bad records are passed over. Of whole records
    all strings are taken, whatever their fields.
    """
    options = ReadOptions(
        text_field=text_field,
        batch_bytes=_SAMPLE_BYTES,
        batch_documents=256,
        max_record_bytes=_SAMPLE_RECORD_BYTES,
        delimiter=delimiter,
        skip_broken=skip_broken,
    )
    units = partial(cut_files, files, chunk_bytes=_SAMPLE_CHUNK_BYTES, skip_broken=skip_broken)
    num_units = sum(1 for _ in units())
    chosen = {place * num_units // _SAMPLE_PLACES for place in range(_SAMPLE_PLACES)}
    texts: list[str] = []
    for unit in units():
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
