"""What a recipe takes from each record: pieces of text that are trained or not, or a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import orjson

from tokenmill.encode.chat import RULES as CHAT_RULES
from tokenmill.encode.recipe.recipe import Recipe, Section, Source, Variant
from tokenmill.errors import nearest

# Messages of a record in one form: role and content, whatever the record calls them.

JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"
Message: TypeAlias = "Mapping[str, JSON]"

JOINED = "\n\n"
"""What stands between fields that make one message."""
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


RULES: Mapping[str, str] = {
    **CHAT_RULES,
    "missing_field": "a record must have the fields of the recipe",
    "not_text": "a field without template must be a string",
    "not_messages": "a field with template must be a list of messages",
    "unknown_role": "the speaker of a message must be known",
    "tools": "tools must be a list of objects, or the JSON of one",
    "no_template": "messages must have a chat template",
    "not_number": "rewards must be a list of numbers that fit float32",
    "empty_group": "a record must have at least one response",
    "lengths_differ": "a record must have as many rewards as responses",
    "prompts_differ": "the chat template must write the same prompt before every response",
    "prompt_too_long": "a prompt must not be longer than max_seq_len",
    "no_supervision": "a record must have a token to train on",
    "second_bos": "control strings in a text must not make BOS twice in a row",
    "utf8": "text must be valid Unicode",
}
"""Reason for which a record is refused -> the rule it breaks."""

_MOST = float(np.finfo(np.float32).max)


@dataclass(kw_only=True, slots=True)
class Pieces:
    """Plain texts in order, several of which make an item; grows while records are read."""

    texts: list[str] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    """Of each piece, whether it is trained."""
    anew: list[bool] = field(default_factory=list)
    """Of each piece, whether it begins anew: BOS before it."""
    counts: list[int] = field(default_factory=list)
    """Of each item, how many pieces it has."""
    owners: list[int] = field(default_factory=list)
    """Of each item, the record that it belongs to."""


@dataclass(kw_only=True, slots=True)
class Talks:
    """Conversations in order; grows while records are read."""

    messages: list[Sequence[Message]] = field(default_factory=list)
    tools: list[Sequence[Message] | None] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    """Of each conversation, the record that it belongs to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A source, with all that does not depend on the record worked out."""

    sections: tuple[Section, ...]
    paths: tuple[tuple[str, ...], ...]
    trained: tuple[bool, ...]
    anew: tuple[bool, ...]

    @classmethod
    def of(cls, recipe: Recipe, source: Source) -> Part:
        """Work it out."""
        sections = source.sections
        return cls(
            sections=sections,
            paths=tuple(section.path for section in sections),
            trained=tuple(
                recipe.trains(section.role) if section.action == "$role" else section.action == "train"
                for section in sections
            ),
            anew=tuple(section.add_special_tokens for section in sections),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A variant, with all that does not depend on the record worked out."""

    template: bool
    fields: tuple[tuple[Section, bool, tuple[str, ...]], ...]
    """Each field once: its section, whether it holds a list of items, and its path."""
    parts: Mapping[str, Part]
    adds_text: bool
    """Whether the recipe puts a text before or behind some field."""

    @classmethod
    def of(cls, recipe: Recipe, variant: Variant) -> Way:
        """Work it out."""
        once = {section.field: (section, listed, section.path) for section, listed in variant.sections()}
        return cls(
            template=variant.template,
            fields=tuple(once.values()),
            parts={name: Part.of(recipe, source) for name, source in variant.sources.items()},
            adds_text=any(section.prefix or section.suffix for section, _ in variant.sections()),
        )


def look_up(record: Mapping[str, Any], path: tuple[str, ...]) -> Any:  # noqa: ANN401 - what JSON gives
    """Return what a field holds; None where it is not there."""
    value = record.get(path[0])
    for name in path[1:]:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def choose(ways: Sequence[Way], record: Mapping[str, Any]) -> Way | Problem:
    """Return the first way whose fields the record has, filled and of the right kind.

    Where none fits, that whose fields are at least there, as it can say best what is wrong. With one way only there
    is nothing to choose, and an empty text is a text.
    """
    if len(ways) == 1:
        return ways[0]
    there: Way | None = None
    for way in ways:
        fits = True
        for section, listed, path in way.fields:
            value = look_up(record, path)
            if value is None or value in ("", []):
                break
            fits = fits and _suits(section, listed, value)
        else:
            if fits:
                return way
            there = there or way
    if there is not None:
        return there
    wanted = [" + ".join(section.field for section, _, _ in way.fields) for way in ways]
    some = list(record)[:12]
    got = ", ".join(map(repr, some)) + (", ..." if len(record) > len(some) else "")
    detail = f"fields {got}; wanted are {', or '.join(dict.fromkeys(wanted))}"
    return Problem(reason="missing_field", detail=detail)


def suits(way: Way, record: Mapping[str, Any]) -> bool:
    """Say whether the fields of a way are there and of the right kind; where they are not the record is refused."""
    return all(_suits(section, listed, look_up(record, path)) for section, listed, path in way.fields)


