"""Cost of engines compared with the local workers, and of driving a build with very many units.

    python benchmarks/engines.py [--megabytes 1000] [--rounds 3] [--only local,processes,dask,ray] [--cache FOLDER]
                                 [--units 100000] [--shards] [--json]

Overhead: each engine prepares the same JSONL with 2 workers, in turns, so other work on the machine slows all of
them equally. Each engine has done one small build before; its start is shown separately. The figure is the wall
clock of a build divided by that of the local workers in the same round, as the median of the rounds. Run it in a
network namespace (`unshare -n`, `ip link set lo up`), because Ray listens on all interfaces.

`--units N` drives N units that do no work: the loop that submits them and counts their results, in a process that
does nothing else. Then it publishes N shards of one document, each with all files of a unit. They are below
`--cache`, which chooses the disk. `--shards` reads a store of 24 shards and one of 256, with at most 64 and 1,024
mapped files: the CPU time of 300 batches of 64 rows in random order.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="local,processes,dask,ray")
    parser.add_argument("--cache", type=Path, help="folder that keeps the corpus for the next run")
    parser.add_argument("--units", type=int)
    parser.add_argument("--shards", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drive:
        print(json.dumps(drive(int(args.drive[0]), Path(args.drive[1]))))
        return
    with tempfile.TemporaryDirectory(prefix="tm-", dir=args.cache if args.units else None) as folder:
        work = Path(folder)
        if args.units:
            command = [sys.executable, __file__, "--drive", str(args.units), folder]
            result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        elif args.shards:
            result = read_shards(work)
        else:
            corpus = write_corpus(args.cache or work, args.megabytes)
            result = compare(corpus, work, args.only.split(","), args.rounds)
    print(json.dumps(result) if args.json else "\n".join(f"{name}: {value}" for name, value in result.items()))


# Engines, compared.


def write_corpus(folder: Path, megabytes: int) -> Path:
    """Make texts of words with different lengths; what they say does not matter here."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"engines-{megabytes}.jsonl"
    if not path.exists():
        words = [
            f"{stem}{ending}" for stem in ("mill", "grain", "wheel", "stone") for ending in ("", "s", "er", "ing")
        ]
        lines = [
            json.dumps({"text": " ".join(words[(7 * i + j * j) % 16] for j in range(200 + i % 800))}) + "\n"
            for i in range(1000)
        ]
        block = "".join(lines).encode()
        with path.open("wb") as file:
            for _ in range(max(1, megabytes * 10**6 // len(block))):
                file.write(block)
    return path


def compare(corpus: Path, work: Path, names: list[str], rounds: int) -> dict[str, Any]:
    from tokenmill.build import PrepareOptions, prepare
    from tokenmill.demo import TOKENIZER_DIR

    small = work / "small.jsonl"
    small.write_text('{"text": "a small one"}\n{"text": "and another"}\n')
    tiny = PrepareOptions(chunk_bytes=30)
    starts: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    stores: set[str] = set()
    with ExitStack() as stack:
        engines: dict[str, dict[str, Any]] = {}
        for name in names:
            begin = time.perf_counter()
            engines[name] = start(name, stack, work)
            prepare(small, out=work / f"start-{name}", progress=False, options=tiny, **engines[name])
            starts[name] = round(time.perf_counter() - begin, 2)
        for _ in range(rounds):
            for name in names:
                out = work / "out"
                begin = time.perf_counter()
                report = prepare(corpus, out=out, tokenizer=TOKENIZER_DIR, progress=False, **engines[name])
                seconds[name].append(time.perf_counter() - begin)
                stores.add(report.fingerprint)
                shutil.rmtree(out)
    assert len(stores) == 1, stores
    local = seconds[names[0]]
    return {
        "megabytes": corpus.stat().st_size // 10**6,
        "start_s": starts,
        "build_s": {name: round(median(each), 2) for name, each in seconds.items()},
        f"over_{names[0]}": {
            name: round(median(a / b for a, b in zip(each, local, strict=True)), 3)
            for name, each in seconds.items()
        },
    }


def start(name: str, stack: ExitStack, work: Path) -> dict[str, Any]:
    """Start an engine with two workers; return what prepare is given."""
    if name == "local":
        return {"workers": 2}
    if name == "processes":
        return {"executor": stack.enter_context(ProcessPoolExecutor(2, get_context("spawn")))}
    if name == "dask":
        from distributed import Client, LocalCluster

        cluster = LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=None,
            local_directory=work,
        )
        client = stack.enter_context(Client(stack.enter_context(cluster)))
        return {"executor": client.get_executor()}
    from tokenmill.build import RayExecutor

    os.environ.setdefault("RAY_TMPDIR", str(work))
    return {"executor": stack.enter_context(RayExecutor(num_cpus=2))}


# Very many units.


class NoWork:
    """Reports every task as done at once."""

    def submit(self, function: Any, out: str, checksum: str, index: int) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future


def link_or_copy(source: str, target: str) -> None:
    """Link a file, or copy it where its file system allows no more links: ext4 has 65,000."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def drive(num_units: int, work: Path) -> dict[str, Any]:
    """Hand out units of no work and read their results, then publish them; each is a copy of one by links."""
    from tokenmill.build import build as module
    from tokenmill.build import journal as journals
    from tokenmill.build import plan_units, publish, run_part
    from tokenmill.build.counts import Counts
    from tokenmill.build.schedule import Outcome, run_by
    from tokenmill.build.tasks import Task, finished_unit, write_list
    from tokenmill.documents import InputFile, Piece, Unit
    from tokenmill.encode.recipe.recipe import load_recipe

    (work / "none.jsonl").write_text('{"text": "a document"}\n')
    plan_units(work / "none.jsonl", out=work / "one")
    run_part(work / "one", "0/1", workers=1, progress=False)
    (done,) = journals.Journal(work / "one").units.glob("[!.]*")
    file = InputFile(path="/none.jsonl", name="none.jsonl", bytes=num_units, suffix=".jsonl")
    tasks = [
        Task(
            kind="write",
            unit=Unit(index=i, pieces=(Piece(file=file, begin=i, end=i + 1, bytes=1),)),
            key=f"{i:032x}",
        )
        for i in range(num_units)
    ]
    journal = journals.Journal(work / "store")
    journal.begin(journals.RunningBuild(identity={}, chunk_bytes=1, rebuild=False))
    for task in tasks:
        shutil.copytree(done, journal.units / task.key, copy_function=link_or_copy)
    os.sync()
    units = write_list(journal, "write", tasks, b"{}", {}, {})
    result, recipe = module.BuildResult(), load_recipe("text")
    begin = time.perf_counter()
    for index in run_by(NoWork(), journal, units, range(len(units)), lambda: None):
        task = units.task(index)
        segments = finished_unit(journal, task.key)
        assert segments is not None
        shards = tuple(replace(segment, key=task.key) for segment in segments)
        result.add(Outcome(task=task, is_resumed=False, segments=shards), recipe, stop=True)
    driven = time.perf_counter() - begin
    publication = publish.Publication(
        is_cleared=True,
        cleared=(),
        units=tuple(result.units),
        base={},
        manifest={"kind": "seq", "keys": {"sequence": "<u2"}, "tokenizer": {"vocab_size": 9}, "recipe": {}},
        ledger=journals.Ledger(identity={}, routes=(), inputs=(), counts=Counts(), scans=()),
    )
    begin, cpu = time.perf_counter(), time.process_time()
    publish.publish(journal, publication)
    published, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {
        "units": num_units,
        "driver_us_a_unit": round(driven / num_units * 1e6, 1),
        "publish_s": round(published, 2),
        "publish_cpu_s": round(cpu, 2),
        "driver_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
    }


# Stores of many shards.


def read_shards(work: Path) -> dict[str, Any]:
    import numpy as np

    import tokenmill as tm
    from tokenmill.store import StoreSpec, StoreWriter, reader

    total, dice = 64_000_000, np.random.default_rng(0)
    for shards in (24, 256):
        keys = {"sequence": "<u2"}
        most = total // shards
        spec = StoreSpec(keys=keys, tokenizer={"vocab_size": 60_000}, recipe={}, max_tokens_per_shard=most)
        with StoreWriter(work / str(shards), spec) as writer:
            for _ in range(total // 10**6):
                ids = dice.integers(0, 60_000, 10**6, dtype=np.uint16)
                writer.append({"sequence": ids}, np.arange(0, 10**6 + 1, 1000))
            writer.commit()
        (work / f"{shards}.toml").write_text(
            f"[run]\nsteps = 400\nglobal_batch_size = 64\nseq_len = 2048\n[[sources]]\n"
            f'name = "a"\nstore = "{work / str(shards)}"\n'
        )
    seconds: dict[str, list[float]] = {}
    before = reader.MAX_MAPS
    for _ in range(5):
        for shards, limit in ((24, 64), (256, 64), (256, before)):
            run = tm.Run.from_toml(work / f"{shards}.toml")
            loader = run.loader(rank=0, world_size=1, micro_batch=64)
            for source in run.stores.values():
                source.maps.limit = limit
            batches = iter(loader)
            next(batches)
            begin = time.process_time()
            for _, _ in zip(range(300), batches, strict=False):
                pass
            seconds.setdefault(f"{shards} shards, {limit} maps", []).append(time.process_time() - begin)
    return {f"cpu_s, {name}": round(median(each), 3) for name, each in seconds.items()}


if __name__ == "__main__":
    main()
