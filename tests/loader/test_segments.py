"""Segments that are filled up to a multiple of some columns, and cut for context-parallel ranks each."""

from dataclasses import replace

import numpy as np
import pytest

from tokenmill.errors import ConfigError
from tokenmill.loader import IGNORE, Layout
from tokenmill.loader.balance import count_costs
from tokenmill.run.run import Run

ARRAYS = (
    "input_ids",
    "labels",
    "position_ids",
    "doc_ids",
    "loss_mask",
    "cu_seqlens",
    "cu_seqlens_unpadded",
    "max_seqlen",
    "num_loss_tokens",
)


def filled_up(run, multiple, **options):
    """Return a run whose segments are filled up."""
    settings = replace(run.config.run, segment_multiple=multiple, **options)
    return Run(config=replace(run.config, run=settings), folder=run.folder, name=run.name)


def expected_rows(run, step, multiple):
    """Lay out the rows of a step, segment by segment."""
    plan = run.plan()
    seq_len = plan.stage(step).spec.seq_len
    pad = 0
    batch = {name: [] for name in ("input_ids", "labels", "position_ids", "doc_ids")}
    bounds, tokens = [0], [0]
    for row, use in enumerate(plan.what(step)):
        ids, labels = np.full(seq_len, pad), np.full(seq_len, IGNORE)
        positions, documents = np.zeros(seq_len, int), np.full(seq_len, -1)
        column = 0
        for number, span in enumerate(use.spans):
            begin, _ = run.stores[use.source].document_bounds(span.document)
            text = run.stores[use.source].fetch(begin + span.start, begin + span.start + span.length, "sequence")
            size = min(span.length, seq_len)
            ids[column : column + size] = text[:size]
            labels[column : column + span.length - 1] = text[1:]
            end = min(seq_len, column + -(-size // multiple) * multiple)
            positions[column:end] = np.arange(end - column)
            documents[column : column + size] = number
            column = end
            bounds.append(row * seq_len + column)
            tokens.append(tokens[-1] + size)
        if column < seq_len:
            positions[column:] = np.arange(seq_len - column)
            bounds.append((row + 1) * seq_len)
            tokens.append(tokens[-1])
        for name, line in zip(batch, (ids, labels, positions, documents), strict=True):
            batch[name].append(line)
    found = {name: np.stack(lines) for name, lines in batch.items()}
    return found | {"cu_seqlens": np.array(bounds), "cu_seqlens_unpadded": np.array(tokens)}


@pytest.mark.parametrize("multiple", [2, 4, 8])
def test_every_segment_begins_at_a_multiple(make_run, multiple):
    """[P1.c] Also where a stage changes the length, and packs what the one before has left."""
    run = filled_up(make_run(packing="best_fit", late_seq_len=24), multiple)
    loader = run.loader(arrays=ARRAYS, micro_batch=12)
    for step in (0, 5, 16, 17, 18, 29):
        batch, expected = loader[step], expected_rows(run, step, multiple)
        for name, array in expected.items():
            assert np.array_equal(batch[name], array), (step, name)
        assert not (batch["cu_seqlens"] % multiple).any()
        assert batch["max_seqlen"] == np.diff(expected["cu_seqlens"]).max()
        assert np.array_equal(batch["loss_mask"], expected["labels"] != IGNORE)
        assert batch["num_loss_tokens"] == (expected["labels"] != IGNORE).sum()


@pytest.mark.parametrize("packing", ["best_fit", "padded"])
def test_padding_is_counted_and_fates_balance(make_run, packing):
    """[P2.a] All tokens are trained on that would be without; what fills up segments is padding."""
    plain = make_run(packing=packing, lengths=16)
    run = filled_up(plain, 8)
    assert run.plan().fingerprint != plain.plan().fingerprint
    for source in ("web", "books"):
        before, after = (r.plan().stages[0].rows[source].fates() for r in (plain, run))
        assert (after.tokens, after.trained, after.masked, after.dropped) == (
            before.tokens,
            before.trained,
            before.masked,
            before.dropped,
        )
        inputs = after.rows * 16 - after.padding
        assert inputs == run.stores[source].num_tokens
        assert after.padding >= before.padding


def test_a_document_that_fills_a_row_has_its_last_label(make_run):
    run = filled_up(make_run(packing="best_fit", lengths=90), 4)
    labels = np.concatenate([run.loader(micro_batch=12)[step]["labels"] for step in range(10)])
    assert (labels[:, -1] != IGNORE).any()


def test_a_horizon_ends_with_its_segment(make_run):
    run = filled_up(make_run(packing="best_fit"), 4, horizon=3)
    plain = filled_up(make_run(packing="best_fit"), 4)
    for step in (0, 17):
        far, near = run.loader(micro_batch=12, arrays=ARRAYS)[step], plain.loader(micro_batch=12)[step]
        assert np.array_equal(far["labels"][..., 0], near["labels"])
        documents = near["doc_ids"]
        same = (documents[:, :-3] == documents[:, 3:]) & (documents[:, :-3] >= 0)
        assert np.array_equal(far["labels"][:, :-3, 2][same], near["input_ids"][:, 3:][same])
        assert (far["labels"][:, :-3, 2][~same] == IGNORE).all()
        assert far["num_loss_tokens"].tolist() == (far["labels"] != IGNORE).sum(axis=(0, 1)).tolist()


def test_costs_are_those_of_segments_with_what_fills_them_up(make_run):
    run = filled_up(make_run(packing="best_fit"), 8)
    plan = run.plan()
    sources, rows = plan.rows(3)
    loader = run.loader(arrays=("input_ids", "cu_seqlens"))
    loader.seek(3)
    for (source, row), batch in zip(zip(sources, rows, strict=True), loader, strict=False):
        cost = count_costs(plan.stage(3).rows[plan.sources[source]], np.array([row]))
        assert cost == (np.diff(batch["cu_seqlens"].astype(int)) ** 2).sum()


def partitioned(bounds, rank, size):
    """Return what Transformer Engine's thd_get_partitioned_indices gives a rank.

    The rule of `thd_partition_indices_kernel` in its transformer_engine/common/fused_attn/context_parallel.cu, line
    by line: sequences are divided by the number of ranks; a token of the second half comes from further behind.
    """
    shares = np.array(bounds) // size
    places = []
    for token in range(shares[-1]):
        sequence = np.searchsorted(shares, token, side="right") - 1
        length = shares[sequence + 1] - shares[sequence]
        index = token - shares[sequence]
        offset = rank if index < length // 2 else (size - 1) * 2 - rank
        places.append(index + shares[sequence] * size + length // 2 * offset)
    return places


@pytest.mark.parametrize("size", [1, 2, 4])
def test_segments_are_cut_as_transformer_engine_cuts_them(make_run, size):
    run = filled_up(make_run(packing="best_fit", late_seq_len=32), 2 * size)
    whole = run.loader(micro_batch=4, arrays=ARRAYS)
    loaders = [
        run.loader(layout=Layout(cp=(rank, size), cut="segments"), micro_batch=4, arrays=ARRAYS)
        for rank in range(size)
    ]
    for number, (batch, *parts) in enumerate(zip(whole, *loaders, strict=True)):
        if number % 9:
            continue
        for rank, part in enumerate(parts):
            places = partitioned(batch["cu_seqlens"], rank, size)
            for name in ("input_ids", "labels", "position_ids", "doc_ids", "loss_mask"):
                assert part[name].shape == (4, batch[name].shape[1] // size)
                assert np.array_equal(part[name].ravel(), batch[name].ravel()[places])
            for name in ("cu_seqlens", "cu_seqlens_unpadded", "max_seqlen"):
                assert np.array_equal(part[name], batch[name])


def test_without_a_multiple_both_bounds_differ_by_padding_alone(make_run):
    batch = make_run(packing="best_fit").loader(micro_batch=12, arrays=ARRAYS)[4]
    assert batch["cu_seqlens_unpadded"][-1] == (batch["doc_ids"] >= 0).sum()
    sizes, tokens = np.diff(batch["cu_seqlens"]), np.diff(batch["cu_seqlens_unpadded"])
    assert set((sizes - tokens)[tokens > 0].tolist()) == {0}


@pytest.mark.parametrize(
    ("run_options", "multiple", "options", "message"),
    [
        ({"packing": "concat"}, 4, {}, "segment_multiple cannot be combined with packing = 'concat'"),
        ({"packing": "bos_best_fit"}, 4, {}, "segment_multiple cannot be combined with packing = 'bos_best_fit'"),
        (
            {"packing": "best_fit", "late_seq_len": 20},
            8,
            {},
            "'talk': seq_len must be divisible by .*, got 20 and 8",
        ),
        ({"packing": "best_fit"}, 0, {}, "segment_multiple must be .*got 0"),
    ],
)
def test_segments_that_cannot_be_filled_up_are_refused(make_run, run_options, multiple, options, message):
    run = make_run(**run_options, add_bos=True)
    with pytest.raises(ConfigError, match=message):
        filled_up(run, multiple, **options).plan()


def test_segments_that_cannot_be_cut_are_refused(make_run):
    run = filled_up(make_run(packing="best_fit"), 4)
    with pytest.raises(ConfigError, match=r"filled up to a multiple of 8 .*, got 4; say segment_multiple = 8"):
        run.loader(layout=Layout(cp=(0, 4), cut="segments"))
