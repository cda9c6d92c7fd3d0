"""WebDataset archives: members are joined by key, and hostile archives harm nothing."""

import gzip
import io
import json
import tarfile
import time
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.documents.corpora import bad_of, read, reasons_of, records_of, tar_of, texts_of

from tokenmill.documents.webdataset import BlockStream
from tokenmill.errors import DocumentError

MEMBERS = [
    ("data/0001.txt", "one ä".encode()),
    ("data/0001.json", b'{"text": "from json", "n": 1}'),
    ("data/0001.jpg", b"\xff\xd8\xff"),
    ("data/0002.JSON", b'{"text": "second"}'),
    ("data/0002.seg.txt", b"part"),
    ("data/0002.md", b"# two"),
    ("README", b"no ending"),
    ("data/.hidden.txt", b"hidden"),
    ("0001.txt", b"another folder"),
]
RECORDS = [
    {"__key__": "data/0001", "txt": "one ä", "json": {"text": "from json", "n": 1}},
    {"__key__": "data/0002", "json": {"text": "second"}, "seg.txt": "part", "md": "# two"},
    {"__key__": "0001", "txt": "another folder"},
]
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
SUFFIXES = {".tar": bytes, ".tar.gz": gzip.compress, ".tgz": gzip.compress, ".tar.zst": zstandard.compress}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_members_of_one_key_are_one_record(tmp_path, suffix, format):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(SUFFIXES[suffix](tar_of(MEMBERS, FORMATS[format])))
    assert records_of(read(path, text_field=None)) == RECORDS
    assert records_of(read(path, text_field=None, fields=("json",)))[1] == {"json": {"text": "second"}}


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of(MEMBERS))
    return path


def test_text_is_the_txt_member_unless_another_is_named(archive):
    batches = read(archive)
    assert texts_of(batches) == ["one ä", "second", "another folder"]
    assert bad_of(batches) == []
    bad = bad_of(read(archive, text_field="n"))
    assert bad[0] == (0, "not_text", "field 'n' is a number of 'data/0001'")
    assert bad[2] == (2, "missing_field", "no field 'n' but '__key__' of '0001'")
    assert texts_of(read(archive, text_field="json.text")) == ["from json", "second"]
    assert texts_of(read(archive, text_field="md")) == ["# two"]
    assert texts_of(read(archive, text_field="seg.txt")) == ["part"]


def test_fields_that_are_no_members_are_looked_for_in_the_json_member(tmp_path):
    path = tmp_path / "a.tar"
    members = [
        ("1.json", b'{"prompt": "p", "response": "r", "json": "inner", "meta": {"site": "x"}}'),
        ("2.json", b'{"prompt": "from json", "response": "r"}'),
        ("2.prompt.txt", b"no field of this name"),
        ("2.txt", b"a text"),
        ("3.txt", b"another"),
    ]
    path.write_bytes(tar_of(members))
    asked = ("prompt", "response", "meta")
    assert records_of(read(path, text_field=None, fields=asked)) == [
        {"prompt": "p", "response": "r", "meta": {"site": "x"}},
        {"prompt": "from json", "response": "r"},
        {},
    ]
    assert records_of(read(path, text_field=None, fields=("text", "json"))) == [
        {"json": {"prompt": "p", "response": "r", "json": "inner", "meta": {"site": "x"}}},
        {"text": "a text", "json": {"prompt": "from json", "response": "r"}},
        {"text": "another"},
    ]
    assert texts_of(read(path, text_field="meta.site")) == ["x"]


def test_a_json_member_that_is_not_needed_may_be_anything(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of([("1.json", b"{no JSON"), ("1.txt", b"a text"), ("2.json", b"{no JSON")]))
    batches = read(path)
    assert texts_of(batches) == ["a text"]
    assert [(line, reason) for line, reason, _ in bad_of(batches)] == [(1, "json")]
    assert "in '2.json'" in bad_of(batches)[0][2]


@pytest.mark.parametrize(
    ("second", "reason"), [(b'{"text": "twice"}', "duplicate"), (b'{"text": "' + b"x" * 300 + b'"}', "too_long")]
)
def test_a_json_member_that_is_there_twice_or_too_long_is_bad_where_it_is_needed(tmp_path, second, reason):
    path = tmp_path / "a.tar"
    contents = [b"{}", second] if reason == "duplicate" else [second]
    members = [(f"{key}.json", content) for key in (1, 2) for content in contents]
    path.write_bytes(tar_of([*members, ("2.txt", b"y")]))
    batches = read(path, max_record_bytes=200)
    assert reasons_of(batches) == [(0, reason)]
    assert texts_of(batches) == ["y"]


