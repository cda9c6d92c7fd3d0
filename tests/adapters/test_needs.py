"""What is said where a framework is missing, blocked or too old."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tokenmill.adapters import TESTED_BELOW, need
from tokenmill.errors import MissingExtraError

NONE = r"adapter: {} is not installed; pip install 'tokenmill\[extra\]'$"


class Blocker:
    """Refuses to import a module, as tools that isolate code do."""

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002 - as the import system calls it
        if name.split(".")[0] == "blocked_framework":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_framework_that_is_there_is_imported():
    need("wave", extra="extra", adapter="adapter")
    assert "wave" in sys.modules


@pytest.mark.parametrize("module", ["no_such_framework", "no_such_framework.part", "blocked_framework"])
def test_one_that_is_missing_or_blocked_is_said_in_one_line(module, monkeypatch):
    """[F1.a]"""
    monkeypatch.setattr(sys, "meta_path", [Blocker(), *sys.meta_path])
    with pytest.raises(MissingExtraError, match=NONE.format(module)):
        need(module, extra="extra", adapter="adapter")


@pytest.mark.parametrize("at_least", ["9.0", "8.10", "8.9.1"])
def test_one_that_is_too_old_is_said_with_both_versions(at_least, monkeypatch):
    """[F1.a] To say that it is missing would send people to install what they have."""
    monkeypatch.setattr("tokenmill.adapters.version", lambda _: "8.9")
    with pytest.raises(MissingExtraError) as caught:
        need("pytest", extra="extra", adapter="adapter", at_least=at_least)
    assert str(caught.value) == (
        f"adapter: needs pytest {at_least} or later, got 8.9; pip install 'pytest>={at_least}'"
    )


@pytest.mark.parametrize("found", ["8.9", "8.9.0", "8.10.dev0", "10.0+cpu"])
def test_one_that_is_new_enough_is_taken(found, monkeypatch):
    monkeypatch.setattr("tokenmill.adapters.version", lambda _: found)
    need("pytest", extra="extra", adapter="adapter", at_least="8.9")


@pytest.mark.parametrize(("installed", "warned"), [("8.9", False), ("8.10.dev0", True), ("9.0", True)])
def test_one_that_is_newer_than_all_tested_is_imported_with_a_warning(installed, warned, monkeypatch, caplog):
    monkeypatch.setattr("tokenmill.adapters.version", lambda _: installed)
    monkeypatch.setitem(TESTED_BELOW, "pytest", "8.10")
    need("pytest", extra="extra", adapter="adapter")
    message = f"adapter: pytest {installed} has not been tested, only versions below 8.10; if it fails, pip install"
    assert [record.getMessage().startswith(message) for record in caplog.records] == [True] * warned


def test_extras_end_where_the_tested_versions_do_and_tests_run_below():
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bounds = {text for extra in ("hf", "trl", "lightning", "torchtitan") for text in extras[extra] if "," in text}
    assert {text.partition(">=")[0]: text.partition("<")[2] for text in bounds} == TESTED_BELOW
    pins = dict(
        line.split("==") for line in (root / "requirements" / "test.txt").read_text().split() if "==" in line
    )
    for name, below in TESTED_BELOW.items():
        assert [int(part) for part in pins[name].split(".")] < [int(part) for part in below.split(".")]


def test_one_that_only_stands_on_the_path_has_no_version_to_refuse(tmp_path, monkeypatch):
    (tmp_path / "framework_of_a_checkout.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    need("framework_of_a_checkout", extra="extra", adapter="adapter", at_least="1.0")
    assert "framework_of_a_checkout" in sys.modules


def test_the_adapter_for_transformers_names_what_it_lacks_when_it_is_imported():
    """[F1.a] In one process, as each costs an import of torch."""
    code = """
import importlib.metadata, sys
import tokenmill.adapters as needs
from tokenmill.errors import MissingExtraError

def told():
    try:
        import tokenmill.adapters.transformers
    except MissingExtraError as error:
        print(error)

find_spec, version = needs.find_spec, needs.version
needs.find_spec = lambda name: None if name == "datasets" else find_spec(name)
told()
needs.find_spec, needs.version = find_spec, lambda name: "5.9.1"
told()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    where = "tokenmill.adapters.transformers: needs"
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [
            "tokenmill.adapters.transformers: datasets is not installed; pip install 'tokenmill[hf]'",
            f"{where} transformers 5.10 or later, got 5.9.1; pip install 'transformers>=5.10'",
        ],
    ), done.stderr
