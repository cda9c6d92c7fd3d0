"""Labels beyond the next token."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tokenmill.errors import ConfigError, ResumeError
from tokenmill.loader import IGNORE
from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter


def with_horizon(run, horizon, **options):
    """Return a run whose labels are the next `horizon` tokens."""
    settings = replace(run.config.run, horizon=horizon, **options)
    return Run(config=replace(run.config, run=settings), folder=run.folder, name=run.name)


def expected_labels(run, step, horizon):
    """Return the labels of a step, token by token: those of the segment of each input, and of it alone."""
    plan = run.plan()
    seq_len = plan.stage(step).spec.seq_len
    rows = []
    for use in plan.what(step):
        store = run.stores[use.source]
        labels = np.full((seq_len, horizon), IGNORE)
        column = 0
        segments = []
        for span in use.spans:
            begin, _ = store.document_bounds(span.document)
            joined = segments and segments[-1][1][-1] == (span.document, 0) and span.start > 0
            places = [(span.document, span.start + k) for k in range(span.length)]
            tokens = store.fetch(begin + span.start, begin + span.start + span.length, "sequence").tolist()
            if joined:
                segments[-1][1].extend(places)
                segments[-1][2].extend(tokens)
            else:
                segments.append((column, places, tokens))
            column += span.length
        for first, _, tokens in segments:
            for k in range(len(tokens)):
                for ahead in range(horizon):
                    if first + k < seq_len and k + 1 + ahead < len(tokens):
                        labels[first + k, ahead] = tokens[k + 1 + ahead]
        rows.append(labels)
    return np.stack(rows)


@pytest.mark.parametrize("horizon", [2, 3, 7, 40])
@pytest.mark.parametrize("packing", ["concat", "best_fit", "bos_best_fit"])
def test_labels_are_the_next_tokens_of_the_document_of_their_input(make_run, packing, horizon):
    """At cuts of long documents, at ends of rows, in padding, after a BOS, and in the rest of an earlier stage."""
    run = with_horizon(make_run(packing=packing, late_seq_len=24, add_bos=True), horizon)
    loader = run.loader(micro_batch=12, arrays=("input_ids", "labels", "num_loss_tokens"))
    for step in (0, 3, 16, 17, 20, 29):
        labels, expected = loader[step]["labels"], expected_labels(run, step, horizon)
        assert labels.shape == expected.shape
        assert np.array_equal(labels, expected)
        assert loader[step]["num_loss_tokens"].tolist() == (expected != IGNORE).sum(axis=(0, 1)).tolist()


def test_the_first_label_is_that_of_a_run_without_a_horizon(make_run, global_batches):
    plain = make_run(packing="best_fit")
    run = with_horizon(plain, 3)
    assert run.plan().fingerprint != plain.plan().fingerprint
    for step in (0, 17, 29):
        far, near = run.loader()[step], plain.loader()[step]
        assert np.array_equal(far["labels"][..., 0], near["labels"])
        for name in ("input_ids", "position_ids", "doc_ids"):
            assert np.array_equal(far[name], near[name])
    reference = global_batches(run, micro_batch=12, threads=0)
    assert global_batches(run, world_size=4, micro_batch=3, threads=2) == reference


def test_the_last_inputs_of_a_full_row_have_the_labels_that_the_row_holds(make_run):
    run = with_horizon(make_run(packing="concat", lengths=500), 5)
    labels = run.loader(micro_batch=12)[0]["labels"]
    assert (labels[:, -5:] != IGNORE).sum(axis=2).max(axis=0).tolist() == [5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("packing", "options"), [("best_fit", {"on_long": "truncate_end"}), ("bos_best_fit", {"crop": "discard"})]
)
def test_a_token_that_is_dropped_is_no_label(make_run, packing, options):
    run = with_horizon(make_run(packing=packing, add_bos=True), 4, **options)
    for step in (0, 5):
        labels = run.loader(micro_batch=12)[step]["labels"]
        assert np.array_equal(labels, expected_labels(run, step, 4))
    assert (labels[:, -1, 1:] == IGNORE).all()


def test_a_token_that_a_mask_leaves_out_is_a_label_of_no_input(tmp_path):
    ids, offsets = np.arange(100, 140, dtype=np.uint16), np.array([0, 10, 40])
    mask = np.ones(40, np.uint8)
    mask[[3, 4, 25, 26]] = 0
    spec = StoreSpec(
        keys={"sequence": "<u2", "loss_mask": "|u1"}, tokenizer={"vocab_size": 200}, recipe={}, kind="sft"
    )
    with StoreWriter(tmp_path / "store", spec) as writer:
        writer.append({"sequence": ids, "loss_mask": mask}, offsets)
        writer.commit()
    tables = {
        "run": {"steps": 1, "global_batch_size": 2, "seq_len": 20, "horizon": 3},
        "sources": [{"name": "web", "store": "store"}],
    }
    tables["run"] |= {"shuffle": "none", "global_batch_size": 1, "packing": "concat"}
    run = Run.from_tables(tables, folder=tmp_path)
    batch = run.loader(arrays=("input_ids", "labels", "loss_mask", "num_loss_tokens"))[0]
    expected = np.full((20, 3), IGNORE)
    for k in range(20):
        for ahead in range(3):
            after = k + 1 + ahead
            if (k < 10) == (after < 10) and mask[after] and after <= 20:
                expected[k, ahead] = ids[after]
    assert np.array_equal(batch["labels"][0], expected)
    assert np.array_equal(batch["loss_mask"][0], expected != IGNORE)
    assert batch["num_loss_tokens"].tolist() == (expected != IGNORE).sum(axis=0).tolist()


def test_shards_that_are_copied_in_turns_give_the_same_labels(make_run, monkeypatch):
    run = with_horizon(make_run(packing="best_fit"), 4)
    expected = run.loader(micro_batch=12)[17]
    again = with_horizon(make_run(packing="best_fit"), 4)
    maps = next(iter(again.stores.values()))._maps
    monkeypatch.setattr(type(maps), "limit", 8, raising=False)
    batch = again.loader(micro_batch=12)[17]
    assert all(np.array_equal(batch[name], expected[name]) for name in expected)


def test_live_text_has_the_labels_of_prepared_text(tmp_path):
    lines = [json.dumps({"text": "the mill grinds " * (1 + number % 9)}) for number in range(40)]
    (tmp_path / "web.jsonl").write_text("\n".join(lines))
    for packing in ("best_fit", "concat", "bos_best_fit"):
        tables = {
            "run": {"steps": 4, "global_batch_size": 4, "seq_len": 24, "packing": packing},
            "sources": [{"name": "web", "documents": ["web.jsonl"], "tokenizer": "bytes", "live": True}],
        }
        near = list(Run.from_tables(tables, folder=tmp_path).loader(micro_batch=4))
        tables["run"]["horizon"] = 4
        far = list(Run.from_tables(tables, folder=tmp_path).loader(micro_batch=4))
        for one, other in zip(near, far, strict=True):
            assert np.array_equal(one["input_ids"], other["input_ids"])
            labels, inputs, documents = other["labels"], other["input_ids"], other["doc_ids"]
            assert np.array_equal(labels[..., 0], one["labels"])
            for ahead in range(1, 4):
                # Within a row a label is the input so many columns later, if that is of the same segment.
                same = documents[:, : -1 - ahead] == documents[:, 1 + ahead :]
                same &= documents[:, : -1 - ahead] >= 0
                assert np.array_equal(labels[:, : -1 - ahead, ahead][same], inputs[:, 1 + ahead :][same])
                assert (labels[:, : -1 - ahead, ahead][~same] == IGNORE).all()


def test_a_state_of_another_horizon_is_refused(make_run):
    run = make_run(packing="best_fit")
    loader = run.loader(micro_batch=12)
    next(iter(loader))
    with pytest.raises(ResumeError, match="batches before step 1 must be those of this run"):
        with_horizon(run, 2).loader(micro_batch=12).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"horizon": 0}, "horizon must be from 1 to 64, got 0; leave it out for the next token"),
        ({"horizon": 65}, "horizon must be from 1 to 64, got 65"),
        (
            {"horizon": 2, "cross_document_labels": True, "packing": "concat"},
            "horizon cannot be combined with cross_document_labels",
        ),
    ],
)
def test_a_horizon_that_cannot_be_is_refused(make_run, keys, message):
    run = make_run()
    with pytest.raises(ConfigError, match=message):
        replace(run, config=replace(run.config, run=replace(run.config.run, **keys))).plan()
