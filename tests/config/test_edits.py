"""Edits of a run under way: what came before stays as it was, and no token is lost or repeated by them."""

import copy
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.config.run import QuarantineConfig, parse_config
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.loader import batch_digest, row_digests
from tokenmill.plan.stages import rows_at
from tokenmill.run.run import Run

SIZES = {"web": 40, "books": 17, "code": 23}
STEPS, BATCH = 24, 4
BASE = {
    "run": {"steps": STEPS, "global_batch_size": BATCH, "seq_len": 16, "seed": 5},
    "sources": [{"name": name, "store": name} for name in ("web", "books")],
    "stages": [
        {"name": "base", "start_step": 0, "weights": {"web": 2, "books": 1}},
        {"name": "late", "start_step": 15, "weights": {"web": 1, "books": 1}, "seq_len": 11},
    ],
}


@pytest.fixture
def run_of(make_store, tmp_path):
    rng = np.random.default_rng(3)
    for name, number in SIZES.items():
        make_store(name, [int(n) for n in rng.integers(0, 40, number)], max_tokens_per_shard=200, seed=number)
    return lambda tables: Run(config=parse_config(tables), folder=tmp_path)


def digests(run, first=0):
    """Return the digest of the global batch of every step that is trained on."""
    plan, loader = run.plan(), run.loader(micro_batch=BATCH, threads=0)
    steps = [step for step in range(first, plan.steps) if plan.at(step).skipped is None]
    return {step: batch_digest(row_digests(loader[step])) for step in steps}


def labels(run, name):
    """Return how often every token of a source was a label, skipped steps included, and when it last was."""
    plan = run.plan()
    offsets = run.stores[name].document_offsets(0, run.stores[name].num_documents)
    counts = np.zeros(int(offsets[-1]), np.int64)
    last = np.full(counts.size, -1)
    for step in range(plan.steps):
        stage = plan.stage(step)
        slots = np.arange(stage.spec.global_batch_size)
        sources, rows = rows_at(stage, np.full_like(slots, step), slots)
        own = rows[sources == plan.sources.index(name)]
        spans = stage.rows[name].spans(own) if own.size else None
        for row in range(own.size):
            for span in spans.row(row):
                tokens = slice(*(offsets[span.document] + span.start + np.array([1, span.length])))
                counts[tokens] += 1
                last[tokens] = step
    firsts = offsets[:-1][np.diff(offsets) > 0]
    return np.delete(counts, firsts), np.delete(last, firsts), np.delete(_documents(offsets), firsts)


def _documents(offsets):
    return np.repeat(np.arange(offsets.size - 1), np.diff(offsets))


@st.composite
def edits(draw):
    """Return (first step that changes, edited tables, documents put aside by source, with the step)."""
    at = draw(st.integers(0, STEPS - 1))
    tables, aside, first = copy.deepcopy(BASE), {}, STEPS
    for kind in draw(
        st.lists(st.sampled_from(["skip", "documents", "source", "stage", "add"]), min_size=1, max_size=3)
    ):
        step = draw(st.integers(at, STEPS - 1))
        if kind == "skip" and "skip" not in tables:
            end = draw(st.integers(step + 1, STEPS))
            if (step, end) == (0, STEPS):
                continue
            tables["skip"] = [{"steps": f"{step}:{end}", "reason": "a spike"}]
        elif kind == "documents":
            name = draw(st.sampled_from(["web", "books"]))
            numbers = draw(st.sets(st.integers(0, SIZES[name] - 1), min_size=1, max_size=8))
            tables.setdefault("quarantine", []).append(
                {"source": name, "from_step": step, "documents": sorted(numbers)}
            )
            for number in numbers:
                aside.setdefault(name, {}).setdefault(number, step)
                aside[name][number] = min(aside[name][number], step)
        elif kind == "source" and not tables.get("quarantine"):
            tables["quarantine"] = [{"source": "books", "from_step": step, "reason": "licence"}]
        elif (
            kind in ("stage", "add")
            and step > 0
            and step != 15
            and not any(s["name"] == kind for s in tables["stages"])
        ):
            weights = {"web": draw(st.sampled_from([1, 3, 0.2])), "books": 1}
            stage = {"name": kind, "start_step": step, "weights": weights}
            if kind == "add":
                tables["sources"].append({"name": "code", "store": "code"})
                weights["code"] = 2
            if draw(st.booleans()):
                stage |= {"ramp": draw(st.sampled_from(["linear", "cosine"])), "ramp_steps": 1}
            tables["stages"] = sorted([*tables["stages"], stage], key=lambda one: one["start_step"])
            if len({one["start_step"] for one in tables["stages"]}) < len(tables["stages"]):
                tables["stages"].remove(stage)
                continue
        else:
            continue
        first = min(first, step)
    return first, tables, aside


