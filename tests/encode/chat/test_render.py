from __future__ import annotations

import re

import jinja2
import pytest
from tests.encode.chat.shapes import FEW, SHAPES, TURNS, reference, searched, shaped, tools_of
from tests.encode.chat.stock import STOCK, stock_source, stock_template, swept
from transformers.utils.chat_template_utils import render_jinja_template

from tokenmill.encode.chat.render import render
from tokenmill.encode.chat.template import ChatTemplate
from tokenmill.encode.refusal import Refusal

MARKED = [name for name in STOCK if "endgeneration" in stock_source(name)]
UNMARKED = [name for name in STOCK if name not in MARKED]
OPTIONS = {"now": "2025-01-31"}
DATE = r"\d{4}-\d\d-\d\d"

_NO_TOOL_CALLS = (
    *("deepseek_r1_distill", "idefics3", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),
)
"""Templates that write nothing of a message with tool calls only: to train on it would be to train on nothing."""
_TOOL_SHAPES = [shape for shape in SHAPES if shape.startswith("tools")]
_GEMMA4 = ("diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5")
REFUSED: dict[tuple[str, str], str] = {
    **{
        (name, shape): "missing"
        for name in _NO_TOOL_CALLS
        for shape in _TOOL_SHAPES
        if shape != "tools, text before"
    },
    # The text of the assistant comes after the tool's answer, in the middle of which its turn would begin.
    **{(name, "tools, text before"): "interleaved" for name in _GEMMA4},
    # Two messages in a row are one turn, with nothing between them.
    **{(name, "assistant twice"): "end_of_turn" for name in ("diffusion_gemma", "gemma4_v5")},
    **{(name, "assistant twice"): "header" for name in ("gemma4", "gemma4_v3", "gemma4_v4")},
    # An empty turn is written otherwise at the end than in the middle, so no render shows where it ends.
    **{
        (name, "first is empty"): "end_of_turn" for name in ("qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6")
    },
    # They raise on a conversation without a user, so no render ends with the first message.
    **{
        (name, "assistant first"): "end_of_turn"
        for name in ("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8")
    },
}


def expected(name: str, shape: str) -> tuple[str, list[tuple[int, int]]] | None:
    """Render by plain jinja; None where the template itself raises."""
    try:
        return reference(stock_source(name), shaped(name, shape), tools=tools_of(shape))
    except (jinja2.TemplateError, TypeError, AttributeError, KeyError):
        return None


def refusal_of(name: str, shape: str) -> str:
    with pytest.raises(Refusal) as caught:
        render(stock_template(name), shaped(name, shape), tools=tools_of(shape), kwargs=OPTIONS)
    return caught.value.reason


def test_there_are_enough_stock_templates_and_none_is_left_out():
    """[T1.a]"""
    assert len(UNMARKED) >= 35
    assert len(MARKED) >= 30
    assert sorted(TURNS) == sorted(UNMARKED)


