"""`tokenmill prepare`: files of text -> a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli.console import console, megabytes, print_json, table

if TYPE_CHECKING:
    from tokenmill.prepare import PrepareReport


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Files, globs or folders: .jsonl, .jsonl.gz, .jsonl.zst."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the store to write.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, a tokenizer.json, a folder with one, or tiktoken:RANKFILE.")
    ] = "bytes",
    text_field: Annotated[str, typer.Option(help="Field that holds the text; dots go down.")] = "text",
    on_error: Annotated[
        str, typer.Option(help="What a bad line does: stop, or skip (counted and listed).")
    ] = "stop",
    workers: Annotated[int | None, typer.Option(help="Worker processes; default: one a core.")] = None,
    max_tokens_per_shard: Annotated[int | None, typer.Option(help="Tokens at which a new shard begins.")] = None,
    bos: Annotated[
        bool | None, typer.Option(help="Start every document with BOS; default: if the tokenizer has one.")
    ] = None,
    eos: Annotated[
        bool | None, typer.Option(help="End every document with EOS; default: if the tokenizer has one.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="auto: the fast engine where it proves equal to the reference.")
    ] = "auto",
    rebuild: Annotated[bool, typer.Option(help="Replace a finished store at OUT.")] = False,
    json: Annotated[bool, typer.Option(help="Print the report as JSON.")] = False,
) -> None:
    """Tokenize files of text into a store."""
    from tokenmill.prepare import PrepareOptions
    from tokenmill.prepare.build import prepare as build
    from tokenmill.store.writer import MAX_TOKENS_PER_SHARD

    report = build(
        inputs,
        out=out,
        tokenizer=tokenizer,
        workers=workers,
        rebuild=rebuild,
        options=PrepareOptions(
            text_field=text_field,
            on_error=on_error,
            max_tokens_per_shard=MAX_TOKENS_PER_SHARD if max_tokens_per_shard is None else max_tokens_per_shard,
            add_bos=bos,
            add_eos=eos,
            engine=engine,
        ),
    )
    if json:
        print_json(report.to_json())
    else:
        _show(out, report)


def _show(out: Path, report: PrepareReport) -> None:
    rows: list[tuple[str, object]] = [
        ("documents", report.documents),
        ("tokens", report.tokens),
        ("text", megabytes(report.text_bytes)),
        ("tokens per byte", round(report.tokens_per_byte, 4)),
        ("shards", report.shards),
        ("skipped", ", ".join(f"{reason} {count:,}" for reason, count in report.skipped.items()) or "none"),
        ("tokenizer engine", report.engine),
        ("time", f"{report.seconds:.1f} s, {report.megabytes_per_second:.1f} MB of text a second"),
        ("fingerprint", report.fingerprint),
    ]
    console.print(table(f"Store {out}", ("what", "value"), rows))
