"""Identity: what makes two token ids mean the same."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.tokenizer import TokenizerIdentity, checked_ids, engine_errors, join, refuse_surrogates
from tokenmill.errors import TokenizerError
from tokenmill.tables import read_table

IDENTITY = TokenizerIdentity(
    kind="tiktoken",
    content="0123456789abcdef" * 2,
    vocab_size=100,
    bos_id=97,
    eos_id=98,
    pad_id=None,
    add_bos=True,
    add_eos=True,
)


def test_identity_survives_json():
    assert read_table(TokenizerIdentity, IDENTITY.to_json(), "tokenizer") == IDENTITY


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "bytes"},
        {"content": "f" * 32},
        {"vocab_size": 101},
        {"bos_id": 96},
        {"eos_id": 96},
        {"pad_id": 96},
        {"add_bos": False},
        {"add_eos": False},
    ],
)
def test_any_change_gives_another_digest(change):
    """T2.a: another hash, vocabulary, control id or policy is another identity."""
    assert replace(IDENTITY, **change).digest != IDENTITY.digest


def test_digest_is_the_same_on_every_machine():
    assert open_tokenizer("bytes").identity.digest == "b71807196256e8fc8a8e3c2899ac50f4"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_sise", 3, r"got 'vocab_sise'; did you mean 'vocab_size'\?"),
        ("vocab_size", True, "tokenizer.vocab_size: must be a whole number, got True"),
        ("bos_id", "97", "tokenizer.bos_id: must be a whole number, got '97'"),
        ("add_bos", 1, "tokenizer.add_bos: must be true or false, got 1"),
    ],
)
def test_a_foreign_json_is_refused(key, value, message):
    with pytest.raises(TokenizerError, match=message):
        read_table(TokenizerIdentity, {**IDENTITY.to_json(), key: value}, "tokenizer", error=TokenizerError)


def test_a_missing_key_is_named():
    value = IDENTITY.to_json()
    del value["eos_id"]
    with pytest.raises(TokenizerError, match="tokenizer: eos_id must be given, got nothing"):
        read_table(TokenizerIdentity, value, "tokenizer", error=TokenizerError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "byte"}, r"got 'byte'; did you mean 'bytes'\?"),
        ({"content": "abc"}, "32 hex digits, got 'abc'"),
        ({"vocab_size": 0}, "got 0"),
        ({"vocab_size": 98}, "eos_id must be below vocab_size 98, got 98"),
        ({"pad_id": -1}, "pad_id must be below vocab_size 100, got -1"),
        ({"bos_id": None}, "to add BOS there must be one.*bos_token=..., or say add_bos=False"),
        ({"eos_id": None}, "to add EOS there must be one"),
        ({"bos_id": 98}, "got 98 for both, two in a row.*add_bos=False or add_eos=False"),
    ],
)
def test_an_identity_that_cannot_be_right_is_refused(change, message):
    with pytest.raises(TokenizerError, match=message):
        replace(IDENTITY, **change)


def test_importing_it_imports_no_engine():
    code = (
        "import sys, tokenmill.encode.tokenizer, tokenmill.encode.engines as a;"
        "print(sorted({'fastokens', 'tokenizers', 'tiktoken', 'torch', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@given(st.lists(st.lists(st.integers(0, 9))))
def test_join_keeps_each_document_in_order(documents):
    encoded = join([np.array(ids, dtype=np.uint32) for ids in documents])
    ends = encoded.offsets.tolist()
    assert [encoded.ids[a:b].tolist() for a, b in pairwise(ends)] == documents


@pytest.mark.parametrize("bad", [100, 2**31, -1])
def test_an_id_outside_the_vocabulary_cannot_be_decoded(bad):
    with pytest.raises(TokenizerError, match=f"below the vocabulary size 100, got {bad};"):
        checked_ids(np.array([3, bad, 99]), IDENTITY)


def test_a_lone_surrogate_is_named_by_text_and_character():
    with pytest.raises(TokenizerError, match=r"text 2 of the batch.*'\\udc00' at character 1; replace it"):
        refuse_surrogates(["a", "\U0001f600", "b\udc00"])


def test_a_panic_of_an_engine_becomes_one_line():
    class PanicException(BaseException):
        pass

    with pytest.raises(TokenizerError, match="engine 1: must encode, got index out of bounds; go away"):  # noqa: SIM117
        with engine_errors("engine 1", "encode", "go away"):
            raise PanicException("index out of bounds")


def test_an_interrupt_is_not_taken_for_a_failure_of_the_engine():
    with pytest.raises(KeyboardInterrupt):  # noqa: SIM117
        with engine_errors("engine 1", "encode", "go away"):
            raise KeyboardInterrupt
