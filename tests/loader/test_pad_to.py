"""Rows that are padded to the longest of their micro-batch hold the same tokens."""

import numpy as np
import pytest

from tokenmill.config.run import parse_config
from tokenmill.errors import ConfigError
from tokenmill.run.run import Run

LENGTHS = np.random.default_rng(0).integers(1, 30, 40).tolist()
ARRAYS = ("input_ids", "labels", "position_ids", "doc_ids", "loss_mask", "source", "num_loss_tokens")


@pytest.fixture
def make_run(tmp_path, make_store):
    make_store("web", LENGTHS)

    def make(source=None, **run):
        tables = {
            "run": {"steps": 9, "global_batch_size": 12, "seq_len": 32, "packing": "padded"} | run,
            "sources": [{"name": "web"} | (source or {"store": "web"})],
        }
        return Run(config=parse_config(tables), folder=tmp_path)

    return make


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 12), (2, 3), (3, 1)])
def test_a_batch_is_as_long_as_its_longest_row_and_else_the_same(make_run, world_size, micro_batch, threads):
    options = {"world_size": world_size, "micro_batch": micro_batch, "arrays": ARRAYS, "threads": threads}
    for rank in range(world_size):
        wide = list(make_run().loader(rank=rank, **options))
        short = list(make_run(pad_to="batch").loader(rank=rank, **options))
        for full, batch in zip(wide, short, strict=True):
            longest = int((full["doc_ids"] >= 0).sum(axis=1).max())
            assert batch["input_ids"].shape == (micro_batch, longest)
            for name in ARRAYS:
                cut = full[name][:, :longest] if full[name].ndim > 1 else full[name]
                assert np.array_equal(batch[name], cut), name
                assert batch[name].flags.c_contiguous
            assert (full["labels"][:, longest:] == -100).all()


def test_bounds_of_segments_are_those_of_the_shorter_rows(make_run):
    arrays = ("doc_ids", "cu_seqlens", "max_seqlen")
    for batch in make_run(pad_to="batch").loader(micro_batch=4, arrays=arrays):
        doc_ids = batch["doc_ids"]
        begins = np.flatnonzero(np.diff(doc_ids, axis=1, prepend=-2)).tolist()
        assert batch["cu_seqlens"].tolist() == [*begins, doc_ids.size]
        assert batch["max_seqlen"] == np.diff(batch["cu_seqlens"]).max()


def test_resume_goes_on_with_the_same_short_batches(make_run):
    loader = make_run(pad_to="batch").loader(micro_batch=3)
    batches = [batch["input_ids"].tolist() for batch in loader]
    first = make_run(pad_to="batch").loader(micro_batch=3)
    stream = iter(first)
    for _ in range(5):
        next(stream)
    again = make_run().loader(micro_batch=3, pad_to="batch")
    again.load_state_dict(first.state_dict())
    assert [batch["input_ids"].tolist() for batch in again] == batches[5:]


def test_packed_rows_are_full_and_refuse_it(make_run):
    with pytest.raises(ConfigError, match=r"pad_to = .batch. cannot be combined with packing = 'best_fit'"):
        make_run(pad_to="batch", packing="best_fit").plan()


@pytest.mark.parametrize(
    ("run", "source", "got"),
    [
        ({"packing": "best_fit"}, {}, r"packing = 'best_fit'"),
        ({"segment_multiple": 8}, {}, r"segment_multiple = 8"),
        ({"packing": "best_fit"}, {"documents": ["web.txt"], "tokenizer": "bytes", "live": True}, r"live text"),
    ],
)
def test_what_a_config_refuses_is_refused_as_an_argument(make_run, tmp_path, run, source, got):
    """Else rows of live text, of which it is not known how long they are, would lose all their tokens but one."""
    (tmp_path / "web.txt").write_text("the mill grinds words\n" * 40)
    made = make_run(source=source, **run)
    with pytest.raises(ConfigError, match=rf"pad_to = .batch. cannot be combined with {got}"):
        made.loader(micro_batch=3, pad_to="batch")
