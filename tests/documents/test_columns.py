"""Parquet and Arrow: typed columns become documents, and damaged files become errors."""

import io
import os
import struct
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.documents.corpora import bad_of, num_lines_of, read, reasons_of, records_of, texts_of

from tokenmill.documents import ReadOptions, cut_files, find_files, read_unit
from tokenmill.documents.columns import runs
from tokenmill.errors import DocumentError

WORDS = ["one", "zwei ä", "", "三", "🙂" * 5, "one"]


def as_parquet(table, path, **options):
    pq.write_table(table, path, **options)


def as_file(table, path, **options):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema, **options) as writer:
        writer.write_table(table)


def as_stream(table, path, **options):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, **options) as writer:
        writer.write_table(table)


WRITERS = {"a.parquet": as_parquet, "file.arrow": as_file, "stream.arrow": as_stream}


@pytest.fixture(params=WRITERS)
def write(request, tmp_path):
    def write(table, **options):
        path = tmp_path / request.param
        WRITERS[request.param](table if isinstance(table, pa.Table) else pa.table(table), path, **options)
        return path

    write.name = request.param
    return write


TYPES = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
}


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_of_text_is_read_and_nulls_are_bad(write, kind):
    column = pa.array([*WORDS[:3], None, *WORDS[3:]], pa.string()).cast(TYPES[kind])
    batches = read(write({"text": column}))
    assert texts_of(batches) == WORDS
    assert bad_of(batches) == [(3, "not_text", "field 'text' is null")]
    assert num_lines_of(batches) == 7
    assert [line for batch in batches for line in batch.lines] == [0, 1, 2, 4, 5, 6]


def test_dictionaries_are_read(write):
    column = pa.chunked_array([pa.array([*WORDS, None]).dictionary_encode(), pa.array(["x"]).dictionary_encode()])
    batches = read(write({"text": column.unify_dictionaries()}))
    assert texts_of(batches) == [*WORDS, "x"]
    assert reasons_of(batches) == [(6, "not_text")]


def test_dictionaries_that_change_between_batches_are_read(tmp_path):
    path = tmp_path / "a.arrow"
    schema = pa.schema({"text": pa.dictionary(pa.int32(), pa.string())})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for words in (["a", "b", "a"], ["c", "d"], ["c"]):
            column = pa.array(words).dictionary_encode()
            writer.write_batch(pa.record_batch([column], schema=schema))
    for chunk_bytes in (1, 1 << 20):
        assert texts_of(read(path, chunk_bytes)) == ["a", "b", "a", "c", "d", "c"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_rows_that_share_a_word_make_no_large_batch(tmp_path, kind):
    """A hundred thousand rows of one text of 1 MB are 100 GB: a batch has a few of them [S.e]."""
    path = tmp_path / "a.arrow"
    words = pa.array(["x" * (1 << 20), None, "y"]).cast(kind)
    rows = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 2] * 25_000, pa.int32()), words)
    as_file(pa.table({"text": rows}), path)
    (unit,) = cut_files(find_files(path).files, chunk_bytes=1 << 30)
    batches = list(islice(read_unit(unit, ReadOptions()), 6))
    assert all(sum(map(len, batch.documents)) < 5 << 20 for batch in batches)
    assert "".join(text[0] for text in texts_of(batches))[:4] == "xyxy"
    assert reasons_of(batches)[:2] == [(1, "not_text"), (2, "not_text")]


@pytest.mark.slow
def test_rows_of_parquet_that_share_a_word_make_no_large_batch(tmp_path):
    """Twenty gigabytes in a file of a megabyte [S.e]."""
    path = tmp_path / "a.parquet"
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * (10 << 20)]))
    pq.write_table(pa.table({"text": rows}), path, store_schema=False, dictionary_pagesize_limit=1 << 30)
    assert path.stat().st_size < 2 << 20
    before = pa.total_allocated_bytes()
    (unit,) = cut_files(find_files(path).files, chunk_bytes=1 << 30)
    for batch in islice(read_unit(unit, ReadOptions()), 5):
        assert len(batch.documents) == 1
        assert pa.total_allocated_bytes() - before < 400 << 20


