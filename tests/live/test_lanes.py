"""Lanes whose rows are made in several ways, one after another."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ResumeError
from tokenmill.live import LiveLoader, LiveOptions, open_live
from tokenmill.live.lanes import LiveLanes
from tokenmill.loader import LoaderOptions
from tokenmill.loader.state import DrawnRows, LanePosition, RowFormat

FORMATS = [
    RowFormat(4, "best_fit", "allow", "return"),
    RowFormat(9, "best_fit", "allow", "return"),
    RowFormat(5, "concat", "allow", "return"),
    RowFormat(7, "bos_best_fit", "allow", "return"),
]
INLINE = LoaderOptions(threads=0)


def lanes_of(source, count, positions=None, options=INLINE):
    lanes = LiveLanes(source, source.windows(count), range(count), options)
    positions = {**lanes.positions(), **(positions or {})}
    lanes.move_to(positions, dict.fromkeys(positions, 10**9), {})
    return lanes


@given(world_size=st.integers(1, 4), lanes_each=st.integers(1, 3), rows_per_lane=st.integers(1, 3), data=st.data())
def test_the_ranks_together_draw_every_lane_in_the_order_of_the_rows(
    tmp_path, write, numbers, world_size, lanes_each, rows_per_lane, data
):
    """[E1.a]"""
    lanes, rows = world_size * lanes_each, lanes_each * rows_per_lane
    micro_batch = data.draw(st.sampled_from([size for size in range(1, rows + 1) if rows % size == 0]))
    path = write(tmp_path / "x.jsonl", ["1 2 3"] * 40)
    source = open_live(path, tokenizer=numbers(), options=LiveOptions(seq_len=4, lanes=lanes))
    drawn = []
    for rank in range(world_size):
        shape = {"global_batch_size": lanes * rows_per_lane, "world_size": world_size, "micro_batch": micro_batch}
        loader = LiveLoader(source, steps=1, rank=rank, options=LoaderOptions(threads=0), **shape)
        draw = loader.text.draw
        loader.text.draw = lambda numbers, *rest, draw=draw: (drawn.extend(numbers), draw(numbers, *rest))[1]
        own = len(drawn)
        list(loader)
        assert set(drawn[own:]) == set(loader.text.numbers)
    assert drawn == [lane for lane in range(lanes) for _ in range(rows_per_lane)]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    ways=st.lists(st.tuples(st.sampled_from(FORMATS), st.integers(1, 7)), min_size=1, max_size=9),
    count=st.integers(1, 3),
    shuffle=st.booleans(),
    window_bytes=st.integers(60, 900),
)
def test_every_token_is_a_label_once_in_an_epoch_however_often_rows_are_made_anew(
    tmp_path, texts, write, numbers, labels_of, lengths, ways, count, shuffle, window_bytes
):
    """[R1.d]"""
    count = count if shuffle else 1  # in a fixed order a lane may be without text for ever
    path = write(tmp_path / "x.jsonl", [*texts(lengths), "1 2 3"])
    options = LiveOptions(seq_len=4, shuffle=shuffle, window_bytes=window_bytes, lanes=count)
    source = open_live(path, tokenizer=numbers(), options=options)
    lanes = lanes_of(source, count)
    seen = Counter()
    for lane in lanes.lanes:
        turn = 0
        while True:
            format, rows = ways[turn % len(ways)]
            turn += 1
            for _ in range(rows):
                if lanes.lanes[lane].position.epoch:
                    break
                window, row = lanes.next_row(lane, format)
                if window.tokenized.epoch == 0:  # nothing may have been left of this one
                    seen.update(labels_of(window, [row], format.seq_len))
            if lanes.lanes[lane].position.epoch:
                break
    assert seen == Counter([*range(10, 10 + sum(lengths)), 1, 2, 3])


@given(
    ways=st.lists(st.tuples(st.sampled_from(FORMATS), st.integers(1, 5)), min_size=1, max_size=8),
    cut=st.integers(0, 30),
)
def test_a_lane_goes_on_from_its_position_with_the_same_rows_in_whichever_format_they_were_made(
    tmp_path, texts, write, numbers, labels_of, ways, cut
):
    """[R1.a]"""
    path = write(tmp_path / "x.jsonl", texts([13, 0, 40, 3, 7, 22, 5, 1, 18] * 3))
    options = LiveOptions(seq_len=4, window_bytes=700, lanes=1)
    source = open_live(path, tokenizer=numbers(), options=options)
    order = [format for format, rows in ways for _ in range(rows)] * 2
    whole = lanes_of(source, 1)
    drawn, positions = [], []

    def labels(lanes, format):
        window, row = lanes.next_row(0, format)
        return labels_of(window, [row], format.seq_len)

    for format in order:
        positions.append(whole.positions())
        drawn.append(labels(whole, format))
    cut %= len(order)
    again = lanes_of(source, 1, positions[cut])
    assert [labels(again, format) for format in order[cut:]] == drawn[cut:]


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_threads_that_work_ahead_do_not_change_rows_that_are_made_anew(make_source, labels_of, threads):
    order = [FORMATS[i // 7 % 4] for i in range(80)]
    drawn = []
    for options in (INLINE, LoaderOptions(threads=threads, ahead=3)):
        lanes = lanes_of(make_source(seq_len=4), 2, options=options)
        rows = [(*lanes.next_row(i % 2, format), format) for i, format in enumerate(order)]
        drawn.append([labels_of(window, [row], format.seq_len) for window, row, format in rows])
        lanes.close()
    assert drawn[0] == drawn[1]


def test_a_window_is_not_read_again_when_its_rows_are_made_anew(make_source, monkeypatch):
    import tokenmill.live.lanes as module

    lanes = lanes_of(make_source(seq_len=4, window_bytes=4000), 1)
    lanes.next_row(0, FORMATS[0])
    monkeypatch.setattr(module, "tokenize_window", lambda *_: pytest.fail("a window was read"))
    for format in (*FORMATS, *FORMATS):
        lanes.next_row(0, format)


def test_lanes_that_start_again_begin_the_next_epoch_once(make_source):
    lanes = lanes_of(make_source(seq_len=4), 2)
    lanes.next_row(1, FORMATS[0])
    lanes.restart()
    lanes.restart()
    assert lanes.positions() == {0: LanePosition(), 1: LanePosition(epoch=1)}


@pytest.mark.parametrize("more", [(), (DrawnRows(FORMATS[1], 1),)])
def test_rows_that_a_window_does_not_have_are_refused(make_source, more):
    drawn = (DrawnRows(FORMATS[0], 10**6), *more)
    lanes = lanes_of(make_source(seq_len=4), 1, {0: LanePosition(drawn=drawn)})
    with pytest.raises(ResumeError, match=r"a lane must be at a row of .*, got row 1000000 of \d+ in epoch 0; use"):
        lanes.next_row(0, FORMATS[1])


def test_documents_too_long_are_left_out_by_the_format_in_which_a_window_was_begun(
    tmp_path, texts, write, numbers, labels_of
):
    path = write(tmp_path / "x.jsonl", texts([3, 30, 4, 5, 2, 3, 4, 2]))
    source = open_live(
        path, tokenizer=numbers(), options=LiveOptions(seq_len=8, packing="padded", on_error="skip", lanes=1)
    )
    lanes = lanes_of(source, 1)
    seen = []
    for format in (RowFormat(8, "padded", "allow", "return"), RowFormat(64, "best_fit", "allow", "return")):
        window, row = lanes.next_row(0, format)
        seen += labels_of(window, [row], format.seq_len)
    assert lanes.positions() == {0: LanePosition(epoch=1)}
    assert sorted(seen) == [*range(10, 13), *range(43, 63)]
    assert np.sum(list(lanes.skipped.counts.values())) == 1
