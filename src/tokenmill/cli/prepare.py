"""`tokenmill prepare` and `tokenmill import`: files of text or records, or of tokens -> a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli import console as ui

if TYPE_CHECKING:
    from tokenmill.build import PrepareReport
    from tokenmill.store import ImportReport


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files, globs, folders, or hf:NAME[:CONFIG[:SPLIT]]. "
            "JSONL, JSON, CSV, TSV and text (also .gz, .zst, .bz2, .xz), Parquet, Arrow, WebDataset tar.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the store to write or to add to.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, a tokenizer.json or .model, a folder with one, or tiktoken:RANKFILE.")
    ] = "bytes",
    recipe: Annotated[
        str, typer.Option(help="text, chat, instruction, dpo, grpo, or a .json or .toml file.")
    ] = "text",
    control_strings: Annotated[
        str | None, typer.Option(help="Strings such as <|endoftext|> in texts: text (default), encode, drop.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="For messages: tokenizer (its own), a .jinja file, or chatml.")
    ] = None,
    text_field: Annotated[
        str | None, typer.Option(help="Field that holds the text; a dot goes into a nested one. Default: text.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="Read all files as this: text, jsonl, json, parquet, arrow, csv, tsv, tar.")
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="Between the cells of CSV and TSV; default: a comma, a tab.")
    ] = None,
    text_unit: Annotated[str, typer.Option(help="What one document is in text files: file, or line.")] = "file",
    keep: Annotated[
        str | None,
        typer.Option(help="Fields to keep beside each document, such as id,url."),
    ] = None,
    on_error: Annotated[
        str, typer.Option(help="What a bad record or broken file does: stop, or skip (counted and listed).")
    ] = "stop",
    keep_empty: Annotated[
        bool, typer.Option("--keep-empty", help="Keep texts without a character; else left out and counted.")
    ] = False,
    min_chars: Annotated[int | None, typer.Option(help="Leave out records with fewer characters.")] = None,
    max_chars: Annotated[int | None, typer.Option(help="Leave out records with more characters.")] = None,
    max_items: Annotated[int | None, typer.Option(help="Stop after this many records, in input order.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Cut records to this many tokens.")] = None,
    domain_key: Annotated[
        str | None, typer.Option(help="Field that names a domain; writes one store for each, below OUT.")
    ] = None,
    deduplicate: Annotated[
        bool | None, typer.Option("--deduplicate", help="Keep only the first of records with the same content.")
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of records that goes to OUT/val; the others go to OUT/train.")
    ] = None,
    same_names: Annotated[
        bool,
        typer.Option("--same-names", help="Files named like ones in the store are others: a second dump."),
    ] = False,
    max_record_bytes: Annotated[
        int | None, typer.Option(help="Largest record; a worker takes up to 15 times that. Default: 64 MiB.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; default: one a core.")] = None,
    max_tokens_per_shard: Annotated[int | None, typer.Option(help="Tokens at which a new shard begins.")] = None,
    storage_format: Annotated[str | None, typer.Option(help="bin, or h5 for HDF5.")] = None,
    bos_token: Annotated[
        str | None, typer.Option(help="Which string is BOS, if not what the tokenizer says.")
    ] = None,
    eos_token: Annotated[
        str | None,
        typer.Option(help="Which string is EOS; tokenizers of chat models often name the end of a turn."),
    ] = None,
    bos: Annotated[
        bool | None, typer.Option(help="Start every document with BOS; default: if the tokenizer has one.")
    ] = None,
    eos: Annotated[
        bool | None, typer.Option(help="End every document with EOS; default: if the tokenizer has one.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="auto: the fast engine, where it is proven equal to the reference.")
    ] = "auto",
    rebuild: ui.Rebuild = False,
    json: ui.AsJson = False,
) -> None:
    """Turn files of text or records into a store. Run it again to go on after a crash, or to add new files."""
    from tokenmill.build import PrepareOptions
    from tokenmill.build.build import prepare as build
    from tokenmill.documents.units import MAX_RECORD_BYTES

    try:
        report = build(
            inputs,
            out=out,
            tokenizer=tokenizer,
            recipe=recipe,
            workers=workers,
            rebuild=rebuild,
            options=PrepareOptions(
                text_field=text_field,
                control_strings=control_strings,
                chat_template=chat_template,
                format=format,
                delimiter="\t" if delimiter == "\\t" else delimiter,
                text_unit=text_unit,
                keep=tuple(keep.split(",")) if keep else (),
                on_error=on_error,
                keep_empty=keep_empty,
                same_names=same_names,
                min_chars=min_chars,
                max_chars=max_chars,
                max_items=max_items,
                max_seq_len=max_seq_len,
                domain_key=domain_key,
                deduplicate=deduplicate,
                val_fraction=val_fraction,
                max_tokens_per_shard=max_tokens_per_shard,
                storage_format=storage_format,
                bos_token=bos_token,
                eos_token=eos_token,
                add_bos=bos,
                add_eos=eos,
                engine=engine,
                max_record_bytes=MAX_RECORD_BYTES if max_record_bytes is None else max_record_bytes,
            ),
        )
    except KeyboardInterrupt:
        ui.errors.print("interrupted: run the same command again, and it goes on from here", style="bold yellow")
        raise typer.Exit(130) from None
    if json:
        ui.print_json(report.to_json())
    else:
        _show_prepared(out, report)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())


def _show_prepared(out: Path, report: PrepareReport) -> None:
    rows: list[tuple[str, object]] = []
    if report.new_files < report.files:
        news = f"{report.new_files} files, {report.new_documents:,} documents, {report.new_tokens:,} tokens"
        rows.append(("new", news if report.new_files else "nothing: all files are in the store already"))
    if report.resumed_units:
        rows.append(("went on with", f"{report.resumed_units} of {report.units} units done before"))
    rows += [("documents", report.documents), ("tokens", report.tokens), ("shards", report.shards)]
    if report.new_files:
        rows.append(("text", ui.megabytes(report.text_bytes)))
        if report.kind == "seq":  # else templates write more than the text
            rows.append(("tokens per byte", round(report.tokens_per_byte, 4)))
        rows.append(("skipped", _counts(report.skipped) or "none"))
        rows += [("cut to max_seq_len", report.truncated)] if report.truncated else []
        rows += [("note", _counts(report.notes))] if report.notes else []
        rate = f"{report.megabytes_per_second:,.1f} MB of text a second"
        opening = f"{report.opening_seconds:.1f} s of it opening the tokenizer"
        rows.append(("time", f"{report.seconds:.1f} s, {opening}; then {rate}"))
    rows += [("BOS and EOS", report.framing), ("tokenizer engine", report.engine)]
    rows.append(("fingerprint", report.fingerprint))
    ui.console.print(ui.table(f"Store {out}", ("what", "value"), rows))
    if len(report.stores) > 1 or report.stores[0].route:
        each = [(store.route, store.documents, store.tokens, store.shards) for store in report.stores]
        ui.console.print(ui.table("Stores", ("name", "documents", "tokens", "shards"), each))


def import_(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Token files: a file, folder, glob or prefix.")],
    out: Annotated[Path, typer.Option(help="Folder of the store to write.")],
    dtype: ui.Dtype = None,
    vocab_size: ui.VocabSize = None,
    eos_id: ui.EosId = None,
    bos_id: ui.BosId = None,
    format: ui.Format = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="What made the ids, as for prepare; it is kept with the store.")
    ] = None,
    max_tokens_per_shard: Annotated[int | None, typer.Option(help="Tokens at which a new shard begins.")] = None,
    rebuild: ui.Rebuild = False,
    json: ui.AsJson = False,
) -> None:
    """Convert token files of another project to a store with checksums, and compare it with them."""
    from tokenmill.store import ForeignOptions, import_store
    from tokenmill.store.writer import MAX_TOKENS_PER_SHARD

    identity = None
    if tokenizer is not None:
        from tokenmill.encode.engines import open_tokenizer

        identity = open_tokenizer(tokenizer).identity.to_json()
    with ui.progress() as tell:
        report = import_store(
            path,
            out=out,
            options=ForeignOptions(dtype=dtype, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id, format=format),
            tokenizer=identity,
            rebuild=rebuild,
            max_tokens_per_shard=MAX_TOKENS_PER_SHARD if max_tokens_per_shard is None else max_tokens_per_shard,
            progress=tell,
        )
    if tokenizer is not None:
        from tokenmill.build.build import keep_tokenizer

        keep_tokenizer(tokenizer, [out])
    if json:
        ui.print_json(asdict(report))
    else:
        _show_imported(report)


def _show_imported(report: ImportReport) -> None:
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


def export(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a store, or token files.")],
    to: Annotated[
        str, typer.Option("--format", help="What to write: megatron, nanoset, npy, astrai-bin, astrai-h5 or hf.")
    ],
    out: Annotated[Path, typer.Option(help="New folder to write to.")],
    drop_masks: Annotated[
        bool, typer.Option("--drop-masks", help="Give up masks that the format has no place for.")
    ] = False,
    dtype: ui.Dtype = None,
    vocab_size: ui.VocabSize = None,
    eos_id: ui.EosId = None,
    bos_id: ui.BosId = None,
    json: ui.AsJson = False,
) -> None:
    """Write a store in the format of another project, and read it back with that project's own reader."""
    from tokenmill.store import ForeignOptions, export_store

    with ui.progress() as tell:
        report = export_store(
            store,
            out=out,
            format=to,
            drop_masks=drop_masks,
            options=ForeignOptions(dtype=dtype, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id),
            progress=tell,
        )
    if json:
        ui.print_json(asdict(report))
        return
    rows: list[tuple[str, object]] = [
        ("format", report.format),
        ("documents", report.documents),
        ("tokens", report.tokens),
        ("files", report.files),
        ("arrays", ", ".join(report.keys)),
        ("read back", f"{report.compared:,} numbers, with {' and '.join(report.read_back)}: all as in the store"),
        *(("note", note) for note in report.notes),
    ]
    ui.console.print(ui.table(f"Export {report.out}", ("what", "value"), rows))
