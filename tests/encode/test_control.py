"""Control strings in raw text: as the recipe says, for every one of them, and never otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.encode.engines import ENGINES, open_tokenizer
from tokenmill.encode.files import kind_of
from tokenmill.encode.tokenizer import POLICIES, with_policy
from tokenmill.errors import ConfigError

BYTES = open_tokenizer("bytes")
NAMES = list(BYTES.special_ids)


def encoded(policy, texts, tokenizer=BYTES):
    found = with_policy(tokenizer, policy).encode(texts)
    return [found.ids[a:b].tolist() for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_control_string_is_treated_as_the_policy_says(specs, policy):
    """[T2.b, S.i]"""
    for spec in specs.values():
        tokenizer = open_tokenizer(spec, engine=ENGINES[kind_of(spec)][-1])
        for name, control in tokenizer.special_ids.items():
            texts = [name, f"a {name}{name} b", "nothing", ""]
            found = encoded(policy, texts, tokenizer)
            counts = [ids.count(control) for ids in found]
            assert counts == ([1, 2, 0, 0] if policy == "encode" else [0, 0, 0, 0]), (spec, name)
            if policy == "drop":
                assert found == encoded("text", ["", "a  b", "nothing", ""], tokenizer)


@given(
    st.lists(st.lists(st.sampled_from(["a", "ü ", "<|", "|>", "eos", *NAMES]), max_size=8).map("".join), max_size=5)
)
def test_encoded_control_strings_are_the_text_with_ids_in_their_places(texts):
    found = encoded("encode", texts)
    assert [BYTES.decode(np.array(ids, np.int64)) for ids in found] == texts
    for ids, text in zip(found, texts, strict=True):
        assert [i for i in ids if i >= 256] == [BYTES.special_ids[n] for n in _names_in(text)]


def _names_in(text):
    import re

    return re.findall("|".join(map(re.escape, NAMES)), text)


def test_what_is_taken_out_cannot_join_to_another():
    assert encoded("drop", ["<|eo<|bos|>s|>x"]) == [[ord("x")]]


def test_an_unknown_policy_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"control_strings: must be one of text, encode, drop, got 'encod'; did you"
    ):
        with_policy(BYTES, "encod")
