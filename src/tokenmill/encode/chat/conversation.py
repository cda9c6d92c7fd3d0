"""A conversation: its strings marked by where they stood, its renders, and where a message stands in them."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tokenmill.encode import Refusal
from tokenmill.encode.chat.tracked import (
    GENERATION,
    UNKNOWN,
    Tracked,
    authored,
    budget,
    placed,
    runs_of,
    seeking,
    too_much_memory,
)
from tokenmill.errors import ConfigError
from tokenmill.fields import surrogate_in

if TYPE_CHECKING:  # conversations are made where no template is opened, and jinja2 takes time to load
    from jinja2.environment import Template

    from tokenmill.encode.chat.template import ChatTemplate

Message: TypeAlias = Mapping[str, Any]

ROLES = (
    *("system", "developer", "user", "assistant", "tool", "function"),
    *("ipython", "observation", "model", "chatbot"),
)
"""Roles that chat templates know. They write the role into their control strings, so it is no free text."""
SETTING = -1
"""In place of the message, for characters of the tools or options."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields for what the assistant thinks before it answers; they mean the same, and a template reads one of them."""
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
    """The messages of a record, and what else its template is given."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)
    """Names that the template reads; they overrule those of the encoder."""


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
    """Field of the message that each string stands in, or `tools` or `options`; empty for white space, and for the
    names of the fields."""
    objects: set[int] = field(default_factory=set)
    """Strings that are the arguments of a tool call as JSON."""
    call_ends: list[int] = field(default_factory=list)
    """One more than the last string of each tool call."""
    firsts: list[int] = field(default_factory=list)
    """First string of each message."""
    size: int = 1
    settings: int = 0
    """First mark of the tools and options."""

    def string_of(self, mark: int) -> int:
        """Return which string a mark belongs to."""
        return bisect_right(self.starts, mark) - 1

    def call_of(self, string: int) -> int:
        """Return the number of the tool call that a string belongs to."""
        return bisect_right(self.call_ends, string)

    def end_of(self, string: int) -> int:
        """Return one more than the last mark of a string."""
        return self.starts[string + 1] if string + 1 < len(self.starts) else self.size

    def size_of(self, message: int, string: int) -> int:
        """Return how many characters a string has; strings are counted from the first of their message."""
        string += self.firsts[message]
        return self.end_of(string) - self.starts[string]

    def parts_of(self, message: int) -> tuple[str, ...]:
        """Return what a message has beside white space: some of text, reasoning, tool calls."""
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
        """Mark the strings of the next message; one that holds anything but text is refused."""
        index = len(self.messages)
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind != "text":
                raise Refusal("media", f"a part of type {shortened(kind)} in {self.named(index)}")
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
    """Check a conversation and mark its strings; what is not text is refused."""
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
    conversation.settings = conversation.size
    if tools is not None:
        conversation.tools = conversation.mark(list(tools), SETTING, ("tools",))
    for key, value in options.items():
        conversation.options[key] = conversation.mark(value, SETTING, ("options",))
    return conversation


def _numbered(messages: Sequence[object], index: int) -> str:
    return f"message {index + 1} of {len(messages)}"


def shortened(value: object) -> str:
    """Show a value for people."""
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
    """Adjacent characters of a render that are adjacent in one string of the conversation too."""

    begin: int
    end: int
    origin: int
    """The first character's number in the conversation."""
    step: int
    """1 where each character has the next number; 0 where all have the same, as those that escape one character."""
    string: int
    owner: int
    """Which message, or `SETTING`."""

    @property
    def last_origin(self) -> int:
        """The last character's number in the conversation."""
        return self.origin + (self.end - self.begin - 1) * self.step


