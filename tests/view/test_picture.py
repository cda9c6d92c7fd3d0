"""The picture of a plan: valid, complete, and readable for runs of any size."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenmill.plan import Ramp, Shuffle, StageSpec, compile_plan
from tokenmill.plan.report import report
from tokenmill.run.report import EvalFacts, Quarantined
from tokenmill.run.run import Run
from tokenmill.view.picture import (
    BOTTOM,
    LEFT,
    POINTS,
    RIGHT,
    TOP,
    WIDTH,
    outlines,
    realised,
    sample,
    shortened,
    text_of,
    ticks,
    timeline,
    width_of,
)

SVG = "{http://www.w3.org/2000/svg}"

EVENTFUL = """
[run]
seed = 7
steps = 400
global_batch_size = 4
seq_len = 16
[[sources]]
name = "web"
store = "stores/web"
[[sources]]
name = "books"
store = "stores/books"
on_exhausted = "stop"
[[stages]]
name = "base <1>"
start_step = 0
weights = { web = 0.75, books = 0.25 }
[[stages]]
name = "late"
start_step = 100
lr_scale = 0.5
weights = { web = 0.5, books = 0.5 }
ramp = "cosine"
ramp_steps = 250
[[skip]]
steps = "40:60"
reason = "loss & spike"
[[quarantine]]
source = "web"
from_step = 30
documents = [3, 4]
"""


HELD = EvalFacts(
    name="held",
    sources=("web",),
    documents=1,
    held_out=1,
    rows=1,
    seq_len=16,
    tokens=16,
    labels=15,
    every=50,
    every_tokens=None,
    overlaps=(),
)


def drawn(plan, facts, quarantined=(), name="run"):
    return ElementTree.fromstring(timeline(plan, facts, name, quarantined))


def titles(root, kind):
    return [group.findtext(f"{SVG}title") for group in root.iter(f"{SVG}g") if group.get("class") == kind]


@pytest.fixture
def eventful(folder):
    (folder / "eventful.toml").write_text(EVENTFUL, encoding="utf-8")
    plan = Run.from_toml(folder / "eventful.toml").plan()
    edit = Quarantined(source="web", from_step=30, documents=2, tokens=77, whole=False, reason="bad")
    return plan, report(plan, stops={"books": 1.0}), [edit]


def test_everything_that_happens_has_a_text_of_its_own(eventful):
    plan, facts, quarantined = eventful
    root = ElementTree.fromstring(timeline(plan, facts, "run", quarantined, [HELD]))
    web, books = facts.sources
    assert books.gone_from is not None
    assert titles(root, "tm-source") == [
        f"web: {web.drawn:,} rows, {web.epochs:.4g} epochs",
        f"books: {books.drawn:,} rows, {books.epochs:.4g} epochs",
    ]
    assert titles(root, "tm-stage") == [
        "base <1>: steps 0 to 100, 20 of them skipped, batch 4, seq_len 16",
        "late: steps 100 to 400, batch 4, seq_len 16, lr_scale 0.5",
    ]
    assert titles(root, "tm-skip") == ["steps 40 to 60 are skipped: loss & spike"]
    assert titles(root, "tm-event") == [
        "2 documents (77 tokens) of web are quarantined, bad, from step 30 on",
        f"web repeats from step {web.first_repeat:,} on",
        f"source books has no row left from step {books.gone_from:,} on",
    ]
    assert titles(root, "tm-realised") == ["web: rows drawn"]
    assert titles(root, "tm-eval") == ["eval held: every 50 steps, 8 times"]
    assert titles(root, "tm-scale") == ["lr_scale: base <1> 1, late 0.5"]
    assert len(titles(root, "tm-legend")) == 2
    assert root.findtext(f"{SVG}title") == "run: shares of sources by step"


def test_nothing_is_loaded_from_elsewhere(eventful):
    """[S.a]"""
    plan, facts, quarantined = eventful
    text = timeline(plan, facts, "run", quarantined)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert re.findall(r"<script|<image|@import|@font-face|\bon\w+=|href=", text) == []
    assert re.findall(r"url\(([^)]*)\)", text) == ["#tm-skipped"]
    assert "prefers-color-scheme:dark" in text


def test_the_bands_are_the_shares_of_the_plan_at_every_edge_and_along_a_ramp(eventful):
    plan, _, _ = eventful
    points = sample(plan)
    places, heights = [place for place, _ in points], np.array([shares for _, shares in points])
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0, plan.steps)
    for step in range(plan.steps):
        shares = plan.at(step).shares
        middle = [np.interp(step + 0.5, places, heights[:, source]) for source in range(2)]
        assert middle == pytest.approx([shares.get("web", 0), shares.get("books", 0)], abs=2e-3)
    for part in plan.stages:
        assert {part.spec.start_step, part.end_step} <= set(places)
        first = part.shares(part.spec.start_step)
        assert (part.spec.start_step, tuple(first.get(name, 0) for name in plan.sources)) in points
    assert len(points) <= POINTS + 3 * len(plan.stages)


def test_the_lines_are_the_rows_that_the_plan_draws(eventful):
    plan, _, _ = eventful
    windows = realised(plan)
    assert [windows[0][0], *(end for _, end, _ in windows)] == [*(first for first, _, _ in windows), plan.steps]
    for first, end, shares in windows:
        if plan.stage(first).spec.skipped is None:
            drawn_sources = np.concatenate([plan.rows(step)[0] for step in range(first, end)])
            counts = np.bincount(drawn_sources, minlength=2)
            assert list(shares) == (counts / counts.sum()).tolist()


def test_a_band_stands_only_where_its_source_is_drawn(eventful):
    plan, facts, _ = eventful
    gone = next(source.gone_from for source in facts.sources if source.name == "books")
    (corners,) = outlines(sample(plan), plan.sources.index("books"))
    assert (min(corners)[0], max(corners)[0]) == (0, gone)
    assert {height for step, height in corners if step < 100} == {0.75, 1.0}


class AnyRows:
    """Rows of any number, of which a picture needs no more."""

    def __init__(self, num_rows):
        self.num_rows, self.num_rest, self.seq_len, self.row_slots = num_rows, 0, 8, 8
        self.description = self.epoch_description = {"rows": num_rows}
        self.cross_document_labels, self.has_epochs = False, True

    def fates(self):
        from tokenmill.types import Fates

        return Fates(rows=self.num_rows, tokens=0, trained=0, masked=0, dropped={}, padding=0)

    def held(self, rows):
        from tokenmill.plan.rows import TokenCounts

        return TokenCounts(tokens=8 * rows.size, trained=8 * rows.size)


def many(sources, stages, steps):
    names = [f"source-{number}" for number in range(sources)]
    specs = [
        StageSpec(
            name=f"stage number {number}",
            start_step=number * steps // stages,
            global_batch_size=4,
            seq_len=8,
            seed=1,
            shuffle=Shuffle(),
            weights={name: 1 + (index * 7 + number * 3) % 11 for index, name in enumerate(names)},
            rows={name: AnyRows(1 + steps // (2 + index)) for index, name in enumerate(names)},
            number=number,
            lr_scale=1 / (1 + number % 3),
            skipped="bad" if number % 7 == 3 else None,
        )
        for number in range(stages)
    ]
    plan = compile_plan(specs, sources=names, steps=steps)
    return plan, report(plan)


@pytest.mark.parametrize(
    ("sources", "stages", "steps"),
    [(1, 1, 1), (1, 1, 10**9), (3, 4, 10**9), (8, 100, 100), (50, 100, 1000), (50, 100, 10**9)],
)
def test_a_run_of_any_size_is_drawn_within_its_frame(sources, stages, steps):
    plan, facts = many(sources, stages, steps)
    text = timeline(plan, facts, "x" * 300)
    root = ElementTree.fromstring(text)
    assert len(text) < 2_000_000
    _, _, width, height = map(float, root.get("viewBox").split())
    assert width == WIDTH
    assert len(titles(root, "tm-source")) == len(titles(root, "tm-legend")) == sources
    assert len(titles(root, "tm-stage")) == stages
    for node in root.iter(f"{SVG}text"):
        if node.get("x") is not None:
            wide = width_of("".join(node.itertext()), 11)
            left = float(node.get("x")) - {"end": wide, "middle": wide / 2}.get(node.get("text-anchor"), 0)
            assert left >= 0
            assert left + (0 if "tm-head" in node.get("class", "") else wide) <= WIDTH + 1
            assert 0 < float(node.get("y")) < height


@pytest.mark.parametrize(("sources", "stages", "steps"), [(12, 9, 50_000), (50, 100, 10**6)])
def test_labels_of_events_and_stages_do_not_overlap(sources, stages, steps):
    root = drawn(*many(sources, stages, steps))
    for kind in ("tm-event", "tm-stage"):
        boxes = []
        for group in (one for one in root.iter(f"{SVG}g") if one.get("class") == kind):
            for node in group.iter(f"{SVG}text"):
                left = float(node.get("x"))
                boxes.append((float(node.get("y")), left, left + width_of(node.text, 11)))
        assert boxes or (kind, sources) == ("tm-stage", 50)
        # Labels stand on lines, so that they overlap only within one.
        assert all(before[0] != after[0] or before[2] <= after[1] for before, after in pairwise(sorted(boxes)))


def test_more_sources_than_colours_are_told_apart_by_how_pale_they_are():
    root = drawn(*many(17, 1, 100))
    for kind, shape in (("tm-source", "path"), ("tm-legend", "rect")):
        groups = [group for group in root.iter(f"{SVG}g") if group.get("class") == kind]
        shapes = [group.find(f"{SVG}{shape}") for group in groups]
        assert len({(node.get("fill"), node.get("fill-opacity")) for node in shapes}) == 17


def test_names_cannot_break_the_picture():
    """[S.a]"""
    plan, facts = many(1, 1, 5)
    root = ElementTree.fromstring(timeline(plan, facts, "<script>\x1b[31m & \ufffe ' \""))
    assert root.findtext(f"{SVG}title") == "<script>\ufffd[31m & \ufffd ' \": shares of sources by step"
    assert text_of("a\x00<b>&\x7f") == "a\ufffd&lt;b&gt;&amp;\ufffd"


@pytest.mark.parametrize("end", [1, 2, 3, 7, 10, 99, 1000, 12_345, 10**9])
@pytest.mark.parametrize("most", [1, 4, 10])
def test_ticks_are_round_even_and_few(end, most):
    found = ticks(end, most)
    assert found[0] == 0
    assert len(found) <= most + 1
    assert found[-1] <= end
    gaps = {after - before for before, after in pairwise(found)}
    assert len(gaps) <= 1
    assert all(str(gap).rstrip("0") in {"1", "2", "25", "3", "5"} for gap in gaps)


def test_a_name_is_shortened_or_left_out():
    assert [shortened("anneal", 10, room) for room in (36, 30, 10)] == ["anneal", "anne…", ""]


def staged(weights, *, num_steps=10, batches=None, ramps=(), skips=()):
    """Return a plan with these weights one after another, two of them a stage; some are ramps, some are skipped."""
    names = [f"s{number}" for number in range(len(weights[0]))]
    lengths = [num_steps] * len(weights) if isinstance(num_steps, int) else num_steps
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    shares = [{name: weight for name, weight in zip(names, line, strict=True) if weight} for line in weights]
    specs = [
        StageSpec(
            name=f"stage {number}",
            start_step=starts[number],
            global_batch_size=batches[number] if batches else 4,
            seq_len=8,
            seed=1,
            shuffle=Shuffle(),
            weights=shares[number],
            rows={name: AnyRows(1000) for name in {*shares[number], *shares[number - 1 if number else 0]}},
            ramp=Ramp(shape=ramps[number], begin=starts[number], end=starts[number + 1], weights=shares[number - 1])
            if number and number < len(ramps) and ramps[number]
            else None,
            number=number // 2,
            skipped="bad" if number in skips else None,
        )
        for number in range(len(weights))
    ]
    return compile_plan(specs, sources=names, steps=starts[-1])


def heights(path, x):
    """Return how high an area of straight lines is above a place, by where the vertical line crosses its edges."""
    crossed = []
    for shape in re.findall(r"M([^MZ]*)Z", path):
        corners = [tuple(map(float, corner.split(" "))) for corner in shape.split("L")]
        for (left, one), (right, other) in pairwise([*corners, corners[0]]):
            if min(left, right) <= x < max(left, right):
                crossed.append(one + (other - one) * (x - left) / (right - left))
    crossed.sort()
    return sum(below - above for above, below in zip(crossed[::2], crossed[1::2], strict=True))


def measured(plan, by):
    """Return the share of each source at the middle of each step, as the picture is drawn."""
    root = ElementTree.fromstring(timeline(plan, report(plan), "run", by=by))
    rows = [plan.at(step).global_batch_size if by == "tokens" else 1 for step in range(plan.steps)]
    places = LEFT + (RIGHT - LEFT) * (np.cumsum(rows) - np.array(rows) / 2) / sum(rows)
    paths = {
        group.findtext(f"{SVG}title").partition(":")[0]: group.find(f"{SVG}path").get("d")
        for group in root.iter(f"{SVG}g")
        if group.get("class") == "tm-source"
    }
    return [[heights(paths.get(name, ""), x) / (BOTTOM - TOP) for name in plan.sources] for x in places.tolist()]


def asked(plan):
    return [[plan.at(step).shares.get(name, 0) for name in plan.sources] for step in range(plan.steps)]


WEIGHTS = st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    weights=WEIGHTS,
    lengths=st.lists(st.integers(1, 12), min_size=5, max_size=5),
    ramps=st.lists(st.sampled_from([None, "linear", "cosine"]), min_size=5, max_size=5),
    batches=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    skips=st.sets(st.integers(0, 4), max_size=2),
    by=st.sampled_from(["steps", "tokens"]),
)
@example([[4, 4, 2], [2, 2, 6]], [50, 50] * 3, [None] * 5, [1] * 5, set(), "steps")
@example([[1, 1, 1], [1, 2, 1], [1, 2, 1]], [5] * 5, [None] * 5, [1, 9, 4, 4, 4], set(), "tokens")
@example([[2, 1, 1], [1, 1, 0], [0, 1, 1]], [1] * 5, [None, "linear", None], [4] * 5, {1}, "tokens")
def test_each_band_is_as_high_as_the_share_of_its_source_at_every_step(weights, lengths, ramps, batches, skips, by):
    plan = staged(weights, num_steps=lengths[: len(weights)], ramps=ramps, batches=batches, skips=skips)
    bands = measured(plan, by)
    assert np.abs(np.array(bands) - asked(plan)).max() < 1e-3
    assert np.abs(np.sum(bands, axis=1) - 1).max() < 1e-3


def test_evals_by_tokens_are_marked_where_a_batch_that_grows_reaches_them():
    plan = staged([[1], [1]], num_steps=10, batches=[1, 9])  # one stage of 80, then 720 tokens
    every = replace(HELD, every=None, every_tokens=80)
    for by, places in (("steps", [10 + 10 * n / 9 for n in range(10)]), ("tokens", range(2, 21, 2))):
        root = ElementTree.fromstring(timeline(plan, report(plan), "run", evals=[every], by=by))
        (group,) = (group for group in root.iter(f"{SVG}g") if group.get("class") == "tm-eval")
        marks = [float(re.match(r"M([\d.]+)", path.get("d"))[1]) for path in group.iter(f"{SVG}path")]
        assert marks == pytest.approx([LEFT + (RIGHT - LEFT) * place / 20 for place in places], abs=0.01)
