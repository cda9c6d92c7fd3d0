"""Attack the readers of foreign files with random damage, and count the outcomes.

    python tools/fuzz.py [--seconds N] [--seed N] [--target NAME ...] [--json]
    python tools/fuzz.py --replay tests/fuzz/*.json
    make fuzz

Targets: stores, forged row indexes, manifests, third-party token files, inputs of every format, tokenizers, chat
templates, configs, states, and random runs that are resumed. Every case must end with the right tokens or with a
tokenmill error. Failures are a crash, a hang, an access out of bounds (kernels are compiled with bounds checks),
any other exception, memory above a limit, or a wrong token. Cases run in a separate process, so a crash is
counted too. Each case is named by target and number, and `--target NAME --case NUMBER` runs it again.

All randomness of a case comes from a list of numbers. A finding is reduced by removing numbers and replacing
others by 0, as long as the outcome stays the same. The result is stored in tests/fuzz, and every run and the
tests replay it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

MEMORY_BYTES = 4 << 30
CASE_SECONDS = 60
"""Limit of CPU time, to separate an endless case from a busy machine; the limit of the clock is ten times this."""
ROUND_CASES = 40
"""Cases of one target that a process runs before the next one has its turn."""
KEPT = Path(__file__).parents[1] / "tests" / "fuzz"
MAX_NUMBERS = 1000
"""Random numbers of a case; all further ones are 0."""
SHRINK_ROUNDS = 40
"""Processes that may be spent on making a finding smaller."""
ODD = (None, True, 0, -1, 1, 2**31, 2**63, 2**70, 1e308, -0.5, "", "x", "../..", "\x1b[31m", [], {}, [1], {"a": 1})
RUN = """
[run]
steps = {steps}
global_batch_size = {batch}
seq_len = {seq_len}
packing = "{packing}"
{more}
seed = {seed}
shuffle = "{shuffle}"
[[sources]]
name = "web"
store = "web"
"""
TWO_SOURCES = """
[[sources]]
name = "chat"
{chat}
[[stages]]
name = "first"
start_step = 0
weights = {{ web = {share}, chat = {rest} }}
[[stages]]
name = "second"
start_step = {change}
seq_len = {later_len}
weights = {{ web = {rest}, chat = {share} }}
"""
EVERYTHING = """
[run]
steps = 8
global_batch_size = 4
seq_len = 24
seed = 1
[[sources]]
name = "web"
store = "web"
[[sources]]
name = "code"
documents = ["web.jsonl"]
tokenizer = "bytes"
live = true
lanes = 4
on_error = "skip"
[[stages]]
name = "first"
start_step = 0
weights = { web = 1 }
[[stages]]
name = "second"
start_step = 3
weights = { web = 0.5, code = 0.5 }
ramp = "cosine"
ramp_steps = 2
[[skip]]
steps = "4:5"
reason = "spike"
[[quarantine]]
source = "web"
from_step = 2
documents = [3, 17]
reason = "licence"
[[evals]]
name = "held-out"
source = "web"
documents = "0:10"
every = 2
"""
"""Every kind of table that a config has."""
ALL_ARRAYS = ("input_ids", "labels", "position_ids", "doc_ids", "loss_mask", "cu_seqlens", "max_seqlen")


class Dice(random.Random):
    """Random choices from a list of 64-bit numbers; after its end all are 0, the first or smallest choice."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self._numbers = iter(numbers)

    def getrandbits(self, k: int) -> int:
        """Return a number of `k` bits."""
        value = 0
        for _ in range(0, k, 64):
            value = value << 64 | next(self._numbers, 0)
        return value >> -k % 64

    def random(self) -> float:
        """Return a number from 0 to 1, exclusive."""
        return self.getrandbits(53) / (1 << 53)


def dice_of(target: str, seed: int, case: int) -> list[int]:
    """Return the numbers of a case."""
    numbers = random.Random(f"{target} {seed} {case}")
    return [numbers.getrandbits(64) for _ in range(MAX_NUMBERS)]


