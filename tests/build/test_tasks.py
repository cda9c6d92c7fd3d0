"""All work of a build is in one list of tasks, and all results are in its folder."""

import pytest
import xxhash
from tests.build.corpus import files_of, some_texts, write_file

from tokenmill.build import PrepareOptions, plan_units, prepare, run_part
from tokenmill.build import cut as cuts
from tokenmill.build.journal import Journal
from tokenmill.build.tasks import is_done, read_digests, read_list, run_index
from tokenmill.errors import StoreCorruptError, StoreError

OPTIONS = PrepareOptions(chunk_bytes=2000)


@pytest.fixture
def planned(tmp_path):
    """Write three files and the list of their tasks."""
    for name in "abc":
        write_file(tmp_path / "in" / f"{name}.jsonl", some_texts(60, seed=ord(name)))
    plan_units(tmp_path / "in", out=tmp_path / "out", options=OPTIONS)
    return tmp_path


def test_the_digest_of_a_file_is_a_task_before_its_first_unit(planned, monkeypatch):
    """So no unit is followed by the digest of a large file, and workers make digests in parallel."""
    monkeypatch.setattr(cuts, "DIGEST_BYTES", 1)
    plan_units(planned / "in", out=planned / "out", options=OPTIONS)
    seen = []
    for task in read_list(Journal(planned / "out")).tasks():
        paths = {piece.file.path for piece in task.unit.pieces}
        if task.kind == "digest":
            seen += paths
        else:
            assert paths <= set(seen)
    assert seen == [str(planned / "in" / f"{name}.jsonl") for name in "abc"]


def test_digests_are_those_of_all_bytes_and_are_not_made_again(planned):
    journal = Journal(planned / "out")
    tasks = read_list(journal)
    (index,) = (index for index, task in enumerate(tasks.tasks()) if task.kind == "digest")
    run_index(str(planned / "out"), tasks.head.checksum, index)
    digests = read_digests(journal, tasks.task(index))
    wanted = {
        str(path): xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in sorted((planned / "in").iterdir())
    }
    assert digests == wanted
    written = (journal.digests / tasks.task(index).key).stat().st_mtime_ns
    assert is_done(journal, tasks.task(index))
    run_part(planned / "out", "0/1", workers=1, progress=False)
    assert (journal.digests / tasks.task(index).key).stat().st_mtime_ns == written
    prepare(planned / "in", out=planned / "out", workers=1, progress=False, options=OPTIONS)
    assert {entry.name: entry.content for entry in journal.ledger().inputs} == {
        f"{name}.jsonl": wanted[str(planned / "in" / f"{name}.jsonl")] for name in "abc"
    }


def test_damaged_digests_are_made_again(planned):
    journal = Journal(planned / "out")
    tasks = read_list(journal)
    run_part(planned / "out", "0/1", workers=1, progress=False)
    (file,) = journal.digests.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    prepare(planned / "in", out=planned / "out", workers=1, progress=False, options=OPTIONS)
    assert all(entry.content for entry in journal.ledger().inputs)
    assert len(tasks) > 3


def test_small_files_share_a_task_of_digests(tmp_path, monkeypatch):
    for number in range(25):
        write_file(tmp_path / "in" / f"{number:02}.jsonl", [f"text {number}"])
    (tmp_path / "in" / "empty.jsonl").touch()
    monkeypatch.setattr(cuts, "DIGEST_FILES", 10)
    plan_units(tmp_path / "in", out=tmp_path / "out")
    kinds = [task.kind for task in read_list(Journal(tmp_path / "out")).tasks()]
    assert kinds == ["digest", "digest", "digest", "write"]
    prepare(tmp_path / "in", out=tmp_path / "out", workers=1, progress=False)
    contents = {entry.name: entry.content for entry in Journal(tmp_path / "out").ledger().inputs}
    assert len(contents) == 26
    assert contents["empty.jsonl"] == xxhash.xxh3_128_hexdigest(b"")


def test_a_worker_of_an_earlier_list_finds_that_its_build_is_over(planned):
    """The list covers the job: the same units with other options are another list."""
    out = planned / "out"
    before = read_list(Journal(out)).head.checksum
    plan_units(planned / "in", out=out, options=PrepareOptions(chunk_bytes=2000, on_error="skip"))
    assert read_list(Journal(out)).head.checksum != before
    with pytest.raises(StoreError, match="the build of this task is over"):
        run_index(str(out), before, 0)


@pytest.mark.parametrize("name", ["units.jsonl", "job"])
def test_a_damaged_list_or_job_is_named(planned, name):
    journal = planned / "out" / ".prepare"
    (file,) = journal.glob(f"{name}*")
    file.write_bytes(file.read_bytes().replace(b"bytes", b"bites", 1))
    with pytest.raises(StoreCorruptError, match=rf"{file.name}: its content is not what prepare wrote"):
        run_part(planned / "out", "0/1", workers=1, progress=False)


def test_indices_may_be_taken_by_workers_parts_and_the_plain_call(planned):
    """[D1.a] Each takes what it likes of one list, in any order."""
    out, straight = planned / "out", planned / "straight"
    prepare(planned / "in", out=straight, workers=1, progress=False, options=OPTIONS)
    tasks = read_list(Journal(out))
    for index in (len(tasks) - 1, 2):
        run_index(str(out), tasks.head.checksum, index)
    run_part(out, "1/3", workers=1, progress=False)
    report = prepare(planned / "in", out=out, workers=2, progress=False, options=OPTIONS)
    assert 2 <= report.resumed_units < report.units
    assert files_of(out) == files_of(straight)
