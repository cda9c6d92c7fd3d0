"""A proxy between a client and an S3 server that is slow, breaks off, lies and hangs as often as it is told to."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Faults:
    """What the proxy does, and what it has seen; may be changed while it runs."""

    latency: float = 0.0
    """Seconds before each answer."""
    bytes_per_second: float = 0.0
    """0: as fast as it goes."""
    errors: float = 0.0
    """Share of reads that are answered by 429, 500 or 503."""
    truncated: float = 0.0
    """Share of bodies that end early."""
    flipped: float = 0.0
    """Share of bodies with one bit changed; a range that had one is left alone afterwards."""
    stalled: float = 0.0
    """Share of bodies that stop in the middle for `stall` seconds."""
    stall: float = 30.0
    only: str = ".bin"
    """Faults are for objects with this in their names; latency is for all."""
    seed: int = 0
    requests: int = 0
    rounds: int = 0
    """Answers that the longest chain of requests waited for: each was sent after the one before it was answered."""
    bytes: int = 0
    """Of the bodies of reads of such objects."""
    changed: set[tuple[str, str | None]] = field(default_factory=set)
    """Paths and ranges of bodies that had a bit changed."""
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    """Object, first byte and end of every read of a part of one."""


@contextmanager
def fault_proxy(endpoint: str, faults: Faults, port: int = 0) -> Iterator[str]:
    """Run a proxy before an endpoint for the length of a `with` block; give its own endpoint."""
    loop = asyncio.new_event_loop()
    started: threading.Event = threading.Event()
    place: list[int] = []
    open_ones: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
    upstream = urlsplit(endpoint)
    assert upstream.hostname is not None
    assert upstream.port is not None
    dice = random.Random(faults.seed)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await _converse(reader, writer, (upstream.hostname, upstream.port), faults, dice)
        await _closed(writer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = loop.create_task(serve(reader, writer))
        open_ones[task] = writer
        task.add_done_callback(lambda task: open_ones[task].transport.abort())
        task.add_done_callback(open_ones.pop)

    async def main() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", port, limit=1 << 24)
        place.append(server.sockets[0].getsockname()[1])
        started.set()
        async with server:
            with suppress(asyncio.CancelledError):
                await server.serve_forever()
        await asyncio.sleep(0.01)  # connections that were just accepted get their tasks
        tasks = list(open_ones)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports that were aborted close their sockets in the next turn of the loop

    runner: list[asyncio.Task[None]] = []

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner.append(loop.create_task(main()))
        loop.run_until_complete(runner[0])
        loop.close()

    thread = threading.Thread(target=run, name="fault-proxy", daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield f"http://127.0.0.1:{place[0]}"
    finally:
        loop.call_soon_threadsafe(runner[0].cancel)
        thread.join(10)


async def _converse(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    upstream: tuple[str | None, int | None],
    faults: Faults,
    dice: random.Random,
) -> None:
    up_reader, up_writer = await asyncio.open_connection(*upstream, limit=1 << 24)
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            method, path, _ = lines[0].split(" ")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:]) if k}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            faults.requests += 1
            chain = faults.rounds + 1
            touched = method == "GET" and faults.only in path
            if faults.latency:
                await asyncio.sleep(faults.latency)
            if touched and dice.random() < faults.errors:
                status = dice.choice(("429 Too Many Requests", "500 Internal Server Error", "503 Slow Down"))
                writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
                await writer.drain()
                continue
            faults.rounds = max(faults.rounds, chain)
            up_writer.write(head + body)
            await up_writer.drain()
            answer = await up_reader.readuntil(b"\r\n\r\n")
            fields = {
                k.lower(): v.strip()
                for k, _, v in (line.partition(":") for line in answer.decode("latin-1").split("\r\n")[1:])
                if k
            }
            writer.write(answer)
            if fields.get("transfer-encoding", "").lower() == "chunked":
                await _relay_chunks(up_reader, writer)
                continue
            size = 0 if method == "HEAD" else int(fields.get("content-length", 0))
            data = await up_reader.readexactly(size)
            if touched:
                faults.bytes += size
                if "range" in headers and answer.startswith(b"HTTP/1.1 206"):
                    begin = int(headers["range"].removeprefix("bytes=").partition("-")[0])
                    faults.ranges.append((path.partition("?")[0], begin, begin + size))
            key = (path, headers.get("range"))
            if touched and data and key not in faults.changed and dice.random() < faults.flipped:
                faults.changed.add(key)
                place = dice.randrange(len(data))
                data = data[:place] + bytes([data[place] ^ (1 << dice.randrange(8))]) + data[place + 1 :]
            if not await _answer(writer, data, faults, dice, touched=touched):
                return
    finally:
        await _closed(up_writer)


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError, asyncio.CancelledError):
        await writer.wait_closed()


async def _answer(
    writer: asyncio.StreamWriter, data: bytes, faults: Faults, dice: random.Random, *, touched: bool
) -> bool:
    """Send a body, with what is wrong with it; say whether the connection goes on."""
    if touched and data:
        if dice.random() < faults.truncated:
            writer.write(data[: len(data) // 2])
            await writer.drain()
            return False
        if dice.random() < faults.stalled:
            writer.write(data[: len(data) // 2])
            await writer.drain()
            await asyncio.sleep(faults.stall)
            data = data[len(data) // 2 :]
    if faults.bytes_per_second:
        for begin in range(0, len(data), 1 << 16):
            writer.write(data[begin : begin + (1 << 16)])
            await writer.drain()
            await asyncio.sleep((1 << 16) / faults.bytes_per_second)
    else:
        writer.write(data)
        await writer.drain()
    return True


async def _relay_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        writer.write(line + await reader.readexactly(size + 2))
        await writer.drain()
        if not size:
            return