def test_text_member_goes_before_txt(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of([("1.txt", b"txt"), ("1.text", b"text"), ("2.txt", b"txt 2")]))
    assert texts_of(read(tmp_path / "a.tar")) == ["text", "txt 2"]


@pytest.mark.parametrize("format", ["gnu", "pax"])
def test_long_and_foreign_names_are_read(tmp_path, format):
    names = ["x" * 200 + "/ä" * 50 + "/1.txt", "ü.txt", "y" * 90 + "/" + "z" * 90 + ".txt"]
    (tmp_path / "a.tar").write_bytes(tar_of([(name, b"x") for name in names], FORMATS[format]))
    assert [record["__key__"] for record in records_of(read(tmp_path / "a.tar", text_field=None))] == [
        name.removesuffix(".txt") for name in names
    ]


def test_ustar_prefix_is_part_of_the_name(tmp_path):
    name = "y" * 90 + "/" + "z" * 90 + ".txt"
    (tmp_path / "a.tar").write_bytes(tar_of([(name, b"x")], tarfile.USTAR_FORMAT))
    assert records_of(read(tmp_path / "a.tar", text_field=None))[0]["__key__"] == name.removesuffix(".txt")


def test_folders_and_links_are_no_members(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind in [("d.txt", tarfile.DIRTYPE), ("l.txt", tarfile.SYMTYPE), ("h.txt", tarfile.LNKTYPE)]:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "/etc/passwd"
            tar.addfile(info)
        info = tarfile.TarInfo("a.txt")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    (tmp_path / "a.tar").write_bytes(out.getvalue())
    assert records_of(read(tmp_path / "a.tar", text_field=None)) == [{"__key__": "a", "txt": "x"}]


def test_hostile_names_are_names_and_nothing_is_written(tmp_path):
    """[S.d, S.e]"""
    names = ["../../up.txt", "/abs.txt", "a/../b.txt", "nul\n.txt"]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.tar").write_bytes(tar_of([(name, b"x") for name in names]))
    assert texts_of(read(folder)) == ["x"] * 4
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "a.tar"]


def test_bad_members_are_told_and_the_rest_is_read(tmp_path):
    members = [
        ("1.txt", b"good"),
        ("2.txt", b"\xff"),
        ("3.json", b"{broken"),
        ("3.txt", b"good, but for its json"),
        ("4.txt", b"x" * 200),
        ("4.json", b"{}"),
        ("5.txt", b"a"),
        ("5.TXT", b"b"),
        ("6.json", b'{"a": "\\ud800"}'),
        ("7.json", b'{"a": NaN}'),
    ]
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    batches = read(tmp_path / "a.tar", text_field=None, max_record_bytes=100)
    assert [record["__key__"] for record in records_of(batches)] == ["1", "7"]
    assert reasons_of(batches) == [
        (1, "utf8"),
        (2, "json"),
        (3, "too_long"),
        (4, "duplicate"),
        (5, "surrogate"),
    ]
    assert bad_of(batches)[0][2] == "invalid start byte at byte 0 of the record in '2.txt'"
    assert texts_of(read(tmp_path / "a.tar", max_record_bytes=100)) == ["good", "good, but for its json"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncated_archive_is_an_error_wherever_it_ends(tmp_path, suffix):
    """[C1]"""
    data = tar_of(MEMBERS[:4])
    end_of_members = len(data.rstrip(b"\0")) // 512 * 512 + 512
    path = tmp_path / f"a{suffix}"
    for end in range(0, end_of_members + 511, 64):
        path.write_bytes(SUFFIXES[suffix](data[:end]))
        with pytest.raises(DocumentError, match=r"must be (a whole|an intact) tar archive"):
            read(path)


def header(name, size, kind=b"0"):
    """Make a header with any size in it."""
    info = tarfile.TarInfo(name)
    info.size = size
    info.type = kind
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", ["a.txt", "a.jpg"])
@pytest.mark.parametrize("size", [3 << 30, 9 << 40])
def test_size_that_a_header_claims_is_not_allocated(tmp_path, suffix, name, size):
    """[S.e]"""
    path = tmp_path / f"a{suffix}"
    path.write_bytes(SUFFIXES[suffix](tar_of([("0.txt", b"x")])[:1024] + header(name, size) + bytes(2048)))
    with pytest.raises(DocumentError, match=r"must be (a whole|an intact) tar archive"):
        read(path, max_record_bytes=1 << 50)
    with pytest.raises(DocumentError, match=r"must be (a whole|an intact) tar archive"):
        read(path)


@pytest.mark.parametrize("kind", [b"L", b"x"])
def test_header_that_goes_on_and_on_is_refused(tmp_path, kind):
    """A name of 3 GB in a small compressed file [S.e]."""
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(header("a", 3 << 30, kind) + bytes(1 << 20)))
    with pytest.raises(DocumentError, match=r"got a header of 3221225472 bytes"):
        read(path)


