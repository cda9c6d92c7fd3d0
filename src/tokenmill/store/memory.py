"""Reading mapped memory by address inside kernels.

A batch draws rows from many shards. Handing a kernel one address per span lets a single call
serve them all; handing it a list of arrays would cost a Python call per shard (benchmarks/loader.py).
The addresses come from `MapCache.borrow`, which has checked the file's size, and spans are checked
against the shard's number of tokens before they get here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.types import Whole


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    """Turn an unsigned 64-bit address into a pointer for `numba.carray`."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate


@numba.njit(cache=True, nogil=True, inline="always")
def view_uint8(address: np.uint64, size: Whole) -> npt.NDArray[np.uint8]:
    """View `size` numbers of 8 bits at an address."""
    return carray(_pointer(address), size, np.uint8)  # type: ignore[call-arg]


@numba.njit(cache=True, nogil=True, inline="always")
def view_uint16(address: np.uint64, size: Whole) -> npt.NDArray[np.uint16]:
    """View `size` numbers of 16 bits at an address."""
    return carray(_pointer(address), size, np.uint16)  # type: ignore[call-arg]


@numba.njit(cache=True, nogil=True, inline="always")
def view_uint32(address: np.uint64, size: Whole) -> npt.NDArray[np.uint32]:
    """View `size` numbers of 32 bits at an address."""
    return carray(_pointer(address), size, np.uint32)  # type: ignore[call-arg]


@numba.njit(cache=True, nogil=True, inline="always")
def view_uint64(address: np.uint64, size: Whole) -> npt.NDArray[np.uint64]:
    """View `size` numbers of 64 bits at an address."""
    return carray(_pointer(address), size, np.uint64)  # type: ignore[call-arg]
