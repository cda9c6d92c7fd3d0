"""BOS and EOS around documents, and the dtype of ids."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.encode.frame import frame, token_dtype
from tokenmill.encode.tokenizer import TokenizerIdentity, join
from tokenmill.errors import TokenizerError
from tokenmill.types import Encoded

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
        assert framed.ids.dtype == token_dtype(vocab_size)
        assert framed.ids.flags.writeable


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
