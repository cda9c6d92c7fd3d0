"""Which documents a lane reads when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.documents import ReadOptions, find_files, read_unit
from tokenmill.errors import DocumentError
from tokenmill.live.windows import HEAD, TAIL, WHOLE, cut_windows


def documents_of(window):
    """Return the texts of a window."""
    texts = [text for batch in read_unit(window.unit, ReadOptions()) for text in batch.documents]
    return [texts[number] for number in window.members(0, len(texts)).tolist()]


@given(
    lanes=st.integers(1, 40),
    window_bytes=st.integers(20, 3000),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_the_lanes_of_an_epoch_read_every_document_exactly_once(corpus, lanes, window_bytes, shuffle, seed, epoch):
    """[R1.d]"""
    files = find_files(corpus).files
    windows = cut_windows(files, window_bytes=window_bytes, lanes=lanes, seed=seed, shuffle=shuffle)
    whole = cut_windows(files, window_bytes=10**9, lanes=1, seed=0, shuffle=False)
    read = [
        text
        for lane in range(lanes)
        for turn in range(windows.num_turns(lane))
        for text in documents_of(windows.at(lane, epoch, turn))
    ]
    assert sorted(read) == sorted(documents_of(whole.at(0, 0, 0)))
    assert windows.num_windows >= lanes


def test_a_lane_begins_with_its_share_of_a_window_and_ends_with_the_rest(corpus):
    windows = cut_windows(find_files(corpus).files, window_bytes=300, lanes=4, seed=0, shuffle=True)
    for lane in range(4):
        turns = [windows.at(lane, 0, turn) for turn in range(windows.num_turns(lane))]
        if lane < 3:
            assert [turn.take for turn in turns] == [HEAD, *[WHOLE] * (len(turns) - 2), TAIL]
            assert turns[0].number == turns[-1].number
            assert (turns[0].head, turns[0].of) == (lane + 1, 4)
        else:
            assert [turn.take for turn in turns] == [WHOLE] * len(turns)
        assert [windows.after(lane, 0, turn) for turn in range(len(turns))] == [
            *((0, turn) for turn in range(1, len(turns))),
            (1, 0),
        ]


def test_without_shuffling_windows_are_dealt_in_turn_and_whole(corpus):
    windows = cut_windows(find_files(corpus).files, window_bytes=300, lanes=4, seed=0, shuffle=False)
    for lane in range(4):
        turns = [windows.at(lane, 5, turn) for turn in range(windows.num_turns(lane))]
        assert [turn.number for turn in turns] == list(range(lane, windows.num_windows, 4))
        assert {turn.take for turn in turns} == {WHOLE}


def test_large_row_groups_and_files_are_read_in_parts_of_about_the_size_of_a_window(tmp_path, texts, write):
    path = write(tmp_path / "x.parquet", texts([50] * 100), [100])
    files = find_files(path).files
    windows = cut_windows(files, window_bytes=files[0].bytes // 5, lanes=1, seed=0, shuffle=False)
    assert (windows.num_windows, windows.max_parts) == (5, 5)
    assert [len(documents_of(windows.at(0, 0, turn))) for turn in range(5)] == [20] * 5
    assert str(windows.at(0, 0, 2)) == f"{path} row groups 0:1 (part 3 of 5)"


def test_windows_are_named_by_file_and_place(corpus):
    windows = cut_windows(find_files(corpus).files, window_bytes=1000, lanes=1, seed=0, shuffle=False)
    names = [str(windows.at(0, 0, turn)) for turn in range(windows.num_turns(0))]
    assert names[0].startswith(f"{corpus / 'a.parquet'} row groups 0:")
    assert any(" bytes 0:1000" in name for name in names)
    assert any("c.jsonl.gz" in name for name in names)
    assert any("d.arrow record batches" in name for name in names)


def test_a_source_without_records_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(DocumentError, match="must have records, got 1 empty files"):
        cut_windows(find_files(tmp_path).files, window_bytes=8, lanes=1, seed=0, shuffle=True)
