"""Packing: documents per second, padding and loss, the cost of all arrays, and the first batch of a huge store.

    python benchmarks/packing.py [--huge] [--tiny] [--json]

Lengths are log-normal (median 400 tokens, tail to 100,000), one core, CPU-seconds. Compared with TRL's packer if
it is installed, and with nanochat's best-fit loop, reimplemented from its description: a buffer of 1,000
documents, the longest that fits, otherwise the shortest one cropped and its rest thrown away. --huge makes a
store of 100 million documents (offsets only; the tokens are a sparse file) and measures the time to its first
batch: cold, then cached.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from hashlib import file_digest
from pathlib import Path

import numpy as np
import xxhash

from tokenmill.packing import Policy, pack_rows
from tokenmill.packing.index import pack_one
from tokenmill.packing.packers import (
    BOS_ADDED,
    CROPPED,
    MAX_DOCUMENTS,
    NUM_COUNTS,
    PADDING,
    ROWS,
    TOKENS,
    TRUNCATED,
    whole_fragments,
)
from tokenmill.types import NO_DOCUMENTS

TINY = "--tiny" in sys.argv
DOCUMENTS = 20_000 if TINY else 1_000_000


def make_lengths(number: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(np.log(400), 1.2, number).astype(np.int64), 1, 100_000)


def fragments_of(lengths: np.ndarray):
    """Read a window as a store would give it: offsets -> fragments."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])

    def of(window: int):
        known = np.diff(offsets[window * MAX_DOCUMENTS : (window + 1) * MAX_DOCUMENTS + 1])
        return whole_fragments(known), known.astype(np.int32)

    return of


def pack(lengths: np.ndarray, seq_len: int, policy: Policy) -> dict:
    of = fragments_of(lengths)
    windows = -(-lengths.size // MAX_DOCUMENTS)
    best = float("inf")
    for _ in range(4):
        counts = np.zeros(NUM_COUNTS, np.int64)
        begin = time.process_time()
        for window in range(windows):
            counts += pack_one(window, of, seq_len, policy, "benchmark", NO_DOCUMENTS).counts
        best = min(best, time.process_time() - begin)
    slots = int(counts[ROWS]) * seq_len
    return {
        "packer": f"tokenmill {policy.name}" + (", discard" if policy.crop == "discard" else ""),
        "seq_len": seq_len,
        "million_documents_per_cpu_s": round(lengths.size / best / 1e6, 3),
        "padding_percent": round(100 * int(counts[PADDING]) / slots, 4),
        "dropped_percent": round(100 * int(counts[TRUNCATED] + counts[CROPPED]) / int(counts[TOKENS]), 2),
        "bos_added_percent": round(100 * int(counts[BOS_ADDED]) / int(counts[TOKENS]), 4),
    }


def nanochat_loop(lengths: np.ndarray, seq_len: int, buffer_size: int = 1000, refill: int = 128) -> dict:
    """Pack lengths as nanochat's loader does: a scan of the whole buffer for every document placed.

    Whenever it holds fewer than `buffer_size` documents, the buffer takes in a whole batch of the tokenizer's.
    """
    room = seq_len + 1
    stream = iter(lengths.tolist())
    buffer: list[int] = []
    used = cropped = placed = 0
    begin = time.process_time()
    done = False
    while not done:
        space = room
        while space > 0:
            while len(buffer) < buffer_size:
                more = list(itertools.islice(stream, refill))
                if not more:
                    done = True
                    break
                buffer += more
            if done:
                break
            best, longest = -1, 0
            for i, length in enumerate(buffer):
                if longest < length <= space:
                    best, longest = i, length
            if best >= 0:
                space -= buffer.pop(best)
                used += longest
            else:
                shortest = min(range(len(buffer)), key=buffer.__getitem__)
                cropped += buffer.pop(shortest) - space
                used += space
                space = 0
            placed += 1
    seconds = time.process_time() - begin
    return {
        "packer": f"nanochat's loop, {lengths.size:,} documents",
        "seq_len": seq_len,
        "million_documents_per_cpu_s": round(placed / seconds / 1e6, 5),
        "padding_percent": 0.0,
        # Of the tokens that have left the buffer; what is still in it at the end is neither used nor dropped.
        "dropped_percent": round(100 * cropped / (used + cropped), 2),
    }


def trl_packer(lengths: np.ndarray, seq_len: int, strategy: str) -> dict | None:
    try:
        import trl
        from datasets import Dataset
        from trl import pack_dataset
    except ImportError as error:
        print(f"TRL is not installed: {error}", file=sys.stderr)
        return None
    import pyarrow as pa

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = pa.array(np.zeros(int(offsets[-1]), np.int8))
    dataset = Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), values)}))
    begin = time.process_time()
    packed = pack_dataset(dataset, seq_length=seq_len + 1, strategy=strategy)
    seconds = time.process_time() - begin
    kept = sum(len(row) for row in packed["input_ids"])
    return {
        "packer": f"TRL {trl.__version__} {strategy}, {lengths.size:,} documents",
        "seq_len": seq_len,
        "million_documents_per_cpu_s": round(lengths.size / seconds / 1e6, 5),
        "padding_percent": round(100 * (1 - kept / (len(packed) * (seq_len + 1))), 4),
        "dropped_percent": round(100 * (1 - kept / int(lengths.sum())), 2),
    }


