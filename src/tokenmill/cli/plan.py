"""`tokenmill plan`: compile a run and tell what it will do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.cells import cell_len
from rich.text import Text

from tokenmill.cli.console import (
    ToNative,
    WorldSize,
    cell,
    console,
    megabytes,
    print_json,
    print_native,
    table,
    tell,
)
from tokenmill.cli.picture import check_file, html_list, html_table, page
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from tokenmill.plan.report import PlanReport, SourceFacts, SourceShare, StageFacts
    from tokenmill.run.report import Costs
    from tokenmill.run.run import Run


# The report of the compiler as tables, for the terminal and for a page alike.

Column = tuple[str, Sequence[object]]
"""Header and cells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    names: int = 1
    """How many columns say what a line is about."""


def views(facts: PlanReport) -> list[View]:
    """Return stages, what they draw, sources over the whole run, what is put aside, the fate of tokens.

    What no line says anything about has no column.
    """
    found = [_stages(facts.stages), _mixture(facts.shares), _sources(facts.sources)]
    if facts.quarantined:
        columns = ("source", "from step", "documents", "tokens", "why")
        rows = tuple(
            (q.source, q.from_step, q.documents, q.tokens, q.reason or ("all of it" if q.whole else "–"))
            for q in facts.quarantined
        )
        found.append(View(title="Put aside", columns=columns, rows=rows))
    return [*found, fate_view(facts)]


def _view(title: str, columns: Sequence[Column], names: int = 1) -> View:
    return View(
        title=title,
        columns=tuple(name for name, _ in columns),
        rows=tuple(zip(*(cells for _, cells in columns), strict=True)),
        names=names,
    )


def _stages(stages: Sequence[StageFacts]) -> View:
    skipping, scaled = any(s.skipped_steps for s in stages), any(s.lr_scale != 1 for s in stages)
    ramped = any(s.ramp_end is not None for s in stages)
    return _view(
        "Stages",
        [
            ("stage", [s.name for s in stages]),
            ("first step", [s.start_step for s in stages]),
            ("end step", [s.end_step for s in stages]),
            *([("ramp until", [s.ramp_end for s in stages])] if ramped else []),
            ("batch", [s.global_batch_size for s in stages]),
            ("seq_len", [s.seq_len for s in stages]),
            *([("lr_scale", [s.lr_scale for s in stages])] if scaled else []),
            ("rows", [s.rows for s in stages]),
            ("tokens", [s.tokens for s in stages]),
            *([("steps skipped", [s.skipped_steps for s in stages])] if skipping else []),
            *([("rows skipped", [s.skipped_rows for s in stages])] if skipping else []),
            *([("tokens skipped", [s.skipped_tokens for s in stages])] if skipping else []),
        ],
    )


def _mixture(shares: Sequence[SourceShare]) -> View:
    def figures(name: str) -> list[object]:
        values = [(share, getattr(share, name)) for share in shares]
        return [value if share.counted else f"about {value:,}" for share, value in values]

    skipping = any(s.skipped_rows for s in shares)
    return _view(
        "Mixture",
        [
            ("stage", [s.stage for s in shares]),
            ("source", [s.source for s in shares]),
            ("asked %", [_percent(s.asked) for s in shares]),
            ("got %", [_percent(s.realised) for s in shares]),
            ("tokens asked %", [_percent(s.asked_tokens) for s in shares]),
            ("tokens got %", [_percent(s.realised_tokens) for s in shares]),
            ("rows", [s.rows for s in shares]),
            ("labels", figures("trained")),
            ("no label", figures("unlabelled")),
            ("padding", figures("padding")),
            ("epochs", [_epochs(s.epochs) for s in shares]),
            *([("rows skipped", [s.skipped_rows for s in shares])] if skipping else []),
        ],
        names=2,
    )


def _epochs(epochs: float | None) -> float | None:
    return None if epochs is None else round(epochs, 4)


def _percent(share: float) -> float:
    return round(100 * share, 4)


