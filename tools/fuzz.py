"""Attacks what reads files of others, with random damage, and counts what comes of it.

    python tools/fuzz.py [--seconds N] [--seed N] [--target NAME ...] [--json]
    make fuzz

Targets: stores and row indexes, manifests, inputs of every format, tokenizers, chat templates, configs, states, and
random runs that are resumed. Every case must end with the right tokens or with an error of ours. What fails it: a
crash, a hang, an access out of bounds (kernels are compiled with bounds checks), an exception that is none of ours,
memory above a bound, a wrong token. Cases run in a process of their own, so that a crash is counted as well; each
is named by target and number, and `--target NAME --case NUMBER` runs it again.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MEMORY_BYTES = 4 << 30
CASE_SECONDS = 60
ROUND_CASES = 40
"""Cases of one target that a process runs before the next one has its turn."""
ODD = (None, True, 0, -1, 1, 2**31, 2**63, 2**70, 1e308, -0.5, "", "x", "../..", "\x1b[31m", [], {}, [1], {"a": 1})
RUN = """
[run]
steps = {steps}
global_batch_size = {batch}
seq_len = {seq_len}
packing = "{packing}"
seed = {seed}
[[sources]]
name = "web"
store = "web"
"""


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

        import tokenmill as tm

        self.folder = folder
        dice = random.Random(0)
        words = ["mill", "grain", "Mühle", "зерно", "粉", "🌾", "water", "\n"]
        self.texts = [" ".join(dice.choices(words, k=dice.randrange(1, 40))) for _ in range(120)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in self.texts)
        (folder / "web.jsonl").write_text(lines)
        tm.prepare(folder / "web.jsonl", out=folder / "web", tokenizer="bytes", workers=1, progress=False)
        self.np, self.tm = np, tm
        self.write_run()
        self.batches = self.draw()
        self.clean = folder.with_name("clean")
        shutil.copytree(folder, self.clean)

    def write_run(self, **values: object) -> None:
        """Write the config of a run."""
        known = {"steps": 6, "batch": 4, "seq_len": 24, "packing": "best_fit", "seed": 1}
        (self.folder / "run.toml").write_text(RUN.format(**known | values))

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
    """Change a value of a tokenizer.json or of what stands beside it, and open and use it."""
    demo = Path(bench.tm.__file__).parent / "demo" / "tokenizer"
    with tempfile.TemporaryDirectory(dir=bench.folder.parent) as name:
        folder = Path(name) / "tokenizer"
        shutil.copytree(demo, folder)
        file = dice.choice(sorted(folder.iterdir()))
        if dice.random() < 0.8:
            file.write_text(json.dumps(mutated(json.loads(file.read_text()), dice)))
        else:
            file.write_bytes(damaged(file.read_bytes(), dice))
        tokenizer = bench.tm.open_tokenizer(str(folder), engine="tokenizers")
        tokenizer.encode(bench.texts[:3])


TEMPLATE_PARTS = (
    *("{% for m in messages %}", "{{ m.content }}", "{% endfor %}", "{{ m.role }}", "{{ messages | tojson }}"),
    *(
        "{% set x = range(99999) | list %}",
        "{{ x | sum }}",
        "{{ x == x }}",
        "{% set x = x + x %}",
        "{{ x | sort }}",
    ),
    *("{% set y = 'ab' * 9999 %}", "{% set y = y ~ y %}", "{{ y | length }}", "{{ y | replace('a', y) | length }}"),
    *("{% if add_generation_prompt %}", "{% endif %}", "{{ messages[0].__class__ }}", "{{ 9 ** 9 ** 9 }}"),
    *("{% macro f(n) %}", "{{ f(n + 1) }}", "{% endmacro %}", "{{ f(0) }}", "{{ '%9999999d' % 1 }}", "<|im_end|>"),
)


def attack_templates(_bench: Bench, dice: random.Random) -> None:
    """Run a template of random parts."""
    from tokenmill.encode import Refusal
    from tokenmill.encode.chat.render import render
    from tokenmill.encode.chat.template import ChatTemplate

    source = "".join(dice.choices(TEMPLATE_PARTS, k=dice.randrange(1, 12)))
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    template = ChatTemplate(source=source, where="fuzz", special_tokens={"eos_token": "</s>"})
    with suppress(Refusal):
        render(template, messages, kwargs={})


def attack_configs(bench: Bench, dice: random.Random) -> None:
    """Change a value of a config."""
    import tomllib

    import tomli_w

    bench.reset()
    tables = mutated(tomllib.loads((bench.folder / "run.toml").read_text()), dice)
    with io.BytesIO() as out:
        try:
            tomli_w.dump(tables, out)  # type: ignore[arg-type]
        except (TypeError, AttributeError):
            return
        (bench.folder / "run.toml").write_bytes(out.getvalue())
    run = bench.tm.Run.from_toml(bench.folder / "run.toml")
    run.plan()


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
    """Draw a random run straight, and in parts by other ranks; the batches must be the same."""
    bench.reset()
    packing = dice.choice(("best_fit", "concat", "bos_best_fit"))
    batch = dice.choice((2, 4, 8))
    values = {"steps": dice.randrange(2, 9), "batch": batch, "seq_len": dice.randrange(8, 64), "packing": packing}
    bench.write_run(**values, seed=dice.randrange(1 << 30))
    run = bench.tm.Run.from_toml(bench.folder / "run.toml")
    straight = [one["input_ids"].tobytes() for one in run.loader(micro_batch=batch, threads=0)]
    world, parts, state = dice.choice((1, 2)), [], None
    while len(parts) < len(straight):
        steps = dice.randrange(1, 4)
        ranks = []
        for rank in range(world):
            loader = run.loader(
                rank=rank, world_size=world, micro_batch=batch // world, threads=dice.choice((0, 1))
            )
            if state is not None:
                loader.load_state_dict(state)
            ranks.append([])
            for one in loader:
                ranks[-1].append(one["input_ids"].tobytes())
                if len(ranks[-1]) == steps:
                    break
            last = loader.state_dict()
        state = last
        parts += [b"".join(pieces) for pieces in zip(*ranks, strict=True)]
        world = dice.choice((1, 2))
    assert parts == straight, "a wrong token"


ATTACKS: dict[str, Callable[[Bench, random.Random], None]] = {
    name.removeprefix("attack_"): function
    for name, function in globals().copy().items()
    if name.startswith("attack_")
}


def serve(target: str, seed: int, first: int, count: int) -> None:
    """Run some cases of a target in this process; a line on stdout for each."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    from tokenmill.errors import TokenmillError

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "bench"
        folder.mkdir()
        bench = Bench(folder)
        for case in range(first, first + count):
            print(json.dumps({"case": case}), flush=True)
            begin, outcome = time.monotonic(), "fine"
            try:
                ATTACKS[target](bench, random.Random(f"{target} {seed} {case}"))
            except TokenmillError:
                outcome = "refused"
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error} at {traceback.format_exc().splitlines()[-3].strip()}"
            print(json.dumps({"case": case, "outcome": outcome, "seconds": time.monotonic() - begin}), flush=True)


