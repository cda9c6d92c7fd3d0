"""Control strings in raw text: as text, as ids, or taken out; also where they are words of the model."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.encode.chat.conftest import REAL as TOKENIZERS
from tests.encode.conftest import CORPUS, trained_pieces
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HuggingFace

from tokenmill.encode.engines import ADVERSARIAL, engines_of, open_tokenizer, placeholder
from tokenmill.encode.tokenizer import CONTROL_POLICIES, control_pattern, with_policy, without_controls
from tokenmill.errors import ConfigError, TokenizerError

BYTE_TOKENIZER = open_tokenizer("bytes")
NAMES = list(BYTE_TOKENIZER.special_ids)


def encoded_by(policy, texts, tokenizer=BYTE_TOKENIZER):
    found = with_policy(tokenizer, policy).encode(texts)
    return [found.ids[a:b].tolist() for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", CONTROL_POLICIES)
def test_every_control_string_is_treated_as_the_policy_says(specs, policy):
    """[T2.b, S.i]"""
    for spec in specs.values():
        tokenizer = open_tokenizer(spec, engine=engines_of(spec)[-1])
        for name, control in tokenizer.special_ids.items():
            texts = [name, f"a {name}{name} b", "nothing", ""]
            found = encoded_by(policy, texts, tokenizer)
            counts = [ids.count(control) for ids in found]
            assert counts == ([1, 2, 0, 0] if policy == "encode" else [0, 0, 0, 0]), (spec, name)
            if policy == "drop":
                assert found == encoded_by("text", ["", "a  b", "nothing", ""], tokenizer)


@given(
    st.lists(st.lists(st.sampled_from(["a", "ü ", "<|", "|>", "eos", *NAMES]), max_size=8).map("".join), max_size=5)
)
def test_encoded_control_strings_are_the_text_with_ids_in_their_places(texts):
    found = encoded_by("encode", texts)
    assert [BYTE_TOKENIZER.decode(np.array(ids, np.int64)) for ids in found] == texts
    pattern = "|".join(map(re.escape, NAMES))
    for ids, text in zip(found, texts, strict=True):
        assert [i for i in ids if i >= 256] == [BYTE_TOKENIZER.special_ids[n] for n in re.findall(pattern, text)]


def test_what_is_taken_out_cannot_join_to_another():
    assert encoded_by("drop", ["<|eo<|bos|>s|>x"]) == [[ord("x")]]


def without_naively(text, names):
    while match := control_pattern(names).search(text):
        text = text[: match.start()] + text[match.end() :]
    return text


@given(
    text=st.text("abc", max_size=40),
    names=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4, unique=True).map(tuple),
)
@example("xabcd", ("ab", "cd", "xc"))
@example("abcabcc", ("abc", "ab", "bb"))
def test_dropping_is_removing_the_first_until_none_is_left(text, names):
    assert without_controls(text, names) == without_naively(text, names)


@pytest.mark.parametrize(("opening", "closing"), [("<|eos", "|>"), ("<|eo<|bos|>s", "|>"), ("<|e", "os|>")])
def test_control_strings_nested_in_a_megabyte_are_dropped_in_one_pass(opening, closing):
    """Repeated passes take minutes: the first of these has 150,000 levels."""
    depth = (1 << 20) // len(opening + closing)
    assert without_controls(opening * depth + closing * depth, tuple(NAMES)) == ""


def test_an_unknown_policy_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"control_strings: expected one of text, encode, drop, got 'encod'; did you"
    ):
        with_policy(BYTE_TOKENIZER, "encod")


# Models that have control strings among their words.

CONTROLS = ["<pad>", "</s>", "<s>", "<extra_id_0>"]
WORDS = [
    "the",
    " grain",
    "mill",
    "</",
    "s>",
    "<",
    ">",
    "/",
    "s",
    " ",
    "\n",
    "ü",
    "ﬁ",
    "＜/s＞",
    "中",
    "\x00",
    *CONTROLS,
]
TEXTS = st.lists(st.sampled_from([*WORDS, *CONTROLS]), max_size=9).map("".join)


def unigram() -> HuggingFace:
    """As T5 is: every control string is a piece, and an EOS behind every text."""
    native = HuggingFace(models.Unigram())
    native.normalizer = normalizers.NFKC()
    native.pre_tokenizer = pre_tokenizers.Metaspace()
    native.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=[*CONTROLS, "<unk>"], unk_token="<unk>", show_progress=False
    )
    native.train_from_iterator(CORPUS, trainer)
    native.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", native.token_to_id("</s>"))]
    )
    return native


def word_level() -> HuggingFace:
    native = HuggingFace(models.WordLevel(unk_token="<unk>"))
    native.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(special_tokens=[*CONTROLS, "<unk>"], show_progress=False)
    native.train_from_iterator(CORPUS, trainer)
    return native


def word_piece() -> HuggingFace:
    native = HuggingFace(models.WordPiece(unk_token="<unk>"))
    native.normalizer = normalizers.BertNormalizer()
    native.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=[*CONTROLS, "<unk>"], show_progress=False)
    native.train_from_iterator(CORPUS, trainer)
    return native


def merges() -> HuggingFace:
    """As InternLM2 is: no added token at all, and BPE merges that make `</s>`."""
    native = HuggingFace(models.BPE(unk_token="<unk>", byte_fallback=False))
    native.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    plain = [text for text in CORPUS if text.isascii() and len(text) < 100]
    native.train_from_iterator([*plain, *(["</s> <s> <pad> <extra_id_0> </s>"] * 500)], trainer)
    value = json.loads(native.to_str())
    value["added_tokens"] = []
    assert "</s>" in value["model"]["vocab"]
    return HuggingFace.from_str(json.dumps(value))


MODELS = {"unigram": unigram, "word level": word_level, "word piece": word_piece, "merges": merges}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """Return the path of a tokenizer, and the reference: the same with EOS as a control string."""
    native = MODELS[request.param]()
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_text(native.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "</s>"}))
    native.add_special_tokens([AddedToken("</s>", normalized=False, special=True)])
    return str(folder), native


def reference_ids(native, texts, *, controls):
    native.encode_special_tokens = not controls
    return [native.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("engine", ["fastokens", "tokenizers"])
def test_text_never_gives_a_control_id_though_the_model_has_the_word(model, engine):
    """[S.i] Every other text has the ids of the reference."""
    spec, native = model
    tokenizer = opened(spec, engine)
    controls = set(tokenizer.special_ids.values()) - {native.token_to_id("<unk>")}

    @settings(deadline=None, max_examples=60, database=None)
    @given(st.lists(TEXTS, max_size=4))
    def check(texts):
        found = encoded_by("text", texts, tokenizer)
        for ids, expected in zip(found, reference_ids(native, texts, controls=False), strict=True):
            assert controls.isdisjoint(ids)
            assert ids == expected or not controls.isdisjoint(expected)

    check()
    assert not controls.isdisjoint(reference_ids(native, ["a </s> b", "</s>"], controls=False)[1])


@pytest.mark.parametrize("engine", ["fastokens", "tokenizers"])
def test_encoded_control_strings_have_the_ids_of_the_reference(model, engine):
    """[T2.b]"""
    spec, native = model
    tokenizer = opened(spec, engine)

    @settings(deadline=None, max_examples=60, database=None)
    @given(st.lists(TEXTS, max_size=4))
    def check(texts):
        assert encoded_by("encode", texts, tokenizer) == reference_ids(native, texts, controls=True)

    check()


@pytest.mark.parametrize("engine", ["fastokens", "tokenizers"])
def test_dropped_control_strings_leave_the_ids_of_the_text_without_them(model, engine):
    spec, native = model
    tokenizer = opened(spec, engine)
    names = [name for name in tokenizer.special_ids if name != "<unk>"]
    texts = [f"the {name}mill{name}" for name in names]
    expected = reference_ids(native, ["the mill"], controls=False)
    assert encoded_by("drop", texts, tokenizer) == expected * len(texts)


def opened(spec, engine):
    try:
        return open_tokenizer(spec, engine=engine)
    except TokenizerError as error:
        if engine == "fastokens" and "must load" in str(error):
            pytest.skip(f"it leaves this model to the reference: {error.__cause__}")
        raise


def test_a_text_that_holds_the_placeholder_is_encoded_as_well(tmp_path):
    """S.i: who knows how it is done still cannot spell EOS."""
    (tmp_path / "tokenizer.json").write_text(unigram().to_str(), encoding="utf-8")
    tokenizer = open_tokenizer(str(tmp_path), engine="tokenizers")
    assert tokenizer.identity.eos_id == tokenizer.special_ids["</s>"]
    spelled = ["</s>" + "".join(placeholder(number, word) for word in range(4)) for number in (0, 1, 7)]
    hostile = [*spelled, "".join(spelled)]
    for ids in encoded_by("text", hostile, tokenizer):
        assert not set(tokenizer.special_ids.values()) - {tokenizer.special_ids["<unk>"]} & set(ids)


@pytest.mark.parametrize("name", [".", "ab"])
def test_an_eos_without_which_texts_would_lose_letters_is_refused(tmp_path, name):
    """BPE drops a letter that it does not know, without a word."""
    model = {"type": "BPE", "vocab": {"a": 0, ".": 1, "ab": 2, "c": 3}, "merges": []}
    value = {"version": "1.0", "added_tokens": [], "model": {**model, "ignore_merges": True}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    assert open_tokenizer(str(tmp_path), engine="tokenizers").encode(["a."]).ids.tolist() == [0, 1]
    with pytest.raises(TokenizerError, match=r"letter by letter, got a model without '[.b]'; name another"):
        open_tokenizer(str(tmp_path), eos_token=name, engine="tokenizers")


def test_words_that_the_model_lacks_are_spelled_as_sentencepiece_spells_them(tmp_path):
    """The same Unigram model, run by SentencePiece, to which control strings are no words."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = trained_pieces("unigram", normalization_rule_name="identity")
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    native = HuggingFace(
        models.Unigram([(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(len(pieces))], unk_id=0)
    )
    native.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    native.add_special_tokens(["<s>", "</s>"])
    (tmp_path / "tokenizer.json").write_text(native.to_str(), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    tokenizer = open_tokenizer(str(tmp_path), engine="tokenizers")
    texts = ["the </s> mill", "</s>", "a<s>b</s></s>", "grain"]
    assert encoded_by("text", texts, tokenizer) == [pieces.encode(text) for text in texts]


SPELLED = {"internlm2": ("<s>", "</s>"), "command_r_plus": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["internlm2", pytest.param("command_r_plus", marks=pytest.mark.deep)])
def test_real_models_that_spell_their_eos_have_the_ids_of_the_reference(name):
    """[S.i] InternLM2's is merged by its model, Command R+'s is an added token like any other."""
    folder = TOKENIZERS / name
    if not folder.is_dir():
        pytest.skip(f"the tokenizer {name} is not there: run tools/fetch_tokenizers.py")
    bos, eos = SPELLED[name]
    native = HuggingFace.from_file(str(folder / "tokenizer.json"))
    native.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in SPELLED[name]])
    tokenizer = open_tokenizer(str(folder))
    assert [tokenizer.special_ids[bos], tokenizer.special_ids[eos]] == [
        tokenizer.identity.bos_id,
        tokenizer.identity.eos_id,
    ]
    texts = [*ADVERSARIAL, f"a {eos}{bos} b", eos, f"x{eos}y <|im_end|>"]
    assert encoded_by("encode", texts, tokenizer) == reference_ids(native, texts, controls=True)
    found = encoded_by("text", texts, tokenizer)
    controls = {tokenizer.identity.bos_id, tokenizer.identity.eos_id}
    for ids, expected in zip(found, reference_ids(native, texts, controls=False), strict=True):
        assert controls.isdisjoint(ids)
        assert ids == expected or not controls.isdisjoint(expected)
    assert [tokenizer.decode(np.array(ids, np.uint32)) for ids in found[-3:]] == [
        native.decode(ids, skip_special_tokens=False) for ids in found[-3:]
    ]