def test_damaged_headers_are_errors(tmp_path):
    path = tmp_path / "a.tar"
    data = tar_of([("a.txt", b"x")])
    for place in range(0, 500, 7):
        broken = bytearray(data)
        broken[place] ^= 0x15
        path.write_bytes(broken)
        with pytest.raises(DocumentError, match=r"a\.tar: must be an intact tar archive.*wrong checksum"):
            read(path)
    path.write_bytes(b"no archive" * 200)
    with pytest.raises(DocumentError, match=r"must be an intact tar archive"):
        read(path)


@pytest.mark.parametrize("record", [b"", b"x", b"9999999999 path=a", b"5 a=b", b"0 =", b"-1 path=x\n", b"\xff" * 9])
def test_pax_headers_of_nonsense_do_no_harm(tmp_path, record):
    path = tmp_path / "a.tar"
    padding = bytes(-len(record) % 512)
    path.write_bytes(header("p", len(record), b"x") + record + padding + tar_of([("a.txt", b"x")]))
    assert texts_of(read(path)) == ["x"]


def test_sparse_members_are_refused(tmp_path):
    (tmp_path / "a.tar").write_bytes(header("a.txt", 0, b"S") + bytes(1024))
    with pytest.raises(DocumentError, match=r"got a sparse member"):
        read(tmp_path / "a.tar")


def test_many_records_come_in_order_and_bounded_batches(tmp_path):
    members = [(f"{i:05}.{kind}", json.dumps(f"{i}").encode()) for i in range(1000) for kind in ("json", "txt")]
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    batches = read(tmp_path / "a.tar", batch_documents=100)
    assert texts_of(batches) == [f'"{i}"' for i in range(1000)]
    assert all(100 <= len(batch.documents) < 200 for batch in batches[:-1])


@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(1, 50))
def test_lines_do_not_see_where_blocks_end(blocks, buffer_bytes):
    with io.BufferedReader(BlockStream(iter(blocks)), buffer_bytes) as stream:
        assert list(stream) == list(io.BytesIO(b"".join(blocks)))


def test_an_extended_header_is_read_in_linear_time(tmp_path):
    """A header of 1 MiB with 170,000 entries took half a minute, and one compresses to a kilobyte."""
    data = b"6 a=b\n" * 170_000
    header = tarfile.TarInfo("x")
    header.size, header.type = len(data), b"x"
    path = tmp_path / "many.tar.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(3):
            file.write(header.tobuf() + data + b"\0" * (-len(data) % 512))
        text = tarfile.TarInfo("a.txt")
        text.size = 5
        file.write(text.tobuf() + b"hello".ljust(512, b"\0") + b"\0" * 1024)
    begin = time.process_time()
    assert texts_of(read(path)) == ["hello"]
    assert time.process_time() - begin < 5


def test_members_of_one_key_take_no_more_memory_than_a_record_may(tmp_path):
    path = tmp_path / "many.tar.gz"
    with gzip.open(path, "wb") as file:
        for name in ("a.txt", *["a.json"] * 40):
            member = tarfile.TarInfo(name)
            member.size = 5 if name == "a.txt" else 1 << 20
            file.write(member.tobuf() + (b"hello" if name == "a.txt" else b" " * (1 << 20)).ljust(512, b"\0"))
        file.write(b"\0" * 1024)
    tracemalloc.start()
    try:
        assert texts_of(read(path)) == ["hello"]
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
