"""A build that was cut short goes on; a finished one is added to; nothing else is done by accident."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tests.build.corpus import files_of, lines_of, some_texts, texts_of, write_file

from tokenmill.build import PrepareOptions, prepare
from tokenmill.build.unit import SegmentWriter
from tokenmill.errors import DocumentError, StoreBusyError, StoreCorruptError, StoreError, StoreExistsError
from tokenmill.store import StoreSpec, StoreWriter, open_store, read_manifest, verify
from tokenmill.store.lease import leased_folder

TEXTS = some_texts(300)


def build(inputs, out, *, workers=1, rebuild=False, tokenizer="bytes", recipe="text", **options):
    return prepare(
        inputs,
        out=out,
        tokenizer=tokenizer,
        recipe=recipe,
        workers=workers,
        rebuild=rebuild,
        progress=False,
        options=PrepareOptions(**options),
    )


# Builds are cut short before every change that they make to a file or folder, and by a full disk; then run again.
CUT_SHORT = """
import errno, os, shutil, signal, sys
from pathlib import Path
from tokenmill.errors import StoreMissingError, TokenmillError
from tokenmill.build import PrepareOptions, prepare
from tokenmill.store import open_store, verify

folder, mode, first, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
events = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
keep = ("text",) if mode == "rebuild" else ()
options = PrepareOptions(chunk_bytes=6000, max_tokens_per_shard=4000, keep=keep)

def build(out, inputs):
    return prepare(inputs, out=out, workers=1, rebuild=mode == "rebuild", progress=False, options=options)

def files(path):
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}

def everything(path):
    store = open_store(path)
    return store.fetch(0, store.num_tokens, "sequence").tobytes()

def start(out):
    if mode != "fresh":
        prepare(folder / "in" / "a.jsonl", out=out, workers=1, progress=False, options=options)

def cut_short(left, out):
    def hook(event, arguments):
        nonlocal left
        if event in events and arguments and str(out) in str(arguments[0]):
            if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
    sys.addaudithook(hook)
    build(out, folder / "in")

start(folder / "whole")
build(folder / "whole", folder / "in")
old = folder / "old"
start(old)
before = files(old) if old.exists() else None
point = first
while True:
    out = folder / "cut"
    shutil.rmtree(out, ignore_errors=True)
    if before is not None:
        shutil.copytree(old, out)
    child = os.fork()
    if child == 0:
        cut_short(point, out)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    try:
        seen = everything(out)
        state = next(name for name, path in (("new", folder / "whole"), ("old", old)) if seen == everything(path))
    except StoreMissingError:
        state = "none"
    report = build(out, folder / "in")
    assert files(out) == files(folder / "whole"), point
    print(state, "done" if status == 0 else "killed", report.resumed_units)
    if status == 0:
        break
    point += step
"""


@pytest.mark.parametrize("mode", ["fresh", "append", "rebuild"])
def test_a_build_killed_before_any_change_of_a_file_ends_with_the_same_bytes(tmp_path, mode):
    """[C1.a, C1.d, D1.a] Readers see the old store, none, or the new one, in that order."""
    write_file(tmp_path / "in" / "a.jsonl", TEXTS[:30])
    write_file(tmp_path / "in" / "b.jsonl", TEXTS[30:60])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CUT_SHORT, str(tmp_path), mode, "0", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines()]
    states = [state for state, _, _ in lines]
    orders = {"fresh": ["none", "new"], "append": ["old", "new"], "rebuild": ["old", "none", "new"]}
    assert states == sorted(states, key=orders[mode].index)
    assert set(states) == set(orders[mode])
    assert lines[-1][1] == "done"
    assert len(lines) > 20
    # Somewhere in the middle finished units were there to go on with.
    assert max(int(resumed) for _, _, resumed in lines) >= 1


SCRIPT = """
import sys
from tokenmill.build import PrepareOptions, prepare
prepare(sys.argv[1], out=sys.argv[2], workers=int(sys.argv[3]), progress=False,
        options=PrepareOptions(chunk_bytes=1 << 20))
