"""Converting foreign files to a store of ours, with checksums, and comparing it with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import ConfigError, StoreCorruptError, StoreError
from tokenmill.store.foreign.files import ForeignFiles, ForeignOptions, ForeignShard
from tokenmill.store.foreign.open import (
    ShardDocuments,
    ShardFacts,
    check_vocabulary,
    find_documents,
    read_foreign,
    tokenizer_of,
)
from tokenmill.store.layout import axis_of, is_ours
from tokenmill.store.store import Store
from tokenmill.store.writer import MAX_TOKENS_PER_SHARD, StoreSpec, StoreWriter
from tokenmill.tables import check_callable, check_instance, check_types, path_of
from tokenmill.types import MASK_KEYS, AnyArray, Int64Array

BATCH_TOKENS = 1 << 22
"""Tokens that are copied together; a longer document is copied in one piece."""
Progress = Callable[[str, int, int], None]
"""Called with what is done (look, write or compare), the tokens done, and the tokens in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """What was converted, and compared token by token."""

    path: str
    format: str
    out: str
    documents: int
    tokens: int
    shards: int
    keys: Mapping[str, str]
    fingerprint: str
    compared: int
    """Numbers of all arrays that were read back and are those of the files."""


def import_store(
    path: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    options: ForeignOptions | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    rebuild: bool = False,
    max_tokens_per_shard: int = MAX_TOKENS_PER_SHARD,
    progress: Progress = lambda _what, _done, _total: None,
) -> ImportReport:
    """Convert third-party token files to a store, read it back, and compare. If it differs, nothing is kept.

    Args:
        path: A file, folder or glob, or the prefix of a Megatron dataset.
        out: Folder of the store to write.
        options: Facts that the files do not record.
        tokenizer: Identity of the tokenizer that made the ids, `tm.open_tokenizer(...).identity.to_json()`. The
            store can then be mixed with other stores of that tokenizer.
        rebuild: Replace a finished store at `out`.
        max_tokens_per_shard: Maximum number of tokens per shard.
        progress: Function that is called with the name of a step, the finished amount and the whole amount.

    Returns:
        Numbers of documents and tokens, and the fingerprint of the store.

    Raises:
        StoreError: The files cannot be read, or their format or type of ids is unknown.
        StoreExistsError: There is a finished store at `out`.
        ConfigError: An argument is wrong.

    Examples:
        >>> import tokenmill as tm
        >>> written = tm.export_store("stores/demo", out="export/megatron", format="megatron")
        >>> tm.import_store("export/megatron", out="stores/again").documents
        324
    """
    source, out = Path(path_of("path", path)), path_of("out", out)
    check_types(
        max_tokens_per_shard=(max_tokens_per_shard, int),
        rebuild=(rebuild, bool),
        tokenizer=(tokenizer, Mapping[str, Any] | None),
    )
    check_callable("progress", progress)
    if options is not None:
        check_instance("options", options, ForeignOptions, "leave it out if the files describe themselves")
    known = _with_tokenizer(options or ForeignOptions(), tokenizer)
    if is_ours(source) or known.format == "tokenmill":
        raise StoreError(f"{source}: must be of another format, got a store of tokenmill; use it as it is")
    format, files, known = read_foreign(source, known)
    total = sum(array.count for shard in files.shards for array in shard.arrays.values())
    looked = counted(progress, "look", total)
    facts = []
    for shard in files.shards:
        # Only what is small is kept: where documents are is found again for each shard when it is needed.
        facts.append(find_documents(shard, files.kind, known, look=True).facts)
        check_vocabulary(shard, facts[-1], known)
        looked(sum(array.count for array in shard.arrays.values()))
    keys = _keys(files, facts, known)
    identity = tokenizer_of(keys, facts, known)
    if tokenizer is not None:  # the user's word, but for how documents are framed
        identity = {**tokenizer, "add_bos": identity["add_bos"], "add_eos": identity["add_eos"]}
    spec = StoreSpec(
        kind=files.kind,
        keys=keys,
        tokenizer=identity,
        recipe={"imported": format, "options": known.given, **files.facts},
        max_tokens_per_shard=max_tokens_per_shard,
    )
    with StoreWriter(out, spec, rebuild=rebuild) as writer:
        inputs = _write(writer, _with_documents(files, known), counted(progress, "write", total))
        tell = counted(progress, "compare", total)
        manifest = writer.commit(
            inputs=inputs, check=lambda store: _compare(store, Path(out), _with_documents(files, known), tell)
        )
    return ImportReport(
        path=str(source),
        format=format,
        out=str(out),
        documents=manifest.documents,
        tokens=manifest.tokens,
        shards=len(manifest.shards),
        keys=keys,
        fingerprint=manifest.fingerprint,
        compared=total,
    )


