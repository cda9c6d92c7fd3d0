"""Lines become documents: every line once, wherever the file is cut."""

import gzip
import json
import tracemalloc
from io import BytesIO

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
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
from tokenmill.documents.lines import read_values
from tokenmill.errors import ConfigError, DocumentError


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
    assert all(1000 <= sum(map(len, batch.documents)) <= 2000 for batch in by_text[:-1])
    by_count = read(path, batch_documents=20)
    assert texts_of(by_count) == texts
    assert all(20 <= len(batch.documents) < 40 for batch in by_count[:-1])


def test_bad_and_blank_lines_do_not_hide_the_good_ones_around_them(write):
    good = lines_of(["good"])
    path = write((good * 3 + b"broken\n" + good + b"\n" + good * 2) * 50)
    batches = read(path, batch_bytes=40, batch_documents=7)
    assert texts_of(batches) == ["good"] * 300
    assert [line for line, _, _ in bad_of(batches)] == [8 * time + 3 for time in range(50)]


def test_dotted_field_goes_down(write):
    path = write(b'{"a": {"b": "yes"}, "b": "no", "text": "no"}\n')
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
    ("line", "detail"),
    [
        (b"broken", "unexpected character, expected a JSON value at character 0 of the record"),
        (b'{"text": "a"', "unexpected end of data at character 13 of the record"),
        (b'{"text": "a"} x', "unexpected content after document at character 14 of the record"),
        (b'{"text": "no end', "unexpected control character in string at character 16 of the record"),
        (b'{"text": "a\tb"}', "unexpected control character in string at character 11 of the record"),
        (b"[", "unexpected end of data at character 2 of the record"),
    ],
)
def test_what_is_wrong_with_the_json_of_a_line_is_told_with_its_place(write, line, detail):
    assert bad_of(read(write(line + b"\n" + b'{"text": "a"}\n'))) == [(0, "json", detail)]


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


@pytest.mark.slow
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


def test_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_bytes(lines_of(TEXTS * 1000))
    (unit,) = cut_files(find_files(path).files, chunk_bytes=16 << 20)
    batches = read_unit(unit, ReadOptions(batch_bytes=100))
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


@pytest.mark.slow
def test_memory_is_bounded_by_the_batch_not_by_the_file(write):
    """Some 32 MB of text; a thousand-fold compression must not be decompressed at once."""
    path = write(lines_of(["x" * 1000]) * 32_000)
    tracemalloc.start()
    try:
        units = cut_files(find_files(path).files, chunk_bytes=8 << 20)
        options = ReadOptions(batch_bytes=1 << 18)
        documents = sum(len(batch.documents) for unit in units for batch in read_unit(unit, options))
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


def test_lines_over_many_blocks_are_put_together(tmp_path):
    texts = ["x" * size for size in (300_000, 10, 131_072, 0, 500_000, 131_071 - 11)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines_of(texts))
    assert texts_of(read(path)) == texts


@pytest.mark.parametrize("field", ["ä", "a b", '"', "\\", "\n", "x" * 200])
def test_a_field_of_any_name_is_found(tmp_path, field):
    path = tmp_path / "a.jsonl"
    for ascii_only in (True, False):
        path.write_text(
            json.dumps({"text": "no", field: "yes"}, ensure_ascii=ascii_only) + "\n" + '{"text": "no"}\n'
        )
        batches = read(path, text_field=field)
        assert texts_of(batches) == ["yes"]
        assert reasons_of(batches) == [(1, "missing_field")]


