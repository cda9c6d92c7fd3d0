"""Live text from Parquet to batches, compared with the bare tokenizer, Hugging Face's stack and nanochat's loops.

    python benchmarks/live.py [--cache FOLDER] [--megabytes 200] [--rounds 5] [--seconds 4] [--rows 16]
                              [--tokenizer .venv/tokenizers/llama3_1/tokenizer.json] [--only NAME,NAME]
                              [--resume GIGABYTES] [--json]

The corpus is that of prepare.py in a random order, in Parquet files as nanochat writes them: zstd at level 3, no
dictionaries, row groups of 1,024 documents. Batches have `rows` rows of 2,048 tokens. All use two cores, one
vocabulary, and BOS before every document. A round runs each candidate once, one after the other, each in a fresh
process. Ratios are medians over the rounds: of wall clocks, and of CPU time, which other work affects less.

- *bare*: the tokenizer of tokenmill, on texts in memory, with its own threads or with two Python threads,
  whichever has the faster median. Nothing is done with the ids.
- *tokenmill*: the loader of live text, shuffled, best fit, with two threads. Also the loaders of
  `tokenmill.adapters.nanochat` over it, flat and best fit, which make a state for every batch; and these with a
  tokenizer like nanochat's (tiktoken).
- *nanochat*: its two loops, reimplemented from their description, with tiktoken on two threads; also with the ids
  of tokenmill's tokenizer.
- *datasets*: `load_dataset(streaming=True)`, `tokenizers` in batches, rows cut from the stream of ids, and a
  torch DataLoader with two workers.

A tenth of the work is done before the clock starts, so buffers are full at the start and at the end. The clock
stops after `seconds`. For the bare tokenizer and tokenmill it also stops when the corpus was read once (by the
first lane to end), because the tokenizer caches words, and a second reading would be faster. A token counts when
it is in a batch, and so does the padding of best fit, 0.03% (packing.py). nanochat's best fit crops documents, so
its loaders are compared with each other. The cost of a start is in `--resume`.

The cost of selection is the share of CPU time in the packing of windows, or in nanochat's search.

`--resume` makes this many GB of Parquet by copying files. It shows the seconds from an open tokenizer and loaded
modules to the first batch: at the start, and at 10%, 50% and 90% of the epoch, from files outside the page cache.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import prepare
from tokenmill.build.tasks import ONE_CORE
from tokenmill.loader import LoaderOptions

ROOT = Path(__file__).parents[1]
SEQ_LEN, ROW_GROUP, FILES = 2048, 1024, 5
TIMES, SHARE, SELECTION, SECONDS = 10, 0.60, 0.05, 2.0
LEAD = 0.1
"""Of the work that is done before the clock starts."""
BARE, OWN_THREADS = "bare", "own threads"
BATCH_CHARACTERS = 1 << 20
AS_NANOCHAT: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 3,
    "row_group_size": ROW_GROUP,
    "use_dictionary": False,
    "write_statistics": False,
}
"""How nanochat's own script writes Parquet."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="folder that keeps the corpus for the next run")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokenizer", default=str(ROOT / ".venv/tokenizers/llama3_1/tokenizer.json"))
    parser.add_argument("--resume", type=float, metavar="GIGABYTES")
    parser.add_argument("--only", help="names of what is measured, with commas")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, folder, tokenizer, rows, limit = args.measure
        print(json.dumps((MEASURES | RESUME)[name](Path(folder), tokenizer, int(rows), float(limit))))
        return
    if not Path(args.tokenizer).exists():
        sys.exit("benchmarks/live.py: needs a real BPE: python tools/fetch_tokenizers.py, or --tokenizer")
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as work:
        cache = args.cache or Path(work)
        cache.mkdir(parents=True, exist_ok=True)
        corpus = corpus_of(cache, args.megabytes)
        result = resume(corpus, Path(work), args) if args.resume else compare(corpus, args)
    print(json.dumps(result, indent=2) if args.json else (resume_table if args.resume else table)(result))


