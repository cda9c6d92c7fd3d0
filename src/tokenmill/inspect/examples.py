"""Tokens of a store as text: examples, excerpts and whole documents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tokenmill.encode.tokenizer import (
    TOKENS_AROUND,
    Tokenizer,
    TokenTexts,
    text_between,
    token_texts,
    whole_edge,
)
from tokenmill.inspect.audit import (
    audit_blocks,
    count_trained,
    end_tokens,
    ended_runs,
    mask_of,
    num_items,
    trained_runs,
    trained_tokens,
)
from tokenmill.inspect.stores import first_noted
from tokenmill.store import Origin, Store
from tokenmill.store.layout import token_keys
from tokenmill.tables import as_json
from tokenmill.types import AnyArray, BoolArray, Float64Array, Int64Array, Span

MAX_EXAMINED = 1 << 16
"""Items in which examples are looked for."""
EXAMPLE_TOKENS = 400
EXCERPT_TOKENS = 16


class Piece(NamedTuple):
    """Consecutive tokens of an example with the same mask."""

    trained: bool
    text: str
    control: bool = False
    """Whether the piece is a special token, not text that spells one."""
    left_out: int = 0
    """Tokens before it that are not shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One item as text, in trained and untrained pieces. A long item is shown around its trained tokens."""

    key: str
    item: int
    why: tuple[str, ...]
    """Kinds of content that the item shows."""
    tokens: int
    supervised: int
    runs: tuple[Piece, ...]
    left_out: int
    """Number of tokens after the last piece, which are not shown."""

    @property
    def title(self) -> str:
        """Name of the item, with its number of trained tokens."""
        counts = f"{self.tokens:,} tokens, {self.supervised:,} trained"
        return f"{self.key} {self.item:,} ({', '.join(self.why)}): {counts}"


_SEARCHED = 64
"""Number of sampled items that are searched for tools and reasoning."""
_KINDS: Mapping[str, re.Pattern[str]] = {
    "tools": re.compile(r"tool_call|TOOL_CALLS|python_tag|tool▁call|to=functions|<function"),
    "reasoning": re.compile(
        r"<think(?!(?:ing)?>\s*</think)|\[THINK\]|START_THINKING|channel\|?>\s*(?:thought|analysis)|seed:think"
    ),
}
"""Text that templates write around tool calls and reasoning. Empty thoughts, as in Qwen 3, do not count."""


def examples(store: Store, tokenizer: Tokenizer | None, *, seed: int = 0) -> list[Example]:
    """Return items that show every kind of content, and some sampled by a seed; empty without a tokenizer.

    Of texts without a mask the first, a middle and the last.
    """
    if tokenizer is None:
        return []
    keys = [key for key in token_keys(store.keys) if key != "prompts"]
    shown: list[Example] = []
    for key in keys:
        chosen = _chosen(store, key, tokenizer, seed)
        shown += [_example(store, tokenizer, key, item, tuple(why)) for item, why in chosen.items()]
    return shown


def _chosen(store: Store, key: str, tokenizer: Tokenizer, seed: int) -> dict[int, list[str]]:
    """Return the items to show, and why each."""
    items, mask_key = num_items(store, key), mask_of(key)
    chosen: dict[int, list[str]] = {}
    for note, document in first_noted(store).items():
        first = store.offsets("groups", document, document + 1)[0] if store.axis(key) == "responses" else document
        if first < items:
            chosen.setdefault(int(first), []).append(note)
    if mask_key not in store.keys or items < 4:
        places = {items - 1: "last", items // 2: "middle", 0: "first"} if items else {}
        for item in sorted(places):
            chosen.setdefault(item, []).append(places[item])
        return chosen
    for why, item in _extremes(store, key, np.array(sorted(end_tokens(store, tokenizer)), np.int64)).items():
        chosen.setdefault(item, []).append(why)
    draw = np.random.default_rng(seed)
    drawn = dict.fromkeys(draw.integers(items, size=_SEARCHED).tolist())
    for item in list(drawn)[:2]:
        chosen.setdefault(item, []).append(f"drawn by seed {seed}")
    for why, pattern in _KINDS.items():
        texts = ((item, _text(store, tokenizer, key, item)) for item in (*chosen, *drawn))
        example = next((item for item, text in texts if pattern.search(text)), None)
        if example is not None:
            chosen.setdefault(example, []).append(why)
    return chosen


def _extremes(store: Store, key: str, ends: Int64Array) -> dict[str, int]:
    """Return the item that is the longest, has most or least trained on, or shows what may be wrong."""
    best: dict[str, tuple[float, int]] = {}

    def offer(why: str, score: Int64Array | Float64Array, begin: int, fits: BoolArray) -> None:
        places = np.flatnonzero(fits)
        if places.size:
            place = int(places[np.argmax(score[places])])
            best[why] = max(best.get(why, (-np.inf, 0)), (float(score[place]), -(begin + place)))

    for begin, end in audit_blocks(num_items(store, key), MAX_EXAMINED):
        offsets = store.offsets(store.axis(key), begin, end)
        trained, lengths = trained_tokens(store, key, offsets), np.diff(offsets)
        ids = store.fetch(int(offsets[0]), int(offsets[-1]), key)
        counts = count_trained(offsets, trained)
        share = counts / np.maximum(1, lengths)
        starts, stops = trained_runs(offsets, trained)
        owners = np.searchsorted(offsets - offsets[0], starts, side="right") - 1
        alone = np.array(
            [bool(np.isin(ids[a:b], ends).all()) for a, b in zip(starts, stops, strict=True)], np.bool_
        )
        offer("longest", lengths, begin, lengths > 0)
        offer("most trained", share, begin, counts > 0)
        offer("least trained", -share, begin, counts > 0)
        offer("nothing trained", lengths, begin, counts == 0)
        if ends.size:
            unended = np.bincount(owners, ~ended_runs(ids, starts, stops, ends), minlength=lengths.size)
            offer("turns without a trained end", unended, begin, unended > 0)
            empty = np.bincount(owners, alone, minlength=lengths.size)
            offer("empty answers", empty, begin, empty > 0)
    return {why: -item for why, (_, item) in best.items()}


def _text(store: Store, tokenizer: Tokenizer, key: str, item: int) -> str:
    begin, end = store.offsets(store.axis(key), item, item + 1).tolist()
    return tokenizer.decode(store.fetch(begin, min(end, begin + (1 << 14)), key))


def _example(store: Store, tokenizer: Tokenizer, key: str, item: int, why: tuple[str, ...]) -> Example:
    offsets = store.offsets(store.axis(key), item, item + 1)
    ids, trained = store.fetch(int(offsets[0]), int(offsets[1]), key), trained_tokens(store, key, offsets)
    control = np.isin(ids, list(tokenizer.special_ids.values()))
    shown = _shown_tokens(trained, *trained_runs(offsets, trained))
    # A piece ends where another kind of token begins; control tokens stand alone.
    kinds = trained + 2 * control + 4 * shown
    changes = (np.flatnonzero((np.diff(kinds) != 0) | control[1:]) + 1).tolist()
    edges = [0, *(whole_edge(tokenizer, ids, edge) for edge in changes), ids.size]
    pieces: list[Piece] = []
    left_out = 0
    for begin, end in pairwise(edges):
        if begin == end or not shown[begin]:
            left_out += end - begin
            continue
        text = text_between(tokenizer, ids, begin, end)
        pieces.append(Piece(bool(trained[begin]), text, bool(control[begin]), left_out))
        left_out = 0
    return Example(
        key=key,
        item=item,
        why=why,
        tokens=int(ids.size),
        supervised=int(trained.sum()),
        runs=tuple(pieces),
        left_out=left_out,
    )


def _shown_tokens(trained: BoolArray, starts: Int64Array, stops: Int64Array) -> BoolArray:
    """Return the tokens of an item to show: all of a short item, or those around trained tokens of a long one."""
    shown = np.ones(trained.size, np.bool_)
    if trained.size <= EXAMPLE_TOKENS:
        return shown
    shown[EXAMPLE_TOKENS // 10 :] = False
    if not starts.size:
        shown[-EXAMPLE_TOKENS // 2 :] = True
        return shown
    runs = list(zip(starts.tolist(), stops.tolist(), strict=True))
    runs = runs if len(runs) <= 4 else [*runs[:2], *runs[-2:]]
    width = EXAMPLE_TOKENS // (2 * len(runs))
    for begin, end in runs:
        shown[max(0, begin - width // 3) : min(end, begin + width)] = True
        shown[max(begin, end - width // 2) : end + width // 6] = True
    return shown


def span_ids(store: Store, span: Span) -> AnyArray:
    """Return the token ids of a span."""
    begin = store.document_bounds(span.document)[0] + span.start
    return store.fetch(begin, begin + span.length, store.manifest.token_key)


def excerpt(store: Store, span: Span, tokenizer: Tokenizer, most: int = EXCERPT_TOKENS) -> str:
    """Return the first `most` tokens of a span as text, which ends with … where more follow."""
    ids = span_ids(store, replace(span, length=min(span.length, most + TOKENS_AROUND)))
    end = whole_edge(tokenizer, ids, min(span.length, most))
    return tokenizer.decode(ids[:end]) + ("…" if span.length > end else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentPart:
    """One array of token ids of a document: the whole of it, or one response of a group."""

    key: str
    ids: tuple[int, ...]
    strings: tuple[str, ...] | None
    """Each id as text; None without the tokenizer. A character that is spread over ids belongs to the first."""
    continues: tuple[bool, ...] | None
    """Whether each token continues the character of the previous one. None without the tokenizer."""
    control: tuple[bool, ...] | None
    """Whether each token is a special token, which looks like text that spells it. None without the tokenizer."""
    mask: tuple[int, ...] | None
    """The mask of each token as it is stored; None where the store has none."""
    trained: tuple[bool, ...]
    """Whether each token is a label. The first token of a document is not."""
    length: int
    """Number of tokens of the document, including those that are not shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentContents:
    """One document, or record, of a store."""

    path: str
    document: int
    origin: Origin
    parts: tuple[DocumentPart, ...]
    rewards: tuple[float, ...] | None
    """Rewards of its responses, for a store of groups."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dict(as_json(self))


def inspect_document(
    store: Store,
    document: int,
    tokenizer: Tokenizer | None = None,
    *,
    first: int = 0,
    count: int | None = None,
) -> DocumentContents:
    """Return the origin, tokens and masks of a document: at most `count` tokens per array, from token `first`."""
    origin = store.origin(document)
    parts: list[DocumentPart] = []
    for key in token_keys(store.keys):
        axis, item, end = store.axis(key), document, document + 1
        if axis == "responses":
            item, end = store.offsets("groups", document, document + 1).tolist()
        parts += [
            _part(store, key, store.offsets(axis, each, each + 1), tokenizer, first, count)
            for each in range(item, end)
        ]
    rewards = np.asarray(store.fetch_record(document, "rewards")).tolist() if "rewards" in store.keys else None
    return DocumentContents(
        path=store.where,
        document=document,
        origin=origin,
        parts=tuple(parts),
        rewards=None if rewards is None else tuple(rewards),
    )


def _part(
    store: Store,
    key: str,
    offsets: Int64Array,
    tokenizer: Tokenizer | None,
    first: int,
    count: int | None,
) -> DocumentPart:
    whole = int(offsets[1] - offsets[0])
    first = min(first, whole)
    last = whole if count is None else min(first + count, whole)
    begin, end = int(offsets[0]) + first, int(offsets[0]) + max(first, last)
    ids = store.fetch(begin, end, key)
    mask_key = mask_of(key)
    mask = store.fetch(begin, end, mask_key).tolist() if mask_key in store.keys else None
    trained = trained_tokens(store, key, np.array([begin, end]))
    if first and trained.size:  # the first token of what is shown is not the first of the document
        trained[0] = key != "prompts" and (mask is None or bool(mask[0]))
    texts = (
        _texts_between(store, tokenizer, key, (int(offsets[0]), begin, end, int(offsets[1]))) if tokenizer else None
    )
    return DocumentPart(
        key=key,
        ids=tuple(ids.tolist()),
        strings=None if texts is None else texts.texts,
        continues=None if texts is None else texts.continues,
        control=tuple(np.isin(ids, list(tokenizer.special_ids.values())).tolist()) if tokenizer else None,
        mask=None if mask is None else tuple(mask),
        trained=tuple(trained.tolist()),
        length=whole,
    )


def _texts_between(store: Store, tokenizer: Tokenizer, key: str, places: tuple[int, int, int, int]) -> TokenTexts:
    """Return the texts of tokens of a document; `places` are its begin, theirs, their end, and its end."""
    first, begin, end, last = places
    first, last = max(first, begin - TOKENS_AROUND), min(last, end + TOKENS_AROUND)
    spelled = token_texts(tokenizer, store.fetch(first, last, key))
    shown = slice(begin - first, end - first)
    return TokenTexts(texts=spelled.texts[shown], continues=spelled.continues[shown])
