"""From what a user names to a list of files, in an order that any machine agrees on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import PurePath

from tokenmill.documents.formats import FORMATS, known_suffix
from tokenmill.documents.units import InputFile
from tokenmill.errors import DocumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The files to read, in order."""

    files: tuple[InputFile, ...]
    passed_over: tuple[str, ...]
    """Files in the given folders whose kind is not known, and that are not read."""


def find_files(inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Inputs:
    """List the files that paths, globs and folders (with all below) stand for.

    The order is that of the whole paths, digits compared as numbers, whatever the order they were
    given in: a glob expanded by the shell gives the same as one expanded here. A file that is named
    twice is read once. Hidden files of a folder are left alone.
    """
    given = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    if not given:
        raise DocumentError("inputs: must name at least one file, got an empty list; give a path, glob or folder")
    found: dict[str, str] = {}
    passed_over: list[str] = []
    for item in given:
        for path, named in _expand(os.fspath(item)):
            suffix = known_suffix(path)
            if suffix is not None:
                found[os.path.abspath(path)] = suffix
            elif named:
                raise DocumentError(f"{path}: must end in {_known()}, got another ending; convert or rename it")
            else:
                passed_over.append(path)
    if not found:
        raise DocumentError(
            f"{', '.join(_shown(os.fspath(item)) for item in given)}: must hold files that end in {_known()}, "
            f"got {len(passed_over)} with other endings; convert or rename them"
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


def natural_key(path: str) -> tuple[object, ...]:
    """Return a sort key that compares digits as numbers, folder by folder.

    >>> sorted(["b/1", "a10", "a9", "a09"], key=natural_key)
    ['a09', 'a9', 'a10', 'b/1']
    """
    parts = tuple(
        tuple(int(piece) if odd % 2 else piece for odd, piece in enumerate(re.split(r"([0-9]+)", part)))
        for part in PurePath(path).parts
    )
    return (parts, path)  # the path itself decides between a09 and a9


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


def _known() -> str:
    return ", ".join(FORMATS)


def _shown(item: str) -> str:
    """Return an input as messages may show it: an address may carry a password before the host."""
    return re.sub(r"(?<=://)[^/@]*@", "", item)
