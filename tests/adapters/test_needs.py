"""What is said where a framework is missing, blocked or too old."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tokenmill.adapters import need
from tokenmill.errors import MissingExtraError

NONE = r"adapter: needs {}, got none; pip install 'tokenmill\[extra\]'$"


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
            f"{where} datasets, got none; pip install 'tokenmill[hf]'",
            f"{where} transformers 5.10 or later, got 5.9.1; pip install 'transformers>=5.10'",
        ],
    ), done.stderr
