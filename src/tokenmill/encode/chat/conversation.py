"""A conversation whose strings are numbered, and renders of it in which each character has its number."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tokenmill.encode import Refusal
from tokenmill.encode.chat.tracked import (
    Tracked,
    authored,
    placed,
)
from tokenmill.fields import surrogate_in

if TYPE_CHECKING:  # conversations are made where no template is opened, and jinja2 takes time to load
    pass

Message: TypeAlias = Mapping[str, Any]

ROLES = (
    *("system", "developer", "user", "assistant", "tool", "function"),
    *("ipython", "observation", "model", "chatbot"),
)
"""Roles that chat templates know. They write the role into special tokens, so it is not free text."""
SETTING = -1
"""Owner of characters that come from `tools` or `options` instead of a message."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields for the reasoning of the assistant. They mean the same, and a template reads one of them."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_PARTS: Mapping[str, tuple[str, ...]] = {
    "text": ("content",),
    "reasoning": REASONING,
    "tool calls": ("tool_calls",),
}
LABELS = frozenset(("name", "id", "type", "tool_call_id"))
"""Fields that templates may write again in another place."""
MAX_DEPTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The messages of a record, and the other arguments of its template."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)
    """Names that the template reads; they override those of the encoder."""


@dataclass(kw_only=True, slots=True)
class MarkedConversation:
    """The strings of one conversation, whose characters are numbered from 1."""

    given: Sequence[Message]
    """Messages before their strings were marked."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    roles: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Number of the first character of each string."""
    owners: list[int] = field(default_factory=list)
    """Message that each string belongs to, or `SETTING`."""
    labels: list[bool] = field(default_factory=list)
    """Whether a string is a name or id, which templates may write again, for example with a tool result."""
    fields: list[str] = field(default_factory=list)
    """Field of the message that contains each string, or `tools` or `options`; empty for white space and for field
    names."""
    objects: set[int] = field(default_factory=set)
    """Strings that are the arguments of a tool call as JSON."""
    call_ends: list[int] = field(default_factory=list)
    """One more than the last string of each tool call."""
    size: int = 1

    def string_of(self, mark: int) -> int:
        """Return the index of the string that contains a character."""
        return bisect_right(self.starts, mark) - 1

    def call_of(self, string: int) -> int:
        """Return the number of the tool call that a string belongs to."""
        return bisect_right(self.call_ends, string)

    def end_of(self, string: int) -> int:
        """Return one more than the number of the last character of a string."""
        return self.starts[string + 1] if string + 1 < len(self.starts) else self.size

    def size_of(self, string: int) -> int:
        """Return the number of characters of a string."""
        return self.end_of(string) - self.starts[string]

    def parts_of(self, message: int) -> tuple[str, ...]:
        """Return the parts of a message that are not white space: text, reasoning, tool calls."""
        fields = self.given[message]
        return tuple(name for name, keys in _PARTS.items() if any(_has_text(fields.get(key)) for key in keys))

    def named(self, owner: int) -> str:
        """Name a message for people, from 1: `message 2 of 3 (assistant, with tool calls)`."""
        if owner == SETTING:
            return "the tools or options"
        more = [part for part in self.parts_of(owner) if part != "text"]
        role = ", with ".join([self.given[owner]["role"], *([" and ".join(more)] if more else [])])
        return f"{_numbered(self.given, owner)} ({role})"

    def add_message(self, message: Message) -> None:
        """Mark the strings of the next message; one with media is rejected."""
        index = len(self.messages)
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind != "text":
                raise Refusal("media", f"a part of type {shortened(kind)} in {self.named(index)}")
        marked = self.mark({key: message[key] for key in message if key != "role"}, index, ())
        self.messages.append({"role": authored(message["role"]), **marked})
        self.roles.append(message["role"])

    def mark(self, value: Any, owner: int, path: tuple[str, ...], depth: int = 0) -> Any:  # noqa: ANN401 - any JSON
        """Return a JSON value with its strings marked."""
        if isinstance(value, str):
            return self._mark_string(value, owner, path)
        if value is None or isinstance(value, bool | int | float):
            return value
        if depth > MAX_DEPTH:
            raise Refusal("not_json", f"values nested deeper than {MAX_DEPTH} in {self.named(owner)}")
        if isinstance(value, Mapping):
            marked: dict[Tracked, Any] = {}
            for key, item in value.items():
                if not isinstance(key, str):
                    raise Refusal("not_json", f"the key {shortened(key)} in {self.named(owner)}")
                # A key inside arguments is text that the assistant wrote; any other is a word of the format.
                name = self._mark_string(key, owner, path if "arguments" in path else (*path, "name"))
                marked[name] = self.mark(item, owner, (*path, key), depth + 1)
            return marked
        if isinstance(value, list | tuple):
            items = []
            for item in value:
                items.append(self.mark(item, owner, path, depth + 1))
                if path == ("tool_calls",):
                    self.call_ends.append(len(self.starts))
            return items
        raise Refusal("not_json", f"a value of type {type(value).__name__} in {self.named(owner)}")

    def _mark_string(self, text: str, owner: int, path: tuple[str, ...]) -> Tracked:
        if not text.isascii() and surrogate_in(text) is not None:
            raise Refusal("not_unicode", f"a lone surrogate in {self.named(owner)}")
        if not text:
            return authored("")
        first = self.size
        self.starts.append(first)
        self.owners.append(owner)
        self.fields.append(path[0] if path and not text.isspace() else "")
        self.labels.append(bool(path) and path[-1] in LABELS and "arguments" not in path)
        if path and path[-1] == "arguments" and text.lstrip().startswith("{"):
            self.objects.add(len(self.starts) - 1)
        self.size += len(text)
        return placed(text, first)


