"""MB/s per core from JSONL to store with a real BPE, against the tokenizer alone, interleaved in one run.

    python benchmarks/prepare.py [--cache FOLDER] [--megabytes 100] [--rounds 5] [--encoding cl100k] [--json]

A round is a fresh process with one worker and one core. After each unit that prepare has brought from the JSONL
file into the store, a second tokenizer encodes the texts of that unit, which are already in memory: the two take
turns every 16 MiB, so that other work on the machine slows both alike, and neither finds the other's caches warm.
Opening the tokenizer, proving its engine and closing it, which a build does once whatever its size, is left out
of both, and the opening shown apart. The ratio is of CPU time, the median of the rounds; as a check on it, the
share of prepare's CPU time that is spent inside the tokenizer is shown too, which should be about the same.
MB are 10⁶ bytes of UTF-8 text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from tokenmill.prepare.pool import ONE_CORE

ENCODINGS = {
    "cl100k": "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
    "o200k": "fb374d419588a4632f3f557e76b4b70aebbca790",
}
TARGET, GOAL = 0.60, 0.75
DOCUMENT_CHARACTERS = 8192
ENDINGS = (".py", ".md", ".rst", ".txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="folder that keeps the corpus for the next run")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--encoding", choices=ENCODINGS, default="cl100k")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, corpus, tokenizer, work = args.measure
        print(json.dumps({"paired": paired, "two": two_workers}[name](corpus, tokenizer, work)))
        return
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as work:
        cache = args.cache or Path(work)
        cache.mkdir(parents=True, exist_ok=True)
        corpus = cache / f"corpus-{args.megabytes}.jsonl"
        if not corpus.exists():
            write_corpus(corpus, args.megabytes * 10**6)
        result = compare(corpus, tokenizer_spec(args.encoding), Path(work), args.rounds)
    result = {"tokenizer": args.encoding, **result}
    print(json.dumps(result, indent=2) if args.json else table(result))


def tokenizer_spec(encoding: str) -> str:
    """Name a rank file among the data files of litellm; the package itself is not imported."""
    found = importlib.util.find_spec("litellm")
    if found is None or not found.submodule_search_locations:
        sys.exit("benchmarks/prepare.py: needs a real BPE: pip install --no-deps litellm")
    folder = Path(found.submodule_search_locations[0]) / "litellm_core_utils" / "tokenizers"
    return f"tiktoken:{folder / ENCODINGS[encoding]}"


def write_corpus(path: Path, size: int) -> None:
    """Make documents of the texts that come with Python and what is installed; no text is taken twice."""
    import orjson

    written = 0
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for text in texts_of_this_machine():
            written += len(text.encode())
            file.write(orjson.dumps({"id": written, "text": text, "source": "benchmark"}) + b"\n")
            if written >= size:
                break
    temporary.rename(path)


def texts_of_this_machine() -> Iterator[str]:
    seen: set[int] = set()
    for folder in dict.fromkeys((sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))):
        for path in sorted(path for path in Path(folder).rglob("*") if path.suffix in ENDINGS):
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            for begin in range(0, len(text), DOCUMENT_CHARACTERS):
                piece = text[begin : begin + DOCUMENT_CHARACTERS]
                if len(piece) >= 64 and hash(piece) not in seen:
                    seen.add(hash(piece))
                    yield piece


def compare(corpus: Path, tokenizer: str, work: Path, rounds: int) -> dict[str, object]:
    runs = [measure("paired", corpus, tokenizer, work) for _ in range(rounds)]
    two = min((measure("two", corpus, tokenizer, work) for _ in range(2)), key=lambda run: run["wall"])
    text_mb = runs[0]["text_bytes"] / 1e6
    ratios = sorted(run["alone_cpu"] / run["prepare_cpu"] for run in runs)

    def middle(value: str) -> float:
        return median(run[value] for run in runs)

    return {
        "text_megabytes": text_mb,
        "documents": runs[0]["documents"],
        "tokens": runs[0]["tokens"],
        "rounds": rounds,
        **{
            f"{name}_mb_per_second": {clock: text_mb / middle(f"{name}_{clock}") for clock in ("cpu", "wall")}
            for name in ("alone", "prepare")
        },
        "opening_seconds": {clock: middle(f"opening_{clock}") for clock in ("cpu", "wall")},
        "ratio": median(ratios),
        "ratio_of_each_round": ratios,
        "share_inside_tokenizer": median(run["inside_cpu"] / run["prepare_cpu"] for run in runs),
        "target": TARGET,
        "goal": GOAL,
        "two_workers_seconds": two["wall"],
        "peak_memory_of_a_worker_mb": two["worker_peak_mb"],
    }


def measure(name: str, corpus: Path, tokenizer: str, work: Path) -> dict[str, float]:
    store = tempfile.mkdtemp(dir=work)
    command = [sys.executable, __file__, "--measure", name, str(corpus), tokenizer, store]
    done = subprocess.run(command, env={**os.environ, **ONE_CORE}, stdout=subprocess.PIPE, check=True)
    shutil.rmtree(store)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def paired(corpus: str, tokenizer: str, work: str) -> dict[str, float]:
    from tokenmill.documents import ReadOptions, cut_files, find_files, read_unit
    from tokenmill.encode.agreement import trusted
    from tokenmill.prepare import build
    from tokenmill.prepare.sample import sample_texts

    units = cut_files(find_files(corpus).files)
    texts = {unit.index: [batch.texts for batch in read_unit(unit, ReadOptions())] for unit in units}
    # Opened just as prepare does it: a tokenizer that has not met a text for the reference yet opens that one when
    # it does, in the middle of the measurement.
    second, _ = trusted(tokenizer, sample=sample_texts(find_files(corpus).files, "text"))
    opening, alone, inside = Stopwatch(), Stopwatch(), Stopwatch()
    kept = []  # closing a tokenizer takes time too, and also once a build
    open_first, take_part = build._open_tokenizer, build._take_part

    def timed_open(*arguments: Any) -> Any:
        with opening:
            opened, warning = open_first(*arguments)
        kept.append(opened)
        return TimedTokenizer(opened, inside), warning

    def take_turns(job: Any, unit: Any, writer: Any) -> None:
        take_part(job, unit, writer)
        with alone:
            for batch in texts[unit.index]:
                second.encode(batch)

    build._open_tokenizer, build._take_part = timed_open, take_turns  # type: ignore[assignment]
    whole = Stopwatch()
    with whole:
        report = build.prepare(corpus, out=work, tokenizer=tokenizer, workers=1, progress=False)
    return {
        "prepare_cpu": whole.cpu - opening.cpu - alone.cpu,
        "prepare_wall": whole.wall - opening.wall - alone.wall,
        "alone_cpu": alone.cpu,
        "alone_wall": alone.wall,
        "inside_cpu": inside.cpu,
        "opening_cpu": opening.cpu,
        "opening_wall": opening.wall,
        "documents": report.documents,
        "text_bytes": report.text_bytes,
        "tokens": report.tokens,
    }


def two_workers(corpus: str, tokenizer: str, work: str) -> dict[str, float]:
    from tokenmill.prepare import prepare

    whole, done, peak = Stopwatch(), threading.Event(), [0.0]

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max([peak[0], *(peak_mb(pid) for pid in children())])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with whole:
            prepare(corpus, out=work, tokenizer=tokenizer, workers=2, progress=False)
    finally:
        done.set()
        watcher.join()
    return {"wall": whole.wall, "worker_peak_mb": peak[0]}


def children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def peak_mb(pid: int) -> float:
    """Return the peak memory of a process since it was started; `ru_maxrss` would be that of its parent too."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


