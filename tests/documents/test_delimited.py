"""CSV and TSV: exact about quotes and newlines, loud about rows that do not fit."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.documents.corpora import COMPRESS, bad_of, csv_of, num_lines_of, read, reasons_of, records_of, texts_of

from tokenmill.documents import ReadOptions
from tokenmill.errors import ConfigError, DocumentError


@pytest.fixture
def write(tmp_path):
    def write(data, name="a.csv"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


CELL = st.text(st.sampled_from('ab,"\n\r\tä \x00'), max_size=8)


@given(rows=st.lists(st.tuples(CELL, CELL), max_size=8), delimiter=st.sampled_from([",", "\t"]))
def test_what_the_standard_library_writes_is_read_back(tmp_path_factory, rows, delimiter):
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerow(["text", "other"])
    writer.writerows(rows)
    path = tmp_path_factory.mktemp("csv") / ("a.csv" if delimiter == "," else "a.tsv")
    path.write_bytes(out.getvalue().encode())
    for batch_bytes in (1, 1 << 20):
        assert records_of(read(path, text_field=None, batch_bytes=batch_bytes)) == [
            {"text": text, "other": other} for text, other in rows
        ]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"], ids=repr)
def test_every_newline_ends_a_row(write, newline):
    path = write(newline.join(["text,b", "one,1", '"two', ' lines",2', "", "last,3"]).encode())
    assert texts_of(read(path)) == ["one", f"two{newline} lines", "last"]


def test_cells_far_beyond_the_limit_of_the_standard_library_are_read(write):
    long = "x" * 300_000
    path = write(csv_of([long, "short"]))
    assert texts_of(read(path)) == [long, "short"]


def test_bad_rows_are_told_and_the_rest_is_read(write):
    path = write(b'\xef\xbb\xbftext,b\none,1\ntoo,many,cells\nfew\n\nbad\xff,1\n"bad\xff\n",1\nlast,2\n"open,3\n')
    batches = read(path)
    assert texts_of(batches) == ["one", "last"]
    assert bad_of(batches) == [
        (1, "columns", "3 instead of 2"),
        (2, "columns", "1 instead of 2"),
        (4, "utf8", "invalid start byte at byte 3 of a line"),
        (5, "utf8", "invalid start byte at byte 4 of a line"),
        (7, "csv", "the quoted cell that begins in line 10 does not end (1 lines are lost)"),
    ]
    assert num_lines_of(batches) == 8
    assert [line for batch in batches for line in batch.lines] == [0, 6]


@pytest.mark.parametrize("batch_bytes", [10, 1 << 20])
@pytest.mark.parametrize("row", ["x" * 500 + ",1", '"' + "x" * 500 + '",1', '1,"' + '""' * 300 + '"'])
def test_row_of_one_line_that_is_too_long_is_passed_over(write, row, batch_bytes):
    """[S.e]"""
    path = write(f"text,b\na,1\n{row}\nb,1\n".encode())
    batches = read(path, max_record_bytes=200, batch_bytes=batch_bytes)
    assert texts_of(batches) == ["a", "b"]
    assert reasons_of(batches) == [(1, "too_long")]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("max_record_bytes", "problem"), [(60, "has more than 60 bytes"), (1 << 20, "does not end")]
)
def test_lines_that_a_quote_without_an_end_takes_along_are_counted(write, newline, max_record_bytes, problem):
    """Whether what follows it is short enough for a record or not."""
    rows = ["text,b", "one,1", '"open,2', *(f"lost {number},3" for number in range(40))]
    batches = read(write(newline.join(rows).encode()), max_record_bytes=max_record_bytes)
    assert texts_of(batches) == ["one"]
    (bad,) = [bad for batch in batches for bad in batch.bad]
    assert (bad.line, bad.reason, bad.count) == (1, "csv", 41)
    assert bad.detail == f"the quoted cell that begins in line 3 {problem} (41 lines are lost)"


@pytest.mark.parametrize("batch_bytes", [10, 1 << 20])
def test_line_too_long_within_a_quoted_cell_loses_the_lines_after_it(write, batch_bytes):
    """[S.e] Where the next row begins cannot be known, because the quotes in the line were not kept."""
    path = write(b'text,b\na,1\n"' + (b"x" * 150 + b"\n") + b"y" * 400 + b'\n",1\nb,1\n')
    batches = read(path, max_record_bytes=200, batch_bytes=batch_bytes)
    assert texts_of(batches) == ["a"]
    assert [(bad.line, bad.reason, bad.count) for batch in batches for bad in batch.bad] == [(1, "csv", 4)]


def test_a_quote_without_an_end_behind_a_carriage_return_is_seen_too(write):
    batches = read(write(b'text,b\rone,1\r"open,2\rlost,3'))
    assert texts_of(batches) == ["one"]
    assert reasons_of(batches) == [(1, "csv")]


def test_lines_that_a_quote_too_many_joins_are_named(write):
    assert bad_of(read(write(b'text,b\n"open,1\nlost,2\n"x, y",3\n'))) == [
        (0, "columns", "3 instead of 2 in lines 2 to 4")
    ]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_cells_may_stand_between_other_characters(tmp_path, name):
    (tmp_path / name).write_bytes(b'id;text\n1;"a;b"\n2;c,d\n')
    assert texts_of(read(tmp_path / name, delimiter=";")) == ["a;b", "c,d"]


@pytest.mark.parametrize("delimiter", ["", ";;", '"', "\n"])
def test_a_delimiter_is_one_character(delimiter):
    with pytest.raises(ConfigError, match=r"delimiter: must be one character, no quote or newline, got"):
        ReadOptions(delimiter=delimiter)


def test_text_field_with_a_dot_is_a_column_of_that_name(write):
    assert texts_of(read(write(b"a.b,c\nyes,no\n"), text_field="a.b")) == ["yes"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"id,txt\n1,x\n", r"a\.csv: no column 'text', only 'id', 'txt'; name it.*did you mean 'txt'"),
        (b"text,text\n1,x\n", r"a\.csv: column 'text' is in the header twice"),
        (b"te\xfft,b\n1,x\n", r"a\.csv: the header row is bad: utf8"),
    ],
)
def test_header_that_does_not_do_is_refused_with_the_way_out(write, data, message):
    with pytest.raises(DocumentError, match=message):
        read(write(data))


@pytest.mark.parametrize("data", [b"", b"\n\n", b"text,b\n"])
def test_file_without_rows_has_no_documents(write, data):
    assert read(write(data)) == []


def test_columns_that_are_named_twice_matter_only_if_needed(write):
    path = write(b"text,x,x\na,1,2\n")
    assert texts_of(read(path)) == ["a"]
    with pytest.raises(DocumentError, match="column 'x' is in the header twice"):
        read(path, text_field=None)


def test_whole_records_hold_the_fields_that_are_asked_for(tmp_path):
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(COMPRESS[".gz"](b"a\tb\tc\n1\t2\t3\n"))
    assert records_of(read(path, text_field=None, fields=("c", "a", "none"))) == [{"c": "3", "a": "1"}]
