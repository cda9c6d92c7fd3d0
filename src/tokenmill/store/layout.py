"""A store at rest: the names, dtypes and sizes of its files, and the manifest that lists them.

The manifest holds everything that a reader needs before it opens another file.
`docs/reference/store-format.md` describes the same layout in words.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError, StoreMissingError
from tokenmill.fingerprint import canonical, digest, first_difference
from tokenmill.tables import MAX_LIST_BYTES, as_json, read_table
from tokenmill.types import TOKEN_KEYS, TRAINING_TYPES, IntegerArray, Uint32Array, natural_key

FORMAT = "tokenmill-store"
VERSION = 2
"""The newest that is written; a store that needs nothing of it is written as version 1."""
MANIFEST = "manifest.json"
DOCUMENTS = "documents.bin"
H5_FILE = "arrays.h5"
"""Arrays of a shard as HDF5, for AstrAI; tokenmill reads the flat files."""
ROWS_FOLDER = ".rows"
"""Where row indexes of the store are kept; they can always be made again."""
TOKENIZER_FOLDER = ".tokenizer"
"""A copy of the tokenizer's files, to read the texts of a store by wherever it is; no part of what it holds."""
ORIGINS_FOLDER = ".origins"
"""Where a store says which file and line its documents came from."""
PAGE_BYTES = 4096
"""Unit of page sums and of a mirror."""
SUMS_FOLDER = ".sums"
"""Folder of the page sums, by which a part of a file is verified."""
HASHES_FOLDER = ".hashes"
"""Where a store keeps a hash of each document's tokens; they can be made again."""
JOURNAL_FOLDER = ".prepare"
"""Where prepare keeps what it needs to add to the store later."""
SIDE_FOLDERS = (ROWS_FOLDER, ORIGINS_FOLDER, TOKENIZER_FOLDER, SUMS_FOLDER, HASHES_FOLDER)
"""Folders that a store may have next to its manifest and shards."""
SHARDS_FOLDER = ".tmp-shards"
LEASE = ".tmp-lease"
"""Says which process may write to a folder; after it in a name stands the holder that it is taken over from (see
`lease`)."""
TEMPORARY = frozenset({LEASE, SHARDS_FOLDER, f".tmp-{MANIFEST}", ".tmp-pid"})
"""Names that a killed build may leave in the folder of a store; the last one is that of an older version."""
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
    return re.fullmatch(r"shard-[0-9]{5,}", name) is not None


def shard_number(name: str) -> int:
    """Return the number in the name that the writer gave to a shard.

    >>> shard_number("shard-00007")
    7
    """
    return int(name.removeprefix("shard-"))


def is_lease_name(name: str) -> bool:
    """Whether a name is that of a lease, or of one that was taken over."""
    return re.fullmatch(rf"{re.escape(LEASE)}(-[0-9a-z]+)?", name) is not None


def is_store_name(name: str) -> bool:
    """Whether tokenmill gives this name in the folder of a store, or a killed build leaves it."""
    known = {MANIFEST, *SIDE_FOLDERS, *TEMPORARY}
    return name in known or is_shard_name(name) or is_lease_name(name)


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

    Beside a finished one, those that were not finished count too, so that none is passed over.
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
    """Return how many anchors stand after the offsets of a shard with a number of tokens."""
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


# The manifest.

