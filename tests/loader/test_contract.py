"""Packed training equals training on each document apart, for every layout of attention that runs here."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tokenmill.errors import ConfigError
from tokenmill.loader import IGNORE

VOCAB, WIDTH, HEADS, LAYERS = 301, 16, 2, 2
EVERY = (
    "input_ids",
    "labels",
    "position_ids",
    "doc_ids",
    "loss_mask",
    "source",
    "cu_seqlens",
    "max_seqlen",
    "num_loss_tokens",
)
PACKINGS = ["best_fit", "bos_best_fit", "concat", "padded"]


class Tiny(torch.nn.Module):
    """A small causal transformer in double precision whose attention is given from outside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        double = {"dtype": torch.float64}
        self.tokens = torch.nn.Embedding(VOCAB, WIDTH, **double)
        self.positions = torch.nn.Embedding(64, WIDTH, **double)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH, **double) for _ in range(LAYERS))
        self.out = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, **double) for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCAB, **double)

    def forward(self, ids, positions, attend):
        """Run tokens of shape (N,); `attend` maps q, k, v of shape (N, heads, d) to the same shape."""
        x = self.tokens(ids) + self.positions(positions)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
            x = x + out(torch.tanh(attend(q, k, v).reshape(-1, WIDTH)))
        return self.head(x)


def dense(mask):
    def attend(q, k, v):
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)

    return attend


def causal(q, k, v):
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def by_segments(bounds):
    def attend(q, k, v):
        return torch.cat([causal(q[a:b], k[a:b], v[a:b]) for a, b in pairwise(bounds)])

    return attend


def flex(doc_ids):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    size = doc_ids.numel()
    mask = create_block_mask(
        lambda _b, _h, i, j: (doc_ids[i] == doc_ids[j]) & (i >= j), 1, 1, size, size, device="cpu"
    )

    def attend(q, k, v):
        q, k, v = (t.transpose(0, 1)[None].contiguous() for t in (q, k, v))
        return flex_attention(q, k, v, block_mask=mask)[0].transpose(0, 1)

    return attend


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def documents_apart(run, plan, step):
    """Return (ids, labels) of every segment of a step, made from the store and the spans alone."""
    for use in plan.what(step):
        groups: list[list] = []
        for span in use.spans:
            record = run.stores[use.source].fetch_record(span.document, "sequence").astype(np.int64)
            tokens = record[span.start : span.start + span.length]
            if groups and groups[-1][0] == span.document and len(groups[-1][1]) == 1 and span.start > 0:
                groups[-1][1] = np.concatenate([groups[-1][1], tokens])
            else:
                groups.append([span.document, tokens])
        for _, tokens in groups:
            yield torch.from_numpy(tokens[:-1].copy()), torch.from_numpy(tokens[1:].copy())


@pytest.fixture
def packed_run(make_run):
    def make(packing, **options):
        run = make_run(packing=packing, vocab_size=300, add_bos=True, **options)
        if packing == "padded":
            file = run.folder / "run.toml"
            file.write_text(file.read_text().replace('shuffle = "', 'on_long = "truncate_end"\nshuffle = "'))
            run = type(run).from_toml(file)
        return run

    return make


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("packing", PACKINGS)
def test_loss_and_gradients_equal_those_of_documents_run_apart(packed_run, packing):
    """[P1.a] To 1e-10, with a dense mask from doc_ids, with cu_seqlens, and (loss) with flex attention."""
    run = packed_run(packing)
    plan, loader = run.plan(), run.loader(arrays=EVERY)
    model = Tiny()
    step = 3
    batch = {name: torch.from_numpy(np.asarray(array)) for name, array in loader[step].items()}
    rows = batch["doc_ids"].to(torch.int64)
    doc_ids = (rows + torch.arange(rows.shape[0])[:, None] * 1000).flatten()
    ids, labels, positions = (batch[name].flatten() for name in ("input_ids", "labels", "position_ids"))

    apart = torch.zeros((), dtype=torch.float64)
    for tokens, targets in documents_apart(run, plan, step):
        if tokens.numel():
            logits = model(tokens, torch.arange(tokens.numel()), causal)
            apart = apart + F.cross_entropy(logits, targets, reduction="sum")
    expected = gradients(model, apart)

    causality = torch.tril(torch.ones(ids.numel(), ids.numel(), dtype=torch.bool))
    layouts = {
        "dense": dense((doc_ids[:, None] == doc_ids[None]) & causality),
        "cu_seqlens": by_segments(batch["cu_seqlens"].tolist()),
    }
    for name, attend in layouts.items():
        loss = F.cross_entropy(model(ids, positions, attend), labels, ignore_index=IGNORE, reduction="sum")
        assert abs(loss.item() - apart.item()) < 1e-10 * apart.item(), name
        for found, wanted in zip(gradients(model, loss), expected, strict=True):
            assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-10), name
    with torch.no_grad():
        logits = model(ids, positions, flex(doc_ids))
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        assert abs(loss.item() - apart.item()) < 1e-10 * apart.item()
    mean = F.cross_entropy(logits, labels, ignore_index=IGNORE)
    assert abs(mean.item() - apart.item() / int(batch["num_loss_tokens"])) < 1e-10


