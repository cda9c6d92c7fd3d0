from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fault_proxy import Faults, fault_proxy
from tests.object_server import BUCKET, SECRET_KEY, free_ports

from tokenmill.errors import (
    MissingExtraError,
    StoreCorruptError,
    StoreError,
    StoreExistsError,
    StoreMissingError,
    StoreUnreachableError,
)
from tokenmill.store.remote.client import CHUNK_BYTES, Client, parse_address
from tokenmill.store.remote.fetch import Loop, Network, RemoteObjects, gathered
from tokenmill.types import RemoteOptions


@pytest.fixture(params=["s3", "file", "az"])
def client(request, tmp_path, object_server):
    """Return a client of an empty place, in a server or in a folder: the same code reads all."""
    if request.param == "file":
        return Client(parse_address(f"file://{tmp_path}/place"))
    if request.param == "az":
        endpoint = request.getfixturevalue("azure")
        return Client(parse_address(f"az://{BUCKET}/client?endpoint={endpoint}"))
    return Client(parse_address(object_server.address(f"client/{tmp_path.name}")))


def test_what_is_put_is_read_listed_and_removed(client):
    body = bytes(range(256)) * 40
    etag = client.put("a/x.bin", body)
    client.put("a.bin", b"1")
    assert client.get("a/x.bin") == body
    info = client.head("a/x.bin")
    assert (info.name, info.bytes, info.etag) == ("a/x.bin", len(body), etag)
    assert [item.name for item in client.list()] == ["a.bin", "a/x.bin"]
    assert client.list("a") == [info]
    client.delete("a.bin")
    client.delete("nothing")
    assert [item.name for item in client.list()] == ["a/x.bin"]
    assert client.head("a.bin") is None


def test_a_file_larger_than_a_part_arrives_whole(client, tmp_path):
    body = bytes(range(251)) * (CHUNK_BYTES // 251 + 9)
    (tmp_path / "large").write_bytes(body)
    client.put("large", tmp_path / "large")
    assert b"".join(client.stream("large")) == body


def test_of_many_who_create_an_object_one_wins(client):
    def create(number):
        try:
            client.create("manifest.json", str(number).encode())
        except StoreExistsError:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        winners = [number for number in pool.map(create, range(8)) if number is not None]
    assert len(winners) == 1
    assert client.get("manifest.json") == str(winners[0]).encode()


def test_an_object_that_is_not_there_is_named(client):
    with pytest.raises(StoreMissingError, match=r"/none: an object must be there to be read"):
        client.get("none")


def test_an_object_that_was_overwritten_is_named(client):
    etag = client.put("x", b"old")
    client.put("x", b"newer")
    with pytest.raises(StoreCorruptError, match=r"/x: an object must stay as it is"):
        list(client.stream("x", etag))


def test_a_wrong_secret_is_a_refusal_that_repeats_no_secret(object_server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-Zx81")
    with pytest.raises(StoreError, match=r"must be allowed to read it.*set AWS_ACCESS_KEY_ID") as caught:
        Client(parse_address(object_server.address("x"))).get("y")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "canary-Zx81" not in str(caught.value)
    assert SECRET_KEY not in str(caught.value)


@pytest.mark.usefixtures("object_server")
def test_a_server_that_is_not_there_is_named_within_the_deadline():
    options = RemoteOptions(endpoint=f"http://127.0.0.1:{free_ports(1)[0]}", deadline=0.5)
    with pytest.raises(
        StoreUnreachableError, match=r"s3://b/w/x: must be read within 0.5 s, got a refused connection"
    ):
        Client(parse_address("s3://b/w", options), options).get("x")


def test_without_obstore_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingExtraError, match=r"s3://b/w: obstore is not installed.*tokenmill\[remote\]"):
        Client(parse_address("s3://b/w"))


FORKED = """
import os, sys
from tokenmill.store.remote.client import Client, parse_address

client = Client(parse_address(sys.argv[1]))
client.put("x", b"1")
if os.fork() == 0:
    try:
        client.get("x")
    except Exception as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_process_that_was_forked_is_told_so_and_does_not_hang(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", FORKED, f"file://{tmp_path}/place"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "place/x: a process must not be forked after object storage was used" in done.stdout


def test_a_second_request_is_raced_against_one_that_hangs(object_server, tmp_path, monkeypatch):
    monkeypatch.setattr("tokenmill.store.remote.fetch.SLOWEST_START", 0.2)
    body = bytes(range(256)) * 20
    Client(parse_address(object_server.address(tmp_path.name))).put("x.bin", body)
    with fault_proxy(object_server.endpoint, Faults(stalled=0.5, stall=20.0)) as endpoint:
        network = Network(RemoteOptions(deadline=6.0))
        objects = RemoteObjects(parse_address(object_server.address(tmp_path.name, endpoint)), network)
        parts = [None] * 20

        async def bring(number):
            parts[number] = bytes(await objects.get("x.bin", 256 * number, 256 * (number + 1)))

        Loop.current().start(gathered([bring(number) for number in range(20)])).result()
    assert b"".join(parts) == body
    assert 0 < network.counters.raced <= 20 + network.counters.retries


ENDED = """
import asyncio
from tokenmill.store.remote.fetch import Loop, gathered

Loop.current().start(gathered([asyncio.sleep(60) for _ in range(9)]))
"""


def test_a_process_that_ends_in_mid_fetch_ends_at_once_and_says_nothing():
    command = [sys.executable, "-c", ENDED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr == ""
