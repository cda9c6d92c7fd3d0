"""Identity: what makes two ids mean the same; control strings; the tokenizer of bytes; BOS and EOS."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.encode.conftest import trained_pieces

from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.tokenizer import (
    Framing,
    TokenizerIdentity,
    Vocabulary,
    checked_ids,
    engine_errors,
    frame,
    identify,
    join,
    refuse_surrogates,
    token_dtype,
    token_texts,
    whole_edge,
)
from tokenmill.errors import TokenizerError
from tokenmill.tables import read_table
from tokenmill.types import Encoded

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
        ("vocab_sise", 3, r"unknown key: 'vocab_sise'; did you mean 'vocab_size'\?"),
        ("vocab_size", True, "tokenizer.vocab_size: expected a whole number, got True"),
        ("bos_id", "97", "tokenizer.bos_id: expected a whole number, got '97'"),
        ("add_bos", 1, "tokenizer.add_bos: expected true or false, got 1"),
    ],
)
def test_a_foreign_json_is_refused(key, value, message):
    with pytest.raises(TokenizerError, match=message):
        read_table(TokenizerIdentity, {**IDENTITY.to_json(), key: value}, "tokenizer", error=TokenizerError)


def test_a_missing_key_is_named():
    value = IDENTITY.to_json()
    del value["eos_id"]
    with pytest.raises(TokenizerError, match="tokenizer: missing key: eos_id"):
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


SPECIAL = {"<s>": 0, "</s>": 1, "<|im_end|>": 2}


def vocabulary(bos="<s>", eos="</s>", pad=None):
    return Vocabulary(
        where="web.json",
        kind="tokenizer.json",
        content="0" * 32,
        vocab_size=10,
        ids={**SPECIAL, "word": 9},
        special_ids=SPECIAL,
        bos=bos,
        eos=eos,
        pad=pad,
    )


@pytest.mark.parametrize(
    ("bos", "eos", "wanted", "ids", "added"),
    [
        ("<s>", "</s>", {}, (0, 1), (True, True)),
        ("<s>", None, {}, (0, None), (True, False)),
        (None, "</s>", {}, (None, 1), (False, True)),
        (None, None, {}, (None, None), (False, False)),
        ("<s>", "</s>", {"add_bos": False}, (0, 1), (False, True)),
        ("<s>", "</s>", {"add_eos": False}, (0, 1), (True, False)),
        # One id for both, T2.b: EOS alone, unless BOS is asked for.
        ("</s>", "</s>", {}, (1, 1), (False, True)),
        ("</s>", "</s>", {"add_bos": True}, (1, 1), (True, False)),
        ("</s>", "</s>", {"add_eos": False}, (1, 1), (True, False)),
        ("</s>", "</s>", {"add_bos": False, "add_eos": False}, (1, 1), (False, False)),
        # Named by the caller, which wins.
        ("<s>", "</s>", {"eos_token": "<|im_end|>"}, (0, 2), (True, True)),
        (None, "</s>", {"bos_token": "<s>"}, (0, 1), (True, True)),
        (None, None, {"bos_token": "word"}, (9, None), (True, False)),
    ],
)
def test_policy(bos, eos, wanted, ids, added):
    identity = identify(vocabulary(bos, eos), Framing(**wanted))
    assert (identity.bos_id, identity.eos_id) == ids
    assert (identity.add_bos, identity.add_eos) == added


def test_both_asked_for_with_one_id_is_refused():
    """T2.b."""
    with pytest.raises(TokenizerError, match="two in a row"):
        identify(vocabulary("</s>", "</s>"), Framing(add_bos=True, add_eos=True))


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_asking_for_what_is_not_there_names_the_way_out(name):
    with pytest.raises(
        TokenizerError, match=rf"got add_{name}=True; name it with {name}_token=..., one of <s>, </s>"
    ):
        identify(vocabulary(None, None), Framing(**{f"add_{name}": True}))


@pytest.mark.parametrize("role", ["bos_token", "eos_token"])
def test_a_name_outside_the_vocabulary_gets_the_nearest(role):
    with pytest.raises(
        TokenizerError, match=rf"'web.json': {role} .*got '<im_end>'; did you mean '<\|im_end\|>'\?"
    ):
        identify(vocabulary(), Framing(**{role: "<im_end>"}))


@pytest.mark.parametrize(("pad", "pad_id"), [(None, None), ("<|im_end|>", 2), ("[PAD]", None)])
def test_a_pad_that_is_not_in_the_vocabulary_is_no_pad(pad, pad_id):
    assert identify(vocabulary(pad=pad), Framing()).pad_id == pad_id


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


# BOS and EOS around documents, and the dtype of ids.

BOS, EOS = 98, 99


def identity(add_bos=True, add_eos=True, vocab_size=100, bos_id=BOS, eos_id=EOS):
    return TokenizerIdentity(
        kind="bytes",
        content="0" * 32,
        vocab_size=vocab_size,
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=None,
        add_bos=add_bos,
        add_eos=add_eos,
    )


def encoded(documents, dtype=np.uint32):
    return join([np.array(ids, dtype=dtype) for ids in documents])


def documents_of(value):
    ends = value.offsets.tolist()
    return [value.ids[a:b].tolist() for a, b in pairwise(ends)]


BARE = st.lists(st.lists(st.integers(0, 97)))


@given(BARE, st.booleans(), st.booleans())
def test_removing_the_frame_gives_the_input(documents, add_bos, add_eos):
    framed = documents_of(frame(encoded(documents), identity(add_bos, add_eos)))
    assert framed == [[BOS] * add_bos + ids + [EOS] * add_eos for ids in documents]


@given(st.lists(st.lists(st.sampled_from([1, BOS, EOS]))), st.booleans(), st.booleans())
def test_framing_twice_is_framing_once(documents, add_bos, add_eos):
    once = frame(encoded(documents), identity(add_bos, add_eos))
    twice = frame(once, identity(add_bos, add_eos))
    assert documents_of(twice) == documents_of(once)


@given(BARE, st.data())
def test_at_most_one_bos_per_document_start(documents, data):
    """T2.b: whether or not a template has placed BOS already, a document starts with exactly one."""
    placed = [[BOS] * data.draw(st.integers(0, 1)) + ids for ids in documents]
    framed = documents_of(frame(encoded(placed), identity()))
    assert framed == [[BOS, *ids, EOS] for ids in documents]


@given(BARE, st.booleans())
def test_never_two_in_a_row_where_bos_is_eos(documents, at_start):
    """T2.b: with one id for both, the stream of non-empty documents has one between any two."""
    filled = [ids for ids in documents if ids]
    stream = frame(encoded(filled), identity(at_start, not at_start, bos_id=99, eos_id=99)).ids
    assert not np.any((stream[1:] == 99) & (stream[:-1] == 99))
    assert np.count_nonzero(stream == 99) == len(filled)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int64])
def test_ids_of_any_width_come_out_in_the_dtype_of_the_vocabulary(dtype):
    framed = frame(encoded([[1, 2], [3]], dtype), identity(vocab_size=70_000))
    assert (framed.ids.dtype, framed.ids.tolist()) == (np.dtype("<u4"), [BOS, 1, 2, EOS, BOS, 3, EOS])
    assert framed.offsets.tolist() == [0, 4, 7]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
@pytest.mark.parametrize("add_bos", [True, False])
def test_long_documents_are_framed_as_short_ones_are(dtype, add_bos):
    """Those that have BOS or EOS already and empty ones among them."""
    long = [[number % 90] * size for number, size in enumerate([3000, 0, 2000, 1])]
    given = [*long, [BOS, *long[0]], [*long[2], EOS], [BOS, 5, EOS], [EOS], [BOS]]
    for vocab_size in (100, 70_000):
        framed = frame(encoded(given, dtype), identity(add_bos=add_bos, vocab_size=vocab_size))
        bos = [BOS] * add_bos
        assert documents_of(framed) == [
            *([*bos, *ids, EOS] for ids in long),
            [BOS, *long[0], EOS],
            [*bos, *long[2], EOS],
            [BOS, 5, EOS],
            [*bos, EOS],
            [BOS, EOS],
        ]
        alike = frame(encoded(long, dtype), identity(add_bos=add_bos, vocab_size=vocab_size))
        assert documents_of(alike) == [[*bos, *ids, EOS] for ids in long]
        for value in (framed, alike):
            assert value.ids.dtype == token_dtype(vocab_size)
            assert value.ids.flags.writeable


def test_memory_that_must_not_be_written_to_is_framed_too():
    value = Encoded(ids=np.frombuffer(b"\x01\0\0\0\x02\0\0\0", np.uint32), offsets=np.array([0, 1, 2]))
    assert documents_of(frame(value, identity())) == [[BOS, 1, EOS], [BOS, 2, EOS]]


def test_an_unframed_batch_is_only_cast():
    framed = frame(encoded([[1, 2], []]), identity(False, False))
    assert (framed.ids.dtype, framed.ids.tolist(), framed.offsets.tolist()) == (np.uint8, [1, 2], [0, 2, 2])


def test_an_empty_document_is_its_frame():
    assert documents_of(frame(encoded([[], []]), identity())) == [[BOS, EOS], [BOS, EOS]]


def test_no_documents_stay_no_documents():
    framed = frame(encoded([]), identity())
    assert (framed.ids.tolist(), framed.offsets.tolist()) == ([], [0])


def test_the_input_is_left_as_it_was():
    value = encoded([[1, 2], [3]])
    frame(value, identity())
    assert (value.ids.tolist(), value.offsets.tolist()) == ([1, 2, 3], [0, 2, 3])


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(np.uint32, 100), (np.uint32, 65_536 + 3), (np.uint8, 255), (np.int64, -1), (np.int64, 2**32 + 3)],
)
def test_an_id_that_overflows_the_vocabulary_raises(dtype, bad):
    """T2.a: it is an error with its place, never a wrapped id."""
    with pytest.raises(TokenizerError, match=rf"document 2 of the batch.*size 100, got {bad} at token 1;"):
        frame(encoded([[1], [], [2, bad], [3]], dtype), identity())


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(1, "<u1"), (256, "<u1"), (257, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (2**32, "<u4")],
)
def test_dtype_is_the_smallest_that_holds_the_vocabulary(vocab_size, name):
    dtype = token_dtype(vocab_size)
    assert dtype == np.dtype(name)
    assert vocab_size - 1 <= np.iinfo(dtype).max


@pytest.mark.parametrize("vocab_size", [0, -1, 2**32 + 1])
def test_a_vocabulary_that_no_dtype_holds_is_refused(vocab_size):
    with pytest.raises(TokenizerError, match=f"from 1 to 2\\*\\*32, got {vocab_size}"):
        token_dtype(vocab_size)


# The text of single tokens

MIXED = "Où? 中文字符，日本語 한국어 🎉👍🏽 👩‍👩‍👧‍👦 e\u0301 ☰ \ufffd\ufffd <|eos|> naïve\n  def f():"
"""Two to four bytes a character, joined emoji, a combining accent, U+FFFD itself, a control string as text."""


def spelled(tokenizer, ids):
    shown = token_texts(tokenizer, ids)
    assert len(shown.texts) == len(shown.continues) == ids.size
    assert not any(text for text, continues in zip(shown.texts, shown.continues, strict=True) if continues)
    return shown


@given(st.text())
@example(MIXED)
def test_the_first_byte_of_a_character_shows_it_and_the_others_continue_it(text):
    shown = spelled(TOKENIZER, TOKENIZER.encode([text]).ids)
    assert [text for text, continues in zip(shown.texts, shown.continues, strict=True) if not continues] == list(
        text
    )
    assert list(shown.continues) == [byte & 0xC0 == 0x80 for byte in text.encode()]


@given(st.lists(st.one_of(st.integers(0, 258), st.sampled_from([0x80, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0xC3]))))
@example([0xB8, 0xAD, *"中".encode(), 0xF0, 0x9F, 257, 0x98, 0xE4, 0xB8, 65])
def test_texts_of_tokens_are_together_the_text_of_all_whatever_the_bytes(ids):
    ids = np.array(ids, np.uint16)
    assert "".join(spelled(TOKENIZER, ids).texts) == TOKENIZER.decode(ids)


def test_what_is_not_utf8_stays_the_replacement_character_and_joins_nothing():
    ids = np.array([0xE4, 0xB8, 65, 0x80, 257, *"中".encode(), 0xFF])
    shown = spelled(TOKENIZER, ids)
    assert shown.texts == ("\ufffd", "", "A", "\ufffd", "<|eos|>", "中", "", "", "\ufffd")
    assert shown.continues == (False, True, False, False, False, False, True, True, False)


@pytest.mark.parametrize("name", ["tiny", "r50k", "o200k"])
def test_tokens_that_share_characters_are_joined_whatever_the_vocabulary(opened, name):
    tokenizer = opened(name)
    ids = tokenizer.encode([MIXED * 2]).ids
    shown = spelled(tokenizer, ids)
    assert "".join(shown.texts) == tokenizer.decode(ids) == MIXED * 2
    alone = [tokenizer.decode(ids[place : place + 1]) for place in range(ids.size)]
    whole = MIXED.count("\ufffd") * 2
    assert sum("\ufffd" in text for text in shown.texts) <= whole < sum("\ufffd" in text for text in alone)


def test_a_chain_of_tokens_that_each_end_within_a_character_is_joined_as_one():
    pieces = {0: "中".encode()[:1], 1: "中".encode()[1:] + "文".encode()[:1], 2: "文".encode()[1:], 3: b" x"}

    class Chained:
        def decode(self, ids):
            return b"".join(pieces[id_] for id_ in ids.tolist()).decode(errors="replace")

    assert spelled(Chained(), np.array([3, 0, 1, 2, 3])).texts == (" x", "中文", "", "", " x")
    long = np.array([0, *[1] * 5000, 2])  # 5,001 characters, no two tokens between which none is cut
    pieces[1] = "中".encode()[1:] + "中".encode()[:1]
    pieces[2] = "中".encode()[1:]
    assert spelled(Chained(), long).texts[:2] == ("中" * 5001, "")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_tokens_of_sentencepiece_keep_their_spaces(tmp_path, kind):
    (tmp_path / "tokenizer.model").write_bytes(trained_pieces(kind, byte_fallback=True))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.model"))
    text = "Hello world, a 中文 day 🎉 and on"
    ids = tokenizer.encode([text]).ids
    assert "".join(spelled(tokenizer, ids).texts) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("edge", range(9))
def test_an_edge_is_moved_behind_the_character_that_it_cuts(edge):
    ids = TOKENIZER.encode(["a中🎉b"]).ids
    assert whole_edge(TOKENIZER, ids, edge) == next(end for end in (0, 1, 4, 8, 9) if end >= edge)
