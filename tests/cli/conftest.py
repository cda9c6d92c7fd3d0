"""The command line in this process, and a small run to try it on."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill.build.build import prepare
from tokenmill.cli.app import main
from tokenmill.cli.console import console

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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def tokenmill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Return a function that runs the entry point of the command with these arguments."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["tokenmill", *map(str, arguments)])
        # A process asks for its width once; workers of the test runner have another one in their environment.
        monkeypatch.setattr(console, "width", int(os.environ["COLUMNS"]))
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        captured = capsys.readouterr()
        return Outcome(code=code, out=captured.out, err=captured.err)

    return run


def texts(seed: int, count: int) -> list[str]:
    words = [
        "the",
        "mill",
        "grinds",
        "grain",
        "über",
        "水",
        "[/red]",
        "[bold]",
        "for i in x:\n\treturn 1",
        "\x1b[31m",
    ]
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(words, generator.integers(1, 30))) for _ in range(count)]


def write_corpus(file: Path, lines: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for seed, (name, count) in enumerate({"web": 60, "books": 25}.items()):
        corpus = write_corpus(folder / f"{name}.jsonl", texts(seed, count))
        prepare(corpus, out=folder / "stores" / name, tokenizer="bytes", workers=1, progress=False)
    (folder / "run.toml").write_text(RUN, encoding="utf-8")
    return folder


@pytest.fixture
def folder(_folder: Path, tmp_path: Path) -> Path:
    """Return a fresh copy of a folder with web.jsonl, books.jsonl, their stores and run.toml."""
    return Path(shutil.copytree(_folder, tmp_path / "run"))


@pytest.fixture
def run_toml(folder: Path) -> Path:
    return folder / "run.toml"
