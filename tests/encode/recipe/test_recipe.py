"""What a recipe may say, and what it is told where it is wrong."""

import json
import os
import subprocess
import sys
from typing import get_args

import pytest

from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.recipe import PRESETS, load_recipe, open_encoder
from tokenmill.encode.recipe.recipe import Kind
from tokenmill.errors import ConfigError
from tokenmill.fingerprint import digest
from tokenmill.types import TRAINING_TYPES

TEXT = {"input": {"sections": [{"field": "text", "action": "train"}]}}
CHAT = {
    "input": {"sections": [{"field": "messages", "action": "$role", "template": True}]},
    "mask": {"system": "mask", "user": "mask", "assistant": "train"},
    "mask_default": "mask",
    "preprocessing": {"max_seq_len": 2048},
    "output": {"storage_format": "bin", "dtype": {"loss_mask": "bool"}},
}
PLAIN = {
    "input": {
        "sections": [
            {"field": "prompt", "action": "mask", "add_special_tokens": True},
            {"field": "response", "action": "train"},
        ]
    },
    "mask_default": "mask",
    "preprocessing": {"max_seq_len": 2048},
}
PAIRS = {
    "input": {
        "sources": {
            "chosen": {"sections": [{"field": "chosen", "action": "$role", "template": True}]},
            "rejected": {"sections": [{"field": "rejected", "action": "$role", "template": True}]},
        }
    },
    "mask": {"user": "mask", "assistant": "train"},
    "mask_default": "mask",
}
GROUPS = {
    "input": {
        "sources": {
            "prompts": {"sections": [{"field": "prompt", "action": "mask", "template": True}]},
            "responses": {
                "sections": [{"field": "responses", "action": "train"}],
                "list_field": True,
                "mask_key": "masks",
            },
            "rewards": {"sections": [{"field": "rewards", "action": "value"}]},
        }
    },
    "mask": {"user": "mask", "assistant": "train"},
    "mask_default": "mask",
}
RECIPES = {"text": TEXT, "chat": CHAT, "plain": PLAIN, "pairs": PAIRS, "groups": GROUPS}


def changed(recipe, path, value):
    """Return a copy of a recipe with one value changed; a path is keys and indexes."""
    copy = json.loads(json.dumps(recipe))
    inner = copy
    for name in path[:-1]:
        inner = inner[name] if isinstance(inner, list) else inner.setdefault(name, {})
    inner[path[-1]] = value
    return copy


@pytest.mark.parametrize(
    ("name", "kind"), [("text", "seq"), ("chat", "sft"), ("plain", "sft"), ("pairs", "dpo"), ("groups", "grpo")]
)
def test_the_sections_and_sources_say_the_training_type(name, kind):
    assert load_recipe(RECIPES[name]).kind == kind


@pytest.mark.parametrize(
    ("path", "key", "meant"),
    [
        (("maks",), "maks", "mask"),
        (("mask_defualt",), "mask_defualt", "mask_default"),
        (("input", "section"), "section", "sections"),
        (("input", "sections", 0, "feild"), "feild", "field"),
        (("input", "sections", 0, "add_special_token"), "add_special_token", "add_special_tokens"),
        (("preprocessing", "min_char"), "min_char", "min_chars"),
        (("preprocessing", "deduplicated"), "deduplicated", "deduplicate"),
        (("output", "position_id_mode"), "position_id_mode", "position_ids_mode"),
        (("output", "max_token_per_shard"), "max_token_per_shard", "max_tokens_per_shard"),
    ],
)
def test_a_misspelt_key_is_an_error_that_names_the_nearest(path, key, meant):
    with pytest.raises(ConfigError, match=rf"unknown key: '{key}'; did you mean '{meant}'\?"):
        load_recipe(changed(CHAT, path, "x"))


