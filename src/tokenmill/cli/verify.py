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
    dtype: Annotated[
        str | None, typer.Option(help="Of ids in files that do not say it: uint16, uint32, ...")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Ids of files of other projects must be below.")] = None,
    eos_id: Annotated[int | None, typer.Option(help="Id that ends documents.")] = None,
    bos_id: Annotated[int | None, typer.Option(help="Id that starts documents.")] = None,
    format: Annotated[str | None, typer.Option(help="Format of files of other projects.")] = None,
) -> None:
    """Read every byte of a store; exit 1 and the file's name if anything is broken.

    Files of other projects have no checksums; what was checked of them is said.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from tokenmill.store import ForeignOptions, open_store
    from tokenmill.store import verify as check

    options = ForeignOptions(dtype=dtype, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id, format=format)
    manifest = open_store(
        store, dtype=dtype, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id, format=format
    ).manifest
    total = sum(info.bytes for shard in manifest.shards for info in shard.files.values())
    columns = ("verify", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("verify", total=total)
        report = check(store, progress=lambda count: progress.advance(task, count), options=options)
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
                **({} if report.format == "tokenmill" else {"format": report.format, "checked": report.checked}),
            }
        )
        return
    console.print(
        f"[bold green]ok[/]  {escape(str(store))}: {report.files} files in {report.shards} shards, "
        f"{megabytes(report.bytes)}, {report.documents:,} documents, {report.tokens:,} tokens; "
        f"{'' if report.format == 'tokenmill' else report.format + ': '}{escape(report.checked)}",
        soft_wrap=True,
    )
