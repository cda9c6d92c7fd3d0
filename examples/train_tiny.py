"""Train a small GPT in plain PyTorch, on any number of processes, with exact resume.

python examples/train_tiny.py examples/train_tiny.toml out
torchrun --standalone --nproc-per-node 2 examples/train_tiny.py examples/train_tiny.toml out

Stop it at any time, also with kill -9. Either command continues from the checkpoint in the folder out.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tokenmill as tm
from tokenmill.torch import TorchLoader, torch_loader

ARRAYS = ["input_ids", "labels", "position_ids", "doc_ids", "num_loss_tokens"]


class TinyGPT(nn.Module):
    """A GPT in which a token attends only to earlier tokens of its own document."""

    def __init__(self, vocab_size: int, max_len: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(max_len, width)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head, self.heads = nn.Linear(width, vocab_size, bias=False), heads

    def forward(self, input_ids: Tensor, position_ids: Tensor, doc_ids: Tensor) -> Tensor:
        """Return the logits (B, T, vocabulary)."""
        blocked = (doc_ids[:, :, None] != doc_ids[:, None, :]) | torch.ones(input_ids.shape[1:] * 2).triu(1).bool()
        x = self.tokens(input_ids) + self.positions(position_ids)
        return self.head(self.blocks(x, mask=blocked.repeat_interleave(self.heads, 0)))


def train(run: tm.Run, loader: TorchLoader, model: nn.Module, checkpoint: Path, save_every: int = 10) -> None:
    """Train from the checkpoint, if it exists, to the end of the run, and print the loss of every step."""
    plan, rank = run.plan(), dist.get_rank() if dist.is_initialized() else 0
    optimizer = torch.optim.AdamW(model.parameters())
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    for name, state in torch.load(checkpoint, weights_only=True).items() if checkpoint.exists() else ():
        parts[name].load_state_dict(state)
    step, loss = loader.step, torch.zeros(1)
    for batch in loader:
        logits = model(batch["input_ids"], batch["position_ids"], batch["doc_ids"])
        summed = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        mean = summed / batch["num_loss_tokens"]  # of the global batch: micro-batches and ranks add up to its mean
        mean.backward()
        loss += mean.detach()
        if loader.step == step:  # more micro-batches of this step follow
            continue
        if dist.is_initialized():
            for tensor in (loss, *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(tensor)
        optimizer.param_groups[0]["lr"] = 3e-3 * plan.at(step).lr_scale * min(1.0, (step + 1) / 20)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} of stage {plan.at(step).stage}: loss {loss.item()!r}", flush=True)
        step, loss = loader.step, torch.zeros(1)
        if rank == 0 and (step % save_every == 0 or step == plan.steps):
            torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)  # a kill leaves the old file or the new one


if __name__ == "__main__":
    config, out = map(Path, sys.argv[1:])
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
    run = tm.Run.from_toml(config)
    loader = torch_loader(run, micro_batch=8 // int(os.environ.get("WORLD_SIZE", "1")), arrays=ARRAYS)
    torch.manual_seed(0)  # the same weights on every rank
    model = TinyGPT(vocab_size=259, max_len=max(stage.spec.seq_len for stage in run.plan().stages))
    out.mkdir(parents=True, exist_ok=True)
    train(run, loader, model, out / "checkpoint.pt")
