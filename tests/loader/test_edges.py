"""Stage edges and ramps, as ranks see them: the declared step for all of them, and exact resume around it."""

import json
import logging
import re

import numpy as np
import pytest

from tokenmill.config.run import parse_config
from tokenmill.errors import ConfigError, PlanError
from tokenmill.loader import batch_digest, row_digests
from tokenmill.run.run import Run

EDGES = (6, 11, 16, 20)
TABLES = {
    "run": {"steps": 24, "global_batch_size": 12, "seq_len": 16, "seed": 5},
    "sources": [{"name": name, "store": name} for name in ("web", "books", "code")],
    "stages": [
        {"name": "base", "start_step": 0, "weights": {"web": 0.7, "books": 0.3}},
        {"name": "ramp", "start_step": 6, "weights": {"code": 2, "web": 1}, "ramp": "linear", "ramp_steps": 5},
        {"name": "long", "start_step": 16, "weights": {"code": 1, "books": 1}, "seq_len": 24, "lr_scale": 0.5},
        {"name": "small", "start_step": 20, "weights": {"books": 1}, "global_batch_size": 24, "seq_len": 24},
    ],
}


@pytest.fixture
def run(make_store, tmp_path):
    rng = np.random.default_rng(3)
    for name, number in {"web": 90, "books": 50, "code": 60}.items():
        make_store(name, [int(n) for n in rng.integers(0, 60, number)], max_tokens_per_shard=300, seed=number)
    return Run(config=parse_config(TABLES), folder=tmp_path)


def drawn(run, loaders, until):
    """Draw with all ranks to a step; return (step, digest of the global batch)."""
    streams = [iter(loader) for loader in loaders]
    found = []
    for step in range(loaders[0].step, until):
        count = loaders[0].part.batches(run.plan().stage(step))
        rows = [row for stream in streams for _ in range(count) for row in row_digests(next(stream))]
        found.append((step, batch_digest(rows)))
    return found