def mark_conversation(
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
    trained_roles: Sequence[str],
) -> MarkedConversation:
    """Check a conversation and mark its strings; values that are not text are rejected."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise Refusal("no_messages", shortened(messages))
    conversation = MarkedConversation(given=messages)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Refusal("role", f"{_numbered(messages, index)}: {shortened(message)}")
        role = message["role"]
        if role not in ROLES and role not in trained_roles:
            raise Refusal("role", f"{_numbered(messages, index)} with the unknown role {role[:64]!r}")
        conversation.add_message(message)
    if tools is not None:
        conversation.tools = conversation.mark(list(tools), SETTING, ("tools",))
    for key, value in options.items():
        conversation.options[key] = conversation.mark(value, SETTING, ("options",))
    return conversation


def _numbered(messages: Sequence[object], index: int) -> str:
    return f"message {index + 1} of {len(messages)}"


def shortened(value: object) -> str:
    """Return a short text of a value for messages."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _has_text(value: object, depth: int = 0) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    if not isinstance(value, Mapping | list | tuple):
        return value is not None
    items = [value[key] for key in value if key != "type"] if isinstance(value, Mapping) else value
    return depth <= MAX_DEPTH and any(_has_text(item, depth + 1) for item in items)


# Renders with the origin of every character.

Range: TypeAlias = tuple[int, int]
"""First character and the one after the last."""


class Fragment(NamedTuple):
    """Adjacent characters of a render that are also adjacent in one string of the conversation."""

    begin: int
    end: int
    origin: int
    """The first character's number in the conversation."""
    step: int
    """1 if each character has the next number; 0 if all have the same one, as in the escape of a character."""
    string: int
    owner: int
    """Index of the message, or `SETTING`."""

    @property
    def last_origin(self) -> int:
        """The last character's number in the conversation."""
        return self.origin + (self.end - self.begin - 1) * self.step


