"""From files to a store, compared with the tokenizer alone, on one core and on two, in one interleaved run.

    python benchmarks/prepare.py [--cache FOLDER] [--megabytes 200] [--rounds 5] [--encoding cl100k]
                                 [--format jsonl|parquet|snappy] [--reading] [--memory] [--datatrove PYTHON]
                                 [--json]

A round is a fresh process with one worker and one core. After each unit that prepare has written to the store, a
second tokenizer encodes the texts of that unit, which are already in memory. The two take turns, so other work
slows both equally, and neither finds the other's caches warm. Work that a build does once, whatever its size, is
excluded from both and shown separately: loading the reader, opening the tokenizer and the recipe, verifying the
engine, closing it, and publishing the finished units. The ratio is of CPU time, as the median of the rounds.

Two cores compared with one: whole builds in worker processes, in turns, without the opening. The ratio is of the
wall clock, as the median of the rounds.

`--reading` uses no tokenizer: CPU-seconds to read the corpus alone, in turns with plain loops of the libraries
over the same file, the fastest of the rounds.

`--memory` prepares a file of 2 GB, and one with a single line of 200 MB, and shows the peak memory of a worker.
`--datatrove` names a Python that has datatrove with its `processing` extra. Its JsonlReader and DocumentTokenizer
do 8 MB with the same vocabulary (a `tokenizer.json` set by `--tokenizer`), in turns with prepare, both with one
process. The ratio is of CPU time, without opening the tokenizer. MB are 10⁶ bytes of UTF-8 text.
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

from tokenmill.build.tasks import ONE_CORE

ENCODINGS = {
    "cl100k": "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
    "o200k": "fb374d419588a4632f3f557e76b4b70aebbca790",
}
CODECS = {"parquet": "zstd", "snappy": "snappy"}
"""Forms of Parquet, and how they are compressed."""
TARGET, GOAL, TWO_CORES = 0.65, 0.75, 1.7
DOCUMENT_CHARACTERS = 8192
SHORT = b'{"text": "a short one"}\n'
ENDINGS = (".py", ".md", ".rst", ".txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="folder that keeps the corpus for the next run")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--encoding", choices=ENCODINGS, default="cl100k")
    parser.add_argument("--tokenizer", help="another tokenizer, such as a tokenizer.json")
    parser.add_argument("--format", choices=("jsonl", *CODECS), default="jsonl")
    parser.add_argument("--reading", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--datatrove", metavar="PYTHON")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, corpus, tokenizer, work = args.measure
        print(json.dumps(MEASURES[name](corpus, tokenizer, work)))
        return
    if args.reading:
        with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as work:
            corpus = corpus_of(args.cache or Path(work), args.megabytes, args.format)
            print(json.dumps({"reading_cpu_seconds": reading(corpus, args.format, args.rounds)}, indent=2))
        return
    tokenizer = args.tokenizer or tokenizer_spec(args.encoding)
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as work:
        cache = args.cache or Path(work)
        cache.mkdir(parents=True, exist_ok=True)
        if args.memory:
            result = {"memory": memory(cache, tokenizer, Path(work))}
        elif args.datatrove:
            result = {"datatrove": beside_datatrove(cache, tokenizer, args.datatrove, Path(work), args.rounds)}
        else:
            corpus = corpus_of(cache, args.megabytes, args.format)
            result = {
                "format": args.format,
                **compare(corpus, tokenizer, Path(work), args.rounds),
            }
    result = {"tokenizer": args.tokenizer or args.encoding, **result}
    print(json.dumps(result, indent=2) if args.json or args.memory or args.datatrove else table(result))


def tokenizer_spec(encoding: str) -> str:
    """Return a rank file of litellm's data files; the package itself is not imported."""
    found = importlib.util.find_spec("litellm")
    if found is None or not found.submodule_search_locations:
        sys.exit("benchmarks/prepare.py: needs a real BPE: pip install --no-deps litellm")
    folder = Path(found.submodule_search_locations[0]) / "litellm_core_utils" / "tokenizers"
    return f"tiktoken:{folder / ENCODINGS[encoding]}"


def corpus_of(cache: Path, megabytes: int, kind: str) -> Path:
    """Return the corpus, made if it is not there yet."""
    plain = cache / f"corpus-{megabytes}.jsonl"
    if not plain.exists():
        write_corpus(plain, megabytes * 10**6)
    if kind == "jsonl":
        return plain
    parquet = plain.with_suffix(".parquet" if kind == "parquet" else f".{kind}.parquet")
    if not parquet.exists():
        import pyarrow.json
        import pyarrow.parquet

        table = pyarrow.json.read_json(plain)
        pyarrow.parquet.write_table(table, parquet, compression=CODECS[kind], row_group_size=2048)
    return parquet


