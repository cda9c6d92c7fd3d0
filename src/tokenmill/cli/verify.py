"""`tokenmill verify`: whether a store is what its manifest says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from tokenmill.cli.console import console, errors, megabytes, print_json
from tokenmill.cli.import_ import BosId, Dtype, EosId, Format, VocabSize

if TYPE_CHECKING:
    from tokenmill.store import ForeignOptions, VerifyReport


def verify(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a store, or of several.")],
    json: Annotated[bool, typer.Option(help="Print the result as JSON.")] = False,
    dtype: Dtype = None,
    vocab_size: VocabSize = None,
    eos_id: EosId = None,
    bos_id: BosId = None,
    format: Format = None,
) -> None:
    """Read every byte of a store, or of all stores in a folder; exit 1 and the file's name if anything is broken.

    Files of other projects have no checksums; what was checked of them is said.
    """
    from tokenmill.store import ForeignOptions

    options = ForeignOptions(dtype=dtype, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id, format=format)
    places = places_of(store)
    found = []
    for place in places:
        report = _check(place, options)
        found.append(_to_json(report))
        if not json:
            _show(place, report)
    if json:
        print_json(found[0] if places == [store] else {"path": str(store), "ok": True, "stores": found})


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
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
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
    console.print(
        f"[bold green]ok[/]  {escape(str(store))}: {report.files} files in {report.shards} shards, "
        f"{megabytes(report.bytes)}, {report.documents:,} documents, {report.tokens:,} tokens; "
        f"{'' if report.format == 'tokenmill' else report.format + ': '}{escape(report.checked)}",
        soft_wrap=True,
    )