def run_round(target: str, seed: int, first: int, count: int) -> tuple[Counter[str], list[str]]:
    """Have some cases run by a process; return how they ended, and what was found."""
    command = [sys.executable, __file__, "--serve", target, str(seed), str(first), str(count)]
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "PYTHONFAULTHANDLER": ""}
    counts: Counter[str] = Counter()
    findings = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    try:
        out, errors = process.communicate(timeout=CASE_SECONDS + 2 * count)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
    ended = {}
    started = -1
    for line in out.splitlines():
        record = json.loads(line)
        started = record["case"]
        if "outcome" in record:
            ended[started] = record["outcome"]
    for case, outcome in ended.items():
        counts["fine" if outcome == "fine" else "refused" if outcome == "refused" else "found"] += 1
        if outcome not in ("fine", "refused"):
            findings.append(f"{target} case {case} (seed {seed}): {outcome}")
    if process.returncode != 0 or (started >= 0 and started not in ended):
        counts["found"] += 1
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or [""]
        findings.append(f"{target} case {started} (seed {seed}): ended by {process.returncode}: {last[0]}")
    return counts, findings


def main() -> None:
    """Attack the targets in turns until the time is up; fail if anything was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", nargs="*", choices=sorted(ATTACKS), default=sorted(ATTACKS))
    parser.add_argument("--case", type=int)
    parser.add_argument("--cases", type=int, default=ROUND_CASES)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=4)
    options = parser.parse_args()
    if options.serve:
        target, *numbers = options.serve
        serve(target, *map(int, numbers))
        return
    counts = {target: Counter[str]() for target in options.target}
    findings: list[str] = []
    begin, first = time.monotonic(), options.case or 0
    while True:
        for target in options.target:
            more, found = run_round(target, options.seed, first, 1 if options.case is not None else options.cases)
            counts[target] += more
            findings += found
        first += options.cases
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
