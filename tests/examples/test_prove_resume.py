from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import tokenmill as tm
from tokenmill.torch import TorchLoader

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)  # five processes that import torch, or ten
@pytest.mark.parametrize("ranks", [(2,), pytest.param((2, 4), marks=pytest.mark.deep)])
def test_the_short_form_is_killed_and_resumes_on_other_ranks(prove_resume, short_run, tmp_path, ranks):
    """[R1.a, R1.b, E1.a, E1.c, C1.d, M1.b]"""
    # One test for all claims: the trainings are run once, whichever worker the tests are spread over.
    out = tmp_path / "out"
    command = [sys.executable, "-W", "error", ROOT / "examples" / "prove_resume.py", "--out", out]
    options = ["--run", short_run, "--save-every", 3, "--seed", 5, "--ranks", *ranks]
    done = subprocess.run([*map(str, [*command, *options])], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "all digests equal, losses differ by at most " in done.stdout

    (straight,), legs = (prove_resume.read_log(out / name / "log.txt") for name in ("straight", "killed"))
    assert [(leg.ranks, leg.micro_batch) for leg in legs] == [*((n, 8 // n) for n in ranks), (1, 1)]
    assert [leg.start % 3 for leg in legs] == [0] * len(legs)
    assert (legs[0].start, legs[-1].end) == (0, 24)
    for before, leg in pairwise(legs):
        assert before.start < leg.start <= before.end < 24

    expected = batches_of_the_command_line(out / "run.toml")
    assert [(step.step, step.stage, step.digest) for step in straight.steps] == expected
    assert [line[1] for line in expected] == ["base"] * 8 + ["long"] * 16
    for leg in legs:
        lines = [(step.step, step.stage, step.digest) for step in leg.steps]
        assert lines == expected[leg.start : leg.end]

    whole, parts = (torch.load(out / n / "checkpoint.pt", weights_only=True) for n in ("straight", "killed"))
    assert list(whole["model"]) == list(parts["model"])
    for name, weights in whole["model"].items():
        torch.testing.assert_close(parts["model"][name], weights, rtol=0, atol=1e-10)
    # The state of the data is one for all, and no rank has left a trace in it.
    loader = tm.Run.from_toml(out / "run.toml").loader()
    loader.seek(24)
    assert parts["loader"] == whole["loader"] == TorchLoader(loader).state_dict()
    assert len(json.dumps(parts["loader"])) <= 256


def batches_of_the_command_line(run):
    command = [sys.executable, "-m", "tokenmill", "batches", str(run), "--digest"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [
        (int(step), stage, digest) for step, stage, digest in (line.split("\t") for line in printed.splitlines())
    ]


def test_checkpoints_that_would_come_too_late_are_rejected_before_training(prove_resume, short_run, tmp_path):
    with pytest.raises(tm.ConfigError, match="must be below the 8 steps of one of 3 legs, got 8; lower it"):
        prove_resume.run_all(short_run, tmp_path, ranks=(2, 4), save_every=8, seed=0)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def proof(prove_resume):
    """Make a proof of 12 steps: no training, the values are invented."""
    steps = [
        prove_resume.Step(step=i, stage="a" if i < 5 else "b", loss=5.5 - 0.2 * i, digest=f"{i:016x}")
        for i in range(12)
    ]
    leg = prove_resume.Leg(ranks=1, micro_batch=8, steps=tuple(steps))
    legs = (
        replace(leg, ranks=2, steps=tuple(steps[:4])),
        replace(leg, ranks=4, steps=tuple(steps[3:9])),
        replace(leg, steps=tuple(steps[6:])),
    )
    other = replace(leg, steps=tuple(replace(step, loss=step.loss + 0.1) for step in steps))
    return prove_resume.Proof(straight=leg, legs=legs, other=other)


PLANNED = [f"{i:016x}" for i in range(12)]


def edited(proof, leg, steps):
    legs = list(proof.legs)
    legs[leg] = replace(legs[leg], steps=tuple(steps))
    return replace(proof, legs=tuple(legs))


def test_a_true_proof_holds(prove_resume, proof):
    prove_resume.check(proof, PLANNED)
    assert proof.difference == 0.0


def test_another_batch_is_found(prove_resume, proof):
    steps = list(proof.legs[1].steps)
    steps[2] = replace(steps[2], digest="f" * 16)
    with pytest.raises(
        tm.TokenmillError, match=r"4 ranks.*expected batch 0+5 in step 5, got batch f{16} in step 5"
    ):
        prove_resume.check(edited(proof, 1, steps), PLANNED)


@pytest.mark.parametrize("loss", [4.5 + 2e-10, 4.5 - 2e-10, float("nan")])
def test_another_loss_is_found(prove_resume, proof, loss):
    steps = list(proof.legs[1].steps)
    steps[2] = replace(steps[2], loss=loss)
    with pytest.raises(
        tm.TokenmillError, match=r"loss of step 5 differs by .* from that of the straight training, more than 1e-10"
    ):
        prove_resume.check(edited(proof, 1, steps), PLANNED)


def test_a_step_that_no_leg_trained_is_found(prove_resume, proof):
    with pytest.raises(tm.TokenmillError, match="steps 4:5 are missing"):
        prove_resume.check(edited(proof, 1, proof.legs[1].steps[2:]), PLANNED)


def test_a_step_that_a_leg_left_out_or_trained_twice_is_found(prove_resume, proof):
    steps = proof.legs[1].steps
    for wrong in ((*steps[:2], *steps[3:]), (*steps[:2], *steps[1:])):
        with pytest.raises(tm.TokenmillError, match=r"expected batch 0+5 in step 5, got"):
            prove_resume.check(edited(proof, 1, wrong), PLANNED)


def test_an_end_that_was_not_reached_is_found(prove_resume, proof):
    with pytest.raises(tm.TokenmillError, match="expected the end at step 12, got 11"):
        prove_resume.check(edited(proof, 2, proof.legs[2].steps[:-1]), PLANNED)


def test_a_straight_training_on_other_batches_is_found(prove_resume, proof):
    with pytest.raises(tm.TokenmillError, match="expected batch other in step 11"):
        prove_resume.check(proof, [*PLANNED[:-1], "other"])


def test_a_line_that_is_being_written_is_not_read(prove_resume, tmp_path):
    file = tmp_path / "log.txt"
    assert prove_resume.read_log(file) == []
    start = json.dumps({"ranks": 2, "micro_batch": 2}) + "\n"
    file.write_text(f"{start}digest 00\nstep 6 of stage a: loss 0.1\ndigest 01\nstep 7 of stage a: lo")
    (leg,) = prove_resume.read_log(file)
    assert (leg.start, leg.end, leg.name) == (6, 7, "2 ranks, micro-batch 2")
    assert leg.steps == (prove_resume.Step(step=6, stage="a", loss=0.1, digest="00"),)


def test_the_picture_shows_all_legs_kills_and_stages(prove_resume, proof):
    drawn = prove_resume.picture(proof)
    tree = ElementTree.fromstring(drawn)
    texts = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    for text in ("kill -9 in step 4,", "resumed at step 3", "kill -9 in step 9,", "resumed at step 6"):
        assert texts.count(text) == 1
    names = [
        text for text in texts if text.startswith(("stage ", "no kill", "another", "1 rank", "2 ranks", "4 ranks"))
    ]
    assert names == [
        "stage a",
        "stage b",
        "no kill: 1 rank, micro-batch 8",
        "another order",
        "2 ranks, micro-batch 8",
        "4 ranks, micro-batch 8",
        "1 rank, micro-batch 8",
    ]
    dots = [element.get("cy") for element in tree.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(dots) == 12 + 4 + 6 + 6
    assert len(set(dots[12:])) == 1  # no difference lies on the floor
    assert "href" not in drawn
    assert drawn.count("http") == 1  # its own name space; nothing is loaded


def test_the_picture_in_the_documents_is_of_the_run_that_they_show():
    drawn = (ROOT / "docs" / "pictures" / "train-tiny.svg").read_text(encoding="utf-8")
    steps = tomllib.loads((ROOT / "examples" / "train_tiny.toml").read_text(encoding="utf-8"))["run"]["steps"]
    title = ElementTree.fromstring(drawn).findtext("{http://www.w3.org/2000/svg}title")
    assert title == f"Killed twice and resumed on other ranks: the same {steps} batches, the same losses"


def test_every_example_has_its_line():
    lines = (ROOT / "examples" / "README.md").read_text(encoding="utf-8").splitlines()
    for example in sorted((ROOT / "examples").glob("*.py")):
        assert len([line for line in lines if line.startswith(f"| [`{example.name}`]")]) == 1, example.name


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_the_full_form_proves_its_claim_at_steps_drawn_by_chance(prove_resume, tmp_path):
    """[R1.a, R1.b, E1.a, M1.b]"""
    command = [sys.executable, str(ROOT / "examples" / "prove_resume.py"), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--picture", str(tmp_path / "p.svg")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    (straight,) = prove_resume.read_log(tmp_path / "out" / "straight" / "log.txt")
    (other,) = prove_resume.read_log(tmp_path / "out" / "other" / "log.txt")
    assert straight.steps[-1].loss < straight.steps[0].loss / 2
    # The tolerance tells other data: hardly a step on another order comes near it.
    assert min(error for _, error in prove_resume.errors(other, straight)) > 1000 * prove_resume.TOLERANCE
    ElementTree.fromstring((tmp_path / "p.svg").read_text(encoding="utf-8"))
