"""What is in a store: its facts, how long its documents are, how much of them is trained on, and examples."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokenmill.documents.units import RULES
from tokenmill.encode import NOTES, WAYS_OUT
from tokenmill.encode.chat.template import ChatTemplate, load_template
from tokenmill.encode.files import spec_of_copy
from tokenmill.encode.hub import local_spec
from tokenmill.encode.tokenizer import (
    TOKENS_AROUND,
    Tokenizer,
    TokenTexts,
    text_between,
    token_texts,
    whole_edge,
)
from tokenmill.errors import TokenizerError, TokenmillError
from tokenmill.fingerprint import digest
from tokenmill.run.turns import Turns, find_turns
from tokenmill.store import ForeignOptions, Origin, Store, open_store
from tokenmill.store.layout import TOKENIZER_FOLDER, is_ours, stores_below, token_keys
from tokenmill.tables import as_json
from tokenmill.types import STORED_ARRAYS, AnyArray, BoolArray, Float64Array, Int64Array, Span

MAX_ITEMS = 1 << 20
"""More items than this are not all audited, but evenly spread blocks of them."""
MAX_EXAMINED = 1 << 16
"""Items in which examples are looked for."""
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
    with_bos: int | None
    """Items that start with BOS; None of responses, and where there is no BOS or no token was read."""
    turns: int
    """Runs of trained tokens: answers, or whole texts where nothing is masked."""
    unended_turns: int | None
    """Those that do not end with EOS or another control token, so that nothing teaches to end there; None of
    prompts, and where no such token is known."""
    truncated: int | None
    """Items that were cut when they were prepared; None where a store does not say."""
    supervised_percent: float
    """Of the tokens."""
    fully_masked_percent: float | None
    """Of the audited items, as the next."""
    without_eos_percent: float | None
    unended_turns_percent: float | None
    """Of the turns."""
    truncated_percent: float | None
    """Of all items."""


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
    """What to do about it, where that is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What was done to some records that are stored."""

    name: str
    records: int
    meaning: str
    document: int | None
    """The first of them; None: it was stored before this was kept, or is in another store of the build."""


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
    """The string; None where there is none, or the tokenizer is not available."""
    eos: str | None
    recipe: Mapping[str, Any]
    skipped: Mapping[str, Any]
    reasons: tuple[SkippedRecords, ...]
    """What was left out, by reason."""
    notes: tuple[Note, ...]
    """What was counted of records that are stored."""
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
            name = store.remotes[0].address.name
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
            Note(name=name, records=count, meaning=NOTES.get(name, ""), document=_noted(store).get(name))
            for name, count in manifest.skipped.get("notes", {}).items()
        ),
        inputs=tuple(dict(item) for item in manifest.inputs),
        longest={key: longest for key, (longest, _) in lengths.items()},
        lengths={key: bins for key, (_, bins) in lengths.items()},
        audit=audit(store, end_tokens(store, tokenizer), max_items=max_items or MAX_ITEMS),
    )


def _noted(store: Store) -> Mapping[str, int]:
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
            way_out=WAYS_OUT.get(reason, "mend the record or its file" if reason in RULES else ""),
        )
        for reason, count in counts
    )


def _string_of(id_: int | None, tokenizer: Tokenizer | None) -> str | None:
    return None if id_ is None or tokenizer is None else tokenizer.decode(np.array([id_]))


def _lengths(store: Store, key: str, max_items: int | None) -> tuple[int, dict[str, int]]:
    """Return the length of the longest item of an array of token ids, and how many items lie in each bin."""
    axis, items = store.axis(key), _num_items(store, key)
    histogram = np.zeros(64, np.int64)
    longest = 0
    blocks = ((begin, min(begin + _LENGTHS_BLOCK, items)) for begin in range(0, items, _LENGTHS_BLOCK))
    for begin, end in blocks if max_items is None else _audit_blocks(items, max_items):
        lengths = np.diff(store.offsets(axis, begin, end))
        histogram += np.bincount(bins_of(lengths), minlength=64)
        longest = max(longest, int(lengths.max()))
    return longest, named_bins(histogram)


def _num_items(store: Store, key: str) -> int:
    """Return how many documents, answers or responses an array has."""
    return int(store.axes[store.axis(key)].items[-1])


def _mask_key(key: str) -> str | None:
    """Return the array that says which tokens of another are trained on; None if there is none."""
    return STORED_ARRAYS[key].mask if key in STORED_ARRAYS else None


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
    """Return where the tokenizer of a store may be: the copy beside it, and where it was then."""
    copied = spec_of_copy(Path(store.path) / TOKENIZER_FOLDER)
    named = str(store.manifest.recipe.get("tokenizer", "bytes"))
    try:
        specs = [local_spec(named, download=False)]  # a manifest may come from anybody, so it causes no download
    except TokenizerError:
        specs = []
    return [*([copied] if copied else []), *specs]


def template_of(store: Store) -> ChatTemplate | None:
    """Return the chat template that a store was made with; None if it has none, or it is no longer available."""
    known = store.manifest.recipe.get("recipe", {}).get("chat_template")
    if not isinstance(known, dict):
        return None
    for tokenizer in _tokenizer_specs(store):
        for spec in ("chatml", "tokenizer"):
            try:
                template = load_template(spec, tokenizer=tokenizer)
            except (TokenmillError, OSError):
                continue
            if digest(template.source) == known.get("content"):
                return template
    return None


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
    for files in store.remotes:
        files.bring_folder(TOKENIZER_FOLDER)
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
    if "tokenizer" not in store.opened:
        store.opened["tokenizer"] = tokenizer_of(store)
    tokenizer: Tokenizer | None = store.opened["tokenizer"]
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


def has_chat_template(recipe: Mapping[str, Any]) -> bool:
    """Whether records were, or could be, written by a chat template, which places BOS and EOS itself."""
    return isinstance(recipe.get("recipe", {}).get("chat_template"), dict)


# How much is trained on


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
    items = _num_items(store, key)
    prompts = key == "prompts"
    bos_id = store.manifest.tokenizer.get("bos_id") if key != "responses" else None
    audited = tokens = supervised = fully_masked = without_eos = with_bos = num_turns = unended = 0
    for begin, end in _audit_blocks(items, max_items):
        offsets = store.offsets(store.axis(key), begin, end)
        trained = _trained(store, key, offsets)
        lengths = np.diff(offsets)
        counts = _count_trained(offsets, trained)
        audited += end - begin
        tokens += int(lengths.sum())
        supervised += int(counts.sum())
        fully_masked += int((counts == 0).sum())
        starts, stops = _turns(offsets, trained)
        num_turns += starts.size
        ids = store.fetch(int(offsets[0]), int(offsets[-1]), key) if ends.size else np.empty(0, np.uint8)
        if ends.size and bos_id is not None:
            with_bos += int((ids[offsets[:-1][lengths > 0] - offsets[0]] == bos_id).sum())
        if ends.size and not prompts:
            last = ids[_last_trained(offsets, trained, counts)]
            without_eos += int((lengths == 0).sum()) + int((~np.isin(last, ends)).sum())
            unended += int((~_ended(ids, starts, stops, ends)).sum())
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
    mask_key = _mask_key(key)
    if mask_key not in store.keys:
        trained = np.ones(end - begin, np.bool_)
    else:
        trained = store.fetch(begin, end, mask_key).astype(np.bool_)
    if key != "responses":  # before a response stands its prompt
        trained[offsets[:-1][np.diff(offsets) > 0] - begin] = False
    return trained


def _count_trained(offsets: Int64Array, trained: BoolArray) -> Int64Array:
    """Return how many labels each item has."""
    counts: Int64Array = np.diff(np.concatenate([[0], np.cumsum(trained)])[offsets - offsets[0]])
    return counts


def _turns(offsets: Int64Array, trained: BoolArray) -> tuple[Int64Array, Int64Array]:
    """Return where runs of trained tokens begin and end, counted from the first token; none goes over two items."""
    first = np.zeros(trained.size + 1, np.bool_)
    first[offsets - offsets[0]] = True
    before = np.concatenate([[False], trained[:-1]])
    behind = np.concatenate([trained[1:], [False]])
    return np.flatnonzero(trained & (~before | first[:-1])), np.flatnonzero(trained & (~behind | first[1:])) + 1


def _ended(ids: AnyArray, starts: Int64Array, stops: Int64Array, ends: Int64Array) -> BoolArray:
    """Return which runs have an end token among their last three: a template may put a line end behind it."""
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


# Tokens as text


class Piece(NamedTuple):
    """Tokens of an example that stand together."""

    trained: bool
    text: str
    control: bool = False
    """Whether it is a control token; a text that spells one is none."""
    left_out: int = 0
    """Tokens before it that are not shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One item as text, in pieces that are trained on or not; a long one around what is trained on."""

    key: str
    item: int
    why: tuple[str, ...]
    """What it is an example of."""
    tokens: int
    supervised: int
    runs: tuple[Piece, ...]
    left_out: int
    """Tokens behind the last piece that are not shown."""

    @property
    def title(self) -> str:
        """Which item it is, and how much of it is trained on."""
        counts = f"{self.tokens:,} tokens, {self.supervised:,} trained"
        return f"{self.key} {self.item:,} ({', '.join(self.why)}): {counts}"


_SEARCHED = 64
"""Items, drawn by a seed, in which tools and reasoning are looked for."""
_KINDS: Mapping[str, re.Pattern[str]] = {
    "tools": re.compile(r"tool_call|TOOL_CALLS|python_tag|tool▁call|to=functions|<function"),
    "reasoning": re.compile(
        r"<think(?!(?:ing)?>\s*</think)|\[THINK\]|START_THINKING|channel\|?>\s*(?:thought|analysis)|seed:think"
    ),
}
"""What templates write around tool calls and reasoning; thoughts without a word, as Qwen 3 has them, are none."""


def examples(store: Store, tokenizer: Tokenizer | None, *, seed: int = 0) -> list[Example]:
    """Return items that show every kind of thing, and some drawn by a seed; none without a tokenizer.

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
    items, mask_key = _num_items(store, key), _mask_key(key)
    chosen: dict[int, list[str]] = {}
    for note, document in _noted(store).items():
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

    for begin, end in _audit_blocks(_num_items(store, key), MAX_EXAMINED):
        offsets = store.offsets(store.axis(key), begin, end)
        trained, lengths = _trained(store, key, offsets), np.diff(offsets)
        ids = store.fetch(int(offsets[0]), int(offsets[-1]), key)
        counts = _count_trained(offsets, trained)
        share = counts / np.maximum(1, lengths)
        starts, stops = _turns(offsets, trained)
        owners = np.searchsorted(offsets - offsets[0], starts, side="right") - 1
        alone = np.array(
            [bool(np.isin(ids[a:b], ends).all()) for a, b in zip(starts, stops, strict=True)], np.bool_
        )
        offer("longest", lengths, begin, lengths > 0)
        offer("most trained", share, begin, counts > 0)
        offer("least trained", -share, begin, counts > 0)
        offer("nothing trained", lengths, begin, counts == 0)
        if ends.size:
            unended = np.bincount(owners, ~_ended(ids, starts, stops, ends), minlength=lengths.size)
            offer("turns without a trained end", unended, begin, unended > 0)
            empty = np.bincount(owners, alone, minlength=lengths.size)
            offer("empty answers", empty, begin, empty > 0)
    return {why: -item for why, (_, item) in best.items()}


