"""The fates of a store with a loss mask: what is trained is what the batches train on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config.run import parse_config
from tokenmill.loader import IGNORE
from tokenmill.packing import ConcatRows, Policy, pack_rows
from tokenmill.plan.report import report
from tokenmill.plan.rows import NOTHING
from tokenmill.run.run import Run
from tokenmill.store import open_store

POLICIES = [
    Policy(),
    Policy(split="truncate_start"),
    Policy(split="truncate_end"),
    Policy(split="drop"),
    Policy(name="bos_best_fit"),
    Policy(name="bos_best_fit", crop="discard"),
    Policy(name="padded", split="truncate_start"),
    Policy(name="padded", split="truncate_end"),
    Policy(name="padded", split="drop"),
]
shapes = st.tuples(
    st.integers(1, 20),
    st.lists(st.one_of(st.integers(0, 4), st.integers(0, 70)), min_size=1, max_size=30),
    st.integers(0, 3),
)


def labels_by_hand(rows, offsets):
    """Say of every token of the stream whether it is a label, walking all spans of all rows."""
    labels = np.zeros(int(offsets[-1]), np.bool_)
    spans = rows.spans(np.arange(rows.num_rows))
    for number in range(rows.num_rows):
        before = None
        for span in spans.row(number):
            begin = int(offsets[span.document]) + span.start
            joined = before == (span.document, 0, 1) and span.start > 0
            labels[begin + (not joined) : begin + span.length] = True
            before = (span.document, span.start, span.length)
    return labels


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}-{p.split}-{p.crop}")
@given(shape=shapes)
def test_trained_are_the_labels_that_the_mask_leaves(make_masked, policy, shape):
    """[P2.a] And the totals balance to the token."""
    seq_len, lengths, seed = shape
    path, mask, offsets = make_masked(lengths, seed, size=200)
    rows = pack_rows(open_store(path), seq_len=seq_len, policy=policy)
    fates = rows.fates()
    assert fates.trained == int((labels_by_hand(rows, offsets) & (mask == 1)).sum())
    assert fates.tokens == mask.size == fates.trained + fates.masked + sum(fates.dropped.values())


@pytest.mark.parametrize("crossing", [False, True])
@given(shape=shapes)
def test_trained_are_the_labels_that_the_mask_leaves_of_the_stream(make_masked, crossing, shape):
    """[P2.a]"""
    seq_len, lengths, seed = shape
    path, mask, offsets = make_masked(lengths, seed, size=200)
    rows = ConcatRows(store=open_store(path), seq_len=seq_len, cross_document_labels=crossing)
    held = rows.num_rows * seq_len + 1 if rows.num_rows else 0
    label = np.arange(mask.size) < held
    label[: 1 if crossing else 0] = False
    if not crossing:
        label[offsets[:-1][np.diff(offsets) > 0]] = False
    fates = rows.fates()
    assert fates.trained == int((label & (mask == 1)).sum())
    assert fates.tokens == mask.size == fates.trained + fates.masked + sum(fates.dropped.values())


@pytest.mark.parametrize(
    "policy", [*POLICIES, None], ids=lambda p: f"{p.name}-{p.split}-{p.crop}" if p else "concat"
)
@given(shape=shapes, key=st.integers(0, 9))
def test_what_rows_hold_adds_up_to_the_fates_in_any_order(make_masked, policy, shape, key):
    """[P2.a]"""
    seq_len, lengths, seed = shape
    store = open_store(make_masked(lengths, seed, size=200)[0])
    if policy is None:
        rows = ConcatRows(store=store, seq_len=seq_len)
    else:
        rows = pack_rows(store, seq_len=seq_len, policy=policy)
    fates = rows.fates()
    parts = np.array_split(np.random.default_rng(key).permutation(rows.num_rows), 3)
    held = sum((rows.held(part) for part in parts), NOTHING)
    assert (held.trained, held.tokens) == (fates.trained, fates.rows * rows.row_slots - fates.padding)
    assert rows.held(np.empty(0, np.int64)) == NOTHING


@pytest.mark.parametrize("packing", ["best_fit", "padded", "concat", "bos_best_fit"])
def test_the_report_of_a_run_counts_what_its_batches_train_on(make_masked, tmp_path, packing):
    """[P2.a] Over an epoch, label by label; more shards than may be mapped at once."""
    make_masked(np.random.default_rng(3).integers(0, 30, 200).tolist(), size=20)
    tables = {
        "run": {"steps": 1, "global_batch_size": 1, "seq_len": 32, "packing": packing},
        "sources": [{"name": "sft", "store": "sft"}],
    }
    rows = Run(config=parse_config(tables), folder=tmp_path).plan().stages[0].rows["sft"].num_rows
    tables["run"]["steps"] = rows
    run = Run(config=parse_config(tables), folder=tmp_path)
    fates = report(run.plan()).sources[0].fates
    trained = sum(int((batch["labels"] != IGNORE).sum()) for batch in run.loader())
    assert 0 < fates.trained == trained
    assert len(run.stores["sft"]._maps._maps) <= 64


@pytest.mark.parametrize(("share", "trained"), [(-1, 0), (2, 7)])
def test_a_mask_of_one_kind_trains_on_nothing_or_on_all(make_masked, share, trained):
    path, _, _ = make_masked([5, 4], share=share)
    fates = pack_rows(open_store(path), seq_len=16, policy=Policy()).fates()
    assert (fates.trained, fates.masked) == (trained, 9 - trained)


def test_a_store_without_a_mask_pays_nothing(make_store):
    """No token is read for its fates."""
    path, tokens, _ = make_store("web", [5, 9, 0, 4])
    rows = pack_rows(open_store(path), seq_len=8, policy=Policy())
    (path / "shard-00000" / "sequence.bin").unlink()
    assert rows.fates().trained == tokens.size - 3
