"""A short conversation of the same kind as another up to some message, which shows how that message is written.

To compare renders for every message of a conversation takes time that grows with the square of its length. What a
template writes around a message hardly depends on what the messages say, so a sample shows it, in which a letter
stands for every text, once for all conversations that have the same sample. It counts only where the whole render
has it, in the same place; a text that holds a string which the template may look for keeps it in the sample.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tokenmill.encode.chat.record import Record, read_record
from tokenmill.encode.chat.refusal import Refusal
from tokenmill.encode.chat.sandbox import Compiled
from tokenmill.encode.chat.scene import Scene, Trace, bare
from tokenmill.encode.chat.turns import Header, asked, closings, header_end, header_ends, origin_at, own_range

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
_MAX_BLANKS = 16
"""White space at an end of a text that a sample repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A character, said without the lengths of texts."""

    message: int
    string: int
    """Which of the message's."""
    back: int
    """How far from the end of the string."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What a sample shows of the message that it is about."""

    header: str | None
    """What asks for it; None if that could not be told."""
    after: Place | None
    """The character that the header follows."""
    leads: tuple[str, ...]
    """What the template writes between the header and the message, at the end of a conversation and inside one."""
    last: Place
    """The message's last character."""
    tails: tuple[str, ...]
    """What may end its turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """The same in terms of the conversation."""

    header: Header | None
    leads: tuple[str, ...]
    last: int | None
    tails: tuple[str, ...]


class _Unlike(Exception):
    """A conversation that no short sample stands for."""


def shown_by_sample(scene: Scene, index: int) -> Known | None:
    """Return what a sample shows of how a message is written; None if there is none that does."""
    record = scene.record
    window = _window(scene, index)
    if len(window) > _MAX_MESSAGES:
        return None
    texts = _Texts(compiled=scene.compiled, labels={})
    try:
        repeated = [*window, *range(index + 1, len(record.roles))[:1]]
        messages = [{**texts.of(record.messages[at], ()), "role": record.roles[at]} for at in repeated]
    except _Unlike:
        return None
    tools = None if record.tools is None else [_TOOL] if record.tools else []
    options = bare(record.options)
    shown = _look(
        _Sample(
            key=repr((messages, tools is None or len(tools), options, sorted(scene.special_tokens.items()))),
            index=len(window) - 1,
            compiled=scene.compiled,
            special_tokens=scene.special_tokens,
            messages=messages,
            tools=tools,
            options=options,
        )
    )
    if shown is None:
        return None
    after = None if shown.after is None else _origin(record, window, shown.after)
    return Known(
        header=None if shown.header is None or after is None else Header(after=after, text=shown.header),
        leads=shown.leads,
        last=_origin(record, window, shown.last),
        tails=shown.tails,
    )


def _window(scene: Scene, index: int) -> list[int]:
    """Return the messages that a sample repeats: what sets the scene, the last question, the last call of tools.

    And all exchanges that hold a string which the template may look for.
    """
    roles = scene.record.roles
    asked_at = next((at for at in range(index - 1, -1, -1) if roles[at] == "user"), None)
    if asked_at is None:
        return list(range(index + 1))
    called_at = next((at for at in range(index - 1, asked_at, -1) if roles[at] == "assistant"), asked_at + 1)
    if not scene.striking:
        scene.striking.append(_striking(scene))
    (striking,) = scene.striking
    opening = [0] if asked_at > 0 and roles[0] in ("system", "developer") else []
    kept = striking[: bisect_left(striking, index)]
    return sorted({*opening, *kept, asked_at, *range(called_at, index + 1)})


def _striking(scene: Scene) -> list[int]:
    """Return the messages of all exchanges in which a text holds what the template may look for."""
    exchanges: list[list[int]] = []
    for index, role in enumerate(scene.record.roles):
        if role == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(index)
    messages = scene.record.messages
    found = [one for one in exchanges if any(_strikes(messages[index], scene.compiled) for index in one)]
    return [index for one in found for index in one]


def _strikes(value: object, compiled: Compiled) -> bool:
    if isinstance(value, str):
        core = value.strip()
        return bool(core) and (core in compiled.words or any(literal in value for literal in compiled.literals))
    if isinstance(value, dict):
        return any(_strikes(item, compiled) for key, item in value.items() if key not in ("role", "type", "name"))
    return isinstance(value, list) and any(_strikes(item, compiled) for item in value)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """A sample, known by its key and template."""

    key: str
    index: int
    """The message that it is about; at most one follows it."""
    compiled: Compiled
    special_tokens: Mapping[str, str] = field(compare=False)
    messages: list[dict[str, Any]] = field(compare=False)
    tools: list[Any] | None = field(compare=False)
    options: Mapping[str, Any] = field(compare=False)


@lru_cache(maxsize=4096)
def _look(sample: _Sample) -> Shown | None:
    """Render a sample; None if the template does not take it or writes nothing of the message."""
    index = sample.index
    try:
        record = read_record(
            sample.messages, sample.tools, sample.options, [one["role"] for one in sample.messages]
        )
        scene = Scene(compiled=sample.compiled, where="sample", special_tokens=sample.special_tokens, record=record)
        whole = scene.trace(index + 1, False)
        own = own_range(whole, record, index)
        last = None if own is None else origin_at(whole, own[1] - 1)
        if own is None or last is None:
            return None
        header = asked(scene, index) if record.roles[index] == "assistant" else None
        leads = [_lead(scene, trace, header, index) for trace in _ends(scene, whole, index)] if header else []
        return Shown(
            header=header.text if header and None not in leads else None,
            after=_place(record, header.after) if header and header.after else None,
            leads=tuple(lead for lead in leads if lead is not None),
            last=_place(record, last),
            tails=closings(scene, index, last),
        )
    except Refusal:
        return None


def _ends(scene: Scene, whole: Trace, index: int) -> list[Trace]:
    """Return the renders that end with a message and, if it is not the last, with the one after it."""
    more = scene.try_trace(index + 2, False) if index + 1 < len(scene.record.roles) else None
    return [whole] if more is None else [whole, more]


def _lead(scene: Scene, trace: Trace, header: Header, index: int) -> str | None:
    """Return what stands between a header and its message; None if the message does not begin after the header."""
    own = own_range(trace, scene.record, index)
    if own is None or header.after is None:
        return None
    ends = header_ends(trace, scene.record, header, own[0])
    follows = scene.record.owners[scene.record.string_of(header.after)] == index - 1
    begins = header_end(scene, trace, index, own[0])
    return trace.text[begins : own[0]] if follows and ends and ends[-1] == begins else None


def _place(record: Record, origin: int) -> Place:
    string = record.string_of(origin)
    message = record.owners[string]
    first = record.firsts[message] if message >= 0 else 0
    return Place(message=message, string=string - first, back=record.end_of(string) - 1 - origin)


def _origin(record: Record, window: list[int], place: Place) -> int | None:
    """Return the number of a character in the conversation; None if it is not of a message."""
    if place.message < 0:
        return None
    string = record.firsts[window[place.message]] + place.string
    origin = record.end_of(string) - 1 - place.back
    return origin if origin >= record.starts[string] else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Texts:
    """Makes the values of a sample: of each text only what a template may look for is left."""

    compiled: Compiled
    labels: dict[str, str]
    """Names and ids, and what stands for each: as long, and the same where they are the same."""

    def of(self, value: Any, path: tuple[str, ...]) -> Any:  # noqa: ANN401 - any JSON value
        """Return what stands for a value; one that cannot be kept short raises `_Unlike`."""
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
        if text in self.compiled.words or not text:
            return text
        if text not in self.labels:
            made = f"{len(self.labels)}{_TEXT * len(text)}"[: len(text)]
            if made in self.labels.values():
                raise _Unlike
            self.labels[text] = made
        return self.labels[text]

    def _text(self, text: str) -> str:
        core = text.strip()
        if not core:
            return self._blank(text)
        if core in self.compiled.words:
            return text
        found = [literal for literal in self.compiled.literals if literal in text]
        if not found:
            return self._outline(text)
        pieces = re.split(f"({'|'.join(map(re.escape, found))})", text)
        if len(pieces) > 2 * _MAX_LITERALS + 1:
            raise _Unlike
        return "".join(self._outline(piece) if at % 2 == 0 else piece for at, piece in enumerate(pieces))

    def _outline(self, text: str) -> str:
        core = text.strip()
        if not core:
            return self._blank(text)
        begin = text.index(core[0])
        return self._blank(text[:begin]) + _TEXT + self._blank(text[begin + len(core) :])

    @staticmethod
    def _blank(text: str) -> str:
        if len(text) > _MAX_BLANKS:
            raise _Unlike
        return text
