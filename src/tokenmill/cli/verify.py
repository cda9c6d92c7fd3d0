"""`tokenmill verify`: whether a store is what its manifest says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from tokenmill.cli import console as ui

if TYPE_CHECKING:
    from tokenmill.store import ForeignOptions, VerifyReport


def verify(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a store, or of several.")],
    json: Annotated[bool, typer.Option(help="Print the result as JSON.")] = False,
    dtype: ui.Dtype = None,
    vocab_size: ui.VocabSize = None,
    eos_id: ui.EosId = None,
    bos_id: ui.BosId = None,
    format: ui.Format = None,
) -> None:
    """Read every byte of a store, or of all stores in a folder; exit 1 and the file's name if anything is broken.

    Files of other projects have no checksums; what was checked of them is said.
    """
    from tokenmill.store import ForeignOptions

    options = ForeignOptions(dtype=dtype, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id, format=format)
    places = places_of(store)
    reports = []
    for place in places:
        reports.append(_check(place, options))
        if not json:
            _show(place, reports[-1])
    if json:
        checked = [_to_json(report) for report in reports]
        ui.print_json(checked[0] if places == [store] else {"path": str(store), "ok": True, "stores": checked})


def places_of(path: Path) -> list[Path]:
    """Return the stores in a folder that is none itself, such as train and val; else the path alone."""
    from tokenmill.store.foreign.files import is_ours, stores_below

    return [path] if is_ours(path) or not path.is_dir() else stores_below(path) or [path]


def _check(store: Path, options: ForeignOptions) -> VerifyReport:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from tokenmill.store import open_store, verify

    manifest = open_store(store, **asdict(options)).manifest
    total = sum(info.bytes for shard in manifest.shards for info in shard.files.values())
    columns = ("verify", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=ui.errors, transient=True, disable=not ui.errors.is_terminal) as progress:
        task = progress.add_task("verify", total=total)
        return verify(store, progress=lambda count: progress.advance(task, count), options=options)


def _to_json(report: VerifyReport) -> dict[str, object]:
    return {
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


def _show(store: Path, report: VerifyReport) -> None:
    ui.console.print(
        f"[bold green]ok[/]  {escape(str(store))}: {report.files} files in {report.shards} shards, "
        f"{ui.megabytes(report.bytes)}, {report.documents:,} documents, {report.tokens:,} tokens; "
        f"{'' if report.format == 'tokenmill' else report.format + ': '}{escape(report.checked)}",
        soft_wrap=True,
    )
