"""Parts give back what was written, in blocks that end between documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.prepare import part
from tokenmill.prepare.part import PartWriter, read_part, read_progress

KEYS = {"sequence": "<u2", "loss_mask": "|u1"}


@given(
    batches=st.lists(st.lists(st.integers(0, 30), max_size=6), max_size=5),
    block_bytes=st.sampled_from([1, 2, 16, 40, 1 << 20]),
)
def test_part_gives_back_every_document_in_order(tmp_path_factory, batches, block_bytes):
    folder = tmp_path_factory.mktemp("parts") / "0"
    lengths = [length for batch in batches for length in batch]
    total = sum(lengths)
    written = {"sequence": np.arange(total, dtype="<u2"), "loss_mask": np.arange(total).astype("|u1")}
    begin = 0
    with PartWriter(folder, KEYS) as writer:
        for batch in batches:
            offsets = np.cumsum([0, *batch])
            end = begin + int(offsets[-1])
            writer.append({key: values[begin:end] for key, values in written.items()}, offsets)
            begin = end
    read = [(arrays, np.diff(offsets)) for arrays, offsets in read_part(folder, KEYS, block_bytes=block_bytes)]
    assert [int(length) for _, block in read for length in block] == lengths
    for key, values in written.items():
        assert b"".join(arrays[key].tobytes() for arrays, _ in read) == values.tobytes()
    assert all(block.sum() * 2 <= block_bytes or block.size == 1 or block[1:].sum() == 0 for _, block in read)


def test_large_parts_are_mapped_a_piece_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(part, "_MAPPED_BYTES", 1)
    lengths = [3, 0, 70_000, 1, 5, 40_000]
    ids = np.arange(sum(lengths), dtype="<u4")
    with PartWriter(tmp_path / "0", {"sequence": "<u4"}) as writer:
        writer.append({"sequence": ids}, np.cumsum([0, *lengths]))
    read = list(read_part(tmp_path / "0", {"sequence": "<u4"}, block_bytes=1000))
    assert np.concatenate([arrays["sequence"] for arrays, _ in read]).tolist() == ids.tolist()
    assert [int(length) for _, offsets in read for length in np.diff(offsets)] == lengths


def test_lengths_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(part, "_LENGTHS_AT_ONCE", 3)
    with PartWriter(tmp_path / "0", {"sequence": "<u2"}) as writer:
        writer.append({"sequence": np.arange(45, dtype="<u2")}, np.cumsum([0, *range(10)]))
    blocks = [(arrays["sequence"], offsets) for arrays, offsets in read_part(tmp_path / "0", {"sequence": "<u2"})]
    assert [offsets.size - 1 for _, offsets in blocks] == [3, 3, 3, 1]
    assert np.concatenate([ids for ids, _ in blocks]).tolist() == list(range(45))


def test_progress_is_what_was_told_last(tmp_path):
    assert read_progress(tmp_path / "0") == (0, 0, 0)
    with PartWriter(tmp_path / "0", KEYS) as writer:
        assert read_progress(tmp_path / "0") == (0, 0, 0)
        writer.tell_progress(1, 2, 3)
        writer.tell_progress(10, 20, 30)
        assert read_progress(tmp_path / "0") == (10, 20, 30)


def test_part_of_another_dtype_is_a_bug(tmp_path):
    with PartWriter(tmp_path / "0", {"sequence": "<u2"}) as writer, pytest.raises(AssertionError):
        writer.append({"sequence": np.arange(3, dtype="<u4")}, np.array([0, 3]))