_MAX_COUNT = 2**53
"""No count of a manifest may be larger: up to here all readers of JSON agree on whole numbers."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_COUNT)]
UNKNOWN, GIVEN = "unknown", "given"
"""Kinds of tokenizers of foreign files: nothing is known, or the user gave the size of the vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """Size and checksum of one file."""

    bytes: Count
    xxh3: str
    """XXH3-128 of all its bytes, 32 hex digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """What a manifest says of one shard."""

    name: str
    documents: Count
    """Records, whatever the training type."""
    tokens: Count
    """Token ids, over all arrays that hold some."""
    files: Mapping[str, FileInfo]
    axes: Mapping[str, tuple[Count, Count]] = field(default_factory=dict)
    """Axis -> (items, values), where there are others than `documents`."""

    def size_of(self, axis: str) -> tuple[int, int]:
        """Return how many items and values an axis has."""
        return self.axes[axis] if self.axes else (self.documents, self.tokens)

    @property
    def index_files(self) -> Collection[str]:
        """Names of the files that say where the items of each axis start."""
        return {index_file(axis) for axis in self.axes} or {DOCUMENTS}

    @property
    def stored_files(self) -> dict[str, FileInfo]:
        """Size and checksum of each file, by its path below the folder of the store."""
        return {f"{self.name}/{name}": info for name, info in self.files.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything that is known of a store without opening another file."""

    kind: str
    """Training type: `seq`, `sft`, `dpo` or `grpo`."""
    keys: Mapping[str, str]
    """Array name -> little-endian numpy dtype."""
    tokenizer: Mapping[str, Any]
    """Identity of the tokenizer; `vocab_size` bounds the ids."""
    recipe: Mapping[str, Any]
    """How documents became tokens."""
    inputs: tuple[Mapping[str, Any], ...] = ()
    """Where the documents came from."""
    skipped: Mapping[str, Any] = field(default_factory=dict)
    """Records that were left out: counts by reason, and the first of them by file and line."""
    shards: tuple[ShardInfo, ...]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def token_key(self) -> str:
        """Name of the array that holds token ids, or the first of several, however the manifest orders its keys."""
        return next((key for key in TOKEN_KEYS if key in self.keys), min(self.keys))

    @property
    def starts_with_bos(self) -> bool:
        """Whether documents start with BOS; conversations may differ in that from texts."""
        recipe = self.recipe.get("recipe")
        template = recipe.get("chat_template") if isinstance(recipe, Mapping) else None
        chats = template.get("bos") if isinstance(template, Mapping) else None
        return chats == "added" or (bool(self.tokenizer.get("add_bos")) and chats != "none")

    @property
    def storage(self) -> str:
        """Storage format: `bin`, or `h5` where each shard also has its arrays as HDF5."""
        return "h5" if any(H5_FILE in shard.files for shard in self.shards) else "bin"

    @property
    def fingerprint(self) -> str:
        """Digest of what the tokens are; paths and other provenance play no part, so a store may be moved.

        Nor does the vocabulary of files of other projects: it is the user's word, to be given when it is needed.
        """
        shards = [
            [s.documents, s.tokens, {name: [f.bytes, f.xxh3] for name, f in s.files.items() if name != H5_FILE}]
            for s in self.shards
        ]
        by_the_user = ("kind", "vocab_size") if self.tokenizer.get("kind") in (UNKNOWN, GIVEN) else ()
        tokenizer = {name: value for name, value in self.tokenizer.items() if name not in by_the_user}
        return digest([1, self.kind, dict(self.keys), tokenizer, shards])


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the one text of a manifest: indented JSON whose `checksum` covers all the rest."""
    body: dict[str, Any] = {
        "format": FORMAT,
        # The oldest version that can say this.
        "version": 2 if any(shard.axes or H5_FILE in shard.files for shard in manifest.shards) else 1,
        "kind": manifest.kind,
        "keys": manifest.keys,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        **as_json(manifest),
    }
    for shard in body["shards"]:
        if not shard["axes"]:  # shards of version 1 have none
            del shard["axes"]
    body["checksum"] = xxhash.xxh3_128_hexdigest(canonical(body))
    return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of the store at `path`; opens no other file."""
    file = Path(path) / MANIFEST
    body = _read_body(file)
    totals = {name: body.pop(name, None) for name in ("documents", "tokens")}
    try:
        manifest = read_table(Manifest, body, f"{file}:", error=StoreCorruptError)
    except StoreCorruptError as error:
        # Nobody writes a manifest by hand: how to write it right is no way out.
        rule = str(error).removeprefix(f"{file}: ").rpartition("; ")[0]
        raise StoreCorruptError(f"{file}: {rule}; {WAY_OUT}") from None
    broken = next(_broken_rules(manifest, totals), None)
    if broken is not None:
        raise StoreCorruptError(f"{file}: {broken[0]}, got {broken[1]!r}; {WAY_OUT}")
    return manifest


_OPEN_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
"""Windows has no links to follow and no pipes to wait for here, but changes line ends of what is not binary."""


