"""Requests and bytes per row that a store in object storage receives, and the stores that nodes download.

    python benchmarks/reading.py [--tiny] [--json] [--mirror]

Counted from the plan, without a server: one pass over a synthetic store (documents of log-normal lengths, uint16,
T = 2,048, batches of 2,048 rows) by 1 and by 8 nodes, for concat and best_fit, under full, block and window
shuffle. Nodes download whole blocks of 1,024 rows or of one packing window, 32 of them shuffled together. Bytes
are without page sums. `tokenmill plan --remote` counts in the same way.

With `--mirror`: the share of page reads that a bounded mirror cannot answer, for eviction by least recent use (LRU)
and by the plan (Belady). Four passes of full shuffle over a smaller store, read page by page.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np

from tokenmill.config.run import parse_config
from tokenmill.run.reading import Link, report_reading
from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter

TINY = "--tiny" in sys.argv
DOCUMENTS = 20_000 if TINY else 524_288
SEQ_LEN = 128 if TINY else 2048
BATCH = 64 if TINY else 2048
TOKENIZER = {"name": "none", "vocab_size": 65536, "eos_id": 0}


def write_store(folder: Path, documents: int = DOCUMENTS) -> int:
    """Write documents of log-normal lengths, and return the number of tokens; the tokens are zeros."""
    median = 20 if TINY else 200
    lengths = np.random.default_rng(0).lognormal(np.log(median), 1.0, documents).astype(np.int64).clip(1, 1 << 17)
    spec = StoreSpec(
        kind="seq", keys={"sequence": "<u2"}, tokenizer=TOKENIZER, recipe={}, max_tokens_per_shard=1 << 30
    )
    with StoreWriter(folder, spec) as writer:
        for part in np.array_split(lengths, 32):
            offsets = np.concatenate([[0], np.cumsum(part)])
            writer.append({"sequence": np.zeros(offsets[-1], "<u2")}, offsets)
        writer.commit()
    return int(lengths.sum())


def measure(folder: Path) -> list[dict[str, object]]:
    tokens = write_store(folder / "web")
    lines: list[dict[str, object]] = []
    for packing in ("concat", "best_fit"):
        for shuffle in ("full", "window"):
            run = {
                "steps": 1,
                "global_batch_size": BATCH,
                "seq_len": SEQ_LEN,
                "packing": packing,
                "shuffle": shuffle,
                "window_blocks": 32,
            }
            tables = {"run": run, "sources": [{"name": "web", "store": "web"}]}
            rows = Run(config=parse_config(tables), folder=folder).plan().stages[0].rows["web"].num_rows
            run["steps"] = rows // BATCH
            opened = Run(config=parse_config(tables), folder=folder)
            for nodes in (1, 8):
                report = report_reading(opened, link=Link(nodes=nodes), verify_pages=False, whole=("window",))
                (reading,) = [each for each in report.readings if each.shuffle == shuffle]
                lines.append(
                    {
                        "packing": packing,
                        "shuffle": shuffle,
                        "nodes": nodes,
                        "requests a row": round(reading.requests / reading.rows, 4),
                        "KiB a request": round(reading.mean_request_bytes / 1024, 1),
                        "KiB a row": round(reading.bytes / reading.rows / 1024, 2),
                        "stores fetched": round(reading.bytes / (2 * tokens) * rows / reading.rows, 2),
                        "MiB of mirror a node": round(reading.mirror_bytes / 2**20, 1),
                        "rows counted": reading.counted_rows,
                    }
                )
    return lines


def page_reads(folder: Path, packing: str) -> np.ndarray:
    """Return the pages of 4 KiB that four passes over a store read, in order; each at most once per step."""
    run = {"steps": 1, "global_batch_size": BATCH // 16, "seq_len": SEQ_LEN, "packing": packing, "shuffle": "full"}
    tables = {"run": run, "sources": [{"name": "web", "store": "web"}]}
    rows = Run(config=parse_config(tables), folder=folder).plan().stages[0].rows["web"].num_rows
    run["steps"] = 4 * rows // run["global_batch_size"]
    plan = Run(config=parse_config(tables), folder=folder).plan()
    reads = []
    for step in range(plan.steps):
        spans = plan.stages[0].rows["web"].spans(plan.rows(step)[1])
        firsts, lasts = 2 * spans.token // 4096, (2 * (spans.token + spans.length) - 1) // 4096
        counts = lasts - firsts + 1
        pages = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        reads.append(np.unique(pages))
    return np.concatenate(reads)


def misses_of_lru(reads: np.ndarray, room: int) -> int:
    kept: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for page in reads.tolist():
        if page in kept:
            kept.move_to_end(page)
            continue
        misses += 1
        if len(kept) >= room:
            kept.popitem(last=False)
        kept[page] = None
    return misses


def misses_of_belady(reads: np.ndarray, room: int) -> int:
    order = np.argsort(reads, kind="stable")
    next_use = np.full(reads.size, reads.size, np.int64)
    same = reads[order[1:]] == reads[order[:-1]]
    next_use[order[:-1][same]] = order[1:][same]
    kept: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    misses = 0
    for page, after in zip(reads.tolist(), next_use.tolist(), strict=True):
        misses += page not in kept
        kept[page] = after
        heapq.heappush(furthest, (-after, page))
        while len(kept) > room:
            use, candidate = heapq.heappop(furthest)
            if kept.get(candidate) == -use:
                del kept[candidate]
    return misses


def measure_mirror(folder: Path) -> list[dict[str, object]]:
    write_store(folder / "web", min(DOCUMENTS, 65_536))
    lines: list[dict[str, object]] = []
    for packing in ("concat", "best_fit"):
        reads = page_reads(folder, packing)
        pages = np.unique(reads).size
        for share in (0.1, 0.25, 0.5):
            lru, belady = (misses(reads, int(share * pages)) for misses in (misses_of_lru, misses_of_belady))
            lines.append(
                {
                    "packing": packing,
                    "mirror": f"{share:.0%}",
                    "pages read": reads.size,
                    "misses, LRU": f"{lru / reads.size:.1%}",
                    "misses, Belady": f"{belady / reads.size:.1%}",
                    "Belady / LRU": round(belady / lru, 2),
                }
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="see that it runs; the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mirror", action="store_true", help="compare eviction by LRU and by the plan")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenmill-requests-") as folder:
        lines = measure_mirror(Path(folder)) if options.mirror else measure(Path(folder))
    if options.json:
        print(json.dumps(lines, indent=2))
        return
    print(" | ".join(lines[0]))
    for line in lines:
        print(" | ".join(str(value) for value in line.values()))


if __name__ == "__main__":
    main()
