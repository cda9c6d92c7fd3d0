"""A field has one meaning in every format: the field of that very name, else the one that its dots lead down to."""

from __future__ import annotations

import csv
import io
import json
from itertools import count

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.documents.corpora import read, records_of, tar_of, texts_of

from tokenmill.documents.lines import read_values
from tokenmill.documents.units import ReadOptions
from tokenmill.fields import field_of, top_fields


def csv_of(records, delimiter=","):
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().encode()


def arrow_of(records, new):
    table, out = pa.Table.from_pylist(records), pa.BufferOutputStream()
    with new(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue().to_pybytes()


def parquet_of(records):
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), out)
    return out.getvalue()


def jsonl_of(records):
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


FORMATS = {
    "a.jsonl": jsonl_of,
    "a.json": lambda records: json.dumps(records, indent=1).encode(),
    "a.csv": csv_of,
    "a.tsv": lambda records: csv_of(records, "\t"),
    "a.parquet": parquet_of,
    "file.arrow": lambda records: arrow_of(records, pa.ipc.new_file),
    "stream.arrow": lambda records: arrow_of(records, pa.ipc.new_stream),
    "a.tar": lambda records: tar_of(
        [(f"{index:03}.json", json.dumps(record).encode()) for index, record in enumerate(records)]
    ),
}
VALUES = st.recursive(
    st.none(), lambda inner: st.dictionaries(st.sampled_from(["a", "b", "a.b"]), inner, min_size=1, max_size=3)
)
"""The shape of a record: objects with these names, and a text at each leaf."""


def filled(shape, numbers):
    if shape is None:
        return f"ä {next(numbers)}"
    return {name: filled(inner, numbers) for name, inner in shape.items()}


@given(shape=VALUES, name=st.sampled_from(["a", "a.b", "a.b.a", "b.a.b"]))
def test_the_same_records_are_the_same_documents_in_every_format(tmp_path_factory, shape, name):
    """[D1.a]"""
    assume(isinstance(shape, dict))
    numbers = count()
    records = [filled(shape, numbers) for _ in range(2)]
    is_flat = all(inner is None for inner in shape.values())
    wanted = [field_of(record, name) for record in records]
    folder = tmp_path_factory.mktemp("fields")
    for file, content_of in FORMATS.items():
        if not is_flat and file.endswith("sv"):
            continue  # a cell is a text
        path = folder / file
        path.write_bytes(content_of(records))
        whole = records_of(read(path, text_field=None, fields=tuple(top_fields([name]))))
        assert [field_of(record, name) for record in whole] == wanted, file
        if isinstance(wanted[0], str):
            assert texts_of(read(path, text_field=name)) == wanted, file


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"a.b": "own", "a": {"b": "inner"}}, "own"),
        ({"a": {"b": "inner", "a.b": "no"}}, "inner"),
        ({"a": {"b": {"c": "no"}}, "a.b": "own"}, "own"),
    ],
)
def test_a_field_of_that_very_name_comes_first(tmp_path, record, text):
    """Also where records of JSON are read one by one."""
    assert read_values([json.dumps(record).encode()], ReadOptions(text_field="a.b")).documents == [text]
    for file, content_of in FORMATS.items():
        if not file.endswith("sv"):
            (tmp_path / file).write_bytes(content_of([record]))
            assert texts_of(read(tmp_path / file, text_field="a.b")) == [text], file


def test_a_dataset_of_hugging_face_has_the_same_fields(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    for name, record in {"own": {"a.b": "own", "a": {"b": "inner"}}, "inner": {"a": {"b": "inner"}}}.items():
        datasets.Dataset.from_list([record]).save_to_disk(tmp_path / name)
        assert texts_of(read(f"hf:{tmp_path / name}", text_field="a.b")) == [name]


def test_a_member_of_an_archive_is_a_field_of_its_name(tmp_path):
    """Before any field in the object of its `json` member, which is then not even parsed."""
    path = tmp_path / "a.tar"
    path.write_bytes(
        tar_of(
            [
                *(("1.seg.txt", b"member"), ("1.json", b"{no JSON")),
                ("2.json", b'{"seg.txt": "own", "seg": {"txt": "inner"}}'),
                ("3.json", b'{"seg": {"txt": "inner"}}'),
            ]
        )
    )
    assert texts_of(read(path, text_field="seg.txt")) == ["member", "own", "inner"]