def smaller(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield lists that are shorter, then lists with a 0 more; the ones that save most come first."""
    kept = list(numbers)
    for share in (1, 2, 4, 8) if kept else ():  # an eighth, a fourth, a half of them, ...
        yield kept[: len(kept) * share // 16]
    for size in (16, 8, 4, 2, 1):
        for begin in range(0, len(kept) - size + 1, size):
            yield kept[:begin] + kept[begin + size :]
    for place, number in enumerate(kept):
        if number:
            yield [*kept[:place], 0, *kept[place + 1 :]]


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Return bytes that are cut, lengthened, or changed in some places."""
    kind = dice.randrange(8)
    if kind == 0:
        return data[: dice.randrange(len(data) + 1)]
    if kind == 1:
        return data + dice.randbytes(dice.randrange(1, 64))
    changed = bytearray(data)
    for _ in range(dice.randrange(1, 5)):
        if changed:
            at = dice.randrange(len(changed))
            if kind == 2:
                changed[at : at + 8] = dice.choice((0, 1, 2**31, 2**62, 2**64 - 1)).to_bytes(8, "little")
            else:
                changed[at] = dice.choice((0, 1, 127, 128, 255, changed[at] ^ 1 << dice.randrange(8)))
    return bytes(changed)


def mutated(value: object, dice: random.Random) -> object:
    """Return a JSON value with one of its parts replaced, renamed or left out."""
    value = json.loads(json.dumps(value))
    at, steps = value, dice.randrange(1, 6)
    for _ in range(steps):
        if not isinstance(at, dict | list) or not at:
            break
        key = dice.choice(list(at)) if isinstance(at, dict) else dice.randrange(len(at))
        inner = at[key]
        if not isinstance(inner, dict | list) or not inner or dice.random() < 0.3:
            way = dice.randrange(4)
            if way == 0 and isinstance(at, dict):
                at[f"{key}x"] = at.pop(key)
            elif way == 1:
                del at[key]
            else:
                at[key] = dice.choice(ODD)
            break
        at = inner
    return value


class Bench:
    """A corpus, a store and a run in a folder of their own, and the batches that are right."""

    def __init__(self, folder: Path) -> None:
        import numpy as np
        from tokenizers import Tokenizer

        import tokenmill as tm

        self.folder = folder
        dice = random.Random(0)
        words = ["mill", "grain", "Mühle", "зерно", "粉", "🌾", "water", "\n"]
        self.texts = [" ".join(dice.choices(words, k=dice.randrange(1, 40))) for _ in range(120)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in self.texts)
        (folder / "web.jsonl").write_text(lines)
        tm.prepare(folder / "web.jsonl", out=folder / "web", tokenizer="bytes", workers=1, progress=False)
        chats = [
            {"messages": [{"role": "user", "content": text[:40]}, {"role": "assistant", "content": text[-40:]}]}
            for text in self.texts
            if text.strip()
        ]
        (folder / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        demo = str(Path(tm.__file__).parent / "demo" / "tokenizer")
        options = tm.PrepareOptions(chat_template="chatml", on_error="skip")
        how = {"recipe": "chat", "workers": 1, "progress": False, "options": options}
        tm.prepare(folder / "chat.jsonl", out=folder / "chat", tokenizer=demo, **how)
        with_gaps = Tokenizer.from_file(f"{demo}/tokenizer.json")
        with_gaps.add_special_tokens(["<pre>", "<suf>", "<mid>"])
        with_gaps.save(str(folder / "with_gaps.json"))
        pairs = [
            {"prompt": text[:20], "chosen": text, "rejected": text[::-1], "id": text[:3]} for text in self.texts
        ]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        how |= {"recipe": "dpo", "options": tm.PrepareOptions(on_error="skip", keep=("id",))}
        tm.prepare(folder / "pairs.jsonl", out=folder / "pairs", tokenizer="bytes", **how)
        self.np, self.tm = np, tm
        self.write_run()
        self.batches = self.draw()
        self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        self.clean = folder.with_name("clean")
        shutil.copytree(folder, self.clean)

    def write_run(self, **values: object) -> None:
        """Write the config of a run."""
        known = {"steps": 6, "batch": 4, "seq_len": 24, "packing": "best_fit", "seed": 1, "shuffle": "full"}
        known["more"] = 'on_long = "truncate_start"' if values.get("packing") == "padded" else ""
        text = (RUN + TWO_SOURCES if "share" in values else RUN).format(**known | values)
        (self.folder / "run.toml").write_text(text)

    def draw(self, **options: object) -> list[dict[str, bytes]]:
        """Return all batches of the run."""
        loader = self.tm.Run.from_toml(self.folder / "run.toml").loader(micro_batch=4, threads=0, **options)
        return [{name: array.tobytes() for name, array in batch.items()} for batch in loader]

    def reset(self) -> None:
        """Put everything back."""
        shutil.rmtree(self.folder)
        shutil.copytree(self.clean, self.folder)


def attack_stores(bench: Bench, dice: random.Random) -> None:
    """Damage a file of a store, or of its row index, before or while it is read."""
    from tokenmill.packing import rows
    from tokenmill.store import verify

    rows.IN_MEMORY_DOCUMENTS = 0
    bench.reset()
    bench.draw()
    files = sorted(path for path in (bench.folder / "web").rglob("*") if path.is_file())
    file = dice.choice(files)
    loader = bench.tm.Run.from_toml(bench.folder / "run.toml").loader(micro_batch=4, threads=0)
    batches = iter(loader)
    next(batches)
    data = damaged(file.read_bytes(), dice)
    with file.open("r+b") as out:
        out.write(data)
        out.truncate(len(data))
    try:
        list(batches)
    finally:
        store = bench.tm.open_store(bench.folder / "web")
        store.fetch(0, store.num_tokens, "sequence")
        verify(bench.folder / "web")
        # What verify lets pass must be what was written.
        assert bench.draw() == bench.batches, "a wrong token"


def attack_indexes(bench: Bench, dice: random.Random) -> None:
    """Forge a row index, checksums and all, or damage offsets and masks under one, and draw all arrays."""
    from tokenmill.packing import rows

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.loader.test_hostile import forged

    rows.IN_MEMORY_DOCUMENTS = 0
    bench.reset()
    packing = dice.choice(("best_fit", "bos_best_fit", "concat", "padded"))
    bench.write_run(packing=packing, seed=dice.randrange(99))
    config = bench.folder / "run.toml"
    config.write_text(config.read_text().replace('"web"', '"chat"'))
    loader = bench.tm.Run.from_toml(config).loader(micro_batch=4, threads=0, arrays=ALL_ARRAYS)
    whole = [{name: array.tobytes() for name, array in batch.items()} for batch in loader]
    store = bench.folder / "chat"
    indexes = sorted((store / ".rows").glob("[!.]*.rows"))
    forge = bool(indexes) and dice.random() < 0.5
    file = dice.choice(indexes if forge else sorted(store.glob("*/*.bin")))
    data = file.read_bytes()
    changed = forged(data, bench.np.random.default_rng(dice.randrange(1 << 30))) if forge else damaged(data, dice)
    if forge:
        file.unlink()
        file.write_bytes(changed)
    else:
        with file.open("r+b") as out:
            out.write(changed)
            out.truncate(len(changed))
    try:
        run = bench.tm.Run.from_toml(config)
        again = run.loader(micro_batch=4, threads=0, arrays=ALL_ARRAYS)
        list(again)
        loader.seek(0)
        list(loader)
        run.plan().what(1)
        run.plan().when("chat", document=3)
        run.report()
    finally:
        file.write_bytes(data)
        if forge:
            file.unlink()
        fresh = bench.tm.Run.from_toml(config).loader(micro_batch=4, threads=0, arrays=ALL_ARRAYS)
        assert [{name: array.tobytes() for name, array in batch.items()} for batch in fresh] == whole, (
            "a wrong token"
        )


def attack_records(bench: Bench, dice: random.Random) -> None:
    """Damage a store of pairs while it is read, with the fields that it keeps of each."""
    bench.reset()
    config = bench.folder / "run.toml"
    sources = [{"name": "pairs", "store": "pairs"}]
    tables = {
        "run": {"steps": 6, "global_batch_size": 4, "seq_len": 32, "seed": 1, "on_long": "truncate_end"},
        "sources": sources,
    }
    run = bench.tm.Run.from_tables(tables, folder=config.parent)
    batches = iter(run.loader(micro_batch=4, threads=0, columns=("id",)))
    next(batches)
    file = dice.choice(sorted(path for path in (bench.folder / "pairs").rglob("*") if path.is_file()))
    before = file.read_bytes()
    data = damaged(before, dice)
    if len(data) < len(before):  # a mapped file that is truncated may end the process: see docs/promises.md
        list(batches)
        del run
        batches = iter(())
    with file.open("r+b") as out:
        out.write(data)
        out.truncate(len(data))
    list(batches)
    list(bench.tm.Run.from_tables(tables, folder=config.parent).loader(micro_batch=4, threads=0, columns=("id",)))


RECIPES = (
    {
        "preset": "text",
        "fim": {
            "rate": 0.5,
            "spm_rate": 0.5,
            "level": "character",
            "seed": 3,
            "tokens": {"prefix": "<pre>", "suffix": "<suf>", "middle": "<mid>"},
        },
    },
    {
        "preset": "chat",
        "chat_template": "chatml",
        "chat_template_kwargs": {},
        "train_turns": "last",
        "system": "Be brief",
        "mask": {"user": "mask", "assistant": "train"},
        "names": {"fields": {"messages": "messages"}, "roles": {"human": "user"}},
    },
    {
        "preset": "dpo",
        "output": {"storage_format": "bin", "dtypes": {"chosen": "uint32"}},
        "control_strings": "text",
    },
)


def attack_recipes(bench: Bench, dice: random.Random) -> None:
    """Change a value of a recipe, and prepare records for it."""
    with tempfile.TemporaryDirectory(dir=bench.folder.parent) as name:
        recipe = Path(name) / "recipe.json"
        number = dice.randrange(len(RECIPES))
        recipe.write_text(json.dumps(mutated(RECIPES[number], dice)))
        path = bench.clean / ("web.jsonl", "chat.jsonl", "pairs.jsonl")[number]
        how = {"recipe": str(recipe), "workers": 1, "progress": False}
        bench.tm.prepare(path, out=Path(name) / "out", tokenizer=str(bench.clean / "with_gaps.json"), **how)


def attack_foreign(bench: Bench, dice: random.Random) -> None:
    """Damage a token file of another project, and read it in place."""
    from tokenmill.store.foreign.export import EXPORTS

    form = dice.choice(sorted({*EXPORTS} - {"parquet"}))
    exported = bench.clean.with_name(form)
    if not exported.exists():  # once, as a process of its own proves each by the other project's reader
        bench.tm.export_store(bench.clean / "web", out=exported, format=form)
    with tempfile.TemporaryDirectory(dir=bench.folder.parent) as name:
        folder = Path(name) / "export"
        shutil.copytree(exported, folder)
        file = dice.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        file.write_bytes(damaged(file.read_bytes(), dice))
        options = {"vocab_size": 300, "eos_id": 256, "dtype": "uint16"} if dice.random() < 0.3 else {}
        store = bench.tm.open_store(folder, **options)
        store.fetch(0, min(store.num_tokens, 1 << 20), "sequence")


def attack_manifests(bench: Bench, dice: random.Random) -> None:
    """Change a value of a manifest, and make its checksum right."""
    import xxhash

    from tokenmill.fingerprint import canonical

    bench.reset()
    file = bench.folder / "web" / "manifest.json"
    body = json.loads(file.read_text())
    del body["checksum"]
    body = mutated(body, dice)
    if isinstance(body, dict):
        body["checksum"] = xxhash.xxh3_128_hexdigest(canonical(body))
    file.write_text(json.dumps(body))
    run = bench.tm.Run.from_toml(bench.folder / "run.toml")
    list(run.loader(micro_batch=4, threads=0))
    run.report()
    run.plan().what(0)


def inputs_of(bench: Bench, folder: Path, dice: random.Random) -> Path:
    """Write the texts in one of the formats."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard
    from pyarrow import feather

    texts = bench.texts[:40]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    kind = dice.choice(("jsonl", "jsonl.gz", "jsonl.zst", "json", "csv", "parquet", "arrow", "tar", "txt"))
    path = folder / f"input.{kind}"
    table = pa.table({"text": texts})
    if kind == "parquet":
        pq.write_table(table, path, compression=dice.choice(("none", "zstd", "snappy")))
    elif kind == "arrow":
        feather.write_feather(table, path, compression="uncompressed")
    elif kind == "tar":
        with tarfile.open(path, "w") as archive:
            for number, text in enumerate(texts):
                member = tarfile.TarInfo(f"{number}.txt")
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))
    else:
        data = {
            "jsonl": lines,
            "jsonl.gz": gzip.compress(lines),
            "jsonl.zst": zstandard.compress(lines),
            "json": json.dumps([{"text": text} for text in texts]).encode(),
            "csv": ("text\n" + "".join(f'"{text}"\n' for text in texts)).encode(),
            "txt": "\n".join(texts).encode(),
        }[kind]
        path.write_bytes(data)
    return path


def attack_inputs(bench: Bench, dice: random.Random) -> None:
    """Damage an input of any format, and prepare it."""
    with tempfile.TemporaryDirectory(dir=bench.folder.parent) as name:
        path = inputs_of(bench, Path(name), dice)
        path.write_bytes(damaged(path.read_bytes(), dice))
        options = bench.tm.PrepareOptions(on_error=dice.choice(("stop", "skip")), max_record_bytes=1 << 20)
        bench.tm.prepare(
            path, out=Path(name) / "out", tokenizer="bytes", workers=1, progress=False, options=options
        )


def attack_tokenizers(bench: Bench, dice: random.Random) -> None:
    """Change a value of a tokenizer.json or of a file next to it, then open and use it and its template."""
    from tokenmill.encode.chat.template import load_template

    demo = Path(bench.tm.__file__).parent / "demo" / "tokenizer"
    with tempfile.TemporaryDirectory(dir=bench.folder.parent) as name:
        folder = Path(name) / "tokenizer"
        shutil.copytree(demo, folder)
        config = folder / "tokenizer_config.json"
        named = [{"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}]
        roles = {"unk_token": {"content": "<unk>"}, "extra_special_tokens": ["<x>"], "added_tokens_decoder": {}}
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": named, **roles}))
        file = dice.choice(sorted(folder.iterdir()))
        if dice.random() < 0.8:
            file.write_text(json.dumps(mutated(json.loads(file.read_text()), dice)))
        else:
            file.write_bytes(damaged(file.read_bytes(), dice))
        tokenizer = bench.tm.open_tokenizer(str(folder), engine="tokenizers")
        tokenizer.encode(bench.texts[:3])
        load_template("tokenizer", tokenizer=str(folder))


TEMPLATE_PARTS = (
    *("{% for m in messages %}", "{{ m.content }}", "{% endfor %}", "{{ m.role }}", "{{ messages | tojson }}"),
    *("{% set x = x + x %}", "{% set y = y ~ y %}", "{% set n.a = namespace(p=n.a, v=y ~ 1) %}", "{{ f(0) }}"),
    *("{% if add_generation_prompt %}", "{% endif %}", "{{ messages[0].__class__ }}", "{{ 9 ** 9 ** 9 }}"),
    *("{% macro f(n) %}", "{{ f(n + 1) }}", "{% endmacro %}", "{{ '%9999999d' % 1 }}", "<|im_end|>"),
    *("{% set z %}", "{% endset %}", "{% filter upper %}", "{% endfilter %}", "{% generation %}"),
    *("{% endgeneration %}", "{% for i in range(9999) %}", "{% set n.a = [n.a, n.a] %}"),
)
VALUES = (
    "x",
    "y",
    "x * 99",
    "[y] * 99",
    "messages",
    "messages[0].content",
    "dict(a=y)",
    "range(99999)",
    "n",
    "12",
    "''",
)
FILTERS = (
    *("abs", "capitalize", "count", "default(x)", "dictsort", "first", "float", "groupby('role')", "int", "items"),
    *("join", "join(y)", "last", "length", "list", "lower", "map('upper')", "map('list')", "max", "min", "reverse"),
    *("replace('a', y)", "replace(old='a', new=y)", "round(-9999)", "safe", "select", "sort", "string", "sum"),
    *("sum(start=[])", "title", "tojson", "tojson(indent=9)", "trim", "unique", "upper", "selectattr('role')"),
)
METHODS = (
    "split('a')",
    "split()",
    "replace('a', y)",
    "join(x)",
    "join('abc')",
    "join(dict(a=1, b=y))",
    "count(x)",
    "copy()",
    "items()",
    "splitlines()",
    "[1:]",
)
OPERATIONS = ("+", "*", "~", "==", "in", "%", "<")
TESTS = ("lower", "upper", "odd", "divisibleby(3)", "eq(x)", "in(x)", "sequence", "mapping", "sameas(y)", "string")


def expression(dice: random.Random, depth: int) -> str:
    """Return a random expression of templates."""
    if not depth:
        return dice.choice(VALUES)
    inner = expression(dice, depth - 1)
    kind = dice.randrange(7)
    if kind == 6:
        return f"({inner}) is {dice.choice(TESTS)}"
    if kind % 3 == 0:
        return f"({inner}) | {dice.choice(FILTERS)}"
    if kind % 3 == 1:
        method = dice.choice(METHODS)
        return f"({inner}){'' if method.startswith('[') else '.'}{method}"
    return f"({inner}) {dice.choice(OPERATIONS)} ({expression(dice, depth - 1)})"


def attack_templates(bench: Bench, dice: random.Random) -> None:
    """Render a template of random parts and expressions in a worker process."""
    parts = dice.choices(TEMPLATE_PARTS, k=dice.randrange(1, 8))
    for _ in range(dice.randrange(1, 6)):
        written = f"{{{{ {expression(dice, dice.randrange(1, 5))} }}}}"
        if dice.random() < 0.3:
            written = f"{{% set {dice.choice('xy')} = {expression(dice, 2)} %}}"
        parts.insert(dice.randrange(len(parts) + 1), written)
    source = "{% set n = namespace(a='a') %}{% set x = range(9999) | list %}{% set y = 'ab' * 99999 %}" + "".join(
        parts
    )
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with tempfile.TemporaryDirectory(dir=bench.folder.parent) as name:
        case = json.dumps({"source": source, "messages": messages})
        command = [sys.executable, "-c", TEMPLATE_WORKER, str(Path(name) / "note")]
        done = subprocess.run(command, input=case, capture_output=True, text=True, check=False)
        is_limited = done.returncode == -signal.SIGPROF or "takes more than" in done.stderr
        assert done.returncode == 0 or is_limited, done.stderr[-2000:]


TEMPLATE_WORKER = """
import json, resource, sys
from contextlib import suppress
from pathlib import Path
from tokenmill.encode import Refusal
from tokenmill.encode.chat import limits
from tokenmill.encode.chat.render import render
from tokenmill.encode.chat.template import ChatTemplate
from tokenmill.errors import ConfigError
limits.MAX_SECONDS, limits.HARD_SECONDS = 1.0, 2.0
limits.enable(Path(sys.argv[1]))
case = json.load(sys.stdin)
template = ChatTemplate(source=case["source"], where="fuzz", special_tokens={"eos_token": "</s>"})
with suppress(Refusal, ConfigError), limits.limited("fuzz", "1"):
    render(template, case["messages"], kwargs={})
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 < 3 << 29
"""
"""Renders one template in a worker, because limits hold only there."""


def attack_configs(bench: Bench, dice: random.Random) -> None:
    """Change a value of a config."""
    import tomllib

    import tomli_w

    bench.reset()
    if dice.random() < 0.5:
        (bench.folder / "run.toml").write_text(EVERYTHING)
    tables = mutated(tomllib.loads((bench.folder / "run.toml").read_text()), dice)
    with io.BytesIO() as out:
        try:
            tomli_w.dump(tables, out)  # type: ignore[arg-type]
        except (TypeError, AttributeError):
            return
        (bench.folder / "run.toml").write_bytes(out.getvalue())
    run = bench.tm.Run.from_toml(bench.folder / "run.toml")
    run.plan()
    run.report()
    for evaluation in run.evals.values():
        next(iter(evaluation.loader()))


def attack_states(bench: Bench, dice: random.Random) -> None:
    """Change a value of a state; one that is taken must go on where it says."""
    bench.reset()
    loader = bench.tm.Run.from_toml(bench.folder / "run.toml").loader(micro_batch=4, threads=0)
    batches = iter(loader)
    for _ in range(dice.randrange(1, 5)):
        next(batches)
    state = mutated(loader.state_dict(), dice)
    fresh = bench.tm.Run.from_toml(bench.folder / "run.toml").loader(micro_batch=4, threads=0)
    fresh.load_state_dict(state)
    step = state["step"]  # type: ignore[index]
    rest = [{name: array.tobytes() for name, array in batch.items()} for batch in fresh]
    assert rest == bench.batches[step:], "a wrong token"


def attack_runs(bench: Bench, dice: random.Random) -> None:
    """Draw a random run straight, and in parts by other ranks, edited on the way; the batches must be the same."""
    bench.reset()
    batch = dice.choice((4, 8))
    steps = dice.randrange(4, 12)
    values = {
        "steps": steps,
        "batch": batch,
        "seq_len": dice.randrange(8, 64),
        "packing": dice.choice(("best_fit", "concat", "bos_best_fit", "padded")),
        "shuffle": dice.choice(("full", "window", "none")),
        "seed": dice.randrange(1 << 30),
    }
    if dice.random() < 0.7:
        share = dice.randrange(1, 99)
        values |= {"share": share / 100, "rest": (100 - share) / 100, "change": dice.randrange(1, steps)}
        values["later_len"] = dice.choice((values["seq_len"], dice.randrange(8, 64)))
        live = 'documents = ["web.jsonl"]\ntokenizer = "bytes"\nlive = true\nlanes = 4\nwindow_bytes = 2000'
        values["chat"] = live if dice.random() < 0.5 else 'store = "web2"'
        shutil.copytree(bench.folder / "web", bench.folder / "web2")
    bench.write_run(**values)
    run = edited = bench.tm.Run.from_toml(bench.folder / "run.toml")
    first = dice.randrange(steps)
    if dice.random() < 0.5:
        skip = f'[[skip]]\nsteps = "{first}:{dice.randrange(first, steps) + 1}"\n'
        (bench.folder / "edited.toml").write_text((bench.folder / "run.toml").read_text() + skip)
        edited = bench.tm.Run.from_toml(bench.folder / "edited.toml")
    straight = [one["input_ids"].tobytes() for one in edited.loader(micro_batch=batch, threads=0)]
    world, parts, states = dice.choice((1, 2, 4)), [], None
    while len(parts) < len(straight):
        count, world, ranks, ended = dice.randrange(1, 4), dice.choice((1, 2, 4)), [], []
        for rank in range(world):
            threads = dice.choice((0, 1))
            opened = run if len(parts) <= first else edited
            loader = opened.loader(rank=rank, world_size=world, micro_batch=batch // world, threads=threads)
            if states is not None:
                loader.load_state_dict(states)
            if opened is run and len(parts) + count > first:
                loader.replan(edited.plan())
            ranks.append([])
            for one in loader:
                ranks[-1].append(one["input_ids"].tobytes())
                if len(ranks[-1]) == count:
                    break
            ended.append(json.loads(json.dumps(loader.state_dict())))
        from tokenmill.loader.state import merge_states

        states = merge_states(ended) if "live" in ended[0] else ended[0]
        parts += [b"".join(pieces) for pieces in zip(*ranks, strict=True)]
    assert parts == straight, "a wrong token"


ATTACKS: dict[str, Callable[[Bench, random.Random], None]] = {
    name.removeprefix("attack_"): function
    for name, function in globals().copy().items()
    if name.startswith("attack_")
}


def serve(target: str) -> None:
    """Run the cases of a target that are listed on stdin, in this process; print one line for each."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    from tokenmill.errors import TokenmillError

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "bench"
        folder.mkdir()
        bench = Bench(folder)
        for case, numbers in json.load(sys.stdin):
            print(json.dumps({"case": case}), flush=True)
            outcome = "fine"
            signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)  # which ends the process
            try:
                ATTACKS[target](bench, Dice(numbers))
            except TokenmillError:
                outcome = "refused"
            except BaseException as error:
                where = traceback.format_exc().splitlines()[-3].strip()
                outcome = f"{type(error).__name__} at {where}: {error}"
            print(json.dumps({"case": case, "outcome": outcome}), flush=True)


def run_cases(target: str, cases: Sequence[tuple[int, Sequence[int]]]) -> dict[int, str]:
    """Run cases in a process, and return the outcome of each. Cases after one that ended the process do not run."""
    command = [sys.executable, __file__, "--serve", target]
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "PYTHONFAULTHANDLER": ""}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
    try:
        out, errors = process.communicate(json.dumps(cases).encode(), timeout=10 * CASE_SECONDS + 2 * len(cases))
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
    outcomes: dict[int, str] = {}
    started = cases[0][0]
    for line in out.splitlines():
        record = json.loads(line)
        started = record["case"]
        if "outcome" in record:
            outcomes[started] = record["outcome"]
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or [""]
        outcomes[started] = f"the process ended by {process.returncode}: {last[0]}"
    return outcomes


