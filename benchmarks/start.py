"""Cost of a first start: CPU-seconds from the start of Python to the first batch of a packed run.

    python benchmarks/start.py [--packing best_fit] [--package src/tokenmill] [--rounds 5] [--tiny] [--json]

Each round uses a new copy of the package that holds bytecode, but no compiled kernels, and starts two processes: a
cold one, which compiles the kernels, and a warm one, which loads them. CPU-seconds are the user and system time of
the whole process, with imports. The output also lists the kernels that were compiled, and the seconds of each.
`--package` measures another tree, such as an older commit.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import tokenmill
from tokenmill.store import StoreSpec, StoreWriter
from tokenmill.types import PACKINGS

ROUNDS = 5

FIRST_BATCH = """
import json, os, sys, time
from numba.core import event

class Kernels(event.Listener):
    def __init__(self):
        self.open, self.seconds = [], []

    def on_start(self, event):
        self.open.append([time.process_time(), 0.0])

    def on_end(self, event):
        begin, inner = self.open.pop()
        whole = time.process_time() - begin
        if self.open:
            self.open[-1][1] += whole
        function = event.data["dispatcher"].py_func
        self.seconds.append((f"{function.__module__}.{function.__qualname__}", whole - inner))

kernels = Kernels()
event.register("numba:compile", kernels)
import tokenmill as tm
next(iter(tm.Run.from_toml(sys.argv[1]).loader(micro_batch=4)))
used = os.times()
print(json.dumps({"cpu_s": used.user + used.system, "kernels": kernels.seconds}))
"""


def make_run(folder: Path, packing: str) -> Path:
    """Write a store of 2,000 short documents, some of them longer than a row, and the config of a run over it."""
    lengths = np.random.default_rng(0).integers(1, 300, 2000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.random.default_rng(1).integers(0, 50_000, int(offsets[-1])).astype("<u2")
    spec = StoreSpec(keys={"sequence": "<u2"}, tokenizer={"vocab_size": 50_000, "add_bos": True}, recipe={})
    with StoreWriter(folder / "web", spec) as writer:
        writer.append({"sequence": ids}, offsets)
        writer.commit()
    run = folder / "run.toml"
    run.write_text(
        f"[run]\nsteps = 100\nglobal_batch_size = 8\nseq_len = {128 if packing != 'padded' else 512}\n"
        f'packing = "{packing}"\n\n[[sources]]\nname = "web"\nstore = "web"\n'
    )
    return run


def copy_package(package: Path, folder: Path) -> Path:
    """Copy the package without compiled kernels; return the folder to import it from."""
    shutil.copytree(package, folder / "tokenmill", ignore=shutil.ignore_patterns("kernels-*", "*.nbi", "*.nbc"))
    compileall.compile_dir(folder, quiet=2)
    return folder


def fresh(run: Path, path: Path, temporary: Path) -> dict:
    """Draw the first batch in a fresh process that imports the package from the folder `path`."""
    environment = {**os.environ, "PYTHONPATH": str(path), "TMPDIR": str(temporary), "NUMBA_CACHE_DIR": ""}
    command = [sys.executable, "-c", FIRST_BATCH, str(run)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def measure(package: Path, packing: str, rounds: int) -> dict:
    with tempfile.TemporaryDirectory(prefix="tokenmill-start-") as name:
        folder = Path(name)
        run = make_run(folder, packing)
        cold, warm = [], []
        for number in range(rounds):
            path = copy_package(package, folder / f"package-{number}")
            cold.append(fresh(run, path, folder))
            warm.append(fresh(run, path, folder))
            shutil.rmtree(path)
    seconds: dict[str, list[list[float]]] = {}
    for number, start in enumerate(cold):
        for kernel, own in start["kernels"]:
            seconds.setdefault(kernel, [[] for _ in cold])[number].append(own)
    kernels = [
        {
            "kernel": kernel,
            "signatures": len(parts[0]),
            "cpu_s": round(statistics.median(sum(part) for part in parts), 3),
        }
        for kernel, parts in seconds.items()
    ]
    return {
        "packing": packing,
        "rounds": rounds,
        "cold_cpu_s": round(statistics.median(start["cpu_s"] for start in cold), 2),
        "warm_cpu_s": round(statistics.median(start["cpu_s"] for start in warm), 2),
        "compiled_when_warm": sum(len(start["kernels"]) for start in warm),
        "compiled": sorted(kernels, key=lambda line: -line["cpu_s"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packing", choices=PACKINGS, default="best_fit")
    parser.add_argument("--package", type=Path, default=Path(tokenmill.__file__).parent)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tiny", action="store_true", help="one round, to see that it runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.package, options.packing, 1 if options.tiny else options.rounds)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"CPU-seconds to the first batch, {result['packing']}, median of {result['rounds']}:")
    print(f"  cold {result['cold_cpu_s']:6.2f}\n  warm {result['warm_cpu_s']:6.2f}")
    total = sum(line["cpu_s"] for line in result["compiled"])
    print(f"of them compiling {total:.2f}; each kernel without those that it calls:")
    for line in result["compiled"]:
        print(f"  {line['cpu_s']:7.3f}  {line['kernel']}" + f" x{line['signatures']}" * (line["signatures"] > 1))


if __name__ == "__main__":
    main()
