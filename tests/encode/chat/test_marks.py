"""A second, independent way to the origin of characters: rare characters around every string, and plain jinja.

The conversation is rendered twice by jinja's own sandbox. The second time a pair of rare characters is around every
string. If both texts are equal without these characters, the pairs say where each string is. No code of
`tokenmill.encode.chat` takes part, so an error in its tracked strings shows here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import jinja2
import pytest
from tests.encode.chat.shapes import SHAPES, reference, shaped, tools_of
from tests.encode.chat.stock import STOCK, stock_source, stock_template, swept
from tests.encode.chat.test_golden import CONVERSATIONS, IN_PARTS

from tokenmill.encode import Refusal
from tokenmill.encode.chat.render import Rendered, render

FIRST_MARK = 0x30000
"""Rare ideographs. They are printable, so `repr` does not escape them."""
NOW = {"now": "2025-01-31"}
NAMES = ("role", "type", "name", "id", "tool_call_id")
"""Fields that templates compare with words of their own, or write again elsewhere."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")

Place = tuple[int, int, int]
"""Message, first character, and one after the last."""


class Marker:
    """Puts a pair of marks around strings; each pair belongs to a message."""

    def __init__(self) -> None:
        self.owners: list[int] = []

    def marked(self, value: object, owner: int, name: str = "") -> object:
        if isinstance(value, dict):
            return {key: self.marked(item, owner, key) for key, item in value.items()}
        if isinstance(value, list):
            return [self.marked(item, owner, name) for item in value]
        if not isinstance(value, str) or name in NAMES or not value.strip() or "<think>" in value:
            return value
        self.owners.append(owner)
        mark = chr(FIRST_MARK + len(self.owners))
        core = value.strip()
        return value.replace(core, f"{mark}{core}{mark}")

    def places(self, text: str) -> tuple[str, list[Place]]:
        """Take the marks out of a text; return also where each string is."""
        plain, places = "", []
        for piece in re.split(f"([{chr(FIRST_MARK)}-{chr(FIRST_MARK + 4096)}])", text):
            if not piece or ord(piece[0]) < FIRST_MARK:
                plain += piece
            elif places and places[-1][0] == ord(piece) and len(places[-1]) == 2:
                places[-1] = (*places[-1], len(plain))
            else:
                places.append((ord(piece), len(plain)))
        owners = [(self.owners[place[0] - FIRST_MARK - 1], *place[1:]) for place in places]
        return plain, [place for place in owners if len(place) == 3]


def places_by_marks(template: str, messages: list[dict], tools: object, text: str) -> list[Place] | None:
    """Return where every string of the messages is; None for a template whose text depends on the marks."""
    # Fields for reasoning have the same text, and a template writes one of them: they get equal marks.
    marker = Marker()
    marked = []
    for index, message in enumerate(messages):
        own = {name: value for name, value in message.items() if name not in THOUGHTS}
        shown = {"role": message["role"], **marker.marked(own, index)}
        thought = next((message[name] for name in THOUGHTS if message.get(name)), None)
        if thought:
            same = marker.marked(thought, index)
            shown |= dict.fromkeys(THOUGHTS, same)
        marked.append(shown)
    try:
        other, _ = reference(stock_source(template), marked, tools=tools)
    except (jinja2.TemplateError, TypeError, AttributeError, KeyError):
        return None
    plain, places = marker.places(other)
    return places if plain == text else None


def wrong_places(found: Rendered, roles: list[str], places: list[Place]) -> Iterator[str]:
    """Yield strings that are authored, or trained though they are not the assistant's, or the reverse."""
    for owner, begin, end in places:
        shown = f"{found.text[begin:end]!r} of message {owner + 1} ({roles[owner]})"
        if any(begin < last and first < end for first, last in found.authored):
            yield f"{shown} is taken for text of the template"
        trained = any(first <= begin and end <= last for first, last in found.supervised)
        touched = any(begin < last and first < end for first, last in found.supervised)
        if roles[owner] == "assistant" and not trained:
            yield f"{shown} is not trained"
        if roles[owner] != "assistant" and touched:
            yield f"{shown} is trained"


def check(template: str, messages: list[dict], tools: object) -> bool:
    """Compare a render with the marks; return whether the marks could tell."""
    try:
        found = render(stock_template(template), messages, tools=tools, kwargs=NOW)
    except Refusal:
        return False
    if "arguments_converted" in found.notes:
        return False
    places = places_by_marks(template, messages, tools, found.text)
    if places is None:
        return False
    assert list(wrong_places(found, [message["role"] for message in messages], places)) == []
    return True


@pytest.mark.parametrize("name", swept(STOCK))
def test_marks_agree_about_every_string_of_the_matrix(name):
    """[T1.a]"""
    told = 0
    for given in CONVERSATIONS.values():
        messages = given["messages"]
        if name.startswith(IN_PARTS):
            messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        told += check(name, messages, given.get("tools"))
    # A template that dates its text is compared with another date, and one that cuts texts sees the marks.
    assert told >= 8


@pytest.mark.parametrize("shape", SHAPES)
def test_marks_agree_about_every_string_of_odd_conversations(shape):
    """[T1.a]"""
    told = sum(check(name, shaped(name, shape), tools_of(shape)) for name in STOCK)
    assert told >= 10


def test_marks_see_a_string_that_is_trained_and_should_not_be():
    messages = [{"role": "user", "content": "asks"}, {"role": "assistant", "content": "says"}]
    found = Rendered(text="asks says", supervised=((0, 9),), authored=((4, 5),))
    assert list(wrong_places(found, ["user", "assistant"], [(0, 0, 4), (1, 5, 9)])) == [
        "'asks' of message 1 (user) is trained"
    ]
    found = Rendered(text="asks says", supervised=((5, 7),), authored=((4, 9),))
    assert [each.rpartition(" ")[2] for each in wrong_places(found, ["user", "assistant"], [(1, 5, 9)])] == [
        "template",
        "trained",
    ]
    assert places_by_marks("qwen3", messages, None, "another text") is None
