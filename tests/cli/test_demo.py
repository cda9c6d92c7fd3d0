from __future__ import annotations

import json
import os
import re

import pytest

from tokenmill.run.run import Run
from tokenmill.store import verify

TITLES = [
    "Guarantees",
    "Stores",
    "Stages",
    "Mixture",
    "Rows and labels",
    "Sources",
    "The first micro-batch",
    "Digests of global batches",
]


def test_the_demo_begins_with_the_verdicts_and_full_shows_the_whole_flow(tokenmill, tmp_path):
    """[R1.a, E1.a, O1.b]"""
    short = tokenmill("demo")
    assert (short.code, short.err) == (0, "")
    assert short.lines[0] == "Guarantees"
    assert [line.split()[0] for line in short.lines[2:5]] == ["holds"] * 3
    assert [line for line in short.lines if line in TITLES] == TITLES[:2]
    done = tokenmill("demo", "--full", "--out", tmp_path / "demo")
    assert (done.code, done.err) == (0, "")
    assert [line for line in done.lines if line in TITLES] == TITLES
    assert len(re.findall(r"\bholds\b", done.out)) == 3
    assert "[green]" not in done.out
    digests = re.findall(r"^\s*4[01]\s+talk((?:\s+[0-9a-f]{16}){3})\s*$", done.out, re.MULTILINE)
    assert [len(set(line.split())) for line in digests] == [1, 1]
    # What was kept can be used.
    for kind in ("prose", "code", "dialogue"):
        assert verify(tmp_path / "demo" / "stores" / kind).documents > 100
    assert Run.from_toml(tmp_path / "demo" / "run.toml").plan().steps == 60
    assert json.loads((tmp_path / "demo" / "state.json").read_bytes())["step"] == 60
    assert f"tokenmill what {tmp_path / 'demo'}/run.toml 41" in done.out


@pytest.mark.deep
def test_the_demo_leaves_nothing_behind_when_not_asked_to(tokenmill, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert tokenmill("demo").code == 0
    assert os.listdir(tmp_path) == []
