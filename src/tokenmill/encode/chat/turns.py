"""Where a message begins and ends in a render, as shown by other renders that stop before or behind it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tokenmill.encode.chat.render import Range, Record, Scene, Trace, bare, read_record
from tokenmill.encode.refusal import Refusal

if TYPE_CHECKING:
    from tokenmill.encode.chat.sandbox import Compiled

# A generation prompt may go on to open, or open and close, the reasoning. A header ends before that: the template
# writes the same into the turn itself, and there it is what the model has to produce. An opener that is not known
# here is left to the prompt where the turn has it as well, and refused where the turn does without.
_REASONING = re.compile(
    r"(?:<think>|<thinking>|<\|channel>thought|<\|START_THINKING\|>|\[THINK\]|<seed:think>)\s*"
    r"(?:</think>|</thinking>|<channel\|>|<\|END_THINKING\|>|\[/THINK\]|</seed:think>)?\s*\Z"
)
MARKUP = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Za-z_]{1,32}\]")
"""What control strings look like."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What asks for a message, as a render that stops before it shows."""

    after: int | None
    """The record's character that it follows; None if nothing of the record is before it."""
    text: str


def own_range(trace: Trace, record: Record, index: int) -> Range | None:
    """Return from where to where a message stands, None if nowhere; a name that is written again does not count."""
    by_string: dict[int, list[Range]] = {}
    last_origins: dict[int, int] = {}
    for one in trace.of_message.get(index, ()):
        ranges = by_string.setdefault(one.string, [])
        if ranges and ranges[-1][1] != one.begin and record.labels[one.string]:
            last_origins[one.string] = -1
        elif ranges and not record.labels[one.string]:
            known = last_origins[one.string]
            if one.origin < known or (one.origin == known and ranges[-1][1] != one.begin):
                raise Refusal(
                    "rewritten", f"{at(trace, one.begin)} of {record.named(index)}, twice or out of order"
                )
        if last_origins.get(one.string) != -1:
            ranges.append((one.begin, one.end))
            last_origins[one.string] = one.last_origin
    found = [both for ranges in by_string.values() for both in ranges]
    return (min(begin for begin, _ in found), max(end for _, end in found)) if found else None


def asked(scene: Scene, index: int) -> Header | None:
    """Return what asks for a message; None if the template cannot be asked there."""
    prompt = scene.try_trace(index, True)
    if prompt is None:
        return None
    last = prompt.fragments[-1] if prompt.fragments else None
    text = _REASONING.sub("", prompt.text[last.end if last else 0 :])
    return Header(after=last.last_origin if last else None, text=text)


def header_ends(full: Trace, record: Record, header: Header, before: int) -> list[int]:
    """Return where a header ends in the whole render, at or before a character; nothing if it is not there."""
    begins = [0]
    if header.after is not None:
        owner = record.owners[record.string_of(header.after)]
        begins = [
            place + 1
            for one in full.of_message.get(owner, ())
            if one.origin <= header.after <= one.last_origin
            for place in (
                [one.begin + header.after - one.origin] if one.step else range(one.begin, min(one.end, before))
            )
            if place < before
        ]
    ends = [begin + len(header.text) for begin in begins if full.text.startswith(header.text, begin)]
    return [end for end in ends if end <= before and not full.within(end - len(header.text), end)]


def header_end(scene: Scene, full: Trace, index: int, before: int) -> int:
    """Return where a turn of the assistant begins: after what asks for it, at or before a character."""
    known = asked(scene, index)
    ends = header_ends(full, scene.record, known, before) if known else []
    end = ends[-1] if ends else None
    if end is not None and (end == before or not MARKUP.search(full.text, end, before)):
        return end
    # A template may also write the header where its prompt does not, as in a turn that goes on after a tool.
    header = _REASONING.sub("", _generation_prompt(scene, index) or "")
    least = end
    if least is None:
        least = max((min(one.end, before) for one in full.before(before) if one.owner != index), default=0)
    found = full.text.rfind(header, least, before) if header.strip() else -1
    if found >= 0:
        return found + len(header)
    if end is None:
        raise Refusal("header", f"{scene.record.named(index)}, and {header!r} is not before it")
    return end


