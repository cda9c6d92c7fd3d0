"""Kernels: functions that numba compiles at their first call, once on a machine, and then loads from a folder.

The folder is the one that NUMBA_CACHE_DIR names, or `__pycache__` in this package. Where nothing can be written to
it, as in an image that `tokenmill warm` has filled, kernels are loaded from it all the same, and others are kept in
a folder that is this user's alone (`caches`). What is kept is named by a digest of the code of a kernel, of all
that it calls and of the constants that they use, so that nothing stale is ever loaded.

Of the processes that start together one compiles a kernel while the others wait for it. The lock goes with its
process, so a killed one keeps nobody waiting; where locks do not work, everyone compiles.

What makes a kernel quick to compile: arrays that Python has made, as each allocation in a kernel takes a tenth of a
second; numbers of one type (`int64`), as a function is compiled for each combination; few arguments, and few tuples
of arrays among them; no sorting. benchmarks/start.py says what each takes.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numba.core import caching, cgutils, event, types
from numba.core.runtime.nrt import rtsys
from numba.extending import intrinsic

from tokenmill.caches import private_folder, writable
from tokenmill.types import AnyArray

P = ParamSpec("P")
R = TypeVar("R")
_KERNELS: list[Any] = []
"""All kernels of the modules that are imported."""
_numba: Any = numba
_caching: Any = caching
_ir: Any = cgutils.ir  # type: ignore[attr-defined]  # of llvmlite, which is numba's own dependency
_types: Any = types

PACKAGE = Path(__file__).parent
MAX_WAIT_SECONDS = 60.0
"""How long a process waits for others that compile the same; one kernel takes a few seconds at most."""

SILENT_SECONDS = 2.0
"""How long kernels are compiled before a line says so."""

_TESTED_NUMBA = (0, 68)
"""The last version with which kernels were loaded without all that compiles them; later ones load it as well."""

int64 = cast(Callable[[Any], int], np.int64)
"""Makes any whole number one of 64 bits: in kernels the integers of Python and of numpy are one."""
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
logger = logging.getLogger("tokenmill")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that Python calls, and keep what was compiled for other processes."""
    dispatcher = _numba.njit(**_OPTIONS)(function)
    dispatcher._cache = _KernelCache(function)
    _KERNELS.append(dispatcher)
    return cast(Callable[P, R], dispatcher)


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that only kernels call: it becomes a part of them, and costs no wrapper for Python."""
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


@contextmanager
def record_compiled() -> Iterator[dict[str, float]]:
    """Note the kernels that are compiled within a `with` block, with the seconds that each took."""
    seconds: dict[str, float] = {}

    class Note(event.Listener):
        """Counts what a kernel calls as a part of it."""

        def __init__(self) -> None:
            self.begun: list[float] = []

        def on_start(self, event: Any) -> None:  # noqa: ANN401, ARG002 - numba's own types
            self.begun.append(time.perf_counter())

        def on_end(self, event: Any) -> None:  # noqa: ANN401
            dispatcher, begin = event.data["dispatcher"], self.begun.pop()
            if isinstance(dispatcher._cache, _KernelCache):
                name = _name(dispatcher.py_func)
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin

    with event.install_listener("numba:compile", Note()):
        yield seconds


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__.removeprefix('tokenmill.')}.{function.__qualname__}"


# Memory by address, inside kernels.
#
# A batch draws rows from many shards. Handing a kernel one address per span lets a single call serve them all;
# handing it a list of arrays would cost a Python call per shard (benchmarks/loader.py). The addresses come from
# `MapCache.open`, which has checked the file's size, and spans are checked against the shard's number of tokens
# before they get here.


def _reader(bits: int) -> Callable[[int, int], int]:
    """Make a function of (address, index) that returns an unsigned number of so many bits."""

    def read(typing_context: Any, address: Any, index: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
            pointer = builder.inttoptr(arguments[0], _ir.IntType(bits).as_pointer())
            value = builder.load(builder.gep(pointer, [arguments[1]]))
            return value if bits == 64 else builder.zext(value, _ir.IntType(64))

        return _types.int64(_types.int64, _types.int64), generate

    return cast(Callable[[int, int], int], intrinsic(read))


def _writer(bits: int) -> Callable[[int, int, int], None]:
    """Make a procedure of (address, index, value) that writes a number of so many bits."""

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


# Where kernels are kept.


def kernel_folders() -> Iterator[Path]:
    """Yield the folders that kernels are loaded from, in the order in which they are looked at."""
    yield _first_folder()
    own = private_folder("kernels", make=False)
    if own is not None:
        yield own


@cache
def _first_folder() -> Path:
    chosen = _numba.config.CACHE_DIR
    return Path(chosen) / "tokenmill" if chosen else PACKAGE / "__pycache__"


@cache
def writable_folder() -> Path | None:
    """Return the folder in which kernels are kept, made if need be; None where there is none."""
    first = _first_folder()
    with suppress(OSError):
        first.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = writable(first) or private_folder("kernels")
    if folder is None:
        logger.warning("no folder for compiled kernels can be written to: every process compiles its own")
    return folder


class _KernelCache:
    """What numba asks for a compiled kernel, and gives it to."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def cache_path(self) -> str | None:
        """Where the kernel is kept."""
        folder = writable_folder()
        return str(folder) if folder else None

    def load_overload(self, signature: Any, context: Any) -> Any:  # noqa: ANN401 - numba's own types
        """Return the kernel for a signature, or None where it must be compiled; then nobody else compiles."""
        compiled = self._load(signature, context)
        if compiled is None and _turn.begin():
            compiled = self._load(signature, context)  # another process may have compiled it meanwhile
            if compiled is not None:
                _turn.end()
        return compiled

    def _load(self, signature: Any, context: Any) -> Any:  # noqa: ANN401
        for folder in kernel_folders():
            files = _files(self._function, folder)
            try:
                compiled = _load_light(files, signature, context)
            except Exception as error:  # whatever a damaged file leads to
                logger.debug("%s: a compiled kernel cannot be read: %s", folder, error)
                with suppress(OSError):
                    files.flush()
                continue
            if compiled is not None:
                return compiled
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:  # noqa: ANN401
        """Keep a kernel, and let others compile."""
        folder = writable_folder()
        try:
            if folder:
                _files(self._function, folder).save_overload(signature, compiled)
        except OSError as error:
            logger.warning("%s: a compiled kernel cannot be kept: %s", folder, error)
        finally:
            _turn.end()