def _sources(sources: Sequence[SourceFacts]) -> View:
    skipping, stopping = any(s.skipped for s in sources), any(s.gone_from is not None for s in sources)
    return _view(
        "Sources",
        [
            ("source", [s.name for s in sources]),
            ("rows an epoch", ["live" if s.rows is None else s.rows for s in sources]),
            *([("lanes", [s.lanes for s in sources])] if any(s.lanes for s in sources) else []),
            ("rows drawn", [s.drawn for s in sources]),
            *([("of them skipped", [s.skipped for s in sources])] if skipping else []),
            ("epochs", [_epochs(s.epochs) for s in sources]),
            ("first repeat", [s.first_repeat for s in sources]),
            *([("used up from step", [s.gone_from for s in sources])] if stopping else []),
        ],
    )


def fate_view(facts: PlanReport) -> View:
    """Return what becomes of the tokens of each source in an epoch, as the last stage that uses it packs them."""
    return View(
        title="Fate of the tokens of an epoch",
        columns=("source", "tokens", "= trained", "+ masked", "+ dropped", "why", "padding"),
        rows=tuple(
            (
                s.name,
                s.fates.tokens,
                s.fates.trained,
                s.fates.masked,
                sum(s.fates.dropped.values()),
                ", ".join(f"{reason} {number:,}" for reason, number in s.fates.dropped.items()) or "–",
                s.fates.padding,
            )
            for s in facts.sources
            if s.fates
        ),
    )


def cost_view(costs: Costs) -> View:
    """Return what a run reads and keeps."""
    most = max(costs.read_bytes_a_step, key=lambda name: costs.read_bytes_a_step[name])
    about = "" if costs.read_bytes_exact else "about "
    rows = [
        ("read by the whole run", about + megabytes(costs.read_bytes), "tokens and masks, over all ranks"),
        ("read by a step", about + megabytes(costs.read_bytes_a_step[most]), f"in stage {most}"),
        ("row indexes in memory", megabytes(costs.index_bytes), "for each process"),
        *(
            [("row indexes in files", megabytes(costs.mapped_index_bytes), "mapped, read as needed")]
            if costs.mapped_index_bytes
            else []
        ),
        ("kept ready by a loader", megabytes(costs.loader_bytes), "for each row of a micro-batch"),
    ]
    return View(title="Reading and memory", columns=("what", "bytes", "of"), rows=tuple(rows))


MIN_NAME = 12
"""Names are not folded to less than so many characters."""