@pytest.mark.parametrize("key", ["list_feild", "mask_keys"])
def test_a_misspelt_key_of_a_source_is_an_error_that_says_where(key):
    with pytest.raises(
        ConfigError, match=rf"^recipe: input\.sources\.responses: unknown key: '{key}'; did you mean"
    ):
        load_recipe(changed(GROUPS, ("input", "sources", "responses", key), True))


def test_a_misspelt_source_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown key: 'choosen'; did you mean 'chosen'\?"):
        load_recipe(changed(PAIRS, ("input", "sources", "choosen"), PAIRS["input"]["sources"]["chosen"]))


WRONG = [
    (TEXT, ("version",), 2, "version must be 1, got 2"),
    (TEXT, ("kind",), "dpo", "kind must be 'seq' for these sections"),
    (TEXT, ("kind",), "stf", r"got 'stf'; did you mean 'sft'\?"),
    (TEXT, ("preset",), "text", "input must be left to the preset"),
    (TEXT, ("preset",), "txt", r"got 'txt'; did you mean 'text'\?"),
    (TEXT, ("input", "sections"), [], r"input\.sections: expected a list of tables, 1 or more, got \[\];"),
    (TEXT, ("input", "sections"), None, "must have one of sections, sources, variants, got none"),
    (TEXT, ("input", "sources"), PAIRS["input"]["sources"], "got sections and sources"),
    (TEXT, ("input", "sections", 0), "text", r"input\.sections\[0\]: expected a table, got 'text'"),
    (TEXT, ("input", "sections", 0, "action"), "tain", r"got 'tain'; did you mean 'train'\?"),
    (TEXT, ("input", "sections", 0, "action"), None, "missing key: action; add action"),
    (TEXT, ("input", "sections", 0, "action"), "mask", "something must be trained, got mask"),
    (TEXT, ("input", "sections", 0, "action"), "value", "value is for rewards only"),
    (TEXT, ("input", "sections", 0, "action"), "$role", "must have a role to go by"),
    (
        TEXT,
        ("input", "sections", 0, "field"),
        "a..b",
        r"\[0\]\.field: expected the name .* outer\.inner, got 'a\.\.b'",
    ),
    (TEXT, ("input", "sections", 0, "field"), 3, r"sections\[0\]\.field: expected the name of a field, .*got 3"),
    (
        TEXT,
        ("input", "sections", 0, "template"),
        "yes",
        r"\[0\]\.template: expected true or false, got 'yes'",
    ),
    (TEXT, ("name",), 3, "recipe: name: expected a string, got 3"),
    (TEXT, ("input",), [], "recipe: input: expected a table, got \\[\\]"),
    (TEXT, ("mask",), {"user": None}, r"mask\.user: expected one of train, mask, got None"),
    (
        TEXT,
        ("output", "dtypes"),
        {"sequence": 3},
        "output.dtypes: expected a table of strings, got {'sequence': 3}",
    ),
    (TEXT, ("preprocessing", "val_fraction"), float("nan"), "val_fraction: expected a number that is at least 0"),
    (TEXT, ("preprocessing", "domain_key"), "a.", r"preprocessing\.domain_key: expected the name of a field"),
    (TEXT, ("input", "variants"), [{}], "got sections and variants"),
    (TEXT, ("input",), {"variants": []}, r"input\.variants: expected a list of tables, 1 or more"),
    (TEXT, ("input",), {"variants": [{}]}, r"input\.variants\[0\]: must have one of sections, sources, got none"),
    (PAIRS, ("input", "sources", "chosen"), {}, r"input\.sources\.chosen: missing key: sections"),
    (TEXT, ("input", "tools_field"), "tools", "tools_field must be left out where no section has template"),
    (TEXT, ("chat_template",), "chatml", "chat_template must be left out where no section has template"),
    (TEXT, ("output", "position_ids_mode"), "continuous", "position_ids_mode must be none for 'seq'"),
    (TEXT, ("output", "position_ids_mode"), "reset", r"got 'reset'; did you mean 'doc_reset'\?"),
    (TEXT, ("output", "storage_format"), "hdf5", "one of bin, h5, got 'hdf5'"),
    (
        TEXT,
        ("output", "max_tokens_per_shard"),
        0,
        r"output\.max_.*: expected a whole number from 1 to .*got 0",
    ),
    (TEXT, ("output", "dtypes"), {"sequenc": "uint32"}, r"got 'sequenc'; did you mean 'sequence'\?"),
    (TEXT, ("output", "dtypes"), {"loss_mask": "uint8"}, "dtypes must name arrays, got 'loss_mask'"),
    (TEXT, ("output", "dtypes"), {"sequence": "int64"}, "uint8, uint16, uint32, got 'int64'"),
    (
        TEXT,
        ("preprocessing", "min_chars"),
        -1,
        r"\.min_chars: expected a whole number from 0 to .*got -1",
    ),
    (TEXT, ("preprocessing", "min_chars"), 1.5, r"preprocessing\.min_chars: expected a whole number .*got 1\.5"),
    (TEXT, ("preprocessing", "max_items"), True, r"preprocessing\.max_items: expected a whole number .*got True"),
    (
        TEXT,
        ("preprocessing", "val_fraction"),
        1,
        "expected a number that is at least 0 and below 1, got 1;",
    ),
    (TEXT, ("preprocessing", "packing_strategy"), "bfd", "got 'bfd'; rows are packed when a run is planned"),
    (TEXT, ("preprocessing", "max_packed_len"), 8192, "max_packed_len must be left out, got 8192"),
    (TEXT, ("preprocessing", "truncation_mode"), "keep", r"got 'keep'; did you mean 'keep_end'|'keep_start'"),
    (CHAT, ("mask",), {}, "something must be trained, got \\$role with mask {}"),
    (
        CHAT,
        ("mask", "assistant"),
        "tarin",
        r"mask\.assistant: expected one of train, mask, got 'tarin'; did",
    ),
    (CHAT, ("mask_default",), "no", "mask_default: expected one of train, mask, got 'no'"),
    (CHAT, ("train_turns",), "first", "train_turns: expected one of all, last, got 'first'"),
    (CHAT, ("input", "sections", 0, "prefix"), "x", "prefix must be left out with template = true"),
    (CHAT, ("input", "sections", 0, "add_special_tokens"), True, "the chat template writes what stands around"),
    (PLAIN, ("input", "sections", 1, "template"), True, "go through the chat template or none, got both"),
    (PAIRS, ("input", "sources", "chosen", "mask_key"), "cm", "mask_key must be 'chosen_mask', got 'cm'"),
    (PAIRS, ("input", "sources", "chosen", "list_field"), True, "list_field is for responses only"),
    (PAIRS, ("input", "sources", "rewards"), TEXT["input"], "sources must be chosen and rejected"),
    (GROUPS, ("input", "sources", "rewards", "sections", 0, "action"), "train", "must be value: it holds numbers"),
    (GROUPS, ("input", "sources", "prompts", "sections", 0, "action"), "train", "action must be mask"),
]


