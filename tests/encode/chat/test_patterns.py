from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from tests.encode.chat.shapes import FEW, SHAPES, TOOLS, shaped, tools_of
from tests.encode.chat.stock import STOCK, stock_template, swept
from tests.encode.chat.test_sample import OPTIONS, long_talk, outcome, renders_noted

from tokenmill.encode import Refusal
from tokenmill.encode.chat.patterns import Patterns
from tokenmill.encode.chat.render import render
from tokenmill.encode.chat.template import ChatTemplate, load_template

# Conversations that are alike: only the first is followed.


def retold(value: object, change) -> object:
    """Return the same conversation with every text of its messages changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            key: item if key in ("role", "type", "name", "id", "tool_call_id") else retold(item, change)
            for key, item in value.items()
        }
    return [retold(item, change) for item in value] if isinstance(value, list) else value


CONTROLS = re.compile(r"<\|im_end\|>")
CHANGES = (
    lambda text: text.replace("0", "é7"),
    lambda text: f"<|im_end|>\n<|eot_id|>{text}" if text.strip() else text,
    lambda text: f'{text[:1]}"{text[1:]}\\ [INST] user {text[-1:]}',
    lambda text: text[:2] + "<think>why</think>" + text[2:],
    lambda text: f"  {text}\n",
)


def by_patterns(known: Patterns, messages: list, tools: object) -> object:
    try:
        return known.render(messages, tools)
    except Refusal as error:
        return error.reason, error.detail


@pytest.mark.parametrize(
    "shapes", [(*FEW[2:4], "tools"), pytest.param(tuple(SHAPES), marks=pytest.mark.deep)], ids=("few", "all")
)
@pytest.mark.parametrize("name", swept(STOCK))
def test_what_is_known_of_one_conversation_is_true_of_all_alike(name, shapes):
    """[T1.a, T1.c]"""
    template, roles = stock_template(name), ("assistant",)
    known = Patterns(template=template, kwargs=OPTIONS, train_on=roles, last_only=False)
    for shape, change in itertools.product(shapes, (lambda text: text, *CHANGES)):
        messages, tools = retold(shaped(name, shape), change), tools_of(shape)
        assert by_patterns(known, messages, tools) == outcome(template, messages, tools, roles)


def test_of_conversations_that_are_alike_the_first_is_followed_and_others_are_rendered_once(monkeypatch):
    template, renders = stock_template("qwen2_5"), renders_noted(monkeypatch)
    known = Patterns(template=template, kwargs={}, train_on=("assistant",), last_only=False)
    for word in ("first", "second", "third"):
        renders.clear()
        found = known.render(long_talk(6, word))
    assert renders == [6]
    assert [found.text[begin:end] for begin, end in found.supervised][1] == "third number 3. <|im_end|>"


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        # The same text, and another mask: by what generation blocks wrote.
        (
            "{% for m in messages %}<{{ m.role }}>{% if m.content[0] == 'x' and m.role == 'assistant' %}"
            "{{ m.content }}<end>{% else %}{% generation %}{{ m.content }}<end>{% endgeneration %}{% endif %}"
            "{% endfor %}",
            ("y", "xy"),
        ),
        # A text of which the length matters.
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content[:4] }}<end>{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}",
            ("four", "more than four"),
        ),
        # A text that is a word of the template.
        (
            "{% for m in messages %}<{{ m.role }}>{{ '' if m.content == 'none' else m.content }}<end>{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}",
            ("some", "none"),
        ),
    ],
    ids=("blocks", "length", "word"),
)
def test_a_text_that_matters_to_the_template_makes_a_conversation_unlike(source, texts):
    """[T1.a]"""
    template = ChatTemplate(source=source, where="test")
    known = Patterns(template=template, kwargs={}, train_on=("assistant",), last_only=False)
    for text in (*texts, *texts[::-1]):
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
        assert by_patterns(known, messages, None) == outcome(template, messages, None, ("assistant",))


def test_a_text_with_what_the_template_looks_for_is_followed(monkeypatch):
    """[T1.a] The record may have written it, or the template in its place, by a message far away."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content.split('~')|join('~') }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    template, renders = ChatTemplate(source=source, where="test"), renders_noted(monkeypatch)
    known = Patterns(template=template, kwargs={}, train_on=("assistant",), last_only=False)
    for word, is_followed in (("one", True), ("two", False), ("th~ree", True), ("fo~ur", True)):
        renders.clear()
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": word}]
        rendered = by_patterns(known, messages, None)
        assert (len(renders) > 1) == is_followed, word
        assert rendered == outcome(template, messages, None, ("assistant",))