def test_dotted_field_goes_down_into_structs_and_reads_nothing_else(write):
    rows = [{"b": {"c": "x"}, "d": 1}, {"b": None, "d": 2}, None, {"b": {"c": None}, "d": 3}, {"b": {"c": "y"}}]
    path = write({"a": rows, "text": [1, 2, 3, 4, 5]})
    batches = read(path, text_field="a.b.c")
    assert texts_of(batches) == ["x", "y"]
    assert reasons_of(batches) == [(1, "not_text"), (2, "not_text"), (3, "not_text")]


def test_column_with_a_dot_in_its_name_is_taken_first(write):
    assert texts_of(read(write({"a.b": ["yes"]}), text_field="a.b")) == ["yes"]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            "txt",
            r"no column 'txt', only 'text', 'n', 's'; name it with text_field=\.\.\., did you mean 'text'",
        ),
        ("n", r"must have strings in column 'n', got int64; name another text_field"),
        ("s", r"must have strings in column 's', got struct"),
        ("s.y", r"no column 's\.y', only 'xs'; name it with text_field=\.\.\., known: xs"),
        ("n.x", r"no column 'n\.x', only int64; name"),
    ],
)
def test_column_that_is_not_there_is_refused_with_the_way_out(write, field, message):
    path = write({"text": ["a"], "n": [1], "s": [{"xs": "b"}]})
    with pytest.raises(DocumentError, match=message):
        read(path, text_field=field)


def test_columns_of_one_name_are_refused(write):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pytest.raises(DocumentError, match=r"must name each column once, got 'text' twice"):
        read(write(table))


def not_utf8(rows):
    """Make a column of strings of bytes that are none."""
    return pa.array(rows, pa.binary()).view(pa.string())


def test_cells_that_are_not_utf8_are_bad_and_the_rest_is_read(write):
    path = write({"text": not_utf8([b"a", b"\xff", b"b", None])})
    batches = read(path)
    assert texts_of(batches) == ["a", "b"]
    assert reasons_of(batches) == [(1, "utf8"), (3, "not_text")]
    whole = read(path, text_field=None)
    assert records_of(whole) == [{"text": "a"}, {"text": "b"}, {"text": None}]
    assert reasons_of(whole) == [(1, "utf8")]


def test_cells_that_are_too_long_are_bad(write):
    path = write({"text": ["a", "x" * 1000, "b"], "n": [1, 2, 3]})
    for options in ({}, {"text_field": None}):
        batches = read(path, max_record_bytes=500, **options)
        assert reasons_of(batches) == [(1, "too_long")]
    assert records_of(batches) == [{"text": "a", "n": 1}, {"text": "b", "n": 3}]


def test_whole_records_keep_their_nested_values(write):
    rows = [{"m": [{"role": "user", "content": "hi"}], "n": 1}, {"m": [], "n": None}]
    path = write(pa.Table.from_pylist(rows))
    assert records_of(read(path, text_field=None)) == rows
    assert records_of(read(path, text_field=None, fields=("m",))) == [{"m": row["m"]} for row in rows]


def test_nulls_of_a_struct_are_fields_that_the_record_did_not_have(write):
    """A struct has the fields of all rows; what other rows have must not get into this one."""
    calls = [[{"name": "a", "arguments": {"x": 1}}], [{"name": "b", "arguments": {"y": [{"z": 2}, None]}}], None]
    table = pa.table({"calls": calls, "other": [None, "b", None]})
    assert records_of(read(write(table), text_field=None)) == [
        {"calls": calls[0], "other": None},
        {"calls": calls[1], "other": "b"},
        {"calls": None, "other": None},
    ]


