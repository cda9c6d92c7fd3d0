from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.loader import batch_digest, row_digests
from tokenmill.run.run import Run

ENTRY = Path(sys.executable).parent / "tokenmill"


@pytest.fixture
def digests(tokenmill, run_toml):
    """Return a function that gives the lines of `batches --digest`."""

    def lines(*options: object) -> list[str]:
        done = tokenmill("batches", run_toml, "--digest", *options)
        assert (done.code, done.err) == (0, "")
        return done.lines

    return lines


def test_digest_prints_step_stage_and_digest(digests, run_toml):
    lines = [line.split("\t") for line in digests()]
    assert [(int(step), stage) for step, stage, _ in lines] == [
        (step, "base" if step < 6 else "late") for step in range(10)
    ]
    loader = Run.from_toml(run_toml).loader()
    assert [digest for _, _, digest in lines] == [batch_digest(row_digests(loader[step])) for step in range(10)]
    assert len({digest for _, _, digest in lines}) == 10


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize(("threads", "prefetch"), [(0, 1), (1, 8), (3, 2)])
def test_the_global_digests_are_the_same_for_any_world_size_and_loader(
    digests, world_size, micro_batch, threads, prefetch
):
    """[E1.a]"""
    micro = [] if micro_batch is None else ["--micro-batch", micro_batch]
    options = ["--world-size", world_size, *micro, "--threads", threads, "--prefetch", prefetch]
    assert digests(*options) == digests()


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_rank_draws_its_slice(digests, run_toml, rank):
    lines = digests("--rank", rank, "--world-size", 4)
    loader = Run.from_toml(run_toml).loader()
    for line in lines:
        step, _, digest = line.split("\t")
        rows = row_digests(loader[int(step)])
        share = len(rows) // 4
        assert digest == batch_digest(rows[rank * share : (rank + 1) * share])
    assert len(lines) == 10


def test_without_digest_the_tokens_are_counted(tokenmill, run_toml):
    done = tokenmill("batches", run_toml)
    loader = Run.from_toml(run_toml).loader()
    trained = [int((loader[step]["labels"] >= 0).sum()) for step in range(10)]
    assert done.lines == [
        f"{step}\t{'base' if step < 6 else 'late'}\t{128 if step < 6 else 64} tokens, {trained[step]:,} trained"
        for step in range(10)
    ]
    assert done.err == "now at step 10 of 10\n"


@pytest.mark.parametrize(
    ("steps", "begin", "end"),
    [("2:4", 2, 4), (":3", 0, 3), ("8:", 8, 10), ("7", 7, 8), (":", 0, 10), ("4:4", 4, 4)],
)
def test_a_range_of_steps_is_the_same_part_of_the_whole(digests, steps, begin, end):
    assert digests("--steps", steps) == digests()[begin:end]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("x", r"--steps: must be a:b, got 'x'; for example 10:20, :5 or 7"),
        ("1:2:3", r"--steps: must be a:b, got '1:2:3'; .*"),
        ("0:11", r"--steps: must lie within 0:10, got 0:11; shorten it"),
        ("5:2", r"--steps: must lie within 0:10, got 5:2; shorten it"),
        ("-1:2", r"--steps: must lie within 0:10, got -1:2; shorten it"),
        ("10", r"--steps: must lie within 0:10, got 10; shorten it"),
    ],
)
def test_a_range_that_cannot_be_is_refused(tokenmill, run_toml, steps, message):
    done = tokenmill("batches", run_toml, f"--steps={steps}")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", done.err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world-size", 3], r"stage 'base': global_batch_size must be divisible by .*, got 8 and 3 \* 1; use .*"),
        (
            ["--micro-batch", 3],
            r"stage 'base': .* divisible by .*, got 8 and 1 \* 3; use .*, or micro_batch 2 or 4",
        ),
        (["--micro-batch", 8], r"stage 'late': .* divisible by .*, got 4 and 1 \* 8; use .*"),
        (["--micro-batch", 0], r"micro_batch: must be at least 1, got 0; .*"),
        (["--world-size", 0], r"--world-size: must be at least 1, got 0; leave it out for 1"),
        (["--world-size", -2], r"--world-size: must be at least 1, got -2; leave it out for 1"),
        (["--rank", 2, "--world-size", 2], r"rank: must lie within 0:world_size, got rank 2 of 2; .*"),
        (["--rank", -1], r"rank: must lie within 0:world_size, got rank -1 of 1; .*"),
        (["--threads", -1], r"loader: threads must be at least 0, .*, got -1, 8 and 30.0; .*"),
        (["--prefetch", 0], r"loader: .* prefetch at least 1 .*, got 1, 0 and 30.0; .*"),
    ],
)
def test_a_slicing_that_cannot_be_is_refused_before_the_first_step(tokenmill, run_toml, options, message):
    """[E1.b, A1.a]"""
    done = tokenmill("batches", run_toml, *options)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", done.err)


