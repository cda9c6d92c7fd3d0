"""`tokenmill plan`: compile a run and tell what it will do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli.console import console, print_json, table

if TYPE_CHECKING:
    from rich.table import Table

    from tokenmill.plan.report import PlanReport


def plan(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Config of a run.")],
    json: Annotated[bool, typer.Option(help="Print the report as JSON.")] = False,
) -> None:
    """Compile and check a run: stages, shares, epochs, first repeats. Reads masks to count labels, but no token."""
    from tokenmill.plan.report import report
    from tokenmill.run import Run

    facts = report(Run.from_toml(run).plan())
    if json:
        print_json(facts.to_json())
        return
    for made in tables(facts):
        console.print(made)
    console.print(f"plan {facts.fingerprint}  {facts.steps:,} steps, {facts.rows:,} rows, {facts.tokens:,} tokens")


def tables(facts: PlanReport) -> list[Table]:
    """Return the report as tables: stages, what they draw, sources over the whole run, the fate of their tokens."""
    return [
        table(
            "Stages",
            ("stage", "first step", "end step", "batch", "seq_len", "rows", "tokens"),
            [
                (s.name, s.start_step, s.end_step, s.global_batch_size, s.seq_len, s.rows, s.tokens)
                for s in facts.stages
            ],
        ),
        table(
            "Mixture",
            ("stage", "source", "asked %", "got %", "rows", "labels", "no label", "padding", "epochs"),
            [
                (
                    s.stage,
                    s.source,
                    100 * s.asked,
                    100 * s.realised,
                    s.rows,
                    s.trained if s.counted else f"about {s.trained:,}",
                    s.unlabelled if s.counted else f"about {s.unlabelled:,}",
                    s.padding if s.counted else f"about {s.padding:,}",
                    round(s.epochs, 4),
                )
                for s in facts.shares
            ],
        ),
        table(
            "Sources",
            ("source", "rows an epoch", "rows drawn", "epochs", "first repeat"),
            [(s.name, s.rows, s.drawn, round(s.epochs, 4), s.first_repeat) for s in facts.sources],
        ),
        fate_table(facts),
    ]


def fate_table(facts: PlanReport) -> Table:
    """Return what becomes of the tokens of each source in an epoch, as the last stage that uses it packs them."""
    return table(
        "Fate of the tokens of an epoch",
        ("source", "tokens", "= trained", "+ masked", "+ dropped", "why", "padding"),
        [
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
        ],
    )
