"""Sets of small whole numbers as bits, for kernels: the nearest member above or below in a few instructions.

A set is an array: the number of its words, its words, and a second level with a bit for each word that is not 0, so
that even a set of 10^5 numbers is searched in a few steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.types import Whole


@intrinsic
def _trailing_zeros(typing_context: Any, value: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    """Return the index of the lowest set bit of a value that is not 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.cttz(arguments[0], _context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), generate


@intrinsic
def _leading_zeros(typing_context: Any, value: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    """Return how many zeros stand before the highest set bit of a value that is not 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.ctlz(arguments[0], _context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), generate


@numba.njit(cache=True, nogil=True)
def empty_set(size: Whole) -> npt.NDArray[np.uint64]:
    """Make an empty set for numbers below `size`."""
    words = (size + 63) >> 6
    members = np.zeros(1 + words + ((words + 63) >> 6), np.uint64)
    members[0] = words
    return members


@numba.njit(cache=True, nogil=True, inline="always")
def insert(members: npt.NDArray[np.uint64], number: Whole) -> None:
    """Add a number to a set."""
    word = number >> 6
    members[1 + word] |= np.uint64(1) << np.uint64(number & 63)
    members[1 + np.int64(members[0]) + (word >> 6)] |= np.uint64(1) << np.uint64(word & 63)


@numba.njit(cache=True, nogil=True, inline="always")
def remove(members: npt.NDArray[np.uint64], number: Whole) -> None:
    """Take a number out of a set."""
    word = number >> 6
    members[1 + word] &= ~(np.uint64(1) << np.uint64(number & 63))
    if not members[1 + word]:
        members[1 + np.int64(members[0]) + (word >> 6)] &= ~(np.uint64(1) << np.uint64(word & 63))


@numba.njit(cache=True, nogil=True)
def at_least(members: npt.NDArray[np.uint64], number: Whole) -> Whole:
    """Return the smallest member that is not below `number`, or -1."""
    words = np.int64(members[0])
    word = number >> 6
    if word >= words:
        return -1
    shift = np.uint64(number & 63)
    value = (members[1 + word] >> shift) << shift
    if not value:
        word = _next(members[1 + words :], word + 1)
        if word < 0:
            return -1
        value = members[1 + word]
    return (word << 6) + np.int64(_trailing_zeros(value))  # type: ignore[call-arg]


@numba.njit(cache=True, nogil=True)
def _next(words: npt.NDArray[np.uint64], number: Whole) -> Whole:
    word = number >> 6
    if word >= words.size:
        return -1
    shift = np.uint64(number & 63)
    value = (words[word] >> shift) << shift
    while not value:
        word += 1
        if word >= words.size:
            return -1
        value = words[word]
    return (word << 6) + np.int64(_trailing_zeros(value))  # type: ignore[call-arg]


@numba.njit(cache=True, nogil=True)
def at_most(members: npt.NDArray[np.uint64], number: Whole) -> Whole:
    """Return the largest member that is not above `number`, or -1."""
    word = number >> 6
    shift = np.uint64(63 - (number & 63))
    value = (members[1 + word] << shift) >> shift
    if not value:
        word = _previous(members[1 + np.int64(members[0]) :], word - 1)
        if word < 0:
            return -1
        value = members[1 + word]
    return (word << 6) + 63 - np.int64(_leading_zeros(value))  # type: ignore[call-arg]


@numba.njit(cache=True, nogil=True)
def _previous(words: npt.NDArray[np.uint64], number: Whole) -> Whole:
    if number < 0:
        return -1
    word = number >> 6
    shift = np.uint64(63 - (number & 63))
    value = (words[word] << shift) >> shift
    while not value:
        word -= 1
        if word < 0:
            return -1
        value = words[word]
    return (word << 6) + 63 - np.int64(_leading_zeros(value))  # type: ignore[call-arg]
