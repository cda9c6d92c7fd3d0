"""A run in one call, the same run as TOML, and the sizes that a starter config chooses."""

from __future__ import annotations

import tomllib

import pytest

from tokenmill.errors import ConfigError
from tokenmill.run.run import Run
from tokenmill.run.starter import SIZES, source_tables, starter_toml
from tokenmill.store import open_store

TOML = """\
[run]
steps = 6
global_batch_size = 4
seq_len = 16
weights = "tokens"

[[sources]]
name = "web"
store = "web"

[[sources]]
name = "code"
store = "more/code"
"""


@pytest.fixture
def stores(make_store, tmp_path):
    make_store("web", [20, 30, 40, 7] * 6)
    make_store("more/code", [11, 90, 3] * 5, seed=1)
    return tmp_path


def test_a_run_in_one_call_is_the_run_of_the_same_toml(stores):
    (stores / "run.toml").write_text(TOML)
    written = Run.from_toml(stores / "run.toml")
    built = Run.build(["web", "more/code"], seq_len=16, global_batch_size=4, steps=6, folder=stores)
    named = Run.build(
        {"web": stores / "web", "code": "more/code"}, seq_len=16, global_batch_size=4, steps=6, folder=stores
    )
    assert built.config == written.config
    assert built.plan().fingerprint == written.plan().fingerprint == named.plan().fingerprint


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"epochs": 2}, {"epochs": 2}),
        ({"tokens": "640", "weights": {"web": 1, "code": 3}}, {"tokens": "640", "weights": {"web": 1, "code": 3}}),
        (
            {"steps": 5, "packing": "concat", "shuffle": "none", "seed": 3, "weights": "rows"},
            {"steps": 5, "packing": "concat", "shuffle": "none", "seed": 3, "weights": "rows"},
        ),
    ],
)
def test_a_run_written_to_another_folder_has_the_same_batches(stores, options, expected):
    (stores / "runs").mkdir()
    run = Run.build(["web", "more/code"], seq_len=16, global_batch_size=4, folder=stores, **options)
    file = run.to_toml(stores / "runs" / "copy.toml")
    tables = tomllib.loads(file.read_text())
    assert tables["run"] == {"seed": 0, "seq_len": 16, "global_batch_size": 4} | expected
    assert [source["store"] for source in tables["sources"]] == ["../web", "../more/code"]
    assert Run.from_toml(file).plan().fingerprint == run.plan().fingerprint


def test_a_run_of_records_in_python_is_written_too(stores):
    (stores / "run.toml").write_text(TOML)
    run = Run(config=Run.from_toml(stores / "run.toml").config, folder=stores)
    assert Run.from_toml(run.to_toml(stores / "copy.toml")).plan().fingerprint == run.plan().fingerprint


def test_a_file_that_exists_is_not_overwritten(stores):
    run = Run.build("web", seq_len=16, global_batch_size=4, steps=3, folder=stores)
    file = run.to_toml(stores / "run.toml")
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=r"file exists: .*run\.toml; choose another name or remove it"):
        run.to_toml(file)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("stores", "names"),
    [
        ("stores/web", ["web"]),
        (["a/web", "b/web", "c/web"], ["web", "web-2", "web-3"]),
        (["s3://bucket/my web/"], ["my-web"]),
        ({"x": "a/web"}, ["x"]),
        (["/"], ["source"]),
    ],
)
def test_sources_are_named_after_their_paths_and_differ(stores, names):
    assert [table["name"] for table in source_tables(stores)] == names


def test_a_store_of_another_type_is_rejected_with_its_value():
    with pytest.raises(ConfigError, match="expected a path or an address of a store, got 5"):
        source_tables([5])


@pytest.mark.parametrize("scale", [1, 400, 20_000])
def test_a_starter_config_plans_about_one_epoch(make_store, tmp_path, scale):
    make_store("web", [50] * scale)
    make_store("code", [20] * scale, seed=1)
    text = starter_toml([(name, open_store(tmp_path / name)) for name in ("web", "code")])
    (tmp_path / "run.toml").write_text(text)
    run = Run.from_toml(tmp_path / "run.toml")
    sizes = (run.config.run.global_batch_size, run.config.run.seq_len)
    assert sizes in SIZES
    slots = run.plan().steps * sizes[0] * sizes[1]
    assert 0 <= slots - 70 * scale < sizes[0] * sizes[1]


def test_a_starter_config_of_pairs_counts_records(tmp_path):
    from tokenmill.build import prepare

    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 30)
    prepare(tmp_path / "pairs.jsonl", out=tmp_path / "pairs", tokenizer="bytes", recipe="dpo", progress=False)
    (tmp_path / "run.toml").write_text(starter_toml([("pairs", open_store(tmp_path / "pairs"))]))
    run = Run.from_toml(tmp_path / "run.toml")
    assert (run.plan().steps, run.config.run.global_batch_size) == (4, 8)


def test_the_commented_parts_of_a_starter_config_are_valid(make_store, tmp_path):
    make_store("web", [50] * 400)
    text = starter_toml([("web", open_store(tmp_path / "web"))])
    head, tail = text.split("# Change the mixture", 1)
    lines = tail.splitlines()[1:]
    tables = [line.removeprefix("# ") for line in lines if "=" in line or "[[" in line]
    (tmp_path / "run.toml").write_text("\n".join([head, *tables]))
    run = Run.from_toml(tmp_path / "run.toml")
    assert [stage.name for stage in run.config.resolved_stages] == ["main", "long-context"]
    assert run.plan().steps
    assert list(run.evals) == ["held-out"]
