"""A byte order mark is dropped at the start of a file, and is content anywhere else."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.documents.corpora import COMPRESS, bad_of, read

MARKED = [b'{"text": "a"}', b"b,c", b'"d\ne"', b"\xef\xbb\xbf", b" ", b"\n", b"\n", b"\xef\xbb\xbf\xef\xbb\xbf"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".txt", ".txt.zst", ".csv"])
@given(
    parts=st.lists(st.sampled_from(MARKED), max_size=8),
    is_marked=st.booleans(),
    chunk_bytes=st.integers(1, 40),
    batch_bytes=st.integers(1, 40),
    text_unit=st.sampled_from(["line", "file"]),
)
@example([b'{"text": "one"}\n', b'\xef\xbb\xbf{"text": "two"}\n'], False, 16, 40, "line")
def test_a_byte_order_mark_means_the_same_wherever_a_file_is_cut(
    tmp_path_factory, suffix, parts, is_marked, chunk_bytes, batch_bytes, text_unit
):
    """[D1.a] It is dropped at the start of a file. Anywhere else it is content."""
    start = b"text\n" if suffix == ".csv" else b""
    folder = tmp_path_factory.mktemp("marked")
    results = []
    for mark in {b"", b"\xef\xbb\xbf" * is_marked}:
        if not mark and parts and parts[0].startswith(b"\xef"):
            continue
        path = folder / f"a{len(mark)}{suffix}"
        path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](mark + start + b"".join(parts)))
        for sizes in ({}, {"chunk_bytes": chunk_bytes, "batch_bytes": batch_bytes}):
            batches = read(path, text_unit=text_unit, skip_broken=True, **sizes)
            # Lines are counted by piece.
            bad = [(reason, detail.replace(str(path), "")) for _, reason, detail in bad_of(batches)]
            results.append(([text for batch in batches for text in batch.documents], bad))
    assert results[1:] == results[:-1]


def test_a_mark_within_a_file_of_json_lines_makes_its_line_bad(tmp_path):
    path = tmp_path / "joined.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n' * 2)
    for chunk_bytes in range(1, 60):
        ((_, reason, detail),) = bad_of(read(path, chunk_bytes))
        assert (reason, detail[:20]) == ("json", "Unexpected UTF-8 BOM")
