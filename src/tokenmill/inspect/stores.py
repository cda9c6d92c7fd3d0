"""Facts of a store, the lengths of its documents, and the tokenizer that decodes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.encode.files import spec_of_copy
from tokenmill.encode.hub import local_spec
from tokenmill.encode.tokenizer import Tokenizer
from tokenmill.errors import TokenizerError
from tokenmill.inspect.audit import MAX_ITEMS, Audit, audit, audit_blocks, end_tokens, num_items
from tokenmill.reasons import NOTES, REASONS
from tokenmill.store import ForeignOptions, Store, open_store
from tokenmill.store.layout import TOKENIZER_FOLDER, is_ours, stores_below, token_keys
from tokenmill.tables import as_json
from tokenmill.types import AnyArray, Int64Array

_LENGTHS_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedRecords:
    """Records that were left out for one reason, and the first of them that is listed."""

    reason: str
    records: int
    file: str | None
    """None: none is listed."""
    line: int | None
    detail: str
    way_out: str
    """Way out, if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Change to records that are stored."""

    name: str
    records: int
    meaning: str
    document: int | None
    """The first of them; None: it was stored before this was kept, or is in another store of the build."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreContents:
    """Summary of a store from its manifest, and the audit of its masks."""

    path: str
    kind: str
    fingerprint: str
    documents: int
    tokens: int
    shards: int
    bytes: int
    keys: Mapping[str, str]
    """Array -> dtype."""
    tokenizer: Mapping[str, Any]
    bos: str | None
    """The string; None where there is none, or the tokenizer is not available."""
    eos: str | None
    recipe: Mapping[str, Any]
    skipped: Mapping[str, Any]
    reasons: tuple[SkippedRecords, ...]
    """Dropped records by reason."""
    notes: tuple[Note, ...]
    """Changes to stored records, by kind."""
    inputs: tuple[Mapping[str, Any], ...]
    longest: Mapping[str, int]
    """Array of token ids -> tokens of its longest item."""
    lengths: Mapping[str, Mapping[str, int]]
    """Array of token ids -> range of lengths, `8 to 15` -> how many items have such a length."""
    audit: tuple[Audit, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dict(as_json(self))


def stores_at(path: Path | str) -> Sequence[Path | str]:
    """Return the stores in a folder that is none itself, such as train and val; else the path or address alone."""
    if isinstance(path, str) or is_ours(path) or not path.is_dir():
        return [path]
    return stores_below(path) or [path]


def open_stores(path: Path | str, options: ForeignOptions | None = None) -> dict[str, Store]:
    """Open a store, or all stores in a folder, by name; a string is an address in object storage."""
    facts = asdict(options or ForeignOptions())
    stores = {}
    for place in stores_at(path):
        store = open_store(place, **facts)
        if isinstance(place, str):
            name = store._remotes[0].address.name
        else:
            name = place.absolute().name if place == path else place.relative_to(path).as_posix()
        stores[name] = store
    return stores


def inspect_store(
    store: Store, tokenizer: Tokenizer | None = None, *, max_items: int | None = None
) -> StoreContents:
    """Look into a store: reads where documents begin, and tokens and masks for the audit, a part at a time.

    With `max_items`, lengths and audit are of that many items at most, spread over the store, whatever its size.
    """
    manifest = store.manifest
    lengths = {key: _lengths(store, key, max_items) for key in token_keys(store.keys)}
    return StoreContents(
        path=store.where,
        kind=manifest.kind,
        fingerprint=manifest.fingerprint,
        documents=store.num_documents,
        tokens=manifest.tokens,
        shards=store.num_shards,
        bytes=sum(info.bytes for shard in manifest.shards for info in shard.files.values()),
        keys=dict(manifest.keys),
        tokenizer=dict(manifest.tokenizer),
        bos=_string_of(manifest.tokenizer.get("bos_id"), tokenizer),
        eos=_string_of(manifest.tokenizer.get("eos_id"), tokenizer),
        recipe=dict(manifest.recipe),
        skipped=dict(manifest.skipped),
        reasons=_reasons(manifest.skipped),
        notes=tuple(
            Note(name=name, records=count, meaning=NOTES.get(name, ""), document=first_noted(store).get(name))
            for name, count in manifest.skipped.get("notes", {}).items()
        ),
        inputs=tuple(dict(item) for item in manifest.inputs),
        longest={key: longest for key, (longest, _) in lengths.items()},
        lengths={key: bins for key, (_, bins) in lengths.items()},
        audit=audit(store, end_tokens(store, tokenizer), max_items=max_items or MAX_ITEMS),
    )


def first_noted(store: Store) -> Mapping[str, int]:
    """Return the first document of which each note is true; none that the store does not have."""
    noted = store.manifest.skipped.get("noted", {})
    return {name: document for name, document in noted.items() if document < store.num_documents}


def _reasons(skipped: Mapping[str, Any]) -> tuple[SkippedRecords, ...]:
    """Group what was left out by its reason, the most frequent first."""
    first: dict[str, Mapping[str, Any]] = {}
    for record in skipped.get("first", ()):
        first.setdefault(str(record.get("reason")), record)
    counts = sorted(skipped.get("counts", {}).items(), key=lambda pair: -pair[1])
    return tuple(
        SkippedRecords(
            reason=reason,
            records=count,
            file=first.get(reason, {}).get("file"),
            line=first.get(reason, {}).get("line"),
            detail=str(first.get(reason, {}).get("detail", "")),
            way_out=REASONS[reason].way_out if reason in REASONS else "",
        )
        for reason, count in counts
    )


def _string_of(id_: int | None, tokenizer: Tokenizer | None) -> str | None:
    return None if id_ is None or tokenizer is None else tokenizer.decode(np.array([id_]))


def _lengths(store: Store, key: str, max_items: int | None) -> tuple[int, dict[str, int]]:
    """Return the length of the longest item of an array of token ids, and how many items lie in each bin."""
    axis, items = store.axis(key), num_items(store, key)
    histogram = np.zeros(64, np.int64)
    longest = 0
    blocks = ((begin, min(begin + _LENGTHS_BLOCK, items)) for begin in range(0, items, _LENGTHS_BLOCK))
    for begin, end in blocks if max_items is None else audit_blocks(items, max_items):
        lengths = np.diff(store.offsets(axis, begin, end))
        histogram += np.bincount(bins_of(lengths), minlength=64)
        longest = max(longest, int(lengths.max()))
    return longest, named_bins(histogram)


def bins_of(values: Int64Array) -> Int64Array:
    """Return the bin of each number: bin 0 holds 0, bin k those from 2^(k-1) to 2^k - 1."""
    return np.ceil(np.log2(values + 1)).astype(np.int64)


def named_bins(counts: Int64Array) -> dict[str, int]:
    """Name the bins that hold something.

    >>> named_bins(np.bincount(bins_of(np.array([0, 1, 3, 9, 9]))))
    {'0': 1, '1 to 1': 1, '2 to 3': 1, '8 to 15': 2}
    """
    names = ["0", *(f"{1 << power} to {(2 << power) - 1}" for power in range(63))]
    return {name: count for name, count in zip(names, counts.tolist(), strict=False) if count}


# What shows texts: the tokenizer and the chat template


def _tokenizer_specs(store: Store) -> list[str]:
    """Return where the tokenizer of a store may be: the copy next to the store, and its original place."""
    copied = spec_of_copy(Path(store.path) / TOKENIZER_FOLDER)
    named = str(store.manifest.recipe.get("tokenizer", "bytes"))
    try:
        specs = [local_spec(named, download=False)]  # a manifest may come from anybody, so it causes no download
    except TokenizerError:
        specs = []
    return [*([copied] if copied else []), *specs]


def tokenizer_of(store: Store, spec: str | None = None) -> Tokenizer | None:
    """Open the tokenizer that made a store: the one named, else the copy beside the store, else where it was then.

    None where neither is there, or still the same: `why_no_texts` says so. One that is named must be the one.
    """
    known = store.manifest.tokenizer.get("content")
    if spec is not None:
        tokenizer = _opened(spec)
        if known is not None and tokenizer.identity.content != known:
            raise TokenizerError(
                f"tokenizer {spec!r}: must be the one that made {store.where}, whose content is {known}, "
                f"got {tokenizer.identity.content}; name that one"
            )
        return tokenizer
    for files in store._remotes:
        files.download_folder(TOKENIZER_FOLDER)
    for candidate in _tokenizer_specs(store):
        try:
            tokenizer = _opened(candidate)
        except (TokenizerError, OSError):
            continue
        if tokenizer.identity.content == known:
            return tokenizer
    return None


def _opened(spec: str) -> Tokenizer:
    """Open a tokenizer to decode with, by its reference; where that is not installed the fast engine may do."""
    from tokenmill.encode.engines import engines_of, open_tokenizer

    try:
        return open_tokenizer(spec, add_bos=False, add_eos=False, engine=engines_of(spec)[-1])
    except TokenizerError:
        return open_tokenizer(spec, add_bos=False, add_eos=False)


def why_no_texts(store: Store) -> str | None:
    """Return why no text of a store can be shown without its tokenizer; None if its tokenizer was never known."""
    if store.manifest.tokenizer.get("content") is None:
        return None
    named = store.manifest.recipe.get("tokenizer")
    gone = f"the tokenizer {named!r} is not there any more, or is another now" if named else "none is kept with it"
    return f"{store.where}: no text can be shown, as {gone}; name its tokenizer with tokenizer=..."


def kept_tokenizer(store: Store) -> Tokenizer | None:
    """Return the tokenizer kept with a store, which is opened once; None where it is not available."""
    if "tokenizer" not in store._opened:
        store._opened["tokenizer"] = tokenizer_of(store)
    tokenizer: Tokenizer | None = store._opened["tokenizer"]
    return tokenizer


def text_of(store: Store, ids: AnyArray) -> str:
    """Return token ids as text by the tokenizer kept with a store."""
    tokenizer = kept_tokenizer(store)
    if tokenizer is None:
        raise TokenizerError(
            f"{store.where}: no text without its tokenizer: {store.manifest.recipe.get('tokenizer', 'unknown')!r}; "
            "decode `ids` with tokenmill.open_tokenizer(...)"
        )
    return tokenizer.decode(ids)