def write_corpus(path: Path, size: int) -> None:
    """Make documents of the texts of Python and the installed packages; each text is used once."""
    import msgspec

    written = 0
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for text in texts_of_this_machine():
            written += len(text.encode())
            file.write(msgspec.json.encode({"id": written, "text": text, "source": "benchmark"}) + b"\n")
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
    pairs = [
        (measure("one", corpus, tokenizer, work), measure("two", corpus, tokenizer, work)) for _ in range(rounds)
    ]
    text_mb = runs[0]["text_bytes"] / 1e6
    ratios = sorted(run["alone_cpu"] / run["prepare_cpu"] for run in runs)
    scaling = sorted(one["wall"] / two["wall"] for one, two in pairs)

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
        "target": TARGET,
        "goal": GOAL,
        "two_cores": median(scaling),
        "two_cores_of_each_round": scaling,
        "two_workers_mb_per_second": text_mb / median(two["wall"] for _, two in pairs),
        "peak_memory_of_a_worker_mb": max(two["worker_peak_mb"] for _, two in pairs),
    }


def measure(name: str, corpus: Path, tokenizer: str, work: Path) -> dict[str, float]:
    store = tempfile.mkdtemp(dir=work)
    command = [sys.executable, __file__, "--measure", name, str(corpus), tokenizer, store]
    done = subprocess.run(command, env={**os.environ, **ONE_CORE}, stdout=subprocess.PIPE, check=True)
    shutil.rmtree(store)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def paired(corpus: str, tokenizer: str, work: str) -> dict[str, float]:
    from tokenmill.build import build, job
    from tokenmill.documents import ReadOptions, chunk_size, cut_files, find_files, read_unit, sample_texts
    from tokenmill.encode.engines import trusted

    files = find_files(corpus).files
    units = cut_files(files, chunk_bytes=chunk_size(files))
    loading, opening, alone = Stopwatch(), Stopwatch(), Stopwatch()
    reading = ReadOptions()
    with loading:  # of the reader, as the first unit would
        next(read_unit(next(cut_files(files, chunk_bytes=1)), reading))
    texts = {unit.index: [batch.documents for batch in read_unit(unit, reading)] for unit in units}
    # Opened just as prepare does it: a tokenizer that has not met a text for the reference yet opens that one when
    # it does, in the middle of the measurement.
    second, _ = trusted(tokenizer, sample=sample_texts(files, "text"))
    kept = []  # closing a tokenizer takes time too, and also once a build
    open_first, run_first = job._open_tokenizer, build.WorkerPool.run
    settle_first, publish_first = job.settle_recipe, build._publish

    def timed_open(*arguments: Any) -> Any:
        with opening:
            kept.append(open_first(*arguments))
        return kept[-1]

    def timed_settle(*arguments: Any) -> Any:
        with opening:  # loads the modules of recipes
            return settle_first(*arguments)

    def timed_publish(*arguments: Any) -> None:
        with opening:
            publish_first(*arguments)

    def take_turns(pool: Any, journal: Any, tasks: Any, indices: Any, tick: Any) -> Iterator[int]:
        for index in run_first(pool, journal, tasks, indices, tick):
            task = tasks.task(index)
            if task.kind == "write":
                with alone:
                    for batch in texts[task.unit.index]:
                        second.encode(batch)
            yield index

    job._open_tokenizer, build.WorkerPool.run = timed_open, take_turns  # type: ignore[method-assign]
    job.settle_recipe, build._publish = timed_settle, timed_publish
    whole = Stopwatch()
    with whole:
        report = build.prepare(corpus, out=work, tokenizer=tokenizer, workers=1, progress=False)
    return {
        "prepare_cpu": whole.cpu - opening.cpu - alone.cpu,
        "prepare_wall": whole.wall - opening.wall - alone.wall,
        "alone_cpu": alone.cpu,
        "alone_wall": alone.wall,
        "opening_cpu": loading.cpu + opening.cpu,
        "opening_wall": loading.wall + opening.wall,
        "documents": report.documents,
        "text_bytes": report.text_bytes,
        "tokens": report.tokens,
    }