def _with_tokenizer(options: ForeignOptions, tokenizer: Mapping[str, Any] | None) -> ForeignOptions:
    """Take from a tokenizer what the user did not say; both must agree on what both say."""
    if tokenizer is None:
        return options
    for name in ("vocab_size", "eos_id", "bos_id"):
        claim, fact = getattr(options, name), tokenizer.get(name)
        if claim is not None and claim != fact:
            raise ConfigError(f"{name}: must be that of the tokenizer, {fact!r}, got {claim!r}; leave it out")
    return replace(options, **{name: tokenizer.get(name) for name in ("vocab_size", "eos_id", "bos_id")})


def _keys(files: ForeignFiles, facts: Sequence[ShardFacts], options: ForeignOptions) -> dict[str, str]:
    """Return key -> the smallest dtype that holds the vocabulary, or else the ids that there are."""
    bound = options.vocab_size or 1 + max((shard.largest for shard in facts), default=0)
    if bound > 1 << 32:
        raise StoreError(
            f"{files.shards[0].name}: ids must be below 2**32, got {bound - 1}; these are no token ids"
        )
    ids = "|u1" if bound <= 1 << 8 else "<u2" if bound <= 1 << 16 else "<u4"
    return {key: "|u1" if key in MASK_KEYS else ids for key in files.shards[0].arrays}


def counted(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """Return a function that adds up the numbers it is given, and reports their sum as progress."""
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        progress(what, done, total)

    return count


def _with_documents(files: ForeignFiles, options: ForeignOptions) -> Iterator[tuple[ForeignShard, ShardDocuments]]:
    """Yield shards with their documents, which are found one shard at a time."""
    for shard in files.shards:
        yield shard, find_documents(shard, files.kind, options, look=False)


def _write(
    writer: StoreWriter, shards: Iterable[tuple[ForeignShard, ShardDocuments]], progress: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Append the documents of all shards; return what a manifest says of each as an input."""
    spec = writer.spec
    inputs: list[dict[str, Any]] = []
    for shard, documents in shards:
        for begin, end in _batches(documents):
            starts = {axis: offsets[begin : end + 1] for axis, offsets in documents.offsets.items()}
            arrays = {key: _cast(shard, key, starts[axis_of(spec.kind, key)], spec.keys[key]) for key in spec.keys}
            writer.append(arrays, {axis: offsets - offsets[0] for axis, offsets in starts.items()})
            progress(sum(array.size for array in arrays.values()))
        tokens = sum(int(offsets[-1]) for offsets in documents.offsets.values())
        items = next(iter(documents.facts.items.values()))
        inputs.append({"name": shard.name, "documents": items, "tokens": tokens})
    return inputs


def _batches(documents: ShardDocuments) -> Iterator[tuple[int, int]]:
    """Yield ranges of documents of a bounded number of tokens, at least one document each."""
    total = sum(documents.offsets.values())  # of all axes together
    assert not isinstance(total, int)
    begin, count = 0, total.size - 1
    while begin < count:
        end = int(np.searchsorted(total, total[begin] + BATCH_TOKENS, side="right")) - 1
        yield begin, max(begin + 1, end)
        begin = max(begin + 1, end)


def _cast(shard: ForeignShard, key: str, starts: Int64Array, dtype: str) -> AnyArray:
    numbers = shard.arrays[key].numbers(int(starts[0]), int(starts[-1]))
    cast = numbers.astype(dtype)
    if not (cast == numbers).all() or (key in MASK_KEYS and int(cast.max(initial=0)) > 1):
        rule = "0 or 1" if key in MASK_KEYS else "ids below the vocabulary"
        raise StoreError(
            f"{shard.arrays[key].path}: {key} must be {rule}, got others from {int(starts[0])} on; repair the file"
        )
    return cast


def _compare(
    store: Store, out: Path, shards: Iterable[tuple[ForeignShard, ShardDocuments]], progress: Callable[[int], None]
) -> None:
    """Read back what is to be the store at `out`, and compare every number and boundary with the files."""
    documents = dict.fromkeys(store.axes, 0)
    places = dict.fromkeys(store.keys, 0)
    for shard, shard_documents in shards:
        for axis, offsets in shard_documents.offsets.items():
            first, last = documents[axis], documents[axis] + offsets.size - 1
            base = places[next(key for key in shard.arrays if store.axis(key) == axis)]
            if last > first and not np.array_equal(store.offsets(axis, first, last), offsets + base):
                raise _differs(out, f"boundaries of {axis}", shard.name)
            documents[axis] = last
        for key, array in shard.arrays.items():
            for block in array.blocks():
                if not np.array_equal(store.fetch(places[key], places[key] + block.size, key), block):
                    raise _differs(out, key, shard.name)
                places[key] += block.size
                progress(block.size)
    if store.num_documents != next(iter(documents.values())):
        raise _differs(out, "the number of documents", "the files")


def _differs(out: Path, what: str, name: str) -> StoreCorruptError:
    return StoreCorruptError(
        f"{out}: {what} must be read back as written, got other numbers than in {name}; "
        "check the disk, then import again"
    )