def contract(cache: Path) -> list[dict]:
    """Measure the loader with all arrays of packed rows against the plain kernel limit, in turns."""
    import functools

    import loader
    from tokenmill.loader import Loader, LoaderOptions, RankSlice
    from tokenmill.plan import Shuffle, StageSpec, compile_plan
    from tokenmill.store import open_store

    store = cache / "store"
    if not (store / "manifest.json").exists():
        loader.make_store(store)
    tokens = np.asarray(np.memmap(store / "shard-00000" / "sequence.bin", np.uint16, mode="r"))
    assert tokens.sum()
    rows = pack_rows(open_store(store), seq_len=loader.SEQ_LEN, policy=Policy())
    sets = {
        "best_fit, input_ids and labels": ("input_ids", "labels"),
        "best_fit, all but num_loss_tokens": (
            *("input_ids", "labels", "position_ids", "doc_ids", "loss_mask", "source", "cu_seqlens", "max_seqlen"),
        ),
    }
    sets["best_fit, all arrays"] = (*sets["best_fit, all but num_loss_tokens"], "num_loss_tokens")

    def stream(batch: int, arrays: tuple[str, ...]):
        spec = StageSpec(
            name="bench",
            start_step=0,
            global_batch_size=batch,
            seq_len=loader.SEQ_LEN,
            seed=1,
            shuffle=Shuffle(),
            weights={"web": 1},
            rows={"web": rows},
        )
        plan = compile_plan([spec], sources=["web"], steps=10**7)
        part = RankSlice(micro_batch=batch)
        return iter(Loader(plan, part, LoaderOptions(arrays=arrays, threads=0)))

    results = []
    plain = ("input_ids", "labels")
    extras = ("position_ids", "doc_ids", "loss_mask", "source", "cu_seqlens", "max_seqlen", "num_loss_tokens")
    prices = {f"price of {extra}": (*plain, extra) for extra in extras}
    for batch in (8, 32):
        for name, arrays in (sets if batch == 8 else sets | prices).items():
            make = functools.partial(stream, batch, arrays)
            warm = tokens.size // loader.SEQ_LEN // batch
            results.append(loader.compare(name, make, tokens, batch, loader.TURN_ROWS // batch, warm_up=warm))
    return results


PROBE = """
import sys, time
import numpy as np
import tokenmill.packing.rows, tokenmill.loader, tokenmill.plan
from tokenmill.run.run import Run
begin = time.perf_counter()
run = Run.from_toml(sys.argv[1])
batch = next(iter(run.loader(micro_batch=8, threads=0)))
seconds = time.perf_counter() - begin
# ru_maxrss would be that of the parent process too, if that was larger.
with open("/proc/self/status") as status:
    print(seconds, next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024)
"""


def make_huge(folder: Path, documents: int) -> Path:
    """Make a store whose documents are known by their offsets; its tokens are a sparse file of zeros."""
    from tokenmill.store.layout import FileInfo, Manifest, ShardInfo, document_file_bytes, manifest_bytes

    shutil.rmtree(folder, ignore_errors=True)
    shard = folder / "web" / "shard-00000"
    shard.mkdir(parents=True)
    tokens = 0
    with (shard / "documents.bin").open("wb") as file:
        for begin in range(0, documents, 1 << 22):
            number = min(1 << 22, documents - begin)
            rng = np.random.default_rng(begin)
            lengths = np.clip(rng.lognormal(np.log(400), 1.2, number).astype(np.int64), 1, 100_000)
            ends = np.cumsum(lengths) + tokens
            file.write((ends - lengths).astype("<u8").tobytes())
            tokens = int(ends[-1])
        file.write(np.array([tokens], "<u8").tobytes())
        file.truncate(document_file_bytes(documents, tokens))
    with (shard / "sequence.bin").open("wb") as file:
        file.truncate(2 * tokens)
    with (shard / "documents.bin").open("rb") as written:
        sums = {"sequence.bin": "0" * 32, "documents.bin": file_digest(written, xxhash.xxh3_128).hexdigest()}
    infos = {name: FileInfo(bytes=(shard / name).stat().st_size, xxh3=xxh3) for name, xxh3 in sums.items()}
    manifest = Manifest(
        kind="seq",
        keys={"sequence": "<u2"},
        tokenizer={"vocab_size": 50_000},
        recipe={},
        shards=(ShardInfo(name="shard-00000", documents=documents, tokens=tokens, files=infos),),
    )
    (folder / "web" / "manifest.json").write_bytes(manifest_bytes(manifest))
    run = folder / "run.toml"
    run.write_text(
        "[run]\nsteps = 1000000\nglobal_batch_size = 64\nseq_len = 2048\n\n"
        '[[sources]]\nname = "web"\nstore = "web"\n'
    )
    return run


def huge(cache: Path, documents: int) -> list[dict]:
    run = make_huge(cache / "huge", documents)
    results = []
    for name in ("cold, index built", "index cached", "index cached, again"):
        out = subprocess.run([sys.executable, "-c", PROBE, str(run)], capture_output=True, text=True, check=True)
        seconds, memory = (float(number) for number in out.stdout.split())
        results.append(
            {"first batch": name, "documents": documents, "seconds": round(seconds, 2), "peak_mb": round(memory)}
        )
    index = next((cache / "huge" / "web" / ".rows").glob("*.rows")).stat().st_size
    results.append({"index": "bytes a document", "documents": documents, "bytes": round(index / documents, 2)})
    shutil.rmtree(cache / "huge")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "tokenmill-bench")
    parser.add_argument("--huge", type=int, nargs="?", const=100_000_000, help="documents of the huge store")
    parser.add_argument("--tiny", action="store_true", help="see that it runs; the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: list[dict] = []
    if options.huge:
        results = huge(options.cache, options.huge)
    else:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        lengths = make_lengths(DOCUMENTS)
        policies = (Policy(), Policy(name="bos_best_fit"), Policy(name="bos_best_fit", crop="discard"))
        for seq_len in (2048, 8192):
            results += [pack(lengths, seq_len, policy) for policy in policies]
            few, more = (2_000, 3_000) if TINY else (20_000, 100_000)
            results += [nanochat_loop(lengths[:number], seq_len) for number in (few, more)]
            if not TINY:
                results += [trl_packer(lengths[:few], seq_len, strategy) for strategy in ("bfd", "bfd_split")]
        results += contract(options.cache)
    results = [line for line in results if line]
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        for line in results:
            print("  ".join(f"{key}={value}" for key, value in line.items()))
    print(
        f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