def _text(store: Store, tokenizer: Tokenizer, key: str, item: int) -> str:
    begin, end = store.offsets(store.axis(key), item, item + 1).tolist()
    return tokenizer.decode(store.fetch(begin, min(end, begin + (1 << 14)), key))


def _example(store: Store, tokenizer: Tokenizer, key: str, item: int, why: tuple[str, ...]) -> Example:
    offsets = store.offsets(store.axis(key), item, item + 1)
    ids, trained = store.fetch(int(offsets[0]), int(offsets[1]), key), _trained(store, key, offsets)
    control = np.isin(ids, list(tokenizer.special_ids.values()))
    shown = _shown_tokens(trained, *_turns(offsets, trained))
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
    """Return which tokens of an item to show: all of a short one, of a long one those around what is trained on."""
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
    """Whether each only continues the character of the one before it; None without the tokenizer."""
    control: tuple[bool, ...] | None
    """Whether each is a control token, which looks like a text that spells it; None without the tokenizer."""
    mask: tuple[int, ...] | None
    """The mask of each token as it is stored; None where the store has none."""
    trained: tuple[bool, ...]
    """Whether each is a label: the first token of a document never is."""
    length: int
    """How many tokens it has, also where not all of them are shown."""
    turns: Turns | None
    """Who says what, of the tokens that are shown; None where no chat template is known."""


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


