from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tests.object_server import SECRET_KEY

import tokenmill as tm
from tokenmill.build import plan_units, run_part
from tokenmill.build.downloads import copy_inputs
from tokenmill.errors import DocumentError
from tokenmill.store.remote.client import Client, parse_address


@pytest.fixture(params=["s3", "file"])
def place(request, tmp_path, object_server):
    if request.param == "file":
        return f"file://{tmp_path}/remote"
    return object_server.address(f"inputs/{tmp_path.name}")


@pytest.fixture
def corpus(tmp_path, place):
    """Put files in a folder and below an address; return the folder."""
    client = Client(parse_address(place))
    folder = tmp_path / "corpus"
    for number, name in enumerate(("a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl", "notes.bin")):
        lines = [json.dumps({"text": f"{name} line {line} " * (line % 7)}) for line in range(50 + number)]
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(lines))
        client.put(name, folder / name)
    return folder


def below(place, name):
    path, mark, query = place.partition("?")
    return f"{path}/{name}{mark}{query}" if name else place


def is_known(name):
    return name.endswith(".jsonl")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", ["a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl"]),
        ("deep", ["c.jsonl", "er/d.jsonl"]),
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("[!a].jsonl", ["b.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl"]),
        ("deep/*/d.jsonl", ["er/d.jsonl"]),
        ("a.jsonl", ["a.jsonl"]),
    ],
)
def test_objects_folders_and_globs_are_copied(corpus, place, tmp_path, pattern, names):
    found = copy_inputs(below(place, pattern), tmp_path / "here", is_known=is_known)
    roots = {str(path).removesuffix(name) for path, name in zip(found, names, strict=True)}
    assert len(roots) == 1
    above = corpus / "deep" if pattern.startswith("deep") else corpus
    for path, name in zip(found, names, strict=True):
        with open(path, "rb") as file:
            assert file.read() == (above / name).read_bytes()


def test_a_copy_is_kept_until_its_object_changes(corpus, place, tmp_path):
    told = []
    options = {"is_known": is_known, "progress": lambda done, total: told.append((done, total))}
    (first,) = copy_inputs(below(place, "a.jsonl"), tmp_path / "here", **options)
    size = (corpus / "a.jsonl").stat().st_size
    assert told == [(0, size), (size, size)]
    told.clear()
    assert copy_inputs([below(place, "a.jsonl")], tmp_path / "here", **options) == [first]
    assert told == [(size, size)]
    Client(parse_address(place)).put("a.jsonl", b'{"text": "another"}')
    assert copy_inputs(below(place, "a.jsonl"), tmp_path / "here", **options) == [first]
    with open(first, "rb") as file:
        assert file.read() == b'{"text": "another"}'


def put_many(folder, count):
    """Put objects of 40 bytes below an address of a folder; return the address."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:05d}.jsonl").write_bytes(b"%039d\n" % number)
    return f"file://{folder}"


def written_bytes():
    """Return how many bytes this process has written so far, by the count of the system."""
    with open("/proc/self/io") as counts:
        return int(next(line for line in counts if line.startswith("wchar")).split()[1])


def test_the_bytes_that_are_written_grow_with_the_objects_and_no_faster(tmp_path):
    counts = []
    for count in (40, 160):
        place = put_many(tmp_path / f"{count}", count)
        before = written_bytes()
        assert len(copy_inputs(place, tmp_path / "here", is_known=is_known)) == count
        counts.append(written_bytes() - before)
    assert counts[1] <= 4.5 * counts[0]


KILLED = """
import os, signal, sys
from tokenmill.build.downloads import copy_inputs

def tell(done, total):
    if done >= 40 * 7:
        os.kill(os.getpid(), signal.SIGKILL)

