"""Text files are documents as they stand."""

import pytest
from tests.documents.corpora import COMPRESS, bad_of, num_lines_of, read, reasons_of, records_of, texts_of

from tokenmill.documents import ReadOptions, cut_files, find_files, read_unit
from tokenmill.errors import DocumentError


@pytest.fixture(params=COMPRESS)
def write(request, tmp_path):
    def write(data, name="a.txt"):
        path = tmp_path / f"{name}{request.param}"
        path.write_bytes(COMPRESS[request.param](data))
        return path

    return write


@pytest.mark.parametrize("name", ["a.txt", "a.text", "a.md"])
def test_file_is_one_document_with_its_newlines(write, name):
    text = "first\r\n\r\nsecond ä\n"
    assert texts_of(read(write(text.encode(), name))) == [text]
    assert texts_of(read(write(text.encode(), name), text_field="whatever")) == [text]


def test_byte_order_mark_is_dropped(write):
    assert texts_of(read(write(b"\xef\xbb\xbfx"))) == ["x"]


def test_empty_file_is_an_empty_text_and_white_space_is_one_too(write):
    assert texts_of(read(write(b""))) == [""]
    assert num_lines_of(read(write(b""))) == 1
    assert texts_of(read(write(b" \n"))) == [" \n"]


def test_file_that_is_not_utf8_is_bad(write):
    assert bad_of(read(write(b"abc\xff"))) == [(0, "utf8", "invalid start byte at byte 3 of the record")]


def test_file_that_is_too_long_is_bad(write):
    """[S.e]"""
    path = write(b"x" * 1000)
    assert bad_of(read(path, max_record_bytes=999)) == [(0, "too_long", "1000 bytes")]
    assert texts_of(read(path, max_record_bytes=1000)) == ["x" * 1000]


def test_lines_are_documents_if_asked_for_and_blank_ones_are_none(write):
    path = write(b"\xef\xbb\xbfone\r\n\n  \ntwo \xc3\xa4\n\x0c\nlast")
    batches = read(path, text_unit="line")
    assert texts_of(batches) == ["one", "two ä", "last"]
    assert [line for batch in batches for line in batch.lines] == [0, 3, 5]
    assert num_lines_of(batches) == 6
    assert records_of(read(path, text_unit="line", text_field=None))[1] == {"text": "two ä"}


@pytest.mark.parametrize("batch_bytes", [3, 1 << 20])
def test_bad_lines_do_not_hide_the_good_ones(write, batch_bytes):
    path = write(b"one\n\xff\n\n" + b"x" * 100 + b"\ntwo\n")
    batches = read(path, text_unit="line", max_record_bytes=50, batch_bytes=batch_bytes)
    assert texts_of(batches) == ["one", "two"]
    assert reasons_of(batches) == [(1, "utf8"), (3, "too_long")]
    assert [line for batch in batches for line in batch.lines] == [0, 4]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 1 << 20])
def test_lines_of_an_uncompressed_file_are_cut_into_units_like_json_lines(tmp_path, chunk_bytes):
    lines = [f"line {number} ä" for number in range(200)]
    path = tmp_path / "a.txt"
    path.write_text("\n".join(lines))
    files = find_files(path).files
    size = path.stat().st_size
    cut = list(cut_files(files, chunk_bytes=chunk_bytes, text_unit="line"))
    assert len(cut) == -(-size // chunk_bytes)
    assert sum(unit.bytes for unit in cut) == size
    options = ReadOptions(text_unit="line")
    assert texts_of(batch for unit in cut for batch in read_unit(unit, options)) == lines
    assert len(list(cut_files(files, chunk_bytes=chunk_bytes))) == 1


def test_file_that_shrinks_is_an_error_and_what_is_added_is_not_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("twelve bytes")
    (unit,) = cut_files(find_files(path).files, chunk_bytes=1)
    path.write_text("twelve bytes and more")
    assert texts_of(read_unit(unit, ReadOptions())) == ["twelve bytes"]
    path.write_text("few")
    with pytest.raises(DocumentError, match=r"a\.txt: must keep its 12 bytes"):
        list(read_unit(unit, ReadOptions()))


def test_folder_of_files_is_a_document_each_in_natural_order(tmp_path):
    for number in range(12):
        (tmp_path / f"p{number}.txt").write_text(f"text {number}")
    batches = read(tmp_path)
    assert texts_of(batches) == [f"text {number}" for number in range(12)]
    assert [piece for batch in batches for piece in batch.pieces] == list(range(12))
