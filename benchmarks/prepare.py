"""MB/s per core from JSONL to store with a real BPE, against the tokenizer alone, interleaved in one run.

    python benchmarks/prepare.py [--cache FOLDER] [--megabytes 100] [--rounds 5] [--encoding cl100k] [--json]

Each measurement is a fresh process that may use one core, so that neither side finds the other's caches warm.
`alone` encodes texts that are already in memory, in batches as prepare makes them. `prepare` goes from a JSONL
file to a committed store with one worker; opening the tokenizer and proving its engine, which a build does once
whatever its size, is left out of both and shown apart. The best round counts: other work on the machine only
ever adds. MB are 10⁶ bytes of UTF-8 text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
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
        print(json.dumps({"alone": alone, "prepare": build, "two": build_two}[name](corpus, tokenizer, work)))
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
    runs: dict[str, list[dict[str, float]]] = {"alone": [], "prepare": []}
    for _ in range(rounds):
        for name, results in runs.items():
            results.append(measure(name, corpus, tokenizer, work))
    two = min((measure("two", corpus, tokenizer, work) for _ in range(2)), key=lambda run: run["wall"])

    def best(name: str, value: str) -> float:
        return min(run[value] for run in runs[name])

    text_mb = runs["alone"][0]["text_bytes"] / 1e6
    speeds = {name: {clock: text_mb / best(name, clock) for clock in ("cpu", "wall")} for name in runs}
    return {
        "text_megabytes": text_mb,
        "documents": runs["alone"][0]["documents"],
        "tokens": runs["alone"][0]["tokens"],
        "rounds": rounds,
        "alone_mb_per_second": speeds["alone"],
        "prepare_mb_per_second": speeds["prepare"],
        "opening_seconds": {clock: best("prepare", f"opening_{clock}") for clock in ("cpu", "wall")},
        "ratio": speeds["prepare"]["cpu"] / speeds["alone"]["cpu"],
        "ratio_of_each_round": sorted(
            a["cpu"] / b["cpu"] for a, b in zip(runs["alone"], runs["prepare"], strict=True)
        ),
        "target": TARGET,
        "goal": GOAL,
        "two_workers_seconds": two["wall"],
        "peak_memory_of_a_worker_mb": two["worker_peak_mb"],
    }


def measure(name: str, corpus: Path, tokenizer: str, work: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", name, str(corpus), tokenizer, str(work / "store")]
    done = subprocess.run(command, env={**os.environ, **ONE_CORE}, stdout=subprocess.PIPE, check=True)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def alone(corpus: str, tokenizer: str, _work: str) -> dict[str, float]:
    from tokenmill.documents import ReadOptions, cut_files, find_files, read_unit
    from tokenmill.encode.load import open_tokenizer

    opened = open_tokenizer(tokenizer)
    units = cut_files(find_files(corpus).files)
    batches = [batch.texts for unit in units for batch in read_unit(unit, ReadOptions())]
    opened.encode(["warm up"])
    tokens = 0
    begin = clocks()
    for texts in batches:
        tokens += opened.encode(texts).ids.size
    cpu, wall = since(begin)
    return {
        "cpu": cpu,
        "wall": wall,
        "documents": sum(map(len, batches)),
        "text_bytes": sum(len(text.encode()) for texts in batches for text in texts),
        "tokens": tokens,
    }


def build(corpus: str, tokenizer: str, work: str, workers: int = 1) -> dict[str, float]:
    from tokenmill.prepare import build as module

    opening = [0.0, 0.0]
    open_tokenizer = module._open_tokenizer

    def timed(*arguments: object) -> object:
        begin = clocks()
        opened = open_tokenizer(*arguments)  # type: ignore[arg-type]
        opening[:] = since(begin)
        return opened

    module._open_tokenizer = timed  # type: ignore[assignment]
    begin = clocks()
    module.prepare(corpus, out=work, tokenizer=tokenizer, workers=workers, rebuild=True, progress=False)
    cpu, wall = since(begin)
    return {
        "cpu": cpu - opening[0],
        "wall": wall - opening[1],
        "opening_cpu": opening[0],
        "opening_wall": opening[1],
    }


def build_two(corpus: str, tokenizer: str, work: str) -> dict[str, float]:
    result = build(corpus, tokenizer, work, workers=2)
    # Workers open the tokenizer too, at the same time; they have ended and been waited for.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {**result, "worker_peak_mb": peak / (1e6 if sys.platform == "darwin" else 1e3)}


def clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def since(begin: tuple[float, float]) -> tuple[float, float]:
    now = clocks()
    return now[0] - begin[0], now[1] - begin[1]


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
            f"{result['tokens']:,} tokens, best of {result['rounds']}, one core",
            f"{'':44} {'CPU':>10} {'wall':>10}",
            f"{'tokenizer alone, MB of text a second':44} {alone}",
            f"{'prepare, JSONL to store, MB of text a second':44} {prepare}",
            f"{'opening and proving the tokenizer, seconds':44} {opening}",
            f"prepare / tokenizer alone: {ratio:.2f} of CPU (target {TARGET}, goal {GOAL}): {verdict}; "
            f"rounds {', '.join(f'{value:.2f}' for value in result['ratio_of_each_round'])}",
            f"two workers: {result['two_workers_seconds']:.2f} s wall with opening the tokenizer in each; "
            f"peak memory of a worker {result['peak_memory_of_a_worker_mb']:.0f} MB",
        ]
    )


if __name__ == "__main__":
    main()
