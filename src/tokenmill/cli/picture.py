"""A run as one picture: shares of the sources over its steps, its stages, and what happens in them."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from itertools import accumulate
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.cli.console import cell
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.plan.plan import Plan
    from tokenmill.plan.report import PlanReport, StageFacts
    from tokenmill.plan.stages import Stage
    from tokenmill.run.report import Example


# The shares of sources over the steps of a plan, as bands that lie on one another.

RAMP_POINTS = 200
"""A ramp is drawn with at most so many points; one of half as many steps, or fewer, step by step."""
_RUN_POINTS = 400
"""A ramp that takes up little of the run has its part of so many: nobody sees more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Steps over which the shares go in straight lines."""

    begin: float
    end: float
    """In steps; edges of stages are whole numbers."""
    first: tuple[float, ...]
    """Share of every source at the beginning."""
    last: tuple[float, ...]

    def at(self, step: float) -> tuple[float, ...]:
        """Return the shares at a step within."""
        way = (step - self.begin) / (self.end - self.begin)
        return tuple(a + (b - a) * way for a, b in zip(self.first, self.last, strict=True))


@dataclass(frozen=True, kw_only=True)
class Bands:
    """All sources of a plan, the first at the bottom."""

    sources: tuple[str, ...]
    pieces: tuple[Piece, ...]

    @cached_property
    def _begins(self) -> list[float]:
        return [piece.begin for piece in self.pieces]

    @cached_property
    def _floors(self) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
        """Of each piece, on what every band lies at its beginning and its end."""
        return [
            (tuple(accumulate(piece.first, initial=0.0)), tuple(accumulate(piece.last, initial=0.0)))
            for piece in self.pieces
        ]

    def at(self, source: str, step: float) -> tuple[float, float]:
        """Return (lower, upper) edge of a band at a step, within 0 and 1."""
        number = self.sources.index(source)
        shares = self.pieces[bisect_right(self._begins, step) - 1].at(step)
        below = sum(shares[:number])
        return below, below + shares[number]

    def outlines(self, source: str) -> Iterator[list[tuple[float, float]]]:
        """Yield the outlines of a band as corners (step, height), one for each run of steps that it is there."""
        number = self.sources.index(source)
        upper: list[tuple[float, float]] = []
        lower: list[tuple[float, float]] = []
        for piece, floors in zip(self.pieces, self._floors, strict=True):
            if piece.first[number] > 0 or piece.last[number] > 0:
                for step, floor in zip((piece.begin, piece.end), floors, strict=True):
                    for edge, corner in ((lower, (step, floor[number])), (upper, (step, floor[number + 1]))):
                        # Where one piece ends as the next begins there is one corner.
                        if not edge or edge[-1] != corner:
                            edge.append(corner)
            elif upper:
                yield [*upper, *reversed(lower)]
                upper, lower = [], []
        if upper:
            yield [*upper, *reversed(lower)]

    def widest(self, source: str, least: float) -> tuple[float, float] | None:
        """Return the longest run of steps over which a band of unchanging height is at least so high."""
        number = self.sources.index(source)
        flat = [
            (piece.end - piece.begin, piece.begin, piece.end)
            for piece in self.pieces
            if piece.first == piece.last and piece.first[number] >= least
        ]
        if not flat:
            return None
        _, begin, end = max(flat)
        return begin, end


def bands(plan: Plan) -> Bands:
    """Sample the shares of a plan: every edge exactly, ramps at few points."""
    pieces: list[Piece] = []
    for part in plan.stages:
        for piece in _pieces(part, plan):
            before = pieces[-1] if pieces else None
            # What only skips steps, or only renames the stage, is no edge.
            if before is not None and before.first == before.last == piece.first == piece.last:
                pieces[-1] = Piece(begin=before.begin, end=piece.end, first=piece.first, last=piece.last)
            else:
                pieces.append(piece)
    return Bands(sources=plan.sources, pieces=tuple(pieces))


def _pieces(part: Stage, plan: Plan) -> Iterator[Piece]:
    begin, end = part.spec.start_step, part.end_step

    def shares(step: int) -> tuple[float, ...]:
        found = part.shares(step)
        return tuple(found.get(name, 0.0) for name in plan.sources)

    ramp = part.spec.ramp
    if ramp is None:
        yield Piece(begin=begin, end=end, first=shares(begin), last=shares(begin))
        return
    length = ramp.end - ramp.begin
    # A ramp that is cut into parts has the points of one that is not.
    points = max(2, min(RAMP_POINTS, max(8, _RUN_POINTS * length // plan.steps)) * (end - begin) // length - 2)
    if end - begin <= points // 2:
        for step in range(begin, end):
            yield Piece(begin=step, end=step + 1, first=shares(step), last=shares(step))
        return
    steps = np.unique(np.linspace(begin, end - 1, points).astype(np.int64)).tolist()
    # The share of a step stands at its middle.
    places = [float(begin), *(step + 0.5 for step in steps), float(end)]
    values = [shares(steps[0]), *(shares(step) for step in steps), shares(steps[-1])]
    for number in range(len(places) - 1):
        yield Piece(begin=places[number], end=places[number + 1], first=values[number], last=values[number + 1])


# Pieces of an SVG picture: text that is safe in XML, ticks, colours, and labels that do not overlap.

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Of Okabe and Ito, told apart by readers of every colour vision, and a grey."""
ON_COLOURS = ("#ffffff", "#000000", "#ffffff", "#000000", "#000000", "#000000", "#000000", "#000000")
"""What is read best on each."""
TEXTURES = (
    "",
    '<path d="M-1 1l2-2M0 6l6-6M5 7l2-2" class="tm-texture"/>',
    '<circle cx="3" cy="3" r="1.1" class="tm-dot"/>',
    '<path d="M0 3h6" class="tm-texture"/>',
    '<path d="M3 0v6" class="tm-texture"/>',
    '<path d="M-1 5l2 2M0 0l6 6M5-1l2 2" class="tm-texture"/>',
    '<path d="M0 3h6M3 0v6" class="tm-texture"/>',
)
"""Laid over the colours where there are more sources than colours."""


