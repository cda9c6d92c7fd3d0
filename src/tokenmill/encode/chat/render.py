"""A conversation as one text, with what is trained on and who wrote each part."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tokenmill.encode.chat.tracked import GENERATION, UNKNOWN, Tracked, authored, budget, placed, runs_of
from tokenmill.encode.refusal import Refusal
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from jinja2.environment import Template

    from tokenmill.encode.chat.sandbox import Compiled
    from tokenmill.encode.chat.template import ChatTemplate


# A conversation as templates are given it: checked, and with every string marked by where it stood.

ROLES = (
    *("system", "developer", "user", "assistant", "tool", "function"),
    *("ipython", "observation", "model", "chatbot"),
)
"""What chat templates know: they write the role into their control strings, so a role is no free text."""
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


NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """The text of a conversation; ranges are (first character, one after the last), sorted and disjoint."""

    text: str
    supervised: tuple[tuple[int, int], ...]
    """What is trained on."""
    authored: tuple[tuple[int, int], ...]
    """What the template wrote: control strings are control tokens there, and ordinary text elsewhere."""
    lost: tuple[str, ...] = ()
    """What the conversation has and the text has not, by the names of `losses`."""
    unsaid: int = 0
    """Characters of contents, and of their parts, of which none is in the text."""


def render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] = NO_OPTIONS,
    add_generation_prompt: bool = False,
    train_on: Sequence[str] = ("assistant",),
    last_only: bool = False,
) -> Rendered:
    """Render a conversation; one that cannot be rendered or proven raises `Refusal`, which is a `DocumentError`.

    With `add_generation_prompt` it is a prompt, in which nothing is trained on. `kwargs` are names that the
    template reads, such as `enable_thinking`; `now`, a date in ISO form, is what templates get for today. A content
    that is a list of texts is given to the template as it is or, if the template does not know such, as one text.
    Reasoning is given under each name that templates read.
    """

    def rendered(given: Sequence[Mapping[str, Any]]) -> Rendered:
        record = read_record(with_reasoning(given), tools, kwargs, train_on)
        return _rendered(template, record, add_generation_prompt, train_on, last_only)

    texts = flattened(messages)
    if texts is None:
        return rendered(messages)
    made: list[Rendered] = []
    refused: list[Refusal] = []
    for given in (messages, texts):
        try:
            made.append(rendered(given))
        except Refusal as error:
            refused.append(error)
        if made and not made[-1].unsaid:
            return made[-1]
    if not made:
        raise refused[0]
    # A template may leave out a message however it is given; that form is right in which it leaves out less.
    return min(made, key=lambda one: one.unsaid)


def _rendered(
    template: ChatTemplate, record: Record, add_generation_prompt: bool, train_on: Sequence[str], last_only: bool
) -> Rendered:
    from tokenmill.encode.chat.sandbox import compiled
    from tokenmill.encode.chat.spans import find_ranges

    scene = Scene(
        compiled=compiled(template.source, template.where),
        where=template.where,
        special_tokens=template.special_tokens,
        record=record,
    )
    full = scene.trace(len(record.messages), add_generation_prompt)
    scene.refuse_other_text(full, add_generation_prompt)
    losses = losses_of(record, full)
    return Rendered(
        text=full.text,
        supervised=() if add_generation_prompt else find_ranges(scene, train_on, last_only),
        authored=tuple(full.authored()),
        lost=losses.names,
        unsaid=losses.unsaid,
    )


# One conversation under one template, rendered whole or in part, with the origin of every character.

Range: TypeAlias = tuple[int, int]
"""First character and the one after the last."""


class Fragment(NamedTuple):
    """Characters of a render that stand together in one string of the record."""

    begin: int
    end: int
    origin: int
    """The first character's number in the record."""
    step: int
    """1 where each further character has the next number; 0 where all have one, as what an escape makes of it."""
    string: int
    owner: int
    """Which message, or `SETTING`."""

    @property
    def last_origin(self) -> int:
        """The last character's number in the record."""
        return self.origin + (self.end - self.begin - 1) * self.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A render; what is in no fragment the template wrote."""

    text: str
    fragments: list[Fragment]
    """In the order of the text."""
    begins: list[int]
    """Of each fragment."""
    of_message: Mapping[int, list[Fragment]]
    generation: list[Range]
    """What generation blocks wrote; ranges do not touch."""

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
        """Return what the template wrote."""
        edges = [0, *(edge for one in self.fragments for edge in (one.begin, one.end)), len(self.text)]
        return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A conversation to render."""

    compiled: Compiled
    where: str
    special_tokens: Mapping[str, str]
    record: Record
    striking: list[list[int]] = field(default_factory=list)
    """Kept by `sample`, once it is known: messages with what the template may look for."""
    _kept: dict[tuple[int, bool], Trace | Refusal] = field(default_factory=dict)

    def trace(self, num_messages: int, add_generation_prompt: bool) -> Trace:
        """Render the first messages and follow every character; each render is done once."""
        key = (num_messages, add_generation_prompt)
        if key not in self._kept:
            try:
                self._kept[key] = self._traced(*key)
            except Refusal as error:
                self._kept[key] = error
        kept = self._kept[key]
        if isinstance(kept, Refusal):
            raise kept
        return kept

    def try_trace(self, num_messages: int, add_generation_prompt: bool) -> Trace | None:
        """Render the first messages, if the template takes a conversation that ends there."""
        try:
            return self.trace(num_messages, add_generation_prompt)
        except Refusal:
            return None

    def refuse_other_text(self, trace: Trace, add_generation_prompt: bool) -> None:
        """Refuse if plain strings, which every other library renders with, give another text."""
        names = self._names(len(self.record.messages), add_generation_prompt, str)
        text = self._run(self.compiled.plain, {name: bare(value) for name, value in names.items()})
        if text != trace.text:
            raise Refusal("changed", "the text is another one when its characters are followed")

    def _traced(self, num_messages: int, add_generation_prompt: bool) -> Trace:
        rendered = self._run(self.compiled.tracked, self._names(num_messages, add_generation_prompt, authored))
        text = str.__str__(rendered)
        fragments: list[Fragment] = []
        generation: list[Range] = []
        of_message: dict[int, list[Fragment]] = {}
        at = 0
        for size, first, step in runs_of(rendered):
            if first == UNKNOWN:
                raise Refusal("untracked", f"the template makes {text[at : at + 40]!r} in a way not followed")
            if first & GENERATION:
                begin = generation.pop()[0] if generation and generation[-1][1] == at else at
                generation.append((begin, at + size))
            origin = first & (GENERATION - 1)
            if origin:
                string = self.record.string_of(origin)
                owner = self.record.owners[string]
                fragments.append(Fragment(at, at + size, origin, step, string, owner))
                of_message.setdefault(owner, []).append(fragments[-1])
            at += size
        return Trace(
            text=text,
            fragments=fragments,
            begins=[one.begin for one in fragments],
            of_message=of_message,
            generation=generation,
        )

    def _names(self, num_messages: int, prompt: bool, own: Callable[[str], str]) -> dict[str, Any]:
        """Return what the template may refer to; `own` makes a string the template's."""
        record = self.record
        return {
            **{name: own(token) for name, token in self.special_tokens.items()},
            "strftime_now": lambda form: own(self._now().strftime(form)),
            **record.options,
            "messages": record.messages[:num_messages],
            "tools": record.tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }

    def _run(self, template: Template, names: dict[str, Any]) -> str:
        with budget():
            try:
                return template.render(names)
            except (Refusal, ConfigError):
                raise
            except Exception as error:
                # A template may fail in any way that Python can; here it costs the record, not the job.
                text = f"{type(error).__name__}: {error}".replace("'Tracked'", "'str'")
                raise Refusal("template_error", f"the template fails with {text}") from error

    def _now(self) -> datetime:
        given = self.record.options.get("now")
        if given is None:
            raise ConfigError(
                f"chat template {self.where}: it writes today's date, and data must not depend on the clock, "
                'got no date; give one among the options of the template: now = "2025-01-31"'
            )
        try:
            return datetime.fromisoformat(str.__str__(given))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"chat template {self.where}: now must be a date in ISO form, got {given!r}; "
                'write it as "2025-01-31"'
            ) from error


def bare(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a value with plain strings in place of tracked ones."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return {str.__str__(key): bare(item) for key, item in value.items()}
    return [bare(item) for item in value] if isinstance(value, list) else value


# What a conversation holds and its render does not, without being refused.

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
    for string, (owner, name) in enumerate(zip(record.owners, record.fields, strict=True)):
        if name == "content":
            if not record.labels[string]:
                unsaid += 0 if string in written else record.end_of(string) - record.starts[string]
            elif string in written and _flat(record.given[owner]) is not record.given[owner]:
                raise Refusal("parts", f"the template writes the list itself in {record.named(owner)}")
        elif name in _NAMES:
            # The fields for reasoning are names of one thing: to write one of them is to write it.
            key = (owner, _NAMES[name])
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
    texts = [_loss_text(part) for part in parts]
    strings = [text for text in texts if text is not None]
    return {**message, "content": "".join(strings)} if len(strings) == len(texts) else message


def _loss_text(part: object) -> str | None:
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        part = part.get("text")
    return part if isinstance(part, str) else None
