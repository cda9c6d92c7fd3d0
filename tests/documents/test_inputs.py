"""What a user names becomes files in one order; they give the same documents, of whatever kind, however cut."""

import gzip
import json
import os
import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.documents.corpora import (
    COMPRESS,
    CONTENTS,
    TEXTS,
    bad_of,
    lines_of,
    num_lines_of,
    read,
    records_of,
    texts_of,
)

from tokenmill.documents import (
    InputFile,
    Piece,
    ReadOptions,
    chunk_size,
    cut_files,
    find_files,
    format_of,
    place,
    read_unit,
)
from tokenmill.documents.inputs import MAX_PIECES, suffix_of
from tokenmill.errors import ConfigError, DocumentError
from tokenmill.types import natural_key


def names(inputs):
    return [file.name for file in find_files(inputs).files]


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    data = ["p10.jsonl", "p9.jsonl", "p1.jsonl.gz", "sub/p2.jsonl.zst"]
    for name in [*data, "README.md", "notes.doc", ".hidden.jsonl"]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * len(name))
    return folder


def test_folder_is_taken_with_all_below_in_natural_order(corpus):
    assert names(corpus) == ["p1.jsonl.gz", "p9.jsonl", "p10.jsonl", "sub/p2.jsonl.zst"]


def test_files_of_a_folder_that_are_passed_over_are_told(corpus):
    """A readme beside data is no part of it."""
    assert sorted(find_files(corpus).passed_over) == [str(corpus / "README.md"), str(corpus / "notes.doc")]


def test_order_and_spelling_of_the_inputs_do_not_matter(corpus):
    given = [corpus / "p10.jsonl", str(corpus / "*.jsonl"), os.path.relpath(corpus / "p1.jsonl.gz"), corpus]
    assert find_files(given).files == find_files(corpus).files


def test_glob_reaches_below_with_two_stars(corpus):
    assert names(str(corpus / "**" / "*.zst")) == ["p2.jsonl.zst"]


def test_glob_skips_the_markers_that_its_folder_skips(tmp_path):
    folder = tmp_path / "spark_out"
    folder.mkdir()
    for name in ("_SUCCESS", "done", ".part-0.crc", ".hidden.jsonl"):
        (folder / name).touch()
    for name in ("_metadata", "part-0.jsonl", "part-1.jsonl"):
        (folder / name).write_text('{"text": "a"}\n')
    assert names(str(folder / "*")) == names(folder) == ["part-0.jsonl", "part-1.jsonl"]
    assert sorted(find_files(str(folder / "*")).passed_over) == [
        str(folder / name) for name in ("_SUCCESS", "_metadata", "done")
    ]


def test_glob_that_matches_data_of_an_unknown_kind_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.rows").write_text("data")
    with pytest.raises(DocumentError, match=r"b\.rows: must end in"):
        find_files(str(tmp_path / "*"))


def test_file_whose_name_looks_like_a_glob_is_itself(tmp_path):
    (tmp_path / "a[1].jsonl").touch()
    assert names(tmp_path / "a[1].jsonl") == ["a[1].jsonl"]


def test_names_are_below_the_shared_folder_wherever_it_stands(corpus, tmp_path):
    moved = tmp_path / "elsewhere" / "deep"
    moved.parent.mkdir()
    before = names(corpus)
    corpus.rename(moved)
    assert names(moved) == before


def test_sizes_and_endings_are_known(corpus):
    assert [(file.bytes, file.suffix) for file in find_files(corpus).files] == [
        (11, ".jsonl.gz"),
        (8, ".jsonl"),
        (9, ".jsonl"),
        (16, ".jsonl.zst"),
    ]


def test_digits_compare_as_numbers_and_the_rest_as_text():
    expected = ["a", "a0", "a1b2", "a1b10", "a02", "a2", "a2²", "b/9", "b/10", "b9"]
    backwards = expected[::-1]
    assert sorted(backwards, key=natural_key) == expected


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("missing.jsonl", r"no such file or folder: .*missing\.jsonl; fix the path"),
        ("*.parquet", r"no such file or folder: .*\*\.parquet"),
        (
            "notes.doc",
            r"notes\.doc: must end in \.jsonl, \.json, \.parquet.*\.tgz.*\.gz, \.zst.*convert",
        ),
    ],
)
def test_input_that_names_no_known_file_is_refused_with_the_way_out(corpus, item, message):
    with pytest.raises(DocumentError, match=message):
        find_files(corpus / item)


