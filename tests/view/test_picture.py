"""The picture of a plan: valid, complete, and readable for runs of any size."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from tokenmill.plan import Shuffle, StageSpec, compile_plan
from tokenmill.plan.report import report
from tokenmill.run.report import EvalFacts, Quarantined
from tokenmill.run.run import Run
from tokenmill.view.picture import (
    POINTS,
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
        self.cross_document_labels, self.counted = False, self

    def fates(self):
        from tokenmill.types import Fates

        return Fates(rows=self.num_rows, tokens=0, trained=0, masked=0, dropped={}, padding=0)

    def held(self, rows):
        from tokenmill.plan.stages import Held

        return Held(tokens=8 * rows.size, trained=8 * rows.size)


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
