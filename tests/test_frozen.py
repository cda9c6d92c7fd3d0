"""What a run delivers and what a store holds stay as they are, to the byte.

`golden/frozen.json` has fingerprints, states, and digests of every array of every batch and of the files of stores.
They are drawn through the documented doors alone, so that this file need not change when modules move. Another
digest is a change for every run that somebody has under way: make it on purpose, say so in the changelog, and write
the file anew with `python tests/test_frozen.py`.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import random
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tokenmill.demo import TOKENIZER_DIR
from tokenmill.live import LiveLoader, LiveOptions, open_live
from tokenmill.loader import LoaderOptions, batch_digest, row_digests

GOLDEN = Path(__file__).parent / "golden" / "frozen.json"

ARRAYS = (
    "input_ids",
    "labels",
    "position_ids",
    "doc_ids",
    "loss_mask",
    "source",
    "cu_seqlens",
    "max_seqlen",
    "num_loss_tokens",
)
OF_MIXED = ARRAYS[:-1]  # of live text nobody knows the labels of the whole step
OF_LIVE = tuple(name for name in OF_MIXED if name != "source")
OF_PAIRS = ("chosen", "rejected", "chosen_mask", "rejected_mask", "chosen_len", "rejected_len", "source")
OF_GROUPS = ("prompts", "prompt_len", "responses", "masks", "response_len", "rewards", "group_size", "source")

# ---------------------------------------------------------------------------------------------------------- inputs

WORDS = (
    *("mill", "grain", "stone", "Mühle", "粉", "wheel,", '"flour"', "<|eos|>", "12", "🌾", "a"),
    "def f(x):\n\treturn x",
)


def some_texts(seed: int, count: int, most_words: int, long: int = 0) -> list[str]:
    """Make texts of 0 to so many words, the first `long` of them ten times as long; `random()` never changes."""
    draw = random.Random(seed).random
    made = []
    for number in range(count):
        words = int(draw() * (most_words + 1)) * (10 if number < long else 1)
        made.append(" ".join(WORDS[int(draw() * len(WORDS))] for _ in range(words)))
    order = sorted(range(count), key=lambda _: draw())
    return [made[number] for number in order]


def lines_of(records: list[Any]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def of_texts(texts: list[str]) -> str:
    return lines_of([{"text": text} for text in texts])


def write_inputs(folder: Path) -> None:
    """Write texts and records of all kinds."""
    write_texts(folder)
    write_tables(folder)
    write_records(folder)
    (folder / "aside.txt").write_text("4\n# bad\n11\n40\n")
    tokens = folder / "tokens"
    for seed, name in enumerate(("web", "code")):
        (tokens / name).mkdir(parents=True)
        draw = random.Random(seed).random
        for part in range(2):
            ids = np.array([1 + int(draw() * 50_000) for _ in range(2_000)], dtype="<u2")
            ids[36::37] = 0
            np.save(tokens / name / f"part{part}.npy", ids)
            (tokens / f"{name}{part}.bin").write_bytes(ids.tobytes())


def write_texts(folder: Path) -> None:
    (folder / "parts").mkdir()
    web = some_texts(1, 90, 12, long=4)
    for name, texts in (("part1", web[:40]), ("part2", web[40:70]), ("part10", web[70:])):
        (folder / "parts" / f"{name}.jsonl").write_text(of_texts(texts), encoding="utf-8")
    (folder / "books.jsonl").write_text(of_texts(some_texts(2, 45, 20, long=2)), encoding="utf-8")
    (folder / "more.jsonl").write_text(of_texts(some_texts(3, 12, 9)), encoding="utf-8")
    (folder / "short.jsonl").write_text(of_texts([text[:20] for text in some_texts(4, 70, 5)]), encoding="utf-8")
    again = some_texts(5, 50, 8)
    tagged = [{"text": text, "meta": {"site": f"site-{n % 3}"}} for n, text in enumerate([*again, *again[10:30]])]
    (folder / "again.jsonl").write_text(lines_of(tagged), encoding="utf-8")
    bad = of_texts(again[:9]) + '{"text": "no end\n{"other": 1}\n' + of_texts(again[9:20])
    (folder / "bad.jsonl").write_text(bad, encoding="utf-8")
    (folder / "live").mkdir()
    for number in range(3):
        texts = some_texts(20 + number, 40, 11, long=1)
        (folder / "live" / f"live{number}.jsonl").write_text(of_texts(texts), encoding="utf-8")
        # Neither compressed nor with a dictionary, so that sizes depend on the texts alone.
        pq.write_table(
            pa.table({"text": texts}),
            folder / "live" / f"live{number}.parquet",
            row_group_size=7,
            compression="none",
            use_dictionary=False,
        )


def write_tables(folder: Path) -> None:
    """Write the same kind of texts in every other format."""
    texts = some_texts(6, 40, 9, long=1)
    rows = [{"meta": {"body": text, "n": n}} for n, text in enumerate(texts)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "table.parquet", row_group_size=9)
    with pa.ipc.new_file(folder / "table.arrow", pa.schema({"text": pa.string()})) as writer:
        writer.write_table(pa.table({"text": texts}), max_chunksize=11)
    for name, delimiter in (("csv", ","), ("tsv", "\t")):
        with (folder / f"table.{name}").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, delimiter=delimiter, lineterminator="\n")
            table.writerows([("n", "text"), *((n, text.replace("\t", " ")) for n, text in enumerate(texts))])
    (folder / "table.json").write_text(json.dumps([{"text": text} for text in texts]), encoding="utf-8")
    (folder / "table.jsonl.gz").write_bytes(gzip.compress(of_texts(texts).encode(), mtime=0))
    (folder / "notes" / "deep").mkdir(parents=True)
    for number in range(6):
        place = folder / "notes" / ("deep" if number % 2 else "") / f"note{number}.txt"
        place.write_text("\n\n".join(texts[number * 5 : number * 5 + 5]), encoding="utf-8")
    with tarfile.open(folder / "pages.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, text in enumerate(texts[:15]):
            member = tarfile.TarInfo(f"{number:03}.txt")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))


def write_records(folder: Path) -> None:
    """Write conversations, instructions, pairs and groups."""
    said = [text or "yes" for text in some_texts(7, 240, 6)]
    chats = []
    for number in range(40):
        turns = [
            {"role": "user" if turn % 2 == 0 else "assistant", "content": said[(number * 5 + turn) % 240]}
            for turn in range(2 + 2 * (number % 3))
        ]
        chats.append(
            {"messages": [*([{"role": "system", "content": "Be brief."}] if number % 4 == 0 else []), *turns]}
        )
    (folder / "chats.jsonl").write_text(lines_of(chats), encoding="utf-8")
    told = [
        {"prompt": said[n], "response": said[n + 1]}
        if n % 3
        else {"instruction": said[n], "input": said[n + 2], "output": said[n + 1]}
        for n in range(50)
    ]
    (folder / "told.jsonl").write_text(lines_of(told), encoding="utf-8")
    pairs = [{"prompt": said[n], "chosen": said[n + 60], "rejected": said[n + 120]} for n in range(50)]
    (folder / "pairs.jsonl").write_text(lines_of(pairs), encoding="utf-8")
    groups = [
        {
            "prompt": said[n],
            "responses": said[n + 70 : n + 71 + n % 4],
            "rewards": [(k * 3 + n) % 5 / 4 for k in range(1 + n % 4)],
        }
        for n in range(45)
    ]
    (folder / "groups.jsonl").write_text(lines_of(groups), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- stores

CUT = {"chunk_bytes": 1_500, "max_tokens_per_shard": 1_200}
PICKED = {"min_chars": 5, "max_chars": 200, "deduplicate": True, "val_fraction": 0.2, "chunk_bytes": 900}

STORES: dict[str, dict[str, Any]] = {
    "web": {"inputs": ["parts"], "options": CUT},
    "web-two-workers": {"inputs": ["parts"], "options": CUT, "workers": 2},
    "web-h5": {"inputs": ["parts"], "options": {**CUT, "storage_format": "h5"}},
    "books": {"inputs": ["books.jsonl"]},
    "short": {"inputs": ["short.jsonl"]},
    "added": {"inputs": ["books.jsonl"], "then": ["more.jsonl"]},
    "bare": {"inputs": ["books.jsonl"], "options": {"add_bos": False, "add_eos": False}},
    "control": {"inputs": ["books.jsonl"], "options": {"control_strings": "encode"}},
    "picked": {"inputs": ["again.jsonl"], "options": PICKED},
    "picked-two-workers": {"inputs": ["again.jsonl"], "options": PICKED, "workers": 2},
    "domains": {"inputs": ["again.jsonl"], "options": {"domain_key": "meta.site"}},
    "first": {"inputs": ["again.jsonl"], "options": {"max_items": 20, "max_seq_len": 30}},
    "skipped": {"inputs": ["bad.jsonl"], "options": {"on_error": "skip"}},
    "parquet": {"inputs": ["table.parquet"], "options": {"text_field": "meta.body"}},
    "arrow": {"inputs": ["table.arrow"]},
    "csv": {"inputs": ["table.csv"]},
    "tsv": {"inputs": ["table.tsv"]},
    "json": {"inputs": ["table.json"]},
    "gz": {"inputs": ["table.jsonl.gz"]},
    "txt": {"inputs": ["notes"]},
    "txt-lines": {"inputs": ["notes"], "options": {"text_unit": "line"}},
    "tar": {"inputs": ["pages.tar"]},
    "demo": {"inputs": ["books.jsonl"], "tokenizer": str(TOKENIZER_DIR)},
    "chat": {"inputs": ["chats.jsonl"], "recipe": "chat", "options": {"chat_template": "chatml"}},
    "chat-h5": {
        "inputs": ["chats.jsonl"],
        "recipe": "chat",
        "options": {"chat_template": "chatml", "storage_format": "h5", "max_tokens_per_shard": 2_000},
    },
    "chat-demo": {
        "inputs": ["chats.jsonl"],
        "recipe": "chat",
        "tokenizer": str(TOKENIZER_DIR),
        "options": {"chat_template": "chatml"},
    },
    "told": {"inputs": ["told.jsonl"], "recipe": "instruction"},
    "dpo": {"inputs": ["pairs.jsonl"], "recipe": "dpo", "options": {"max_tokens_per_shard": 3_000}},
    "dpo-h5": {"inputs": ["pairs.jsonl"], "recipe": "dpo", "options": {"storage_format": "h5"}},
    "grpo": {"inputs": ["groups.jsonl"], "recipe": "grpo", "workers": 2, "options": {"chunk_bytes": 2_000}},
}
IMPORTED = {"imported": "tokens/web"}

# Files of these kinds have other bytes with another version of pyarrow or zlib, and so has what counts them; the
# demo tokenizer lies where tokenmill is installed. Of these stores JSON files are compared by what they say,
# without what is left out; those of all others, which have neither paths nor times nor versions, to the byte.
LOOSE = ("parquet", "arrow", "gz", "demo", "chat-demo")
LEFT_OUT = (
    "checksum",  # covers all of what follows
    "bytes",  # of an input file, or its digest: see above. Those of shards are seen in the shards themselves
    "digest",
    "engine",  # depends on which tokenizer library is installed; the ids do not
    "scans",  # named by digests of the input
)


def prepare_store(folder: Path, name: str) -> None:
    told = STORES[name]
    for inputs in (told["inputs"], [*told["inputs"], *told.get("then", [])])[: 2 if "then" in told else 1]:
        tm.prepare(
            [folder / each for each in inputs],
            out=folder / name,
            tokenizer=told.get("tokenizer", "bytes"),
            recipe=told.get("recipe", "text"),
            workers=told.get("workers", 1),
            progress=False,
            options=tm.PrepareOptions(keep_empty=True, **told.get("options", {})),
        )


def plain(value: Any, folder: Path) -> Any:
    """Return JSON without what is left out, and without where things lie."""
    if isinstance(value, dict):
        return {key: plain(each, folder) for key, each in value.items() if key not in LEFT_OUT}
    if isinstance(value, list):
        return [plain(each, folder) for each in value]
    if isinstance(value, str):
        return value.replace(str(TOKENIZER_DIR), "<demo>").replace(str(folder), "<folder>")
    return value


def files_of(folder: Path, name: str) -> dict[str, str]:
    """Return the digest of every file of a store by its path, before any run has written row indexes into it."""
    found = {}
    for file in sorted((folder / name).rglob("*")):
        if not file.is_file() or ".tokenizer" in file.parts:  # a copy of what was given, beside the store
            continue
        content = file.read_bytes()
        if name in LOOSE and "scans" in file.parts:
            continue
        if name in LOOSE and file.suffix == ".json":
            content = json.dumps(plain(json.loads(content), folder)).encode()
        found[file.relative_to(folder / name).as_posix()] = hashlib.sha256(content).hexdigest()[:32]
    return found


def make_all(folder: Path) -> dict[str, dict[str, str]]:
    """Write all inputs and stores below a folder; return the files of every store."""
    write_inputs(folder)
    for name in STORES:
        prepare_store(folder, name)
    for name, path in IMPORTED.items():
        tm.import_store(folder / path, out=folder / name, max_tokens_per_shard=1_500)
    return {name: files_of(folder, name) for name in (*STORES, *IMPORTED)}


# ------------------------------------------------------------------------------------------------------------ runs


def over(*sources: str, run: str = "", rest: str = "", weights: str = "", **more: str) -> str:
    """Write a config over stores; `more` says what stands in the table of a source."""
    head = f"[run]\nsteps = 60\nglobal_batch_size = 8\n{run}\n"
    if "seq_len" not in run:
        head += "seq_len = 32\n"
    if "seed" not in run:
        head += "seed = 7\n"
    if len(sources) > 1 and not weights and "weights" not in run:
        weights = ", ".join(f"{name} = {0.6 if n == 0 else 0.4}" for n, name in enumerate(sources))
    if weights:
        head += f"weights = {{ {weights} }}\n"
    for name in sources:
        head += f'[[sources]]\nname = "{name}"\n' + more.get(name, f'store = "{name}"') + "\n"
    return head + rest


def two(run: str = "", rest: str = "", **more: str) -> str:
    return over("web", "books", run=run, rest=rest, **more)


def stages(later: str) -> str:
    return '[[stages]]\nname = "one"\nstart_step = 0\n[[stages]]\nname = "two"\nstart_step = 17\n' + later


MOSTLY_BOOKS = "weights = { web = 0.2, books = 0.8 }"
LIVE = 'documents = ["live/*.jsonl"]\ntokenizer = "bytes"\nlive = true\nwindow_bytes = 700\nkeep_empty = true'

RUNS: dict[str, str] = {
    "best-fit": two(),
    "best-fit-forbid": over("short", run='on_long = "stop"'),
    "best-fit-truncate-start": two('on_long = "truncate_start"'),
    "best-fit-truncate-end": two('on_long = "truncate_end"'),
    "bos-best-fit-return": two('packing = "bos_best_fit"'),
    "bos-best-fit-discard": two('packing = "bos_best_fit"\ncrop = "discard"'),
    "concat": two('packing = "concat"'),
    "concat-across": two('packing = "concat"\ncross_document_labels = true'),
    "concat-positions-of-rows": two('packing = "concat"\npositions = "row"'),
    "padded": over("short", run='packing = "padded"'),
    "padded-truncate-start": two('packing = "padded"\non_long = "truncate_start"'),
    "padded-truncate-end": two('packing = "padded"\non_long = "truncate_end"'),
    "later-length-unseen": two(rest=stages("seq_len = 80\n")),
    "later-length-restart": two(rest=stages('seq_len = 80\non_change = "restart"\n')),
    "later-length-concat": two('packing = "concat"', stages("seq_len = 20\nglobal_batch_size = 16\n")),
    "later-length-bos": two('packing = "bos_best_fit"', stages("seq_len = 50\n")),
    "later-packing-unseen": two(rest=stages('packing = "concat"\n')),
    "later-packing-restart": two('packing = "concat"', stages('packing = "bos_best_fit"\non_change = "restart"\n')),
    "later-seed-and-shuffle": two(rest=stages('seed = 99\nshuffle = "none"\nlr_scale = 0.5\n')),
    "ramp-linear": two(rest=stages('weights = { web = 0.1, books = 0.9 }\nramp = "linear"\nramp_steps = 15\n')),
    "ramp-cosine": two(rest=stages('weights = { web = 0.1, books = 0.9 }\nramp = "cosine"\nramp_steps = 15\n')),
    "ramp-of-the-first-stage": two(
        rest='[[stages]]\nname = "one"\nstart_step = 0\nramp = "linear"\nramp_steps = 33\n'
        "ramp_from = { books = 1 }\n"
    ),
    "skip": two(rest='[[skip]]\nsteps = "5:9"\nreason = "spike"\n[[skip]]\nsteps = "30:31"\n'),
    "quarantine-documents": two(
        rest='[[quarantine]]\nsource = "web"\nfrom_step = 11\ndocuments = [0, 3, 17, 18, 60]\n'
    ),
    "quarantine-file": two(rest='[[quarantine]]\nsource = "books"\nfrom_step = 20\nfile = "aside.txt"\n'),
    "quarantine-source": two(rest='[[quarantine]]\nsource = "books"\nfrom_step = 11\n'),
    "quarantine-and-length": two(
        'packing = "concat"',
        stages("seq_len = 50\n") + '[[quarantine]]\nsource = "books"\nfrom_step = 25\ndocuments = [1, 2, 30]\n',
    ),
    "shuffle-none": two('shuffle = "none"'),
    "weigh-by-tokens": two('packing = "padded"\non_long = "truncate_end"\nweigh_by = "tokens"'),
    "temperature": two("temperature = 3.0"),
    "exhausted-stop": two(MOSTLY_BOOKS, books='store = "books"\non_exhausted = "stop"'),
    "epochs-then-stop": two(MOSTLY_BOOKS, books='store = "books"\nmax_epochs = 2\non_exhausted = "stop"'),
    "max-epochs": two(MOSTLY_BOOKS, books='store = "books"\nmax_epochs = 9'),
    "other-seed": two("seed = 12345"),
    "h5": over("web-h5", "books"),
    "demo-tokenizer": over("demo", run="seq_len = 24"),
    "eager-documents": over("books", books='documents = ["books.jsonl"]\ntokenizer = "bytes"\nkeep_empty = true'),
    "chat": over("chat", run="seq_len = 96"),
    "chat-demo": over("chat-demo", run='seq_len = 128\npacking = "padded"\non_long = "truncate_end"'),
    "told": over("told", run="seq_len = 64"),
    "told-bos": over("told", run='seq_len = 64\npacking = "bos_best_fit"'),
    "chat-told-web": over(
        "chat-h5", "told", "web", run='seq_len = 48\npacking = "concat"', weights="chat-h5 = 2, told = 1, web = 1"
    ),
    "dpo": over("dpo", run='seq_len = 70\non_long = "truncate_end"'),
    "dpo-mixed": over(
        "dpo", "dpo-h5", run='seq_len = 60\non_long = "truncate_start"', rest=stages("seq_len = 40\n")
    ),
    "grpo": over("grpo", run='seq_len = 70\non_long = "truncate_end"'),
    "npy": over("tokens", tokens='store = "tokens/web/*.npy"\neos_id = 0'),
    "raw-bin": over("tokens", tokens='store = "tokens/*.bin"\ndtype = "uint16"\nvocab_size = 50257\neos_id = 0'),
    "imported": over("imported", run='packing = "concat"'),
    "mixed": over("talk", "books", talk=LIVE, rest=stages("seq_len = 50\nweights = { talk = 0.4, books = 0.6 }\n")),
    "mixed-lanes": over("talk", "books", talk=LIVE + "\nlanes = 4", run='packing = "concat"'),
    "mixed-all-live": over("talk", talk=LIVE, run='packing = "bos_best_fit"\nshuffle = "none"'),
    "kempnerforge": """