class Header(NamedTuple):
    """What asks for a message, as shown by a render that stops before it."""

    after: int | None
    """Number of the character that it follows; None if nothing of the conversation stands before it."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A render; the template wrote what is in no fragment."""

    conversation: MarkedConversation
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
        edges = [0, *(edge for each in self.fragments for edge in (each.begin, each.end)), len(self.text)]
        return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]

    def origin_at(self, at: int) -> int | None:
        """Return the number of a character of the text; None where the template wrote it."""
        fragments = self.within(at, at + 1)
        return fragments[0].origin + (at - fragments[0].begin) * fragments[0].step if fragments else None

    def is_repeated(self, fragment: Fragment) -> bool:
        """Say whether the last character of a fragment stands elsewhere too, so that it marks no place."""
        origin = fragment.last_origin
        others = [
            each
            for each in self.of_message[fragment.owner]
            if each.begin != fragment.begin and each.origin <= origin <= each.last_origin
        ]
        return not self.conversation.labels[fragment.string] and any(each.step for each in others)

    def shown(self, begin: int) -> str:
        """Show people the text from a character on."""
        return repr(self.text[begin : begin + 24])

    def own_range(self, index: int) -> Range | None:
        """Return where a message begins and ends; None if it is not written. A repeated name does not count."""
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

    def opening(self, index: int, first: int) -> str | None:
        """Return what the template writes between the message before and this one, which begins at `first`."""
        at = bisect_left(self.begins, first)
        previous = self.fragments[at - 1] if at else None
        return self.text[previous.end : first] if previous and previous.owner == index - 1 else None

    def goes_on(self, index: int, after: int) -> bool:
        """Say whether this message and the next make one turn: both of the assistant, with nothing between them."""
        pair = self.conversation.roles[index : index + 2]
        following = self.within(after, after + 1)
        return pair == ["assistant"] * 2 and any(
            each.owner == index + 1 and each.begin == after for each in following
        )

    def header_ends(self, header: Header, before: int) -> list[int]:
        """Return all places where a header ends, up to a character."""
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
        """Return which of some tails stands at `after`, without white space at its end; None if none does."""
        fitting = [tail for tail in tails if self.text.startswith(tail, after)]
        return min((tail for tail in fitting if tail.strip()), key=len, default="").rstrip() if fitting else None


# Renders of a conversation, whole or in part, which show where its messages begin and end.

# A generation prompt may open the reasoning behind the header, or open and close it. The header ends before that:
# inside of a turn the same text is what the model has to produce. An opener that is not listed here counts as part
# of the header where the turn has it too; where the turn lacks it, the conversation is refused.
_OPENED = (
    r"(?:<think>|<thinking>|<\|channel>thought|<\|START_THINKING\|>|\[THINK\]|<seed:think>)\s*"
    r"(?:</think>|</thinking>|<channel\|>|<\|END_THINKING\|>|\[/THINK\]|</seed:think>)?\s*"
)
_REASONING_AT_END = re.compile(_OPENED + r"\Z")
_REASONING_AT_START = re.compile(_OPENED)
MARKUP = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Za-z_]{1,32}\]")
"""What control strings look like."""
_ENDS_OF_TURN = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>", "<|eot|>",
    "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>", "<|assistant_end|>", "</s>", "[/INST]",
)  # fmt: skip
"""What models write to end a turn."""
_MAX_DATE_CHARS = 4096
"""Of the format of a date; the date itself may be 256 times as long."""
_KEPT_TRACES = 16
"""Renders of parts of a conversation; the memory for all of them would grow with the square of its length."""


