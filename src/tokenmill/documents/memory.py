"""Memory by address inside kernels, 64 bytes at a time: a few vector instructions on any processor.

Addresses and not arrays: numba counts the references to an array at each call of a function, which takes most of
the time of a short line. Who calls must know that the memory is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from tokenmill.types import Whole

ir = cgutils.ir  # type: ignore[attr-defined]  # of llvmlite, which is numba's own dependency
WIDTH = 64
QUOTE, BACKSLASH = 0x22, 0x5C

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_BLOCK = ir.VectorType(_BYTE, WIDTH)
_Kernel = TypeVar("_Kernel", bound=Callable[..., object])


def kernel(function: _Kernel) -> _Kernel:
    """Compile what Python calls; it is kept on disk, unless this machine has no place that can be written to."""
    try:
        return cast("_Kernel", numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:
        return part(function)


def part(function: _Kernel) -> _Kernel:
    """Compile what kernels call, and keep it as a part of them."""
    return cast("_Kernel", numba.njit(nogil=True)(function))


def _instruction(function: Callable[..., Any]) -> Callable[..., Whole]:
    made: Callable[..., Whole] = intrinsic(function)
    return made


def _load(builder: Any, address: Any) -> Any:  # noqa: ANN401 - llvmlite has no types
    return builder.load(builder.inttoptr(address, _BLOCK.as_pointer()), align=1)


def _where(builder: Any, block: Any, how: str, value: int) -> Any:  # noqa: ANN401
    """Compare the bytes of a block, as signed numbers, with a value: a bit each."""
    return builder.bitcast(builder.icmp_signed(how, block, ir.Constant(_BLOCK, [value] * WIDTH)), _WORD)


@_instruction
def string_stops(typing_context: Any, address: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    """Return a bit for each of the 64 bytes at an address that is a quote, a backslash or a control character."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        block = _load(builder, arguments[0])
        quotes = builder.or_(_where(builder, block, "==", QUOTE), _where(builder, block, "==", BACKSLASH))
        control = builder.and_(_where(builder, block, "<", 0x20), _where(builder, block, ">=", 0))
        return builder.or_(quotes, control)

    return types.uint64(types.int64), generate


@_instruction
def beyond_ascii(typing_context: Any, address: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    """Return a bit for each of the 64 bytes at an address that is not ASCII."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return _where(builder, _load(builder, arguments[0]), "<", 0)

    return types.uint64(types.int64), generate


@_instruction
def copy(typing_context: Any, source: Any, target: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    """Copy the 64 bytes at one address to another."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        target_pointer = builder.inttoptr(arguments[1], _BLOCK.as_pointer())
        builder.store(_load(builder, arguments[0]), target_pointer, align=1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@_instruction
def get(typing_context: Any, address: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    """Return the byte at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.zext(builder.load(builder.inttoptr(arguments[0], _BYTE.as_pointer())), _WORD)

    return types.int64(types.int64), generate


@_instruction
def put(typing_context: Any, address: Any, value: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    """Write a byte to an address, and return the next one."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        pointer = builder.inttoptr(arguments[0], _BYTE.as_pointer())
        builder.store(builder.trunc(arguments[1], _BYTE), pointer)
        return builder.add(arguments[0], ir.Constant(_WORD, 1))

    return types.int64(types.int64, types.int64), generate


@_instruction
def lowest(typing_context: Any, bits: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    """Return the place of the lowest bit of a number that is not 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate
