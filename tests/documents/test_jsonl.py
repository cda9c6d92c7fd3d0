"""Lines become documents: every line once, wherever the file is cut."""

import gzip
import json
import tracemalloc
from importlib import import_module

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.documents import corpora
from tests.documents.corpora import (
    COMPRESS,
    TEXTS,
    bad_of,
    lines_of,
    num_lines_of,
    read,
    reasons_of,
    records_of,
    texts_of,
)

from tokenmill.documents import ReadOptions, cut_files, find_files, read_unit
from tokenmill.errors import ConfigError, DocumentError


@pytest.fixture(params=[False, True], ids=["parser", "kernel"], autouse=True)
def compiled(request, monkeypatch):
    """Have all tests run twice; the kernel is loaded before any of them measures memory."""
    monkeypatch.setitem(corpora.DEFAULTS, "compiled", request.param)
    if request.param:
        scanned = import_module("tokenmill.documents.scanned")
        list(scanned.scanned_groups(iter([b"{}"]), ReadOptions(), "text", int))
    return request.param


@pytest.fixture(params=COMPRESS)
def write(request, tmp_path):
    def write(data):
        path = tmp_path / f"input.jsonl{request.param}"
        path.write_bytes(COMPRESS[request.param](data))
        return path

    write.compression = request.param
    return write


def test_texts_come_in_order_from_every_kind_of_file(write):
    assert texts_of(read(write(lines_of([*TEXTS, ""])))) == [*TEXTS, ""]


LINE = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=40).map(lambda text: json.dumps({"text": text}).encode()),
    st.sampled_from([b"", b"  ", b"\t"]),
    st.just(b"broken"),
)


@given(
    lines=st.lists(st.tuples(LINE, st.sampled_from([b"\n", b"\r\n"])), max_size=12),
    mark=st.booleans(),
    final_newline=st.booleans(),
    chunk_bytes=st.integers(1, 120),
)
def test_every_cut_gives_every_line_once(tmp_path_factory, lines, mark, final_newline, chunk_bytes):
    """Lines of any length, blank ones, CRLF, a byte order mark, no newline at the end [C1, D1.a]."""
    data = b"".join(line + end for line, end in lines)
    if not final_newline:
        data = data.rstrip(b"\r\n")
    stripped = [line.strip() for line in data.split(b"\n")]
    path = tmp_path_factory.mktemp("cut") / "input.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * mark + data)
    batches = read(path, chunk_bytes)
    assert texts_of(batches) == [json.loads(line)["text"] for line in stripped if line[:1] == b"{"]
    assert len(bad_of(batches)) == stripped.count(b"broken")
    assert num_lines_of(batches) == (data.count(b"\n") + (not data.endswith(b"\n")) if data else int(mark))


def test_units_of_a_file_sum_to_its_size_and_compressed_files_are_one(write):
    path = write(lines_of(TEXTS * 100))
    units = list(cut_files(find_files(path).files, chunk_bytes=1000))
    assert sum(unit.bytes for unit in units) == path.stat().st_size
    assert [unit.index for unit in units] == list(range(len(units)))
    assert (len(units) > 1) == (write.compression == "")


def test_batches_are_bounded_by_text_and_by_documents(write):
    texts = ["x" * 100] * 500
    path = write(lines_of(texts))
    by_text = read(path, batch_bytes=1000)
    assert texts_of(by_text) == texts
    assert all(1000 <= sum(map(len, batch.texts)) <= 2000 for batch in by_text[:-1])
    by_count = read(path, batch_documents=20)
    assert texts_of(by_count) == texts
    assert all(20 <= len(batch.texts) < 40 for batch in by_count[:-1])


def test_bad_and_blank_lines_do_not_hide_the_good_ones_around_them(write):
    good = lines_of(["good"])
    path = write((good * 3 + b"broken\n" + good + b"\n" + good * 2) * 50)
    batches = read(path, batch_bytes=40, batch_documents=7)
    assert texts_of(batches) == ["good"] * 300
    assert [line for line, _, _ in bad_of(batches)] == [8 * time + 3 for time in range(50)]


def test_dotted_field_goes_down(write):
    path = write(b'{"a": {"b": "yes"}, "a.b": "no", "text": "no"}\n')
    assert texts_of(read(path, text_field="a.b")) == ["yes"]


@pytest.mark.parametrize("field", ["", ".", "a..b", "a."])
def test_empty_name_in_a_field_is_refused(field):
    with pytest.raises(ConfigError, match="text_field: must be a name"):
        ReadOptions(text_field=field)


def test_bad_lines_are_told_by_line_and_reason(write):
    lines = [
        b'{"text": "good"}',
        b'{"text": "broken',
        b"",
        b'{"text": "\xff"}',
        b'{"other": "x"}',
        b'{"text": 7}',
        b'{"text": null}',
        b'["text"]',
        b'{"text": {"b": "x"}}',
        b'{"text": "\\ud800"}',
        b'{"text": NaN}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"text": "good too"}',
    ]
    batches = read(write(b"\r\n".join(lines)))
    assert texts_of(batches) == ["good", "good too"]
    assert reasons_of(batches) == [
        (1, "json"),
        (3, "utf8"),
        (4, "missing_field"),
        (5, "not_text"),
        (6, "not_text"),
        (7, "missing_field"),
        (8, "not_text"),
        (9, "surrogate"),
        (10, "not_text"),
        (11, "json"),
    ]
    details = [detail for _, _, detail in bad_of(batches)]
    assert details[1] == "invalid start byte at byte 10 of the record"
    assert details[4] == "field 'text' is null"
    assert details[7] == "a lone U+D800 in a string"
    assert details[9] == "an object that is nested too deeply"
    assert num_lines_of(batches) == len(lines)


