"""`tokenmill plan`, `diff`, `fork`: what a run will do, where two differ, and one that leaves another at a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli import console as ui
from tokenmill.cli.summary import plan_parts
from tokenmill.errors import ConfigError
from tokenmill.view.tables import plan_notes, plan_tables, reading_tables

if TYPE_CHECKING:
    from tokenmill.cli.summary import Part
    from tokenmill.run.compare import Difference
    from tokenmill.run.quarantine import Quarantine
    from tokenmill.run.reading import ReadingReport
    from tokenmill.run.report import RunReport

MAX_MISSING = 20
"""Values without a document that are printed."""


def plan(
    run: ui.RunFile,
    full: ui.Full = False,
    json: ui.AsJson = False,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="HTML page to write, with tables and picture")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="Picture of the run to write")] = None,
    to_native: ui.ToNative = False,
    world_size: ui.WorldSize = None,
    remote: Annotated[
        bool,
        typer.Option(
            "--remote",
            help="Estimate the cost of reading from object storage",
            rich_help_panel="Object storage",
        ),
    ] = False,
    nodes: Annotated[
        int, typer.Option(metavar="N", help="Machines that train", min=1, rich_help_panel="Object storage")
    ] = 1,
    latency: Annotated[
        float,
        typer.Option(
            metavar="MS", help="Time to the first byte of a request", min=0, rich_help_panel="Object storage"
        ),
    ] = 50.0,
    bandwidth: Annotated[
        float, typer.Option(metavar="GBIT", help="Bandwidth of a machine", rich_help_panel="Object storage")
    ] = 10.0,
    request_price: Annotated[
        float,
        typer.Option(metavar="USD", help="Price of 1,000 requests", min=0, rich_help_panel="Object storage"),
    ] = 0.0004,
    gb_price: Annotated[
        float,
        typer.Option(metavar="USD", help="Price of a GB", min=0, rich_help_panel="Object storage"),
    ] = 0.0,
) -> None:
    """Check a run and print what it trains on.

    Reads lengths and masks, but no token.
    """
    ui.check_file("--html", html)
    ui.check_file("--svg", svg)
    if to_native:
        from dataclasses import replace

        from tokenmill.run.fork import native_tables
        from tokenmill.run.run import Run

        read = Run.from_toml(run, world_size=world_size)
        assert read.translation is not None  # it was read from a file
        ui.print_native(replace(read.translation, tables=native_tables(read, read.translation)))
        return
    opened = ui.open_run(run, world_size)
    with ui.busy("compiling the plan"):
        report = opened.report()
        reading = None
        if remote or opened.network is not None:
            from tokenmill.run.reading import Link, Prices

            reading = opened.reading(
                link=Link(nodes=nodes, latency_ms=latency, gbit=bandwidth),
                prices=Prices(thousand_requests=request_price, gigabyte=gb_price),
            )
    if html is not None or svg is not None:
        from tokenmill.view.pages import plan_html, standalone
        from tokenmill.view.picture import timeline

        picture = timeline(opened.plan(), report, opened.name, report.quarantined, report.evals)
        if svg is not None:
            ui.write_file(svg, picture)
        if html is not None:
            body = f"<figure>{picture}</figure>{plan_html(report, reading)}"
            ui.write_file(html, standalone(f"tokenmill plan: {opened.name}", body))
    if json:
        ui.print_json({**report.to_json(), **({"remote": reading.to_json()} if reading else {})})
        return
    ui.print_parts(_all_parts(report, reading) if full else plan_parts(report, run.name, reading))
    for file in (html, svg):
        if file is not None:
            ui.print_line(f"wrote {file}")


def _all_parts(report: RunReport, reading: ReadingReport | None) -> Iterator[Part]:
    yield from plan_tables(report)
    yield from reading_tables(reading) if reading else ()
    yield from plan_notes(report, reading)


# Two runs


def diff(
    old: Annotated[Path, typer.Argument(metavar="RUN1.toml", help="Config of a run")],
    new: Annotated[Path, typer.Argument(metavar="RUN2.toml", help="Config of another run")],
    rows: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Maximum number of rows to compare"),
    ] = 1 << 22,
    world_size: ui.WorldSize = None,
    json: ui.AsJson = False,
) -> None:
    """Find the first step at which two runs differ.

    Prints the first difference of the plans, the changed keys and the number of rows that differ. The exit code is
    0 if all batches are the same, 1 if not, and 2 after an error. Reads no token.
    """
    left, right = (ui.open_run(path, world_size) for path in (old, new))
    with ui.progress() as tell:
        difference = left.diff(right, limit_rows=rows, progress=lambda count: tell("rows compared", count, None))
    if json:
        ui.print_json(difference.to_json())
    else:
        for line in _sentences(difference):
            ui.print_line(line)
    raise typer.Exit(0 if difference.same else 1)


def _sentences(difference: Difference) -> Iterator[str]:
    if difference.first_step is not None:
        stage = f"stage {difference.stage!r}"
        yield f"first difference at step {difference.first_step:,} of {difference.steps:,} ({stage})"
        yield f"first difference of the plans: {difference.cause}"
    elif difference.same:
        yield f"the same batches at all {difference.steps:,} steps"
    else:
        assert difference.begins is not None  # or all would be the same
        yield (
            f"no difference within the first {difference.end_step - difference.begins:,} steps after step "
            f"{difference.begins:,}, where the plans begin to differ: {difference.cause}"
        )
        yield "raise --rows to compare more"
    if difference.changes:
        yield from ("changed keys:", *(f"  {change}" for change in difference.changes))
    if difference.first_step is not None:
        differing, compared = difference.differing, difference.compared
        share = f"{differing / compared:.1%}"
        if difference.complete:
            yield f"{differing:,} of {compared:,} rows differ after it ({share})"
        else:
            yield (
                f"{differing:,} of the first {compared:,} rows after it differ ({share}); the other "
                f"{difference.total - compared:,} were not compared, raise --rows to compare more"
            )


def fork(
    run: ui.RunFile,
    at: Annotated[int, typer.Option(metavar="STEP", help="First step of the new run that may differ")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="NEW.toml", help="Config to write, with a state next to it")
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the new stage", show_default="fork")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WEIGHTS", help="Weights of the new stage, such as web=3,books=1", show_default="as before"
        ),
    ] = None,
    world_size: ui.WorldSize = None,
    json: ui.AsJson = False,
) -> None:
    """Start a new run from a step of another.

    Writes its config and state. All batches before that step are the same, which is checked before anything is
    written.
    """
    opened = ui.open_run(run, world_size)
    fork = opened.fork(at=at, to=out, name=name, weights=_weights(weights) if weights else None)
    if json:
        ui.print_json(fork)
        return
    state = out.with_name(fork.state.name)
    ui.print_line(f"wrote {out} and {state}: stage {fork.stage!r} begins at step {fork.step:,}")
    ui.print_line(f"all batches before are those of {run} (fingerprint {fork.shared[:12]})")
    if not fork.edited:
        ui.print_line(f"so are all after it, until you edit stage {fork.stage!r}")


def quarantine(
    run: ui.RunFile,
    file: Annotated[Path, typer.Option(metavar="PATH", help="File with one value of the field per line")],
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the source", show_default="the only one")
    ] = None,
    field: Annotated[str, typer.Option(metavar="NAME", help="Kept field of the values")] = "url",
    from_step: Annotated[int, typer.Option(metavar="N", min=0, help="First step without the documents")] = 0,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason, for the config and the history")] = "",
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Ignore values that are in no document")
    ] = False,
    json: ui.AsJson = False,
) -> None:
    """Remove documents from the rest of a run.

    Documents are named by url, id or another kept field. Their numbers are written to a file next to RUN.toml, and
    a quarantine that names it is added to RUN.toml. If a value is in no document, nothing is written and the exit
    code is 1.
    """
    from tokenmill.run.quarantine import quarantine as add
    from tokenmill.run.quarantine import read_values

    values = read_values(file)
    with ui.busy("reading kept fields"):
        edit = add(
            run,
            values,
            source=source,
            field=field,
            from_step=from_step,
            reason=reason,
            skip_missing=skip_missing,
        )
    if json:
        ui.print_json(edit)
    else:
        _show_quarantine(run, field, edit)
    if edit.missing and not skip_missing:
        ui.show_error(
            f"nothing was written: {len(edit.missing):,} of {edit.values:,} values of {field!r} are in no document "
            f"of {edit.source!r}; correct them, or pass --skip-missing"
        )
        raise typer.Exit(1)


def _show_quarantine(run: Path, field: str, edit: Quarantine) -> None:
    values = f"{edit.values - len(edit.missing):,} of {edit.values:,} values of {field!r}"
    ui.print_line(f"{values} are in {edit.documents:,} documents of {edit.source!r}")
    for value in edit.missing[:MAX_MISSING]:
        ui.print_note(f"  not found: {ui.printable(value)}")
    if len(edit.missing) > MAX_MISSING:
        ui.print_note(f"  and {len(edit.missing) - MAX_MISSING:,} more; --json lists all")
    if edit.file is not None:
        ui.print_line(
            f"wrote {edit.file if run.is_symlink() else run.with_name(edit.file.name)}: {edit.added:,} documents"
        )
        ui.print_line(f"added to {run}:\n\n{ui.printable(edit.edit).replace('⏎', '').rstrip()}")
    elif edit.documents and not edit.missing:
        ui.print_line("nothing to add: all of them are in quarantine from that step on")


def _weights(texts: list[str]) -> dict[str, float]:
    """Read the weights of sources."""
    weights: dict[str, float] = {}
    for part in ",".join(texts).split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        try:
            weight = float(number)
        except ValueError:
            raise ConfigError(
                f"--weights: expected a list of name=number, got {part.strip()!r}; for example web=0.5,books=0.5"
            ) from None
        if name in weights:
            raise ConfigError(f"--weights: must name each source once, got {name!r} twice; leave one out")
        weights[name] = weight
    return weights