def test_values_that_are_kept_as_json_are_what_the_json_says(write):
    texts = ['{"role": "user", "n": [1, null]}', None, '"a text"', "[3]"]
    values = pa.array(texts, pa.json_())
    table = pa.table({"value": values, "listed": pa.ListArray.from_arrays([0, 1, 1, 3, 4], values)})
    assert records_of(read(write(table), text_field=None)) == [
        {"value": {"role": "user", "n": [1, None]}, "listed": [{"role": "user", "n": [1, None]}]},
        {"value": None, "listed": []},
        {"value": "a text", "listed": [None, "a text"]},
        {"value": [3], "listed": [[3]]},
    ]


def test_a_value_that_is_no_json_makes_its_row_bad(write):
    found = read(write(pa.table({"value": pa.array(["1", "{", "3"], pa.json_())})), text_field=None)
    assert [record["value"] for record in records_of(found)] == [1, 3]
    assert reasons_of(found) == [(1, "json")]


def test_file_without_rows_has_no_documents(write):
    assert texts_of(read(write(pa.table({"text": pa.array([], pa.string())})))) == []


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd", "lz4"])
def test_every_compression_of_parquet_is_read(tmp_path, codec):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": WORDS * 100}), path, compression=codec, row_group_size=50)
    assert texts_of(read(path, 200)) == WORDS * 100


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("kind", [as_file, as_stream])
def test_compressed_arrow_is_read(tmp_path, kind, codec):
    path = tmp_path / "a.arrow"
    kind(pa.table({"text": WORDS * 100}), path, options=pa.ipc.IpcWriteOptions(compression=codec))
    assert texts_of(read(path)) == WORDS * 100


