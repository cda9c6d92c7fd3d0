"""`tokenmill what` and `tokenmill when`: from steps to documents, and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli.console import WorldSize, console, excerpt, print_json, table, tell, tokenizer_of
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.plan import RowUse
    from tokenmill.run.run import Run


def what(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Config of a run.")],
    step: Annotated[int, typer.Option(help="Step to look at.")],
    rank: Annotated[int | None, typer.Option(help="Only the slice of this rank.")] = None,
    world_size: Annotated[int | None, typer.Option(help="Number of ranks; default: 1.")] = None,
    text: Annotated[bool, typer.Option(help="Show the beginning of each span as text.")] = True,
    json: Annotated[bool, typer.Option(help="Print as JSON.")] = False,
) -> None:
    """Which documents and spans the batch of a step is made of."""
    opened = _open(run, world_size)
    plan = opened.plan()
    uses = plan.what(step)
    if rank is not None:
        size = 1 if world_size is None else world_size
        if not 0 <= rank < size or len(uses) % size:
            raise ConfigError(
                f"--rank: must lie within 0:world_size, and world_size divide {len(uses)} rows, "
                f"got {rank} and {size}; fix one of them"
            )
        share = len(uses) // size
        uses = uses[rank * share : (rank + 1) * share]
    tokenizers = {name: tokenizer_of(store) if text else None for name, store in opened.stores.items()}
    lines = [
        (use, span, excerpt(opened.stores[use.source], span, tokenizers[use.source]))
        for use in uses
        for span in use.spans
    ]
    if json:
        print_json(
            [
                {"slot": use.slot, "source": use.source, "row": use.row, **asdict(span), "text": found}
                for use, span, found in lines
            ]
        )
        return
    rows = [
        (use.slot, use.source, use.row, span.document, f"{span.start}:{span.start + span.length}", found)
        for use, span, found in lines
    ]
    title = f"Step {step}, stage {plan.at(step).stage!r}"
    console.print(table(title, ("slot", "source", "row", "document", "tokens", "text"), rows))


def _open(file: Path, world_size: int | None) -> Run:
    """Read the config of a run, for so many ranks if it is of a kind that counts rows by rank."""
    from tokenmill.run.run import Run

    opened = Run.from_toml(file, world_size=world_size or None)
    assert opened.translation is not None
    tell(opened.translation)
    return opened


def when(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Config of a run.")],
    source: Annotated[str, typer.Option(help="Name of the source.")],
    document: Annotated[int, typer.Option(help="Index of the document in the source, from 0.")],
    json: Annotated[bool, typer.Option(help="Print as JSON.")] = False,
    world_size: WorldSize = None,
) -> None:
    """At which steps a document is seen, over the whole run, past and future."""
    uses = _open(run, world_size).plan().when(source, document)
    if json:
        print_json([_flat(use) for use in uses])
        return
    rows = [
        (use.step, use.slot, use.row, ", ".join(f"{s.start}:{s.start + s.length}" for s in use.spans))
        for use in uses
    ]
    title = f"Document {document} of {source!r}: {len(rows)} uses"
    console.print(table(title, ("step", "slot", "row", "tokens of the document"), rows))


def _flat(use: RowUse) -> dict[str, object]:
    spans = [{"start": span.start, "length": span.length} for span in use.spans]
    return {"step": use.step, "slot": use.slot, "row": use.row, "spans": spans}
