"""Commands on a run that draws from live text."""

from __future__ import annotations

import json

import pytest

RUN = """
[run]
steps = 6
global_batch_size = 4
seq_len = 24

[[sources]]
name = "web"
documents = ["web.jsonl"]
tokenizer = "bytes"
live = true
on_error = "skip"
window_bytes = 400
"""


@pytest.fixture
def live_toml(tmp_path):
    lines = [json.dumps({"text": f"document {number} of the mill"}) for number in range(60)]
    (tmp_path / "web.jsonl").write_text("\n".join([*lines[:30], "{", *lines[30:]]) + "\n")
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def test_plan_tells_what_is_not_counted_and_how_many_lanes_there_are(tokenmill, live_toml, tmp_path):
    told = tokenmill("plan", live_toml, "--json", "--svg", tmp_path / "x.svg").json
    assert {key: told["sources"][0][key] for key in ("rows", "epochs", "lanes", "drawn", "fates")} == {
        "rows": None,
        "epochs": None,
        "lanes": 4,
        "drawn": 24,
        "fates": None,
    }
    assert told["shares"][0]["counted"] is False
    assert "live text" in (tmp_path / "x.svg").read_text()
    summary = tokenmill("plan", live_toml)
    assert (summary.code, sum(line.startswith("web ") for line in summary.lines)) == (0, 1)
    shown = tokenmill("plan", live_toml, "--full")
    assert (shown.code, shown.err) == (0, "")
    assert any(line.split()[:2] == ["web", "live"] and "4" in line.split() for line in shown.lines)


def test_batches_resume_from_a_file_at_any_world_size_and_tell_what_was_left_out(tokenmill, live_toml, tmp_path):
    whole = tokenmill("batches", live_toml, "--digest")
    assert len(whole.lines) == 6
    assert whole.err == "skipped in web: json 1\n"
    state = tmp_path / "state.json"
    first = tokenmill("batches", live_toml, "--digest", "--world-size", "2", "--steps", ":3", "--state", state)
    rest = tokenmill("batches", live_toml, "--digest", "--world-size", "4", "--state", state)
    assert first.lines + rest.lines == whole.lines
    assert rest.err == whole.err


def test_what_only_a_store_knows_is_refused_with_the_way_out(tokenmill, live_toml, tmp_path):
    for words in (
        ("what", live_toml, "--step", "1"),
        ("when", live_toml, "--source", "web", "--document", "3"),
        ("batches", live_toml, "--steps", "2:4"),
        ("fork", live_toml, "--at", "3", "--out", tmp_path / "new.toml"),
    ):
        done = tokenmill(*words)
        assert done.code == 2
        said = (
            "got live text",
            "is live text: the documents of a row",
            "draws from live text",
            "made as they are read; leave out live = true",
        )
        assert any(words in done.err for words in said)


def test_a_run_is_the_same_as_itself_and_inspect_says_that_it_is_live(tokenmill, live_toml):
    assert tokenmill("diff", live_toml, live_toml).code == 0
    shown = tokenmill("inspect", live_toml)
    assert shown.code == 0
    assert "web: live text, 1 files of" in shown.err
