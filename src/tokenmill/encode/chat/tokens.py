"""Ids and masks of conversations, with special tokens only where the template wrote them."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tokenmill.encode import Refusal
from tokenmill.encode.chat.conversation import NO_OPTIONS, Conversation
from tokenmill.encode.chat.limits import limited
from tokenmill.encode.chat.render import Rendered, render
from tokenmill.encode.chat.sample import sample_of
from tokenmill.encode.chat.template import ChatTemplate, StripRule
from tokenmill.encode.chat.turns import MARKUP
from tokenmill.encode.tokenizer import Tokenizer, control_pattern, join, num_shared, split
from tokenmill.errors import ConfigError, nearest
from tokenmill.types import BoolArray, Encoded, Int64Array, Refused, Uint8Array, Uint32Array

# Control strings in a rendered text, and the white space around them that goes with them.

BLANKS = frozenset("\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | set(
    map(chr, range(0x2000, 0x200B))
)
"""White space to Hugging Face tokenizers; Python takes four control characters for it as well."""


_MAX_KNOWN = 4096
"""Texts of a template whose control strings are kept."""


class Control(NamedTuple):
    """A special token in a text, with the white space that it removes."""

    begin: int
    end: int
    at: int
    """First character of the string itself."""
    stop: int
    """One after its last."""
    id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Controls:
    """Finds the special tokens of a tokenizer."""

    ids: Mapping[str, int]
    rules: Mapping[str, StripRule]
    where: str
    """What the user called the template, for messages."""
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _known: dict[str, list[tuple[int, int, str]]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """Special tokens in texts of the template. The same texts occur in most conversations."""

    def __post_init__(self) -> None:
        odd = [name for name, rule in self.rules.items() if rule.unlike]
        object.__setattr__(self, "pattern", control_pattern(tuple(sorted({*self.ids, *odd} - {""}))))

    def find(self, text: str, ranges: Iterable[tuple[int, int]]) -> list[Control]:
        """Return the special tokens within the ranges; white space around them may be outside."""
        controls: list[Control] = []
        done = 0
        for first, last in ranges:
            for begin, end, name in self._within(text[first:last]):
                at, stop = first + begin, first + end
                around = (at, stop)
                if name in self.rules:
                    around = self._with_blanks(text, done, at, stop, self.rules[name])
                controls.append(Control(*around, at, stop, self.ids[name]))
                done = around[1]
        return controls

    def _within(self, text: str) -> list[tuple[int, int, str]]:
        if text not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[text] = [(*match.span(), match.group()) for match in self.pattern.finditer(text)]
        return self._known[text]

    def _with_blanks(self, text: str, done: int, begin: int, end: int, rule: StripRule) -> tuple[int, int]:
        if rule.unlike:
            raise ConfigError(
                f"chat template {self.where}: what it writes must have the ids that transformers gives, got "
                f"{text[begin:end]!r}, which by the tokenizer's files {rule.unlike}; "
                "change that in a copy of the files, and use the copy wherever the model is used"
            )
        while rule.lstrip and begin > done and text[begin - 1] in BLANKS:
            begin -= 1
        while rule.rstrip and end < len(text) and text[end] in BLANKS:
            end += 1
        return begin, end


# A rendered text cut at its control strings, and encoded.


@dataclass(kw_only=True, slots=True)
class Segment:
    """A special token, or the ordinary text between two of them."""

    text: str
    edges: Sequence[int]
    """Characters within an ordinary text at which a trained range begins or ends."""
    trained: bool
    """Whether its first character is trained; this changes at every edge."""
    parts: list[Uint32Array] = field(default_factory=list)
    """Ids; those of a text are split at its edges."""


def segments_of(rendered: Rendered, controls: Controls) -> list[Segment]:
    """Split a text at the special tokens that the template wrote; those of the record are ordinary text."""
    text = rendered.text
    bounds = [edge for both in rendered.supervised for edge in both]
    segments: list[Segment] = []

    def add_text(begin: int, end: int) -> None:
        if begin < end:
            first = bisect_right(bounds, begin)
            edges = [edge - begin for edge in bounds[first : bisect_left(bounds, end)]]
            segments.append(Segment(text=text[begin:end], edges=edges, trained=first % 2 == 1))

    done = 0
    for control in controls.find(text, rendered.authored):
        add_text(done, control.begin)
        before, shown = bisect_right(bounds, control.at), text[control.at : control.stop]
        if before < len(bounds) and bounds[before] < control.stop:
            raise Refusal("straddles", f"what is trained on begins or ends inside {shown!r}")
        segments.append(Segment(text=shown, edges=(), trained=before % 2 == 1, parts=[_alone(control.id)]))
        done = control.end
    add_text(done, len(text))
    return segments


@lru_cache(maxsize=4096)
def _alone(control: int) -> Uint32Array:
    ids = np.array([control], np.uint32)
    ids.setflags(write=False)
    return ids


def encode_all(
    rendered: Sequence[Rendered], tokenizer: Tokenizer, controls: Controls
) -> list[tuple[Uint32Array, Uint8Array] | Refusal]:
    """Encode several conversations in one call of the tokenizer, and again where a token straddles an edge."""
    cut: list[list[Segment] | Refusal] = []
    for each in rendered:
        try:
            cut.append(segments_of(each, controls))
        except Refusal as error:
            cut.append(error)
    texts = [segment for segments in cut if isinstance(segments, list) for segment in segments if not segment.parts]
    _encode_whole(texts, tokenizer)
    _encode_parts([segment for segment in texts if not segment.parts], tokenizer)
    return [segments if isinstance(segments, Refusal) else _joined(segments) for segments in cut]


def _joined(segments: list[Segment]) -> tuple[Uint32Array, Uint8Array] | Refusal:
    ids: list[Uint32Array] = [np.empty(0, np.uint32)]
    trained: list[bool] = [False]
    for segment in segments:
        if not segment.parts:
            shown = segment.text[max(0, segment.edges[0] - 8) : segment.edges[0] + 8]
            return Refusal("straddles", f"a token lies across an edge of what is trained on, in {shown!r}")
        ids += segment.parts
        trained += [(at % 2 == 0) == segment.trained for at in range(len(segment.parts))]
    return np.concatenate(ids), np.repeat(np.array(trained, np.uint8), [part.size for part in ids])


def _encode_whole(segments: list[Segment], tokenizer: Tokenizer) -> None:
    """Encode whole texts, and the text before each edge; texts with a token across an edge are left out."""
    texts = [segment.text[:end] for segment in segments for end in (*segment.edges, len(segment.text))]
    ids = _encode(texts, tokenizer)
    at = 0
    for segment in segments:
        *before, whole = ids[at : at + len(segment.edges) + 1]
        at += len(before) + 1
        if all(np.array_equal(part, whole[: part.size]) for part in before):
            ends = [0, *(part.size for part in before), whole.size]
            segment.parts = [whole[begin:end] for begin, end in pairwise(ends)]


_LINE_END = "\n"


def _encode_parts(segments: list[Segment], tokenizer: Tokenizer) -> None:
    """Encode both sides of an edge separately where a token would straddle it.

    A tokenizer that puts a mark before every text would add a blank there. Its words begin with the blank before
    them. If only that blank is on the other side of the edge, the word is on this side, as in transformers. In all
    other cases the text after an edge is encoded after a line end, where no mark is added. Texts that would change
    are left out.
    """
    opening = _encode([_LINE_END], tokenizer)[0] if segments else None
    for segment in segments:
        edges = (0, *segment.edges, len(segment.text))
        texts = [segment.text[begin:end] for begin, end in pairwise(edges)]
        whole, *more = _encode([segment.text, *texts, *(segment.text[:end] for end in segment.edges)], tokenizer)
        sides, before = more[: len(texts)], more[len(texts) :]
        if tokenizer.decode(np.concatenate(sides)) == tokenizer.decode(whole):
            segment.parts = sides
            continue
        same = [num_shared(part, whole) for part in before]
        blank = [not tokenizer.decode(part[size:]).strip() for part, size in zip(before, same, strict=True)]
        if all(blank) and same == sorted(same):
            segment.parts = [whole[begin:end] for begin, end in pairwise((0, *same, whole.size))]
            continue
        behind = _encode([_LINE_END + text for text in texts[1:]], tokenizer)
        assert opening is not None
        if all(np.array_equal(ids[: opening.size], opening) for ids in behind):
            sides = [sides[0], *(ids[opening.size :] for ids in behind)]
            if tokenizer.decode(np.concatenate(sides)) == tokenizer.decode(whole):
                segment.parts = sides


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[Uint32Array]:
    if not texts:
        return []
    encoded = tokenizer.encode(texts)
    return split(replace(encoded, ids=encoded.ids.astype(np.uint32, copy=False)))


# Conversations to ids and masks.

_TAKEN = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatEncoded:
    """Encoded conversations, and the rejected ones."""

    encoded: Encoded
    """Ids as uint32."""
    masks: Uint8Array
    """One per token: 1 if it is trained."""
    kept: Int64Array
    """Indices of the encoded conversations, in order."""
    refused: Sequence[Refused]
    notes: Sequence[tuple[str, ...]]
    """Notes of each encoded conversation, as in `Rendered.notes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatEncoder:
    """Encodes conversations with one template and one tokenizer."""

    template: ChatTemplate
    tokenizer: Tokenizer
    train_on: tuple[str, ...] = ("assistant",)
    """Roles whose messages are trained."""
    last_only: bool = False
    """Whether only the last of these messages is trained."""
    kwargs: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)
    """Names that the template reads, such as `enable_thinking`; `now` is the date for templates that write it."""
    add_bos: bool | None = None
    """Whether BOS is put before a conversation whose template writes none. None: only with the built-in template,
    if texts start with BOS; other templates write it themselves, as in transformers."""
    _controls: Controls = field(init=False, repr=False, compare=False)
    _examples: list[Rendered | None] = field(init=False, repr=False, compare=False, default_factory=list)
    """Render of a plain question and answer, cached."""

    def __post_init__(self) -> None:
        template = self.template
        controls = Controls(ids=self.tokenizer.special_ids, rules=template.strip_rules, where=template.where)
        object.__setattr__(self, "_controls", controls)
        identity = self.tokenizer.identity
        if identity.kind == "tokenizer.json" and self.template.tokenizer != identity.content:
            raise ConfigError(
                f"chat template {self.template.where}: must be loaded for the tokenizer that encodes, whose files "
                "say what its control strings do with white space, got one for "
                f"{self.template.tokenizer or 'none'}, not for {identity.content}; "
                "name it: load_template(..., tokenizer=<its path>)"
            )
        if isinstance(self.train_on, str) or not self.train_on or not all(self.train_on):
            raise ConfigError(
                f"chat: train_on must name roles, got {self.train_on!r}; write train_on=('assistant',)"
            )
        taken = next((name for name in self.kwargs if name in (*_TAKEN, *self.template.special_tokens)), None)
        if taken is not None:
            raise ConfigError(
                f"chat: an option must not replace what the template is given, got {taken!r}; leave it out"
            )
        unknown = next((name for name in self.kwargs if name not in self._names), None)
        if unknown is not None:
            raise ConfigError(
                f"chat template {self.template.where}: an option must be one that it reads, got {unknown!r}; "
                f"{nearest(unknown, sorted(self._names))}"
            )

    @property
    def _names(self) -> set[str]:
        """Names that options may set: those that the template reads, and `now`."""
        names = self.template.compiled.names
        return {*(names - {*_TAKEN, *self.template.special_tokens}), "now"}

    def _options_of(self, conversation: Conversation) -> Mapping[str, Any]:
        """Return the options of a conversation; one that the template does not read is rejected."""
        unknown = next((name for name in conversation.options if name not in self._names), None)
        if unknown is not None:
            raise Refusal("options", f"{unknown!r}; {nearest(str(unknown), sorted(self._names))}")
        return {**self.kwargs, **conversation.options}

    @property
    def spelled(self) -> tuple[str, ...]:
        """End-of-turn strings of the template that are not special tokens of the tokenizer.

        The text of a record can spell them too, and so seem to end a turn. Empty if there are none, and if the
        template rejects a plain question and answer.
        """
        shown = self._shown()
        if shown is None:
            return ()
        end = shown.supervised[-1][1]
        tails = [shown.text[first:end] for first, last in shown.authored if first < end <= last]
        ends = dict.fromkeys(name for tail in tails for name in MARKUP.findall(tail))
        return tuple(name for name in ends if name not in self.tokenizer.special_ids)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why a model may not learn to end its turns, or why a message could end a turn."""
        spelled, shown = self.spelled, self._shown()
        warnings: list[str] = []
        if spelled:
            warnings.append(
                f"the chat template ends turns with {', '.join(map(repr, spelled))}, which the tokenizer has no "
                "special token for: it is spelled in ordinary tokens, and a message may spell it too; "
                "use a template that fits the tokenizer, or add the token to it"
            )
        if shown is not None and shown.text[: shown.supervised[-1][1]].endswith("a"):
            warnings.append(
                f"chat template {self.template.where}: no end-of-turn token is trained, so a model does not learn "
                "to stop; use a variant of the template with {% generation %} blocks that hold the end of a turn"
            )
        return tuple(warnings)

    @property
    def lacks_bos(self) -> bool:
        """Whether texts start with BOS and conversations do not, because the template writes none."""
        shown = self._shown() if self.tokenizer.identity.add_bos and not self._adds_bos else None
        if shown is None:
            return False
        controls = self._controls.find(shown.text, shown.authored)
        return not controls or controls[0].begin > 0 or controls[0].id != self.tokenizer.identity.bos_id

    @property
    def adds_own_bos(self) -> bool:
        """Whether conversations start with BOS although texts do not."""
        return self._adds_bos and not self.tokenizer.identity.add_bos

    @property
    def _adds_bos(self) -> bool:
        identity = self.tokenizer.identity
        if self.add_bos is None:
            return identity.add_bos and self.template.built_in
        return self.add_bos and identity.bos_id is not None

    def _shown(self) -> Rendered | None:
        """Return the render of a plain question and answer; None if the template rejects it."""
        if not self._examples:
            self._examples.append(sample_of(self.template, self.kwargs))
        return self._examples[0]

    def encode(self, conversations: Sequence[Conversation], places: Sequence[str] = ()) -> ChatEncoded:
        """Render and encode conversations; those that cannot be verified are rejected.

        A template that asks for today's date and was given none raises `ConfigError`. In a worker, so does a
        template that takes too much time or memory; the error names the record by its entry in `places`.
        """
        rendered: dict[int, Rendered] = {}
        refused: dict[int, Refusal] = {}
        for index, conversation in enumerate(conversations):
            place = places[index] if places else f"{index + 1} of {len(conversations)}"
            try:
                with limited(self.template.where, place):
                    rendered[index] = render(
                        self.template,
                        conversation.messages,
                        tools=conversation.tools,
                        kwargs=self._options_of(conversation),
                        train_on=self.train_on,
                        last_only=self.last_only,
                    )
            except Refusal as error:
                refused[index] = error
        ids: list[Uint32Array] = []
        masks: list[Uint8Array] = [np.empty(0, np.uint8)]
        results = encode_all(list(rendered.values()), self.tokenizer, self._controls)
        for index, result in zip(rendered, results, strict=True):
            try:
                if isinstance(result, Refusal):
                    raise result
                own, mask = self._with_one_bos(*result)
                if not mask.any():
                    raise Refusal("no_supervision", "no token is left of what is trained on, only white space")
            except Refusal as error:
                refused[index] = error
                continue
            ids.append(own)
            masks.append(mask)
        kept = [index for index in rendered if index not in refused]
        return ChatEncoded(
            encoded=join(ids),
            masks=np.concatenate(masks),
            kept=np.array(kept, np.int64),
            refused=[
                Refused(index=index, reason=error.reason, detail=error.detail)
                for index, error in sorted(refused.items())
            ],
            notes=[rendered[index].notes for index in kept],
        )

    def _with_one_bos(self, ids: Uint32Array, mask: Uint8Array) -> tuple[Uint32Array, Uint8Array]:
        """Return a conversation with at most one BOS at its start, and with one if it is to be added.

        Of several BOS that the template writes at the start, one is kept. Text of the record never has this id.
        """
        identity = self.tokenizer.identity
        if identity.bos_id is None:
            return ids, mask
        is_bos = ids == identity.bos_id
        at_start = int(np.argmin(is_bos)) if not is_bos.all() else ids.size
        if at_start > 1:
            ids, mask = ids[at_start - 1 :], mask[at_start - 1 :]
        elif at_start == 0 and self._adds_bos:
            ids = np.concatenate([np.array([identity.bos_id], np.uint32), ids])
            mask = np.concatenate([np.zeros(1, np.uint8), mask])
        is_bos = ids == identity.bos_id
        if np.any(is_bos[1:] & is_bos[:-1]):
            raise Refusal("bos", "the template writes BOS twice in a row")
        if is_bos[:1].any():
            self._refuse_late_bos(ids, is_bos)
        return ids, mask

    def _refuse_late_bos(self, ids: Uint32Array, is_bos: BoolArray) -> None:
        """Reject a BOS that the template wrote after white space, when another one was added before it."""
        others = np.flatnonzero(is_bos[1:])
        if others.size and not self.tokenizer.decode(ids[1 : 1 + int(others[0])]).strip():
            raise Refusal("bos", "the template writes white space before BOS, so that there would be two")