[model]
vocab_size = 50257
[train]
batch_size = 4
grad_accum_steps = 2
seq_len = 32
max_steps = 30
[data]
file_pattern = "*.npy"
mix_temperature = 1.5
[[data.datasets]]
name = "web"
path = "tokens/web"
weight = 0.75
[[data.datasets]]
name = "code"
path = "tokens/code"
weight = 0.25
[[data.phases]]
start_step = 20
dataset_weights = { web = 0.25, code = 0.75 }
lr_scale = 0.5
""",
    "kempnerforge-packed": """
[train]
batch_size = 8
seq_len = 32
max_steps = 30
seed = 3
[data]
dataset_path = "tokens/code"
pack_sequences = true
[tokenmill]
eos_id = 0
""",
    "torchtitan": """
[training]
steps = 40
local_batch_size = 8
[[training.data_stages]]
name = "pretrain"
start_step = 0
end_step = 25
dataset_type = "nanoset"
dataset_folders = ["web", "books"]
dataset_weights = [0.7, 0.3]
seq_len = 32
[[training.data_stages]]
name = "annealing"
start_step = 25
dataset_type = "nanoset"
dataset_folders = ["web", "books"]
dataset_weights = [0.4, 0.6]
dataset_random_seed = 5678
seq_len = 64
""",
}
OF_RUN = dict.fromkeys(("dpo", "dpo-mixed"), OF_PAIRS) | {"grpo": OF_GROUPS}
IN_TWO_RANKS = (
    *("best-fit", "concat", "bos-best-fit-return", "later-length-unseen", "ramp-linear", "exhausted-stop"),
    *("quarantine-documents", "chat", "grpo", "mixed"),
)

PLAIN = {"seq_len": 32, "seed": 3, "window_bytes": 700, "keep_empty": True}
LIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "jsonl-8-lanes": ("*.jsonl", {**PLAIN, "lanes": 8}),
    "jsonl-2-lanes": ("*.jsonl", {**PLAIN, "lanes": 2}),
    "jsonl-unshuffled": ("*.jsonl", {**PLAIN, "lanes": 4, "shuffle": False}),
    "parquet-8-lanes": ("*.parquet", {**PLAIN, "lanes": 8}),
    "parquet-2-lanes": ("*.parquet", {**PLAIN, "lanes": 2, "packing": "concat"}),
    "parquet-unshuffled": ("*.parquet", {**PLAIN, "shuffle": False, "packing": "bos_best_fit"}),
    "jsonl-padded": ("*.jsonl", {**PLAIN, "packing": "padded", "split": "truncate_end"}),
    "jsonl-discard": ("*.jsonl", {**PLAIN, "packing": "bos_best_fit", "crop": "discard"}),
}


class Drawn:
    """Digests of what batches hold: of each array over all of them, and of the rows of each."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self.batches: list[str] = []

    def add(self, batch: dict[str, Any]) -> None:
        for name, array in batch.items():
            found = np.asarray(array)
            digest = self.arrays.setdefault(name, hashlib.sha256())
            digest.update(f"{found.dtype.str}{found.shape}".encode())
            digest.update(np.ascontiguousarray(found).tobytes())
        self.batches.append(batch_digest(row_digests(batch)))

    def told(self) -> dict[str, Any]:
        arrays = {name: digest.hexdigest()[:32] for name, digest in self.arrays.items()}
        return {"arrays": arrays, "batches": " ".join(self.batches)}


