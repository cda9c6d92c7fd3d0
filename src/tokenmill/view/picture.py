"""A run as one picture: shares of the sources over its steps, its stages, and what happens in them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate, chain, groupby, pairwise
from math import ceil, floor, log10
from typing import NamedTuple

import numpy as np

from tokenmill.plan.plan import Plan
from tokenmill.plan.report import PlanReport
from tokenmill.run.report import EvalFacts, Quarantined
from tokenmill.view.tables import batch_size, cell, totals

WIDTH = 1000
LEFT, RIGHT, TOP, BOTTOM = 64.0, 976.0, 118.0, 418.0
"""Height of the shares; the name of the run, `lr_scale` and the names of stages are above them."""
SIZE = 11.0
"""Font size."""
LINE = 16.0
EVENT_LINES = 3
POINTS = 300
"""Number of points per curve, over the whole run."""
WINDOWS = 100
"""Number of windows of steps in which the rows are counted."""
MARKS = 400
"""Maximum number of evaluations that are marked one by one."""
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Palette of Okabe and Ito, which readers with any colour vision can distinguish, and a grey."""
_STYLE = """
.tm{font:11px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
.tm-paper{fill:#fff}.tm-ink{fill:#1c1f24}.tm-dim{fill:#5b616b}.tm-head{font-size:15px;font-weight:600}
.tm-edge{stroke:#1c1f24;fill:none}.tm-grid{stroke:#5b616b;stroke-opacity:.25}
.tm-band{stroke:#fff;stroke-width:.6;stroke-linejoin:round}.tm-veil{fill:#fff;fill-opacity:.72}
.tm-hatch{stroke:#1c1f24;stroke-opacity:.6}.tm-cut{stroke:#1c1f24;stroke-dasharray:4 3}
.tm-mark{fill:#fff;stroke:#1c1f24;stroke-width:1.6}
.tm-label{fill:#1c1f24;stroke:#fff;stroke-width:3;paint-order:stroke;stroke-linejoin:round}
.tm-got{fill:none;stroke:#1c1f24;stroke-width:1.1}.tm-halo{fill:none;stroke:#fff;stroke-width:2.6;stroke-opacity:.7}
@media (prefers-color-scheme:dark){
.tm-paper{fill:#15181d}.tm-ink{fill:#e8eaed}.tm-dim{fill:#a2a9b4}.tm-edge{stroke:#e8eaed}.tm-grid{stroke:#a2a9b4}
.tm-band{stroke:#15181d}.tm-veil{fill:#15181d}.tm-hatch{stroke:#e8eaed}.tm-cut{stroke:#e8eaed}
.tm-mark{fill:#15181d;stroke:#e8eaed}.tm-got{stroke:#e8eaed}.tm-halo{stroke:#15181d}}
"""
_HATCH = (
    '<pattern id="tm-skipped" width="8" height="8" patternUnits="userSpaceOnUse">'
    '<path d="M-2 2l4-4M0 8l8-8M6 10l4-4" class="tm-hatch"/></pattern>'
)


# The shares of sources over the steps of a plan

Point = tuple[float, tuple[float, ...]]
"""A step, and the share of every source at it."""