def test_a_state_is_saved_after_every_step_and_resumed_from(digests, folder):
    """[R1.a, R1.b]"""
    state = folder / "state.json"
    drawn: list[str] = []
    # One of the cuts is the edge of a stage, one draws nothing; the world size changes on the way.
    for end, world_size in ((2, 1), (2, 4), (6, 2), (7, 4), (10, 1), (10, 2)):
        drawn += digests("--steps", f":{end}", "--state", state, "--world-size", world_size)
        assert json.loads(state.read_bytes())["step"] == end
        assert len(state.read_bytes()) <= 200
    assert drawn == digests()


def test_a_state_is_resumed_in_a_new_process(digests, folder):
    """[R1.a]"""
    state = folder / "state.json"
    drawn = []
    for end in (4, 10):
        command = [ENTRY, "batches", folder / "run.toml", "--digest", "--state", state, "--steps", f":{end}"]
        drawn += subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert drawn == digests()


def test_a_state_of_another_plan_is_refused_with_the_first_difference(tokenmill, digests, folder):
    """[S.b]"""
    state, config = folder / "state.json", folder / "run.toml"
    digests("--steps", ":3", "--state", state)
    saved = state.read_bytes()
    config.write_text(config.read_text(encoding="utf-8").replace("web = 0.75", "web = 0.8"), encoding="utf-8")
    done = tokenmill("batches", config, "--digest", "--state", state)
    assert (done.code, done.out) == (1, "")
    assert re.search(
        r"made by plan \w{12} and this run is \w{12}; first difference: stages\[0\]\.weights\.web ", done.err
    )
    assert "0.75 -> 0.8" in done.err
    assert state.read_bytes() == saved


def test_a_changed_future_is_accepted(digests, folder):
    """[M1.c]"""
    state, config = folder / "state.json", folder / "run.toml"
    before = digests("--steps", ":3", "--state", state)
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("{ web = 0.5, books = 0.5 }", "{ books = 1 }"), encoding="utf-8")
    after = digests("--state", state)
    assert before + after == digests()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r".*state\.json: must be a state in JSON, got .*; remove it to start over"),
        ("[]", r"state: must be the dict that state_dict\(\) gave, got list; pass that"),
        ("{}", r"state: missing key: version; add version = .*"),
        ('{"stpe": 1}', r"state: unknown key: 'stpe'; did you mean 'step'\?"),
    ],
)
def test_what_is_no_state_is_refused(tokenmill, folder, content, message):
    """[S.b]"""
    state = folder / "state.json"
    state.write_text(content, encoding="utf-8")
    done = tokenmill("batches", folder / "run.toml", "--state", state)
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(f"error: {message}\n", done.err)
    assert state.read_text(encoding="utf-8") == content


def test_a_state_in_the_middle_of_a_step_is_refused_as_whole_steps_are_drawn(tokenmill, folder):
    """[R1.c]"""
    loader = Run.from_toml(folder / "run.toml").loader(micro_batch=2)
    next(iter(loader))
    state = folder / "state.json"
    state.write_text(json.dumps(loader.state_dict()), encoding="utf-8")
    done = tokenmill("batches", folder / "run.toml", "--micro-batch", 2, "--state", state)
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(
        r"error: .*state\.json: the state was saved 1 micro-batches into step .*; use .*\n", done.err
    )


@pytest.mark.parametrize("name", ["sequence.bin", "documents.bin"])
def test_a_missing_shard_stops_with_its_name(tokenmill, folder, name):
    """[S.f]"""
    (folder / "stores" / "web" / "shard-00000" / name).unlink()
    done = tokenmill("batches", folder / "run.toml")
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(rf"error: .*stores/web/shard-00000/{name}: must exist.*, got nothing there; .*\n", done.err)


def test_check_writes_a_record_and_compares_a_run_with_it(tokenmill, run_toml, tmp_path):
    record = tmp_path / "record.json"
    assert tokenmill("check", run_toml, "--record", record, "--steps", "2:8").lines == [
        f"wrote {record}: digests of steps 2:8"
    ]
    assert tokenmill("check", run_toml, "--against", record).lines == ["all batches of steps 2:8 are the same"]
    run_toml.write_text(run_toml.read_text().replace("seed = 7", "seed = 8"))
    done = tokenmill("check", run_toml, "--against", record)
    assert done.code == 1
    assert re.match(r"first difference at step 2 in rows of (web|books|books, web)$", done.lines[0])
    assert re.search(r"because .*: .* -> ", done.lines[1])
    done = tokenmill("check", run_toml, "--against", record, "--json")
    result = json.loads(done.out)
    assert (done.code, result["same"], result["differing_step"]) == (1, False, 2)


def test_check_needs_exactly_one_file(tokenmill, run_toml, tmp_path):
    for options in ([], ["--record", tmp_path / "a", "--against", tmp_path / "b"]):
        done = tokenmill("check", run_toml, *options)
        assert done.code == 2
        assert "expected --record or --against, got both or neither; pass one of them" in done.err
    assert tokenmill("check", run_toml, "--against", tmp_path / "gone").code == 2