copy_inputs(sys.argv[1], __import__("pathlib").Path(sys.argv[2]), is_known=lambda _: True, progress=tell)
"""


@pytest.mark.parametrize("torn", [0, 1, 3, 20])
def test_copies_of_a_process_that_was_killed_are_kept(tmp_path, torn):
    place, here = put_many(tmp_path / "many", 30), tmp_path / "here"
    done = subprocess.run([sys.executable, "-c", KILLED, place, str(here)], check=False)
    assert done.returncode == -signal.SIGKILL
    (journal,) = here.rglob(".objects.jsonl")
    if torn:
        journal.write_bytes(journal.read_bytes()[:-torn])
    told = []
    options = {"is_known": is_known, "progress": lambda done, total: told.append((done, total))}
    copies = copy_inputs(place, here, **options)
    assert told[0] == (40 * (7 if torn <= 1 else 6), 40 * 30)  # without its line break a line is whole
    for number, path in enumerate(copies):
        with open(path, "rb") as file:
            assert file.read() == b"%039d\n" % number
    told.clear()
    assert copy_inputs(place, here, **options) == copies
    assert told == [(40 * 30, 40 * 30)]


def test_a_copy_of_an_object_that_changed_is_not_taken_for_the_one_before(tmp_path, monkeypatch):
    """A process that ends between the new copy and its line leaves the old line, which must not count."""
    place, here = put_many(tmp_path / "many", 1), tmp_path / "here"
    object_file = tmp_path / "many" / "00000.jsonl"
    before, times = object_file.read_bytes(), object_file.stat()
    (copy,) = copy_inputs(place, here, is_known=is_known)
    object_file.write_bytes(b"x" * 40)

    def end(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tokenmill.build.downloads.sync_folder", end)
        with pytest.raises(KeyboardInterrupt):
            copy_inputs(place, here, is_known=is_known)
    with open(copy, "rb") as file:
        assert file.read() == b"x" * 40
    with object_file.open("r+b") as file:  # the same object as before, so the same version
        file.write(before)
    os.utime(object_file, ns=(times.st_atime_ns, times.st_mtime_ns))
    (copy,) = copy_inputs(place, here, is_known=is_known)
    with open(copy, "rb") as file:
        assert file.read() == before


@pytest.mark.usefixtures("corpus")
def test_what_is_not_there_is_named_and_local_paths_stay(place, tmp_path):
    with pytest.raises(DocumentError, match=r"\*\.parquet: found no object that can be read"):
        copy_inputs(below(place, "*.parquet"), tmp_path / "here", is_known=is_known)
    assert copy_inputs(["x/*.jsonl", tmp_path], tmp_path / "here", is_known=is_known) == ["x/*.jsonl", tmp_path]


def test_a_store_of_objects_is_that_of_local_files(corpus, place, tmp_path):
    options = {"workers": 1, "progress": False}
    local = tm.prepare(f"{corpus}/**/*.jsonl", out=tmp_path / "local", **options)
    away = tm.prepare(below(place, "**/*.jsonl"), out=tmp_path / "away", staging=tmp_path / "staging", **options)
    assert away.fingerprint == local.fingerprint
    assert (tmp_path / "away" / "manifest.json").read_bytes() == (tmp_path / "local" / "manifest.json").read_bytes()
    # From objects to objects.
    both = tm.prepare(
        below(place, "**/*.jsonl"), out=below(place, "store"), staging=tmp_path / "staging", **options
    )
    assert both.fingerprint == local.fingerprint


def test_units_of_objects_are_planned_and_done_in_parts(corpus, place, tmp_path):
    local = tm.prepare(f"{corpus}/**/*.jsonl", out=tmp_path / "local", workers=1, progress=False)
    inputs, how = below(place, "**/*.jsonl"), {"out": tmp_path / "away", "staging": tmp_path / "staging"}
    planned = plan_units(inputs, **how)
    assert (planned.phase, planned.units) == ("write", 1)
    assert run_part(part="1/1", workers=1, progress=False, **how).units == 1
    done = tm.prepare(inputs, workers=1, progress=False, **how)
    assert done.resumed_units == 1
    assert done.fingerprint == local.fingerprint


RUN = """
[run]
steps = 6
global_batch_size = 4
seq_len = 32

[[sources]]
name = "web"
documents = ["{documents}"]
tokenizer = "bytes"
live = {live}
"""


@pytest.mark.parametrize("live", ["true", "false"])
def test_sources_of_text_in_object_storage_give_the_batches_of_local_files(corpus, place, tmp_path, live):
    """[N2.b] Live text, and text that is prepared when it is first used; no secret is in what a run leaves."""
    batches = []
    for name, documents in (("near", f"{corpus}/*.jsonl"), ("far", below(place, "*.jsonl"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.toml").write_text(RUN.format(documents=documents, live=live))
        loader = tm.Run.from_toml(tmp_path / name / "run.toml").loader(micro_batch=2, threads=0)
        batches.append([{key: array.tobytes() for key, array in batch.items()} for batch in loader])
    assert batches[0] == batches[1]
    assert len(batches[0]) == 12
    left = [path.read_bytes() for path in (tmp_path / "far").rglob("*") if path.is_file()]
    assert left
    assert not [body for body in left if SECRET_KEY.encode() in body]


@pytest.mark.usefixtures("corpus")
def test_a_long_copy_that_nobody_watches_says_how_far_it_is(place, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tokenmill.progress.LINE_SECONDS", 0.0)
    copy_inputs(below(place, "a.jsonl"), tmp_path / "here", is_known=is_known)
    assert "inputs are copied from object storage: 0 MB of 0 MB" in caplog.text


@pytest.mark.usefixtures("corpus")
def test_inputs_that_do_not_fit_the_disk_are_refused_before_any_is_copied(place, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(
        DocumentError, match=r"must have room for [\d,]+ bytes of inputs .*got 1,000 free.*staging="
    ):
        copy_inputs(place, tmp_path / "here", is_known=is_known)
    assert not list((tmp_path / "here").rglob("*.jsonl"))