@pytest.mark.parametrize(("recipe", "path", "value", "message"), WRONG)
def test_what_cannot_be_right_is_said(recipe, path, value, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(changed(recipe, path, value))


def test_every_error_says_where_the_rule_the_value_and_the_way_out():
    for recipe, path, value, _ in WRONG:
        with pytest.raises(ConfigError, match=r"(?s)^recipe.*: .*(got .*|key: .*); .+"):
            load_recipe(changed(recipe, path, value))


def test_responses_cannot_begin_anew_or_answer_no_messages():
    plain = changed(GROUPS, ("input", "sources", "prompts", "sections", 0, "template"), False)
    begun = changed(plain, ("input", "sources", "responses", "sections", 0, "add_special_tokens"), True)
    with pytest.raises(ConfigError, match="a response goes on behind its prompt"):
        load_recipe(begun)
    with pytest.raises(ConfigError, match="must answer messages, got prompts without it"):
        load_recipe(changed(plain, ("input", "sources", "responses", "sections", 0, "template"), True))


def test_what_is_no_recipe_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"got 'instructions'; did you mean 'instruction'\?"):
        load_recipe("instructions")
    with pytest.raises(ConfigError, match=r"missing\.toml: a recipe must be a readable file"):
        load_recipe(str(tmp_path / "missing.toml"))
    for name, text in (("a.json", "{"), ("a.toml", "x ="), ("b.toml", "\udcff"), ("b.json", "[1]")):
        path = tmp_path / name
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ConfigError, match=rf"{name}: (must be (JSON|TOML)|expected a table), got"):
            load_recipe(str(path))


