"""A conversation as one text, with its trained ranges and the ranges that the template wrote.

Trained ranges come from `{% generation %}` blocks, or from the turns of messages. Then every character is checked:
no character of another message is trained, and no character of a trained message is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from tokenmill.encode import Refusal
from tokenmill.encode.chat.conversation import (
    NO_OPTIONS,
    REASONING,
    Header,
    MarkedConversation,
    Message,
    Range,
    Trace,
    mark_conversation,
    shortened,
)
from tokenmill.encode.chat.template import ChatTemplate
from tokenmill.encode.chat.tracked import runs_of
from tokenmill.encode.chat.turns import Renderer, reject_missing, turn_range


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """The text of a conversation; ranges are (first character, one after the last), sorted and disjoint."""

    text: str
    supervised: tuple[Range, ...]
    """Trained ranges."""
    authored: tuple[Range, ...]
    """Text of the template: special tokens are single ids there, and ordinary text in all other places."""
    notes: tuple[str, ...] = ()
    """Names of `reasons.NOTES`: parts of the conversation that the text lacks, flags of training, empty answers."""
    num_omitted: int = 0
    """Number of content characters and tool calls that are not in the text. A call also counts if a part of it is
    missing, or if its arguments are an object that is written as a text in quotes."""


def render(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] = NO_OPTIONS,
    add_generation_prompt: bool = False,
    train_on: Sequence[str] = ("assistant",),
    last_only: bool = False,
) -> Rendered:
    """Render a conversation; one that cannot be rendered or verified raises `Refusal`, which is a `DocumentError`.

    With `add_generation_prompt` it is a prompt, in which nothing is trained. `kwargs` are names that the template
    reads, such as `enable_thinking`. `now`, a date in ISO form, is the date of today for the template. Reasoning is
    passed under each name that templates read. Contents and arguments of tool calls are passed as they are, or in
    another format if the template does not accept that (`formats_of`).
    """
    shown: list[Rendered] = []
    refused: list[Refusal] = []
    for given, notes in formats_of(with_reasoning(messages)):
        try:
            conversation = mark_conversation(given, tools, kwargs, train_on)
            renderer = Renderer(template=template, conversation=conversation)
            rendered = _rendered(renderer, notes, add_generation_prompt, train_on, last_only)
        except Refusal as error:
            if error.reason in _IN_ANY_FORM:
                raise
            refused.append(error)
            continue
        if not rendered.num_omitted:
            return rendered
        shown.append(rendered)
    if not shown:
        # A format that the template writes explains the cause best, and one that it fails on explains least.
        raise min(refused, key=lambda error: _FAILS.get(error.reason, 0))
    # A template may leave out a message in every format. The best format is the one that loses least.
    return min(shown, key=lambda rendered: rendered.num_omitted)


_FAILS: Mapping[str, int] = {"missing": 1, "untracked": 2, "template_error": 2}
"""Reasons that explain least; a reason that is not listed here is reported first."""
_IN_ANY_FORM = frozenset(
    (
        "no_messages",
        "role",
        "flag",
        "media",
        "not_json",
        "not_unicode",
        "no_trained_message",
    )
)
"""Reasons that are the same in every format of a conversation."""


def _rendered(
    renderer: Renderer,
    notes: tuple[str, ...],
    add_generation_prompt: bool,
    train_on: Sequence[str],
    last_only: bool,
) -> Rendered:
    conversation = renderer.conversation
    trace = renderer.trace(len(conversation.messages), add_generation_prompt)
    renderer.check_plain_text(trace, add_generation_prompt)
    _reject_written_null(trace)
    says = [says_of_training(message) for message in conversation.given]
    trained = () if add_generation_prompt else trained_messages(conversation.roles, says, train_on, last_only)
    omitted, num_omitted = _omissions(trace)
    flagged = {"flags_of_training"} if any(flag is not None for flag in says) else set()
    empty = {"empty_answers"} if any(not conversation.parts_of(index) for index in trained) else set()
    last = len(conversation.roles) - 1
    unanswered = ("unanswered",) if trained and last not in trained and conversation.roles[last] == "user" else ()
    return Rendered(
        text=trace.text,
        supervised=() if add_generation_prompt else find_ranges(renderer, trained),
        authored=tuple(trace.authored()),
        notes=(*notes, *sorted(flagged | empty), *sorted(omitted), *unanswered),
        num_omitted=num_omitted,
    )


# Formats of the same conversation.

_REASONING = frozenset(REASONING)


def with_reasoning(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages with their reasoning under every name that templates read, as in transformers."""
    if not isinstance(messages, list | tuple):
        return messages
    return [_with_reasoning(message) if isinstance(message, Mapping) else message for message in messages]


