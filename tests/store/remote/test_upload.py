from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from tests.fault_proxy import Faults, fault_proxy
from tests.object_server import SECRET_KEY

from tokenmill.errors import ConfigError, StoreCorruptError, StoreError, StoreExistsError, StoreMissingError
from tokenmill.store import open_store
from tokenmill.store.layout import MANIFEST
from tokenmill.store.remote.client import Client, parse_address
from tokenmill.store.remote.upload import upload

LENGTHS = [7, 0, 31, 12] * 40


@pytest.fixture(params=["s3", "file"])
def place(request, tmp_path, object_server):
    """Return an empty address, in a server or in a folder: the same code writes to both."""
    if request.param == "file":
        return f"file://{tmp_path}/remote"
    return object_server.address(f"upload/{tmp_path.name}")


def client_of(place):
    return Client(parse_address(place))


def files_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] != ".prepare"
    }


def objects_of(place):
    client = client_of(place)
    return {item.name: client.get(item.name) for item in client.list()}


def test_every_file_of_a_store_arrives(make_store, place):
    path, *_ = make_store("web", LENGTHS, max_tokens_per_shard=300)
    (path / ".tokenizer").mkdir()
    (path / ".tokenizer" / "vocab.json").write_bytes(b"words")
    (path / ".rows").mkdir()
    (path / ".rows" / "index.rows").write_bytes(b"which readers need not build")
    (path / ".rows" / ".index.rows.lock").write_bytes(b"")
    (path / ".rows" / ".tmp-index").write_bytes(b"left by a build")
    (path / ".tmp-lease").write_bytes(b"left by a build")
    told = []
    report = upload(path, place, progress=lambda done, total: told.append((done, total)))
    files = files_of(path)
    for name in (".tmp-lease", ".rows/.index.rows.lock", ".rows/.tmp-index"):
        del files[name]
    assert objects_of(place) == files
    assert (report.files, report.sent_files) == (len(files), len(files))
    assert report.bytes == report.sent_bytes == sum(map(len, files.values()))
    assert report.fingerprint == open_store(path).fingerprint
    assert told[-1] == (report.bytes, report.bytes)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_an_upload_goes_on_with_what_is_missing_or_wrong(make_store, place):
    path, *_ = make_store("web", LENGTHS, max_tokens_per_shard=300)
    upload(path, place)
    client = client_of(place)
    client.delete(MANIFEST)
    client.delete("shard-00001/sequence.bin")
    size = len(client.get("shard-00002/sequence.bin"))
    client.put("shard-00002/sequence.bin", b"x" * size)
    report = upload(path, place)
    assert report.sent_files == 3
    assert objects_of(place) == files_of(path)
    assert upload(path, place).sent_files == 0


def test_another_store_is_never_overwritten(make_store, place):
    path, *_ = make_store("web", LENGTHS)
    other, *_ = make_store("other", LENGTHS[:-1])
    upload(path, place)
    with pytest.raises(StoreExistsError, match=r"must hold nothing, or a part of this store, got another store"):
        upload(other, place)
    assert objects_of(place) == files_of(path)


def test_page_sums_of_another_shard_are_not_uploaded(make_store, place):
    path, *_ = make_store("web", LENGTHS, max_tokens_per_shard=300)
    (path / ".sums" / "shard-00001.bin").write_bytes((path / ".sums" / "shard-00000.bin").read_bytes())
    with pytest.raises(StoreCorruptError, match=r"shard-00001.bin: page sums of another"):
        upload(path, place)
    assert objects_of(place) == {}


def test_a_damaged_store_is_not_published(make_store, place):
    path, *_ = make_store("web", LENGTHS)
    file = path / "shard-00000" / "sequence.bin"
    data = np.fromfile(file, np.uint8)
    data[5] ^= 1
    data.tofile(file)
    with pytest.raises(StoreCorruptError, match=r"sequence\.bin: must be what the manifest says before"):
        upload(path, place)
    assert client_of(place).head(MANIFEST) is None


def test_a_store_without_page_sums_is_not_uploaded(make_store, place):
    path, *_ = make_store("web", LENGTHS, max_tokens_per_shard=500)
    (path / ".sums" / "shard-00001.bin").unlink()
    with pytest.raises(StoreCorruptError, match=r"shard-00001.bin: page sums not found"):
        upload(path, place)
    assert objects_of(place) == {}


