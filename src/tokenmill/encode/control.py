"""What becomes of control strings, such as `<|endoftext|>`, that stand in raw text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tokenmill.encode.files import JsonFile
from tokenmill.encode.tokenizer import Tokenizer, TokenizerIdentity, control_pattern, join, split
from tokenmill.errors import ConfigError, TokenizerError, nearest
from tokenmill.types import AnyArray, BoolArray, Encoded

if TYPE_CHECKING:
    import tokenizers

POLICIES = ("text", "encode", "drop")
"""They are ordinary text, become control ids, or are taken out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlTokenizer:
    """A tokenizer that gives control strings in raw text their ids, or takes them out first."""

    identity: TokenizerIdentity
    engine: str
    special_ids: Mapping[str, int]
    tokenizer: Tokenizer = field(repr=False)
    policy: str

    def decode(self, ids: AnyArray) -> str:
        """Return the text of ids."""
        return self.tokenizer.decode(ids)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text."""
        if self.policy == "encode":
            return self.encode_with_controls(texts)
        return self.tokenizer.encode([self._without(text) for text in texts])

    def encode_with_controls(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text, those of control strings among them."""
        return self.tokenizer.encode_with_controls(texts)

    def _without(self, text: str) -> str:
        pattern = control_pattern(tuple(self.special_ids))
        while pattern.search(text):  # taking one out may join the halves of another
            text = pattern.sub("", text)
        return text


def with_policy(tokenizer: Tokenizer, policy: str) -> Tokenizer:
    """Return a tokenizer that treats control strings in raw text so; `text` is what every tokenizer does itself."""
    if policy not in POLICIES:
        raise ConfigError(
            f"control_strings: must be one of {', '.join(POLICIES)}, got {policy!r}; {nearest(policy, POLICIES)}"
        )
    if policy == "text" or not tokenizer.special_ids:
        return tokenizer
    return ControlTokenizer(
        identity=tokenizer.identity,
        engine=tokenizer.engine,
        special_ids=tokenizer.special_ids,
        tokenizer=tokenizer,
        policy=policy,
    )


# Control strings of a `tokenizer.json` that are also words of its model.


def mark_framing(file: JsonFile, identity: TokenizerIdentity) -> JsonFile:
    """Make BOS and EOS control strings, where a file has them as words like any other."""
    ids = file.vocabulary.ids
    unmarked = {identity.bos_id, identity.eos_id} - {None, *file.vocabulary.special_ids.values()}
    if not unmarked:
        return file
    marked = {name: id_ for name, id_ in ids.items() if id_ in unmarked}
    value = msgspec.json.decode(file.text)
    added = {token["content"]: token for token in value.get("added_tokens") or []}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for name, id_ in marked.items():
        added[name] = {**plain, **added.get(name, {}), "id": id_, "content": name, "special": True}
    value["added_tokens"] = sorted(added.values(), key=lambda token: int(token["id"]))
    vocabulary = replace(file.vocabulary, special_ids={**file.vocabulary.special_ids, **marked})
    return replace(
        file,
        text=msgspec.json.encode(value).decode(),
        vocabulary=vocabulary,
        added_ids={**file.added_ids, **marked},
    )


def control_ids(file: JsonFile, identity: TokenizerIdentity) -> dict[str, int]:
    """Return what raw text must not be able to spell: the control strings, BOS and EOS."""
    controls = dict(file.vocabulary.special_ids)
    # Text that the model has no token for may well become the unknown token, unless that is also BOS or EOS.
    if file.unknown is not None and controls.get(file.unknown) not in {identity.bos_id, identity.eos_id}:
        controls.pop(file.unknown, None)
    return controls


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Keeps control ids out of raw text where they are words of the model: T5's `</s>`, or one that BPE merges.

    An engine is told not to look for control strings, and the model then finds some all the same. A text whose ids
    hold one is encoded again, by the reference, with a model that does not have those words: as SentencePiece has
    it, to which they are no words either. A text whose ids hold none is the same under both models.
    """

    where: str
    is_control: BoolArray
    """Of each id."""
    open_without: Callable[[int], tokenizers.Tokenizer] = field(repr=False)
    """Opens the reference, once, with the words replaced by the placeholder of that number."""

    def applied(self, texts: Sequence[str], encoded: Encoded) -> Encoded:
        """Return ids without control ids, given those that an engine gave."""
        at = np.flatnonzero(self.is_control[encoded.ids])
        if not at.size:
            return encoded
        documents = split(encoded)
        for index in np.unique(np.searchsorted(encoded.offsets, at, side="right") - 1).tolist():
            documents[index] = self._encode(texts[index])
        return join(documents)

    def _encode(self, text: str) -> AnyArray:
        number = next(number for number in count() if placeholder(number) not in text)
        native = self.open_without(number)
        ids = np.array(native.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        spelled = ids[self.is_control[ids]]
        if spelled.size:
            raise TokenizerError(
                f"tokenizer {self.where!r}: raw text must not give control ids, got id {int(spelled[0])} "
                f"({native.id_to_token(int(spelled[0]))!r}) for {text[:40]!r}; name another BOS or EOS with "
                "bos_token=... or eos_token=...: the model gives this one to text that it does not know"
            )
        return ids


def guard_of(
    file: JsonFile, identity: TokenizerIdentity, open_native: Callable[[str], tokenizers.Tokenizer]
) -> Guard | None:
    """Return what keeps control ids out of raw text; None where the model has no control string as a word."""
    controls = control_ids(file, identity)
    words = file.words(controls) - {file.unknown}
    if not words and file.unknown not in controls:
        return None
    is_control = np.zeros(identity.vocab_size, np.bool_)
    is_control[list(controls.values())] = True
    opened: dict[int, tokenizers.Tokenizer] = {}

    def open_without(number: int) -> tokenizers.Tokenizer:
        # What is left of the model must be able to spell the words: BPE leaves out a letter that it lacks.
        lacking = {letter for word in words for letter in word} - (file.model_ids.keys() - words)
        if lacking & words or (lacking and file.unknown is None):
            raise TokenizerError(
                f"tokenizer {file.vocabulary.where!r}: a control string in text must be spelled letter by letter, "
                f"got a model without {min(lacking)!r}; name another BOS or EOS with bos_token=... or eos_token=..."
            )
        if number not in opened:
            opened[number] = open_native(_without_words(file.text, words, number))
        return opened[number]

    return Guard(where=file.vocabulary.where, is_control=is_control, open_without=open_without)


def placeholder(number: int, word: int | str = "") -> str:
    """Return what stands in a model in place of words, and in no text that is encoded with it."""
    return f"\U0010ffff{number}.{word}"


def _without_words(text: str, words: set[str], number: int) -> str:
    """Return a `tokenizer.json` in which words of the model are something that the text to encode does not hold.

    Every id stays what it is, and every other word keeps its score, or its place among the merges.
    """
    value = msgspec.json.decode(text)
    names = {word: placeholder(number, index) for index, word in enumerate(sorted(words))}
    model: dict[str, Any] = value["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(word, word): id_ for word, id_ in model["vocab"].items()}
    if model.get("merges"):
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    for token in value.get("added_tokens") or []:
        token["content"] = names.get(token["content"], token["content"])
    return msgspec.json.encode({**value, "post_processor": None}).decode()