"""


def kill_at_random(corpus, store, dice, workers):
    """Start a build, kill it after a random time; return whether it had finished."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, corpus, store, str(workers)], stderr=subprocess.DEVNULL
    )
    time.sleep(dice.uniform(0.3, 1.5))
    process.send_signal(signal.SIGKILL)
    return process.wait() == 0


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.deep)])
def test_a_build_killed_at_random_moments_ends_with_the_same_bytes(tmp_path, kills):
    """[C1.a, D1.a] With another number of workers each time."""
    dice = random.Random(kills)
    corpus = write_file(tmp_path / "input.jsonl", some_texts(2000) * (20 if kills < 10 else 60))
    build(corpus, tmp_path / "straight", chunk_bytes=1 << 20)
    whole = files_of(tmp_path / "straight")
    killed = 0
    while killed < kills:
        while not kill_at_random(corpus, tmp_path / "store", dice, dice.choice([1, 2, 3])):
            killed += 1
            if killed >= kills:
                break
        build(corpus, tmp_path / "store", workers=dice.choice([1, 2]), chunk_bytes=1 << 20)
        assert files_of(tmp_path / "store") == whole
        shutil.rmtree(tmp_path / "store")


@pytest.fixture
def small_segments(monkeypatch):
    """Let units of files that cannot be cut end a segment after a batch or two."""
    monkeypatch.setattr("tokenmill.build.unit.SEGMENT_BYTES", 1 << 16)


def stop_after(monkeypatch, most):
    """Stop a build after some batches; return the number of documents of each batch, which later ones extend."""
    appended, first = [], SegmentWriter.append

    def append(self, route, values, offsets):
        if len(appended) == most:
            raise RuntimeError("stopped")
        appended.append(int(offsets["documents"].size) - 1)
        first(self, route, values, offsets)

    monkeypatch.setattr(SegmentWriter, "append", append)
    return appended


@pytest.mark.usefixtures("small_segments")
def test_a_file_that_cannot_be_cut_continues_after_its_last_finished_shard(tmp_path, monkeypatch):
    """[C1.b] The work after that shard is lost, not the unit."""
    corpus = write_file(tmp_path / "input.jsonl.gz", some_texts(3000) * 8)
    whole = build(corpus, tmp_path / "whole").path
    shards = read_manifest(whole).shards
    assert len(shards) > 3
    with monkeypatch.context() as patch:
        appended = stop_after(patch, 3)
        with pytest.raises(RuntimeError, match="stopped"):
            build(corpus, tmp_path / "store")
    finished = len(list((tmp_path / "store" / ".prepare" / "units").glob("[!.]*")))
    assert 0 < finished < len(shards)
    with monkeypatch.context() as patch:
        rest = stop_after(patch, 10**9)
        build(corpus, tmp_path / "store")
    assert sum(rest) == 24_000 - sum(shard.documents for shard in shards[:finished])
    assert sum(appended) < 24_000
    assert files_of(tmp_path / "store") == files_of(whole)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("options", [{"deduplicate": True}, {"max_items": 9000}, {"domain_key": "id"}])
def test_lines_and_duplicates_are_counted_through_the_shards_of_one_file(tmp_path, monkeypatch, options):
    """As in a file that is cut into units."""
    records = [{"text": text or "-", "id": "ab"[number % 2]} for number, text in enumerate(some_texts(12_000))]
    lines = [json.dumps(record).encode() for record in records]
    lines[10_000:10_000] = [b"broken"]
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(b"\n".join(lines))
    packed.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    cut = build(plain, tmp_path / "cut", on_error="skip", chunk_bytes=1 << 19, **options)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(RuntimeError, match="stopped"):
            build(packed, tmp_path / "whole", on_error="skip", **options)
    whole = build(packed, tmp_path / "whole", on_error="skip", **options)
    assert (whole.documents, whole.skipped) == (cut.documents, cut.skipped)
    for one, other in zip(cut.stores, whole.stores, strict=True):
        ours, theirs = open_store(one.path), open_store(other.path)
        assert (
            ours.fetch(0, ours.num_tokens, "sequence").tolist()
            == theirs.fetch(0, theirs.num_tokens, "sequence").tolist()
        )
        last = ours.num_documents - 1
        assert ours.origin(last).place == theirs.origin(last).place
        assert [bad["line"] for bad in ours.manifest.skipped.get("first", ())] == [
            bad["line"] for bad in theirs.manifest.skipped.get("first", ())
        ]


def test_a_damaged_journal_is_named_and_a_rebuild_is_the_way_out(tmp_path):
    corpus = write_file(tmp_path / "a.jsonl", TEXTS[:10])
    build(corpus, tmp_path / "store")
    ledger = tmp_path / "store" / ".prepare" / "inputs.json"
    ledger.write_bytes(ledger.read_bytes().replace(b"a.jsonl", b"b.jsonl"))
    with pytest.raises(StoreCorruptError, match=r"inputs\.json: .* is not what prepare wrote.*rebuild=True"):
        build(corpus, tmp_path / "store")


