"""Train on the data stages of a torchtitan config with the loader that its trainer builds; run it again to resume.

python examples/torchtitan_stages.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from pathlib import Path

import torch

import tokenmill as tm
from tokenmill.adapters.torchtitan import build_dataloader
from tokenmill.demo import CORPUS_DIR

CONFIG = """
[training]
steps = 10
local_batch_size = 4
seq_len = 128

[[training.data_stages]]
name = "pretrain"
start_step = 0
end_step = 6
dataset_type = "nanoset"
dataset_folders = ["prose", "code"]
dataset_weights = [0.8, 0.2]
seq_len = 64

[[training.data_stages]]
name = "long"
start_step = 6
dataset_type = "nanoset"
dataset_folders = ["prose", "code"]
dataset_weights = [0.4, 0.6]
seq_len = 128
"""


def main(folder: Path) -> None:
    """Train, or resume, in a folder."""
    for name in ("prose", "code"):
        tm.prepare(CORPUS_DIR / f"{name}.jsonl", out=folder / name, tokenizer="bytes", progress=False)
    config = tomllib.loads(CONFIG) | {"job": {"config_file": str(folder / "titan.toml")}}  # paths start there
    loader = build_dataloader(dp_world_size=1, dp_rank=0, tokenizer=None, job_config=config)
    torch.manual_seed(0)
    model = torch.nn.Embedding(259, 259)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    parts, saved = {"model": model, "optimizer": optimizer, "dataloader": loader}, folder / "checkpoint.pt"
    if saved.exists():
        for name, state in torch.load(saved, weights_only=True).items():
            parts[name].load_state_dict(state)
    for inputs, labels in loader:
        logits = model(inputs["input"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {loader.step - 1}: loss {loss.item():.4f}, rows of {labels.shape[1]} tokens")
        torch.save({name: part.state_dict() for name, part in parts.items()}, saved)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
