"""`tokenmill demo`: the whole flow on the bundled corpus, with its guarantees checked."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli import console as ui
from tokenmill.cli.summary import demo_parts, verdict_table
from tokenmill.errors import TokenmillError
from tokenmill.view.tables import Table, plan_tables

if TYPE_CHECKING:
    from tokenmill.cli.summary import Part
    from tokenmill.run.run import Run

KINDS = ("prose", "code", "dialogue")
STEPS, WORLD_SIZES, KILL_AFTER = 60, (1, 2, 4), 23

RUN_TOML = f"""\
[run]
seed = 1234
steps = {STEPS}
global_batch_size = 16
seq_len = 128
packing = "best_fit"
shuffle = "full"

[[sources]]
name = "prose"
store = "stores/prose"

[[sources]]
name = "code"
store = "stores/code"

[[sources]]
name = "dialogue"
store = "stores/dialogue"
max_epochs = 4

[[stages]]
name = "base"
start_step = 0
weights = {{ prose = 0.7, code = 0.3 }}

[[stages]]
name = "talk"
start_step = 40
global_batch_size = 8
seq_len = 256
weights = {{ prose = 0.2, code = 0.2, dialogue = 0.6 }}
"""


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Folder to keep the stores and run.toml in",
            show_default="a temporary one",
        ),
    ] = None,
    full: ui.Full = False,
) -> None:
    """Run everything on a bundled corpus and check the guarantees."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-demo-") if out is None else nullcontext(out) as place:
        folder = Path(place)
        with ui.busy("preparing the bundled corpus; the first run also compiles the kernels"):
            stores = _prepare(folder)
        run = _open(folder)
        report = run.report()
        with ui.busy("checking the guarantees"):
            digests, *verdicts = _check_world_sizes(folder), _check_resume(folder), _check_provenance(run)
        checked = [("same batches at any world size", f"{STEPS} steps at {_sizes()} ranks"), *verdicts]
        if not full:
            ui.print_parts(demo_parts(checked, stores, report, None if out is None else str(out)))
            return
        ui.print_parts([verdict_table(checked), stores, *plan_tables(report), *_first_batch(run), digests])
        if out is not None:
            ui.print_sentence(f"kept in {out}; next: `tokenmill what {out}/run.toml 41`")


def _prepare(folder: Path) -> Table:
    from tokenmill.build.build import prepare
    from tokenmill.demo import CORPUS_DIR, TOKENIZER_DIR

    rows = []
    for kind in KINDS:
        report = prepare(
            CORPUS_DIR / f"{kind}.jsonl",
            out=folder / "stores" / kind,
            tokenizer=str(TOKENIZER_DIR),
            workers=1,
            rebuild=True,
            progress=False,
        )
        rows.append((kind, report.documents, report.text_bytes, report.tokens, round(report.tokens_per_byte, 3)))
    columns = ("store", "documents", "bytes of text", "tokens", "tokens per byte")
    return Table(title="Stores", columns=columns, rows=rows)


def _open(folder: Path) -> Run:
    from tokenmill.run.run import Run

    file = folder / "run.toml"
    file.write_text(RUN_TOML, encoding="utf-8")
    return Run.from_toml(file)


def _first_batch(run: Run) -> tuple[Table, Part]:
    """Return the arrays of a micro-batch, and the state after it."""
    loader = run.loader(rank=0, world_size=1, micro_batch=4)
    batch = next(iter(loader))
    rows = [
        (name, str(array.dtype), str(array.shape), " ".join(map(str, array[0, :8].tolist())) + " …")
        for name, array in batch.items()
    ]
    columns = ("array", "dtype", "shape", "first values of row 0")
    return Table(title="The first micro-batch", columns=columns, rows=rows), ("state", f"{loader.state_dict()}\n")


def _sizes() -> str:
    return ", ".join(map(str, WORLD_SIZES[:-1])) + f" and {WORLD_SIZES[-1]}"


def _batches(folder: Path, *options: str) -> list[str]:
    """Return the command that draws batches in a process of its own."""
    return [sys.executable, "-m", "tokenmill", "batches", str(folder / "run.toml"), "--digest", *options]


def _digests(folder: Path, *options: str) -> list[str]:
    done = subprocess.run(_batches(folder, *options), capture_output=True, text=True, check=False)
    if done.returncode:
        raise TokenmillError(f"demo: `tokenmill batches` must succeed, got {done.stderr.strip()}; report this")
    return done.stdout.splitlines()


def _check_world_sizes(folder: Path) -> Table:
    """Draw all steps at several world sizes, in processes of their own, and compare the global batches."""
    drawn = [_digests(folder, "--world-size", str(size), "--micro-batch", "2") for size in WORLD_SIZES]
    _require(all(lines == drawn[0] for lines in drawn) and len(drawn[0]) == STEPS, "world sizes differ")
    shown = [39, 40, 41]
    rows = [(*drawn[0][step].split("\t")[:2], *(lines[step].split("\t")[2] for lines in drawn)) for step in shown]
    columns = ("step", "stage", *(f"world size {size}" for size in WORLD_SIZES))
    return Table(title="Digests of global batches", columns=columns, rows=rows)


def _check_resume(folder: Path) -> tuple[str, str]:
    """Kill a drawing process with SIGKILL in mid-run, resume in a new one, and compare with a straight run."""
    state = folder / "state.json"
    state.unlink(missing_ok=True)
    with subprocess.Popen(_batches(folder, "--state", str(state)), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        before = [process.stdout.readline().rstrip("\n") for _ in range(KILL_AFTER)]
        process.kill()
        before += process.stdout.read().splitlines()
    after = _digests(folder, "--world-size", "2", "--state", str(state))
    straight = _digests(folder)
    # A step may have been printed but not yet saved when the process died; the new one then draws it again.
    resumed = len(straight) - len(after)
    _require(before[:resumed] + after == straight and 0 < resumed <= len(before), "resume differs")
    return "exact resume after kill -9", f"killed in step {resumed}, resumed with 2 ranks"


def _check_provenance(run: Run) -> tuple[str, str]:
    """Ask of every row of some steps when its documents are seen, and find the step among the answers."""
    plan = run.plan()
    asked = 0
    for step in (0, 17, 40, STEPS - 1):
        for use in plan.what(step):
            span = use.spans[0]
            uses = [(u.step, u.slot) for u in plan.when(use.source, span.document)]
            _require((step, use.slot) in uses, f"when() does not name step {step}")
            asked += 1
    return "what and when are inverse", f"{asked} rows traced to documents and back"


def _require(ok: bool, problem: str) -> None:
    if not ok:
        raise TokenmillError(
            f"demo: a guarantee does not hold: {problem}; report this with the output of `tokenmill doctor`"
        )
