"""Opening tokenizers by what names them."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tokenmill.encode.engines import open_tokenizer
from tokenmill.errors import TokenizerError

ALL = [
    ("bytes", "bytes"),
    ("tiny", "fastokens"),
    ("tiny", "tokenizers"),
    ("claude", "tokenizers"),
    ("r50k", "fastokens"),
    ("r50k", "tiktoken"),
    ("p50k", "tiktoken"),
    ("cl100k", "fastokens"),
    ("cl100k", "tiktoken"),
    ("o200k", "fastokens"),
    ("o200k", "tiktoken"),
]


@pytest.mark.parametrize(("name", "engine"), ALL)
def test_control_strings_in_raw_text_are_ordinary_text(opened, name, engine):
    """S.i, T2.b: no control id comes out of a text that spells any control string, by any engine."""
    tokenizer = opened(name, engine)
    assert tokenizer.special_ids
    texts = [
        shown
        for control in tokenizer.special_ids
        for shown in (control, control * 2, f"x{control}y", f" {control} ", f"\n{control}\n")
    ]
    encoded = tokenizer.encode(texts)
    assert set(encoded.ids.tolist()) & set(tokenizer.special_ids.values()) == set()
    ends = encoded.offsets.tolist()
    assert [tokenizer.decode(encoded.ids[a:b]) for a, b in pairwise(ends)] == texts


@pytest.mark.parametrize(("name", "engine"), ALL)
def test_every_id_is_inside_the_vocabulary(opened, name, engine):
    """T2.a: what `vocab_size` promises, for control ids and for text."""
    tokenizer = opened(name, engine)
    size = tokenizer.identity.vocab_size
    assert max(tokenizer.special_ids.values()) < size
    assert int(tokenizer.encode(["Any text, \U0001f469\u200d\U0001f469 中文\n"]).ids.max()) < size


@pytest.mark.parametrize(
    ("name", "engines"), [("tiny", ("fastokens", "tokenizers")), ("r50k", ("fastokens", "tiktoken"))]
)
def test_engines_share_one_identity(opened, name, engines):
    fast, reference = (opened(name, engine) for engine in engines)
    assert fast.identity == reference.identity
    assert (fast.engine.split()[0], reference.engine.split()[0]) == engines
    assert dict(fast.special_ids) == dict(reference.special_ids)


def test_a_folder_and_its_file_are_one_tokenizer(specs):
    folder = open_tokenizer(specs["tiny"])
    assert open_tokenizer(str(Path(specs["tiny"]) / "tokenizer.json")).identity == folder.identity


def test_auto_is_the_fast_engine(specs):
    assert open_tokenizer(specs["tiny"]).engine.startswith("fastokens ")


def test_the_first_word_of_the_engine_opens_the_same(opened, specs):
    for name, engine in ALL[:4]:
        tokenizer = opened(name, engine)
        assert open_tokenizer(specs[name], engine=tokenizer.engine.split()[0]).engine == tokenizer.engine


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt2", r"tokenizer 'gpt2': must be 'bytes', a tokenizer.json.*does not exist; nothing is downloaded"),
        ("no/such/tokenizer.json", "does not exist"),
        ("tiktoken:no/such/file", "must name a rank file, got 'no/such/file', which is no file"),
        ("tiktoken:", "must name a rank file"),
        ("some/cl100k_base.tiktoken", "write 'tiktoken:some/cl100k_base.tiktoken'"),
        ("", r"folder must hold a tokenizer.json|does not exist"),
    ],
)
def test_a_spec_that_names_nothing_says_what_can_be_named(spec, message):
    with pytest.raises(TokenizerError, match=message):
        open_tokenizer(spec)


def test_a_folder_without_a_tokenizer_says_what_it_holds(tmp_path):
    (tmp_path / "vocab.txt").touch()
    with pytest.raises(TokenizerError, match=r"must hold a tokenizer.json, got vocab.txt; save it"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "engine", "known"),
    [("bytes", "tokenizers", "auto, bytes"), ("tiny", "tiktoken", "auto, fastokens, tokenizers")],
)
def test_an_engine_of_another_kind_is_refused(specs, name, engine, known):
    with pytest.raises(TokenizerError, match=f"must be one of {known}, got '{engine}'"):
        open_tokenizer(specs[name], engine=engine)


def test_options_reach_the_identity():
    identity = open_tokenizer("bytes", add_bos=False, eos_token="<|pad|>").identity
    assert (identity.add_bos, identity.add_eos, identity.eos_id) == (False, True, 258)


FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
WORDS = {"type": "WordLevel", "vocab": {"hello": 0, "<s>": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
PIECES = {
    "type": "Unigram",
    "unk_id": 0,
    "vocab": [["<unk>", 0.0], ["<s>", 0.0], ["<", -2.0], ["s", -2.0], [">", -2.0], ["x", -2.0]],
}
MERGES = {
    "type": "BPE",
    "vocab": {"s": 0, "<s>": 1, "<": 2, ">": 3, "<s": 4},
    "merges": [["<", "s"], ["<s", ">"]],
}


def write_model(folder, model, **added):
    tokens = [{"id": id_, "content": name, **FLAGS} for name, id_ in added.items()]
    value = {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": tokens, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(value))
    return str(folder)


@pytest.mark.parametrize("model", [WORDS, PIECES, MERGES])
def test_a_model_that_can_spell_a_control_string_is_refused(tmp_path, model):
    """S.i: the engine is told not to match it, but the model would."""
    with pytest.raises(TokenizerError, match=r"raw text must not give control ids, got id 1 for the text '<s>'"):
        open_tokenizer(write_model(tmp_path, model, **{"<s>": 1}), engine="tokenizers")


@pytest.mark.parametrize("engine", ["fastokens", "tokenizers"])
def test_an_eos_that_is_not_marked_special_is_refused(write, engine):
    """S.i: raw text would give it."""
    with pytest.raises(TokenizerError, match=r"for the text '<tool>'.*mark it as special in the file"):
        open_tokenizer(write(), eos_token="<tool>", engine=engine)


def test_the_unknown_token_may_come_out_of_text(tmp_path):
    spec = write_model(tmp_path, WORDS, **{"[UNK]": 2})
    assert open_tokenizer(spec, engine="tokenizers").encode(["hello you"]).ids.tolist() == [0, 2]


def test_an_unknown_token_that_is_also_eos_is_refused(tmp_path):
    """T2.b: else any unknown word would end a document."""
    with pytest.raises(TokenizerError, match=r"got id 2 for the text '\[UNK\]'"):
        open_tokenizer(write_model(tmp_path, WORDS, **{"[UNK]": 2}), eos_token="[UNK]", engine="tokenizers")
