"""`tokenmill init` and `tokenmill doctor`."""

from __future__ import annotations

import json
import tomllib

import pytest

import tokenmill as package
from tokenmill.run.run import Run


def test_init_demo_makes_a_run_that_trains(tokenmill, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = tokenmill("init", "--demo")
    assert (done.code, done.err) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "run.toml", "stores"]
    loader = Run.from_toml(tmp_path / "run.toml").loader(micro_batch=2)
    assert next(iter(loader))["input_ids"].shape == (2, 128)


def test_init_writes_paths_that_start_at_the_config(tokenmill, tmp_path, make_store, monkeypatch):
    make_store("stores/web", [30] * 50)
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert tokenmill("init", "stores/web", "-o", "runs/first.toml").code == 0
    tables = tomllib.loads((tmp_path / "runs" / "first.toml").read_text())
    assert tables["sources"] == [{"name": "web", "store": "../stores/web"}]
    assert Run.from_toml(tmp_path / "runs" / "first.toml").plan().steps == tables["run"]["steps"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "init: no stores; pass the stores to train on"),
        (("stores/web", "--demo"), "--demo cannot be combined with stores"),
        (("stores/web", "-o", "there.toml"), "file exists: there.toml; choose another name"),
        (("stores/web", "-o", "run.txt"), "a config must end in .toml, got 'run.txt'"),
        (("stores/web", "-o", "no/run.toml"), "folder not found: no; create it first"),
        (("stores/none",), "stores/none"),
    ],
)
def test_init_names_what_is_wrong_and_writes_nothing(
    tokenmill, tmp_path, make_store, monkeypatch, arguments, message
):
    make_store("stores/web", [30] * 50)
    (tmp_path / "there.toml").write_text("mine")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    done = tokenmill("init", "--out", "run.toml", *arguments)
    assert done.code != 0
    assert message in done.err
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "there.toml").read_text() == "mine"


def test_doctor_prints_what_a_bug_report_needs(tokenmill, monkeypatch):
    monkeypatch.setenv("TOKENMILL_API_KEY", "hunter2")
    done = tokenmill("doctor")
    assert (done.code, done.err) == (0, "")
    assert f"tokenmill: {package.__version__}" in done.lines
    assert "hunter2" not in done.out
    assert any(line.startswith("self-test: passed in") for line in done.lines)
    report = json.loads(tokenmill("doctor", "--json", "--no-test").out)
    assert report["problems"] == []
    assert report["self_test"] is None
    assert {"numpy", "numba", "pyarrow"} <= report["packages"].keys()
    assert "torch" in report["extras"]["torch"]


def test_doctor_names_a_self_test_that_failed(tokenmill, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    done = tokenmill("doctor")
    assert done.code == 1
    assert "self-test failed: NotADirectoryError" in done.err
    assert "report this output" in done.err