def test_folder_without_known_files_is_refused(tmp_path):
    (tmp_path / "notes.doc").touch()
    with pytest.raises(DocumentError, match=r"must hold files that end in .*got 1 others"):
        find_files(tmp_path)


def test_empty_list_is_refused():
    with pytest.raises(DocumentError, match="at least one file"):
        find_files([])


def test_password_in_an_address_is_never_shown():
    with pytest.raises(ConfigError, match=r"^s3://host/b/\*\.jsonl: the address contains a user") as caught:
        find_files("s3://user:secret@host/b/*.jsonl")
    assert "secret" not in str(caught.value)


def test_readme_is_read_where_there_is_nothing_else_or_it_is_named(corpus, tmp_path):
    assert names([corpus / "README.md", corpus / "p9.jsonl"]) == ["README.md", "p9.jsonl"]
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("README.md", "LICENSE.txt", "a.txt"):
        (folder / name).write_text(name)
    assert names(folder) == ["LICENSE.txt", "README.md", "a.txt"]


def test_broken_links_and_pipes_in_a_folder_are_passed_over(corpus):
    (corpus / "gone.jsonl").symlink_to(corpus / "nowhere")
    os.mkfifo(corpus / "pipe.jsonl")
    assert names(corpus) == ["p1.jsonl.gz", "p9.jsonl", "p10.jsonl", "sub/p2.jsonl.zst"]
    assert {str(corpus / "gone.jsonl"), str(corpus / "pipe.jsonl")} <= set(find_files(corpus).passed_over)


@pytest.fixture
def code(tmp_path):
    folder = tmp_path / "code"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("hidden")
    (folder / "main.py").write_text("print('ä')\n")
    (folder / "Makefile").write_text("all:\n")
    (folder / "data.json").write_text("{}")
    (folder / "notes.log.gz").write_bytes(gzip.compress(b"log"))
    (folder / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    (folder / "zeros.bin").write_bytes(bytes(100))
    (folder / "not.gz").write_bytes(b"text")
    (folder / "long.c").write_bytes(b"x" * 8191 + "ä".encode())
    return folder


def test_text_format_takes_every_file_of_a_folder_that_is_utf8(code):
    found = find_files(code, format="text")
    assert [file.name for file in found.files] == ["Makefile", "data.json", "long.c", "main.py", "notes.log.gz"]
    assert [os.path.basename(path) for path in sorted(found.passed_over)] == ["logo.png", "not.gz", "zeros.bin"]
    assert texts_of(read(code, format="text")) == ["all:\n", "{}", "x" * 8191 + "ä", "print('ä')\n", "log"]


def test_binary_file_that_is_named_itself_is_bad_and_not_passed_over(code):
    assert [reason for _, reason, _ in bad_of(read(code / "logo.png", format="text"))] == ["utf8"]


@pytest.mark.parametrize(
    ("name", "format", "suffix"),
    [
        ("a.txt", "jsonl", ".jsonl"),
        ("a.gz", "jsonl", ".jsonl.gz"),
        ("part-0", "parquet", ".parquet"),
        ("a.log.zst", "tsv", ".tsv.zst"),
        ("a.tgz", "tar", ".tar.gz"),
        ("a.parquet.gz", "parquet", ".parquet"),
    ],
)
def test_format_goes_before_the_ending_but_for_compression(tmp_path, name, format, suffix):
    (tmp_path / name).touch()
    assert [file.suffix for file in find_files(tmp_path, format=format).files] == [suffix]


def test_unknown_format_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"format: expected one of jsonl, .*got 'parket'; did you mean 'parquet'"):
        find_files(tmp_path, format="parket")


MANY = [f"{number} {text}" for number in range(40) for text in TEXTS]


def write_columns(path, texts):
    table = pa.table({"id": list(range(len(texts))), "text": texts})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=7)
    elif path.suffix == ".feather":
        feather.write_feather(table, path, chunksize=7)
    else:
        kind = pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as file, kind(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)


COLUMNS = ["a.parquet", "a.arrow", "a-stream.arrow", "a.feather"]


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("suffix", CONTENTS)
def test_every_row_format_gives_the_same_texts(tmp_path, suffix, compression):
    path = tmp_path / f"a{suffix}{compression}"
    path.write_bytes(COMPRESS[compression](CONTENTS[suffix](MANY)))
    batches = read(path)
    assert texts_of(batches) == MANY
    assert num_lines_of(batches) == len(MANY)
    assert [line for batch in batches for line in batch.lines] == list(range(len(MANY)))


