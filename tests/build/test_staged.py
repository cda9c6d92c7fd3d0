from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys

import pytest
from tests.fault_proxy import Faults, fault_proxy
from tests.object_server import SECRET_KEY

import tokenmill as tm
from tokenmill.build import PrepareOptions
from tokenmill.errors import ConfigError, StoreError, StoreExistsError, StoreUnreachableError
from tokenmill.store.layout import MANIFEST
from tokenmill.store.remote.client import Client, parse_address
from tokenmill.types import RemoteOptions


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus" / "web.jsonl"
    path.parent.mkdir()
    lines = [
        json.dumps({"text": f"document {number} " * (number % 9), "domain": "ab"[number % 2]})
        for number in range(400)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(params=["s3", "file"])
def place(request, tmp_path, object_server):
    if request.param == "file":
        return f"file://{tmp_path}/remote"
    return object_server.address(f"staged/{tmp_path.name}")


def objects_of(place):
    client = Client(parse_address(place))
    return {item.name: client.get(item.name) for item in client.list()}


def files_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".prepare" not in path.parts
    }


def test_records_in_memory_become_a_store_at_an_address(tmp_path, place):
    records = [{"text": f"document {number}"} for number in range(40)]
    local = tm.prepare(records, out=tmp_path / "local", workers=1, progress=False)
    staging = tmp_path / "staging"
    report = tm.prepare(iter(records), out=place, workers=1, progress=False, staging=staging)
    assert (report.fingerprint, report.documents) == (local.fingerprint, 40)
    assert objects_of(place) == files_of(tmp_path / "local")
    assert os.listdir(staging) == []


def test_a_store_built_for_an_address_has_the_bytes_of_one_in_a_folder(corpus, tmp_path, place):
    local = tm.prepare(corpus, out=tmp_path / "local", workers=1, progress=False)
    told = []
    report = tm.prepare(
        corpus, out=place, staging=tmp_path / "staging", workers=1, progress=False, on_progress=told.append
    )
    assert objects_of(place) == files_of(tmp_path / "local")
    assert report.fingerprint == local.fingerprint
    assert report.path == place.partition("?")[0]
    assert list((tmp_path / "staging").iterdir()) == []
    assert told[-1].what == "upload"
    assert told[-1].done_bytes


def test_every_domain_goes_below_the_address(corpus, tmp_path, place):
    options = PrepareOptions(domain_key="domain")
    report = tm.prepare(corpus, out=place, staging=tmp_path / "staging", workers=1, progress=False, options=options)
    assert [store.path for store in report.stores] == [f"{place.partition('?')[0]}/{name}" for name in "ab"]
    assert {name.split("/")[0] for name in objects_of(place)} == {"a", "b"}


def test_an_address_with_a_store_is_refused_before_any_work(corpus, tmp_path, place):
    tm.prepare(corpus, out=place, staging=tmp_path / "staging", workers=1, progress=False)
    before = objects_of(place)
    with pytest.raises(StoreExistsError, match=r"there is a store, and stores in object storage are not added to"):
        tm.prepare(corpus, out=place, staging=tmp_path / "staging", progress=False)
    with pytest.raises(ConfigError, match=r"rebuild does not work for object storage"):
        tm.prepare(corpus, out=place, staging=tmp_path / "staging", progress=False, rebuild=True)
    assert objects_of(place) == before
    assert list((tmp_path / "staging").iterdir()) == []


UNITS = PrepareOptions(chunk_bytes=1500, max_tokens_per_shard=600, domain_key="domain")


