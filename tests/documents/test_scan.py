"""The kernel gives what the parser gives, of any bytes, and does most lines itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.documents.corpora import TEXTS, lines_of, read, texts_of

from tokenmill.documents import scanned
from tokenmill.documents.lines import read_values
from tokenmill.documents.memory import kernel
from tokenmill.documents.scan import scan_lines
from tokenmill.documents.units import ReadOptions

FIELD = "text"

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
NAME = st.sampled_from([FIELD, "id", "meta", "Text", "texts", "tex", "ä", ""]) | STRING
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", "\r: "), ("\t,", " :\t")])


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    """Make a line with one object, mostly with the text field."""
    record = draw(st.dictionaries(NAME, VALUE, max_size=4))
    if draw(st.integers(0, 9)):
        record[FIELD] = draw(LONG)
    separators = draw(SPACES)
    line = json.dumps(record, ensure_ascii=draw(st.booleans()), separators=separators).encode()
    return draw(st.sampled_from([b"", b" ", b"\t\r"])) + line + draw(st.sampled_from([b"", b" ", b"\r", b"\t "]))


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
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


def both(data: bytes, path, **options):
    """Read lines by the parser, and by the kernel."""
    path.write_bytes(data)
    return (read(path, compiled=compiled, **options) for compiled in (False, True))


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 200, 1 << 20])
def test_odd_lines_are_read_as_the_parser_reads_them(tmp_path, block_bytes):
    data = b"\n".join(line for odd in ODD for line in (odd, b'{"text": "between"}'))
    parser, compiled = both(data, tmp_path / "a.jsonl", batch_bytes=block_bytes)
    assert compiled == parser


@pytest.mark.parametrize("odd", ODD, ids=lambda line: repr(line[:40]))
def test_an_odd_line_by_itself_is_read_as_the_parser_reads_it(tmp_path, odd):
    for data in (odd, odd + b"\n", odd + b"\r\n", odd + b" " * 200 + b"\n"):
        parser, compiled = both(data, tmp_path / "a.jsonl")
        assert compiled == parser


@settings(max_examples=150)
@given(
    lines=st.lists(st.tuples(objects() | mutants(), st.sampled_from([b"\n", b"\r\n", b"\n\n"])), max_size=8),
    final_newline=st.booleans(),
    block_bytes=st.sampled_from([1, 13, 64, 150, 1 << 20]),
    documents=st.sampled_from([1, 2, 4096]),
    most=st.sampled_from([30, 100, 1 << 20]),
)
def test_any_lines_are_read_as_the_parser_reads_them(tmp_path, lines, final_newline, block_bytes, documents, most):
    """Documents, bad records with reason, line and detail, blank lines, and where batches end [C1, D1.a]."""
    data = b"".join(line + end for line, end in lines)
    data = data if final_newline else data.rstrip(b"\r\n")
    options = {"batch_bytes": block_bytes, "batch_documents": documents, "max_record_bytes": most}
    parser, compiled = both(data, tmp_path / "a.jsonl", **options)
    assert compiled == parser


@pytest.mark.deep
@settings(max_examples=20_000)
@given(line=mutants())
def test_no_mutant_is_read_otherwise(line):
    check_line(line)


@given(line=objects() | mutants())
@example(b'{"text": "' + b"x" * 118 + b'\\"')
@example(b'{"text": "' + b"x" * 117 + b"\\u00")
def test_a_line_that_is_taken_has_the_text_that_the_parser_finds(line):
    check_line(line)


def check_line(line: bytes) -> None:
    for around in (line, line + b"\n", line + b"\n" + b'{"text": "next"}' + b" " * 200):
        data = np.frombuffer(around, np.uint8)
        guard = np.full(data.size + 64, 0xEE, np.uint8)
        name = np.frombuffer(FIELD.encode(), np.uint8)
        line_ends, text_ends, taken = np.empty(9, np.int64), np.empty(9, np.int64), np.empty(9, np.bool_)
        count, end, filled, _ = scan_lines(data, 0, name, guard[: data.size], 0, (line_ends, text_ends, taken), 0)
        assert end == data.size
        assert (guard[data.size :] == 0xEE).all(), "nothing is written behind the room that was given"
        assert count == around.count(b"\n") + (not around.endswith(b"\n")) if around else count == 0
        begin = start = 0
        for k in range(count):
            raw = around[begin : line_ends[k]]
            if taken[k]:
                text = guard[start : text_ends[k]].tobytes()
                values = read_values([raw], ReadOptions())
                if values.bad:
                    assert [bad.reason for bad in values.bad] == ["utf8"]
                    with pytest.raises(UnicodeDecodeError):
                        text.decode()
                else:
                    assert values.documents == [text.decode()]
            begin, start = int(line_ends[k]), int(text_ends[k])
        assert start == filled


def test_ordinary_lines_never_reach_the_parser(tmp_path, monkeypatch):
    """With other fields, nested ones too, escapes, any language, CRLF: else it would be right but slow."""
    monkeypatch.setattr(scanned, "read_values", lambda raws, _options: pytest.fail(f"{raws[0]!r} was left"))
    meta = {"a": [1, -2.5e-3, {"b": None, "ü": "ö\n"}], "c": {}, "d": [], "e": True}
    rows = [{"id": i, "text": text, "meta": meta, "url": "https://ä.example/\t"} for i, text in enumerate(TEXTS)]
    for ascii_only in (True, False):
        path = tmp_path / "a.jsonl"
        lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
        for newline in ("\n", "\r\n"):
            path.write_bytes(("".join(line + newline for line in lines) * 50).encode())
            assert texts_of(read(path, compiled=True)) == TEXTS * 50


@pytest.mark.parametrize("field", ["ä", "a b", '"', "\\", "\n", "\ud800", "x" * 200])
def test_a_field_of_any_name_is_found(tmp_path, field):
    path = tmp_path / "a.jsonl"
    for ascii_only in (True, False):
        line = json.dumps({"text": "no", field: "yes"}, ensure_ascii=ascii_only)
        parser, compiled = both(line.encode(errors="surrogatepass"), path, text_field=field)
        assert compiled == parser


def test_a_dotted_field_is_left_to_the_parser(tmp_path):
    parser, compiled = both(b'{"a": {"b": "yes"}, "a.b": "no"}\n', tmp_path / "a.jsonl", text_field="a.b")
    assert texts_of(compiled) == texts_of(parser) == ["yes"]


@pytest.mark.parametrize("documents", [1, 3, 4096])
def test_texts_of_many_bytes_a_character_are_left_to_the_parser_for_a_while(tmp_path, monkeypatch, documents):
    """And then the kernel takes over again; the batches do not tell."""
    texts = [*["文字" * 40] * 40, *["plain text"] * 400, *["文字" * 40] * 3]
    seen = []
    real = scanned.scan_lines
    monkeypatch.setattr(scanned, "scan_lines", lambda *given: seen.append(given[0].size) or real(*given))
    parser, compiled = both(
        lines_of(texts), tmp_path / "a.jsonl", batch_bytes=300, batch_documents=documents, max_record_bytes=1000
    )
    assert compiled == parser
    assert texts_of(compiled) == texts
    num_blocks = len(lines_of(texts)) // 300
    assert 0 < len([size for size in seen if size]) < num_blocks


def test_lines_over_many_blocks_are_put_together(tmp_path):
    texts = ["x" * size for size in (300_000, 10, 131_072, 0, 500_000, 131_071 - 11)]
    parser, compiled = both(lines_of(texts), tmp_path / "a.jsonl")
    assert compiled == parser
    assert texts_of(compiled) == texts


def test_a_kernel_works_where_nothing_can_be_kept():
    """As on a machine with read-only folders: numba finds no place for a function without a file."""
    space: dict[str, object] = {}
    exec("def double(x):\n    return 2 * x", space)
    assert kernel(space["double"])(21) == 42
