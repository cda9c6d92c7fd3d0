"""A window as rows: nothing is lost, nothing is there twice."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import DocumentError
from tokenmill.live import LiveOptions, open_live
from tokenmill.live.assemble import Assembler
from tokenmill.live.lanes import padding_id, window_rows
from tokenmill.loader import IGNORE

POLICIES = [
    ("concat", "allow", "return"),
    ("best_fit", "allow", "return"),
    ("best_fit", "truncate_start", "return"),
    ("bos_best_fit", "allow", "return"),
    ("bos_best_fit", "allow", "discard"),
    ("padded", "truncate_end", "return"),
]


def epoch_of(source, windows, epoch):
    """Make all windows that the lanes read in an epoch."""
    for lane in range(windows.lanes):
        for turn in range(windows.num_turns(lane)):
            yield window_rows(windows.at(lane, epoch, turn), epoch, source.tokenizer, source.options)


def labels_of(source, window):
    assembler = Assembler(
        arrays=("input_ids", "labels"),
        rows=1,
        seq_len=source.options.seq_len,
        pad=padding_id(source.tokenizer.identity),
    )
    batches = [assembler.batch([(window, row)]) for row in range(window.num_rows)]
    return np.concatenate([np.empty(0, np.int64), *(batch["labels"].ravel() for batch in batches)])


@pytest.mark.parametrize(("packing", "split", "crop"), POLICIES)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    lanes=st.integers(1, 9),
    window_bytes=st.integers(50, 2000),
    ending=st.sampled_from(["jsonl", "parquet"]),
    shuffle=st.booleans(),
    seq_len=st.integers(1, 9),
)
def test_every_token_of_an_epoch_is_a_label_once_or_its_fate_is_told(
    tmp_path, texts, write, numbers, packing, split, crop, shuffle, lengths, lanes, window_bytes, ending, seq_len
):
    """[R1.d]"""
    path = write(tmp_path / f"x.{ending}", texts(lengths), [3, 5])
    options = LiveOptions(
        seq_len=seq_len, packing=packing, split=split, crop=crop, shuffle=shuffle, window_bytes=window_bytes
    )
    source = open_live(path, tokenizer=numbers(), options=options)
    windows = source.windows(lanes)
    ids = range(10, 10 + sum(lengths))
    for epoch in (0, 1):
        made = list(epoch_of(source, windows, epoch))
        labels = np.concatenate([labels_of(source, window) for window in made])
        seen = Counter(labels[labels != IGNORE].tolist())
        dropped = sum(sum(window.fates.dropped.values()) for window in made)
        # BOS stands before every document and is no label; every other token is one, or is dropped and counted.
        assert sum(window.fates.tokens for window in made) == sum(lengths) + len(lengths)
        assert sum(window.fates.trained for window in made) == sum(seen.values())
        assert set(seen.values()) <= {1}
        assert set(seen) <= set(ids)
        if (split, crop) == ("allow", "return"):
            assert (seen, dropped) == (Counter(ids), 0)
        else:
            assert sum(seen.values()) + sum(window.fates.masked for window in made) + dropped == (
                sum(lengths) + len(lengths)
            )


@pytest.mark.parametrize("packing", ["concat", "best_fit", "bos_best_fit"])
def test_the_order_of_documents_and_rows_is_another_in_every_epoch_and_under_every_seed(make_source, packing):
    def delivered(epoch, **options):
        source = make_source(packing=packing, window_bytes=10**6, **options)
        made = window_rows(source.windows(1).at(0, epoch, 0), epoch, source.tokenizer, source.options)
        return labels_of(source, made).tolist()

    plain = delivered(0)
    assert plain == delivered(0)
    assert plain != delivered(1)
    assert plain != delivered(0, seed=4)
    assert delivered(0, shuffle=False) == delivered(1, shuffle=False)


def test_without_shuffling_a_window_is_read_in_the_order_of_the_file(tmp_path, texts, write, numbers):
    path = write(tmp_path / "x.jsonl", texts([5, 0, 9, 1, 20]))
    options = LiveOptions(seq_len=8, packing="concat", shuffle=False)
    source = open_live(path, tokenizer=numbers(), options=options)
    made = window_rows(source.windows(1).at(0, 0, 0), 0, source.tokenizer, options)
    labels = labels_of(source, made)
    assert labels[labels != IGNORE].tolist() == list(range(10, 45))


def test_ids_are_kept_in_the_smallest_dtype(make_source, numbers):
    for vocab_size, dtype in ((60_000, np.uint16), (70_000, np.uint32)):
        source = make_source(tokenizer=numbers(vocab_size))
        made = window_rows(source.windows(1).at(0, 0, 0), 0, source.tokenizer, source.options)
        assert made.ids.dtype == dtype


def test_a_document_that_must_not_be_cut_is_refused_by_its_place_or_skipped(tmp_path, texts, write, numbers):
    path = write(tmp_path / "x.jsonl", texts([5, 3, 30, 2]))

    def rows(on_error):
        options = LiveOptions(seq_len=8, packing="padded", on_error=on_error)
        source = open_live(path, tokenizer=numbers(), options=options)
        return source, window_rows(source.windows(1).at(0, 0, 0), 0, source.tokenizer, options)

    with pytest.raises(DocumentError, match=r"x\.jsonl:3: .* at most 9 tokens, got 31; raise seq_len"):
        rows("stop")
    source, made = rows("skip")
    labels = labels_of(source, made)
    assert sorted(labels[labels != IGNORE].tolist()) == [*range(10, 18), 48, 49]
    assert [(one.reason, one.place) for one in made.skipped] == [("too_many_tokens", f"{path}:3")]
    assert made.fates.tokens == 10 + 3
