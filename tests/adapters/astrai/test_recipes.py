"""Tokens of recipes: those of AstrAI, with every kind of tokenizer folder."""

from __future__ import annotations

import json
from itertools import product

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import tokenmill as tm
from tokenmill.adapters.astrai import DatasetFactory, Pipeline
from tokenmill.errors import ConfigError, DocumentError
from tokenmill.store import open_store

BOS, EOS, START, END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
POST = {"none": None, "both": f"{BOS} $A {EOS}", "bos": f"{BOS} $A", "eos": f"$A {EOS}"}
NAMED = {"bos_token": BOS, "eos_token": EOS}
CONFIGS = {
    "nothing": {},
    "AstrAI's keys": {"special_tokens": NAMED},
    "AstrAI's keys, no BOS": {"special_tokens": {"eos_token": EOS}},
    "HF keys": NAMED,
}
FOLDERS = list(product(CONFIGS, POST))

ROLES = {"system": "mask", "user": "mask", "assistant": "train"}
MESSAGES = {"action": "$role", "template": True}
TEXT = {"input": {"sections": [{"field": "text", "action": "train"}]}}
CHAT = {"input": {"sections": [{"field": "messages", **MESSAGES}]}, "mask": ROLES}
INSTRUCTION = {
    "input": {
        "sections": [
            {"field": "prompt", "action": "mask", "add_special_tokens": True},
            {"field": "response", "action": "train"},
        ]
    },
}
PAIRS = {
    "input": {"sources": {key: {"sections": [{"field": key, **MESSAGES}]} for key in ("chosen", "rejected")}},
    "mask": ROLES,
}


def group(prompt):
    return {
        "input": {
            "sources": {
                "prompts": {"sections": [{"field": "prompt", "action": "mask", **prompt}]},
                "responses": {
                    "sections": [{"field": "responses", "action": "train"}],
                    "list_field": True,
                    "mask_key": "masks",
                },
                "rewards": {"sections": [{"field": "rewards", "action": "value"}]},
            }
        },
        "mask": ROLES,
    }


@pytest.fixture
def folder(tmp_path):
    """Make a tokenizer folder: a token a letter, with what stands beside it and what its post-processor adds."""

    def make(config, post):
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([BOS, EOS, START, END])
        if POST[post]:
            placed = [(name, tokenizer.token_to_id(name)) for name in (BOS, EOS)]
            tokenizer.post_processor = processors.TemplateProcessing(single=POST[post], special_tokens=placed)
        path = tmp_path / "tokenizer"
        path.mkdir()
        tokenizer.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, **CONFIGS[config]}))
        return path, tokenizer

    return make


def build(tmp_path, config, records, tokenizer, name="out"):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    report = Pipeline(config, [tmp_path / "a.jsonl"], tmp_path / name, tokenizer).run(workers=1)
    return open_store(tmp_path / name), report


def records_of(store, key):
    return [
        [each.tolist() for each in value] if isinstance(value, list) else value.tolist()
        for value in (store.fetch_record(index, key) for index in range(store.num_documents))
    ]


