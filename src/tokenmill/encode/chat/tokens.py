"""The ids and the mask of rendered conversations: control ids only where the template wrote them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from tokenmill.encode.chat.render import NO_OPTIONS, Rendered, render
from tokenmill.encode.chat.template import ChatTemplate, Controls, Ids
from tokenmill.encode.refusal import Refusal
from tokenmill.encode.tokenizer import Tokenizer, join
from tokenmill.errors import ConfigError
from tokenmill.types import BoolArray, Encoded, Int64Array, Refused, Uint8Array

Mask: TypeAlias = "Uint8Array"


@dataclass(kw_only=True, slots=True)
class Piece:
    """A control string, or the ordinary text between two of them."""

    text: str
    edges: Sequence[int]
    """Characters inside an ordinary text where what is trained on begins or ends."""
    trained: bool
    """Whether its first character is trained on; it changes at every edge."""
    parts: list[Ids] = field(default_factory=list)
    """The ids, of a text in as many parts as its edges make."""


def pieces_of(rendered: Rendered, controls: Controls) -> list[Piece]:
    """Cut a text at the control strings that the template wrote; those of the record are ordinary text."""
    text = rendered.text
    bounds = [edge for both in rendered.supervised for edge in both]
    pieces: list[Piece] = []

    def add_text(begin: int, end: int) -> None:
        if begin < end:
            edges = [edge - begin for edge in bounds[bisect_right(bounds, begin) : bisect_left(bounds, end)]]
            pieces.append(Piece(text=text[begin:end], edges=edges, trained=bisect_right(bounds, begin) % 2 == 1))

    done = 0
    for control in controls.find(text, rendered.authored):
        add_text(done, control.begin)
        before, shown = bisect_right(bounds, control.at), text[control.at : control.stop]
        if before < len(bounds) and bounds[before] < control.stop:
            raise Refusal("straddles", f"what is trained on begins or ends inside {shown!r}")
        pieces.append(Piece(text=shown, edges=(), trained=before % 2 == 1, parts=[control.ids]))
        done = control.end
    add_text(done, len(text))
    return pieces


def encode_all(
    rendered: Sequence[Rendered], tokenizer: Tokenizer, controls: Controls
) -> list[tuple[Ids, Mask] | Refusal]:
    """Encode several conversations in one call of the tokenizer, and once more where a token straddles an edge."""
    cut: list[list[Piece] | Refusal] = []
    for one in rendered:
        try:
            cut.append(pieces_of(one, controls))
        except Refusal as error:
            cut.append(error)
    texts = [piece for pieces in cut if isinstance(pieces, list) for piece in pieces if not piece.parts]
    _encode_whole(texts, tokenizer)
    _encode_parts([piece for piece in texts if not piece.parts], tokenizer)
    return [pieces if isinstance(pieces, Refusal) else _joined(pieces) for pieces in cut]


def _joined(pieces: list[Piece]) -> tuple[Ids, Mask] | Refusal:
    ids: list[Ids] = [np.empty(0, np.uint32)]
    trained: list[bool] = [False]
    for piece in pieces:
        if not piece.parts:
            shown = piece.text[max(0, piece.edges[0] - 8) : piece.edges[0] + 8]
            return Refusal("straddles", f"a token lies across an edge of what is trained on, in {shown!r}")
        ids += piece.parts
        trained += [(at % 2 == 0) == piece.trained for at in range(len(piece.parts))]
    return np.concatenate(ids), np.repeat(np.array(trained, np.uint8), [part.size for part in ids])


def _encode_whole(pieces: list[Piece], tokenizer: Tokenizer) -> None:
    """Encode texts as a whole, and what stands before each edge; those where a token straddles are left out."""
    texts = [piece.text[:end] for piece in pieces for end in (*piece.edges, len(piece.text))]
    ids = _encode(texts, tokenizer)
    at = 0
    for piece in pieces:
        *before, whole = ids[at : at + len(piece.edges) + 1]
        at += len(before) + 1
        if all(np.array_equal(part, whole[: part.size]) for part in before):
            ends = [0, *(part.size for part in before), whole.size]
            piece.parts = [whole[begin:end] for begin, end in pairwise(ends)]


def _encode_parts(pieces: list[Piece], tokenizer: Tokenizer) -> None:
    """Encode both sides of an edge on their own where a token would straddle it, as the model meets them.

    A tokenizer that puts a mark before every text would add a blank there; such texts are left out.
    """
    texts = [
        text
        for piece in pieces
        for text in (
            piece.text,
            *(piece.text[begin:end] for begin, end in pairwise((0, *piece.edges, len(piece.text)))),
        )
    ]
    ids = _encode(texts, tokenizer)
    at = 0
    for piece in pieces:
        whole, *sides = ids[at : at + len(piece.edges) + 2]
        at += len(sides) + 1
        if tokenizer.decode(np.concatenate(sides)) == tokenizer.decode(whole):
            piece.parts = sides


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[Ids]:
    if not texts:
        return []
    encoded = tokenizer.encode(texts)
    ids = encoded.ids.astype(np.uint32, copy=False)
    return [ids[begin:end] for begin, end in pairwise(encoded.offsets.tolist())]


# Conversations to ids and masks.

_TAKEN = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The messages of a record, and what its template is told besides."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)
    """Names that the template reads; they go before those of the encoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatEncoded:
    """The conversations that could be encoded, and those that could not."""

    encoded: Encoded
    """Ids as uint32."""
    masks: Mask
    """One a token: 1 where it is trained on."""
    kept: Int64Array
    """Which of the conversations that were given these are, in order."""
    refused: Sequence[Refused]
    lost: Sequence[tuple[str, ...]]
    """Of each that was kept, what the template did not write of it, by the names of `losses`."""

    @property
    def notes(self) -> Mapping[str, int]:
        """What a user should know, by name: of how many conversations it is true."""
        return dict(sorted(Counter(name for names in self.lost for name in names).items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatEncoder:
    """Encodes conversations with one template and one tokenizer."""

    template: ChatTemplate
    tokenizer: Tokenizer
    train_on: tuple[str, ...] = ("assistant",)
    """Roles whose messages are trained on."""
    last_only: bool = False
    """Whether only the last of them is."""
    kwargs: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)
    """Names that the template reads, such as `enable_thinking`; `now` is the date for templates that write one."""
    _controls: Controls = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        controls = Controls.of(self.tokenizer.special_ids, self.template.habits, self.template.where)
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
        taken = self._taken(self.kwargs)
        if taken is not None:
            raise ConfigError(
                f"chat: an option must not replace what the template is given, got {taken!r}; leave it out"
            )

    @property
    def spelled(self) -> tuple[str, ...]:
        """What looks like a control string, ends the assistant's turns, and is no control string of the tokenizer.

        The text of a record can spell it as well, and so seem to end a turn. Empty where all is well, and where the
        template takes no plain question and answer.
        """
        from tokenmill.encode.chat.turns import MARKUP

        for content in ("a", [{"type": "text", "text": "a"}]):
            messages = [{"role": role, "content": content} for role in ("user", "assistant")]
            try:
                shown = render(self.template, messages, kwargs=self.kwargs)
            except Refusal:
                continue
            end = shown.supervised[-1][1]
            tails = [shown.text[first:end] for first, last in shown.authored if first < end <= last]
            ends = dict.fromkeys(name for tail in tails for name in MARKUP.findall(tail))
            return tuple(name for name in ends if name not in self.tokenizer.special_ids)
        return ()

    def to_json(self) -> dict[str, Any]:
        """Return all that decides ids and masks, but for the tokenizer, which has an identity of its own."""
        return {
            "template": self.template.to_json(),
            "train_on": sorted(self.train_on),
            "last_only": self.last_only,
            "kwargs": dict(self.kwargs),
        }

    def encode(self, conversations: Sequence[Conversation]) -> ChatEncoded:
        """Render, cut and encode conversations; what cannot be proven right is refused, the rest kept.

        A template that asks for today's date and was given none raises `ConfigError`.
        """
        rendered: list[Rendered] = []
        places: list[int] = []
        refused: list[Refused] = []
        for index, conversation in enumerate(conversations):
            try:
                rendered.append(self._rendered(conversation))
                places.append(index)
            except Refusal as error:
                refused.append(Refused(index=index, reason=error.reason, detail=error.detail))
        kept: list[int] = []
        lost: list[tuple[str, ...]] = []
        ids: list[Ids] = []
        masks: list[Mask] = [np.empty(0, np.uint8)]
        results = encode_all(rendered, self.tokenizer, self._controls)
        for index, shown, result in zip(places, rendered, results, strict=True):
            try:
                if isinstance(result, Refusal):
                    raise result
                one, mask = self._with_one_bos(*result)
                if not mask.any():
                    raise Refusal("no_supervision", "no token is left of what is trained on, only white space")
            except Refusal as error:
                refused.append(Refused(index=index, reason=error.reason, detail=error.detail))
                continue
            kept.append(index)
            lost.append(shown.lost)
            ids.append(one)
            masks.append(mask)
        return ChatEncoded(
            encoded=join(ids),
            masks=np.concatenate(masks),
            kept=np.array(kept, np.int64),
            refused=sorted(refused, key=lambda one: one.index),
            lost=lost,
        )

    def _rendered(self, conversation: Conversation) -> Rendered:
        taken = self._taken(conversation.kwargs)
        if taken is not None:
            raise Refusal("options", repr(taken))
        return render(
            self.template,
            conversation.messages,
            tools=conversation.tools,
            kwargs={**self.kwargs, **conversation.kwargs},
            train_on=self.train_on,
            last_only=self.last_only,
        )

    def _taken(self, options: Mapping[str, Any]) -> str | None:
        """Return an option that would replace what the template is given; None if none does."""
        return next((name for name in options if name in (*_TAKEN, *self.template.special_tokens)), None)

    def _with_one_bos(self, ids: Ids, mask: Mask) -> tuple[Ids, Mask]:
        """See that a conversation starts with one BOS if the template writes it or the tokenizer adds it.

        What the template wrote stands, so only a BOS that is missing is put in front, and of several at the start
        one is left. Text of the record never gives the id.
        """
        identity = self.tokenizer.identity
        if identity.bos_id is None:
            return ids, mask
        is_bos = ids == identity.bos_id
        at_start = int(np.argmin(is_bos)) if not is_bos.all() else ids.size
        if at_start > 1:
            ids, mask = ids[at_start - 1 :], mask[at_start - 1 :]
        elif at_start == 0 and identity.add_bos:
            ids = np.concatenate([np.array([identity.bos_id], np.uint32), ids])
            mask = np.concatenate([np.zeros(1, np.uint8), mask])
        is_bos = ids == identity.bos_id
        if np.any(is_bos[1:] & is_bos[:-1]):
            raise Refusal("bos", "the template writes BOS twice in a row")
        if is_bos[:1].any():
            self._refuse_late_bos(ids, is_bos)
        return ids, mask

    def _refuse_late_bos(self, ids: Ids, is_bos: BoolArray) -> None:
        """Refuse a BOS that the template wrote behind white space, after the one that was put in front."""
        others = np.flatnonzero(is_bos[1:])
        if others.size and not self.tokenizer.decode(ids[1 : 1 + int(others[0])]).strip():
            raise Refusal("bos", "the template writes white space before BOS, so that there would be two")
