"""The recipes that have a name: which fields they find, and in which order of priority."""

import pytest

from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.recipe import PRESETS, load_recipe, open_encoder
from tokenmill.types import TRAINING_TYPES


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_the_arrays_of_its_training_type(encoder, name):
    recipe = load_recipe(name)
    assert recipe.name == name
    opened = encoder({"preset": name, "chat_template": "chatml"} if name == "chat" else name)
    stored = set(TRAINING_TYPES[recipe.kind]) - (set() if recipe.kind == "sft" else {"position_ids"})
    assert set(opened.keys) == stored


HEADED = "^### Instruction:\n{}\n\n### Response:\n[{}$]"


@pytest.mark.parametrize(
    ("record", "asked", "answer"),
    [
        ({"prompt": "q", "response": "a"}, "q", "a"),
        ({"prompt": "q", "completion": "a"}, "q", "a"),
        ({"instruction": "q", "input": "i", "output": "a"}, "q\n\n### Input:\ni", "a"),
        ({"instruction": "q", "input": "", "output": "a"}, "q", "a"),
        ({"instruction": "q", "input": None, "output": "a"}, "q", "a"),
        ({"instruction": "q", "output": "a"}, "q", "a"),
        ({"instruction": "q", "context": "i", "response": "a"}, "q\n\n### Input:\ni", "a"),
        ({"instruction": "q", "context": "", "response": "a"}, "q", "a"),
        ({"question": "q", "answer": "a"}, "q", "a"),
        # Priority: the earlier of the list is taken, whatever the order of the fields.
        ({"answer": "4", "question": "3", "completion": "2", "response": "1", "prompt": "q"}, "q", "1"),
        ({"output": "3", "instruction": "i", "completion": "2", "prompt": "q"}, "q", "2"),
        ({"question": "3", "answer": "4", "output": "2", "instruction": "q"}, "q", "2"),
    ],
)
def test_the_usual_fields_of_instructions_are_found(encoder, shown, record, asked, answer):
    done = encoder("instruction").encode([record])
    assert shown(done, "sequence", "loss_mask", "documents") == [HEADED.format(asked, answer)]


def test_detection_is_by_record_so_files_may_differ(encoder, shown):
    records = [{"prompt": "q", "response": "a"}, {"question": "q", "answer": "b"}, {"text": "x"}]
    done = encoder("instruction").encode(records)
    assert shown(done, "sequence", "loss_mask", "documents") == [HEADED.format("q", "a"), HEADED.format("q", "b")]
    assert [(each.index, each.reason) for each in done.refused] == [(2, "missing_field")]
    assert "'text'; wanted are prompt + response, or prompt + completion" in done.refused[0].detail
    alone = encoder("instruction").encode(records[1:2])
    assert shown(alone, "sequence", "loss_mask", "documents") == [HEADED.format("q", "b")]


def test_a_field_of_another_type_is_said(encoder):
    done = encoder("instruction").encode([{"prompt": "q", "response": 4}])
    assert [(each.reason, each.detail) for each in done.refused] == [("not_text", "field 'response' is a number")]


def test_texts_of_pairs_are_taken_as_they_are(encoder, shown):
    done = encoder("dpo").encode([{"prompt": "Q: it? A:", "chosen": " yes", "rejected": " no"}])
    assert shown(done, "chosen", "chosen_mask") == ["^Q: it? A:[ yes$]"]
    assert shown(done, "rejected", "rejected_mask") == ["^Q: it? A:[ no$]"]


def test_pairs_of_texts_without_a_prompt_are_refused(encoder):
    done = encoder("dpo").encode([{"chosen": "Q: it? A: yes", "rejected": "Q: it? A: no"}])
    assert [(each.reason, each.detail) for each in done.refused] == [("not_messages", "field 'chosen' is a string")]


def test_texts_of_groups_are_taken_as_they_are(encoder, shown):
    record = {"prompt": "2+2=", "responses": ["4", "5"], "rewards": [1, 0]}
    done = encoder("grpo").encode([record])
    assert shown(done, "prompts") == ["^2+2="]
    assert shown(done, "responses", "masks") == ["[4$]", "[5$]"]


def test_the_text_preset_makes_what_the_fast_path_makes(shown):
    encoder = open_encoder(load_recipe("text"), open_tokenizer("bytes"), tokenizer_spec="bytes")
    assert shown(encoder.encode([{"text": "ab"}, {"content": "x"}]), "sequence", axis="documents") == ["^ab$"]