class TimedTokenizer:
    """A tokenizer whose time is taken."""

    def __init__(self, tokenizer: Any, watch: Stopwatch) -> None:
        self._tokenizer, self._watch = tokenizer, watch
        self.identity, self.engine = tokenizer.identity, tokenizer.engine

    def encode(self, texts: Any) -> Any:
        with self._watch:
            return self._tokenizer.encode(texts)


class Stopwatch:
    """Adds up the CPU and wall seconds of `with` blocks."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0

    def __enter__(self) -> None:
        self.cpu -= time.process_time()
        self.wall -= time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        self.cpu += time.process_time()
        self.wall += time.perf_counter()


def table(result: dict[str, Any]) -> str:
    alone, prepare, opening = (
        "{cpu:10.1f} {wall:10.1f}".format(**result[name])
        for name in ("alone_mb_per_second", "prepare_mb_per_second", "opening_seconds")
    )
    ratio = result["ratio"]
    verdict = "goal met" if ratio >= GOAL else "target met" if ratio >= TARGET else "TARGET MISSED"
    return "\n".join(
        [
            f"{result['tokenizer']}, {result['text_megabytes']:.1f} MB of text, {result['documents']:,} documents, "
            f"{result['tokens']:,} tokens, median of {result['rounds']}, one core",
            f"{'':44} {'CPU':>10} {'wall':>10}",
            f"{'tokenizer alone, MB of text a second':44} {alone}",
            f"{'prepare, JSONL to store, MB of text a second':44} {prepare}",
            f"{'opening and proving the tokenizer, seconds':44} {opening}",
            f"prepare / tokenizer alone: {ratio:.2f} of CPU (target {TARGET}, goal {GOAL}): {verdict}; "
            f"rounds {', '.join(f'{value:.2f}' for value in result['ratio_of_each_round'])}",
            f"of prepare's CPU, {result['share_inside_tokenizer']:.2f} is inside the tokenizer",
            f"two workers: {result['two_workers_seconds']:.2f} s wall with opening the tokenizer in each; "
            f"peak memory of a worker {result['peak_memory_of_a_worker_mb']:.0f} MB",
        ]
    )


if __name__ == "__main__":
    main()
