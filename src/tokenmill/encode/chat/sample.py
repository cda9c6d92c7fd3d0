"""A short conversation of the same kind as another up to some message, which shows how that message is written.

To compare renders for every message of a conversation takes time that grows with the square of its length. What a
template writes around a message hardly depends on what the messages say, so a sample shows it, in which a letter
stands for every text, once for all conversations that have the same sample. It counts only where the whole render
has it, in the same place; a text that holds a string which the template looks for keeps it in the sample.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from tokenmill.encode import Refusal
from tokenmill.encode.chat.conversation import (
    Header,
    MarkedConversation,
    Message,
    Renderer,
    Trace,
    bare,
    mark_conversation,
)
from tokenmill.encode.chat.template import ChatTemplate

_TEXT = "Q"
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _TEXT,
        "description": _TEXT,
        "parameters": {"type": "object", "properties": {_TEXT: {"type": "string"}}, "required": [_TEXT]},
    },
}
_MAX_MESSAGES = 64
_MAX_LITERALS = 8
"""That one text of a sample may hold."""
_MAX_STRIKING = 2
"""Exchanges with what the template looks for that a sample repeats."""
_MANY_BLANKS = re.compile(r"\s{17}")
"""More white space than a sample repeats."""


class _Place(NamedTuple):
    """A character, said without the lengths of texts."""

    message: int
    string: int
    """Which of the message's."""
    back: int
    """How far from the end of the string."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleEdges:
    """What a sample shows of the message that it is about."""

    header: str | None
    """What asks for it; None if that could not be told."""
    after: _Place | None
    """The character that the header follows."""
    leads: tuple[str, ...] | None
    """What the template writes between the header and the message, at the end of a conversation and inside one;
    None if the message does not begin behind the header."""
    openings: tuple[tuple[str, int], ...]
    """What the template writes between the message before and this one, and how much of it is to be produced."""
    last: _Place
    """The message's last character."""
    tails: tuple[str, ...]
    """What may end its turn."""
    between: tuple[str | None, ...]
    """What may stand between it and the next message, if there is one; None if one of the two is not written."""


class TurnEdges(NamedTuple):
    """What a sample shows of a message, with its two places as characters of the conversation."""

    sample: SampleEdges
    header: Header | None
    last: int | None


class _NoSample(Exception):
    """A conversation that no short sample stands for."""


def edges_by_sample(renderer: Renderer, index: int) -> TurnEdges | None:
    """Return what a sample shows of how a message is written; None if there is none that does."""
    conversation = renderer.conversation
    repeated = _repeated(renderer, index)
    if len(repeated) > _MAX_MESSAGES:
        return None
    sought = _longest_first(frozenset(renderer.sought))
    texts = _SampleTexts(words=renderer.template.compiled.words, sought=sought, labels={})
    tools = None if conversation.tools is None else [_TOOL] if conversation.tools else []
    options = bare(conversation.options)
    keys = [f"{tools is None or len(tools)}{options}{renderer.template.special_tokens}"]
    messages = []
    try:
        for at in (*repeated, *_near(renderer)[1][index]):
            # Labels are numbered through a sample; what has none is the same in each.
            message, key = renderer.samples.get((at, sought), (None, ""))
            if message is None:
                message = {**texts.of(conversation.messages[at], ()), "role": conversation.roles[at]}
                key = repr(message)
                if not texts.labels:
                    renderer.samples[at, sought] = message, key
            messages.append(message)
            keys.append(key)
    except _NoSample:
        return None
    shown = _edges_of_sample(
        _Sample(
            key="\n".join(keys),
            index=len(repeated) - 1,
            source=renderer.template.source,
            template=renderer.template,
            messages=messages,
            tools=tools,
            options=options,
        )
    )
    if shown is None:
        return None
    after = None if shown.after is None else _origin(conversation, repeated, shown.after)
    header = None if shown.header is None or after is None else Header(after=after, text=shown.header)
    return TurnEdges(sample=shown, header=header, last=_origin(conversation, repeated, shown.last))


@lru_cache(maxsize=256)
def _longest_first(texts: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(texts, key=lambda text: (-len(text), text)))


def _repeated(renderer: Renderer, index: int) -> list[int]:
    """Return the messages up to one that a sample of it repeats, with the last exchanges before it that strike."""
    if renderer.striking is None:
        renderer.striking = _striking(renderer)
    before = bisect_left(renderer.striking, index, key=lambda exchange: exchange[0])
    exchanges = renderer.striking[max(0, before - _MAX_STRIKING) : before]
    return sorted({*_near(renderer)[0][index], *(at for exchange in exchanges for at in exchange if at < index)})