def empty_turn(scene: Scene, trace: Trace, index: int) -> int:
    """Return where a turn of the assistant without any text begins."""
    known = asked(scene, index)
    ends = header_ends(trace, scene.record, known, len(trace.text)) if known else []
    if len(ends) != 1:
        raise Refusal("header", f"{scene.record.named(index)}, which is empty")
    return ends[0]


def _generation_prompt(scene: Scene, index: int) -> str | None:
    """Return what a template adds to ask for a message: for this one, else for another of the conversation.

    Behind a message of the assistant a template may write another end when it is asked for more, so such a place
    counts only if nothing but the prompt is added.
    """
    roles = scene.record.roles
    for num_messages in (index, *range(1, len(roles) + 1)):
        longer, shorter = scene.try_trace(num_messages, True), scene.try_trace(num_messages, False)
        if longer is None or shorter is None:
            continue
        prompt = _difference(longer.text, shorter.text)
        after_assistant = num_messages > 0 and roles[num_messages - 1] == "assistant"
        if prompt.strip() and (not after_assistant or longer.text.startswith(shorter.text)):
            return prompt
    return None


def _difference(longer: str, shorter: str) -> str:
    """Return what a text has after what it has in common with another; markup is not split."""
    common = 0
    if longer.startswith(shorter):
        common = len(shorter)
    else:
        pairs = enumerate(zip(longer, shorter, strict=False))
        common = next((at for at, (one, other) in pairs if one != other), min(len(longer), len(shorter)))
    for match in MARKUP.finditer(longer, max(0, common - 66), common + 66):
        if match.start() < common < match.end():
            common = match.start()
    return longer[common:]


def closings(scene: Scene, index: int, after: int | None) -> tuple[str, ...]:
    """Return what the template may write behind a message to end its turn; `after` is its last character, if any.

    A template may write an end behind the last message that no other has (EOS after the conversation, or another
    end of turn), so two renders that end with the message are looked at: as it is, and asking for one more.
    """
    ended = _tail(scene, scene.try_trace(index + 1, False), index, after)
    more = _tail(scene, scene.try_trace(index + 1, True), index, after)
    known = [tail for tail in (ended,) if tail is not None]
    if more is not None and (ended is None or not more.startswith(ended)):
        prompt = _generation_prompt(scene, index)
        known += [more.removesuffix(prompt)] if prompt and more.endswith(prompt) else []
    return tuple(known)


def closing_of(full: Trace, tails: tuple[str, ...], after: int) -> str | None:
    """Return the tail that the whole render has, without the white space after it; None if it has none."""
    fitting = [tail for tail in tails if full.text.startswith(tail, after)]
    return min((tail for tail in fitting if tail.strip()), key=len, default="").rstrip() if fitting else None


def _tail(scene: Scene, trace: Trace | None, index: int, after: int | None) -> str | None:
    """Return what a render that ends with a message has behind it; None if it is not the same message there."""
    if trace is None:
        return None
    own = own_range(trace, scene.record, index)
    if own is None:
        return trace.text[empty_turn(scene, trace, index) :]
    return trace.text[own[1] :] if origin_at(trace, own[1] - 1) == after else None


def origin_at(trace: Trace, at: int) -> int | None:
    """Return the record's character that stands somewhere; None where the template wrote it."""
    found = trace.within(at, at + 1)
    return found[0].origin + (at - found[0].begin) * found[0].step if found else None


def at(trace: Trace, begin: int) -> str:
    """Show the text from a character on."""
    return repr(trace.text[begin : begin + 24])


# A short conversation of the same kind as another up to some message, which shows how that message is written.
#
# To compare renders for every message of a conversation takes time that grows with the square of its length. What a
# template writes around a message hardly depends on what the messages say, so a sample shows it, in which a letter
# stands for every text, once for all conversations that have the same sample. It counts only where the whole render
# has it, in the same place; a text that holds a string which the template may look for keeps it in the sample.

