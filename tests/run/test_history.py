"""What is kept of the plans of a run, and how it is told."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from tokenmill.config.run import to_toml
from tokenmill.errors import ResumeError
from tokenmill.run.history import Edit, read_history, read_plan
from tokenmill.run.run import Run
from tokenmill.tables import as_json

BASE = {
    "run": {"seed": 3, "steps": 30, "global_batch_size": 6, "seq_len": 16},
    "sources": [{"name": "web", "store": "web"}, {"name": "books", "store": "books"}],
    "stages": [
        {"name": "base", "start_step": 0, "weights": {"web": 0.8, "books": 0.2}},
        {"name": "late", "start_step": 20, "weights": {"web": 0.5, "books": 0.5}},
    ],
}
SKIP = {"skip": [{"steps": "12:14", "reason": "loss spike"}]}


@pytest.fixture
def folder(tmp_path, make_store):
    rng = np.random.default_rng(3)
    for number, (name, count) in enumerate({"web": 70, "books": 30}.items()):
        make_store(name, rng.integers(3, 60, count).tolist(), dtype="<u4", seed=number)
    return tmp_path


@pytest.fixture
def load(folder):
    """Return a function that writes the config of a run and makes its loader, as a training job does."""

    def loaded(tables, name="run", rank=0):
        file = folder / f"{name}.toml"
        file.write_text(to_toml(tables))
        run = Run.from_toml(file)
        return run.loader(rank=rank, world_size=2)

    return loaded


def digits(loader):
    return loader.plan.fingerprint[:16]


def test_a_record_describes_shared_rows_once_and_older_records_read_the_same(load, folder):
    plan = load(BASE).plan
    number = plan.fingerprint[:16]
    file = folder / ".tokenmill" / "plans" / f"{number}.json"
    written, record = json.loads(file.read_text()), read_plan(folder, number)
    assert [stage["sources"] for stage in written["stages"]] == [{"books": 0, "web": 1}] * 2
    assert list(record.stages) == plan.describe()["stages"]
    file.write_text(json.dumps({**written, "rows": [], "stages": list(record.stages)}))
    assert read_plan(folder, number) == record
    file.write_text(json.dumps(written | {"rows": []}))
    assert read_plan(folder, number) is None


def test_runs_made_in_python_record_plans_only_in_a_folder_that_was_passed(folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    plan = Run.from_tables(BASE).loader(world_size=2).plan
    Run.build(["web", "books"], seq_len=16, global_batch_size=6, steps=3).loader(world_size=2)
    assert sorted(folder.rglob("*")) == before
    assert Run.from_tables(BASE, folder=".").loader(world_size=2).plan.fingerprint == plan.fingerprint
    assert [edit.plan for edit in read_history(folder, "run")] == [plan.fingerprint[:16]]


def test_a_line_is_added_when_the_plan_changes_and_only_then(load, folder):
    """[O1.c] An edit is recorded with the step from which on it acts, the keys, and the reason."""
    first = load(BASE)
    load(BASE)
    second = load(BASE | SKIP)
    load(BASE | SKIP)
    assert [line for line in (folder / ".tokenmill/history/run.jsonl").read_text().split("\n") if line][2:] == []
    old, new = read_history(folder, "run")
    assert (old.plan, old.before, old.first_step, old.changes, old.reasons) == (digits(first), None, None, (), ())
    assert (new.plan, new.before, new.first_step) == (digits(second), digits(first), 12)
    assert [(change.path, change.old, change.new) for change in new.changes] == [
        ("skip[0].steps", None, "12:14"),
        ("skip[0].reason", None, "loss spike"),
    ]
    assert new.reasons == ("skip 12:14 (loss spike)",)
    assert str(new).endswith(f" plan {digits(second)[:8]}… from step 12: skip 12:14 (loss spike)")


def test_every_edit_is_told_with_its_reason(load, folder):
    quarantine = [
        {"source": "web", "from_step": 15, "documents": [3, 4], "reason": "spam"},
        {"source": "books", "from_step": 18},
    ]
    late = [BASE["stages"][0], BASE["stages"][1] | {"weights": {"web": 0.5, "books": 0.6}}]
    for tables in (BASE, BASE | SKIP, BASE | SKIP | {"quarantine": quarantine}, BASE | {"stages": late}):
        load(tables)
    shown = [line.partition("… ")[2] for line in map(str, read_history(folder, "run"))]
    assert shown == [
        "is the first on record",
        "from step 12: skip 12:14 (loss spike)",
        "from step 15: quarantine documents 3, 4 of web from step 15 (spam), quarantine all of books from step 18",
        "from step 12: stages[1].weights.books 0.5 -> 0.6, skip[0].steps '12:14' -> (absent), "
        "quarantine[0].source 'web' -> (absent), and 6 more",
    ]


def test_more_steps_are_an_edit_at_the_end(load, folder):
    load(BASE)
    load(BASE | {"run": BASE["run"] | {"steps": 40}})
    assert str(read_history(folder, "run")[1]).endswith(" from step 30: run.steps 30 -> 40")


def test_what_changes_no_batch_is_no_edit(load, folder):
    load(BASE)
    load(BASE | {"stages": [BASE["stages"][0], BASE["stages"][1] | {"lr_scale": 0.5, "name": "cool"}]})
    assert len(read_history(folder, "run")) == 1


def test_going_back_is_an_edit_as_well(load, folder):
    plans = [digits(load(tables)) for tables in (BASE, BASE | SKIP, BASE)]
    found = read_history(folder, "run")
    assert [(edit.plan, edit.before) for edit in found] == [
        (plans[0], None),
        (plans[1], plans[0]),
        (plans[0], plans[1]),
    ]
    assert found[2].first_step == 12


def test_other_ranks_and_other_configs_keep_out_of_it(load, folder):
    load(BASE, rank=1)
    assert read_history(folder, "run") == []
    load(BASE)
    load(BASE | SKIP, name="other")
    assert [len(read_history(folder, name)) for name in ("run", "other", "none")] == [1, 1, 0]


def test_lines_that_cannot_be_read_are_left_out(load, folder):
    load(BASE)
    file = folder / ".tokenmill" / "history" / "run.jsonl"
    whole = file.read_bytes()
    junk = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"time": 1}', whole.strip()[:-9], b'{"plan": "a", "time": 3}']
    file.write_bytes(b"\n".join(junk) + b"\n" + whole + b'{"time": "20')
    assert len(read_history(folder, "run")) == 1
    load(BASE | SKIP)
    found = read_history(folder, "run")
    assert [edit.first_step for edit in found] == [None, 12]


def test_an_old_record_without_a_config_is_read_and_completed(load, folder):
    """Plans that were recorded before configs were kept are compared by their descriptions."""
    first = load(BASE)
    file = folder / ".tokenmill" / "plans" / f"{digits(first)}.json"
    record = json.loads(file.read_text())
    assert list(record) == ["version", "contract", "rows", "stages", "config"]
    assert record.pop("config")["run"]["seed"] == 3
    file.write_text(json.dumps(record))
    load(BASE | SKIP)
    assert read_history(folder, "run")[1].first_step == 12
    load(BASE, name="again")
    assert json.loads(file.read_text())["config"]["run"]["seed"] == 3


def test_a_line_of_an_earlier_version_is_read(load, folder):
    """It does not say that a run was not forked."""
    plan = digits(load(BASE))
    file = folder / ".tokenmill" / "history" / "run.jsonl"
    line = {"time": "2026-11-01T08:00:00Z", "plan": "77" * 8, "before": None, "first_step": None}
    change = {"path": "quarantine[0].documents", "old": None, "new": [3, 4]}
    edit = {"changes": [change], "reasons": ["quarantine documents 3, 4 of web from step 5"]}
    later = {"time": "2026-11-02T08:00:00Z", "plan": plan, "before": "77" * 8, "first_step": 5}
    old = [line | {"changes": [], "reasons": []}, later | edit]
    file.write_text("".join(json.dumps(one) + "\n" for one in old))
    assert [(edit.plan, edit.first_step, edit.forked_from) for edit in read_history(folder, "run")] == [
        ("77" * 8, None, None),
        (plan, 5, None),
    ]
    assert read_history(folder, "run")[1].changes[0].new == (3, 4)
    load(BASE)
    assert len(file.read_text().splitlines()) == 2


@pytest.mark.parametrize("left", [None, b"", b"{", b"[]", b'{"stages": 3}', b'{"stages": [{"seed": 1}]}'])
def test_a_plan_that_is_not_on_record_is_no_obstacle(load, folder, left):
    first = load(BASE)
    file = folder / ".tokenmill" / "plans" / f"{digits(first)}.json"
    file.unlink() if left is None else file.write_bytes(left)
    load(BASE | SKIP)
    assert str(read_history(folder, "run")[1]).endswith("…: what changed is not on record")


@pytest.mark.parametrize(
    ("blocked", "kept"), [(".tokenmill", 0), (".tokenmill/history", 0), (".tokenmill/plans", 1)]
)
def test_a_folder_that_cannot_be_written_to_costs_only_the_history(load, folder, blocked, kept):
    (folder / blocked).parent.mkdir(exist_ok=True)
    (folder / blocked).write_text("in the way")
    assert next(iter(load(BASE)))["input_ids"].shape == (1, 16)
    assert len(read_history(folder, "run")) == kept


APPEND = """
import sys
from pathlib import Path
from tokenmill.run.history import Edit, _append
for number in range(200):
    text = f"{sys.argv[2]}-{number}"
    _append(Path(sys.argv[1]), Edit(time="t", plan=text, before="x" * 3000, first_step=number))
