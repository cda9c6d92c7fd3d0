"""The supervision audit of a store: how much of it is trained on, and what that looks like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.store.layout import token_keys

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.encode.tokenizer import Tokenizer
    from tokenmill.store import Store

MASKS = {
    "sequence": "loss_mask",
    "chosen": "chosen_mask",
    "rejected": "rejected_mask",
    "prompts": None,
    "responses": "masks",
}
"""Array of token ids -> array of its mask; a prompt is never trained on."""
MAX_ITEMS = 1 << 20
"""More items than this are not all looked at, but evenly spread blocks of them."""
_BLOCK = 1 << 12
EXAMPLE_TOKENS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What was found in one array of token ids."""

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

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object, with percentages."""
        return {
            **asdict(self),
            "supervised_percent": percent(self.supervised, self.tokens),
            "fully_masked_percent": share(self.fully_masked, self.audited),
            "without_eos_percent": share(self.without_eos, self.audited),
            "truncated_percent": share(self.truncated, self.items),
        }


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


def percent(part: int, whole: int) -> float:
    """Return a share in percent; 0 of nothing."""
    return 100 * part / whole if whole else 0.0


def share(part: int | None, whole: int) -> float | None:
    """Return a share in percent, None where the part is not known."""
    return None if part is None else percent(part, whole)


def has_chat_template(recipe: Mapping[str, Any]) -> bool:
    """Whether records were, or could be, written by a chat template, which places BOS and EOS itself."""
    return isinstance(recipe.get("recipe", {}).get("chat_template"), dict)


def audit(store: Store, tokenizer: Tokenizer | None) -> list[Audit]:
    """Audit every array of token ids of a store; at most `MAX_ITEMS` items of each are looked at."""
    identity = store.manifest.tokenizer
    ends: set[int] = set() if identity.get("eos_id") is None else {int(identity["eos_id"])}
    if tokenizer is not None:
        ends |= set(tokenizer.special_ids.values())
    elif has_chat_template(store.manifest.recipe):
        ends.clear()  # turns end with tokens that only the tokenizer knows
    return [_audit_key(store, key, np.array(sorted(ends), np.int64)) for key in token_keys(store.keys)]


def _audit_key(store: Store, key: str, ends: npt.NDArray[np.int64]) -> Audit:
    items = int(store.axes[store.axis(key)].items[-1])
    audited = tokens = supervised = fully_masked = without_eos = 0
    for begin, end in _blocks(items):
        offsets = store.offsets(store.axis(key), begin, end)
        ids, trained = _tokens_and_masks(store, key, offsets)
        lengths = np.diff(offsets)
        counts = np.diff(np.concatenate([[0], np.cumsum(trained)])[offsets - offsets[0]])
        audited += end - begin
        tokens += int(lengths.sum())
        supervised += int(counts.sum())
        fully_masked += int((counts == 0).sum())
        without_eos += int((lengths == 0).sum()) + int((~np.isin(ids[_last(offsets, trained, counts)], ends)).sum())
    return Audit(
        key=key,
        items=items,
        audited=audited,
        tokens=tokens,
        supervised=supervised,
        fully_masked=None if key == "prompts" else fully_masked,
        without_eos=None if key == "prompts" or not ends.size else without_eos,
        truncated=store.manifest.skipped.get("truncated", 0) if "name" in store.manifest.recipe else None,
    )


def _last(
    offsets: npt.NDArray[np.int64], trained: npt.NDArray[np.bool_], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return where the last trained token of each item is, or the last one where none is; no place of empty items.

    What a template puts behind the end of a turn, such as a line break, is masked and says nothing of that end.
    """
    ends = offsets[1:] - offsets[0] - 1
    places = np.where(trained, np.arange(trained.size), -1)
    latest: npt.NDArray[np.int64] = np.maximum.accumulate(places)
    filled = np.diff(offsets) > 0
    found: npt.NDArray[np.int64] = np.where(counts[filled] > 0, latest[ends[filled]], ends[filled])
    return found


def _blocks(items: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of items to look at."""
    num_blocks = -(-items // _BLOCK)
    wanted = min(num_blocks, MAX_ITEMS // _BLOCK)
    for index in range(wanted):
        begin = index * num_blocks // wanted * _BLOCK
        yield begin, min(begin + _BLOCK, items)


def _tokens_and_masks(
    store: Store, key: str, offsets: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return the ids of some items, and which of them are labels."""
    begin, end = int(offsets[0]), int(offsets[-1])
    ids = store.fetch(begin, end, key)
    mask_key = MASKS.get(key)
    if key == "prompts":
        return ids, np.zeros(ids.size, np.bool_)
    if mask_key in store.keys:
        trained = store.fetch(begin, end, mask_key).astype(np.bool_)
    else:
        trained = np.ones(ids.size, np.bool_)
    if key != "responses":  # before a response stands its prompt
        starts = offsets[:-1][np.diff(offsets) > 0] - begin
        trained[starts] = False
    return ids, trained


def examples(store: Store, tokenizer: Tokenizer | None) -> list[Example]:
    """Return the first, a middle and the last item of each array of token ids; none without a tokenizer."""
    if tokenizer is None:
        return []
    found: list[Example] = []
    keys = [key for key in token_keys(store.keys) if key != "prompts"]
    for key in keys:
        items = int(store.axes[store.axis(key)].items[-1])
        places = sorted({0, items // 2, items - 1}) if len(keys) == 1 else [0, items - 1]
        found += [_example(store, tokenizer, key, item) for item in dict.fromkeys(places) if 0 <= item < items]
    return found


def _example(store: Store, tokenizer: Tokenizer, key: str, item: int) -> Example:
    offsets = store.offsets(store.axis(key), item, item + 1)
    ids, trained = _tokens_and_masks(store, key, offsets)
    shown, flags = ids[:EXAMPLE_TOKENS], trained[:EXAMPLE_TOKENS]
    edges = [0, *(np.flatnonzero(np.diff(flags.astype(np.int8))) + 1).tolist(), shown.size]
    runs = tuple(
        (bool(flags[begin]), tokenizer.decode(shown[begin:end])) for begin, end in pairwise(edges) if end > begin
    )
    return Example(
        key=key,
        item=item,
        tokens=int(ids.size),
        supervised=int(trained.sum()),
        runs=runs,
        cut=ids.size > shown.size,
    )


def printable(text: str) -> str:
    """Return a text that cannot speak to the terminal: no escape sequences, no bells, no reversed text."""
    return "".join(c if c.isprintable() else "⏎\n" if c == "\n" else "→" if c == "\t" else "\ufffd" for c in text)
