"""From what a user names to a list of files, in an order that any machine agrees on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec

from tokenmill.documents.formats import COMPRESSIONS, ENDINGS, forced_suffix, known_suffix
from tokenmill.documents.units import InputFile
from tokenmill.errors import DocumentError, nearest
from tokenmill.types import natural_key

if TYPE_CHECKING:
    import datasets


# Hugging Face datasets as the Arrow files that they are made of.

PREFIX = "hf:"
_SAVED, _SAVED_INFO, _SAVED_DICT = "state.json", "dataset_info.json", "dataset_dict.json"
_DEFAULT_SPLIT = "train"
_INDICES = ("_indices_files", "_indices_data_files")


def dataset_files(item: str) -> list[str]:
    """Return the Arrow files of `hf:name[:config[:split]]`, in the order of the dataset.

    The name is a folder made by `save_to_disk`, a folder of data files, or one on the hub; the last two are
    brought into the cache of the `datasets` library first. The split is `train` unless it is said.
    """
    name, config, split = parse(item)
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise DocumentError(
            f"{item}: must have the datasets library to read it, got none; pip install 'tokenmill[hf]'"
        ) from None
    saved = any(os.path.isfile(os.path.join(name, mark)) for mark in (_SAVED, _SAVED_DICT))
    dataset = _saved(item, name, config, split) if saved else _loaded(item, name, config, split)
    return _arrow_files(item, dataset)


def is_saved_note(path: str) -> bool:
    """Tell whether a file is one in which `save_to_disk` keeps notes beside the rows: it holds no document."""
    folder, name = os.path.split(path)
    if name not in (_SAVED, _SAVED_INFO, _SAVED_DICT):
        return False
    others = {_SAVED: (_SAVED_INFO,), _SAVED_INFO: (_SAVED,), _SAVED_DICT: ()}[name]
    return all(os.path.isfile(os.path.join(folder, other)) for other in others)


def parse(item: str) -> tuple[str, str | None, str | None]:
    """Return (name, config, split); a part that is empty or left out is None.

    A name with colons, such as a path on Windows, is a folder that exists: the longest that does.

    >>> parse("hf:org/name::validation")
    ('org/name', None, 'validation')
    """
    parts = re.split(r":(?![^\[]*\])", os.path.expanduser(item.removeprefix(PREFIX)))  # not in a split's [:10%]
    for end in range(len(parts), max(len(parts) - 3, 0), -1):
        name = ":".join(parts[:end])
        if name and os.path.isdir(name):
            rest = parts[end:]
            break
    else:
        name, rest = parts[0], parts[1:]
    if not name or len(rest) > 2:
        raise DocumentError(f"{item}: must be hf:name[:config[:split]], got {len(parts)} parts; fix it")
    config, split = (part or None for part in (*rest, "", "")[:2])
    return name, config, split


def _saved(item: str, folder: str, config: str | None, split: str | None) -> datasets.Dataset:
    """Open a folder made by `save_to_disk`; there are no configs in it, so one word after the name is the split."""
    import datasets

    if config is not None and split is not None:
        raise DocumentError(
            f"{item}: must name no config, as a saved dataset has none, got {config!r}; write hf:{folder}:{split}"
        )
    split = split or config
    if os.path.isfile(os.path.join(folder, _SAVED_DICT)):
        folder = os.path.join(folder, _split_of(item, folder, split))
        split = None
    _refuse_old_indices(item, folder)
    try:
        dataset = datasets.load_from_disk(folder, keep_in_memory=False)
    except (OSError, ValueError, KeyError) as error:
        raise _not_opened(item, error) from None
    if not isinstance(dataset, datasets.Dataset) or (split is not None and split != str(dataset.split)):
        raise DocumentError(
            f"{item}: must name the split of a saved dataset, got {split!r} for {getattr(dataset, 'split', None)}; "
            f"write hf:{folder}"
        )
    return dataset


def _split_of(item: str, folder: str, split: str | None) -> str:
    try:
        with open(os.path.join(folder, _SAVED_DICT), "rb") as file:
            known = [str(name) for name in msgspec.json.decode(file.read())["splits"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _not_opened(item, error) from None
    chosen = split or _DEFAULT_SPLIT
    if chosen not in known:
        raise DocumentError(
            f"{item}: must name one of the splits {', '.join(known)}, got {chosen!r}; {nearest(chosen, known)}"
        )
    return chosen


def _refuse_old_indices(item: str, folder: str) -> None:
    """Raise if an old `datasets` saved a selection beside the rows, which newer ones do not see."""
    try:
        with open(os.path.join(folder, _SAVED), "rb") as file:
            state = msgspec.json.decode(file.read())
    except (OSError, ValueError, RecursionError) as error:
        raise _not_opened(item, error) from None
    if any(state.get(name) for name in _INDICES):
        raise _selection(item)


def _loaded(item: str, name: str, config: str | None, split: str | None) -> datasets.Dataset:
    import datasets

    split = split or _DEFAULT_SPLIT
    try:
        if int(datasets.__version__.split(".")[0]) < 4:  # older ones would ask whether to run code
            return datasets.load_dataset(name, config, split=split, trust_remote_code=False)
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library lets through what any of its own libraries raises
        raise _not_opened(item, error) from error


def _arrow_files(item: str, dataset: datasets.Dataset) -> list[str]:
    """Return the files that hold the rows of a dataset, and no others, in its order."""
    if dataset._indices is not None:
        raise _selection(item)
    files = [file["filename"] for file in dataset.cache_files]
    if len(set(files)) < len(files) or sum(map(_num_rows, files)) != len(dataset):
        raise DocumentError(
            f"{item}: must be a dataset of whole files, got one of parts of {len(set(files))} files; "
            "save it with save_to_disk and give that folder"
        )
    return files


def _num_rows(path: str) -> int:
    import pyarrow as pa

    with pa.memory_map(path) as source:
        return sum(batch.num_rows for batch in pa.ipc.open_stream(source))


def _selection(item: str) -> DocumentError:
    return DocumentError(
        f"{item}: must be a dataset of all rows of its files, got one with an indices mapping, as select, shuffle "
        "and filter make it; call flatten_indices() and save it again"
    )


def _not_opened(item: str, error: Exception) -> DocumentError:
    said = " ".join(str(error).split()) or "no message"
    return DocumentError(
        f"{item}: must be a dataset that the datasets library can open, got {type(error).__name__}: {said}; "
        "fix the name, config or split, or the connection"
    )


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
    decompress = next((COMPRESSIONS[ending] for ending in COMPRESSIONS if suffix.endswith(ending)), None)
    try:
        with open(path, "rb") as file:
            start = file.read(_SNIFFED_BYTES) if decompress is None else next(decompress(file, path), b"")
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
