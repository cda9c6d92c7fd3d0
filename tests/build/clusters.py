"""One corpus that has all of it, and what a build of it gives, whatever runs it. Also run as a program, for Ray.

python clusters.py FOLDER    builds the corpus in FOLDER on Ray, in every way, and prints what came of it as JSON
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.build import PrepareOptions, Progress, RayExecutor, prepare
from tokenmill.demo import TOKENIZER_DIR
from tokenmill.errors import DocumentError
from tokenmill.fingerprint import digest

CHATS = PrepareOptions(
    chunk_bytes=7000,
    chat_template="chatml",
    domain_key="site",
    deduplicate=True,
    val_fraction=0.3,
)


def records(count: int, seed: int) -> list[dict[str, object]]:
    """Make conversations, some of them twice, of two sites."""
    dice = random.Random(seed)
    words = ["mill", "grain", "Mühle", "зерно", "粉", "🌾", "wheel", "<|im_end|>"]
    made = []
    for _ in range(count):
        said = [" ".join(dice.choices(words, k=dice.randrange(2, 40))) for _ in range(2)]
        messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
        made.append({"messages": messages, "site": dice.choice(["river", "hill"])})
    return made + made[: count // 5]


def write_corpus(folder: Path) -> Path:
    """Write the corpus as JSONL and Parquet."""
    corpus = folder / "in"
    corpus.mkdir(parents=True)
    lines = [json.dumps(record) + "\n" for record in records(80, 1)]
    (corpus / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(records(40, 2)), corpus / "b.parquet", row_group_size=16)
    return corpus


def write_bad(folder: Path) -> Path:
    """Write texts of which two in the middle cannot be read."""
    lines = [json.dumps({"text": f"text {number} " * 20}) for number in range(260)]
    lines[122] = '{"text": 5}'
    lines[191] = "no JSON"
    path = folder / "bad.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def digest_of(out: Path) -> str:
    """Return what stands for every file of a build, names and bytes."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return digest([[str(path.relative_to(out)), path.read_bytes().hex()] for path in files])


def build(corpus: Path, out: Path, options: PrepareOptions = CHATS, **how: object) -> str:
    """Build the corpus and return its digest."""
    recipe = "chat" if options.chat_template else "text"
    prepare(corpus, out=out, tokenizer=TOKENIZER_DIR, recipe=recipe, progress=False, options=options, **how)
    return digest_of(out)


def bad_records(path: Path, out: Path, **how: object) -> dict[str, object]:
    """Return what is told of bad records: when they stop the build, and when they are skipped."""
    options = {"chunk_bytes": 5000}
    told: dict[str, object] = {}
    try:
        prepare(path, out=out, progress=False, options=PrepareOptions(**options), **how)
    except DocumentError as error:
        told["error"] = str(error)
    report = prepare(path, out=out, progress=False, options=PrepareOptions(on_error="skip", **options), **how)
    told["skipped"] = dict(report.skipped)
    told["documents"] = report.documents
    told["digest"] = digest_of(out)
    return told


# On Ray.


def workers_of(parent: int) -> list[int]:
    """Return the processes of Ray that do units, below one raylet, or all."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            title = Path(entry.path, "cmdline").read_bytes()
            stat = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if title.startswith(b"ray::run_index") and (not parent or int(stat[1]) == parent):
            found.append(int(entry.name))
    return found


def kill_while(running: threading.Thread, cluster: object, dice: random.Random, kills: int) -> list[str]:
    """Kill workers and raylets at random while a build runs; a raylet that is gone is replaced."""
    killed: list[str] = []
    while running.is_alive() and len(killed) < kills:
        time.sleep(dice.uniform(0.02, 0.4))
        nodes = sorted(cluster.worker_nodes, key=lambda node: node.unique_id)
        if nodes and len(killed) % 4 == 1:
            raylet = nodes[0].all_processes["raylet"][0].process
            raylet.send_signal(signal.SIGKILL)
            raylet.wait()
            cluster.remove_node(nodes[0], allow_graceful=False)
            killed.append("raylet")
            with suppress(Exception):  # it waits 30 s for a node, too short on a busy machine
                cluster.add_node(num_cpus=1)
        elif workers := workers_of(0):
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(dice.choice(workers), signal.SIGKILL)
                killed.append("worker")
    return killed


def interrupted(corpus: Path, out: Path, executor: RayExecutor) -> list[object]:
    """Interrupt a build amid its units, as Ctrl-C does; return whether, how many go on, and what the next gives."""

    def interrupt(now: Progress) -> None:
        if now.what == "prepare" and now.documents:
            raise KeyboardInterrupt

    try:
        build(corpus, out, executor=executor, on_progress=interrupt)
        was_interrupted = False
    except KeyboardInterrupt:
        was_interrupted = True
    end = time.monotonic() + 20
    while workers_of(0) and time.monotonic() < end:
        time.sleep(0.1)
    return [was_interrupted, len(workers_of(0)), build(corpus, out, executor=executor)]


def on_ray(folder: Path, kills: int) -> dict[str, object]:
    """Build on one node, on two, and on two with processes killed."""
    import ray
    from ray.cluster_utils import Cluster

    corpus = folder / "in"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    told: dict[str, object] = {}
    try:
        with RayExecutor(cluster.address) as executor:
            told["one node"] = build(corpus, folder / "one", executor=executor)
            told["bad"] = bad_records(folder / "bad.jsonl", folder / "bad-out", executor=executor)
            told["interrupted"] = interrupted(corpus, folder / "interrupted", executor)
            cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
            told["two nodes"] = build(corpus, folder / "two", executor=executor)
            told["nodes"] = sum(node["Alive"] for node in ray.nodes())
            dice, killed, digests = random.Random(kills), [], []
            while len(killed) < kills:
                out = folder / "killed"
                shutil.rmtree(out, ignore_errors=True)
                running = threading.Thread(
                    target=lambda out=out: digests.append(build(corpus, out, executor=executor)), daemon=True
                )
                running.start()
                killed += kill_while(running, cluster, dice, kills - len(killed))
                running.join()
            told["killed"], told["digests"] = killed, digests
    finally:
        cluster.shutdown()
    return told


if __name__ == "__main__":
    print(json.dumps(on_ray(Path(sys.argv[1]), int(sys.argv[2]))))
