"""Lines that are too large, or would be as text, are never held."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
