from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.encode.chat.shapes import SHAPES, TOOLS, tools_of
from tests.encode.chat.stock import stock_template

from tokenmill.encode.chat.conversation import Conversation, flattened
from tokenmill.encode.chat.render import Rendered, render
from tokenmill.encode.chat.template import CHATML, ChatTemplate, load_template
from tokenmill.encode.chat.tokens import ChatEncoder
from tokenmill.encode.refusal import Refusal

USER = {"role": "user", "content": "USER"}


def one(source: str) -> ChatTemplate:
    return ChatTemplate(source=source, where="test")


CHAT = one(CHATML)


def lost(template: ChatTemplate, messages: list, **more: object) -> tuple[str, ...]:
    return render(template, messages, kwargs={"now": "2025-01-31"}, **more).lost


def trained(found: Rendered) -> list[str]:
    return [found.text[a:b] for a, b in found.supervised]


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("llama3", ("tools_not_written",)),
        ("gemma", ("tools_not_written",)),
        ("qwen3", ()),
        ("llama3_1", ()),
        ("gptoss", ()),
    ],
)
def test_tools_that_a_template_does_not_write_are_told(name, names):
    """[T1.b]"""
    assert lost(stock_template(name), SHAPES["2 turns"], tools=TOOLS) == names
    assert lost(stock_template(name), SHAPES["2 turns"], tools=None) == ()
    assert lost(stock_template(name), SHAPES["2 turns"], tools=[]) == ()


def test_an_option_that_is_written_is_not_taken_for_the_tools():
    template = one("{{ note }}" + CHATML)
    found = render(template, SHAPES["1 turn"], tools=TOOLS, kwargs={"note": "weather"})
    assert found.lost == ("tools_not_written",)


@pytest.mark.parametrize(
    ("name", "shape", "names"),
    [
        # Qwen3 leaves out the reasoning of earlier turns alone, by design.
        ("qwen3", "reasoning", ("reasoning_dropped",)),
        ("qwen3", "reasoning in the text", ("reasoning_dropped",)),
        ("qwen3", "tools, reasoning", ()),
        ("qwen3_8", "reasoning", ()),
        ("qwen3_8", "reasoning in the text", ()),
        ("qwen2_5", "reasoning", ("reasoning_dropped",)),
        ("qwen2_5", "reasoning in the text", ()),
        ("qwen2_5", "tools, reasoning", ("reasoning_dropped",)),
        ("llama3", "tools, text before", ("tool_calls_not_written", "tools_not_written")),
        ("llama3_1", "tools, text before", ("content_not_written",)),
        ("qwen3", "tools, text before", ()),
        ("qwen3", "tools, no arguments", ()),
        ("qwen3", "white space", ()),
        ("qwen3", "last is empty", ()),
    ],
)
def test_what_a_template_leaves_out_is_told(name, shape, names):
    """[T1.b]"""
    assert lost(stock_template(name), SHAPES[shape], tools=tools_of(shape)) == names


@pytest.mark.parametrize("reasoning", ["", " \n", None])
def test_reasoning_without_a_text_is_not_lost(reasoning):
    answer = {"role": "assistant", "content": "<think>\n\n</think>\n\nANSWER", "reasoning_content": reasoning}
    assert lost(stock_template("qwen2_5"), [USER, answer]) == ()
    answers = one(CHATML.replace("message.content", "message.content.split('</think>')[-1]"))
    assert lost(answers, [USER, answer]) == ()
    assert lost(answers, [USER, {"role": "assistant", "content": "WHY</think>ANSWER"}]) == ("reasoning_dropped",)


def test_fields_for_reasoning_are_names_of_one_thing():
    template = one(CHATML.replace("content + '<|im_end|>'", "(message.thinking or '') + content + '<|im_end|>'", 1))
    both = {"role": "assistant", "content": "ANSWER", "thinking": "WHY", "reasoning_content": "WHY"}
    assert lost(template, [USER, both]) == ()
    assert lost(template, [USER, {**both, "thinking": None}]) == ()
    assert lost(one(CHATML), [USER, both]) == ("reasoning_dropped",)


def test_losses_are_told_of_the_conversations_that_are_kept(small):
    template = replace(stock_template("llama3"), tokenizer=small.identity.content)
    encoder = ChatEncoder(template=template, tokenizer=small)
    given = [
        Conversation(messages=SHAPES["2 turns"], tools=TOOLS),
        Conversation(messages=SHAPES["2 turns"]),
        Conversation(messages=[USER], tools=TOOLS),
        Conversation(messages=SHAPES["reasoning"], tools=TOOLS),
    ]
    encoded = encoder.encode(given)
    assert encoded.kept.tolist() == [0, 1, 3]
    assert encoded.lost == [("tools_not_written",), (), ("reasoning_dropped", "tools_not_written")]


def parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


IN_PARTS = [
    {"role": "user", "content": parts("US", "ER")},
    {"role": "assistant", "content": parts("AN", "SW", "ER")},
]
FLAT = [{"role": "user", "content": "USER"}, {"role": "assistant", "content": "ANSWER"}]
STRINGS_ONLY = CHATML.replace("message.content is string", "true")


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3", "gemma", "phi3", "cohere", "gptoss", "glm4moe"])
def test_texts_in_parts_are_what_one_text_is(name):
    """[T1.a]"""
    options = {"now": "2025-01-31"}
    found = render(stock_template(name), IN_PARTS, kwargs=options)
    assert found == render(stock_template(name), FLAT, kwargs=options)
    assert "USER" in found.text


@pytest.mark.parametrize(
    "source",
    [
        STRINGS_ONLY,  # prints the list
        STRINGS_ONLY.replace("{{- message.content -}}", "{{- message.content + '' -}}"),  # fails
        STRINGS_ONLY.replace("{{- message.content -}}", "{{- message.content | trim -}}"),
        STRINGS_ONLY.replace("{{- message.content -}}", "{{- message.content | tojson -}}"),
        CHATML.replace("message.content is not none", "false"),  # writes nothing
    ],
)
def test_a_template_that_does_not_know_parts_is_given_one_text(source):
    """[T1.a]"""
    found = render(one(source), IN_PARTS)
    assert found == render(one(source), FLAT)
    assert "list" not in found.text
    assert "type" not in found.text
    assert found.lost == ()
    mixed = [FLAT[0], IN_PARTS[1]]
    assert render(one(source), mixed) == found


def test_parts_are_given_as_they_are_to_a_template_that_knows_them():
    source = CHATML.replace("else part.text", "else part.text + '+'")
    assert trained(render(one(source), IN_PARTS)) == ["AN+SW+ER+<|im_end|>"]
    # It leaves out the system in either form.
    without = one(source.replace("for message in messages", "for message in messages if message.role != 'system'"))
    found = render(without, [{"role": "system", "content": parts("SYS", "TEM")}, *IN_PARTS])
    assert trained(found) == ["AN+SW+ER+<|im_end|>"]
    assert found.lost == ("content_not_written",)


def test_a_part_that_is_left_out_is_told():
    found = render(stock_template("llava_next"), IN_PARTS)
    assert trained(found) == [" AN</s>"]
    assert found.lost == ("content_not_written",)


def test_what_is_wrong_in_either_form_is_told_of_the_form_that_was_given():
    with pytest.raises(Refusal) as caught:
        render(CHAT, IN_PARTS[:1])
    assert caught.value.reason == "no_trained_message"
    with pytest.raises(Refusal) as caught:
        render(
            one("{{ messages[0].content }}{{ raise_exception('no') if messages[0].content is string }}"), IN_PARTS
        )
    assert (caught.value.reason, caught.value.detail) == (
        "parts",
        "the template writes the list itself in message 1 of 2 (user)",
    )


@pytest.mark.parametrize(
    "content", [{"name": "town", "warm": True}, [{"name": "town"}, {"name": "lake"}], [1, [2]]]
)
def test_contents_that_are_no_texts_may_be_written_as_json(content):
    template = one(STRINGS_ONLY.replace("{{- message.content -}}", "{{- message.content | tojson -}}"))
    found = render(template, [{"role": "tool", "content": content}, USER, {"role": "assistant", "content": "A"}])
    assert found.text.startswith(f"<|im_start|>tool\n{json.dumps(content)}<|im_end|>\n")
    assert found.lost == ()


def test_only_lists_of_texts_are_made_one_text():
    assert flattened(FLAT) is None
    assert flattened(IN_PARTS) == FLAT
    assert flattened([{"role": "user", "content": ["a", {"text": "b"}]}]) == [{"role": "user", "content": "ab"}]
    assert flattened([{"role": "user", "content": []}]) == [{"role": "user", "content": ""}]
    assert flattened([{"role": "user", "content": [{"type": "text", "text": None}]}]) is None
    assert flattened([{"role": "user", "content": [*parts("a"), {"type": "image", "text": "b"}]}]) is None
    assert flattened(["x"]) is None
    assert flattened("x") is None


def test_the_template_chatml_has_no_tools_and_says_so(chatml):
    """[T1.b]"""
    assert load_template("chatml", tokenizer=None).source == chatml.source
    assert lost(chatml, SHAPES["1 turn"], tools=TOOLS) == ("tools_not_written",)
