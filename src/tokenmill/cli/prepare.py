"""`tokenmill prepare`, `import`, `export` and `upload`: how stores come to be, and go elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from tokenmill.build.options import GROUPS, OptionHelp, PrepareOptions
from tokenmill.cli import console as ui
from tokenmill.errors import ConfigError
from tokenmill.tables import is_address
from tokenmill.view.tables import Table

if TYPE_CHECKING:
    from tokenmill.build import Executor, PartReport, PrepareReport, UnitsReport
    from tokenmill.store import ImportReport

ENGINES = ("local", "ray")


FLAGS = {"add_bos": "bos", "add_eos": "eos", "engine": "tokenizer_engine"}
"""Fields of `PrepareOptions` whose flags have other names."""
SWITCHES = {
    "bos": "--bos/--no-bos",
    "eos": "--eos/--no-eos",
    "keep_empty": "--keep-empty",
    "deduplicate": "--deduplicate",
    "same_names": "--same-names",
}


def _parsers() -> dict[str, Callable[[Any], Any]]:
    """Return functions that read an option from its text on the command line."""
    return {
        "mask": _roles,
        "keep": lambda texts: tuple(ui.listed(texts)),
        "delimiter": lambda text: "\t" if text == "\\t" else text,
    }


def _options_of(values: Mapping[str, Any]) -> PrepareOptions:
    """Return the options that a command line specifies."""
    parsers = _parsers()
    described = [item.name for item in fields(PrepareOptions) if "option" in item.metadata]
    chosen = {name: values[FLAGS.get(name, name)] for name in described}
    return PrepareOptions(**{name: parsers.get(name, lambda value: value)(value) for name, value in chosen.items()})


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add a flag for each described field of `PrepareOptions` to a command, in the order of the groups."""
    signature, hints = inspect.signature(command, eval_str=True), get_type_hints(PrepareOptions)
    parameters = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
    for item in fields(PrepareOptions):
        described: OptionHelp | None = item.metadata.get("option")
        if described is None:
            continue
        name, kind = FLAGS.get(item.name, item.name), hints[item.name]
        is_list = item.name in ("mask", "keep")
        option = typer.Option(
            *([SWITCHES[name]] if name in SWITCHES else []),
            help=described.help,
            metavar=described.metavar,
            rich_help_panel=described.group,
            show_default=described.shown or (item.default not in (None, (), False)),
        )
        annotation = Annotated[list[str] | None if is_list else kind, option]  # type: ignore[valid-type]
        default = None if is_list else item.default
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    def place(parameter: inspect.Parameter) -> int:
        panel = getattr(parameter.annotation.__metadata__[0], "rich_help_panel", None)
        return GROUPS.index(panel) if panel in GROUPS else -1

    parameters = [item.replace(kind=item.KEYWORD_ONLY) for item in sorted(parameters, key=place)]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    return command