@pytest.mark.parametrize("packing", ["best_fit", "bos_best_fit"])
def test_no_token_reaches_another_document(packed_run, packing):
    """[P1.b] Another first token changes no logit outside its segment, bit for bit."""
    batch = packed_run(packing).loader(arrays=EVERY)[2]
    model = Tiny()
    ids, positions = (torch.from_numpy(batch[name][0].copy()) for name in ("input_ids", "position_ids"))
    doc_ids = torch.from_numpy(batch["doc_ids"][0])
    same = (doc_ids[:, None] == doc_ids[None]) & torch.tril(torch.ones(16, 16, dtype=torch.bool))
    with torch.no_grad():
        before = model(ids, positions, dense(same))
        ids[0] = (ids[0] + 1) % VOCAB
        after = model(ids, positions, dense(same))
    assert torch.equal(before[doc_ids != 0], after[doc_ids != 0])
    assert not torch.equal(before[doc_ids == 0], after[doc_ids == 0])


@pytest.mark.parametrize("packing", PACKINGS)
def test_all_arrays_agree_with_one_another(packed_run, packing):
    """[P1.c]"""
    loader = packed_run(packing).loader(arrays=EVERY, micro_batch=4)
    for batch in loader:
        doc_ids, labels, positions = batch["doc_ids"], batch["labels"], batch["position_ids"]
        starts = np.ones_like(doc_ids, dtype=bool)
        starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
        assert np.array_equal(batch["cu_seqlens"][:-1], np.flatnonzero(starts.ravel()))
        assert batch["cu_seqlens"][-1] == labels.size
        assert batch["cu_seqlens"].dtype == np.int32
        assert batch["max_seqlen"] == np.diff(batch["cu_seqlens"]).max()
        assert (positions[starts] == 0).all()
        assert (np.diff(positions, axis=1)[~starts[:, 1:]] == 1).all()
        assert np.array_equal(batch["loss_mask"], labels != IGNORE)
        ends = np.roll(starts, -1, axis=1)[:, :-1]
        assert (labels[:, :-1][ends] == IGNORE).all()
        inside = ~ends & (doc_ids[:, :-1] >= 0)
        assert np.array_equal(labels[:, :-1][inside], batch["input_ids"][:, 1:][inside])
        assert (labels[doc_ids < 0] == IGNORE).all()
        assert batch["source"].shape == (4,)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_number_of_loss_tokens_is_that_of_the_global_batch(packed_run, packing, world_size):
    """[P1.d] On every rank and micro-batch."""
    run = packed_run(packing)
    whole = run.loader(arrays=("labels",))
    loaders = [
        run.loader(rank=rank, world_size=world_size, micro_batch=2, arrays=("labels", "num_loss_tokens"))
        for rank in range(world_size)
    ]
    for loader in loaders:
        for number, batch in enumerate(loader):
            step = number // (12 // world_size // 2)
            if step >= 17:
                break
            assert batch["num_loss_tokens"] == (whole[step]["labels"] != IGNORE).sum()


def test_every_row_of_bos_best_fit_starts_with_bos(packed_run):
    run = packed_run("bos_best_fit")
    plan, loader = run.plan(), run.loader()
    for step in range(0, 30, 4):
        for use, ids in zip(plan.what(step), loader[step]["input_ids"], strict=True):
            assert use.spans[0].start == 0
            first = run.stores[use.source].fetch_record(use.spans[0].document, "sequence")[0]
            assert ids[0] == first


def test_positions_may_run_through_the_row(packed_run):
    run = packed_run("best_fit")
    file = run.folder / "run.toml"
    file.write_text(file.read_text().replace("seq_len = 16\npacking", 'seq_len = 16\npositions = "row"\npacking'))
    batch = type(run).from_toml(file).loader()[1]
    assert (batch["position_ids"] == np.arange(16)).all()


