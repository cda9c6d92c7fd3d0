"""Requests and bytes per row that a store in object storage receives, and the stores that nodes download.

    python benchmarks/reading.py [--tiny] [--json]

Counted from the plan, without a server: one pass over a synthetic store (documents of log-normal lengths, uint16,
T = 2,048, batches of 2,048 rows) by 1 and by 8 nodes, for concat and best_fit, under full, block and window
shuffle. Nodes download whole blocks of 1,024 rows or of one packing window, 32 of them shuffled together. Bytes
are without page sums. `tokenmill plan --remote` counts in the same way.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
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


def write_store(folder: Path) -> int:
    """Write documents of log-normal lengths, and return the number of tokens; the tokens are zeros."""
    median = 20 if TINY else 200
    lengths = np.random.default_rng(0).lognormal(np.log(median), 1.0, DOCUMENTS).astype(np.int64).clip(1, 1 << 17)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="see that it runs; the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenmill-requests-") as folder:
        lines = measure(Path(folder))
    if options.json:
        print(json.dumps(lines, indent=2))
        return
    print(" | ".join(lines[0]))
    for line in lines:
        print(" | ".join(str(value) for value in line.values()))


if __name__ == "__main__":
    main()
