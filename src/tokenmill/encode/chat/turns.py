"""Turns of a conversation: where a message begins and ends in a render, with its end of turn.

A template writes the turns of a role in the same way. So the header and the end of a turn are learned once, from a
few short messages, and found again in the render of a record. A turn that looks different is located by rendering
parts of the record: up to the message, and with a generation prompt.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.encode import Refusal
from tokenmill.encode.chat.conversation import (
    REASONING,
    Fragment,
    Header,
    MarkedConversation,
    Message,
    Range,
    Trace,
    bare,
    mark_conversation,
)
from tokenmill.encode.chat.limits import MAX_CHARS
from tokenmill.encode.chat.tracked import (
    GENERATION,
    UNKNOWN,
    Tracked,
    authored,
    runs_of,
)
from tokenmill.errors import ConfigError

if TYPE_CHECKING:  # conversations are made where no template is opened, and jinja2 takes time to load
    from jinja2.environment import Template

    from tokenmill.encode.chat.template import ChatTemplate


# A generation prompt may open the reasoning after the header, or open and close it. The header ends before that,
# because the model produces the same text within a turn. An opener that is not listed here counts as a part of the
# header if the turn has it too; if the turn lacks it, the conversation is rejected.
_OPENED = (
    r"(?:<think>|<thinking>|<\|channel>thought|<\|START_THINKING\|>|\[THINK\]|<seed:think>)\s*"
    r"(?:</think>|</thinking>|<channel\|>|<\|END_THINKING\|>|\[/THINK\]|</seed:think>)?\s*"
)
_REASONING_AT_END = re.compile(_OPENED + r"\Z")
_REASONING_AT_START = re.compile(_OPENED)
_REASONING_CLOSED = re.compile(
    r"\s*(?:</think>|</thinking>|<channel\|>|<\|END_THINKING\|>|\[/THINK\]|</seed:think>)\s*"
)
MARKUP = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Za-z_]{1,32}\]")
"""Pattern of special tokens in the text of a template."""
_ENDS_OF_TURN = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>", "<|eot|>",
    "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>", "<|assistant_end|>", "</s>", "[/INST]",
)  # fmt: skip
"""End-of-turn tokens of common models."""
_MAX_DATE_CHARS = 4096
"""Limit for the format of a date; the date itself may be 256 times as long."""
_KEPT_TRACES = 16
"""Number of cached renders. All of them would take memory that grows with the square of the length."""


@dataclass(kw_only=True, slots=True)
class Renderer:
    """Renders one conversation, whole or in part, with one template."""

    template: ChatTemplate
    conversation: MarkedConversation
    _turns: dict[int, Turn] = field(default_factory=dict)
    _traces: dict[tuple[int, bool], Trace | Refusal] = field(default_factory=dict)

    def trace(self, num_messages: int, add_generation_prompt: bool) -> Trace:
        """Render the first messages with tracked strings. The last renders and the whole one are cached."""
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

    def check_plain_text(self, trace: Trace, add_generation_prompt: bool) -> None:
        """Reject a conversation whose text differs with plain strings, which all other libraries use."""
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

    def learned(self, index: int) -> Turn:
        """Return what the template writes around messages like this one."""
        if index not in self._turns:
            own, message = self.conversation, self.conversation.given[index]
            content = message.get("content")
            options = bare(own.options)
            kind = Kind(
                template=self.template,
                options=options,
                source=self.template.source,
                setting=f"{sorted(self.template.special_tokens.items())} {options}",
                has_tools=bool(own.tools),
                role=message["role"],
                parts=own.parts_of(index),
                has_thought=isinstance(content, str) and "</think>" in content,
                as_list=isinstance(content, list | tuple),
                has_null=any(each.get("tool_calls") and each.get("content") is None for each in own.given),
                has_text_arguments=bool(own.objects),
            )
            self._turns[index] = learn(kind)
        return self._turns[index]

    def end_of_turn(self, trace: Trace, index: int, after: int) -> str:
        """Return the end of the turn of a message whose own characters end at `after`."""
        tails = self.closings(index, trace.origin_at(after - 1))
        if trace.closing_of(tails, after) is None and trace.continues_turn(index, after):
            return ""
        return _closing(trace, tails, index, after)

    def generation_header(self, index: int) -> Header | None:
        """Return the generation prompt for a message; None if the template does not render one there."""
        prompt = self.try_trace(index, True)
        if prompt is None:
            return None
        last = prompt.fragments[-1] if prompt.fragments else None
        if last and prompt.is_repeated(last):
            return None
        text = _REASONING_AT_END.sub("", prompt.text[last.end if last else 0 :])
        return Header(after=last.last_origin if last else None, text=text)

    def header_end(self, trace: Trace, index: int, before: int) -> int:
        """Return the first character of an assistant turn: the one after its header, at or before `before`."""
        header = self.generation_header(index)
        ends = trace.header_ends(header, before) if header else []
        end = ends[-1] if ends else None
        if end is not None and (end == before or not MARKUP.search(trace.text, end, before)):
            return end
        # A template may also write the header where its prompt does not, as in a turn that goes on after a tool.
        text = _REASONING_AT_END.sub("", self.generation_prompt(index) or "")
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
        """Return the first character of the assistant turn that ends at `end`; its message begins at `first`."""
        try:
            return self.header_end(trace, index, first)
        except Refusal as error:
            begin = self._begin_without_header(trace, index, first, end) if error.reason == "header" else None
            if begin is None:
                raise
            return begin

    def _begin_without_header(self, trace: Trace, index: int, first: int, end: int) -> int | None:
        """Return the first character of a turn without a header; None if it is unknown.

        The turn begins after the end of the turn before it. Text between the two and the message is trained if the
        template writes the same text within a turn, between two tool calls of one message.
        """
        before = trace.own_range(index - 1) if index else None
        if before is None or before[1] > first:
            return None
        if before[1] == first and trace.continues_turn(index - 1, first):
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
        """Return a sample turn with the tool calls of a message twice, and its generation prompt."""
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
        prompt = (twice.generation_prompt(1) or "").strip()
        return ("", "") if tail is None or not prompt else (trace.text[begin : own[1] + len(tail)], prompt)

    def empty_turn(self, trace: Trace, index: int) -> int:
        """Return the first character of an assistant turn without any text."""
        header = self.generation_header(index)
        ends = trace.header_ends(header, len(trace.text)) if header else []
        if len(ends) != 1:
            raise Refusal("header", f"{trace.conversation.named(index)}, which is empty")
        return ends[0]

    def closings(self, index: int, after: int | None) -> tuple[str, ...]:
        """Return possible ends of the turn of a message, whose last character has the number `after`.

        After the last message of a conversation, a template may write another end of turn, or EOS. So two renders
        that end with the message are compared: with and without a generation prompt.
        """
        ended = self._tail(self.try_trace(index + 1, False), index, after)
        more = self._tail(self.try_trace(index + 1, True), index, after)
        tails = [] if ended is None else self._proven(ended, index, after)
        if more is not None and (ended is None or not more.startswith(ended)):
            prompt = self.generation_prompt(index)
            tails += [more.removesuffix(prompt)] if prompt and more.endswith(prompt) else []
        return tuple(tails)

    def _proven(self, tail: str, index: int, after: int | None) -> list[str]:
        """Return the part of a tail that ends the turn; an empty list if it is unknown.

        After the last message, a template may write text that is not a part of its turn: an unconditional
        generation prompt, EOS of the document, a date, a footer. So only text counts that the template also writes
        before one more message, up to its header, or an end-of-turn token in the same place.
        """
        further, between = self._text_before_next(index, after)
        if between is None:
            return [tail] if not self._without_ends(tail) else []
        # A template may close reasoning, or write an empty one, in a last turn, and leave it out of earlier turns.
        thought = self._thought_at_start(tail, is_empty=after is None)
        if thought and not between.startswith(thought):
            bare_ends = self._proven(tail[len(thought) :], index, after)
            return [*(thought + end for end in bare_ends), *(bare_ends if after is None else ())]
        return self._ends_before(tail, between, further)

    def _ends_before(self, tail: str, between: str, further: Message) -> list[str]:
        """Return the ends of turn that a tail, and the text between the message and one more, have in common."""
        shared = _shared(tail, between)
        if not tail[:shared].strip() and not self._without_ends(tail):
            return [tail]
        opening = self.of([further]).try_trace(1, False)
        header = opening.text[: opening.begins[0]] if opening and opening.fragments else ""
        size = len(between) - _shared_end(header, between)
        # What opens a conversation may hold an end of turn too: that of a system prompt which the template adds.
        size += max((len(end) for end in self._ends if between.startswith(end, size)), default=0)
        closing, is_empty = between[:size], not self._without_ends(tail[shared:])
        rests = tail[shared:], closing[shared:]
        if is_empty and all(map(str.strip, rests)) and not self._without_ends(rests[1]):
            return [tail, closing]
        if is_empty and (closing.strip() or header == between):
            return [tail[: min(shared, size)]]
        if is_empty:
            return [tail[:shared]]
        return [closing] if header and closing.strip() and tail.startswith(closing) else []

    def _thought_at_start(self, tail: str, is_empty: bool) -> str:
        """Return the part of a tail that closes reasoning, or is an empty one in a turn without any text."""
        match = (_REASONING_AT_START if is_empty else _REASONING_CLOSED).match(tail)
        if match or is_empty:
            return match.group() if match else ""
        # A template may write its header again between the reasoning and the text of a turn.
        header = _REASONING_AT_END.sub("", self.generation_prompt(0) or "")
        again = next((end + header for end in self._ends if tail.startswith(end + header)), "")
        return again if header.strip() and any(end in tail[len(again) :] for end in self._ends) else ""

    def _text_before_next(self, index: int, after: int | None) -> tuple[Message, str | None]:
        """Return a message that may follow another, and the text that the template writes between the two."""
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
        return Renderer(template=self.template, conversation=conversation)

    def _between(self, index: int, after: int | None) -> str | None:
        """Return the text between a message and the next one; None if the template omits either."""
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
        """End-of-turn tokens, and EOS."""
        eos = self.template.special_tokens.get("eos_token")
        return (*_ENDS_OF_TURN, eos) if eos else _ENDS_OF_TURN

    def _without_ends(self, text: str) -> str:
        """Return a text without ends of turns and white space."""
        for end in self._ends:
            text = text.replace(end, "")
        return text.strip()

    def _tail(self, trace: Trace | None, index: int, after: int | None) -> str | None:
        """Return the text after the last message of a render; None if the message ends differently there."""
        if trace is None:
            return None
        own = trace.own_range(index)
        if own is None:
            return trace.text[self.empty_turn(trace, index) :]
        return trace.text[own[1] :] if trace.origin_at(own[1] - 1) == after else None

    def generation_prompt(self, index: int) -> str | None:
        """Return the generation prompt for a message, or for another one of the conversation.

        After an assistant message, a template may write another end of turn when it adds a prompt. So such a place
        counts only if nothing except the prompt is added.
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


