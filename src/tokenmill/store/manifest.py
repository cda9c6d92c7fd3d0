"""The manifest: everything that is known of a store without opening another file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError, StoreMissingError
from tokenmill.fingerprint import canonical, digest
from tokenmill.store.layout import (
    DOCUMENTS,
    DTYPES,
    FORMAT,
    MANIFEST,
    TOKEN_DTYPES,
    VERSION,
    axes_of,
    axis_of,
    document_file_bytes,
    index_file,
    is_key,
    is_plain_name,
    key_file,
    token_keys,
)
from tokenmill.types import TOKEN_KEYS

_MAX_COUNT = 2**53
"""No count of a manifest may be larger: up to here all readers of JSON agree on whole numbers."""
_WAY_OUT = "copy the store again from where it is intact, or prepare it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """Size and checksum of one file, or of one array inside a shard that is a single file."""

    bytes: int
    xxh3: str
    """XXH3-128 of all its bytes, 32 hex digits."""
    begin: int = 0
    """First byte inside the shard's file; 0 where the shard is a folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """What a manifest says of one shard."""

    name: str
    documents: int
    """Records, whatever the training type."""
    tokens: int
    """Token ids, over all arrays that hold some."""
    files: Mapping[str, FileInfo]
    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Axis -> (items, values), where there are others than `documents`."""
    container: FileInfo | None = None
    """The one file that holds the arrays; None where the shard is a folder with a file an array."""

    def size_of(self, axis: str) -> tuple[int, int]:
        """Return how many items and values an axis has."""
        return self.axes[axis] if self.axes else (self.documents, self.tokens)


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
        """Name of the array that holds token ids, or the first of several, however the manifest orders its keys."""
        return next((key for key in TOKEN_KEYS if key in self.keys), min(self.keys))

    @property
    def storage(self) -> str:
        """How shards are kept: `bin`, a folder with a file an array, or `h5`, one HDF5 file."""
        return "h5" if any(shard.container for shard in self.shards) else "bin"

    @property
    def fingerprint(self) -> str:
        """Digest of what the tokens are; paths and other provenance play no part, so a store may be moved.

        Nor does the vocabulary of files of other projects: it is the user's word, to be given when it is needed.
        """
        shards = [
            [s.documents, s.tokens, {name: [f.bytes, f.xxh3] for name, f in s.files.items()}] for s in self.shards
        ]
        told = ("kind", "vocab_size") if self.tokenizer.get("kind") in ("unknown", "given") else ()
        tokenizer = {name: value for name, value in self.tokenizer.items() if name not in told}
        return digest([1, self.kind, dict(self.keys), tokenizer, shards])


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the one text of a manifest: indented JSON whose `checksum` covers all the rest."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": _version(manifest),
        "kind": manifest.kind,
        "keys": dict(manifest.keys),
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "tokenizer": dict(manifest.tokenizer),
        "recipe": dict(manifest.recipe),
        "inputs": [dict(item) for item in manifest.inputs],
        "skipped": dict(manifest.skipped),
        "shards": [shard_to_json(shard) for shard in manifest.shards],
    }
    body["checksum"] = xxhash.xxh3_128_hexdigest(canonical(body))
    return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"


def _version(manifest: Manifest) -> int:
    """Return the oldest version that can say this."""
    return 2 if any(shard.axes or shard.container for shard in manifest.shards) else 1


def shard_to_json(shard: ShardInfo) -> dict[str, Any]:
    """Return a shard as a JSON object."""
    inside = shard.container is not None
    value: dict[str, Any] = {
        "name": shard.name,
        "documents": shard.documents,
        "tokens": shard.tokens,
        "files": {
            name: {"bytes": f.bytes, "xxh3": f.xxh3, **({"begin": f.begin} if inside else {})}
            for name, f in shard.files.items()
        },
    }
    if shard.axes:
        value["axes"] = {axis: list(size) for axis, size in shard.axes.items()}
    if shard.container is not None:
        value["container"] = {"bytes": shard.container.bytes, "xxh3": shard.container.xxh3}
    return value


def shard_from_json(value: Mapping[str, Any]) -> ShardInfo:
    """Read what `shard_to_json` wrote; what is not there or of another type raises a builtin error."""
    container = value.get("container")
    return ShardInfo(
        name=_text(value["name"]),
        documents=_count(value["documents"]),
        tokens=_count(value["tokens"]),
        files={name: _file_info(info, inside=container is not None) for name, info in value["files"].items()},
        axes={axis: (_count(items), _count(values)) for axis, (items, values) in value.get("axes", {}).items()},
        container=None if container is None else _file_info(container),
    )


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
        body = msgspec.json.decode(text)
        checksum = body.pop("checksum")
        intact = checksum == xxhash.xxh3_128_hexdigest(canonical(body))
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise StoreCorruptError(f"{file}: must be a JSON object with a checksum, got {error}; {_WAY_OUT}") from None
    if body.get("format") != FORMAT or body.get("version") not in range(1, VERSION + 1):
        found = f"{body.get('format')!r} version {body.get('version')!r}"
        raise StoreError(
            f"{file}: must be {FORMAT!r} version 1 to {VERSION}, got {found}; "
            "open it with the tokenmill that wrote it, or prepare it again"
        )
    if not intact:
        raise StoreCorruptError(f"{file}: checksum must match its content, got {checksum!r}; {_WAY_OUT}")
    try:
        manifest = _parse(body)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StoreCorruptError(
            f"{file}: must have all fields of version {body['version']}, got {error}; {_WAY_OUT}"
        ) from None
    _check(manifest, body, file)
    return manifest


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
    return Manifest(
        kind=_text(body["kind"]),
        keys=dict(body["keys"]),
        tokenizer=dict(body["tokenizer"]),
        recipe=dict(body["recipe"]),
        inputs=tuple(dict(item) for item in body["inputs"]),
        skipped=dict(body["skipped"]),
        shards=tuple(shard_from_json(shard) for shard in body["shards"]),
    )


def _file_info(value: Mapping[str, Any], *, inside: bool = False) -> FileInfo:
    """Read size and checksum; what is `inside` a file must say where it begins."""
    begin = value["begin"] if inside else value.get("begin", 0)
    return FileInfo(bytes=_count(value["bytes"]), xxh3=_text(value["xxh3"]), begin=_count(begin))


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
        allowed = TOKEN_DTYPES if key in token_keys(manifest.keys) else DTYPES
        require(dtype in allowed, f"a dtype must be one of {allowed}", dtype)
    for name, total in (("documents", manifest.documents), ("tokens", manifest.tokens)):
        require(body.get(name) == total < _MAX_COUNT, f"{name} must be the sum over shards", body.get(name))
    vocab_size = manifest.tokenizer.get("vocab_size")
    require(type(vocab_size) is int and vocab_size > 0, "vocab_size must be a positive number", vocab_size)
    names = [shard.name for shard in manifest.shards]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    require(twice is None, "shard names must differ", twice)
    for shard in manifest.shards:
        require(is_plain_name(shard.name), "a shard name must be a plain name", shard.name)
        problem = shard_problem(shard, manifest.kind, manifest.keys)
        require(problem is None, *(problem or ("", "")))


def shard_problem(shard: ShardInfo, kind: str, keys: Mapping[str, str]) -> tuple[str, object] | None:
    """Return the first rule that a shard breaks, and what it has instead; None if its numbers fit together."""
    axes = axes_of(kind, keys)
    said = set(shard.axes or ("documents",))
    if said != set(axes):
        return f"{shard.name} must say the sizes of {sorted(axes)}", sorted(said)
    if "responses" in axes and "groups" not in axes:
        return f"keys of {shard.name} must have rewards, which cut responses into records", sorted(keys)
    sizes = {key_file(key): shard.size_of(axis_of(kind, key))[1] * np.dtype(keys[key]).itemsize for key in keys}
    sizes |= {index_file(axis): document_file_bytes(*shard.size_of(axis)) for axis in axes}
    if set(shard.files) != set(sizes):
        return f"shard {shard.name} must have files {sorted(sizes)}", sorted(shard.files)
    return next(_odd_files(shard, sizes), None) or next(_odd_axes(shard, kind, keys), None)


def _odd_files(shard: ShardInfo, sizes: Mapping[str, int]) -> Iterator[tuple[str, object]]:
    room = shard.container.bytes if shard.container else 0
    for name, info in shard.files.items():
        if info.bytes != sizes[name]:
            yield f"{shard.name}/{name} must have {sizes[name]} bytes", info.bytes
        if shard.container and info.begin + info.bytes > room:
            yield f"{shard.name}/{name} must lie within {room} bytes", info.begin + info.bytes
        if not shard.container and info.begin:
            yield f"{shard.name}/{name} must begin at 0 in a file of its own", info.begin


def _odd_axes(shard: ShardInfo, kind: str, keys: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    for axis, (items, _) in shard.axes.items():
        # Responses are cut into records by the groups, every other axis is cut into records itself.
        expected = shard.axes["groups"][1] if axis == "responses" else shard.documents
        if items != expected:
            yield f"axis {axis} of {shard.name} must have {expected} items", items
    tokens = sum(shard.size_of(axis_of(kind, key))[1] for key in token_keys(keys))
    if tokens != shard.tokens:
        yield f"{shard.name} must have {tokens} tokens", shard.tokens
