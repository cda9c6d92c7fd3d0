import json
import shutil
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

import tokenmill
from tokenmill.config.run import parse_config, to_toml
from tokenmill.errors import ConfigError, StoreMissingError
from tokenmill.loader import Layout
from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter, open_store

WEB = tokenmill.SourceConfig(name="web", store="web")


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
        StoreMissingError, match=r"no store at this path: .*web .* run `tokenmill prepare`, or fix the path"
    ):
        make_run("web").plan()


def test_sources_of_two_tokenizers_are_refused_with_the_difference(make_run, make_store):
    """[T2.a]"""
    make_store("web", [50], vocab_size=300)
    make_store("books", [50], vocab_size=301)
    with pytest.raises(
        ConfigError, match=r"'web' with .*300 ids.* and 'books' with .* differ in vocab_size: 300 and 301"
    ):
        make_run("web", "books").plan()


def warnings_of_loader(run, caplog, **options):
    caplog.clear()
    loader = run.loader(**options)
    assert (loader.part.rank, loader.part.world_size) == (0, 1)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("environment", "warns"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"WORLD_SIZE": "8"}, False),
        ({"RANK": "0", "WORLD_SIZE": "many"}, False),
        ({}, False),
    ],
)
def test_a_loader_of_one_rank_among_many_processes_is_told_and_nothing_else_changes(
    make_run, make_store, monkeypatch, caplog, environment, warns
):
    make_store("web", [50] * 10)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run = make_run("web")
    told = warnings_of_loader(run, caplog)
    assert len(told) == warns
    assert all(
        "each of the 8 processes of this job reads all rows; use torch_loader, or pass rank=" in one for one in told
    )
    assert warnings_of_loader(run, caplog, rank=0, world_size=1) == []
    assert warnings_of_loader(run, caplog, layout=Layout()) == []


def test_mixed_tokenizers_are_named_by_file_and_size(tmp_path, make_run, tokenizer_identity):
    """[T2.a] Two digests alone do not say which tokenizer to use."""
    for name, digit, file in (
        ("web", "a", "gpt2/tokenizer.json"),
        ("books", "b", "llama.model"),
        ("code", "c", None),
    ):
        identity = {**tokenizer_identity(50_257), "kind": "tokenizer.json", "content": digit * 32}
        recipe = {"tokenizer": file} if file else {}
        with StoreWriter(
            tmp_path / name, StoreSpec(keys={"sequence": "<u2"}, tokenizer=identity, recipe=recipe)
        ) as out:
            out.append({"sequence": np.arange(50, dtype="<u2")}, np.array([0, 50]))
            out.commit()
    web = r"'web' with gpt2/tokenizer\.json, 50,257 ids, digest aaaaaaaa"
    for other, text in (("books", r"llama\.model \(tokenizer\.json\)"), ("code", r"tokenizer\.json")):
        message = (
            rf"got {web} and '{other}' with {text}, 50,257 ids, digest {other[0]}{{8}} that differ in content; "
        )
        with pytest.raises(ConfigError, match=f"{message}prepare one of them again$"):
            make_run("web", other).plan()
    with pytest.raises(
        ConfigError, match=r"books: .*got 'llama\.model .*' as its tokenizer where .*web has 'gpt2/"
    ):
        open_store([tmp_path / "web", tmp_path / "books"])


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


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("store", [["a", "b"], "[ab]"])
def test_several_stores_are_one_source_in_every_way(make_store, tmp_path, packing, store):
    """[R1.a] Batches, what and when, quarantine and resume are those of a store that holds the documents of all."""
    parts = [make_store("a", [17, 33, 50, 4, 9] * 2), make_store("b", [40, 1, 25] * 5, seed=1)]
    spec = StoreSpec(
        keys={"sequence": "<u2"}, tokenizer=open_store(parts[0][0]).manifest.tokenizer, recipe={"kind": "text"}
    )
    with StoreWriter(tmp_path / "whole", spec) as writer:
        for _, tokens, offsets in parts:
            writer.append({"sequence": tokens}, offsets)
        writer.commit()

    def run_of(store, *quarantine):
        tables = {
            "run": {"steps": 30, "global_batch_size": 4, "seq_len": 8, "packing": packing},
            "sources": [{"name": "web", "store": store}],
            "quarantine": list(quarantine),
        }
        return Run.from_tables(tables, folder=tmp_path)

    def batches(loader):
        return [{name: array.tolist() for name, array in batch.items()} for batch in loader]

    edit = {"source": "web", "from_step": 3, "documents": [2, 15]}
    for quarantine in ([], [edit]):
        joined, whole = run_of(store, *quarantine), run_of("whole", *quarantine)
        straight = batches(joined.loader(micro_batch=4))
        assert straight == batches(whole.loader(micro_batch=4))
        assert [joined.plan().what(step) for step in range(30)] == [whole.plan().what(step) for step in range(30)]
        assert joined.plan().when("web", document=12) == whole.plan().when("web", document=12)
        loader, resumed = joined.loader(micro_batch=4), joined.loader(micro_batch=4)
        assert batches(islice(loader, 5)) == straight[:5]
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert batches(resumed) == straight[5:]
    assert run_of(store).plan().fingerprint != run_of(store, edit).plan().fingerprint


