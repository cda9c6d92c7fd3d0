"""Which files a store is made of, and the manifest that lists them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError, StoreMissingError
from tokenmill.fingerprint import canonical, digest

FORMAT = "tokenmill-store"
VERSION = 1
MANIFEST = "manifest.json"
DOCUMENTS = "documents.bin"
ANCHOR_TOKENS = 1024
"""A shard's index names the document that holds every 1,024th token: one short search finds any other."""

OFFSET_DTYPE = np.dtype("<u8")
ANCHOR_DTYPE = np.dtype("<u4")
TOKEN_DTYPES = ("|u1", "<u2", "<u4")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_MAX_COUNT = 2**53
"""No count of a manifest may be larger: up to here all readers of JSON agree on whole numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """Size and checksum of one file."""

    bytes: int
    xxh3: str
    """XXH3-128 of the whole file, 32 hex digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """What a manifest says of one shard."""

    name: str
    documents: int
    tokens: int
    files: Mapping[str, FileInfo]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything that is known of a store without opening another file."""

    kind: str
    """Training type: `seq`, later `sft`, `dpo`, `grpo`."""
    keys: Mapping[str, str]
    """Array name -> little-endian numpy dtype."""
    tokenizer: Mapping[str, Any]
    """Identity of the tokenizer; `vocab_size` bounds the ids."""
    recipe: Mapping[str, Any]
    """How documents became tokens."""
    shards: tuple[ShardInfo, ...]
    inputs: tuple[Mapping[str, Any], ...] = ()
    """Where the documents came from."""
    skipped: Mapping[str, Any] = field(default_factory=dict)
    """Records that were left out: counts by reason, and the first of them by file and line."""

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
        """Name of the array that holds token ids, whatever the order in which the manifest lists its keys."""
        return "sequence" if "sequence" in self.keys else min(self.keys)

    @property
    def fingerprint(self) -> str:
        """Digest of what the tokens are; paths and other provenance play no part, so a store may be moved."""
        shards = [
            [s.documents, s.tokens, {name: [f.bytes, f.xxh3] for name, f in s.files.items()}] for s in self.shards
        ]
        return digest([VERSION, self.kind, dict(self.keys), dict(self.tokenizer), shards])


def key_file(key: str) -> str:
    """Return the name of the file that holds an array.

    >>> key_file("sequence")
    'sequence.bin'
    """
    return f"{key}.bin"


def is_key(name: str) -> bool:
    """Whether an array may have this name: a plain one whose file is not that of the documents."""
    return _NAME.fullmatch(name) is not None and key_file(name) != DOCUMENTS


def shard_name(index: int) -> str:
    """Return the name that the writer gives to a shard.

    >>> shard_name(7)
    'shard-00007'
    """
    return f"shard-{index:05d}"


def is_shard_name(name: str) -> bool:
    """Whether a name could have been given to a shard by the writer."""
    return re.fullmatch(r"shard-[0-9]{5,}", name) is not None


def num_anchors(tokens: int) -> int:
    """Return how many anchors stand behind the offsets of a shard with so many tokens."""
    return -(-tokens // ANCHOR_TOKENS)


def document_file_bytes(documents: int, tokens: int) -> int:
    """Return the size of a shard's `documents.bin`."""
    return (documents + 1) * OFFSET_DTYPE.itemsize + num_anchors(tokens) * ANCHOR_DTYPE.itemsize


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the one text of a manifest: indented JSON whose `checksum` covers all the rest."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "kind": manifest.kind,
        "keys": dict(manifest.keys),
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "tokenizer": dict(manifest.tokenizer),
        "recipe": dict(manifest.recipe),
        "inputs": [dict(item) for item in manifest.inputs],
        "skipped": dict(manifest.skipped),
        "shards": [
            {
                "name": shard.name,
                "documents": shard.documents,
                "tokens": shard.tokens,
                "files": {name: {"bytes": f.bytes, "xxh3": f.xxh3} for name, f in shard.files.items()},
            }
            for shard in manifest.shards
        ],
    }
    body["checksum"] = xxhash.xxh3_128_hexdigest(canonical(body))
    return orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of the store at `path`; opens no other file."""
    file = Path(path) / MANIFEST
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreMissingError(_missing(Path(path))) from None
    except IsADirectoryError:
        raise StoreCorruptError(f"{file}: must be a file, got a folder; {_WAY_OUT}") from None
    try:
        body = orjson.loads(text)
        checksum = body.pop("checksum")
        intact = checksum == xxhash.xxh3_128_hexdigest(canonical(body))
    except (orjson.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise StoreCorruptError(f"{file}: must be a JSON object with a checksum, got {error}; {_WAY_OUT}") from None
    if body.get("format") != FORMAT or body.get("version") != VERSION:
        found = f"{body.get('format')!r} version {body.get('version')!r}"
        raise StoreError(
            f"{file}: must be {FORMAT!r} version {VERSION}, got {found}; "
            "open it with the tokenmill that wrote it, or prepare it again"
        )
    if not intact:
        raise StoreCorruptError(f"{file}: checksum must match its content, got {checksum!r}; {_WAY_OUT}")
    try:
        manifest = _parse(body)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StoreCorruptError(
            f"{file}: must have all fields of version {VERSION}, got {error}; {_WAY_OUT}"
        ) from None
    _check(manifest, body, file)
    return manifest


_WAY_OUT = "copy the store again from where it is intact, or prepare it again"


def _missing(path: Path) -> str:
    if not path.exists():
        return (
            f"{path}: a store must be a folder with {MANIFEST}, got nothing there; "
            "run `tokenmill prepare` or fix the path"
        )
    return (
        f"{path}: a store must be a folder with {MANIFEST}, got none; "
        "if `tokenmill prepare` was interrupted there, run it again"
    )


def _parse(body: Mapping[str, Any]) -> Manifest:
    shards = tuple(
        ShardInfo(
            name=_text(shard["name"]),
            documents=_count(shard["documents"]),
            tokens=_count(shard["tokens"]),
            files={
                name: FileInfo(bytes=_count(info["bytes"]), xxh3=_text(info["xxh3"]))
                for name, info in shard["files"].items()
            },
        )
        for shard in body["shards"]
    )
    return Manifest(
        kind=_text(body["kind"]),
        keys=dict(body["keys"]),
        tokenizer=dict(body["tokenizer"]),
        recipe=dict(body["recipe"]),
        inputs=tuple(dict(item) for item in body["inputs"]),
        skipped=dict(body["skipped"]),
        shards=shards,
    )


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise ValueError(f"{value!r} where a count must be")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} where a text must be")
    return value


def _check(manifest: Manifest, body: Mapping[str, Any], file: Path) -> None:
    """Refuse a manifest whose numbers or names cannot be right, before anything is mapped by them."""

    def require(ok: bool, rule: str, got: object) -> None:
        if not ok:
            raise StoreCorruptError(f"{file}: {rule}, got {got!r}; {_WAY_OUT}")

    require(bool(manifest.keys), "keys must not be empty", dict(manifest.keys))
    for key, dtype in manifest.keys.items():
        require(is_key(key), f"a key must be a plain name and not that of {DOCUMENTS}", key)
        require(dtype in TOKEN_DTYPES, f"a dtype must be one of {TOKEN_DTYPES}", dtype)
    for name, total in (("documents", manifest.documents), ("tokens", manifest.tokens)):
        require(body.get(name) == total < _MAX_COUNT, f"{name} must be the sum over shards", body.get(name))
    vocab_size = manifest.tokenizer.get("vocab_size")
    require(type(vocab_size) is int and vocab_size > 0, "vocab_size must be a positive number", vocab_size)
    expected = {key_file(key) for key in manifest.keys} | {DOCUMENTS}
    names = [shard.name for shard in manifest.shards]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    require(twice is None, "shard names must differ", twice)
    for shard in manifest.shards:
        require(_NAME.fullmatch(shard.name) is not None, "a shard name must be a plain name", shard.name)
        require(
            set(shard.files) == expected,
            f"shard {shard.name} must have files {sorted(expected)}",
            sorted(shard.files),
        )
        sizes = {key_file(key): shard.tokens * np.dtype(dtype).itemsize for key, dtype in manifest.keys.items()}
        sizes[DOCUMENTS] = document_file_bytes(shard.documents, shard.tokens)
        for name, info in shard.files.items():
            require(info.bytes == sizes[name], f"{shard.name}/{name} must have {sizes[name]} bytes", info.bytes)