def colour(number: int) -> str:
    """Return the colour of a source."""
    return COLOURS[number % len(COLOURS)]


def texture(number: int) -> int:
    """Return which texture a source has; 0 is none."""
    return number // len(COLOURS) % len(TEXTURES)


def patterns(sources: int) -> str:
    """Return the textures that so many sources need, as definitions."""
    used = sorted({texture(number) for number in range(sources)} - {0})
    size = 'width="6" height="6" patternUnits="userSpaceOnUse"'
    return "".join(f'<pattern id="tm-p{one}" {size}>{TEXTURES[one]}</pattern>' for one in used)


def text_of(value: str) -> str:
    """Return a text as XML may hold it: escaped, and without characters that XML forbids.

    >>> text_of("a<b" + chr(27))
    'a&lt;b\ufffd'
    """
    allowed = "".join(
        character if character in "\t\n" or _is_allowed(ord(character)) else "\ufffd" for character in value
    )
    return escape(allowed)


def _is_allowed(code: int) -> bool:
    return 0x20 <= code < 0x7F or 0xA0 <= code <= 0xD7FF or 0xE000 <= code <= 0xFFFD or code >= 0x10000


def number(value: float) -> str:
    """Return a coordinate, short.

    >>> number(12.0), number(1 / 3)
    ('12', '0.33')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def width_of(text: str, size: float) -> float:
    """Return about how wide a text is; rather too wide than too narrow, as the font is the reader's."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return size * (0.6 * (len(text) - wide) + 1.1 * wide)


