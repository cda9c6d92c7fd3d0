"""`tokenmill init`, `doctor`, `warm`: a first run, and what this machine has for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import console as ui
from tokenmill.errors import ConfigError
from tokenmill.tables import is_address


def init(
    stores: Annotated[
        list[str] | None,
        typer.Argument(metavar="STORE", help="Folders or addresses of stores to train on", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="RUN.toml", help="Config to write")] = Path(
        "run.toml"
    ),
    demo: Annotated[bool, typer.Option("--demo", help="Write a demo corpus, its store and a run")] = False,
) -> None:
    """Write a commented config for your stores.

    Steps, batch size and sequence length fit the size of the stores. Nothing is overwritten.
    """
    from tokenmill.run.starter import starter_toml
    from tokenmill.store import open_store

    if bool(stores) == demo:
        raise ConfigError(
            "init: no stores; pass the stores to train on, such as stores/web, or --demo"
            if not demo
            else "init: --demo cannot be combined with stores; remove one"
        )
    if out.exists():
        raise ConfigError(f"file exists: {out}; choose another name with --out, or remove it")
    if out.suffix != ".toml":
        raise ConfigError(f"--out: a config must end in .toml, got {out.name!r}; rename it")
    if demo:
        stores = [_make_demo(out.parent)]
    elif not out.absolute().parent.is_dir():
        raise ConfigError(f"folder not found: {out.parent}; create it first")
    opened = [
        (store if is_address(store) else _path_from(out.parent, store), open_store(store)) for store in stores or ()
    ]
    text = starter_toml(opened)
    with out.open("x", encoding="utf-8") as file:
        file.write(text)
    ui.print_line(f"wrote {out}; next: tokenmill plan {out}")


def _path_from(folder: Path, store: str) -> str:
    """Return a path as a config in that folder has it."""
    return store if Path(store).is_absolute() else Path(os.path.relpath(store, folder)).as_posix()


def _make_demo(folder: Path) -> str:
    """Copy the bundled corpus to `folder`/corpus and prepare a store of its prose; return its path."""
    from tokenmill.build import prepare
    from tokenmill.demo import CORPUS_DIR

    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(CORPUS_DIR, folder / "corpus", dirs_exist_ok=True)
    store = folder / "stores" / "demo"
    report = prepare(folder / "corpus" / "prose.jsonl", out=store, tokenizer="bytes", progress=False)
    ui.print_line(
        f"wrote {folder / 'corpus'} and {store}: {report.documents:,} documents, {report.tokens:,} tokens"
    )
    return str(store)


def doctor(
    json: ui.AsJson = False,
    test: Annotated[bool, typer.Option("--test/--no-test", help="Build a small store and check a run")] = True,
) -> None:
    """Print versions and folders, and run a self-test.

    Paste the output into a bug report. The exit code is 1 if something is wrong.
    """
    from tokenmill.run.doctor import diagnose

    with ui.busy("self-test"):
        report = diagnose(os.environ, self_test=test)
    if json:
        ui.print_json({**_as_dict(report), "problems": report.problems})
    else:
        rows = [
            ("tokenmill", report.tokenmill),
            ("python", report.python),
            ("platform", report.platform),
            ("cpu", report.cpu),
            *((purpose, folder or "nowhere") for purpose, folder in report.folders.items()),
            *((f"free space, {purpose}", f"{free / 1e9:,.1f} GB") for purpose, free in report.free_bytes.items()),
            *report.environment.items(),
        ]
        for name, value in rows:
            ui.print_line(f"{name}: {value}")
        installed = ", ".join(f"{name} {number}" for name, number in report.packages.items())
        ui.print_line(f"packages: {installed}")
        for extra, packages in sorted(report.extras.items()):
            parts = ", ".join(f"{name} {number}" for name, number in packages.items())
            ui.print_line(f"extra [{extra}]: {parts}")
        if report.self_test is not None:
            state = "passed" if report.self_test.passed else "failed"
            ui.print_line(f"self-test: {state} in {report.self_test.seconds:.1f} s")
    for problem in report.problems:
        ui.show_error(problem)
    if report.problems:
        raise typer.Exit(1)


def _as_dict(report: object) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(report)  # type: ignore[call-overload,no-any-return]


def warm(json: ui.AsJson = False) -> None:
    """Compile all kernels for the CPU of this machine.

    For container images, so that the first run does not have to. NUMBA_CACHE_DIR sets the folder. Kernels that
    exist in it are not compiled again.
    """
    from tokenmill.run.warm import warm

    report = warm()
    if json:
        ui.print_json(report)
        return
    if report.compiled:
        rows = [(name, round(seconds, 2)) for name, seconds in report.compiled.items()]
        ui.print_table("compiled", ("kernel", "seconds"), rows)
    ready = f"{len(report.compiled)} kernels compiled, {report.loaded} were there, in {report.seconds:.1f} s"
    ui.print_line(f"{ready}: {report.folder or 'kept nowhere, as no folder can be written to'}")
