"""Price of many changes: CPU seconds of a run whose weights change at thousands of steps.

    python benchmarks/changes.py [--tiny] [--json]

A run of three stores, one stage per change, every 100 steps. Compiling the plan; opening the loader of the first
rank, whose history has the run before the last change; single questions, in milliseconds.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter

TINY = "--tiny" in sys.argv
CHANGES = 30 if TINY else 3000
STEPS = 100
SOURCES = ("web", "code", "math")
DOCUMENTS = 500 if TINY else 20_000


def write_store(path: Path, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(20, 2000, DOCUMENTS)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    spec = StoreSpec(keys={"sequence": "<u2"}, tokenizer={"vocab_size": 1000}, recipe={})
    with StoreWriter(path, spec) as writer:
        writer.append({"sequence": np.ones(int(offsets[-1]), np.uint16)}, offsets)
        writer.commit()


def make_run(folder: Path, changes: int) -> Run:
    shares = np.random.default_rng(0).integers(1, 100, (changes, len(SOURCES))) / 100
    stages = [
        {"name": f"s{i}", "start_step": STEPS * i, "weights": dict(zip(SOURCES, row, strict=True))}
        for i, row in enumerate(shares.tolist())
    ]
    tables = {
        "run": {"steps": STEPS * CHANGES, "global_batch_size": 64, "seq_len": 2048, "seed": 1},
        "sources": [{"name": name, "store": name} for name in SOURCES],
        "stages": stages,
    }
    return Run.from_tables(tables, folder=folder)


def cpu_seconds(work) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, source in enumerate(SOURCES):
            write_store(folder / source, seed)
        make_run(folder, 2).loader(rank=0, world_size=1)  # kernels are compiled, and the history has a plan
        make_run(folder, CHANGES - 1).loader(rank=0, world_size=1)
        run = make_run(folder, CHANGES)
        found = {f"{CHANGES:,} changes: CPU-s to compile the plan": cpu_seconds(run.plan)}
        again = make_run(folder, CHANGES)
        found[f"{CHANGES:,} changes: CPU-s to open the loader, with a history"] = cpu_seconds(
            lambda: again.loader(rank=0, world_size=1)
        )
        plan, schedule = run.plan(), run.lr_schedule()
        steps = np.random.default_rng(1).integers(0, plan.steps, 200).tolist()
        questions = {
            "plan.at": lambda: [plan.at(step) for step in steps],
            "plan.rows": lambda: [plan.rows(step) for step in steps],
            "lr_schedule(step)": lambda: [schedule(step) for step in steps],
        }
        for question, ask in questions.items():
            ask()
            found[f"{CHANGES:,} changes: ms of {question}"] = 1000 * cpu_seconds(ask) / len(steps)
        documents = np.arange(0, DOCUMENTS, DOCUMENTS // 100)
        found[f"{CHANGES:,} changes: CPU-s of plan.when_many, 100 documents"] = cpu_seconds(
            lambda: plan.when_many("web", documents)
        )
    return found


if __name__ == "__main__":
    figures = measure()
    if "--json" in sys.argv:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:70} {value:10.3f}")
