"""A real Trainer of Lightning: the same batches and losses, straight and resumed in mid-epoch, on any ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tokenmill.adapters.lightning import RunData
from tokenmill.errors import ConfigError, ResumeError, StoreMissingError
from tokenmill.live import LiveLoader, LiveOptions, open_live
from tokenmill.loader import LoaderOptions

# What Lightning says of a small machine, and of its own use of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed.*"),
]

STEPS, BATCH, SEQ_LEN, VOCAB = 6, 4, 16, 60


@pytest.fixture
def make_run(run_over_web):
    """Make a run over a store of short documents, several in a row; `more` is added to its config."""

    def make(name="run", more="", **said):
        numbers = {"steps": STEPS, "batch": BATCH, "seq_len": SEQ_LEN, **said}
        return run_over_web(name, more, vocab_size=VOCAB, **numbers)

    return make


class Bigrams(lightning.LightningModule):
    """Learns which token follows which, and keeps what it was given."""

    def __init__(self, vocab_size=VOCAB):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(vocab_size, vocab_size)
        self.dropout = torch.nn.Dropout(0.1)  # so that a lost generator state shows
        self.seen = []

    def training_step(self, batch, index):
        logits = self.dropout(self.table(batch["input_ids"]))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        self.seen.append((index, {name: tensor.tolist() for name, tensor in batch.items()}))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def trained(folder, data, *, resume=None, model=None, **options):
    model = model or Bigrams()
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    values = {"max_epochs": 1, "accumulate_grad_batches": 2, "accelerator": "cpu", "devices": 1, "logger": False}
    values |= {"enable_progress_bar": False, "enable_model_summary": False, "callbacks": [saving]}
    trainer = lightning.Trainer(**(values | options))
    torch.manual_seed(5)
    # weights_only: Lightning's own state of loops is more than weights.
    trainer.fit(model, datamodule=data, ckpt_path=resume and str(resume), weights_only=False if resume else None)
    return trainer, model


def test_the_batches_are_those_of_the_run_in_order(make_run, tmp_path):
    run = make_run()
    trainer, model = trained(tmp_path / "out", RunData(run, micro_batch=2))
    expected = [{name: array.tolist() for name, array in batch.items()} for batch in run.loader(micro_batch=2)]
    assert model.seen == list(enumerate(expected))
    assert trainer.global_step == STEPS


def test_a_checkpoint_in_mid_epoch_resumes_with_the_same_batches_and_weights(make_run, tmp_path):
    """[R2.a] Nothing is skipped through, and Lightning's own count of batches goes on."""
    run = make_run()
    _, straight = trained(tmp_path / "out", RunData(run, micro_batch=2), model=without_dropout())
    for step in (1, 4):
        checkpoint = tmp_path / "out" / f"step={step}.ckpt"
        kept = torch.load(checkpoint, weights_only=False)["RunData"]
        assert (kept["step"], len(json.dumps(kept)) <= 200) == (step, True)
        trainer, resumed = trained(
            tmp_path / f"from{step}", RunData(run, micro_batch=2), resume=checkpoint, model=without_dropout()
        )
        assert resumed.seen == straight.seen[2 * step :]
        assert trainer.global_step == STEPS
        assert resumed.table.weight.tolist() == straight.table.weight.tolist()


def without_dropout():
    """Make a model without chance: Lightning does not keep the state of generators."""
    model = Bigrams()
    model.dropout = torch.nn.Identity()
    return model


def test_a_checkpoint_of_a_resumed_run_resumes_as_well(make_run, tmp_path):
    run = make_run()
    _, straight = trained(tmp_path / "out", RunData(run, micro_batch=2))
    trained(tmp_path / "second", RunData(run, micro_batch=2), resume=tmp_path / "out" / "step=2.ckpt")
    data = RunData(run, micro_batch=2)
    _, third = trained(tmp_path / "third", data, resume=tmp_path / "second" / "step=4.ckpt")
    assert third.seen == straight.seen[8:]
    assert data.state_dict()["step"] == STEPS


@pytest.mark.parametrize(("micro_batch", "accumulated"), [(4, 1), (1, 4)])
def test_a_checkpoint_resumes_with_another_micro_batch(make_run, tmp_path, micro_batch, accumulated):
    """Lightning counts micro-batches: it must neither end too early nor wait for more than there are."""
    run = make_run()
    _, straight = trained(tmp_path / "out", RunData(run, micro_batch=2))
    trainer, model = trained(
        tmp_path / "again",
        RunData(run, micro_batch=micro_batch),
        resume=tmp_path / "out" / "step=4.ckpt",
        accumulate_grad_batches=accumulated,
    )
    rows = [row for _, batch in straight.seen[8:] for row in batch["input_ids"]]
    assert [row for _, batch in model.seen for row in batch["input_ids"]] == rows
    assert [index for index, _ in model.seen] == list(range(4 * accumulated, 6 * accumulated))
    assert trainer.global_step == STEPS


