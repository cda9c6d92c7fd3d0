"""JSON files are read record by record, however they are laid out."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.documents.corpora import COMPRESS, TEXTS, bad_of, num_lines_of, read, reasons_of, records_of, texts_of

from tokenmill.documents import ReadOptions, cut_files, find_files, json_file, read_unit
from tokenmill.documents.json_file import are_lines
from tokenmill.errors import DocumentError

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
        ('{"text": "a"}, {"text": "b"}', ["a", "b"], []),
        ('{"text": "a"}\n{"text": "b"}\n{"text": "c\n{"text": "d"}\n', ["a", "b", "d"], [(2, "json")]),
        ('"text"', ["text"], []),
        ('[{"text": "\\ud800"}, {"text": "a", "n": NaN}]', ["a"], [(0, "surrogate")]),
        ('[{"text": "a"}, {"text": [1]}, {"text": "b"}]', ["a", "b"], [(1, "not_text")]),
    ],
    ids=lambda value: repr(value)[:40],
)
@pytest.mark.parametrize("batch_bytes", [1, 7, 1 << 20])
def test_bad_records_are_counted_and_the_rest_is_read(tmp_path, text, texts, reasons, batch_bytes):
    path = tmp_path / "a.json"
    path.write_text(text)
    batches = read(path, batch_bytes=batch_bytes)
    assert (texts_of(batches), reasons_of(batches)) == (texts, reasons)


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ('[{"text": "a"}, {"text": "b"', ["a"]),
        ('[{"text": "a"},', ["a"]),
        ('[{"text": "a"}', ["a"]),
        ('[{"text": "a"}, {"text": "b]', ["a"]),
        ('[{"text": "a"}, {"text": "b\\', ["a"]),
        ('[{"text": "a"}] x', ["a"]),
        ('[{"text": "a"}, broken, {"text": "b"}]', ["a"]),
        ('[{"text": "a"} {"text": "b"}, {"text": "c"}]', ["a"]),
        ('{"text": "a"} x {"text": "b"}', ["a"]),
        ('{"text": "a"}{"text": "b"', ["a"]),
        ("hello", []),
        ("]}", []),
        ("[" * 100_000, []),
        ('{"a":' * 100_000, []),
    ],
    ids=lambda value: repr(value)[:40],
)
@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
def test_damage_ends_the_file_after_the_records_before_it(tmp_path, text, texts, batch_bytes):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DocumentError, match=r"a\.json: not valid JSON: .*; fix the file, or convert it to JSONL"):
        read(path, batch_bytes=batch_bytes)
    batches = read(path, batch_bytes=batch_bytes, skip_broken=True)
    assert (texts_of(batches), reasons_of(batches)) == (
        texts,
        [(len(texts), "broken")] if texts else [(0, "broken")],
    )


@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
def test_record_that_is_not_utf8_is_bad_by_itself(tmp_path, batch_bytes):
    path = tmp_path / "a.json"
    for start in (b'[{"text": "a"}, ', b'[{"text": "a", "n": NaN}, '):
        path.write_bytes(start + b'{"text": "\xff"}, {"text": "b"}]')
        batches = read(path, batch_bytes=batch_bytes)
        assert (texts_of(batches), reasons_of(batches)) == (["a", "b"], [(1, "utf8")])


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.text(max_size=10),
        st.sampled_from([*'"\\', "[]{},", float("inf")]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)


@given(
    values=st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), max_size=6),
    indent=st.sampled_from([None, 1]),
    is_list=st.booleans(),
    batch_bytes=st.sampled_from([1, 40, 1 << 20]),
)
def test_any_list_or_sequence_of_objects_gives_its_objects(tmp_path_factory, values, indent, is_list, batch_bytes):
    path = tmp_path_factory.mktemp("json") / "a.json"
    texts = [json.dumps(value, indent=indent) for value in values]
    path.write_text(f"[{', '.join(texts)}]" if is_list else "\n".join(texts))
    assert records_of(read(path, text_field=None, batch_bytes=batch_bytes)) == values


def test_a_list_above_the_limit_is_refused_and_lines_are_not(tmp_path, monkeypatch):
    """[K1.a] A list is read whole, so it has a limit. JSON lines have none."""
    monkeypatch.setattr(json_file, "MAX_BYTES", 1000)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "x" * 100}] * 10))
    with pytest.raises(DocumentError, match=r"a\.json: .* larger than 1000 bytes.*convert it to JSONL"):
        read(path)
    path.write_text((json.dumps({"text": "x" * 100}) + "\n") * 10)
    assert texts_of(read(path)) == ["x" * 100] * 10


@pytest.mark.parametrize("batch_bytes", [10, 1 << 20])
def test_record_that_is_too_long_is_passed_over(tmp_path, batch_bytes):
    """[S.e]"""
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": "x" * 500}, {"text": "b"}, "y" * 300, "c"]))
    batches = read(path, max_record_bytes=200, batch_bytes=batch_bytes)
    assert texts_of(batches) == ["a", "b", "c"]
    assert reasons_of(batches) == [(1, "too_long"), (3, "too_long")]
    assert num_lines_of(batches) == 5


def test_memory_of_a_list_is_its_size_and_a_batch(tmp_path):
    """[S.e] Some 16 MB of records; parsed, they would take many times that."""
    path = tmp_path / "a.json"
    path.write_text("[" + ",".join([json.dumps({"text": "x" * 200, "n": [1, 2, 3] * 20})] * 40_000) + "]")
    size = path.stat().st_size
    tracemalloc.start()
    try:
        units = cut_files(find_files(path).files, chunk_bytes=1 << 20)
        documents = sum(len(batch.documents) for unit in units for batch in read_unit(unit, ReadOptions()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert documents == 40_000
    assert peak < 2 * size + (16 << 20)


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
