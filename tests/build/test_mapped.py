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


def test_a_function_that_workers_cannot_import_is_rejected_with_a_chat_template(build):
    """Templates run in worker processes only, where their time and memory are limited."""
    options = {"chat_template": "chatml"}
    with pytest.raises(ConfigError, match=r"map: chat templates run in workers, which cannot import .*lambda"):
        build(lambda record: record, recipe="chat", workers=1, options=options)


def test_what_a_function_raises_or_returns_wrongly_is_a_bad_record(build):
    with pytest.raises(DocumentError, match=r"in.jsonl:1: the map function must .*, got KeyError: 'nothing'"):
        build(lambda record: {"text": record["nothing"]})
    report = build(lambda record: 5 if record["n"] else {"text": "x"}, "other", options={"on_error": "skip"})
    assert (report.documents, report.skipped) == (1, {"map_failed": 11})


SEVERAL = """
def shout(record):
    n = record["n"]
    if n == 3:
        return []
    if n == 4:
        return True
    if n == 5:
        return False
    return [{"text": f"{record['said']}.{copy}", "n": n} for copy in range(n % 3)]
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_several_records_of_one_share_its_origin(build, module, tmp_path, workers):
    variants = [{"sections": [{"field": name, "action": "train"}]} for name in ("text", "said")]
    recipe = {"input": {"variants": variants}}
    report = build(module(SEVERAL), workers=workers, recipe=recipe, options={"keep": ("n",)})
    assert texts(tmp_path / "out") == [
        f"<|bos|>{text}<|eos|>"
        for text in ("a1.0", "a2.0", "a2.1", "a4", "a7.0", "a8.0", "a8.1", "a10.0", "a11.0", "a11.1")
    ]
    assert report.skipped == {"map": 5}  # 0, 3, 6 and 9 give none, 5 is False
    store = open_store(tmp_path / "out")
    assert [store.origin(n).place for n in range(10)] == [2, 3, 3, 5, 8, 9, 9, 11, 12, 12]
    assert store.origin(2).kept == {"n": 2}


def test_duplicates_and_a_limit_count_the_records_that_the_function_made(build, tmp_path):
    function = lambda record: [{"text": "same"}, {"text": record["said"]}]  # noqa: E731
    report = build(function, options={"deduplicate": True, "max_items": 4})
    assert texts(tmp_path / "out") == [f"<|bos|>{text}<|eos|>" for text in ("same", "a0", "a1", "a2")]
    assert report.skipped["duplicate"] >= 2


def test_a_list_with_something_else_is_a_bad_record(build):
    with pytest.raises(DocumentError, match=r"in.jsonl:1: .*got a list with NoneType, which is not a"):
        build(lambda record: [record, None])


def prepare_command(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "tokenmill", "prepare", "in.jsonl", "--out", "out", "--quiet", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


FILTER = """
def is_even(record):
    return record["n"] % 2 == 0
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "quality.py").write_text(FILTER)
    lines = [json.dumps({"text": f"a{n}", "n": n}) for n in range(12)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_command_line_filters_by_a_function_of_the_current_folder(folder, workers):
    ended = prepare_command(folder, "--filter", "quality:is_even", "--workers", workers)
    assert ended.returncode == 0, ended.stderr
    assert texts(folder / "out") == [f"<|bos|>a{n}<|eos|>" for n in range(0, 12, 2)]


def test_parts_import_the_function_and_reject_another(folder):
    assert prepare_command(folder, "--filter", "quality:is_even", "--plan-only").returncode == 0
    ended = prepare_command(folder, "--part", "0/1")
    assert ended.returncode == 2, ended.stdout
    assert "map" in ended.stderr
    for mode in (["--part", "0/1"], ["--publish"]):
        ended = prepare_command(folder, "--filter", "quality:is_even", *mode)
        assert ended.returncode == 0, ended.stderr
    assert texts(folder / "out") == [f"<|bos|>a{n}<|eos|>" for n in range(0, 12, 2)]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("quality", r"filter: expected module:function, got 'quality'; for example"),
        ("quality:is_od", r"filter: cannot import 'quality:is_od': module 'quality' has no attribute 'is_od'"),
        ("qualty:is_even", r"filter: cannot import 'qualty:is_even': No module named 'qualty'"),
        ("json:JSONDecoder", r"map: must be a function of a record"),
    ],
)
def test_a_filter_that_cannot_be_imported_names_the_way_out(folder, name, error):
    ended = prepare_command(folder, "--filter", name)
    assert ended.returncode == 2, ended.stderr
    assert error in " ".join(ended.stderr.split())


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