@pytest.mark.parametrize("ending", [{"max_steps": 2}, {"limit_train_batches": 4}])
def test_a_leg_that_ended_early_goes_on_with_the_next_batch(make_run, tmp_path, ending):
    """[R1.c] Lightning takes the epoch for done: it would train nothing, and say so nowhere."""
    run = make_run()
    _, straight = trained(tmp_path / "out", RunData(run, micro_batch=2), model=without_dropout())
    options = {"callbacks": [ModelCheckpoint(tmp_path / "leg", filename="end", save_top_k=-1)]}
    first, _ = trained(tmp_path, RunData(run, micro_batch=2), model=without_dropout(), **options, **ending)
    first.save_checkpoint(tmp_path / "leg" / "after.ckpt")
    for name in ("end", "after"):
        checkpoint = tmp_path / "leg" / f"{name}.ckpt"
        trainer, rest = trained(
            tmp_path, RunData(run, micro_batch=2), resume=checkpoint, model=without_dropout(), **options
        )
        assert rest.seen == straight.seen[4:]
        assert (trainer.global_step, trainer.current_epoch) == (STEPS, 1)
        assert rest.table.weight.tolist() == straight.table.weight.tolist()


def test_a_run_that_ended_goes_on_where_it_was_made_longer_and_only_there(make_run, tmp_path):
    trained(tmp_path / "out", RunData(make_run(), micro_batch=2))
    checkpoint = tmp_path / "out" / f"step={STEPS}.ckpt"
    _, nothing = trained(tmp_path / "again", RunData(make_run(), micro_batch=2), resume=checkpoint)
    assert nothing.seen == []
    longer = make_run("longer", steps=STEPS + 2)
    trainer, rest = trained(tmp_path / "longer", RunData(longer, micro_batch=2), resume=checkpoint)
    expected = [{name: array.tolist() for name, array in batch.items()} for batch in longer.loader(micro_batch=2)]
    assert rest.seen == list(enumerate(expected))[2 * STEPS :]
    assert trainer.global_step == STEPS + 2


def test_a_state_without_a_checkpoint_starts_a_new_epoch_from_there(make_run, tmp_path):
    run = make_run()
    _, straight = trained(tmp_path / "out", RunData(run, micro_batch=2))
    data = RunData(run, micro_batch=2)
    data.load_state_dict(torch.load(tmp_path / "out" / "step=3.ckpt", weights_only=False)["RunData"])
    assert data.state_dict()["step"] == 3
    trainer, model = trained(tmp_path / "again", data)
    assert [batch for _, batch in model.seen] == [batch for _, batch in straight.seen[6:]]
    assert (trainer.global_step, trainer.num_training_batches) == (3, 6)


def test_a_state_loaded_while_training_moves_the_loader_that_there_is(make_run, tmp_path):
    run = make_run()
    data = RunData(run, micro_batch=2)
    trained(tmp_path / "out", data, max_steps=2)
    state = data.state_dict()
    assert state["step"] == 2
    data.loader.seek(5)
    data.load_state_dict(state)
    assert data.loader.step == 2


def test_live_text_is_given_by_a_function_and_resumes_as_well(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "document {i} of the mill"}}\n' for i in range(300)))

    def loader(rank, world_size):
        source = open_live(tmp_path / "a.jsonl", tokenizer="bytes", options=LiveOptions(seq_len=SEQ_LEN))
        share = {"rank": rank, "world_size": world_size, "micro_batch": 2}
        return LiveLoader(source, steps=4, global_batch_size=BATCH, options=LoaderOptions(threads=0), **share)

    _, straight = trained(tmp_path / "out", RunData(loader), model=Bigrams(260))
    _, resumed = trained(
        tmp_path / "again", RunData(loader), model=Bigrams(260), resume=tmp_path / "out" / "step=3.ckpt"
    )
    assert len(straight.seen) == 8
    assert resumed.seen == straight.seen[6:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 1}, r"accumulate_grad_batches must be 2.*got 1; say that"),
        ({"max_epochs": 3}, r"max_epochs must be 1.*got 3; say max_epochs=1"),
        ({"max_epochs": None, "max_steps": STEPS + 1}, r"max_epochs must be 1.*say max_epochs=1"),
    ],
)
def test_a_trainer_that_contradicts_the_run_is_refused(make_run, tmp_path, options, message):
    """[A1.a]"""
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path / "out", RunData(make_run(), micro_batch=2), **options)


def test_a_loader_of_another_rank_is_refused(make_run, tmp_path):
    """[A1.a]"""
    run = make_run()
    with pytest.raises(ConfigError, match=r"must be that of rank 0 of 1, got rank 1 of 2; hand on"):
        trained(tmp_path / "out", RunData(lambda _rank, _size: run.loader(rank=1, world_size=2, micro_batch=2)))


def test_a_checkpoint_of_another_plan_is_refused(make_run, tmp_path):
    trained(tmp_path / "out", RunData(make_run(), micro_batch=2), max_steps=2)
    other = make_run("other", seed=4)
    with pytest.raises(ResumeError, match=r"stages\[0\].seed 3 -> 4"):
        trained(tmp_path / "again", RunData(other, micro_batch=2), resume=tmp_path / "out" / "step=2.ckpt")