@pytest.mark.parametrize(
    "lines",
    [
        [b'{"text":', b'"a"} {"text": "b"}'],
        [b'{"text": "a", "n": [{}', b', {}]} {"text": "b"}'],
        [b'{"n":', b'{"text": "no"}, "text": "a"} {"text": "b"}'],
        [b'{"text": "a"} {"text": "b"}', b'{"n": {}', b', "text": "c"}'],
        [b"{", b'"text": "a"} {"text": "b"} {"text": "c"}', b'{"n": 1', b"}"],
    ],
)
def test_a_value_over_several_lines_is_none_and_a_line_holds_one(tmp_path, lines):
    """[C1] Also where there are as many values as lines, so that nothing seems amiss."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "first"}', *lines, b'{"text": "last"}', b""]))
    batches = read(path)
    assert texts_of(batches) == ["first", "last"]
    assert reasons_of(batches) == [(number, "json") for number in range(1, len(lines) + 1)]


STRING = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    [
        "",
        "\x00\x1f\x7f",
        '"\\/\b\f\n\r\t',
        "\ud7ff\ue000\uffff",
        "🙂" * 40,
        "ä" * 70,
        "x" * 200,
        "\\" * 130,
        "\n" * 64,
    ]
)
LONG = st.lists(STRING | st.integers(0, 70).map(lambda size: "y" * size), max_size=8).map("".join)
NUMBER = (
    st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0, -0.0, 1e-7, 1.5e300, 10**30, 10**100])
)
VALUE = st.recursive(
    STRING | NUMBER | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRING, inner, max_size=4),
    max_leaves=8,
)
NAME = st.sampled_from(["text", "id", "meta", "Text", "texts", "tex", "ä", ""]) | STRING
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", "\r: "), ("\t,", " :\t")])


@st.composite
def objects(draw):
    """Make a line with one object, mostly with the text field."""
    record = draw(st.dictionaries(NAME, VALUE, max_size=4))
    if draw(st.integers(0, 9)):
        record["text"] = draw(LONG)
    separators = draw(SPACES)
    line = json.dumps(record, ensure_ascii=draw(st.booleans()), separators=separators).encode()
    return draw(st.sampled_from([b"", b" ", b"\t\r"])) + line + draw(st.sampled_from([b"", b" ", b"\r", b"\t "]))


@st.composite
def mutants(draw):
    """Make a line some bytes of which are changed, put in or left out."""
    line = bytearray(draw(objects()))
    odd = st.sampled_from(b'"\\{}[],:0123456789-+.eEtrufalsn /\xc3\xa9\xe2\x82\xed\xa0\xf0\xff\x00\x1f\x7f\r')
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(line)))
        what = draw(st.integers(0, 2))
        if what == 0:
            line.insert(place, draw(odd | st.integers(0, 255)))
        elif place < len(line):
            line[place : place + 1] = b"" if what == 1 else bytes([draw(odd | st.integers(0, 255))])
    return bytes(line)


ODD = [
    b"",
    b" \t\r",
    b"\x0b\x0c",
    b"{}",
    b"[]",
    b"null",
    b'"text"',
    b'{"text"}',
    b'{"text": "a",}',
    b'{,"text": "a"}',
    b'{"text": "a"} {"text": "b"}',
    b'{"text": "a"}}',
    b'{"text": "a"} x',
    b'{"text": "first", "text": "last"}',
    b'{"text": "first", "text": 7}',
    b'{"text": 7, "text": "last"}',
    b'{"text": "plain", "\\u0074ext": "escaped"}',
    b'{"\\u0074ext": "escaped"}',
    b'{"te\\xt": "bad escape"}',
    b'{"text": "a\\qb"}',
    b'{"text": "a\\',
    b'{"text": "a\\u00',
    b'{"text": "a\\u00g0"}',
    b'{"text": "\\ud83c\\udf3e \\uD83C\\uDF3E"}',
    b'{"text": "\\ud83c"}',
    b'{"text": "\\udf3e\\ud83c"}',
    b'{"text": "\\udf3e\\udf3e"}',
    b'{"text": "\\ud83c\\u0041"}',
    b'{"text": "\\ud83cx\\udf3e"}',
    b'{"text": "\\ud83c\\n"}',
    b'{"other": "\\ud83c", "text": "a"}',
    b'{"other": "\\ud83c\\udf3e\\/", "text": "a"}',
    b'{"text": "\\u0000\\u007f\\u0080\\u07ff\\u0800\\uffff"}',
    b'{"text": "tab\there"}',
    b'{"text": "nul\x00here"}',
    b'{"other": "tab\there", "text": "a"}',
    b'{"text": "\xff"}',
    b'{"text": "\xed\xa0\x80"}',
    b'{"text": "\xc0\xaf"}',
    b'{"text": "\xf4\x90\x80\x80"}',
    b'{"text": "cut \xe2\x82"}',
    b'{"other": "\xe2\x82\xac", "text": "a"}',
    b'{"other": "\xe2\x82", "text": "a"}',
    b'{"other": "\xed\xa0\x80", "text": "a"}',
    b'{"other": "\xe0\x9f\xbf", "text": "a"}',
    b'{"other": "\xf0\x8f\xbf\xbf", "text": "a"}',
    b'{"other": "\xf4\x8f\xbf\xbf", "text": "a"}',
    b'{"other": "\xf4\x90\x80\x80", "text": "a"}',
    b'{"other": "\xf5\x80\x80\x80", "text": "a"}',
    b'{"other": "\xc1\xbf", "text": "a"}',
    b'{"\xc3\xa4": 1, "text": "a"}',
    b'{"\xc3": 1, "text": "a"}',
    b'\xef\xbb\xbf{"text": "mark"}',
    b'{"text": "a"}\x00',
    b'{"text": "a", "n": NaN}',
    b'{"text": "a", "n": -Infinity}',
    *(
        b'{"n": ' + number + b', "text": "a"}'
        for number in [
            *(b"0", b"-0", b"00", b"01", b"-01", b"-", b"+1", b"1.", b".5", b"1.5", b"1e5", b"1E+5", b"1e-5"),
            *(b"1e", b"1e+", b"1.e5", b"0x10", b"1_0", b"1e999", b"-1e999", b"1" * 63, b"1" * 64, b"1" * 65),
            *(b"1" * 400, b"9" * 5000, b"0." + b"3" * 70, b"true", b"false", b"null", b"True", b"nul", b"truee"),
            *(b"[]", b"{}", b"[1,2]", b"[1,]", b"[,1]", b"[1 2]", b'{"a":1}', b'{"a":1,}', b'{"a" 1}', b"{1:2}"),
            *(b"[}", b"{]", b'["a":1]', b'{"a"}', b"[[[]],{}]", b'{"a":{"a":[{}]}}', b'{"a":"b"', b"[1"),
            *(b"[" * depth + b"]" * depth for depth in (63, 64, 65, 1023, 1024, 1025)),
            *(b'{"a":' * depth + b"1" + b"}" * depth for depth in (63, 64, 65)),
            b'["' + b"x" * 300 + b'\\"\\u00e9"]',
        ]
    ),
]


def apart(data, **options):
    """Read lines one by one: documents, bad records and blank lines."""
    group = read_values(BytesIO(data).readlines(), ReadOptions(**options))
    return group.documents, [(bad.line, bad.reason, bad.detail) for bad in group.bad], group.num_lines


def together(path, data, **options):
    path.write_bytes(data)
    batches = read(path, **options)
    return texts_of(batches), bad_of(batches), num_lines_of(batches)


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 200, 1 << 20])
def test_an_odd_line_is_read_alike_wherever_blocks_end_and_whatever_is_around_it(tmp_path, block_bytes):
    """[C1]"""
    data = b"\n".join(line for odd in ODD for line in (odd, b'{"text": "between"}'))
    assert together(tmp_path / "a.jsonl", data, batch_bytes=block_bytes) == apart(data)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    lines=st.lists(st.tuples(objects() | mutants(), st.sampled_from([b"\n", b"\r\n", b"\n\n"])), max_size=8),
    final_newline=st.booleans(),
    block_bytes=st.sampled_from([1, 13, 64, 150, 1 << 20]),
    documents=st.sampled_from([1, 2, 4096]),
)
def test_any_line_is_read_alike_wherever_blocks_end(tmp_path, lines, final_newline, block_bytes, documents):
    """Documents, and bad records with reason, line and detail [C1, D1.a]."""
    data = b"".join(line + end for line, end in lines)
    data = data if final_newline else data.rstrip(b"\r\n")
    options = {"batch_bytes": block_bytes, "batch_documents": documents}
    assert together(tmp_path / "a.jsonl", data, **options) == apart(data)


def standard_text(line):
    """Return what the standard library finds in the text field of a line, None if that is no text."""
    try:
        text = json.loads(line.decode())["text"]
        text.encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return text


def check_line(line):
    group = read_values([line], ReadOptions())
    expected = standard_text(line)
    if expected is None and group.documents:  # it only nests more lists than the standard library follows
        with pytest.raises(RecursionError):
            json.loads(line)
        return
    assert group.documents == ([] if expected is None else [expected])


@pytest.mark.parametrize("odd", ODD, ids=lambda line: repr(line[:40]))
def test_a_line_has_the_text_that_the_standard_library_finds(odd):
    check_line(odd)


@given(line=objects() | mutants())
def test_any_line_has_the_text_that_the_standard_library_finds(line):
    check_line(line)


@pytest.mark.deep
@settings(max_examples=20_000)
@given(line=mutants())
def test_no_mutant_has_another_text(line):
    check_line(line)


@pytest.mark.parametrize("line", [b'{"other": "\xe2\x82", "text": "a"}', b'{"\xc3": 1, "text": "a"}'])
def test_a_line_is_bad_whichever_field_has_bytes_that_are_not_utf8(write, line):
    batches = read(write(line + b"\n" + b'{"text": "b"}\n' + line))
    assert texts_of(batches) == ["b"]
    assert [(number, reason) for number, reason, _ in bad_of(batches)] == [(0, "utf8"), (2, "utf8")]
