import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tokenmill.config.run import parse_config
from tokenmill.errors import ConfigError, StoreMissingError
from tokenmill.run.run import Run


@pytest.fixture
def make_run(tmp_path):
    def make(*sources, steps=10, **run):
        tables = {
            "run": {"steps": steps, "global_batch_size": 4, "seq_len": 8} | run,
            "sources": [{"name": name, "store": name} for name in sources],
        }
        tables["run"]["weights"] = dict.fromkeys(sources, 1)
        return Run(config=parse_config(tables), folder=tmp_path)

    return make


def test_a_missing_store_is_named_with_the_way_out(make_run):
    with pytest.raises(
        StoreMissingError, match=r"web: a store must be a folder .* run `tokenmill prepare` or fix the path"
    ):
        make_run("web").plan()


def test_sources_of_two_tokenizers_are_refused_with_the_difference(make_run, make_store):
    """[T2.a]"""
    make_store("web", [50], vocab_size=300)
    make_store("books", [50], vocab_size=301)
    with pytest.raises(ConfigError, match="'web' and 'books' that differ in vocab_size: 300 and 301"):
        make_run("web", "books").plan()


def test_compiling_reads_no_token(make_run, make_store):
    """[A1.a] Where documents begin is enough; the tokens are gone."""
    path, _, _ = make_store("web", [50] * 10, max_tokens_per_shard=100)
    for file in path.glob("shard-*/sequence.bin"):
        file.unlink()
    plan = make_run("web").plan()
    assert plan.rows(9)[1].size == 4
    with pytest.raises(ConfigError, match="global_batch_size must be divisible"):
        make_run("web").loader(world_size=3)


def test_a_plan_by_concat_reads_manifests_only(make_run, make_store):
    """[S1.a]"""
    path, _, _ = make_store("web", [50] * 10, max_tokens_per_shard=100)
    for folder in path.glob("shard-*"):
        shutil.rmtree(folder)
    assert make_run("web", packing="concat").plan().rows(9)[1].size == 4


def test_a_store_may_be_moved(make_run, make_store, tmp_path):
    """Paths play no part in what a plan is."""
    path, _, _ = make_store("web", [50] * 10)
    before = make_run("web").plan().fingerprint
    (tmp_path / "elsewhere").mkdir()
    shutil.move(path, tmp_path / "elsewhere" / "web")
    moved = Run(config=make_run("web").config, folder=tmp_path / "elsewhere")
    assert moved.plan().fingerprint == before


def test_re_sharding_keeps_the_stream(make_run, make_store):
    """[M1.e] Other shards, same documents, same order: the same batches."""
    batches = []
    for shard_tokens in (10**9, 60):
        make_store("web", [17, 0, 33, 50, 1] * 10, max_tokens_per_shard=shard_tokens)
        batches.append(
            [{k: v.tolist() for k, v in batch.items()} for batch in make_run("web").loader(micro_batch=4)]
        )
    assert batches[0] == batches[1]


def test_relative_stores_count_from_the_config_file(make_store, tmp_path, monkeypatch):
    make_store("web", [50])
    file = tmp_path / "run.toml"
    file.write_text('[run]\nsteps=2\nglobal_batch_size=2\nseq_len=8\n[[sources]]\nname="web"\nstore="web"\n')
    monkeypatch.chdir("/")
    assert Run.from_toml(file).plan().steps == 2


def test_a_read_only_folder_is_no_obstacle(make_run, make_store, tmp_path):
    make_store("web", [50])
    (tmp_path / ".tokenmill").write_text("in the way")
    assert len(list(make_run("web").loader(micro_batch=4))) == 10


def test_ranks_of_separate_processes_agree(make_run, make_store, tmp_path):
    """[T2.c] Other hash seeds, other processes: the same plan and the same rows."""
    make_store("web", [50] * 20)
    (tmp_path / "run.toml").write_text(
        '[run]\nsteps=20\nglobal_batch_size=4\nseq_len=8\n[[sources]]\nname="web"\nstore="web"\n'
    )
    script = (
        "import sys, json, tokenmill as tm\n"
        "plan = tm.Run.from_toml(sys.argv[1]).plan()\n"
        "print(json.dumps([plan.fingerprint, plan.rows(13)[1].tolist()]))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "run.toml")],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    plan = make_run("web", steps=20).plan()
    assert [json.loads(output) for output in outputs] == [[plan.fingerprint, plan.rows(13)[1].tolist()]] * 2


def test_the_front_door_needs_a_few_lines(tmp_path, monkeypatch):
    """[A1.c] From JSONL to batches."""
    import tokenmill as tm

    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": f"line {i} " * 9}) + "\n" for i in range(50))
    )
    tm.prepare("corpus.jsonl", out="stores/web", tokenizer="bytes", workers=1, progress=False)
    (tmp_path / "run.toml").write_text(
        '[run]\nsteps=5\nglobal_batch_size=4\nseq_len=32\n[[sources]]\nname="web"\nstore="stores/web"\n'
    )
    loader = tm.Run.from_toml("run.toml").loader(rank=0, world_size=1, micro_batch=4)
    batches = list(loader)
    assert len(batches) == 5
    assert batches[0]["input_ids"].shape == (4, 32)
    assert np.array_equal(loader[4]["labels"], batches[4]["labels"])


def test_the_vocabulary_of_files_of_others_may_be_given_when_a_source_is_added(tmp_path):
    """[M1.c] Mixing needs it, one source does not: to give it in mid-run changes no batch and is accepted."""
    for name in ("web", "books"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "tokens.npy", np.arange(600, dtype=np.uint16) % 97)
    web, books = ({"name": name, "store": f"{name}/*.npy"} for name in ("web", "books"))
    run = {"steps": 12, "global_batch_size": 2, "seq_len": 8, "packing": "concat"}
    one = Run(config=parse_config({"run": run, "sources": [web]}), folder=tmp_path)
    loader = one.loader()
    loader.seek(5)
    tables = {
        "run": run,
        "sources": [source | {"vocab_size": 50257} for source in (web, books)],
        "stages": [
            {"name": "base", "start_step": 0, "weights": {"web": 1}},
            {"name": "more", "start_step": 8, "weights": {"web": 1, "books": 1}},
        ],
    }
    two = Run(config=parse_config(tables), folder=tmp_path)
    two.loader().load_state_dict(loader.state_dict())
    for step in range(8):
        assert [a.tolist() for a in two.plan().rows(step)] == [a.tolist() for a in one.plan().rows(step)]