def inspect_document(
    store: Store,
    document: int,
    tokenizer: Tokenizer | None = None,
    *,
    first: int = 0,
    count: int | None = None,
    template: ChatTemplate | None = None,
) -> DocumentContents:
    """Look at one document: where it came from, its tokens and its masks, and who says what in a chat.

    Of each of its arrays the tokens from the `first` on, `count` at most; None for all. `template` is the one that
    a chat was made with, see `template_of`.
    """
    origin = store.origin(document)
    parts: list[DocumentPart] = []
    for key in token_keys(store.keys):
        axis, item, end = store.axis(key), document, document + 1
        if axis == "responses":
            item, end = store.offsets("groups", document, document + 1).tolist()
        parts += [
            _part(store, key, store.offsets(axis, each, each + 1), tokenizer, (first, count), template)
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
    shown: tuple[int, int | None],
    template: ChatTemplate | None,
) -> DocumentPart:
    whole = int(offsets[1] - offsets[0])
    first, last = min(shown[0], whole), whole if shown[1] is None else min(shown[0] + shown[1], whole)
    begin, end = int(offsets[0]) + first, int(offsets[0]) + max(first, last)
    ids = store.fetch(begin, end, key)
    mask_key = _mask_key(key)
    mask = store.fetch(begin, end, mask_key).tolist() if mask_key in store.keys else None
    trained = _trained(store, key, np.array([begin, end]))
    if first and trained.size:  # the first token of what is shown is not the first of the document
        trained[0] = key != "prompts" and (mask is None or bool(mask[0]))
    texts = (
        _texts_between(store, tokenizer, key, (int(offsets[0]), begin, end, int(offsets[1]))) if tokenizer else None
    )
    frame = [_string_of(store.manifest.tokenizer.get(name), tokenizer) for name in ("bos_id", "eos_id")]
    return DocumentPart(
        key=key,
        ids=tuple(ids.tolist()),
        strings=None if texts is None else texts.texts,
        continues=None if texts is None else texts.continues,
        control=tuple(np.isin(ids, list(tokenizer.special_ids.values())).tolist()) if tokenizer else None,
        mask=None if mask is None else tuple(mask),
        trained=tuple(trained.tolist()),
        length=whole,
        turns=find_turns(template, texts.texts, frame) if template and texts and texts.texts else None,
    )


def _texts_between(store: Store, tokenizer: Tokenizer, key: str, places: tuple[int, int, int, int]) -> TokenTexts:
    """Return the texts of tokens of a document; `places` are its begin, theirs, their end, and its end."""
    first, begin, end, last = places
    first, last = max(first, begin - TOKENS_AROUND), min(last, end + TOKENS_AROUND)
    spelled = token_texts(tokenizer, store.fetch(first, last, key))
    shown = slice(begin - first, end - first)
    return TokenTexts(texts=spelled.texts[shown], continues=spelled.continues[shown])
