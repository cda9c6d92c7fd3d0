import numpy as np
import pytest

from tokenmill.errors import PlanError
from tokenmill.packing import ConcatRows
from tokenmill.plan import Shuffle, StageSpec, compile_plan
from tokenmill.store import open_store


@pytest.fixture
def stored_plan(make_store):
    """Two real stores, three stages, several epochs, documents longer and shorter than a row, empty ones too."""
    rng = np.random.default_rng(3)
    rows = {}
    for name, count in (("web", 120), ("books", 40)):
        lengths = [int(n) for n in rng.integers(0, 40, count)]
        path, _, _ = make_store(name, lengths, max_tokens_per_shard=300)
        rows[name] = ConcatRows(store=open_store(path), seq_len=16)
    stages = [(0, 6, {"web": 0.7, "books": 0.3}), (200, 4, {"web": 1}), (700, 6, {"web": 0.1, "books": 0.9})]
    specs = [
        StageSpec(
            name=f"s{start}",
            start_step=start,
            global_batch_size=batch,
            seq_len=16,
            seed=5,
            shuffle=Shuffle(),
            weights=weights,
            rows={name: rows[name] for name in weights},
        )
        for start, batch, weights in stages
    ]
    return compile_plan(specs, sources=("web", "books"), steps=1_200), rows


def test_when_of_what_names_the_step_for_all_documents_of_1000_random_steps(stored_plan):
    """[O1.b] With the very slot and span."""
    plan, _ = stored_plan
    known: dict[tuple[str, int], set[tuple]] = {}
    for step in np.random.default_rng(0).choice(plan.steps, 1_000, replace=False).tolist():
        for use in plan.what(step):
            for span in use.spans:
                key = (use.source, span.document)
                if key not in known:
                    known[key] = {(u.step, u.slot, u.row, s) for u in plan.when(*key) for s in u.spans}
                assert (step, use.slot, use.row, span) in known[key]


def test_when_names_no_other_step(stored_plan):
    plan, _ = stored_plan
    seen = []
    for step in range(plan.steps):
        for use in plan.what(step):
            seen += [(step, use.slot, use.row, s) for s in use.spans if (use.source, s.document) == ("web", 17)]
    found = [(use.step, use.slot, use.row, span) for use in plan.when("web", 17) for span in use.spans]
    assert found == sorted(seen, key=lambda item: item[:2])
    assert found


def test_what_is_in_the_order_of_the_global_batch(stored_plan):
    plan, _ = stored_plan
    sources, rows = plan.rows(201)
    uses = plan.what(201)
    assert [use.slot for use in uses] == list(range(4))
    assert [(plan.sources.index(use.source), use.row) for use in uses] == list(
        zip(sources.tolist(), rows.tolist(), strict=True)
    )
    assert all(sum(span.length for span in use.spans) == 17 for use in uses)


def test_a_document_with_no_tokens_is_never_seen(stored_plan):
    plan, rows = stored_plan
    offsets = rows["web"].store.document_offsets(0, 120)
    empty = int(np.flatnonzero(np.diff(offsets) == 0)[0])
    assert plan.when("web", empty) == ()


def test_an_unknown_source_names_the_nearest(stored_plan):
    with pytest.raises(PlanError, match=r"unknown source: 'wb'; did you mean 'web'\?"):
        stored_plan[0].when("wb", 0)


@pytest.mark.parametrize("step", [-1, 1_200])
def test_a_step_outside_the_run_is_refused(stored_plan, step):
    with pytest.raises(PlanError, match=rf"step: must lie within 0:1200, got {step}"):
        stored_plan[0].what(step)


def test_when_reaches_far_into_a_long_plan(numbered_rows):
    """[R2.a, O1.b] A source of a billion rows, a hundred million steps: answered at once, and inverse."""
    rows = {"web": numbered_rows(10**9, "web"), "books": numbered_rows(10**8, "books")}
    spec = StageSpec(
        name="long",
        start_step=0,
        global_batch_size=64,
        seq_len=8,
        seed=1,
        shuffle=Shuffle(),
        weights={"web": 0.8, "books": 0.2},
        rows=rows,
    )
    plan = compile_plan([spec], sources=("web", "books"), steps=10**8)
    for step in (0, 999_999, 99_999_999):
        sources, found = plan.rows(step)
        for slot in (0, 31, 63):
            uses = plan.when(plan.sources[sources[slot]], int(found[slot]))
            assert (step, slot) in [(use.step, use.slot) for use in uses]