def test_what_is_no_store_or_no_address_is_refused(make_store, tmp_path):
    with pytest.raises(StoreMissingError):
        upload(tmp_path / "nothing", f"file://{tmp_path}/remote")
    path, *_ = make_store("web", LENGTHS)
    with pytest.raises(ConfigError, match=r"address: expected one of object storage, got 'elsewhere'"):
        upload(path, "elsewhere")


def test_uploads_killed_anywhere_leave_nothing_that_reads_as_whole(make_store, tmp_path, object_server):
    """[N2.a] Until the manifest is there no reader finds a store; then all of it is right."""
    path, *_ = make_store("web", [3000] * 600, max_tokens_per_shard=60_000)
    place = object_server.address(f"killed/{tmp_path.name}")
    program = f"from tokenmill.store.remote.upload import upload; upload({str(path)!r}, {place!r})"
    client, whole = client_of(place), False
    for attempt in range(12):
        process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
        try:
            process.wait(0.4 + 0.15 * attempt)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        error = process.communicate()[1].decode()
        assert process.returncode in (0, -signal.SIGKILL), error
        if client.head(MANIFEST) is not None:
            whole = True
            break
        assert process.returncode != 0
        time.sleep(0.01)
    if not whole:
        upload(path, place)
    assert objects_of(place) == files_of(path)


def test_no_secret_is_in_what_an_upload_says_or_leaves(make_store, tmp_path, object_server, capfd, caplog):
    """[N2.b]"""
    path, *_ = make_store("web", LENGTHS)
    place = object_server.address(f"canary/{tmp_path.name}")
    report = upload(path, place)
    texts = [repr(report)]
    with pytest.raises(StoreExistsError) as refused:
        upload(make_store("other", LENGTHS[:3])[0], place)
    texts.append(str(refused.value))
    texts += [body.decode("latin-1") for body in (*objects_of(place).values(), *files_of(tmp_path).values())]
    out, err = capfd.readouterr()
    assert not [text for text in (*texts, out, err, caplog.text) if SECRET_KEY in text]


def test_a_server_that_compares_checksums_is_not_read_back(make_store, tmp_path, object_server):
    path, *_ = make_store("web", [3000] * 200)
    faults = Faults(only="")
    with fault_proxy(object_server.endpoint, faults) as endpoint:
        place = object_server.address(f"trusted/{tmp_path.name}", endpoint)
        report = upload(path, place, read_back=False)
    assert not report.read_back
    assert [each for each in faults.ranges if "manifest" not in each[0]] == []
    assert objects_of(place.replace(endpoint, object_server.endpoint)) == files_of(path)
    with pytest.raises(ConfigError, match=r"file:// has no checksums of uploads; leave it out"):
        upload(path, f"file://{tmp_path}/away", read_back=False)


def test_a_server_that_compares_checksums_rejects_bytes_that_changed_on_the_way(tmp_path, object_server):
    """The guarantee on which `read_back=False` relies, of the server of these tests."""
    with changing_proxy(object_server.endpoint, b"NEEDLE", b"NEEDLX") as endpoint:
        address = object_server.address(f"changed/{tmp_path.name}", endpoint)
        Client(parse_address(address)).put("a", b"a NEEDLE that is changed")
        assert Client(parse_address(address)).get("a") == b"a NEEDLX that is changed"
        with pytest.raises(StoreError, match=r"cannot be written: status 400"):
            Client(parse_address(address), checksums=True).put("b", b"a NEEDLE that is changed")


@contextmanager
def changing_proxy(endpoint, old, new):
    """Run a proxy that changes bytes of what clients send, for the length of a `with` block."""
    host, _, port = endpoint.rpartition("//")[2].partition(":")
    listening = socket.create_server(("127.0.0.1", 0))
    opened = [listening]

    def pump(source, target, before, after):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data.replace(before, after))
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve():
        with suppress(OSError):
            while True:
                opened.append(client := listening.accept()[0])
                opened.append(server := socket.create_connection((host, int(port))))
                threading.Thread(target=pump, args=(client, server, old, new), daemon=True).start()
                threading.Thread(target=pump, args=(server, client, b"", b""), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        for each in opened:
            each.close()