def loaders_of(run, world_size, micro_batch, **options):
    return [
        run.loader(rank=rank, world_size=world_size, micro_batch=micro_batch, **options)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize(
    ("world_size", "micro_batch", "threads", "prefetch"),
    [(1, 12, 0, 1), (1, 1, 2, 64), (2, 3, 1, 8), (3, 4, 3, 2), (4, 1, 0, 8), (6, 2, 1, 1), (12, 1, 1, 8)],
)
def test_the_switch_is_at_the_declared_step_for_every_rank(run, world_size, micro_batch, threads, prefetch):
    """[M1.b, E1.a]"""
    plan = run.plan()
    names = {number: set() for number in range(4)}
    for step in range(24):
        names[plan.at(step).index] |= {plan.sources[source] for source in plan.rows(step)[0]}
    assert names == {0: {"web", "books"}, 1: {"web", "books", "code"}, 2: {"code", "books"}, 3: {"books"}}
    assert [plan.at(step).stage for edge in (6, 16, 20) for step in (edge - 1, edge)] == [
        *("base", "ramp", "ramp", "long", "long", "small")
    ]
    whole = drawn(run, loaders_of(run, 1, 12, threads=0), 24)
    assert drawn(run, loaders_of(run, world_size, micro_batch, threads=threads, prefetch=prefetch), 24) == whole


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_resume_around_an_edge_gives_the_same_stream(run, edge, offset):
    """[R1.b] Twice in a row, and with another world size each time."""
    whole = drawn(run, loaders_of(run, 1, 12, threads=0), 24)
    first = loaders_of(run, 2, 3)
    got = drawn(run, first, edge + offset)
    state = json.loads(json.dumps(first[1].state_dict()))
    for world_size, micro_batch, until in ((4, 3, edge + offset), (3, 2, edge + offset + 1), (1, 12, 24)):
        loaders = loaders_of(run, world_size, micro_batch)
        for loader in loaders:
            loader.load_state_dict(state)
        assert loaders[-1].state_dict() == state  # [R1.c]
        got += drawn(run, loaders, until)
        state = json.loads(json.dumps(loaders[-1].state_dict()))
    assert got == whole


def test_a_state_names_the_stage_for_people(run):
    loader = run.loader(micro_batch=12)
    told = []
    for step in (0, 5, 6, 16, 23, 24):
        loader.seek(step)
        state = loader.state_dict()
        assert len(json.dumps(state)) <= 200
        told.append((state["stage_idx"], state["stage_name"]))
    assert told == [(0, "base"), (0, "base"), (1, "ramp"), (2, "long"), (3, "small"), (3, "small")]
    # What is told is not asked for: a renamed stage, or a state without it, is the same place.
    renamed = {**loader.state_dict(), "stage_name": "other", "stage_idx": 7}
    loader.load_state_dict(renamed)
    loader.load_state_dict({key: value for key, value in renamed.items() if not key.startswith("stage")})
    assert loader.step == 24


def test_the_plan_and_every_transition_are_logged_by_one_rank(run, caplog):
    caplog.set_level(logging.INFO, logger="tokenmill")
    for rank in (1, 0):
        for _ in run.loader(rank=rank, world_size=2, micro_batch=6):
            pass
    found = [record.getMessage() for record in caplog.records]
    assert found == [
        f"plan {run.plan().fingerprint[:16]}: 24 steps, now at step 0",
        "stage 0 'base': steps 0:6, 1,152 tokens, batch 12, seq_len 16, books 30.0%, web 70.0%",
        "stage 1 'ramp': steps 6:16, 1,920 tokens, batch 12, seq_len 16, code 66.7%, web 33.3%",
        "stage 2 'long': steps 16:20, 1,152 tokens, batch 12, seq_len 24, books 50.0%, code 50.0%, lr_scale 0.5",
        "stage 3 'small': steps 20:24, 2,304 tokens, batch 24, seq_len 24, books 100.0%",
        "step 6: stage 'base' -> 'ramp': batch 12, seq_len 16, code 66.7%, web 33.3% "
        "by a linear ramp until step 11; changes: sources (books, web -> code, web), weights",
        "step 16: stage 'ramp' -> 'long': batch 12, seq_len 24, books 50.0%, code 50.0%, lr_scale 0.5; "
        "changes: sources (code, web -> books, code), weights, seq_len 16 -> 24, lr_scale 1 -> 0.5",
        "step 20: stage 'long' -> 'small': batch 24, seq_len 24, books 100.0%; "
        "changes: sources (books, code -> books), weights, batch 12 -> 24, lr_scale 0.5 -> 1",
    ]


def test_a_transition_lists_what_changes(make_store, tmp_path, caplog):
    """As the torchtitan fork lists it; a stage that differs in its name alone changes nothing."""
    make_store("web", [40] * 90)
    stages = [
        {"name": "a", "start_step": 0},
        {"name": "b", "start_step": 2},
        {"name": "c", "start_step": 4, "seed": 9, "packing": "best_fit", "shuffle": "none"},
    ]
    run = {"steps": 6, "global_batch_size": 4, "seq_len": 16, "seed": 5, "packing": "concat"}
    tables = {"run": run, "sources": [{"name": "web", "store": "web"}], "stages": stages}
    caplog.set_level(logging.INFO, logger="tokenmill")
    for _ in Run(config=parse_config(tables), folder=tmp_path).loader(micro_batch=4):
        pass
    assert [record.getMessage().partition("changes: ")[2] for record in caplog.records[-2:]] == [
        "none",
        "packing concat -> best_fit, shuffle full -> none, seed 5 -> 9",
    ]


def test_an_iteration_that_starts_late_tells_where_it_stands(run, caplog):
    caplog.set_level(logging.INFO, logger="tokenmill")
    loader = run.loader(micro_batch=12)
    loader.seek(16)
    next(iter(loader))
    assert caplog.records[0].getMessage().endswith("24 steps, now at step 16")
    assert len(caplog.records) == 5


@pytest.mark.parametrize("step", ["3", 2.5, 3.0, None, [1]])
def test_a_step_that_is_no_whole_number_is_named(run, step):
    plan, loader = run.plan(), run.loader()
    asks = (plan.at, plan.stage, plan.rows, plan.what, plan.tokens_seen, plan.next_trained)
    for ask in (*asks, loader.__getitem__, loader.seek):
        with pytest.raises(PlanError, match=r"^step: expected a whole number, got .*; count from 0$"):
            ask(step)
    with pytest.raises(PlanError, match=r"^step: .*got slice\(0, 2, None\); pass one step at a time$"):
        loader[0:2]
    with pytest.raises(PlanError, match=r"^document: expected a whole number, got '3'; count from 0$"):
        plan.when(plan.sources[0], "3")


def test_a_step_of_numpy_is_a_step(run):
    loader, other = run.loader(), run.loader()
    assert row_digests(loader[np.int64(3)]) == row_digests(loader[3])
    loader.seek(np.int32(3))
    other.seek(3)
    assert json.dumps(loader.state_dict()) == json.dumps(other.state_dict())
    assert json.dumps(run.plan().what(np.int64(3))[0].step) == "3"


@pytest.mark.parametrize("key", ["arrays", "columns"])
@pytest.mark.parametrize(("names", "way_out"), [("labels", "['labels']"), (5, "[...]"), ([5], "[...]")])
def test_names_that_are_no_list_of_names_are_refused(run, key, names, way_out):
    message = f"{key}: expected a list of names, got {names!r}; say {key}={way_out}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        run.loader(**{key: names})
