"""Tokens per second, first batch and bytes per token from a real S3 server with latency, with peers.

    python benchmarks/remote.py [--tiny] [--json] [--latency 0 20 100] [--megatokens 20] [--steps 60]
        [--peers PYTHON] [--slow]

One server (SeaweedFS, on this machine), one proxy before it that counts requests and adds latency to every
answer, and the same tokens for all. Each candidate draws batches of 32 rows of 2,048 tokens in its own process:

- tokenmill from disk; from the server with verified pages, and without; with a mirror of a tenth of the store;
- one blocking request for every piece of a row, like a loader that reads exact ranges but does not work ahead;
- MosaicML Streaming and LitData from their own formats, with a cache of a tenth of the store, if `--peers` names
  the Python of an environment that has them. Each of their files is a 64th of the store, so a cache holds six.
  The default is 64 MB, which reads more per row. Mosaic shuffles fully (`naive`). LitData shuffles its files, and
  the rows within each: it has no full shuffle.

With `--slow`, only waits for a batch are measured, behind a proxy that stops 2% of the bodies for 2 s. Requests
that are slower than usual are raced by a second one, as always, or not.

Kernels are loaded and packages imported before the clock starts. Rates are those after the first batch. A
candidate that is not ready after ten seconds is stopped, and the batches that it has drawn are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
SEQ_LEN, BATCH, SECONDS = 2048, 32, 10
FILES = 64
"""Into how many files the peers cut the store."""
ORDERS = (("concat", "full"), ("concat", "window"), ("best_fit", "full"), ("best_fit", "window"))
"""Packing and shuffle of the runs that are measured."""
RUN = """
[run]
steps = {steps}
global_batch_size = 32
seq_len = 2048
packing = "{packing}"
shuffle = "{shuffle}"
{more}
[remote]
verify_pages = {verify}
{remote}
[[sources]]
name = "web"
store = "{store}"
"""


def make_store(path: Path, tokens: int) -> None:
    """Write a store of random ids with log-normal documents."""
    from tokenmill.store import StoreSpec, StoreWriter

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(400), 1.2, tokens // 700).astype(np.int64), 1, 100_000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, 50_000, int(offsets[-1]), dtype=np.uint16)
    spec = StoreSpec(
        keys={"sequence": "<u2"}, tokenizer={"vocab_size": 50_000}, recipe={}, max_tokens_per_shard=tokens // 4
    )
    with StoreWriter(path, spec) as writer:
        writer.append({"sequence": ids}, offsets)
        writer.commit()


# What is measured: each in a process of its own.


def timed(batches: Iterator[int], began: float, cpu: float) -> dict[str, float]:
    """Draw batches, given as their tokens: seconds to the first, tokens per second after it, CPU-seconds."""
    first, tokens = 0.0, 0
    waits, last = [], began
    for size in batches:
        waits.append(time.perf_counter() - last)
        last += waits[-1]
        first = first or time.perf_counter() - began
        tokens += size
        if time.perf_counter() - began > SECONDS and tokens > size:
            break
    rate = (tokens - BATCH * SEQ_LEN) / (time.perf_counter() - began - first)
    tail = np.quantile(waits[1:], [0.5, 0.99]).tolist() if len(waits) > 1 else [0.0, 0.0]
    waited = {"wait_p50": tail[0], "wait_p99": tail[1]}
    return {"first": first, "rate": rate, "tokens": tokens, "cpu": time.process_time() - cpu, **waited}


def draw(file: str) -> dict[str, float]:
    """Draw all batches of a run."""
    from tokenmill.run.run import Run

    Run.from_toml(Path(file).with_name("warm.toml")).loader(micro_batch=BATCH)[0]
    began, cpu = time.perf_counter(), time.process_time()
    loader = Run.from_toml(file).loader(micro_batch=BATCH, arrays=("input_ids", "labels"))
    found = timed((batch["input_ids"].size for batch in loader), began, cpu)
    return {**found, **(loader.network.counters.to_json() if loader.network else {})}


def draw_unraced(file: str) -> dict[str, float]:
    """Draw all batches of a run, and wait for each request however long it takes."""
    from tokenmill.store.remote import fetch

    fetch.SLOWEST_START = fetch.LEAST_RACE = float("inf")
    return draw(file)


def draw_one_by_one(file: str) -> dict[str, float]:
    """Read the rows of a run by one blocking request a span, as soon as they are needed."""
    import obstore

    from tokenmill.run.run import Run
    from tokenmill.store.remote.client import Client

    began, cpu = time.perf_counter(), time.process_time()
    run = Run.from_toml(file)
    plan, store = run.plan(), run.stores["web"]
    objects = Client(store._remotes[0].address)

    def batches() -> Iterator[int]:
        for step in range(plan.steps):
            spans = plan.stages[0].rows["web"].spans(plan.rows(step)[1])
            # Documents of a row that are neighbours at rest are one range.
            follows = (spans.shard[1:] == spans.shard[:-1]) & (spans.token[1:] == (spans.token + spans.length)[:-1])
            heads = np.flatnonzero(np.concatenate([[True], ~follows]))
            sizes = np.add.reduceat(spans.length, heads)
            for shard, token, size in zip(spans.shard[heads], spans.token[heads], sizes, strict=True):
                name = f"{store.manifest.shards[shard].name}/sequence.bin"
                obstore.get_range(objects.store, name, start=2 * int(token), end=2 * int(token + size))
            yield BATCH * SEQ_LEN

    return timed(batches(), began, cpu)


def write_mosaic(rows: np.ndarray, out: str) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=out, columns={"ids": "bytes"}, size_limit=rows.nbytes // FILES) as writer:
        for row in rows:
            writer.write({"ids": row.tobytes()})


def draw_mosaic(address: str, endpoint: str, cache: str, limit: int) -> dict[str, float]:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    os.environ["S3_ENDPOINT_URL"] = endpoint
    began, cpu = time.perf_counter(), time.process_time()
    dataset = StreamingDataset(
        remote=address, local=cache, cache_limit=limit, shuffle=True, batch_size=BATCH, shuffle_algo="naive"
    )
    batches = DataLoader(dataset, BATCH, collate_fn=lambda rows: len(rows) * SEQ_LEN)
    return timed(iter(batches), began, cpu)


def _each(row: np.ndarray) -> np.ndarray:
    return row


def write_lit(rows: np.ndarray, out: str) -> None:
    from litdata import optimize

    optimize(_each, list(rows), out, chunk_size=len(rows) // FILES, num_workers=1, verbose=False)


def draw_lit(address: str, endpoint: str, cache: str, limit: int) -> dict[str, float]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # as nothing else lets its fast path reach this server
    began, cpu = time.perf_counter(), time.process_time()
    options = {"endpoint_url": endpoint, "region_name": "us-east-1"}
    dataset = StreamingDataset(address, cache, shuffle=True, storage_options=options, max_cache_size=limit)
    batches = StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=lambda rows: len(rows) * SEQ_LEN)
    return timed(iter(batches), began, cpu)


PEERS = {
    "MosaicML Streaming": ("streaming", write_mosaic, draw_mosaic, "full"),
    "LitData": ("litdata", write_lit, draw_lit, "files"),
}


def child(kind: str, arguments: list[str]) -> None:
    """Run one candidate in a separate process, and print its results."""
    ways = {"draw": draw, "one": draw_one_by_one, "unraced": draw_unraced}
    if kind in ways:
        print(json.dumps(ways[kind](*arguments)))
        return
    from peers import torchvision_or_stand_in

    module, write, read, _ = PEERS[arguments[0]]
    with torchvision_or_stand_in() if module == "streaming" else nullcontext():
        __import__(module)
    if kind == "write":
        tokens = np.load(arguments[1], mmap_mode="r")
        rows = tokens[: tokens.size // (SEQ_LEN + 1) * (SEQ_LEN + 1)].reshape(-1, SEQ_LEN + 1)
        write(np.ascontiguousarray(rows), arguments[2])
    else:
        address, endpoint, cache, limit = arguments[1:]
        print(json.dumps(read(address, endpoint, cache, int(limit))))


def in_child(*arguments: str, python: str = sys.executable) -> dict[str, float]:
    """Return what a child printed, or why it failed."""
    command = [python, "-W", "ignore", __file__, "--child", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments} ended with {done.returncode}: {done.stderr}")
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


# The whole.


class Bench:
    """A server with one store, and the lines that were measured."""

    def __init__(
        self, folder: Path, tokens: int, steps: int, peers: str | None, orders: tuple[tuple[str, str], ...]
    ) -> None:
        from tests.object_server import running_server

        self.folder, self.steps, self.peers, self.orders, self.lines = folder, steps, peers, orders, []
        make_store(folder / "web", tokens)
        self.limit = sum(file.stat().st_size for file in (folder / "web").rglob("sequence.bin")) // 10
        (folder / "server").mkdir()
        self.running = running_server(folder / "server")

    def upload(self, name: str) -> None:
        from tokenmill.store.remote.client import Client, parse_address

        client = Client(parse_address(self.server.address(name)))
        for file in sorted((self.folder / name).rglob("*")):
            if file.is_file():
                client.put(str(file.relative_to(self.folder / name)), file)

    def run_slow(self) -> None:
        """Measure waits behind a proxy that stops some bodies, with second requests and without, interleaved."""
        from tests.fault_proxy import Faults, fault_proxy
        from tests.object_server import make_bucket

        base = {"steps": self.steps, "packing": "concat", "shuffle": "full", "more": "", "verify": "true"}
        with self.running as self.server:
            make_bucket(self.server)
            os.environ.update(self.server.environment)
            self.upload("web")
            text = RUN.format(**base, remote="", store=self.folder / "web")
            (self.folder / "warm.toml").write_text(text)
            in_child("draw", str(self.folder / "warm.toml"))
            for seed in range(3):
                for way in ("draw", "unraced"):
                    faults = Faults(latency=0.02, only="sequence.bin", stalled=0.02, stall=2.0, seed=seed)
                    with fault_proxy(self.server.endpoint, faults) as endpoint:
                        place = self.server.address("web", endpoint)
                        (self.folder / "run.toml").write_text(RUN.format(**base, remote="", store=place))
                        found = in_child(way, str(self.folder / "run.toml"))
                    self.lines.append({"way": "raced" if way == "draw" else "one request", "seed": seed, **found})

    def run(self, latencies: list[int]) -> None:
        from tests.object_server import make_bucket

        with self.running as self.server:
            make_bucket(self.server)
            os.environ.update(self.server.environment)
            self.upload("web")
            for packing, shuffle in self.orders:
                self.run_packing(packing, shuffle, latencies)
            self.run_peers(latencies)

    def measure(self, line: dict[str, object], latency: int, only: str, *arguments: str, **options: str) -> None:
        """Measure one way to read; `{endpoint}` in its arguments is that of a proxy with a latency."""
        from tests.fault_proxy import Faults, fault_proxy

        faults = Faults(latency=latency / 1000, only=only)
        with fault_proxy(self.server.endpoint, faults) as endpoint:
            if arguments[0] in ("draw", "one"):
                (self.folder / "run.toml").write_text(arguments[1].replace("{endpoint}", endpoint))
                arguments = (arguments[0], str(self.folder / "run.toml"))
            found = in_child(*(each.replace("{endpoint}", endpoint) for each in arguments), **options)
        served = {"served_bytes": faults.bytes, "served_requests": faults.requests}
        self.lines.append({**line, "latency_ms": latency, **found, **served})

    def run_packing(self, packing: str, shuffle: str, latencies: list[int]) -> None:
        window = "window_blocks = 2" if shuffle == "window" else ""
        base = {"steps": self.steps, "packing": packing, "shuffle": shuffle, "more": window}
        local = RUN.format(**base, verify="true", remote="", store=self.folder / "web")
        (self.folder / "warm.toml").write_text(local)
        line = {"packing": packing, "shuffle": shuffle}
        self.measure({**line, "way": "local copy"}, 0, "/", "draw", local)  # compiles kernels
        self.lines.pop()
        self.measure({**line, "way": "local copy"}, 0, "/", "draw", local)
        place = self.server.address("web", "{endpoint}")
        for latency in latencies:
            # (way, how it is drawn, whether pages are proven, what the mirror may hold)
            ways = [
                ("proven pages", "draw", "true", 0),
                ("exact bytes", "draw", "false", 0),
                ("one request at a time", "one", "false", 0),
                ("mirror of a tenth", "draw", "true", self.limit),
            ]
            if shuffle == "window":
                ways = [("mirror", "draw", "true", None)]
            for way, kind, verified, limit in ways:
                # A new folder, so that each downloads small files again.
                remote = f'mirror = "{self.folder}/mirror-{len(self.lines)}"'
                remote += "" if limit is None else f"\nlimit_bytes = {limit}"
                text = RUN.format(**base, verify=verified, remote=remote, store=place)
                self.measure({**line, "way": way}, latency, "sequence.bin", kind, text)

    def run_peers(self, latencies: list[int]) -> None:
        tokens = np.concatenate(
            [np.fromfile(each, np.uint16) for each in sorted(self.folder.glob("web/*/sequence.bin"))]
        )
        np.save(self.folder / "tokens.npy", tokens)
        for peer, (module, _, _, shuffle) in PEERS.items():
            python = self.peers or sys.executable
            look = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
            if subprocess.run([python, "-c", look], check=False).returncode:
                self.lines.append({"way": peer, "skipped": f"{module} is not installed for {python}"})
                continue
            if not (self.folder / module).exists():
                in_child("write", peer, str(self.folder / "tokens.npy"), str(self.folder / module), python=python)
                self.upload(module)
            line = {"packing": "concat", "shuffle": shuffle, "way": peer}
            address = self.server.address(module).partition("?")[0]
            for latency in latencies:
                cache = f"{self.folder}/cache-{len(self.lines)}"
                arguments = ("read", peer, address, "{endpoint}", cache, str(self.limit))
                self.measure(line, latency, module, *arguments, python=python)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--latency", type=int, nargs="*", default=[0, 20, 100])
    parser.add_argument("--megatokens", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--peers", help="the Python of an environment with mosaicml-streaming and litdata")
    parser.add_argument("--slow", action="store_true", help="measure second requests behind a slow proxy")
    parser.add_argument("--child", nargs="+")
    options = parser.parse_args()
    if options.child:
        child(options.child[0], options.child[1:])
        return
    from tests.object_server import missing_program

    if missing_program():
        print(json.dumps({"skipped": missing_program()}))
        return
    tokens, steps = (1_000_000, 2) if options.tiny else (options.megatokens * 1_000_000, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), tokens, steps, options.peers, ORDERS[-1:] if options.tiny else ORDERS)
        if options.slow:
            bench.run_slow()
        else:
            bench.run([0] if options.tiny else options.latency)
    if options.slow and not options.json:
        for line in bench.lines:
            waits = f"p50 {1000 * line['wait_p50']:8.1f} ms, p99 {1000 * line['wait_p99']:8.1f} ms"
            print(f"seed {line['seed']}  {line['way']:12} {waits}, {line['raced']} second requests")
        return
    if options.json:
        print(json.dumps(bench.lines))
        return
    columns = ("first s", "Mtok/s", "bytes/token", "requests/row", "CPU s/Mtok")
    print(f"{'packing':9} {'shuffle':7} {'way':26} {'ms':>4} " + " ".join(f"{name:>12}" for name in columns))
    for line in bench.lines:
        if "skipped" in line:
            print(f"{line['way']}: {line['skipped']}")
            continue
        asked = line["served_requests"] / (line["tokens"] / SEQ_LEN)
        each, cpu = line["served_bytes"] / line["tokens"], line["cpu"] / line["tokens"] * 1e6
        figures = (line["first"], line["rate"] / 1e6, each, asked, cpu)
        print(
            f"{line['packing']:9} {line['shuffle']:7} {line['way']:26} {line['latency_ms']:4d} "
            + " ".join(f"{figure:12.2f}" for figure in figures)
        )


if __name__ == "__main__":
    main()
