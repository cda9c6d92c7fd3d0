"""What is in a store: its facts, how long its documents are, how much of them is trained on, and examples."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.encode.files import kind_of, spec_of_copy
from tokenmill.encode.tokenizer import Tokenizer
from tokenmill.errors import TokenizerError
from tokenmill.store import Origin, Store
from tokenmill.store.layout import TOKENIZER_FOLDER, token_keys
from tokenmill.tables import as_json
from tokenmill.types import STORED_ARRAYS, BoolArray, Int64Array, Span

MAX_ITEMS = 1 << 20
"""More items than this are not all audited, but evenly spread blocks of them."""
EXAMPLE_TOKENS = 400
EXCERPT_TOKENS = 16
_LENGTHS_BLOCK = 1 << 20
_AUDIT_BLOCK = 1 << 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """How much of one array of token ids is trained on."""

    key: str
    items: int
    """Documents, answers or responses."""
    audited: int
    """Those that were looked at."""
    tokens: int
    """Of those."""
    supervised: int
    """Tokens that are trained on; the first token of a document never is."""
    fully_masked: int | None
    """Items without such a token; None of prompts, which are never trained on."""
    without_eos: int | None
    """Items whose last trained token, or last where none is, is neither EOS nor another control token, such as the
    end of a turn; None of prompts, and where no such token is known."""
    truncated: int | None
    """Items that were cut when they were prepared; None where a store does not say."""
    supervised_percent: float
    """Of the tokens."""
    fully_masked_percent: float | None
    """Of the audited items, as the next."""
    without_eos_percent: float | None
    truncated_percent: float | None
    """Of all items."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreContents:
    """All that is known of a store without its tokens, and the audit of what is trained on."""

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
    """The string; None where there is none, or the tokenizer is not at hand."""
    eos: str | None
    recipe: Mapping[str, Any]
    skipped: Mapping[str, Any]
    inputs: tuple[Mapping[str, Any], ...]
    longest: Mapping[str, int]
    """Array of token ids -> tokens of its longest item."""
    lengths: Mapping[str, Mapping[str, int]]
    """Array of token ids -> range of lengths, `8 to 15` -> how many items have such a length."""
    audit: tuple[Audit, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dict(as_json(self))


def inspect_store(store: Store, tokenizer: Tokenizer | None = None) -> StoreContents:
    """Look into a store: reads where documents begin, and tokens and masks for the audit, a part at a time."""
    manifest = store.manifest
    lengths = {key: _lengths(store, key) for key in token_keys(store.keys)}
    return StoreContents(
        path=str(store.path),
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
        inputs=tuple(dict(item) for item in manifest.inputs),
        longest={key: longest for key, (longest, _) in lengths.items()},
        lengths={key: bins for key, (_, bins) in lengths.items()},
        audit=audit(store, end_tokens(store, tokenizer)),
    )


def _string_of(id_: int | None, tokenizer: Tokenizer | None) -> str | None:
    return None if id_ is None or tokenizer is None else tokenizer.decode(np.array([id_]))


def _lengths(store: Store, key: str) -> tuple[int, dict[str, int]]:
    """Return the length of the longest item of an array of token ids, and how many items lie in each bin.

    Bin 0 holds empty items, bin k those of 2^(k-1) to 2^k - 1 tokens.
    """
    axis = store.axis(key)
    items = int(store.axes[axis].items[-1])
    histogram = np.zeros(64, np.int64)
    longest = 0
    for begin in range(0, items, _LENGTHS_BLOCK):
        lengths = np.diff(store.offsets(axis, begin, min(begin + _LENGTHS_BLOCK, items)))
        histogram += np.bincount(np.ceil(np.log2(lengths + 1)).astype(np.int64), minlength=64)
        longest = max(longest, int(lengths.max()))
    names = ["0", *(f"{1 << power} to {(2 << power) - 1}" for power in range(63))]
    return longest, {name: count for name, count in zip(names, histogram.tolist(), strict=True) if count}


# How much is trained on


def tokenizer_of(store: Store, spec: str | None = None) -> Tokenizer | None:
    """Open the tokenizer that made a store: the one named, else the copy beside the store, else where it was then.

    None where neither is there, or still the same: `why_no_texts` says so. One that is named must be the one.
    """
    known = store.manifest.tokenizer.get("content")
    if spec is not None:
        tokenizer = _opened(spec)
        if known is not None and tokenizer.identity.content != known:
            raise TokenizerError(
                f"tokenizer {spec!r}: must be the one that made {store.path}, whose content is {known}, "
                f"got {tokenizer.identity.content}; name that one"
            )
        return tokenizer
    copied = spec_of_copy(Path(store.path) / TOKENIZER_FOLDER)
    for each in (*([copied] if copied else []), str(store.manifest.recipe.get("tokenizer", "bytes"))):
        try:
            tokenizer = _opened(each)
        except (TokenizerError, OSError):
            continue
        if tokenizer.identity.content == known:
            return tokenizer
    return None


def _opened(spec: str) -> Tokenizer:
    """Open a tokenizer to decode with, by its reference; where that is not installed the fast engine may do."""
    from tokenmill.encode.engines import ENGINES, open_tokenizer

    try:
        return open_tokenizer(spec, add_bos=False, add_eos=False, engine=ENGINES[kind_of(spec)][-1])
    except TokenizerError:
        return open_tokenizer(spec, add_bos=False, add_eos=False)


def why_no_texts(store: Store) -> str | None:
    """Say why the texts of a store cannot be shown where `tokenizer_of` finds none; None if none was ever known."""
    if store.manifest.tokenizer.get("content") is None:
        return None
    named = store.manifest.recipe.get("tokenizer")
    gone = f"the tokenizer {named!r} is not there any more, or is another now" if named else "none is kept with it"
    return f"{store.path}: no text can be shown, as {gone}; name its tokenizer with --tokenizer"


def has_chat_template(recipe: Mapping[str, Any]) -> bool:
    """Whether records were, or could be, written by a chat template, which places BOS and EOS itself."""
    return isinstance(recipe.get("recipe", {}).get("chat_template"), dict)


def end_tokens(store: Store, tokenizer: Tokenizer | None) -> set[int]:
    """Return the ids that may end a document: EOS and control tokens; none where only the tokenizer would know."""
    eos = store.manifest.tokenizer.get("eos_id")
    ends = set() if eos is None else {int(eos)}
    if tokenizer is not None:
        return ends | set(tokenizer.special_ids.values())
    return set() if has_chat_template(store.manifest.recipe) else ends


def audit(store: Store, ends: Collection[int] = (), *, max_items: int = MAX_ITEMS) -> tuple[Audit, ...]:
    """Audit every array of token ids of a store, `max_items` of each at most.

    Items should end with one of `ends`; where none is given, masks are read but no token.
    """
    return tuple(
        _audit_key(store, key, np.array(sorted(ends), np.int64), max_items) for key in token_keys(store.keys)
    )


def _audit_key(store: Store, key: str, ends: Int64Array, max_items: int) -> Audit:
    items = int(store.axes[store.axis(key)].items[-1])
    prompts = key == "prompts"
    audited = tokens = supervised = fully_masked = without_eos = 0
    for begin, end in _audit_blocks(items, max_items):
        offsets = store.offsets(store.axis(key), begin, end)
        trained = _trained(store, key, offsets)
        lengths = np.diff(offsets)
        counts = np.diff(np.concatenate([[0], np.cumsum(trained)])[offsets - offsets[0]])
        audited += end - begin
        tokens += int(lengths.sum())
        supervised += int(counts.sum())
        fully_masked += int((counts == 0).sum())
        if ends.size and not prompts:
            ids = store.fetch(int(offsets[0]), int(offsets[-1]), key)
            last = ids[_last_trained(offsets, trained, counts)]
            without_eos += int((lengths == 0).sum()) + int((~np.isin(last, ends)).sum())
    truncated = store.manifest.skipped.get("truncated", 0) if "name" in store.manifest.recipe else None
    masked = None if prompts else fully_masked
    endless = None if prompts or not ends.size else without_eos
    return Audit(
        key=key,
        items=items,
        audited=audited,
        tokens=tokens,
        supervised=supervised,
        fully_masked=masked,
        without_eos=endless,
        truncated=truncated,
        supervised_percent=100 * supervised / max(1, tokens),
        fully_masked_percent=None if masked is None else 100 * masked / max(1, audited),
        without_eos_percent=None if endless is None else 100 * endless / max(1, audited),
        truncated_percent=None if truncated is None else 100 * truncated / max(1, items),
    )


def _audit_blocks(items: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of items to look at."""
    num_blocks = -(-items // _AUDIT_BLOCK)
    wanted = min(num_blocks, most // _AUDIT_BLOCK)
    for index in range(wanted):
        begin = index * num_blocks // wanted * _AUDIT_BLOCK
        yield begin, min(begin + _AUDIT_BLOCK, items)


def _trained(store: Store, key: str, offsets: Int64Array) -> BoolArray:
    """Return which tokens of some items are labels."""
    begin, end = int(offsets[0]), int(offsets[-1])
    if key == "prompts":
        return np.zeros(end - begin, np.bool_)
    mask_key = STORED_ARRAYS[key].mask if key in STORED_ARRAYS else None
    if mask_key not in store.keys:
        trained = np.ones(end - begin, np.bool_)
    else:
        trained = store.fetch(begin, end, mask_key).astype(np.bool_)
    if key != "responses":  # before a response stands its prompt
        trained[offsets[:-1][np.diff(offsets) > 0] - begin] = False
    return trained


def _last_trained(offsets: Int64Array, trained: BoolArray, counts: Int64Array) -> Int64Array:
    """Return where the last trained token of each item is, or the last one where none is; no place of empty items.

    What a template puts behind the end of a turn, such as a line break, is masked and says nothing of that end.
    """
    ends = offsets[1:] - offsets[0] - 1
    latest = np.maximum.accumulate(np.where(trained, np.arange(trained.size), -1))
    filled = np.diff(offsets) > 0
    last: Int64Array = np.where(counts[filled] > 0, latest[ends[filled]], ends[filled])
    return last


# Tokens as text


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One item as text, in runs that are trained on or not."""

    key: str
    item: int
    tokens: int
    supervised: int
    runs: tuple[tuple[bool, str], ...]
    cut: bool
    """Whether more follows than is shown."""


def examples(store: Store, tokenizer: Tokenizer | None) -> list[Example]:
    """Return the first, a middle and the last item of each array of token ids; none without a tokenizer."""
    if tokenizer is None:
        return []
    keys = [key for key in token_keys(store.keys) if key != "prompts"]
    shown: list[Example] = []
    for key in keys:
        items = int(store.axes[store.axis(key)].items[-1])
        places = sorted({0, items // 2, items - 1}) if len(keys) == 1 else [0, items - 1]
        shown += [_example(store, tokenizer, key, item) for item in dict.fromkeys(places) if 0 <= item < items]
    return shown


def _example(store: Store, tokenizer: Tokenizer, key: str, item: int) -> Example:
    offsets = store.offsets(store.axis(key), item, item + 1)
    ids, trained = store.fetch(int(offsets[0]), int(offsets[1]), key), _trained(store, key, offsets)
    shown, flags = ids[:EXAMPLE_TOKENS], trained[:EXAMPLE_TOKENS]
    edges = [0, *(np.flatnonzero(np.diff(flags.astype(np.int8))) + 1).tolist(), shown.size]
    return Example(
        key=key,
        item=item,
        tokens=int(ids.size),
        supervised=int(trained.sum()),
        runs=tuple(
            (bool(flags[begin]), tokenizer.decode(shown[begin:end]))
            for begin, end in pairwise(edges)
            if end > begin
        ),
        cut=ids.size > shown.size,
    )


def excerpt(store: Store, span: Span, tokenizer: Tokenizer) -> str:
    """Return the beginning of a span as text, which ends with … where more follows."""
    begin = store.document_bounds(span.document)[0] + span.start
    length = min(span.length, EXCERPT_TOKENS)
    ids = store.fetch(begin, begin + length, store.manifest.token_key)
    return tokenizer.decode(ids) + ("…" if span.length > length else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentPart:
    """One array of token ids of a document: the whole of it, or one response of a group."""

    key: str
    ids: tuple[int, ...]
    strings: tuple[str, ...] | None
    """Each id as text; None without the tokenizer."""
    mask: tuple[int, ...] | None
    """What the store says of each token; None where it has no mask."""
    trained: tuple[bool, ...]
    """Whether each is a label: the first token of a document never is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentContents:
    """One document, or record, of a store."""

    path: str
    document: int
    origin: Origin
    parts: tuple[DocumentPart, ...]
    rewards: tuple[float, ...] | None
    """Of its responses, in a store of groups."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dict(as_json(self))


def inspect_document(store: Store, document: int, tokenizer: Tokenizer | None = None) -> DocumentContents:
    """Look at one document: where it came from, its tokens and its masks."""
    origin = store.origin(document)
    parts: list[DocumentPart] = []
    for key in token_keys(store.keys):
        axis, first, last = store.axis(key), document, document + 1
        if axis == "responses":
            first, last = store.offsets("groups", document, document + 1).tolist()
        parts += [_part(store, key, store.offsets(axis, item, item + 1), tokenizer) for item in range(first, last)]
    rewards = np.asarray(store.fetch_record(document, "rewards")).tolist() if "rewards" in store.keys else None
    return DocumentContents(
        path=str(store.path),
        document=document,
        origin=origin,
        parts=tuple(parts),
        rewards=None if rewards is None else tuple(rewards),
    )


def _part(store: Store, key: str, offsets: Int64Array, tokenizer: Tokenizer | None) -> DocumentPart:
    begin, end = offsets.tolist()
    ids = store.fetch(begin, end, key)
    mask_key = STORED_ARRAYS[key].mask if key in STORED_ARRAYS else None
    mask = store.fetch(begin, end, mask_key).tolist() if mask_key in store.keys else None
    return DocumentPart(
        key=key,
        ids=tuple(ids.tolist()),
        strings=tuple(tokenizer.decode(ids[place : place + 1]) for place in range(ids.size)) if tokenizer else None,
        mask=None if mask is None else tuple(mask),
        trained=tuple(_trained(store, key, offsets).tolist()),
    )