@_with_options
def prepare(
    *,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT",
            help="Files, globs, folders, hf:NAME[:CONFIG[:SPLIT]] or s3:// addresses",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str,
        typer.Option(
            "--out", "-o", metavar="STORE", help="Folder or address of the store", rich_help_panel="Output"
        ),
    ],
    recipe: Annotated[
        str,
        typer.Option(
            metavar="RECIPE",
            help="Recipe, such as text or chat, or a TOML file",
            rich_help_panel="Input",
        ),
    ] = "text",
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            "-t",
            metavar="SPEC",
            help="bytes, a tokenizer's file or folder, tiktoken:RANKFILE or hf:NAME",
            rich_help_panel="Tokenizer",
        ),
    ] = "bytes",
    filter: Annotated[
        str | None,
        typer.Option(
            "--filter",
            metavar="MODULE:FUNCTION",
            help="Python function that keeps, changes or drops records",
            show_default=False,
            rich_help_panel="Filters",
        ),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Replace a finished store at OUT", rich_help_panel="Output")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-j",
            metavar="N",
            help="Worker processes",
            show_default="one per core",
            rich_help_panel="Parallel",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="ENGINE", help="Executor of units: local processes, or ray", rich_help_panel="Parallel"
        ),
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Ray cluster, such as auto or HOST:PORT",
            show_default="a new one on this machine",
            rich_help_panel="Parallel",
        ),
    ] = None,
    plan_only: Annotated[
        bool,
        typer.Option(
            "--plan-only", help="Write the list of units for --part, and stop", rich_help_panel="Parallel"
        ),
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Do every N-th unit of the list", rich_help_panel="Parallel"),
    ] = None,
    publish: Annotated[
        bool,
        typer.Option("--publish", help="Do the remaining units and publish the store", rich_help_panel="Parallel"),
    ] = False,
    unit_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Time without progress of a unit that ends the build",
            show_default="no limit",
            rich_help_panel="Advanced",
        ),
    ] = None,
    staging: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for copies from and to object storage", rich_help_panel="Advanced"
        ),
    ] = None,
    json: ui.AsJson = False,
    **values: Any,  # noqa: ANN401 - of `PrepareOptions`
) -> None:
    """Convert files of text or records to a store.

    Run the same command again to resume after a crash, or to add new files.
    """
    from tokenmill.build import plan_units, run_part
    from tokenmill.build.build import prepare as build
    from tokenmill.build.job import asked_for, find_function, search_current_folder

    _check_mode(inputs, plan_only=plan_only, part=part, publish=publish, engine=engine, address=address)
    options = _options_of(values)
    function = None if filter is None else find_function(filter)
    how: dict[str, Any] = {
        "tokenizer": tokenizer,
        "recipe": recipe,
        "map": function,
        "staging": staging,
        "options": options,
    }
    progress = False if ui.is_quiet() else None
    report: PrepareReport | UnitsReport | PartReport
    try:
        if part is not None:
            search_current_folder()  # for a function that the list of units names
            asked = asked_for(inputs, tokenizer, recipe, options, function) if inputs else None
            report = run_part(
                out,
                part,
                workers=workers,
                progress=progress,
                staging=staging,
                unit_timeout=unit_timeout,
                asked=asked,
            )
        elif plan_only:
            report = plan_units(inputs or [], out=out, rebuild=rebuild, **how)
        else:
            with _executor(engine, address, workers) as executor:
                how |= {"workers": workers, "executor": executor, "unit_timeout": unit_timeout}
                report = build(inputs or [], out=out, rebuild=rebuild, progress=progress, **how)
    except (KeyboardInterrupt, SystemExit):  # by Ctrl-C, by SIGTERM
        ui.print_note("interrupted; run the same command again to resume")
        raise
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
        raise ConfigError("prepare: no input files; name them before --out")
    if engine not in ENGINES:
        raise ConfigError(
            f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}; what runs the tokenizer is "
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
        ui.show_table(ui.facts_table(f"Units of {out}", rows))
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
            "finished": "nothing to do: the store is finished",
        }
        rows += [("note", notes[report.phase])] if report.phase in notes else []
        ui.show_table(ui.facts_table(f"Part {report.part} of {report.parts} of {out}", rows))
    else:
        _show_prepared(report)


def _roles(texts: list[str] | None) -> dict[str, str] | None:
    """Read `tool=train,user=mask`."""
    if not texts:
        return None
    text = ",".join(texts)
    pairs = [part.split("=", 1) for part in text.split(",")]
    if not all(len(pair) == 2 and all(word.strip() for word in pair) for pair in pairs):
        raise ConfigError(
            f"--mask: must be roles with train or mask, got {text!r}; for example tool=train,user=mask"
        )
    roles = [role.strip() for role, _ in pairs]
    twice = next((role for role in roles if roles.count(role) > 1), None)
    if twice is not None:
        raise ConfigError(f"--mask: role set twice: {twice!r}; remove one")
    return {role.strip(): action.strip() for role, action in pairs}


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())


