"""What a conversation holds and its render does not, without being refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.encode.chat.record import REASONING, Record
from tokenmill.encode.chat.refusal import Refusal
from tokenmill.encode.chat.scene import Trace
from tokenmill.encode.chat.tracked import runs_of

_DROPPED = "reasoning_dropped"
_NAMES: Mapping[str, str] = {
    "tools": "tools_not_written",
    "tool_calls": "tool_calls_not_written",
    **dict.fromkeys(REASONING, _DROPPED),
}
"""Field -> what it is called that a message, or the record, has it and no character of it was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """What the template was given and did not write."""

    names: tuple[str, ...]
    """Of tools, and of tool calls, reasoning or content of some message."""
    unsaid: int
    """Characters of contents, and of their parts, of which none was written."""


def losses_of(record: Record, full: Trace) -> Losses:
    """Find what no character was written of; where a list of texts is written as a list the record is refused.

    Reasoning counts in a field of its own and at the start of a content, before `</think>`.
    """
    written = {one.string for one in full.fragments}
    found: dict[tuple[int, str], bool] = {}
    unsaid = 0
    for string, (owner, field) in enumerate(zip(record.owners, record.fields, strict=True)):
        if field == "content":
            if not record.labels[string]:
                unsaid += 0 if string in written else record.end_of(string) - record.starts[string]
            elif string in written and _flat(record.given[owner]) is not record.given[owner]:
                raise Refusal("parts", f"the template writes the list itself in {record.named(owner)}")
        elif field in _NAMES:
            # The fields for reasoning are names of one thing: to write one of them is to write it.
            key = (owner, _NAMES[field])
            found[key] = found.get(key, False) or string in written
    lost = {name for (_, name), shown in found.items() if not shown}
    lost |= {"content_not_written"} if unsaid else set()
    for index, begin, end in _thoughts(record):
        fragments = full.of_message.get(index, ())
        if not any(one.origin < end and one.last_origin >= begin for one in fragments):
            lost.add(_DROPPED)
    return Losses(names=tuple(sorted(lost)), unsaid=unsaid)


def _thoughts(record: Record) -> Iterator[tuple[int, int, int]]:
    """Yield message, first mark and last, exclusive, of what stands before `</think>` in an answer."""
    for index, message in enumerate(record.messages):
        content = message.get("content") if record.roles[index] == "assistant" else None
        if isinstance(content, str) and "</think>" in content:
            text = str.__str__(content)
            end = text.index("</think>")
            opened = text.rfind("<think>", 0, end)
            begin = opened + len("<think>") if opened >= 0 else 0
            thought = text[begin:end]
            if thought.strip():
                first = runs_of(content)[0][1] + begin
                blank = len(thought) - len(thought.lstrip())
                yield index, first + blank, first + len(thought.rstrip())


def flattened(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """Return messages in which every list of texts is one text; None where there is no such list."""
    if not isinstance(messages, list | tuple):
        return None
    made = [_flat(message) for message in messages]
    return made if any(one is not given for one, given in zip(made, messages, strict=True)) else None


def _flat(message: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list | tuple):
        return message
    texts = [_text(part) for part in parts]
    strings = [text for text in texts if text is not None]
    return {**message, "content": "".join(strings)} if len(strings) == len(texts) else message


def _text(part: object) -> str | None:
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        part = part.get("text")
    return part if isinstance(part, str) else None
