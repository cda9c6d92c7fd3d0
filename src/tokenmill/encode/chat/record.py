"""A conversation as templates are given it: checked, and with every string marked by where it stood."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.encode.chat.refusal import Refusal
from tokenmill.encode.chat.tracked import Tracked, placed
from tokenmill.encode.chat.written import authored

ROLES = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "model", "chatbot")
)
"""Templates write the role into their control strings, so a role is no free text."""
SETTING = -1
"""The message of a character of the tools or options."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields for what the assistant thinks before it answers: names of one thing, of which a template reads one."""
_PARTS: Mapping[str, tuple[str, ...]] = {
    "text": ("content",),
    "reasoning": REASONING,
    "tool calls": ("tool_calls",),
}
_LABELS = frozenset(("name", "id", "type", "tool_call_id"))
_MAX_DEPTH = 64


@dataclass(kw_only=True, slots=True)
class Record:
    """The strings of one conversation, numbered from 1 through all of their characters."""

    given: Sequence[Mapping[str, Any]]
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
    firsts: list[int] = field(default_factory=list)
    """First string of each message."""
    size: int = 1

    def string_of(self, mark: int) -> int:
        """Return which string a mark of the record belongs to."""
        return bisect_right(self.starts, mark) - 1

    def end_of(self, string: int) -> int:
        """Return one more than the last mark of a string."""
        return self.starts[string + 1] if string + 1 < len(self.starts) else self.size

    def parts_of(self, message: int) -> tuple[str, ...]:
        """Say what a message has to show, white space aside: some of text, reasoning, tool calls."""
        fields = self.given[message]
        return tuple(name for name, keys in _PARTS.items() if any(_text(fields.get(key)) for key in keys))

    def named(self, owner: int) -> str:
        """Name a message for people, from 1: `message 2 of 3 (assistant, with tool calls)`."""
        if owner == SETTING:
            return "the tools or options"
        more = [part for part in self.parts_of(owner) if part != "text"]
        role = ", with ".join([self.given[owner]["role"], *([" and ".join(more)] if more else [])])
        return f"{_numbered(self.given, owner)} ({role})"


def _numbered(messages: Sequence[object], index: int) -> str:
    return f"message {index + 1} of {len(messages)}"


def _text(value: object, depth: int = 0) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    if not isinstance(value, Mapping | list | tuple):
        return value is not None
    items = [value[key] for key in value if key != "type"] if isinstance(value, Mapping) else value
    return depth <= _MAX_DEPTH and any(_text(item, depth + 1) for item in items)


def with_reasoning(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Give reasoning each name that templates read, as transformers does: data often has another."""
    if not isinstance(messages, list | tuple):
        return messages
    return [_with_reasoning(message) if isinstance(message, Mapping) else message for message in messages]


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    # Columns of a table give a null to every name that a message does not use.
    own = {key: value for key, value in message.items() if key not in REASONING or value is not None}
    return {"thinking": reasoning, **own, "reasoning_content": reasoning}


def read_record(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
    trained_roles: Sequence[str],
) -> Record:
    """Check a conversation and mark its strings; what is not text is refused."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise Refusal("no_messages", _shown(messages))
    record = Record(given=messages)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Refusal("role", f"{_numbered(messages, index)}: {_shown(message)}")
        role = message["role"]
        if role not in ROLES and role not in trained_roles:
            raise Refusal("role", f"{_numbered(messages, index)} with the unknown role {role[:64]!r}")
        _refuse_media(record, index)
        record.firsts.append(len(record.starts))
        marked_message = _marked(record, {key: message[key] for key in message if key != "role"}, index, ())
        record.messages.append({"role": authored(role), **marked_message})
        record.roles.append(role)
    if tools is not None:
        record.tools = _marked(record, list(tools), SETTING, ("tools",))
    record.options = {key: _marked(record, value, SETTING, ("options",)) for key, value in options.items()}
    return record


def _refuse_media(record: Record, index: int) -> None:
    content = record.given[index].get("content")
    for part in content if isinstance(content, list | tuple) else ():
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text":
            raise Refusal("media", f"a part of type {_shown(kind)} in {record.named(index)}")


def _marked(
    record: Record,
    value: Any,  # noqa: ANN401 - any JSON value
    owner: int,
    path: tuple[str, ...],
    depth: int = 0,
) -> Any:  # noqa: ANN401
    if isinstance(value, str):
        return _marked_string(record, value, owner, path)
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth > _MAX_DEPTH:
        raise Refusal("not_json", f"values nested deeper than {_MAX_DEPTH} in {record.named(owner)}")
    if isinstance(value, Mapping):
        made: dict[Tracked, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise Refusal("not_json", f"the key {_shown(key)} in {record.named(owner)}")
            # A key of arguments is text that the assistant wrote; others are words of the format.
            name = _marked_string(record, key, owner, path if "arguments" in path else (*path, "name"))
            made[name] = _marked(record, item, owner, (*path, key), depth + 1)
        return made
    if isinstance(value, list | tuple):
        return [_marked(record, item, owner, path, depth + 1) for item in value]
    raise Refusal("not_json", f"a value of type {type(value).__name__} in {record.named(owner)}")


def _marked_string(record: Record, text: str, owner: int, path: tuple[str, ...]) -> Tracked:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Refusal("not_unicode", f"a lone surrogate in {record.named(owner)}") from error
    if not text:
        return authored("")
    record.starts.append(record.size)
    record.owners.append(owner)
    record.fields.append(path[0] if path and not text.isspace() else "")
    record.labels.append(bool(path) and path[-1] in _LABELS and "arguments" not in path)
    first = record.size
    record.size += len(text)
    return placed(text, first)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
