"""Train a small GPT with Lightning; run it again, and it resumes from its last checkpoint.

python examples/lightning_gpt.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import lightning
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint

import tokenmill as tm
from tokenmill.adapters.lightning import RunData
from tokenmill.demo import CORPUS_DIR, TOKENIZER_DIR

RUN = f"""
[run]
steps = 10
global_batch_size = 8
seq_len = 64
[[sources]]
name = "prose"
documents = ["{CORPUS_DIR}/prose.jsonl"]
tokenizer = "{TOKENIZER_DIR}"
"""


class GPT(lightning.LightningModule):
    """A small GPT. Labels are already the next tokens, so the loss does not shift them."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(vocab_size=4096, n_embd=64, n_layer=2, n_head=2, use_cache=False)
        self.model = transformers.GPT2LMHeadModel(config)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        """Return the mean loss over the labels of a micro-batch."""
        logits = self.model(batch["input_ids"], position_ids=batch["position_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    (folder / "run.toml").write_text(RUN, encoding="utf-8")
    saving = ModelCheckpoint(folder / "out", every_n_train_steps=5, save_last=True)
    options = {"accelerator": "cpu", "logger": False, "callbacks": [saving]}
    trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=2, **options)
    data = RunData(tm.Run.from_toml(folder / "run.toml"), micro_batch=4)
    trainer.fit(GPT(), datamodule=data, ckpt_path="last", weights_only=False)
