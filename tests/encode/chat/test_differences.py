"""Conversations for which a second implementation, with marks around every string, gave another result.

The table comes from a trial with 3,600 random conversations. Each case expects the judgement of the trial.
"""

from __future__ import annotations

import pytest
from tests.encode.chat.shapes import TOOLS, result
from tests.encode.chat.stock import stock_template

from tokenmill.encode import Refusal
from tokenmill.encode.chat.render import Rendered, render

NOW = {"now": "2025-01-31"}
USER = {"role": "user", "content": "USER"}
ANSWER = {"role": "assistant", "content": "ANSWER."}


def answer(text: str | None, **more: object) -> dict:
    return {"role": "assistant", "content": text, **more}


def calls(*arguments: object) -> list[dict]:
    return [
        {"id": f"call{index}", "type": "function", "function": {"name": "weather", "arguments": each}}
        for index, each in enumerate(arguments)
    ]


def shown(name: str, messages: list[dict], **more: object) -> Rendered:
    return render(stock_template(name), messages, kwargs=NOW, **more)


def trained(name: str, messages: list[dict], **more: object) -> list[str]:
    found = shown(name, messages, **more)
    return [found.text[begin:end] for begin, end in found.supervised]


@pytest.mark.parametrize("arguments", ['{"town": "%s"}', {"town": "%s"}], ids=["text", "object"])
@pytest.mark.parametrize("name", ["gptoss", "gptoss_training"])
def test_a_call_that_the_template_leaves_out_is_noted_and_the_other_is_no_text_in_quotes(name, arguments):
    """gpt-oss writes the first of parallel calls only (N1)."""
    both = [arguments % town if isinstance(arguments, str) else {"town": town} for town in ("FIRST", "SECOND")]
    messages = [USER, answer("", tool_calls=calls(*both)), result(0), ANSWER]
    found = shown(name, messages, tools=TOOLS)
    assert "tool_calls_not_written" in found.notes
    assert "SECOND" not in found.text
    turns = [found.text[begin:end] for begin, end in found.supervised]
    assert '<|message|>{"town": "FIRST"}<|call|>' in turns[0]


def test_a_call_that_is_written_as_a_whole_is_not_noted():
    messages = [USER, answer("", tool_calls=calls({"town": "FIRST"}, {"town": "SECOND"})), result(0), ANSWER]
    assert shown("qwen3", messages, tools=TOOLS).notes == ()


@pytest.mark.parametrize("name", ["glm4moe", "glm4moe_training", "llama3_1", "qwen3", "deepseekv3"])
def test_a_null_answer_is_trained_like_an_empty_one(name):
    """GLM writes it as the text "None" (N2)."""
    for messages in ([USER, answer(None)], [USER, answer(None), USER, ANSWER]):
        same = [{**each, "content": each["content"] or ""} for each in messages]
        assert shown(name, messages) == shown(name, same)
        assert "None" not in "".join(trained(name, messages))


def test_a_null_beside_calls_is_not_written_as_a_word():
    messages = [USER, answer(None, tool_calls=calls({"town": "ARG"})), result(0), ANSWER]
    assert "None" not in shown("glm4moe", messages, tools=TOOLS).text


def test_a_null_among_arguments_stays_what_the_template_makes_of_it():
    messages = [USER, answer(None, tool_calls=calls({"town": None})), result(0), ANSWER]
    assert "town:None" in trained("gemma4", messages, tools=TOOLS)[0]


def test_an_empty_answer_in_the_middle_is_trained_with_its_end():
    """gpt-oss ends the last turn with another token than earlier ones (N3)."""
    empty = "<|channel|>final<|message|>"
    assert trained("gptoss", [USER, answer(""), USER, ANSWER]) == [
        f"{empty}<|end|>",
        f"{empty}ANSWER.<|return|>",
    ]
    assert trained("gptoss", [USER, answer("")]) == [f"{empty}<|return|>"]


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("qwen3", "<think>\nWHY\n</think>\n\n<|im_end|>"),
        ("qwen3_5_think", "<think>\nWHY\n</think>\n\n<|im_end|>"),
        ("nemotron_3_nano", "<think>\nWHY\n</think><|im_end|>"),
        ("glm4moe", "\n<think>WHY</think>"),
        (
            "gptoss",
            "<|channel|>analysis<|message|>WHY<|end|><|start|>assistant<|channel|>final<|message|><|return|>",
        ),
    ],
)
def test_an_answer_of_reasoning_alone_is_trained_up_to_its_end(name, turn):
    """It was rejected, because earlier turns are written without their reasoning (N4)."""
    assert trained(name, [USER, answer("", reasoning_content="WHY")]) == [turn]


@pytest.mark.parametrize("content", ["", " ", "\n\n"])
def test_white_space_does_not_stand_for_calls_that_the_template_leaves_out(content):
    """A content of white space was stored, although the same message with an empty one was rejected."""
    messages = [USER, answer(content, tool_calls=calls({"town": "ARG"})), result(0), ANSWER]
    with pytest.raises(Refusal, match="writes no tool calls") as caught:
        shown("phi3", messages, tools=TOOLS)
    assert caught.value.reason == "missing"


def test_a_tag_that_a_template_looks_for_and_passes_on_is_text_of_the_record():
    """Marks around strings cannot tell this; they took it for text of the template."""
    found = shown("nemotron_3_nano", [USER, answer("<think>WHY</think>ANSWER.")])
    at = found.text.index("WHY")
    assert not any(begin <= at < end for begin, end in found.authored)
    turn = found.text[slice(*found.supervised[0])]
    assert turn.endswith("WHY</think>ANSWER.<|im_end|>")


def test_an_empty_last_answer_after_many_turns_is_trained_as_its_end():
    """Once in 3,600 conversations it was rejected."""
    messages = [USER, ANSWER] * 4 + [USER, answer("")]
    assert trained("qwen3", messages)[-1] == "<think>\n\n</think>\n\n<|im_end|>"
