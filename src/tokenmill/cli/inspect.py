"""`tokenmill inspect`, `verify` and `view`: what is in a store, or behind a run, and whether it is intact."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tokenmill.cli import console as ui
from tokenmill.errors import ConfigError, MissingExtraError, StoreError
from tokenmill.view.tables import fates, store_tables

if TYPE_CHECKING:
    from tokenmill.inspect.examples import Example
    from tokenmill.run.run import Run
    from tokenmill.store import ForeignOptions, Store, VerifyReport

MAX_TOKENS = 1000
"""Tokens of a document that are listed."""
MARKS = ("⟦", "⟧")
"""Around trained text where there is no colour."""
CONTROLS = ("‹", "›")
"""Around control tokens there, and in lists of tokens."""


def inspect(
    place: Annotated[
        str,
        typer.Argument(metavar="STORE|RUN.toml", help="Stores, or config of a run"),
    ],
    document: Annotated[
        int | None, typer.Option(metavar="N", help="Document to show, with its tokens and masks")
    ] = None,
    find: ui.Find = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the random examples")] = 0,
    html: Annotated[Path | None, typer.Option(metavar="PATH", help="HTML page to write")] = None,
    json: ui.AsJson = False,
    tokenizer: ui.TextsBy = None,
    dtype: ui.Dtype = None,
    vocab_size: ui.VocabSize = None,
    eos_id: ui.EosId = None,
    bos_id: ui.BosId = None,
    format: ui.Format = None,
) -> None:
    """Show statistics and examples of stores, or of a run."""
    from tokenmill.inspect.examples import examples
    from tokenmill.inspect.stores import inspect_store, open_stores
    from tokenmill.plan.report import report
    from tokenmill.run.run import is_config
    from tokenmill.store import ForeignOptions

    options = ForeignOptions(dtype=dtype, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id, format=format)
    ui.check_file("--html", html)
    path = ui.place(place)
    if document is not None:
        _inspect_document(path, options, document, tokenizer, json=json)
        return
    run = _open_run(path, options) if is_config(path) else None
    if find is not None:
        _show_found(run.stores if run else open_stores(path, options), find, tokenizer, json=json)
        return
    counted = report(run.plan()) if run else None
    shown = []
    with ui.busy("reading lengths and masks"):
        for name, store in (run.stores if run else open_stores(path, options)).items():
            decoder = ui.tokenizer_for(store, tokenizer)
            shown.append((name, inspect_store(store, decoder), examples(store, decoder, seed=seed)))

    if html is not None:
        from tokenmill.view.pages import standalone, stores_html

        body = stores_html(shown, None if counted is None else fates(counted))
        ui.write_file(html, standalone(f"tokenmill: {Path(path).absolute().name}", body))
    if json:
        fates_of = {source.name: {"fates": source.fates} for source in counted.sources} if counted else {}
        ui.print_json({name: store.to_json() | fates_of.get(name, {}) for name, store, _ in shown})
        return
    for number, (name, contents, texts) in enumerate(shown):
        if number:
            ui.print_line("")
        ui.print_parts(store_tables(name, contents, inputs=False))
        _show_examples(ui.console, texts)
    if counted is not None:
        ui.print_line("")
        ui.show_table(fates(counted))
    if html is not None:
        ui.print_line(f"wrote {html}")


def _inspect_document(
    path: Path | str, options: ForeignOptions, document: int, tokenizer: str | None, *, json: bool
) -> None:
    from tokenmill.inspect.examples import inspect_document
    from tokenmill.run.run import is_config
    from tokenmill.store import open_store

    if is_config(path):
        raise ConfigError(f"--document: must be given with a store, got the run {path}; name the store of a source")
    store = open_store(path, **asdict(options))
    contents = inspect_document(store, document, ui.tokenizer_for(store, tokenizer))
    if json:
        ui.print_json(contents.to_json())
        return
    ui.print_line(f"Document {document} of {store.where}, from {ui.printable(str(contents.origin))}")
    for name, value in contents.origin.kept.items():
        ui.print_line(f"{ui.printable(name)}: {ui.printable(str(value))}")
    if contents.rewards is not None:
        ui.print_line(f"rewards: {', '.join(map(str, contents.rewards))}")
    for part in contents.parts:
        columns = ("token", "id", "text", "mask", "trained")
        nothing = [None] * len(part.ids)
        strings, masks, controls = part.strings or nothing, part.mask or nothing, part.control or nothing
        joined = part.continues or nothing
        lines = [
            (
                place,
                number,
                "(continued)" if continues else _token(text, bool(control)),
                mask,
                "yes" if trained else "no",
            )
            for place, (number, text, control, mask, trained, continues) in enumerate(
                zip(part.ids, strings, controls, masks, part.trained, joined, strict=True)
            )
        ]
        ui.print_table(f"{part.key}: {len(lines):,} tokens", columns, lines[:MAX_TOKENS])
        if len(lines) > MAX_TOKENS:
            ui.print_line(f"{len(lines) - MAX_TOKENS:,} more tokens; --json has them all")


def _show_found(stores: Mapping[str, Store], find: str, tokenizer: str | None, *, json: bool) -> None:
    """Print the documents with a kept field: number, origin and the beginning of the text."""
    from tokenmill.inspect.examples import excerpt
    from tokenmill.types import Span

    found: list[dict[str, Any]] = []
    for name, store in stores.items():
        with ui.busy("reading kept fields"):
            documents = ui.find_documents(store, find)
        decoder = ui.tokenizer_for(store, tokenizer) if documents else None
        for document in documents:
            begin, end = store.document_bounds(document)
            span = Span(document=document, start=0, length=end - begin)
            text = None if decoder is None else excerpt(store, span, decoder, 40)
            found.append({"store": name, "document": document, "origin": store.origin(document), "text": text})
    if json:
        ui.print_json(found)
    for each in () if json else found:
        ui.print_line(f"document {each['document']} of {each['store']}, from {ui.printable(str(each['origin']))}")
        if each["text"] is not None:
            ui.print_line(f"  {ui.printable(each['text'])}")
    if not found:
        ui.show_error(f"no document has {find}; the value must be the whole of the kept field")
        raise typer.Exit(1)


def _token(text: str | None, control: bool) -> str | None:
    """Show a token; a control token looks different from a text that spells it."""
    if text is None:
        return None
    return f"{CONTROLS[0]}{ui.printable(text)}{CONTROLS[1]}" if control else repr(ui.printable(text))


def _open_run(path: Path | str, options: ForeignOptions) -> Run:
    """Open a run, and describe its live text, which has no store, on stderr."""
    from tokenmill.run.run import Run

    if options.given:
        name, value = next(iter(options.given.items()))
        raise ConfigError(
            f"{path}: {name} = {value!r} cannot be combined with a run; write it under [[sources]] of the config"
        )
    run = Run.from_toml(path)
    for name, rows in run.live.items():
        files = len(rows.source.files)
        size = ui.megabytes(sum(file.bytes for file in rows.source.files))
        ui.print_note(
            f"{name}: live text, {files:,} files of {size}, {rows.lanes:,} lanes, tokenized as it is read"
        )
    return run


def _show_examples(console: Console, examples: list[Example]) -> None:
    """Print examples. Trained text and special tokens have a colour, or brackets without colours."""
    coloured = console.is_terminal and console.color_system is not None and not console.no_color
    trained_marks, control_marks = (("", ""), ("", "")) if coloured else (MARKS, CONTROLS)
    how = (
        "trained bright, masked dim, control tokens on a ground of their own"
        if coloured
        else f"{MARKS[0]}trained{MARKS[1]}, masked without brackets, {CONTROLS[0]}control tokens{CONTROLS[1]}"
    )
    if examples:
        console.print(Text(f"\nExamples: {how}", "bold"))
    for example in examples:
        console.print(example.title)
        text = Text()
        for index, piece in enumerate(example.runs):
            before, behind = example.runs[index - 1 : index], example.runs[index + 1 : index + 2]
            opens = piece.trained and not (before and before[0].trained and not piece.left_out)
            closes = piece.trained and not (behind and behind[0].trained and not behind[0].left_out)
            shown = ui.printable(piece.text)
            shown = f"{control_marks[0]}{shown}{control_marks[1]}" if piece.control else shown
            shown = (trained_marks[0] if opens else "") + shown + (trained_marks[1] if closes else "")
            text.append(f" … {piece.left_out:,} tokens … " if piece.left_out else "", "dim")
            text.append(shown, ("bold green" if piece.trained else "dim") + (" reverse" if piece.control else ""))
        text.append(f" … {example.left_out:,} tokens" if example.left_out else "", "dim")
        console.print(text, soft_wrap=True)


def verify(
    stores: Annotated[list[str], typer.Argument(metavar="STORE", help="Folders or addresses of stores")],
    json: ui.AsJson = False,
    add_hashes: Annotated[
        bool, typer.Option("--add-hashes", help="Write document hashes to stores without them")
    ] = False,
    dtype: ui.Dtype = None,
    vocab_size: ui.VocabSize = None,
    eos_id: ui.EosId = None,
    bos_id: ui.BosId = None,
    format: ui.Format = None,
) -> None:
    """Check every byte of stores and name broken files.

    The exit code is 1 if a file is broken, and 2 if a store does not exist. Third-party token files have no
    checksums; the checks that were made instead are printed.
    """
    from tokenmill.inspect.stores import stores_at
    from tokenmill.store import ForeignOptions, check_store, open_store
    from tokenmill.store.hashes import write_hashes

    options = ForeignOptions(dtype=dtype, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id, format=format)
    named_places = [ui.place(store) for store in stores]
    places = [place for named in named_places for place in stores_at(named)]
    total, done = sum(_num_bytes(place, options) for place in places), 0
    with ui.progress(ui.megabytes) as tell:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            tell("verify", done, total)

        reports = []
        for place in places:
            reports.append(check_store(place, progress=advance, options=options))
            if add_hashes and not reports[-1].problems:
                write_hashes(open_store(place))
            if not json and not reports[-1].problems:
                _show_verified(reports[-1])
            for problem in reports[-1].problems:
                ui.show_error(str(problem))
    ok = not any(report.problems for report in reports)
    if json:
        checked = [_to_json(report) for report in reports]
        named = {"path": stores[0]} if len(stores) == 1 else {}
        ui.print_json(checked[0] if places == named_places[:1] else {**named, "ok": ok, "stores": checked})
    if not ok:
        raise typer.Exit(2 if any(isinstance(place, Path) and not place.exists() for place in places) else 1)


def _num_bytes(store: Path | str, options: ForeignOptions) -> int:
    """Return how much there is to read; nothing of what cannot be opened."""
    from tokenmill.store import open_store
    from tokenmill.store.verify import bytes_to_read

    try:
        return bytes_to_read(open_store(store, **asdict(options)))
    except (StoreError, OSError):
        return 0


def _to_json(report: VerifyReport) -> dict[str, object]:
    return {
        "path": str(report.path),
        "ok": not report.problems,
        "shards": report.shards,
        "files": report.files,
        "bytes": report.bytes,
        "documents": report.documents,
        "tokens": report.tokens,
        "fingerprint": report.fingerprint,
        **({} if report.format == "tokenmill" else {"format": report.format, "checked": report.checked}),
        "problems": [str(problem) for problem in report.problems],
    }


def _show_verified(report: VerifyReport) -> None:
    text = (
        f"  {report.path}: {report.files} files in {report.shards} {'shard' if report.shards == 1 else 'shards'}, "
        f"{ui.megabytes(report.bytes)}, {report.documents:,} documents, {report.tokens:,} tokens; "
        f"{'' if report.format == 'tokenmill' else report.format + ': '}{report.checked}"
    )
    ui.console.print(Text.assemble(("ok", "bold green"), text), soft_wrap=True)


def view(
    path: Annotated[str, typer.Argument(metavar="RUN.toml|STORE", help="Config of a run, or a store")],
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65_535, help="Port; 0 for a free one")] = 0,
    diff: Annotated[Path | None, typer.Option(metavar="OTHER.toml", help="Run to compare with")] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on")] = "127.0.0.1",
    expose: Annotated[
        bool,
        typer.Option("--expose", help="Allow access from other machines to all documents"),
    ] = False,
) -> None:
    """Serve a run or store as local web pages.

    The pages show batches, mixture, packing, documents and the differences of two runs. No file is written, and the
    pages load nothing from a network.
    """
    try:
        import uvicorn

        from tokenmill.view.server import LOOPBACK, make_app, new_word
    except ImportError as error:
        raise MissingExtraError(
            f"tokenmill view: starlette or uvicorn is not installed ({error}); pip install 'tokenmill[view]'"
        ) from None
    from tokenmill.view.views import Opened

    if host not in LOOPBACK and not expose:
        raise ConfigError(
            f"--host: must be an address of this machine alone, got {host!r}, by which others could read every "
            "document; add --expose if that is meant"
        )
    opened = Opened(path=ui.place(path), other=diff)
    with ui.busy("opening"):
        _ = opened.stores if opened.run is None else opened.run.plan()
        if diff is not None:
            if opened.run is None:
                raise ConfigError(f"--diff: must be given with a run, got the store {path}; open a RUN.toml")
            opened.beside(diff.name).the_run.plan()  # a wrong path is named now, not on the page
    with _listen(host, port) as listening:
        port = listening.getsockname()[1]
        word, names = new_word(), (host, *(LOOPBACK if host in LOOPBACK else ()))
        app = make_app(opened, word, tuple(f"{name}:{port}" for name in dict.fromkeys(names)))
        if host not in LOOPBACK:
            ui.print_line(f"warning: {path} and all documents of its stores are open to anyone with this address")
        ui.print_line(f"http://{host}:{port}/{word}/  (Ctrl-C ends it)")
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    """Listen at an address of this machine, or raise an error that names the wrong option."""
    try:
        return socket.create_server((host.strip("[]"), port))
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python repeats the address behind it
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(
                f"--port: must be a free port, got {port} ({reason}); leave it out, and a free one is taken"
            ) from None
        raise ConfigError(
            f"--host: must be an address of this machine, got {host!r} ({reason}); leave it out for 127.0.0.1"
        ) from None
