"""Mixture of sources: the source of a position and the ordinal of its row, in closed form, both ways.

The sources are the leaves of a Huffman tree over their weights. Of the first m draws that reach a node with
weights (left, right), floor(m * left / (left + right) + 1/2) go left and the rest go right. So the source of a
position, and the number of its earlier draws, take one division per level.

Each level rounds by at most half a row, and an inner node of a Huffman tree has at most two thirds of its parent's
weight. So after any number of positions a source is less than 2 rows from its share: half a row for the leaf's own
level, and 1/2 + 2/3 * (1/2 + 2/3 * ...) = 3/2 for those above it. After every `period` positions all counts are
exact. See docs/decisions/0003-mixture-tree.md.

Where the weights of a run change, the new tree gets the lead of each source over its share. Each node then rounds
so that leads even out. A ramp is a number of ranges with constant weights over one tree, whose nodes keep the
remainder of their rounding from range to range. See docs/decisions/0011-edges-and-ramps.md.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import cos, floor, gcd, lcm, pi

import numpy as np

from tokenmill.compiled import inner, int64, kernel
from tokenmill.errors import ConfigError
from tokenmill.types import Int64Array

MAX_TOTAL = 1 << 31
"""Largest sum of whole weights, so that every product in the kernels fits 64 bits."""
STAIRS = 256
"""Largest number of ranges of constant weights in a ramp."""
_COSINE_DIGITS = 9
"""Decimal digits of the way along a cosine: every machine computes these alike."""

_SMALL = np.uint64(1 << 32)
"""Below this, a position times a weight fits 64 bits, and one division per level is enough."""

LEFT, RIGHT, OFFSET, TOTAL, LEFT_WEIGHT, PARENT = range(6)
"""Columns of a node: children (a leaf is ~source), rounding, weights, and the node above. Of m draws that reach it,
(m * LEFT_WEIGHT + OFFSET) // TOTAL go left; OFFSET lies within 0 and TOTAL - 1."""

_HALF = Fraction(1, 2)


def integer_weights(weights: Mapping[str, float | Fraction]) -> dict[str, int]:
    """Return weights as whole numbers in the same proportions, none of them 0.

    Decimal weights keep their proportions exactly while their sum is at most 2^31. Others are rounded to a 2^-31
    part of the whole, and up to 1 where they would vanish.

    >>> integer_weights({"web": 0.9, "books": 0.1})
    {'web': 9, 'books': 1}
    """
    bad = {name: weight for name, weight in weights.items() if not 0 < weight < float("inf")}
    if bad or not weights:
        raise ConfigError(
            f"weights: must be positive and finite, got {bad or dict(weights)}; "
            "leave a source out to give it no share"
        )
    return dict(zip(weights, _whole([exact_weight(weight) for weight in weights.values()]), strict=True))