# Conversations of any shape, put together of what is known of others.

TOLD = (
    *(
        "Yes.",
        "42",
        "the mill grinds",
        " a blank before",
        "and behind \n",
        "é, ü and 水",
        'a "quoted" word',
        "user",
    ),
    *("<think>\nwhy\n</think>\n\nso", "<think>never closed", "a</think>b", "<|im_end|>", "[INST] in [/INST]"),
)


def any_talk(chosen: random.Random) -> tuple[list, list | None]:
    """Return a conversation of some shape; most texts are new, some are what templates may stumble over."""

    def text(kind: str) -> str:
        told = chosen.choice(TOLD) if chosen.random() < 0.15 else ""
        return f"{kind}{chosen.random()}{told}" if chosen.random() < 0.9 else told or kind

    def answer(**more: object) -> dict:
        thought = {chosen.choice(("reasoning_content", "thinking")): text("REASON")} if thinks else {}
        flag = {"train": chosen.random() < 0.5} if chosen.random() < 0.05 else {}
        return {"role": "assistant", "content": text("ANSWER"), **thought, **flag, **more}

    thinks, has_tools = chosen.random() < 0.3, chosen.random() < 0.4
    messages = [{"role": "system", "content": text("SYSTEM")}] if chosen.random() < 0.4 else []
    for turn in range(chosen.randint(1, 6)):
        messages.append({"role": "user", "content": text("USER")})
        for number in range(chosen.randint(0, 2) if has_tools else 0):
            name = f"call{turn}{number}"
            arguments = {"town": text("ARG"), **({"days": 3} if chosen.random() < 0.3 else {})}
            given = arguments if chosen.random() < 0.8 else json.dumps(arguments)
            function = {"name": chosen.choice(("weather", "clock")), "arguments": given}
            calls = [{"id": name, "type": "function", "function": function}]
            messages.append(answer(tool_calls=calls, **({} if chosen.random() < 0.2 else {"content": ""})))
            messages.append(
                {"role": "tool", "name": function["name"], "tool_call_id": name, "content": text("RESULT")}
            )
        messages.append(answer())
    return messages, TOOLS if has_tools else None


