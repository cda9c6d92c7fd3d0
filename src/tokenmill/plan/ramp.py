"""A mixture whose weights go from one set to another over some steps, linearly or along a cosine.

Within a step the weights stand still, and every node of the tree goes on rounding where the step before left it.
So the draws of a step follow from one number a node; it is kept for every 256th step, and the others are reached
from there. Where the ramp ends, the exact shares of all its steps say how far each source is ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm

import numpy as np

from tokenmill.compiled import kernel
from tokenmill.plan.mixture import (
    LEFT,
    LEFT_WEIGHT,
    OFFSET,
    RIGHT,
    TOTAL,
    Segments,
    build_tree,
    leaf_parents,
    position_of,
    round_nodes,
    weigh_nodes,
)
from tokenmill.types import Float64Array, Int64Array

SHAPES = ("linear", "cosine")
MAX_BATCH = 1 << 22
"""Rows of a step of a ramp, so that every product in the kernels fits 64 bits."""
PARTS = 1 << 20
"""Weights at an end of a ramp are whole numbers with at most this sum; the way has at most so many parts."""
KEPT = 256
"""Every so manieth step is kept."""


@dataclass(frozen=True, kw_only=True)
class RampMixture:
    """The tree over sources 0..n-1 while their weights change, from the first step of a ramp to its last."""

    batch: int
    """Rows of a step."""
    steps: int
    """Of the whole ramp."""
    first: int
    """Step of the ramp at which this begins; steps count from there. 0, but for a ramp whose sources change."""
    cosine: bool
    begin: Int64Array
    """Weight of each source at the start; those at the end have the same sum."""
    end: Int64Array
    nodes: Int64Array
    """The tree as it is in the first step."""
    leaf_parent: Int64Array

    @property
    def parts(self) -> int:
        """Into how many parts the way from one end to the other is cut: exact, for a line that is not too long."""
        return PARTS if self.cosine else min(2 * self.steps, PARTS)

    @property
    def _facts(self) -> tuple[int, int, int, int, int]:
        return self.batch, self.steps, self.parts, int(self.cosine), self.first

    @property
    def _tables(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        return self.begin, self.end, self.nodes

    @cached_property
    def _kept(self) -> tuple[Float64Array, Int64Array, Int64Array]:
        """Before every 256th step: what is left over at each node, draws of each source, ways added up."""
        number = -(-(self.steps - self.first) // KEPT) + 1
        left = np.zeros((number, len(self.nodes)), np.float64)
        counts = np.zeros((number, self.begin.size), np.int64)
        ways = np.zeros(number, np.int64)
        left[0] = self.nodes[:, OFFSET] / self.nodes[:, TOTAL]
        _walk(self._facts, self._tables, left, counts, ways)
        return left, counts, ways

    def asked(self, first: int, last: int) -> list[Fraction]:
        """Return the mean share of each source over some steps, counted from the first of the ramp."""
        way = Fraction(self._way(last) - self._way(first), (last - first) * self.parts)
        ends = zip(self.begin.tolist(), self.end.tolist(), strict=True)
        total = int(self.begin.sum())
        return [(begin * (1 - way) + end * way) / total for begin, end in ends]

    def counts(self, positions: int) -> list[int]:
        """Return how often each source is drawn in the first `positions` positions."""
        step = min(positions // self.batch, self.steps - self.first - 1)
        found = self.segments(step * self.batch, (step + 1) * self.batch)
        counts = found.bases[0]
        _count(positions - step * self.batch, found.nodes[0], counts)
        return [int(number) for number in counts]

    def ahead(self, positions: int, before: Sequence[Fraction]) -> list[Fraction]:
        """Return how many rows each source is ahead of its share after so many positions, which are whole steps."""
        steps, rest = divmod(positions, self.batch)
        assert not rest
        asked = self.asked(0, max(steps, 1))
        drawn = self.counts(positions)
        return [lead + number - share * positions for lead, number, share in zip(before, drawn, asked, strict=True)]

    def segments(self, first: int, last: int) -> Segments:
        """Return what draws the positions from `first` to `last`: a tree for every step."""
        begin, end = first // self.batch, min(self.steps - self.first, -(-last // self.batch))
        left, counts, _ = self._kept
        nodes = np.empty((end - begin, *self.nodes.shape), np.int64)
        bases = np.empty((end - begin, self.begin.size), np.int64)
        kept = begin // KEPT
        _steps(self._facts, self._tables, (begin, end), (left[kept].copy(), counts[kept].copy()), nodes, bases)
        return Segments(starts=np.arange(begin, end) * self.batch, nodes=nodes, bases=bases)

    def positions_of(self, source: int, drawn: Int64Array) -> Int64Array:
        """Return the positions of some draws of a source."""
        left, counts, _ = self._kept
        order = np.argsort(drawn, kind="stable")
        wanted = drawn[order]
        kept = np.searchsorted(counts[:, source], wanted, side="right") - 1
        found = np.empty_like(wanted)
        _find(self._facts, self._tables, (left, counts), source, (wanted, kept), self.leaf_parent, found)
        result = np.empty_like(found)
        result[order] = found
        return result

    def _way(self, step: int) -> int:
        """Return how far the steps before one have come, added up."""
        kept = step // KEPT
        here = range(kept * KEPT, step)
        return int(self._kept[2][kept]) + sum(int(_way_of(other, self._facts)) for other in here)


def build_ramp(
    begin: Sequence[Fraction],
    end: Sequence[Fraction],
    *,
    steps: range,
    batch: int,
    cosine: bool,
    ahead: Sequence[Fraction],
) -> RampMixture:
    """Build the tree for weights that change; a source may have no share at one end, but not at both.

    `steps` are those that are wanted of the steps of the ramp, counted from its first, until its end.
    """
    assert batch <= MAX_BATCH
    first, last = _whole(begin), _whole(end)
    total = lcm(sum(first), sum(last))
    if total <= PARTS:
        first = [weight * (total // sum(first)) for weight in first]
        last = [weight * (total // sum(last)) for weight in last]
    else:
        first, last = _rounded(first), _rounded(last)
    tree = [
        [left, right, 0, 0, 0, parent]
        for left, right, parent in build_tree([a + b for a, b in zip(first, last, strict=True)])
    ]
    ramp = RampMixture(
        batch=batch,
        steps=steps.stop,
        first=steps.start,
        cosine=cosine,
        begin=np.array(first, np.int64),
        end=np.array(last, np.int64),
        nodes=np.zeros((len(tree), 6), np.int64),
        leaf_parent=leaf_parents(tree, len(first)),
    )
    way = int(_way_of(0, ramp._facts))
    weigh_nodes(tree, [a * (ramp.parts - way) + b * way for a, b in zip(first, last, strict=True)])
    round_nodes(tree, ahead)
    ramp.nodes[:] = np.array(tree, np.int64).reshape(-1, 6)
    return ramp


def _whole(weights: Sequence[Fraction]) -> list[int]:
    scale = lcm(*(weight.denominator for weight in weights))
    return [int(weight * scale) for weight in weights]


def _rounded(weights: Sequence[int]) -> list[int]:
    """Return whole numbers in nearly the same proportions that sum to `PARTS`; none becomes or ceases to be 0."""
    total = sum(weights)
    found = [max(weight * PARTS // total, int(weight > 0)) for weight in weights]
    found[found.index(max(found))] += PARTS - sum(found)
    return found


@kernel
def _way_of(step: int, facts: tuple[int, int, int, int, int]) -> int:
    """Return how many parts of the way from one end to the other are behind, in the middle of a step."""
    _, steps, parts, cosine, first = facts
    middle = 2 * (first + step) + 1
    if not cosine:
        return max(1, middle * parts // (2 * steps))
    at = middle / (2 * steps)
    near = min(at, 1.0 - at)
    # sin(pi / 2 * near)^2 is (1 - cos(pi * near)) / 2. A sum of products, as every machine computes it alike.
    x = near * 1.5707963267948966
    y = x * x
    sine = x * (1 - y / 6 * (1 - y / 20 * (1 - y / 42 * (1 - y / 72 * (1 - y / 110 * (1 - y / 156))))))
    way: int = min(max(int(sine * sine * parts), 1), parts // 2)
    return way if at <= 0.5 else parts - way


@kernel
def _weigh(
    step: int,
    facts: tuple[int, int, int, int, int],
    tables: tuple[Int64Array, Int64Array, Int64Array],
    left: Float64Array,
    nodes: Int64Array,
) -> None:
    """Fill in the tree of a step: its weights, and what is left over at each node."""
    begin, end, template = tables
    way, parts = _way_of(step, facts), facts[2]
    for number in range(template.shape[0]):
        nodes[number] = template[number]
        total = np.int64(0)
        for column in (RIGHT, LEFT):
            child = template[number, column]
            weight = begin[~child] * (parts - way) + end[~child] * way if child < 0 else nodes[child, TOTAL]
            total += weight
        nodes[number, TOTAL] = total
        nodes[number, LEFT_WEIGHT] = weight
        nodes[number, OFFSET] = min(np.int64(left[number] * total), total - 1)


@kernel
def _draw(
    batch: int,
    nodes: Int64Array,
    left: Float64Array,
    counts: Int64Array,
) -> None:
    """Draw the rows of a step: count them, and note what is left over at each node."""
    arriving = np.zeros(nodes.shape[0], np.int64)
    if not nodes.shape[0]:
        counts[0] += batch
        return
    arriving[-1] = batch
    for number in range(nodes.shape[0] - 1, -1, -1):
        scaled = arriving[number] * nodes[number, LEFT_WEIGHT] + nodes[number, OFFSET]
        to_left = scaled // nodes[number, TOTAL]
        left[number] = (scaled - to_left * nodes[number, TOTAL]) / nodes[number, TOTAL]
        for child, drawn in (
            (nodes[number, LEFT], to_left),
            (nodes[number, RIGHT], arriving[number] - to_left),
        ):
            if child < 0:
                counts[~child] += drawn
            else:
                arriving[child] = drawn


@kernel
def _count(positions: int, nodes: Int64Array, counts: Int64Array) -> None:
    """Add the draws of the first positions of a step."""
    _draw(positions, nodes, np.empty(nodes.shape[0], np.float64), counts)


@kernel
def _walk(
    facts: tuple[int, int, int, int, int],
    tables: tuple[Int64Array, Int64Array, Int64Array],
    left: Float64Array,
    counts: Int64Array,
    ways: Int64Array,
) -> None:
    """Go through all steps of a ramp and keep every 256th; `left` has the first already."""
    batch, steps, _, _, first = facts
    nodes = np.empty_like(tables[2])
    here = left[0].copy()
    drawn = np.zeros(counts.shape[1], np.int64)
    way = np.int64(0)
    for step in range(steps - first):
        if step % KEPT == 0:
            left[step // KEPT] = here
            counts[step // KEPT] = drawn
            ways[step // KEPT] = way
        _weigh(step, facts, tables, here, nodes)
        _draw(batch, nodes, here, drawn)
        way += _way_of(step, facts)
    left[-1] = here
    counts[-1] = drawn
    ways[-1] = way


@kernel
def _steps(
    facts: tuple[int, int, int, int, int],
    tables: tuple[Int64Array, Int64Array, Int64Array],
    wanted: tuple[int, int],
    state: tuple[Float64Array, Int64Array],
    nodes: Int64Array,
    bases: Int64Array,
) -> None:
    """Fill in the trees of some steps and the draws before each; `state` is that of the last kept step before."""
    begin, end = wanted
    left, counts = state
    here = np.empty_like(tables[2])
    for step in range(begin - begin % KEPT, end):
        _weigh(step, facts, tables, left, here)
        if step >= begin:
            nodes[step - begin] = here
            bases[step - begin] = counts
        _draw(facts[0], here, left, counts)


@kernel
def _find(
    facts: tuple[int, int, int, int, int],
    tables: tuple[Int64Array, Int64Array, Int64Array],
    kept: tuple[Float64Array, Int64Array],
    source: int,
    wanted: tuple[Int64Array, Int64Array],
    leaf_parent: Int64Array,
    found: Int64Array,
) -> None:
    """Fill in the positions of draws of a source, which are in ascending order with the kept step before each."""
    batch = facts[0]
    nodes = np.empty_like(tables[2])
    step = -1
    left = kept[0][0].copy()
    counts = kept[1][0].copy()
    before = np.int64(0)
    for i in range(wanted[0].size):
        if step < wanted[1][i] * KEPT:
            step = wanted[1][i] * KEPT - 1
            left[:] = kept[0][wanted[1][i]]
            counts[:] = kept[1][wanted[1][i]]
        while counts[source] <= wanted[0][i]:
            step += 1
            before = counts[source]
            _weigh(step, facts, tables, left, nodes)
            _draw(batch, nodes, left, counts)
        found[i] = step * batch + position_of(source, wanted[0][i] - before, nodes, leaf_parent)
