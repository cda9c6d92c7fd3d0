"""The examples for frameworks run unchanged, from any directory, with nothing but a folder."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 10


def state_of_trainer(folder):
    kept = json.loads((folder / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return kept["stateful_callbacks"]["TokenmillState"]["attributes"]["data"]


def state_of_lightning(folder):
    return torch.load(folder / "out" / "last.ckpt", weights_only=False)["RunData"]


def state_of_jax(folder):
    return json.loads((folder / "state.json").read_text())


def state_of_loop(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def state_of_kempnerforge(folder):
    state = torch.load(folder / "checkpoint.pt", weights_only=True)["loader"]
    return {"step": state["batches"] // 2}  # batches per step


def state_of_torchtitan(folder):
    state = torch.load(folder / "checkpoint.pt", weights_only=True)["dataloader"]
    return json.loads(state["dataloader_state"])


FILES = {
    "nanochat_base.py": state_of_loop,
    "astrai_sft.py": state_of_loop,
    "kempnerforge_phases.py": state_of_kempnerforge,
    "torchtitan_stages.py": state_of_torchtitan,
    "transformers_trainer.py": state_of_trainer,
    "trl_sft.py": state_of_trainer,
    "trl_dpo.py": state_of_trainer,
    "lightning_gpt.py": state_of_lightning,
    "jax_train.py": state_of_jax,
}


@pytest.mark.parametrize("name", FILES)
def test_an_example_is_short(name):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= 70


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Make an empty folder the working directory; compute in one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.set_num_threads(before)


# Warnings of Lightning about itself and about a first run.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*no last checkpoint available.*")
@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*")
@pytest.mark.parametrize("name", FILES)
def test_an_example_trains_all_steps_and_saves_the_position_of_the_data(name, here, monkeypatch):
    folder = here / "made"
    folder.mkdir()
    monkeypatch.setattr(sys, "argv", [name, str(folder)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert FILES[name](folder)["step"] == STEPS
    assert sorted(path.name for path in here.iterdir()) == ["made"]  # nothing is left beside it


@pytest.mark.deep
@pytest.mark.parametrize("name", FILES)
def test_an_example_runs_as_a_program_and_again_on_what_it_has_saved(name, tmp_path):
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / name), str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        assert FILES[name](tmp_path)["step"] == STEPS


@pytest.mark.slow
def test_the_fsdp_example_resumes_on_another_number_of_ranks(tmp_path):
    lines = []
    for ranks in (2, 1):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [sys.executable, *command, str(EXAMPLES / "fsdp_gpt.py"), str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        lines += done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *(f"step {step} on 2 ranks" for step in range(5)),
        *(f"step {step} on 1 ranks" for step in range(5, 10)),
    ]
    losses = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert losses == sorted(losses, reverse=True)
