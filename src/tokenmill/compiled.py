"""Kernels: functions that numba compiles at their first call, once per machine, and then loads from a folder.

The folder is below NUMBA_CACHE_DIR, or below `__pycache__` of this package. If that is not writable, as in an image
that `tokenmill warm` has filled, the kernels are copied to a private folder of this user (`caches`). The name of
the folder is a digest of the package's sources, so a stale kernel is never loaded. Processes that start together
may compile the same kernel: the last one to finish keeps it.

These make a kernel quick to compile: arrays that Python has made, as each allocation in a kernel takes a tenth of a
second; numbers of one type (`int64`), as a function is compiled for each combination; few arguments, and few tuples
of arrays among them; no sorting. benchmarks/start.py measures each kernel.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numba.core import cgutils, event, types
from numba.extending import intrinsic

from tokenmill.caches import private_folder, writable
from tokenmill.types import AnyArray

P = ParamSpec("P")
R = TypeVar("R")
_KERNELS: list[Any] = []
"""All kernels of the modules that are imported."""
_numba: Any = numba
_ir: Any = cgutils.ir  # type: ignore[attr-defined]  # of llvmlite, which is numba's own dependency
_types: Any = types

PACKAGE = Path(__file__).parent
SILENT_SECONDS = 2.0
"""Compile time after which a log line explains the wait."""

int64 = cast(Callable[[Any], int], np.int64)
"""Converts a whole number to 64 bits: in kernels, integers of Python and of numpy are one type."""
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
logger = logging.getLogger("tokenmill")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that Python calls, and keep the result for other processes."""
    folder = writable_folder()
    before = _numba.config.CACHE_DIR
    try:
        if folder is not None:
            _numba.config.CACHE_DIR = str(folder)  # numba reads it here, for this function
        dispatcher = _numba.njit(cache=folder is not None, **_OPTIONS)(function)
    finally:
        _numba.config.CACHE_DIR = before
    _KERNELS.append(dispatcher)
    return cast(Callable[P, R], dispatcher)


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that only kernels call: it becomes a part of them, and needs no wrapper for Python."""
    dispatcher = _numba.njit(no_cpython_wrapper=True, **_OPTIONS)(function)
    return cast(Callable[P, R], dispatcher)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Put the few lines of a function in the place of each call, before anything is compiled."""
    return cast(Callable[P, R], _numba.njit(inline="always", **_OPTIONS)(function))


@inlined
def least(a: int, b: int) -> int:
    """Return the smaller of two numbers; numba takes longer to compile `min`."""
    return a if a < b else b


def known_kernels() -> dict[str, int]:
    """Return the kernels of all modules that are imported, each with the number of signatures that are loaded."""
    return {_name(dispatcher.py_func): len(dispatcher.signatures) for dispatcher in _KERNELS}


