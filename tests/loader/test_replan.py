"""A loader that continues with another plan."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from tokenmill.errors import ConfigError, ResumeError
from tokenmill.run.run import Run


def rows_of(batches):
    return [batch["input_ids"].tolist() for batch in batches]


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("drawn", [0, 5, 20, 40])
def test_batches_after_a_replan_are_those_of_the_new_plan(make_run, threads, drawn):
    """Before the first batch, between steps, in the middle of a step, and after the edge of a stage."""
    old, new = make_run(), make_run(name="new", edge=24)
    loader = old.loader(micro_batch=4, threads=threads)
    stream = iter(loader)
    before = rows_of(islice(stream, drawn))
    loader.replan(new.plan())
    assert before + rows_of(stream) == rows_of(new.loader(micro_batch=4, threads=0))
    assert loader.plan is new.plan()


def test_a_replan_may_lengthen_a_run_that_is_over(make_run):
    old = make_run()
    longer = old.lasting(steps=33)
    loader = old.loader(micro_batch=12)
    stream = iter(loader)
    before = rows_of(stream)
    loader.replan(longer.plan())
    assert before + rows_of(loader) == rows_of(longer.loader(micro_batch=12))


def test_a_plan_with_other_earlier_batches_is_rejected_and_the_loader_goes_on(make_run):
    run, other = make_run(), make_run(name="other", books=0.6)
    loader = run.loader(micro_batch=12)
    stream = iter(loader)
    before = rows_of(islice(stream, 3))
    with pytest.raises(ResumeError, match=r"before step 3 differ: stages\[0\]\.weights\.books 0\.3 -> 0\.6"):
        loader.replan(other.plan())
    assert before + rows_of(stream) == rows_of(run.loader(micro_batch=12))


def test_a_plan_that_the_ranks_do_not_divide_is_rejected_and_the_loader_goes_on(make_run):
    run = make_run(edge=24)
    loader = run.loader(micro_batch=12)
    stream = iter(loader)
    before = rows_of(islice(stream, 3))
    text = (run.folder / "run.toml").read_text().replace("global_batch_size = 24", "global_batch_size = 20")
    (run.folder / "odd.toml").write_text(text)
    with pytest.raises(ConfigError, match="must be divisible by world_size"):
        loader.replan(Run.from_toml(run.folder / "odd.toml").plan())
    assert before + rows_of(stream) == rows_of(run.loader(micro_batch=12))


def test_lanes_of_live_text_keep_their_places(tmp_path):
    lines = [json.dumps({"text": "the mill grinds " * (1 + number % 9)}) for number in range(60)]
    (tmp_path / "web.jsonl").write_text("\n".join(lines))

    def run(steps):
        tables = {
            "run": {"steps": steps, "global_batch_size": 4, "seq_len": 24},
            "sources": [{"name": "web", "documents": ["web.jsonl"], "tokenizer": "bytes", "live": True}],
        }
        return Run.from_tables(tables, folder=tmp_path)

    loader = run(6).loader(micro_batch=2)
    stream = iter(loader)
    before = rows_of(islice(stream, 5))
    loader.replan(run(9).plan())
    assert before + rows_of(stream) == rows_of(run(9).loader(micro_batch=2))


def test_a_balanced_loader_assigns_rows_of_the_new_plan(make_run):
    def run(edge):
        plain = make_run(name=f"edge{edge}", edge=edge, packing="best_fit")
        text = (plain.folder / f"edge{edge}.toml").read_text().replace("[run]", '[run]\nbalance = "attention"')
        (plain.folder / f"edge{edge}.toml").write_text(text)
        return Run.from_toml(plain.folder / f"edge{edge}.toml")

    old, new = run(17), run(24)
    parts = []
    for rank in range(2):
        loader = old.loader(rank=rank, world_size=2, micro_batch=6)
        stream = iter(loader)
        first = rows_of(islice(stream, 16))
        loader.replan(new.plan())
        parts.append(first + rows_of(stream))
    expected = [rows_of(new.loader(rank=rank, world_size=2, micro_batch=6)) for rank in range(2)]
    assert parts == expected
    assert not np.array_equal(parts[0][20], parts[1][20])
