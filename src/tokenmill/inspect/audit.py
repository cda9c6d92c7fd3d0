"""Supervision of a store: the share of tokens that its masks train, and the last tokens of its documents."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenmill.encode.tokenizer import Tokenizer
from tokenmill.store import Store
from tokenmill.store.layout import token_keys
from tokenmill.types import STORED_ARRAYS, AnyArray, BoolArray, Int64Array

MAX_ITEMS = 1 << 20
"""More items than this are not all audited, but evenly spread blocks of them."""
_AUDIT_BLOCK = 1 << 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """Share of trained tokens in one array of ids."""

    key: str
    items: int
    """Documents, answers or responses."""
    audited: int
    """Number of items that were audited."""
    tokens: int
    """Tokens in the audited items."""
    supervised: int
    """Tokens that are trained on; the first token of a document never is."""
    fully_masked: int | None
    """Items without such a token; None of prompts, which are never trained on."""
    without_eos: int | None
    """Items whose last trained token, or last where none is, is neither EOS nor another control token, such as the
    end of a turn; None of prompts, and where no such token is known."""
    with_bos: int | None
    """Items that start with BOS; None of responses, and where there is no BOS or no token was read."""
    turns: int
    """Runs of trained tokens: answers, or whole texts where nothing is masked."""
    unended_turns: int | None
    """Trained ranges that do not end with EOS or another special token, so nothing teaches the model to stop there.
    None for prompts, and if no such token is known."""
    truncated: int | None
    """Items that were truncated during preparation. None if the store does not record it."""
    supervised_percent: float
    """Percent of tokens."""
    fully_masked_percent: float | None
    """Percent of audited items; the next field too."""
    without_eos_percent: float | None
    unended_turns_percent: float | None
    """Percent of messages."""
    truncated_percent: float | None
    """Percent of all items."""


def has_chat_template(recipe: Mapping[str, Any]) -> bool:
    """Whether a chat template, which places BOS and EOS itself, wrote the records or could have."""
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
    items = num_items(store, key)
    prompts = key == "prompts"
    bos_id = store.manifest.tokenizer.get("bos_id") if key != "responses" else None
    audited = tokens = supervised = fully_masked = without_eos = with_bos = num_turns = unended = 0
    for begin, end in audit_blocks(items, max_items):
        offsets = store.offsets(store.axis(key), begin, end)
        trained = trained_tokens(store, key, offsets)
        lengths = np.diff(offsets)
        counts = count_trained(offsets, trained)
        audited += end - begin
        tokens += int(lengths.sum())
        supervised += int(counts.sum())
        fully_masked += int((counts == 0).sum())
        starts, stops = trained_runs(offsets, trained)
        num_turns += starts.size
        ids = store.fetch(int(offsets[0]), int(offsets[-1]), key) if ends.size else np.empty(0, np.uint8)
        if ends.size and bos_id is not None:
            with_bos += int((ids[offsets[:-1][lengths > 0] - offsets[0]] == bos_id).sum())
        if ends.size and not prompts:
            last = ids[_last_trained(offsets, trained, counts)]
            without_eos += int((lengths == 0).sum()) + int((~np.isin(last, ends)).sum())
            unended += int((~ended_runs(ids, starts, stops, ends)).sum())
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
        with_bos=with_bos if ends.size and bos_id is not None else None,
        turns=num_turns,
        unended_turns=None if endless is None else unended,
        truncated=truncated,
        supervised_percent=100 * supervised / max(1, tokens),
        fully_masked_percent=None if masked is None else 100 * masked / max(1, audited),
        without_eos_percent=None if endless is None else 100 * endless / max(1, audited),
        unended_turns_percent=None if endless is None else 100 * unended / max(1, num_turns),
        truncated_percent=None if truncated is None else 100 * truncated / max(1, items),
    )


def audit_blocks(items: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of items to look at."""
    num_blocks = -(-items // _AUDIT_BLOCK)
    wanted = min(num_blocks, most // _AUDIT_BLOCK)
    for index in range(wanted):
        begin = index * num_blocks // wanted * _AUDIT_BLOCK
        yield begin, min(begin + _AUDIT_BLOCK, items)


def trained_tokens(store: Store, key: str, offsets: Int64Array) -> BoolArray:
    """Return which tokens of some items are labels."""
    begin, end = int(offsets[0]), int(offsets[-1])
    if key == "prompts":
        return np.zeros(end - begin, np.bool_)
    mask_key = mask_of(key)
    if mask_key not in store.keys:
        trained = np.ones(end - begin, np.bool_)
    else:
        trained = store.fetch(begin, end, mask_key).astype(np.bool_)
    if key != "responses":  # before a response stands its prompt
        trained[offsets[:-1][np.diff(offsets) > 0] - begin] = False
    return trained


def count_trained(offsets: Int64Array, trained: BoolArray) -> Int64Array:
    """Return how many labels each item has."""
    counts: Int64Array = np.diff(np.concatenate([[0], np.cumsum(trained)])[offsets - offsets[0]])
    return counts


def trained_runs(offsets: Int64Array, trained: BoolArray) -> tuple[Int64Array, Int64Array]:
    """Return where runs of trained tokens begin and end, counted from the first token; none goes over two items."""
    first = np.zeros(trained.size + 1, np.bool_)
    first[offsets - offsets[0]] = True
    before = np.concatenate([[False], trained[:-1]])
    behind = np.concatenate([trained[1:], [False]])
    return np.flatnonzero(trained & (~before | first[:-1])), np.flatnonzero(trained & (~behind | first[1:])) + 1


def ended_runs(ids: AnyArray, starts: Int64Array, stops: Int64Array, ends: Int64Array) -> BoolArray:
    """Return whether each range has an end token among its last three; a template may add a line break after it."""
    is_end = np.concatenate([np.isin(ids, ends), [False]])
    places = [np.where(stops - back >= starts, stops - back, ids.size) for back in (1, 2, 3)]
    ended: BoolArray = np.any([is_end[place] for place in places], axis=0)
    return ended


def _last_trained(offsets: Int64Array, trained: BoolArray, counts: Int64Array) -> Int64Array:
    """Return where the last trained token of each item is, or the last one where none is; no place of empty items.

    What a template puts behind the end of a turn, such as a line break, is masked and says nothing of that end.
    """
    ends = offsets[1:] - offsets[0] - 1
    latest = np.maximum.accumulate(np.where(trained, np.arange(trained.size), -1))
    filled = np.diff(offsets) > 0
    last: Int64Array = np.where(counts[filled] > 0, latest[ends[filled]], ends[filled])
    return last


def num_items(store: Store, key: str) -> int:
    """Return how many documents, answers or responses an array has."""
    return int(store.axes[store.axis(key)].items[-1])


def mask_of(key: str) -> str | None:
    """Return the mask of an array of ids; None if it has none."""
    return STORED_ARRAYS[key].mask if key in STORED_ARRAYS else None