def test_a_second_build_is_refused_with_the_process_of_the_first(tmp_path):
    """[C1.c]"""
    corpus = write_file(tmp_path / "a.jsonl", TEXTS[:10])
    (tmp_path / "store").mkdir()
    match = rf"another build writes to it: process {os.getpid()}; wait"
    with leased_folder(tmp_path / "store"), pytest.raises(StoreBusyError, match=match):
        build(corpus, tmp_path / "store")
    build(corpus, tmp_path / "store")


def test_new_files_add_shards_and_leave_the_old_ones_alone(tmp_path):
    write_file(tmp_path / "in" / "a.jsonl", TEXTS[:100])
    first = build(tmp_path / "in", tmp_path / "store")
    before = files_of(tmp_path / "store")
    write_file(tmp_path / "in" / "b.jsonl", TEXTS[100:])
    second = build(tmp_path / "in", tmp_path / "store")
    assert (second.new_files, second.files, second.new_documents) == (1, 2, 200)
    assert (first.documents, second.documents) == (100, 300)
    assert texts_of(open_store(tmp_path / "store")) == TEXTS
    after = files_of(tmp_path / "store")
    shards = {name: data for name, data in before.items() if name.startswith("shard-")}
    assert {name: after[name] for name in shards} == shards
    assert verify(tmp_path / "store").shards == first.shards + 1
    names = [entry["name"] for entry in read_manifest(tmp_path / "store").inputs]
    assert names == ["a.jsonl", "b.jsonl"]


def test_the_same_files_again_change_nothing(tmp_path):
    write_file(tmp_path / "in" / "a.jsonl", TEXTS[:100])
    build(tmp_path / "in", tmp_path / "store")
    before = files_of(tmp_path / "store")
    report = build(tmp_path / "in", tmp_path / "store")
    assert (report.new_files, report.new_documents, report.documents) == (0, 0, 100)
    assert files_of(tmp_path / "store") == before


def test_files_that_moved_together_are_known_again(tmp_path):
    write_file(tmp_path / "in" / "a.jsonl", TEXTS[:100])
    build(tmp_path / "in" / "a.jsonl", tmp_path / "store")
    shutil.move(tmp_path / "in", tmp_path / "elsewhere")
    write_file(tmp_path / "elsewhere" / "deep" / "b.jsonl", TEXTS[100:200])
    report = build(tmp_path / "elsewhere", tmp_path / "store")
    assert (report.new_files, report.documents) == (1, 200)


