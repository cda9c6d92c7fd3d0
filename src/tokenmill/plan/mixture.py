"""Which source a position draws from, and the ordinal of its row there: exact shares, in closed form, both ways.

The sources are the leaves of a Huffman tree over their weights. Of the first m draws that reach a
node with weights (left, right), floor(m * left / (left + right) + 1/2) go left and the rest go right,
so a position finds its source, and how often that source was drawn before, by one division a level.

Each level rounds by at most half a row, and an inner node of a Huffman tree holds at most two thirds
of its parent, so after any number of positions a source is less than 2 rows from its share:
half a row for the leaf's own level, and 1/2 + 2/3 * (1/2 + 2/3 * ...) = 3/2 for those above it.
After every `period` positions all counts are exact. See docs/decisions/0003-mixture-tree.md.

Where the weights of a run change, the new tree is told how far each source is ahead of its share. A node
then rounds as if it had always been there: what is behind gets every draw, and what is ahead none, until
the shares of the whole run hold. So an edge adds no error. See docs/decisions/0011-edges-and-ramps.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import floor, gcd, lcm

import numpy as np

from tokenmill.compiled import inner, int64, kernel, least
from tokenmill.errors import ConfigError
from tokenmill.types import Float64Array, Int64Array

MAX_TOTAL = 1 << 31
"""Integer weights sum to at most this, so that every product in the kernels fits 64 bits."""

_SMALL = np.uint64(1 << 32)
"""Below this a position times a weight fits 64 bits, and one division a level is enough."""

LEFT, RIGHT, OFFSET, TOTAL, LEFT_WEIGHT, PARENT = range(6)
"""Columns of a node: children (a leaf is ~source), rounding, weights, and the node above. Of m draws that reach it,
(m * LEFT_WEIGHT + OFFSET) // TOTAL go left; OFFSET lies within 0 and TOTAL - 1."""

_HALF = Fraction(1, 2)


