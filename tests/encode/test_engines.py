"""Engines: opening them, what they give, and whether they agree."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFace
from tokenizers import models, pre_tokenizers, trainers

from tokenmill.encode import engines
from tokenmill.encode.engines import (
    ADVERSARIAL,
    DIVERGENT,
    _difference,
    engines_of,
    open_tokenizer,
    texts_to_compare,
    trusted,
)
from tokenmill.encode.tokenizer import Framing
from tokenmill.errors import ConfigError, TokenizerError

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


@pytest.mark.slow
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


@pytest.mark.slow
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
        ("gpt2", r"tokenizer not found: 'gpt2'; pass 'bytes', .*did you mean 'hf:gpt2'\?$"),
        ("openai-community/gpt2", r"did you mean 'hf:openai-community/gpt2'\?$"),
        ("hf:", r"'hf:': expected hf:NAME or hf:NAME@REVISION"),
        ("hf:a/b/c", "expected hf:NAME"),
        ("hf:org/name:en", "expected hf:NAME"),
        ("hf:../x", "not a valid name of a repository"),
        ("no/such/tokenizer.json", "tokenizer not found: "),
        ("tiktoken:no/such/file", "must name a rank file, got 'no/such/file', which is no file"),
        ("tiktoken:", "must name a rank file"),
        ("some/cl100k_base.tiktoken", "write 'tiktoken:some/cl100k_base.tiktoken'"),
        ("no/such/folder/", "tokenizer not found: "),
    ],
)
def test_a_spec_that_names_nothing_says_what_can_be_named(spec, message):
    with pytest.raises(TokenizerError, match=message):
        open_tokenizer(spec)


def test_an_empty_spec_is_refused():
    with pytest.raises(ConfigError, match=r"tokenizer: expected a path, got ''; give a string"):
        open_tokenizer("")


def test_a_folder_without_a_tokenizer_says_what_it_holds(tmp_path):
    (tmp_path / "vocab.txt").touch()
    with pytest.raises(TokenizerError, match=r"or a tokenizer.model, got vocab.txt; save it"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "engine", "known"),
    [("bytes", "tokenizers", "auto, bytes"), ("tiny", "tiktoken", "auto, fastokens, tokenizers")],
)
def test_an_engine_of_another_kind_is_refused(specs, name, engine, known):
    with pytest.raises(ConfigError, match=f"must be one of {known}, got '{engine}'"):
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
def test_a_model_that_can_spell_a_control_string_is_kept_from_it(tmp_path, model):
    """S.i: the engine is told not to match it, but the model would."""
    tokenizer = open_tokenizer(write_model(tmp_path, model, **{"<s>": 1}), engine="tokenizers")
    assert 1 in tokenizer.to_ids("<s>")
    assert 1 not in tokenizer.encode(["<s>", "s<s>s"]).ids


@pytest.mark.parametrize("engine", ["fastokens", "tokenizers"])
def test_an_eos_that_is_not_marked_special_is_a_control_string(write, tiny, engine):
    """S.i: raw text would give it, as with Command R+."""
    tokenizer = open_tokenizer(write(), eos_token="<tool>", engine=engine)
    eos = tokenizer.identity.eos_id
    assert (eos, tokenizer.special_ids["<tool>"]) == (tiny["added_tokens"][-1]["id"],) * 2
    assert eos not in tokenizer.encode(["<tool>", "a <tool> b"]).ids
    assert tokenizer.encode_with_controls(["<tool>"]).ids.tolist() == [eos]


def test_the_unknown_token_may_come_out_of_text(tmp_path):
    spec = write_model(tmp_path, WORDS, **{"[UNK]": 2})
    assert open_tokenizer(spec, engine="tokenizers").encode(["hello you"]).ids.tolist() == [0, 2]


def test_an_unknown_token_that_is_also_eos_is_refused(tmp_path):
    """T2.b: else any unknown word would end a document."""
    with pytest.raises(TokenizerError, match=r"got id 2 \('\[UNK\]'\) for .*; name another BOS or EOS"):
        open_tokenizer(write_model(tmp_path, WORDS, **{"[UNK]": 2}), eos_token="[UNK]", engine="tokenizers")


PAIRS = ["tiny", "r50k", "cl100k", "o200k"]

HARD = (
    "aZ 09'sS\n\r\t.<|>_\u0301\u00e9\u017f\u180e\u00a0\u2028\u3000\u200d\U0001f469\U0001f3fd"
    "中ア\x00\ufeff٣½ا\u0130\u01c5"
)
SPELLED = st.lists(st.sampled_from(["<|endoftext|>", "<s>", " ", "x"])).map("".join)
TEXT = st.one_of(st.text(), st.text(alphabet=HARD), SPELLED)


def reference_of(name, specs):
    return engines_of(specs[name])[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_ids_are_those_of_the_reference_for_any_texts(opened, specs, name):
    fast, reference = opened(name), opened(name, reference_of(name, specs))
    assert fast.engine.startswith("fastokens ")

    @settings(deadline=None, max_examples=80, database=None)
    @given(st.lists(TEXT, max_size=4))
    def check(texts):
        ours, theirs = fast.encode(texts), reference.encode(texts)
        assert ours.offsets.tolist() == theirs.offsets.tolist()
        assert ours.ids.tolist() == theirs.ids.tolist()

    check()


@pytest.mark.parametrize("name", PAIRS)
def test_decode_undoes_encode(opened, name):
    tokenizer = opened(name)

    @settings(deadline=None, max_examples=40, database=None)
    @given(TEXT)
    def check(text):
        assert tokenizer.decode(tokenizer.encode([text]).ids) == text

    check()


@pytest.mark.parametrize("name", PAIRS)
def test_decode_is_that_of_the_reference_for_any_ids(opened, specs, name):
    fast, reference = opened(name), opened(name, reference_of(name, specs))

    @settings(deadline=None, max_examples=40, database=None)
    @given(st.lists(st.integers(0, fast.identity.vocab_size - 1)))
    def check(ids):
        assert fast.decode(np.array(ids, dtype=np.uint32)) == reference.decode(np.array(ids, dtype=np.uint32))

    check()


def test_a_file_without_a_decoder_is_decoded_as_the_reference_does(write):
    spec = write(lambda value: value.update(decoder=None))
    fast, reference = open_tokenizer(spec), open_tokenizer(spec, engine="tokenizers")
    ids = fast.encode(["some words, some more"]).ids
    assert fast.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("name", PAIRS)
def test_ids_are_flat_arrays_with_offsets(opened, name):
    encoded = opened(name).encode(["one", "", "two three"])
    assert (encoded.ids.dtype, encoded.offsets.dtype) == (np.uint32, np.int64)
    assert (encoded.ids.ndim, encoded.offsets.size, encoded.offsets[1]) == (1, 4, encoded.offsets[2])


@pytest.mark.parametrize("name", PAIRS)
def test_a_batch_is_its_texts_one_by_one(opened, name):
    texts = ["plain", f"a {DIVERGENT[0]} b", "", f"it'{DIVERGENT[1]} c", "end", DIVERGENT[0], "x"]
    tokenizer = opened(name)
    whole = tokenizer.encode(texts)
    parts = [tokenizer.encode([text]).ids.tolist() for text in texts]
    assert whole.ids.tolist() == [id_ for part in parts for id_ in part]
    assert np.diff(whole.offsets).tolist() == [len(part) for part in parts]


def test_no_texts_give_no_ids(opened):
    encoded = opened("tiny").encode([])
    assert (encoded.ids.tolist(), encoded.offsets.tolist()) == ([], [0])


@pytest.mark.parametrize("texts", [["a", "b\ud800"], [DIVERGENT[0], DIVERGENT[0] + "\udfff"]])
@pytest.mark.parametrize("name", PAIRS)
def test_a_lone_surrogate_is_refused_with_its_text(opened, name, texts):
    with pytest.raises(TokenizerError, match="text 1 of the batch must be valid Unicode"):
        opened(name).encode(texts)


def test_a_file_that_changed_since_is_not_used_as_reference(write):
    tokenizer = open_tokenizer(write())
    write(lambda value: value["model"]["merges"].pop())
    with pytest.raises(TokenizerError, match="the file must stay as it was"):
        tokenizer.encode([DIVERGENT[0]])


@pytest.mark.parametrize(("name", "why"), [("claude", "NFKC"), ("p50k", "token 50256 is missing")])
def test_what_it_does_not_support_is_refused_when_opened(specs, name, why):
    with pytest.raises(
        TokenizerError, match=f"fastokens .*: must load .*, got .*{why}.*; take the slower reference"
    ):
        open_tokenizer(specs[name], engine="fastokens")


def test_that_the_slower_engine_is_taken_is_told(write, capsys):
    spec = write(lambda value: value.update(normalizer={"type": "NFKC"}))
    assert open_tokenizer(spec).engine.startswith("tokenizers ")
    told = capsys.readouterr().err
    assert (
        f"warning: tokenizer {spec!r}: the slower engine 'tokenizers' is used, because the fast one fails" in told
    )
    assert "NFKC" in told
    assert open_tokenizer(spec, engine="tokenizers").engine.startswith("tokenizers ")
    assert open_tokenizer(write()).engine.startswith("fastokens ")
    assert capsys.readouterr().err == ""


FORK = """
import os, sys
from tokenmill.encode.engines import open_tokenizer
tokenizer = open_tokenizer(sys.argv[1], engine="tokenizers")
tokenizer.encode(["some text"] * 100)
child = os.fork()
if child == 0:
    tokenizer.encode(["some text"] * 100)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_prints_nothing(specs):
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, specs["tiny"]],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_nothing_is_cut_or_padded_whatever_the_file_says(write):
    def change(value):
        value["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        value["padding"] = {
            "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 2, "pad_type_id": 0, "pad_token": "<pad>",
        }  # fmt: skip

    texts = ["a", "one two three four five six seven " * 20]
    plain = open_tokenizer(write()).encode(texts)
    spec = write(change)
    for engine in ("fastokens", "tokenizers"):
        encoded = open_tokenizer(spec, engine=engine).encode(texts)
        assert encoded.offsets.tolist() == plain.offsets.tolist()
        assert encoded.ids.tolist() == plain.ids.tolist()


