"""A short run of the fuzzer, and what it keeps; `make fuzz` runs it for long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "fuzz.py"
KEPT = sorted((Path(__file__).parent / "fuzz").glob("*.json"))
"""What it has found so far, each as small as it could be made."""


def run(*arguments, **environment):
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_no_attack_finds_anything():
    report = json.loads(run("--seconds", 0, "--cases", 3, "--seed", 7, "--json").stdout)
    assert report["findings"] == []
    assert {target: sum(counts.values()) for target, counts in report["counts"].items()} == dict.fromkeys(
        (
            *("configs", "foreign", "indexes", "inputs", "manifests", "recipes", "records", "runs", "states"),
            *("stores", "templates", "tokenizers"),
        ),
        3,
    )


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_what_was_found_once_stays_mended(file):
    assert run("--replay", file).stdout.strip() == ""


def test_what_is_tried_to_make_a_finding_smaller_is_smaller(monkeypatch):
    """Else one that is as small as can be is tried again until the rounds are used up."""
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import fuzz

    for numbers in ([], [0], [7], [0, 3], list(range(40))):
        for each in fuzz.smaller(numbers):
            assert (len(each), sum(map(bool, each))) < (len(numbers), sum(map(bool, numbers)))


BUG = """
import os, signal, tokenmill as tm
right = tm.Run.from_toml
def broken(path):
    if "shuffle = " not in path.read_text():
        os.kill(os.getpid(), signal.SIGSEGV)
    return right(path)
tm.Run.from_toml = broken
"""


@pytest.mark.slow
def test_a_planted_bug_is_found_made_small_and_kept(tmp_path):
    """Each process of the fuzzer imports `sitecustomize`, which breaks the reader of configs."""
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "sitecustomize.py").write_text(BUG)
    paths = os.pathsep.join([str(planted), os.environ.get("PYTHONPATH", "")])
    options = ("--target", "configs", "--seconds", 0, "--cases", 40, "--keep", tmp_path / "kept")
    report = json.loads(run(*options, "--json", PYTHONPATH=paths).stdout)
    assert report["findings"]
    (file,) = (tmp_path / "kept").iterdir()
    # Which part of the config, and what becomes of it: a few numbers of a thousand.
    assert len(json.loads(file.read_text())["numbers"]) < 8
    assert run("--replay", file).returncode == 0
    again = run("--replay", file, PYTHONPATH=paths)
    assert again.returncode == 1
    assert "the process ended by -11" in again.stdout