def shortened(text: str, size: float, room: float) -> str:
    """Return a text, or its beginning, that fits into some room; nothing if hardly any of it does."""
    if width_of(text, size) <= room:
        return text
    end = len(text)
    while end and width_of(text[:end] + "…", size) > room:
        end -= 1
    return text[:end] + "…" if end >= 3 else ""


def ticks(end: int, most: int) -> list[int]:
    """Return round numbers from 0 to `end`, at most so many and one more, whole and evenly spaced.

    >>> ticks(1000, 5), ticks(3, 8)
    ([0, 200, 400, 600, 800, 1000], [0, 1, 2, 3])
    """
    least = max(1.0, end / max(1, most))
    power = 10 ** floor(log10(least))
    step = next(ceil(power * factor) for factor in (1, 2, 2.5, 5, 10) if ceil(power * factor) >= least)
    return list(range(0, end + 1, step))


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A place that something takes up."""

    left: float
    top: float
    width: float
    height: float

    def meets(self, other: Box) -> bool:
        """Say whether two places overlap."""
        return (
            self.left < other.left + other.width
            and other.left < self.left + self.width
            and self.top < other.top + other.height
            and other.top < self.top + self.height
        )


@dataclass(slots=True)
class Places:
    """What is taken on a picture; a label gets the first place that is free, or none."""

    frame: Box
    taken: list[Box] = field(default_factory=list)

    def take(self, wanted: Iterable[Box]) -> Box | None:
        """Take and return the first of some places that lies within the frame and is free."""
        for box in wanted:
            inside = (
                box.left >= self.frame.left
                and box.top >= self.frame.top
                and box.left + box.width <= self.frame.left + self.frame.width
                and box.top + box.height <= self.frame.top + self.frame.height
            )
            if inside and not any(box.meets(other) for other in self.taken):
                self.taken.append(box)
                return box
        return None


def polygon(corners: Sequence[tuple[float, float]]) -> str:
    """Return a closed outline as the data of a path."""
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in corners) + "Z"


WIDTH = 1000
LEFT, RIGHT = 64.0, 976.0
SHARES_HEIGHT = 300.0
SCALE_HEIGHT = 46.0
SIZE = 11.0
"""Of letters."""
LANE = 16.0
LEGEND_LINE = 20.0
EVENT_LINES = 3

_STYLE = """
.tm{font:11px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
.tm-paper{fill:#fff}.tm-ink{fill:#1c1f24}.tm-dim{fill:#5b616b}.tm-head{font-size:15px;font-weight:600}
.tm-edge{stroke:#1c1f24;stroke-width:1}.tm-grid{stroke:#5b616b;stroke-opacity:.25;stroke-width:1}
.tm-band{stroke:#fff;stroke-width:.6;stroke-linejoin:round}.tm-veil{fill:#fff;fill-opacity:.72}
.tm-hatch{stroke:#1c1f24;stroke-opacity:.6;stroke-width:1.2}.tm-line{fill:none;stroke:#1c1f24;stroke-width:1.8}
.tm-mark{fill:#fff;stroke:#1c1f24;stroke-width:1.6}.tm-cut{stroke:#1c1f24;stroke-width:1.2;stroke-dasharray:4 3}
.tm-tag{fill:#fff;fill-opacity:.88}.tm-none{fill:#fff;fill-opacity:0}
.tm-texture{fill:none;stroke:#000;stroke-opacity:.45;stroke-width:1}.tm-dot{fill:#000;fill-opacity:.45}
@media (prefers-color-scheme:dark){
.tm-paper{fill:#15181d}.tm-ink{fill:#e8eaed}.tm-dim{fill:#a2a9b4}.tm-edge{stroke:#e8eaed}.tm-grid{stroke:#a2a9b4}
.tm-band{stroke:#15181d}.tm-veil{fill:#15181d}.tm-hatch{stroke:#e8eaed}.tm-line{stroke:#e8eaed}
.tm-mark{fill:#15181d;stroke:#e8eaed}.tm-cut{stroke:#e8eaed}.tm-tag{fill:#15181d}}
"""
_HATCH = (
    '<pattern id="tm-skipped" width="8" height="8" patternUnits="userSpaceOnUse">'
    '<path d="M-2 2l4-4M0 8l8-8M6 10l4-4" class="tm-hatch"/></pattern>'
)


@dataclass(frozen=True, kw_only=True)
class _Chart:
    """What is drawn, and where: heights count from the top."""

    plan: Plan
    facts: PlanReport
    name: str

    @cached_property
    def bands(self) -> Bands:
        return bands(self.plan)

    @property
    def scaled(self) -> bool:
        """Whether the learning rate is scaled anywhere."""
        return any(stage.lr_scale != 1 for stage in self.facts.stages)

    @property
    def names_top(self) -> float:
        """Where the names of stages stand."""
        return 40 + (SCALE_HEIGHT + 14 if self.scaled else 0)

    @property
    def top(self) -> float:
        return self.names_top + LANE + 2

    @property
    def bottom(self) -> float:
        return self.top + SHARES_HEIGHT

    @property
    def events_height(self) -> float:
        """Room for what happens below the shares."""
        return min(EVENT_LINES, len(self.events)) * LANE + 6 if self.events else 0

    @property
    def legend_top(self) -> float:
        return self.bottom + self.events_height + 50

    @cached_property
    def legend_columns(self) -> int:
        longest = max(width_of(name, SIZE) for name in self.plan.sources)
        return max(1, min(5, len(self.plan.sources), int((RIGHT - LEFT) // (min(longest, 400) + 90))))

    @property
    def height(self) -> float:
        lines = -(-len(self.plan.sources) // self.legend_columns)
        return self.legend_top + lines * LEGEND_LINE + 12

    @cached_property
    def events(self) -> list[tuple[int, str, str]]:
        """(step, short label, whole text) of sources that stop and of what is put aside, by step."""
        found = [
            (source.gone_from, f"{source.name} used up", f"source {source.name} has no row left from step ")
            for source in self.facts.sources
            if source.gone_from is not None
        ]
        for aside in self.facts.quarantined:
            what = "all" if aside.whole else f"{aside.documents:,}"
            why = f", {aside.reason}" if aside.reason else ""
            told = f"{aside.documents:,} documents ({aside.tokens:,} tokens) of {aside.source} are put aside{why}"
            found.append((aside.from_step, f"{what} of {aside.source} aside", f"{told}, from step "))
        return [(step, label, f"{text}{step:,} on") for step, label, text in sorted(found)]

    @cached_property
    def repeats(self) -> dict[str, tuple[float, float]]:
        """Where the sources that repeat do so first."""
        found = {}
        for source in self.facts.sources:
            if source.first_repeat is not None:
                low, high = self.bands.at(source.name, source.first_repeat)
                found[source.name] = self.x(source.first_repeat), self.y((low + high) / 2)
        return found

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / self.plan.steps

    def y(self, share: float) -> float:
        return self.bottom - SHARES_HEIGHT * min(1.0, share)


def timeline(plan: Plan, facts: PlanReport, name: str) -> str:
    """Draw a plan as an SVG that needs nothing else, for light and dark pages."""
    chart = _Chart(plan=plan, facts=facts, name=name)
    height = number(chart.height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'class="tm" role="img" aria-labelledby="tm-title tm-desc">',
        f'<title id="tm-title">{text_of(name)}: shares of sources by step</title>',
        f'<desc id="tm-desc">{text_of(_described(facts))}</desc>',
        f"<style>{_STYLE}</style><defs>{_HATCH}{patterns(len(plan.sources))}</defs>",
        f'<rect width="{WIDTH}" height="{height}" class="tm-paper"/>',
        *_heading(chart),
        *_areas(chart),
        *_skipped(chart),
        *_axes(chart),
        *_stages(chart),
        *(_scales(chart) if chart.scaled else ()),
        *_events(chart),
        *_marks(chart),
        *_legend(chart),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _described(facts: PlanReport) -> str:
    return "; ".join(
        f"stage {stage.name}, steps {stage.start_step:,} to {stage.end_step:,}: "
        + ", ".join(f"{s.source} {s.asked:.1%}" for s in facts.shares if s.stage == stage.name)
        for stage in facts.stages
    )


def _text(x: float, y: float, text: str, kind: str = "tm-ink", anchor: str = "start") -> str:
    anchored = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{number(x)}" y="{number(y)}" class="{kind}"{anchored}>{text_of(text)}</text>'


def _heading(chart: _Chart) -> Iterator[str]:
    facts = chart.facts
    told = f"{facts.steps:,} steps, {facts.rows:,} rows, {facts.tokens:,} tokens"
    told += f", {facts.skipped_steps:,} steps skipped" if facts.skipped_steps else ""
    room = RIGHT - LEFT - width_of(told, SIZE) - 24
    yield _text(LEFT, 24, shortened(chart.name, 15, room), "tm-ink tm-head")
    yield _text(RIGHT, 24, told, "tm-dim", "end")


def _areas(chart: _Chart) -> Iterator[str]:
    for index, source in enumerate(chart.plan.sources):
        outlines = [
            polygon([(chart.x(step), chart.y(share)) for step, share in outline])
            for outline in chart.bands.outlines(source)
        ]
        if not outlines:
            continue
        data, fact = "".join(outlines), chart.facts.sources[index]
        title = f"{source}: {fact.drawn:,} rows, {_epochs(fact.epochs)}"
        yield f'<g class="tm-source"><title>{text_of(title)}</title>'
        yield f'<path d="{data}" fill="{colour(index)}" class="tm-band"/>'
        if texture(index):
            yield f'<path d="{data}" fill="url(#tm-p{texture(index)})"/>'
        yield "</g>"
    yield from _band_names(chart)


def _band_names(chart: _Chart) -> Iterator[str]:
    """Write names of sources into their bands, where there is room and nothing else is marked."""
    frame = Box(left=LEFT, top=chart.top, width=RIGHT - LEFT, height=SHARES_HEIGHT)
    lines = [(chart.x(step) - 3, 6.0) for step, _, _ in chart.events]
    lines += [
        (chart.x(part.spec.start_step), chart.x(part.end_step) - chart.x(part.spec.start_step))
        for part in chart.plan.stages
        if part.spec.skipped is not None
    ]
    places = Places(frame=frame)
    places.taken += [Box(left=left, top=chart.top, width=wide, height=SHARES_HEIGHT) for left, wide in lines]
    places.taken += [Box(left=x - 8, top=y - 12, width=150, height=24) for x, y in chart.repeats.values()]
    for index, source in enumerate(chart.plan.sources):
        found = chart.bands.widest(source, 17 / SHARES_HEIGHT)
        if found is None or texture(index):
            continue
        low, high = chart.bands.at(source, found[0])
        y, wide = chart.y((low + high) / 2), width_of(source, SIZE) + 12
        left, right = chart.x(found[0]), chart.x(found[1]) - wide
        box = places.take(
            Box(left=left + (right - left) * way, top=y - 8, width=wide, height=16)
            for way in (0.5, 0.35, 0.65, 0.2, 0.8, 0.05, 0.95)
            if left <= right
        )
        if box is not None:
            yield (
                f'<text x="{number(box.left + wide / 2)}" y="{number(y + 4)}" fill="{ON_COLOURS[index]}" '
                f'text-anchor="middle" pointer-events="none">{text_of(source)}</text>'
            )


def _skipped(chart: _Chart) -> Iterator[str]:
    for part in chart.plan.stages:
        if part.spec.skipped is None:
            continue
        left, right = chart.x(part.spec.start_step), chart.x(part.end_step)
        title = (
            f"steps {part.spec.start_step:,} to {part.end_step:,} are skipped: {part.spec.skipped or 'no reason'}"
        )
        # A few steps of a long run must still be seen.
        place = (
            f'x="{number(left)}" y="{number(chart.top)}" width="{number(max(1.5, right - left))}" '
            f'height="{number(SHARES_HEIGHT)}"'
        )
        yield f'<g class="tm-skip"><title>{text_of(title)}</title><rect {place} class="tm-veil"/>'
        yield f'<rect {place} fill="url(#tm-skipped)"/></g>'


def _axes(chart: _Chart) -> Iterator[str]:
    for percent in (0, 25, 50, 75, 100):
        y = chart.y(percent / 100)
        yield f'<path d="M{number(LEFT)} {number(y)}H{number(RIGHT)}" class="tm-grid"/>'
        yield _text(LEFT - 8, y + 4, f"{percent}%", "tm-dim", "end")
    widest = width_of(f"{chart.plan.steps:,}", SIZE) + 18
    below = chart.bottom + chart.events_height
    for step in ticks(chart.plan.steps, max(1, int((RIGHT - LEFT) // widest))):
        x = number(chart.x(step))
        yield f'<path d="M{x} {number(below)}v5" class="tm-edge"/>'
        # The last one must not leave the picture.
        half = width_of(f"{step:,}", SIZE) / 2
        yield _text(min(chart.x(step), WIDTH - 4 - half), below + 18, f"{step:,}", "tm-dim", "middle")
    yield f'<path d="M{number(LEFT)} {number(below)}H{number(RIGHT)}" class="tm-edge"/>'
    yield _text((LEFT + RIGHT) / 2, below + 34, "step", "tm-dim", "middle")
    middle = (chart.top + chart.bottom) / 2
    yield (
        f'<text transform="translate(16 {number(middle)}) rotate(-90)" text-anchor="middle" class="tm-dim">'
        "share of rows</text>"
    )


def _stages(chart: _Chart) -> Iterator[str]:
    for stage in chart.facts.stages:
        left, right = chart.x(stage.start_step), chart.x(stage.end_step)
        title = text_of(_stage_title(stage))
        yield (
            f'<g class="tm-stage"><title>{title}</title><rect x="{number(left)}" y="{number(chart.names_top)}" '
            f'width="{number(right - left)}" height="{number(LANE)}" class="tm-none"/>'
        )
        yield f'<path d="M{number(left)} {number(chart.names_top)}V{number(chart.bottom)}" class="tm-edge"/>'
        shown = shortened(stage.name, SIZE, right - left - 10)
        yield (_text(left + 5, chart.names_top + 12, shown) if shown else "") + "</g>"
    end = number(RIGHT)
    yield f'<path d="M{end} {number(chart.names_top)}V{number(chart.bottom)}" class="tm-edge"/>'


def _stage_title(stage: StageFacts) -> str:
    scale = f", lr_scale {stage.lr_scale:g}" if stage.lr_scale != 1 else ""
    skipped = f", {stage.skipped_steps:,} of them skipped" if stage.skipped_steps else ""
    return (
        f"{stage.name}: steps {stage.start_step:,} to {stage.end_step:,}{skipped}, "
        f"batch {stage.global_batch_size:,}, seq_len {stage.seq_len:,}{scale}"
    )


def _scales(chart: _Chart) -> Iterator[str]:
    """Draw the scale of the learning rate as a line of steps."""
    top, bottom = 44.0, 44.0 + SCALE_HEIGHT - 8
    most = max(stage.lr_scale for stage in chart.facts.stages)
    line = ""
    places = Places(frame=Box(left=LEFT, top=top - 12, width=RIGHT - LEFT, height=bottom - top + 14))
    labels = []
    for index, stage in enumerate(chart.facts.stages):
        x, y = chart.x(stage.start_step), bottom - (bottom - top) * stage.lr_scale / most
        line += f"{'V' if line else f'M{number(x)} '}{number(y)}H{number(chart.x(stage.end_step))}"
        before = chart.facts.stages[index - 1].lr_scale if index else None
        text = f"{stage.lr_scale:g}×"
        if stage.lr_scale != before and width_of(text, SIZE) + 8 <= chart.x(stage.end_step) - x:
            box = places.take(
                Box(left=x + 4, top=top_, width=width_of(text, SIZE) + 4, height=13) for top_ in (y - 14, y + 1)
            )
            labels += [_text(box.left, box.top + 11, text)] if box else []
    yield f'<g class="tm-scale"><title>{text_of(_scale_title(chart))}</title>'
    yield f'<path d="M{number(LEFT)} {number(bottom)}H{number(RIGHT)}" class="tm-grid"/>'
    yield f'<path d="{line}" class="tm-line"/>{"".join(labels)}</g>'
    yield _text(LEFT - 8, bottom + 4, "0", "tm-dim", "end") + _text(LEFT - 8, top + 8, "lr_scale", "tm-dim", "end")


def _scale_title(chart: _Chart) -> str:
    return "lr_scale: " + ", ".join(f"{stage.name} {stage.lr_scale:g}" for stage in chart.facts.stages)


def _marks(chart: _Chart) -> Iterator[str]:
    """Mark first repeats on their bands; labels go where there is room."""
    frame = Box(left=LEFT, top=chart.top, width=RIGHT - LEFT, height=SHARES_HEIGHT)
    places = Places(frame=frame)
    places.taken += [Box(left=x - 5, top=y - 5, width=10, height=10) for x, y in chart.repeats.values()]
    for source in chart.facts.sources:
        if source.name not in chart.repeats:
            continue
        x, y = chart.repeats[source.name]
        title = f"{source.name} repeats from step {source.first_repeat:,} on"
        label = f"{source.name} repeats, {source.first_repeat:,}"
        yield f'<g class="tm-repeat"><title>{text_of(title)}</title>'
        yield f'<circle cx="{number(x)}" cy="{number(y)}" r="4" class="tm-mark"/>'
        wide = width_of(label, SIZE) + 8
        box = places.take(
            Box(left=left, top=y + lift, width=wide, height=15)
            for lift in (-7.5, -22, 7, -38, 23)
            for left in (x + 8, x - 8 - wide)
        )
        yield _tag(box, label) + "</g>"


def _tag(box: Box | None, label: str) -> str:
    if box is None:
        return ""
    return (
        f'<rect x="{number(box.left)}" y="{number(box.top)}" width="{number(box.width)}" '
        f'height="{number(box.height)}" rx="3" class="tm-tag"/>' + _text(box.left + 4, box.top + 11.5, label)
    )


def _events(chart: _Chart) -> Iterator[str]:
    """Mark from which steps on something is put aside or used up, below the shares."""
    room = Box(left=LEFT, top=chart.bottom, width=RIGHT - LEFT + 20, height=chart.events_height)
    places = Places(frame=room)
    places.taken += [
        Box(left=chart.x(step) - 5, top=chart.bottom, width=10, height=10) for step, _, _ in chart.events
    ]
    for step, label, title in chart.events:
        x = chart.x(step)
        yield f'<g class="tm-event"><title>{text_of(title)}</title>'
        yield f'<path d="M{number(x)} {number(chart.top)}V{number(chart.bottom + 5)}" class="tm-cut"/>'
        yield f'<path d="M{number(x)} {number(chart.bottom + 1)}l4 7h-8z" class="tm-ink"/>'
        wide = width_of(label, SIZE) + 8
        box = places.take(
            Box(left=left, top=chart.bottom + 2 + line * LANE, width=wide, height=LANE)
            for left in (x + 6, x - 6 - wide)
            for line in range(EVENT_LINES)
        )
        yield (_text(box.left + 2, box.top + 12, label) if box else "") + "</g>"


def _epochs(epochs: float | None) -> str:
    return "live text" if epochs is None else f"{epochs:.4g} epochs"


def _legend(chart: _Chart) -> Iterator[str]:
    column = (RIGHT - LEFT) / chart.legend_columns
    rows = chart.facts.rows + chart.facts.skipped_rows
    for index, source in enumerate(chart.facts.sources):
        line, place = divmod(index, chart.legend_columns)
        x, y = LEFT + place * column, chart.legend_top + line * LEGEND_LINE
        box = f'x="{number(x)}" y="{number(y)}" width="13" height="13" rx="2"'
        share = f"{source.drawn / rows:.1%}"
        title = f"{source.name}: {source.drawn:,} of {rows:,} rows, {_epochs(source.epochs)}"
        yield f'<g class="tm-legend"><title>{text_of(title)}</title><rect {box} fill="{colour(index)}"/>'
        if texture(index):
            yield f'<rect {box} fill="url(#tm-p{texture(index)})"/>'
        name = shortened(source.name, SIZE, column - 28 - width_of(share, SIZE))
        yield (
            f'<text x="{number(x + 19)}" y="{number(y + 10.5)}" class="tm-ink">{text_of(name)} '
            f'<tspan class="tm-dim">{share}</tspan></text></g>'
        )


# What `inspect` and `plan` tell as one page of HTML that needs nothing else.

_PAGE_STYLE = """
:root { color-scheme: light dark; --line: #8884; --trained: #0a7d33; --dim: #888; --bar: #4c8bf5; }
@media (prefers-color-scheme: dark) { :root { --trained: #58d68d; --dim: #888; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0;
text-align: left; vertical-align: top; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.bar { background: var(--bar); height: .8rem; display: inline-block; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); padding: .8rem; }
.masked { color: var(--dim); } .trained { color: var(--trained); font-weight: 600; }
code { overflow-wrap: anywhere; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
"""


def check_file(option: str, file: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is read; None is one that is not wanted."""
    if file is None:
        return
    if file.is_dir():
        name = f"report{'.svg' if option == '--svg' else '.html'}"
        raise ConfigError(f"{option}: must be a file, got the folder {file}; name a file in it, such as {name}")
    if not file.absolute().parent.is_dir():
        raise ConfigError(
            f"{option}: must be a file in a folder that is there, got {file}; make {file.parent} first"
        )


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole page."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n{''.join(parts)}</body></html>\n"
    )


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a heading."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    return f"<h2>{escape(title)}</h2>\n<table><tr>{head}</tr>\n{body}</table>\n"


def html_list(title: str, lines: Iterable[str]) -> str:
    """Return a list with a heading."""
    return f"<h2>{escape(title)}</h2>\n<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>\n"


def _cell(value: object) -> str:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return f'<td class="number">{cell(value)}</td>' if numeric else f"<td>{escape(cell(value))}</td>"


def html_histogram(title: str, counts: Mapping[str, int]) -> str:
    """Return bars, one a bin."""
    most = max(counts.values(), default=1)
    rows = "".join(
        f'<tr><td>{escape(label)}</td><td class="number">{count:,}</td>'
        f'<td><span class="bar" style="width:{20 * count / most:.2f}rem"></span></td></tr>\n'
        for label, count in counts.items()
    )
    return f"<h2>{escape(title)}</h2>\n<table>{rows}</table>\n"


def html_examples(examples: Sequence[Example]) -> str:
    """Return examples with what is trained on standing out."""
    parts = ["<h2>Examples</h2><p><span class='trained'>trained</span>, <span class='masked'>masked</span></p>\n"]
    for example in examples:
        runs = "".join(
            f'<span class="{"trained" if trained else "masked"}">{escape(text)}</span>'
            for trained, text in example.runs
        )
        parts.append(
            f"<p>{escape(example.key)} {example.item:,}: {example.tokens:,} tokens, "
            f"{example.supervised:,} trained</p><pre>{runs}{'…' if example.cut else ''}</pre>\n"
        )
    return "".join(parts)
