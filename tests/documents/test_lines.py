"""Lines that are too large, or would be as text, are never held."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.documents.corpora import COMPRESS, bad_of, read

from tokenmill.documents import lines as module
from tokenmill.documents.lines import Unread, split_lines, text_memory


@given(st.text(max_size=60))
def test_the_memory_of_a_text_is_never_taken_for_less_than_it_is(text):
    """[S.e] Escaped or not: what Python holds for it is at most what was said, but for the head of the object."""
    widest = max(map(ord, text), default=0)
    width = 4 if widest > 0xFFFF else 2 if widest > 0xFF else 1
    for ascii_only in (True, False):
        assert text_memory(json.dumps(text, ensure_ascii=ascii_only).encode()) >= width * len(text)


@pytest.mark.parametrize(
    ("raw", "width"),
    [
        (rb"\u0041 \u00ff", 1),
        (rb"\\u0416", 1),
        (rb"\\\u0416", 2),
        (rb"\ud83c\udf3e", 4),
        (rb"\uD83C", 4),
        (rb"\\ud83c", 1),
        ("ü".encode(), 1),
        ("ß\u0416".encode(), 2),
        ("\U0001f33e".encode(), 4),
        (b"", 1),
    ],
)
def test_one_wide_character_makes_all_wide_and_an_escaped_backslash_none(raw, width):
    assert text_memory(raw) == width * len(raw.decode())


@pytest.mark.parametrize(("mark", "kept"), [("x", True), ("\U0001f33e", False)])
def test_a_line_that_fits_as_bytes_but_not_as_text_is_not_read(monkeypatch, mark, kept):
    monkeypatch.setattr(module, "LARGE_BYTES", 10)
    line = (mark + "a" * 60 + "\n").encode()
    ((found, last),) = split_lines(iter([line + b"short\n"]), 100)
    assert (found == line) == kept
    assert isinstance(found, Unread) != kept
    assert last == b"short\n"
    if not kept:
        assert found.detail == f"{len(line)} bytes that take 248 in memory as text"


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
            batches = read(path, text_unit=text_unit, **sizes)
            bad = [(reason, detail) for _, reason, detail in bad_of(batches)]  # lines are counted by piece
            results.append(([text for batch in batches for text in batch.documents], bad))
    assert results[1:] == results[:-1]


def test_a_mark_within_a_file_of_json_lines_makes_its_line_bad(tmp_path):
    path = tmp_path / "joined.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n' * 2)
    for chunk_bytes in range(1, 60):
        ((_, reason, detail),) = bad_of(read(path, chunk_bytes))
        assert (reason, detail[:20]) == ("json", "Unexpected UTF-8 BOM")
