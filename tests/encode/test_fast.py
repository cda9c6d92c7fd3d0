"""The fast engine: the ids of the reference, for any text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.encode.engines import DIVERGENT, ENGINES, open_tokenizer
from tokenmill.encode.files import kind_of
from tokenmill.errors import TokenizerError

PAIRS = ["tiny", "r50k", "cl100k", "o200k"]

HARD = (
    "aZ 09'sS\n\r\t.<|>_\u0301\u00e9\u017f\u180e\u00a0\u2028\u3000\u200d\U0001f469\U0001f3fd"
    "中ア\x00\ufeff٣½ا\u0130\u01c5"
)
SPELLED = st.lists(st.sampled_from(["<|endoftext|>", "<s>", " ", "x"])).map("".join)
TEXT = st.one_of(st.text(), st.text(alphabet=HARD), SPELLED)


def reference_of(name, specs):
    return ENGINES[kind_of(specs[name])][1]


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
