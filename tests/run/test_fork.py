"""Runs that part from another at a step: nothing before it changes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config.run import to_toml
from tokenmill.errors import ConfigError, PlanError
from tokenmill.loader import row_digests
from tokenmill.run.fork import fork
from tokenmill.run.history import read_history
from tokenmill.run.run import Run

STEPS = 24
BASE = {
    "run": {"seed": 3, "steps": STEPS, "global_batch_size": 6, "seq_len": 16},
    "sources": [{"name": "web", "store": "stores/web"}, {"name": "books", "store": "stores/books"}],
    "stages": [
        {"name": "base", "start_step": 0, "weights": {"web": 0.8, "books": 0.2}},
        {"name": "late", "start_step": 10, "weights": {"web": 0.5, "books": 0.5}, "seq_len": 8, "lr_scale": 0.5},
    ],
}


@pytest.fixture
def folder(tmp_path, make_store):
    """Make two stores under job/stores."""
    rng = np.random.default_rng(3)
    for number, (name, count) in enumerate({"web": 70, "books": 30}.items()):
        make_store(f"job/stores/{name}", rng.integers(3, 60, count).tolist(), dtype="<u4", seed=number)
    return tmp_path / "job"


@pytest.fixture
def write(folder):
    """Return a function that writes the config of a run and opens it."""

    def written(tables, name="run"):
        file = folder / f"{name}.toml"
        file.write_text(to_toml(tables))
        return Run.from_toml(file)

    return written


def batches(run):
    """Return (step, digests of the rows) of all batches."""
    loader, plan = run.loader(threads=0), run.plan()
    steps = [step for step in range(plan.steps) if plan.next_trained(step) == step]
    return [(step, row_digests(loader[step])) for step in steps]


@st.composite
def edited(draw):
    """Draw the tables of a run with ramps, skips and quarantines in any place."""
    tables = json.loads(json.dumps(BASE))
    late = tables["stages"][1]
    late |= draw(st.sampled_from([{}, {"seq_len": 16}, {"on_change": "restart"}, {"seed": 9}]))
    late |= draw(st.sampled_from([{}, {"ramp": "linear", "ramp_steps": 5}, {"ramp": "cosine", "ramp_steps": 7}]))
    if draw(st.booleans()):
        del tables["stages"]
        tables["run"]["weights"] = {"web": 2, "books": 1}
    if draw(st.booleans()):
        first = draw(st.integers(0, 20))
        tables["skip"] = [{"steps": f"{first}:{first + 2}", "reason": "spike"}]
    if draw(st.booleans()):
        edit = {"source": "web", "from_step": draw(st.integers(0, 23)), "documents": [1, 5]}
        tables["quarantine"] = [edit]
    if draw(st.booleans()):
        tables["sources"][1] |= {"max_epochs": 0.5, "on_exhausted": "stop"}
    return tables


def within_ramp(tables, step):
    return 10 < step < 10 + next((stage.get("ramp_steps", 0) for stage in tables.get("stages", [])[1:]), 0)


@given(tables=edited(), step=st.integers(0, STEPS - 1))
def test_a_fork_without_weights_gives_the_same_batches_for_ever(write, folder, tables, step):
    """[M1.c, O1.c] At any step but within a ramp, whatever is edited."""
    run = write(tables)
    for old in [*folder.glob("new*"), *folder.glob(".tokenmill/history/*")]:
        old.unlink()
    if within_ramp(tables, step):
        with pytest.raises(ConfigError, match="within the ramp of stage 'late'"):
            fork(run, at=step, to=folder / "new.toml")
        return
    made = fork(run, at=step, to=folder / "new.toml")
    new = Run.from_toml(folder / "new.toml")
    assert new.plan().fingerprint == run.plan().fingerprint
    assert batches(new) == batches(run)
    assert [stage.start_step for stage in new.config.stages].count(step) == 1
    assert (made.step, made.edited) == (step, False)


@given(tables=edited(), step=st.integers(0, STEPS - 1))
def test_a_fork_with_weights_keeps_what_comes_before_and_goes_on_from_its_state(write, folder, tables, step):
    """[M1.c, R1.a] A trainer loads the state into the new run and goes on."""
    run = write(tables)
    for old in [*folder.glob("new*"), *folder.glob(".tokenmill/history/*")]:
        old.unlink()
    if within_ramp(tables, step):
        return
    made = fork(run, at=step, to=folder / "new.toml", weights={"web": 1})
    new = Run.from_toml(folder / "new.toml")
    assert [one for one in batches(new) if one[0] < step] == [one for one in batches(run) if one[0] < step]
    loader = new.loader(micro_batch=6, threads=0)
    loader.load_state_dict(json.loads(made.state.read_bytes()))
    assert loader.state_dict() == json.loads(made.state.read_bytes())
    rest = [row_digests(batch) for batch in loader]
    assert rest == [rows for number, rows in batches(new) if number >= step]


def test_the_stage_of_a_fork_is_a_copy_of_the_one_that_is_running(write, folder):
    made = fork(write(BASE), at=15, to=folder / "new.toml")
    stages = Run.from_toml(folder / "new.toml").translation.tables["stages"]
    assert stages[:2] == BASE["stages"]
    assert stages[2] == BASE["stages"][1] | {"name": "fork", "start_step": 15}
    assert (made.stage, made.config, made.state) == ("fork", folder / "new.toml", folder / "new.state.json")


def test_where_a_stage_begins_already_it_is_left_as_it_is(write, folder):
    assert fork(write(BASE), at=10, to=folder / "same.toml").stage == "late"
    assert Run.from_toml(folder / "same.toml").translation.tables == BASE
    made = fork(write(BASE), at=10, to=folder / "other.toml", name="math", weights={"books": 1})
    assert made.edited
    stage = Run.from_toml(folder / "other.toml").translation.tables["stages"][1]
    assert stage == BASE["stages"][1] | {"name": "math", "weights": {"books": 1}}


def test_a_fork_at_step_0_and_one_of_a_run_without_stages(write, folder):
    single = {"run": BASE["run"] | {"weights": {"web": 1, "books": 1}}, "sources": BASE["sources"]}
    run = write(single)
    assert fork(run, at=0, to=folder / "zero.toml").stage == "main"
    assert fork(run, at=5, to=folder / "five.toml").stage == "fork"
    names = [stage.name for stage in Run.from_toml(folder / "five.toml").config.stages]
    assert names == ["main", "fork"]
    assert [batches(Run.from_toml(folder / f"{name}.toml")) == batches(run) for name in ("zero", "five")] == [
        True
    ] * 2


def test_a_fork_of_a_fork_gets_a_name_of_its_own(write, folder):
    fork(write(BASE), at=4, to=folder / "one.toml")
    assert fork(Run.from_toml(folder / "one.toml"), at=6, to=folder / "two.toml").stage == "fork-2"
    with pytest.raises(ConfigError, match=r"name must be one that no stage has \(base, late\), got 'late'; choose"):
        fork(write(BASE), at=4, to=folder / "three.toml", name="late")


@pytest.mark.parametrize("step", [11, 13, 14])
def test_a_step_within_a_ramp_is_refused_with_the_nearest_legal_ones(write, folder, step):
    tables = json.loads(json.dumps(BASE))
    tables["stages"][1] |= {"ramp": "linear", "ramp_steps": 5}
    run = write(tables)
    with pytest.raises(
        ConfigError, match=rf"ramp of stage 'late' \(steps 10:15\), got {step}; fork at 10, .* at 15,"
    ):
        fork(run, at=step, to=folder / "new.toml")
    assert not (folder / "new.toml").exists()
    fork(run, at=15, to=folder / "new.toml")
    assert "ramp" not in Run.from_toml(folder / "new.toml").translation.tables["stages"][2]


def test_a_fork_where_documents_are_put_aside_does_not_start_their_source_again(write, folder):
    """A stage that restarts its sources is cut in its midst, at the very step of a quarantine."""
    tables = json.loads(json.dumps(BASE)) | {
        "quarantine": [{"source": "web", "from_step": 15, "documents": [2, 3]}]
    }
    tables["stages"][1]["on_change"] = "restart"
    run = write(tables)
    fork(run, at=15, to=folder / "new.toml")
    new = Run.from_toml(folder / "new.toml")
    assert "on_change" not in new.translation.tables["stages"][2]
    assert batches(new) == batches(run)


def test_a_fork_before_a_source_is_first_drawn_still_starts_it_again(write, folder):
    """The second stage restarts a source that it has not drawn from before the fork."""
    tables = json.loads(json.dumps(BASE))
    tables["stages"][1] |= {"on_change": "restart", "weights": {"web": 0.985, "books": 0.015}}
    run = write(tables)
    name = run.plan().sources.index("books")
    drawn = [step for step in range(10, STEPS) if name in run.plan().rows(step)[0]]
    assert drawn[0] > 12
    fork(run, at=12, to=folder / "new.toml")
    assert batches(Run.from_toml(folder / "new.toml")) == batches(run)


def test_relative_paths_lead_to_the_same_files_from_another_folder(write, folder, tmp_path):
    (folder / "lists").mkdir()
    (folder / "lists" / "bad.txt").write_text("3\n")
    (tmp_path / "apart").symlink_to(folder / "stores")
    tables = json.loads(json.dumps(BASE)) | {
        "quarantine": [{"source": "web", "from_step": 12, "file": "lists/bad.txt"}],
    }
    tables["sources"][0]["store"] = "../apart/web"
    tables["sources"][1]["store"] = str(folder / "stores" / "books")
    run = write(tables)
    (tmp_path / "forks" / "deep").mkdir(parents=True)
    made = fork(run, at=5, to=tmp_path / "forks" / "deep" / "new.toml")
    found = Run.from_toml(made.config).translation.tables
    assert [source["store"] for source in found["sources"]] == ["../../apart/web", str(folder / "stores" / "books")]
    assert found["quarantine"][0]["file"] == "../../job/lists/bad.txt"
    assert batches(Run.from_toml(made.config)) == batches(run)
    edit = read_history(tmp_path / "forks" / "deep", "new")[0]
    assert edit.forked_from.config == "../../job/run.toml"


def test_text_that_is_prepared_on_first_use_is_found_from_another_folder(folder, tmp_path):
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"line {i} " * 5}) + "\n" for i in range(60)))
    tables = {
        "run": BASE["run"] | {"steps": 6},
        "sources": [{"name": "web", "documents": ["text.jsonl"], "tokenizer": "bytes"}],
    }
    (folder / "run.toml").write_text(to_toml(tables))
    run = Run.from_toml(folder / "run.toml")
    made = fork(run, at=3, to=tmp_path / "new.toml")
    source = Run.from_toml(made.config).translation.tables["sources"][0]
    assert (source["documents"], source["tokenizer"]) == (["job/text.jsonl"], "bytes")
    assert batches(Run.from_toml(made.config)) == batches(run)


@pytest.mark.parametrize("name", ["new.toml", "new.state.json"])
def test_nothing_is_overwritten(write, folder, name):
    (folder / name).write_text("mine")
    with pytest.raises(ConfigError, match=rf"file exists: .*{name}; choose another name"):
        fork(write(BASE), at=5, to=folder / "new.toml")
    assert (folder / name).read_text() == "mine"
    assert sorted(file.name for file in folder.glob("*new*")) == [name]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"at": 24}, PlanError, "step must lie within 0:24, got 24; choose"),
        ({"at": -1}, PlanError, "step must lie within 0:24, got -1; choose"),
        ({"at": 5, "weights": {"wbe": 1}}, ConfigError, "got 'wbe'; did you mean 'web'"),
        ({"at": 5, "weights": {"web": 0}}, ConfigError, "weights must be positive, got {'web': 0}; leave"),
        ({"at": 5, "name": ""}, ConfigError, "got ''; choose another"),
        ({"at": 5, "to": "new.json"}, ConfigError, r"a config must end in \.toml, got '\.json'; rename it"),
        (
            {"at": 5, "to": "nowhere/new.toml"},
            ConfigError,
            "folder not found: .*nowhere; create it first",
        ),
    ],
)
def test_what_cannot_be_forked_is_refused_and_nothing_is_written(write, folder, options, error, message):
    run = write(BASE)
    with pytest.raises(error, match=message):
        fork(run, **({"to": folder / options.pop("to", "new.toml")} | options))
    assert [file.name for file in folder.glob("*new*")] == []


def test_a_fork_begins_its_history_with_where_it_comes_from(write, folder):
    """[O1.c]"""
    run = write(BASE)
    made = fork(run, at=5, to=folder / "new.toml", weights={"web": 1})
    (edit,) = read_history(folder, "new")
    assert (edit.plan, edit.before) == (made.plan, run.plan().fingerprint[:16])
    assert (edit.first_step, edit.forked_from.step, edit.forked_from.config) == (5, 5, "run.toml")
    assert "stages[1].weights.web" in [change.path for change in edit.changes]
    Run.from_toml(made.config).loader()
    assert read_history(folder, "new") == [edit]


def test_a_fork_of_a_foreign_config_is_native(folder, tmp_path):
    (folder / "tokens").mkdir()
    np.save(folder / "tokens" / "a.npy", np.arange(4000, dtype=np.uint16))
    (folder / "kf.toml").write_text(
        '[data]\ndataset_path = "tokens"\n[train]\nbatch_size = 4\nmax_steps = 9\nseq_len = 16\n'
    )
    run = Run.from_toml(folder / "kf.toml", world_size=2)
    made = fork(run, at=4, to=tmp_path / "new.toml")
    new = Run.from_toml(made.config)
    assert (run.translation.dialect, new.translation.dialect) == ("KempnerForge", "native")
    assert batches(new) == batches(run)


@pytest.mark.parametrize("length", [{"steps": STEPS}, {"tokens": STEPS * 6 * 16, "steps": None}, {"epochs": 2}])
def test_a_fork_elsewhere_reads_the_same_object_storage_by_the_same_options(write, folder, length):
    """Addresses are no paths, and [remote] is kept, however the length of the run is given."""
    length = {key: value for key, value in length.items() if value is not None}
    tables = {
        "run": {"global_batch_size": 6, "seq_len": 16, **length},
        "sources": [{"name": "web", "store": f"file://{folder}/stores/web"}],
        "remote": {"mirror": "mirror", "concurrency": 7},
    }
    run = write(tables)
    (folder / "forks").mkdir()
    run.fork(at=3, to=folder / "forks" / "new.toml")
    new = Run.from_toml(folder / "forks" / "new.toml")
    assert batches(new) == batches(run)
    assert new.config.sources == run.config.sources
    assert new.config.remote == replace(run.config.remote, mirror="../mirror")
    assert new.network.options.mirror == f"{folder}/forks/../mirror"
