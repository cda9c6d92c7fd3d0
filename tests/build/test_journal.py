"""What is there already: files that are known again, folders that are not ours, journals that cannot be read."""

import os
import shutil

import pytest
from tests.build.corpus import files_of, lines_of, some_texts, texts_of, write_file

from tokenmill.build import PrepareOptions, prepare
from tokenmill.build.unit import SegmentWriter
from tokenmill.errors import DocumentError, StoreCorruptError, StoreError, StoreExistsError
from tokenmill.store import open_store, read_manifest, verify

TEXTS = some_texts(100)


def build(inputs, out, *, workers=1, rebuild=False, **options):
    return prepare(
        inputs, out=out, workers=workers, rebuild=rebuild, progress=False, options=PrepareOptions(**options)
    )


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_files_with_the_same_name_and_content_are_read_each(tmp_path, workers, deduplicate):
    """Two units may be made from the same bytes; neither stands for the other."""
    for folder in ("a", "b", "c"):
        write_file(tmp_path / "in" / folder / "x.jsonl", TEXTS)
    report = build(tmp_path / "in", tmp_path / "out", workers=workers, chunk_bytes=2000, deduplicate=deduplicate)
    expected = list(dict.fromkeys(TEXTS)) if deduplicate else TEXTS * 3
    assert texts_of(open_store(tmp_path / "out")) == expected
    assert report.documents + report.skipped.get("duplicate", 0) == 300
    assert verify(tmp_path / "out").documents == len(expected)


def test_a_renamed_file_is_refused_and_not_taken_twice(tmp_path):
    path = write_file(tmp_path / "a.jsonl", TEXTS)
    write_file(tmp_path / "empty.jsonl", [])
    build([path, tmp_path / "empty.jsonl"], tmp_path / "out")
    before = files_of(tmp_path / "out")
    os.rename(path, tmp_path / "b.jsonl")
    with pytest.raises(
        StoreExistsError, match=r"added once, got .*b\.jsonl with the content of a\.jsonl, .*rebuild"
    ):
        build(tmp_path / "b.jsonl", tmp_path / "out")
    assert files_of(tmp_path / "out") == before
    # A copy beside the file is meant, and so is one more file without records.
    shutil.copy(tmp_path / "b.jsonl", path)
    os.rename(tmp_path / "empty.jsonl", tmp_path / "none.jsonl")
    assert build([tmp_path / n for n in ("a.jsonl", "b.jsonl", "none.jsonl")], tmp_path / "out").documents == 200


def test_a_store_inside_the_input_folder_is_no_input(tmp_path):
    write_file(tmp_path / "in" / "sub" / "a.jsonl", TEXTS[:50])
    build(tmp_path / "in", tmp_path / "in" / "store")
    (tmp_path / "link").symlink_to(tmp_path / "in" / "store")
    write_file(tmp_path / "in" / "sub" / "b.jsonl", TEXTS[50:])
    report = build(tmp_path / "in", tmp_path / "link")
    assert (report.new_files, texts_of(open_store(tmp_path / "in" / "store"))) == (1, TEXTS)
    assert [file["name"] for file in read_manifest(tmp_path / "link").inputs] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(DocumentError, match=r"must not all lie in the store"):
        build(tmp_path / "in" / "store" / "manifest.json", tmp_path / "in" / "store")


def test_the_store_may_be_named_from_where_one_stands(tmp_path, monkeypatch):
    write_file(tmp_path / "in" / "a.jsonl", TEXTS[:50])
    monkeypatch.chdir(tmp_path)
    build("in", "out", workers=2, chunk_bytes=1000)
    write_file(tmp_path / "in" / "b.jsonl", TEXTS[50:])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    build("../in", "../out", workers=2, chunk_bytes=1000)
    assert texts_of(open_store(tmp_path / "out")) == TEXTS


@pytest.mark.parametrize("storage_format", ["bin", "h5"])
def test_a_shard_that_is_in_no_manifest_is_never_overwritten(tmp_path, storage_format):
    path = write_file(tmp_path / "a.jsonl", TEXTS)
    stranger = tmp_path / "out" / "shard-00000" / "years of work"
    stranger.parent.mkdir(parents=True)
    stranger.write_bytes(b"foreign")
    with pytest.raises(StoreExistsError, match=r"shards but those of its manifest, got 'shard-00000'; .*rebuild"):
        build(path, tmp_path / "out", storage_format=storage_format)
    with pytest.raises(StoreError, match=r"unknown file in a folder with the name of a shard"):
        build(path, tmp_path / "out", storage_format=storage_format, rebuild=True)
    assert stranger.read_bytes() == b"foreign"
    shutil.rmtree(tmp_path / "out")
    build(path, tmp_path / "out", storage_format=storage_format)
    (tmp_path / "out" / "manifest.json").unlink()
    shutil.rmtree(tmp_path / "out" / ".prepare")
    with pytest.raises(StoreExistsError, match=r"no shards but those of its manifest"):
        build(path, tmp_path / "out", storage_format=storage_format)
    assert build(path, tmp_path / "out", storage_format=storage_format, rebuild=True).documents == 100


