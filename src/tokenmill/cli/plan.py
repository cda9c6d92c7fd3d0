"""`tokenmill plan`, `diff`, `fork`: what a run will do, where two differ, and one that leaves another at a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from tokenmill.cli import console as ui
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.plan.report import PlanReport, SourceShare, StageFacts
    from tokenmill.run.compare import Difference
    from tokenmill.run.reading import ReadingReport
    from tokenmill.run.report import Costs, EvalFacts, RunReport


def plan(
    run: ui.RunFile,
    json: ui.AsJson = False,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write tables, warnings and picture as a page.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="Write the picture of the run.")] = None,
    to_native: ui.ToNative = False,
    world_size: ui.WorldSize = None,
    remote: Annotated[
        bool,
        typer.Option(
            "--remote",
            help="Tell what reading from object storage takes, of local stores as well, before an upload.",
        ),
    ] = False,
    nodes: Annotated[int, typer.Option(help="With --remote: machines that train.", min=1)] = 1,
    latency: Annotated[float, typer.Option(metavar="MS", help="With --remote: of a request.", min=0)] = 50.0,
    bandwidth: Annotated[float, typer.Option(metavar="GBIT", help="With --remote: of a machine, a second.")] = 10.0,
    request_price: Annotated[
        float, typer.Option(metavar="USD", help="With --remote: of 1,000 requests; default: S3 Standard.", min=0)
    ] = 0.0004,
    gb_price: Annotated[
        float, typer.Option(metavar="USD", help="With --remote: of a GB; default: S3, within its region.", min=0)
    ] = 0.0,
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
        reading = None
        if remote or opened.network is not None:
            from tokenmill.run.reading import Link, Prices

            reading = opened.reading(
                link=Link(nodes=nodes, latency_ms=latency, gbit=bandwidth),
                prices=Prices(thousand_requests=request_price, gigabyte=gb_price),
            )
    if html is not None or svg is not None:
        from tokenmill.view.picture import timeline

        picture = timeline(opened.plan(), report, opened.name, report.quarantined, report.evals)
        if svg is not None:
            svg.write_text(picture, encoding="utf-8")
        if html is not None:
            text = ui.page(
                f"tokenmill plan: {opened.name}", lambda recorder: _show(recorder, report, reading), picture
            )
            html.write_text(text, encoding="utf-8")
    if json:
        ui.print_json({**report.to_json(), **({"remote": reading.to_json()} if reading else {})})
        return
    _show(ui.console, report, reading)
    for file in (html, svg):
        if file is not None:
            ui.print_line(f"wrote {file}")


def _show(console: Console, report: RunReport, reading: ReadingReport | None = None) -> None:
    for view in tables(report):
        console.print(view)
    if reading is not None:
        for view in _reading(reading):
            console.print(view)
        link, prices = reading.link, reading.prices
        console.print(
            f"object storage: nodes {link.nodes}, {link.latency_ms:g} ms a request, {link.concurrency} at a time, "
            f"{link.gbit:g} Gbit/s; {prices.thousand_requests:g} $ for 1,000 requests, {prices.gigabyte:g} $ a GB "
            "(defaults: S3 Standard, read within its region)",
            soft_wrap=True,
            highlight=False,
        )
    for warning in report.warnings:
        console.print(Text.assemble(("warning:", "bold yellow"), " ", warning), soft_wrap=True)
    for line in report.history:
        console.print(Text(f"history: {line}"), soft_wrap=True)
    if report.epochs is not None:
        console.print(Text(report.epochs.sentence(report.steps)), soft_wrap=True)
    totals = f"{report.steps:,} steps, {report.rows:,} rows, {report.tokens:,} tokens"
    totals += f", {report.skipped_steps:,} steps skipped" if report.skipped_steps else ""
    seconds = f"compiled in {report.costs.compile_seconds:.2f} s, about what a start takes"
    console.print(f"plan {report.fingerprint}  {totals}, {seconds}", soft_wrap=True)


def tables(report: RunReport) -> Iterator[ui.WideTable]:
    """Yield the report as tables; what no line says anything about has no column, and no table."""
    yield _stages(report)
    yield _mixture(report.shares)
    yield _sources(report)
    if report.quarantined:
        yield ui.WideTable(
            title="Quarantined",
            columns=("source", "from step", "documents", "tokens", "why"),
            rows=[
                (q.source, q.from_step, q.documents, q.tokens, q.reason or ("all of it" if q.whole else "–"))
                for q in report.quarantined
            ],
        )
    if report.evals:
        yield _evals(report.evals)
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
    if report.imbalance:
        yield ui.WideTable(
            title="Waiting of ranks: how often as long as without",
            columns=("stage", "ranks", "rows in order", "rows dealt by cost"),
            rows=[(i.stage, i.ranks, round(i.in_order, 3), round(i.dealt, 3)) for i in report.imbalance],
        )
    yield _costs(report.costs)


_DULL = {
    "ramp until": None,
    "tokens before": 0,
    "lr_scale": 1,
    "labels an input": 1,
    "segments filled up to": 1,
    "cut for its middle": None,
    "lanes": None,
    "held out": 0,
    "every": None,
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


def _stages(report: RunReport) -> ui.WideTable:
    stages = report.stages
    return _columns(
        "Stages",
        [
            ("stage", [s.name for s in stages]),
            ("first step", [s.start_step for s in stages]),
            ("end step", [s.end_step for s in stages]),
            ("ramp until", [s.ramp_end for s in stages]),
            ("tokens before", [s.start_tokens for s in stages]),
            ("batch", [_batch(s) for s in stages]),
            ("seq_len", [s.seq_len for s in stages]),
            ("labels an input", [report.horizon for _ in stages]),
            ("segments filled up to", [report.segment_multiple for _ in stages]),
            ("lr_scale", [s.lr_scale for s in stages]),
            ("rows", [s.rows for s in stages]),
            ("tokens", [s.tokens for s in stages]),
            ("steps skipped", [s.skipped_steps for s in stages]),
            ("rows skipped", [s.skipped_rows for s in stages]),
            ("tokens skipped", [s.skipped_tokens for s in stages]),
        ],
    )


def _batch(facts: StageFacts) -> int | str:
    first, last = facts.global_batch_size, facts.last_batch_size
    return first if first == last else f"{first:,} to {last:,}"


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


def _sources(report: RunReport) -> ui.WideTable:
    sources = report.sources
    return _columns(
        "Sources",
        [
            ("source", [s.name for s in sources]),
            ("rows an epoch", ["live" if s.rows is None else s.rows for s in sources]),
            ("lanes", [s.lanes for s in sources]),
            ("cut for its middle", [report.fim.get(s.name) for s in sources]),
            ("rows drawn", [s.drawn for s in sources]),
            ("of them skipped", [s.skipped for s in sources]),
            ("epochs", [_rounded(s.epochs) for s in sources]),
            ("first repeat", [s.first_repeat for s in sources]),
            ("used up from step", [s.gone_from for s in sources]),
        ],
    )


def _evals(evals: Sequence[EvalFacts]) -> ui.WideTable:
    return _columns(
        "Evals",
        [
            ("eval", [e.name for e in evals]),
            ("documents", [e.documents for e in evals]),
            ("held out", [e.held_out for e in evals]),
            ("rows", [e.rows for e in evals]),
            ("seq_len", [e.seq_len for e in evals]),
            ("labels", [e.labels for e in evals]),
            ("every", [e.every if e.every_tokens is None else f"{e.every_tokens:,} tokens" for e in evals]),
            ("trained on", [_trained_on(e) for e in evals]),
        ],
    )


def _trained_on(facts: EvalFacts) -> str:
    """Say of an eval which of its documents are trained on: none, so many, or what is not known."""
    known = ", ".join(f"{o.documents:,} in {o.source}" for o in facts.overlaps if o.documents)
    unknown = ", ".join(f"{o.source} not known" for o in facts.overlaps if o.unknown is not None)
    return ", ".join(text for text in (known, unknown) if text) or "none"


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


def _reading(report: ReadingReport) -> Iterator[ui.WideTable]:
    """Yield what each stage asks of object storage, and what an epoch of each source does."""
    lines = report.readings
    told = [f"{r.shuffle}, as planned" if r.is_planned else r.shuffle for r in lines]
    names = [("stage", [r.stage for r in lines]), ("source", [r.source for r in lines]), ("shuffle", told)]
    for title, parts in (
        ("Object storage, a stage", [1.0] * len(lines)),
        ("Object storage, an epoch", [max(1.0, r.epochs) for r in lines]),
    ):
        yield _columns(
            title,
            [
                *names,
                ("requests", [round(r.requests / part) for r, part in zip(lines, parts, strict=True)]),
                ("bytes", [ui.megabytes(round(r.bytes / part)) for r, part in zip(lines, parts, strict=True)]),
                ("a request", [ui.megabytes(round(r.mean_request_bytes)) for r in lines]),
                ("mirror a node", [ui.megabytes(r.mirror_bytes) if r.mirror_bytes else "–" for r in lines]),
                ("hours", [_rounded(r.seconds / part / 3600) for r, part in zip(lines, parts, strict=True)]),
                ("$", [_rounded(r.dollars / part) for r, part in zip(lines, parts, strict=True)]),
            ],
            names=3,
        )


# Two runs


def diff(
    old: Annotated[Path, typer.Argument(metavar="RUN1.toml", help="Config of a run.")],
    new: Annotated[Path, typer.Argument(metavar="RUN2.toml", help="Config of another.")],
    rows: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Most rows to compare, before the first difference and after it."),
    ] = 1 << 22,
    world_size: ui.WorldSize = None,
    json: ui.AsJson = False,
) -> None:
    """Find the first step at which two runs differ, the change that causes it, and how many rows differ.

    The exit code is 0 if all batches are the same, 1 if not, and 2 if that cannot be told. Reads no token.
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
    deciding = [str(change) for change in difference.changes if change.step is not None]
    idle = [str(change) for change in difference.changes if change.step is None]
    if difference.first_step is not None:
        stage = f"stage {difference.stage!r}"
        yield f"first difference at step {difference.first_step:,} of {difference.steps:,} ({stage})"
        yield f"because {deciding[0]}"
        if deciding[1:]:
            yield from ("other changes:", *(f"  {change}" for change in deciding[1:]))
    elif difference.same:
        yield f"the same batches at all {difference.steps:,} steps"
    else:
        assert difference.begins is not None  # or all would be the same
        yield (
            f"no difference within the first {difference.end_step - difference.begins:,} steps after step "
            f"{difference.begins:,}, where the configs begin to differ in {', '.join(deciding)}"
        )
        yield "raise --rows to compare more"
    if idle:
        yield from ("changes that change no batch:", *(f"  {change}" for change in idle))
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
    at: Annotated[int, typer.Option(metavar="STEP", help="First step of the new run's own.")],
    to: Annotated[Path, typer.Option(metavar="NEW.toml", help="Config to write; its state is written beside it.")],
    name: Annotated[
        str | None, typer.Option(help="Of the stage that begins there; default: fork.", show_default=False)
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="web=0.5,books=0.5", help="Of that stage; default: as before.")
    ] = None,
    world_size: ui.WorldSize = None,
    json: ui.AsJson = False,
) -> None:
    """Start a new run from any step of another: write its config and its state.

    All batches before that step are the same; this is proven before anything is written.
    """
    opened = ui.open_run(run, world_size)
    fork = opened.fork(at=at, to=to, name=name, weights=None if weights is None else _weights(weights))
    if json:
        ui.print_json(asdict(fork))
        return
    state = to.with_name(fork.state.name)
    ui.print_line(f"wrote {to} and {state}: stage {fork.stage!r} begins at step {fork.step:,}")
    ui.print_line(f"all batches before are those of {run} (fingerprint {fork.shared[:12]})")
    if not fork.edited:
        ui.print_line(f"so are all after it, until you edit stage {fork.stage!r}")


def _weights(text: str) -> dict[str, float]:
    """Read the weights of sources."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        try:
            weight = float(number)
        except ValueError:
            raise ConfigError(
                f"--weights: must be a list of name=number, got {part.strip()!r}; for example web=0.5,books=0.5"
            ) from None
        if name in weights:
            raise ConfigError(f"--weights: must name each source once, got {name!r} twice; leave one out")
        weights[name] = weight
    return weights
