"""Files that are cut while they are mapped: noticed, where the system would end the process.

A process that reads a page of a mapped file that is no longer there gets the signal SIGBUS, which ends it without a
word. Looking at the size first leaves a moment between the look and the read. So, as systemd does for its
journals, the signal is answered: a page of zeros takes the place of the missing one, the map is marked, and the
reader goes on. It asks afterwards (`num_faults`), and throws away what was read of such a map.

The answer must be machine code, as Python cannot run inside a signal: a few instructions, made by the LLVM that
compiles kernels, in 10 ms. So it is on Linux; elsewhere sizes alone are checked. A signal for another address
goes to the handler that was there before ours.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import sys
from functools import cache
from typing import Any

import numpy as np

from tokenmill.types import Int64Array

MAX_WATCHED = 4096
"""Maps that are watched at a time; one that finds no place is not."""
BEGIN, END, FAULTS = range(3)
"""Columns: first address of a map, the end of its last page, how many of its pages were missing."""
_missing: Int64Array = np.zeros(1, np.int64)
missing_pages: memoryview[int] = _missing.data
"""Its one number is how many pages of all maps were missing: cheap to compare before each map is asked."""
_watched: Int64Array = np.zeros((MAX_WATCHED, 3), np.int64)
_free = list(range(MAX_WATCHED - 1, -1, -1))


def watch(address: int, size: int) -> int | None:
    """Count the pages of a map that are missing when they are read; return where to ask, None if none.

    `forget` must be called before the map is gone, as another could come to lie at its address.
    """
    if not _answer_signals():
        return None
    try:
        place = _free.pop()  # without a lock, which a thread could hold when the process is forked
    except IndexError:
        return None
    end = address + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    _watched[place, END], _watched[place, FAULTS] = end, 0
    _watched[place, BEGIN] = address
    return place


def num_faults(place: int | None) -> int:
    """Return how many pages of a map were missing so far."""
    return 0 if place is None else int(_watched[place, FAULTS])


def forget(place: int | None) -> None:
    """Count no more for a map."""
    if place is not None:
        _watched[place, END] = 0
        _free.append(place)


class _Action(ctypes.Structure):
    """`struct sigaction` of glibc and musl on machines of 64 bits."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_before = _Action()
"""What answered the signal before us."""
_SIGINFO, _ON_STACK, _RESTART = 0x4, 0x08000000, 0x10000000
_INFO_CODE, _INFO_ADDRESS = 8, 16
"""Where `siginfo_t` says why a signal came, and the address that was read."""
_PRIVATE_FIXED_ANONYMOUS = 0x32


def _answer_signals() -> bool:
    """See that the signal comes to us; others may have asked for it since, as torch does in its workers."""
    if sys.platform != "linux" or sys.maxsize < 1 << 62 or not hasattr(signal, "SIGBUS"):
        return False
    libc, address = _native()
    current = _Action()
    if libc.sigaction(signal.SIGBUS, None, ctypes.byref(current)) != 0:
        return False
    if current.handler == address:
        return True
    ctypes.memmove(ctypes.byref(_before), ctypes.byref(current), ctypes.sizeof(_Action))
    ours = _Action(handler=address, flags=_SIGINFO | _ON_STACK | _RESTART)
    return bool(libc.sigaction(signal.SIGBUS, ctypes.byref(ours), None) == 0)


@cache
def _native() -> tuple[Any, int]:
    """Compile the answer; return the library of C and the address of the answer, which stays for ever."""
    from llvmlite import binding, ir

    libc = ctypes.CDLL(None)
    module = ir.Module(name="tokenmill-faults")
    module.triple = binding.get_default_triple()
    _write_answer(ir, module, libc)
    binding.initialize_native_target()  # as numba does before it compiles; twice does no harm
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(opt=2)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    _engines.append(engine)
    return libc, engine.get_function_address("answer")


_engines: list[Any] = []


def _call(ir: Any, builder: Any, function: Any, result: Any, *arguments: Any) -> Any:  # noqa: ANN401
    """Write a call of a function of C."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    address = ir.IntType(64)(ctypes.cast(function, ctypes.c_void_p).value)
    return builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


def _load(builder: Any, begin: Any, offset: int, kind: Any) -> Any:  # noqa: ANN401
    """Write a read of a number that stands `offset` bytes after an address."""
    return builder.load(builder.inttoptr(builder.add(begin, begin.type(offset)), kind.as_pointer()))


def _write_answer(ir: Any, module: Any, libc: Any) -> None:  # noqa: ANN401 - of llvmlite, which has no types
    """Write `void answer(int signal, siginfo_t *info, void *context)`.

    If the address lies in a map that is watched, it counts the fault and maps a page of zeros there. Else it puts
    back what answered before; the same read then fails again, and that gets the signal. One that a process sent is
    raised again, as nothing repeats it.
    """
    word, number = ir.IntType(64), ir.IntType(32)
    pointer = ir.IntType(8).as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [number, pointer, pointer]), "answer")
    start, loop, inside, counted, following, others, send, end = (
        function.append_basic_block(name)
        for name in ("start", "loop", "inside", "counted", "following", "others", "send", "end")
    )

    builder = ir.IRBuilder(start)
    info = builder.ptrtoint(function.args[1], word)
    code = _load(builder, info, _INFO_CODE, number)
    fault = _load(builder, info, _INFO_ADDRESS, word)
    # Codes of signals that processes send are not positive.
    builder.cbranch(builder.icmp_signed(">", code, number(0)), loop, others)

    builder = ir.IRBuilder(loop)
    place = builder.phi(word)
    first = int(_watched.ctypes.data)
    place.add_incoming(word(first), start)
    begin = _load(builder, place, 8 * BEGIN, word)
    last = _load(builder, place, 8 * END, word)
    hit = builder.and_(builder.icmp_unsigned("<=", begin, fault), builder.icmp_unsigned("<", fault, last))
    builder.cbranch(hit, inside, following)

    builder = ir.IRBuilder(inside)
    page = builder.and_(fault, word(-mmap.PAGESIZE))
    flags = (number(mmap.PROT_READ), number(_PRIVATE_FIXED_ANONYMOUS), number(-1))
    mapped = _call(ir, builder, libc.mmap, word, page, word(mmap.PAGESIZE), *flags, word(0))
    builder.cbranch(builder.icmp_signed("==", mapped, page), counted, others)
    builder = ir.IRBuilder(counted)
    for address in (builder.add(place, word(8 * FAULTS)), word(int(_missing.ctypes.data))):
        count = builder.inttoptr(address, word.as_pointer())
        builder.store(builder.add(builder.load(count), word(1)), count)
    builder.branch(end)

    builder = ir.IRBuilder(following)
    after = builder.add(place, word(24))
    place.add_incoming(after, following)
    builder.cbranch(builder.icmp_unsigned("<", after, word(first + _watched.nbytes)), loop, others)

    builder = ir.IRBuilder(others)
    before = builder.inttoptr(word(ctypes.addressof(_before)), pointer)
    _call(ir, builder, libc.sigaction, number, function.args[0], before, builder.inttoptr(word(0), pointer))
    # If that hands the signal back to us, the process is ended, as it is where nobody answers.
    builder.store(word(signal.SIG_DFL), builder.bitcast(before, word.as_pointer()))
    builder.cbranch(builder.icmp_signed(">", code, number(0)), end, send)
    builder = ir.IRBuilder(send)
    _call(ir, builder, getattr(libc, "raise"), number, function.args[0])
    builder.branch(end)
    ir.IRBuilder(end).ret_void()