def _with_reasoning(message: Message) -> Message:
    if _REASONING.isdisjoint(message):
        return message
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    # Columns of a table have a null for every name that a message does not use.
    own = {key: value for key, value in message.items() if key not in REASONING or value is not None}
    return {"thinking": reasoning, **own, "reasoning_content": reasoning}


def formats_of(messages: Sequence[Message]) -> Iterator[tuple[Sequence[Message], tuple[str, ...]]]:
    """Yield at most four formats in which templates may want messages, each with its notes; the given one first.

    Contents in parts may be one text, a content next to tool calls may be null or empty, and the arguments of tool
    calls may be a JSON object or its text.
    """
    if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
        yield messages, ()
        return
    for arguments, notes in _arguments_of(messages):
        contents = _without_nulls(arguments)
        yield contents, notes
        other = _other_contents(contents)
        if other != contents:
            yield other, notes


def _tool_calls(message: object) -> Sequence[Any]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return calls if isinstance(calls, list | tuple) else ()


def _without_nulls(messages: Sequence[Message]) -> list[Message]:
    """Return messages with "" for a null content. Next to tool calls all contents become null if one of them is."""
    has_null = any(_tool_calls(message) and message.get("content") is None for message in messages)

    def content(message: Message) -> object:
        if _tool_calls(message):
            return None if has_null and message["content"] == "" else message["content"]
        return "" if message["content"] is None else message["content"]

    return [{**message, "content": content(message)} if "content" in message else message for message in messages]


def _other_contents(messages: Sequence[Message]) -> list[Message]:
    """Return messages with every list of texts as one text, and null for "" next to tool calls or the reverse."""

    def content(message: Message) -> object:
        if _tool_calls(message) and not message.get("content"):
            return "" if message.get("content") is None else None
        return "".join(_texts(message)) if has_parts(message) else message.get("content")

    return [
        {**message, "content": content(message)} if "content" in message or _tool_calls(message) else message
        for message in messages
    ]


def _arguments_of(messages: Sequence[Message]) -> Iterator[tuple[Sequence[Message], tuple[str, ...]]]:
    """Yield messages with the arguments of tool calls as given, and in the other form; mixed ones in both forms."""
    forms = [
        [
            {**message, "tool_calls": [_converted_call(call, form) for call in _tool_calls(message)]}
            if _tool_calls(message)
            else message
            for message in messages
        ]
        for form in (_object_of, _text_of)
    ]
    given = list(messages)
    if given in forms or forms[0] == forms[1]:
        yield messages, ()
    for form in forms:
        if form != given:
            yield form, ("arguments_converted",)


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


def has_parts(message: Message) -> bool:
    """Return whether the content of a message is a list of texts."""
    is_list = isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
    return is_list and None not in _texts(message)


def _texts(message: Message) -> list[Any]:
    """Return the text of each part of a content; None for a part that is no text."""
    parts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        for part in message["content"]
    ]
    return [part if isinstance(part, str) else None for part in parts]


# Trained messages and ranges.

_FLAGS = ("train", "training", "weight", "loss", "loss_mask", "loss_weight")
_LIKE_FLAGS = re.compile(r"train|loss|mask|weight|supervis|ignore", re.IGNORECASE)
"""Pattern of field names that may be flags of other projects."""


@lru_cache(maxsize=1024)
def _is_like_a_flag(name: str) -> bool:
    return name not in _FLAGS and _LIKE_FLAGS.search(name) is not None