@pytest.mark.parametrize(
    "other", [b"NaN", b"Infinity", b"[1, -Infinity]", b'"\\udc00"', b"1" * 400, b"1e999"], ids=repr
)
def test_what_stands_in_another_field_does_not_make_a_line_bad(write, other):
    path = write(b'{"score": ' + other + b', "text": "good"}\n{"text": "too"}\n')
    assert texts_of(read(path)) == ["good", "too"]


def test_missing_part_of_a_dotted_field_is_missing(write):
    batches = read(write(b'{"a": {}}\n{"a": "text"}\n{"a": {"b": 1}}\n'), text_field="a.b")
    assert [reason for _, reason in reasons_of(batches)] == ["missing_field", "missing_field", "not_text"]


def test_whole_records_are_objects_and_nothing_else(write):
    path = write(b'{"a": [1, {"b": null}]}\n\n[1]\n"x"\n{"c": NaN, "a": 2}\n{"a": "\\ud800"}\nbroken\n')
    batches = read(path, text_field=None, fields=("a",))
    assert records_of(batches) == [{"a": [1, {"b": None}]}, {"a": 2}]
    assert reasons_of(batches) == [(2, "not_object"), (3, "not_object"), (5, "surrogate"), (6, "json")]
    assert records_of(read(path, text_field=None))[0] == {"a": [1, {"b": None}]}


@pytest.mark.parametrize("chunk_bytes", [64, 1000, 16 << 20])
@pytest.mark.parametrize("batch_bytes", [50, 1 << 20])
def test_line_that_is_too_long_is_passed_over_amid_good_ones(write, chunk_bytes, batch_bytes):
    """[S.e]"""
    long = lines_of(["x" * 5000])
    path = write(lines_of(["a"]) + long + lines_of(["b", "c"]) + long * 2 + lines_of(["d"]) + long.rstrip())
    batches = read(path, chunk_bytes, max_record_bytes=200, batch_bytes=batch_bytes)
    assert texts_of(batches) == ["a", "b", "c", "d"]
    assert [reason for _, reason in reasons_of(batches)] == ["too_long"] * 4
    assert num_lines_of(batches) == 8
    assert bad_of(batches)[0][2] == f"{len(long)} bytes"


def test_line_of_just_the_most_bytes_is_read(write):
    path = write(lines_of(["x" * 100]))
    size = len(lines_of(["x" * 100]))
    assert texts_of(read(path, max_record_bytes=size)) == ["x" * 100]
    assert reasons_of(read(path, max_record_bytes=size - 1)) == [(0, "too_long")]


def test_memory_does_not_grow_with_a_line_that_is_too_long(write):
    """A line of 64 MB, limit 1 MB [S.e, K1.a]."""
    path = write(lines_of(["a"]) + b'{"text": "' + b"x" * (64 << 20) + b'"}\n' + lines_of(["b"]))
    tracemalloc.start()
    try:
        batches = read(path, 8 << 20, max_record_bytes=1 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert texts_of(batches) == ["a", "b"]
    assert [reason for _, reason in reasons_of(batches)] == ["too_long"]
    assert peak < 24 << 20


def test_file_of_blank_lines_comes_in_bounded_batches(write):
    batches = read(write(b"\n" * 100_000), batch_documents=1000)
    assert num_lines_of(batches) == 100_000
    assert all(1000 <= batch.num_lines < 2000 for batch in batches[:-1])


def test_file_that_shrinks_while_it_is_read_is_an_error(tmp_path, compiled):
    path = tmp_path / "input.jsonl"
    path.write_bytes(lines_of(TEXTS * 1000))
    (unit,) = cut_files(find_files(path).files, chunk_bytes=16 << 20)
    batches = read_unit(unit, ReadOptions(batch_bytes=100, compiled=compiled))
    next(batches)
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(DocumentError, match=r"input\.jsonl: must keep its .* bytes while it is read"):
        list(batches)


def test_file_that_has_shrunk_since_it_was_listed_is_an_error(write):
    path = write(lines_of(TEXTS))
    (unit,) = cut_files(find_files(path).files, chunk_bytes=16 << 20)
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(DocumentError, match=r"must keep its .* bytes"):
        list(read_unit(unit, ReadOptions()))


def test_lines_that_are_added_while_a_file_is_read_are_not_read(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_bytes(lines_of(TEXTS).rstrip())
    (unit,) = cut_files(find_files(path).files, chunk_bytes=16 << 20)
    path.write_bytes(lines_of([*TEXTS, "later"]))
    assert texts_of(read_unit(unit, ReadOptions())) == TEXTS


def test_memory_is_bounded_by_the_batch_not_by_the_file(write, compiled):
    """Some 32 MB of text; a thousand-fold compression must not unfold at once."""
    path = write(lines_of(["x" * 1000]) * 32_000)
    tracemalloc.start()
    try:
        units = cut_files(find_files(path).files, chunk_bytes=8 << 20)
        options = ReadOptions(batch_bytes=1 << 18, compiled=compiled)
        documents = sum(len(batch.texts) for unit in units for batch in read_unit(unit, options))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert documents == 32_000
    assert peak < 12 << 20


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gz", "zst"])
def test_files_of_several_members_or_frames_are_read_whole(tmp_path, compress):
    suffix = "gz" if compress is gzip.compress else "zst"
    data = lines_of(TEXTS)
    path = tmp_path / f"input.jsonl.{suffix}"
    path.write_bytes(b"".join(compress(data[begin : begin + 7]) for begin in range(0, len(data), 7)))
    assert texts_of(read(path)) == TEXTS