def open_run(folder: Path, name: str) -> tm.Run:
    file = folder / f"run-{name}.toml"
    file.write_text(RUNS[name])
    return tm.Run.from_toml(file)


def is_live(name: str) -> bool:
    return "live = true" in RUNS[name]


def arrays_of(name: str) -> tuple[str, ...]:
    return OF_RUN.get(name, OF_MIXED if is_live(name) else ARRAYS)


def draw_run(folder: Path, name: str) -> dict[str, Any]:
    """Draw a whole run by one rank, in batches of half a step; the state is that in the middle of a step."""
    run = open_run(folder, name)
    plan = run.plan()
    loader = run.loader(micro_batch=4, arrays=arrays_of(name))
    drawn, state = Drawn(), None
    for number, batch in enumerate(loader):
        drawn.add(batch)
        if number == 40:
            state = loader.state_dict()
    found = {"fingerprint": plan.fingerprint, "fingerprint at 20": plan.fingerprint_at(20), **drawn.told()}
    if is_live(name):
        loader.close()
        return found
    return found | {"state": state}


def draw_live(folder: Path, name: str) -> dict[str, Any]:
    files, options = LIVES[name]
    source = open_live([folder / "live" / files], tokenizer="bytes", options=LiveOptions(**options))
    loader = LiveLoader(source, steps=60, global_batch_size=8, micro_batch=4, options=LoaderOptions(arrays=OF_LIVE))
    drawn = Drawn()
    for batch in loader:
        drawn.add(batch)
    loader.close()
    return drawn.told()