def test_only_our_own_temporary_files_are_removed(tmp_path):
    path = write_file(tmp_path / "a.jsonl", TEXTS)
    build(path, tmp_path / "out")
    (tmp_path / "out" / ".tmp-thesis").write_text("years of work")
    with pytest.raises(StoreExistsError, match=r"got '\.tmp-thesis' in it"):
        build(path, tmp_path / "out", rebuild=True)
    assert (tmp_path / "out" / ".tmp-thesis").read_text() == "years of work"


@pytest.mark.parametrize("name", ["inputs.json", "build.json", "publish.json"])
def test_a_journal_that_cannot_be_read_is_named_and_a_rebuild_is_the_way_out(tmp_path, name):
    path = write_file(tmp_path / "a.jsonl", TEXTS)
    whole = files_of(build(path, tmp_path / "out").path)
    (tmp_path / "out" / ".prepare" / name).write_bytes(b"{}")
    with pytest.raises(StoreCorruptError, match=rf"{name}: .* is not what prepare wrote; .*with rebuild=True"):
        build(path, tmp_path / "out")
    build(path, tmp_path / "out", rebuild=True)
    assert files_of(tmp_path / "out") == whole


@pytest.mark.parametrize("damage", ["result", "shard", "gone"])
def test_a_finished_unit_that_is_not_whole_is_done_again(tmp_path, monkeypatch, damage):
    path = write_file(tmp_path / "a.jsonl", TEXTS * 4)
    whole = build(path, tmp_path / "whole", chunk_bytes=3000).path
    first = SegmentWriter.append

    def append(self, route, values, offsets):
        if len([unit for unit in self._units.iterdir() if not unit.name.startswith(".")]) == 2:
            raise RuntimeError("stopped")
        first(self, route, values, offsets)

    monkeypatch.setattr(SegmentWriter, "append", append)
    with pytest.raises(RuntimeError):
        build(path, tmp_path / "out", chunk_bytes=3000)
    monkeypatch.undo()
    unit = next((tmp_path / "out" / ".prepare" / "units").glob("[!.]*"))
    if damage == "result":
        (unit / "result.json").write_bytes(b"")
    elif damage == "shard":
        (unit / "routes" / "store" / "0" / "sequence.bin").write_bytes(b"")
    else:
        shutil.rmtree(unit / "routes")
    assert build(path, tmp_path / "out", chunk_bytes=3000).resumed_units == 1
    assert files_of(tmp_path / "out") == files_of(whole)


@pytest.mark.parametrize("change", ["rewritten", "grown", "gone"])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_file_that_is_written_to_during_the_build_is_refused(tmp_path, monkeypatch, change, deduplicate):
    """Nothing that was read before is mixed with what is there after."""
    write_file(tmp_path / "in" / "a.jsonl", TEXTS)
    path = write_file(tmp_path / "in" / "b.jsonl", TEXTS)
    first = SegmentWriter.commit

    def commit(self, **position):
        if change == "rewritten":
            path.write_bytes(path.read_bytes().replace(b"mill", b"Mill"))
        elif change == "grown":
            path.write_bytes(path.read_bytes() + lines_of(["more"]))
        else:
            path.unlink(missing_ok=True)
        return first(self, **position)

    monkeypatch.setattr(SegmentWriter, "commit", commit)
    with pytest.raises(DocumentError, match=r"b\.jsonl: (changed while it was read|must be readable)"):
        build(tmp_path / "in", tmp_path / "out", deduplicate=deduplicate, chunk_bytes=1 << 20)
    monkeypatch.undo()
    assert not (tmp_path / "out" / "manifest.json").exists()
    texts = [text.replace("mill", "Mill") for text in TEXTS]
    write_file(path, texts)
    build(tmp_path / "in", tmp_path / "out", deduplicate=deduplicate, chunk_bytes=1 << 20)
    expected = [*TEXTS, *texts]
    assert texts_of(open_store(tmp_path / "out")) == (list(dict.fromkeys(expected)) if deduplicate else expected)


def test_units_may_be_cut_anew_when_a_build_goes_on(tmp_path, monkeypatch):
    path = write_file(tmp_path / "a.jsonl", TEXTS * 4)
    whole = build(path, tmp_path / "whole", chunk_bytes=3000).path
    monkeypatch.setattr(SegmentWriter, "append", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build(path, tmp_path / "out", chunk_bytes=10_000)
    monkeypatch.undo()
    build(path, tmp_path / "out", chunk_bytes=3000)
    assert files_of(tmp_path / "out") == files_of(whole)


@pytest.mark.parametrize("name", ["file", "file/below", "dangling"])
def test_a_path_that_cannot_be_a_folder_is_told_with_the_way_out(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"must be a folder that can be written to, got .*mend the path"):
        build(write_file(tmp_path / "a.jsonl", TEXTS), tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_odd_names_are_kept_and_impossible_ones_refused(tmp_path):
    path = write_file(tmp_path / "in" / "ü \n*[x]?'\"{}.jsonl", TEXTS)
    build(path, tmp_path / "out $(x)", workers=2, chunk_bytes=1000)
    assert [file["name"] for file in read_manifest(tmp_path / "out $(x)").inputs] == [path.name]
    odd = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"\xff.jsonl"))
    shutil.copy(path, odd)
    with pytest.raises(DocumentError, match=r"a path must be UTF-8; rename it"):
        build(odd, tmp_path / "other")
