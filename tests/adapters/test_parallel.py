"""Over gloo: loss and gradient of four ranks are those of one, dealt by cost, and by context parallelism."""

from __future__ import annotations

import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.adapters.ranks import call_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._attention import _context_parallel_shard
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _ContextParallel,
    _create_cp_block_mask,
)
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from tokenmill import Run
from tokenmill.adapters.torch import mesh_layout, to_torch, torch_loader

VOCAB, WIDTH, HEADS = 64, 16, 2
ARRAYS = ("input_ids", "labels", "position_ids", "cu_seqlens", "num_loss_tokens")


class Attention(nn.Module):
    """What torch's context parallelism wraps: it gathers keys and values of all members."""

    def forward(self, query, key, value, block_mask):
        """Attend by flex_attention, which has no gradients on CPUs, or else by the same mask written out."""
        if not torch.is_grad_enabled():
            return flex_attention(query, key, value, block_mask=block_mask)
        shape = (query.shape[0], 1, query.shape[2], key.shape[2])
        mask = create_mask(block_mask.mask_mod, *shape, device="cpu")
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Model(nn.Module):
    """A model of one layer, in 64 bits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(1024, WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        self.attention = Attention()
        self.double()

    def loss(self, batch, block_mask):
        """Return the summed loss of the labels of a batch."""
        hidden = self.tokens(batch["input_ids"]) + self.places(batch["position_ids"])
        rows, columns, _ = hidden.shape
        parts = self.mix(hidden).view(rows, columns, 3 * HEADS, -1).transpose(1, 2).chunk(3, dim=1)
        mixed = self.attention(*parts, block_mask).transpose(1, 2).reshape(rows, columns, WIDTH)
        logits = self.out(hidden + mixed)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def mask_of(batch, seq_len):
    """Return what may attend to what in whole rows: the documents of cu_seqlens, causally."""
    rows = int(batch["cu_seqlens"][-1]) // seq_len
    documents = torch.searchsorted(batch["cu_seqlens"], torch.arange(rows * seq_len), right=True).view(rows, -1)

    def may_attend(row, head, query, key):  # noqa: ARG001 - as torch calls it
        return (documents[row, query] == documents[row, key]) & (query >= key)

    return may_attend, rows


def gradient(model):
    """Return all gradients end to end."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def whole_step(run, step):
    """Return loss and gradient of a step, computed by one process."""
    model = Model()
    batch = to_torch(run.loader(micro_batch=8, arrays=ARRAYS)[step])
    seq_len = batch["input_ids"].shape[1]
    may_attend, rows = mask_of(batch, seq_len)
    loss = model.loss(batch, create_block_mask(may_attend, rows, None, seq_len, seq_len, device="cpu"))
    (loss / batch["num_loss_tokens"]).backward()
    return float(loss.detach() / batch["num_loss_tokens"]), gradient(model)


def dealt_step(folder):
    """Compute a step on four ranks, two micro-batches each, whose rows are dealt by cost."""
    model = Model()
    run = Run.from_toml(folder / "balanced.toml")
    loader = torch_loader(run, arrays=ARRAYS, check_ranks=True)
    total = 0.0
    for batch, _ in zip(loader, range(2), strict=False):
        seq_len = batch["input_ids"].shape[1]
        may_attend, rows = mask_of(batch, seq_len)
        loss = model.loss(batch, create_block_mask(may_attend, rows, None, seq_len, seq_len, device="cpu"))
        (loss / batch["num_loss_tokens"]).backward()
        total += float(loss.detach() / batch["num_loss_tokens"])
    return total, gradient(model), loader.loader.slots(0).tolist()


def cut_step(folder):
    """Compute a step on two data-parallel ranks of two context-parallel ones, by what torch has for it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model, run = Model(), Run.from_toml(folder / "run.toml")
    parallelize_module(model, mesh["cp"], {"attention": _ContextParallel(2, _ContextParallel.AttentionType.FLEX)})
    whole = run.loader(rank=mesh.get_local_rank("dp"), world_size=2, micro_batch=4, arrays=ARRAYS)
    (batch,) = (
        batch
        for batch, _ in zip(
            torch_loader(run, layout=mesh_layout(mesh), micro_batch=4, arrays=ARRAYS), range(1), strict=False
        )
    )
    full = to_torch(whole[0])
    seq_len = full["input_ids"].shape[1]
    balancer = _HeadTailLoadBalancer(seq_len, 2, "cpu")
    names = ("input_ids", "labels", "position_ids")
    parts = _context_parallel_shard(mesh["cp"], [full[name] for name in names], [1, 1, 1], balancer)
    for name, part in zip(names, parts, strict=True):
        assert torch.equal(part, batch[name]), name
    may_attend, rows = mask_of(batch, seq_len)
    mask = _create_cp_block_mask(may_attend, rows, 1, seq_len, seq_len, mesh["cp"], balancer)
    with torch.no_grad():
        flexible = model.loss(batch, mask)
    loss = model.loss(batch, mask)
    assert abs(float(loss - flexible)) < 1e-9
    (loss / batch["num_loss_tokens"]).backward()
    return float(loss.detach() / batch["num_loss_tokens"]), gradient(model), []


def work(folder):
    """Be one rank; return for each task the loss and gradient of all ranks together, and the own slots."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found = {}
    for task in (dealt_step, cut_step):
        loss, grad, slots = task(folder)
        total = torch.cat([torch.tensor([loss], dtype=torch.float64), grad])
        dist.all_reduce(total)
        found[task.__name__] = (float(total[0]), total[1:].numpy(), slots)
    dist.destroy_process_group()
    return found


# The tests.


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """Write a store and two runs of it, and let four ranks compute a step of each."""
    from tokenmill.store import StoreSpec, StoreWriter

    folder = tmp_path_factory.mktemp("parallel")
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4, 1.2, 200), 1, 900).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    spec = StoreSpec(keys={"sequence": "|u1"}, tokenizer={"vocab_size": VOCAB}, recipe={})
    with StoreWriter(folder / "web", spec) as writer:
        writer.append({"sequence": rng.integers(0, VOCAB, int(offsets[-1]), dtype=np.uint8)}, offsets)
        writer.commit()
    for name, more in (("run", ""), ("balanced", 'balance = "attention"\n')):
        text = f"[run]\nsteps = 2\nglobal_batch_size = 8\nseq_len = 512\n{more}"
        text += "[[sources]]\nname = 'web'\nstore = 'web'\n"
        (folder / f"{name}.toml").write_text(text)
    return folder, call_ranks(4, work, folder, TORCHDYNAMO_DISABLE="1")


@pytest.mark.parametrize("task", ["dealt_step", "cut_step"])
def test_a_step_of_four_ranks_is_that_of_one(four_ranks, task):
    """[P1.a] Loss and gradient, where rows are dealt by cost, and where each rank has a part of every row."""
    folder, ranks = four_ranks
    expected_loss, expected_grad = whole_step(Run.from_toml(folder / "run.toml"), 0)
    loss, grad, _ = ranks[0][task]
    assert abs(loss - expected_loss) < 1e-10
    assert np.abs(grad - expected_grad.numpy()).max() < 1e-10
    if task == "dealt_step":
        slots = [slot for rank in ranks for slot in rank[task][2]]
        assert sorted(slots) == list(range(8)) != slots