class _CompileTimes(event.Listener):
    """Seconds that each kernel took to compile, with the functions that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun: list[float] = []

    def on_start(self, event: Any) -> None:  # noqa: ANN401, ARG002 - numba's own types
        self._begun.append(time.perf_counter())

    def on_end(self, event: Any) -> None:  # noqa: ANN401
        dispatcher, begin = event.data["dispatcher"], self._begun.pop()
        if any(dispatcher is kernel for kernel in _KERNELS):
            name = _name(dispatcher.py_func)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            self.on_kernel(is_outermost=not self._begun)

    def on_kernel(self, *, is_outermost: bool) -> None:
        """Do nothing: a kernel has been compiled."""


class _Notice(_CompileTimes):
    """Logs once that kernels are being compiled, if that takes long."""

    is_logged = False

    def on_kernel(self, *, is_outermost: bool) -> None:
        if is_outermost and not self.is_logged and sum(self.seconds.values()) > SILENT_SECONDS:
            logger.warning("compiling kernels for this CPU, once: later starts load them")
            self.is_logged = True


_event: Any = event
_event.register("numba:compile", _Notice())


@contextmanager
def record_compiled() -> Iterator[dict[str, float]]:
    """Record the kernels that are compiled within a `with` block, with the seconds that each took."""
    times = _CompileTimes()
    with event.install_listener("numba:compile", times):
        yield times.seconds


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__.removeprefix('tokenmill.')}.{function.__qualname__}"


# Memory by address, inside kernels.
#
# A batch draws rows from many shards. Handing a kernel one address per span lets a single call serve them all;
# handing it a list of arrays would cost a Python call per shard (benchmarks/loader.py). The addresses come from
# `MapCache.open`, which has checked the file's size, and spans are checked against the shard's number of tokens
# before they get here.


def _reader(bits: int) -> Callable[[int, int], int]:
    """Make a function of (address, index) that returns an unsigned number of `bits` bits."""

    def read(typing_context: Any, address: Any, index: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
            pointer = builder.inttoptr(arguments[0], _ir.IntType(bits).as_pointer())
            value = builder.load(builder.gep(pointer, [arguments[1]]))
            return value if bits == 64 else builder.zext(value, _ir.IntType(64))

        return _types.int64(_types.int64, _types.int64), generate

    return cast(Callable[[int, int], int], intrinsic(read))


def _writer(bits: int) -> Callable[[int, int, int], None]:
    """Make a procedure of (address, index, value) that writes a number of `bits` bits."""

    def write(typing_context: Any, address: Any, index: Any, value: Any) -> Any:  # noqa: ANN401, ARG001
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
            pointer = builder.inttoptr(arguments[0], _ir.IntType(bits).as_pointer())
            value = arguments[2] if bits == 64 else builder.trunc(arguments[2], _ir.IntType(bits))
            builder.store(value, builder.gep(pointer, [arguments[1]]))
            return context.get_dummy_value()

        return _types.void(_types.int64, _types.int64, _types.int64), generate

    return cast(Callable[[int, int, int], None], intrinsic(write))


read_uint8, read_uint16, read_uint32, read_int64 = (_reader(bits) for bits in (8, 16, 32, 64))
write_int8, write_int32, write_int64 = (_writer(bits) for bits in (8, 32, 64))


@intrinsic
def _address_of(typing_context: Any, array: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, _ir.IntType(64))

    return _types.int64(array), generate


address_of = cast(Callable[[AnyArray], int], _address_of)
"""Returns the address of the first value of an array."""


def _zeros(count: str) -> Callable[[np.uint64], int]:
    """Make a function that counts the zeros at one end of 64 bits: 64 where all are."""

    def zeros(typing_context: Any, value: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
            return getattr(builder, count)(arguments[0], _ir.IntType(1)(0))

        return _types.int64(_types.uint64), generate

    return cast(Callable[[np.uint64], int], intrinsic(zeros))


leading_zeros, trailing_zeros = _zeros("ctlz"), _zeros("cttz")


# The folder of compiled kernels.


@cache
def writable_folder() -> Path | None:
    """Return the folder in which kernels are kept, made if need be; None if no folder is writable."""
    name = f"kernels-{_stamp()}"
    chosen = _numba.config.CACHE_DIR
    first = Path(chosen) / "tokenmill" if chosen else PACKAGE / "__pycache__"
    with suppress(OSError):
        first.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder := writable(first / name):
        return folder
    private = private_folder("kernels")
    if private is None:
        logger.warning("no folder for compiled kernels can be written to: every process compiles its own")
        return None
    folder = private / name
    if (first / name).is_dir() and not folder.exists():
        copy = private / f".tmp-{os.getpid()}"
        with suppress(OSError):  # another process may have copied it meanwhile
            shutil.copytree(first / name, copy)
            copy.rename(folder)
        shutil.rmtree(copy, ignore_errors=True)
    return writable(folder)


@cache
def _stamp() -> str:
    """Return a digest of the sources of the package, whose functions and constants kernels use."""
    state = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        state.update(str(file.relative_to(PACKAGE)).encode() + b"\0" + file.read_bytes() + b"\0")
    return state.hexdigest()[:16]