def in_workers(workers: int, corpus: str, tokenizer: str, work: str) -> dict[str, float]:
    """Build in worker processes; the clock runs from when all of them have opened and loaded what they need."""
    from tokenmill.build import prepare
    from tokenmill.build.journal import UNITS, Journal
    from tokenmill.build.schedule import WorkerPool
    from tokenmill.build.tasks import Task, TaskList, read_job, write_list

    clock, peak, run = Stopwatch(), [0.0], WorkerPool.run

    def timed(pool: WorkerPool, journal: Journal, tasks: TaskList, indices: Any, tick: Any) -> Iterator[int]:
        small = unit_to_load(work, Path(corpus).suffix, tasks.task(len(tasks) - 1).unit.bytes)
        warm = [Task(kind="write", unit=small, key=f"warm{number}") for number in range(workers)]
        listed = (journal.folder / UNITS).read_bytes()
        warm_list = write_list(journal, "write", warm, read_job(journal, tasks.head), {}, {})
        for _ in run(pool, journal, warm_list, range(workers), tick):  # one each, as all are free
            pass
        (journal.folder / UNITS).write_bytes(listed)
        with clock:
            done = list(run(pool, journal, tasks, indices, tick))
        peak[0] = max(map(peak_mb, children()))
        yield from done

    WorkerPool.run = timed  # type: ignore[method-assign,assignment]
    # A timeout has one worker run in a process, too.
    report = prepare(
        corpus,
        out=Path(work) / "store",
        tokenizer=tokenizer,
        workers=workers,
        unit_timeout=10**6,
        progress=False,
    )
    return {"wall": clock.wall, "worker_peak_mb": peak[0], "text_bytes": report.text_bytes}


