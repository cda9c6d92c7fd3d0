"""`tokenmill prepare`, `import`, `export` and `upload`: how stores come to be, and go elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import console as ui
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.build import Executor, PartReport, PrepareReport, UnitsReport
    from tokenmill.store import ImportReport

ENGINES = ("local", "ray")


def prepare(
    out: Annotated[
        str,
        typer.Option(
            "--out",
            "-o",
            metavar="STORE",
            help="Folder of the store to write or to add to; or a new s3://, gs:// or az:// address.",
        ),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT...",
            help="Files, globs, folders, hf:NAME[:CONFIG[:SPLIT]], or addresses such as s3://BUCKET/*.parquet. "
            "JSONL, JSON, CSV, TSV and text (also .gz, .zst, .bz2, .xz), Parquet, Arrow, WebDataset tar.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            "-t",
            metavar="SPEC",
            help="bytes, a tokenizer.json or .model, a folder with one, tiktoken:RANKFILE or hf:NAME.",
        ),
    ] = "bytes",
    recipe: Annotated[
        str,
        typer.Option(
            help="text, chat, instruction, completion, dpo, pairs, kto, grpo, prompts, or a .json or .toml file."
        ),
    ] = "text",
    control_strings: Annotated[
        str | None, typer.Option(help="Strings such as <|endoftext|> in texts: text (default), encode, drop.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="For messages: tokenizer (its own), a .jinja file, or chatml.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message of conversations that have none of their own.")
    ] = None,
    train_turns: Annotated[
        str | None, typer.Option(help="Messages of trained roles that are trained on: all, or last.")
    ] = None,
    mask: Annotated[
        str | None, typer.Option(help="Roles that are trained on or not, such as tool=train,user=mask.")
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
    keep: Annotated[str | None, typer.Option(help="Fields to keep beside each document, such as id,url.")] = None,
    on_error: Annotated[
        str, typer.Option(help="What to do about bad records and broken files: stop, or skip (counted, listed).")
    ] = "stop",
    keep_empty: Annotated[
        bool, typer.Option("--keep-empty", help="Keep texts without a character; else left out and counted.")
    ] = False,
    min_chars: Annotated[int | None, typer.Option(help="Leave out records with fewer characters.")] = None,
    max_chars: Annotated[int | None, typer.Option(help="Leave out records with more characters.")] = None,
    max_items: Annotated[int | None, typer.Option(help="Stop after this many records, in input order.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Cut records to this many tokens.")] = None,
    on_long: Annotated[
        str | None, typer.Option(help="What to do about longer records: cut (default), drop (counted), or stop.")
    ] = None,
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
        bool, typer.Option("--same-names", help="Add files whose names the store has already: a second dump.")
    ] = False,
    max_record_bytes: Annotated[
        int | None, typer.Option(help="Largest record; a worker takes up to 15 times that. Default: 64 MiB.")
    ] = None,
    max_expansion: Annotated[
        int | None, typer.Option(help="Most text that a file may hold, as a multiple of its size. Default: 256.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-j", metavar="N", help="Worker processes; default: one per core.")
    ] = None,
    unit_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a unit without progress ends the build; default: no limit."),
    ] = None,
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
    tokenizer_engine: Annotated[
        str, typer.Option(help="auto: the fast engine, where it is proven equal to the reference.")
    ] = "auto",
    engine: Annotated[
        str, typer.Option(help="What runs the units: local (worker processes of this machine), or ray.")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="Cluster of Ray: auto, HOST:PORT, ...; default: one started here.")
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Write the list of units into OUT and stop, for --part.")
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Do only every N-th unit of the list in OUT that has no result yet."),
    ] = None,
    publish: Annotated[
        bool,
        typer.Option("--publish", help="Do the units that parts have left, and publish; as without these options."),
    ] = False,
    rebuild: ui.Rebuild = False,
    staging: Annotated[
        Path | None,
        typer.Option(help="Folder for copies of inputs from addresses, and for building a store that goes to one."),
    ] = None,
    json: ui.AsJson = False,
) -> None:
    """Turn files of text or records into a store. Run it again to go on after a crash, or to add new files."""
    from tokenmill.build import PrepareOptions, plan_units, run_part
    from tokenmill.build.build import prepare as build
    from tokenmill.build.parts import asked_for
    from tokenmill.documents.units import MAX_EXPANSION, MAX_RECORD_BYTES

    _check_mode(inputs, plan_only=plan_only, part=part, publish=publish, engine=engine, address=address)
    options = PrepareOptions(
        text_field=text_field,
        control_strings=control_strings,
        chat_template=chat_template,
        system=system,
        train_turns=train_turns,
        mask=_roles(mask),
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
        on_long=on_long,
        domain_key=domain_key,
        deduplicate=deduplicate,
        val_fraction=val_fraction,
        max_tokens_per_shard=max_tokens_per_shard,
        storage_format=storage_format,
        bos_token=bos_token,
        eos_token=eos_token,
        add_bos=bos,
        add_eos=eos,
        engine=tokenizer_engine,
        max_record_bytes=MAX_RECORD_BYTES if max_record_bytes is None else max_record_bytes,
        max_expansion=MAX_EXPANSION if max_expansion is None else max_expansion,
    )
    how: dict[str, Any] = {"tokenizer": tokenizer, "recipe": recipe, "staging": staging, "options": options}
    report: PrepareReport | UnitsReport | PartReport
    try:
        if part is not None:
            asked = asked_for(inputs, tokenizer, recipe, options) if inputs else None
            report = run_part(out, part, workers=workers, staging=staging, unit_timeout=unit_timeout, asked=asked)
        elif plan_only:
            report = plan_units(inputs or [], out=out, rebuild=rebuild, **how)
        else:
            with _executor(engine, address, workers) as executor:
                how |= {"workers": workers, "executor": executor, "unit_timeout": unit_timeout}
                report = build(inputs or [], out=out, rebuild=rebuild, **how)
    except KeyboardInterrupt:
        ui.errors.print("interrupted: run the same command again, and it goes on from here", style="bold yellow")
        raise typer.Exit(130) from None
    if json:
        ui.print_json(report.to_json())
    else:
        _show(out, report)


def _check_mode(
    inputs: list[str] | None, *, plan_only: bool, part: str | None, publish: bool, engine: str, address: str | None
) -> None:
    """Refuse what does not go together."""
    modes = {"--plan-only": plan_only, "--part": part is not None, "--publish": publish}
    chosen = [name for name, is_chosen in modes.items() if is_chosen]
    if len(chosen) > 1:
        raise ConfigError(
            f"prepare: must do one of {', '.join(modes)} at a time, got {' and '.join(chosen)}; choose one"
        )
    if not inputs and part is None:
        raise ConfigError("prepare: needs files to read, got none; name them before --out")
    if engine not in ENGINES:
        raise ConfigError(
            f"engine: must be one of {', '.join(ENGINES)}, got {engine!r}; what runs the tokenizer is "
            "--tokenizer-engine"
        )
    if engine == "ray" and (plan_only or part is not None):
        raise ConfigError(f"engine: {chosen[0]} must go without an engine, got 'ray'; leave --engine out")
    if address is not None and engine != "ray":
        raise ConfigError(
            f"address: must be given with --engine ray only, got {address!r}; add it, or leave it out"
        )


def _executor(engine: str, address: str | None, workers: int | None) -> AbstractContextManager[Executor | None]:
    """Return what runs units, None for the workers of this machine; what was started for it is ended."""
    if engine == "local":
        return nullcontext()
    from tokenmill.build import RayExecutor

    return RayExecutor(address, num_cpus=workers)


def _show(out: str, report: PrepareReport | UnitsReport | PartReport) -> None:
    from tokenmill.build import PartReport, UnitsReport

    if isinstance(report, UnitsReport):
        then = f"tokenmill prepare --out {out} --part I/N for every part I of N, then the same command as before"
        rows: list[tuple[str, object]] = [
            ("units", report.units),
            ("done before", report.done),
            ("input", ui.megabytes(report.input_bytes)),
            ("next", then if report.units else "nothing: all files are in the store already"),
        ]
        if report.phase == "hash":
            rows.append(("note", "records are hashed first: run all parts twice"))
        ui.print_table(f"Units of {out}", ("what", "value"), rows)
    elif isinstance(report, PartReport):
        rows = [
            ("units", report.units),
            ("done before", report.resumed_units),
            ("documents", report.documents),
            ("tokens", report.tokens),
            ("text", ui.megabytes(report.text_bytes)),
            ("time", f"{report.seconds:.1f} s"),
        ]
        notes = {
            "hash": "records are hashed; run this part again when all parts have done so",
            "published": "nothing to do: the store is finished",
        }
        rows += [("note", notes[report.phase])] if report.phase in notes else []
        ui.print_table(f"Part {report.part} of {report.parts} of {out}", ("what", "value"), rows)
    else:
        _show_prepared(report)


def _roles(text: str | None) -> dict[str, str] | None:
    """Read `tool=train,user=mask`."""
    if text is None:
        return None
    pairs = [part.split("=", 1) for part in text.split(",")]
    if not all(len(pair) == 2 and all(word.strip() for word in pair) for pair in pairs):
        raise ConfigError(
            f"--mask: must be roles with train or mask, got {text!r}; for example tool=train,user=mask"
        )
    return {role.strip(): action.strip() for role, action in pairs}


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())


def _show_prepared(report: PrepareReport) -> None:
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
    # What --tokenizer names if it is left out, which a newcomer may do unaware.
    engine = (
        "bytes: one id a byte; --tokenizer names that of a model" if report.engine == "bytes" else report.engine
    )
    rows += [("BOS and EOS", report.framing), ("tokenizer engine", engine)]
    rows.append(("fingerprint", report.fingerprint))
    ui.print_table(f"Store {report.path}", ("what", "value"), rows)
    if len(report.stores) > 1 or report.stores[0].route:
        each = [(store.route, store.documents, store.tokens, store.shards) for store in report.stores]
        ui.print_table("Stores", ("name", "documents", "tokens", "shards"), each)


def import_(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Token files: a file, folder, glob or prefix.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="STORE", help="Folder of the store to write.")],
    dtype: ui.Dtype = None,
    vocab_size: ui.VocabSize = None,
    eos_id: ui.EosId = None,
    bos_id: ui.BosId = None,
    format: ui.Format = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer that made the ids, as for prepare; a copy is kept with the store.")
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
        from tokenmill.encode.files import copy_of

        keep_tokenizer(copy_of(tokenizer), [out])
    if json:
        ui.print_json(report)
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
    ui.print_table(f"Store {report.out}", ("what", "value"), rows)


def export(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a store, or token files.")],
    to: Annotated[
        str, typer.Option("--format", help="What to write: megatron, nanoset, npy, astrai-bin, astrai-h5 or hf.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="New folder to write to.")],
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
        ui.print_json(report)
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
    ui.print_table(f"Export {report.out}", ("what", "value"), rows)


def upload(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a finished store.")],
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="s3://BUCKET/PATH, gs://, az:// or file:///FOLDER; ?endpoint=.")
    ],
    json: ui.AsJson = False,
) -> None:
    """Copy a store to object storage: what is there already is verified, the rest is sent, the manifest last.

    Credentials come from the environment. An upload that was interrupted goes on when it is run again.
    """
    from tokenmill.store.remote.upload import upload

    with ui.progress(ui.megabytes) as tell:
        report = upload(store, address, progress=lambda done, total: tell("upload", done, total))
    if json:
        ui.print_json(report)
        return
    rows: list[tuple[str, object]] = [
        ("files", report.files),
        ("bytes", ui.megabytes(report.bytes)),
        ("sent", f"{report.sent_files:,} files, {ui.megabytes(report.sent_bytes)}; the others were there"),
        ("proven", "all, as read back"),
        ("fingerprint", report.fingerprint),
    ]
    ui.print_table(f"Store {report.address}", ("what", "value"), rows)
