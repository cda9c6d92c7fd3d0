"""Lines become texts: every line once, wherever the file is cut."""

import gzip
import io
import tracemalloc

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.documents import ReadOptions, cut_files, find_files, read_unit
from tokenmill.documents.jsonl import BlockStream
from tokenmill.errors import ConfigError, DocumentError

COMPRESS = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}
TEXTS = ["one", "zwei ä", "", "三", "🙂" * 50, 'quote " and \\ and \n']


def lines_of(texts, field="text"):
    return b"".join(orjson.dumps({field: text}) + b"\n" for text in texts)


def read(path, chunk_bytes=16 << 20, **options):
    """All batches of all units of one file."""
    units = cut_files(find_files(path).files, chunk_bytes=chunk_bytes)
    return [batch for unit in units for batch in read_unit(unit, ReadOptions(**options))]


def texts_of(batches):
    return [text for batch in batches for text in batch.texts]


def bad_of(batches):
    return [(bad.line, bad.reason, bad.detail) for batch in batches for bad in batch.bad]


@pytest.fixture(params=COMPRESS)
def write(request, tmp_path):
    def write(data, *, compress=None):
        path = tmp_path / f"input{request.param}"
        path.write_bytes((compress or COMPRESS[request.param])(data))
        return path

    write.suffix = request.param
    return write


def test_texts_come_in_order_from_every_kind_of_file(write):
    assert texts_of(read(write(lines_of(TEXTS)))) == TEXTS


LINE = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=40).map(lambda text: orjson.dumps({"text": text})),
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
    assert texts_of(batches) == [orjson.loads(line)["text"] for line in stripped if line[:1] == b"{"]
    assert len(bad_of(batches)) == stripped.count(b"broken")
    num_lines = sum(batch.num_lines for batch in batches)
    assert num_lines == (data.count(b"\n") + (not data.endswith(b"\n")) if data else int(mark))


@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(1, 50))
def test_lines_do_not_see_where_blocks_end(blocks, buffer_bytes):
    with io.BufferedReader(BlockStream(iter(blocks)), buffer_bytes) as stream:
        assert list(stream) == list(io.BytesIO(b"".join(blocks)))


def test_units_of_a_file_sum_to_its_size_and_compressed_files_are_one(write):
    path = write(lines_of(TEXTS * 100))
    units = list(cut_files(find_files(path).files, chunk_bytes=1000))
    assert sum(unit.bytes for unit in units) == path.stat().st_size
    assert [unit.index for unit in units] == list(range(len(units)))
    assert (len(units) > 1) == (write.suffix == ".jsonl")


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
        b'{"text": "good too"}',
    ]
    batches = read(write(b"\r\n".join(lines)))
    assert texts_of(batches) == ["good", "good too"]
    assert [(line, reason) for line, reason, _ in bad_of(batches)] == [
        (1, "json"),
        (3, "utf8"),
        (4, "missing_field"),
        (5, "not_text"),
        (6, "not_text"),
        (7, "missing_field"),
        (8, "not_text"),
        (9, "json"),
    ]
    assert bad_of(batches)[1][2] == "invalid start byte at byte 10 of the line"
    assert bad_of(batches)[4][2] == "field 'text' is null"
    assert sum(batch.num_lines for batch in batches) == len(lines)


def test_missing_part_of_a_dotted_field_is_missing(write):
    batches = read(write(b'{"a": {}}\n{"a": "text"}\n{"a": {"b": 1}}\n'), text_field="a.b")
    assert [reason for _, reason, _ in bad_of(batches)] == ["missing_field", "missing_field", "not_text"]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gz", "zst"])
def test_files_of_several_members_or_frames_are_read_whole(tmp_path, compress):
    suffix = "gz" if compress is gzip.compress else "zst"
    data = lines_of(TEXTS)
    path = tmp_path / f"input.jsonl.{suffix}"
    path.write_bytes(b"".join(compress(data[begin : begin + 7]) for begin in range(0, len(data), 7)))
    assert texts_of(read(path)) == TEXTS


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gz", "zst"])
def test_truncated_file_is_an_error_wherever_it_ends(tmp_path, compress):
    """Never a silent short read [C1]; cutting between two whole members leaves a whole file."""
    suffix = "gz" if compress is gzip.compress else "zst"
    first, second = compress(lines_of(TEXTS)), compress(lines_of(TEXTS))
    path = tmp_path / f"input.jsonl.{suffix}"
    for end in range(len(first + second)):
        path.write_bytes((first + second)[:end])
        if end == len(first):
            assert texts_of(read(path)) == TEXTS
        else:
            with pytest.raises(DocumentError, match=rf"input\.jsonl\.{suffix}: must be"):
                read(path)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_damaged_file_is_an_error_that_names_it(tmp_path, suffix):
    data = lines_of([str(number) for number in range(1000)])
    path = tmp_path / f"input.jsonl.{suffix}"
    # zstd checks contents only if asked to, as its command line does.
    packed = gzip.compress(data) if suffix == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress(data)
    for place in (0, len(packed) // 2, len(packed) - 1):
        broken = bytearray(packed)
        broken[place] ^= 0x55
        path.write_bytes(broken)
        with pytest.raises(DocumentError, match=rf"input\.jsonl\.{suffix}: must be"):
            read(path)
    path.write_bytes(packed + b"garbage")
    with pytest.raises(DocumentError, match=rf"input\.jsonl\.{suffix}: must be an intact"):
        read(path)


def test_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_bytes(lines_of(TEXTS))
    (unit,) = cut_files(find_files(path).files)
    path.write_bytes(lines_of(TEXTS[:2]))
    with pytest.raises(DocumentError, match=r"must keep its .* bytes"):
        list(read_unit(unit, ReadOptions()))


def test_lines_that_are_added_while_a_file_is_read_are_not_read(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_bytes(lines_of(TEXTS).rstrip())
    (unit,) = cut_files(find_files(path).files)
    path.write_bytes(lines_of([*TEXTS, "later"]))
    assert texts_of(read_unit(unit, ReadOptions())) == TEXTS


def test_memory_is_bounded_by_the_batch_not_by_the_file(write):
    """Some 32 MB of text; a thousand-fold compression must not unfold at once."""
    path = write(lines_of(["x" * 1000]) * 32_000)
    tracemalloc.start()
    try:
        units = cut_files(find_files(path).files, chunk_bytes=8 << 20)
        documents = sum(
            len(batch.texts) for unit in units for batch in read_unit(unit, ReadOptions(batch_bytes=1 << 18))
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert documents == 32_000
    assert peak < 12 << 20
