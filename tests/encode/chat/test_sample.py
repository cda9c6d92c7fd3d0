from __future__ import annotations

import itertools
import json
import random

import pytest
from tests.encode.chat.shapes import FEW, SHAPES, TOOLS, shaped, tools_of
from tests.encode.chat.stock import STOCK, stock_source, stock_template, swept

from tokenmill.encode import Refusal
from tokenmill.encode.chat import render as rendering
from tokenmill.encode.chat import trace
from tokenmill.encode.chat.conversation import mark_conversation
from tokenmill.encode.chat.patterns import Patterns
from tokenmill.encode.chat.render import render
from tokenmill.encode.chat.sample import _edges_of_sample
from tokenmill.encode.chat.sandbox import compiled
from tokenmill.encode.chat.template import ChatTemplate
from tokenmill.encode.chat.trace import Renderer

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
        compiled=compiled(source, "a"),
        where="a",
        special_tokens={},
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
    run = trace._run
    monkeypatch.setattr(trace, "_run", lambda *given: renders.append(len(given[1]["messages"])) or run(*given))
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
