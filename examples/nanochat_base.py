"""Train on live text as nanochat's base_train does; run it again, also with another batch size, and it resumes.

python examples/nanochat_base.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tokenmill.adapters.nanochat import tokenizing_distributed_data_loader_with_state_bos_bestfit
from tokenmill.demo import CORPUS_DIR

B, T, STEPS = 4, 128, 10


def main(folder: Path) -> None:
    """Train, or resume, in a folder."""
    data, saved = folder / "base_data", folder / "checkpoint.pt"
    if not data.exists():  # nanochat's layout: Parquet files, of which the last one is for validation
        data.mkdir()
        lines = (CORPUS_DIR / "prose.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        for number in range(3):
            table = pa.table({"text": texts[number::3]})
            pq.write_table(table, data / f"shard_{number:05d}.parquet", row_group_size=32)
    torch.manual_seed(0)
    model = torch.nn.Embedding(259, 259)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    checkpoint = torch.load(saved, weights_only=True) if saved.exists() else {"step": 0, "loader": None}
    if saved.exists():
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(
        "bytes", B, T, "train", device="cpu", data_dir=data, resume_state_dict=checkpoint["loader"]
    )
    x, y, state = next(loader)
    for step in range(checkpoint["step"], STEPS):
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
        x, y, state = next(loader)  # the state resumes with this batch
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({"step": step + 1, "loader": state, **parts}, saved)
    loader.close()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