def _near(renderer: Renderer) -> tuple[list[list[int]], list[list[int]]]:
    if renderer.near is None:
        conversation = renderer.conversation
        renderer.near = neighbours(conversation.roles, first_call(conversation.roles, conversation.given))
    return renderer.near


def neighbours(roles: Sequence[str], special: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the messages on which it depends how each is written, as far as a template can be expected.

    Up to each: what sets the scene, the last question, the last call of tools and all that is behind it. And some
    special ones: the first call, as a template may write later ones otherwise; and exchanges that hold a string
    which the template looks for. What it wrote of others hardly matters, and a sample that does not show how a
    message is written is not used. Behind each: the next message, the answer that ends the exchange, and the next
    question, as templates write a message otherwise if one of these follows.
    """
    num_messages = len(roles)
    opening = [0] if roles[0] in ("system", "developer") else []
    before: list[list[int]] = []
    asked_at = called_at = -1
    for index, role in enumerate(roles):
        if asked_at < 0:
            before.append(list(range(index + 1)))
        else:
            near = {*(opening if asked_at else ()), asked_at, *range(called_at, index + 1)}
            near.update(at for at in special if at < index)
            before.append(sorted(near))
        if role == "user":
            asked_at, called_at = index, index + 1
        elif role == "assistant":
            called_at = index
    behind: list[list[int]] = []
    asked_at = num_messages
    for index in range(num_messages - 1, -1, -1):
        after = [index + 1] if index + 1 < num_messages else []
        if asked_at - 1 > index + 1 and roles[asked_at - 1] == "assistant":
            after.append(asked_at - 1)
        if index + 1 < asked_at < num_messages:
            after.append(asked_at)
        behind.append(after)
        if roles[index] == "user":
            asked_at = index
    return before, behind[::-1]


def first_call(roles: Sequence[str], messages: Sequence[Message]) -> list[int]:
    """Return the first message with tool calls, with its results, its question before and its answer behind it."""
    first = next((at for at, message in enumerate(messages) if message.get("tool_calls")), None)
    if first is None:
        return []
    asked_at = next((at for at in range(first - 1, -1, -1) if roles[at] == "user"), first)
    after = next((at for at in range(first, len(roles)) if roles[at] == "user"), len(roles))
    behind = next((at for at in range(first + 1, after) if roles[at] == "assistant"), after)
    answer = [after - 1] if roles[after - 1] == "assistant" else []
    return sorted({asked_at, *range(first, behind), *answer})


def _striking(renderer: Renderer) -> list[list[int]]:
    """Return the messages of all exchanges in which a text holds what the template looks for."""
    exchanges: list[list[int]] = []
    for index, role in enumerate(renderer.conversation.roles):
        if role == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(index)
    messages = renderer.conversation.messages
    words, sought = renderer.template.compiled.words, tuple(renderer.sought)
    return [exchange for exchange in exchanges if any(_strikes(messages[at], words, sought) for at in exchange)]


def _strikes(value: object, words: frozenset[str], sought: tuple[str, ...]) -> bool:
    if isinstance(value, str):
        text = str.__str__(value)
        core = text.strip()
        return bool(core) and (core in words or any(needle in text for needle in sought))
    if isinstance(value, dict):
        items = [item for key, item in value.items() if key not in ("role", "type", "name")]
        return any(_strikes(item, words, sought) for item in items)
    return isinstance(value, list) and any(_strikes(item, words, sought) for item in value)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """A sample, known by its key and template."""

    key: str
    index: int
    """The message that it is about; at most three follow it."""
    source: str
    """Of the template."""
    template: ChatTemplate = field(compare=False)
    messages: list[dict[str, Any]] = field(compare=False)
    tools: list[Any] | None = field(compare=False)
    options: Mapping[str, Any] = field(compare=False)


@lru_cache(maxsize=4096)
def _edges_of_sample(sample: _Sample) -> SampleEdges | None:
    """Render a sample; None if the template does not take it or writes nothing of the message."""
    index = sample.index
    roles = [message["role"] for message in sample.messages]
    try:
        conversation = mark_conversation(sample.messages, sample.tools, sample.options, roles)
        renderer = Renderer(template=sample.template, conversation=conversation)
        trace = renderer.trace(index + 1, False)
        own = trace.own_range(index)
        last = None if own is None else trace.origin_at(own[1] - 1)
        if own is None or last is None:
            return None
        header = renderer.asked(index) if roles[index] == "assistant" else None
        # The message at the end of the conversation and, if there are others, inside one.
        inside = [renderer.try_trace(count, False) for count in range(index + 2, len(roles) + 1)]
        ends = [trace, *(each for each in inside if each is not None)]
        tails = renderer.closings(index, last)
        beginnings = [_beginning(renderer, each, index, header, tails) for each in ends] if header else []
        leads = [lead for lead, _ in beginnings]
        return SampleEdges(
            header=header.text if header else None,
            after=_place(conversation, header.after) if header and header.after else None,
            leads=None if None in leads else tuple(lead for lead in leads if lead is not None),
            openings=tuple(opening for _, opening in beginnings if opening is not None),
            last=_place(conversation, last),
            tails=tails,
            between=tuple(between(each, index) for each in ends[1:]),
        )
    except Refusal as error:
        if error.reason == "too_slow":  # by the clock of the record that came first, not of all that share a sample
            raise
        return None


def between(trace: Trace, index: int) -> str | None:
    """Return what the template writes between a message and the next; None where one of them is not written."""
    own, following = trace.own_range(index), trace.own_range(index + 1)
    if not own or not following or own[1] > following[0]:
        return None
    # Names and ids of calls, which may be written again there, are others in a sample.
    edges = [own[1], *(edge for each in trace.within(own[1], following[0]) for edge in each[:2]), following[0]]
    return "\0".join(trace.text[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True))


def _beginning(
    renderer: Renderer, trace: Trace, index: int, header: Header, tails: tuple[str, ...]
) -> tuple[str | None, tuple[str, int] | None]:
    """Return one of `SampleEdges.leads` and one of `openings`; None for what a render does not show."""
    own = trace.own_range(index)
    if own is None:
        return None, None
    first, after = own
    try:
        begin = renderer.begin(trace, index, first, after + len(trace.closing_of(tails, after) or ""))
    except Refusal:
        return None, None  # the end of the turn may be known all the same
    lead = None
    if header.after is not None:
        ends = trace.header_ends(header, first)
        follows = trace.conversation.owners[trace.conversation.string_of(header.after)] == index - 1
        lead = trace.text[begin:first] if follows and ends and ends[-1] == begin else None
    opening = trace.opening(index, first)
    return lead, None if opening is None else (opening, first - begin)


def _place(conversation: MarkedConversation, origin: int) -> _Place:
    string = conversation.string_of(origin)
    message = conversation.owners[string]
    first = conversation.firsts[message] if message >= 0 else 0
    return _Place(message=message, string=string - first, back=conversation.end_of(string) - 1 - origin)


def _origin(conversation: MarkedConversation, repeated: list[int], place: _Place) -> int | None:
    """Return the number of a character in the conversation; None if it is not of a message."""
    if place.message < 0:
        return None
    string = conversation.firsts[repeated[place.message]] + place.string
    origin = conversation.end_of(string) - 1 - place.back
    return origin if origin >= conversation.starts[string] else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _SampleTexts:
    """Makes the values of a sample: of each text only what a template may look for is left."""

    words: frozenset[str]
    """Texts that the template may compare one with."""
    sought: tuple[str, ...]
    """What it looks for in a text, the longest first."""
    labels: dict[str, str]
    """Names and ids, and what stands for each: as long, and the same where they are the same."""

    def of(self, value: Any, path: tuple[str, ...]) -> Any:  # noqa: ANN401 - any JSON value
        """Return what stands for a value; one that cannot be kept short raises `_NoSample`."""
        if isinstance(value, str):
            text = str.__str__(value)
            if path[-1] == "type":
                return text
            return self._label(text) if path[-1] in ("id", "tool_call_id", "name") else self._text(text)
        if isinstance(value, dict):
            return {
                str.__str__(key): self.of(item, (*path, key))
                for key, item in value.items()
                if key != "role" or path
            }
        return [self.of(item, path) for item in value] if isinstance(value, list) else value

    def _label(self, text: str) -> str:
        if text in self.words or not text:
            return text
        if text not in self.labels:
            label = f"{len(self.labels)}{_TEXT * len(text)}"[: len(text)]
            if label in self.labels.values():
                raise _NoSample
            self.labels[text] = label
        return self.labels[text]

    def _text(self, text: str) -> str:
        if text.strip() in self.words:
            return text
        outline = outlined(text, self.sought)
        if outline is None or _MANY_BLANKS.search(outline):
            raise _NoSample
        return outline


def outlined(text: str, sought: Sequence[str]) -> str | None:
    """Return a text with a letter for each stretch of which only that it is there matters to a template.

    What the template looks for, the longest first, is kept, as is white space at the ends of stretches. None if
    there are many of them.

    >>> outlined(" so <end>", ["<end>"])
    ' Q <end>'
    """
    literals = [literal for literal in sought if literal in text]
    pieces = re.split(f"({'|'.join(map(re.escape, literals))})", text) if literals else [text]
    if len(pieces) > 2 * _MAX_LITERALS + 1:
        return None
    for number in range(0, len(pieces), 2):
        core = pieces[number].strip()
        if core:
            pieces[number] = pieces[number].replace(core, _TEXT, 1)
    return "".join(pieces)
