"""Train a small GPT with FSDP on CPUs; run it again with another number of processes, and it resumes.

torchrun --standalone --nproc-per-node 2 examples/fsdp_gpt.py FOLDER
torchrun --standalone --nproc-per-node 4 examples/fsdp_gpt.py FOLDER
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from train_tiny import ARRAYS, TinyGPT

import tokenmill as tm
from tokenmill.demo import CORPUS_DIR
from tokenmill.torch import torch_loader


def main(folder: Path, steps: int = 5) -> None:
    """Train some steps, from the checkpoint if it exists."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        tm.prepare(CORPUS_DIR / "prose.jsonl", out=folder / "prose", tokenizer="bytes", progress=False)
    dist.barrier()
    run = tm.Run.build(folder / "prose", seq_len=128, global_batch_size=8, steps=1000)
    loader = torch_loader(run, micro_batch=8 // world_size, arrays=ARRAYS)
    torch.manual_seed(0)
    model = TinyGPT(vocab_size=259, max_len=128)
    for block in model.blocks.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoint = folder / "checkpoint"
    if checkpoint.exists():
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load({**states, "loader": loader}, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    end = loader.step + steps
    for batch in loader:
        logits = model(batch["input_ids"], batch["position_ids"], batch["doc_ids"])
        summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        loss = summed / batch["num_loss_tokens"]
        (loss * world_size).backward()  # FSDP averages gradients over ranks
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {loader.step - 1} on {world_size} ranks: loss {total.item():.4f}", flush=True)
        if loader.step == end:
            break
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**states, "loader": loader}, storage_writer=dcp.FileSystemWriter(checkpoint, overwrite=True))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    gc.collect()  # FSDP's states are in cycles: free them while the threads of gloo still run
    dist.barrier()
    dist.destroy_process_group()