def unit_to_load(work: str, suffix: str, num_bytes: int) -> Any:
    """Return a unit of one text, in the same format: with it workers load and open all that they will use.

    That is also the reference, which is opened by the first text that the fast engine leaves to it: whether one
    worker meets such a text or both do is chance.
    """
    from tokenmill.documents import cut_files, find_files
    from tokenmill.encode.engines import DIVERGENT

    path = Path(work) / f"small{suffix}"
    if suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.table({"text": DIVERGENT[:1]}), path)
    else:
        line = json.dumps({"text": DIVERGENT[0]}).encode() + b"\n"
        path.write_bytes((b" " * 65_535 + b"\n") * (num_bytes // 65_536 + 1) + line)
    return next(cut_files(find_files(path).files, chunk_bytes=2 * path.stat().st_size))


def one_worker(corpus: str, tokenizer: str, work: str) -> dict[str, float]:
    return in_workers(1, corpus, tokenizer, work)


def two_workers(corpus: str, tokenizer: str, work: str) -> dict[str, float]:
    return in_workers(2, corpus, tokenizer, work)


def reading(corpus: Path, kind: str, rounds: int) -> dict[str, float]:
    """Return the CPU-seconds that reading all texts takes, by tokenmill and by loops of libraries."""
    import msgspec
    import pyarrow.parquet
    import simdjson

    from tokenmill.documents import ReadOptions, chunk_size, cut_files, find_files, read_unit

    files = find_files(corpus).files

    def tokenmill() -> None:
        for unit in cut_files(files, chunk_bytes=chunk_size(files)):
            for _ in read_unit(unit, ReadOptions()):
                pass

    def lines(parse: Any) -> None:
        with corpus.open("rb", buffering=1 << 20) as file:
            for line in file:
                parse(line)["text"]

    def arrow() -> None:
        with pyarrow.parquet.ParquetFile(corpus) as file:
            for batch in file.iter_batches(128, columns=["text"], use_threads=False):
                batch.column(0).to_pylist()

    parse = simdjson.Parser().parse
    libraries: dict[str, Any] = {"pyarrow": arrow}
    if kind == "jsonl":
        libraries = {
            "simdjson": lambda: lines(lambda line: parse(line, True)),
            "msgspec": lambda: lines(msgspec.json.decode),
        }
    fastest: dict[str, float] = {}
    for _ in range(rounds):
        for name, read in {"tokenmill": tokenmill, **libraries}.items():
            clock = Stopwatch()
            with clock:
                read()
            fastest[name] = min(clock.cpu, fastest.get(name, clock.cpu))
    return fastest


def memory(cache: Path, tokenizer: str, work: Path) -> dict[str, object]:
    """Return the peak memory of a worker for 2 GB of JSONL, and for one line of 200 MB."""
    large = cache / "two-gigabytes.jsonl"
    if not large.exists():
        once = corpus_of(cache, 200, "jsonl").read_bytes()
        with large.open("wb") as file:
            for _ in range(10):
                file.write(once)
    plain, wide = cache / "one-line.jsonl", cache / "one-wide-line.jsonl"
    if not wide.exists():
        text = "".join(texts_of_this_machine())
        ascii_only = text.encode("ascii", "ignore").decode()
        for path, line in ((plain, (ascii_only * 3)[: 200 * 10**6]), (wide, (text * 3)[: 200 * 10**6])):
            path.write_bytes(json.dumps({"text": line}, ensure_ascii=False).encode() + b"\n" + SHORT * 1000)
    found: dict[str, object] = {}
    for name, path in (
        ("2 GB of JSONL", large),
        ("one line of 200 MB, ASCII", plain),
        ("one line of 200 MB with characters that make it four times as wide, skipped", wide),
    ):
        run = measure("peak", path, tokenizer, work)
        found[name] = {"file_mb": path.stat().st_size / 1e6, **run}
    return found


def peak(corpus: str, tokenizer: str, work: str) -> dict[str, float]:
    from tokenmill.build import PrepareOptions, prepare

    done, seen = threading.Event(), [0.0]

    def watch() -> None:
        while not done.wait(0.02):
            seen[0] = max([seen[0], *(peak_mb(pid) for pid in children())])

    watcher = threading.Thread(target=watch)
    watcher.start()
    size = Path(corpus).stat().st_size
    try:
        # At least two units, so that there are workers to look at.
        options = PrepareOptions(chunk_bytes=min(size // 2, 85 << 20), on_error="skip")
        report = prepare(corpus, out=work, tokenizer=tokenizer, workers=2, progress=False, options=options)
    finally:
        done.set()
        watcher.join()
    return {
        "worker_peak_mb": seen[0],
        "parent_peak_mb": peak_mb(os.getpid()),
        "seconds": report.seconds,
        "tokens": report.tokens,
        "skipped": sum(report.skipped.values()),
    }


DATATROVE = """
import json, sys, time
corpus, tokenizer, out = sys.argv[1:]
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
reader = JsonlReader(corpus)
writer = DocumentTokenizer(out, tokenizer_name_or_path=tokenizer, shuffle_documents=False)
writer.tokenizer.encode("opened")
begin = time.process_time()
for _ in writer(reader(None, 0, 1), 0, 1) or ():
    pass
print(json.dumps({"cpu": time.process_time() - begin}))
"""


def beside_datatrove(cache: Path, vocabulary: str, python: str, work: Path, rounds: int) -> dict[str, object]:
    """Return how much CPU datatrove takes for the same text and vocabulary, against prepare."""
    corpus = corpus_of(cache, 8, "jsonl")
    folder = work / "corpus"
    folder.mkdir()
    shutil.copy(corpus, folder)
    ratios, ours, theirs = [], [], []
    for index in range(rounds):
        mine = measure("paired", corpus, vocabulary, work)
        command = [python, "-c", DATATROVE, str(folder), vocabulary, str(work / f"out-{index}")]
        done = subprocess.run(command, env={**os.environ, **ONE_CORE}, stdout=subprocess.PIPE, check=True)
        other = json.loads(done.stdout.splitlines()[-1])["cpu"]
        megabytes = mine["text_bytes"] / 1e6
        ours.append(megabytes / mine["prepare_cpu"])
        theirs.append(megabytes / other)
        ratios.append(ours[-1] / theirs[-1])
    return {
        "text_megabytes": mine["text_bytes"] / 1e6,
        "prepare_mb_per_cpu_second": sorted(ours),
        "datatrove_mb_per_cpu_second": sorted(theirs),
        "times": median(ratios),
        "times_of_each_round": sorted(ratios),
    }


MEASURES = {"paired": paired, "one": one_worker, "two": two_workers, "peak": peak}


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
    ratio, two = result["ratio"], result["two_cores"]
    verdict = "goal met" if ratio >= GOAL else "target met" if ratio >= TARGET else "TARGET MISSED"
    return "\n".join(
        [
            f"{result['tokenizer']}, {result['text_megabytes']:.1f} MB of text, {result['documents']:,} documents, "
            f"{result['tokens']:,} tokens, {result['format']}, median of {result['rounds']}, one core",
            f"{'':44} {'CPU':>10} {'wall':>10}",
            f"{'tokenizer alone, MB of text a second':44} {alone}",
            f"{'prepare, file to store, MB of text a second':44} {prepare}",
            f"{'opening, proving and publishing, seconds':44} {opening}",
            f"prepare / tokenizer alone: {ratio:.2f} of CPU (target {TARGET}, goal {GOAL}): {verdict}; "
            f"rounds {', '.join(f'{value:.2f}' for value in result['ratio_of_each_round'])}",
            f"two cores / one: {two:.2f} (target {TWO_CORES}): {'met' if two >= TWO_CORES else 'MISSED'}; "
            f"rounds {', '.join(f'{value:.2f}' for value in result['two_cores_of_each_round'])}; "
            f"{result['two_workers_mb_per_second']:.0f} MB/s with two; "
            f"peak memory of a worker {result['peak_memory_of_a_worker_mb']:.0f} MB",
        ]
    )


if __name__ == "__main__":
    main()