def says_of_training(message: Message) -> bool | None:
    """Return whether flags of a message include or exclude it from training; None if its role decides.

    Only `train` and `training` include a message whose role is not trained, because all messages may have a weight
    of 1. A value that is neither yes nor no is rejected, and so is a flag of unclear meaning.
    """
    flags = {name: message[name] for name in _FLAGS if message.get(name) is not None}
    for name, value in message.items():
        # A text is a remark, unless the name can only be that of a flag.
        if _is_like_a_flag(name) and value is not None:
            if isinstance(value, str) and name not in ("mask", "masked"):
                continue
            raise Refusal(
                "flag", f"{name} = {shortened(value)}, which may mean either; name it train: true or false"
            )
    for name, value in flags.items():
        if value not in (0, 1) or not isinstance(value, bool | int | float):
            raise Refusal(
                "flag", f"{name} = {shortened(value)}, neither 0 nor 1; weights are not stored, make it one"
            )
    if not flags:
        return None
    if len(set(map(bool, flags.values()))) > 1:
        raise Refusal("flag", f"{shortened(flags)}, which contradict one another; leave one of them")
    if not next(iter(flags.values())):
        return False
    return True if flags.keys() & {"train", "training"} else None


def trained_messages(
    roles: Sequence[str], says: Sequence[bool | None], trained_roles: Sequence[str], last_only: bool
) -> tuple[int, ...]:
    """Return the messages to train, by their roles and flags; there must be at least one."""
    trained = [index for index, role in enumerate(roles) if role in trained_roles]
    if last_only:
        # Where only the last message is trained on, a flag cannot add another.
        trained = [index for index in trained[-1:] if says[index] is not False]
    else:
        chosen = set(trained)
        trained = [index for index, flag in enumerate(says) if (index in chosen if flag is None else flag)]
    if not trained:
        masked = f", and {says.count(False)} say that they are not to be trained on" if False in says else ""
        raise Refusal(
            "no_trained_message", f"no message is of the roles {list(trained_roles)}, only {list(roles)}{masked}"
        )
    return tuple(trained)


def find_ranges(renderer: Renderer, trained: Sequence[int]) -> tuple[Range, ...]:
    """Return the sorted, disjoint trained ranges; a conversation that cannot be verified is rejected."""
    roles = renderer.conversation.roles
    trace = renderer.trace(len(roles), False)
    has_blocks = renderer.template.compiled.has_generation
    by_block = [index for index in trained if has_blocks and roles[index] == "assistant"]
    for index in by_block:
        reject_missing(trace, index)
    ranges = _block_ranges(trace, by_block) if by_block else []
    by_turn = [index for index in trained if index not in by_block]
    if by_turn:
        ranges += [both for both in _turn_ranges(renderer, trace, by_turn) if both[0] < both[1]]
    ranges = _merged(ranges)
    _prove(trace, ranges, set(trained))
    return tuple(ranges)


def _merged(ranges: list[Range]) -> list[Range]:
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if merged and begin < merged[-1][1]:
            raise Refusal("overlap", f"a turn from character {begin}, where the one before it has not ended")
        if merged and begin == merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def _prove(trace: Trace, ranges: list[Range], trained: set[int]) -> None:
    """Reject ranges that contain a character of another message, or lack one of a trained message."""
    if not ranges:
        raise Refusal("no_supervision", "nothing in the render is trained on")
    for begin, end in ranges:
        for each in trace.within(begin, end):
            if each.owner not in trained:
                shown = trace.shown(max(begin, each.begin))
                raise Refusal("foreign", f"what is trained on would hold {shown} of another message")
    outside = [0, *(edge for both in ranges for edge in both), len(trace.text)]
    for begin, end in zip(outside[::2], outside[1::2], strict=True):
        for each in trace.within(begin, end):
            if each.owner in trained and not trace.conversation.labels[each.string]:
                shown = trace.shown(max(begin, each.begin))
                raise Refusal("uncovered", f"what is trained on would leave out {shown}")


def _block_ranges(trace: Trace, trained: Sequence[int]) -> list[Range]:
    """Return the ranges of generation blocks that belong to some assistant messages."""
    if not trace.generation:
        raise Refusal("no_generation", "the template has generation blocks, and this conversation reached none")
    answers = [index for index, role in enumerate(trace.conversation.roles) if role == "assistant"]
    if answers == list(trained):
        return list(trace.generation)
    return [(begin, end) for begin, end in trace.generation if _block_owner(trace, begin, end) in trained]