def sample(plan: Plan) -> list[Point]:
    """Sample the shares of a plan for a curve of straight lines: every edge exactly, ramps at some points."""
    points: list[Point] = []
    for part in plan.stages:
        begin, end = part.spec.start_step, part.end_step
        count = min(part.num_steps, max(8, POINTS * part.num_steps // plan.steps)) if part.spec.ramp else 1
        steps = np.unique(np.linspace(begin, end - 1, count).astype(np.int64)).tolist()
        # The share of a step is drawn at its middle.
        places = [float(begin), *(step + 0.5 for step in steps), float(end)]
        for place, step in zip(places, [steps[0], *steps, steps[-1]], strict=True):
            shares = part.shares(step)
            points.append((place, tuple(shares.get(name, 0.0) for name in plan.sources)))
    return points


def realised(plan: Plan) -> list[tuple[int, int, tuple[float, ...]]]:
    """Count the share of rows of each source in windows of steps: (first, end, shares), all steps in order."""
    windows: list[tuple[int, int, tuple[float, ...]]] = []
    for part in plan.stages:
        count = max(1, min(part.num_steps, WINDOWS * part.num_steps // plan.steps))
        edges = np.linspace(part.spec.start_step, part.end_step, count + 1).astype(np.int64).tolist()
        drawn = [part.drawn(step) for step in edges]
        for (first, before), (end, after) in pairwise(zip(edges, drawn, strict=True)):
            rows = (end - first) * part.spec.global_batch_size
            shares = tuple((after.get(name, 0) - before.get(name, 0)) / rows for name in plan.sources)
            windows.append((first, end, shares))
    return windows


def outlines(points: Sequence[Point], source: int) -> Iterator[list[tuple[float, float]]]:
    """Yield the corners (step, height) of the band of a source, for each range of steps that has it."""
    for is_there, run in groupby(points, key=lambda point: point[1][source] > 0):
        if is_there:
            edges = [(step, sum(shares[:source]), sum(shares[: source + 1])) for step, shares in run]
            upper = [(step, top) for step, _, top in edges]
            lower = [(step, bottom) for step, bottom, _ in reversed(edges)]
            # An upper corner can also be a lower one where stages meet, so only equal neighbours are joined.
            yield [corner for corner, _ in groupby([*upper, *lower])]


# Words and places


def text_of(value: str) -> str:
    """Return a text as XML may hold it: escaped, and without characters that XML forbids.

    >>> text_of("a<b" + chr(27))
    'a&lt;b\ufffd'
    """
    return escape(re.sub("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", value))


def number(value: float) -> str:
    """Return a coordinate, short.

    >>> number(12.0), number(1 / 3)
    ('12', '0.33')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def width_of(text: str, size: float) -> float:
    """Return the estimated width of a text; rather too wide, because the reader chooses the font."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return size * (0.6 * (len(text) - wide) + 1.1 * wide)


def shortened(text: str, size: float, room: float) -> str:
    """Return a text, or its beginning, that fits into the room; empty if hardly any of it fits."""
    if width_of(text, size) <= room:
        return text
    end = len(text)
    while end and width_of(text[:end] + "…", size) > room:
        end -= 1
    return text[:end] + "…" if end >= 3 else ""


def ticks(end: int, most: int) -> list[int]:
    """Return round numbers from 0 to `end`, whole and evenly spaced, at most `most` + 1 of them.

    >>> ticks(1000, 5), ticks(3, 8)
    ([0, 200, 400, 600, 800, 1000], [0, 1, 2, 3])
    """
    least = max(1.0, end / max(1, most))
    power = 10 ** floor(log10(least))
    step = next(ceil(power * factor) for factor in (1, 2, 2.5, 5, 10) if ceil(power * factor) >= least)
    return list(range(0, end + 1, step))


def _text(x: float, y: float, text: str, kind: str = "tm-ink", anchor: str = "start") -> str:
    return f'<text x="{number(x)}" y="{number(y)}" class="{kind}" text-anchor="{anchor}">{text_of(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, paint: str) -> str:
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f"<rect {place} {paint}/>"


def _line(start: tuple[float, float], rest: str, kind: str) -> str:
    return f'<path d="M{number(start[0])} {number(start[1])}{rest}" class="{kind}"/>'


def _group(kind: str, title: str, *parts: str) -> str:
    """Return a group of shapes, with the text of its tooltip."""
    return f'<g class="{kind}"><title>{text_of(title)}</title>{"".join(parts)}</g>'


# The picture


class _Event(NamedTuple):
    step: int
    label: str
    text: str
    """Full text, shown as a tooltip."""
    source: int | None = None
    """Index of the source whose band has the mark; None for a mark over the whole height."""


class _Chart:
    def __init__(self, plan: Plan, report: PlanReport, quarantined: Sequence[Quarantined], by: str) -> None:
        self.plan, self.report, self.by = plan, report, by
        # All steps within a part of a stage have the same number of tokens; those of a whole stage may not.
        slots = [part.num_positions * part.row_slots for part in plan.stages]
        self.part_edges = np.array([part.spec.start_step for part in plan.stages] + [plan.steps])
        self.part_tokens = np.array([0, *accumulate(slots)])
        """Tokens before each of these steps, as in configs: with skipped steps and padding."""
        # Progress of the run at the edges, in the unit of the axis.
        self.edges = np.array([stage.start_step for stage in report.stages] + [plan.steps])
        self.reached = self.edges
        if by == "tokens":
            self.edges, self.reached = self.part_edges, self.part_tokens
        self.points = sample(plan)
        self.events = sorted(_events(report, quarantined))
        self.axis = BOTTOM + (min(EVENT_LINES, len(self.events)) * LINE + 14 if self.events else 0)
        """Vertical position of the steps, below the events."""

    def x(self, step: float) -> float:
        return self.place(float(np.interp(step, self.edges, self.reached)))

    def place(self, reached: float) -> float:
        """Return the progress of the run at a step."""
        return LEFT + (RIGHT - LEFT) * reached / max(int(self.reached[-1]), 1)

    def y(self, share: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * min(1.0, share)


def timeline(
    plan: Plan,
    report: PlanReport,
    name: str,
    quarantined: Sequence[Quarantined] = (),
    evals: Sequence[EvalFacts] = (),
    *,
    by: str = "steps",
) -> str:
    """Draw a plan as a self-contained SVG for light and dark pages, by `steps` or `tokens`."""
    chart = _Chart(plan, report, quarantined, by)
    edges = " ".join(f"{step}:{number(chart.x(step))}" for step in chart.edges.tolist())
    legend = list(_legend(chart))
    height = number(chart.axis + 62 + LINE * len(legend))
    described = "; ".join(
        f"stage {stage.name}, steps {stage.start_step:,} to {stage.end_step:,}: "
        + ", ".join(f"{share.source} {share.asked:.1%}" for share in report.shares if share.stage == stage.name)
        for stage in report.stages
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'class="tm" data-edges="{edges}" role="img" aria-labelledby="tm-title tm-desc">',
        f'<title id="tm-title">{text_of(name)}: shares of sources by step</title>',
        f'<desc id="tm-desc">{text_of(described)}</desc><style>{_STYLE}</style><defs>{_HATCH}</defs>',
        f'<rect width="{WIDTH}" height="{height}" class="tm-paper"/>',
    ]
    shares = chain(_heading(chart, name), _bands(chart), _realised(chart), _skipped(chart))
    around = chain(_axes(chart, evals), _stages(chart), _marks(chart), _evals(chart, evals))
    return "\n".join([*parts, *shares, *around, *legend, "</svg>\n"])


def _events(report: PlanReport, quarantined: Sequence[Quarantined]) -> Iterator[_Event]:
    for index, source in enumerate(report.sources):
        if source.gone_from is not None:
            text = f"source {source.name} has no row left from step {source.gone_from:,} on"
            yield _Event(source.gone_from, f"{source.name} used up", text)
        if source.first_repeat is not None:
            text = f"{source.name} repeats from step {source.first_repeat:,} on"
            yield _Event(source.first_repeat, f"{source.name} repeats", text, index)
    for edit in quarantined:
        number = "all" if edit.whole or edit.documents is None else f"{edit.documents:,}"
        size = "all" if edit.documents is None else f"{edit.documents:,} documents ({edit.tokens:,} tokens)"
        why = f", {edit.reason}" if edit.reason else ""
        text = f"{size} of {edit.source} are quarantined{why}, from step {edit.from_step:,} on"
        yield _Event(edit.from_step, f"{number} of {edit.source} quarantined", text)


def _heading(chart: _Chart, name: str) -> Iterator[str]:
    """Write the name and the totals, and draw `lr_scale`, unless it is always 1."""
    report = chart.report
    words = totals(report)
    room = RIGHT - LEFT - width_of(words, SIZE) - 24
    yield _text(LEFT, 24, shortened(name, 15, room), "tm-ink tm-head")
    yield _text(RIGHT, 24, words, "tm-dim", "end")
    scales = [stage.lr_scale for stage in report.stages]
    if set(scales) == {1}:
        return
    heights = [86 - 40 * scale / max(scales) for scale in scales]
    steps, labels = "", ""
    for stage, y in zip(report.stages, heights, strict=True):
        left, right, label = chart.x(stage.start_step), chart.x(stage.end_step), f"{stage.lr_scale:g}×"
        steps += f"V{number(y)}H{number(right)}"
        if width_of(label, SIZE) + 12 <= right - left:
            labels += _text(left + 5, y + 12 if y < 66 else y - 4, label)
    title = "lr_scale: " + ", ".join(f"{stage.name} {stage.lr_scale:g}" for stage in report.stages)
    yield _group("tm-scale", title, _line((LEFT, heights[0]), steps, "tm-edge"), labels)
    yield _text(LEFT - 8, 54, "lr_scale", "tm-dim", "end") + _text(LEFT - 8, 90, "0", "tm-dim", "end")


def _paint(number: int) -> str:
    """Return the paint of a source: with more sources than colours, each round of colours is paler."""
    rounds, place = divmod(number, len(COLOURS))
    return f'fill="{COLOURS[place]}" fill-opacity="{0.68**rounds:.3g}"'


def _bands(chart: _Chart) -> Iterator[str]:
    for index, source in enumerate(chart.report.sources):
        shapes = [
            "L".join(f"{number(chart.x(step))} {number(chart.y(share))}" for step, share in corners)
            for corners in outlines(chart.points, index)
        ]
        if shapes:
            path = f'<path d="{"".join(f"M{shape}Z" for shape in shapes)}" {_paint(index)} class="tm-band"/>'
            title = f"{source.name}: {source.drawn:,} rows, {_epochs(source.epochs)}"
            yield _group("tm-source", title, path, _label(chart, index, source.name))


def _label(chart: _Chart, index: int, name: str) -> str:
    """Write the name of a source where its band is high for longest, so that readers need no colours."""
    least = (SIZE + 4) / (BOTTOM - TOP)
    runs = [list(run) for fits, run in groupby(chart.points, key=lambda p: p[1][index] >= least) if fits]
    widths = [chart.x(run[-1][0]) - chart.x(run[0][0]) for run in runs]
    if not runs or max(widths) < width_of(name, SIZE) + 16:
        return ""
    run = runs[widths.index(max(widths))]
    x = (chart.x(run[0][0]) + chart.x(run[-1][0])) / 2
    edges = [chart.x(step) for step, _ in run]
    low, high = (np.interp(x, edges, [sum(shares[:end]) for _, shares in run]) for end in (index, index + 1))
    return _text(x, chart.y(float(low + high) / 2) + 4, name, "tm-label", "middle")


def _realised(chart: _Chart) -> Iterator[str]:
    """Draw the shares of the actual rows as lines over those of the weights; where they meet, both are equal."""
    windows = realised(chart.plan)
    for source in range(len(chart.plan.sources) - 1):
        path, is_there = "", False
        for first, end, shares in windows:
            top, left = number(chart.y(sum(shares[: source + 1]))), number(chart.x(first))
            move = f"V{top}" if is_there else f"M{left} {top}"
            path, is_there = path + (f"{move}H{number(chart.x(end))}" if shares[source] else ""), shares[source] > 0
        if path:
            lines = "".join(f'<path d="{path}" class="{kind}"/>' for kind in ("tm-halo", "tm-got"))
            yield _group("tm-realised", f"{chart.plan.sources[source]}: rows drawn", lines)


def _epochs(epochs: float | None) -> str:
    return "live text" if epochs is None else f"{epochs:.4g} epochs"


def _skipped(chart: _Chart) -> Iterator[str]:
    for part in chart.plan.stages:
        if part.spec.skipped is not None:
            begin, end = part.spec.start_step, part.end_step
            x = chart.x(begin)
            wide = max(chart.x(end) - x, 1.5)  # a few steps of a long run must remain visible
            paints = ('class="tm-veil"', 'fill="url(#tm-skipped)"')
            title = f"steps {begin:,} to {end:,} are skipped: {part.spec.skipped or 'no reason'}"
            yield _group("tm-skip", title, *(_rect(x, TOP, wide, BOTTOM - TOP, paint) for paint in paints))


def _axes(chart: _Chart, evals: Sequence[EvalFacts]) -> Iterator[str]:
    for percent in (0, 25, 50, 75, 100):
        y = chart.y(percent / 100)
        yield _line((LEFT, y), f"H{number(RIGHT)}", "tm-grid")
        yield _text(LEFT - 8, y + 4, f"{percent}%", "tm-dim", "end")
    end = int(chart.reached[-1])
    widest = width_of(f"{end:,}", SIZE) + 18
    for reached in ticks(max(end, 1), max(1, int((RIGHT - LEFT) // widest))):
        yield _line((chart.place(reached), chart.axis), "v5", "tm-edge")
        # The last label must stay within the picture.
        x = min(chart.place(reached), WIDTH - 4 - width_of(f"{reached:,}", SIZE) / 2)
        yield _text(x, chart.axis + 18, f"{reached:,}", "tm-dim", "middle")
    yield _line((LEFT, chart.axis), f"H{number(RIGHT)}", "tm-edge")
    words = f"{chart.by.removesuffix('s')}; areas: requested shares, lines: shares of the rows"
    words += "; marks on the axis: evals" if any(each.every or each.every_tokens for each in evals) else ""
    yield _text((LEFT + RIGHT) / 2, chart.axis + 34, words, "tm-dim", "middle")
    turned = f'transform="translate(16 {number((TOP + BOTTOM) / 2)}) rotate(-90)" text-anchor="middle"'
    yield f'<text {turned} class="tm-dim">share of rows</text>'


def _stages(chart: _Chart) -> Iterator[str]:
    for stage in chart.report.stages:
        left, right = chart.x(stage.start_step), chart.x(stage.end_step)
        skipped = f", {stage.skipped_steps:,} of them skipped" if stage.skipped_steps else ""
        batch = f"batch {cell(batch_size(stage))}"
        title = f"{stage.name}: steps {stage.start_step:,} to {stage.end_step:,}{skipped}, {batch}"
        title += f", seq_len {stage.seq_len:,}"
        title += f", lr_scale {stage.lr_scale:g}" if stage.lr_scale != 1 else ""
        label = f"{stage.name}, {batch}"
        name = (
            label if width_of(label, SIZE) <= right - left - 10 else shortened(stage.name, SIZE, right - left - 10)
        )
        edge = _line((left, TOP - 18), f"V{number(BOTTOM)}", "tm-edge")
        yield _group("tm-stage", title, edge, _text(left + 5, TOP - 6, name) if name else "")
    yield _line((RIGHT, TOP - 18), f"V{number(BOTTOM)}", "tm-edge")


def _marks(chart: _Chart) -> Iterator[str]:
    """Mark events, each with a label on the first line below the shares that has room for it."""
    ends = [0.0] * EVENT_LINES
    """End of the last label of each line."""
    for step, label, text, source in chart.events:
        x, top, circle = chart.x(step), TOP, ""
        if source is not None:
            shares = [shares for place, shares in chart.points if place <= step][-1]
            top = chart.y(sum(shares[:source]) + shares[source] / 2)
            circle = f'<circle cx="{number(x)}" cy="{number(top)}" r="4" class="tm-mark"/>'
        line = _line((x, top), f"V{number(BOTTOM + 5)}", "tm-cut") + _line((x, BOTTOM + 1), "l4 7h-8z", "tm-ink")
        wide = width_of(label, SIZE)
        left = min(x - 4, WIDTH - 4 - wide)
        free = next((index for index, end in enumerate(ends) if end <= left), None)
        words = ""
        if free is not None:
            ends[free] = left + wide + 8
            words = _text(left, BOTTOM + 21 + free * LINE, label)
        yield _group("tm-event", text, line, circle, words)


def _evals(chart: _Chart, evals: Sequence[EvalFacts]) -> Iterator[str]:
    """Mark the evals above the axis."""
    for each in evals:
        tokens = int(chart.part_tokens[-1])
        end, every = (chart.plan.steps, each.every) if each.every else (tokens, each.every_tokens)
        if not every:
            continue
        times = np.arange(1, min(end // every, MARKS) + 1) * every
        steps = times if each.every else np.interp(times, chart.part_tokens, chart.part_edges)
        lines = "".join(_line((chart.x(step), chart.axis), "v-7", "tm-edge") for step in steps.tolist())
        unit = "steps" if each.every else "tokens"
        title = f"eval {each.name}: every {every:,} {unit}, {end // every:,} times"
        yield _group(
            "tm-eval",
            title,
            lines if end // every <= MARKS else _line((LEFT, chart.axis - 4), f"H{RIGHT:g}", "tm-edge"),
        )


def _legend(chart: _Chart) -> Iterator[str]:
    """Yield the sources with their shares, one line each."""
    sources, rows = chart.report.sources, chart.report.rows + chart.report.skipped_rows
    longest = max(width_of(source.name, SIZE) for source in sources)
    columns = max(1, min(5, len(sources), int((RIGHT - LEFT) // (min(longest, 400) + 170))))
    wide = (RIGHT - LEFT) / columns
    for first in range(0, len(sources), columns):
        line = ""
        for index, source in enumerate(sources[first : first + columns], first):
            x, y = LEFT + (index - first) * wide, chart.axis + 50 + LINE * (first // columns)
            share = f"{source.drawn / rows:.1%}, {_epochs(source.epochs)}"
            name = shortened(source.name, SIZE, wide - 28 - width_of(share, SIZE))
            title = f"{source.name}: {source.drawn:,} of {rows:,} rows, {_epochs(source.epochs)}"
            box = _rect(x, y, 13, 13, f'rx="2" {_paint(index)}')
            line += _group("tm-legend", title, box, _text(x + 19, y + 10.5, f"{name} {share}"))
        yield line