def read_at(descriptor: int, size: int, place: int) -> bytes:
    """Return bytes of a file from a place on, fewer at its end. Only one thread may use the descriptor."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, place)
    os.lseek(descriptor, place, os.SEEK_SET)  # on Windows
    return os.read(descriptor, size)


def open_plain(file: Path) -> tuple[int, int]:
    """Open a plain file: a link may lead anywhere, and a pipe keeps its reader waiting.

    Return its descriptor, which the caller closes, and its size.
    """
    try:
        descriptor = os.open(file, _OPEN_FLAGS)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        kind = "a link" if error.errno == errno.ELOOP else "another kind"
        raise StoreCorruptError(f"{file}: must be a plain file, got {kind}; {WAY_OUT}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "another kind"
        raise StoreCorruptError(f"{file}: must be a plain file, got {kind}; {WAY_OUT}")
    return descriptor, status.st_size


def _read_plain(file: Path) -> bytes:
    descriptor, size = open_plain(file)
    try:
        if size > MAX_LIST_BYTES:
            raise StoreCorruptError(f"{file}: must have at most {MAX_LIST_BYTES} bytes, got {size}; {WAY_OUT}")
        parts = []
        while part := os.read(descriptor, 1 << 24):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _read_body(file: Path) -> dict[str, Any]:
    """Read a manifest; format, version and checksum are checked and left out."""
    try:
        text = _read_plain(file)
    except (FileNotFoundError, NotADirectoryError):
        reason, way_out = "the folder does not exist", "run `tokenmill prepare`, or fix the path"
        if file.parent.exists():
            reason, way_out = f"no {MANIFEST}", "if `tokenmill prepare` was interrupted there, run it again"
        raise StoreMissingError(f"no store at this path: {file.parent} ({reason}); {way_out}") from None
    try:
        body: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        checksum = body.pop("checksum")
        intact = checksum == xxhash.xxh3_128_hexdigest(canonical(body))
    except (ValueError, RecursionError, KeyError) as error:
        raise StoreCorruptError(f"{file}: must be a JSON object with a checksum, got {error}; {WAY_OUT}") from None
    format, version = body.pop("format", None), body.pop("version", None)
    if format != FORMAT or version not in range(1, VERSION + 1):
        raise StoreError(
            f"{file}: must be {FORMAT!r} version 1 to {VERSION}, got {format!r} version {version!r}; "
            "open it with the tokenmill that wrote it, or prepare it again"
        )
    if not intact:
        raise StoreCorruptError(f"{file}: checksum must match its content, got {checksum!r}; {WAY_OUT}")
    shards = body.get("shards")
    if isinstance(shards, list) and any(isinstance(shard, dict) and "container" in shard for shard in shards):
        raise StoreError(f"{file}: HDF5 shards of an earlier tokenmill; prepare the store again")
    return body


def _broken_rules(manifest: Manifest, totals: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield rules that a manifest breaks, with what it has instead; each takes those before it as kept."""
    if not manifest.keys:
        yield "keys must not be empty", manifest.keys
    allowed = allowed_dtypes(manifest.keys)
    for key, dtype in manifest.keys.items():
        if not is_key(key):
            yield f"a key must be a plain name and not that of {DOCUMENTS}", key
        if dtype not in allowed[key]:
            yield f"a dtype must be one of {allowed[key]}", dtype
    for name, total in (("documents", manifest.documents), ("tokens", manifest.tokens)):
        if type(totals[name]) is not int or not totals[name] == total < _MAX_COUNT:
            yield f"{name} must be the sum over shards", totals[name]
    yield from _broken_tokenizer_rules(manifest.tokenizer)
    if not isinstance(manifest.recipe.get("recipe", {}), dict):
        yield "the recipe within recipe must be a table", manifest.recipe["recipe"]
    yield from _broken_count_rules(manifest)
    for name, count in Counter(shard.name for shard in manifest.shards).items():
        if count > 1:
            yield "shard names must differ", name
    for shard in manifest.shards:
        if not is_plain_name(shard.name):
            yield "a shard name must be a plain name", shard.name
        yield from _broken_shard_rules(shard, manifest.kind, manifest.keys)


