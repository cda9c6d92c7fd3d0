"""Every benchmark runs, in a form so small that its figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SMALL = ("--megabytes", "1", "--rounds", "1")
COMMANDS = {
    "chat": ("chat.py", "--tiny"),
    "live": ("live.py", *SMALL, "--seconds", "0.2", "--rows", "2", "--only", "tokenmill"),
    "loader": ("loader.py", "--tiny", "--cache", "{folder}"),
    "order": ("order.py", "--tiny"),
    "packing": ("packing.py", "--tiny", "--cache", "{folder}"),
    "samplers": ("samplers.py", "--tiny"),
    "packing, huge": ("packing.py", "--huge", "2200000", "--cache", "{folder}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_runs(name, tmp_path):
    script, *options = (word.format(folder=tmp_path) for word in COMMANDS[name])
    command = [sys.executable, "-W", "ignore", str(FOLDER / script), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_a_second_start_compiles_nothing():
    command = [sys.executable, str(FOLDER / "start.py"), "--tiny", "--json"]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert result["compiled_when_warm"] == 0
    assert result["compiled"]
    assert 0 < result["warm_cpu_s"] < result["cold_cpu_s"]


def test_every_benchmark_is_run():
    scripts = {path.name for path in FOLDER.glob("*.py")}
    assert scripts - {command[0] for command in COMMANDS.values()} == {
        "peers.py",  # has an environment of its own
        "prepare.py",
        "start.py",  # has a test of its own
    }
