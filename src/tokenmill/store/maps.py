"""Files in memory: a bounded number of maps that all stores of a run share, and what becomes of one that is cut.

Of what cannot be mapped, ranges are brought into memory of the file's size, of which only the pages that were
written to take room. So a span has an address as it has one in a local file, and kernels see no difference.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import stat
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from tokenmill.errors import StoreCorruptError, StoreMissingError
from tokenmill.store.layout import WAY_OUT
from tokenmill.types import Int64Array, Uint8Array

MAX_MAPS = 1024
"""Enough for a store of 256 GiB of text: rows come from anywhere, and to map files anew for them takes much longer
than to read them (benchmarks/engines.py --shards). A map takes address space, no memory and no descriptor."""
LARGE_BYTES = 1 << 28
"""Of a larger file only the pages that are used are read and mapped, not their neighbours as well: rows are read in
random order, and reading ahead would read and hold many times what they need."""
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# No link is followed out of the store, and a pipe in place of a file does not make us wait for its other end.
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(eq=False, slots=True)
class MappedFile:
    """One file in memory, read-only; stays mapped while this object lives."""

    path: Path | str
    data: Uint8Array
    address: int
    """Where `data` starts; 0 for an empty file."""
    mapping: mmap.mmap | None = None
    """What the system knows of the map; None for what is in memory or empty."""
    end: int = 0
    """How many bytes the file must keep."""
    watched: int | None = None
    """Where the pages are counted that were missing when they were read."""
    borrowers: int = field(default=0)

    def check(self) -> None:
        """Refuse what was read of a file that became shorter meanwhile: zeros stand where bytes are gone.

        To be called after reading. Where missing pages cannot be watched, reading them ends the process.
        """
        if self.mapping is None:
            return
        size = self.mapping.size()
        if size < self.end or num_faults(self.watched):
            raise StoreCorruptError(
                f"{self.path}: must keep its {self.end} bytes while it is read, got {size}"
                f"{' after it was cut' if size >= self.end else ''}; {WAY_OUT}"
            )


@dataclass(frozen=True, slots=True)
class FileRequest:
    """A file or a part of one, and the size that the manifest promises."""

    path: Path
    bytes: int
    """Size of the whole file."""
    begin: int = 0
    size: int | None = None
    """How many bytes from `begin` on are wanted; None: all that there are."""

    @property
    def wanted(self) -> int:
        """How many bytes are wanted."""
        return self.bytes - self.begin if self.size is None else self.size


@dataclass(frozen=True, eq=False, slots=True)
class MemoryRequest:
    """What stands for a file of a store but is held in memory."""

    path: Path
    """The file it was made from, for messages."""
    data: Uint8Array

    @property
    def wanted(self) -> int:
        """How many bytes there are."""
        return self.data.size


class Loan(Protocol):
    """Ranges of files that are on their way into memory."""

    @property
    def is_here(self) -> bool:
        """Whether all of them have arrived."""

    def wait(self) -> Sequence[MappedFile]:
        """Return the files once all ranges are there; between the ranges they hold nothing."""

    def release(self) -> None:
        """Let go of the memory, or of what is still on its way."""


class RangeReader(Protocol):
    """Where files are that are not mapped but read by ranges: object storage, or a disk that is not trusted."""

    def begin(self, ranges: Sequence[Ranges], *, ahead: bool) -> Loan:
        """Begin to read ranges of some files; those that are `ahead` of training wait for room in memory."""


@dataclass(frozen=True, eq=False, slots=True)
class RangeRequest:
    """A file, or a part of one, of which only ranges can be had."""

    path: str
    """Its address, for messages."""
    reader: RangeReader
    name: str
    """By which the reader knows the file."""
    bytes: int
    """Size of the whole file."""
    begin: int = 0
    size: int | None = None
    """How many bytes from `begin` on are wanted; None: all that there are."""

    @property
    def wanted(self) -> int:
        """How many bytes are wanted."""
        return self.bytes - self.begin if self.size is None else self.size


@dataclass(frozen=True, eq=False, slots=True)
class Ranges:
    """What is wanted of a file."""

    request: RangeRequest
    begins: Int64Array
    """First byte of each range, counted from where the request begins."""
    ends: Int64Array
    """End of each range, exclusive."""
    again: Callable[[Int64Array], Int64Array] | None = None
    """First bytes of pages -> the step at which the run needs each page again, if somebody knows."""
    whole: tuple[Int64Array, Int64Array] | None = None
    """Ranges around these, begins and ends, all of which the run soon needs: a mirror brings them whole."""


Request: TypeAlias = FileRequest | MemoryRequest | RangeRequest


class MapCache:
    """Keeps the most recently used maps, at most `limit` with those in use, for any number of threads.

    Maps are lent, so that none is closed under a reader. Idle ones make room for new ones. The limit
    is passed only while the borrowers of one moment need more than that together: waiting for one
    another could wait for ever.
    """

    def __init__(self, limit: int | None = None) -> None:
        limit = MAX_MAPS if limit is None else limit
        assert limit >= 2
        self.limit = limit
        self._maps: OrderedDict[FileRequest, MappedFile] = OrderedDict()
        self._lock = threading.Lock()

    def renew_lock(self) -> None:
        """Take a new lock, in a process that was forked: a thread that is not here may hold the old one."""
        self._lock = threading.Lock()

    @property
    def num_open(self) -> int:
        """How many files are mapped now."""
        return len(self._maps)

    def take(self, requests: Sequence[Request]) -> list[MappedFile]:
        """Lend the maps of some files, in the order asked for, until they are given back."""
        with self._lock:
            files: list[MappedFile] = []
            try:
                for request in requests:
                    assert not isinstance(request, RangeRequest), "its ranges are borrowed by `lent`"
                    if isinstance(request, MemoryRequest):
                        files.append(map_file(request))
                        files[-1].borrowers += 1
                        continue
                    file = self._maps.get(request)
                    if file is None:
                        self._make_room()
                        file = self._maps[request] = map_file(request)
                    else:
                        self._maps.move_to_end(request)
                    file.borrowers += 1
                    files.append(file)
            except BaseException:
                self._return(files)
                raise
            return files

    def give_back(self, files: Sequence[MappedFile]) -> None:
        """End a loan; the maps stay open until their room is needed."""
        with self._lock:
            self._return(files)

    @contextmanager
    def borrow(self, requests: Sequence[Request]) -> Iterator[list[MappedFile]]:
        """Lend the maps of some files for the length of a `with` block; what was read of a cut one is refused."""
        files = self.take(requests)
        try:
            yield files
            for file in files:
                self.check(file)
        finally:
            self.give_back(files)

    def check(self, file: MappedFile) -> None:
        """Refuse what was read of a file that was cut; once it is put back, it is mapped anew."""
        try:
            file.check()
        except StoreCorruptError:
            with self._lock:
                for request in [request for request, mapped in self._maps.items() if mapped is file]:
                    del self._maps[request]
            raise

    def _return(self, files: Sequence[MappedFile]) -> None:
        for file in files:
            file.borrowers -= 1
        while len(self._maps) > self.limit and self._close_idle():
            pass

    def _make_room(self) -> None:
        if len(self._maps) >= self.limit:
            self._close_idle()

    def _close_idle(self) -> bool:
        for request, file in self._maps.items():
            if not file.borrowers:
                del self._maps[request]
                return True
        return False


def map_file(request: Request) -> MappedFile:
    """Map a file or a part of it, after checking that it has the size that the manifest promises.

    What is in memory is handed out as if it were mapped.
    """
    assert not isinstance(request, RangeRequest), "its ranges are borrowed by `lent`"
    if isinstance(request, MemoryRequest):
        return MappedFile(request.path, request.data, int(request.data.ctypes.data) if request.data.size else 0)
    with _open_checked(request) as descriptor:
        if request.wanted == 0:
            return MappedFile(request.path, np.empty(0, np.uint8), 0)
        before = request.begin % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(
                descriptor, before + request.wanted, access=mmap.ACCESS_READ, offset=request.begin - before
            )
        except ValueError:  # cut since its size was checked
            raise StoreCorruptError(
                f"{request.path}: must keep its {request.bytes} bytes while it is read, got cut; {WAY_OUT}"
            ) from None
        if request.wanted > LARGE_BYTES and hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        data = np.frombuffer(mapped, np.uint8, request.wanted, before)
    address = int(data.ctypes.data)
    return MappedFile(
        request.path, data, address, mapped, request.begin + request.wanted, watch(mapped, address - before)
    )


def read_range(request: Request, begin: int, size: int) -> Uint8Array:
    """Read bytes of a file without mapping it: what is read once should not stay in this process's memory."""
    if isinstance(request, MemoryRequest):
        return request.data[begin : begin + size]
    if isinstance(request, RangeRequest):
        with lent(MapCache(), [Ranges(request, np.array([begin]), np.array([begin + size]))]) as (file,):
            return file.data[begin : begin + size].copy()
    data = np.empty(size, np.uint8)
    with _open_checked(request) as descriptor:
        filled = 0
        while filled < size:  # the system reads at most 2 GB at a time
            count = os.preadv(descriptor, [data[filled:].data], request.begin + begin + filled)
            if count == 0:
                raise StoreCorruptError(f"{request.path}: must have {request.bytes} bytes, got fewer; {WAY_OUT}")
            filled += count
    return data


