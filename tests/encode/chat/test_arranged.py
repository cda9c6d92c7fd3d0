"""Turns that templates write in pieces, without a header or without an end, proven by other arrangements."""

from __future__ import annotations

import pytest
from tests.encode.chat.shapes import TOOLS, call, result
from tests.encode.chat.stock import stock_template

from tokenmill.encode import Refusal
from tokenmill.encode.chat import turns as located
from tokenmill.encode.chat.render import render
from tokenmill.encode.chat.template import CHATML, ChatTemplate

USER = {"role": "user", "content": "USER"}
CALL = '<|tool_call>call:weather{{town:<|"|>{}<|"|>}}<tool_call|><|tool_response>'


NOW = {"now": "2025-01-31"}


def asked(index: int, **more: object) -> dict:
    return call(index, {"town": f"ARG{index}"}, **more)


def answer(text: str, **more: object) -> dict:
    return {"role": "assistant", "content": text, **more}


def trained(name: str, messages: list[dict]) -> list[str]:
    found = render(stock_template(name), messages, tools=TOOLS, kwargs=NOW)
    return [found.text[begin:end] for begin, end in found.supervised]


BESIDE = [USER, asked(0, content="TEXT0."), result(0), asked(1, content="TEXT1."), result(1), answer("ANSWER.")]
"""Calls in a row, each with a text beside it."""


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("gemma4", ["TEXT0.<turn|>", CALL.format("ARG1"), "TEXT1.<turn|>", "ANSWER.<turn|>"]),
        ("gemma4_v5", [f"TEXT0.{CALL.format('ARG1')}", "TEXT1.ANSWER.<turn|>"]),
        ("diffusion_gemma", ["TEXT0.", CALL.format("ARG1"), "TEXT1.", "ANSWER.<turn|>"]),
    ],
)
def test_a_text_beside_calls_is_trained_on_where_the_template_writes_it(name, turns):
    assert trained(name, BESIDE) == [CALL.format("ARG0"), *turns]


@pytest.mark.parametrize("name", ["gemma4_v5", "diffusion_gemma"])
def test_reasoning_between_a_text_behind_the_results_and_the_answer_is_trained_on(name):
    messages = [USER, asked(0, content="TEXT."), result(0), answer("ANSWER.", reasoning_content="WHY")]
    assert trained(name, messages)[-1].endswith("<|channel>thought\nWHY\n<channel|>ANSWER.<turn|>")


@pytest.mark.parametrize(
    ("name", "without_call", "without_answer"),
    [
        ("gemma4", ["ANSWER.<turn|>"], ["TEXT.<turn|>"]),
        ("gemma4_v5", ["ANSWER.<turn|>"], ["TEXT."]),
        ("diffusion_gemma", ["ANSWER.<turn|>"], ["TEXT."]),
    ],
)
def test_flags_are_honoured_where_a_message_stands_in_pieces(name, without_call, without_answer):
    given = [USER, asked(0, content="TEXT."), result(0), answer("ANSWER.")]
    assert trained(name, [USER, {**given[1], "train": False}, *given[2:]]) == without_call
    assert trained(name, [*given[:3], {**given[3], "train": False}]) == [CALL.format("ARG0"), *without_answer]


def test_a_text_behind_results_whose_turn_nothing_ends_provably_is_refused():
    with pytest.raises(Refusal, match="in parts, with others between them") as caught:
        trained("diffusion_gemma", [USER, asked(0, content="TEXT."), result(0), USER, answer("ANSWER.")])
    assert caught.value.reason == "interleaved"


DEEPSEEK = '\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{{"town": "{}"}}\n```<｜tool▁call▁end｜>'


def test_a_call_without_a_header_begins_behind_what_ends_the_message_before_it():
    end = "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    later = [DEEPSEEK.format(town) + end for town in ("ARG1", "ARG2")]
    messages = [USER, asked(0), result(0), asked(1), result(1), answer("ANSWER0."), USER, asked(2), result(2)]
    _, *turns = trained("deepseekv3", [*messages, answer("ANSWER2.")])
    assert turns == [
        later[0],
        "ANSWER0.<｜end▁of▁sentence｜>",
        later[1],
        "ANSWER2.<｜end▁of▁sentence｜>",
    ]


def test_what_asks_for_calls_is_not_trained_on_where_a_turn_has_it_inside():
    """gpt-oss writes its header before each part of a turn: of the thoughts, and of the call."""
    turns = trained("gptoss", [USER, asked(0, reasoning_content="WHY"), result(0), answer("ANSWER.")])
    assert turns[0].startswith(" to=functions.weather")


def test_a_result_may_have_to_say_which_call_it_belongs_to():
    """As Mistral's templates ask for it: what ends a call is shown by a result that does."""
    source = CHATML.replace(
        "{{- '<|im_start|>' + message.role",
        "{%- if message.role == 'tool' and not message.tool_call_id -%}"
        "{{- raise_exception('no id') -}}{%- endif -%}"
        "{%- if message.role == 'user' and loop.previtem and loop.previtem.tool_calls -%}"
        "{{- raise_exception('no result') -}}{%- endif -%}{{- '<|im_start|>' + message.role",
    )
    source = source.replace(
        "{%- generation -%}", "{{- message.tool_calls | tojson if message.tool_calls else '' -}}"
    )
    template = ChatTemplate(source=source.replace("{%- endgeneration -%}", ""), where="test", special_tokens={})
    found = render(template, [USER, asked(0), result(0), answer("ANSWER.")])
    turns = [found.text[begin:end] for begin, end in found.supervised]
    assert [turn.endswith("}}]<|im_end|>") for turn in turns] == [True, False]


@pytest.mark.parametrize("name", ["qwen3_vl", "gptoss", "lfm2_2_5", "deepseekv3"])
@pytest.mark.parametrize("content", [None, ""])
def test_a_call_without_a_text_may_have_a_content_that_is_null_or_empty(name, content):
    empty = render(stock_template(name), [USER, asked(0), result(0), answer("ANSWER.")], tools=TOOLS, kwargs=NOW)
    other = [USER, asked(0, content=content), result(0), answer("ANSWER.")]
    assert render(stock_template(name), other, tools=TOOLS, kwargs=NOW) == empty


@pytest.mark.parametrize("name", ["gemma4_v5", "deepseekv3"])
def test_a_conversation_is_rendered_as_often_however_long_it_is(monkeypatch, name):
    """Of a long one the whole is rendered, and all else is shown by short samples."""
    sizes: list[int] = []
    rendered = located._run

    def counted(template: object, names: dict) -> str:
        sizes.append(len(names["messages"]))
        return rendered(template, names)

    monkeypatch.setattr(located, "_run", counted)
    counts = []
    for turns in (12, 24):
        exchange = [USER, asked(0, content="TEXT."), result(0), answer("ANSWER.")]
        sizes.clear()
        trained(name, exchange * turns)
        counts.append(len([size for size in sizes if size > 24]))
    assert counts[0] == counts[1] <= 12