def _block_owner(trace: Trace, begin: int, end: int) -> int:
    """Return the assistant message that a generation block belongs to."""
    roles = trace.conversation.roles
    owners = {each.owner for each in trace.within(begin, end) if each.owner >= 0}
    if not owners:
        # A block without any text of the conversation ends the turn before it, or is an empty turn.
        before = max((each.owner for each in trace.before(begin)), default=-1)
        after = min((each.owner for each in trace.within(end, len(trace.text)) if each.owner >= 0), default=None)
        owners = {index for index, role in enumerate(roles[:after]) if index >= before and role == "assistant"}
    if len(owners) != 1:
        raise Refusal("no_proof", f"the block with {trace.shown(begin)} may be of either of two messages")
    return owners.pop()


# Messages that a template writes in two pieces, with other messages between them.

_RESULTS = ("tool", "function", "ipython", "observation")


def _turn_ranges(renderer: Renderer, trace: Trace, trained: Sequence[int]) -> list[Range]:
    """Return the trained ranges of some messages.

    A template may write the text next to tool calls after the results of the calls. Then the conversation is
    rearranged, so that every message is in one piece. If another answer follows the results, the text is left out.
    In all other cases, or if the text of the render changes, it becomes a message after the results.
    """
    conversation = trace.conversation
    calling = [index for index, message in enumerate(conversation.given) if message.get("tool_calls")]
    apart = [index for index in sorted({*calling, *trained}) if _is_apart(trace, index)]
    if not apart:
        return [turn_range(renderer, trace, index) for index in trained]
    refused = Refusal("interleaved", f"{conversation.named(apart[0])} in parts, with others between them")
    if not all({"text", "tool calls"} <= {*conversation.parts_of(index)} for index in apart):
        raise refused
    roles = conversation.roles
    behind = {
        index: next((at for at in range(index + 1, len(roles)) if roles[at] not in _RESULTS), len(roles))
        for index in apart
    }
    answered = [index for index in apart if roles[behind[index] :][:1] == ["assistant"]]
    for left_out in ([answered] if answered else []) + [[]]:
        try:
            arranged = _Arranged.of(renderer, trace, behind, left_out)
            if arranged is not None:
                return [both for index in trained for both in arranged.ranges(index)]
        except Refusal as error:
            refused = error
    raise refused


def _is_apart(trace: Trace, index: int) -> bool:
    try:
        own = trace.own_range(index)
    except Refusal:
        return False  # raised again where the message is trained on
    return own is not None and any(each.owner != index for each in trace.within(*own))