def test_json_toml_and_table_give_the_same_recipe(tmp_path):
    """[T2.c]"""
    (tmp_path / "chat.json").write_text(json.dumps(CHAT), encoding="utf-8")
    (tmp_path / "chat.toml").write_text(
        """
mask_default = "mask"
[input]
sections = [{ template = true, action = "$role", field = "messages" }]
[mask]
user = "mask"
assistant = "train"
system = "mask"
[output]
dtypes = { loss_mask = "uint8" }
[preprocessing]
max_seq_len = 2048
truncation_mode = "keep_start"
""",
        encoding="utf-8",
    )
    recipes = [
        load_recipe(CHAT),
        load_recipe(str(tmp_path / "chat.json")),
        load_recipe(str(tmp_path / "chat.toml")),
    ]
    assert recipes[0] == recipes[1] == recipes[2]
    assert json.dumps(recipes[0].to_json()) == json.dumps(recipes[2].to_json())


@pytest.mark.parametrize(
    "spec",
    [
        *PRESETS,
        *RECIPES.values(),
        {"preset": "instruction", "chat_template": "chatml"},
        {"preset": "dpo", "chat_template": "chatml", "preprocessing": {"max_seq_len": 64}},
        {"preset": "grpo", "name": "mine", "output": {"storage_format": "h5"}},
        {"preset": "chat", "mask": {"tool": "train"}, "chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=str,
)
def test_the_json_of_a_recipe_is_that_recipe(spec):
    """[T1.c, T2.c]"""
    recipe = load_recipe(spec)
    again = load_recipe(json.loads(json.dumps(recipe.to_json())))
    assert again == recipe
    assert digest(again.to_json()) == digest(recipe.to_json())


def test_defaults_and_the_order_of_keys_make_no_difference():
    """[T2.c]"""
    said = {
        "output": {"position_ids_mode": "none", "storage_format": "bin", "dtypes": {}},
        "preprocessing": {"val_fraction": 0, "min_chars": 0, "deduplicate": False, "packing_strategy": "simple"},
        "mask_default": "mask",
        "mask": {},
        "input": {"sections": [{"action": "train", "field": "text", "add_special_tokens": True}]},
        "version": 1,
    }
    assert load_recipe(said).to_json() == load_recipe(TEXT).to_json()
    swapped = {"sources": dict(reversed(PAIRS["input"]["sources"].items()))}
    assert json.dumps(load_recipe({**PAIRS, "input": swapped}).to_json()) == json.dumps(
        load_recipe(PAIRS).to_json()
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("name",), "mine"),
        (("input", "sections", 0, "field"), "conversations"),
        (("input", "sections", 0, "action"), "train"),
        (("input", "sections", 0, "role"), "user"),
        (("input", "tools_field"), "tools"),
        (("mask", "system"), "train"),
        (("mask_default",), "train"),
        (("train_turns",), "last"),
        (("chat_template",), "chatml"),
        (("chat_template_kwargs",), {"a": 1}),
        (("preprocessing", "max_seq_len"), 1024),
        (("preprocessing", "truncation_mode"), "keep_end"),
        (("preprocessing", "min_chars"), 1),
        (("preprocessing", "max_chars"), 10),
        (("preprocessing", "max_items"), 10),
        (("preprocessing", "domain_key"), "source"),
        (("preprocessing", "deduplicate"), True),
        (("preprocessing", "val_fraction"), 0.5),
        (("output", "storage_format"), "h5"),
        (("output", "max_tokens_per_shard"), 10),
        (("output", "dtype"), {"sequence": "uint32"}),
        (("output", "position_ids_mode"), "continuous"),
    ],
)
def test_any_other_option_is_another_recipe(path, value):
    """[T1.c, T2.c]"""
    assert digest(load_recipe(changed(CHAT, path, value)).to_json()) != digest(load_recipe(CHAT).to_json())


