"""The built-in tokenizer: one id a byte."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.encode.engines import open_tokenizer
from tokenmill.errors import TokenizerError

TOKENIZER = open_tokenizer("bytes")


@given(st.lists(st.text()))
def test_ids_are_the_bytes_of_each_text_and_decode_to_it(texts):
    encoded = TOKENIZER.encode(texts)
    ends = encoded.offsets.tolist()
    documents = [encoded.ids[a:b] for a, b in pairwise(ends)]
    assert [document.tolist() for document in documents] == [list(text.encode()) for text in texts]
    assert [TOKENIZER.decode(document) for document in documents] == texts


@given(st.lists(st.integers(0, 258)))
def test_decode_never_raises_on_valid_ids(ids):
    text = TOKENIZER.decode(np.array(ids, dtype=np.uint16))
    assert text.count("<|pad|>") >= ids.count(258)


def test_identity_is_259_ids_with_bos_eos_and_pad_on_top():
    identity = TOKENIZER.identity
    assert (identity.kind, identity.vocab_size) == ("bytes", 259)
    assert (identity.bos_id, identity.eos_id, identity.pad_id) == (256, 257, 258)
    assert (identity.add_bos, identity.add_eos) == (True, True)


def test_control_ids_are_shown_as_their_strings():
    ids = np.array([256, 104, 105, 257, 258], dtype=np.uint16)
    assert TOKENIZER.decode(ids) == "<|bos|>hi<|eos|><|pad|>"


def test_a_control_id_inside_a_character_leaves_replacements_on_both_sides():
    assert TOKENIZER.decode(np.array([0xC3, 257, 0xA9])) == "\ufffd<|eos|>\ufffd"


def test_invalid_utf8_becomes_the_replacement_character():
    assert TOKENIZER.decode(np.array([97, 0xFF, 98])) == "a\ufffdb"


def test_no_texts_give_no_ids():
    encoded = TOKENIZER.encode([])
    assert (encoded.ids.tolist(), encoded.offsets.tolist()) == ([], [0])


def test_ids_are_uint8():
    assert TOKENIZER.encode(["a"]).ids.dtype == np.uint8


def test_a_lone_surrogate_is_refused_with_its_text():
    with pytest.raises(TokenizerError, match="text 1 of the batch"):
        TOKENIZER.encode(["fine", "\ud800"])
