"""A function of the user over records: what it makes is stored, who it is stands in the manifest."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from tokenmill.build import PrepareOptions, prepare
from tokenmill.build.job import identify
from tokenmill.encode.engines import open_tokenizer
from tokenmill.errors import ConfigError, DocumentError, TokenmillError
from tokenmill.store import open_store

TOKENIZER = open_tokenizer("bytes")
SOURCE = """
def shout(record):
    if record["n"] % 3 == 0:
        return None
    return {"text": record["said"].upper(), "n": record["n"]}
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a function that makes a module with a function in it."""

    def make(source=SOURCE, name="shouting"):
        (tmp_path / "code").mkdir(exist_ok=True)
        (tmp_path / "code" / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path / "code"))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'code'}:{':'.join(sys.path)}")
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module(name).shout

    return make


@pytest.fixture
def build(tmp_path):
    def run(function, out="out", *, recipe="text", **arguments):
        lines = [json.dumps({"said": f"a{n}", "n": n}) for n in range(12)]
        (tmp_path / "in.jsonl").write_text("\n".join(lines))
        options = PrepareOptions(chunk_bytes=60, **arguments.pop("options", {}))
        return prepare(
            tmp_path / "in.jsonl",
            out=tmp_path / out,
            recipe=recipe,
            map=function,
            progress=False,
            options=options,
            **arguments,
        )

    return run


def texts(path):
    store = open_store(path)
    return [TOKENIZER.decode(store.fetch_record(n, "sequence")) for n in range(store.num_documents)]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_the_function_makes_is_stored_and_what_it_leaves_out_counted(build, module, tmp_path, workers):
    report = build(module(), workers=workers, options={"keep": ("n",)})
    assert texts(tmp_path / "out") == [f"<|bos|>A{n}<|eos|>" for n in range(12) if n % 3]
    assert report.skipped == {"map": 4}
    store = open_store(tmp_path / "out")
    assert [str(store.origin(n)) for n in range(3)] == ["in.jsonl:2", "in.jsonl:3", "in.jsonl:5"]
    assert store.origin(2).kept == {"n": 4}
    identity = identify(module())
    assert store.manifest.recipe["map"] == {"name": "shout", "source": identity.source}


def test_another_source_is_another_build(build, module):
    build(module())
    assert build(module()).new_files == 0
    with pytest.raises(TokenmillError, match=r"map"):
        build(module(SOURCE.replace("upper", "lower")))
    with pytest.raises(TokenmillError, match=r"map"):
        build(None, recipe={"input": {"sections": [{"field": "said", "action": "train"}]}})


def test_a_function_that_workers_cannot_import_is_run_by_this_process(build, tmp_path):
    build(lambda record: {"text": record["said"]})
    assert texts(tmp_path / "out")[0] == "<|bos|>a0<|eos|>"
    with pytest.raises(
        ConfigError, match=r"map: must be a function of a module that workers can import, got .*lambda"
    ):
        build(lambda record: {"text": record["said"]}, "other", workers=2)


def test_what_a_function_raises_or_returns_wrongly_is_a_bad_record(build):
    with pytest.raises(
        DocumentError, match=r"in.jsonl:1: the function of the build must .*, got KeyError: 'nothing'"
    ):
        build(lambda record: {"text": record["nothing"]})
    report = build(lambda record: 5 if record["n"] else {"text": "x"}, "other", options={"on_error": "skip"})
    assert (report.documents, report.skipped) == (1, {"map_failed": 11})


def test_a_function_whose_source_does_not_say_what_it_does_is_refused(build):
    around = 3

    def closed(record):
        return {"text": record["said"] * around}

    with pytest.raises(ConfigError, match=r"must depend on nothing but the record.*got .*closed with around"):
        build(closed)
    with pytest.raises(ConfigError, match="must be a function of a record, got <built-in function len>"):
        build(len)
    with pytest.raises(ConfigError, match="must be written in a file"):
        build(eval("lambda record: record"))


def test_inspect_names_the_function_and_its_source(build, module, tmp_path):
    function = module()
    build(function)
    told = subprocess.run(
        [sys.executable, "-m", "tokenmill", "inspect", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = f"recipe text, records through shout (source {identify(function).source[:12]})"
    assert wanted in " ".join(told.stdout.split())