@pytest.mark.parametrize("name", COLUMNS)
def test_every_columnar_format_gives_the_same_texts_and_records(tmp_path, name):
    write_columns(tmp_path / name, MANY)
    assert texts_of(read(tmp_path / name)) == MANY
    whole = [{"id": number, "text": text} for number, text in enumerate(MANY)]
    assert records_of(read(tmp_path / name, text_field=None)) == whole
    assert records_of(read(tmp_path / name, text_field=None, fields=("id", "none"))) == [
        {"id": number} for number in range(len(MANY))
    ]


def write_all(folder):
    """Write files of every kind, some empty of documents."""
    rest = list(MANY)
    rng = random.Random(1)
    rows = [f"b{suffix}{compression}" for suffix in CONTENTS for compression in COMPRESS]
    for number, name in enumerate([*COLUMNS, *rows, "c.txt", "d.md.gz"]):
        path = folder / f"{number}-{name}"
        if ".txt" in name or ".md" in name:
            path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](rest.pop().encode()))
        elif name in COLUMNS:
            write_columns(path, [rest.pop() for _ in range(rng.randrange(1, 30))])
        else:
            suffix = f".{name.split('.')[1]}"
            texts = [rest.pop() for _ in range(rng.randrange(12))]
            path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](CONTENTS[suffix](texts)))


@given(chunk_bytes=st.one_of(st.integers(1, 3000), st.integers(1, 200_000)))
def test_no_cut_and_no_grouping_changes_what_is_read(tmp_path, chunk_bytes):
    """[D1.a]"""
    if not list(tmp_path.iterdir()):
        write_all(tmp_path)
    files = find_files(tmp_path).files
    straight = [
        (piece.file.name, text)
        for unit in cut_files(files, chunk_bytes=1 << 40)
        for batch in read_unit(unit, ReadOptions())
        for piece, text in zip(map(unit.pieces.__getitem__, batch.pieces), batch.documents, strict=True)
    ]
    units = list(cut_files(files, chunk_bytes=chunk_bytes))
    cut = []
    for unit in units:
        position = 0
        for batch in read_unit(unit, ReadOptions()):
            names = [unit.pieces[piece].file.name for piece in batch.pieces]
            cut += zip(names, batch.documents, strict=True)
            assert position <= batch.position <= unit.bytes
            position = batch.position
            places = list(zip(batch.pieces, batch.lines, strict=True))
            assert places == sorted(set(places))
            assert places == [batch.place(index) for index in range(len(batch.documents))]
    assert cut == straight
    assert len(straight) > 100
    assert [unit.index for unit in units] == list(range(len(units)))
    assert sum(unit.bytes for unit in units) == sum(file.bytes for file in files)
    assert all(unit.bytes >= chunk_bytes for unit in units[:-1])
    assert [piece.file for unit in units for piece in unit.pieces] == sorted(
        (piece.file for unit in units for piece in unit.pieces), key=files.index
    )
    assert units == list(cut_files(files, chunk_bytes=chunk_bytes))


def test_small_files_share_a_unit_and_large_ones_are_cut(tmp_path):
    for name, count in [("a", 1), ("b", 1), ("c", 1000), ("d", 1)]:
        (tmp_path / f"{name}.jsonl").write_bytes(lines_of(["x" * 100] * count))
    units = list(cut_files(find_files(tmp_path).files, chunk_bytes=50_000))
    assert [[(piece.file.name, piece.begin, piece.end) for piece in unit.pieces] for unit in units] == [
        [("a.jsonl", 0, 113), ("b.jsonl", 0, 113), ("c.jsonl", 0, 50_000)],
        [("c.jsonl", 50_000, 100_000)],
        [("c.jsonl", 100_000, 113_000), ("d.jsonl", 0, 113)],
    ]


def test_unit_of_empty_files_is_bounded(tmp_path):
    (tmp_path / "a.txt").touch()
    (file,) = find_files(tmp_path).files
    units = list(cut_files([file] * (MAX_PIECES + 5), chunk_bytes=1 << 20))
    assert [len(unit.pieces) for unit in units] == [MAX_PIECES, 5]


def test_files_are_looked_into_only_when_the_iterator_comes_to_them(tmp_path):
    """[S1.a]"""
    write_columns(tmp_path / "a.parquet", MANY)
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    units = cut_files(find_files(tmp_path).files, chunk_bytes=1)
    assert next(units).pieces[0].file.name == "a.parquet"