"""


def test_lines_of_several_processes_never_mix(folder):
    """[C1.c]"""
    file = folder / ".tokenmill" / "history" / "run.jsonl"
    workers = [subprocess.Popen([sys.executable, "-c", APPEND, str(file), str(name)]) for name in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    found = read_history(folder, "run")
    # Who meets another in the middle of its line begins a new one: some lines may be empty, none is torn.
    assert len(found) == len([line for line in file.read_bytes().split(b"\n") if line]) == 600
    for name in range(3):
        mine = [edit.first_step for edit in found if edit.plan.startswith(f"{name}-")]
        assert mine == list(range(200))


def test_two_processes_that_note_the_same_plan_make_one_edit(load, folder):
    load(BASE)
    file = folder / ".tokenmill" / "history" / "run.jsonl"
    file.write_bytes(file.read_bytes() * 2)
    assert len(read_history(folder, "run")) == 1


def test_a_refused_resume_names_the_key_of_the_config(load):
    """[S.b]"""
    old = load(BASE)
    stream = iter(old)
    for _ in range(3 * 16):
        next(stream)
    state = old.state_dict()
    assert state["step"] == 16
    for tables, told in (
        (BASE | SKIP, r"first difference: stages\[1\]\S* .* \(skip\[0\]\.steps \(absent\) -> '12:14'\); resume"),
        (
            BASE | {"run": BASE["run"] | {"seed": 4}},
            r"first difference: stages\[0\]\.seed 3 -> 4 \(run\.seed 3 -> 4\); resume",
        ),
        (
            BASE | {"stages": [{"name": "base", "start_step": 0, "weights": {"web": 0.8, "books": 0.3}}]},
            r"first difference: stages\[0\]\.weights\.books 0\.2 -> 0\.3; resume",
        ),
    ):
        with pytest.raises(ResumeError, match=told):
            load(tables).load_state_dict(state)


def test_an_edit_reads_back_as_it_was_written(load, folder):
    load(BASE)
    load(BASE | SKIP)
    found = read_history(folder, "run")
    lines_written = (folder / ".tokenmill/history/run.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines_written] == [json.loads(json.dumps(as_json(edit))) for edit in found]
    first = Edit(time="2026-11-16T00:00:00Z", plan="ab" * 8, before=None, first_step=None)
    assert str(first) == "2026-11-16 plan abababab… is the first on record"
