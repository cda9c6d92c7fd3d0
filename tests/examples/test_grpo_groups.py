"""The loss of the GRPO example is that of a computation response by response."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import tokenmill as tm
from tokenmill.torch import to_torch

SPEC = importlib.util.spec_from_file_location(
    "grpo_groups", Path(__file__).parents[2] / "examples" / "grpo_groups.py"
)
example = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)

GROUPS = [
    {
        "prompt": f"{n} + {n} = ",
        "responses": [str(2 * n), "many", "x" * n][: 1 + n % 3],
        "rewards": [1.0, 0.2, n][: 1 + n % 3],
    }
    for n in range(1, 9)
]


def tiny_model(seed):
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=259, **shape)).eval()


def loss_by_hand(model, old, groups):
    """Compute the loss one response at a time, of texts and nothing else."""
    tokenizer, losses = tm.open_tokenizer("bytes"), []
    for group in groups:
        rewards = np.array(group["rewards"])
        gains = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for response, gain in zip(group["responses"], gains, strict=True):
            prompt = [256, *tokenizer.encode([group["prompt"]]).ids.tolist()]
            ids = torch.tensor([[*prompt, *tokenizer.encode([response]).ids.tolist(), 257]])
            with torch.no_grad():
                logs = [
                    torch.log_softmax(each(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
                    for each in (model, old)
                ]
            ratio = (logs[0] - logs[1])[len(prompt) - 1 :].exp()
            clipped = ratio.clamp(0.8, 1.2)
            losses.append(-torch.minimum(ratio * gain, clipped * gain).mean().item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("pad_to", ["row", "batch"])
def test_the_loss_is_that_of_every_response_alone(tmp_path, pad_to):
    (tmp_path / "groups.jsonl").write_text("".join(json.dumps(group) + "\n" for group in GROUPS))
    tm.prepare(tmp_path / "groups.jsonl", out=tmp_path / "groups", recipe="grpo", workers=1, progress=False)
    tables = {"run": {"epochs": 1, "global_batch_size": 8, "seq_len": 24, "pad_to": pad_to}}
    run = tm.Run.from_tables(tables | {"sources": [{"name": "groups", "store": "groups"}]}, folder=tmp_path)
    (batch,) = [to_torch(batch) for batch in run.loader(micro_batch=8)]
    model, old = tiny_model(0), tiny_model(1)
    with torch.no_grad():
        ours = example.grpo_loss(model, batch, example.log_probs(old, batch)[0]).item()
    assert ours == pytest.approx(loss_by_hand(model, old, GROUPS), abs=1e-5)


def test_the_example_makes_the_best_response_likelier(tmp_path, capsys):
    example.main(tmp_path)
    chances = [float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(chances) == 8
    assert chances[-1] > chances[0]