def corpus_of(cache: Path, megabytes: int) -> Path:
    """Return the folder of Parquet files, made if it is not there yet."""
    folder = cache / f"live-plain-{megabytes}"
    if folder.exists():
        return folder
    import numpy as np
    import pyarrow.json
    import pyarrow.parquet

    texts = pyarrow.json.read_json(prepare.corpus_of(cache, megabytes, "jsonl")).select(["text"])
    texts = texts.take(np.random.default_rng(0).permutation(texts.num_rows))
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    each = -(-texts.num_rows // (FILES - 1))
    parts = [texts.slice(number * each, each) for number in range(FILES - 1)]
    for number, part in enumerate([*parts, texts.slice(0, ROW_GROUP)]):  # the last is for validation
        path = temporary / f"shard_{number:05d}.parquet"
        pyarrow.parquet.write_table(part, path, **AS_NANOCHAT)
    temporary.rename(folder)
    return folder


def train_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))[:-1]


def compare(corpus: Path, args: argparse.Namespace) -> dict[str, Any]:
    names = args.only.split(",") if args.only else [name for name in MEASURES if name != OWN_THREADS]
    rounds: list[dict[str, dict[str, float]]] = []
    measured = [*names, *([OWN_THREADS] if BARE in names else [])]
    for _ in range(args.rounds):
        rounds.append({name: measure(name, corpus, args, args.seconds) for name in measured})
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if BARE in names:  # by the medians: the better of two in every round would be luck
        faster = max((BARE, OWN_THREADS), key=lambda name: median(one[name]["rate"] for one in rounds))
        rounds = [{**one, BARE: one[faster]} for one in rounds]

    pairs = {pair: target for pair, target in PAIRS.items() if set(pair) <= set(names)}

    def ratios(clock: str, above: str, below: str) -> list[float]:
        return sorted(one[above][clock] / one[below][clock] for one in rounds)

    return {
        "text_megabytes": args.megabytes,
        "rounds": args.rounds,
        "rates": {name: median(one[name]["rate"] for one in rounds) for name in names},
        "cpu_rates": {name: median(one[name]["cpu_rate"] for one in rounds) for name in names},
        "selection": {
            name: median(one[name]["selection"] for one in rounds)
            for name in names
            if "selection" in rounds[0][name]
        },
        "ratios": {
            f"{above} / {below}": (ratios("rate", above, below), ratios("cpu_rate", above, below))
            for above, below in pairs
        },
        "targets": {f"{above} / {below}": target for (above, below), target in pairs.items()},
    }