# Turns that are learned once.


class Turn(NamedTuple):
    """The text that a template writes around messages of one kind."""

    openings: tuple[tuple[str, int], ...] = ()
    """Texts from a header up to its message, the longest first, each with the number of trained characters at its
    end."""
    gaps: Mapping[str, int] = MappingProxyType({})
    """Texts between the message before, without its header, and the message -> trained characters at their end."""
    ends: tuple[str, ...] = ()
    """Ends of turn, each from the end of the message on."""
    call_end: str = ""
    """Last part of the end of a turn with tool calls. It is the same for all arguments."""

    def begin(self, trace: Trace, first: int) -> int | None:
        """Return where the turn of a message begins, whose own characters begin at `first`."""
        least = trace.begin_of_gap(first)
        sizes = (size for opening, size in self.openings if trace.text.endswith(opening, least, first))
        size = next(sizes, self.gaps.get(trace.text[least:first]))
        return None if size is None else first - size

    def end(self, trace: Trace, index: int, after: int) -> int | None:
        """Return where the turn of message `index` ends, whose own characters end at `after`."""
        at = bisect_left(trace.begins, after)
        others = (each.begin for each in trace.fragments[at:] if each.owner != index)
        most = next(others, len(trace.text))
        if self.call_end:
            begin = trace.text.find(self.call_end, after, most)
            return None if begin < 0 else begin + len(self.call_end)
        ends = [after + len(end) for end in self.ends if trace.text.startswith(end, after)]
        return min((end for end in ends if end <= most), default=None)