@pytest.mark.slow
@given(edits())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_edit_leaves_the_past_alone_and_loses_and_repeats_nothing(run_of, edit):
    """[M1.c, R1.d]"""
    first, tables, aside = edit
    base, edited = run_of(BASE), run_of(tables)
    before, after = digests(base), digests(edited)
    assert {step: value for step, value in after.items() if step < first} == {
        step: value for step, value in before.items() if step < first
    }
    # A state of the run as it was is accepted by the run as it is now, up to the edit.
    loader = base.loader(micro_batch=BATCH, threads=0)
    loader.seek(first)
    resumed = edited.loader(micro_batch=BATCH, threads=0)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    rest = [batch_digest(row_digests(batch)) for batch in resumed]
    assert rest == [value for step, value in after.items() if step >= first]
    # Every label of an epoch is seen once before one is seen again; what is put aside is not seen from then on.
    for name in edited.config.source_names:
        counts, last, documents = labels(edited, name)
        hidden = aside.get(name, {})
        kept = ~np.isin(documents, list(hidden))
        assert counts[kept].max(initial=0) - counts[kept].min(initial=counts[kept].max(initial=0)) <= 1
        for document, step in hidden.items():
            assert last[documents == document].max(initial=-1) < step


def test_an_edit_of_the_past_is_refused_with_the_first_difference(run_of):
    base = run_of(BASE)
    loader = base.loader(micro_batch=BATCH, threads=0)
    loader.seek(10)
    edited = run_of({**BASE, "skip": [{"steps": "4:6"}]})
    with pytest.raises(ResumeError, match="batches before step 10 must be those of this run"):
        edited.loader(micro_batch=BATCH).load_state_dict(loader.state_dict())


def test_a_loader_jumps_over_skipped_steps(run_of):
    whole, edited = run_of(BASE), run_of({**BASE, "skip": [{"steps": "4:6"}, {"steps": "22:24"}]})
    every = digests(whole)
    left = [step for step in range(STEPS) if step not in (4, 5, 22, 23)]
    assert digests(edited) == {step: every[step] for step in left}
    loader = edited.loader(micro_batch=2)
    assert len(loader) == 2 * len(left)
    steps = [loader.step for _ in loader]
    assert steps[6:9] == [3, 6, 6]
    assert steps[-1] == STEPS
    loader.seek(5)
    assert loader.step == 6
    assert loader.state_dict()["step"] == 6


