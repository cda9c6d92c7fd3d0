"""Cost of the order: nanoseconds per row, and time and memory to the first rows of a huge plan.

    python benchmarks/order.py [--tiny] [--json]

Stage, mixture and shuffle together, vectorised, one core, with 10^9 rows per source. `window` groups blocks of
1,024 rows. Within a ramp: blocks of 2 steps of 1,024 rows. Start and resume run in fresh processes: from an opened
plan (modules imported, kernels compiled) to the first row ids.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import numpy as np

from tokenmill.plan import Ramp, Shuffle, StageSpec, compile_plan
from tokenmill.plan.mixture import build_mixture, integer_weights
from tokenmill.plan.permute import permute_all
from tokenmill.plan.stages import rows_at

TINY = "--tiny" in sys.argv
ROWS = 10**9
ROUNDS = 3 if TINY else 12


@dataclass(frozen=True)
class Rows:
    """A source known by its size alone, as the plan needs it."""

    num_rows: int
    seq_len: int = 2048
    num_rest: int = 0
    segment_multiple: int = 1
    cross_document_labels: bool = False

    has_epochs = True

    def window_starts(self, *, rest):
        return None

    @property
    def description(self):
        return {"rows": self.num_rows}

    @property
    def epoch_description(self):
        return self.description


def make_plan(sources: int, mode: str = "full"):
    names = [f"source{i}" for i in range(sources)]
    weights = {name: 1 / (i + 1) for i, name in enumerate(names)}
    stages = [
        StageSpec(
            name=f"stage{start}",
            start_step=start,
            global_batch_size=1024,
            seq_len=2048,
            seed=1,
            shuffle=Shuffle(mode=mode),
            weights=weights,
            rows={name: Rows(ROWS) for name in names},
        )
        for start in (0, 500_000)
    ]
    return compile_plan(stages, sources=names, steps=10**7)


def nanoseconds_alone(sources: int) -> dict[str, float]:
    """Return what the permutation of 10^9 rows and the mixture cost on their own; medians of 10."""
    weights = integer_weights({f"source{i}": 1 / (i + 1) for i in range(sources)})
    mixture = build_mixture(tuple(weights.values()))
    index = np.arange(1 << 18) + 6 * 10**8
    measured = {}
    for name, work in (
        ("permutation", lambda: permute_all(index, ROWS, np.uint64(5))),
        (f"mixture of {sources}", lambda: mixture.draw(index)),
    ):
        rounds = []
        for _ in range(ROUNDS):
            begin = time.process_time()
            work()
            rounds.append((time.process_time() - begin) / index.size * 1e9)
        measured[f"ns a row, {name} alone"] = round(statistics.median(rounds[2:]), 1)
    return measured


def nanoseconds_a_row(sources: int, mode: str) -> float:
    plan = make_plan(sources, mode)
    index = np.arange(1 << 18)
    rounds = []
    for start in range(ROUNDS):
        stage = plan.stage(600_000 + start * 1000)
        steps = index // 1024 + 600_000 + start * 1000
        begin = time.process_time()
        rows_at(stage, steps, index % 1024)
        rounds.append((time.process_time() - begin) / index.size * 1e9)
    return statistics.median(rounds[2:])


def nanoseconds_in_a_ramp(sources: int) -> tuple[float, float]:
    """Return (ns per row, ms to compile) for weights that change over 10^6 steps; medians of 10."""
    plan = make_plan(sources)
    spec = plan.stages[0].spec
    ramp = Ramp(shape="cosine", begin=0, end=10**6, weights=dict.fromkeys(spec.weights, 1.0))
    begin = time.process_time()
    stage = compile_plan([replace(spec, ramp=ramp)], sources=list(spec.weights), steps=10**6).stages[0]
    rows_at(stage, np.zeros(1, np.int64), np.zeros(1, np.int64))
    compiled = (time.process_time() - begin) * 1e3
    index = np.arange(2048)
    rounds = []
    for start in range(ROUNDS):
        steps = index // 1024 + 600_000 + start * 1000
        begin = time.process_time()
        for _ in range(20):
            rows_at(stage, steps, index % 1024)
        rounds.append((time.process_time() - begin) / index.size / 20 * 1e9)
    return statistics.median(rounds[2:]), compiled


PROBE = """
import sys, time
sys.path.insert(0, {folder!r})
from order import make_plan
make_plan(2).rows(0)  # imports, and kernels from the cache
def peak():
    # ru_maxrss would be that of the parent process too, if that was larger.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
before = peak()
begin = time.perf_counter()
plan = make_plan(8)
compiled = time.perf_counter()
plan.rows({step})
plan.fingerprint_at({step})
end = time.perf_counter()
print((compiled - begin) * 1e3, (end - compiled) * 1e3, peak() - before)
"""


def fresh_process(step: int) -> tuple[float, float, float]:
    """Return (ms to compile, ms to the rows and fingerprint of a step, MB of peak memory gained); medians of 5."""
    folder = __file__.rsplit("/", 1)[0]
    runs = [
        [
            float(number)
            for number in subprocess.run(
                [sys.executable, "-c", PROBE.format(folder=folder, step=step)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
        ]
        for _ in range(1 if TINY else 5)
    ]
    compile_ms, first_ms, memory = (statistics.median(column) for column in zip(*runs, strict=True))
    return compile_ms, first_ms, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="see that it runs; the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, object] = {}
    for sources in (2,) if TINY else (2, 8, 64):
        results |= nanoseconds_alone(sources)
    for sources in (1, 2) if TINY else (1, 2, 8, 64):
        for mode in ("full", "window"):
            results[f"ns a row, {sources} sources, {mode}"] = round(nanoseconds_a_row(sources, mode), 1)
    for sources in (2,) if TINY else (2, 8, 64):
        row, compiled = nanoseconds_in_a_ramp(sources)
        results[f"ns a row, {sources} sources, within a ramp"] = round(row, 1)
        results[f"ms to compile a ramp of 10^6 steps, {sources} sources"] = round(compiled, 1)
    for name, step in (("first rows", 0), ("rows after resume at step 10^6", 10**6)):
        compile_ms, first_ms, memory = fresh_process(step)
        results[f"{name}: ms to compile a plan of 8 sources x 10^9 rows"] = round(compile_ms, 2)
        results[f"{name}: ms from the plan to row ids"] = round(first_ms, 2)
        results[f"{name}: MB beyond the import"] = round(memory, 2)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for name, value in results.items():
        print(f"{name:<70}{value:>10}")


if __name__ == "__main__":
    main()