def test_a_run_is_made_of_python_objects(make_store, tmp_path):
    """[A1.b] The same as of a file, of tables, or of records; a path may be one."""
    path, _, _ = make_store("web", [50] * 10)
    tables = {
        "run": {"steps": 10, "global_batch_size": 4, "seq_len": 8},
        "sources": [{"name": "web", "store": str(path)}],
        "stages": [{"name": "a", "start_step": 0}, {"name": "b", "start_step": 5, "seq_len": 16}],
    }
    of_records = tokenmill.Run(
        tokenmill.Config(
            run=tokenmill.RunConfig(steps=10, global_batch_size=4, seq_len=8),
            sources=[tokenmill.SourceConfig(name="web", store=path)],
            stages=[
                tokenmill.StageConfig(name="a", start_step=0),
                tokenmill.StageConfig(name="b", start_step=5, seq_len=16),
            ],
        ),
        tmp_path,
    )
    of_tables = tokenmill.Run.from_tables(tables, folder=tmp_path)
    (tmp_path / "run.toml").write_text(to_toml(tables))
    of_file = tokenmill.Run.from_toml(tmp_path / "run.toml")
    assert of_records.config == of_tables.config == of_file.config
    assert of_records.plan().fingerprint == of_file.plan().fingerprint
    with pytest.raises(ConfigError) as caught:
        tokenmill.Run.from_tables(tables | {"run": {**tables["run"], "seq_len": "8"}})
    assert str(caught.value) == "run.seq_len: expected a whole number, got '8'; leave out the quotes"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("run.toml", r"^Run: expected a Config, got 'run.toml'; use Run.from_toml\(...\)$"),
        ({"run": {"steps": 1}}, r"^Run: expected a Config, got \{'run': .*; use Run.from_tables\(...\)$"),
        (None, r"^Run: expected a Config, got None; use Run.from_toml"),
    ],
)
def test_a_run_of_something_else_than_a_config_says_how_it_is_made(config, message):
    with pytest.raises(ConfigError, match=message):
        Run(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sources": WEB},
            r"^sources: expected a list of SourceConfig, got one SourceConfig; write sources=\[...\]$",
        ),
        ({"sources": "web"}, r"^sources: expected a list of SourceConfig, got one str; write sources"),
        ({"sources": [{"name": "web"}]}, r"^sources: .*, got \{'name': 'web'\} in it; Run.from_tables takes plain"),
        (
            {"stages": tokenmill.StageConfig(name="a", start_step=0)},
            r"^stages: .* got one StageConfig; write stages=",
        ),
        (
            {"run": {"steps": 1}},
            r"^run: expected a RunConfig, got \{'steps': 1\}; Run.from_tables takes plain tables$",
        ),
    ],
)
def test_a_config_of_other_records_names_the_key(changes, message):
    run = tokenmill.RunConfig(steps=10, global_batch_size=4, seq_len=8)
    with pytest.raises(ConfigError, match=message):
        tokenmill.Config(**{"run": run, "sources": [WEB]} | changes)


def test_numbers_of_numpy_are_numbers_of_a_run(make_store, tmp_path):
    path, _, _ = make_store("web", [50] * 10)

    def tables(steps, batch, length, share, start):
        return {
            "run": {"steps": steps, "global_batch_size": batch, "seq_len": length, "weights": {"web": share}},
            "sources": [{"name": "web", "store": str(path)}],
            "stages": [{"name": "a", "start_step": 0}, {"name": "b", "start_step": start}],
        }

    plain = Run.from_tables(tables(10, 4, 8, 0.5, 5), folder=tmp_path)
    numbers = np.int64(10), np.uint8(4), np.int32(8), np.float32(0.5), np.int64(5)
    run = Run.from_tables(tables(*numbers), folder=tmp_path)
    assert run.config == plain.config
    assert run.plan().fingerprint == plain.plan().fingerprint
    steps, batch, length, share, start = numbers
    made = tokenmill.Config(
        run=tokenmill.RunConfig(steps=steps, global_batch_size=batch, seq_len=length, weights={"web": share}),
        sources=[tokenmill.SourceConfig(name="web", store=path)],
        stages=[tokenmill.StageConfig(name="a", start_step=0), tokenmill.StageConfig(name="b", start_step=start)],
    )
    assert Run(made, tmp_path).plan().fingerprint == plain.plan().fingerprint
    assert plain.lasting(steps=steps).config == plain.config
