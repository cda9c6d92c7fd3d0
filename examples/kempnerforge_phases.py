"""Train on a mixture with phases through KempnerForge's config and loader; run it again, and it resumes.

python examples/kempnerforge_phases.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import tokenmill as tm
from tokenmill.adapters.kempnerforge import DataConfig, DatasetSource, TrainingPhase, build_dataloader
from tokenmill.demo import CORPUS_DIR

BATCHES_PER_STEP, STEPS = 2, 10


def main(folder: Path) -> None:
    """Train, or resume, in a folder."""
    for name in ("prose", "code"):
        tm.prepare(CORPUS_DIR / f"{name}.jsonl", out=folder / name, tokenizer="bytes", progress=False)
    sources = [DatasetSource(path=str(folder / name), name=name) for name in ("prose", "code")]
    phases = [TrainingPhase(start_step=6, dataset_weights={"prose": 0.2, "code": 0.8}, lr_scale=0.3)]
    config = DataConfig(num_workers=0, datasets=sources, phases=phases)
    loader = build_dataloader(config, batch_size=4, seq_len=128, grad_accum_steps=BATCHES_PER_STEP)
    torch.manual_seed(0)
    model = torch.nn.Embedding(259, 259)
    optimizer = torch.optim.AdamW(model.parameters())
    parts, saved = {"model": model, "optimizer": optimizer, "loader": loader}, folder / "checkpoint.pt"
    if saved.exists():
        for name, state in torch.load(saved, weights_only=True).items():
            parts[name].load_state_dict(state)
    stream = iter(loader)
    for step in range(loader.step, STEPS):
        optimizer.param_groups[0]["lr"] = 0.05 * loader.lr_scale
        total = 0.0
        for batch in (next(stream) for _ in range(BATCHES_PER_STEP)):
            logits = model(batch["input_ids"])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            (loss / BATCHES_PER_STEP).backward()
            total += loss.item() / BATCHES_PER_STEP
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {total:.4f}, lr {optimizer.param_groups[0]['lr']:.3f}")
        torch.save({name: part.state_dict() for name, part in parts.items()}, saved)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
