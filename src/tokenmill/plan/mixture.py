"""Which source a position draws from, and its how-manieth row: exact shares, in closed form, both ways.

The sources are the leaves of a Huffman tree over their weights. Of the first m draws that reach a
node with weights (left, right), floor(m * left / (left + right) + 1/2) go left and the rest go right,
so a position finds its source, and how often that source was drawn before, by one division a level.

Each level rounds by at most half a row, and an inner node of a Huffman tree holds at most two thirds
of its parent, so after any number of positions a source is less than 2 rows from its share:
half a row for the leaf's own level, and 1/2 + 2/3 * (1/2 + 2/3 * ...) = 3/2 for those above it.
After every `period` positions all counts are exact. See docs/decisions/0003-mixture-tree.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import TYPE_CHECKING

import numba
import numpy as np

from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.types import Whole

MAX_TOTAL = 1 << 31
"""Integer weights sum to at most this, so that every product in the kernels fits 64 bits."""

_SMALL = np.uint64(1 << 32)
"""Below this a position times a weight fits 64 bits, and one division a level is enough."""

LEFT, RIGHT, HALF, TOTAL, LEFT_WEIGHT, PARENT = range(6)
"""Columns of a node: children (a leaf is ~source), rounding, weights, and the node above."""


def integer_weights(weights: Mapping[str, float]) -> dict[str, int]:
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
    # The shortest decimal that means this float is what the user wrote: 0.1 is one tenth.
    exact = {name: Fraction(repr(float(weight))) for name, weight in weights.items()}
    scale = lcm(*(weight.denominator for weight in exact.values()))
    whole = {name: int(weight * scale) for name, weight in exact.items()}
    shared = gcd(*whole.values())
    whole = {name: weight // shared for name, weight in whole.items()}
    total = sum(whole.values())
    if total <= MAX_TOTAL:
        return whole
    room = MAX_TOTAL - len(whole)
    return {name: max(1, weight * room // total) for name, weight in whole.items()}


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The tree over sources 0..n-1, as an array for the kernels."""

    weights: tuple[int, ...]
    nodes: npt.NDArray[np.int64]
    """One line a node, in order of creation, so the root is last; empty where there is one source."""
    leaf_parent: npt.NDArray[np.int64]
    """Node above each source; -1 where there is one source."""

    @property
    def period(self) -> int:
        """Number of positions after which every source has exactly its share."""
        return sum(self.weights)

    @cached_property
    def _order(self) -> list[list[int]]:
        return [[int(x) for x in node] for node in self.nodes]

    def counts(self, positions: int) -> list[int]:
        """Return how often each source is drawn in the first `positions` positions."""
        counts = [0] * len(self.weights)
        arriving = {len(self._order) - 1: positions}
        if not self._order:
            return [positions]
        for index in range(len(self._order) - 1, -1, -1):
            left, right, half, total, left_weight, _parent = self._order[index]
            here = arriving[index]
            to_left = (here * left_weight + half) // total
            for child, number in ((left, to_left), (right, here - to_left)):
                if child < 0:
                    counts[~child] = number
                else:
                    arriving[child] = number
        return counts


def build_mixture(weights: tuple[int, ...]) -> Mixture:
    """Build the tree for whole, positive weights of sources 0..n-1."""
    assert weights
    assert all(weight > 0 for weight in weights)
    assert sum(weights) <= MAX_TOTAL
    heap = [(weight, source, ~source) for source, weight in enumerate(weights)]
    heapq.heapify(heap)
    nodes: list[list[int]] = []
    leaf_parent = [-1] * len(weights)
    while len(heap) > 1:
        light, _, right = heapq.heappop(heap)
        heavy, _, left = heapq.heappop(heap)
        total = light + heavy
        number = len(nodes)
        nodes.append([left, right, total // 2, total, heavy, -1])
        for child in (left, right):
            if child < 0:
                leaf_parent[~child] = number
            else:
                nodes[child][PARENT] = number
        # Ties go to the older node, which keeps the tree a function of the weights alone.
        heapq.heappush(heap, (total, len(weights) + number, number))
    return Mixture(
        weights=weights,
        nodes=np.array(nodes, np.int64).reshape(-1, 6),
        leaf_parent=np.array(leaf_parent, np.int64),
    )


@numba.njit(cache=True, nogil=True, error_model="numpy")
def draw(position: Whole, nodes: npt.NDArray[np.int64]) -> tuple[Whole, Whole]:
    """Return (source, how often it was drawn before) at a position."""
    node = nodes.shape[0] - 1
    if node < 0:
        return 0, position
    here = np.uint64(position)
    while True:
        total = np.uint64(nodes[node, TOTAL])
        left_weight = np.uint64(nodes[node, LEFT_WEIGHT])
        half = np.uint64(nodes[node, HALF])
        if here < _SMALL:
            scaled = here * left_weight + half
            to_left = scaled // total
            rest = scaled - to_left * total
        else:
            # here = rounds * total + the rest, so that no product leaves 64 bits.
            rounds = here // total
            scaled = (here - rounds * total) * left_weight + half
            more = scaled // total
            to_left = rounds * left_weight + more
            rest = scaled - more * total
        if rest + left_weight >= total:
            here = to_left
            node = nodes[node, LEFT]
        else:
            here -= to_left
            node = nodes[node, RIGHT]
        if node < 0:
            return ~node, np.int64(here)


@numba.njit(cache=True, nogil=True)
def position_of(
    source: Whole, drawn: Whole, nodes: npt.NDArray[np.int64], leaf_parent: npt.NDArray[np.int64]
) -> Whole:
    """Return the position at which `source` is drawn after having been drawn `drawn` times."""
    child = ~source
    node = leaf_parent[source]
    here = drawn
    while node >= 0:
        total = nodes[node, TOTAL]
        weight = nodes[node, LEFT_WEIGHT]
        half = nodes[node, HALF]
        if nodes[node, LEFT] != child:
            weight = total - weight
            half = total - 1 - half
        rounds = (here + 1) // weight
        rest = (here + 1) - rounds * weight
        # The smallest number of arrivals that has sent here + 1 of them this way, less one.
        here = rounds * total - ((half - rest * total) // weight) - 1
        child = node
        node = nodes[node, PARENT]
    return here


@numba.njit(cache=True, nogil=True)
def draw_all(
    positions: npt.NDArray[np.int64], nodes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return sources and earlier draws at many positions."""
    sources = np.empty_like(positions)
    drawn = np.empty_like(positions)
    for i in range(positions.size):
        sources[i], drawn[i] = draw(positions[i], nodes)
    return sources, drawn


@numba.njit(cache=True, nogil=True)
def positions_of(
    source: Whole, drawn: npt.NDArray[np.int64], nodes: npt.NDArray[np.int64], leaf_parent: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the positions of many draws of one source."""
    out = np.empty_like(drawn)
    for i in range(drawn.size):
        out[i] = position_of(source, drawn[i], nodes, leaf_parent)
    return out
