"""Servers that redirect, that are down when a store is opened, and that lack the bucket or refuse it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.fault_proxy import Faults, fault_proxy
from tests.object_server import SECRET_KEY, free_ports
from typer.testing import CliRunner

import tokenmill as tm
from tokenmill.build.downloads import copy_inputs
from tokenmill.cli.app import app
from tokenmill.errors import StoreError, StoreUnreachableError
from tokenmill.store import open_store
from tokenmill.store.layout import MANIFEST
from tokenmill.store.remote.client import Client, parse_address
from tokenmill.store.remote.fetch import Network
from tokenmill.store.remote.upload import upload
from tokenmill.types import RemoteOptions


@contextmanager
def answering(status, headers=None, port=0, only=""):
    """Run a server that gives one answer to all requests for paths with `only` in them; give port and requests."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.command, self.path))
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status if only in self.path else 404)
            for name, value in (headers or {}).items():
                self.send_header(name, value.format(path=self.path))
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port, seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def uploaded(make_store, tmp_path, object_server):
    """Return a store, and the name of its copy in object storage."""
    path, *_ = make_store("web", [7, 0, 31, 12] * 40)
    upload(path, object_server.address(f"{tmp_path.name}/web"))
    return path, f"{tmp_path.name}/web"


# Redirects.


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_to_another_port_is_rejected_by_name(uploaded, object_server, status):
    target = f"{object_server.endpoint}{{path}}"
    with answering(status, {"Location": target}) as (port, _):
        address = object_server.address(uploaded[1], f"http://127.0.0.1:{port}")
        with pytest.raises(
            StoreError, match=rf"web/manifest.json: redirected to {object_server.endpoint}; .* set endpoint"
        ) as caught:
            open_store(address)
    assert SECRET_KEY not in str(caught.value)
    assert "X-Amz" not in str(caught.value)


def test_uploads_and_inputs_are_not_redirected(uploaded, object_server, tmp_path):
    path, name = uploaded
    with answering(307, {"Location": f"{object_server.endpoint}{{path}}"}) as (port, seen):
        place = object_server.address(f"{tmp_path.name}/other", f"http://127.0.0.1:{port}")
        with pytest.raises(StoreError, match=rf"redirected to {object_server.endpoint}"):
            upload(path, place)
        assert {method for method, _ in seen} == {"GET"}
        inputs = object_server.address(name, f"http://127.0.0.1:{port}")
        with pytest.raises(StoreError, match=rf"redirected to {object_server.endpoint}"):
            copy_inputs(inputs, tmp_path / "copies", is_known=lambda _: True)
    assert Client(parse_address(object_server.address(f"{tmp_path.name}/other"))).list() == []


def test_a_redirect_within_the_endpoint_is_not_taken_for_one_to_another_server(object_server):
    with answering(307, {"Location": "/elsewhere"}, only=MANIFEST) as (port, _):
        options = RemoteOptions(endpoint=f"http://127.0.0.1:{port}", deadline=1.0)
        with pytest.raises(StoreError, match=r"must be an address with manifest.json below it"):
            open_store("s3://b/w", remote=options)
    assert object_server.endpoint


@pytest.mark.usefixtures("object_server")
def test_an_endpoint_on_this_machine_leads_to_no_other_one_after_it_was_opened():
    """The first answer to a redirect is no request to that host: without the rule this would be an unknown host."""
    with answering(307, {"Location": "http://elsewhere.invalid:81{path}?X-Secret=canary"}) as (port, _):
        client = Client(parse_address("s3://b/w", RemoteOptions(endpoint=f"http://127.0.0.1:{port}")))
        with pytest.raises(StoreError, match=r"w/x: redirected to http://elsewhere.invalid:81; ") as caught:
            client.get("x")
    assert not isinstance(caught.value, StoreUnreachableError)
    assert "canary" not in str(caught.value)


@pytest.mark.usefixtures("object_server")
def test_a_redirect_without_a_location_is_told_as_another_region():
    with answering(301) as (port, _):
        client = Client(parse_address("s3://b/w", RemoteOptions(endpoint=f"http://127.0.0.1:{port}")))
        with pytest.raises(StoreError, match=r"w/x: bucket is in another region than .*; set region"):
            client.get("x")


# Servers that are down.


