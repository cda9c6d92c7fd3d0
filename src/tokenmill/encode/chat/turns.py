"""Where a message begins and ends in a render, as shown by other renders that stop before or behind it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenmill.encode.chat.record import Record
from tokenmill.encode.chat.refusal import Refusal
from tokenmill.encode.chat.scene import Range, Scene, Trace

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
