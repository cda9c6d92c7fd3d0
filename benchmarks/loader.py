"""Tokens per second that a loader delivers, compared with the kernel limit and with peers, in one run.

    python benchmarks/loader.py [--peers] [--tiny] [--json]

The limit is one compiled loop that widens random windows of uint16 tokens into preallocated int64 inputs and
labels. Everything runs on one core, the limit and the loader in turns. Rates are per CPU-second, so other work on
the machine affects both. The loader delivers int64 input_ids and labels, shuffled, with the labels of document
ends set to -100. Each peer of peers.py has its own process, so the threads and modules of one do not affect the
next.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numba
import numpy as np

from tokenmill.loader import Loader, LoaderOptions, RankSlice
from tokenmill.packing import ConcatRows
from tokenmill.plan import Shuffle, StageSpec, compile_plan
from tokenmill.store import StoreSpec, StoreWriter, open_store

TINY = "--tiny" in sys.argv
SEQ_LEN = 2048
TOKENS = 1_000_000 if TINY else 200_000_000
VOCAB = 50_000
ROUNDS = 1 if TINY else 7
TURN_ROWS = 320 if TINY else 8000
"""Rows that a loader delivers per turn; the limit copies twice as many."""


def make_lengths(tokens: int) -> np.ndarray:
    """Log-normal document lengths: median 400 tokens, tail to 100,000."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(400), 1.2, tokens // 700).astype(np.int64), 1, 100_000)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens))]


def make_store(path: Path) -> None:
    """Write a store of random ids; the content does not matter to any loader."""
    offsets = np.concatenate([[0], np.cumsum(make_lengths(TOKENS))])
    ids = np.random.default_rng(1).integers(0, VOCAB, int(offsets[-1]), dtype=np.uint16)
    spec = StoreSpec(keys={"sequence": "<u2"}, tokenizer={"vocab_size": VOCAB}, recipe={})
    with StoreWriter(path, spec) as writer:
        writer.append({"sequence": ids}, offsets)
        writer.commit()


@numba.njit(nogil=True)
def copy_windows(tokens, starts, inputs, labels):
    for i in range(starts.size):
        window = tokens[starts[i] : starts[i] + inputs.shape[1] + 1]
        following = window[1:]
        row, after = inputs[i], labels[i]
        for k in range(row.size):
            row[k] = window[k]
        for k in range(after.size):
            after[k] = following[k]


def limit_stream(tokens: np.ndarray, batch: int) -> Iterator[None]:
    starts = np.random.default_rng(2).integers(0, tokens.size - SEQ_LEN - 1, (4096, batch))
    inputs = np.empty((batch, SEQ_LEN), np.int64)
    labels = np.empty((batch, SEQ_LEN), np.int64)
    for chosen in itertools.cycle(starts):
        copy_windows(tokens, chosen, inputs, labels)
        yield


def our_stream(path: Path, batch: int, arrays: tuple[str, ...] = ("input_ids", "labels")) -> Iterator[object]:
    rows = ConcatRows(store=open_store(path), seq_len=SEQ_LEN)
    spec = StageSpec(
        name="bench",
        start_step=0,
        global_batch_size=batch,
        seq_len=SEQ_LEN,
        seed=1,
        shuffle=Shuffle(),
        weights={"web": 1},
        rows={"web": rows},
    )
    plan = compile_plan([spec], sources=["web"], steps=10**7)
    return iter(Loader(plan, RankSlice(micro_batch=batch), LoaderOptions(arrays=arrays, threads=0)))


def rate(
    stream: Iterator[object], batches: int, batch: int, clock: Callable[[], float] = time.process_time
) -> float:
    """Return tokens per CPU-second of this process, all threads together, or as `clock` counts."""
    begin = clock()
    deque(itertools.islice(stream, batches), maxlen=0)  # takes each batch and drops it
    return batches * batch * SEQ_LEN / (clock() - begin)