def is_found(outcome: str) -> bool:
    """Say whether a case ended in a way that it must not."""
    return outcome not in ("fine", "refused")


def kind_of(outcome: str) -> str:
    """Return what two findings have in common that are the same: what was raised, and where."""
    return outcome.partition(":")[0]


def shrink(target: str, numbers: Sequence[int], outcome: str) -> list[int]:
    """Return the fewest and least numbers for which a case ends in the same way, as far as some tries find them."""
    kept = list(numbers)
    candidates = list(smaller(kept))
    for _ in range(SHRINK_ROUNDS):
        if not candidates:
            break
        tried = dict(enumerate(candidates[:ROUND_CASES]))
        outcomes = run_cases(target, list(tried.items()))
        same = [case for case, each in outcomes.items() if kind_of(each) == kind_of(outcome)]
        if same:
            kept = tried[same[0]]
            candidates = list(smaller(kept))
        else:
            candidates = candidates[len(outcomes) :]
    while kept and not kept[-1]:
        kept.pop()
    return kept


def keep(folder: Path, target: str, numbers: Sequence[int], outcome: str) -> Path:
    """Write a finding to a new file."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"target": target, "found": outcome, "numbers": list(numbers)}
    name = hashlib.sha256(json.dumps([target, list(numbers)]).encode()).hexdigest()[:8]
    path = folder / f"{target}-{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def replay(files: Sequence[Path]) -> list[str]:
    """Run the stored cases, and return those that fail."""
    findings = []
    for file in files:
        record = json.loads(file.read_text())
        outcome = run_cases(record["target"], [(0, record["numbers"])])[0]
        if is_found(outcome):
            findings.append(f"{file}: {outcome}")
    return findings


def main() -> None:
    """Attack the targets in turns until the time is up; fail if anything was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", nargs="*", choices=sorted(ATTACKS), default=sorted(ATTACKS))
    parser.add_argument("--case", type=int)
    parser.add_argument("--cases", type=int, default=ROUND_CASES)
    parser.add_argument("--replay", nargs="*", type=Path, help="run these cases alone, which were kept")
    parser.add_argument("--keep", type=Path, default=KEPT, help="where findings are kept")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if options.replay is not None:
        findings = replay(options.replay)
        print(*findings, sep="\n")
        sys.exit(bool(findings))
    counts = {target: Counter[str]() for target in options.target}
    kept: set[tuple[str, str]] = set()
    findings = replay(sorted(options.keep.glob("*.json")))
    begin, first = time.monotonic(), options.case or 0
    count = options.cases if options.case is None else 1
    while True:
        for target in options.target:
            dice = {case: dice_of(target, options.seed, case) for case in range(first, first + count)}
            outcomes = run_cases(target, list(dice.items()))
            for case, outcome in outcomes.items():
                counts[target]["found" if is_found(outcome) else outcome] += 1
                if is_found(outcome):
                    findings.append(f"{target} case {case} (seed {options.seed}): {outcome}")
                    if (target, kind_of(outcome)) not in kept:  # most others of its kind are the same
                        kept.add((target, kind_of(outcome)))
                        path = keep(options.keep, target, shrink(target, dice[case], outcome), outcome)
                        findings[-1] += f"; kept as {path}"
        first += count
        found = sum(each["found"] for each in counts.values())
        print(f"{first} cases of each target, {found} found", file=sys.stderr, flush=True)
        if options.case is not None or time.monotonic() - begin > options.seconds:
            break
    if options.json:
        print(json.dumps({"counts": counts, "findings": findings, "seconds": time.monotonic() - begin}))
    else:
        for target, each in counts.items():
            ends = ", ".join(f"{each[end]} {end}" for end in ("fine", "refused", "found"))
            print(f"{target:11} {sum(each.values()):6} cases: {ends}")
        print(*findings, sep="\n")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