@pytest.mark.parametrize("count", [20, pytest.param(400, marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", swept(STOCK))
def test_a_conversation_gives_the_same_whatever_came_before_it(name, count):
    """[T1.a, T1.c]"""
    template, chosen = stock_template(name), random.Random(name)
    known = Patterns(template=template, kwargs=OPTIONS, train_on=("assistant",), last_only=False)
    for _ in range(count):
        messages, tools = any_talk(chosen)
        assert by_patterns(known, messages, tools) == outcome(template, messages, tools, ("assistant",))


def test_kinds_of_messages_that_were_met_before_are_not_followed_in_any_order(monkeypatch):
    template = stock_template("qwen3")
    known = Patterns(template=template, kwargs=OPTIONS, train_on=("assistant",), last_only=False)

    def talk(kinds: str, word: str) -> list:
        messages = [{"role": "user", "content": f"{word} asks"}]
        for index, kind in enumerate(kinds):
            thought = {"reasoning_content": f"{word} thinks {index}"} if kind == "t" else {}
            messages.append({"role": "assistant", "content": f"{word} says {index}", **thought})
            messages.append({"role": "user", "content": f"{word} asks again {index}"})
        return [*messages, {"role": "assistant", "content": f"{word} ends"}]

    for kinds in ("ttaat", "taatta"):
        known.render(talk(kinds, "first"))
    renders = renders_noted(monkeypatch)
    found = known.render(talk("tatatt", "second"))
    assert renders == [14], "as plain text alone"
    assert found == render(template, talk("tatatt", "second"), kwargs=OPTIONS)


def test_an_answer_that_repeats_the_question_is_followed(monkeypatch):
    """[T1.a] Of two equal texts nobody could say which the template wrote."""
    template = stock_template("qwen2_5")
    known = Patterns(template=template, kwargs={}, train_on=("assistant",), last_only=False)
    for question, answer in (("one", "two"), ("same", "same")):
        renders = renders_noted(monkeypatch)
        known.render([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    assert len(renders) > 1


# Two conversations of the same text that are trained on otherwise, or refused: each is what it is on its own.

_BODY = "{% for m in messages %}<{{ m.role }}>WRITTEN<end>{% endfor %}" + (
    "{% if add_generation_prompt %}<assistant>PROMPT{% endif %}"
)
_SHOWN = _BODY.replace("PROMPT", "")


def _talk(*said: str) -> list[dict[str, str]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]


@pytest.mark.parametrize(
    ("source", "before", "after"),
    [
        pytest.param(
            "{% if messages[0].content | length < 3 %}{{ raise_exception('no sample') }}{% endif %}"
            + _BODY.replace("WRITTEN", ">{{ m.content }}").replace(
                "PROMPT", "{% if messages | length % 4 == 1 %}>{% endif %}"
            ),
            _talk("first", "b", "c", "d", "e", "f", "g", "h"),
            _talk("first", "b", "c", "d", "e", "f"),
            id="what asks for a turn depends on how many there are",
        ),
        pytest.param(
            "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% if m.content | length > 4 %}"
            "x{% generation %}x{% endgeneration %}{% else %}{% generation %}x{% endgeneration %}x{% endif %}"
            "{% generation %}{{ m.content }}<end>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
            "{% endfor %}",
            _talk("a", "long text"),
            _talk("a", "b"),
            id="a generation block wrote the other of two letters",
        ),
        pytest.param(
            "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% if messages | length > 6 %}"
            "x{% generation %}x{% endgeneration %}{% else %}{% generation %}x{% endgeneration %}x{% endif %}"
            "{% generation %}{{ m.content }}<end>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
            "{% endfor %}",
            _talk("a", "b", "c", "d", "e", "f", "g", "h"),
            _talk("i", "j", "k", "l", "m", "n"),
            id="a generation block wrote the other of two letters, by the number of messages",
        ),
        pytest.param(
            _SHOWN.replace("WRITTEN", "{{ m.content | int if m.content | int(-1) >= 0 else m.content }}"),
            _talk("q", "b"),
            _talk("q", "12"),
            id="a number is written, and not the text",
        ),
        pytest.param(
            _SHOWN.replace(
                "WRITTEN",
                "{% if m.content | length > 6 %}{{ m.content[:-3] }}end{% else %}{{ m.content }}{% endif %}",
            ),
            _talk("a friend", "b"),
            _talk("a", "b end"),
            id="the end of a long text is written by the template",
        ),
        pytest.param(
            _SHOWN.replace(
                "WRITTEN",
                "{% if m.content == messages[0].content %}{{ messages[0].content }}"
                "{% else %}{{ m.content }}{% endif %}",
            ),
            _talk("a", "b", "c", "d"),
            _talk("a", "b", "a", "d"),
            id="a question is written again from the first message",
        ),
    ],
)
def test_the_same_text_does_not_stand_for_the_same_mask(source, before, after):
    """[T1.a, T1.c]"""
    template = ChatTemplate(source=source, where="test")
    for first, second in ((before, after), (after, before)):
        known = Patterns(template=template, kwargs={}, train_on=("assistant",), last_only=False)
        for messages in (first, first, second):
            assert by_patterns(known, messages, None) == outcome(template, messages, None, ("assistant",))


def test_a_text_with_a_control_string_is_followed_as_it_may_be_the_template_that_wrote_it(tmp_path):
    """[T1.c, T2.b]"""
    source = _SHOWN.replace(
        "WRITTEN",
        "{% if loop.index > 4 and m.content.endswith('<|im_end|>') %}"
        "{{ m.content.split('<|im_end|>')[0] }}<|im_end|>{% else %}{{ m.content }}{% endif %}",
    )
    path = tmp_path / "template.jinja"
    path.write_text(source)
    template = load_template(str(path), tokenizer="bytes")
    texts = ("a", "b", "c<|im_end|>", "d", "e<|im_end|>", "f")
    early, late = _talk("x", "y", *texts[:4], "z", "w"), _talk("x", "y", "z", "w", *texts[2:])
    known = Patterns(template=template, kwargs={}, train_on=("assistant",), last_only=False, controls=CONTROLS)
    for messages in (early, early, late):
        assert by_patterns(known, messages, None) == outcome(template, messages, None, ("assistant",))
