"""Evals under torch.distributed: four ways in which a validation loop goes wrong, as they were seen in one."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.adapters.ranks import call_ranks

from tokenmill import Run
from tokenmill.adapters.torch import lr_scheduler, torch_loader


def score_table():
    """Return the logits of every id, given the one before it."""
    return torch.randn(60, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def train_and_evaluate(folder):
    """Train as one rank, with an eval after every second step; return the evals and the steps."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    run, table = Run.from_toml(folder / "run.toml"), score_table()
    training, evals = torch_loader(run, micro_batch=4), torch_loader(run.evals["held"], micro_batch=2)

    def evaluate():
        total, labels, seen = torch.zeros((), dtype=torch.float64), 0, []
        for batch in evals:
            logits = table[batch["input_ids"]].flatten(0, 1)
            total += torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
            count = (batch["labels"] != -100).sum()
            dist.all_reduce(count)  # waits for ever for a rank that has no batch left
            assert int(count) == int(batch["num_loss_tokens"])
            labels += int(count)
            seen.append(batch["input_ids"].tolist())
        dist.all_reduce(total)
        return float(total / labels), seen

    rounds = [evaluate() for number, _ in enumerate(training) if number % 2]
    dist.destroy_process_group()
    return rounds


EVALS = """
[[evals]]
name = "held"
source = "web"
documents = "0:13"
"""


@pytest.fixture
def run(run_over_web):
    return run_over_web(more=EVALS, steps=6, batch=12, seq_len=16)


def test_no_rank_waits_loses_or_changes_a_batch_and_the_mean_is_exact(run):
    """[V1.a, C2.a] A hang, a batch lost a round, other batches each round, an uneven end: four known bugs."""
    ranks = call_ranks(3, train_and_evaluate, run.folder)
    number = run.evals["held"].num_rows
    assert number % 6  # the end is uneven
    seen = [[batches for _, batches in rank] for rank in ranks]
    assert {len(batches) for rounds in seen for batches in rounds} == {-(-number // 6)}
    assert all(batches == rounds[0] for rounds in seen for batches in rounds)
    first = zip(*(rounds[0] for rounds in seen), strict=True)
    together = [row for parts in first for part in parts for row in part]
    alone = [batch["input_ids"][0].tolist() for batch in torch_loader(run.evals["held"], rank=0, world_size=1)]
    assert together[:number] == alone
    table, total, labels = score_table(), 0, 0
    for batch in torch_loader(run.evals["held"], rank=0, world_size=1):
        logits = table[batch["input_ids"][0]]
        total += torch.nn.functional.cross_entropy(logits, batch["labels"][0], reduction="sum")
        labels += int(batch["num_loss_tokens"])
    for rank in ranks:
        assert [mean for mean, _ in rank] == pytest.approx([float(total) / labels] * 3, rel=0, abs=1e-10)


def test_an_eval_leaves_the_steps_of_the_training_loader_as_they_are(run):
    training, evals = torch_loader(run, micro_batch=4), torch_loader(run.evals["held"], micro_batch=4)
    plain = [batch["input_ids"].tolist() for batch in torch_loader(run, micro_batch=4)]
    seen = []
    for batch in training:
        seen.append(batch["input_ids"].tolist())
        assert sum(1 for _ in evals) == len(evals)
    assert seen == plain


def test_a_scheduler_follows_tokens_and_keeps_no_plan_in_its_state(run_over_web):
    run = run_over_web(steps=12, batch="{ from = 2, to = 6, step = 2, over_steps = 8 }", seq_len=16)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = run.lr_schedule(warmup_tokens=128, final=0.25)
    scheduler = lr_scheduler(optimizer, schedule)
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([2.0 * schedule(step) for step in range(12)])
    assert rates[-1] == pytest.approx(0.5)
    assert scheduler.state_dict()["lr_lambdas"] == [None]
    loader = torch_loader(run, micro_batch=2)
    stream = iter(loader)
    for _ in range(1 * 4 + 2):  # four steps of one batch, one of two
        next(stream)
    assert loader.tokens_seen.slots == (4 * 2 + 4) * 16