@dataclass(kw_only=True, slots=True)
class Renderer:
    """Renders one conversation, whole or in part, with one template."""

    template: ChatTemplate
    conversation: MarkedConversation
    sought: set[str] = field(default_factory=set)
    """Strings that the template looked for in texts, in all renders so far."""
    striking: list[list[int]] | None = None
    """Kept by `sample`: exchanges that hold what the template looks for."""
    near: tuple[list[list[int]], list[list[int]]] | None = None
    """Kept by `sample`: the messages on which it depends how each is written."""
    samples: dict[tuple[int, tuple[str, ...]], tuple[dict[str, Any], str]] = field(default_factory=dict)
    """Kept by `sample`: what stands for a message, by what the template looked for, and its text."""
    unsampled: set[int] = field(default_factory=set)
    """Messages whose turn no sample showed, so that renders of the conversation itself had to."""
    _traces: dict[tuple[int, bool], Trace | Refusal] = field(default_factory=dict)

    def trace(self, num_messages: int, add_generation_prompt: bool) -> Trace:
        """Render the first messages and follow every character; the latest renders, and the whole one, are kept."""
        key = (num_messages, add_generation_prompt)
        if key not in self._traces:
            try:
                self._traces[key] = self._traced(*key)
            except Refusal as error:
                self._traces[key] = error
            whole = (len(self.conversation.messages), False)
            for old in [old for old in self._traces if old != whole][:-_KEPT_TRACES]:
                del self._traces[old]
        trace = self._traces[key]
        if isinstance(trace, Refusal):
            raise trace
        return trace

    def try_trace(self, num_messages: int, add_generation_prompt: bool) -> Trace | None:
        """Render the first messages, if the template takes a conversation that ends there."""
        try:
            return self.trace(num_messages, add_generation_prompt)
        except Refusal:
            return None

    def refuse_other_text(self, trace: Trace, add_generation_prompt: bool) -> None:
        """Refuse a conversation of which plain strings, as every other library has them, give another text."""
        conversation = self.conversation
        text = plain_text(
            self.template,
            self.template.compiled.plain,
            bare(conversation.messages),
            bare(conversation.tools),
            bare(conversation.options),
            add_generation_prompt,
        )
        if text != trace.text:
            raise Refusal("changed", "the text is another one when its characters are followed")

    def _traced(self, num_messages: int, add_generation_prompt: bool) -> Trace:
        conversation = self.conversation
        names = _names(
            self.template,
            conversation.messages[:num_messages],
            conversation.tools,
            conversation.options,
            add_generation_prompt,
            authored,
        )
        with seeking(self.sought, conversation.settings):
            rendered = _run(self.template.compiled.tracked, names)
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
                string = conversation.string_of(origin)
                owner = conversation.owners[string]
                fragments.append(Fragment(at, at + size, origin, step, string, owner))
                of_message.setdefault(owner, []).append(fragments[-1])
            at += size
        return Trace(
            conversation=conversation,
            text=text,
            fragments=fragments,
            begins=[each.begin for each in fragments],
            of_message=of_message,
            generation=generation,
        )

    # Where a message begins and ends, as shown by renders that stop before or behind it.

    def asked(self, index: int) -> Header | None:
        """Return what asks for a message; None if the template does not render a prompt there."""
        prompt = self.try_trace(index, True)
        if prompt is None:
            return None
        last = prompt.fragments[-1] if prompt.fragments else None
        if last and prompt.is_repeated(last):
            return None
        text = _REASONING_AT_END.sub("", prompt.text[last.end if last else 0 :])
        return Header(after=last.last_origin if last else None, text=text)

    def header_end(self, trace: Trace, index: int, before: int) -> int:
        """Return where a turn of the assistant begins: behind its header, at or before a character."""
        header = self.asked(index)
        ends = trace.header_ends(header, before) if header else []
        end = ends[-1] if ends else None
        if end is not None and (end == before or not MARKUP.search(trace.text, end, before)):
            return end
        # A template may also write the header where its prompt does not, as in a turn that goes on after a tool.
        text = _REASONING_AT_END.sub("", self._generation_prompt(index) or "")
        least = end
        if least is None:
            least = max((min(each.end, before) for each in trace.before(before) if each.owner != index), default=0)
        at = trace.text.rfind(text, least, before) if text.strip() else -1
        if at >= 0:
            return at + len(text)
        if end is None:
            raise Refusal("header", f"{trace.conversation.named(index)}, and {text!r} is not before it")
        return end

    def begin(self, trace: Trace, index: int, first: int, end: int) -> int:
        """Return where a turn of the assistant begins, whose message begins at `first` and which ends at `end`."""
        try:
            return self.header_end(trace, index, first)
        except Refusal as error:
            begin = self._unasked(trace, index, first, end) if error.reason == "header" else None
            if begin is None:
                raise
            return begin

    def _unasked(self, trace: Trace, index: int, first: int, end: int) -> int | None:
        """Return where a turn without a header begins; None if that cannot be told.

        It begins behind what ends the turn before it. What then stands before the message is the assistant's to
        produce if the template writes the same inside of a turn: before calls that follow others in one message.
        """
        before = trace.own_range(index - 1) if index else None
        if before is None or before[1] > first:
            return None
        if before[1] == first and trace.goes_on(index - 1, first):
            return first
        tails = self.closings(index - 1, trace.origin_at(before[1] - 1))
        begins = {before[1] + len(tail) for tail in tails if trace.text.startswith(tail, before[1])}
        if first in begins:
            return first
        inside, prompt = self._calls_inside_a_turn(index) if begins else ("", "")
        for begin in sorted(begins):
            if inside.endswith(trace.text[begin:end]) and prompt not in trace.text[begin:first]:
                return begin
        return None

    def _calls_inside_a_turn(self, index: int) -> tuple[str, str]:
        """Return a turn that has the tool calls of a message twice and nothing else, and what asks for it."""
        message = self.conversation.given[index]
        calls = message.get("tool_calls")
        if not calls or not isinstance(calls, list | tuple):
            return "", ""
        content = None if message.get("content") is None else ""
        calling = {"role": "assistant", "content": content, "tool_calls": [*calls, *calls]}
        twice = self.of([{"role": "user", "content": "Q"}, calling])
        try:
            trace = twice.trace(2, False)
            own = trace.own_range(1)
            if own is None:
                return "", ""
            begin = twice.header_end(trace, 1, own[0])
            tail = trace.closing_of(twice.closings(1, trace.origin_at(own[1] - 1)), own[1])
        except Refusal:
            return "", ""
        prompt = (twice._generation_prompt(1) or "").strip()
        return ("", "") if tail is None or not prompt else (trace.text[begin : own[1] + len(tail)], prompt)

    def empty_turn(self, trace: Trace, index: int) -> int:
        """Return where a turn of the assistant without any text begins."""
        header = self.asked(index)
        ends = trace.header_ends(header, len(trace.text)) if header else []
        if len(ends) != 1:
            raise Refusal("header", f"{trace.conversation.named(index)}, which is empty")
        return ends[0]

    def closings(self, index: int, after: int | None) -> tuple[str, ...]:
        """Return what may end the turn of a message, whose last character has the number `after`.

        Behind the last message of a conversation a template may write another end than behind others (EOS, or
        another end of turn). So two renders that end with the message count: with and without a generation prompt.
        """
        ended = self._tail(self.try_trace(index + 1, False), index, after)
        more = self._tail(self.try_trace(index + 1, True), index, after)
        tails = [] if ended is None else self._proven(ended, index, after)
        if more is not None and (ended is None or not more.startswith(ended)):
            prompt = self._generation_prompt(index)
            tails += [more.removesuffix(prompt)] if prompt and more.endswith(prompt) else []
        if ended is None and more is None and after is not None:
            return self._closings_of_next(index)
        return tuple(tails)

    def _closings_of_next(self, index: int) -> tuple[str, ...]:
        """Return what ends the next turn of the same role, for a message that no conversation may end with.

        A template may refuse a conversation without a user. All turns of a role end alike.
        """
        roles = self.conversation.roles
        further = next((at for at in range(index + 1, len(roles)) if roles[at] == roles[index]), None)
        trace = self.trace(len(roles), False)
        own = None if further is None else trace.own_range(further)
        if further is None or own is None:
            return ()
        return self.closings(further, trace.origin_at(own[1] - 1))

    def _proven(self, tail: str, index: int, after: int | None) -> list[str]:
        """Return the part of a tail that ends the turn; nothing where that cannot be told.

        Behind the last message a template may write what is no part of its turn: a generation prompt that was not
        asked for, EOS of the document, a date, a footer. So what counts is what the template also writes before one
        more message, up to its header; or an end of turn or EOS in that place.
        """
        further, between = self._followed(index, after)
        if between is None:
            return [tail] if not self._without_ends(tail) else []
        # A template may write empty reasoning into an empty last turn, and leave it out of earlier ones.
        thought = _REASONING_AT_START.match(tail) if after is None else None
        if thought and not between.startswith(thought.group()):
            bare_ends = self._proven(tail[thought.end() :], index, after)
            return [*(thought.group() + end for end in bare_ends), *bare_ends]
        shared = _shared(tail, between)
        if not tail[:shared].strip() and not self._without_ends(tail):
            return [tail]
        opening = self.of([further]).try_trace(1, False)
        header = opening.text[: opening.begins[0]] if opening and opening.fragments else ""
        size = len(between) - _shared_end(header, between)
        # What opens a conversation may hold an end of turn too: that of a system prompt which the template adds.
        size += max((len(end) for end in self._ends if between.startswith(end, size)), default=0)
        closing, is_empty = between[:size], not self._without_ends(tail[shared:])
        if is_empty and (closing.strip() or header == between):
            return [tail[: min(shared, size)]]
        if is_empty:
            return [tail[:shared]]
        return [closing] if header and closing.strip() and tail.startswith(closing) else []

    def _followed(self, index: int, after: int | None) -> tuple[Message, str | None]:
        """Return a message that may follow another, and what the template writes between the two."""
        given = self.conversation.given[: index + 1]
        in_parts = isinstance(given[index].get("content"), list | tuple)
        content = [{"type": "text", "text": "Q"}] if in_parts else "Q"
        if given[index].get("tool_calls"):
            # A template may ask for the id of the call that a result belongs to.
            following: list[Message] = [{"role": "tool"}, _result_of(given[index]), {"role": "user"}]
        else:
            following = [{"role": "assistant" if self.conversation.roles[index] == "user" else "user"}]
        for further in ({**each, "content": content} for each in following):
            between = self.of([*given, further])._between(index, after)
            if between is not None:
                return further, between
        return {}, None

    def of(self, messages: Sequence[Message]) -> Renderer:
        """Return a renderer of other messages with the same template, tools and options."""
        own = self.conversation
        roles = [message["role"] for message in messages]
        conversation = mark_conversation(messages, bare(own.tools), bare(own.options), roles)
        return Renderer(template=self.template, conversation=conversation, sought=self.sought)

    def _between(self, index: int, after: int | None) -> str | None:
        """Return what stands between a message and the next one; None where either is not written there."""
        trace = self.try_trace(index + 2, False)
        if trace is None:
            return None
        try:
            own, further = trace.own_range(index), trace.own_range(index + 1)
            begin = own[1] if own else self.empty_turn(trace, index)
        except Refusal:
            return None
        same = own is None or trace.origin_at(begin - 1) == after
        return trace.text[begin : further[0]] if further and begin <= further[0] and same else None

    @property
    def _ends(self) -> tuple[str, ...]:
        """What may end a turn."""
        eos = self.template.special_tokens.get("eos_token")
        return (*_ENDS_OF_TURN, eos) if eos else _ENDS_OF_TURN

    def _without_ends(self, text: str) -> str:
        """Return a text without ends of turns and white space."""
        for end in self._ends:
            text = text.replace(end, "")
        return text.strip()

    def _tail(self, trace: Trace | None, index: int, after: int | None) -> str | None:
        """Return what a render that ends with a message has behind it; None if the message ends otherwise there."""
        if trace is None:
            return None
        own = trace.own_range(index)
        if own is None:
            return trace.text[self.empty_turn(trace, index) :]
        return trace.text[own[1] :] if trace.origin_at(own[1] - 1) == after else None

    def _generation_prompt(self, index: int) -> str | None:
        """Return what the template adds to ask for a message: this one, or else another of the conversation.

        Behind a message of the assistant, a template may write another end of turn when it adds a prompt. So such a
        place counts only if nothing but the prompt is added.
        """
        roles = self.conversation.roles
        for num_messages in (index, *range(1, len(roles) + 1)):
            longer, shorter = self.try_trace(num_messages, True), self.try_trace(num_messages, False)
            if longer is None or shorter is None:
                continue
            prompt = longer.text[_shared(longer.text, shorter.text) :]
            after_assistant = num_messages > 0 and roles[num_messages - 1] == "assistant"
            if prompt.strip() and (not after_assistant or longer.text.startswith(shorter.text)):
                return prompt
        return None


