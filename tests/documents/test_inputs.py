"""Paths, globs and folders become files in one order."""

import gzip
import os

import pytest
from tests.documents.corpora import bad_of, read, texts_of

from tokenmill.documents import find_files
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
        ("missing.jsonl", r"missing\.jsonl: .*got nothing there; fix the path"),
        ("*.parquet", r"\*\.parquet: .*got nothing there"),
        (
            "notes.doc",
            r"notes\.doc: must end in \.jsonl, \.json, \.parquet.*\.tgz.*\.gz or \.zst.*convert",
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
    with pytest.raises(DocumentError, match=r"^s3://host/b/\*\.jsonl: must be a path") as caught:
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
    with pytest.raises(ConfigError, match=r"format: must be one of jsonl, .*got 'parket'; did you mean 'parquet'"):
        find_files(tmp_path, format="parket")
