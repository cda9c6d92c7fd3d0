"""Tokens a second, first batch and bytes a token from a real S3 server, with latency, against a local copy.

    python benchmarks/remote.py [--tiny] [--json] [--latency 0 20 100] [--megatokens 20] [--steps 60]

One server (SeaweedFS, on this machine), one proxy before it that adds latency to every answer and counts, one
store. Each way to read draws the rows of the same steps in a process of its own, after a step from disk that loads
the kernels: tokenmill from disk, tokenmill from the server with pages proven and without, and one blocking request
for every span of a row, as a loader does that reads exact ranges but does not work ahead; that one is stopped after
ten seconds. Rates are those behind the first batch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.fault_proxy import Faults, fault_proxy  # noqa: E402
from tests.object_server import make_bucket, missing_program, running_server  # noqa: E402

from tokenmill.run.run import Run  # noqa: E402
from tokenmill.store import StoreSpec, StoreWriter, verify  # noqa: E402
from tokenmill.store.remote.client import Client, parse_address  # noqa: E402

SEQ_LEN = 2048
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
    verify(path, add_page_sums=True)


def draw(file: str) -> dict[str, float]:
    """Draw all batches of a run: seconds to the first batch, and tokens a second behind it."""
    Run.from_toml(Path(file).with_name("warm.toml")).loader(micro_batch=32)[0]
    began = time.perf_counter()
    loader = Run.from_toml(file).loader(micro_batch=32, arrays=("input_ids", "labels"))
    first, tokens = 0.0, 0
    for batch in loader:
        first = first or time.perf_counter() - began
        tokens += batch["input_ids"].size
    counted = loader.network.counters.to_json() if loader.network else {}
    return {"first": first, "rate": _rate(tokens, first, began), "tokens": tokens, **counted}


def _rate(tokens: int, first: float, began: float) -> float:
    """Return the tokens a second of all steps but the first."""
    return (tokens - 32 * SEQ_LEN) / (time.perf_counter() - began - first)


def draw_one_by_one(file: str) -> dict[str, float]:
    """Read the rows of a run by one blocking request a span, as soon as they are needed."""
    began = time.perf_counter()
    run = Run.from_toml(file)
    plan, store = run.plan(), run.stores["web"]
    objects = Client(store.remotes[0].address)
    first, tokens, read = 0.0, 0, 0
    for step in range(plan.steps):
        spans = plan.stages[0].rows["web"].spans(plan.rows(step)[1])
        for shard, token, length in zip(spans.shard, spans.token, spans.length, strict=True):
            name = f"{store.manifest.shards[shard].name}/sequence.bin"
            read += len(objects.get_range(name, 2 * int(token), 2 * int(token + length)))
        first = first or time.perf_counter() - began
        tokens += 32 * SEQ_LEN
        if step and time.perf_counter() - began > 10:
            break
    return {"first": first, "rate": _rate(tokens, first, began), "tokens": tokens, "bytes": read}


def child(kind: str, file: str) -> None:
    print(json.dumps(draw(file) if kind == "draw" else draw_one_by_one(file)))


def measure(kind: str, text: str, folder: Path) -> dict[str, float]:
    file = folder / "run.toml"
    file.write_text(text)
    command = [sys.executable, "-W", "ignore", __file__, "--child", kind, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--latency", type=int, nargs="*", default=[0, 20, 100])
    parser.add_argument("--megatokens", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    if missing_program():
        print(json.dumps({"skipped": missing_program()}))
        return
    tokens, steps = (1_000_000, 2) if options.tiny else (options.megatokens * 1_000_000, options.steps)
    latencies = [0] if options.tiny else options.latency
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_store(folder / "web", tokens)
        (folder / "server").mkdir()
        with running_server(folder / "server") as server:
            make_bucket(server)
            os.environ.update(server.environment)
            client = Client(parse_address(server.address("web")))
            for file in sorted((folder / "web").rglob("*")):
                if file.is_file():
                    client.put(str(file.relative_to(folder / "web")), file)
            for packing, shuffle in (("concat", "full"), ("best_fit", "full"), ("best_fit", "window")):
                window = "window_blocks = 2" if shuffle == "window" else ""
                base = {"steps": steps, "packing": packing, "shuffle": shuffle, "more": window}
                local = RUN.format(**base, verify="true", remote="", store=folder / "web")
                (folder / "warm.toml").write_text(local)
                measure("draw", local, folder)  # compiles kernels
                found = measure("draw", local, folder)
                rows.append({"packing": packing, "shuffle": shuffle, "way": "local copy", "latency_ms": 0, **found})
                for latency in latencies:
                    faults = Faults(latency=latency / 1000, only="sequence.bin")
                    with fault_proxy(server.endpoint, faults) as endpoint:
                        address = server.address("web", endpoint)
                        mirror = f'mirror = "{folder}/mirror-{len(rows)}"' if shuffle == "window" else ""
                        ways = [
                            ("proven pages", "draw", "true", mirror),
                            ("exact bytes", "draw", "false", mirror),
                            ("one request at a time", "one", "false", ""),
                        ]
                        for way, kind, verified, remote in ways if shuffle == "full" else ways[:1]:
                            faults.bytes = faults.requests = 0
                            text = RUN.format(**base, verify=verified, remote=remote, store=address)
                            found = measure(kind, text, folder)
                            line = {"packing": packing, "shuffle": shuffle, "way": way, "latency_ms": latency}
                            served = {"served_bytes": faults.bytes, "served_requests": faults.requests}
                            rows.append({**line, **found, **served})
    if options.json:
        print(json.dumps(rows))
        return
    columns = ("first s", "Mtok/s", "bytes/token", "requests/row")
    print(f"{'packing':9} {'shuffle':7} {'way':22} {'ms':>4} " + " ".join(f"{name:>12}" for name in columns))
    for row in rows:
        each = row.get("served_bytes", 0) / row["tokens"]
        asked = row.get("served_requests", 0) / (row["tokens"] / SEQ_LEN)
        figures = (row["first"], row["rate"] / 1e6, each, asked)
        line = f"{row['packing']:9} {row['shuffle']:7} {row['way']:22} {row['latency_ms']:4d} "
        print(line + " ".join(f"{figure:12.2f}" for figure in figures))


if __name__ == "__main__":
    main()
