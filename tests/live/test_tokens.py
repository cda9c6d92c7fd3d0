"""A window as tokens: the documents of a file, framed, in the order of an epoch."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.encode.tokenizer import frame, join
from tokenmill.errors import DocumentError, TokenizerError
from tokenmill.live import LiveOptions, open_live
from tokenmill.live.tokens import in_order, pack_window, tokenize_window
from tokenmill.loader.state import DrawnRows, RowFormat
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
    options = LiveOptions(seq_len=8, shuffle=shuffle, window_bytes=10**6, keep_empty=True)
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


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
def test_empty_texts_are_left_out_and_counted_once(tmp_path, write, ending, lanes):
    path = write(tmp_path / f"x.{ending}", ["", "a", "b", "", "c", " ", ""], [2])
    found, counts = [], Counter()
    for keep_empty in (False, True):
        options = LiveOptions(seq_len=8, shuffle=False, window_bytes=10**6, keep_empty=keep_empty)
        source = open_live(path, tokenizer="bytes", options=options)
        windows = source.windows(lanes)
        made = [tokenize_window(windows.at(lane, 0, 0), 0, source.tokenizer, options) for lane in range(lanes)]
        found.append(sorted(document for each in made for document in documents_of(each.encoded)))
        counts.update((keep_empty, each.reason) for window in made for each in window.skipped)
    bos, eos = found[1][0][0], found[1][0][-1]
    assert found[0] == [[bos, ord(text), eos] for text in " abc"]
    assert found[1] == sorted([*found[0], *([[bos, eos]] * 3)])
    assert counts == {(False, "empty"): 3}


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
        write(tmp_path / "x.jsonl", ["", ""]),
        tokenizer=numbers(),
        options=LiveOptions(seq_len=8, shuffle=False, keep_empty=True),
    )
    assert documents_of(tokenized(source).encoded) == documents_of(join([np.array([0]), np.array([0])]))


# A window as rows: nothing is lost, nothing is there twice.

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
            yield rows_of(windows.at(lane, epoch, turn), epoch, source)


def rows_of(window, epoch, source):
    """Make the rows of a window."""
    return pack_window(tokenize_window(window, epoch, source.tokenizer, source.options), source.options)


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
    tmp_path,
    texts,
    write,
    numbers,
    labels_of,
    packing,
    split,
    crop,
    shuffle,
    lengths,
    lanes,
    window_bytes,
    ending,
    seq_len,
):
    """[R1.d]"""
    path = write(tmp_path / f"x.{ending}", texts(lengths), [3, 5])
    options = LiveOptions(
        keep_empty=True,
        seq_len=seq_len,
        packing=packing,
        split=split,
        crop=crop,
        shuffle=shuffle,
        window_bytes=window_bytes,
    )
    source = open_live(path, tokenizer=numbers(), options=options)
    windows = source.windows(lanes)
    ids = range(10, 10 + sum(lengths))
    for epoch in (0, 1):
        made = list(epoch_of(source, windows, epoch))
        seen = Counter(label for rows in made for label in labels_of(rows, range(rows.num_rows), seq_len))
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


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    formats=st.lists(
        st.tuples(
            st.integers(1, 9),
            st.sampled_from([*POLICIES, ("best_fit", "truncate_end", "return"), ("best_fit", "drop", "return")]),
        ),
        min_size=2,
        max_size=3,
    ),
    share=st.floats(0, 1),
)
def test_what_is_left_of_a_window_is_told_whichever_formats_follow_one_another(
    tmp_path, texts, write, numbers, labels_of, lengths, formats, share
):
    """Every token that is left is a label of the new rows, or its fate is told; none is trained a second time."""
    path = write(tmp_path / "x.jsonl", texts(lengths))
    formats = [RowFormat(seq_len, *policy) for seq_len, policy in formats]
    options = LiveOptions(**formats[0]._asdict(), window_bytes=1 << 20)
    source = open_live(path, tokenizer=numbers(), options=options)
    made = tokenize_window(source.windows(1).at(0, 0, 0), 0, source.tokenizer, options)
    drawn, seen = [], Counter()
    for format in formats:
        rows = pack_window(made, options.in_format(format), drawn)
        if rows.first:
            break  # the format before had this one's name: its rows go on
        labels = labels_of(rows, range(rows.num_rows), format.seq_len)
        assert rows.fates.trained == len(labels)
        number = min(int(share * rows.num_rows), rows.num_rows - 1)
        if number < 1:
            break
        seen.update(labels_of(rows, range(number), format.seq_len))
        drawn.append(DrawnRows(format, number))
    assert set(seen.values()) <= {1}


@pytest.mark.parametrize("packing", ["concat", "best_fit", "bos_best_fit"])
def test_the_order_of_documents_and_rows_is_another_in_every_epoch_and_under_every_seed(
    make_source, labels_of, packing
):
    def delivered(epoch, **options):
        source = make_source(packing=packing, window_bytes=10**6, **options)
        made = rows_of(source.windows(1).at(0, epoch, 0), epoch, source)
        return labels_of(made, range(made.num_rows), 16)

    plain = delivered(0)
    assert plain == delivered(0)
    assert plain != delivered(1)
    assert plain != delivered(0, seed=4)
    assert delivered(0, shuffle=False) == delivered(1, shuffle=False)


def test_without_shuffling_a_window_is_read_in_the_order_of_the_file(tmp_path, texts, write, numbers, labels_of):
    path = write(tmp_path / "x.jsonl", texts([5, 0, 9, 1, 20]))
    options = LiveOptions(seq_len=8, packing="concat", shuffle=False)
    source = open_live(path, tokenizer=numbers(), options=options)
    made = rows_of(source.windows(1).at(0, 0, 0), 0, source)
    assert labels_of(made, range(made.num_rows), 8) == list(range(10, 45))


def test_ids_are_kept_in_the_smallest_dtype(make_source, numbers):
    for vocab_size, dtype in ((60_000, np.uint16), (70_000, np.uint32)):
        source = make_source(tokenizer=numbers(vocab_size))
        made = rows_of(source.windows(1).at(0, 0, 0), 0, source)
        assert made.ids.dtype == dtype


def test_a_document_that_must_not_be_cut_is_refused_by_its_place_or_skipped(
    tmp_path, texts, write, numbers, labels_of
):
    path = write(tmp_path / "x.jsonl", texts([5, 3, 30, 2]))

    def rows(on_error):
        options = LiveOptions(seq_len=8, packing="padded", on_error=on_error)
        source = open_live(path, tokenizer=numbers(), options=options)
        return rows_of(source.windows(1).at(0, 0, 0), 0, source)

    with pytest.raises(DocumentError, match=r"x\.jsonl:3: .* at most 9 tokens, got 31; raise seq_len"):
        rows("stop")
    made = rows("skip")
    assert sorted(labels_of(made, range(made.num_rows), 8)) == [*range(10, 18), 48, 49]
    assert [(one.reason, one.place) for one in made.skipped] == [("too_many_tokens", f"{path}:3")]
    assert made.fates.tokens == 10 + 3