def _show_prepared(report: PrepareReport) -> None:
    rows: list[tuple[str, object]] = []
    if report.new_files < report.files:
        news = f"{report.new_files} files, {report.new_documents:,} documents, {report.new_tokens:,} tokens"
        rows.append(("new", news if report.new_files else "nothing: all files are in the store already"))
    if report.resumed_units:
        rows.append(("resumed", f"{report.resumed_units} of {report.units} units were done before"))
    rows += [("documents", report.documents), ("tokens", report.tokens), ("shards", report.shards)]
    if report.new_files:
        rows.append(("text", ui.megabytes(report.text_bytes)))
        if report.kind == "seq":  # else templates write more than the text
            rows.append(("tokens per byte", round(report.tokens_per_byte, 4)))
        rows.append(("skipped", _counts(report.skipped) or "none"))
        rows += [("cut to max_seq_len", report.truncated)] if report.truncated else []
        rows += [("note", _counts(report.notes))] if report.notes else []
        rate = f"{report.megabytes_per_second:,.1f} MB of text per second"
        opening = f"{report.opening_seconds:.1f} s of it opening the tokenizer"
        rows.append(("time", f"{report.seconds:.1f} s, {opening}; then {rate}"))
    # What --tokenizer names if it is left out, which a newcomer may do unaware.
    engine = (
        "bytes: one id per byte; set --tokenizer for that of a model" if report.engine == "bytes" else report.engine
    )
    rows += [("BOS and EOS", report.framing), ("tokenizer engine", engine)]
    rows.append(("fingerprint", report.fingerprint))
    tables = [ui.facts_table(f"Store {report.path}", rows)]
    if len(report.stores) > 1 or report.stores[0].route:
        each = [(store.route, store.documents, store.tokens, store.shards) for store in report.stores]
        tables.append(Table(title="Stores", columns=("name", "documents", "tokens", "shards"), rows=each))
    ui.print_parts(tables)
    if ui.console.is_terminal and not is_address(str(report.path)) and len(report.stores) == 1:
        ui.print_note(f"next: tokenmill init {report.path}")


def import_(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Token files: a file, folder, glob or prefix")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="STORE", help="Folder of the store to write")],
    dtype: ui.Dtype = None,
    vocab_size: ui.VocabSize = None,
    eos_id: ui.EosId = None,
    bos_id: ui.BosId = None,
    format: ui.Format = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", "-t", metavar="SPEC", help="Tokenizer that made the ids, as for prepare"),
    ] = None,
    max_tokens_per_shard: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum number of tokens per shard")
    ] = None,
    rebuild: ui.Rebuild = False,
    json: ui.AsJson = False,
) -> None:
    """Convert third-party token files to a store.

    The store has checksums and is compared with the files.
    """
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
        ("compared", f"{report.compared:,} numbers, all equal to the files"),
        ("fingerprint", report.fingerprint),
    ]
    ui.show_table(ui.facts_table(f"Store {report.out}", rows))


def export(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a store, or token files")],
    to: Annotated[
        str, typer.Option("--format", metavar="NAME", help="megatron, nanoset, npy, astrai-bin, astrai-h5 or hf")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="New folder to write to")],
    drop_masks: Annotated[
        bool, typer.Option("--drop-masks", help="Drop masks that the format cannot hold")
    ] = False,
    dtype: ui.Dtype = None,
    vocab_size: ui.VocabSize = None,
    eos_id: ui.EosId = None,
    bos_id: ui.BosId = None,
    json: ui.AsJson = False,
) -> None:
    """Write a store in a third-party format.

    The files are read back with the reader of that project and compared with the store.
    """
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
        ("read back", f"{report.compared:,} numbers, all equal to the store"),
        *(("note", note) for note in report.notes),
    ]
    ui.show_table(ui.facts_table(f"Export {report.out}", rows))


def upload(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a finished store")],
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="s3://BUCKET/PATH, gs://, az:// or file:///FOLDER")
    ],
    trust_server: Annotated[
        bool, typer.Option("--trust-server", help="Trust checksums of an S3 server instead of reading back")
    ] = False,
    json: ui.AsJson = False,
) -> None:
    """Copy a store to object storage.

    Credentials come from the environment. Run the same command again to resume an interrupted upload: files that
    exist are verified, the others are sent, and the manifest is sent last.
    """
    from tokenmill.store.remote.upload import upload

    with ui.progress(ui.megabytes) as tell:
        report = upload(
            store,
            address,
            read_back=False if trust_server else None,
            progress=lambda done, total: tell("upload", done, total),
        )
    if json:
        ui.print_json(report)
        return
    rows: list[tuple[str, object]] = [
        ("files", report.files),
        ("bytes", ui.megabytes(report.bytes)),
        ("sent", f"{report.sent_files:,} files, {ui.megabytes(report.sent_bytes)}; the others existed"),
        ("verified", f"all files, {'by reading them back' if report.read_back else 'by checksums of the server'}"),
        ("fingerprint", report.fingerprint),
    ]
    ui.show_table(ui.facts_table(f"Store {report.address}", rows))
