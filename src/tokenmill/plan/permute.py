"""Keyed permutations of range(size), computed in both directions and never stored.

Each is an alternating Feistel network over the bits that `size` needs. An image outside the range is permuted
again until it falls inside (cycle-walking), which keeps the map a bijection and takes fewer than two passes on
average. There are six rounds because with four the statistical tests of `tests/plan/test_permute.py` fail for small
ranges.
"""

from __future__ import annotations

import numpy as np

from tokenmill.compiled import inlined, inner, int64, kernel, leading_zeros
from tokenmill.types import Int64Array

ROUNDS = 6
MIN_BITS = 6
"""Bits that tiny ranges are walked in: with fewer, a Feistel network reaches too few permutations."""

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
    """Return the key that `derive` returns, for callers outside of kernels."""
    return derive(key, number)


@inlined
def num_bits(size: int) -> np.uint64:
    """Return the number of bits that numbers below `size` need, at least MIN_BITS."""
    bits = 64 - leading_zeros(np.uint64(size - 1))
    return np.uint64(bits if bits > MIN_BITS else MIN_BITS)


@inlined
def _round(half: np.uint64, key: np.uint64, number: int) -> np.uint64:
    value = half + (key ^ (_GOLDEN * np.uint64(number + 1)))
    value = (value ^ (value >> np.uint64(32))) * _M1
    value = (value ^ (value >> np.uint64(29))) * _M2
    return value >> np.uint64(32)


@inlined
def _pass(value: np.uint64, bits: np.uint64, key: np.uint64) -> np.uint64:
    """Return the image of a number of `bits` bits under one pass of the network."""
    low_bits = bits >> _ONE
    low_mask = (_ONE << low_bits) - _ONE
    high_mask = (_ONE << (bits - low_bits)) - _ONE
    low = value & low_mask
    high = value >> low_bits
    for number in range(0, ROUNDS, 2):
        low ^= _round(high, key, number) & low_mask
        high ^= _round(low, key, number + 1) & high_mask
    return (high << low_bits) | low


@kernel
def permute(index: int, size: int, key: np.uint64) -> int:
    """Return the image of `index` under the permutation of range(size) that `key` names."""
    bits = num_bits(size)
    value = _pass(np.uint64(index), bits, key)
    while value >= np.uint64(size):
        value = _pass(value, bits, key)
    return int64(value)


@inner
def unpermute(image: int, size: int, key: np.uint64) -> int:
    """Return the index that `permute` maps to `image`."""
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
    """Return the image of each of many indices."""
    out = np.empty_like(indices)
    bits = num_bits(size)
    for i in range(indices.size):  # without a branch, so that a processor permutes several at a time
        out[i] = int64(_pass(np.uint64(indices[i]), bits, key))
    for i in range(indices.size):
        while out[i] >= size:
            out[i] = int64(_pass(np.uint64(out[i]), bits, key))
    return out


@kernel
def unpermute_all(images: Int64Array, size: int, key: np.uint64) -> Int64Array:
    """Return the index that `permute` maps to each of many images."""
    out = np.empty_like(images)
    for i in range(images.size):
        out[i] = unpermute(images[i], size, key)
    return out
