"""What a notebook prints of the main objects: a few lines, whatever the size of a run."""

from __future__ import annotations

import re

import pytest

from tokenmill.run.run import Run


@pytest.fixture
def folder(make_store, tmp_path):
    for number in range(12):
        make_store(f"s{number}", [20, 30, 40, 7] * 6, seed=number)
    return tmp_path


def tables(num_sources, num_stages):
    names = [f"s{number}" for number in range(num_sources)]
    return {
        "run": {"steps": 40, "global_batch_size": 4, "seq_len": 16},
        "sources": [{"name": name, "store": name} for name in names],
        "stages": [
            {"name": f"stage{number}", "start_step": number, "weights": dict.fromkeys(names, 1 + number % 2)}
            for number in range(num_stages)
        ],
        "evals": [{"name": "held", "source": "s0", "documents": "0:2"}],
    }


def test_each_object_says_what_it_is(folder):
    run = Run.from_tables(tables(2, 2), folder=folder, name="first")
    assert repr(run) == (
        "<Run 'first': 40 steps, sources s0, s1\n"
        " stage0, from step 0: s0 1, s1 1\n"
        " stage1, from step 1: s0 2, s1 2>"
    )
    assert "stores" not in vars(run)
    plan = run.plan()
    short = plan.fingerprint[:8]
    assert repr(plan) == (
        f"<Plan {short}: 40 steps\n"
        " stage0, steps 0:1: 4 rows of 16 tokens, s0 50%, s1 50%\n"
        " stage1, steps 1:40: 4 rows of 16 tokens, s0 50%, s1 50%>"
    )
    loader = run.loader(rank=1, world_size=2, micro_batch=2)
    next(iter(loader))
    assert repr(loader) == (
        f"<Loader of plan {short}: at step 1 of 40, rank 1 of 2, micro_batch 2\n"
        " arrays input_ids, labels, position_ids, doc_ids; threads 1, prefetch 8>"
    )
    assert repr(run.evals["held"]) == "<Eval 'held': rows of 16 tokens from s0>"
    assert re.fullmatch(rf"<RunReport of plan {short}: 40 steps, 160 rows, .* tokens; .*>", repr(run.report()))


def test_a_large_run_takes_five_lines(folder):
    run = Run.from_tables(tables(12, 30), folder=folder)
    for shown in (repr(run), repr(run.plan())):
        assert len(shown.splitlines()) == 5
        assert len(shown) < 800
        assert "and 27 more stages" in shown


def test_a_run_without_a_length_has_a_repr(folder):
    written = tables(1, 0)
    del written["run"]["steps"]
    assert repr(Run.from_tables(written, folder=folder)) == "<Run 'run': no length yet, sources s0>"