@pytest.mark.parametrize("engine", ["fastokens", "tokenizers"])
def test_the_template_of_the_file_adds_no_bos(opened, engine):
    """T2.b: the file says '<s> $A', but BOS is placed by `frame` alone."""
    tokenizer = opened("tiny", engine)
    encoded = tokenizer.encode(["text", ""])
    assert np.count_nonzero(encoded.ids == tokenizer.identity.bos_id) == 0
    assert encoded.offsets[1] == encoded.offsets[2]


@pytest.mark.parametrize("engine", ["fastokens", "tokenizers"])
def test_an_added_word_that_is_no_control_string_is_one_token(opened, tiny, engine):
    ids = opened("tiny", engine).encode(["<tool>"]).ids.tolist()
    assert ids == [tiny["added_tokens"][-1]["id"]]


@pytest.mark.parametrize(
    ("name", "engine"), [("tiny", "tokenizers"), ("claude", "tokenizers"), ("r50k", "tiktoken")]
)
def test_a_lone_surrogate_is_refused_with_its_text_by_the_reference(opened, name, engine):
    with pytest.raises(TokenizerError, match="text 1 of the batch must be valid Unicode"):
        opened(name, engine).encode(["a", "\ud800"])


@pytest.mark.parametrize(
    ("name", "engine"), [("tiny", "tokenizers"), ("claude", "tokenizers"), ("r50k", "tiktoken")]
)
def test_no_texts_give_no_ids_by_the_reference(opened, name, engine):
    encoded = opened(name, engine).encode([])
    assert (encoded.ids.tolist(), encoded.offsets.tolist()) == ([], [0])


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("r50k", "tiktoken", r"pip install 'tokenmill\[tiktoken\]'"),
        ("tiny", "tokenizers", "pip install tokenizers"),
    ],
)
def test_a_missing_library_says_what_to_install(specs, monkeypatch, name, module, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TokenizerError, match=f"{module}: must be installed.*{message}"):
        open_tokenizer(specs[name], engine=module)


