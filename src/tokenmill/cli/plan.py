"""`tokenmill plan`: compile a run and tell what it will do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from tokenmill.cli import console as ui

if TYPE_CHECKING:
    from tokenmill.plan.report import PlanReport, SourceFacts, SourceShare, StageFacts
    from tokenmill.run.report import Costs, RunReport


def plan(
    run: ui.RunFile,
    json: ui.AsJson = False,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write tables, warnings and picture as a page.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="Write the picture of the run.")] = None,
    to_native: ui.ToNative = False,
    world_size: ui.WorldSize = None,
) -> None:
    """Check a run before it starts: stages, shares, epochs, first repeats, costs. Reads masks, but no token."""
    ui.check_file("--html", html)
    ui.check_file("--svg", svg)
    if to_native:
        from tokenmill.run.run import Run

        translation = Run.from_toml(run, world_size=world_size).translation
        assert translation is not None  # it was read from a file
        ui.print_native(translation)
        return
    opened = ui.open_run(run, world_size)
    with ui.busy("compiling the plan"):
        report = opened.report()
    if html is not None or svg is not None:
        from tokenmill.cli.picture import timeline

        picture = timeline(opened.plan(), report, opened.name, report.quarantined)
        if svg is not None:
            svg.write_text(picture, encoding="utf-8")
        if html is not None:
            text = ui.page(f"tokenmill plan: {opened.name}", lambda recorder: _show(recorder, report), picture)
            html.write_text(text, encoding="utf-8")
    if json:
        ui.print_json(report.to_json())
        return
    _show(ui.console, report)
    for file in (html, svg):
        if file is not None:
            ui.print_line(f"wrote {file}")


def _show(console: Console, report: RunReport) -> None:
    for view in tables(report):
        console.print(view)
    for warning in report.warnings:
        console.print(Text.assemble(("warning:", "bold yellow"), " ", warning), soft_wrap=True)
    for line in report.history:
        console.print(Text(f"history: {line}"), soft_wrap=True)
    totals = f"{report.steps:,} steps, {report.rows:,} rows, {report.tokens:,} tokens"
    totals += f", {report.skipped_steps:,} steps skipped" if report.skipped_steps else ""
    seconds = f"compiled in {report.costs.compile_seconds:.2f} s, about what a start takes"
    console.print(f"plan {report.fingerprint}  {totals}, {seconds}", soft_wrap=True)


def tables(report: RunReport) -> Iterator[ui.WideTable]:
    """Yield the report as tables; what no line says anything about has no column, and no table."""
    yield _stages(report.stages)
    yield _mixture(report.shares)
    yield _sources(report.sources)
    if report.quarantined:
        yield ui.WideTable(
            title="Quarantined",
            columns=("source", "from step", "documents", "tokens", "why"),
            rows=[
                (q.source, q.from_step, q.documents, q.tokens, q.reason or ("all of it" if q.whole else "–"))
                for q in report.quarantined
            ],
        )
    yield fates(report)
    audits = [(source, audit) for source, audits in report.supervision.items() for audit in audits]
    if audits:
        yield ui.WideTable(
            title="Supervision",
            columns=("source", "array", "records", "supervised %", "fully masked %"),
            rows=[
                (source, a.key, a.items, _rounded(a.supervised_percent), _rounded(a.fully_masked_percent))
                for source, a in audits
            ],
            names=2,
        )
    yield _costs(report.costs)


_DULL = {
    "ramp until": None,
    "lr_scale": 1,
    "lanes": None,
    "used up from step": None,
    "steps skipped": 0,
    "rows skipped": 0,
    "tokens skipped": 0,
    "of them skipped": 0,
}
"""Columns that are left out where every line says only this."""


def _columns(title: str, columns: Sequence[tuple[str, Sequence[object]]], names: int = 1) -> ui.WideTable:
    """Make a table of columns, each a header and cells."""
    told = [(name, cells) for name, cells in columns if name not in _DULL or set(cells) != {_DULL[name]}]
    rows = list(zip(*(cells for _, cells in told), strict=True))
    return ui.WideTable(title=title, columns=[name for name, _ in told], rows=rows, names=names)


def _stages(stages: Sequence[StageFacts]) -> ui.WideTable:
    return _columns(
        "Stages",
        [
            ("stage", [s.name for s in stages]),
            ("first step", [s.start_step for s in stages]),
            ("end step", [s.end_step for s in stages]),
            ("ramp until", [s.ramp_end for s in stages]),
            ("batch", [s.global_batch_size for s in stages]),
            ("seq_len", [s.seq_len for s in stages]),
            ("lr_scale", [s.lr_scale for s in stages]),
            ("rows", [s.rows for s in stages]),
            ("tokens", [s.tokens for s in stages]),
            ("steps skipped", [s.skipped_steps for s in stages]),
            ("rows skipped", [s.skipped_rows for s in stages]),
            ("tokens skipped", [s.skipped_tokens for s in stages]),
        ],
    )


def _mixture(shares: Sequence[SourceShare]) -> ui.WideTable:
    def figures(name: str) -> list[object]:
        values = [(share, getattr(share, name)) for share in shares]
        return [value if share.counted else f"about {value:,}" for share, value in values]

    return _columns(
        "Mixture",
        [
            ("stage", [s.stage for s in shares]),
            ("source", [s.source for s in shares]),
            ("asked %", [_rounded(100 * s.asked) for s in shares]),
            ("got %", [_rounded(100 * s.realised) for s in shares]),
            ("tokens asked %", [_rounded(100 * s.asked_tokens) for s in shares]),
            ("tokens got %", [_rounded(100 * s.realised_tokens) for s in shares]),
            ("rows", [s.rows for s in shares]),
            ("labels", figures("trained")),
            ("no label", figures("unlabelled")),
            ("padding", figures("padding")),
            ("epochs so far", [_rounded(s.epochs) for s in shares]),
            ("rows skipped", [s.skipped_rows for s in shares]),
        ],
        names=2,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _sources(sources: Sequence[SourceFacts]) -> ui.WideTable:
    return _columns(
        "Sources",
        [
            ("source", [s.name for s in sources]),
            ("rows an epoch", ["live" if s.rows is None else s.rows for s in sources]),
            ("lanes", [s.lanes for s in sources]),
            ("rows drawn", [s.drawn for s in sources]),
            ("of them skipped", [s.skipped for s in sources]),
            ("epochs", [_rounded(s.epochs) for s in sources]),
            ("first repeat", [s.first_repeat for s in sources]),
            ("used up from step", [s.gone_from for s in sources]),
        ],
    )


def fates(report: PlanReport) -> ui.WideTable:
    """Return what becomes of the tokens of each source in an epoch, as the last stage that uses it packs them."""
    return ui.WideTable(
        title="Fate of the tokens of an epoch",
        columns=("source", "tokens", "= trained", "+ masked", "+ dropped", "why", "padding"),
        rows=[
            (
                s.name,
                s.fates.tokens,
                s.fates.trained,
                s.fates.masked,
                sum(s.fates.dropped.values()),
                ", ".join(f"{reason} {number:,}" for reason, number in s.fates.dropped.items()) or "–",
                s.fates.padding,
            )
            for s in report.sources
            if s.fates
        ],
    )


def _costs(costs: Costs) -> ui.WideTable:
    most = max(costs.read_bytes_a_step, key=lambda name: costs.read_bytes_a_step[name])
    about = "" if costs.read_bytes_exact else "about "
    rows = [
        ("read by the whole run", about + ui.megabytes(costs.read_bytes), "tokens and masks, over all ranks"),
        ("read by a step", about + ui.megabytes(costs.read_bytes_a_step[most]), f"in stage {most}"),
        ("row indexes in memory", ui.megabytes(costs.index_bytes), "for each process"),
    ]
    if costs.mapped_index_bytes:
        rows.append(("row indexes in files", ui.megabytes(costs.mapped_index_bytes), "mapped, read as needed"))
    rows.append(("kept ready by a loader", ui.megabytes(costs.loader_bytes), "for each row of a micro-batch"))
    return ui.WideTable(title="Reading and memory", columns=("what", "bytes", "of"), rows=rows)