def local_bytes(folder):
    """Return the size of all arrays of units below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*.bin"))


def test_units_are_uploaded_as_they_finish_and_their_arrays_removed(corpus, tmp_path, place):
    """The local disk holds few units at any time, not the store."""
    local = tm.prepare(corpus, out=tmp_path / "local", workers=1, progress=False, options=UNITS)
    held, client = [], Client(parse_address(place))

    def look(progress):
        if progress.what == "prepare":
            held.append((local_bytes(tmp_path / "staging"), len(client.list())))

    report = tm.prepare(
        corpus, out=place, staging=tmp_path / "staging", workers=1, on_progress=look, progress=False, options=UNITS
    )
    assert report.fingerprint == local.fingerprint
    for route in "ab":
        assert objects_of(f"{place}/{route}" if "?" not in place else place.replace("?", f"/{route}?")) == (
            files_of(tmp_path / "local" / route)
        )
    whole = local_bytes(tmp_path / "local")
    assert max(size for size, _ in held) < whole / 3
    assert max(count for _, count in held) > 10


@pytest.mark.parametrize("stop", ["send", "record", "publish", "manifest"])
def test_a_build_that_stops_anywhere_continues_with_what_is_uploaded(corpus, tmp_path, place, monkeypatch, stop):
    """[C1.a] Within a unit, between units, before the store is published, and before its manifest is written."""
    sent, names = (
        [],
        {
            "send": "tokenmill.build.uploads.send_file",
            "record": "tokenmill.build.uploads.write_signed",
            "publish": "tokenmill.build.build.publish",
            "manifest": "tokenmill.store.remote.upload._publish",
        },
    )
    owner, _, name = names[stop].rpartition(".")
    first, limit = getattr(importlib.import_module(owner), name), {"send": 40, "record": 4}.get(stop, 0)

    def stopping(*arguments):
        if len(sent) == limit:
            raise KeyboardInterrupt
        sent.append(arguments)
        return first(*arguments)

    build = {"staging": tmp_path / "staging", "progress": False, "options": UNITS}
    with monkeypatch.context() as patch:
        patch.setattr(names[stop], stopping)
        with pytest.raises(KeyboardInterrupt):
            tm.prepare(corpus, out=place, workers=1, **build)
    client = Client(parse_address(place))
    assert not [info for info in client.list() if info.name.endswith(MANIFEST)]
    report = tm.prepare(corpus, out=place, workers=2, **build)
    local = tm.prepare(corpus, out=tmp_path / "local", workers=1, progress=False, options=UNITS)
    assert report.fingerprint == local.fingerprint
    assert objects_of(place) == files_of(tmp_path / "local")
    assert list((tmp_path / "staging").iterdir()) == []


def test_units_after_an_input_that_changed_are_uploaded_again(corpus, tmp_path, place, monkeypatch):
    """Their shards get other numbers, so no object of the first try may count."""
    later = corpus.with_name("z.jsonl")
    later.write_bytes(corpus.read_bytes())
    options = PrepareOptions(chunk_bytes=1500)
    build = {"out": place, "workers": 1, "progress": False, "options": options, "staging": tmp_path / "staging"}
    with monkeypatch.context() as patch:
        patch.setattr("tokenmill.build.build.publish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tm.prepare(corpus.parent, **build)
    corpus.write_bytes(corpus.read_bytes() + b"\n" + corpus.read_bytes())
    with pytest.raises(StoreError, match=r"the inputs have changed since unit .* run again"):
        tm.prepare(corpus.parent, **build)
    report = tm.prepare(corpus.parent, **build)
    local = tm.prepare(corpus.parent, out=tmp_path / "local", workers=1, progress=False, options=options)
    assert report.fingerprint == local.fingerprint
    assert (
        tm.open_store(place).fetch(0, 100, "sequence").tolist()
        == tm.open_store(tmp_path / "local").fetch(0, 100, "sequence").tolist()
    )


def test_a_store_is_prepared_through_a_proxy_that_fails_and_cuts_off(corpus, tmp_path, object_server):
    """[N2.a]"""
    faults = Faults(errors=0.1, truncated=0.1, only="", seed=7)
    with fault_proxy(object_server.endpoint, faults) as endpoint:
        place = object_server.address(f"faulty/{tmp_path.name}", endpoint)
        report = tm.prepare(
            corpus, out=place, staging=tmp_path / "staging", workers=1, progress=False, options=UNITS
        )
    assert faults.requests > 100
    local = tm.prepare(corpus, out=tmp_path / "local", workers=1, progress=False, options=UNITS)
    assert report.fingerprint == local.fingerprint
    plain = object_server.address(f"faulty/{tmp_path.name}")
    assert objects_of(plain) == files_of(tmp_path / "local")


@pytest.mark.slow
def test_a_build_killed_anywhere_leaves_no_store_and_goes_on(corpus, tmp_path, object_server):
    """[N2.a] While it is prepared, uploaded and published."""
    place = object_server.address(f"killed-build/{tmp_path.name}")
    program = (
        f"import tokenmill as tm; tm.prepare({str(corpus)!r}, out={place!r}, "
        f"staging={str(tmp_path / 'staging')!r}, workers=1, progress=False)"
    )
    client = Client(parse_address(place))
    for attempt in range(14):
        process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
        try:
            process.wait(0.5 + 0.2 * attempt)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        error = process.communicate()[1].decode()
        assert process.returncode in (0, -signal.SIGKILL), error
        if client.head(MANIFEST) is not None:
            break
    else:
        tm.prepare(corpus, out=place, staging=tmp_path / "staging", workers=1, progress=False)
    tm.prepare(corpus, out=tmp_path / "local", workers=1, progress=False)
    assert objects_of(place) == files_of(tmp_path / "local")


def test_no_secret_is_in_a_build_its_store_or_its_errors(
    corpus, tmp_path, object_server, capfd, caplog, monkeypatch
):
    """[N2.b]"""
    monkeypatch.setitem(RemoteOptions.__init__.__kwdefaults__, "deadline", 1.0)
    place = object_server.address(f"canary-build/{tmp_path.name}")
    tm.prepare(corpus, out=place, staging=tmp_path / "staging", workers=1, progress=False)
    refused = []
    for wrong in (place, place.replace("s3://mill", "s3://another"), "s3://mill/x?endpoint=http://127.0.0.1:9"):
        options = {"staging": tmp_path / "again", "workers": 1, "progress": False}
        with pytest.raises((StoreExistsError, StoreUnreachableError, tm.StoreError)) as error:
            tm.prepare(corpus, out=wrong, **options)
        refused.append(str(error.value))
    bodies = [body.decode("latin-1") for body in (*objects_of(place).values(), *files_of(tmp_path).values())]
    out, err = capfd.readouterr()
    assert not [text for text in (*refused, *bodies, out, err, caplog.text) if SECRET_KEY in text]
