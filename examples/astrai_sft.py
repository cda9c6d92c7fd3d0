"""Fine-tune on masked answers through AstrAI's pipeline, dataset and sampler; run it again, and it resumes.

python examples/astrai_sft.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from tokenmill.adapters.astrai import DatasetFactory, Pipeline, ResumableDistributedSampler

RECIPE = {
    "input": {
        "sections": [
            {"field": "prompt", "action": "mask", "add_special_tokens": True},
            {"field": "response", "action": "train"},
        ]
    },
    "output": {"storage_format": "bin", "dtype": {"loss_mask": "bool"}},
}
BATCH, STEPS = 8, 10


def main(folder: Path) -> None:
    """Train, or resume, in a folder."""
    store, saved = folder / "sft", folder / "checkpoint.pt"
    if not store.exists():
        pairs = [{"prompt": f"How much is {n} and {n}? ", "response": f"That makes {2 * n}."} for n in range(200)]
        (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
        Pipeline(RECIPE, [folder / "sums.jsonl"], store, "bytes").run()
    torch.manual_seed(0)
    model = torch.nn.Embedding(259, 259)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    parts, step = {"model": model, "optimizer": optimizer}, 0
    if saved.exists():
        checkpoint = torch.load(saved, weights_only=True)
        step = checkpoint.pop("step")
        for name, state in checkpoint.items():
            parts[name].load_state_dict(state)
    dataset = DatasetFactory.load("sft", store, window_size=64)
    sampler = ResumableDistributedSampler(dataset, start_iter=step * BATCH)
    for batch in DataLoader(dataset, BATCH, sampler=sampler):
        if step == STEPS:
            break
        losses = torch.nn.functional.cross_entropy(
            model(batch["input_ids"]).flatten(0, 1), batch["target_ids"].flatten(), reduction="none"
        )
        loss = losses[batch["loss_mask"].flatten()].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f} over {int(batch['loss_mask'].sum())} tokens of answers")
        step += 1
        torch.save({"step": step} | {name: part.state_dict() for name, part in parts.items()}, saved)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