def _suits(section: Section, listed: bool, value: object) -> bool:
    if section.action == "value":
        return True
    if listed:
        if not isinstance(value, Sequence) or isinstance(value, str):
            return False
        return section.template or all(isinstance(item, str) for item in value)
    if isinstance(value, str):
        return not section.template or section.role is not None
    return section.template and isinstance(value, Sequence)


def add_texts(pieces: Pieces, owner: int, record: Mapping[str, Any], part: Part) -> Problem | None:
    """Add an item: the texts of the part's fields."""
    texts = []
    for section, path in zip(part.sections, part.paths, strict=True):
        value = look_up(record, path)
        if not isinstance(value, str):
            return _no_text(value, section.field)
        texts.append(f"{section.prefix}{value}{section.suffix}" if section.prefix or section.suffix else value)
    _add(pieces, owner, texts, part)
    return None


def add_listed_texts(pieces: Pieces, owner: int, record: Mapping[str, Any], part: Part) -> Problem | int:
    """Add an item for every element of the part's field; return how many there are."""
    (section,) = part.sections
    values = _list_of(record, section)
    if isinstance(values, Problem):
        return values
    for index, value in enumerate(values):
        if not isinstance(value, str):
            return _no_text(value, f"{section.field}[{index}]")
        _add(pieces, owner, [f"{section.prefix}{value}{section.suffix}"], part)
    return len(values)


def add_talk(
    talks: Talks, owner: int, record: Mapping[str, Any], part: Part, tools_field: str | None
) -> Problem | None:
    """Add a conversation: the messages of all fields of the part."""
    messages = _conversation(record, part)
    tools = None if tools_field is None else tools_of(look_up(record, tuple(tools_field.split("."))), tools_field)
    for found in (messages, tools):
        if isinstance(found, Problem):
            return found
    assert not isinstance(messages, Problem)
    assert not isinstance(tools, Problem)
    talks.messages.append(messages)
    talks.tools.append(tools)
    talks.owners.append(owner)
    return None


def add_answers(
    talks: Talks, owner: int, record: Mapping[str, Any], prompt: Part, answers: Part, tools_field: str | None
) -> Problem | int:
    """Add a conversation for every answer to a prompt; return how many there are."""
    (section,) = answers.sections
    values = _list_of(record, section)
    if isinstance(values, Problem):
        return values
    asked = Talks()
    problem = add_talk(asked, owner, record, prompt, tools_field)
    if problem is not None:
        return problem
    for index, value in enumerate(values):
        answer = messages_of(value, section.role, f"{section.field}[{index}]")
        if isinstance(answer, Problem):
            return answer
        talks.messages.append([*asked.messages[0], *answer])
        talks.tools.append(asked.tools[0])
        talks.owners.append(owner)
    return len(values)


def numbers_of(record: Mapping[str, Any], section: Section) -> list[float] | Problem:
    """Return the numbers of a field: one, or a list of them."""
    value = look_up(record, section.path)
    if value is None:
        return _no_text(value, section.field)
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    for item in values:
        if not isinstance(item, int | float) or isinstance(item, bool) or not abs(item) <= _MOST:
            return Problem(reason="not_number", detail=f"field {section.field!r} holds {str(item)[:60]!r}")
    return [float(item) for item in values]


def text_of(record: Mapping[str, Any], way: Way) -> str:
    """Return the texts of all fields, each once, a line break between them."""
    paths = [path for section, _, path in way.fields if section.action != "value"]
    return "\n".join(text for path in paths for text in texts_of(look_up(record, path)))


def _conversation(record: Mapping[str, Any], part: Part) -> list[Message] | Problem:
    messages: list[Message] = []
    for section, path in zip(part.sections, part.paths, strict=True):
        value = look_up(record, path)
        if value is None:
            return _no_text(value, section.field)
        more = messages_of(value, section.role, section.field)
        if isinstance(more, Problem):
            return more
        messages = joined(messages, more, isinstance(value, str), JOINED)
    return messages


def _list_of(record: Mapping[str, Any], section: Section) -> Sequence[object] | Problem:
    values = look_up(record, section.path)
    if values is None:
        return _no_text(values, section.field)
    if not isinstance(values, Sequence) or isinstance(values, str):
        return Problem(reason="not_text", detail=f"field {section.field!r} is {kind_name(values)}, no list")
    if not values:
        return Problem(reason="empty_group", detail=f"field {section.field!r} is an empty list")
    return values


def _add(pieces: Pieces, owner: int, texts: Iterable[str], part: Part) -> None:
    pieces.texts.extend(texts)
    pieces.trained.extend(part.trained)
    pieces.anew.extend(part.anew)
    pieces.counts.append(len(part.sections))
    pieces.owners.append(owner)


def _no_text(value: object, name: str) -> Problem:
    if value is None:
        return Problem(reason="missing_field", detail=f"no field {name!r}, or null")
    return Problem(reason="not_text", detail=f"field {name!r} is {kind_name(value)}")