def integer_weights(weights: Mapping[str, float | Fraction]) -> dict[str, int]:
    """Return weights as whole numbers in the same proportions, none of them 0.

    Decimal weights keep their proportions exactly, as long as their sum stays below 2^31; others are
    rounded to a 2^-31 part of the whole, and up to 1 where they would vanish.

    >>> integer_weights({"web": 0.9, "books": 0.1})
    {'web': 9, 'books': 1}
    """
    bad = {name: weight for name, weight in weights.items() if not 0 < weight < float("inf")}
    if bad or not weights:
        raise ConfigError(
            f"weights: must be positive and finite, got {bad or dict(weights)}; "
            "leave a source out to give it no share"
        )
    exact = {name: exact_weight(weight) for name, weight in weights.items()}
    scale = lcm(*(weight.denominator for weight in exact.values()))
    whole = {name: int(weight * scale) for name, weight in exact.items()}
    shared = gcd(*whole.values())
    whole = {name: weight // shared for name, weight in whole.items()}
    total = sum(whole.values())
    if total <= MAX_TOTAL:
        return whole
    room = MAX_TOTAL - len(whole)
    return {name: max(1, weight * room // total) for name, weight in whole.items()}


def exact_weight(weight: float | Fraction) -> Fraction:
    """Return the number that a weight stands for: the shortest decimal that means this float is what was written.

    >>> exact_weight(0.1)
    Fraction(1, 10)
    """
    return weight if isinstance(weight, Fraction) else Fraction(repr(float(weight)))


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Trees that draw consecutive positions, one after another."""

    starts: Int64Array
    """Position at which each begins."""
    nodes: Int64Array
    """Tree by tree, line by line."""
    bases: Int64Array
    """Draws of each source before each."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The tree over sources 0..n-1, as an array for the kernels."""

    weights: tuple[int, ...]
    nodes: Int64Array
    """One line a node, in order of creation, so the root is last; empty where there is one source."""
    leaf_parent: Int64Array
    """Node above each source; -1 where there is one source."""

    @property
    def period(self) -> int:
        """Number of positions after which every source has exactly its share."""
        return sum(self.weights)

    def asked(self, first: int, last: int) -> list[Fraction]:  # noqa: ARG002 - in a ramp they differ from step to step
        """Return the mean share of each source over some steps."""
        return [Fraction(weight, self.period) for weight in self.weights]

    def counts(self, positions: int) -> list[int]:
        """Return how often each source is drawn in the first `positions` positions."""
        return count_draws(self._order, positions, len(self.weights))

    @cached_property
    def _order(self) -> list[list[int]]:
        nodes: list[list[int]] = self.nodes.tolist()
        return nodes

    def ahead(self, positions: int, before: Sequence[Fraction]) -> list[Fraction]:
        """Return how many rows each source is ahead of its share after so many positions."""
        return [
            lead + drawn - Fraction(positions * weight, self.period)
            for lead, drawn, weight in zip(before, self.counts(positions), self.weights, strict=True)
        ]

    def segments(self, first: int, last: int) -> Segments:  # noqa: ARG002 - where weights change there are several
        """Return what draws the positions from `first` to `last`: one tree draws all."""
        return self._segments

    @cached_property
    def _segments(self) -> Segments:
        bases = np.zeros((1, len(self.weights)), np.int64)
        return Segments(starts=np.zeros(1, np.int64), nodes=self.nodes[None], bases=bases)

    def positions_of(self, source: int, drawn: Int64Array) -> Int64Array:
        """Return the positions of some draws of a source."""
        found: Int64Array = positions_of(source, drawn, self.nodes, self.leaf_parent)
        return found


@dataclass(frozen=True, kw_only=True)
class InTurn:
    """Sources 0..n-1 one after another, each to its end: what draws the rows of an eval."""

    begins: Int64Array
    """Position at which each source begins."""
    sizes: Int64Array
    """Rows of each; one at least."""

    def asked(self, first: int, last: int) -> list[Fraction]:  # noqa: ARG002 - as a mixture has it
        """Return the share of each source in the whole."""
        return [Fraction(int(size), int(self.sizes.sum())) for size in self.sizes]

    def counts(self, positions: int) -> list[int]:
        """Return how often each source is drawn in the first `positions` positions."""
        drawn: list[int] = np.clip(positions - self.begins, 0, self.sizes).tolist()
        return drawn

    def segments(self, first: int, last: int) -> Segments:  # noqa: ARG002 - there are few
        """Return what draws all positions: for each source a tree that always draws that one."""
        order = np.argsort(self.begins)
        nodes = np.array([[[~source, ~source, 0, 1, 1, -1]] for source in order.tolist()], np.int64)
        return Segments(starts=self.begins[order], nodes=nodes, bases=np.zeros((order.size, order.size), np.int64))

    def positions_of(self, source: int, drawn: Int64Array) -> Int64Array:
        """Return the positions of some draws of a source."""
        return drawn + int(self.begins[source])


def count_draws(nodes: Sequence[Sequence[int]], positions: int, sources: int) -> list[int]:
    """Return how often each source is drawn in the first `positions` positions of a tree."""
    if not nodes:
        return [positions]
    counts = [0] * sources
    arriving = {len(nodes) - 1: positions}
    for index in range(len(nodes) - 1, -1, -1):
        left, right, offset, total, left_weight, _parent = nodes[index]
        to_left = (arriving[index] * left_weight + offset) // total
        for child, number in ((left, to_left), (right, arriving[index] - to_left)):
            if child < 0:
                counts[~child] = number
            else:
                arriving[child] = number
    return counts


def build_mixture(weights: tuple[int, ...], ahead: Sequence[Fraction] | None = None) -> Mixture:
    """Build the tree for whole, positive weights of sources 0..n-1, which are `ahead` of their shares so far."""
    assert weights
    assert all(weight > 0 for weight in weights)
    assert sum(weights) <= MAX_TOTAL
    nodes = [[left, right, 0, 0, 0, parent] for left, right, parent in build_tree(weights)]
    weigh_nodes(nodes, weights)
    round_nodes(nodes, ahead or [Fraction(0)] * len(weights))
    return Mixture(
        weights=weights,
        nodes=np.array(nodes, np.int64).reshape(-1, 6),
        leaf_parent=leaf_parents(nodes, len(weights)),
    )


def weigh_nodes(nodes: list[list[int]], weights: Sequence[int]) -> None:
    """Fill in the weights of the nodes."""
    for node in nodes:
        left, right = (weights[~child] if child < 0 else nodes[child][TOTAL] for child in node[:2])
        node[TOTAL], node[LEFT_WEIGHT] = left + right, left


def round_nodes(nodes: list[list[int]], ahead: Sequence[Fraction]) -> None:
    """Let every node round so that what its children are ahead of their shares is evened out.

    What all together are ahead stays: sources that are not drawn now keep their error, and all others have the
    opposite of it, an equal part each. A node can even out half a row; what is more than that stays as well.
    """
    sums: list[tuple[int, Fraction]] = []
    for node in nodes:
        sides = [(1, ahead[~child]) if child < 0 else sums[child] for child in node[:2]]
        sums.append((sides[0][0] + sides[1][0], sides[0][1] + sides[1][1]))
    kept = {len(nodes) - 1: sum(ahead, Fraction(0))}
    for number in range(len(nodes) - 1, -1, -1):
        left, right, _, total, left_weight, _ = nodes[number]
        leaves, lead = sums[number]
        some, left_lead = (1, ahead[~left]) if left < 0 else sums[left]
        share = Fraction(left_weight, total) * (lead - kept[number])
        turn = max(-_HALF, min(_HALF, left_lead - kept[number] * some / leaves - share))
        nodes[number][OFFSET] = min(floor((_HALF - turn) * total), total - 1)
        kept[left] = left_lead - share - turn
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
    """Return Huffman's tree as (left, right, parent) a node; a leaf is ~source, the root is last, its parent -1."""
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
    batch: int, shares: Mapping[str, Fraction], rooms: Mapping[str, int], ahead: Mapping[str, Fraction], where: str
) -> dict[str, int]:
    """Return how many rows a step draws from each source when some have too few: those give what they have.

    The others share the rest of the batch as their weights say, whole rows, those first that are most behind.
    """
    quotas: dict[str, int] = {}
    others = dict(shares)
    while True:
        free = batch - sum(quotas.values())
        if not others:
            if not free:
                return quotas
            raise ConfigError(
                f"{where}: its sources must last until it ends, got all of them used up (on_exhausted = stop), "
                f"{free} of {batch} rows too few; end the run before that step, or add documents"
            )
        total = sum(others.values())
        wanted = {
            name: max(Fraction(0), share / total * free - ahead.get(name, Fraction(0)))
            for name, share in others.items()
        }
        shared = _apportion(wanted, free)
        short = [name for name, rows in shared.items() if rows > rooms.get(name, rows)]
        if not short:
            return quotas | shared
        for name in short:
            quotas[name] = rooms[name]
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
    """Return (source, how often it was drawn before) at a position, by a tree of `count` nodes from `first` on."""
    if count == 0:
        return int64(0), position
    node = first + count - 1
    here = np.uint64(position)
    while True:
        total = np.uint64(nodes[node, TOTAL])
        left_weight = np.uint64(nodes[node, LEFT_WEIGHT])
        offset = np.uint64(nodes[node, OFFSET])
        if here < _SMALL:
            scaled = here * left_weight + offset
            to_left = scaled // total
            rest = scaled - to_left * total
        else:
            # here = rounds * total + the rest, so that no product leaves 64 bits.
            rounds = here // total
            scaled = (here - rounds * total) * left_weight + offset
            more = scaled // total
            to_left = rounds * left_weight + more
            rest = scaled - more * total
        to_the_left = rest + left_weight >= total
        here = to_left if to_the_left else here - to_left
        child = nodes[node, LEFT if to_the_left else RIGHT]
        if child < 0:
            return ~child, int64(here)
        node = first + child


@inner
def position_of(source: int, drawn: int, nodes: Int64Array, leaf_parent: Int64Array) -> int:
    """Return the position at which `source` is drawn after having been drawn `drawn` times."""
    child = ~source
    node = leaf_parent[source]
    here = drawn
    while node >= 0:
        total = nodes[node, TOTAL]
        weight = nodes[node, LEFT_WEIGHT]
        offset = nodes[node, OFFSET]
        if nodes[node, LEFT] != child:
            weight = total - weight
            offset = total - 1 - offset
        rounds = (here + 1) // weight
        rest = (here + 1) - rounds * weight
        # The smallest number of arrivals that has sent here + 1 of them this way, less one.
        here = rounds * total - ((offset - rest * total) // weight) - 1
        child = node
        node = nodes[node, PARENT]
    return here


@kernel
def draw_all(positions: Int64Array, nodes: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return sources and earlier draws at many positions."""
    sources = np.empty_like(positions)
    drawn = np.empty_like(positions)
    for i in range(positions.size):
        sources[i], drawn[i] = draw(positions[i], nodes, 0, nodes.shape[0])
    return sources, drawn


@kernel
def positions_of(source: int, drawn: Int64Array, nodes: Int64Array, leaf_parent: Int64Array) -> Int64Array:
    """Return the positions of many draws of one source."""
    out = np.empty_like(drawn)
    for i in range(drawn.size):
        out[i] = position_of(source, drawn[i], nodes, leaf_parent)
    return out


# A mixture whose weights go from one set to another over some steps, linearly or along a cosine.
#
# Within a step the weights stand still, and every node of the tree goes on rounding where the step before left it.
# So the draws of a step follow from one number a node; it is kept for every 256th step, and the others are reached
# from there. Where the ramp ends, the exact shares of all its steps say how far each source is ahead.

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
        ways[-1] = _walk(
            self._facts, (self.begin, self.end), state, (0, 0, steps, KEPT), (_NO_TREES, left, counts, ways)
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
        _find_draws(self._facts, tables, self._state(left[0], counts[0]), source, wanted, kept, found)
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
def _weigh_step(
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
def _draw_step(batch: int, nodes: Int64Array, left: Float64Array, counts: Int64Array, arriving: Int64Array) -> None:
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
        _weigh_step(step, facts, begin, end, left, nodes)
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
        _draw_step(facts[0], nodes, left, counts, arriving)
        ways += _way_of(step, facts)
    return ways


@kernel
def _find_draws(
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
            _weigh_step(step, facts, begin, end, left, nodes)
            _draw_step(facts[0], nodes, left, counts, arriving)
        found[i] = step * facts[0] + position_of(source, wanted[i] - before, nodes, leaf_parent)
