"""The shares of sources over the steps of a plan, as bands that lie on one another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.plan.mixture import Mixture

if TYPE_CHECKING:
    from tokenmill.plan.plan import Plan
    from tokenmill.plan.stages import Stage

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

    if isinstance(part.mixture, Mixture):
        yield Piece(begin=begin, end=end, first=shares(begin), last=shares(begin))
        return
    ramp = part.spec.ramp
    assert ramp is not None
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