def test_a_file_that_changed_after_it_was_prepared_is_refused(tmp_path):
    write_file(tmp_path / "in" / "a.jsonl", TEXTS[:100])
    build(tmp_path / "in", tmp_path / "store")
    before = files_of(tmp_path / "store")
    write_file(tmp_path / "in" / "a.jsonl", TEXTS[:101])
    with pytest.raises(
        StoreExistsError, match=r"must stay as they were, got .*a\.jsonl with other content .*rebuild=True"
    ):
        build(tmp_path / "in", tmp_path / "store")
    assert files_of(tmp_path / "store") == before
    assert build(tmp_path / "in", tmp_path / "store", rebuild=True).documents == 101


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"add_eos": False}, r"tokenizer\.add_eos True -> False"),
        ({"text_field": "body"}, r"recipe\.input\.sections\[0\]\.field 'text' -> 'body'"),
        ({"min_chars": 3}, r"recipe\.preprocessing\.min_chars 0 -> 3"),
        ({"val_fraction": 0.5}, r"recipe\.preprocessing\.val_fraction 0\.0 -> 0\.5"),
        ({"format": "jsonl"}, r"options\.format None -> 'jsonl'"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_another_option_is_refused_with_the_first_difference(tmp_path, monkeypatch, change, difference, finished):
    """[T2.c]"""
    corpus = write_file(tmp_path / "a.jsonl", TEXTS[:20])
    if finished:
        build(corpus, tmp_path / "store")
    else:
        stop_at_the_second_unit(monkeypatch)
        with pytest.raises(ZeroDivisionError):
            build(corpus, tmp_path / "store", chunk_bytes=400)
        monkeypatch.undo()
    before = files_of(tmp_path / "store")
    rule = "added to as it was made" if finished else "go on as it began"
    with pytest.raises(StoreExistsError, match=rf"must (be )?{rule}, got {difference}; .*rebuild=True"):
        build(corpus, tmp_path / "store", **change)
    assert files_of(tmp_path / "store") == before


def stop_at_the_second_unit(monkeypatch):
    first, commits = SegmentWriter.append, []

    def append(self, *arguments):
        commits.append(self.name)
        if len(set(commits)) > 1:
            raise ZeroDivisionError
        first(self, *arguments)

    monkeypatch.setattr(SegmentWriter, "append", append)


def test_a_build_that_has_finished_nothing_yet_may_be_asked_for_otherwise(tmp_path):
    """The first try of a newcomer fails at a bad line or a wrong field; the advice of the error must work."""
    corpus = tmp_path / "a.jsonl"
    corpus.write_bytes(b'{"body": "one"}\n{"body": 2}\n')
    with pytest.raises(DocumentError, match="text_field="):
        build(corpus, tmp_path / "store")
    with pytest.raises(DocumentError, match='on_error="skip"'):
        build(corpus, tmp_path / "store", text_field="body")
    assert build(corpus, tmp_path / "store", text_field="body", on_error="skip").documents == 1


def test_bad_records_may_be_skipped_from_the_middle_of_a_build_on(tmp_path):
    corpus = tmp_path / "a.jsonl"
    corpus.write_bytes(lines_of(TEXTS[:200]) + b"broken\n" + lines_of(TEXTS[200:]))
    with pytest.raises(DocumentError, match=r"a\.jsonl:201"):
        build(corpus, tmp_path / "store", chunk_bytes=2000)
    report = build(corpus, tmp_path / "store", chunk_bytes=2000, on_error="skip")
    assert report.resumed_units > 5
    assert (report.documents, report.skipped) == (300, {"json": 1})


def test_a_rebuild_replaces_the_store_at_the_end_and_not_before(tmp_path, monkeypatch):
    corpus = write_file(tmp_path / "a.jsonl", TEXTS[:20])
    build(corpus, tmp_path / "store")
    monkeypatch.setattr(SegmentWriter, "append", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build(corpus, tmp_path / "store", rebuild=True, add_eos=False)
    monkeypatch.undo()
    assert verify(tmp_path / "store").tokens == open_store(tmp_path / "store").num_tokens
    # Run again without the word, it goes on with the rebuild that it finds.
    assert build(corpus, tmp_path / "store", add_eos=False).documents == 20
    assert not read_manifest(tmp_path / "store").tokenizer["add_eos"]


def test_a_rebuild_may_change_which_stores_there_are(tmp_path):
    corpus = write_file(tmp_path / "a.jsonl", TEXTS[:100])
    one = files_of(build(corpus, tmp_path / "store").path)
    report = build(corpus, tmp_path / "store", rebuild=True, val_fraction=0.3)
    assert [store.route for store in report.stores] == ["train", "val"]
    with pytest.raises(StoreError):
        open_store(tmp_path / "store")
    build(corpus, tmp_path / "store", rebuild=True)
    assert files_of(tmp_path / "store") == one


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    corpus = write_file(tmp_path / "a.jsonl", TEXTS[:10])
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").write_text("years of work")
    for rebuild in (False, True):
        with pytest.raises(StoreExistsError, match=r"folder of its own for the store, got 'thesis\.txt' in it"):
            build(corpus, tmp_path / "store", rebuild=rebuild)
    assert files_of(tmp_path / "store") == {"thesis.txt": b"years of work"}


def test_a_store_that_prepare_did_not_make_is_not_added_to(tmp_path):
    corpus = write_file(tmp_path / "a.jsonl", TEXTS[:10])
    spec = StoreSpec(keys={"sequence": "<u2"}, tokenizer={"vocab_size": 300}, recipe={})
    with StoreWriter(tmp_path / "store", spec) as writer:
        writer.append({"sequence": np.array([1, 2], "<u2")}, np.array([0, 2]))
        writer.commit()
    with pytest.raises(StoreExistsError, match=r"cannot add to, got one without its journal; .*rebuild=True"):
        build(corpus, tmp_path / "store")
    assert build(corpus, tmp_path / "store", rebuild=True).documents == 10


@pytest.mark.parametrize(("workers", "most", "options"), [(1, 200_000, {}), (2, 20_000, {"deduplicate": True})])
def test_a_full_disk_is_named_and_the_next_run_goes_on(tmp_path, workers, most, options):
    """[C1] No file can be larger than so many bytes; with more room the same command ends with the same bytes."""
    corpus = write_file(tmp_path / "input.jsonl", some_texts(3000) * 2)
    whole = build(corpus, tmp_path / "whole", chunk_bytes=1 << 18, **options).path
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))\n"
        + SCRIPT.replace("1 << 20", f"1 << 18, **{options}")
    )
    done = subprocess.run(
        [sys.executable, "-c", program, corpus, tmp_path / "store", str(workers)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "StoreError" in done.stderr
    assert "make room or mend the disk, and run again: it goes on from there" in done.stderr
    build(corpus, tmp_path / "store", chunk_bytes=1 << 18, **options)
    assert files_of(tmp_path / "store") == files_of(whole)


def test_lines_are_numbered_through_the_file_when_a_build_goes_on(tmp_path):
    good = lines_of(TEXTS)
    corpus = tmp_path / "a.jsonl"
    corpus.write_bytes(good + b"broken\n" + good)
    report = build(corpus, tmp_path / "store", on_error="skip", chunk_bytes=5000)
    first = read_manifest(tmp_path / "store").skipped["first"]
    assert (report.skipped, [one["line"] for one in first]) == ({"json": 1}, [301])


def test_a_ledger_of_another_version_is_named_and_a_rebuild_is_the_way_out(tmp_path):
    from tokenmill.build.journal import read_signed, write_signed

    corpus = write_file(tmp_path / "a.jsonl", TEXTS[:10])
    build(corpus, tmp_path / "store")
    ledger = tmp_path / "store" / ".prepare" / "inputs.json"
    write_signed(ledger, {**read_signed(ledger), "news": 1})
    with pytest.raises(StoreCorruptError, match=r"inputs\.json: it was written by another version.*rebuild=True"):
        build(corpus, tmp_path / "store")
    assert build(corpus, tmp_path / "store", rebuild=True).documents == 10


def long_file(path, odd=None):
    """Write a file of which samples see little; `odd` is one of its texts that differs."""
    texts = [f"{number:04} {'x' * 1000}" for number in range(1000)]
    if odd is not None:
        texts[odd] = texts[odd][:-1] + "y"
    return write_file(path, texts)


def test_a_file_of_a_store_that_changed_where_no_sample_sees_it_is_refused(tmp_path):
    path = long_file(tmp_path / "a.jsonl")
    prepare(path, out=tmp_path / "out", progress=False)
    long_file(path, odd=200)
    write_file(tmp_path / "b.jsonl", ["new"])
    with pytest.raises(StoreExistsError, match=r"must stay as they were, got .*a\.jsonl with other content"):
        prepare(tmp_path / "*.jsonl", out=tmp_path / "out", progress=False)
    long_file(path)
    assert prepare(tmp_path / "*.jsonl", out=tmp_path / "out", progress=False).documents == 1001


def test_units_of_a_file_that_changed_since_a_build_stopped_are_done_again(tmp_path):
    path = long_file(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("{")
    options = PrepareOptions(chunk_bytes=50_000, deduplicate=True)
    with pytest.raises(DocumentError, match=r"b\.jsonl"):
        prepare(tmp_path / "*.jsonl", out=tmp_path / "out", workers=1, progress=False, options=options)
    long_file(path, odd=200)
    write_file(tmp_path / "b.jsonl", ["new"])
    prepare(tmp_path / "*.jsonl", out=tmp_path / "out", workers=1, progress=False, options=options)
    prepare(tmp_path / "*.jsonl", out=tmp_path / "straight", workers=1, progress=False, options=options)
    assert texts_of(open_store(tmp_path / "out")) == texts_of(open_store(tmp_path / "straight"))


@pytest.mark.parametrize("damage", [lambda _: b"", lambda data: data[:-16], lambda data: b"\1" + data[1:]])
def test_hashes_that_are_not_as_they_were_written_are_made_again(tmp_path, damage):
    """Else records that are there twice would be taken, and no checksum would tell."""
    write_file(tmp_path / "a.jsonl", ["one", "two", "one"])
    (tmp_path / "b.jsonl").write_text("{")
    options = PrepareOptions(deduplicate=True)
    with pytest.raises(DocumentError, match=r"b\.jsonl"):
        prepare(tmp_path / "*.jsonl", out=tmp_path / "out", workers=1, progress=False, options=options)
    scans = sorted((tmp_path / "out" / ".prepare" / "scans").iterdir())
    assert scans
    for scan in scans:
        scan.write_bytes(damage(scan.read_bytes()))
    write_file(tmp_path / "b.jsonl", ["two", "three"])
    prepare(tmp_path / "*.jsonl", out=tmp_path / "out", workers=1, progress=False, options=options)
    assert texts_of(open_store(tmp_path / "out")) == ["one", "two", "three"]
    (scan, *_) = sorted((tmp_path / "out" / ".prepare" / "scans").iterdir())
    scan.write_bytes(damage(scan.read_bytes()))
    write_file(tmp_path / "c.jsonl", ["four"])
    with pytest.raises(StoreCorruptError, match=r"to add files, got other bytes than were written; start over"):
        prepare(tmp_path / "*.jsonl", out=tmp_path / "out", workers=1, progress=False, options=options)