def plain_text(
    template: ChatTemplate,
    runnable: Template,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
    add_generation_prompt: bool,
) -> str:
    """Render a conversation with plain strings, as every other library does; `runnable` is of the template."""
    return _run(runnable, _names(template, messages, tools, options, add_generation_prompt, str))


def _names(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
    add_generation_prompt: bool,
    own: Callable[[str], str],
) -> dict[str, Any]:
    """Return what a template may refer to; `own` marks a string as the template's own."""
    return {
        **{name: own(token) for name, token in template.special_tokens.items()},
        "strftime_now": lambda form: own(_now(template.where, options).strftime(form[:_MAX_DATE_CHARS])),
        **options,
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }


def _run(template: Template, names: dict[str, Any]) -> str:
    with budget():
        try:
            return template.render(names)
        except (Refusal, ConfigError):
            raise
        except MemoryError as error:
            raise too_much_memory() from error
        except Exception as error:
            # A template may fail in any way that Python can; here it costs the record, not the job.
            text = f"{type(error).__name__}: {error}".replace("'Tracked'", "'str'").replace(
                f"{Tracked.__module__}.Tracked", "str"
            )
            raise Refusal("template_error", f"the template fails with {text}") from error


def _now(where: str, options: Mapping[str, Any]) -> datetime:
    given = options.get("now")
    if given is None:
        raise ConfigError(
            f"chat template {where}: it writes today's date, and data must not depend on the clock, "
            'got no date; write chat_template_kwargs = { now = "2025-01-31" } into the recipe'
        )
    try:
        return datetime.fromisoformat(str.__str__(given))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f'chat template {where}: now must be a date in ISO form, got {given!r}; write it as "2025-01-31"'
        ) from error


def _result_of(message: Message) -> Message:
    """Return the result of the first tool call of a message, without its content."""
    calls = message["tool_calls"]
    call = calls[0] if isinstance(calls, list | tuple) and isinstance(calls[0], Mapping) else {}
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    return {"role": "tool", "name": name, "tool_call_id": call.get("id")}


def _common(left: str, right: str) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


def _shared(left: str, right: str) -> int:
    """Return how many characters two texts have in common at their start; markup of the first is not split."""
    shared = _common(left, right)
    for match in MARKUP.finditer(left, max(0, shared - 66), shared + 66):
        if match.start() < shared < match.end():
            shared = match.start()
    return shared


def _shared_end(left: str, right: str) -> int:
    """Return how many characters two texts have in common at their end; markup of the second is not split."""
    begin = len(right) - _common(left[::-1], right[::-1])
    for match in MARKUP.finditer(right, max(0, begin - 66), begin + 66):
        if match.start() < begin < match.end():
            begin = match.end()
    return len(right) - begin


def bare(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a value with plain strings in place of tracked ones."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return {str.__str__(key): bare(item) for key, item in value.items()}
    return [bare(item) for item in value] if isinstance(value, list) else value