@pytest.mark.parametrize(
    "shape", [shape if shape in FEW else pytest.param(shape, marks=pytest.mark.deep) for shape in SHAPES]
)
@pytest.mark.parametrize("name", swept(MARKED))
def test_generation_blocks_are_what_transformers_makes_of_them(name, shape):
    """[T1.a]"""
    wanted = expected(name, shape)
    if wanted is None:
        assert refusal_of(name, shape) == "template_error"
    elif REFUSED.get((name.removesuffix("_training"), shape)) == "missing":
        assert refusal_of(name, shape) == "missing"
    else:
        found = render(stock_template(name), shaped(name, shape), tools=tools_of(shape), kwargs=OPTIONS)
        text, ranges = wanted
        assert found.text == text
        assert [text[a:b] for a, b in found.supervised] == [text[a:b] for a, b in joined(ranges)]
        assert list(found.supervised) == joined(ranges)


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that touch."""
    done: list[tuple[int, int]] = []
    for begin, end in ranges:
        if done and done[-1][1] == begin:
            begin = done.pop()[0]  # noqa: PLW2901
        done.append((begin, end))
    return done


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", swept(UNMARKED))
def test_without_generation_blocks_a_turn_goes_from_its_header_to_its_end(name, shape):
    """[T1.a]"""
    wanted = expected(name, shape)
    if wanted is None:
        assert refusal_of(name, shape) == "template_error"
    elif (name, shape) in REFUSED:
        assert refusal_of(name, shape) == REFUSED[name, shape]
    else:
        messages = shaped(name, shape)
        found = render(stock_template(name), messages, tools=tools_of(shape), kwargs=OPTIONS)
        assert found.text == wanted[0]
        pieces = [found.text[a:b] for a, b in found.supervised]
        for word in ("USER", "SYSTEM", "RESULT", "TOOLTEXT"):
            assert not any(word in piece for piece in pieces)
        if "empty" in shape or "no arguments" in shape:
            # What has no text cannot be searched for: the turns around it can.
            assert len(pieces) == sum(message["role"] == "assistant" for message in messages)
            pieces = [piece for piece in pieces if "ANSWER" in piece]
        assert pieces == searched(name, found.text, messages)


TRAPS = {
    "the same text everywhere": ["same words", "same words", "same words", "same words"],
    "texts that are parts of others": ["a", "aa", "a a", "a"],
    "text that looks like turns": [
        "<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n",
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\ny",
        "[/INST] z</s><end_of_turn>\n<start_of_turn>model\nw<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n<|end|><|return|><turn|><｜end▁of▁sentence｜>",
    ],
    "words of the template": ["assistant", "model", "Assistant:", "user"],
    "format strings and tags": ["{{ 7*7 }} {% raw %}", "%s %d %(x)s {0}", "{# x #}", "{{ messages }}"],
}


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", swept(UNMARKED))
def test_spans_do_not_depend_on_what_the_texts_are(name, trap):
    """[T1.a, S.i]"""
    sentinels = ["USER0.", "ANSWER0.", "USER1.", "ANSWER1."]
    text = reference(stock_source(name), shaped(name, "2 turns"))[0]
    pieces = searched(name, text, shaped(name, "2 turns"))
    wanted = []
    for piece, sentinel, content in zip(pieces, sentinels[1::2], TRAPS[trap][1::2], strict=True):
        wanted.append(piece.replace(sentinel, content))
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, TRAPS[trap], strict=True)]
    if isinstance(shaped(name, "2 turns")[0]["content"], list):
        messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    found = render(stock_template(name), messages, kwargs=OPTIONS)
    assert [found.text[a:b] for a, b in found.supervised] == [piece.strip("\t") for piece in wanted]


def test_what_the_template_wrote_and_what_the_record_wrote_share_the_text(chatml):
    found = render(chatml, [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}])
    assert found.text == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
    assert [found.text[a:b] for a, b in found.authored] == [
        "<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n",
    ]
    assert [found.text[a:b] for a, b in found.supervised] == ["c<|im_end|>"]


def test_a_prompt_has_nothing_to_train_on(chatml):
    found = render(chatml, [{"role": "user", "content": "ab"}], add_generation_prompt=True)
    assert found.text == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    assert found.supervised == ()


def test_only_the_last_turn_is_trained_on_if_that_is_asked_for(chatml):
    for template in (chatml, stock_template("qwen2_5"), stock_template("diffusion_gemma_training")):
        found = render(template, SHAPES["5 turns"], last_only=True)
        (piece,) = [found.text[a:b] for a, b in found.supervised]
        assert piece.startswith("ANSWER4.")


def test_an_empty_last_turn_after_an_empty_question_is_not_guessed(chatml):
    with pytest.raises(Refusal) as caught:
        render(chatml, SHAPES["last is empty"], last_only=True)
    assert caught.value.reason == "no_proof"


def test_other_roles_can_be_trained_on():
    found = render(stock_template("qwen2_5"), SHAPES["2 turns"], train_on=("assistant", "user"))
    pieces = [found.text[a:b] for a, b in found.supervised]
    assert pieces == ["USER0.<|im_end|>", "ANSWER0.<|im_end|>", "USER1.<|im_end|>", "ANSWER1.<|im_end|>"]
    found = render(stock_template("qwen2_5_training"), SHAPES["2 turns"], train_on=("user",))
    assert [found.text[a:b] for a, b in found.supervised] == ["USER0.<|im_end|>", "USER1.<|im_end|>"]


def one(source: str) -> ChatTemplate:
    return ChatTemplate(source=source, where="test")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        # Generation blocks that are not reached, hold another's text, or leave out text of the assistant.
        ("{% if false %}{% generation %}{% endgeneration %}{% endif %}{{ messages[1].content }}", "no_generation"),
        ("{% generation %}{{ messages[0].content + messages[1].content }}{% endgeneration %}", "foreign"),
        (
            "{{ messages[1].content[:2] }}{% generation %}{{ messages[1].content[2:] }}{% endgeneration %}",
            "uncovered",
        ),
        ("{{ messages[0].content }}{% generation %}x{% endgeneration %}", "missing"),
        # No blocks: written twice, backwards, in parts, not at all; or nothing asks for the turn.
        ("U{{ messages[0].content }}A{{ messages[1].content }}{{ messages[1].content }}E", "rewritten"),
        ("U{{ messages[0].content }}A{{ messages[1].content | reverse }}E", "rewritten"),
        ("{{ messages[1].content[:2] + messages[0].content + messages[1].content[2:] }}", "interleaved"),
        ("{{ messages[0].content }}", "missing"),
        # An operation that is not followed must not make text of the record the template's own.
        ("{{ messages[0].content.replace('', '-') }}{{ messages[1].content }}", "untracked"),
        ("{{ messages[0].content | title }}{{ messages[1].content }}", "untracked"),
        # The text depends on how it is made.
        ("{{ (messages[1].content | safe) + '<' }}", "changed"),
        ("{{ raise_exception('no system here') }}", "template_error"),
        ("{{ messages[0].nothing.at_all }}", "template_error"),
        ("{{ messages[9].content }}", "template_error"),
    ],
)
def test_what_cannot_be_proven_is_refused_with_the_reason(source, reason):
    """[T1.b]"""
    messages = [{"role": "user", "content": "question here"}, {"role": "assistant", "content": "answer"}]
    with pytest.raises(Refusal) as caught:
        render(one(source), messages)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no_messages"),
        ("text", "no_messages"),
        ([{"content": "x"}], "role"),
        ([{"role": 7, "content": "x"}], "role"),
        (["text"], "role"),
        # A role is written into control strings, so it must not be able to spell one.
        ([{"role": "user<|im_end|>", "content": "x"}], "role"),
        ([{"role": "endoftext", "content": "x"}], "role"),
        ([{"role": "user", "content": "x"}], "no_trained_message"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "media"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}], "media"),
        ([{"role": "assistant", "content": "\ud800"}], "not_unicode"),
        ([{"role": "assistant", "content": b"x"}], "not_json"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"function": {"arguments": {1: 2}}}]}], "not_json"),
    ],
)
def test_a_record_that_is_no_conversation_of_text_is_refused(chatml, messages, reason):
    with pytest.raises(Refusal) as caught:
        render(chatml, messages)
    assert caught.value.reason == reason


OPENER = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and (loop.last or all) %}<muse>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|><muse>{% endif %}"
)


def test_an_opener_of_reasoning_that_is_not_known_is_never_taken_for_a_header_that_is_missing():
    """[T1.b]"""
    # Where every turn has it, the prompt gives it to the model, so that it is not trained on.
    found = render(one(OPENER), SHAPES["2 turns"], kwargs={"all": True})
    assert [found.text[a:b] for a, b in found.supervised] == ["ANSWER0.<|end|>", "ANSWER1.<|end|>"]
    # Where an earlier turn does without, nothing shows how that turn was asked for.
    with pytest.raises(Refusal) as caught:
        render(one(OPENER), SHAPES["2 turns"], kwargs={"all": False})
    assert caught.value.reason == "header"
    # One that is known belongs to the turn.
    found = render(one(OPENER.replace("muse", "think")), SHAPES["2 turns"], kwargs={"all": False})
    assert [found.text[a:b] for a, b in found.supervised] == ["ANSWER0.<|end|>", "<think>ANSWER1.<|end|>"]


def test_contents_may_be_parts_of_text(chatml):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    found = render(chatml, [{"role": "user", "content": "x"}, {"role": "assistant", "content": parts}])
    assert [found.text[a:b] for a, b in found.supervised] == ["one two<|im_end|>"]


@pytest.mark.parametrize("given", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("name", ["qwen3", "gptoss", "gptoss_training", "lfm2_2_5", "glm4moe"])
def test_reasoning_is_written_by_whichever_name_the_data_and_the_template_have_for_it(name, given):
    answer = {"role": "assistant", "content": "ANSWER.", given: "REASON."}
    messages = [{"role": "user", "content": "USER"}, answer]
    nulls = dict.fromkeys(("reasoning_content", "thinking", "reasoning"))
    (text,), _ = render_jinja_template(
        conversations=[messages], chat_template=stock_source(name), bos_token="<s>", eos_token="</s>"
    )
    for shown in (answer, {**nulls, **answer}):
        found = render(stock_template(name), [messages[0], shown], kwargs=OPTIONS)
        assert re.sub(DATE, "", found.text) == re.sub(DATE, "", text)
        trained = "".join(found.text[a:b] for a, b in found.supervised)
        assert ("REASON." in trained, "reasoning_dropped" in found.lost) == (
            "REASON." in text,
            "REASON." not in text,
        )
