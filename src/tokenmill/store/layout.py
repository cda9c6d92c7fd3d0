"""Which files a store is made of: their names, dtypes and sizes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tokenmill.types import TOKEN_KEYS, TRAINING_TYPES, IntegerArray, Uint32Array, natural_key

FORMAT = "tokenmill-store"
VERSION = 2
"""The newest that is written; a store that needs nothing of it is written as version 1."""
MANIFEST = "manifest.json"
DOCUMENTS = "documents.bin"
ROWS_FOLDER = ".rows"
"""Where row indexes of the store are kept; they can always be made again."""
JOURNAL_FOLDER = ".prepare"
"""Where prepare keeps what it needs to add to the store later."""
SHARDS_FOLDER = ".tmp-shards"
OWNER = ".tmp-pid"
"""Who writes to a folder, for the message that refuses a second one; the lock is on the folder itself."""
TEMPORARY = frozenset({OWNER, SHARDS_FOLDER, f".tmp-{MANIFEST}"})
"""What a build that was killed may leave in the folder of a store beside its shards."""
ANCHOR_TOKENS = 1024
"""A shard's index names the document that holds every 1,024th token: one short search finds any other."""

OFFSET_DTYPE = np.dtype("<u8")
ANCHOR_DTYPE = np.dtype("<u4")
TOKEN_DTYPES = ("|u1", "<u2", "<u4")
WAY_OUT = "copy the store again from where it is intact, or prepare it again"
"""Of a store that is damaged."""
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def key_file(key: str) -> str:
    """Return the name of the file that holds an array.

    >>> key_file("sequence")
    'sequence.bin'
    """
    return f"{key}.bin"


def is_key(name: str) -> bool:
    """Whether an array may have this name: a plain one whose file is not that of the documents."""
    return is_plain_name(name) and key_file(name) != DOCUMENTS and not key_file(name).endswith("-index.bin")


def is_plain_name(name: str) -> bool:
    """Whether a name leads to no other folder and hides no file."""
    return _NAME.fullmatch(name) is not None


def shard_name(index: int) -> str:
    """Return the name that the writer gives to a shard.

    >>> shard_name(7)
    'shard-00007'
    """
    return f"shard-{index:05d}"


def is_shard_name(name: str) -> bool:
    """Whether a name could have been given to a shard by the writer."""
    return re.fullmatch(r"shard-[0-9]{5,}(\.h5)?", name) is not None


def is_ours(path: Path) -> bool:
    """Whether a store of ours is at a path, finished or begun.

    A manifest makes a folder a store. Without one, it is a store that was begun if it has what a build leaves:
    shards, its journal or its temporary files, and nothing else but hidden files. An empty folder is no store.
    """
    if os.path.lexists(path / MANIFEST):
        return True
    names = os.listdir(path) if path.is_dir() else []
    shards = [name for name in names if is_shard_name(name)]
    begun = shards or JOURNAL_FOLDER in names or not TEMPORARY.isdisjoint(names)
    return bool(begun) and len(shards) == len([name for name in names if not name.startswith(".")])


def stores_below(folder: Path) -> list[Path]:
    """List the stores of ours in a folder, at any depth; none within another, nor in hidden folders.

    Beside a finished one, those that were not finished count too: whoever looks at all must not pass them over.
    """
    stores: list[Path] = []
    any_finished = False
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if any(map(is_shard_name, [*folders, *names])) and is_ours(Path(place)):
            stores.append(Path(place))
            any_finished |= MANIFEST in names
            folders.clear()
    stores.sort(key=lambda store: natural_key(os.path.relpath(store, folder)))
    return stores if any_finished else []


def num_anchors(tokens: int) -> int:
    """Return how many anchors stand behind the offsets of a shard with so many tokens."""
    return -(-tokens // ANCHOR_TOKENS)


def document_file_bytes(documents: int, tokens: int) -> int:
    """Return the size of a shard's `documents.bin`."""
    return (documents + 1) * OFFSET_DTYPE.itemsize + num_anchors(tokens) * ANCHOR_DTYPE.itemsize


def anchors_of(offsets: IntegerArray) -> Uint32Array:
    """Return the item that holds every 1,024th value, given where items start and the end of the last."""
    marks = np.arange(0, int(offsets[-1]), ANCHOR_TOKENS).astype(offsets.dtype)
    return (np.searchsorted(offsets, marks, side="right") - 1).astype(ANCHOR_DTYPE)


def axis_of(kind: str, key: str) -> str:
    """Return the axis of an array: which other arrays are cut at the same places.

    >>> axis_of("sft", "loss_mask"), axis_of("dpo", "chosen_mask")
    ('documents', 'chosen')
    """
    array = TRAINING_TYPES.get(kind, {}).get(key)
    return array.axis if array else "documents"


def axes_of(kind: str, keys: Iterable[str]) -> tuple[str, ...]:
    """Return the axes of a store with these arrays, each once."""
    return tuple(dict.fromkeys(axis_of(kind, key) for key in keys))


def index_file(axis: str) -> str:
    """Return the name of the file that says where the items of an axis start.

    >>> index_file("documents"), index_file("chosen")
    ('documents.bin', 'chosen-index.bin')
    """
    return DOCUMENTS if axis == "documents" else f"{axis}-index.bin"


def allowed_dtypes(keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return what each array may be: token ids are never floats."""
    names = list(keys)
    ids = token_keys(names) if names else ()
    return {key: TOKEN_DTYPES if key in ids else (*TOKEN_DTYPES, "<f4") for key in names}


def token_keys(keys: Iterable[str]) -> tuple[str, ...]:
    """Return those arrays that hold token ids, in order; the first of all where none has a known name."""
    names = list(keys)
    return tuple(key for key in names if key in TOKEN_KEYS) or (min(names),)