RANKS = """
import json, os, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from tokenmill.run.run import Run
from test_lightning import (
    BATCH, SEQ_LEN, Bigrams, LiveLoader, LiveOptions, LoaderOptions, RunData, open_live, trained
)

folder = Path(sys.argv[2])
run = Run.from_toml(folder / "run.toml")

def live(rank, world_size):
    source = open_live(folder / "a.jsonl", tokenizer="bytes", options=LiveOptions(seq_len=SEQ_LEN))
    share = {"rank": rank, "world_size": world_size, "micro_batch": 1}
    return LiveLoader(source, steps=3, global_batch_size=BATCH, options=LoaderOptions(threads=0), **share)

def train(name, data, resume=None, **options):
    options = {"devices": 2, "strategy": "ddp", **options}
    trainer, model = trained(folder / name, data, resume=resume and folder / resume, model=Bigrams(260), **options)
    return [batch["input_ids"] for _, batch in model.seen]

out = {"two": train("two", RunData(run, micro_batch=1))}
out["two-again"] = train("two-again", RunData(run, micro_batch=1), resume="two/step=3.ckpt")
out["live"] = train("live", RunData(live))
out["live-again"] = train("live-again", RunData(live), resume="live/step=2.ckpt")
(folder / f"rank{os.environ.get('LOCAL_RANK', 0)}.json").write_text(json.dumps(out))
"""


@pytest.mark.deep
def test_two_ranks_train_on_the_batches_of_one_and_no_sampler_is_put_between(make_run, tmp_path):
    run = make_run()
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "document {i} of the mill"}}\n' for i in range(300)))
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "ranks.py"), str(Path(__file__).parent), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    expected = [batch["input_ids"].tolist() for batch in run.loader(micro_batch=1)]
    for name, first in (("two", 0), ("two-again", 3)):
        together = [
            ids for step in range(STEPS - first) for rank in ranks for ids in rank[name][2 * step : 2 * step + 2]
        ]
        assert together == expected[BATCH * first :]
    for rank in ranks:
        assert len(rank["live"]) == 6
        assert rank["live-again"] == rank["live"][4:]
    # What two ranks saved, one goes on with.
    _, alone = trained(
        tmp_path / "one",
        RunData(run, micro_batch=1),
        model=Bigrams(260),
        resume=tmp_path / "two" / "step=4.ckpt",
        accumulate_grad_batches=4,
    )
    assert [batch["input_ids"] for _, batch in alone.seen] == expected[BATCH * 4 :]


class Validated(Bigrams):
    """Sums the loss over the labels of all validation batches."""

    def on_validation_epoch_start(self):
        self.total, self.labels, self.counted = 0.0, 0, 0

    def validation_step(self, batch, index):  # noqa: ARG002 - as Lightning calls it
        logits, labels = self.table(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        self.total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        self.labels += int((labels >= 0).sum())
        self.counted += int(batch["num_loss_tokens"])


def test_a_model_is_validated_on_the_whole_eval_and_trained_on_the_same_batches(make_run, tmp_path):
    run = make_run(more='[[evals]]\nname = "val"\nsource = "web"\ndocuments = "0:13"\n')
    _, straight = trained(tmp_path / "a", RunData(run, micro_batch=2), model=without_dropout())
    model = Validated()
    model.dropout = torch.nn.Identity()
    data = RunData(run, micro_batch=2, evals=run.evals["val"])
    trained(tmp_path / "b", data, model=model, num_sanity_val_steps=0)
    assert model.seen == straight.seen
    assert model.labels == model.counted == run.evals["val"].held.trained
    total = 0.0
    for batch in run.evals["val"].loader(micro_batch=5):
        logits = model.table(torch.from_numpy(batch["input_ids"])).flatten(0, 1)
        labels = torch.from_numpy(batch["labels"]).flatten()
        total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
    assert model.total / model.labels == pytest.approx(total / model.labels, abs=1e-6)


def test_stores_and_evals_by_name_are_validated_on_as_evals_are(make_run, tmp_path):
    run = make_run(more='[[evals]]\nname = "val"\nstore = "web"\n')
    held = run.evals["val"].held.trained
    store = run.stores["web"]
    for evals in (run.evals, [run.evals["val"]], store, store.path, str(store.path)):
        model = Validated()
        trained(tmp_path / "out", RunData(run, micro_batch=2, evals=evals), model=model, num_sanity_val_steps=0)
        assert model.labels == model.counted == held


def test_an_eval_that_cannot_be_read_is_refused_before_the_training(make_run, tmp_path):
    run = make_run()
    with pytest.raises(StoreMissingError, match=r"no store at this path: .*nope"):
        RunData(run, evals=tmp_path / "nope")
    with pytest.raises(ConfigError, match=r"evals: must be an eval of a run or a store, got a run.*run.evals"):
        RunData(run, evals=run)
    with pytest.raises(ConfigError, match=r"evals: must be evals of a run or stores, got \{'val': 7\}"):
        RunData(run, evals={"val": 7})
    with pytest.raises(ConfigError, match=r"evals: a store must go with a run as run"):
        RunData(lambda rank, size: run.loader(rank=rank, world_size=size), evals=run.stores["web"])