_TEXT = "Q"
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _TEXT,
        "description": _TEXT,
        "parameters": {"type": "object", "properties": {_TEXT: {"type": "string"}}, "required": [_TEXT]},
    },
}
_MAX_MESSAGES = 64
_MAX_LITERALS = 8
"""That one text of a sample may hold."""
_MAX_BLANKS = 16
"""White space at an end of a text that a sample repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A character, said without the lengths of texts."""

    message: int
    string: int
    """Which of the message's."""
    back: int
    """How far from the end of the string."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What a sample shows of the message that it is about."""

    header: str | None
    """What asks for it; None if that could not be told."""
    after: Place | None
    """The character that the header follows."""
    leads: tuple[str, ...]
    """What the template writes between the header and the message, at the end of a conversation and inside one."""
    last: Place
    """The message's last character."""
    tails: tuple[str, ...]
    """What may end its turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """The same in terms of the conversation."""

    header: Header | None
    leads: tuple[str, ...]
    last: int | None
    tails: tuple[str, ...]


class _Unlike(Exception):
    """A conversation that no short sample stands for."""


def shown_by_sample(scene: Scene, index: int) -> Known | None:
    """Return what a sample shows of how a message is written; None if there is none that does."""
    record = scene.record
    window = _window(scene, index)
    if len(window) > _MAX_MESSAGES:
        return None
    texts = _Texts(compiled=scene.compiled, labels={})
    try:
        repeated = [*window, *range(index + 1, len(record.roles))[:1]]
        messages = [{**texts.of(record.messages[at], ()), "role": record.roles[at]} for at in repeated]
    except _Unlike:
        return None
    tools = None if record.tools is None else [_TOOL] if record.tools else []
    options = bare(record.options)
    shown = _look(
        _Sample(
            key=repr((messages, tools is None or len(tools), options, sorted(scene.special_tokens.items()))),
            index=len(window) - 1,
            compiled=scene.compiled,
            special_tokens=scene.special_tokens,
            messages=messages,
            tools=tools,
            options=options,
        )
    )
    if shown is None:
        return None
    after = None if shown.after is None else _origin(record, window, shown.after)
    return Known(
        header=None if shown.header is None or after is None else Header(after=after, text=shown.header),
        leads=shown.leads,
        last=_origin(record, window, shown.last),
        tails=shown.tails,
    )


def _window(scene: Scene, index: int) -> list[int]:
    """Return the messages that a sample repeats: what sets the scene, the last question, the last call of tools.

    And all exchanges that hold a string which the template may look for.
    """
    roles = scene.record.roles
    asked_at = next((at for at in range(index - 1, -1, -1) if roles[at] == "user"), None)
    if asked_at is None:
        return list(range(index + 1))
    called_at = next((at for at in range(index - 1, asked_at, -1) if roles[at] == "assistant"), asked_at + 1)
    if not scene.striking:
        scene.striking.append(_striking(scene))
    (striking,) = scene.striking
    opening = [0] if asked_at > 0 and roles[0] in ("system", "developer") else []
    kept = striking[: bisect_left(striking, index)]
    return sorted({*opening, *kept, asked_at, *range(called_at, index + 1)})


def _striking(scene: Scene) -> list[int]:
    """Return the messages of all exchanges in which a text holds what the template may look for."""
    exchanges: list[list[int]] = []
    for index, role in enumerate(scene.record.roles):
        if role == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(index)
    messages = scene.record.messages
    found = [one for one in exchanges if any(_strikes(messages[index], scene.compiled) for index in one)]
    return [index for one in found for index in one]


def _strikes(value: object, compiled: Compiled) -> bool:
    if isinstance(value, str):
        core = value.strip()
        return bool(core) and (core in compiled.words or any(literal in value for literal in compiled.literals))
    if isinstance(value, dict):
        return any(_strikes(item, compiled) for key, item in value.items() if key not in ("role", "type", "name"))
    return isinstance(value, list) and any(_strikes(item, compiled) for item in value)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """A sample, known by its key and template."""

    key: str
    index: int
    """The message that it is about; at most one follows it."""
    compiled: Compiled
    special_tokens: Mapping[str, str] = field(compare=False)
    messages: list[dict[str, Any]] = field(compare=False)
    tools: list[Any] | None = field(compare=False)
    options: Mapping[str, Any] = field(compare=False)


@lru_cache(maxsize=4096)
def _look(sample: _Sample) -> Shown | None:
    """Render a sample; None if the template does not take it or writes nothing of the message."""
    index = sample.index
    try:
        record = read_record(
            sample.messages, sample.tools, sample.options, [one["role"] for one in sample.messages]
        )
        scene = Scene(compiled=sample.compiled, where="sample", special_tokens=sample.special_tokens, record=record)
        whole = scene.trace(index + 1, False)
        own = own_range(whole, record, index)
        last = None if own is None else origin_at(whole, own[1] - 1)
        if own is None or last is None:
            return None
        header = asked(scene, index) if record.roles[index] == "assistant" else None
        leads = [_lead(scene, trace, header, index) for trace in _ends(scene, whole, index)] if header else []
        return Shown(
            header=header.text if header and None not in leads else None,
            after=_place(record, header.after) if header and header.after else None,
            leads=tuple(lead for lead in leads if lead is not None),
            last=_place(record, last),
            tails=closings(scene, index, last),
        )
    except Refusal:
        return None


def _ends(scene: Scene, whole: Trace, index: int) -> list[Trace]:
    """Return the renders that end with a message and, if it is not the last, with the one after it."""
    more = scene.try_trace(index + 2, False) if index + 1 < len(scene.record.roles) else None
    return [whole] if more is None else [whole, more]


def _lead(scene: Scene, trace: Trace, header: Header, index: int) -> str | None:
    """Return what stands between a header and its message; None if the message does not begin after the header."""
    own = own_range(trace, scene.record, index)
    if own is None or header.after is None:
        return None
    ends = header_ends(trace, scene.record, header, own[0])
    follows = scene.record.owners[scene.record.string_of(header.after)] == index - 1
    begins = header_end(scene, trace, index, own[0])
    return trace.text[begins : own[0]] if follows and ends and ends[-1] == begins else None


def _place(record: Record, origin: int) -> Place:
    string = record.string_of(origin)
    message = record.owners[string]
    first = record.firsts[message] if message >= 0 else 0
    return Place(message=message, string=string - first, back=record.end_of(string) - 1 - origin)


def _origin(record: Record, window: list[int], place: Place) -> int | None:
    """Return the number of a character in the conversation; None if it is not of a message."""
    if place.message < 0:
        return None
    string = record.firsts[window[place.message]] + place.string
    origin = record.end_of(string) - 1 - place.back
    return origin if origin >= record.starts[string] else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Texts:
    """Makes the values of a sample: of each text only what a template may look for is left."""

    compiled: Compiled
    labels: dict[str, str]
    """Names and ids, and what stands for each: as long, and the same where they are the same."""

    def of(self, value: Any, path: tuple[str, ...]) -> Any:  # noqa: ANN401 - any JSON value
        """Return what stands for a value; one that cannot be kept short raises `_Unlike`."""
        if isinstance(value, str):
            text = str.__str__(value)
            if path[-1] == "type":
                return text
            return self._label(text) if path[-1] in ("id", "tool_call_id", "name") else self._text(text)
        if isinstance(value, dict):
            return {
                str.__str__(key): self.of(item, (*path, key))
                for key, item in value.items()
                if key != "role" or path
            }
        return [self.of(item, path) for item in value] if isinstance(value, list) else value

    def _label(self, text: str) -> str:
        if text in self.compiled.words or not text:
            return text
        if text not in self.labels:
            made = f"{len(self.labels)}{_TEXT * len(text)}"[: len(text)]
            if made in self.labels.values():
                raise _Unlike
            self.labels[text] = made
        return self.labels[text]

    def _text(self, text: str) -> str:
        core = text.strip()
        if not core:
            return self._blank(text)
        if core in self.compiled.words:
            return text
        found = [literal for literal in self.compiled.literals if literal in text]
        if not found:
            return self._outline(text)
        pieces = re.split(f"({'|'.join(map(re.escape, found))})", text)
        if len(pieces) > 2 * _MAX_LITERALS + 1:
            raise _Unlike
        return "".join(self._outline(piece) if at % 2 == 0 else piece for at, piece in enumerate(pieces))

    def _outline(self, text: str) -> str:
        core = text.strip()
        if not core:
            return self._blank(text)
        begin = text.index(core[0])
        return self._blank(text[:begin]) + _TEXT + self._blank(text[begin + len(core) :])

    @staticmethod
    def _blank(text: str) -> str:
        if len(text) > _MAX_BLANKS:
            raise _Unlike
        return text
