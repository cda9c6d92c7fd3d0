"""Conversations of records through real chat templates."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tokenmill.encode.chat.conversation import Conversation
from tokenmill.encode.chat.template import load_template
from tokenmill.encode.chat.tokens import ChatEncoder
from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.recipe import load_recipe
from tokenmill.errors import ConfigError

PLAIN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "Is it?"}
YES = {"role": "assistant", "content": "Yes"}
NO = {"role": "assistant", "content": "No"}
TALK = [{"role": "system", "content": "S"}, USER, YES, {"role": "user", "content": "Sure?"}, NO]


def turn(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def answer(text):
    return f"<|im_start|>assistant\n[{text}<|im_end|>]\n"


ASKED = "^" + turn("user", "Is it?")


@pytest.fixture
def chatml(encoder):
    """Open the encoder of a preset with the template chatml, on bytes."""

    def opened(preset, **more):
        return encoder({"preset": preset, "chat_template": "chatml", **more})

    return opened


def test_messages_go_through_the_template_of_the_tokenizer(write, encoder):
    """[T1.a, T2.b]"""
    spec = write(tokenizer_config={"chat_template": PLAIN_CHAT, "bos_token": "<s>", "eos_token": "</s>"})
    tokenizer = open_tokenizer(spec)
    done = encoder("chat", spec).encode([{"messages": TALK}, {"messages": [USER, YES], "tools": None}])
    ids, mask, offsets = done.values["sequence"], done.values["loss_mask"], done.offsets["documents"]
    assert done.refused == ()
    assert ids.dtype.str == "<u2"
    first, second = ids[: offsets[1]], ids[offsets[1] :]
    assert tokenizer.decode(first[mask[: offsets[1]] == 1]) == "Yes</s>No</s>"
    assert tokenizer.decode(second) == "<|im_start|>user\nIs it?</s>\n<|im_start|>assistant\nYes</s>\n"
    assert (ids == tokenizer.identity.bos_id).sum() == 0, "the template writes none"


def test_a_preset_that_needs_a_template_says_how_to_name_one(encoder, write):
    for tokenizer, place in (("bytes", "for 'bytes'"), (spec := write(), f"in {Path(spec).parent}")):
        with pytest.raises(ConfigError) as caught:
            encoder("chat", tokenizer)
        assert str(caught.value) == (
            f"chat template 'tokenizer': the tokenizer must have one, got none {place}; "
            "set chat_template=...: chatml, or the path of a .jinja file"
        )
    with pytest.raises(ConfigError, match=r"got no such file; did you mean 'chatml'\?"):
        encoder({"preset": "chat", "chat_template": "chatlm"})


def test_texts_do_without_a_template_and_messages_are_refused_without_one(encoder, shown):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    done = encoder("dpo").encode([{"chosen": [USER, YES], "rejected": [USER, NO]}, pair])
    assert shown(done, "chosen", "chosen_mask") == ["^q[a$]"]
    assert [(each.index, each.reason) for each in done.refused] == [(0, "no_template")]
    assert done.refused[0].detail == "none beside the tokenizer 'bytes'"


def test_a_template_that_cannot_be_used_says_why(encoder, write):
    with pytest.raises(ConfigError, match=r"must compile, got .* at line 1; correct the template$"):
        encoder("chat", write(tokenizer_config={"chat_template": "{% if %}"}))
    done = encoder("dpo", write(tokenizer_config={"chat_template": "{% if %}"})).encode(
        [{"chosen": [USER, YES], "rejected": [USER, NO]}]
    )
    assert "must compile, got" in done.refused[0].detail


def test_messages_and_sharegpt_give_the_same_tokens(chatml, shown):
    share = [
        {"from": "system", "value": "S"},
        {"from": "human", "value": "Is it?"},
        {"from": "gpt", "value": "Yes"},
    ]
    rows = [{**message, "tool_calls": None, "name": None} for message in (TALK[0], USER, YES)]
    done = chatml("chat").encode(
        [
            {"messages": TALK[:3]},
            {"conversations": share},
            {"conversations": share[1:], "system": "S"},
            {"conversations": share, "messages": TALK[:3], "system": ""},
            {"messages": rows},
        ]
    )
    whole = "^" + turn("system", "S") + turn("user", "Is it?") + answer("Yes")
    assert shown(done, "sequence", "loss_mask", "documents") == [whole] * 5


def test_the_mask_table_and_the_turns_say_what_is_trained(chatml, shown):
    head = "^" + turn("system", "S") + turn("user", "Is it?")
    middle = turn("user", "Sure?")
    for more, trained in (
        ({}, head + answer("Yes") + middle + answer("No")),
        ({"train_turns": "last"}, head + turn("assistant", "Yes") + middle + answer("No")),
    ):
        done = chatml("chat", **more).encode([{"messages": TALK}])
        assert shown(done, "sequence", "loss_mask", "documents") == [trained]


def test_a_conversation_may_be_trained_whole_but_for_its_bos(encoder, shown):
    recipe = {
        "input": {"sections": [{"field": "messages", "action": "train", "template": True}]},
        "chat_template": "chatml",
    }
    done = encoder(recipe).encode([{"messages": [USER, YES]}])
    assert shown(done, "sequence", "loss_mask", "documents") == [
        "^[" + turn("user", "Is it?") + turn("assistant", "Yes") + "]"
    ]


def test_instructions_become_messages_where_a_template_is_named(chatml, shown):
    done = chatml("instruction").encode(
        [{"prompt": "Is it?", "response": "Yes"}, {"instruction": "Add", "input": "2 2", "output": "4"}]
    )
    assert shown(done, "sequence", "loss_mask", "documents") == [
        ASKED + answer("Yes"),
        "^" + turn("user", "Add\n2 2") + answer("4"),
    ]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Is it?", "chosen": "Yes", "rejected": "No"},
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": "Is it?", "chosen": [YES], "rejected": [NO]},
        {"prompt": "Is it?", "chosen": [USER, YES], "rejected": [USER, NO]},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": "", "chosen": [USER, YES], "rejected": [USER, NO]},
    ],
    ids=["strings", "lists", "prompt string", "whole with prompt", "whole", "whole, empty prompt"],
)
def test_pairs_of_every_shape_give_the_same_tokens(chatml, shown, record):
    done = chatml("dpo").encode([record])
    assert shown(done, "chosen", "chosen_mask") == [ASKED + answer("Yes")]
    assert shown(done, "rejected", "rejected_mask") == [ASKED + answer("No")]


def test_of_a_pair_only_the_last_answer_is_trained(chatml, shown):
    history = [USER, YES, {"role": "user", "content": "Sure?"}]
    done = chatml("dpo").encode([{"chosen": [*history, YES], "rejected": [*history, NO]}])
    before = ASKED + turn("assistant", "Yes") + turn("user", "Sure?")
    assert shown(done, "chosen", "chosen_mask") == [before + answer("Yes")]
    assert shown(done, "rejected", "rejected_mask") == [before + answer("No")]


def test_texts_and_messages_of_one_batch_stay_in_order(write, encoder):
    spec = write(tokenizer_config={"chat_template": PLAIN_CHAT, "bos_token": "<s>", "eos_token": "</s>"})
    tokenizer = open_tokenizer(spec)
    text = {"prompt": "q", "chosen": "a", "rejected": "b"}
    talk = {"prompt": [USER], "chosen": [YES], "rejected": [NO]}
    broken = {"prompt": [USER], "chosen": [YES], "rejected": [USER]}
    opened = encoder("dpo", spec)
    done = opened.encode([talk, text, broken, talk, text])
    cuts = done.offsets["rejected"].tolist()
    texts = [tokenizer.decode(done.values["rejected"][a:b]) for a, b in pairwise(cuts)]
    said = "<|im_start|>user\nIs it?</s>\n<|im_start|>assistant\nNo</s>\n"
    assert texts == [said, "<s>qb</s>", said, "<s>qb</s>"]
    assert done.kept.tolist() == [0, 1, 3, 4]
    assert [each.index for each in done.refused] == [2]


@pytest.mark.parametrize("prompt", ["Is it?", [USER]])
@pytest.mark.parametrize("responses", [["Yes", "No", ""], [[YES], [NO], [{"role": "assistant", "content": ""}]]])
def test_a_prompt_ends_where_the_template_lets_the_answer_begin(chatml, shown, prompt, responses):
    done = chatml("grpo").encode([{"prompt": prompt, "responses": responses, "rewards": [1, 0.5, 0]}])
    assert shown(done, "prompts") == [ASKED + "<|im_start|>assistant\n"]
    assert shown(done, "responses", "masks") == ["[Yes<|im_end|>]", "[No<|im_end|>]", "[<|im_end|>]"]
    assert done.offsets["groups"].tolist() == [0, 3]


def test_a_group_is_refused_as_a_whole(chatml, shown):
    good = {"prompt": "Is it?", "responses": ["Yes", "No"], "rewards": [1, 0]}
    done = chatml("grpo").encode([{**good, "responses": ["Yes", [USER]]}, good, {**good, "responses": ["Yes", 3]}])
    assert done.kept.tolist() == [1]
    assert shown(done, "responses", "masks") == ["[Yes<|im_end|>]", "[No<|im_end|>]"]
    assert [(each.index, each.reason) for each in done.refused][1:] == [(2, "not_messages")]
    assert done.refused[0].index == 0


def test_a_template_that_shows_the_answer_in_the_prompt_is_refused(encoder, tmp_path):
    path = tmp_path / "odd.jinja"
    path.write_text(
        "{{ messages[-1].content | length }} " + PLAIN_CHAT.replace("</s>", "<|eos|>"), encoding="utf-8"
    )
    record = {"prompt": "Is it?", "responses": ["Yes", "No"], "rewards": [1, 0]}
    done = encoder({"preset": "grpo", "chat_template": str(path)}).encode([record])
    assert [each.reason for each in done.refused] == ["prompts_differ"]


def test_tools_reach_the_template_as_a_list_or_as_json(encoder, shown, tmp_path):
    path = tmp_path / "tools.jinja"
    path.write_text("{{ tools | tojson }}\n" + PLAIN_CHAT.replace("</s>", "<|eos|>"), encoding="utf-8")
    tools = [{"type": "function", "function": {"name": "grind"}}]
    opened = encoder({"preset": "chat", "chat_template": str(path)})
    records = [{"messages": [USER, YES], "tools": each} for each in (tools, json.dumps(tools), "[")]
    done = opened.encode(records)
    first, second = shown(done, "sequence", "loss_mask", "documents")
    assert first == second
    assert first.startswith('[{"type": "function", "function": {"name": "grind"}}]\n<|im_start|>user')
    assert [(each.index, each.reason) for each in done.refused] == [(2, "tools")]


def test_options_reach_the_template(encoder, shown, tmp_path):
    path = tmp_path / "options.jinja"
    path.write_text("{{ mood }}\n" + PLAIN_CHAT.replace("</s>", "<|eos|>"), encoding="utf-8")
    recipe = {"preset": "chat", "chat_template": str(path), "chat_template_kwargs": {"mood": "calm"}}
    done = encoder(recipe).encode([{"messages": [USER, YES]}])
    assert shown(done, "sequence", "loss_mask", "documents")[0].startswith("calm\n")


def test_options_of_a_record_come_before_those_of_the_recipe(encoder, shown, tmp_path):
    source = "{{ mood | default('none') }}|{{ name | default('') }}" + PLAIN_CHAT.replace("</s>", "<|eos|>")
    path = tmp_path / "mood.jinja"
    path.write_text(source, encoding="utf-8")
    recipe = {"preset": "chat", "chat_template": str(path), "chat_template_kwargs": {"mood": "calm"}}
    own = [None, {}, {"mood": "wild"}, {"name": "x", "mood": None}, {"moood": "wild"}, "wild"]
    records = [{"messages": [USER, YES], "chat_template_kwargs": options} for options in own]
    done = encoder(recipe).encode(records)
    texts = shown(done, "sequence", "loss_mask", "documents")
    assert [text.partition("<")[0] for text in texts] == ["calm|", "calm|", "wild|", "calm|x"]
    assert [(each.index, each.reason) for each in done.refused] == [(4, "options"), (5, "options")]
    assert "did you mean 'mood'?" in done.refused[0].detail


def test_what_the_template_refuses_is_refused_with_its_reason(chatml):
    """[T1.b]"""
    done = chatml("chat").encode([{"messages": [USER, YES]}, {"messages": [USER]}, {"messages": []}])
    template = load_template("chatml", tokenizer="bytes")
    (refused,) = (
        ChatEncoder(template=template, tokenizer=open_tokenizer("bytes"))
        .encode([Conversation(messages=[USER])])
        .refused
    )
    assert done.kept.tolist() == [0]
    assert [(each.index, each.reason) for each in done.refused] == [(1, refused.reason), (2, "missing_field")]
    assert done.refused[0].detail == refused.detail


def test_a_cut_before_the_answer_refuses_the_conversation(chatml):
    """[T1.b]"""
    limits = {"max_seq_len": 20}
    done = chatml("chat", preprocessing=limits).encode([{"messages": [USER, YES]}])
    assert [each.reason for each in done.refused] == ["no_supervision"]
    done = chatml("chat", preprocessing={**limits, "truncation_mode": "keep_end"}).encode(
        [{"messages": [USER, YES]}]
    )
    assert (done.truncated, done.values["sequence"].size, done.values["sequence"][0]) == (1, 20, 256)


def test_masks_do_not_depend_on_the_batch(chatml):
    """[T1.c]"""
    records = [{"messages": TALK}, {"messages": [USER]}, {"messages": [USER, YES]}, {"conversations": 3}] * 3
    opened = chatml("chat")
    whole = opened.encode(records)
    alone = [opened.encode([record]) for record in records]
    for key, values in whole.values.items():
        assert values.tolist() == np.concatenate([each.values[key] for each in alone]).tolist()
    assert whole.kept.tolist() == [index for index, each in enumerate(alone) if each.kept.size]


def test_control_strings_of_a_message_are_ordinary_text(write, encoder):
    """[S.i]"""
    spec = write(tokenizer_config={"chat_template": PLAIN_CHAT, "bos_token": "<s>", "eos_token": "</s>"})
    tokenizer = open_tokenizer(spec)
    content = "x".join(tokenizer.special_ids)
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    done = encoder("chat", spec).encode([{"messages": messages}])
    controls = np.isin(done.values["sequence"], list(tokenizer.special_ids.values()))
    assert tokenizer.decode(done.values["sequence"][controls]) == "<|im_start|></s><|im_start|></s>"


def test_the_json_of_an_encoder_holds_what_the_template_says_not_where_it_is(encoder, tmp_path):
    """[T1.c, T2.c]"""
    made = {}
    for name, text in (("a", PLAIN_CHAT), ("b", PLAIN_CHAT), ("c", PLAIN_CHAT + " ")):
        (tmp_path / f"{name}.jinja").write_text(text.replace("</s>", "<|eos|>"), encoding="utf-8")
        made[name] = encoder({"preset": "chat", "chat_template": str(tmp_path / f"{name}.jinja")}).to_json()
    assert made["a"] == made["b"]
    assert made["a"] != made["c"]
    assert str(tmp_path) not in json.dumps(made["a"])
    assert {**made["a"], "chat_template": "tokenizer"} == load_recipe("chat").to_json()


def test_the_content_of_messages_is_what_they_say(chatml):
    assert chatml("chat").read({"messages": TALK}).content == "S\nIs it?\nYes\nSure?\nNo"
    shared = {"conversations": [{"from": "human", "value": "h"}], "system": "s"}
    assert chatml("chat").read(shared).content == "s\nh"
    assert chatml("dpo").read({"prompt": "p", "chosen": [YES], "rejected": [NO]}).content == "p\nYes\nNo"
    assert chatml("chat").read({"text": "x"}).content is None
    assert chatml("chat").read({"messages": "x"}).content is None


def test_a_conversation_without_a_word_may_be_kept_and_so_has_a_content(chatml):
    opened = chatml("chat", preprocessing={"min_chars": 0})
    record = {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]}
    assert opened.read(record).content == ""
    assert opened.encode([record]).kept.tolist() == [0]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
THOUGHT = {**YES, "reasoning_content": "It must be."}


def test_what_the_template_does_not_write_is_counted_by_record(chatml):
    """[T1.b]"""
    done = chatml("chat").encode(
        [
            {"messages": [USER, YES], "tools": [TOOL]},
            {"messages": [USER, THOUGHT], "tools": json.dumps([TOOL, TOOL])},
            {"messages": [USER, YES], "tools": []},
            {"messages": [USER], "tools": [TOOL]},
        ]
    )
    assert done.kept.tolist() == [0, 1, 2]
    assert done.notes == {"reasoning_dropped": 1, "tools_not_written": 2}
    assert chatml("chat").encode([{"messages": [USER, YES]}]).notes == {}


def test_a_record_of_several_conversations_is_noted_once_and_not_at_all_if_it_is_refused(chatml):
    """[T1.b]"""
    pair = {"chosen": [USER, THOUGHT], "rejected": [USER, {**THOUGHT, "content": "No"}], "tools": [TOOL]}
    done = chatml("dpo").encode([pair, {**pair, "rejected": [USER]}, {**pair, "tools": None}])
    assert done.kept.tolist() == [0, 2]
    assert done.notes == {"reasoning_dropped": 2, "tools_not_written": 1}
    group = {"prompt": [USER], "responses": ["Yes", "No"], "rewards": [1, 0], "tools": [TOOL]}
    done = chatml("grpo").encode([group, {**group, "rewards": [1]}, group])
    assert done.kept.tolist() == [0, 2]
    assert done.notes == {"tools_not_written": 2}


def test_a_call_of_tools_without_a_content_is_refused_by_what_the_template_lacks(chatml):
    """[T1.b]"""
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "weather", "arguments": {}}}],
    }
    (refused,) = chatml("chat").encode([{"messages": [USER, call, YES]}]).refused
    assert (refused.reason, refused.detail) == (
        "missing",
        "the template writes no tool calls, and message 2 of 3 (assistant, with tool calls) has nothing else",
    )


def test_texts_in_parts_are_what_one_text_is(write, encoder):
    """[T1.a]"""
    spec = write(tokenizer_config={"chat_template": PLAIN_CHAT, "bos_token": "<s>", "eos_token": "</s>"})
    parts = [{"type": "text", "text": "Y"}, {"type": "text", "text": "es"}]
    done = encoder("chat", spec).encode(
        [{"messages": [USER, {**YES, "content": parts}]}, {"messages": [USER, YES]}]
    )
    assert (done.refused, done.notes) == ((), {})
    ids, offsets = done.values["sequence"], done.offsets["documents"]
    assert ids[: offsets[1]].tolist() == ids[offsets[1] :].tolist()


def test_no_template_is_opened_where_no_section_needs_one():
    program = (
        "import sys\n"
        "from tokenmill.encode.engines import open_tokenizer\n"
        "from tokenmill.encode.recipe import load_recipe, open_encoder\n"
        "open_encoder(load_recipe('instruction'), open_tokenizer('bytes'), tokenizer_spec='bytes')\n"
        "print('jinja2' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_earlier_answers_belong_to_the_prompt_of_a_group(chatml, shown):
    history = [USER, YES, {"role": "user", "content": "Sure?"}]
    done = chatml("grpo").encode([{"prompt": history, "responses": ["Yes", "No"], "rewards": [1, 0]}])
    asked = ASKED + turn("assistant", "Yes") + turn("user", "Sure?")
    assert shown(done, "prompts") == [asked + "<|im_start|>assistant\n"]
    assert shown(done, "responses", "masks") == ["[Yes<|im_end|>]", "[No<|im_end|>]"]


def test_groups_of_texts_and_of_messages_are_those_that_each_gives_alone(write, encoder):
    spec = write(tokenizer_config={"chat_template": PLAIN_CHAT, "bos_token": "<s>", "eos_token": "</s>"})
    opened = encoder("grpo", spec)
    records = [
        {
            "prompt": [USER] if index % 3 else "Is it?",
            "responses": [f"answer {index} {number}" for number in range(1 + index % 4)],
            "rewards": list(range(1 + index % 4)),
        }
        for index in range(40)
    ]
    whole = opened.encode(records)
    alone = [opened.encode([record]) for record in records]
    assert whole.kept.tolist() == list(range(40))
    for key, values in whole.values.items():
        assert values.tolist() == np.concatenate([each.values[key] for each in alone]).tolist()
    for axis, offsets in whole.offsets.items():
        assert np.diff(offsets).tolist() == np.concatenate([np.diff(each.offsets[axis]) for each in alone]).tolist()


def test_an_encoder_warns_of_ends_of_turns_that_are_ordinary_text(chatml, encoder, write):
    """[S.i]"""
    (warning,) = chatml("chat").describe().warnings
    assert "ends turns with '<|im_end|>', which the tokenizer has no special token for" in warning
    assert encoder("text").describe().warnings == ()
    spec = write(tokenizer_config={"chat_template": PLAIN_CHAT, "bos_token": "<s>", "eos_token": "</s>"})
    assert encoder("chat", spec).describe().warnings == ()


def test_an_encoder_warns_of_a_template_that_ends_no_turn(encoder, write):
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    source += "{% if add_generation_prompt %}[assistant]{% endif %}"
    spec = write(tokenizer_config={"chat_template": source, "bos_token": "<s>", "eos_token": "</s>"})
    (warning,) = encoder("chat", spec).describe().warnings
    assert "no end-of-turn token is trained" in warning


SAID = "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.mark.parametrize("field", ["messages", "conversations"])
def test_the_system_text_beside_messages_is_their_first(chatml, shown, field):
    first = {"role": "system", "content": "Be brief."}
    done = chatml("chat").encode(
        [
            {"system": "Be brief.", field: [USER, YES]},
            {field: [first, USER, YES]},
            {"system": "Be brief.", field: [first, USER, YES]},
            {"system": "", field: [USER, YES]},
            {"system": None, field: [USER, YES]},
        ]
    )
    once, inside, both, empty, null = shown(done, "sequence", "loss_mask", "documents")
    assert done.refused == ()
    assert once.startswith(f"^{SAID}<|im_start|>user")
    assert once == inside
    assert null == empty == once.replace(SAID, "")
    # Of conversations the recipe itself names the field beside them.
    assert both == once if field == "messages" else both.count(SAID) == 2
    assert done.notes.get("system_field", 0) == (1 if field == "messages" else 0)


def test_a_system_prompt_that_nothing_reads_is_noted(chatml):
    """[T1.d] A recipe may name it; then it is the system text."""
    records = [{"system_prompt": text, "messages": [USER, YES]} for text in ("Be brief.", "", None)]
    done = chatml("chat").encode(records)
    assert (done.notes, done.noted) == ({"system_prompt_not_read": 1}, {"system_prompt_not_read": 0})
    named = chatml("chat", names={"fields": {"system": "system_prompt"}}).encode(records)
    assert named.notes == {"system_field": 1}


def test_two_texts_of_the_system_and_one_that_is_none_are_refused(chatml):
    first = {"role": "system", "content": "Be long."}
    done = chatml("chat").encode(
        [{"system": "Be brief.", "messages": [first, USER, YES]}, {"system": 7, "messages": [USER, YES]}]
    )
    assert [(each.index, each.reason) for each in done.refused] == [(0, "two_systems"), (1, "not_text")]


def test_pairs_and_groups_have_the_system_text_too(chatml, shown):
    pair = {"system": "Be brief.", "prompt": [USER], "chosen": [YES], "rejected": [NO]}
    done = chatml("dpo").encode([pair])
    assert shown(done, "rejected", "rejected_mask")[0].startswith(f"^{SAID}<|im_start|>user")
    group = {"system": "Be brief.", "prompt": [USER], "responses": [[YES], [NO]], "rewards": [1, 0]}
    done = chatml("grpo").encode([group])
    assert shown(done, "prompts")[0].startswith(f"^{SAID}<|im_start|>user")


def test_records_that_differ_in_the_system_text_are_two(chatml):
    encoder = chatml("chat")
    plain, brief = {"messages": [USER, YES]}, {"system": "Be brief.", "messages": [USER, YES]}
    assert encoder.read(plain).content == "Is it?\nYes"
    assert encoder.read(brief).content == "Is it?\nYes\nBe brief."


def test_a_pair_of_equal_answers_is_counted(chatml):
    pairs = [{"prompt": [USER], "chosen": [YES], "rejected": [other]} for other in (YES, NO, YES)]
    assert chatml("dpo").encode(pairs).notes == {"equal_pair": 2}


def test_a_last_question_without_an_answer_is_counted(chatml):
    done = chatml("chat").encode([{"messages": [USER, YES, USER]}, {"messages": [USER, YES]}])
    assert (done.notes, done.noted) == ({"unanswered": 1}, {"unanswered": 0})