_TEXT = "Q"
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _TEXT,
        "description": _TEXT,
        "parameters": {"type": "object", "properties": {_TEXT: {"type": "string"}}, "required": [_TEXT]},
    },
}
_CALL_ID = "callQ0000"
_ARGUMENTS: tuple[object, ...] = ({_TEXT: _TEXT}, {_TEXT: 0}, '{"Q": "Q"}')
"""Arguments of sample calls. The common end of their turns does not depend on arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A set of messages with the same kind of turn, by everything that the turn may depend on."""

    template: ChatTemplate = field(compare=False)
    options: Mapping[str, Any] = field(compare=False)
    source: str
    """Source of the template."""
    setting: str
    """Special tokens and options, as a text."""
    has_tools: bool
    role: str
    parts: tuple[str, ...]
    """Parts of the message, as in `MarkedConversation.parts_of`."""
    has_thought: bool
    """Whether the text begins with reasoning, up to `</think>`."""
    as_list: bool
    """Whether contents are lists of parts."""
    has_null: bool
    """Whether the content next to tool calls is null and not empty."""
    has_text_arguments: bool
    """Whether arguments of tool calls are JSON texts."""

    def content(self, text: str) -> object:
        """Return a content in the form of the record."""
        return [{"type": "text", "text": text}] if self.as_list else text

    def calling(self, arguments: object) -> dict[str, Any]:
        """Return a message with a tool call alone."""
        content = None if self.has_null else self.content("")
        return {"role": "assistant", "content": content, "tool_calls": [_call(arguments)]}

    def message(self, arguments: object) -> Message:
        """Return a message of this kind."""
        text = _TEXT if "text" in self.parts else ""
        text = f"<think>\n{_TEXT}\n</think>\n\n{text}" if self.has_thought else text
        has_calls = "tool calls" in self.parts
        message: dict[str, Any] = self.calling(arguments) if has_calls else {"role": self.role}
        if text or not has_calls:
            message["content"] = self.content(text)
        return message | (dict.fromkeys(REASONING, _TEXT) if "reasoning" in self.parts else {})

    def samples(self, arguments: object) -> Iterator[tuple[list[Message], int]]:
        """Yield conversations with such a message, and its index: at the end, inside, and after a result."""
        user: Message = {"role": "user", "content": self.content(_TEXT)}
        calling = self.calling(_ARGUMENTS[-1] if self.has_text_arguments else _ARGUMENTS[0])
        result: Message = {"role": "tool", "name": _TEXT, "tool_call_id": _CALL_ID, "content": self.content(_TEXT)}
        answer: Message = {"role": "assistant", "content": self.content(_TEXT)}
        message = self.message(arguments)
        match self.role:
            case "assistant":
                following = [result, answer] if "tool calls" in self.parts else [user, answer]
                before = [[user]]
                if self.has_tools:
                    before += [[user, calling, result], [user, calling, result, answer, user]]
                for first in before:
                    for after in ([], following, [*following, user, answer]):
                        yield [*first, message, *after], len(first)
            case "user":
                yield [message, answer], 0
            case "system":
                yield [message, user, answer], 0
            case "tool" if self.has_tools:
                yield [user, calling, {**result, **message}, answer], 2