def test_a_store_whose_server_starts_later_is_opened(uploaded, object_server):
    """[N1.c] Requests of opening are retried until the deadline, like those of training."""
    path, name = uploaded
    (port,) = free_ports(1)
    expected = open_store(path)
    began = threading.Event()
    found = []

    def read():
        began.set()
        store = open_store(object_server.address(name, f"http://127.0.0.1:{port}"), remote=network)
        found.append((store.fingerprint, store.fetch(0, store.num_tokens, "sequence").tolist()))

    network = Network(RemoteOptions(deadline=60.0))
    thread = threading.Thread(target=read)
    thread.start()
    assert began.wait(10)
    thread.join(4.0)  # longer than ten retries of obstore took
    assert thread.is_alive()
    with fault_proxy(object_server.endpoint, Faults(), port=port):
        thread.join(30)
    assert found == [(expected.fingerprint, expected.fetch(0, expected.num_tokens, "sequence").tolist())]


@pytest.mark.usefixtures("object_server")
def test_a_server_that_stays_down_is_told_and_named_after_the_deadline(caplog):
    options = RemoteOptions(endpoint=f"http://127.0.0.1:{free_ports(1)[0]}", deadline=2.0)
    with pytest.raises(StoreUnreachableError, match=r"must be read within 2 s, got a refused connection"):
        open_store("s3://b/w", remote=options)
    (line,) = [line for line in caplog.messages if "object storage does not answer" in line]
    assert line.endswith("does not answer (a refused connection); requests are retried for up to 2 s")


@pytest.mark.usefixtures("object_server")
def test_a_client_that_is_stopped_retries_no_more():
    """An interrupted command waits for its threads, and so for what they retry."""
    options = RemoteOptions(endpoint=f"http://127.0.0.1:{free_ports(1)[0]}", deadline=600.0)
    client = Client(parse_address("s3://b/w", options), options)
    client.stop()
    with pytest.raises(StoreUnreachableError, match=r"got a refused connection"):
        client.get("x")


def test_a_request_that_a_server_does_not_support_is_not_retried(object_server):
    with answering(501) as (port, seen):
        options = RemoteOptions(endpoint=f"http://127.0.0.1:{port}", deadline=60.0)
        with pytest.raises(StoreUnreachableError, match=r"cannot be written: status 501; check endpoint"):
            Client(parse_address("s3://b/w", options), options).create("x", b"1")
    assert len(seen) <= 4
    assert object_server.endpoint


# Buckets that are not there, or not ours.


def commands(tmp_path, store, bucket, endpoint):
    place = f"s3://{bucket}/w?endpoint={endpoint}"
    (tmp_path / "texts.jsonl").write_text('{"text": "by the mill"}\n')
    (tmp_path / "run.toml").write_text(
        "[run]\nsteps = 2\nglobal_batch_size = 2\nseq_len = 8\n[remote]\ndeadline = 60.0\n"
        f'[[sources]]\nname = "web"\nstore = "{place}"\n'
    )
    staging = ["--staging", str(tmp_path / "staging")]
    return {
        "verify": ["verify", place],
        "upload": ["upload", str(store), place],
        "run": ["batches", str(tmp_path / "run.toml")],
        "inputs": ["prepare", place, "--out", str(tmp_path / "out"), *staging],
        "out": ["prepare", str(tmp_path / "texts.jsonl"), "--out", place, *staging],
    }


@pytest.mark.parametrize("command", ["verify", "upload", "run", "inputs", "out"])
def test_a_bucket_that_does_not_exist_is_told_as_that(make_store, tmp_path, object_server, command):
    store, *_ = make_store("web", [5, 9])
    done = CliRunner().invoke(app, commands(tmp_path, store, "nobucket", object_server.endpoint)[command])
    text = done.output if isinstance(done.exception, SystemExit) else str(done.exception)
    assert done.exit_code == 1
    assert "bucket not found: 'nobucket'; create it, or fix its name or the endpoint" in " ".join(text.split())


@pytest.mark.parametrize("command", ["verify", "upload", "run", "inputs", "out"])
def test_a_bucket_that_may_not_be_read_is_told_as_that(make_store, tmp_path, object_server, monkeypatch, command):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-Zx81")
    store, *_ = make_store("web", [5, 9])
    done = CliRunner().invoke(app, commands(tmp_path, store, "mill", object_server.endpoint)[command])
    text = done.output if isinstance(done.exception, SystemExit) else str(done.exception)
    assert done.exit_code == 1
    assert "got a refusal; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in " ".join(text.split())
    assert "canary-Zx81" not in text


def test_a_missing_bucket_is_told_in_python(object_server, tmp_path):
    with pytest.raises(StoreError, match=r"s3://nobucket/w.*: bucket not found: 'nobucket'"):
        tm.verify(f"s3://nobucket/w?endpoint={object_server.endpoint}")
    assert list(tmp_path.iterdir()) == []
