from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.encode.chat.tracked import (
    AUTHORED,
    GENERATION,
    UNKNOWN,
    Tracked,
    authored,
    generated,
    join,
    placed,
    runs_of,
    text_of,
    tojson,
)

TEXTS = st.text(alphabet="ab <>\n\tÄßİŒ'\"\\é\U0001f600\x00", max_size=12)


def of_record(text: str, first: int = 1) -> Tracked:
    return placed(text, first) if text else authored("")


def marks_of(text: str) -> list[int]:
    """Write runs out: one mark a character."""
    marks = [first + index * step for size, first, step in runs_of(text) for index in range(size)]
    assert len(marks) == len(text)
    return marks


def origin(result: str, source: str, first: int = 1) -> list[str]:
    """Return the source's character that each character of the result is said to come from."""
    marks = marks_of(result)
    return ["" if mark == AUTHORED else "?" if mark == UNKNOWN else source[mark - first] for mark in marks]


OPERATIONS = {
    "strip": lambda t: [t.strip()],
    "strip chars": lambda t: [t.strip("a\n")],
    "lstrip": lambda t: [t.lstrip()],
    "rstrip": lambda t: [t.rstrip("b ")],
    "slice": lambda t: [t[1:], t[:-1], t[::-1], t[2:1], t[:]],
    "index": lambda t: [t[0], t[-1]] if t else [],
    "iterate": list,
    "split": lambda t: t.split(),
    "split once": lambda t: t.split(None, 1),
    "split sep": lambda t: t.split("a"),
    "rsplit": lambda t: [*t.rsplit(None, 1), *t.rsplit("b", 1)],
    "splitlines": lambda t: [*t.splitlines(), *t.splitlines(True)],
    "partition": lambda t: [*t.partition("a"), *t.rpartition("b")],
    "prefix": lambda t: [t.removeprefix("a"), t.removesuffix("b"), t.removesuffix("")],
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=TEXTS)
def test_parts_of_a_string_are_the_parts_of_str_and_know_where_they_stood(name, text):
    found = OPERATIONS[name](of_record(text))
    assert found == OPERATIONS[name](text)
    for part in found:
        assert type(part) is Tracked
        assert origin(part, text) == list(str.__str__(part))


@given(left=TEXTS, right=TEXTS)
def test_joined_strings_keep_both_origins(left, right):
    for made in (of_record(left) + authored(right), join((of_record(left), authored(right)))):
        assert made == left + right
        assert origin(made, left) == [*left, *[""] * len(right)]
    assert origin(authored(left) + of_record(right), right) == [*[""] * len(left), *right]
    assert origin(left + of_record(right), right) == [*["?"] * len(left), *right], (
        "of a plain string nothing is known"
    )
    assert origin(of_record(left) + right, left) == [*left, *["?"] * len(right)]


@given(text=TEXTS, new=TEXTS)
def test_what_replaces_is_known_as_the_replacement(text, new):
    made = of_record(text).replace("a", authored(new))
    assert made == text.replace("a", new)
    assert [mark for mark in origin(made, text) if mark] == [c for c in text if c != "a"]
    assert of_record(text).replace("a", new, 1) == text.replace("a", new, 1)
    assert authored("-").join([of_record(text), authored("x")]) == text + "-x"


@given(text=TEXTS)
def test_changes_of_case_keep_the_origin_of_each_character(text):
    for name in ("lower", "upper", "casefold"):
        made = getattr(of_record(text), name)()
        assert made == getattr(text, name)()
        assert "" not in origin(made, text)
        if "?" not in origin(made, text):
            assert all(c in getattr(was, name)() for c, was in zip(made, origin(made, text), strict=True))
    for name in ("capitalize", "title", "swapcase"):
        assert getattr(of_record(text), name)() == getattr(text, name)()


@given(text=TEXTS, other=TEXTS)
def test_formatting_follows_what_it_fills_in(text, other):
    made = authored("<%s|%s%%>") % (of_record(text), authored(other))
    assert made == "<%s|%s%%>" % (text, other)  # noqa: UP031
    assert origin(made, text) == ["", *text, "", *[""] * len(other), "", ""]
    assert "?" in origin("%s!" % of_record("x"), "x")  # noqa: UP031


def test_methods_that_are_not_followed_give_strings_of_unknown_origin():
    for made in ("{}!".format(of_record("x")), of_record("x").center(3), "".join([of_record("x")])):
        assert set(marks_of(made)) == {UNKNOWN}
        assert origin(authored("a") + made, "x")[0] == ""
        assert "?" in origin(authored("a") + made, "x")
    assert set(marks_of(Tracked("plain"))) == {UNKNOWN}


def test_a_tracked_string_is_a_string_to_everyone_else():
    text = of_record("key")
    assert {"key": 1}[text] == 1
    assert hash(text) == hash("key")
    assert isinstance(str(text), Tracked)
    assert json.dumps({text: text}) == '{"key": "key"}'
    assert text.startswith("k")
    assert "e" in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def all_of_record(value: object) -> object:
    if isinstance(value, str):
        return of_record(value)
    if isinstance(value, dict):
        return {of_record(key): all_of_record(item) for key, item in value.items()}
    return [all_of_record(item) for item in value] if isinstance(value, list) else value


@given(value=JSON, ascii_=st.booleans(), indent=st.none() | st.integers(0, 4), sort=st.booleans())
def test_json_is_that_of_the_standard_library(value, ascii_, indent, sort):
    made = tojson(all_of_record(value), ensure_ascii=ascii_, indent=indent, sort_keys=sort)
    assert made == json.dumps(value, ensure_ascii=ascii_, indent=indent, sort_keys=sort)
    assert UNKNOWN not in marks_of(made)
    assert tojson({"a": [1, {}]}, separators=(",", ":")) == '{"a":[1,{}]}'


@given(value=JSON)
def test_printed_values_are_those_of_python(value):
    if not isinstance(value, str):
        made = text_of(all_of_record(value))
        assert made == str(value)
        assert UNKNOWN not in marks_of(made)


def test_escaped_characters_know_the_character_that_was_escaped():
    text = 'a"\n\U0001f600b'
    made = tojson(of_record(text), ensure_ascii=True)
    assert origin(made, text) == ["", "a", *['"'] * 2, *["\n"] * 2, *["\U0001f600"] * 12, "b", ""]
    made = text_of([of_record('it\'s "x"\n')])
    assert made == str(['it\'s "x"\n'])
    assert origin(made, 'it\'s "x"\n')[3:7] == ["t", "'", "'", "s"]


def test_generation_is_marked_on_every_character():
    made = generated(join((authored("<t>"), of_record("ab"))))
    assert all(mark & GENERATION for mark in marks_of(made))
    assert [mark & (GENERATION - 1) for mark in marks_of(made)] == [0, 0, 0, 1, 2]
    assert set(marks_of(generated("plain"))) == {UNKNOWN}
