from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

import tokenmill as tm
from tokenmill.torch import torch_loader

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(short_run):
    return tm.Run.from_toml(short_run)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Gradients(torch.optim.SGD):
    """An optimizer that keeps the gradients of each step and changes nothing."""

    found: list[torch.Tensor]

    def step(self):
        parameters = self.param_groups[0]["params"]
        self.found.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))


def trained(train_tiny, run, checkpoint, capsys, micro_batch=8, save_every=10):
    """Train a model of fixed first weights; return steps, stages and losses as printed."""
    torch.manual_seed(0)
    model = train_tiny.TinyGPT(vocab_size=259, max_len=64, width=16, layers=1)
    loader = torch_loader(run, micro_batch=micro_batch, arrays=train_tiny.ARRAYS)
    train_tiny.train(run, loader, model, checkpoint, save_every)
    lines = re.findall(r"^step (\d+) of stage (\w+): loss (\S+)$", capsys.readouterr().out, re.MULTILINE)
    return [(int(step), stage, float(loss)) for step, stage, loss in lines]


def test_it_is_read_at_one_sitting():
    assert len((ROOT / "examples" / "train_tiny.py").read_text(encoding="utf-8").splitlines()) <= 80


@pytest.mark.usefixtures("float64")
def test_loss_and_gradient_do_not_depend_on_the_micro_batch(train_tiny, run, tmp_path, capsys, monkeypatch):
    """[P1.d]"""
    found = {}
    for micro_batch in (8, 4, 1):
        Gradients.found = []
        monkeypatch.setattr(torch.optim, "AdamW", lambda parameters: Gradients(parameters, lr=0.1))
        losses = trained(train_tiny, run, tmp_path / f"{micro_batch}.pt", capsys, micro_batch)
        assert [(step, stage) for step, stage, _ in losses] == [
            *((step, "base") for step in range(8)),
            *((step, "long") for step in range(8, 24)),
        ]
        found[micro_batch] = torch.tensor([loss for _, _, loss in losses]), torch.stack(Gradients.found)
    for micro_batch in (4, 1):
        torch.testing.assert_close(found[micro_batch][0], found[8][0], rtol=0, atol=1e-13)
        torch.testing.assert_close(found[micro_batch][1], found[8][1], rtol=0, atol=1e-14)
    assert found[8][1].abs().amax(1).min() > 1e-3


@pytest.mark.usefixtures("float64")
def test_a_document_of_a_row_does_not_see_another(train_tiny):
    """[P1.b]"""
    torch.manual_seed(0)
    model = train_tiny.TinyGPT(vocab_size=16, max_len=8)
    ids = torch.arange(8)[None]
    positions, documents = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]]), torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]])
    before = model(ids, positions, documents)
    changed = ids.clone()
    changed[0, 4] = 15
    after = model(changed, positions, documents)
    same = (before == after).all(-1)[0]
    # Nor does a token see those after it.
    assert same.tolist() == [True, True, True, True, False, False, False, True]


def test_a_checkpoint_resumes_and_trains_no_step_twice(train_tiny, run, tmp_path, capsys, monkeypatch):
    """[R1.c]"""
    straight = trained(train_tiny, run, tmp_path / "straight.pt", capsys)
    checkpoint = tmp_path / "killed.pt"
    saves = []

    def kill(states, file, save=torch.save):
        saves.append(states["loader"]["step"])
        if len(saves) == 2:
            file.write_bytes(b"half")
            raise KeyboardInterrupt
        save(states, file)

    monkeypatch.setattr(torch, "save", kill)
    with pytest.raises(KeyboardInterrupt):
        trained(train_tiny, run, checkpoint, capsys, save_every=5)
    assert saves == [5, 10]
    capsys.readouterr()
    monkeypatch.undo()
    assert trained(train_tiny, run, checkpoint, capsys, save_every=5) == straight[5:]
    assert trained(train_tiny, run, checkpoint, capsys) == []


def test_a_checkpoint_of_another_plan_is_rejected(train_tiny, run, short_run, tmp_path, capsys):
    other = short_run.with_name("other.toml")
    other.write_text(short_run.read_text().replace("prose = 0.7, code = 0.3", "prose = 0.6, code = 0.4"))
    trained(train_tiny, run, tmp_path / "checkpoint.pt", capsys)
    with pytest.raises(tm.ResumeError, match="first difference: stages"):
        trained(train_tiny, tm.Run.from_toml(other), tmp_path / "checkpoint.pt", capsys)


def test_its_own_config_runs_from_a_clean_checkout(tmp_path, monkeypatch, capsys):
    """[F1.a] Nothing is prepared before, and git ignores what is prepared."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "src").symlink_to(ROOT / "src")
    config = tmp_path / "examples" / "train_tiny.toml"
    text = (ROOT / "examples" / "train_tiny.toml").read_text(encoding="utf-8")
    for long, short in (("steps = 240", "steps = 3"), ("step = 100", "step = 1"), ("step = 180", "step = 2")):
        assert long in text
        text = text.replace(long, short)
    config.write_text(text.replace("ramp_steps = 30", "ramp_steps = 1"), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["", str(config), str(tmp_path / "out")])
    runpy.run_path(str(ROOT / "examples" / "train_tiny.py"), run_name="__main__")
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"step {step} of stage {stage}" for step, stage in enumerate(["base", "long", "anneal"])
    ]
    assert (tmp_path / "out" / "checkpoint.pt").exists()
    assert sorted(path.name for path in config.parent.iterdir()) == [".tokenmill", "train_tiny.toml"]
    assert ".tokenmill/" in (ROOT / ".gitignore").read_text().splitlines()


def test_a_wrong_config_of_the_proof_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text("[run]\nsteps = 1\nglobal_batch_size = 8\nseq_len = 8\n")
    monkeypatch.setattr("sys.argv", ["", "--run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "examples" / "prove_resume.py"), run_name="__main__")
    assert str(caught.value).startswith("error: ")
    assert "sources" in str(caught.value)
