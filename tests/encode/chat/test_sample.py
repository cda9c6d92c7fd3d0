from __future__ import annotations

import itertools

import pytest
from tests.encode.chat.shapes import FEW, SHAPES, shaped, tools_of
from tests.encode.chat.stock import STOCK, stock_source, stock_template, swept

from tokenmill.encode import Refusal
from tokenmill.encode.chat import conversation
from tokenmill.encode.chat import render as rendering
from tokenmill.encode.chat.conversation import Renderer, mark_conversation
from tokenmill.encode.chat.render import render
from tokenmill.encode.chat.sample import _edges_of_sample
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
            patch.setattr(rendering, "edges_by_sample", lambda *_: None)
            return outcome(*given)

    return found


@pytest.mark.parametrize(
    "shapes", [FEW[2:4], pytest.param(tuple(SHAPES), marks=pytest.mark.deep)], ids=("few", "all")
)
@pytest.mark.parametrize("name", swept(UNMARKED))
def test_a_sample_shows_what_the_whole_conversation_shows(name, shapes, the_long_way):
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
def test_what_messages_say_changes_nothing_that_a_sample_hides(name, the_long_way):
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


def test_what_a_template_looks_for_in_texts_is_noted_and_names_of_fields_are_not():
    source = (
        "{% set y = '[c]' %}{% for m in messages %}{{ 'content' in m }}{{ m.get('role') }}"
        "{{ '<image>' in m.content }}"
        "{{ y in m.content }}{{ m.content.split('<a>')[0].lstrip('\n').startswith(('<b>', 'd')) }}"
        "{{ m.content | replace('<e>', '') }}{{ m.content in ['word'] }}{{ m.content.find(m.role) }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "some text"}]
    renderer = Renderer(
        template=ChatTemplate(source=source, where="a"),
        conversation=mark_conversation(messages, None, {}, ()),
    )
    renderer.trace(1, False)
    assert renderer.sought == {"<image>", "[c]", "<a>", "<b>", "d", "<e>", "user"}


def long_talk(count: int, word: str) -> list[dict[str, str]]:
    roles = itertools.cycle(("user", "assistant"))
    return [
        {"role": role, "content": f"{' ' * (index % 3)}{word} number {index}.{' ' * (index % 2)}"}
        for index, role in zip(range(count), roles, strict=False)
    ]


def renders_noted(monkeypatch) -> list[int]:
    """Return a list to which the number of messages of each further render is added."""
    renders: list[int] = []
    run = conversation._run
    monkeypatch.setattr(
        conversation, "_run", lambda *given: renders.append(len(given[1]["messages"])) or run(*given)
    )
    return renders


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma", "phi3", "qwen2_5"])
def test_a_conversation_is_rendered_twice_however_long_it_is(name, monkeypatch):
    renders = renders_noted(monkeypatch)
    template = stock_template(name)
    _edges_of_sample.cache_clear()
    render(template, long_talk(16, "first"))
    assert len(renders) > 2
    assert max(renders[2:]) == 3, "samples are short"
    renders.clear()
    found = render(template, long_talk(100, "second"))
    assert renders == [100, 100], "followed, and as plain text"
    assert len(found.supervised) == 50


@pytest.mark.parametrize("name", ["gemma4", "qwen3", "glm4moe", "deepseekv3"])
@pytest.mark.parametrize("word", ["<think>so</think> that", "the content, name, id and type of a text function"])
def test_samples_stay_short_where_every_text_holds_what_a_template_looks_for(name, word, monkeypatch):
    renders = renders_noted(monkeypatch)
    _edges_of_sample.cache_clear()
    found = render(stock_template(name), long_talk(120, word))
    assert renders.count(120) == 2
    assert sorted(renders)[-3] < 10
    assert len(found.supervised) == 60


def test_calls_of_tools_in_a_row_make_no_longer_samples(monkeypatch):
    asked = [{"role": "user", "content": "question"}]
    for index in range(30):
        call = {
            "id": f"call{index}",
            "type": "function",
            "function": {"name": "f", "arguments": {"a": f"v{index}"}},
        }
        asked.append({"role": "assistant", "content": "", "tool_calls": [call]})
        asked.append({"role": "tool", "tool_call_id": f"call{index}", "content": f"result {index}"})
    asked.append({"role": "assistant", "content": "answer"})
    renders = renders_noted(monkeypatch)
    found = render(stock_template("qwen3"), asked)
    assert sorted(renders)[-3:] == [8, len(asked), len(asked)], "the first call and the answer are in each"
    assert len(found.supervised) == 31


def test_the_order_of_conversations_changes_nothing():
    """[T1.c]"""
    given = [shaped("qwen3", shape) for shape in SHAPES if not shape.startswith("tools")]
    template = stock_template("qwen3")
    straight = [outcome(template, one, None, ("assistant",)) for one in given]
    _edges_of_sample.cache_clear()
    assert [outcome(template, one, None, ("assistant",)) for one in reversed(given)] == straight[::-1]
