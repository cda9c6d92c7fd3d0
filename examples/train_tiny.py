"""Train a small GPT in plain torch: several stages, any number of ranks, exact resume.

python examples/train_tiny.py examples/train_tiny.toml --out out
torchrun --standalone --nproc-per-node 2 examples/train_tiny.py examples/train_tiny.toml --out out --micro-batch 4

Kill it at any moment, with kill -9 if you like: either command goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tokenmill as tm
from tokenmill.loader import DIGEST_ARRAYS, batch_digest, row_digests
from tokenmill.torch import TorchLoader

LEARNING_RATE, WARMUP_STEPS = 3e-3, 20


class Block(nn.Module):
    """Attention, then two layers for each token on its own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return (B, T, width) for (B, T, width); `mask` (B, 1, T, T) is true where a token may look."""
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class TinyGPT(nn.Module):
    """A GPT that keeps the documents of a row apart."""

    def __init__(self, vocab_size: int, max_len: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(max_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, doc_ids: Tensor) -> Tensor:
        """Return the logits (B, T, vocabulary)."""
        # A token sees itself and what stands before it in its own document, which also counts its position.
        mask = (doc_ids[:, None, :, None] == doc_ids[:, None, None, :]).tril()
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def train_step(
    model: TinyGPT, optimizer: torch.optim.Optimizer, batches: Iterable[Mapping[str, Tensor]]
) -> tuple[float, str]:
    """Train on this rank's part of a global batch; return the loss and the digest of the whole of it."""
    optimizer.zero_grad()
    loss, rows = torch.zeros(1), []
    for batch in batches:
        logits = model(batch["input_ids"], batch["position_ids"], batch["doc_ids"])
        # A sum divided by the labels of the global batch: such parts add up to its mean, however it is cut.
        summed = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        part = summed / batch["num_loss_tokens"]
        part.backward()
        loss += part.detach()
        rows += row_digests({name: batch[name].numpy() for name in DIGEST_ARRAYS})
    add_up([loss, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])
    optimizer.step()
    digests = gather(torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)).view(-1, 8)
    return loss.item(), batch_digest(digest.tobytes() for digest in digests.numpy())


def add_up(parts: list[Tensor]) -> None:
    """Add up tensors over all ranks, in place and in one message."""
    if dist.is_initialized():
        total = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(total)
        for part, added in zip(parts, total.split([part.numel() for part in parts]), strict=True):
            part.copy_(added.view_as(part))


def gather(mine: Tensor) -> Tensor:
    """Return what all ranks have, end to end, in the order of ranks."""
    if not dist.is_initialized():
        return mine
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return torch.cat(theirs)


def save(file: Path, checkpoint: Mapping[str, object]) -> None:
    """Write a checkpoint so that a kill leaves the old one or the whole new one."""
    temporary = file.with_suffix(".tmp")
    with temporary.open("wb") as stream:
        torch.save(checkpoint, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


def log(folder: Path, **facts: object) -> None:
    """Append one line of JSON to the log, in one write."""
    with (folder / "log.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(facts) + "\n")


def train(options: argparse.Namespace, rank: int, world_size: int) -> None:
    """Train from the last checkpoint, if there is one, to the end."""
    run = tm.Run.from_toml(options.run)
    plan = run.plan()
    slices = {"rank": rank, "world_size": world_size, "micro_batch": options.micro_batch}
    loader = TorchLoader(run.loader(**slices, arrays=(*DIGEST_ARRAYS, "num_loss_tokens")))
    torch.manual_seed(0)  # the same first weights on every rank
    vocab_size = next(iter(run.stores.values())).manifest.tokenizer["vocab_size"]
    model = TinyGPT(vocab_size, max_len=max(stage.spec.seq_len for stage in plan.stages))
    optimizer = torch.optim.AdamW(model.parameters())

    kept, checkpoint = {"model": model, "optimizer": optimizer, "loader": loader}, options.out / "checkpoint.pt"
    if checkpoint.exists():
        for name, state in torch.load(checkpoint, weights_only=True).items():
            kept[name].load_state_dict(state)
    pids = gather(torch.tensor([os.getpid()])).tolist()
    if rank == 0:
        log(options.out, start=loader.step, micro_batch=options.micro_batch, pids=pids)

    batches = iter(loader)
    end = min(plan.steps, options.until)
    while loader.step < end:
        now = plan.at(loader.step)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * now.lr_scale * min(1.0, (now.step + 1) / WARMUP_STEPS)
        num_batches = now.global_batch_size // (world_size * options.micro_batch)
        loss, digest = train_step(model, optimizer, islice(batches, num_batches))
        if rank == 0:
            log(options.out, step=now.step, stage=now.stage, loss=loss, digest=digest)
        if loader.step % options.save_every == 0 or loader.step == end:
            states = {name: part.state_dict() for name, part in kept.items()}
            if rank == 0:  # one copy for all: it says nothing of ranks
                save(checkpoint, states)


def main() -> None:
    """Read the options and train, alone or as one of the ranks that torchrun starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="config of the run")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoint.pt and log.jsonl")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows that a rank takes at a time")
    parser.add_argument("--until", type=int, default=1 << 62, help="step to stop before; default: the end")
    parser.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_default_dtype(getattr(torch, options.dtype))
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # the loader tells its plan and its stages
    if world_size > 1:
        dist.init_process_group("gloo")
    train(options, rank, world_size)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except tm.TokenmillError as error:
        sys.exit(f"error: {error}")
