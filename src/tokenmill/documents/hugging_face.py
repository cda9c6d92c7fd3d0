"""Hugging Face datasets as the Arrow files that they are made of."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import orjson

from tokenmill.errors import DocumentError, nearest

if TYPE_CHECKING:
    import datasets

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
            known = [str(name) for name in orjson.loads(file.read())["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
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
            state = orjson.loads(file.read())
    except (OSError, ValueError) as error:
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
