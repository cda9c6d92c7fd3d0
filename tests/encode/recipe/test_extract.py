"""Messages in one form, whatever a record calls them."""

import pytest

from tokenmill.encode import Refusal
from tokenmill.encode.recipe.extract import joined, messages_of, texts_of, tools_of

USER = {"role": "user", "content": "Is it?"}
ANSWER = {"role": "assistant", "content": "Yes"}
SYSTEM = {"role": "system", "content": "Be brief"}


def test_speakers_of_sharegpt_become_roles():
    said = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "h"},
        {"from": "gpt", "value": "g", "weight": 1},
        {"from": "tool", "value": "t"},
    ]
    assert messages_of(said, None, "conversations") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "h"},
        {"role": "assistant", "content": "g", "weight": 1},
        {"role": "tool", "content": "t"},
    ]


def test_nulls_of_a_table_are_not_there():
    """A column of messages has every key in every message; a template would take a null for something said."""
    row = {"role": "user", "content": "x", "from": None, "value": None, "tool_calls": None, "name": None}
    assert messages_of([row], None, "messages") == [{"role": "user", "content": "x"}]
    row = {"role": None, "content": None, "from": "human", "value": "x"}
    assert messages_of([row], None, "messages") == [{"role": "user", "content": "x"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert messages_of([call], None, "messages") == [{**call, "content": ""}]


def test_a_text_is_a_message_of_the_role_that_is_given():
    assert messages_of("Is it?", "user", "prompt") == [USER]


@pytest.mark.parametrize(
    ("value", "role", "reason", "detail"),
    [
        ("Is it?", None, "not_messages", "field 'm' is a string"),
        ([], None, "not_messages", "field 'm' is an empty list"),
        (3, "user", "not_messages", "field 'm' is a number"),
        ({"role": "user"}, None, "not_messages", "field 'm' is an object"),
        ([USER, "x"], None, "not_messages", "m[1] is a string"),
        ([{"content": "x"}], None, "not_messages", "m[0] has no role, its keys are ['content']"),
        ([{"role": 3}], None, "not_messages", "m[0] has no role, its keys are ['role']"),
        ([{"from": "gtp", "value": ""}], None, "unknown_role", "m[0] is from 'gtp'; did you mean 'gpt'?"),
        ([{"from": ["gpt"], "value": ""}], None, "unknown_role", "m[0] is from ['gpt']; did you mean 'gpt'?"),
    ],
)
def test_what_is_no_message_is_said(value, role, reason, detail):
    with pytest.raises(Refusal) as refused:
        messages_of(value, role, "m")
    assert (refused.value.reason, refused.value.detail) == (reason, detail)


@pytest.mark.parametrize(
    ("before", "more", "text", "whole"),
    [
        ([], [USER], True, [USER]),
        ([SYSTEM], [USER], True, [SYSTEM, USER]),
        ([SYSTEM], [USER, ANSWER], False, [SYSTEM, USER, ANSWER]),
        ([USER], [ANSWER], True, [USER, ANSWER]),
        ([SYSTEM, USER], [ANSWER], False, [SYSTEM, USER, ANSWER]),
        ([USER], [USER], True, [{"role": "user", "content": "Is it?\nIs it?"}]),
        # The list holds the whole conversation, its prompt included.
        ([USER], [USER, ANSWER], False, [USER, ANSWER]),
        ([USER], [SYSTEM, USER, ANSWER], False, [SYSTEM, USER, ANSWER]),
    ],
)
def test_fields_are_joined_into_one_conversation(before, more, text, whole):
    assert joined(before, more, text) == whole


def test_tools_are_a_list_or_its_json():
    tools = [{"type": "function", "function": {"name": "grind"}}]
    assert tools_of(tools, "tools") == tools
    assert tools_of('[{"type": "function", "function": {"name": "grind"}}]', "tools") == tools
    assert [tools_of(value, "tools") for value in (None, [], "", " ", "[]")] == [None] * 5
    for value in ("[", 3, {"a": 1}, ["grind"], '{"a": 1}'):
        with pytest.raises(Refusal, match=r"^record: refused as tools: field 'tools'"):
            tools_of(value, "tools")


def test_all_texts_of_a_field_are_found_in_order():
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"from": "gpt", "value": "c"}, {"role": "assistant"}, 3]
    assert texts_of(messages) == ["a", "b", "c"]
    assert texts_of("x") == ["x"]
    assert texts_of(None) == []


def test_a_record_nested_without_end_does_not_exhaust_the_stack():
    deep = "x"
    for _ in range(100_000):
        deep = [deep]
    assert texts_of(deep) == []
    with pytest.raises(Refusal, match=r"^record: refused as not_messages: m\[0\] is a list$"):
        messages_of(deep, None, "m")