def _call(arguments: object) -> Message:
    return {"id": _CALL_ID, "type": "function", "function": {"name": _TEXT, "arguments": arguments}}


@lru_cache(maxsize=4096)
def learn(kind: Kind) -> Turn:
    """Return the text around messages of a kind, as far as samples show it."""
    openings: set[tuple[str, int]] = set()
    gaps: dict[str, int] = {}
    ends: set[str] = set()
    has_calls = "tool calls" in kind.parts
    for arguments in _ARGUMENTS if has_calls else _ARGUMENTS[:1]:
        for messages, index in kind.samples(arguments):
            with suppress(Refusal):
                opening, has_header, size, end = _sample_turn(kind, messages, index)
                ends.add(end)
                if has_header:
                    openings.add((opening, size))
                elif MARKUP.search(opening):
                    gaps[opening] = size
    longest_first = tuple(sorted(openings, key=lambda opening: (-len(opening[0]), opening)))
    if not has_calls:
        return Turn(openings=longest_first, gaps=gaps, ends=tuple(sorted(ends - {""} or ends)))
    call_end = _common_end(ends)
    return Turn(openings=longest_first, gaps=gaps, call_end=call_end) if MARKUP.search(call_end) else Turn()


def _sample_turn(kind: Kind, messages: Sequence[Message], index: int) -> tuple[str, bool, int, str]:
    """Return the opening of a message, whether it has a header, its trained characters, and the end of the turn."""
    tools = [_TOOL] if kind.has_tools else None
    conversation = mark_conversation(messages, tools, kind.options, [message["role"] for message in messages])
    renderer = Renderer(template=kind.template, conversation=conversation)
    trace = renderer.trace(len(messages), False)
    own = trace.own_range(index)
    if own is None:
        raise Refusal("missing", "a sample")
    first, after = own
    end = renderer.end_of_turn(trace, index, after)
    if kind.role != "assistant":
        return "", False, 0, end
    begin = renderer.begin(trace, index, first, after + len(end))
    header = _REASONING_AT_END.sub("", renderer.generation_prompt(index) or "")
    has_header = bool(header.strip()) and trace.text.endswith(header, 0, begin)
    opening = trace.begin_of_gap(first)
    if has_header and begin - len(header) >= opening:
        opening = begin - len(header)
    elif opening > begin:
        return "", False, 0, end
    else:
        has_header = False
    return trace.text[opening:first], has_header, first - begin, end


