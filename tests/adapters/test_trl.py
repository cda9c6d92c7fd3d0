"""A real SFTTrainer of TRL fed with our packed batches: labels and positions as they are, exact resume."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
import trl

import tokenmill as tm
from tokenmill.adapters.torch import to_torch
from tokenmill.adapters.transformers import to_transformers
from tokenmill.adapters.trl import DPOTrainer, SFTTrainer
from tokenmill.demo import TOKENIZER_DIR
from tokenmill.errors import ConfigError

VOCAB, SEQ_LEN, BATCH = 4096, 48, 4


class SFT(SFTTrainer):
    """What a user imports, and a record of what every training step was given."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        batch = {name: tensor.numpy().tobytes() for name, tensor in inputs.items()}
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.seen = [*getattr(self, "seen", []), (batch, int(num_items_in_batch), loss.item())]
        return loss


@pytest.fixture
def run(tmp_path):
    """Prepare questions and answers, of which only the answers are trained on, as a run of four steps."""
    lines = [
        f'{{"prompt": "How much is {n} and {n}?", "response": "{n} and {n} make {2 * n}."}}\n' for n in range(60)
    ]
    (tmp_path / "sums.jsonl").write_text("".join(lines))
    tm.prepare(
        tmp_path / "sums.jsonl",
        out=tmp_path / "sums",
        tokenizer=str(TOKENIZER_DIR),
        recipe="instruction",
        workers=1,
        progress=False,
    )
    (tmp_path / "run.toml").write_text(
        f"[run]\nsteps = 4\nglobal_batch_size = {BATCH}\nseq_len = {SEQ_LEN}\n"
        '[[sources]]\nname = "sums"\nstore = "sums"\n'
    )
    return tm.Run.from_toml(tmp_path / "run.toml")


def tiny_model():
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def trained(folder, run, *, resume=None, **options):
    values = {"per_device_train_batch_size": 2, "save_steps": 2, "logging_steps": 1, "learning_rate": 0.01}
    values |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "bf16": False}
    values |= {"gradient_checkpointing": False}
    trainer = SFT(
        model=tiny_model(),
        args=trl.SFTConfig(output_dir=str(folder), **(values | options)),
        train_dataset=run,
        processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR),
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def test_the_packed_batches_reach_the_model_as_they_are_and_the_loss_is_that_of_their_labels(run, tmp_path):
    trainer = trained(tmp_path / "out", run, save_strategy="no", max_steps=1)
    batches = [to_transformers(to_torch(batch)) for batch in run.loader(micro_batch=2)][:2]
    assert [seen for seen, _, _ in trainer.seen] == [
        {name: tensor.numpy().tobytes() for name, tensor in batch.items()} for batch in batches
    ]
    batch, model = run.loader(micro_batch=BATCH)[0], tiny_model()
    total, count = 0.0, int((batch["labels"] >= 0).sum())
    assert 0 < count < batch["labels"].size // 2  # of the answers alone
    for ids, labels, documents in zip(batch["input_ids"], batch["labels"], batch["doc_ids"], strict=True):
        edges = [0, *(np.flatnonzero(np.diff(documents)) + 1).tolist(), documents.size]
        assert len(edges) > 2  # several conversations in a row
        for begin, end in pairwise(edges):
            logits = model(torch.from_numpy(ids[None, begin:end])).logits[0]
            targets = torch.from_numpy(labels[begin:end])
            total += torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").item()
    assert [number for _, number, _ in trainer.seen] == [count, count]
    assert sum(loss for _, _, loss in trainer.seen) == pytest.approx(total / count, rel=1e-5)


def test_a_checkpoint_resumes_with_the_same_batches_losses_and_weights(run, tmp_path):
    """[R2.a]"""
    straight = trained(tmp_path / "out", run)
    resumed = trained(tmp_path / "again", run, resume=tmp_path / "out" / "checkpoint-2")
    assert len(straight.seen) == 8
    assert resumed.seen == straight.seen[4:]
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor)


def test_an_eval_honours_masks_and_its_loss_is_that_of_a_hand_computation(run, tmp_path):
    evals = [{"name": "val", "source": "sums", "documents": "0:9"}]
    tables = {"run": {"steps": 2, "global_batch_size": BATCH, "seq_len": SEQ_LEN}, "evals": evals}
    tables["sources"] = [{"name": "sums", "store": "sums"}]
    run = tm.Run.from_tables(tables, folder=run.folder)
    trainer = SFT(
        model=tiny_model(),
        args=trl.SFTConfig(
            output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False, per_device_train_batch_size=2
        ),
        train_dataset=run,
        eval_dataset=run.evals["val"],
        processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR),
    )
    metrics, model, total, count = trainer.evaluate(), tiny_model().eval(), 0.0, 0
    store = run.stores["sums"]
    for number in range(9):
        record = store.fetch_record(number)
        ids, trained_on = torch.from_numpy(record["sequence"].astype(np.int64)), record["loss_mask"] == 1
        with torch.no_grad():
            logs = torch.log_softmax(model(ids[None]).logits[0, :-1], dim=-1)
        wanted = torch.from_numpy(trained_on[1:])
        total -= logs.gather(1, ids[1:, None])[:, 0][wanted].sum().item()
        count += int(wanted.sum())
    assert metrics["eval_labels"] == count
    assert metrics["eval_loss"] == pytest.approx(total / count, abs=1e-5)


def test_what_is_no_run_and_a_run_of_other_data_are_refused_with_the_way_out(run, tmp_path):
    with pytest.raises(
        ConfigError, match=r"train_dataset: must be a Run .*, got 'run.toml'; open .* Run.from_toml"
    ):
        trained(tmp_path, "run.toml")
    with pytest.raises(
        ConfigError, match=r"stores must be of kind dpo for this Trainer, got 'sums' of sft; prepare"
    ):
        DPOTrainer(
            model=tiny_model(),
            args=trl.DPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False),
            train_dataset=run,
        )


def test_an_eval_of_other_data_is_refused_before_the_training(run, tmp_path):
    pair = json.dumps({"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"})
    (tmp_path / "pairs.jsonl").write_text(f"{pair}\n{pair}\n")
    tm.prepare(
        tmp_path / "pairs.jsonl", out=tmp_path / "pairs", tokenizer=str(TOKENIZER_DIR), recipe="dpo", progress=False
    )
    with pytest.raises(ConfigError, match=r"eval_dataset: stores must be of kind seq or sft .*, got 'eval' of dpo"):
        SFT(
            model=tiny_model(),
            args=trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=2),
            train_dataset=run,
            eval_dataset=tmp_path / "pairs",
        )
