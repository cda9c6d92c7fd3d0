"""Ranges of objects, many at a time: retried until a deadline, raced where one is slow, counted.

All requests of a process run in one thread with an event loop. What the stores of a run share is a `Network`: how
many requests are under way, how much of what arrived is held in memory, and what was counted.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from tokenmill.errors import StoreCorruptError, StoreUnreachableError, TokenmillError
from tokenmill.store.layout import WAY_OUT
from tokenmill.store.remote.client import (
    LINE_SECONDS,
    NO_LOCATION,
    REDIRECT,
    Address,
    Attempts,
    check_process,
    connect,
    explained,
    kind_of,
    overwritten,
)
from tokenmill.types import RemoteOptions

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
logger = logging.getLogger("tokenmill")
MAX_REQUEST_BYTES = 8 << 20
"""A longer range is asked for in parts."""
USUAL = 256
"""Requests from whose times it is known what is usual."""
SLOWEST_START = 2.0
"""Seconds after which a second request is raced against the first, as long as nothing is known."""
LEAST_RACE = 0.25
TELL_SECONDS = 5.0
"""Of waiting that are worth a line."""
_FATAL_KINDS = frozenset(
    (
        *("PermissionDeniedError", "UnauthenticatedError", "status 401", "status 403", "PreconditionError"),
        *(REDIRECT, NO_LOCATION),
    )
)


@dataclass(slots=True)
class Counters:
    """Counters of requests and of their results."""

    requests: int = 0
    bytes: int = 0
    """That arrived, with those that were thrown away."""
    hits: int = 0
    """Bytes that were found in the mirror."""
    retries: int = 0
    raced: int = 0
    """Second requests, because the first was slow."""
    corrupt: int = 0
    """Pages that were not what their checksums say, and asked for again."""
    evicted: int = 0
    """Bytes that left the mirror."""
    waited: float = 0.0
    """Seconds for which training waited."""

    def to_json(self) -> dict[str, int | float]:
        """Return them as JSON."""
        return asdict(self)


class Loop:
    """A thread that runs an event loop: one a process."""

    _current: Loop | None = None
    _making = threading.Lock()

    def __init__(self) -> None:
        self.process = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="tokenmill-network", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    @classmethod
    def current(cls) -> Loop:
        """Return that of this process."""
        check_process("object storage")
        with cls._making:
            if cls._current is None:
                cls._current = Loop()
            return cls._current

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def _stop(self) -> None:
        """Cancel pending requests quietly when the interpreter exits."""
        if self.process != os.getpid():
            return
        with suppress(TimeoutError):
            self.start(self._give_up()).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self.loop.close()

    async def _give_up(self) -> None:
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1)


class Network:
    """Requests under way, memory and counters that the stores of a run share."""

    def __init__(self, options: RemoteOptions | None = None) -> None:
        self.options = options or RemoteOptions()
        self.counters = Counters()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._times: deque[float] = deque(maxlen=USUAL)
        self._race_after = SLOWEST_START
        self._next_line = self._told = 0.0
        self._last_error: str | None = None
        """Kind of the last failure; None once a request has succeeded since."""
        self._failing_since = 0.0
        self.told: set[str] = set()
        """Warnings that a run gives once."""
        self._lock = threading.Lock()
        self._held = 0
        self._queue: deque[tuple[int, Callable[[], object]]] = deque()

    # Memory: what is read ahead of training waits for room, what somebody waits for does not.

    def reserve(self, size: int, go: Callable[[], object], *, ahead: bool) -> None:
        """Call `go` once there is room for `size` bytes; at once unless it is ahead of training."""
        with self._lock:
            if ahead and (self._queue or (self._held and self._held + size > self.options.horizon_bytes)):
                self._queue.append((size, go))
                return
            self._held += size
        go()

    def prioritize(self, go: Callable[[], object]) -> None:
        """Start something that waits for room, because its result is needed now."""
        with self._lock:
            waiting = [(size, each) for size, each in self._queue if each == go]
            for item in waiting:
                self._queue.remove(item)
                self._held += item[0]
        for _, each in waiting:
            each()

    def release(self, size: int, go: Callable[[], object]) -> None:
        """Give back `size` bytes that are no longer in memory or no longer needed."""
        with self._lock:
            waiting = [item for item in self._queue if item[1] == go]
            for item in waiting:
                self._queue.remove(item)
            if not waiting:
                self._held -= size
            ready = []
            while self._queue and (not self._held or self._held + self._queue[0][0] <= self.options.horizon_bytes):
                size, each = self._queue.popleft()
                self._held += size
                ready.append(each)
        for each in ready:
            each()

    def count(self, name: str, more: int = 1) -> None:
        """Add to a counter; from any thread."""
        with self._lock:
            setattr(self.counters, name, getattr(self.counters, name) + more)

    def record_wait(self, seconds: float) -> None:
        """Count the seconds that training waited; log them now and then."""
        self.counters.waited += seconds
        now = monotonic()
        if self.counters.waited >= self._told + TELL_SECONDS and now > self._next_line:
            self._next_line, self._told = now + LINE_SECONDS, self.counters.waited
            counted = self.counters
            if self._last_error is None:
                advice = "more concurrency or horizon_bytes under [remote] may help, or a mirror"
            else:
                advice = f"last error: {self._last_error}; check that the server runs"
            logger.warning(
                "training waits for the network: %.1f s so far, %s requests, %s MB, %s retries; %s",
                counted.waited,
                f"{counted.requests:,}",
                f"{counted.bytes / 1e6:,.1f}",
                f"{counted.retries:,}",
                advice,
            )

    def record_failure(self, kind: str) -> None:
        """Count an attempt that is retried; log it now and then while none succeeds."""
        now = monotonic()
        self.counters.retries += 1
        if self._last_error is None:
            self._failing_since = now
        self._last_error = kind
        if now >= self._failing_since + TELL_SECONDS and now > self._next_line:
            self._next_line = now + LINE_SECONDS
            logger.warning(
                "object storage has not answered for %.0f s: %s retries, last error: %s; requests are retried for "
                "up to %g s, so check that the server runs",
                now - self._failing_since,
                f"{self.counters.retries:,}",
                kind,
                self.options.deadline,
            )

    # Requests.

    def slots(self) -> asyncio.Semaphore:
        """Return the semaphore that bounds the requests under way in the running loop."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self.options.concurrency))
        return self._slots[1]

    @property
    def race_after(self) -> float:
        """Seconds after which a request is slower than usual."""
        return self._race_after

    def record_latency(self, seconds: float) -> None:
        """Record the seconds that a successful request took."""
        self._last_error = None
        self._times.append(seconds)
        if len(self._times) >= 32 and self.counters.requests % 32 == 0:
            times = sorted(self._times)
            self._race_after = max(LEAST_RACE, 3 * times[int(len(times) * 0.95)])