def test_the_json_of_the_presets_is_the_same_under_any_hash_seed():
    """[T2.c]"""
    program = (
        "from tokenmill.encode.recipe import PRESETS, load_recipe\n"
        "from tokenmill.fingerprint import digest\n"
        "print([digest(load_recipe(name).to_json()) for name in PRESETS])\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {f"{[digest(load_recipe(name).to_json()) for name in PRESETS]}\n"}


def test_only_one_bare_text_field_is_left_to_the_fast_path():
    assert load_recipe("text").text_field == "text"
    assert load_recipe(changed(TEXT, ("input", "sections", 0, "field"), "a.b")).text_field == "a.b"
    filtered = changed(TEXT, ("preprocessing",), {"min_chars": 3, "deduplicate": True, "val_fraction": 0.1})
    assert load_recipe(filtered).text_field == "text"
    more = {"field": "title", "action": "train"}
    for recipe in (
        changed(TEXT, ("preprocessing", "max_seq_len"), 8),
        changed(TEXT, ("preprocessing", "domain_key"), "source"),
        changed(TEXT, ("output", "dtypes"), {"sequence": "uint32"}),
        changed(TEXT, ("input", "sections", 0, "prefix"), "# "),
        changed(TEXT, ("input", "sections", 0, "add_special_tokens"), False),
        changed(TEXT, ("input", "sections"), [*TEXT["input"]["sections"], more]),
        changed(TEXT, ("kind",), "sft"),
        PLAIN,
    ):
        assert load_recipe(recipe).text_field is None
    assert [load_recipe(name).text_field for name in PRESETS] == ["text", *[None] * (len(PRESETS) - 1)]


BESIDE = ("system", "history")


def test_the_fields_are_all_that_a_record_may_need():
    assert {name: load_recipe(name).fields for name in PRESETS} == {
        "text": ("text",),
        "chat": ("messages", "system", "conversations", "tools", "chat_template_kwargs"),
        "instruction": (
            *("prompt", "response", "completion", "instruction", "input", "output", "context"),
            *("question", "answer", *BESIDE),
        ),
        "completion": ("prompt", "completion", "tools", *BESIDE, "chat_template_kwargs"),
        "dpo": ("prompt", "chosen", "rejected", "tools", *BESIDE, "chat_template_kwargs"),
        "pairs": (
            "conversations",
            "chosen",
            "rejected",
            "instruction",
            "input",
            "tools",
            *BESIDE,
            "chat_template_kwargs",
        ),
        "prompts": ("prompt", "tools", *BESIDE, "chat_template_kwargs"),
        "kto": (
            *("prompt", "completion", "label", "conversations", "kto_tag", "messages"),
            *("instruction", "input", "output", "tools", *BESIDE, "chat_template_kwargs"),
        ),
        "grpo": ("prompt", "responses", "rewards", "tools", *BESIDE, "chat_template_kwargs"),
    }
    inner = changed(TEXT, ("input", "sections", 0, "field"), "meta.text")
    assert load_recipe(changed(inner, ("preprocessing", "domain_key"), "meta.source")).fields == (
        *("meta.text", "meta", "meta.source"),
    )


def test_the_domain_key_may_stand_in_the_output_table_but_not_differ():
    recipe = load_recipe(changed(TEXT, ("output", "domain_key"), "source"))
    assert recipe == load_recipe(changed(TEXT, ("preprocessing", "domain_key"), "source"))
    assert recipe.fields == ("text", "source")
    both = changed(changed(TEXT, ("output", "domain_key"), "a"), ("preprocessing", "domain_key"), "b")
    with pytest.raises(ConfigError, match="domain_key must be said once, got 'b' and 'a' in output"):
        load_recipe(both)


def test_a_key_that_is_null_is_left_out():
    nulls = {"train_turns": None, "name": None, "kind": None, "preprocessing": {"max_seq_len": None}}
    assert load_recipe({"preset": "dpo", **nulls}) == load_recipe("dpo")
    assert load_recipe({"preset": "dpo"}).train_turns == "last"
    kept = load_recipe({**CHAT, "chat_template_kwargs": {"date": None}})
    assert kept.chat_template_kwargs == {"date": None}


def test_a_recipe_knows_every_training_type():
    assert get_args(Kind) == tuple(TRAINING_TYPES)


def test_positions_are_stored_for_sft_unless_the_recipe_says_none():
    assert load_recipe(CHAT).output.position_ids_mode == "doc_reset"
    assert load_recipe(changed(TEXT, ("output", "position_ids_mode"), "doc_reset")) == load_recipe(TEXT)
    assert load_recipe(changed(CHAT, ("output", "position_ids_mode"), "none")).output.position_ids_mode == "none"
    modes = {name: load_recipe(name).output.position_ids_mode for name in PRESETS}
    assert {name for name, mode in modes.items() if mode == "doc_reset"} == {"chat", "instruction", "completion"}


def test_an_answer_to_messages_is_a_message():
    (variant,) = load_recipe(GROUPS).variants
    (section,) = variant.sources["responses"].sections
    assert (section.template, section.role) == (True, "assistant")


def test_a_chat_template_over_a_preset_takes_its_plain_texts_as_well():
    recipe = load_recipe({"preset": "instruction", "chat_template": "chatml"})
    sections = [section for variant in recipe.variants for section, _ in variant.all_sections()]
    assert all(section.template and not section.prefix and not section.suffix for section in sections)
    assert len(recipe.variants) == len(load_recipe("instruction").variants)
    # The variant of strings and that of messages become one.
    assert len(load_recipe({"preset": "dpo", "chat_template": "chatml"}).variants) == 2


def test_a_template_named_by_a_recipe_file_is_looked_for_beside_it(tmp_path):
    (tmp_path / "mine.jinja").write_text("", encoding="utf-8")
    for name in ("mine.jinja", "chatml", "tokenizer"):
        (tmp_path / "chat.json").write_text(json.dumps({**CHAT, "chat_template": name}), encoding="utf-8")
        found = load_recipe(str(tmp_path / "chat.json")).chat_template
        assert found == (str(tmp_path / name) if name == "mine.jinja" else name)


# The recipes that have a name: which fields they find, and in which order of priority.


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
    assert "fields 'text', but no prompt + response, nor prompt + completion, nor" in done.refused[0].detail
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


@pytest.mark.parametrize(("role", "meant"), [("asistant", "assistant"), ("User", "user"), ("sytem", "system")])
def test_a_slip_in_a_role_of_mask_is_refused_with_what_was_meant(role, meant):
    with pytest.raises(ConfigError, match=rf"mask must name roles, got '{role}'; did you mean '{meant}'"):
        load_recipe({"preset": "chat", "mask": {role: "mask"}})


def test_a_role_of_ones_own_may_stand_in_mask():
    assert "narrator" in load_recipe({"preset": "chat", "mask": {"narrator": "train"}}).trained_roles
