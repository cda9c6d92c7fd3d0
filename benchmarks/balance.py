"""Waiting of ranks with rows in order and balanced by cost, and the cost of balancing in a loader.

    python benchmarks/balance.py [--shuffle full|window] [--sources N] [--tiny] [--json]

Waiting is the duration of a step divided by that of a step whose work is shared out evenly. Costs are those of a
model with 8B parameters (`balance = "attention"`). Two cases are shown: ranks wait at each micro-batch (as in
FSDP), or only at the end of the step. Documents are log-normal with a heavy tail, packed by best_fit.

The cost of balancing is measured with two loaders that go through the same steps in turns. One assigns the rows;
the other receives the slots that the first one assigned, so both map and copy the same rows. The extra CPU time
of the first, until its rows are found, is the cost of balancing. It is a share of the whole CPU time of that
loader, which delivers input_ids, labels, position_ids and doc_ids. A loader without a balance would be no
comparison: it delivers other rows, and rows of many documents take longer to copy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

import tokenmill as tm
from tokenmill.config.run import ATTENTION
from tokenmill.loader.balance import balance, count_costs, group_edges, waiting
from tokenmill.store import StoreSpec, StoreWriter

TINY = "--tiny" in sys.argv
TOKENS = 3_000_000 if TINY else 200_000_000
LENGTHS = (2048,) if TINY else (2048, 8192, 32768, 131072)
BATCHES = 4
TURNS, ROUNDS = (2, 1) if TINY else (4, 9)
"""Number of turns per round, and of rounds, of which the median counts."""


def make_store(path: Path) -> None:
    """Write a store of documents of a median of 600 tokens, and a tail to 200,000."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(600), 1.5, TOKENS // 1500), 1, 200_000).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    spec = StoreSpec(keys={"sequence": "<u2"}, tokenizer={"vocab_size": 50_000}, recipe={})
    with StoreWriter(path, spec) as writer:
        writer.append({"sequence": rng.integers(0, 50_000, int(offsets[-1]), dtype=np.uint16)}, offsets)
        writer.commit()


def make_run(
    folder: Path, seq_len: int, ranks: int, balance: str | None, shuffle: str = "full", sources: int = 1
) -> tm.Run:
    """Return a run over several sources of one store, the n-th with a weight of 1 / n."""
    settings = {"shuffle": shuffle, "steps": 100_000, "global_batch_size": ranks * BATCHES, "seq_len": seq_len}
    weights = {f"web{number}": 1 / number for number in range(1, sources + 1)}
    tables = {
        "run": {**settings, **({"balance": balance} if balance else {})},
        "sources": [{"name": name, "store": str(folder / "web")} for name in weights],
        "stages": [{"name": "all", "start_step": 0, "weights": weights}],
    }
    return tm.Run.from_tables(tables, folder=folder)


def measure_waiting(folder: Path, seq_len: int, ranks: int) -> list[dict]:
    """Return what steps take, with 4 micro-batches of a row and 1 of 4."""
    plan = make_run(folder, seq_len, ranks, None).plan()
    rows = plan.stages[0].rows["web1"]
    edges = group_edges(plan.stages[0], ranks)
    steps = range(3 if TINY else 100)
    squares = np.stack([count_costs(rows, plan.rows(step)[1]) for step in steps])
    costs = ATTENTION["linear"] * seq_len + ATTENTION["quadratic"] * squares
    balanced = np.take_along_axis(costs, balance(squares, edges), axis=1)
    found = []
    for micro_batch in (1, BATCHES):
        line = {"seq_len": seq_len, "ranks": ranks, "micro_batch": micro_batch}
        for name, order in (("in order", costs), ("balanced", balanced)):
            cells = order.reshape(len(steps), ranks, -1, micro_batch).sum(axis=3)
            line |= {
                f"{name}, waiting at micro-batches": round(waiting(cells), 3),
                f"{name}, waiting at steps": round(waiting(cells.sum(axis=2, keepdims=True)), 3),
            }
        found.append(line)
    return found


def measure_cost(folder: Path, seq_len: int, ranks: int, micro_batch: int, shuffle: str, sources: int = 1) -> dict:
    """Return the share of balancing in the CPU time of a rank's loader."""
    place = {"rank": ranks // 2, "world_size": ranks, "micro_batch": micro_batch, "threads": 0}
    runs = [make_run(folder, seq_len, ranks, "attention", shuffle, sources) for _ in range(2)]
    dealing, told = (run.loader(**place) for run in runs)
    places, finding = deque(), {"dealing": 0.0, "told": 0.0}
    deal_places = dealing._places

    def record(*arguments: object) -> object:
        places.append(deal_places(*arguments))
        return places[-1]

    def timed(name: str, find: Callable) -> Callable:
        def block(*arguments: object, **options: object) -> object:
            begin = time.process_time()
            found = find(*arguments, **options)
            finding[name] += time.process_time() - begin
            return found

        return block

    dealing._places, told._places = record, lambda *_: (places.popleft()[0], None)
    dealing._block, told._block = timed("dealing", dealing._block), timed("told", told._block)
    batches = (8 if TINY else max(512, 50_000_000 // seq_len)) // micro_batch
    streams, rounds = (iter(dealing), iter(told)), []
    for _ in range(ROUNDS + 1):
        total, finding = 0.0, dict.fromkeys(finding, 0.0)
        for stream in streams * TURNS:
            begin = time.process_time()
            deque(itertools.islice(stream, max(1, batches // TURNS)), maxlen=0)
            total += time.process_time() - begin if stream is streams[0] else 0
        rounds.append(((finding["dealing"] - finding["told"]) / total, finding["told"] / total))
    share, without = (statistics.median(column) for column in zip(*rounds[1:], strict=True))  # the first warms up
    return {
        "seq_len": seq_len,
        "ranks": ranks,
        "micro_batch": micro_batch,
        "shuffle": shuffle,
        "sources": sources,
        "balancing, of the CPU time": f"{share:.1%}",
        "finding rows without it": f"{without:.1%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shuffle", default="full", choices=("full", "window"))
    parser.add_argument("--sources", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="so small that the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenmill-balance-") as name:
        folder = Path(name)
        make_store(folder / "web")
        sizes = [(seq_len, ranks) for seq_len in LENGTHS for ranks in (8, 64)]
        lines = [line for size in sizes for line in measure_waiting(folder, *size)]
        lines += [
            measure_cost(folder, *size, micro_batch, options.shuffle, options.sources)
            for size in sizes
            for micro_batch in (1, BATCHES)
        ]
    if options.json:
        print(json.dumps(lines))
        return
    for line in lines:
        print(", ".join(f"{name}: {value}" for name, value in line.items()))


if __name__ == "__main__":
    main()
