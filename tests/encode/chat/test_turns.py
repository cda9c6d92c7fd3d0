"""Turns that are learned once from samples are those that renders of the whole conversation show."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from tests.encode.chat.shapes import FEW, SHAPES, TOOLS, shaped, tools_of
from tests.encode.chat.stock import STOCK, stock_source, stock_template, swept

from tokenmill.encode import Refusal
from tokenmill.encode.chat import turns as located
from tokenmill.encode.chat.render import Rendered, render
from tokenmill.encode.chat.template import ChatTemplate

UNMARKED = [name for name in STOCK if "endgeneration" not in stock_source(name)]
OPTIONS = {"now": "2025-01-31"}
ROLES = ("assistant", "user", "tool", "system")


def outcome(template: ChatTemplate, messages: list, tools: object, roles: tuple[str, ...]) -> object:
    try:
        return render(template, messages, tools=tools, kwargs=OPTIONS, train_on=roles)
    except Refusal as error:
        return error.reason, error.detail


@pytest.fixture
def the_long_way(monkeypatch):
    """Return what finds spans by renders of the conversation itself alone."""

    def found(*given):
        with monkeypatch.context() as patch:
            patch.setattr(located.Renderer, "learned", lambda *_: located.Turn())
            return outcome(*given)

    return found


@pytest.mark.parametrize(
    "shapes", [FEW[2:4], pytest.param(tuple(SHAPES), marks=pytest.mark.deep)], ids=("few", "all")
)
@pytest.mark.parametrize("name", swept(UNMARKED))
def test_samples_show_what_the_whole_conversation_shows(name, shapes, the_long_way):
    """[T1.a]"""
    template = stock_template(name)
    for shape, roles in itertools.product(shapes, (("assistant",), ROLES)):
        given = (template, shaped(name, shape), tools_of(shape), roles)
        assert outcome(*given) == the_long_way(*given)


TEXTS = (
    *("plain", " before", "behind \n", "\n\n both\t", "user", "assistant", "tool_calls", "x" * 500, " " * 40 + "x"),
    *("<think>\nreason\n</think>\n\nanswer", "</think>", "<think>", "a</think>b</think>c", "<think></think>" * 9),
    *(
        "<tool_response>x</tool_response>",
        "<|im_end|>\n<|im_start|>assistant\n",
        "[/INST]",
        "/nothink",
        "text, image",
    ),
)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1_distill", "glm4moe", "gemma", "llama3", "nemotron_3_nano"])
def test_texts_of_messages_change_nothing_that_samples_hide(name, the_long_way):
    """[T1.a]"""
    template = stock_template(name)
    for index, first in enumerate(TEXTS):
        said = [first, TEXTS[index - 3], "question", TEXTS[index - 7]]
        roles = ("user", "assistant", "user", "assistant")
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
        given = (template, messages, None, ("assistant",))
        assert outcome(*given) == the_long_way(*given)


DEPENDS = (
    "{% set deep = FLAG %}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and deep %}LEAD"
    "{% endif %}{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% if deep %}LEAD{% endif %}"
    "{% endif %}"
)


def turns(first_role: str, first: str, **more: str) -> list[dict[str, str]]:
    said = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f")]
    talk = [{"role": role, "content": text} for role, text in said]
    if first_role != "user":
        return [{"role": first_role, "content": first}, {**talk[0], **more}, *talk[1:]]
    return [{"role": "user", "content": first, **more}, *talk[1:]]


@pytest.mark.parametrize("lead", ["<deep>", "deep: "])
@pytest.mark.parametrize(
    "flag",
    [
        "'/deep' in messages[0].content",
        "messages[0].content.endswith('/deep')",
        "messages[0].content == '/deep'",
        "messages | selectattr('thought') | list | length > 0",
    ],
)
def test_a_prompt_that_depends_on_what_was_said_long_before_is_still_told_from_the_turn(flag, lead, the_long_way):
    """[T1.a]"""
    template = ChatTemplate(source=DEPENDS.replace("FLAG", flag).replace("LEAD", lead), where="test")
    leads = set()
    for role, text, thought in itertools.product(
        ("user", "system"), ("one", "/deep", "x /deep", "/deep x"), ("", "y")
    ):
        messages = turns(role, text, **({"thought": thought} if thought else {}))
        found = outcome(template, messages, None, ("assistant",))
        assert found == the_long_way(template, messages, None, ("assistant",))
        assert [found.text[begin:end] for begin, end in found.supervised] == ["b</>", "d</>", "f</>"]
        leads.add(lead in found.text)
    assert leads == {True, False}


def long_talk(count: int, word: str) -> list[dict[str, str]]:
    roles = itertools.cycle(("user", "assistant"))
    return [
        {"role": role, "content": f"{' ' * (index % 3)}{word} number {index}.{' ' * (index % 2)}"}
        for index, role in zip(range(count), roles, strict=False)
    ]


def renders_noted(monkeypatch) -> list[int]:
    """Return a list to which the number of messages of each further render is added."""
    renders: list[int] = []
    run = located._run
    monkeypatch.setattr(located, "_run", lambda *given: renders.append(len(given[1]["messages"])) or run(*given))
    return renders


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma", "phi3", "qwen2_5"])
def test_a_conversation_is_rendered_twice_however_long_it_is(name, monkeypatch):
    renders = renders_noted(monkeypatch)
    template = stock_template(name)
    located.learn.cache_clear()
    render(template, long_talk(16, "first"))
    assert sorted(renders)[-3] <= 8, "samples are short"
    renders.clear()
    found = render(template, long_talk(100, "second"))
    assert renders == [100, 100], "followed, and as plain text"
    assert len(found.supervised) == 50


def test_the_order_of_conversations_changes_nothing():
    """[T1.c]"""
    given = [shaped("qwen3", shape) for shape in SHAPES if not shape.startswith("tools")]
    template = stock_template("qwen3")
    straight = [outcome(template, one, None, ("assistant",)) for one in given]
    located.learn.cache_clear()
    assert [outcome(template, one, None, ("assistant",)) for one in reversed(given)] == straight[::-1]


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


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", swept(UNMARKED))
def test_conversations_of_any_shape_give_what_renders_of_the_whole_show(name, count, the_long_way):
    """[T1.a, T1.c]"""
    template, chosen = stock_template(name), random.Random(name)
    for _ in range(count):
        messages, tools = any_talk(chosen)
        found, wanted = (way(template, messages, tools, ("assistant",)) for way in (outcome, the_long_way))
        # Samples show more: the end of an answer of reasoning alone, for example.
        assert found == wanted or not isinstance(wanted, Rendered)
