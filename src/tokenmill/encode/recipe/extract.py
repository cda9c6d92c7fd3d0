"""What a recipe takes from each record: texts that are trained or not, or a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import numpy as np

from tokenmill.encode import Refusal
from tokenmill.encode.chat.conversation import Message
from tokenmill.encode.recipe.recipe import (
    HISTORY,
    OPTIONS,
    SYSTEM,
    SYSTEM_PROMPT,
    Names,
    Recipe,
    Section,
    Source,
    Variant,
)
from tokenmill.errors import nearest
from tokenmill.fields import field_of, json_kind

Record: TypeAlias = Mapping[str, Any]

# Messages in one form, with role and content, whatever a record calls them.

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
    "function_response": "tool",
    "function_call": "assistant",
}
"""What ShareGPT's `from` says -> role. The text of a `function_call` is the JSON of the tools that are called."""
_CALL = "function_call"
_OWN_NAMES = Names()


def messages_of(value: object, role: str | None, field: str, names: Names = _OWN_NAMES) -> list[Message]:
    """Return the messages that a field holds: a list of them, one, or the text of one whose role is known."""
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping) and role is not None:
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        got = "an empty list" if isinstance(value, list) else json_kind(value)
        raise Refusal("not_messages", f"field {field!r} is {got}")
    return [_message(item, f"{field}[{index}]", names) for index, item in enumerate(value)]


def _message(item: object, where: str, names: Names) -> Message:
    if not isinstance(item, Mapping):
        raise Refusal("not_messages", f"{where} is {json_kind(item)}")
    # Columns of a table give null for what a message does not have; a template would take it for a value.
    message = {name: value for name, value in item.items() if value is not None}
    for key, theirs in names.keys.items():
        if theirs in message:
            message = {key: message.pop(theirs), **message}
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        if not isinstance(speaker, str) or (speaker not in SPEAKERS and speaker not in names.roles):
            known = [*SPEAKERS, *names.roles]
            raise Refusal("unknown_role", f"{where} is from {speaker!r}; {nearest(str(speaker), known)}")
        role = names.roles.get(speaker) or SPEAKERS[speaker]
        role = speaker if speaker == _CALL and speaker not in names.roles else role
        message = {"role": role, "content": message.pop("value", ""), **message}
    if message.get("role") == _CALL and _CALL not in names.roles:
        message |= {"role": "assistant", "content": "", **_called(message.get("content"), where)}
    if not isinstance(message.get("role"), str):
        raise Refusal("not_messages", f"{where} has no role, its keys are {sorted(message)}")
    message["role"] = names.roles.get(message["role"], message["role"])
    if "content" not in message and isinstance(message.get("value"), str):
        message["content"] = message.pop("value")  # half of ShareGPT's keys
    message.setdefault("content", "")
    return message