class _LeftOut(NamedTuple):
    """A text that is left out of an arrangement."""

    begin: int
    end: int
    """Where it stands in the render of the conversation."""
    at: int
    """Where it would stand in that of the arrangement."""
    next: int
    """Which message follows it there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arranged:
    """Another arrangement of a conversation, which renders to the same text but for what is left out."""

    renderer: Renderer
    trace: Trace
    messages: list[list[int]]
    """Of each message, its index in the arrangement; two where its text is a message of its own."""
    left_out: Mapping[int, _LeftOut]
    """By message, in the order of the text."""

    @classmethod
    def of(
        cls, renderer: Renderer, trace: Trace, behind: Mapping[int, int], left_out: Sequence[int]
    ) -> _Arranged | None:
        """Take texts out of messages: some are left out, others become a message behind the results of the calls.

        None if that renders to another text.
        """
        given = trace.conversation.given
        texts = {at: index for index, at in behind.items() if index not in left_out}
        messages: list[Message] = []
        places: list[list[int]] = [[] for _ in given]
        for index in range(len(given) + 1):
            if index in texts:
                calling = texts[index]
                places[calling].append(len(messages))
                messages.append({"role": given[calling]["role"], "content": given[calling]["content"]})
            if index < len(given):
                places[index].append(len(messages))
                messages.append({**given[index], "content": ""} if index in behind else given[index])
        lacking: dict[int, _LeftOut] = {}
        kept, done = "", 0
        fields = trace.conversation.fields
        for index in left_out:
            text = [each for each in trace.of_message[index] if fields[each.string] == "content"]
            kept += trace.text[done : text[0].begin]
            done = text[-1].end
            following = places[behind[index]][-1]
            lacking[index] = _LeftOut(begin=text[0].begin, end=done, at=len(kept), next=following)
        arranged = renderer.of(messages)
        other = arranged.try_trace(len(messages), False)
        if other is None or other.text != kept + trace.text[done:]:
            return None
        return cls(renderer=arranged, trace=other, messages=places, left_out=lacking)

    def ranges(self, index: int) -> list[Range]:
        """Return what of a message has to be produced, in the render of the conversation."""
        ranges: list[Range] = []
        for at in self.messages[index]:
            begin, end = turn_range(self.renderer, self.trace, at)
            begin += sum(text.end - text.begin for text in self.left_out.values() if text.at <= begin)
            end += sum(text.end - text.begin for text in self.left_out.values() if text.at < end)
            ranges.append((begin, end))
        text = self.left_out.get(index)
        if text is not None:
            # The model writes it where it is asked for the next message. What stands behind it ends no turn, as it
            # stands there without the text too.
            if turn_range(self.renderer, self.trace, text.next)[0] != text.at and not self._is_asked(
                self.renderer.generation_header(text.next), text.at
            ):
                raise Refusal("header", f"the text of {self.trace.conversation.named(index)}, behind the results")
            ranges.append((text.begin, text.end))
        return ranges

    def _is_asked(self, header: Header | None, at: int) -> bool:
        return header is not None and at in self.trace.header_ends(header, at)


# Parts of a conversation that its render lacks.

_DROPPED = "reasoning_dropped"
_NAMES: Mapping[str, str] = {
    "tools": "tools_not_written",
    **dict.fromkeys(REASONING, _DROPPED),
}
"""Field -> the note of a message, or record, that has it and of which no character of it was written."""


def _reject_written_null(trace: Trace) -> None:
    """Reject a format in which a template may write a null content as the text "None"."""
    has_null = any(message.get("content") is None for message in trace.conversation.given)
    if has_null and any("None" in trace.text[begin:end] for begin, end in trace.authored()):
        raise Refusal("template_error", "the template writes a null content as the text 'None'")


def _omissions(trace: Trace) -> tuple[set[str], int]:
    """Return notes of everything that the template leaves out, and `Rendered.num_omitted`.

    A list of texts that the template writes as a list is rejected. Reasoning may be in a field of its own or at the
    start of a content, before `</think>`.
    """
    conversation = trace.conversation
    written = {each.string for each in trace.fragments}
    escaped = {each.string for each in trace.fragments if not each.step and each.end > each.begin + 1}
    fields = conversation.fields
    written_calls = {conversation.call_of(string) for string in written if fields[string] == "tool_calls"}
    bad_calls: set[int] = set()
    is_written: dict[tuple[int, str], bool] = {}
    notes: set[str] = set()
    num_omitted = 0
    for string, (owner, name) in enumerate(zip(conversation.owners, fields, strict=True)):
        if name == "content":
            if not conversation.labels[string]:
                num_omitted += 0 if string in written else conversation.size_of(string)
            elif string in written and has_parts(conversation.given[owner]):
                raise Refusal("parts", f"the template writes the list itself in {conversation.named(owner)}")
        elif name == "tool_calls":
            call = conversation.call_of(string)
            # Arguments that are a text and are written in quotes should have been an object.
            in_quotes = string in escaped and string in conversation.objects
            is_lost = string not in written and not conversation.labels[string]
            if is_lost or in_quotes or call not in written_calls:
                bad_calls.add(call)
            if call not in written_calls:
                notes.add("tool_calls_not_written")
        elif name in _NAMES:
            # The fields for reasoning mean the same: it is written if one of them is.
            key = (owner, _NAMES[name])
            is_written[key] = is_written.get(key, False) or string in written
    if num_omitted:
        notes.add("content_not_written")
    notes.update(name for (_, name), shown in is_written.items() if not shown)
    for index, begin, end in _thoughts(conversation):
        fragments = trace.of_message.get(index, ())
        if not any(each.origin < end and each.last_origin >= begin for each in fragments):
            notes.add(_DROPPED)
    return notes, num_omitted + len(bad_calls)


def _thoughts(conversation: MarkedConversation) -> Iterator[tuple[int, int, int]]:
    """Yield what stands before `</think>` in answers: the message, its first mark and one more than its last."""
    for index, message in enumerate(conversation.messages):
        content = message.get("content") if conversation.roles[index] == "assistant" else None
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
