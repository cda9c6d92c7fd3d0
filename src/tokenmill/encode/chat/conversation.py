"""A conversation as templates are given it: checked, and with every string marked by where it stood."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeAlias

from tokenmill.encode import Refusal
from tokenmill.encode.chat.tracked import Tracked, authored, placed

Message: TypeAlias = Mapping[str, Any]

ROLES = (
    *("system", "developer", "user", "assistant", "tool", "function"),
    *("ipython", "observation", "model", "chatbot"),
)
"""What chat templates know: they write the role into their control strings, so a role is no free text."""
SETTING = -1
"""The message of a character of the tools or options."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields for what the assistant thinks before it answers: names of one thing, of which a template reads one."""
_REASONING = frozenset(REASONING)
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_PARTS: Mapping[str, tuple[str, ...]] = {
    "text": ("content",),
    "reasoning": REASONING,
    "tool calls": ("tool_calls",),
}
LABELS = frozenset(("name", "id", "type", "tool_call_id"))
"""Fields that templates may write again elsewhere."""
MAX_DEPTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The messages of a record, and what its template is told besides."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)
    """Names that the template reads, beside those of the encoder and before them."""


@dataclass(kw_only=True, slots=True)
class MarkedConversation:
    """The strings of one conversation, numbered from 1 through all of their characters."""

    given: Sequence[Message]
    """The messages before their strings were marked."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    roles: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """First mark of each string."""
    owners: list[int] = field(default_factory=list)
    """Message that each string belongs to, or `SETTING`."""
    labels: list[bool] = field(default_factory=list)
    """Whether a string is a name or id, which templates may write again elsewhere, as for a tool's answer."""
    fields: list[str] = field(default_factory=list)
    """Field of the message that each string stands in, or `tools` or `options`; empty for white space and for the
    names of the fields."""
    objects: set[int] = field(default_factory=set)
    """Strings that are the arguments of a tool call as JSON."""
    firsts: list[int] = field(default_factory=list)
    """First string of each message."""
    size: int = 1
    settings: int = 0
    """First mark of the tools and options."""

    def string_of(self, mark: int) -> int:
        """Return which string a mark belongs to."""
        return bisect_right(self.starts, mark) - 1

    def end_of(self, string: int) -> int:
        """Return one more than the last mark of a string."""
        return self.starts[string + 1] if string + 1 < len(self.starts) else self.size

    def size_of(self, message: int, string: int) -> int:
        """Return the characters of a string, counted through its message."""
        string += self.firsts[message]
        return self.end_of(string) - self.starts[string]

    def parts_of(self, message: int) -> tuple[str, ...]:
        """Say what a message has to show, white space aside: some of text, reasoning, tool calls."""
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
        """Mark the strings of the next message; one that holds other things than text is refused."""
        index = len(self.messages)
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind != "text":
                raise Refusal("media", f"a part of type {_shortened(kind)} in {self.named(index)}")
        self.firsts.append(len(self.starts))
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
                    raise Refusal("not_json", f"the key {_shortened(key)} in {self.named(owner)}")
                # A key of arguments is text that the assistant wrote; others are words of the format.
                name = self._mark_string(key, owner, path if "arguments" in path else (*path, "name"))
                marked[name] = self.mark(item, owner, (*path, key), depth + 1)
            return marked
        if isinstance(value, list | tuple):
            return [self.mark(item, owner, path, depth + 1) for item in value]
        raise Refusal("not_json", f"a value of type {type(value).__name__} in {self.named(owner)}")

    def _mark_string(self, text: str, owner: int, path: tuple[str, ...]) -> Tracked:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise Refusal("not_unicode", f"a lone surrogate in {self.named(owner)}") from error
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
    """Check a conversation and mark its strings; what is not text is refused."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise Refusal("no_messages", _shortened(messages))
    conversation = MarkedConversation(given=messages)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Refusal("role", f"{_numbered(messages, index)}: {_shortened(message)}")
        role = message["role"]
        if role not in ROLES and role not in trained_roles:
            raise Refusal("role", f"{_numbered(messages, index)} with the unknown role {role[:64]!r}")
        conversation.add_message(message)
    conversation.settings = conversation.size
    if tools is not None:
        conversation.tools = conversation.mark(list(tools), SETTING, ("tools",))
    for key, value in options.items():
        conversation.options[key] = conversation.mark(value, SETTING, ("options",))
    return conversation


def _numbered(messages: Sequence[object], index: int) -> str:
    return f"message {index + 1} of {len(messages)}"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _has_text(value: object, depth: int = 0) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    if not isinstance(value, Mapping | list | tuple):
        return value is not None
    items = [value[key] for key in value if key != "type"] if isinstance(value, Mapping) else value
    return depth <= MAX_DEPTH and any(_has_text(item, depth + 1) for item in items)


# What a message says of its own training.

_FLAGS = ("train", "training", "weight", "loss", "loss_mask", "loss_weight")
_LIKE_FLAGS = re.compile(r"train|loss|mask|weight|supervis", re.IGNORECASE)
"""In the names of fields that may be flags of another project."""


@lru_cache(maxsize=1024)
def _is_like_a_flag(name: str) -> bool:
    return name not in _FLAGS and _LIKE_FLAGS.search(name) is not None


def says_of_training(message: Message) -> bool | None:
    """Return whether a message says that it is to be trained on, or not; None where it leaves that to its role.

    Only `train` and `training` make a message trained whose role is not: a weight of 1 is what all messages have.
    What is neither yes nor no is refused, as is a flag that may mean either.
    """
    flags = {name: message[name] for name in _FLAGS if message.get(name) is not None}
    for name, value in message.items():
        # A text is a remark, unless the name can be nothing but a flag.
        if _is_like_a_flag(name) and value is not None:
            if isinstance(value, str) and name not in ("mask", "masked"):
                continue
            raise Refusal(
                "flag", f"{name} = {_shortened(value)}, which may mean either; name it train: true or false"
            )
    for name, value in flags.items():
        if value not in (0, 1) or not isinstance(value, bool | int | float):
            raise Refusal(
                "flag", f"{name} = {_shortened(value)}, neither 0 nor 1; weights are not stored, make it one"
            )
    if not flags:
        return None
    if len(set(map(bool, flags.values()))) > 1:
        raise Refusal("flag", f"{_shortened(flags)}, which contradict one another; leave one of them")
    if not next(iter(flags.values())):
        return False
    return True if flags.keys() & {"train", "training"} else None


# Other forms of the same conversation.


def with_reasoning(messages: Sequence[Message]) -> Sequence[Message]:
    """Give reasoning each name that templates read, as transformers does: data often has another."""
    if not isinstance(messages, list | tuple):
        return messages
    return [_with_reasoning(message) if isinstance(message, Mapping) else message for message in messages]


def _with_reasoning(message: Message) -> Message:
    if _REASONING.isdisjoint(message):
        return message
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    # Columns of a table give a null to every name that a message does not use.
    own = {key: value for key, value in message.items() if key not in REASONING or value is not None}
    return {"thinking": reasoning, **own, "reasoning_content": reasoning}


def forms_of(messages: Sequence[Message]) -> Iterator[tuple[Sequence[Message], tuple[str, ...]]]:
    """Yield the forms in which templates may want messages, as they are given first; with what to note of each.

    Contents in parts may be one text; the arguments of tool calls may be a JSON object or its text; and where
    there are nothing but tool calls the content may be null, or empty.
    """
    for calling in (messages, *_without_text(messages)):
        converted = ((given, ("arguments_converted",)) for given in _converted(calling))
        for given, notes in ((calling, ()), *converted):
            yield given, notes
            texts = flattened(given)
            if texts is not None:
                yield texts, notes


def may_have_forms(message: Message) -> bool:
    """Say whether `forms_of` may give another form of a message."""
    return bool(_tool_calls(message)) or has_parts(message)


def _tool_calls(message: object) -> Sequence[Any]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return calls if isinstance(calls, list | tuple) else ()


def _without_text(messages: Sequence[Message]) -> list[list[Message]]:
    """Return messages in which the content beside tool calls is null if it is empty, and empty if it is null."""
    if not isinstance(messages, list | tuple):
        return []
    bare = {index for index, message in enumerate(messages) if _tool_calls(message) and not message.get("content")}
    return [
        [{**message, "content": content} if index in bare else message for index, message in enumerate(messages)]
        for content in (None, "")
        if any(messages[index].get("content") != content for index in bare)
    ]


def _converted(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield messages with the arguments of all tool calls as objects, and as texts, where they are not so."""
    if not isinstance(messages, list | tuple) or not any(map(_tool_calls, messages)):
        return
    for form in (_object_of, _text_of):
        converted = [
            {**message, "tool_calls": [_converted_call(call, form) for call in _tool_calls(message)]}
            if _tool_calls(message)
            else message
            for message in messages
        ]
        if converted != list(messages):
            yield converted


def _converted_call(call: object, form: Callable[[object], object]) -> object:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _converted_call(call["function"], form)}
    try:
        return {**call, "arguments": form(call["arguments"])} if "arguments" in call else call
    except (TypeError, ValueError, RecursionError):
        return call


def _object_of(arguments: object) -> object:
    value = json.loads(arguments or "{}") if isinstance(arguments, str) else None
    return value if isinstance(value, dict) else arguments


def _text_of(arguments: object) -> object:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


def flattened(messages: Sequence[Message]) -> list[Message] | None:
    """Return messages in which every list of texts is one text; None where there is no such list."""
    if not isinstance(messages, list | tuple) or not any(map(has_parts, messages)):
        return None
    return [
        {**message, "content": "".join(_texts(message))} if has_parts(message) else message for message in messages
    ]


def has_parts(message: Message) -> bool:
    """Say whether the content of a message is a list of texts."""
    is_list = isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
    return is_list and None not in _texts(message)


def _texts(message: Message) -> list[Any]:
    """Return the text of each part of a content; None for a part that is no text."""
    parts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        for part in message["content"]
    ]
    return [part if isinstance(part, str) else None for part in parts]