def test_padding_is_marked_and_never_trained(packed_run):
    run = packed_run("padded")
    pad = 0
    for step in range(0, 30, 5):
        batch = run.loader()[step]
        empty = batch["doc_ids"] == -1
        assert (batch["input_ids"][empty] == pad).all()
        assert (batch["labels"][empty] == IGNORE).all()


def test_a_loss_mask_in_the_store_is_honoured(tmp_path, tokenizer_identity):
    """[T1.c] A label whose mask is 0 is not trained on; masked and unmasked stores mix."""
    from tokenmill.config.run import parse_config
    from tokenmill.run.run import Run
    from tokenmill.store import StoreSpec, StoreWriter

    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 80)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, 300, offsets[-1]).astype("<u2")
    mask = rng.integers(0, 2, offsets[-1]).astype("u1")
    spec = StoreSpec(
        keys={"sequence": "<u2", "loss_mask": "|u1"}, tokenizer=tokenizer_identity(300), recipe={}, kind="sft"
    )
    with StoreWriter(tmp_path / "sft", spec) as writer:
        writer.append({"sequence": ids, "loss_mask": mask}, offsets)
        writer.commit()
    tables = {
        "run": {"steps": 5, "global_batch_size": 4, "seq_len": 16, "packing": "best_fit"},
        "sources": [{"name": "sft", "store": "sft"}],
    }
    run = Run(config=parse_config(tables), folder=tmp_path)
    loader = run.loader(arrays=("labels", "loss_mask", "num_loss_tokens"))
    for step in range(5):
        batch = loader[step]
        for slot, use in enumerate(run.plan().what(step)):
            expected = []
            for span in use.spans:
                begin = int(offsets[span.document]) + span.start
                piece = ids[begin : begin + span.length].astype(np.int64)
                keep = mask[begin : begin + span.length]
                expected += [*np.where(keep[1:] == 1, piece[1:], IGNORE).tolist(), IGNORE]
            expected = (expected[:-1] + [IGNORE] * 17)[:16] if sum(s.length for s in use.spans) <= 17 else expected
            assert batch["labels"][slot].tolist() == expected[:16]
        assert batch["num_loss_tokens"] == (batch["labels"] != IGNORE).sum() == batch["loss_mask"].sum()


def test_bos_best_fit_needs_documents_that_start_with_bos(make_run):
    with pytest.raises(ConfigError, match="needs documents that start with BOS, got a store without"):
        make_run(packing="bos_best_fit").plan()


def test_a_loss_mask_alone_is_right_when_shards_are_copied_in_turns(tmp_path, tokenizer_identity):
    from tokenmill.config.run import parse_config
    from tokenmill.run.run import Run
    from tokenmill.store import StoreSpec, StoreWriter

    rng = np.random.default_rng(0)
    offsets = np.arange(0, 20 * 301, 20)
    ids = rng.integers(0, 300, offsets[-1]).astype("<u2")
    mask = rng.integers(0, 2, offsets[-1]).astype("u1")
    spec = StoreSpec(
        keys={"loss_mask": "|u1", "sequence": "<u2"},
        tokenizer=tokenizer_identity(300),
        recipe={},
        max_tokens_per_shard=60,
    )
    with StoreWriter(tmp_path / "sft", spec) as writer:
        writer.append({"sequence": ids, "loss_mask": mask}, offsets)
        writer.commit()
    tables = {
        "run": {"steps": 3, "global_batch_size": 64, "seq_len": 32},
        "sources": [{"name": "sft", "store": "sft"}],
    }
    run = Run(config=parse_config(tables), folder=tmp_path)
    dirty = [np.full((64, 32), 7, np.int64) for _ in range(50)]
    del dirty
    for step in range(3):
        labels = run.loader(arrays=("labels",))[step]["labels"]
        assert np.array_equal(run.loader(arrays=("loss_mask",))[step]["loss_mask"], labels != IGNORE)
        assert int(run.loader(arrays=("labels", "num_loss_tokens"))[step]["num_loss_tokens"]) == (labels >= 0).sum()
        ids_drawn = run.loader(arrays=("input_ids",))[step]["input_ids"]
        assert ids_drawn.max() > 1, "the token ids are those of `sequence`, whatever the order of the keys"


def test_stacked_slices_are_the_global_batch(packed_run):
    from tokenmill.loader import stack

    run = packed_run("best_fit")
    whole = run.loader(arrays=EVERY)[4]
    parts = [run.loader(rank=rank, world_size=3, arrays=EVERY)[4] for rank in range(3)]
    joined = stack(parts)
    assert set(joined) == set(whole)
    for name, array in whole.items():
        assert np.array_equal(joined[name], array), name
