"""Who says what in a stored chat: read off its tokens, by what its template writes around each role.

Some conversations are rendered to learn what the template writes before and behind the words of each role. The
turns that are found are proven by rendering them again.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from tokenmill.encode.chat.render import render
from tokenmill.encode.chat.template import ChatTemplate
from tokenmill.errors import TokenmillError

SAMPLES = (
    ("user", "assistant", "user", "assistant", "user", "assistant"),
    ("system", "user", "assistant", "user", "assistant"),
    ("system", "system", "user", "user", "assistant", "assistant", "system", "assistant", "user"),
    ("user", "assistant", "tool", "assistant", "user", "assistant"),
)
"""Conversations that show what stands around the words of each role; a template need not take them all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The words of one message."""

    role: str
    first: int
    """Its first token, and the one behind its last."""
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """The messages of a text, in order; what stands between them was written by the template."""

    turns: tuple[Turn, ...]
    proven: bool
    """Whether the template writes this very text for these messages; else it had more to write, such as tools."""


def find_turns(template: ChatTemplate, strings: Sequence[str], frame: Sequence[str | None] = ()) -> Turns | None:
    """Find the messages of a text that is given token by token; None where the template shows none.

    `frame` are BOS and EOS, which the tokenizer may have put around it.
    """
    text = "".join(strings)
    spans = list(_spans(text, _wrappings(template.source, template.where, tuple(template.special_tokens.items()))))
    if not spans:
        return None
    messages = [{"role": role, "content": text[begin:end]} for role, begin, end in spans]
    bare = {text, *(text.removeprefix(bos or "") for bos in frame[:1])}
    bare |= {each.removesuffix(eos or "") for each in bare for eos in frame[1:]}
    # A token without a text continues the one before it, and belongs to its message.
    places = zip(strings, accumulate(map(len, strings), initial=0), strict=False)
    begins = list(accumulate(places, lambda before, token: token[1] if token[0] else before, initial=0))[1:]
    turns = [
        Turn(role=role, first=bisect_left(begins, begin), end=bisect_left(begins, end))
        for role, begin, end in spans
    ]
    return Turns(turns=tuple(turns), proven=any(_is_rendered(template, messages, each) for each in bare))


def _is_rendered(template: ChatTemplate, messages: Sequence[dict[str, str]], text: str) -> bool:
    for prompt in (False, True):
        try:
            if render(template, messages, add_generation_prompt=prompt).text == text:
                return True
        except TokenmillError:
            continue
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wrapping:
    """What a template writes before and behind the words of a role."""

    role: str
    header: str
    footer: str


def _spans(text: str, wrappings: Sequence[_Wrapping]) -> Iterator[tuple[str, int, int]]:
    """Yield role, begin and end of the words of each message. Every text is looked for once from left to right."""
    places: dict[str, int] = {}

    def find(sought: str, begin: int) -> int:
        if places.get(sought, -1) < begin:
            place = text.find(sought, begin)
            places[sought] = len(text) if place < 0 else place
        return places[sought]

    place = 0
    while wrappings:
        chosen = min(wrappings, key=lambda each: (find(each.header, place), -len(each.header)))
        begin = find(chosen.header, place) + len(chosen.header)
        if begin > len(text):
            return
        ends = (chosen.footer, *(other.header for other in wrappings))
        place = min(find(each, begin) for each in ends if each)
        yield chosen.role, begin, place


@lru_cache(maxsize=16)
def _wrappings(source: str, where: str, special_tokens: tuple[tuple[str, str], ...]) -> tuple[_Wrapping, ...]:
    """Learn what a template writes around each role: what is common to all places where it stands."""
    template = ChatTemplate(source=source, where=where, special_tokens=dict(special_tokens))
    before: dict[str, list[str]] = {}
    behind: dict[str, list[str]] = {}
    for roles in SAMPLES:
        words = [f"W{number}q{number}W" for number in range(len(roles))]
        try:
            text = render(
                template, [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
            ).text
        except TokenmillError:
            continue
        places = [text.find(word) for word in words]
        if min(places) < 0 or places != sorted(places):
            continue
        ends = [0, *(place + len(word) for place, word in zip(places, words, strict=True))]
        for role, (end, begin) in zip(roles, zip(ends, places, strict=False), strict=False):
            before.setdefault(role, []).append(text[end:begin])
        for role, (end, begin) in zip(roles, zip(ends[1:], [*places[1:], len(text)], strict=True), strict=True):
            behind.setdefault(role, []).append(text[end:begin])
    learnt = [
        _Wrapping(role=role, header=header, footer=_common_start(behind[role]))
        for role, leads in before.items()
        for header in _headers(leads)
    ]
    return tuple(each for each in learnt if _says_much(each.header))


def _headers(leads: Sequence[str]) -> list[str]:
    """Return how the texts before the words of a role end: in one way, or in several that have nothing in common.

    Qwen 3 writes empty thoughts behind the header of the last answer alone.
    """
    headers: list[str] = []
    for lead in leads:
        common = [_common_start([lead[::-1], header[::-1]])[::-1] for header in headers]
        known = next((number for number, each in enumerate(common) if _says_much(each)), None)
        if known is None:
            headers.append(lead)
        else:
            headers[known] = common[known]
    return headers


def _says_much(header: str) -> bool:
    return len(header.strip()) > 1


def _common_start(texts: Sequence[str]) -> str:
    return os.path.commonprefix(list(texts))  # noqa: RUF071 - characters are meant
