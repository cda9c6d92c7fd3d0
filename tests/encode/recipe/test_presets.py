"""What people have: records of other projects, read by a preset or a few names."""

from __future__ import annotations

import json

import pytest

from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.recipe import load_recipe, open_encoder
from tokenmill.errors import ConfigError

TOKENIZER = open_tokenizer("bytes")


def encode(recipe, *records):
    table = recipe if isinstance(recipe, dict) else {"preset": recipe}
    return open_encoder(load_recipe(table), TOKENIZER, tokenizer_spec="bytes").encode(records)


def text_of(done, key="sequence"):
    assert done.refused == ()
    return TOKENIZER.decode(done.values[key])


def trained(done, key="sequence", mask="loss_mask"):
    assert done.refused == ()
    return TOKENIZER.decode(done.values[key][done.values[mask] == 1])


def chatml(preset, **more):
    return {"preset": preset, "chat_template": "chatml", **more}


def said(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


ASKED = {"role": "user", "content": "And 3?"}
BEFORE = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "Two."}, ASKED]


def test_a_completion_of_text_goes_on_where_its_prompt_ends():
    done = encode("completion", {"prompt": "2 + 2 = ", "completion": "4"})
    assert text_of(done) == "<|bos|>2 + 2 = 4<|eos|>"
    assert trained(done) == "4<|eos|>"


def test_a_completion_of_messages_trains_on_no_answer_of_the_prompt():
    table = {"preset": "completion", "chat_template": "chatml"}
    answer = [{"role": "assistant", "content": "Three."}]
    done = encode(table, {"prompt": BEFORE, "completion": answer})
    assert text_of(done).removeprefix("<|bos|>") == (
        said("user", "2?") + said("assistant", "Two.") + said("user", "And 3?") + said("assistant", "Three.")
    )
    assert trained(done) == "Three.<|im_end|>"


@pytest.mark.parametrize(
    "turns",
    [
        [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}],
        [{"role": "user", "value": "Hi"}, {"role": "assistant", "value": "Yes."}],
        [{"from": "user", "value": "Hi", "weight": None}, {"from": "assistant", "value": "Yes."}],
    ],
)
def test_the_keys_of_sharegpt_may_be_mixed_with_others(turns):
    done = encode(chatml("chat"), {"conversations": turns, "system": "Be short."})
    assert text_of(done).removeprefix("<|bos|>") == said("system", "Be short.") + said("user", "Hi") + said(
        "assistant", "Yes."
    )
    assert trained(done) == "Yes.<|im_end|>"


def test_a_function_call_of_sharegpt_is_a_call_of_the_assistant():
    from tokenmill.encode.recipe.extract import messages_of

    call = {"name": "clock", "arguments": {"zone": "UTC"}}
    turns = [
        {"from": "human", "value": "When?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "12:00"},
        {"from": "gpt", "value": "Noon."},
    ]
    assert messages_of(turns, None, "conversations") == [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon."},
    ]
    thinking = {"role": "function_call", "content": f"<think>\nLook.\n</think>\n\n{json.dumps([call])}"}
    assert messages_of([thinking], None, "messages") == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
            "reasoning_content": "Look.",
        }
    ]
    (refused,) = encode(chatml("chat"), {"conversations": [{"from": "function_call", "value": "clock()"}]}).refused
    assert (refused.reason, "function_call of no JSON" in refused.detail) == ("tools", True)


def test_pairs_of_llama_factory_have_one_message_on_each_side():
    record = {
        "conversations": [{"from": "human", "value": "Hi"}],
        "chosen": {"from": "gpt", "value": "Hello."},
        "rejected": {"from": "gpt", "value": "No."},
    }
    done = encode(chatml("pairs"), record)
    assert trained(done, "chosen", "chosen_mask") == "Hello.<|im_end|>"
    assert text_of(done, "rejected").removeprefix("<|bos|>") == said("user", "Hi") + said("assistant", "No.")
    alpaca = {"instruction": "Add.", "input": "2 2", "chosen": "4", "rejected": "5"}
    done = encode("pairs", alpaca)
    assert text_of(done, "chosen") == "<|bos|>Add.\n2 24<|eos|>"
    assert trained(done, "rejected", "rejected_mask") == "5<|eos|>"


@pytest.mark.parametrize(("label", "reward"), [(True, 1.0), (False, 0.0), (1, 1.0), (0.25, 0.25)])
def test_a_label_of_kto_is_the_reward_of_a_group_of_one(label, reward):
    done = encode("kto", {"prompt": "2 + 2 = ", "completion": "4", "label": label})
    assert (text_of(done, "prompts"), text_of(done, "responses")) == ("<|bos|>2 + 2 = ", "4<|eos|>")
    assert (done.values["rewards"].tolist(), done.offsets["groups"].tolist()) == ([reward], [0, 1])
    done = encode(
        chatml("kto"), {"prompt": BEFORE, "completion": [{"role": "assistant", "content": "3."}], "label": label}
    )
    assert trained(done, "responses", "masks") == "3.<|im_end|>"
    assert done.values["rewards"].tolist() == [reward]