def _whole(weights: Sequence[Fraction]) -> list[int]:
    """Return positive weights as whole numbers with a sum of at most MAX_TOTAL, none of them 0."""
    scale = lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    shared = gcd(*whole)
    whole = [weight // shared for weight in whole]
    total = sum(whole)
    if total <= MAX_TOTAL:
        return whole
    most = MAX_TOTAL - len(whole)
    return [max(1, weight * most // total) for weight in whole]


def exact_weight(weight: float | Fraction) -> Fraction:
    """Return the number that a weight means: the shortest decimal that rounds to this float.

    >>> exact_weight(0.1)
    Fraction(1, 10)
    """
    return weight if isinstance(weight, Fraction) else Fraction(repr(float(weight)))


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sources 0..n-1, drawn over ranges of positions with constant weights each.

    The order of a stage has one range, a ramp up to `STAIRS`, and an eval one for each source.
    """

    starts: Int64Array
    """First position of each range, ascending from 0. The last range has no end."""
    weights: Int64Array
    """Whole weights of all sources in each range; 0 for a source that it does not draw."""
    nodes: Int64Array
    """Tree of each range, one line per node in order of creation, so the root is last. A single source has none."""
    leaf_parents: Int64Array
    """Node above each source in every tree; -1 for a single source."""
    bases: Int64Array
    """Draws of each source before each range."""

    @cached_property
    def _positions(self) -> list[int]:
        positions: list[int] = self.starts.tolist()
        return positions

    @cached_property
    def _trees(self) -> dict[int, list[list[int]]]:
        """Trees as lists, by range: those that were counted in."""
        return {}

    def draw(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the source at each position, and the number of its earlier draws."""
        sources, drawn = _draw_all(positions, self.starts, self.nodes.reshape(-1, 6), self.bases)
        return sources, drawn

    def positions_of(self, source: int, drawn: Int64Array) -> Int64Array:
        """Return the positions of some draws of a source, counted from its first."""
        return _positions_of(source, drawn, self.starts, self.nodes.reshape(-1, 6), self.leaf_parents, self.bases)

    def counts(self, positions: int) -> list[int]:
        """Return the number of draws of each source in the first `positions` positions."""
        index = bisect_right(self._positions, positions) - 1
        if index not in self._trees:
            self._trees[index] = self.nodes[index].tolist()
        drawn = count_draws(self._trees[index], positions - self._positions[index], self.weights.shape[1])
        return [before + number for before, number in zip(self.bases[index].tolist(), drawn, strict=True)]

    def shares(self, first: int, last: int) -> list[Fraction]:
        """Return the share that the weights give to each source in the positions from `first` to `last`."""
        begin, end = bisect_right(self._positions, first) - 1, bisect_right(self._positions, max(first, last - 1))
        if end - begin == 1:
            return self._shares(begin)
        edges = [first, *self._positions[begin + 1 : end], last]
        shares = [Fraction(0)] * self.weights.shape[1]
        for index, (left, right) in enumerate(pairwise(edges), begin):
            part = Fraction(right - left, last - first)
            shares = [share + part * more for share, more in zip(shares, self._shares(index), strict=True)]
        return shares

    def _shares(self, index: int) -> list[Fraction]:
        weights = self.weights[index].tolist()
        total = sum(weights)
        return [Fraction(weight, total) for weight in weights]

    def leads(self, positions: int, before: Sequence[Fraction]) -> list[Fraction]:
        """Return the lead of each source over its share after some positions, from the leads before the first."""
        shares = self.shares(0, max(positions, 1))
        return [
            lead + drawn - positions * share
            for lead, drawn, share in zip(before, self.counts(positions), shares, strict=True)
        ]

    def rounded_leads(self, positions: int, before: Sequence[Fraction], grain: int) -> list[Fraction]:
        """Return the leads after some positions, rounded to parts of a row of 1 / `grain`.

        The next mixture starts from them. Exact leads would grow with every change of weights.
        """
        return [Fraction(round(lead * grain), grain) for lead in self.leads(positions, before)]


def build_mixture(weights: Sequence[int], leads: Sequence[Fraction] | None = None) -> Mixture:
    """Build the mixture of constant weights, whole and positive; `leads` are those over the shares so far."""
    assert weights
    assert all(weight > 0 for weight in weights)
    assert sum(weights) <= MAX_TOTAL
    return _build([0], [list(weights)], build_tree(weights), leads)


def build_ramp(
    begin: Sequence[Fraction],
    end: Sequence[Fraction],
    *,
    steps: range,
    batch: int,
    shape: str,
    leads: Sequence[Fraction],
) -> Mixture:
    """Build the mixture of weights that go from one set to another; a source may have weight 0 in one of them.

    `steps` are the wanted ones of the ramp's steps, counted from its first, until its end. Weights at a step do not
    depend on the first of them.
    """
    first, last = ([weight / sum(side) for weight in side] for side in (begin, end))
    stairs = [(step, way) for step, way in _stairs(steps.stop, shape) if step > steps.start]
    weights = []
    for _, way in stairs:
        whole = _whole([a * (1 - way) + b * way for a, b in zip(first, last, strict=True)])
        scale = MAX_TOTAL // sum(
            whole
        )  # the finer the weights, the less a remainder is rounded from range to range
        weights.append([scale * weight for weight in whole])
    starts = [0, *((step - steps.start) * batch for step, _ in stairs[:-1])]
    return _build(starts, weights, build_tree(_whole([a + b for a, b in zip(first, last, strict=True)])), leads)


def _stairs(steps: int, shape: str) -> Iterator[tuple[int, Fraction]]:
    """Yield the stairs of a ramp: the step at which each ends, and the part of the way at its middle."""
    number = min(steps, STAIRS)
    for stair in range(number):
        way = Fraction(2 * stair + 1, 2 * number)
        if shape == "cosine":
            way = Fraction(f"{(1 - cos(pi * float(way))) / 2:.{_COSINE_DIGITS}f}")
        yield (stair + 1) * steps // number, way


def in_order(begins: Sequence[int], sizes: Sequence[int]) -> Mixture:
    """Build the mixture that draws each source to its end, one after another, beginning at the given positions.

    >>> in_order([2, 0], [3, 2]).draw(np.arange(5))[0].tolist()
    [1, 1, 0, 0, 0]
    """
    sources = sorted(range(len(begins)), key=lambda source: begins[source])
    weights, bases = np.zeros((2, len(sources), len(sources)), np.int64)
    for number, source in enumerate(sources):
        weights[number, source] = 1
        bases[number + 1 :, source] = sizes[source]
    return Mixture(
        starts=np.array([begins[source] for source in sources], np.int64),
        weights=weights,
        nodes=np.array([[[~source, ~source, 0, 1, 1, -1]] for source in sources], np.int64),
        leaf_parents=np.zeros(len(sources), np.int64),
        bases=bases,
    )


def _build(
    starts: Sequence[int],
    weights: Sequence[Sequence[int]],
    tree: Sequence[tuple[int, int, int]],
    leads: Sequence[Fraction] | None,
) -> Mixture:
    """Build the mixture of ranges over one tree; each node keeps the remainder of its rounding between ranges."""
    sources = len(weights[0])
    nodes = [[left, right, 0, 0, 0, parent] for left, right, parent in tree]
    counts, bases, trees = [0] * sources, [], []
    for index, start in enumerate(starts):
        remainders = [(node[OFFSET], node[TOTAL]) for node in nodes]
        weigh_nodes(nodes, weights[index])
        if index:
            for node, (remainder, total) in zip(nodes, remainders, strict=True):
                node[OFFSET] = remainder * node[TOTAL] // total
        elif leads is None:
            round_nodes(nodes, [Fraction(0)] * sources)
        else:
            round_nodes(nodes, leads)
        bases.append(list(counts))
        trees.append([list(node) for node in nodes])
        if index + 1 < len(starts):
            drawn = _pass_draws(nodes, starts[index + 1] - start, sources)
            counts = [before + more for before, more in zip(counts, drawn, strict=True)]
    return Mixture(
        starts=np.array(starts, np.int64),
        weights=np.array(weights, np.int64),
        nodes=np.array(trees, np.int64).reshape(len(starts), -1, 6),
        leaf_parents=leaf_parents(nodes, sources),
        bases=np.array(bases, np.int64),
    )


def _pass_draws(nodes: list[list[int]], positions: int, sources: int) -> list[int]:
    """Return the draws of each source in some positions of a tree, and put remainders in place of its rounding."""
    if not nodes:
        return [positions]
    counts, arriving = [0] * sources, {len(nodes) - 1: positions}
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        to_left, node[OFFSET] = divmod(arriving[index] * node[LEFT_WEIGHT] + node[OFFSET], node[TOTAL])
        for child, number in ((node[LEFT], to_left), (node[RIGHT], arriving[index] - to_left)):
            if child < 0:
                counts[~child] += number
            else:
                arriving[child] = number
    return counts


def count_draws(nodes: Sequence[Sequence[int]], positions: int, sources: int) -> list[int]:
    """Return the number of draws of each source in the first `positions` positions of a tree."""
    return _pass_draws([list(node) for node in nodes], positions, sources)


def weigh_nodes(nodes: list[list[int]], weights: Sequence[int]) -> None:
    """Fill in the weights of the nodes."""
    for node in nodes:
        left, right = (weights[~child] if child < 0 else nodes[child][TOTAL] for child in node[:2])
        node[TOTAL], node[LEFT_WEIGHT] = left + right, left


def round_nodes(nodes: list[list[int]], leads: Sequence[Fraction]) -> None:
    """Set the rounding of every node so that the leads of its children even out.

    The total lead cannot be corrected here: absent sources keep theirs, and the present ones share the opposite
    equally. A node corrects at most half a row; the rest of a lead stays.
    """
    sums: list[tuple[int, Fraction]] = []
    for node in nodes:
        sides = [(1, leads[~child]) if child < 0 else sums[child] for child in node[:2]]
        sums.append((sides[0][0] + sides[1][0], sides[0][1] + sides[1][1]))
    kept = {len(nodes) - 1: sum(leads, Fraction(0))}
    for number in range(len(nodes) - 1, -1, -1):
        left, right, _, total, left_weight, _ = nodes[number]
        leaves, lead = sums[number]
        left_leaves, left_lead = (1, leads[~left]) if left < 0 else sums[left]
        share = Fraction(left_weight, total) * (lead - kept[number])
        shift = max(-_HALF, min(_HALF, left_lead - kept[number] * left_leaves / leaves - share))
        nodes[number][OFFSET] = min(floor((_HALF - shift) * total), total - 1)
        kept[left] = left_lead - share - shift
        kept[right] = kept[number] - kept[left]


def leaf_parents(nodes: Sequence[Sequence[int]], sources: int) -> Int64Array:
    """Return the node above each source; -1 where there is one source."""
    parents = np.full(sources, -1, np.int64)
    for number, node in enumerate(nodes):
        for child in node[:2]:
            if child < 0:
                parents[~child] = number
    return parents


def build_tree(weights: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return Huffman's tree as (left, right, parent) per node.

    A leaf is ~source. The root is last, and its parent is -1.
    """
    heap = [(weight, source, ~source) for source, weight in enumerate(weights)]
    heapq.heapify(heap)
    children: list[tuple[int, int]] = []
    parents: dict[int, int] = {}
    while len(heap) > 1:
        light, _, right = heapq.heappop(heap)
        heavy, _, left = heapq.heappop(heap)
        number = len(children)
        children.append((left, right))
        parents |= {child: number for child in (left, right) if child >= 0}
        # Ties go to the older node, which keeps the tree a function of the weights alone.
        heapq.heappush(heap, (light + heavy, len(weights) + number, number))
    return [(left, right, parents.get(number, -1)) for number, (left, right) in enumerate(children)]


def share_out(
    batch: int, shares: Mapping[str, Fraction], limits: Mapping[str, int], leads: Mapping[str, Fraction], where: str
) -> dict[str, int]:
    """Return the rows that a step draws from each source when some have too few left.

    Those give all they have. The others share the rest of the batch by weight, in whole rows. `limits` are the rows
    that are left of sources, `leads` the leads of sources over their shares.
    """
    quotas: dict[str, int] = {}
    others = dict(shares)
    while True:
        free = batch - sum(quotas.values())
        if not others:
            if not free:
                return quotas
            raise ConfigError(
                f"{where}: all sources are used up (on_exhausted = stop), with {free} of {batch} rows too few; "
                "end the run before that step, or add documents"
            )
        total = sum(others.values())
        wanted = {
            name: max(Fraction(0), share / total * free - leads.get(name, Fraction(0)))
            for name, share in others.items()
        }
        shared = _apportion(wanted, free)
        short = [name for name, rows in shared.items() if rows > limits.get(name, rows)]
        if not short:
            return quotas | shared
        for name in short:
            quotas[name] = limits[name]
            del others[name]


def _apportion(wanted: Mapping[str, Fraction], free: int) -> dict[str, int]:
    """Round to whole rows that sum to `free`."""
    total = sum(wanted.values())
    if total:
        wanted = {name: value * free / total for name, value in wanted.items()}
    whole = {name: floor(value) for name, value in wanted.items()}
    order = sorted(wanted, key=lambda name: (whole[name] - wanted[name], name))
    left = free - sum(whole.values())
    return {name: rows + (order.index(name) < left) for name, rows in whole.items()}


@inner
def draw(position: int, nodes: Int64Array, first: int, count: int) -> tuple[int, int]:
    """Return (source, number of its earlier draws) at a position, by the tree of `count` nodes from `first` on."""
    if count == 0:
        return int64(0), position
    node = first + count - 1
    at = np.uint64(position)
    while True:
        total = np.uint64(nodes[node, TOTAL])
        left_weight = np.uint64(nodes[node, LEFT_WEIGHT])
        offset = np.uint64(nodes[node, OFFSET])
        if at < _SMALL:
            scaled = at * left_weight + offset
            to_left = scaled // total
            rest = scaled - to_left * total
        else:
            # at = rounds * total + the rest, so that no product leaves 64 bits.
            rounds = at // total
            scaled = (at - rounds * total) * left_weight + offset
            more = scaled // total
            to_left = rounds * left_weight + more
            rest = scaled - more * total
        to_the_left = rest + left_weight >= total
        at = to_left if to_the_left else at - to_left
        child = nodes[node, LEFT if to_the_left else RIGHT]
        if child < 0:
            return ~child, int64(at)
        node = first + child


@inner
def position_of(source: int, drawn: int, nodes: Int64Array, first: int, leaf_parents: Int64Array) -> int:
    """Return the position at which `source` is drawn after `drawn` draws, by the tree from node `first` on."""
    child = ~source
    node = leaf_parents[source]
    at = drawn
    while node >= 0:
        total = nodes[first + node, TOTAL]
        weight = nodes[first + node, LEFT_WEIGHT]
        offset = nodes[first + node, OFFSET]
        if nodes[first + node, LEFT] != child:
            weight = total - weight
            offset = total - 1 - offset
        rounds = (at + 1) // weight
        rest = (at + 1) - rounds * weight
        # The smallest number of arrivals of which at + 1 went this way, less one.
        at = rounds * total - ((offset - rest * total) // weight) - 1
        child = node
        node = nodes[first + node, PARENT]
    return at


@kernel
def _draw_all(positions: Int64Array, starts: Int64Array, nodes: Int64Array, bases: Int64Array) -> Int64Array:
    """Return sources, and earlier draws, at many positions, in two lines."""
    out = np.empty((2, positions.size), np.int64)
    tree_nodes = nodes.shape[0] // starts.size
    index = int64(0)
    for i in range(positions.size):
        position = positions[i]
        while index > 0 and position < starts[index]:
            index -= 1
        while index + 1 < starts.size and position >= starts[index + 1]:
            index += 1
        source, drawn = draw(position - starts[index], nodes, index * tree_nodes, tree_nodes)
        out[0, i] = source
        out[1, i] = bases[index, source] + drawn
    return out


@kernel
def _positions_of(
    source: int,
    drawn: Int64Array,
    starts: Int64Array,
    nodes: Int64Array,
    leaf_parents: Int64Array,
    bases: Int64Array,
) -> Int64Array:
    out = np.empty_like(drawn)
    tree_nodes = nodes.shape[0] // starts.size
    for i in range(drawn.size):
        low, high = int64(0), int64(starts.size - 1)
        while low < high:
            middle = (low + high + 1) >> 1
            if bases[middle, source] <= drawn[i]:
                low = middle
            else:
                high = middle - 1
        in_range = drawn[i] - bases[low, source]
        out[i] = starts[low] + position_of(source, in_range, nodes, low * tree_nodes, leaf_parents)
    return out
