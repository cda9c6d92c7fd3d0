"""Reading mapped memory by address inside kernels.

A batch draws rows from many shards. Handing a kernel one address per span lets a single call
serve them all; handing it a list of arrays would cost a Python call per shard (benchmarks/loader.py).
The addresses come from `MapCache.borrow`, which has checked the file's size, and spans are checked
against the shard's number of tokens before they get here.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    """Turn an unsigned 64-bit address into a pointer for `numba.carray`."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate
