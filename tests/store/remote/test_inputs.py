from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from tests.object_server import SECRET_KEY

import tokenmill as tm
from tokenmill.errors import DocumentError
from tokenmill.store.remote.client import Client, parse_address
from tokenmill.store.remote.inputs import copy_inputs


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


@pytest.mark.usefixtures("corpus")
def test_what_is_not_there_is_named_and_local_paths_stay(place, tmp_path):
    with pytest.raises(DocumentError, match=r"\*\.parquet: must be an object, or a folder or glob of some"):
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
    monkeypatch.setattr("tokenmill.store.remote.inputs.LINE_SECONDS", 0.0)
    copy_inputs(below(place, "a.jsonl"), tmp_path / "here", is_known=is_known)
    assert "inputs are copied from object storage: 0 of 0 MB" in caplog.text


@pytest.mark.usefixtures("corpus")
def test_inputs_that_do_not_fit_the_disk_are_refused_before_any_is_copied(place, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(
        DocumentError, match=r"must have room for [\d,]+ bytes of inputs .*got 1,000 free.*--staging"
    ):
        copy_inputs(place, tmp_path / "here", is_known=is_known)
    assert not list((tmp_path / "here").rglob("*.jsonl"))