@contextmanager
def lent(maps: MapCache, ranges: Sequence[Ranges | Request]) -> Iterator[list[MappedFile]]:
    """Lend files for the length of a `with` block: whole ones by their maps, of others the ranges."""
    whole = [item for item in ranges if not isinstance(item, Ranges)]
    loans = [item.request.reader.begin([item], ahead=False) for item in ranges if isinstance(item, Ranges)]
    try:
        with maps.borrow(whole) as mapped:
            files, parts = iter(mapped), iter(loans)
            yield [next(parts).wait()[0] if isinstance(item, Ranges) else next(files) for item in ranges]
    finally:
        for loan in loans:
            loan.release()


@contextmanager
def _open_checked(request: FileRequest) -> Iterator[int]:
    """Open a file that is what the manifest says: a plain file of the store, of that size."""
    try:
        # A part of a file lies in the store's own folder, which may be a link; a whole file in that of its shard.
        if request.size is None and request.path.parent.is_symlink():
            raise StoreCorruptError(f"{request.path.parent}: must be a folder of the store, got a link; {WAY_OUT}")
        descriptor = os.open(request.path, _FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreMissingError(
            f"{request.path}: must exist, as the manifest lists it, got nothing there; {WAY_OUT}"
        ) from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise StoreCorruptError(f"{request.path}: must be a file of the store, got a link; {WAY_OUT}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StoreCorruptError(f"{request.path}: must be a plain file, got another kind; {WAY_OUT}")
        if status.st_size != request.bytes:
            raise StoreCorruptError(
                f"{request.path}: must have {request.bytes} bytes, got {status.st_size}; {WAY_OUT}"
            )
        if request.begin + request.wanted > request.bytes:
            raise StoreCorruptError(
                f"{request.path}: a part must lie within its {request.bytes} bytes, "
                f"got {request.begin}:{request.begin + request.wanted}; {WAY_OUT}"
            )
        yield descriptor
    finally:
        os.close(descriptor)


# Ranges in memory of the file's size.


def sparse_map(path: str, size: int) -> MappedFile:
    """Return memory of a file's size, of which nothing is taken before it is written to."""
    if not size:
        return MappedFile(path, np.empty(0, np.uint8), 0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    mapping = mmap.mmap(-1, size, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):
            mapping.madvise(mmap.MADV_NOHUGEPAGE)  # or a page of 4 KiB would take 2 MiB
    data = np.frombuffer(mapping, np.uint8)
    return MappedFile(path, data, int(data.ctypes.data))


def merged(begins: Int64Array, ends: Int64Array, page: int, size: int) -> tuple[Int64Array, Int64Array]:
    """Return ranges in ascending order, widened to whole pages; those that touch or overlap become one, gaps stay.

    >>> [part.tolist() for part in merged(np.array([8, 0, 4]), np.array([9, 4, 6]), 1, 100)]
    [[0, 8], [6, 9]]
    """
    kept = ends > begins
    begins, ends = begins[kept] // page * page, np.minimum(-(-ends[kept] // page) * page, size)
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    heads = np.flatnonzero(np.concatenate([[True], begins[1:] > ends[:-1]])[: begins.size])
    return begins[heads], ends[np.append(heads[1:], begins.size) - 1] if begins.size else ends


def part_of(mapped: MappedFile, request: RangeRequest) -> MappedFile:
    """Return the part of a file that a request is for, as if it were mapped alone."""
    data = mapped.data[request.begin : request.begin + request.wanted]
    return MappedFile(request.path, data, mapped.address + request.begin if data.size else 0)


# Files that are cut while they are mapped.
#
# Who reads a page of a mapped file that is no longer there gets the signal SIGBUS, which ends a process without a
# word. Looking at the size first leaves a moment between the look and the read. So, as systemd does for its
# journals, the signal is answered: a page of zeros takes the place of the missing one, the map is marked, and the
# reader goes on. Whoever reads maps asks afterwards (`MappedFile.check`) and throws away what was read.
#
# The answer must be machine code, as Python cannot run inside a signal: a few instructions, made by the LLVM that
# compiles kernels, in 10 ms. So it is on Linux; elsewhere sizes alone are checked. A signal for another address
# goes to whoever answered it before us.

MAX_WATCHED = 4096
"""Maps that are watched at a time; one that finds no place is not."""
BEGIN, END, FAULTS = range(3)
"""Columns: first address of a map, the end of its last page, how many of its pages were missing."""
_missing: Int64Array = np.zeros(1, np.int64)
missing_pages: memoryview[int] = _missing.data
"""Its one number is how many pages of all maps were missing: cheap to compare before each map is asked."""
_watched: Int64Array = np.zeros((MAX_WATCHED, 3), np.int64)
_free = list(range(MAX_WATCHED - 1, -1, -1))
_lock = threading.Lock()


def watch(mapping: mmap.mmap, address: int) -> int | None:
    """Count the pages of a map that are missing when they are read; return where to ask, None if none."""
    if not _answer_signals():
        return None
    with _lock:
        if not _free:
            return None
        place = _free.pop()
        end = address + -(-len(mapping) // mmap.PAGESIZE) * mmap.PAGESIZE
        _watched[place, END], _watched[place, FAULTS] = end, 0
        _watched[place, BEGIN] = address
    weakref.finalize(mapping, _forget, place).atexit = False
    return place


def num_faults(place: int | None) -> int:
    """Return how many pages of a map were missing so far."""
    return 0 if place is None else int(_watched[place, FAULTS])


def _forget(place: int) -> None:
    _watched[place, END] = 0
    with _lock:
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
    if sys.platform != "linux" or sys.maxsize < 1 << 62:
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
    """Write a read of a number so many bytes behind an address."""
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