class RemoteObjects:
    """The objects of one store, read by ranges; each is pinned to the version that was seen first."""

    def __init__(self, address: Address, network: Network, etags: dict[str, str] | None = None) -> None:
        self.address = address
        self.network = network
        self.etags = {} if etags is None else etags
        """Name -> what its version is known by; a mirror, which keeps versions on disk, fills it and sets `pin`."""
        self.pin: Callable[[str, str], str] = self.etags.setdefault
        """Called with the version of an object that was seen; gives back the one that counts."""
        self.sizes: dict[str, int] = {}
        """Name -> how many bytes it must have, where that is known."""
        self._store: ObjectStore = connect(address, network.options, retries=0)

    async def get(
        self, name: str, begin: int, end: int, find_wrong: Callable[[Any], int | None] | None = None
    ) -> Any:  # noqa: ANN401 - a buffer
        """Return the bytes `begin` to `end` (exclusive) of an object, retried until the deadline.

        `find_wrong` returns the first page of the bytes that fails its checksum. They are then requested once more.
        """
        network, options = self.network, self.network.options
        async with network.slots():
            attempts, wrong = Attempts(options.deadline), False
            while True:
                try:
                    data = await self._raced(name, begin, end, attempts.end)
                except TokenmillError:
                    raise
                except Exception as error:
                    await self._failed(error, name, (begin, end), attempts)
                    continue
                page = find_wrong(data) if find_wrong is not None else None
                if page is None:
                    return data
                network.count("corrupt")
                if wrong:
                    raise StoreCorruptError(
                        f"{self.address / name}: bytes {begin}:{end} must be what their checksums say, got others "
                        f"twice, in page {page}; {WAY_OUT}"
                    )
                wrong = True

    async def _failed(self, error: Exception, name: str, span: tuple[int, int], attempts: Attempts) -> None:
        """Wait before the next attempt, or raise what ends them."""
        address, options = self.address / name, self.network.options
        kind = _OUR_KINDS.get(type(error)) or kind_of(error)
        if kind == "status 416":
            raise self._wrong_size(name) from None
        if isinstance(error, FileNotFoundError) or kind in _FATAL_KINDS:
            raise explained(error, address, "read", options) from None
        pause = attempts.next_pause()
        if pause is None:
            raise StoreUnreachableError(
                f"{address}: bytes {span[0]}:{span[1]} must be read within {options.deadline:g} s, got {kind} in "
                f"the last of {attempts.count} attempts; check endpoint and network, or raise deadline under "
                "[remote]"
            ) from None
        self.network.record_failure(kind)
        await asyncio.sleep(pause)

    def _wrong_size(self, name: str, got: int | None = None) -> StoreCorruptError:
        return StoreCorruptError(
            f"{self.address / name}: must have {self.sizes.get(name)} bytes, got "
            f"{'fewer' if got is None else got}; {WAY_OUT}"
        )

    async def _raced(self, name: str, begin: int, end: int, last: float) -> Any:  # noqa: ANN401 - a buffer
        """Return the bytes by one request, or by the faster of two where the first is slower than usual."""
        network = self.network
        first = asyncio.ensure_future(self._once(name, begin, end))
        tasks = {first}
        # An attempt may take a sixth of all time: what hangs for longer will not come.
        longest = min(last - monotonic(), max(2 * network.race_after, network.options.deadline / 6))
        try:
            done, _ = await asyncio.wait(tasks, timeout=min(network.race_after, longest))
            if not done:
                network.counters.raced += 1
                tasks.add(asyncio.ensure_future(self._once(name, begin, end)))
                end_of = monotonic() + longest
                waiting = set(tasks)
                while waiting and not done:
                    done, waiting = await asyncio.wait(
                        waiting, timeout=end_of - monotonic(), return_when=asyncio.FIRST_COMPLETED
                    )
                    if not done:
                        raise TimeoutError
                    if all(task.exception() is not None for task in done) and waiting:
                        done = set()  # the other one may still come
            return next((task for task in tasks if task.done() and task.exception() is None), first).result()
        finally:
            for task in tasks:
                if not task.done():
                    task.cancel()
                elif not task.cancelled():
                    task.exception()

    async def _once(self, name: str, begin: int, end: int) -> Any:  # noqa: ANN401 - a buffer
        import obstore

        counters, began = self.network.counters, monotonic()
        counters.requests += 1
        etag = self.etags.get(name)
        options: Any = {"range": (begin, end), "if_match": etag} if etag else {"range": (begin, end)}
        result = await obstore.get_async(self._store, name, options=options)
        seen = result.meta["e_tag"]
        if etag is None and seen and await on_disk(self.pin, name, seen) != seen:
            raise overwritten(self.address / name)
        if self.sizes.get(name, result.meta["size"]) != result.meta["size"]:
            raise self._wrong_size(name, result.meta["size"])
        data = await result.bytes_async()
        counters.bytes += len(data)
        self.network.record_latency(monotonic() - began)
        if len(data) != end - begin:
            raise _CutShort
        return data


class _CutShort(Exception):
    """Fewer bytes came than were asked for."""


_OUR_KINDS: dict[type, str] = {TimeoutError: "a time-out", _CutShort: "a body that was cut short"}


_disk = ThreadPoolExecutor(8, thread_name_prefix="tokenmill-disk")
"""Threads for reads and writes of local files, so that a slow disk does not stop the requests of the loop."""


async def on_disk(work: Callable[..., T], *arguments: object) -> T:
    """Run a function in a thread for disk work, and return its result.

    If the caller is cancelled, the function is waited for: the caller then closes the files that it uses.
    """
    done = asyncio.get_running_loop().run_in_executor(_disk, partial(work, *arguments))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait([done])
        raise


async def gathered(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines in parallel; the first error cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def split(begin: int, end: int) -> list[tuple[int, int]]:
    """Cut a range into requests.

    >>> split(0, 5), split(0, (8 << 20) + 1)
    ([(0, 5)], [(0, 8388608), (8388608, 8388609)])
    """
    return [(at, min(at + MAX_REQUEST_BYTES, end)) for at in range(begin, end, MAX_REQUEST_BYTES)]