def _broken_count_rules(manifest: Manifest) -> Iterator[tuple[str, object]]:
    """Yield rules that the counts of inputs, and of records that were left out, break."""
    for entry in manifest.inputs:
        for name in ("bytes", "documents", "tokens"):
            if not _is_count(entry.get(name, 0)):
                yield f"{name} of an input must be a whole number from 0 on", entry[name]
        if not isinstance(entry.get("name", ""), str):
            yield "the name of an input must be a string", entry["name"]
    if not _is_count(manifest.skipped.get("truncated", 0)):
        yield "truncated must be a whole number from 0 on", manifest.skipped["truncated"]
    for name in ("counts", "notes", "noted"):
        counts = manifest.skipped.get(name, {})
        if not isinstance(counts, dict) or not all(map(_is_count, counts.values())):
            yield f"{name} of skipped must be a table of whole numbers from 0 on", counts
    first = manifest.skipped.get("first", [])
    if not isinstance(first, list | tuple) or not all(isinstance(item, dict) for item in first):
        yield "first of skipped must be a list of tables", first


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _broken_tokenizer_rules(tokenizer: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield rules that the identity of a tokenizer breaks: its numbers become tokens of batches."""
    vocab_size = tokenizer.get("vocab_size")
    if type(vocab_size) is not int or not 1 <= vocab_size <= 1 << 32:
        yield "vocab_size must be a whole number from 1 to 2^32", vocab_size
        return
    for name in ("bos_id", "eos_id", "pad_id"):
        value = tokenizer.get(name)
        if value is not None and not (type(value) is int and 0 <= value < vocab_size):
            yield f"{name} must be a whole number below vocab_size {vocab_size}", value
    for name in ("add_bos", "add_eos"):
        if not isinstance(tokenizer.get(name, False), bool):
            yield f"{name} must be true or false", tokenizer[name]
    for name in ("kind", "content"):
        if not isinstance(tokenizer.get(name, ""), str | None):
            yield f"{name} of the tokenizer must be a string", tokenizer[name]


def _broken_shard_rules(shard: ShardInfo, kind: str, keys: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    """Yield rules that the numbers of a shard break."""
    axes = axes_of(kind, keys)
    sized = sorted(shard.axes or ("documents",))
    if sized != sorted(axes):
        yield f"{shard.name} must say the sizes of {sorted(axes)}", sized
    if "responses" in axes and "groups" not in axes:
        yield f"keys of {shard.name} must have rewards, which cut responses into records", sorted(keys)
    sizes = {index_file(axis): document_file_bytes(*shard.size_of(axis)) for axis in axes}
    for key, dtype in keys.items():
        _, values = shard.size_of(axis_of(kind, key))
        sizes[key_file(key)] = values * np.dtype(dtype).itemsize
    if set(shard.files) - {H5_FILE} != set(sizes):
        yield f"shard {shard.name} must have files {sorted(sizes)}", sorted(shard.files)
    for name, size in sizes.items():
        if shard.files[name].bytes != size:
            yield f"{shard.name}/{name} must have {size} bytes", shard.files[name].bytes
    for axis, (items, _) in shard.axes.items():
        # Responses are cut into records by the groups, every other axis is cut into records itself.
        expected = shard.axes["groups"][1] if axis == "responses" else shard.documents
        if items != expected:
            yield f"axis {axis} of {shard.name} must have {expected} items", items
    tokens = sum(shard.size_of(axis_of(kind, key))[1] for key in token_keys(keys))
    if tokens != shard.tokens:
        yield f"{shard.name} must have {tokens} tokens", shard.tokens


def describe_tokenizer(identity: Mapping[str, Any], file: object = None) -> str:
    """Name a tokenizer by its file or kind, its size and the start of its digest.

    >>> describe_tokenizer({"kind": "tokenizer.json", "vocab_size": 50257, "content": "ac0b15b0f1"}, "gpt2")
    'gpt2 (tokenizer.json), 50,257 ids, digest ac0b15b0'
    """
    kind, content = str(identity.get("kind", UNKNOWN)), str(identity.get("content") or "")
    named = str(file or kind)
    name = named if named.endswith(kind) else f"{named} ({kind})"
    digest = f", digest {content[:8]}" if content else ""
    return f"{name}, {identity.get('vocab_size', 0):,} ids{digest}"


def tokenizer_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, Any, Any, str] | None:
    """Return the first thing in which two tokenizers differ, both sides and the way out; None if ids mean the same.

    Foreign files do not say which tokenizer made them. Giving their vocab_size is the user's word that it was the
    one of the other sources: then vocab_size must agree, and eos_id and bos_id where both say them. Without that
    word they mix with nothing.
    """
    kinds = first.get("kind"), second.get("kind")
    if UNKNOWN in kinds:
        return "kind", *kinds, "give the vocab_size of files of other projects"
    if GIVEN not in kinds:
        difference = first_difference(dict(first), dict(second))
        return (*difference, "prepare one of them again") if difference else None
    for name in ("vocab_size", "eos_id", "bos_id"):
        values = first.get(name), second.get(name)
        if None not in values and values[0] != values[1]:
            return name, *values, "fix what is said of the files of another project"
    return None