def _load_light(files: Any, signature: Any, context: Any) -> Any:  # noqa: ANN401
    """Load a kernel without all that compiles one, which takes numba a third of a second to import."""
    if _numba.version_info.short > _TESTED_NUMBA:
        return files.load_overload(signature, context)
    rtsys.initialize(context)
    return files._load_overload(signature, context)


@cache
def _files(function: Callable[..., Any], folder: Path) -> Any:  # noqa: ANN401
    """Return numba's own reader and writer of compiled functions, for one function and folder."""
    place = {"_locator_classes": [_Locator(folder, _stamp(function))]}
    files = {"_impl_class": type("Place", (_caching.CompileResultCacheImpl,), place)}
    return type("Files", (_caching.FunctionCache,), files)(function)


class _Locator:
    """Says to numba where a function is kept, and under which name."""

    def __init__(self, folder: Path, stamp: str) -> None:
        self._folder, self._stamp = folder, stamp
        self._py_file = str(PACKAGE)

    def from_function(self, function: object, file: str) -> _Locator:  # noqa: ARG002 - as numba calls it
        return self

    def ensure_cache_path(self) -> None: ...

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._stamp

    def get_disambiguator(self) -> str:
        return self._stamp[:16]


@cache
def _stamp(function: Callable[..., Any]) -> str:
    """Return a digest of all that decides what a kernel does."""
    state = hashlib.sha256(repr((_OPTIONS, _numba.config.BOUNDSCHECK)).encode())
    for part in _parts(function, set()):
        state.update(part.encode() + b"\0")
    return state.hexdigest()


def _parts(function: Callable[..., Any], seen: set[object]) -> Iterator[str]:
    """Yield the code of a function, of those that it calls, and the values of the constants that they use."""
    if function in seen:
        return
    seen.add(function)
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield code.co_code.hex()
        yield repr([constant for constant in code.co_consts if not isinstance(constant, CodeType)])
        yield repr((code.co_names, code.co_varnames, code.co_freevars))
    known = {name: function.__globals__.get(name) for code in codes for name in code.co_names}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    known |= {name: cell.cell_contents for name, cell in cells}
    for name, value in sorted(known.items()):
        called = getattr(value, "py_func", None) or getattr(value, "_defn", None)
        if called is not None:
            yield repr(getattr(value, "targetoptions", None))
            yield from _parts(called, seen)
        elif isinstance(value, np.ndarray):
            yield f"{name} {value.dtype} {value.shape} {value.tobytes().hex()}"
        elif callable(value):
            yield f"{name} {value.__module__}.{value.__qualname__}"
        elif not isinstance(value, ModuleType):
            yield f"{name} {value!r}"


class _Turn:
    """The right to compile, of one process at a time; kernels that a kernel calls are compiled in the same turn."""

    def __init__(self) -> None:
        self._depth = 0
        self._lock: IO[bytes] | None = None
        self._patient = True
        self._said = False
        self._begun = self._spent = 0.0

    def begin(self) -> bool:
        """Wait until no other process compiles; False if this one already had the right."""
        self._depth += 1
        folder = writable_folder()
        if self._depth > 1 or folder is None:
            return False
        try:
            self._lock = (folder / "kernels.lock").open("wb")
            self._wait(self._lock, folder)
        except (ImportError, OSError) as error:
            logger.debug("%s: no lock: %s", folder, error)
        if self._spent > SILENT_SECONDS:
            logger.warning("compiling kernels for this CPU, once: later starts load them")
            self._spent = float("-inf")
        self._begun = time.monotonic()
        return True

    def _wait(self, lock: IO[bytes], folder: Path) -> None:
        import fcntl

        begin = time.monotonic()
        while self._patient:
            try:
                # Of a process, not of a file that its children inherit: they do not compile.
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):
                time.sleep(0.02)
            waited = time.monotonic() - begin
            if waited > 0.5 and not self._said:  # once, however many kernels others compile
                logger.warning("%s: waiting for another process that compiles kernels, to load them then", folder)
                self._said = True
            self._patient = waited < MAX_WAIT_SECONDS

    def end(self) -> None:
        """Give the right back."""
        self._depth -= 1
        if self._depth == 0 and self._lock is not None:
            self._spent += time.monotonic() - self._begun
            self._lock.close()
            self._lock = None


_turn = _Turn()
