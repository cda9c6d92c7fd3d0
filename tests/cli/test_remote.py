"""All commands that look at stores and runs, of a store in object storage."""

from __future__ import annotations

import gc
import json

import pytest
from tests.object_server import ObjectServer
from typer.testing import CliRunner

import tokenmill as tm
from tokenmill.cli.app import app
from tokenmill.store.remote.client import Client, parse_address

RUN = """
[run]
steps = 12
global_batch_size = 4
seq_len = 32

[[sources]]
name = "web"
store = "{store}"
"""


@pytest.fixture
def both(tmp_path, object_server: ObjectServer):
    """Return a prepared store, its address, and runs of the two."""
    texts = [{"text": f"document {number} of the mill by the water" * (1 + number % 5)} for number in range(80)]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    tm.prepare(tmp_path / "web.jsonl", out=tmp_path / "web", tokenizer="bytes", workers=1, progress=False)
    address = object_server.address(f"{tmp_path.name}/web")
    client = Client(parse_address(address))
    for file in sorted((tmp_path / "web").rglob("*")):
        if file.is_file():
            client.put(str(file.relative_to(tmp_path / "web")), file)
    (tmp_path / "local.toml").write_text(RUN.format(store="web"))
    (tmp_path / "away.toml").write_text(RUN.format(store=address))
    return tmp_path / "web", address, tmp_path / "local.toml", tmp_path / "away.toml"


def run(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_what_is_told_of_a_run_is_the_same(both):
    _, _, local, away = both
    for command in (["what", "--step", "3", "--json"], ["when", "--source", "web", "--document", "7", "--json"]):
        name, *rest = command
        assert run(name, away, *rest) == run(name, local, *rest)
    assert run("batches", away, "--digest") == run("batches", local, "--digest")
    assert json.loads(run("diff", local, away, "--json"))["first_step"] is None
    assert json.loads(run("plan", away, "--json"))["steps"] == 12


def test_a_document_is_shown_with_its_origin_and_text(both):
    store, address, _, _ = both
    here, there = (json.loads(run("inspect", place, "--document", 5, "--json")) for place in (store, address))
    assert here.pop("path") == str(store)
    assert there.pop("path") == address.partition("?")[0]
    assert here == there
    assert json.loads(run("inspect", address, "--json"))["web"]["path"] == address.partition("?")[0]


def test_counters_are_printed_as_json(both):
    lines = [json.loads(line) for line in run("batches", both[3], "--json").splitlines()]
    assert [line["step"] for line in lines[:-1]] == list(range(12))
    assert lines[-1]["remote"]["requests"] > 4
    assert lines[-1]["waited"] >= 0


def test_verify_reads_every_byte_and_names_what_is_broken(both):
    _, address, _, _ = both
    client = Client(parse_address(address))
    assert [item.name for item in client.list(".sums")] == [".sums/shard-00000.bin"]
    assert json.loads(run("verify", address, "--json"))["ok"]
    for _ in range(2):  # the second time there is a copy on this machine, which does not count
        sums = client.get(".sums/shard-00000.bin")
        client.delete(".sums/shard-00000.bin")
        done = CliRunner().invoke(app, ["verify", address, "--json"])
        (problem,) = json.loads(done.stdout)["problems"]
        assert "/.sums/shard-00000.bin: page sums not found" in problem
        client.put(".sums/shard-00000.bin", sums)
    name = "shard-00000/sequence.bin"
    body = bytearray(client.get(name))
    body[-1] ^= 1
    client.put(name, bytes(body))
    done = CliRunner().invoke(app, ["verify", address, "--json"])
    assert done.exit_code == 1
    assert name in json.loads(done.stdout)["problems"][0]


def test_verify_uploads_the_hashes_that_a_store_lacks(both):
    store, address, _, _ = both
    client, name = Client(parse_address(address)), ".hashes/00000.bin"
    expected = (store / name).read_bytes()
    for _ in range(2):  # the second time there is a copy on this machine, which does not count
        client.delete(name)
        run("verify", address, "--add-hashes")
        assert client.get(name) == expected
    assert json.loads(run("verify", address, "--json", "--add-hashes"))["ok"]
    sent = client.head(name)
    run("verify", address, "--add-hashes")
    assert client.head(name) == sent


def test_copies_of_small_files_are_removed_when_nothing_uses_them(both, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = tm.open_store(both[1]), tm.open_store(both[1])
    text = first[3].ids.tolist()
    folder = first.path
    assert (folder / "shard-00000" / "documents.bin").exists()
    del first
    gc.collect()
    assert second[3].ids.tolist() == text
    del second
    gc.collect()
    assert not folder.exists()


def test_an_address_without_a_store_is_refused_with_the_way_out(object_server: ObjectServer):
    done = CliRunner().invoke(app, ["verify", object_server.address("nothing/here"), "--json"])
    assert done.exit_code == 1
    assert "nothing/here: a store must be an address with manifest.json below it" in done.stdout