def test_rows_are_read_some_at_a_time(tmp_path):
    """One row group of 64 MB: a batch has about a megabyte of it [K1.a]."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"{i}" * 1000 for i in range(20_000)]}), path, row_group_size=1 << 20)
    before = pa.total_allocated_bytes()
    peak = count = 0
    (unit,) = cut_files(find_files(path).files, chunk_bytes=1 << 30)
    for batch in read_unit(unit, ReadOptions()):
        peak = max(peak, pa.total_allocated_bytes() - before)
        count += len(batch.documents)
        assert sum(map(len, batch.documents)) < 3 << 20
    assert count == 20_000
    assert peak < 24 << 20


def test_truncated_file_is_an_error_wherever_it_ends(write):
    """Also between two batches of a stream, where Arrow itself sees nothing wrong [C1]."""
    path = write(pa.concat_tables([pa.table({"text": WORDS})] * 5))
    data = path.read_bytes()
    for end in range(0, len(data), 7):
        path.write_bytes(data[:end])
        with pytest.raises(DocumentError, match=rf"{write.name}: must be an intact (Parquet|Arrow) file, got"):
            read(path)


def error_of(path, **options):
    """Read all of a file, or return what its error begins with."""
    try:
        read(path, **options)
    except DocumentError as error:
        return str(error).partition(": ")[0]
    return ""


@given(place=st.integers(0, 10**9), value=st.integers(1, 255))
def test_damaged_file_gives_documents_or_a_clean_error_and_never_a_crash(tmp_path, place, value):
    """[S.e]"""
    for name, writer in WRITERS.items():
        path = tmp_path / name
        writer(pa.table({"text": WORDS * 3, "s": [{"n": 1, "l": ["x"]}] * 18}), path)
        data = bytearray(path.read_bytes())
        data[place % len(data)] ^= value
        path.write_bytes(data)
        for options in ({}, {"text_field": None}):
            assert error_of(path, **options) in ("", str(path))


@pytest.mark.deep
@pytest.mark.parametrize("name", WRITERS)
def test_no_damaged_byte_crashes(tmp_path, name):
    """[S.e]"""
    path = tmp_path / name
    WRITERS[name](pa.table({"text": WORDS, "s": [{"n": 1, "l": ["x"]}] * 6}), path)
    data = path.read_bytes()
    for place in range(len(data)):
        for value in (0x01, 0x80, 0xFF):
            path.write_bytes(data[:place] + bytes([data[place] ^ value]) + data[place + 1 :])
            for options in ({}, {"text_field": None}):
                assert error_of(path, **options) in ("", str(path))


def test_offsets_that_point_out_of_a_column_are_an_error(tmp_path):
    """[S.e]"""
    path = tmp_path / "a.arrow"
    as_file(pa.table({"text": ["abcd", "efgh"]}), path)
    data = path.read_bytes()
    good = struct.pack("<3i", 0, 4, 8)
    assert data.count(good) == 1
    path.write_bytes(data.replace(good, struct.pack("<3i", 0, 1 << 30, 8)))
    for options in ({}, {"text_field": None}):
        with pytest.raises(DocumentError, match=r"a\.arrow: must be an intact Arrow file"):
            read(path, **options)


def test_other_files_with_these_endings_are_refused(tmp_path):
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b'{"text": "json"}\n' * 100)
        with pytest.raises(DocumentError, match=r"must be an intact .*or fix its name"):
            read(tmp_path / name)
    (tmp_path / "b.feather").write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    with pytest.raises(DocumentError, match=r"got Feather version 1; read and write it again"):
        read(tmp_path / "b.feather")


def test_file_that_changes_its_size_is_an_error(write):
    path = write({"text": WORDS})
    (unit,) = cut_files(find_files(path).files, chunk_bytes=1 << 20)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(DocumentError, match=r"must keep its .* bytes"):
        list(read_unit(unit, ReadOptions()))


def test_pieces_are_about_a_chunk_and_sum_to_the_file(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [f"{i} " * 200 for i in range(1000)]
    pq.write_table(pa.table({"text": rows}), path, row_group_size=10, compression="none", use_dictionary=False)
    (file,) = find_files(path).files
    chunk_bytes = file.bytes // 10
    pieces = [piece for unit in cut_files([file], chunk_bytes=chunk_bytes) for piece in unit.pieces]
    assert sum(piece.bytes for piece in pieces) == file.bytes
    assert all(chunk_bytes <= piece.bytes < 1.2 * chunk_bytes for piece in pieces[:-1])
    assert [piece.begin for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    assert pieces[-1].end == 100


@given(st.lists(st.integers(1, 1000), max_size=20), st.integers(0, 10**6), st.integers(1, 10**6))
def test_runs_cover_all_parts_and_all_bytes(sizes, total, chunk_bytes):
    found = list(runs(sizes, total, chunk_bytes))
    assert [index for begin, end, _ in found for index in range(begin, end)] == list(range(len(sizes)))
    assert sum(size for _, _, size in found) == (total if sizes else 0)
    assert all(size >= chunk_bytes for _, _, size in found[:-1])


def test_reading_from_a_stream_of_many_batches_can_begin_anywhere(tmp_path):
    path = tmp_path / "a.arrow"
    table = pa.table({"text": [str(i) for i in range(100)]})
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    path.write_bytes(out.getvalue())
    units = list(cut_files(find_files(path).files, chunk_bytes=1))
    assert len(units) == 34
    assert [next(read_unit(unit, ReadOptions())).documents[0] for unit in units[::-1]] == [
        str(i) for i in range(99, -1, -3)
    ]


@pytest.mark.parametrize("name", ["file.arrow", "stream.arrow"])
def test_a_file_that_is_truncated_while_it_is_mapped_is_an_error(tmp_path, name):
    """[S.g] The texts of the next batches are on pages that are still there, so no signal ends this process."""
    path = tmp_path / name
    batch = pa.table({"text": ["mill " * 2000] * 20})
    WRITERS[name](pa.concat_tables([batch] * 20), path)
    (unit,) = cut_files(find_files(path).files, chunk_bytes=1 << 30)
    batches = read_unit(unit, ReadOptions(batch_bytes=1 << 16))
    next(batches)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(
        DocumentError, match=r"arrow: must (keep its|be an intact Arrow file, got a file whose size)"
    ):
        list(batches)