def _called(text: object, where: str) -> Message:
    """Return the tool calls in the text of a `function_call`: JSON of one or of a list, perhaps after thoughts."""
    thought, end, rest = text.partition("</think>") if isinstance(text, str) else ("", "", "")
    thinks = bool(end) and thought.lstrip().startswith("<think>")
    try:
        calls = msgspec.json.decode(rest if thinks else text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise Refusal("tools", f"{where} is a function_call of no JSON: {error}") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise Refusal("tools", f"{where} is a function_call without the name of a tool")
    functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    reasoning = {"reasoning_content": thought.lstrip().removeprefix("<think>").strip()} if thinks else {}
    return {"tool_calls": [{"type": "function", "function": function} for function in functions], **reasoning}


def options_of(value: object) -> Mapping[str, Any]:
    """Return the arguments that a record has for the chat template, without nulls."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Refusal("options", f"field {OPTIONS!r} is {json_kind(value)}")
    return {name: item for name, item in value.items() if item is not None}


def with_system(messages: list[Message], text: object) -> list[Message]:
    """Put the text of a system before messages; a system message that says the same is kept."""
    if text is None or text == "":
        return messages
    if not isinstance(text, str):
        raise Refusal("not_text", f"field {SYSTEM!r} is {json_kind(text)}")
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    if "".join(texts_of(messages[0])) != text:
        raise Refusal("two_systems", f"field {SYSTEM!r} has {text[:40]!r}, the first message another text")
    return messages


def with_history(messages: list[Message], turns: object) -> list[Message]:
    """Put the turns of the field `history`, pairs of question and answer, behind the system of messages."""
    if not turns:
        return messages
    earlier: list[Message] = []
    for index, pair in enumerate(turns if isinstance(turns, Sequence) and not isinstance(turns, str) else [turns]):
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise Refusal("not_messages", f"{HISTORY}[{index}] is no question and answer, but {json_kind(pair)}")
        earlier += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
    at = 1 if messages[0]["role"] == "system" else 0
    return [*messages[:at], *earlier, *messages[at:]]


def joined(before: list[Message], more: list[Message], is_text: bool) -> list[Message]:
    """Append the messages of the next field to those of the previous fields.

    Texts of one role become one message, a line each, as LLaMA-Factory has it. A list behind a message of the user
    that does not begin with an answer is the whole conversation: it replaces the messages before it.
    """
    if not before:
        return more
    if is_text and before[-1]["role"] == more[0]["role"] and isinstance(before[-1]["content"], str):
        content = f"{before[-1]['content']}\n{more[0]['content']}"
        return [*before[:-1], {**before[-1], "content": content}]
    answers = more[0]["role"] in ("assistant", "tool")
    is_whole = not is_text and not answers and any(message["role"] == "user" for message in before)
    return more if is_whole else before + more


def tools_of(value: object, field: str) -> Sequence[Message] | None:
    """Return the definitions of tools that a field holds, as a list or as the JSON of one; None: there are none."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise Refusal("tools", f"field {field!r}: {error}") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise Refusal("tools", f"field {field!r} is {json_kind(value)}")
    return value


def texts_of(value: object, depth: int = 8) -> list[str]:
    """Return the texts in a field: its own, or those of its messages or parts, in order.

    What lies deeper than `depth` is left out: a hostile record could exhaust the stack.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping) and depth:
        text = next((value[name] for name in ("content", "value", "text") if value.get(name)), None)
        return texts_of(text, depth - 1)
    if isinstance(value, Sequence) and depth:
        return [text for item in value for text in texts_of(item, depth - 1)]
    return []


# What a source takes from a record.


@dataclass(kw_only=True, slots=True)
class PlainItems:
    """Items of plain text, each of one or more texts end to end; they grow while records are read."""

    texts: list[str] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    """Of each text, whether it is trained."""
    anew: list[bool] = field(default_factory=list)
    """Whether BOS comes before each text."""
    counts: list[int] = field(default_factory=list)
    """Of each item, how many texts it has."""
    owners: list[int] = field(default_factory=list)
    """Of each item, the record that it belongs to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceReader:
    """Takes what one source needs from records; what does not depend on the record is computed once."""

    sections: tuple[Section, ...]
    trained: tuple[bool, ...]
    anew: tuple[bool, ...]
    listed: bool
    """Whether the one field holds a list of items, and not one."""
    names: Names
    trained_roles: frozenset[str]

    @classmethod
    def of(cls, recipe: Recipe, source: Source) -> SourceReader:
        """Return the reader of a source."""
        return cls(
            sections=source.sections,
            trained=tuple(map(recipe.trains_section, source.sections)),
            anew=tuple(bool(section.add_special_tokens) for section in source.sections),
            listed=bool(source.list_field),
            names=recipe.names,
            trained_roles=frozenset(recipe.trained_roles),
        )

    def add_texts(self, items: PlainItems, owner: int, record: Record) -> None:
        """Add an item: the texts of all fields."""
        texts = []
        for section in self.sections:
            value = field_of(record, section.field)
            if not isinstance(value, str):
                raise _no_text(value, section.field)
            texts.append(f"{section.prefix}{value}{section.suffix}" if section.prefix or section.suffix else value)
        self._add(items, owner, texts)

    def add_listed_texts(self, items: PlainItems, owner: int, record: Record) -> int:
        """Add an item for every element of the one field; return how many there are."""
        section = self.sections[0]
        values = self.list_in(record)
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise _no_text(value, f"{section.field}[{index}]")
            self._add(items, owner, [f"{section.prefix}{value}{section.suffix}"])
        return len(values)

    def _add(self, items: PlainItems, owner: int, texts: Sequence[str]) -> None:
        items.texts += texts
        items.trained += self.trained
        items.anew += self.anew
        items.counts.append(len(texts))
        items.owners.append(owner)

    def messages(self, record: Record) -> list[Message]:
        """Return the messages of all fields, as one conversation."""
        messages: list[Message] = []
        for section in self.sections:
            value = field_of(record, section.field)
            if value is None:
                raise _no_text(value, section.field)
            more = messages_of(value, section.role, section.field, self.names)
            if section.action == "mask" and len(self.sections) > 1:
                # A masked section is not trained on, whoever says it.
                more = [
                    {**message, "train": False} if message["role"] in self.trained_roles else message
                    for message in more
                ]
            messages = joined(messages, more, isinstance(value, str))
        return messages

    def parted(self, record: Record) -> tuple[list[Message], list[list[Message]]]:
        """Return the messages before the answer that a conversation ends with, and that answer alone."""
        *asked, answer = self.messages(record)
        if answer["role"] != "assistant" or not asked:
            field = self.sections[0].field
            raise Refusal(
                "not_messages", f"field {field!r} does not end with an answer, but with {answer['role']!r}"
            )
        return asked, [[answer]]

    def answers(self, record: Record) -> list[list[Message]]:
        """Return the messages of every element of the one field."""
        section = self.sections[0]
        return [
            messages_of(value, section.role, f"{section.field}[{index}]", self.names)
            for index, value in enumerate(self.list_in(record))
        ]

    def list_in(self, record: Record) -> Sequence[object]:
        """Return the list that the one field holds, or its one item; an empty list is refused."""
        section = self.sections[0]
        values = field_of(record, section.field)
        if values is None:
            raise _no_text(values, section.field)
        if not self.listed:
            return [values]
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise Refusal("not_text", f"field {section.field!r} is {json_kind(values)}, no list")
        if not values:
            raise Refusal("empty_group", f"field {section.field!r} is an empty list")
        return values

    def numbers(self, record: Record) -> list[float]:
        """Return the numbers of the one field: one, or a list of them."""
        section = self.sections[0]
        value = field_of(record, section.field)
        if value is None:
            raise _no_text(value, section.field)
        if isinstance(value, bool):
            return [float(value)]  # a label of one answer: good or bad
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        largest = float(np.finfo(np.float32).max)
        for item in values:
            if not isinstance(item, int | float) or isinstance(item, bool) or not abs(item) <= largest:
                raise Refusal("not_number", f"field {section.field!r} holds {str(item)[:60]!r}")
        return [float(item) for item in values]


def _no_text(value: object, name: str) -> Refusal:
    if value is None:
        return Refusal("missing_field", f"no field {name!r}, or null")
    return Refusal("not_text", f"field {name!r} is {json_kind(value)}")


# Which variant of a recipe reads a record.


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantReader:
    """Takes what a variant needs from records; what does not depend on the record is computed once."""

    template: bool
    fields: tuple[tuple[Section, bool], ...]
    """Each field once: its section, and whether it holds a list of items."""
    sources: Mapping[str, SourceReader]
    reads_system: bool
    """Whether the field `system` is put before messages, as no section of the variant has it."""
    leaves_system_prompt: bool
    """Whether nothing reads the field `system_prompt` beside messages."""
    asked: str | None
    """Field with the text of a user, before which the field `history` stands; None: there is none."""
    needs_text: bool
    """Whether a record without any text has nothing to train on.

    An empty conversation is for the chat template to refuse, which may write something even so.
    """

    @classmethod
    def of(cls, recipe: Recipe, variant: Variant) -> VariantReader:
        """Return the reader of a variant."""
        once = {section.field: (section, listed) for section, listed in variant.all_sections()}
        adds_text = any(section.prefix or section.suffix for section, _ in variant.all_sections())
        asked = [section.field for section, _ in variant.all_sections() if section.role == "user"]
        return cls(
            template=variant.template,
            fields=tuple(once.values()),
            sources={name: SourceReader.of(recipe, source) for name, source in variant.sources.items()},
            reads_system=variant.template and SYSTEM not in once,
            leaves_system_prompt=variant.template and SYSTEM_PROMPT not in {*once, *recipe.names.fields.values()},
            asked=asked[0] if asked and HISTORY not in once else None,
            needs_text=recipe.kind != "seq" and not variant.template and not adds_text,
        )

    def has_history(self, record: Record) -> bool:
        """Return whether a record has turns before the text of a user."""
        if self.asked is None or not record.get(HISTORY):
            return False
        return isinstance(field_of(record, self.asked), str)

    def refuse_turns(self, record: Record) -> None:
        """Refuse a record of plain texts with a system or earlier turns, which only a chat template can write."""
        system = record.get(SYSTEM) if self.asked is not None else None
        beside = HISTORY if self.has_history(record) else None
        if isinstance(system, str) and system.strip():
            beside = SYSTEM
        if beside is not None and not any(section.field == beside for section, _ in self.fields):
            raise Refusal("no_template", f"field {beside!r} stands beside texts, which have no place for it")

    def content(self, record: Record) -> str | None:
        """Return the texts of all fields, each once, a line each; None if one is of a wrong kind, or all empty."""
        lines: list[str] = []
        for section, listed in self.fields:
            value = field_of(record, section.field)
            if not _suits(section, listed, value):
                return None
            if section.action != "value":
                lines += texts_of(value)
        if self.reads_system:
            lines += texts_of(record.get(SYSTEM))
        if self.has_history(record):
            lines += texts_of(record[HISTORY])
        text = "\n".join(lines)
        return None if self.needs_text and not text else text


def choose(readers: Sequence[VariantReader], record: Record) -> VariantReader:
    """Return the first variant whose fields the record has, filled and of the right kind.

    Where none fits, the first whose fields are at least present, as it can say best what is wrong. A single variant
    is always taken, also for an empty text.
    """
    if len(readers) == 1:
        return readers[0]
    present: VariantReader | None = None
    for reader in readers:
        fits = True
        for section, listed in reader.fields:
            value = field_of(record, section.field)
            if value is None or value in ("", []):
                break
            fits = fits and _suits(section, listed, value)
        else:
            if fits:
                return reader
            present = present or reader
    if present is not None:
        return present
    wanted = [" + ".join(section.field for section, _ in reader.fields) for reader in readers]
    names = list(record)[:12]
    shown = ", ".join(map(repr, names)) + (", ..." if len(record) > len(names) else "")
    # A record of JSONL has only the fields that some variant wants, perhaps none.
    got = f"fields {shown}, but " if names else ""
    raise Refusal("missing_field", f"{got}no {', nor '.join(dict.fromkeys(wanted))}")


def _suits(section: Section, listed: bool, value: object) -> bool:
    """Tell whether a field holds what its section takes; else its record is refused."""
    if section.action == "value":
        return True
    if listed:
        if not isinstance(value, Sequence) or isinstance(value, str):
            return False
        return section.template or all(isinstance(item, str) for item in value)
    if isinstance(value, str):
        return not section.template or section.role is not None
    return section.template and isinstance(value, Sequence if section.role is None else Sequence | Mapping)
