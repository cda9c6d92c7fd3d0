"""Runs and stores to look at, some of them hostile."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from starlette.testclient import TestClient

import tokenmill as tm
from tokenmill.view.server import make_app
from tokenmill.view.views import Opened

HOST = "127.0.0.1:8000"
WORD = "word"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
RUN = """\
[run]
seed = 7
steps = 10
global_batch_size = 8
seq_len = 16

[[sources]]
name = "web"
store = "stores/web"

[[sources]]
name = "books"
store = "stores/books"

[[stages]]
name = "base"
start_step = 0
weights = { web = 0.75, books = 0.25 }

[[stages]]
name = "late"
start_step = 6
global_batch_size = 4
weights = { web = 0.5, books = 0.5 }
"""


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Return a folder with two stores and a run over them."""
    folder = tmp_path_factory.mktemp("view")
    for name in ("web", "books"):
        texts = [
            {"text": f"{name} {i} {HOSTILE if i == 3 else 'plain words ' * (i % 7)}"}
            for i in range(60 if name == "web" else 40)
        ]
        path = write_lines(folder / f"{name}.jsonl", texts)
        tm.prepare(path, out=folder / "stores" / name, tokenizer="bytes", progress=False, workers=1)
    (folder / "run.toml").write_text(RUN, encoding="utf-8")
    (folder / "other.toml").write_text(RUN.replace("start_step = 6", "start_step = 4"), encoding="utf-8")
    return folder


@dataclass
class Site:
    """A server that is asked in this process."""

    client: TestClient
    opened: Opened

    def page(self, address, status=200):
        answer = self.client.get(f"/{WORD}/{address}")
        assert answer.status_code == status, answer.text
        return answer.text

    def api(self, address, status=200):
        answer = self.client.get(f"/{WORD}/api/{address}")
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture(scope="session")
def open_site():
    """Return what opens a server for a path."""

    def start(path, **options):
        opened = Opened(path=path, **options)
        client = TestClient(make_app(opened, WORD, (HOST,)), base_url=f"http://{HOST}", follow_redirects=False)
        return Site(client=client, opened=opened)

    return start


@pytest.fixture(scope="session")
def site(folder, open_site):
    return open_site(folder / "run.toml")