def in_two_ranks(folder: Path, name: str) -> Iterator[str]:
    """Give the digests of the batches of two ranks, which have half of every step each, in turn."""
    run = open_run(folder, name)
    loaders = [run.loader(rank=rank, world_size=2, micro_batch=4, arrays=arrays_of(name)) for rank in range(2)]
    for both in zip(*loaders, strict=True):
        yield from (batch_digest(row_digests(batch)) for batch in both)
    for loader in loaders if is_live(name) else []:
        loader.close()


# ----------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="session")
def frozen() -> dict[str, dict[str, Any]]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("frozen")


@pytest.fixture(scope="session")
def stores(folder) -> dict[str, dict[str, str]]:
    return make_all(folder)


def test_every_case_that_is_frozen_is_compared(frozen):
    assert {part: set(cases) for part, cases in frozen.items()} == {
        "stores": {*STORES, *IMPORTED},
        "runs": set(RUNS),
        "live": set(LIVES),
    }


@pytest.mark.parametrize("name", [*STORES, *IMPORTED])
def test_the_files_of_a_store_are_as_they_were(frozen, stores, name):
    assert stores[name] == frozen["stores"][name]


@pytest.mark.parametrize("name", ["web", "picked"])
def test_the_files_of_a_store_do_not_depend_on_the_workers(stores, name):
    assert stores[name] == stores[f"{name}-two-workers"]


@pytest.mark.usefixtures("stores")
@pytest.mark.parametrize("name", RUNS)
def test_batches_fingerprints_and_states_of_a_run_are_as_they_were(frozen, folder, name):
    assert draw_run(folder, name) == frozen["runs"][name]


@pytest.mark.usefixtures("stores")
@pytest.mark.parametrize("name", IN_TWO_RANKS)
def test_two_ranks_deliver_the_rows_that_one_delivered(frozen, folder, name):
    assert " ".join(in_two_ranks(folder, name)) == frozen["runs"][name]["batches"]


@pytest.mark.usefixtures("stores")
@pytest.mark.parametrize("name", LIVES)
def test_batches_of_live_text_are_as_they_were(frozen, folder, name):
    assert draw_live(folder, name) == frozen["live"][name]


def freeze() -> None:
    """Write down how everything is now."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        found = {
            "stores": make_all(folder),
            "runs": {name: draw_run(folder, name) for name in RUNS},
            "live": {name: draw_live(folder, name) for name in LIVES},
        }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    freeze()
