"""`tokenmill import`: token files of other projects -> a store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli import console as ui

if TYPE_CHECKING:
    from tokenmill.store import ImportReport


def import_(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Token files: a file, folder, glob or prefix.")],
    out: Annotated[Path, typer.Option(help="Folder of the store to write.")],
    dtype: ui.Dtype = None,
    vocab_size: ui.VocabSize = None,
    eos_id: ui.EosId = None,
    bos_id: ui.BosId = None,
    format: ui.Format = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="What made the ids: bytes, a tokenizer.json, a folder, tiktoken:RANKFILE.")
    ] = None,
    max_tokens_per_shard: Annotated[int | None, typer.Option(help="Tokens at which a new shard begins.")] = None,
    rebuild: Annotated[bool, typer.Option(help="Replace a finished store at OUT.")] = False,
    json: Annotated[bool, typer.Option(help="Print the report as JSON.")] = False,
) -> None:
    """Convert token files of another project to a store with checksums, and compare it with them."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tokenmill.store import ForeignOptions, import_store
    from tokenmill.store.writer import MAX_TOKENS_PER_SHARD

    identity = None
    if tokenizer is not None:
        from tokenmill.encode.engines import open_tokenizer

        identity = open_tokenizer(tokenizer).identity.to_json()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=ui.errors, transient=True, disable=not ui.errors.is_terminal) as bar:
        tasks = {what: bar.add_task(what, total=None) for what in ("look", "write", "compare")}
        report = import_store(
            path,
            out=out,
            options=ForeignOptions(dtype=dtype, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id, format=format),
            tokenizer=identity,
            rebuild=rebuild,
            max_tokens_per_shard=MAX_TOKENS_PER_SHARD if max_tokens_per_shard is None else max_tokens_per_shard,
            progress=lambda what, done, total: bar.update(tasks[what], completed=done, total=total),
        )
    if json:
        ui.print_json(asdict(report))
    else:
        _show(report)


def _show(report: ImportReport) -> None:
    rows: list[tuple[str, object]] = [
        ("format", report.format),
        ("documents", report.documents),
        ("tokens", report.tokens),
        ("shards", report.shards),
        ("arrays", ", ".join(f"{key} {dtype}" for key, dtype in report.keys.items())),
        ("compared", f"{report.compared:,} numbers, all as in the files"),
        ("fingerprint", report.fingerprint),
    ]
    ui.console.print(ui.table(f"Store {report.out}", ("what", "value"), rows))
