"""Who says what in a chat is read off its tokens, and proven by rendering it again."""

from __future__ import annotations

import pytest

from tokenmill.encode.chat.render import render
from tokenmill.encode.chat.template import CHATML, ChatTemplate
from tokenmill.run.turns import find_turns

TEMPLATES = {
    "chatml": CHATML,
    "headers": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "instructions": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}{{ raise_exception('no such role') }}"
        "{% endif %}{% endfor %}"
    ),
    "thoughts before the last answer": (  # as Qwen 3 writes them
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
        "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "default system": (
        "{% if messages[0].role != 'system' %}<|system|>You are kind.<|end|>{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}
TALK = [("user", "What is 2 + 2?"), ("assistant", "Four."), ("user", "Sure?"), ("assistant", "Quite\nsure.")]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("width", [1, 3])
def test_turns_are_found_and_proven(name, width):
    template = ChatTemplate(source=TEMPLATES[name], where=name, special_tokens={"bos_token": "<s>"})
    text = render(template, [{"role": role, "content": content} for role, content in TALK]).text
    strings = [text[place : place + width] for place in range(0, len(text), width)]
    found = find_turns(template, ["<s>", *strings, "</s>"], ("<s>", "</s>"))
    assert found.proven
    said = [turn for turn in found.turns if turn.role != "system"]
    assert [turn.role for turn in said] == [role for role, _ in TALK]
    if width == 1:
        assert ["".join(strings[turn.first - 1 : turn.end - 1]) for turn in said] == [text for _, text in TALK]


def test_tokens_that_continue_a_character_belong_to_its_message():
    template = ChatTemplate(source=CHATML, where="chatml")
    text = render(template, [{"role": "user", "content": "中"}, {"role": "assistant", "content": "文"}]).text
    strings = [part for character in text for part in (character, *[""] * (len(character.encode()) - 1))]
    said = find_turns(template, strings).turns
    assert [strings[turn.first : turn.end] for turn in said] == [["中", "", ""], ["文", "", ""]]


def test_a_text_that_the_template_did_not_write_has_no_turns_or_none_proven():
    template = ChatTemplate(source=CHATML, where="chatml")
    assert find_turns(template, list("plain words")) is None
    assert not find_turns(template, list("tools: none<|im_start|>user\nhi<|im_end|>\n")).proven
