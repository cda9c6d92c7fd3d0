"""`tokenmill plan`: compile a run and tell what it will do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.cells import cell_len
from rich.text import Text

from tokenmill.cli.console import cell, console, print_json, table
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from tokenmill.config import StageConfig
    from tokenmill.plan.report import PlanReport
    from tokenmill.run import Run
    from tokenmill.store import Store

_BLOCK = 1 << 20
"""Documents whose lengths are looked at together."""
MIN_NAME = 12
"""Names are not folded to less than so many characters."""
_LOST = "what follows a cut is trained without what stood before"
_GUIDE = "docs/guides/packing.md"


def plan(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Config of a run.")],
    json: Annotated[bool, typer.Option(help="Print the report as JSON.")] = False,
) -> None:
    """Compile and check a run: stages, shares, epochs, first repeats. Reads masks to count labels, but no token."""
    from tokenmill.plan.report import report
    from tokenmill.run import Run

    if run.is_dir():
        raise ConfigError(
            f"{run}: must be the .toml of a run, got a folder; `tokenmill inspect {run}` shows a store"
        )
    opened = Run.from_toml(run)
    facts = report(opened.plan())
    found = list(warnings(opened))
    if json:
        print_json(facts.to_json() | {"warnings": found})
        return
    for made in tables(facts):
        console.print(made)
    for warning in found:
        console.print(Text.assemble(("warning:", "bold yellow"), " ", warning), soft_wrap=True)
    totals = f"{facts.steps:,} steps, {facts.rows:,} rows, {facts.tokens:,} tokens"
    console.print(f"plan {facts.fingerprint}  {totals}", soft_wrap=True)


def warnings(run: Run) -> Iterator[str]:
    """Yield what a user should know of records with a loss mask that are cut, by stage and source.

    Reads document offsets, a part at a time. A text is used to being cut; an answer without its question is not.
    """
    for stage in run.config.resolved_stages():
        for name in stage.weights or ():
            store = run.stores[name]
            told = _cuts(stage, store, name) if "loss_mask" in store.keys else None
            if told:
                yield f"stage {stage.name!r}: {told}"


def _cuts(stage: StageConfig, store: Store, name: str) -> str | None:
    """Say which records a stage cuts so that something is trained behind the cut; None if it cuts none so."""
    assert stage.seq_len is not None  # resolved_stages() has filled it in
    longer, crossing = _count_cut(store, stage.seq_len)
    total = f"{store.num_documents:,} records of {name!r}"
    if stage.packing == "best_fit" and stage.split == "allow" and longer:
        return (
            f"{longer:,} of {total} are longer than a row of {stage.seq_len:,} tokens and are cut: {_LOST}; "
            f'split = "forbid" refuses them, "truncate_end" cuts them off ({_GUIDE})'
        )
    way_out = f'packing = "best_fit" cuts only longer ones, and none with split = "forbid" ({_GUIDE})'
    if stage.packing == "concat" and crossing:
        return f"{crossing:,} of {total} are cut where a row of {stage.seq_len:,} tokens ends: {_LOST}; {way_out}"
    if stage.packing == "bos_best_fit" and stage.crop == "return":
        return (
            f"{longer:,} of {total} are longer than a row of {stage.seq_len:,} tokens and are cut, and others "
            f"where that fills a row: {_LOST}; {way_out}"
        )
    return None


def _count_cut(store: Store, seq_len: int) -> tuple[int, int]:
    """Count the documents longer than a row, and those that an edge of a row cuts where `concat` makes rows."""
    longer = crossing = 0
    last_row = (store.num_tokens - 1) // seq_len - 1  # what stands behind it is dropped, not cut
    for begin in range(0, store.num_documents, _BLOCK):
        offsets = store.document_offsets(begin, min(begin + _BLOCK, store.num_documents))
        first, last = offsets[:-1], offsets[1:] - 1
        longer += int((np.diff(offsets) > seq_len + 1).sum())  # a row has one token more, the last label
        # A token is the label of the one before it, and is in that one's row.
        crossing += int((first // seq_len < np.minimum((last - 1) // seq_len, last_row)).sum())
    return longer, crossing


def tables(facts: PlanReport) -> list[Table]:
    """Return the report as tables: stages, what they draw, sources over the whole run, the fate of their tokens."""
    return [
        *fitting(
            "Stages",
            ("stage", "first step", "end step", "batch", "seq_len", "rows", "tokens"),
            [
                (s.name, s.start_step, s.end_step, s.global_batch_size, s.seq_len, s.rows, s.tokens)
                for s in facts.stages
            ],
        ),
        *fitting(
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
            names=2,
        ),
        *fitting(
            "Sources",
            ("source", "rows an epoch", "rows drawn", "epochs", "first repeat"),
            [(s.name, s.rows, s.drawn, round(s.epochs, 4), s.first_repeat) for s in facts.sources],
        ),
        *fate_tables(facts),
    ]


def fate_tables(facts: PlanReport) -> list[Table]:
    """Return what becomes of the tokens of each source in an epoch, as the last stage that uses it packs them."""
    return fitting(
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
