"""`tokenmill plan`: compile a run and tell what it will do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli.console import console, print_json, table

if TYPE_CHECKING:
    from tokenmill.plan.report import PlanReport


def plan(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Config of a run.")],
    json: Annotated[bool, typer.Option(help="Print the report as JSON.")] = False,
) -> None:
    """Compile and check a run: stages, shares, epochs, first repeats. Reads no token."""
    from tokenmill.plan.report import report
    from tokenmill.run import Run

    opened = Run.from_toml(run)
    compiled = opened.plan()
    facts = report(compiled)
    dropped = {
        name: opened.rows(name, stage.spec.seq_len).dropped_tokens
        for stage in compiled.stages
        for name in stage.names
    }
    if json:
        print_json(facts.to_json() | {"dropped_tokens": dropped})
        return
    for made in tables(facts, dropped):
        console.print(made)
    console.print(f"plan {facts.fingerprint}  {facts.steps:,} steps, {facts.rows:,} rows, {facts.tokens:,} tokens")


def tables(facts: PlanReport, dropped: dict[str, int]) -> list[object]:
    """Return the report as tables: stages, shares of sources by stage, sources over the whole run."""
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
            ("stage", "source", "asked %", "realised %", "rows", "tokens", "epochs so far"),
            [
                (s.stage, s.source, 100 * s.asked, 100 * s.realised, s.rows, s.tokens, round(s.epochs, 4))
                for s in facts.shares
            ],
        ),
        table(
            "Sources",
            ("source", "rows an epoch", "rows drawn", "epochs", "first repeat at step", "tokens in no row"),
            [
                (s.name, s.rows, s.drawn, round(s.epochs, 4), s.first_repeat, dropped.get(s.name))
                for s in facts.sources
            ],
        ),
    ]