KTO = {"instruction": "Add.", "output": "4", "kto_tag": True}
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]


def test_a_kto_tag_of_llama_factory_is_a_reward_too():
    done = encode("kto", {**KTO, "input": "2 2"})
    assert (text_of(done, "prompts"), text_of(done, "responses")) == ("<|bos|>Add.\n2 2", "4<|eos|>")
    assert done.values["rewards"].tolist() == [1.0]
    done = encode(chatml("kto"), {**KTO, "system": "Be short.", "history": [["1 1", "2"]]})
    begin = said("system", "Be short.") + said("user", "1 1") + said("assistant", "2") + said("user", "Add.")
    assert text_of(done, "prompts").removeprefix("<|bos|>") == begin + "<|im_start|>assistant\n"
    assert trained(done, "responses", "masks") == "4<|im_end|>"
    done = encode(chatml("kto"), {"conversations": SHAREGPT, "kto_tag": False})
    assert (trained(done, "responses", "masks"), done.values["rewards"].tolist()) == ("Hello.<|im_end|>", [0.0])
    done = encode(chatml("kto"), {"conversations": SHAREGPT[:1], "kto_tag": False})
    assert [refused.reason for refused in done.refused] == ["not_messages"]


ALPACA = {"instruction": "And 3?", "input": "", "output": "Three."}


def test_the_history_of_alpaca_is_said_and_trained_before_the_instruction():
    record = {**ALPACA, "system": "Count.", "history": [["1?", "One."], ["2?", "Two."]]}
    done = encode(chatml("instruction"), record)
    assert text_of(done).removeprefix("<|bos|>") == "".join(
        said(role, text)
        for role, text in (
            ("system", "Count."), ("user", "1?"), ("assistant", "One."), ("user", "2?"), ("assistant", "Two."),
            ("user", "And 3?"), ("assistant", "Three."),
        )
    )  # fmt: skip
    assert trained(done) == "One.<|im_end|>Two.<|im_end|>Three.<|im_end|>"
    assert encode(chatml("instruction"), {**record, "history": [["1?"]]}).refused[0].reason == "not_messages"


@pytest.mark.parametrize("beside", [{"system": "Count."}, {"history": [["1?", "One."]]}])
def test_texts_without_a_chat_template_do_not_drop_what_stands_beside_them(beside):
    assert encode("instruction", {**ALPACA, **beside}).refused[0].reason == "no_template"
    assert encode("instruction", {**ALPACA, "system": "", "history": []}).refused == ()


def test_names_of_fields_keys_and_roles_are_those_of_the_record():
    names = {
        "fields": {"messages": "dialog"},
        "keys": {"role": "speaker", "content": "text"},
        "roles": {"doctor": "assistant", "patient": "user"},
    }
    recipe = chatml("chat", names=names)
    record = {"dialog": [{"speaker": "patient", "text": "It hurts."}, {"speaker": "doctor", "text": "Rest."}]}
    done = encode(recipe, record)
    assert text_of(done).removeprefix("<|bos|>") == said("user", "It hurts.") + said("assistant", "Rest.")
    assert trained(done) == "Rest.<|im_end|>"
    assert "dialog" in load_recipe(recipe).fields
    assert "messages" not in load_recipe(recipe).fields
    assert load_recipe(load_recipe(recipe).to_json()) == load_recipe(recipe)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"fields": {"mesages": "dialog"}},
            "names: fields must be of the recipe, got 'mesages'; did you mean 'messages'",
        ),
        (
            {"roles": {"doctor": "asistant"}},
            "names: roles must lead to a role, got 'asistant'; did you mean 'assistant'",
        ),
        ({"keys": {"rolle": "x"}}, "names: keys must be role or content, got 'rolle'; name the record's"),
    ],
)
def test_slips_in_names_are_refused(names, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(chatml("chat", names=names))


def test_a_constant_system_is_said_where_a_record_says_none():
    recipe = chatml("chat", system="Be kind.")
    plain = {"messages": [ASKED, {"role": "assistant", "content": "3."}]}
    own = {"messages": [{"role": "system", "content": "Be brief."}, *plain["messages"]]}
    answered = said("user", "And 3?") + said("assistant", "3.")
    assert text_of(encode(recipe, plain)).removeprefix("<|bos|>") == said("system", "Be kind.") + answered
    assert text_of(encode(recipe, own)).removeprefix("<|bos|>") == said("system", "Be brief.") + answered
    field = encode(recipe, {**plain, "system": "Be odd."})
    assert text_of(field).removeprefix("<|bos|>") == said("system", "Be odd.") + answered
    with pytest.raises(ConfigError, match="system must be left out where no section has template"):
        load_recipe({"preset": "text", "system": "Be kind."})


def test_the_same_recipe_without_names_is_written_as_before():
    table = load_recipe("chat").to_json()
    assert not {"names", "system"} & table.keys()
    assert load_recipe(table) == load_recipe("chat")