def plan(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Config of a run.")],
    json: Annotated[bool, typer.Option(help="Print the report as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write tables, warnings and picture as a page.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="Write the picture of the run.")] = None,
    to_native: ToNative = False,
    world_size: WorldSize = None,
) -> None:
    """Compile and check a run: stages, shares, epochs, first repeats. Reads masks to count labels, but no token."""
    from tokenmill.run.run import Run

    if run.is_dir():
        raise ConfigError(
            f"{run}: must be the .toml of a run, got a folder; `tokenmill inspect {run}` shows a store"
        )
    for option, file in (("--html", html), ("--svg", svg)):
        check_file(option, file)
    opened = Run.from_toml(run, world_size=world_size)
    assert opened.translation is not None
    if to_native:
        print_native(opened.translation)
        return
    tell(opened.translation)
    _report(opened, json, html, svg)


def _report(run: Run, json: bool, html: Path | None, svg: Path | None) -> None:
    """Compile a run, write what is wanted of it to files, and show the rest."""
    from tokenmill.config.schedule import limits
    from tokenmill.plan.report import report
    from tokenmill.run.history import lines, read_history
    from tokenmill.run.report import all_warnings, costs, put_aside

    began = perf_counter()
    compiled = run.plan()
    seconds = perf_counter() - began
    facts = report(compiled, stops=limits(run.config)[1], quarantined=put_aside(run))
    cost, found = costs(run, facts, seconds), all_warnings(run, facts)
    history = lines(read_history(run.folder, run.name))
    if html is not None or svg is not None:
        _write(run, facts, html, svg, [*views(facts), cost_view(cost)], [*found, *history])
    if json:
        print_json(facts.to_json() | {"costs": cost.to_json(), "warnings": found, "history": history})
        return
    for made in (one for view in [*views(facts), cost_view(cost)] for one in _fitting(view)):
        console.print(made)
    for warning in found:
        console.print(Text.assemble(("warning:", "bold yellow"), " ", warning), soft_wrap=True)
    for line in history:
        console.print(Text(f"history: {line}"), soft_wrap=True)
    totals = f"{facts.steps:,} steps, {facts.rows:,} rows, {facts.tokens:,} tokens"
    totals += f", {facts.skipped_steps:,} steps skipped" if facts.skipped_steps else ""
    console.print(
        f"plan {facts.fingerprint}  {totals}, compiled in {seconds:.2f} s, about what a start takes", soft_wrap=True
    )
    for file in (html, svg):
        if file is not None:
            console.print(f"wrote {file}", soft_wrap=True, markup=False)


def _write(
    run: Run, facts: PlanReport, html: Path | None, svg: Path | None, shown: Sequence[View], notes: Sequence[str]
) -> None:
    """Write the picture, and the page with it."""
    from tokenmill.cli.picture import timeline

    picture = timeline(run.plan(), facts, run.name)
    if svg is not None:
        svg.write_text(picture, encoding="utf-8")
    if html is not None:
        parts = [
            f"<p>plan <code>{facts.fingerprint}</code></p>\n",
            f"<figure>{picture}</figure>\n",
            *([html_list("To look at", notes)] if notes else []),
            *(html_table(view.title, view.columns, view.rows) for view in shown),
        ]
        html.write_text(page(f"tokenmill plan: {run.name}", parts), encoding="utf-8")


def tables(facts: PlanReport) -> list[Table]:
    """Return the report as tables: stages, what they draw, sources over the whole run, the fate of their tokens."""
    return [made for view in views(facts) for made in _fitting(view)]


def fate_tables(facts: PlanReport) -> list[Table]:
    """Return what becomes of the tokens of each source in an epoch, as the last stage that uses it packs them."""
    return _fitting(fate_view(facts))


def _fitting(view: View) -> list[Table]:
    return fitting(view.title, view.columns, view.rows, names=view.names)


def fitting(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, names: int = 1) -> list[Table]:
    """Return one table, or several below each other where the console is too narrow for all columns.

    The first `names` columns may be folded and stand in every table; no word or number of the others is cut.
    """
    lines = [list(row) for row in rows]
    texts = [[name, *(cell(line[index]) for line in lines)] for index, name in enumerate(columns)]
    least = [_least(column, folded=index < names) for index, column in enumerate(texts)]
    made: list[Table] = []
    first = names
    while first < len(columns):
        last = first + 1
        while last < len(columns) and _needed([*least[:names], *least[first : last + 1]]) <= console.width:
            last += 1
        chosen = [*range(names), *range(first, last)]
        part = table(
            f"{title}, continued" if made else title,
            [columns[index] for index in chosen],
            [[line[index] for index in chosen] for line in lines],
        )
        room = max(0, console.width - _needed([least[index] for index in chosen]))
        # Told to rich in full: where room is scarce, it would take some from numbers as well. Names come last.
        for column, index in [*zip(part.columns, chosen, strict=True)][::-1]:
            column.width = min(max(map(cell_len, texts[index])), least[index] + room)
            column.min_width, column.no_wrap = None, False
            room -= column.width - least[index]
            if _is_estimate(texts[index]):
                column.justify = "right"
        made.append(part)
        first = last
    return made


def _least(texts: Sequence[str], *, folded: bool) -> int:
    """Return how narrow a column may be: a name may be folded, else it holds its longest word."""
    whole = max(map(cell_len, texts))
    if folded:
        return min(MIN_NAME, whole)
    return whole if _is_estimate(texts) else max(cell_len(word) for text in texts for word in text.split() or [""])


def _is_estimate(texts: Sequence[str]) -> bool:
    return any(text.startswith("about ") for text in texts)


def _needed(widths: Sequence[int]) -> int:
    """Return the width of a table whose columns have these widths, with a blank and a line around each."""
    return sum(widths) + 3 * len(widths) - 1