def test_a_source_that_restarts_does_so_however_its_stage_is_cut(run_of):
    """The source is not drawn before the cut: it must still start again, as it would without."""
    late = {"name": "late", "start_step": 10, "seq_len": 8, "on_change": "restart"}
    late["weights"] = {"web": 0.985, "books": 0.015}
    tables = {**BASE, "stages": [BASE["stages"][0], late]}
    whole, cut = digests(run_of(tables)), digests(run_of({**tables, "skip": [{"steps": "12:13"}]}))
    assert cut == {step: value for step, value in whole.items() if step != 12}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_skip_together(run_of, world_size):
    """[E1.a]"""
    edited = run_of({**BASE, "skip": [{"steps": "4:6"}]})
    loaders = [edited.loader(rank=rank, world_size=world_size, micro_batch=1) for rank in range(world_size)]
    streams = [iter(loader) for loader in loaders]
    found = {}
    for step in digests(edited):
        rows = [row for stream in streams for _ in range(BATCH // world_size) for row in row_digests(next(stream))]
        found[step] = batch_digest(rows)
    assert found == digests(edited)


def test_documents_may_be_named_in_a_file(run_of, tmp_path):
    (tmp_path / "bad.txt").write_text("# found by the filter of May\n7\n\n3  # doubled\n7\n")
    listed = run_of({**BASE, "quarantine": [{"source": "web", "from_step": 3, "documents": [3, 7]}]})
    named = run_of({**BASE, "quarantine": [{"source": "web", "from_step": 3, "file": "bad.txt"}]})
    assert digests(named) == digests(listed)
    assert named.plan().fingerprint == listed.plan().fingerprint
    assert QuarantineConfig(source="web", from_step=3, file="bad.txt").numbers(tmp_path).tolist() == [3, 7]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            {"skip": [{"steps": "6:4"}]},
            "skip: steps must be a:b with a below b, got '6:4'; for example steps = '1200:1240'",
        ),
        (
            {"skip": [{"steps": "x"}]},
            "skip: steps must be a:b with a below b, got 'x'; for example steps = '1200:1240'",
        ),
        ({"skip": [{"steps": "20:30"}]}, "skip 20:30: steps must lie within 0:24, got 30; shorten it"),
        (
            {"skip": [{"steps": "4:6"}, {"steps": "5:7"}]},
            "skip 5:7: steps must be skipped once, got those before 6 twice; join the two",
        ),
        ({"skip": [{"steps": "0:24"}]}, "skip: a run must train on some step, got all 24 skipped; shorten it"),
        (
            {"quarantine": [{"source": "wep", "from_step": 1}]},
            "quarantine: source must be one of the run's, got 'wep'; did you mean 'web'?",
        ),
        (
            {"quarantine": [{"source": "web", "from_step": 24}]},
            "quarantine of 'web': from_step must be below run.steps 24, got 24; leave it out",
        ),
        (
            {"quarantine": [{"source": "web", "from_step": -1}]},
            "quarantine of 'web': from_step must not be negative, got -1; count from 0",
        ),
        (
            {"quarantine": [{"source": "web", "from_step": 1, "documents": [-4]}]},
            "quarantine of 'web': documents must be numbers from 0 on, got -4; count from 0",
        ),
        (
            {"quarantine": [{"source": "web", "from_step": 1, "documents": [10**20]}]},
            f"quarantine of 'web': documents must be numbers from 0 on, got {10**20}; count from 0",
        ),
        (
            {"quarantine": [{"source": "web", "from_step": 1, "documents": []}]},
            "quarantine of 'web': documents must name some, got an empty list; leave the quarantine out, "
            "or documents to quarantine the whole source",
        ),
        (
            {"quarantine": [{"source": "books", "from_step": 9, "documents": list(range(17))}]},
            "stage 'base': a source must have documents left at step 9, got all of 'books' in quarantine; "
            "quarantine the whole source: leave out documents and file",
        ),
        (
            {"quarantine": [{"source": "web", "from_step": 1, "documents": [4], "file": "x"}]},
            "quarantine of 'web': `documents` cannot be combined with `file`; remove one",
        ),
        (
            {"quarantine": [{"source": "web", "from_step": 1, "documents": ["4"]}]},
            "quarantine[0].documents: expected a list of whole numbers, got ['4']; change its type",
        ),
        (
            {"quarantine": [{"source": "web", "from_step": 7}, {"source": "books", "from_step": 9}]},
            "stage 'base': no source is left at step 9, because all of ['books', 'web'] are quarantined; "
            "end the run before, or add a source to the stage",
        ),
    ],
)
def test_edits_that_do_not_fit_are_refused(run_of, edit, message):
    with pytest.raises(ConfigError) as error:
        run_of({**BASE, **edit}).plan()
    assert str(error.value) == message


def test_a_file_of_documents_that_is_none_is_refused(run_of, tmp_path):
    (tmp_path / "bad.txt").write_text("7\nseven\n")
    with pytest.raises(ConfigError) as error:
        run_of({**BASE, "quarantine": [{"source": "web", "from_step": 3, "file": "bad.txt"}]}).plan()
    assert str(error.value) == (
        f"{tmp_path / 'bad.txt'}, line 2: must be the number of a document, got 'seven'; "
        "write one a line, what follows # is not read"
    )
    with pytest.raises(ConfigError, match=r"file must be a text with numbers of documents, got .*; fix it"):
        run_of({**BASE, "quarantine": [{"source": "web", "from_step": 3, "file": "none.txt"}]}).plan()


def test_a_document_that_a_store_does_not_have_is_refused(run_of):
    with pytest.raises(ConfigError, match=r"web: .* 40"):
        run_of({**BASE, "quarantine": [{"source": "web", "from_step": 3, "documents": [40]}]}).plan()
