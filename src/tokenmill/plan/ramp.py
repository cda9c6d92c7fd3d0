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

from tokenmill.compiled import inner, int64, kernel, least
from tokenmill.plan.mixture import (
    LEFT,
    LEFT_WEIGHT,
    OFFSET,
    RIGHT,
    TOTAL,
    Segments,
    build_tree,
    count_draws,
    leaf_parents,
    position_of,
    round_nodes,
    weigh_nodes,
)
from tokenmill.types import Float64Array, Int64Array

MAX_BATCH = 1 << 22
"""Rows of a step of a ramp, so that every product in the kernels fits 64 bits."""
PARTS = 1 << 20
"""Weights at an end of a ramp are whole numbers with at most this sum; the way has at most so many parts."""
KEPT = 256
"""What a step follows from is kept for one of so many steps."""
_NO_TREES, _NO_REST, _NO_WAYS = np.empty((0, 0, 0), np.int64), np.empty((0, 0)), np.empty(0, np.int64)


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

    def _state(
        self, left: Float64Array, counts: Int64Array
    ) -> tuple[Int64Array, Float64Array, Int64Array, Int64Array]:
        """Return what kernels change: the tree, what is left over at each node, draws of sources and at nodes."""
        return self.nodes.copy(), left.copy(), counts.copy(), np.empty(len(self.nodes), np.int64)

    @cached_property
    def _kept(self) -> tuple[Float64Array, Int64Array, Int64Array]:
        """Before every 256th step: what is left over at each node, draws of each source, ways added up."""
        steps = self.steps - self.first
        number = -(-steps // KEPT) + 1
        state = self._state(self.nodes[:, OFFSET] / self.nodes[:, TOTAL], np.zeros(self.begin.size, np.int64))
        left, counts = np.empty((number, len(self.nodes))), np.empty((number, self.begin.size), np.int64)
        ways = np.empty(number, np.int64)
        no_trees = np.empty((0, 0, 0), np.int64)
        ways[-1] = _walk(
            self._facts, (self.begin, self.end), state, (0, 0, steps, KEPT), (no_trees, left, counts, ways)
        )
        left[-1], counts[-1] = state[1], state[2]
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
        drawn = count_draws(found.nodes[0].tolist(), positions - step * self.batch, self.begin.size)
        return [before + number for before, number in zip(found.bases[0].tolist(), drawn, strict=True)]

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
        out = (nodes, _NO_REST, bases, _NO_WAYS)
        state = self._state(left[kept], counts[kept])
        _walk(self._facts, (self.begin, self.end), state, (kept * KEPT, begin, end, 1), out)
        return Segments(starts=np.arange(begin, end) * self.batch, nodes=nodes, bases=bases)

    def positions_of(self, source: int, drawn: Int64Array) -> Int64Array:
        """Return the positions of some draws of a source."""
        left, counts, _ = self._kept
        order = np.argsort(drawn, kind="stable")
        wanted = drawn[order]
        kept = np.searchsorted(counts[:, source], wanted, side="right") - 1
        found = np.empty_like(wanted)
        tables = (self.begin, self.end, left, counts, self.leaf_parent)
        _find(self._facts, tables, self._state(left[0], counts[0]), source, wanted, kept, found)
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
        way = middle * parts // (2 * steps)
        return way if way > 1 else 1
    at = middle / (2 * steps)
    near = at if at < 1.0 - at else 1.0 - at
    # sin(pi / 2 * near)^2 is (1 - cos(pi * near)) / 2. A sum of products, as every machine computes it alike.
    x = near * 1.5707963267948966
    y = x * x
    sine = x * (1 - y / 6 * (1 - y / 20 * (1 - y / 42 * (1 - y / 72 * (1 - y / 110 * (1 - y / 156))))))
    way = least(int64(sine * sine * parts), parts // 2)
    way = way if way > 1 else 1
    return way if at <= 0.5 else parts - way


@inner
def _weigh(
    step: int,
    facts: tuple[int, int, int, int, int],
    begin: Int64Array,
    end: Int64Array,
    left: Float64Array,
    nodes: Int64Array,
) -> None:
    """Fill in the tree of a step: its weights, and what is left over at each node."""
    way, parts = _way_of(step, facts), facts[2]
    for number in range(nodes.shape[0]):
        total = weight = int64(0)
        for side in range(2):
            child = nodes[number, LEFT if side else RIGHT]
            weight = begin[~child] * (parts - way) + end[~child] * way if child < 0 else nodes[child, TOTAL]
            total += weight
        nodes[number, TOTAL] = total
        nodes[number, LEFT_WEIGHT] = weight
        nodes[number, OFFSET] = least(int64(left[number] * total), total - 1)


@inner
def _draw(batch: int, nodes: Int64Array, left: Float64Array, counts: Int64Array, arriving: Int64Array) -> None:
    """Draw the rows of a step: count them, and note what is left over at each node."""
    if not nodes.shape[0]:
        counts[0] += batch
        return
    arriving[nodes.shape[0] - 1] = batch
    for number in range(nodes.shape[0] - 1, -1, -1):
        total = nodes[number, TOTAL]
        scaled = arriving[number] * nodes[number, LEFT_WEIGHT] + nodes[number, OFFSET]
        to_left = scaled // total
        left[number] = (scaled - to_left * total) / total
        for side in range(2):
            child = nodes[number, LEFT if side else RIGHT]
            drawn = to_left if side else arriving[number] - to_left
            if child < 0:
                counts[~child] += drawn
            else:
                arriving[child] = drawn


@kernel
def _walk(
    facts: tuple[int, int, int, int, int],
    ends: tuple[Int64Array, Int64Array],
    state: tuple[Int64Array, Float64Array, Int64Array, Int64Array],
    steps: tuple[int, int, int, int],
    out: tuple[Int64Array, Float64Array, Int64Array, Int64Array],
) -> int:
    """Go on from a state through some steps; return the ways of all, added up.

    steps is (first, first that is kept, last, every how many are kept). What is kept, in those arrays that are not
    empty, is the tree of a step, and, before it: what is left over at each node, draws of each source, ways.
    """
    begin, end = ends
    nodes, left, counts, arriving = state
    first, next_kept, last, every = steps
    kept_nodes, kept_left, kept_counts, kept_ways = out
    ways = k = int64(0)
    for step in range(first, last):
        _weigh(step, facts, begin, end, left, nodes)
        if step == next_kept:
            for source in range(counts.size):
                kept_counts[k, source] = counts[source]
            for node in range(nodes.shape[0]):
                if kept_left.size:
                    kept_left[k, node] = left[node]
                if kept_nodes.size:
                    for column in range(6):
                        kept_nodes[k, node, column] = nodes[node, column]
            if kept_ways.size:
                kept_ways[k] = ways
            next_kept += every
            k += 1
        _draw(facts[0], nodes, left, counts, arriving)
        ways += _way_of(step, facts)
    return ways


@kernel
def _find(
    facts: tuple[int, int, int, int, int],
    tables: tuple[Int64Array, Int64Array, Float64Array, Int64Array, Int64Array],
    state: tuple[Int64Array, Float64Array, Int64Array, Int64Array],
    source: int,
    wanted: Int64Array,
    kept: Int64Array,
    found: Int64Array,
) -> None:
    """Fill in the positions of draws of a source, which are in ascending order with the kept step before each."""
    begin, end, kept_left, kept_counts, leaf_parent = tables
    nodes, left, counts, arriving = state
    step = int64(-1)
    before = int64(0)
    for i in range(wanted.size):
        if step < kept[i] * KEPT:
            step = kept[i] * KEPT - 1
            for node in range(left.size):
                left[node] = kept_left[kept[i], node]
            for other in range(counts.size):
                counts[other] = kept_counts[kept[i], other]
        while counts[source] <= wanted[i]:
            step += 1
            before = counts[source]
            _weigh(step, facts, begin, end, left, nodes)
            _draw(facts[0], nodes, left, counts, arriving)
        found[i] = step * facts[0] + position_of(source, wanted[i] - before, nodes, leaf_parent)
