"""JSON files are read record by record, however they are laid out."""

import json
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.documents.corpora import COMPRESS, TEXTS, bad_of, num_lines_of, read, reasons_of, records_of, texts_of

from tokenmill.documents import ReadOptions, cut_files, find_files, read_unit
from tokenmill.documents.json_file import Scanner, are_lines

OBJECTS = [{"text": text, "n": [{"deep": ["]", "}", '"', "\\"]}]} for text in TEXTS]
LAYOUTS = {
    "list": json.dumps(OBJECTS),
    "indented list": json.dumps(OBJECTS, indent=2),
    "packed list": json.dumps(OBJECTS, separators=(",", ":"), ensure_ascii=False),
    "lines": "".join(json.dumps(value) + "\n" for value in OBJECTS),
    "lines with blank ones": "\n\n".join(json.dumps(value) for value in OBJECTS),
    "indented objects": "\n".join(json.dumps(value, indent=2) for value in OBJECTS),
    "objects without space": "".join(json.dumps(value) for value in OBJECTS),
    "one a line, then indented": json.dumps(OBJECTS[0])
    + "\n"
    + "\n".join(json.dumps(value, indent=1) for value in OBJECTS[1:]),
    "list with a mark and space": "\ufeff \n" + json.dumps(OBJECTS) + " \n\n",
}


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
def test_every_layout_gives_the_same_records(tmp_path, layout, compression, batch_bytes):
    path = tmp_path / f"a.json{compression}"
    path.write_bytes(COMPRESS[compression](LAYOUTS[layout].encode()))
    assert texts_of(read(path, batch_bytes=batch_bytes)) == TEXTS
    assert records_of(read(path, text_field=None, batch_bytes=batch_bytes)) == OBJECTS


def test_one_object_is_one_record(tmp_path):
    path = tmp_path / "a.json"
    for indent in (None, 2):
        path.write_text(json.dumps(OBJECTS[4], indent=indent))
        assert records_of(read(path, text_field=None)) == [OBJECTS[4]]


def test_list_of_strings_is_a_list_of_texts(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([*TEXTS, {"text": "an object"}, 7, "last"]))
    batches = read(path)
    assert texts_of(batches) == [*TEXTS, "an object", "last"]
    assert bad_of(batches) == [(len(TEXTS) + 1, "missing_field", "no field 'text' in a number")]
    path.write_text(json.dumps(TEXTS))
    assert texts_of(read(path)) == TEXTS
    assert {reason for _, reason in reasons_of(read(path, text_field=None))} == {"not_object"}


@pytest.mark.parametrize("text", ["", " \n", "[]", " [ ] ", "\ufeff"], ids=repr)
def test_file_of_nothing_has_no_records(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert texts_of(read(path)) == []
    assert bad_of(read(path)) == []


@pytest.mark.parametrize(
    ("text", "texts", "reasons"),
    [
        ('[{"text": "a"}, {"text": "b"', ["a"], [(1, "json")]),
        ('[{"text": "a"},', ["a"], [(1, "json")]),
        ('[{"text": "a"}, {"text": "b]', ["a"], [(1, "json")]),
        ('[{"text": "a"}, {"text": "b\\', ["a"], [(1, "json")]),
        ('[{"text": "a"}] x', ["a"], [(1, "json")]),
        ('[{"text": "a"}, broken, {"text": "b"}]', ["a", "b"], [(1, "json")]),
        ('[{"text": "a"} {"text": "b"}, {"text": "c"}]', ["c"], [(0, "json")]),
        ('{"text": "a"} x {"text": "b"}', ["a", "b"], [(1, "json")]),
        ('{"text": "a"}, {"text": "b"}', ["a", "b"], []),
        ('{"text": "a"}{"text": "b"', ["a"], [(1, "json")]),
        ('{"text": "a"}\n{"text": "b"}\n{"text": "c\n{"text": "d"}\n', ["a", "b", "d"], [(2, "json")]),
        ('"text"', ["text"], []),
        ("hello", [], [(0, "json")]),
        ("]}", [], [(0, "json")]),
        ("[" * 100_000, [], [(0, "json")]),
        ("[" + "[" * 100_000 + "]" * 100_000 + ', "a"]', ["a"], [(0, "json")]),
        ('{"a":' * 100_000, [], [(0, "json")]),
        ('[{"text": "\\ud800"}, {"text": "a", "n": NaN}]', ["a"], [(0, "surrogate")]),
    ],
    ids=lambda value: repr(value)[:40],
)
@pytest.mark.parametrize("batch_bytes", [1, 7, 1 << 20])
def test_what_is_broken_is_told_and_the_rest_is_read(tmp_path, text, texts, reasons, batch_bytes):
    path = tmp_path / "a.json"
    path.write_text(text)
    batches = read(path, batch_bytes=batch_bytes)
    assert (texts_of(batches), reasons_of(batches)) == (texts, reasons)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=10), st.sampled_from(['"', "\\", "[]{},"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)


@given(values=st.lists(VALUES, max_size=6), indent=st.sampled_from([None, 1]), cuts=st.lists(st.integers(0, 400)))
def test_records_do_not_depend_on_where_blocks_end(values, indent, cuts):
    data = json.dumps(values, indent=indent).encode()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    scanner = Scanner(1 << 20)
    found = [raw for begin, end in pairwise(edges) for raw in scanner.feed(data[begin:end])]
    assert [json.loads(raw) for raw in found] == values
    assert scanner.finish() == []


@pytest.mark.parametrize("batch_bytes", [10, 1 << 20])
def test_record_that_is_too_long_is_passed_over(tmp_path, batch_bytes):
    """[S.e]"""
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": "x" * 500}, {"text": "b"}, "y" * 300, "c"]))
    batches = read(path, max_record_bytes=200, batch_bytes=batch_bytes)
    assert texts_of(batches) == ["a", "b", "c"]
    assert reasons_of(batches) == [(1, "too_long"), (3, "too_long")]
    assert num_lines_of(batches) == 5


def test_memory_is_bounded_by_the_record_not_by_the_file(tmp_path):
    """Some 8 MB of records, and one of 24 MB that is too long [K1.a, S.e]."""
    path = tmp_path / "a.json"
    many = b",".join([json.dumps({"text": "x" * 1000}).encode()] * 8_000)
    path.write_bytes(b"[" + many + b',{"text": "' + b"y" * (24 << 20) + b'"},' + many[:1013] + b"]")
    del many
    tracemalloc.start()
    try:
        documents = 0
        bad = []
        for unit in cut_files(find_files(path).files, chunk_bytes=1 << 20):
            for batch in read_unit(unit, ReadOptions(max_record_bytes=1 << 20)):
                documents += len(batch.documents)
                bad += [record.reason for record in batch.bad]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (documents, bad) == (8_001, ["too_long"])
    assert peak < 10 << 20


@pytest.mark.parametrize(
    ("start", "whole", "lines"),
    [
        (b'{"a": 1}', True, True),
        (b'{"a": 1}\n', True, True),
        (b'\n{"a": 1}\n\n{"a": 2}\n[', True, True),
        (b'{"a": 1}\n{', True, False),
        (b'{"a": 1}\n{"b', False, True),
        (b'{"a": 1}\n[', False, False),
        (b'{"a": 1} {"a": 2}\n', True, False),
        (b'{"a', False, False),
        (b"[1]\n[2]\n", True, False),
        (b"", True, False),
    ],
)
def test_json_lines_are_told_by_the_first_two(start, whole, lines):
    assert are_lines(start, whole=whole) is lines
