"""From what a user names to a list of files, in an order that any machine agrees on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import PurePath

from tokenmill.documents.formats import COMPRESSIONS, ENDINGS, forced_suffix, known_suffix
from tokenmill.documents.hugging_face import PREFIX, dataset_files, is_saved_note
from tokenmill.documents.units import InputFile
from tokenmill.errors import DocumentError
from tokenmill.natural import natural_key

_NOTES = ("readme", "license", "licence")
"""Text files that tell of the data beside them and are no part of it."""
_TEXT, _ARROW = ".txt", ".arrow"
_SNIFFED_BYTES = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The files to read, in order."""

    files: tuple[InputFile, ...]
    passed_over: tuple[str, ...]
    """Files in the given folders that are not read: of no known kind, notes beside data, or binary where text is
    asked for."""


def find_files(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, format: str | None = None
) -> Inputs:
    """List the files that paths, globs, folders (with all below) and `hf:name[:config[:split]]` stand for.

    The order is that of the whole paths, digits compared as numbers, whatever the order they were
    given in: a glob expanded by the shell gives the same as one expanded here. A file that is named
    twice is read once. Hidden files of a folder are left alone. `format` says how files are read, whatever their
    endings: with `text`, every file of a folder that is UTF-8 is a document.
    """
    given = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    if not given:
        raise DocumentError("inputs: must name at least one file, got an empty list; give a path, glob or folder")
    if format is not None:
        forced_suffix("", format)  # an unknown name is refused before anything is looked for
    found: dict[str, str] = {}
    passed_over: list[str] = []
    for item in given:
        of_item, others = _files_of(os.fspath(item), format)
        found |= of_item
        passed_over += others
    if not found:
        raise DocumentError(
            f"{', '.join(_shown(os.fspath(item)) for item in given)}: must hold files that end in {_known()}, "
            f"got {len(passed_over)} others; convert or rename them, or say their format"
        )
    folder = os.path.commonpath([os.path.dirname(path) for path in found])
    paths = sorted(found, key=lambda path: natural_key(os.path.relpath(path, folder)))
    files = tuple(
        InputFile(
            path=path,
            name=PurePath(os.path.relpath(path, folder)).as_posix(),
            bytes=os.path.getsize(path),
            suffix=found[path],
        )
        for path in paths
    )
    return Inputs(files=files, passed_over=tuple(passed_over))


def _files_of(item: str, format: str | None) -> tuple[dict[str, str], list[str]]:
    """Return the suffix by path of the files that one input stands for, and what is passed over."""
    if item.startswith(PREFIX):
        return {os.path.abspath(path): _ARROW for path in dataset_files(item)}, []
    found: dict[str, str] = {}
    passed_over: list[str] = []
    inside: list[str] = []
    for path, named in _expand(item):
        suffix = known_suffix(path) if format is None else forced_suffix(path, format)
        if named and suffix is None:
            raise DocumentError(
                f"{path}: must end in {_known()}, got another ending; convert or rename it, or say its format"
            )
        if suffix is None or (not named and not _is_input(path, suffix, format)):
            passed_over.append(path)
            continue
        found[os.path.abspath(path)] = suffix
        if not named:
            inside.append(path)
    if format is None and any(not suffix.startswith(_TEXT) for suffix in found.values()):
        notes = [path for path in inside if _is_note(path)]
        for path in notes:
            del found[os.path.abspath(path)]
        passed_over += notes
    return found, passed_over


def _expand(item: str) -> Iterator[tuple[str, bool]]:
    """Yield (path, whether it was named itself and not found in a folder)."""
    if "://" in item:
        raise DocumentError(
            f"{_shown(item)}: must be a path on this machine, got an address; download the files first"
        )
    item = os.path.expanduser(item)
    if os.path.isfile(item):
        yield item, True
    elif os.path.isdir(item):
        for path in _below(item):
            yield path, False
    elif os.path.exists(item):
        raise DocumentError(f"{item}: must be a file or folder, got something else; write it to a file first")
    else:
        matches = glob(item, recursive=True)
        if not matches:
            raise DocumentError(
                f"{item}: must be a file, folder or glob that matches some, got nothing there; "
                f"fix the path (this process runs in {os.getcwd()})"
            )
        for match in matches:
            yield from _expand(match)


def _below(folder: str) -> Iterator[str]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield os.path.join(here, name)


def _is_input(path: str, suffix: str, format: str | None) -> bool:
    """Tell whether a file in a folder is to be read: no broken link, pipe, or note of a saved dataset."""
    if not os.path.isfile(path):
        return False
    if format == "text":
        return _is_text(path, suffix)
    return not is_saved_note(path)


def _is_note(path: str) -> bool:
    return os.path.basename(path).partition(".")[0].lower() in _NOTES and (known_suffix(path) or "").startswith(
        _TEXT
    )


def _is_text(path: str, suffix: str) -> bool:
    """Tell whether the start of a file is UTF-8 text."""
    unfold = next((COMPRESSIONS[ending] for ending in COMPRESSIONS if suffix.endswith(ending)), None)
    try:
        with open(path, "rb") as file:
            start = file.read(_SNIFFED_BYTES) if unfold is None else next(unfold(file, path), b"")
    except (OSError, DocumentError):
        return False
    start = start[:_SNIFFED_BYTES]
    try:
        start.decode()
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data" or len(start) < _SNIFFED_BYTES:
            return False
    return b"\0" not in start


def _known() -> str:
    return f"{', '.join(ENDINGS)} (but for columns also with {' or '.join(COMPRESSIONS)})"


def _shown(item: str) -> str:
    """Return an input as messages may show it: an address may carry a password before the host."""
    return re.sub(r"(?<=://)[^/@]*@", "", item)
