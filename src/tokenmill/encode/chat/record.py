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
_LABELS = frozenset(("name", "id", "type", "tool_call_id"))
_MAX_DEPTH = 64


@dataclass(kw_only=True, slots=True)
class Record:
    """The strings of one conversation, numbered from 1 through all of their characters."""

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
    firsts: list[int] = field(default_factory=list)
    """First string of each message."""
    size: int = 1

    def string_of(self, mark: int) -> int:
        """Return which string a mark of the record belongs to."""
        return bisect_right(self.starts, mark) - 1

    def end_of(self, string: int) -> int:
        """Return one more than the last mark of a string."""
        return self.starts[string + 1] if string + 1 < len(self.starts) else self.size

    def has_text(self, message: int) -> bool:
        """Say whether a message has anything but white space to show."""
        content = self.messages[message]
        shown = [
            content.get(key) for key in ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")
        ]
        return any(_text(value) for value in shown)


def _text(value: object) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, Mapping):
        return any(_text(item) for key, item in value.items() if key != "type")
    return any(map(_text, value)) if isinstance(value, list) else value is not None


def read_record(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
    trained_roles: Sequence[str],
) -> Record:
    """Check a conversation and mark its strings; what is not text is refused."""
    record = Record()
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise Refusal("no_messages", f"a conversation must be a list of messages, got {_shown(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Refusal("role", f"message {index} must be an object with a role, got {_shown(message)}")
        role = message["role"]
        if role not in ROLES and role not in trained_roles:
            raise Refusal("role", f"message {index} has the unknown role {role[:64]!r}")
        _refuse_media(message.get("content"), index)
        record.firsts.append(len(record.starts))
        marked_message = _marked(record, {key: message[key] for key in message if key != "role"}, index, ())
        record.messages.append({"role": authored(role), **marked_message})
        record.roles.append(role)
    if tools is not None:
        record.tools = _marked(record, list(tools), SETTING, ("tools",))
    record.options = {key: _marked(record, value, SETTING, ("options",)) for key, value in options.items()}
    return record


def _refuse_media(content: object, index: int) -> None:
    for part in content if isinstance(content, list | tuple) else ():
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text":
            raise Refusal(
                "not_text", f"message {index} has a part of type {_shown(kind)}; only text can be trained on"
            )


def _marked(record: Record, value: Any, owner: int, path: tuple[str, ...]) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, str):
        return _marked_string(record, value, owner, path)
    if value is None or isinstance(value, bool | int | float):
        return value
    if len(path) > _MAX_DEPTH:
        raise Refusal("not_json", f"message {owner} is nested deeper than {_MAX_DEPTH}")
    if isinstance(value, Mapping):
        made: dict[Tracked, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise Refusal("not_json", f"message {owner} has a key that is no string: {_shown(key)}")
            # A key of arguments is text that the assistant wrote; others are words of the format.
            name = _marked_string(record, key, owner, path if "arguments" in path else (*path, "name"))
            made[name] = _marked(record, item, owner, (*path, key))
        return made
    if isinstance(value, list | tuple):
        return [_marked(record, item, owner, path) for item in value]
    raise Refusal("not_json", f"message {owner} holds a {type(value).__name__}")


def _marked_string(record: Record, text: str, owner: int, path: tuple[str, ...]) -> Tracked:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Refusal("not_unicode", f"message {owner} holds a lone surrogate: {error.reason}") from error
    if not text:
        return authored("")
    record.starts.append(record.size)
    record.owners.append(owner)
    record.labels.append(bool(path) and path[-1] in _LABELS and "arguments" not in path)
    first = record.size
    record.size += len(text)
    return placed(text, first)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
