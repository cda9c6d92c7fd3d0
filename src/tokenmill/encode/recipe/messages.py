"""Messages of a record in one form: role and content, whatever the record calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import orjson

from tokenmill.errors import nearest

JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"
Message: TypeAlias = "Mapping[str, JSON]"

SPEAKERS: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""What ShareGPT's `from` says -> role."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Why a record gives nothing."""

    reason: str
    detail: str


def kind_name(value: object) -> str:
    """Name the kind of a value for people."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def messages_of(value: object, role: str | None, field: str) -> list[Message] | Problem:
    """Return the messages that a field holds: a list of them, or the text of one whose role is known."""
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        got = "an empty list" if isinstance(value, list) else kind_name(value)
        return Problem(reason="not_messages", detail=f"field {field!r} is {got}")
    messages: list[Message] = []
    for index, item in enumerate(value):
        message = _message(item, f"{field}[{index}]")
        if isinstance(message, Problem):
            return message
        messages.append(message)
    return messages


def _message(item: object, where: str) -> Message | Problem:
    if not isinstance(item, Mapping):
        return Problem(reason="not_messages", detail=f"{where} is {kind_name(item)}")
    # Columns of a table give null for what a message does not have; a template would take it for something said.
    given = {name: value for name, value in item.items() if value is not None}
    if "role" not in given and "from" in given:
        speaker = given.pop("from")
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            detail = f"{where} is from {speaker!r}; {nearest(str(speaker), SPEAKERS)}"
            return Problem(reason="unknown_role", detail=detail)
        given = {"role": SPEAKERS[speaker], "content": given.pop("value", ""), **given}
    if not isinstance(given.get("role"), str):
        return Problem(reason="not_messages", detail=f"{where} has no role, its keys are {sorted(given)}")
    given.setdefault("content", "")
    return given


def joined(before: list[Message], more: list[Message], text: bool, between: str) -> list[Message]:
    """Put the messages of the next field behind those of the fields before it.

    Texts of one role are one message. A list that does not begin with an answer, behind a message of the user,
    holds the whole conversation: it takes the place of what stands before it.
    """
    if not before:
        return more
    if text and before[-1]["role"] == more[0]["role"] and isinstance(before[-1]["content"], str):
        content = f"{before[-1]['content']}{between}{more[0]['content']}"
        return [*before[:-1], {**before[-1], "content": content}]
    if more[0]["role"] not in ("assistant", "tool") and any(message["role"] == "user" for message in before):
        return before + more if text else more
    return before + more


def tools_of(value: object, field: str) -> Sequence[Message] | Problem | None:
    """Return the definitions of tools that a field holds, as a list or as the JSON of one; None: there are none."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value) if value.strip() else None
        except ValueError as error:
            return Problem(reason="tools", detail=f"field {field!r}: {error}")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        return Problem(reason="tools", detail=f"field {field!r} is {kind_name(value)}")
    return value


def texts_of(value: object, depth: int = 8) -> list[str]:
    """Return what there is to read in a field: its text, or those of its messages or parts, in order.

    What lies deeper than `depth` is no message; a hostile record could else exhaust the stack.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping) and depth:
        said = next((value[name] for name in ("content", "value", "text") if value.get(name)), None)
        return texts_of(said, depth - 1)
    if isinstance(value, Sequence) and depth:
        return [text for item in value for text in texts_of(item, depth - 1)]
    return []
