"""A keyed bijection on range(size): computed, never stored, and invertible.

An alternating Feistel network over just as many bits as `size` needs, with cycle-walking: an image
that falls outside the range is sent through again until it falls inside, which keeps it a bijection
and costs less than two passes on average. Six rounds: with four, the statistical tests of
`tests/plan/test_permute.py` fail for small ranges.
"""

from __future__ import annotations

import numpy as np

from tokenmill.compiled import inlined, inner, int64, kernel, leading_zeros
from tokenmill.types import Int64Array

ROUNDS = 6
MIN_BITS = 6
"""Tiny ranges walk in 64 values: below that a Feistel network reaches too few permutations."""

# Odd constants of SplitMix64 and of its variants; any well-mixed odd numbers would do.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)


@inlined
def mix(value: np.uint64) -> np.uint64:
    """Scramble 64 bits (the finalizer of SplitMix64)."""
    value = (value ^ (value >> np.uint64(30))) * _M1
    value = (value ^ (value >> np.uint64(27))) * _M2
    return value ^ (value >> np.uint64(31))


@inlined
def derive(key: np.uint64, number: int) -> np.uint64:
    """Return the key of one epoch, window or step of many that share `key`."""
    return mix(key + (np.uint64(number) + _ONE) * _GOLDEN)


@kernel
def derived_key(key: np.uint64, number: int) -> np.uint64:
    """Return what `derive` does, outside of kernels."""
    return derive(key, number)


@inlined
def num_bits(size: int) -> np.uint64:
    """Return how many bits the numbers below `size` need, at least MIN_BITS."""
    bits = 64 - leading_zeros(np.uint64(size - 1))
    return np.uint64(bits if bits > MIN_BITS else MIN_BITS)


@inlined
def _round(half: np.uint64, key: np.uint64, number: int) -> np.uint64:
    value = half + (key ^ (_GOLDEN * np.uint64(number + 1)))
    value = (value ^ (value >> np.uint64(32))) * _M1
    value = (value ^ (value >> np.uint64(29))) * _M2
    return value >> np.uint64(32)


@kernel
def permute(index: int, size: int, key: np.uint64) -> int:
    """Return where `index` goes under the permutation of range(size) that `key` names."""
    bits = num_bits(size)
    low_bits = bits >> _ONE
    low_mask = (_ONE << low_bits) - _ONE
    high_mask = (_ONE << (bits - low_bits)) - _ONE
    value = np.uint64(index)
    while True:
        low = value & low_mask
        high = value >> low_bits
        for number in range(0, ROUNDS, 2):
            low ^= _round(high, key, number) & low_mask
            high ^= _round(low, key, number + 1) & high_mask
        value = (high << low_bits) | low
        if value < np.uint64(size):
            return int64(value)


@inner
def unpermute(image: int, size: int, key: np.uint64) -> int:
    """Return the index that `permute` sends to `image`."""
    bits = num_bits(size)
    low_bits = bits >> _ONE
    low_mask = (_ONE << low_bits) - _ONE
    high_mask = (_ONE << (bits - low_bits)) - _ONE
    value = np.uint64(image)
    while True:
        low = value & low_mask
        high = value >> low_bits
        for number in range(ROUNDS - 2, -1, -2):
            high ^= _round(low, key, number + 1) & high_mask
            low ^= _round(high, key, number) & low_mask
        value = (high << low_bits) | low
        if value < np.uint64(size):
            return int64(value)


@kernel
def permute_all(indices: Int64Array, size: int, key: np.uint64) -> Int64Array:
    """Permute many indices at once."""
    out = np.empty_like(indices)
    for i in range(indices.size):
        out[i] = permute(indices[i], size, key)
    return out