def compare(
    name: str, make: Callable[[], Iterator[object]], tokens: np.ndarray, batch: int, batches: int, warm_up: int = 50
) -> dict:
    """Measure limit, loader, limit in turns; return medians and the ratio."""
    limit, stream = limit_stream(tokens, batch), make()
    # Of this thread alone, because threads of a peer may still be running.
    of_limit = functools.partial(rate, limit, 2 * TURN_ROWS // batch, batch, time.thread_time)
    of_limit()
    rate(stream, warm_up, batch)
    ratios, rates, limits = [], [], []
    for _ in range(ROUNDS):
        before, own, after = of_limit(), rate(stream, batches, batch), of_limit()
        rates.append(own)
        limits.append((before + after) / 2)
        ratios.append(own / limits[-1])
    return {
        "loader": name,
        "batch": batch,
        "mtok_per_cpu_s": round(statistics.median(rates) / 1e6, 1),
        "limit_mtok_per_cpu_s": round(statistics.median(limits) / 1e6, 1),
        "share_of_limit": round(statistics.median(ratios), 4),
    }


def open_tokens(cache: Path) -> np.ndarray:
    """Return the tokens of the store, which is made at the first call, with every page of the mapping touched."""
    store = cache / "store"
    if not (store / "manifest.json").exists():
        make_store(store)
    tokens = np.asarray(np.memmap(store / "shard-00000" / "sequence.bin", np.uint16, mode="r"))
    assert tokens.sum()
    return tokens


def measure_ours(cache: Path, tokens: np.ndarray) -> list[dict]:
    every = ("input_ids", "labels", "position_ids", "doc_ids")
    results = []
    for batch in (8, 32):
        count, epoch = TURN_ROWS // batch, tokens.size // SEQ_LEN // batch
        for name, arrays in (("tokenmill", every[:2]), ("tokenmill, with position_ids, doc_ids", every)):
            make = functools.partial(our_stream, cache / "store", batch, arrays)
            results.append(compare(name, make, tokens, batch, count, warm_up=epoch))
    return results


def measure_peer(name: str, cache: Path, tokens: np.ndarray) -> list[dict]:
    from peers import peer_streams

    make = dict(peer_streams(cache, tokens, SEQ_LEN))[name]
    results = []
    for batch in (8, 32):
        try:
            results.append(compare(name, functools.partial(make, batch), tokens, batch, 3200 // batch))
        except Exception as error:  # whatever a peer raises is its result
            results.append({"loader": name, "batch": batch, "error": f"{type(error).__name__}: {error}"})
    return results


def measure_peers(cache: Path, tokens: np.ndarray) -> list[dict]:
    from peers import peer_streams

    results = []
    for name, _ in peer_streams(cache, tokens, SEQ_LEN):
        command = [sys.executable, "-W", "ignore", __file__, "--cache", str(cache), "--peer", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            results += json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            ending = (done.stderr.strip().splitlines() or ["no message"])[-1]
            results.append({"loader": name, "batch": 0, "error": f"exit code {done.returncode}: {ending}"})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "tokenmill-bench")
    parser.add_argument("--peers", action="store_true", help="also measure what is installed of the peers")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="see that it runs; the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tokens = open_tokens(options.cache)
    if options.peer:
        print(json.dumps(measure_peer(options.peer, options.cache, tokens)))
        return
    results = measure_ours(options.cache, tokens)
    if options.peers:
        results += measure_peers(options.cache, tokens)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{'loader':<42}{'batch':>6}{'Mtok/CPU-s':>12}{'limit':>9}{'share of limit':>16}")
    for line in results:
        if "error" in line:
            print(f"{line['loader']:<42}{line['batch']:>6}  failed: {line['error']}")
            continue
        print(
            f"{line['loader']:<42}{line['batch']:>6}{line['mtok_per_cpu_s']:>12}"
            f"{line['limit_mtok_per_cpu_s']:>9}{line['share_of_limit']:>15.1%}"
        )


if __name__ == "__main__":
    main()
