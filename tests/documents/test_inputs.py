"""Paths, globs and folders become files in one order."""

import os

import pytest

from tokenmill.documents import find_files
from tokenmill.documents.inputs import natural_key
from tokenmill.errors import DocumentError


def names(inputs):
    return [file.name for file in find_files(inputs).files]


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    for name in ["p10.jsonl", "p9.jsonl", "p1.jsonl.gz", "sub/p2.jsonl.zst", "README.md", ".hidden.jsonl"]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * len(name))
    return folder


def test_folder_is_taken_with_all_below_in_natural_order(corpus):
    assert names(corpus) == ["p1.jsonl.gz", "p9.jsonl", "p10.jsonl", "sub/p2.jsonl.zst"]


def test_files_of_a_folder_that_are_passed_over_are_told(corpus):
    assert find_files(corpus).passed_over == (str(corpus / "README.md"),)


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
        ("README.md", r"README\.md: must end in \.jsonl, \.jsonl\.gz, \.jsonl\.zst.*convert or rename"),
    ],
)
def test_input_that_names_no_known_file_is_refused_with_the_way_out(corpus, item, message):
    with pytest.raises(DocumentError, match=message):
        find_files(corpus / item)


def test_folder_without_known_files_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DocumentError, match=r"must hold files that end in .*got 1 with other endings"):
        find_files(tmp_path)


def test_empty_list_is_refused():
    with pytest.raises(DocumentError, match="at least one file"):
        find_files([])


def test_password_in_an_address_is_never_shown():
    with pytest.raises(DocumentError, match=r"^s3://host/b/\*\.jsonl: must be a path") as caught:
        find_files("s3://user:secret@host/b/*.jsonl")
    assert "secret" not in str(caught.value)