def bare(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def messages(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def rendered(tokenizer, turns):
    """Encode messages one by one, as AstrAI does."""
    texts = [f"{START}{turn['role']}\n{turn['content']}{END}\n" for turn in turns]
    return [token for text in texts for token in bare(tokenizer, text)]


CONVERSATIONS = [
    messages(("user", "2 + 2?"), ("assistant", "4 ")),
    messages(("system", "Be kind."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
]


@pytest.mark.parametrize(("config", "post"), FOLDERS)
def test_texts_have_the_bos_and_eos_of_the_post_processor(tmp_path, folder, config, post):
    path, tokenizer = folder(config, post)
    texts = ["The mill stands by the river.", "It grinds."]
    store, report = build(tmp_path, TEXT, [{"text": text} for text in texts], path)
    assert records_of(store, "sequence") == [tokenizer.encode(text).ids for text in texts]
    assert dict(report.notes) == {}


@pytest.mark.parametrize(("config", "post"), FOLDERS)
def test_chats_begin_with_the_bos_of_special_tokens(tmp_path, folder, config, post):
    path, tokenizer = folder(config, post)
    bos = [tokenizer.token_to_id(BOS)] if config == "AstrAI's keys" else []
    store, _ = build(tmp_path, CHAT, [{"messages": turns} for turns in CONVERSATIONS], path)
    assert records_of(store, "sequence") == [bos + rendered(tokenizer, turns) for turns in CONVERSATIONS]
    assert store.manifest.starts_with_bos is bool(bos)
    masks = [mask for record in records_of(store, "loss_mask") for mask in record[: len(bos)]]
    assert not any(masks)


@pytest.mark.parametrize(("config", "post"), FOLDERS)
def test_pairs_begin_with_the_bos_of_special_tokens(tmp_path, folder, config, post):
    path, tokenizer = folder(config, post)
    bos = [tokenizer.token_to_id(BOS)] if config == "AstrAI's keys" else []
    pair = {"chosen": CONVERSATIONS[0], "rejected": messages(("user", "2 + 2?"), ("assistant", "5"))}
    store, _ = build(tmp_path, PAIRS, [pair], path)
    for key in ("chosen", "rejected"):
        assert records_of(store, key) == [bos + rendered(tokenizer, pair[key])]


@pytest.mark.parametrize(("config", "post"), FOLDERS)
def test_instructions_have_the_tokens_of_astrai_and_eos_at_their_end(tmp_path, folder, config, post):
    """AstrAI has the EOS of a post-processor behind the prompt, where it is masked."""
    path, tokenizer = folder(config, post)
    store, report = build(tmp_path, INSTRUCTION, [{"prompt": "1 + 1 = ", "response": "2"}], path)
    theirs = tokenizer.encode("1 + 1 = ").ids + bare(tokenizer, "2")
    (ours,) = records_of(store, "sequence")
    eos = tokenizer.token_to_id(EOS)
    moved = [token for token in theirs if token != eos] + [eos] * theirs.count(eos)
    assert ours == moved
    assert records_of(store, "loss_mask") == [
        [0] * (len(ours) - 1 - theirs.count(eos)) + [1] * (1 + theirs.count(eos))
    ]
    assert dict(report.notes) == ({"eos_at_end": 1} if eos in theirs else {})


@pytest.mark.parametrize("sections", [(False, False), (True, True)])
def test_sections_that_say_so_begin_anew(tmp_path, folder, sections):
    path, tokenizer = folder("HF keys", "both")
    fields = [
        {"field": field, "action": action, "add_special_tokens": anew}
        for (field, action), anew in zip((("prompt", "mask"), ("response", "train")), sections, strict=True)
    ]
    store, report = build(tmp_path, {"input": {"sections": fields}}, [{"prompt": "a", "response": "b"}], path)
    expected = [
        tokenizer.encode(text, add_special_tokens=anew).ids for text, anew in zip("ab", sections, strict=True)
    ]
    assert records_of(store, "sequence") == [expected[0] + expected[1]]
    assert dict(report.notes) == {}


def test_only_what_an_answer_says_is_trained_and_its_end_of_turn(tmp_path, folder):
    """AstrAI trains on its header and on the line end after it as well."""
    path, tokenizer = folder("AstrAI's keys", "none")
    store, report = build(tmp_path, CHAT, [{"messages": turns} for turns in CONVERSATIONS], path)
    for index, answers in enumerate((["4 "], ["b", "d"])):
        record = store.fetch_record(index)
        trained = record["sequence"][record["loss_mask"] == 1].tolist()
        assert trained == [token for answer in answers for token in bare(tokenizer, answer + END)]
    assert dict(report.notes) == {"header_not_trained": 2}


GROUP = {"prompt": "2 + 2?", "responses": ["4", "five"], "rewards": [1.0, 0.25]}


@pytest.mark.parametrize("config", CONFIGS)
def test_groups_of_text_have_the_tokens_of_astrai(tmp_path, folder, config):
    path, tokenizer = folder(config, "none")
    store, _ = build(tmp_path, group({"add_special_tokens": True}), [GROUP], path)
    assert records_of(store, "prompts") == [bare(tokenizer, "2 + 2?")]
    assert records_of(store, "responses") == [[bare(tokenizer, text) for text in ("4", "five")]]
    assert records_of(store, "masks") == [[[1], [1, 1, 1, 1]]]
    assert records_of(store, "rewards") == [[1.0, 0.25]]


def test_groups_of_messages_are_what_the_model_meets(tmp_path, folder):
    """AstrAI has neither the generation prompt nor the end of turn."""
    path, tokenizer = folder("AstrAI's keys", "none")
    record = {**GROUP, "prompt": messages(("user", "2 + 2?"))}
    store, report = build(tmp_path, group({"template": True}), [record], path)
    theirs = [tokenizer.token_to_id(BOS), *rendered(tokenizer, record["prompt"])]
    assert records_of(store, "prompts") == [theirs + bare(tokenizer, f"{START}assistant\n")]
    assert records_of(store, "responses") == [[bare(tokenizer, text + END) for text in ("4", "five")]]
    assert dict(report.notes) == {"response_is_message": 1}


def test_texts_and_chats_of_one_tokenizer_are_mixed_in_a_run(tmp_path, folder):
    path, _ = folder("AstrAI's keys", "none")
    build(tmp_path, TEXT, [{"text": "The mill stands by the river."}] * 9, path, "texts")
    build(tmp_path, CHAT, [{"messages": CONVERSATIONS[0]}] * 9, path, "chats")
    (tmp_path / "run.toml").write_text(
        '[run]\nsteps = 2\nglobal_batch_size = 2\nseq_len = 16\nweights = "tokens"\n'
        '[[sources]]\nname = "texts"\nstore = "texts"\n[[sources]]\nname = "chats"\nstore = "chats"\n'
    )
    assert tm.Run.from_toml(tmp_path / "run.toml").loader()[1]["input_ids"].shape == (2, 16)


def test_a_post_processor_that_adds_more_is_refused(tmp_path, folder):
    path, tokenizer = folder("nothing", "none")
    placed = [(name, tokenizer.token_to_id(name)) for name in (BOS, EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} {EOS} $A", special_tokens=placed)
    tokenizer.save(str(path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"at most one token before and after a text, got \['<s>', '</s>'\]"):
        Pipeline(TEXT, [tmp_path], tmp_path / "out", path)


# Raw records as a dataset.


@pytest.mark.parametrize("prompt", ["input", "prompt"])
@pytest.mark.parametrize("post", ["none", "bos"])
@pytest.mark.parametrize("is_list", [False, True])
def test_raw_pairs_go_through_the_chat_template(tmp_path, folder, prompt, post, is_list):
    path, tokenizer = folder("HF keys", post)
    asked, answers = messages(("user", "2 + 2?")), {"chosen": "4", "rejected": "five"}
    record = {prompt: asked if is_list else "2 + 2?"}
    record |= {key: messages(("assistant", text)) if is_list else text for key, text in answers.items()}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(record) + "\n")
    (item,) = DatasetFactory.load("dpo", tmp_path / "pairs.jsonl", tokenizer_path=str(path))
    bos = [tokenizer.token_to_id(BOS)] if post == "bos" else []
    for key, text in answers.items():
        assert item[key].tolist() == bos + rendered(tokenizer, asked + messages(("assistant", text)))
        assert item[key][item[f"{key}_mask"]].tolist() == bare(tokenizer, text + END)


@pytest.mark.parametrize("kind", ["seq", "sft"])
def test_raw_messages_are_chats_of_either_type(tmp_path, folder, kind):
    path, tokenizer = folder("AstrAI's keys", "none")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in CONVERSATIONS))
    dataset = DatasetFactory.load(kind, tmp_path, 8, tokenizer_path=str(path))
    stream = [
        token for turns in CONVERSATIONS for token in [tokenizer.token_to_id(BOS), *rendered(tokenizer, turns)]
    ]
    assert dataset[1]["input_ids"].tolist() == stream[8:16]
    assert dataset.token_count == len(stream)


# What messages advise.


def test_errors_advise_keys_of_the_recipe_and_arguments_of_run(tmp_path, folder):
    path, _ = folder("nothing", "none")
    (path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"got none in .*; set chat_template=...: chatml, or the path"):
        build(tmp_path, CHAT, [{"messages": CONVERSATIONS[0]}], path)
    calls = [("dpo", {"chosen": CONVERSATIONS[0], "rejected": CONVERSATIONS[0]}), ("text", {"body": "x"})]
    for config, record in calls:
        with pytest.raises(DocumentError) as error:
            build(tmp_path, config, [record], path, config)
        assert "--" not in str(error.value)
        assert str(error.value).count("chat_template") <= 1
        assert str(error.value).endswith('or skip bad ones with on_error="skip"')