def listed(total, *suffixes):
    each = total // len(suffixes)
    return [InputFile(path=f"/a{suffix}", name="a", bytes=each, suffix=suffix) for suffix in suffixes]


@pytest.mark.parametrize(
    ("total", "mib"),
    [
        (0, 4),
        (96 << 20, 4),
        ((96 << 20) + 24, 5),
        (1200 << 20, 50),
        (1536 << 20, 64),
        (2400 << 20, 64),
        (16 << 30, 64),
        (32 << 30, 128),
        (64 << 30, 256),
        (25 << 40, 256),
    ],
)
def test_units_are_few_for_small_inputs_and_256_or_more_for_large_ones(total, mib):
    assert chunk_size(listed(total, ".jsonl")) == mib << 20
    assert chunk_size(listed(2 * (total // 2), ".jsonl", ".parquet")) == mib << 20


@pytest.mark.parametrize(
    ("total", "kib"),
    [(0, 1024), (24 << 20, 1024), ((24 << 20) + 24, 1280), (240 << 20, 10 << 10), (2400 << 20, 16 << 10)],
)
def test_units_of_compressed_files_are_a_quarter_of_that(total, kib):
    """So that a file of 50 MB, with 200 MB of text in it, keeps all cores busy."""
    assert chunk_size(listed(total, ".parquet")) == kib << 10
    assert chunk_size(listed(total, ".jsonl.gz", ".json.zst")) == kib << 10


def test_chunk_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"chunk_bytes: must be at least 1, got 0"):
        next(cut_files([], chunk_bytes=0))


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("a.jsonl", "a.jsonl:17"),
        ("a.txt", "a.txt:17"),
        ("a.json", "a.json record 17"),
        ("a.parquet", "a.parquet row 17"),
        ("a.csv", "a.csv row 17"),
        ("a.tar", "a.tar member 17"),
    ],
)
def test_record_is_named_for_people(tmp_path, name, named):
    (tmp_path / name).touch()
    (file,) = find_files(tmp_path / name).files
    piece = Piece(file=file, begin=0, end=1, bytes=0)
    assert place(piece, 16) == f"{tmp_path}/{named}"


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("A.JSONL", ".jsonl"),
        ("a.ndjson.zst", ".jsonl.zst"),
        ("a.json.gz", ".json.gz"),
        ("a.feather", ".arrow"),
        ("a.b.md", ".txt"),
        ("a.text.gz", ".txt.gz"),
        ("a.tgz", ".tar.gz"),
        ("a.tar.zst", ".tar.zst"),
        ("a.parquet.gz", None),
        ("a.tgz.gz", None),
        ("a.gz", None),
        ("jsonl", None),
    ],
)
def test_ending_says_the_format(name, suffix):
    assert suffix_of(name) == suffix
    assert suffix is None or format_of(suffix).counts


def test_whole_records_from_every_row_format(tmp_path):
    (tmp_path / "a.json").write_bytes(json.dumps([{"text": "x", "n": 1}]).encode())
    (tmp_path / "b.csv").write_bytes(b"text,n\nx,1\n")
    (tmp_path / "c.txt").write_bytes(b"x")
    assert records_of(read(tmp_path, text_field=None)) == [
        {"text": "x", "n": 1},
        {"text": "x", "n": "1"},
        {"text": "x"},
    ]


def test_text_field_and_fields_exclude_each_other():
    with pytest.raises(ConfigError, match=r"fields: must be given for whole records only"):
        ReadOptions(fields=("a",))


def test_unknown_text_unit_names_the_nearest():
    with pytest.raises(ConfigError, match=r"text_unit: expected one of file, line, .*did you mean 'line'"):
        ReadOptions(text_unit="lines")


def test_importing_documents_loads_no_library_of_a_format():
    """[F1.a]"""
    program = (
        "import sys, tokenmill.documents; "
        "print([name for name in ('pyarrow', 'datasets', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_empty_folder_is_said_to_be_one(tmp_path):
    with pytest.raises(
        DocumentError, match=r"must hold files that end in \.jsonl.*, got no file at all; fix the path"
    ):
        find_files(tmp_path)


def test_a_store_is_no_input_and_is_passed_over_beside_inputs(tmp_path, make_store):
    store, _, _ = make_store("web", [3, 4])
    with pytest.raises(
        DocumentError, match=r"web: must hold texts or records, got a store.*; name it as the store of"
    ):
        find_files(store)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert [file.name for file in find_files(tmp_path).files] == ["a.jsonl"]