def measure(name: str, folder: Path, args: argparse.Namespace, limit: float) -> dict[str, float]:
    # Two threads, each with libraries that keep to one core, but where the library is what is to use both.
    alone = ONE_CORE if name.startswith((BARE, "tokenmill", "resume")) else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **alone}
    command = [sys.executable, __file__, "--measure", name, str(folder), args.tokenizer, str(args.rows), str(limit)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def clocked(
    tokens: Iterator[int],
    limit: float = math.inf,
    done: Callable[[], float] | None = None,
    started: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Add up tokens from the end of the lead until the time is over or nothing is left.

    `done` returns the finished share of the work, from 0 to 1. Without it, the work is a number of seconds.
    `started` is called when the clock starts.
    """
    first, begun, total, cpu = time.perf_counter(), 0.0, 0, 0.0
    for number in tokens:
        now = time.perf_counter()
        if begun:
            total += number
        elif (done() if done else (now - first) / limit) >= LEAD:
            started()
            begun, cpu = time.perf_counter(), cpu_seconds()
        if begun and now - begun >= limit:
            break
    wall, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
    return {"rate": total / wall, "cpu_rate": total / cpu, "cpu": cpu, "tokens": total}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the children that it has."""
    ticks = os.sysconf("SC_CLK_TCK")
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in prepare.children()]
    return time.process_time() + sum((int(field[11]) + int(field[12])) / ticks for field in fields)


def opened(tokenizer: str) -> Any:
    from tokenmill.encode.engines import open_tokenizer

    found = open_tokenizer(tokenizer, add_bos=True, add_eos=False)
    found.encode(["\u180e"])  # opens the reference, which a few texts are left to
    return found


class Tiktoken:
    """A tokenizer with nanochat's methods over tiktoken, as nanochat has it."""

    def __init__(self, path: str) -> None:
        import tiktoken

        file = json.loads(Path(path).read_text(encoding="utf-8"))
        letters = byte_letters()
        ranks = {bytes(letters[letter] for letter in token): rank for token, rank in file["model"]["vocab"].items()}
        pattern = next(
            part["pattern"]["Regex"] for part in file["pre_tokenizer"]["pretokenizers"] if part["type"] == "Split"
        )
        special = {token["content"]: token["id"] for token in file["added_tokens"]}
        self.encoding = tiktoken.Encoding("live", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self.bos = next(number for text, number in special.items() if text.startswith("<|begin_of_text"))

    def get_bos_token_id(self) -> int:
        return self.bos

    def get_vocab_size(self) -> int:
        return self.encoding.n_vocab

    def encode(self, text: list[str], prepend: int, num_threads: int) -> list[list[int]]:
        lists = self.encoding.encode_ordinary_batch(text, num_threads=num_threads)
        for ids in lists:
            ids.insert(0, prepend)
        return lists

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)


def byte_letters() -> dict[str, int]:
    """Return the byte of each letter of a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


class SameEngine:
    """The tokenizer that tokenmill uses, with nanochat's methods."""

    def __init__(self, path: str) -> None:
        self.inner = opened(path)

    def get_bos_token_id(self) -> int:
        return int(self.inner.identity.bos_id)

    def encode(self, text: list[str], prepend: int, num_threads: int) -> list[list[int]]:
        found = self.inner.encode(text)
        bounds = found.offsets.tolist()
        return [[prepend, *found.ids[a:b].tolist()] for a, b in pairwise(bounds)]


# What is measured. Each yields the tokens of a batch at a time; those of the lead are not counted.


def bare(folder: Path, tokenizer: str, _rows: int, _limit: float) -> dict[str, float]:
    """Encode the texts in batches of a megabyte, by two threads or by those of the tokenizer."""
    import pyarrow.parquet as pq

    texts = [text for file in train_files(folder) for text in pq.read_table(file)["text"].to_pylist()]
    engine, threads = opened(tokenizer), 2 if os.environ.get("RAYON_NUM_THREADS") == "1" else 1
    engine.encode(texts[:8])

    ready = threading.Barrier(threads + 1)
    go = threading.Barrier(threads + 1)

    def work(part: list[str], found: list[int]) -> None:
        begin = size = 0
        lead = int(LEAD * len(part))
        for end, text in enumerate(part, 1):
            size += len(text)
            if size >= BATCH_CHARACTERS or end in (lead, len(part)):
                found.append(engine.encode(part[begin:end]).ids.size)
                begin, size = end, 0
            if end == lead:
                found.clear()
                ready.wait()
                go.wait()

    def once() -> Iterator[int]:
        counts: list[list[int]] = [[] for _ in range(threads)]
        running = [threading.Thread(target=work, args=(texts[n::threads], counts[n])) for n in range(threads)]
        for thread in running:
            thread.start()
        ready.wait()
        yield 0  # here the clock starts
        go.wait()
        for thread in running:
            thread.join()
        yield sum(map(sum, counts))

    return clocked(once(), done=lambda: LEAD)


def ours(kind: str, tokenizer: Any, folder: Path, rows: int, limit: float) -> dict[str, float]:
    import tokenmill.adapters.nanochat as adapter
    from tokenmill.live import lanes as lanes_module

    packing, begun = [0.0], {"flat": "", "best fit": "_bos_bestfit"}[kind]
    first = lanes_module.pack_window

    def timed(*args: Any, **more: Any) -> Any:
        at = time.thread_time()
        try:
            return first(*args, **more)
        finally:
            packing[0] += time.thread_time() - at

    lanes_module.pack_window = timed  # type: ignore[assignment]
    loader = getattr(adapter, f"tokenizing_distributed_data_loader_with_state{begun}")
    call = {"split": "train", "tokenizer_threads": 2, "device": "cpu", "data_dir": folder}
    warm = loader(tokenizer, rows, SEQ_LEN, **{**call, "split": "val"})  # loads the kernels
    next(warm)
    warm.close()

    turns, done = num_row_groups(folder) / rows, [0.0]

    def once() -> Iterator[int]:
        """Yield until a lane has read its share of the corpus; by then most have."""
        for inputs, targets, state in loader(tokenizer, rows, SEQ_LEN, **call):
            lanes = state["live"]["live"]["lanes"]["text"].values()
            if any(lane[0] for lane in lanes):
                return
            done[0] = min(lane[1] for lane in lanes) / turns
            yield int((targets >= 0).count_nonzero()) if kind == "flat" else inputs.numel()

    found = clocked(
        once(), limit, None if limit < math.inf else lambda: done[0], lambda: packing.__setitem__(0, 0.0)
    )
    return {**found, "selection": packing[0] / found["cpu"]}


def plain(folder: Path, tokenizer: str, rows: int, _limit: float) -> dict[str, float]:
    """Draw from the loader of live text itself: best fit, shuffled."""
    from tokenmill.live import LiveLoader, LiveOptions, open_live

    options = LiveOptions(seq_len=SEQ_LEN, window_bytes=1 << 20)
    source = open_live([str(file) for file in train_files(folder)], tokenizer=opened(tokenizer), options=options)

    def loader() -> LiveLoader:
        return LiveLoader(
            source,
            steps=1 << 40,
            global_batch_size=rows,
            micro_batch=rows,
            options=LoaderOptions(threads=2, arrays=("input_ids", "labels")),
        )

    warm = loader()  # loads the kernels
    next(iter(warm))
    warm.close()
    live = loader()
    turns = live.text.windows.num_windows / rows

    def once() -> Iterator[int]:
        """Yield until a lane has read its share of the corpus; by then most have."""
        for batch in live:
            if any(lane.begun.epoch for lane in live.text.lanes.values()):
                return
            yield batch["labels"].size

    found = clocked(once(), done=lambda: min(lane.begun.turn for lane in live.text.lanes.values()) / turns)
    live.close()
    return found


def text_batches(folder: Path, size: int) -> Iterator[list[str]]:
    """Yield texts as nanochat reads them: a row group at a time, in small batches, for ever."""
    import pyarrow.parquet as pq

    while True:
        for path in train_files(folder):
            file = pq.ParquetFile(path)
            for group in range(file.num_row_groups):
                texts = file.read_row_group(group).column("text").to_pylist()
                for begin in range(0, len(texts), size):
                    yield texts[begin : begin + size]


def nanochat_flat(folder: Path, tokenizer: str, rows: int, limit: float) -> dict[str, float]:
    import torch

    engine = Tiktoken(tokenizer)

    def stream() -> Iterator[int]:
        needed, waiting = rows * SEQ_LEN + 1, []
        batches = text_batches(folder, 128)
        while True:
            while len(waiting) < needed:
                for ids in engine.encode(next(batches), engine.get_bos_token_id(), 2):
                    waiting.extend(ids)
            scratch = torch.tensor(waiting[:needed], dtype=torch.long)
            waiting = waiting[rows * SEQ_LEN :]
            inputs, targets = scratch[:-1].view(rows, SEQ_LEN), scratch[1:].view(rows, SEQ_LEN)
            assert inputs.shape == targets.shape
            yield inputs.numel()

    return clocked(stream(), limit)


def nanochat_best_fit(engine: Any, folder: Path, rows: int, limit: float) -> dict[str, float]:
    """Fill rows from a buffer of 1,000 documents in one pool of tokens, which is compacted when it is full."""
    import torch

    room, wanted = SEQ_LEN + 1, 1000
    searching = [0.0]

    def stream() -> Iterator[int]:
        pool, end = torch.empty(wanted * 512, dtype=torch.long), 0
        waiting: list[tuple[int, int]] = []
        batches = text_batches(folder, 128)
        table = torch.empty((rows, room), dtype=torch.long)
        inputs, targets = (torch.empty((rows, SEQ_LEN), dtype=torch.long) for _ in range(2))

        def refill() -> None:
            nonlocal pool, end
            lists = engine.encode(next(batches), engine.get_bos_token_id(), 2)
            new = sum(map(len, lists))
            if end + new > pool.numel():  # move what waits to the front
                at = 0
                for index, (start, length) in enumerate(waiting):
                    if start != at:
                        pool[at : at + length] = pool[start : start + length].clone()
                        waiting[index] = (at, length)
                    at += length
                end = at
            if end + new > pool.numel():
                larger = torch.empty(max(2 * pool.numel(), end + new), dtype=torch.long)
                larger[:end] = pool[:end]
                pool = larger
            for ids in lists:
                pool[end : end + len(ids)] = torch.tensor(ids, dtype=torch.long)
                waiting.append((end, len(ids)))
                end += len(ids)

        def choose(space: int) -> int:
            best, longest = -1, 0
            for index, (_, length) in enumerate(waiting):
                if longest < length <= space:
                    best, longest = index, length
            return best if best >= 0 else min(range(len(waiting)), key=lambda index: waiting[index][1])

        while True:
            for row in range(rows):
                column = 0
                while column < room:
                    while len(waiting) < wanted:
                        refill()
                    begun = time.thread_time()
                    start, length = waiting.pop(choose(room - column))
                    searching[0] += time.thread_time() - begun
                    taken = min(length, room - column)
                    table[row, column : column + taken] = pool[start : start + taken]
                    column += taken
            inputs.copy_(table[:, :-1])
            targets.copy_(table[:, 1:])
            yield inputs.numel()

    found = clocked(stream(), limit)
    return {**found, "selection": searching[0] / found["cpu"]}


def hugging_face(folder: Path, tokenizer: str, rows: int, limit: float) -> dict[str, float]:
    import torch
    from datasets import load_dataset
    from tokenizers import Tokenizer
    from torch.utils.data import DataLoader

    engine = Tokenizer.from_file(tokenizer)
    bos = next(token["id"] for token in json.loads(Path(tokenizer).read_text())["added_tokens"])
    files = [str(path) for path in train_files(folder)]
    texts = load_dataset("parquet", data_files=files, split="train", streaming=True)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = engine.encode_batch_fast(batch["text"], add_special_tokens=False)
        ids = list(chain.from_iterable([bos, *one.ids] for one in found))
        each = SEQ_LEN + 1
        return {"ids": [ids[at : at + each] for at in range(0, len(ids) - each + 1, each)]}

    def collate(items: list[dict[str, list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([item["ids"] for item in items])
        return ids[:, :-1], ids[:, 1:]

    cut = texts.map(encode, batched=True, batch_size=1000, remove_columns=["text"])
    loader = DataLoader(cut, batch_size=rows, num_workers=2, collate_fn=collate, prefetch_factor=4)
    return clocked((inputs.numel() for inputs, _ in loader), limit)


def resumed(folder: Path, tokenizer: str, rows: int, place: float) -> dict[str, float]:
    """Return the seconds to the first batch from a state at a part of the epoch; nothing of it is in memory yet."""
    import tokenmill.adapters.nanochat as adapter

    engine = opened(tokenizer)
    loader = adapter.tokenizing_distributed_data_loader_with_state_bos_bestfit
    call = {
        "tokenizer": engine,
        "B": rows,
        "T": SEQ_LEN,
        "tokenizer_threads": 2,
        "device": "cpu",
        "data_dir": folder,
    }
    warm = loader(**call, split="val")  # loads the kernels
    next(warm)
    warm.close()
    first = loader(**call, split="train", prefetched=True)
    _, _, state = next(first)
    first.close()
    # Turns of a lane are row groups, one after the other: a run that begins at one saves a state in its midst.
    turns = num_row_groups(folder) // rows
    lanes = state["live"]["live"]["lanes"]["text"]
    lanes |= {lane: [0, int(place * turns)] for lane in lanes}
    there = loader(**call, split="train", resume_state_dict=state)
    for _ in range(5):
        _, _, state = next(there)
    there.close()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begun, cpu = time.perf_counter(), time.process_time()
    stream = loader(**call, split="train", resume_state_dict=state)
    made = time.perf_counter()
    next(stream)
    ended = time.perf_counter()
    found = {"seconds": ended - begun, "opening": made - begun, "cpu": time.process_time() - cpu}
    stream.close()
    return found


def num_row_groups(folder: Path) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_row_groups for path in train_files(folder))


def resume(corpus: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    folder = work / "large"
    folder.mkdir()
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = pa.concat_tables([pq.read_table(path) for path in train_files(corpus)] * 2)
    one = folder / "shard_00000.parquet"
    pq.write_table(whole, one, **AS_NANOCHAT)
    copies = int(args.resume * 1e9 / one.stat().st_size) + 1
    for number in range(1, copies + 1):  # the last is for validation
        shutil.copy(
            one if number < copies else sorted(corpus.iterdir())[-1], folder / f"shard_{number:05d}.parquet"
        )
    os.sync()
    places = {"start": 0.0, "10%": 0.1, "50%": 0.5, "90%": 0.9}
    rounds = [
        {name: measure("resume", folder, args, place) for name, place in places.items()} for _ in range(args.rounds)
    ]
    return {
        "gigabytes": sum(path.stat().st_size for path in train_files(folder)) / 1e9,
        "files": copies,
        "row_groups": num_row_groups(folder),
        "rounds": args.rounds,
        "rows": args.rows,
        "target": SECONDS,
        **{
            what: {name: median(one[name][what] for one in rounds) for name in places}
            for what in ("seconds", "opening", "cpu")
        },
    }


MEASURES: dict[str, Callable[[Path, str, int, float], dict[str, float]]] = {
    BARE: bare,
    OWN_THREADS: bare,
    "tokenmill": plain,
    "tokenmill flat": lambda folder, path, rows, _: ours("flat", opened(path), folder, rows, math.inf),
    "tokenmill best fit": lambda folder, path, rows, _: ours("best fit", opened(path), folder, rows, math.inf),
    "tokenmill best fit with tiktoken": lambda folder, path, rows, limit: ours(
        "best fit", Tiktoken(path), folder, rows, limit
    ),
    "nanochat flat": nanochat_flat,
    "nanochat best fit": lambda folder, path, rows, limit: nanochat_best_fit(Tiktoken(path), folder, rows, limit),
    "nanochat best fit with fastokens": lambda folder, path, rows, limit: nanochat_best_fit(
        SameEngine(path), folder, rows, limit
    ),
    "datasets": hugging_face,
}
RESUME = {"resume": resumed}
PAIRS = {
    ("tokenmill", BARE): SHARE,
    ("tokenmill flat", BARE): None,
    ("tokenmill", "datasets"): TIMES,
    ("tokenmill flat", "nanochat flat"): TIMES,
    ("tokenmill best fit", "nanochat best fit"): TIMES,
    ("tokenmill best fit", "nanochat best fit with fastokens"): None,
    ("tokenmill best fit with tiktoken", "nanochat best fit"): None,
}
"""Numerator, denominator and target of each ratio."""


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['text_megabytes']} MB of text, rows of {SEQ_LEN:,} tokens, two cores, {result['rounds']} rounds",
        f"{'':34} {'tokens/s':>12} {'of a CPU-second':>16} {'selection':>10}",
    ]
    for name, rate in result["rates"].items():
        selection = result["selection"].get(name)
        shown = "" if selection is None else f"{selection:10.1%}"
        lines.append(f"{name:34} {rate:12,.0f} {result['cpu_rates'][name]:16,.0f} {shown}")
    for name, (wall, cpu) in result["ratios"].items():
        target = result["targets"].get(name)
        verdict = "" if target is None else f", target {target}: {'met' if median(wall) >= target else 'MISSED'}"
        rounds = ", ".join(f"{value:.2f}" for value in wall)
        lines.append(f"{name}: {median(wall):.2f}, of CPU {median(cpu):.2f}{verdict}; rounds {rounds}")
    best = result["selection"].get("tokenmill best fit")
    if best is not None:
        lines.append(f"best fit of all CPU time: {best:.1%}, target {SELECTION:.0%}: {said(best < SELECTION)}")
    return "\n".join(lines)


def resume_table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['gigabytes']:.1f} GB of Parquet, {result['files']} files, {result['row_groups']:,} row groups, "
        f"batches of {result['rows']} rows, median of {result['rounds']}",
        f"{'':8} {'seconds':>10} {'of these opening':>17} {'CPU':>8}",
    ]
    for name, seconds in result["seconds"].items():
        lines.append(f"{name:8} {seconds:10.2f} {result['opening'][name]:17.2f} {result['cpu'][name]:8.2f}")
    worst = max(result["seconds"].values())
    lines.append(f"to the first batch: {worst:.2f} s at most, target {SECONDS}: {said(worst < SECONDS)}")
    return "\n".join(lines)


def said(met: bool) -> str:
    return "met" if met else "MISSED"


if __name__ == "__main__":
    main()
