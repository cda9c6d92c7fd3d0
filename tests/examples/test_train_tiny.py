from __future__ import annotations

import json
import runpy
from itertools import islice
from pathlib import Path

import pytest
import torch

import tokenmill as tm
from tokenmill.loader import DIGEST_ARRAYS
from tokenmill.torch import TorchLoader

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


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("step", [0, 8])
@pytest.mark.usefixtures("float64")
def test_loss_gradient_and_digest_do_not_depend_on_the_micro_batch(train_tiny, run, step, micro_batch):
    """[P1.d]"""

    def results(micro_batch):
        loader = run.loader(micro_batch=micro_batch, arrays=(*DIGEST_ARRAYS, "num_loss_tokens"))
        loader.seek(step)
        torch.manual_seed(0)
        model = train_tiny.TinyGPT(vocab_size=300, max_len=64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = islice(TorchLoader(loader), run.plan().at(step).global_batch_size // micro_batch)
        loss, digest = train_tiny.train_step(model, optimizer, batches)
        assert loader.step == step + 1
        return loss, digest, torch.nn.utils.parameters_to_vector(p.grad for p in model.parameters())

    whole, cut = results(8), results(micro_batch)
    assert cut[1] == whole[1]
    assert cut[0] == pytest.approx(whole[0], abs=1e-13)
    torch.testing.assert_close(cut[2], whole[2], rtol=0, atol=1e-14)
    assert whole[2].abs().max() > 1e-3


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


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(train_tiny, tmp_path):
    file = tmp_path / "checkpoint.pt"
    train_tiny.save(file, {"loader": {"step": 3}})
    with pytest.raises(Exception, match="generator"):
        train_tiny.save(file, {"loader": (number for number in range(3))})
    assert torch.load(file, weights_only=True) == {"loader": {"step": 3}}


def test_the_same_command_again_trains_no_step_twice(train_tiny, short_run, tmp_path, monkeypatch):
    """[R1.c]"""
    for until in ("2", "2", "3"):
        monkeypatch.setattr("sys.argv", ["", str(short_run), "--out", str(tmp_path), "--until", until])
        train_tiny.main()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["start"] if "start" in line else ("step", line["step"]) for line in lines] == [
        *(0, ("step", 0), ("step", 1)),
        *(2, 2, ("step", 2)),
    ]


def test_a_checkpoint_of_another_plan_is_refused(train_tiny, short_run, tmp_path, monkeypatch):
    other = short_run.with_name("other.toml")
    other.write_text(short_run.read_text().replace("prose = 0.7, code = 0.3", "prose = 0.6, code = 0.4"))
    arguments = ["--out", str(tmp_path), "--until", "2"]
    monkeypatch.setattr("sys.argv", ["", str(short_run), *arguments])
    train_tiny.main()
    monkeypatch.setattr("sys.argv", ["", str(other), *arguments])
    with pytest.raises(tm.ResumeError, match="first difference: stages"):
        train_tiny.main()


def test_its_own_config_runs_from_a_clean_checkout(train_tiny, tmp_path, monkeypatch):
    """[F1.a] Nothing is prepared before; what is prepared stands where git does not look."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "src").symlink_to(ROOT / "src")
    config = tmp_path / "examples" / "train_tiny.toml"
    config.write_bytes((ROOT / "examples" / "train_tiny.toml").read_bytes())
    monkeypatch.setattr("sys.argv", ["", str(config), "--out", str(tmp_path / "out"), "--until", "1"])
    train_tiny.main()
    assert len((tmp_path / "out" / "log.jsonl").read_text().splitlines()) == 2
    assert sorted(path.name for path in config.parent.iterdir()) == [".tokenmill", "train_tiny.toml"]
    assert ".tokenmill/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("name", ["train_tiny", "prove_resume"])
def test_what_is_wrong_is_said_in_one_line(name, tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text("[run]\nsteps = 1\nglobal_batch_size = 8\nseq_len = 8\n")
    words = [str(tmp_path / "run.toml")] if name == "train_tiny" else ["--run", str(tmp_path / "run.toml")]
    monkeypatch.setattr("sys.argv", ["", *words, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert str(caught.value).startswith("error: ")
    assert "sources" in str(caught.value)
