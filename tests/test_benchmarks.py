"""Every benchmark runs, in a form so small that its figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.demo import TOKENIZER_DIR

FOLDER = Path(__file__).parents[1] / "benchmarks"
SMALL = ("--megabytes", "1", "--rounds", "1")
COMMANDS = {
    "balance": ("balance.py", "--tiny"),
    "chat": ("chat.py", "--tiny"),
    "chat, all templates": ("chat.py", "--stock", "--tiny"),
    "live": ("live.py", *SMALL, "--seconds", "0.2", "--rows", "2", "--only", "tokenmill"),
    "loader": ("loader.py", "--tiny", "--cache", "{folder}"),
    "changes": ("changes.py", "--tiny"),
    "order": ("order.py", "--tiny"),
    "packing": ("packing.py", "--tiny", "--cache", "{folder}"),
    "reading": ("reading.py", "--tiny"),
    "reading, mirror": ("reading.py", "--tiny", "--mirror"),
    "remote": ("remote.py", "--tiny"),
    "samplers": ("samplers.py", "--tiny"),
    "view": ("view.py", "--tiny"),
    "prepare": ("prepare.py", *SMALL, "--cache", "{folder}", "--tokenizer", str(TOKENIZER_DIR)),
    "prepare, reading": ("prepare.py", *SMALL, "--reading"),
    "prepare, reading Parquet": ("prepare.py", *SMALL, "--reading", "--format", "parquet"),
    "engines": ("engines.py", "--megabytes", "1", "--rounds", "1", "--only", "local,processes"),
    "engines, units": ("engines.py", "--units", "300"),
    "packing, huge": ("packing.py", "--huge", "2200000", "--cache", "{folder}"),
}
DEEP = {"prepare, its own tokenizer": ("prepare.py", *SMALL, "--cache", "{folder}")}
"""Opens a vocabulary of 100,000 tokens several times, which takes 10 s of CPU."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMMANDS, *(pytest.param(name, marks=pytest.mark.deep) for name in DEEP)])
def test_a_benchmark_runs(name, tmp_path):
    script, *options = (word.format(folder=tmp_path) for word in (COMMANDS | DEEP)[name])
    command = [sys.executable, "-W", "ignore", str(FOLDER / script), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


@pytest.mark.slow
def test_a_second_start_compiles_nothing():
    command = [sys.executable, str(FOLDER / "start.py"), "--tiny", "--json"]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert result["compiled_when_warm"] == 0
    assert result["compiled"]
    assert 0 < result["warm_cpu_s"] < result["cold_cpu_s"]


PEERS = """
import sys
from pathlib import Path
import loader, peers

cache = Path(sys.argv[2])
for name, make in peers.peer_streams(cache, loader.open_tokens(cache), loader.SEQ_LEN):
    ids, labels = next(iter(make(2)))
    print(name.split()[0], tuple(ids.shape), bool((ids[:, 1:] == labels[:, :-1]).all()), sep="\\t")
"""


@pytest.mark.slow
def test_the_peers_that_are_installed_deliver_batches(tmp_path):
    """Those of peers.py, which `loader.py --peers` measures, each in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", PEERS, "--tiny", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    delivered = {tuple(line.split("\t")) for line in done.stdout.splitlines()}
    assert delivered == {(name, "(2, 2048)", "True") for name in ("torch", "datasets", "megatron-core")}


def test_the_chart_of_loaders_is_drawn_from_its_results(tmp_path):
    pictures = FOLDER.parent / "docs" / "pictures"
    command = [sys.executable, str(FOLDER / "chart.py"), str(pictures / "loaders.json"), "--out", str(tmp_path)]
    subprocess.run(command, check=True)
    for name in ("loaders.svg", "loaders-dark.svg"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (pictures / name).read_text(encoding="utf-8")
    assert (pictures / "loaders.svg").read_text(encoding="utf-8").count("<rect") == 9


def test_every_script_of_the_project_is_run():
    """What a page or a figure stands on must not be left behind."""
    tests = "".join(path.read_text(encoding="utf-8") for path in FOLDER.parent.glob("tests/**/*.py"))
    tests += (FOLDER.parent / "Makefile").read_text(encoding="utf-8")  # fetches tokenizers
    scripts = [
        path for folder in ("benchmarks", "examples", "tools") for path in FOLDER.parent.glob(f"{folder}/*.py")
    ]
    assert len(scripts) > 15
    assert [path.name for path in scripts if path.name not in tests and f'"{path.stem}"' not in tests] == []
