"""A window as tokens: the documents of a file, framed, in the order of an epoch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.encode.frame import frame
from tokenmill.encode.tokenizer import join
from tokenmill.errors import DocumentError, TokenizerError
from tokenmill.live import LiveOptions, open_live
from tokenmill.live.tokens import in_order, tokenize_window
from tokenmill.plan.permute import permute_all
from tokenmill.types import Encoded


def documents_of(encoded):
    return [encoded.ids[begin:end].tolist() for begin, end in pairwise(encoded.offsets.tolist())]


def tokenized(source, epoch=0, lanes=1):
    window = source.windows(lanes).at(0, epoch, 0)
    return tokenize_window(window, epoch, source.tokenizer, source.options)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    ending=st.sampled_from(["jsonl", "parquet"]),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_a_window_holds_its_documents_with_bos_in_the_order_of_the_epoch(
    tmp_path, texts, write, numbers, lengths, ending, shuffle, epoch
):
    path = write(tmp_path / f"x.{ending}", texts(lengths), [100])
    options = LiveOptions(seq_len=8, shuffle=shuffle, window_bytes=10**6)
    source = open_live(path, tokenizer=numbers(), options=options)
    made = tokenized(source, epoch)
    plain = [[0, *map(int, text.split())] for text in texts(lengths)]
    order = list(range(len(plain)))
    if shuffle:
        key = source.windows(1).at(0, epoch, 0).key(options.seed, epoch, "documents")
        order = permute_all(np.arange(len(plain)), len(plain), key).tolist()
    assert documents_of(made.encoded) == [plain[number] for number in order]
    assert made.places.tolist() == [[0, number] for number in order]
    assert made.check == xxhash.xxh3_64_hexdigest(made.encoded.ids.tobytes())[:8]


def test_what_is_tokenized_in_parts_is_what_is_tokenized_at_once(tmp_path, write):
    """Texts of several batches of the reader, of characters of all widths."""
    texts = [f"{number} é 語 🙂 " * 8000 for number in range(40)]
    path = write(tmp_path / "x.parquet", texts, [40])
    source = open_live(path, tokenizer="bytes", options=LiveOptions(seq_len=8, shuffle=False, window_bytes=1 << 30))
    at_once = frame(source.tokenizer.encode(texts), source.tokenizer.identity)
    made = tokenized(source)
    assert sum(map(len, texts)) > 2 * source.options.reading.batch_bytes
    assert made.encoded.ids.tolist() == at_once.ids.tolist()
    assert made.encoded.offsets.tolist() == at_once.offsets.tolist()


@given(
    parts=st.lists(st.lists(st.lists(st.integers(0, 255), max_size=5)), min_size=1),
    dtype=st.sampled_from([np.uint8, np.uint16, np.uint32]),
    data=st.data(),
)
def test_documents_of_several_parts_stand_in_the_order_that_is_asked_for(parts, dtype, data):
    """Also those of memory that must not be written to."""
    together = [ids for part in parts for ids in part]
    order = data.draw(st.permutations(range(len(together))))
    encoded = [
        Encoded(
            ids=np.array([token for ids in part for token in ids], dtype), offsets=np.cumsum([0, *map(len, part)])
        )
        for part in parts
    ]
    for part in encoded[1:]:
        part.ids.flags.writeable = False
    ordered = in_order(encoded, np.array(order, np.int64))
    assert documents_of(ordered) == [together[number] for number in order]


@pytest.mark.parametrize("bad", [100, 65_536 + 10, 2**32 + 10])
def test_an_id_that_is_not_of_the_vocabulary_is_refused_and_never_cut_to_fit(tmp_path, write, numbers, bad):
    """[T2.a]"""
    source = open_live(
        write(tmp_path / "x.jsonl", ["10 11", f"12 {bad}"]),
        tokenizer=numbers(vocab_size=100),
        options=LiveOptions(seq_len=8),
    )
    with pytest.raises((TokenizerError, DocumentError), match=f"below the vocabulary size 100, got {bad}"):
        tokenized(source)


def test_a_window_that_breaks_off_gives_nothing_and_says_so(tmp_path, texts, write, numbers):
    path = write(tmp_path / "x.parquet", texts([5] * 30), [10])
    whole = path.read_bytes()
    options = LiveOptions(seq_len=8, on_error="skip", window_bytes=1 << 30)
    source = open_live(path, tokenizer=numbers(), options=options)
    at = whole.rindex(b"PAR1", 0, len(whole) // 2) + len(whole) // 3
    path.write_bytes(whole[:at] + bytes(64) + whole[at + 64 :])
    made = tokenized(source)
    assert (made.encoded.num_documents, made.encoded.ids.size, len(made.places)) == (0, 0, 0)
    assert [one.reason for one in made.skipped] == ["broken"]


def test_framed_documents_of_no_text_are_bos_alone(tmp_path, write, numbers):
    source = open_live(
        write(tmp_path / "x.jsonl", ["", ""]), tokenizer=numbers(), options=LiveOptions(seq_len=8, shuffle=False)
    )
    assert documents_of(tokenized(source).encoded) == documents_of(join([np.array([0]), np.array([0])]))