def _common_end(texts: Set[str]) -> str:
    """Return the longest end that all texts have."""
    shortest = min(texts, key=len, default="")
    sizes = range(len(shortest), 0, -1)
    return next((shortest[-size:] for size in sizes if all(text.endswith(shortest[-size:]) for text in texts)), "")


# A turn in the render of a record.


def turn_range(renderer: Renderer, trace: Trace, index: int) -> Range:
    """Return where the trained part of a message begins and ends, its end of turn included."""
    asks = trace.conversation.roles[index] == "assistant"
    own = trace.own_range(index)
    reject_missing(trace, index)
    if own is None:
        if not asks:
            return (0, 0)
        begin = renderer.empty_turn(trace, index)
        return begin, begin + len(_closing(trace, renderer.closings(index, None), index, begin))
    first, after = own
    turn = renderer.learned(index)
    known_begin, known_end = turn.begin(trace, first), turn.end(trace, index, after)
    end = after + len(renderer.end_of_turn(trace, index, after)) if known_end is None else known_end
    if not asks:
        return first, end
    return renderer.begin(trace, index, first, end) if known_begin is None else known_begin, end


def reject_missing(trace: Trace, index: int) -> None:
    """Reject a conversation if the template omits a trained message."""
    fields = trace.conversation.fields
    if any(fields[each.string] for each in trace.of_message.get(index, ())):
        return  # something other than white space is written
    named = trace.conversation.named(index)
    match trace.conversation.parts_of(index):
        case ():
            return
        case ("text", *_):
            detail = f"the template writes nothing of {named}"
        case parts:
            detail = f"the template writes no {' and no '.join(parts)}, and {named} has nothing else"
    raise Refusal("missing", detail)


def _closing(trace: Trace, tails: tuple[str, ...], index: int, after: int) -> str:
    end = trace.closing_of(tails, after)
    if end is None:
        raise Refusal("end_of_turn", f"{trace.shown(after)} behind {trace.conversation.named(index)}")
    return end


def plain_text(
    template: ChatTemplate,
    runnable: Template,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
    add_generation_prompt: bool,
) -> str:
    """Render a conversation with plain strings, as in other libraries; `runnable` is compiled from the template."""
    return _run(runnable, _names(template, messages, tools, options, add_generation_prompt, str))


def _names(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
    add_generation_prompt: bool,
    own: Callable[[str], str],
) -> dict[str, Any]:
    """Return the variables of a render; `own` marks a string as text of the template."""
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
    try:
        text = template.render(names)
    except (Refusal, ConfigError, MemoryError):
        raise
    except Exception as error:
        # A template may fail in any way that Python can; here it costs the record, not the job.
        detail = f"{type(error).__name__}: {error}".replace("'Tracked'", "'str'").replace(
            f"{Tracked.__module__}.Tracked", "str"
        )
        raise Refusal("template_error", f"the template fails with {detail}") from error
    if len(text) > MAX_CHARS:
        raise Refusal("too_large", f"the template makes {len(text):,} characters, more than {MAX_CHARS:,}")
    return text


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
    """Return the length of the common start of two texts; markup of the first is not split."""
    shared = _common(left, right)
    for match in MARKUP.finditer(left, max(0, shared - 66), shared + 66):
        if match.start() < shared < match.end():
            shared = match.start()
    return shared


def _shared_end(left: str, right: str) -> int:
    """Return the length of the common end of two texts; markup of the second is not split."""
    begin = len(right) - _common(left[::-1], right[::-1])
    for match in MARKUP.finditer(right, max(0, begin - 66), begin + 66):
        if match.start() < begin < match.end():
            begin = match.end()
    return len(right) - begin
