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
        ({"keys": {"rolle": "x"}}, "rolle"),
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