class Header(NamedTuple):
    """The header of a message, from a render that stops before it."""

    after: int | None
    """Number of the character before it; None if nothing of the conversation is before it."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A render; the template wrote the text between fragments."""

    conversation: MarkedConversation
    text: str
    fragments: list[Fragment]
    """In the order of the text."""
    begins: list[int]
    """First character of each fragment."""
    of_message: Mapping[int, list[Fragment]]
    generation: list[Range]
    """Text of generation blocks; ranges do not touch."""

    def before(self, at: int) -> list[Fragment]:
        """Return the fragments that begin before a character."""
        return self.fragments[: bisect_left(self.begins, at)]

    def within(self, begin: int, end: int) -> list[Fragment]:
        """Return the fragments that have a character in a range."""
        if begin >= end:
            return []
        first = bisect_right(self.begins, begin)
        first -= first > 0 and self.fragments[first - 1].end > begin
        return self.fragments[first : bisect_left(self.begins, end)]

    def authored(self) -> list[Range]:
        """Return the ranges that the template wrote."""
        edges = [0, *(edge for each in self.fragments for edge in (each.begin, each.end)), len(self.text)]
        return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]

    def origin_at(self, at: int) -> int | None:
        """Return the number of a character of the text; None if the template wrote it."""
        fragments = self.within(at, at + 1)
        return fragments[0].origin + (at - fragments[0].begin) * fragments[0].step if fragments else None

    def is_repeated(self, fragment: Fragment) -> bool:
        """Return whether the last character of a fragment is in another fragment too, so that it marks no place."""
        origin = fragment.last_origin
        others = [
            each
            for each in self.of_message[fragment.owner]
            if each.begin != fragment.begin and each.origin <= origin <= each.last_origin
        ]
        return not self.conversation.labels[fragment.string] and any(each.step for each in others)

    def shown(self, begin: int) -> str:
        """Return a short text from a character on, for messages."""
        return repr(self.text[begin : begin + 24])

    def own_range(self, index: int) -> Range | None:
        """Return the range of a message; None if it is not written. A repeated name does not count."""
        conversation = self.conversation
        by_string: dict[int, list[Range]] = {}
        last_origins: dict[int, int] = {}
        for each in self.of_message.get(index, ()):
            ranges = by_string.setdefault(each.string, [])
            if ranges and ranges[-1][1] != each.begin and conversation.labels[each.string]:
                last_origins[each.string] = -1
            elif ranges and not conversation.labels[each.string]:
                last = last_origins[each.string]
                if each.origin < last or (each.origin == last and ranges[-1][1] != each.begin):
                    shown = f"{self.shown(each.begin)} of {conversation.named(index)}"
                    raise Refusal("rewritten", f"{shown}, twice or out of order")
            if last_origins.get(each.string) != -1:
                ranges.append((each.begin, each.end))
                last_origins[each.string] = each.last_origin
        own = [both for ranges in by_string.values() for both in ranges]
        return (min(begin for begin, _ in own), max(end for _, end in own)) if own else None

    def begin_of_gap(self, first: int) -> int:
        """Return the end of the fragment before a character, from which on the template wrote everything."""
        at = bisect_left(self.begins, first)
        return min(self.fragments[at - 1].end, first) if at else 0

    def continues_turn(self, index: int, after: int) -> bool:
        """Return whether this message and the next one are one turn of the assistant, with nothing between them."""
        pair = self.conversation.roles[index : index + 2]
        following = self.within(after, after + 1)
        return pair == ["assistant"] * 2 and any(
            each.owner == index + 1 and each.begin == after for each in following
        )

    def header_ends(self, header: Header, before: int) -> list[int]:
        """Return the ends of a header in the text, up to a character."""
        begins = [0]
        if header.after is not None:
            conversation = self.conversation
            owner = conversation.owners[conversation.string_of(header.after)]
            begins = [
                place + 1
                for each in self.of_message.get(owner, ())
                if each.origin <= header.after <= each.last_origin
                for place in (
                    [each.begin + header.after - each.origin]
                    if each.step
                    else range(each.begin, min(each.end, before))
                )
                if place < before
            ]
        ends = [begin + len(header.text) for begin in begins if self.text.startswith(header.text, begin)]
        return [end for end in ends if end <= before and not self.within(end - len(header.text), end)]

    def closing_of(self, tails: tuple[str, ...], after: int) -> str | None:
        """Return the tail that is at `after`, without white space at its end; None if no tail is there."""
        fitting = [tail for tail in tails if self.text.startswith(tail, after)]
        return min((tail for tail in fitting if tail.strip()), key=len, default="").rstrip() if fitting else None


def bare(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a value with plain strings instead of tracked ones."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return {str.__str__(key): bare(item) for key, item in value.items()}
    return [bare(item) for item in value] if isinstance(value, list) else value
