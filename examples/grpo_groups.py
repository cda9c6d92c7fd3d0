"""Train a small model with GRPO on stored groups: prompts with sampled responses and their rewards.

python examples/grpo_groups.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import tokenmill as tm
from tokenmill.adapters.torch import Tensors, to_torch

CLIP = 0.2
"""Largest distance of the ratio of the policies from 1."""


def advantages(rewards: torch.Tensor, group_size: torch.Tensor) -> torch.Tensor:
    """Return the rewards minus the mean of the group, divided by its deviation; (B, G)."""
    exists = torch.arange(rewards.shape[1]) < group_size[:, None]
    count = group_size[:, None].clamp(min=1)
    centred = (rewards - (rewards * exists).sum(1, keepdim=True) / count) * exists
    deviation = (centred.square().sum(1, keepdim=True) / count).sqrt()
    return centred / (deviation + 1e-4)


def log_probs(model: torch.nn.Module, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of all response tokens, and the mask of trained ones; (B, G, T)."""
    rows, group, length = batch["responses"].shape
    prompt_len, response_len = batch["prompt_len"], batch["response_len"]
    width = batch["prompts"].shape[1] + length
    ids = torch.zeros(rows, group, width, dtype=torch.long)
    attended = torch.zeros(rows, group, width, dtype=torch.long)
    for row in range(rows):
        start = int(prompt_len[row])
        ids[row, :, :start] = batch["prompts"][row, :start]
        ids[row, :, start : start + length] = batch["responses"][row]
        for number in range(group):
            attended[row, number, : start + int(response_len[row, number])] = 1
    logits = model(ids.flatten(0, 1), attention_mask=attended.flatten(0, 1), use_cache=False).logits
    logs = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(2, ids.flatten(0, 1)[:, 1:, None])[..., 0]
    # The token at position p is predicted at p - 1, and a response starts after its prompt.
    places = (prompt_len[:, None] - 1 + torch.arange(length)).clamp(max=width - 2)
    places = places[:, None].expand(rows, group, length).flatten(0, 1)
    return logs.gather(1, places).view(rows, group, length), batch["masks"]


def grpo_loss(model: torch.nn.Module, batch: Tensors, old: torch.Tensor | None = None) -> torch.Tensor:
    """Return the loss: clipped ratios times advantages, as the mean over tokens, then over responses.

    `old` are the log-probabilities of the policy that sampled the responses [default: this model].
    """
    logs, trained = log_probs(model, batch)
    ratio = (logs - (logs.detach() if old is None else old)).exp()
    gain = advantages(batch["rewards"], batch["group_size"])[..., None]
    each = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain) * trained
    responses = (torch.arange(logs.shape[1]) < batch["group_size"][:, None]).sum().clamp(min=1)
    return (each.sum(2) / trained.sum(2).clamp(min=1)).sum() / responses


def main(folder: Path) -> None:
    """Train in a folder."""
    groups = [
        {"prompt": f"{n} + {n} = ", "responses": [str(2 * n), str(n), "many"], "rewards": [1.0, 0.2, 0.0]}
        for n in range(24)
    ]
    (folder / "groups.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups), encoding="utf-8")
    tm.prepare(folder / "groups.jsonl", out=folder / "groups", recipe="grpo", progress=False)
    tables = {"run": {"epochs": 2, "global_batch_size": 6, "seq_len": 24, "pad_to": "batch"}}
    run = tm.Run.from_tables(tables | {"sources": [{"name": "groups", "store": "groups"}]}, folder=folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=259, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = run.loader(micro_batch=6)
    for step, batch in enumerate(loader):
        tensors = to_torch(batch)
        with torch.no_grad():
            old, _ = log_probs(model, tensors)
        for _ in range(2):  # two updates on the responses of one policy: the second has ratios other than 1
            loss = grpo_loss(model, tensors, old)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        chance = log_probs(model, tensors)[0][:, 0].sum(1).mean()
        sys.stdout.write(
            f"step {step}: loss {loss.item():.4f}, log-probability of the best response {chance.item():.2f}\n"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
