"""The fast engine is proved before it is trusted."""

import json
import sys
from importlib.metadata import version

import pytest
from tokenizers import Tokenizer as HuggingFace
from tokenizers import models, pre_tokenizers, trainers

from tokenmill.encode import engines
from tokenmill.encode.engines import ADVERSARIAL, first_difference, open_tokenizer, texts_to_compare, trusted
from tokenmill.errors import TokenizerError


def difference(fast, reference, sample):
    texts = texts_to_compare(reference, sample)
    return first_difference(texts, fast.encode(texts), reference.encode(texts))


@pytest.mark.parametrize(
    ("name", "reference"),
    [("tiny", "tokenizers"), ("r50k", "tiktoken"), ("cl100k", "tiktoken"), ("o200k", "tiktoken")],
)
def test_engines_agree_on_all_hard_texts(opened, name, reference):
    assert difference(opened(name), opened(name, reference), ["a sample"]) is None


def test_what_is_compared_is_the_sample_then_hard_texts_then_own_control_strings(opened):
    texts = texts_to_compare(opened("tiny"), ["first", "second"])
    assert texts[:2] == ["first", "second"]
    assert tuple(texts[2 : 2 + len(ADVERSARIAL)]) == ADVERSARIAL
    assert texts[2 + len(ADVERSARIAL) :][:3] == ["<s>", "see <s><s>in text", "x <s> y"]


def test_the_first_text_that_differs_is_shown_from_the_first_token_that_differs(opened, write):
    def forget(value):
        value["pre_tokenizer"]["use_regex"] = False

    plain, other = opened("tiny"), open_tokenizer(write(forget), engine="tokenizers")
    sample = ["same", "no space at all "]
    found = difference(plain, other, sample)
    assert found is not None
    theirs = other.encode([found.text]).ids.tolist()
    ours = plain.encode([found.text]).ids.tolist()
    assert ours[: found.index] == theirs[: found.index]
    assert ours[found.index : found.index + 8] == list(found.fast_ids)
    assert theirs[found.index : found.index + 8] == list(found.reference_ids)
    assert found.fast_ids != found.reference_ids


def test_a_tail_that_one_engine_lacks_is_a_difference():
    whole = open_tokenizer("bytes")

    class Cut:
        identity, engine, special_ids = whole.identity, "cut 1", whole.special_ids

        def encode(self, texts):
            return whole.encode([text[:-1] for text in texts])

    found = difference(Cut(), whole, ["abc"])
    assert (found.text, found.index, found.fast_ids, found.reference_ids) == ("abc", 2, (), (99,))


@pytest.mark.parametrize("name", ["bytes", "tiny", "r50k"])
def test_an_engine_that_agrees_is_used_in_silence(opened, specs, name):
    tokenizer, reason = trusted(specs[name], ["some text"])
    assert (tokenizer.engine, reason) == (opened(name).engine, None)


@pytest.mark.parametrize(
    ("name", "why"), [("claude", "unsupported normalizer type: NFKC"), ("p50k", "50256 is missing")]
)
def test_a_file_that_the_fast_engine_refuses_falls_back_loudly(specs, name, why):
    tokenizer, reason = trusted(specs[name], ["some text"])
    assert tokenizer.engine.split()[0] in ("tokenizers", "tiktoken")
    assert reason is not None
    assert reason.startswith(f"tokenizer {specs[name]!r}: fastokens ")
    assert why in reason
    assert reason.endswith(f"so the slower engine {tokenizer.engine} is used")
    assert "\n" not in reason


@pytest.fixture(scope="module")
def unsplit() -> dict:
    """Train a byte-level BPE that merges across anything, so that any pattern before it shows in the ids."""
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    native = HuggingFace(models.BPE())
    native.pre_tokenizer = bytes_only
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=sorted(bytes_only.alphabet()), show_progress=False
    )
    native.train_from_iterator([*ADVERSARIAL] * 3, trainer)
    return json.loads(native.to_str())


@pytest.mark.parametrize("pattern", [r"\h+", r"\w+", r"[[:alpha:]]+", r"\p{Han}+"])
def test_a_pattern_that_the_fast_engine_reads_differently_falls_back_loudly(tmp_path, unsplit, pattern):
    """These files load without a word in fastokens, and get other ids."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    value = {**unsplit, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, unsplit["pre_tokenizer"]]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")
    tokenizer, reason = trusted(str(tmp_path), ["plain words"])
    assert tokenizer.engine.startswith("tokenizers ")
    assert reason is not None
    assert " differ on the text " in reason
    assert " instead of [" in reason
    assert reason.endswith(f"so the slower engine {tokenizer.engine} is used")


@pytest.mark.parametrize(
    ("name", "text"), [("r50k", "b \u180e! \u180e/ \u180e_"), ("o200k", "\u017f'\u017f'LLLL \u6587'\u017f'SL")]
)
def test_hard_texts_would_show_what_is_left_to_the_reference(opened, monkeypatch, name, text):
    """If texts with these characters went to the fast engine and it still erred there, it would not be trusted."""
    fast_tokenizer, reference = opened(name), opened(name, "tiktoken")
    monkeypatch.setattr(engines, "DIVERGENT", ())
    errs = fast_tokenizer.encode([text]).ids.tolist() != reference.encode([text]).ids.tolist()
    assert (difference(fast_tokenizer, reference, []) is not None) == errs
    if version("fastokens") == "0.3.5":
        assert errs


def test_the_sample_alone_can_show_a_difference(opened, write):
    """A difference that no hard text has: an added word that only the sample holds."""

    def rename(value):
        value["added_tokens"][-1]["content"] = "<millstone>"

    other = open_tokenizer(write(rename), engine="tokenizers")
    found = difference(opened("tiny"), other, ["plain", "a <millstone>"])
    assert found is not None
    assert found.text == "a <millstone>"
    assert difference(opened("tiny"), other, ["plain"]) is None


def test_without_the_fast_engine_the_reference_is_used_loudly(specs, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    tokenizer, reason = trusted(specs["tiny"])
    assert tokenizer.engine.startswith("tokenizers ")
    assert reason is not None
    assert reason.endswith(f"so the slower engine {tokenizer.engine} is used")


def test_options_reach_the_trusted_tokenizer(specs):
    tokenizer, _ = trusted(specs["tiny"], add_bos=False, eos_token="<pad>")
    assert (tokenizer.identity.add_bos, tokenizer.identity.eos_id) == (False, 2)


def test_a_sample_that_is_not_unicode_is_an_error_not_a_fallback(specs):
    with pytest.raises(TokenizerError, match="text 1 of the batch must be valid Unicode"):
        trusted(specs["tiny"], ["fine", "\ud800"])


def test_a_file_that_no_engine_reads_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Nonsense", "vocab": {"a": 0}}}')
    with pytest.raises(TokenizerError, match=r"tokenizers .*: must load"):
        trusted(str(tmp_path))


def test_hard_texts_are_valid_and_distinct():
    assert len(set(ADVERSARIAL)) == len(ADVERSARIAL)
    assert all(text.encode().decode() == text for text in ADVERSARIAL)
