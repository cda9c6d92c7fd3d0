"""Hugging Face datasets as the Arrow files that they are made of."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.errors import DocumentError, nearest

if TYPE_CHECKING:
    import datasets

PREFIX = "hf:"
_SAVED, _SAVED_INFO, _SAVED_DICT = "state.json", "dataset_info.json", "dataset_dict.json"
_DEFAULT_SPLIT = "train"
_INDICES = ("_indices_files", "_indices_data_files")


def dataset_files(item: str) -> list[str]:
    """Return the Arrow files of `hf:name[:config[:split]]`, in the order of the dataset.

    The name is a folder made by `save_to_disk`, a folder of data files, or a dataset on the hub. The `datasets`
    library copies the last two to its cache first. The split is `train` by default.
    """
    name, config, split = parse(item)
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise DocumentError(f"{item}: the datasets library is not installed; pip install 'tokenmill[hf]'") from None
    is_saved = any(os.path.isfile(os.path.join(name, mark)) for mark in (_SAVED, _SAVED_DICT))
    return _arrow_files(item, _saved(item, name, config, split) if is_saved else _loaded(item, name, config, split))


def is_saved_note(path: str) -> bool:
    """Return whether `save_to_disk` wrote a file next to the rows as a note: it holds no document."""
    folder, name = os.path.split(path)
    other = {_SAVED: _SAVED_INFO, _SAVED_INFO: _SAVED, _SAVED_DICT: _SAVED_DICT}.get(name)
    return other is not None and os.path.isfile(os.path.join(folder, other))


def parse(item: str) -> tuple[str, str | None, str | None]:
    """Return name, config and split; a part that is empty or left out is None.

    A name may have colons, as a Windows path has, if it is a folder that exists. The longest such name is taken.

    >>> parse("hf:org/name::validation")
    ('org/name', None, 'validation')
    """
    parts = re.split(r":(?![^\[]*\])", os.path.expanduser(item.removeprefix(PREFIX)))  # not in a split's [:10%]
    names = [":".join(parts[:end]) for end in range(1, len(parts) + 1)]
    ends = [end for end, name in enumerate(names, 1) if name and os.path.isdir(name) and len(parts) - end <= 2]
    end = max(ends, default=1)
    rest = parts[end:]
    if not names[end - 1] or len(rest) > 2:
        raise DocumentError(f"{item}: must be hf:name[:config[:split]], got {len(parts)} parts; fix it")
    config, split = (part or None for part in (*rest, "", "")[:2])
    return names[end - 1], config, split


def _saved(item: str, folder: str, config: str | None, split: str | None) -> datasets.Dataset:
    """Open a folder made by `save_to_disk`. It has no configs, so a single word after the name is the split."""
    import datasets

    if config is not None and split is not None:
        raise DocumentError(f"{item}: a saved dataset has no configs: {config!r}; write hf:{folder}:{split}")
    split = split or config
    try:
        if os.path.isfile(os.path.join(folder, _SAVED_DICT)):
            splits = [str(name) for name in _read_json(folder, _SAVED_DICT)["splits"]]
            split = split or _DEFAULT_SPLIT
            if split not in splits:
                raise DocumentError(
                    f"{item}: must name one of the splits {', '.join(splits)}, got {split!r}; "
                    f"{nearest(split, splits)}"
                )
            folder, split = os.path.join(folder, split), None
        # An old `datasets` saved a selection next to the rows. Newer ones ignore it and return all rows.
        if any(_read_json(folder, _SAVED).get(name) for name in _INDICES):
            raise _selection(item)
        dataset = datasets.load_from_disk(folder, keep_in_memory=False)
    except DocumentError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _not_opened(item, error) from None
    if not isinstance(dataset, datasets.Dataset) or (split is not None and split != str(dataset.split)):
        raise DocumentError(
            f"{item}: must name the split of a saved dataset, got {split!r} for {getattr(dataset, 'split', None)}; "
            f"write hf:{folder}"
        )
    return dataset


def _read_json(folder: str, name: str) -> dict[str, Any]:
    with open(os.path.join(folder, name), "rb") as file:
        return msgspec.json.decode(file.read(), type=dict[str, Any])


def _loaded(item: str, name: str, config: str | None, split: str | None) -> datasets.Dataset:
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split or _DEFAULT_SPLIT)
    except Exception as error:  # the library passes on the errors of its own libraries
        raise _not_opened(item, error) from error


def _arrow_files(item: str, dataset: datasets.Dataset) -> list[str]:
    """Return the files that hold the rows of a dataset, and no others, in its order."""
    import pyarrow as pa

    if dataset._indices is not None:
        raise _selection(item)
    files = [file["filename"] for file in dataset.cache_files]
    num_rows = 0
    for path in files:
        with pa.memory_map(path) as source:
            num_rows += sum(batch.num_rows for batch in pa.ipc.open_stream(source))
    if len(set(files)) < len(files) or num_rows != len(dataset):
        raise DocumentError(
            f"{item}: must be a dataset of whole files, got one of parts of {len(set(files))} files; "
            "save it with save_to_disk and give that folder"
        )
    return files


def _selection(item: str) -> DocumentError:
    return DocumentError(
        f"{item}: the dataset has an indices mapping, as select, shuffle and filter make it; "
        "call flatten_indices() and save it again"
    )


def _not_opened(item: str, error: Exception) -> DocumentError:
    message = " ".join(str(error).split()) or "no message"
    return DocumentError(
        f"{item}: must be a dataset that the datasets library can open, got {type(error).__name__}: {message}; "
        "fix the name, config or split, or the connection (offline, set HF_HUB_OFFLINE=1 to use its cache at once)"
    )