def test_a_missing_fast_engine_says_what_to_install(specs, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    with pytest.raises(TokenizerError, match=r"fastokens: must be installed.*pip install fastokens, or take"):
        open_tokenizer(specs["tiny"], engine="fastokens")
    assert open_tokenizer(specs["tiny"]).engine.startswith("tokenizers ")


def test_a_model_that_does_not_fit_the_text_is_one_line(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}')
    tokenizer = open_tokenizer(str(path), engine="tokenizers")
    with pytest.raises(TokenizerError, match=r"tokenizers .*: must encode 1 texts, got .*[Mm]issing"):
        tokenizer.encode(["b"])


def difference(fast, reference, sample):
    texts = texts_to_compare(reference, sample)
    return _difference(texts, fast.encode(texts), reference.encode(texts))


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
    text = next(text for text in texts_to_compare(other, sample) if found.startswith(repr(text) + " from"))
    ours, theirs = plain.encode([text]).ids.tolist(), other.encode([text]).ids.tolist()
    at = next(index for index, (left, right) in enumerate(zip(ours, theirs, strict=False)) if left != right)
    assert found == f"{text!r} from token {at} ({ours[at : at + 8]} instead of {theirs[at : at + 8]})"


def test_a_tail_that_one_engine_lacks_is_a_difference():
    whole = open_tokenizer("bytes")

    class Cut:
        identity, engine, special_ids = whole.identity, "cut 1", whole.special_ids

        def encode(self, texts):
            return whole.encode([text[:-1] for text in texts])

    assert difference(Cut(), whole, ["abc"]) == "'abc' from token 2 ([] instead of [99])"


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


@pytest.mark.slow
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
    assert found.startswith("'a <millstone>' from token ")
    assert difference(opened("tiny"), other, ["plain"]) is None


def test_without_the_fast_engine_the_reference_is_used_loudly(specs, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    tokenizer, reason = trusted(specs["tiny"])
    assert tokenizer.engine.startswith("tokenizers ")
    assert reason is not None
    assert reason.endswith(f"so the slower engine {tokenizer.engine} is used")


def test_options_reach_the_trusted_tokenizer(specs):
    tokenizer, _ = trusted(specs["tiny"], framing=Framing(add_bos=False, eos_token="<pad>"))
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
