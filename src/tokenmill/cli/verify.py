"""`tokenmill verify`: whether a store is what its manifest says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tokenmill.cli.console import console, errors, megabytes, print_json


def verify(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a store.")],
    json: Annotated[bool, typer.Option(help="Print the result as JSON.")] = False,
) -> None:
    """Read every byte of a store; exit 1 and the file's name if anything is broken."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from tokenmill.store import read_manifest
    from tokenmill.store import verify as check

    total = sum(info.bytes for shard in read_manifest(store).shards for info in shard.files.values())
    columns = ("verify", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("verify", total=total)
        report = check(store, progress=lambda count: progress.advance(task, count))
    if json:
        print_json(
            {
                "path": str(report.path),
                "ok": True,
                "shards": report.shards,
                "files": report.files,
                "bytes": report.bytes,
                "documents": report.documents,
                "tokens": report.tokens,
                "fingerprint": report.fingerprint,
            }
        )
        return
    console.print(
        f"[bold green]ok[/]  {escape(str(store))}: {report.files} files in {report.shards} shards, "
        f"{megabytes(report.bytes)}, {report.documents:,} documents, {report.tokens:,} tokens; "
        "checksums, offsets and ids are right",
        soft_wrap=True,
    )
