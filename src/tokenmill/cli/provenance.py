"""`tokenmill what` and `tokenmill when`: from steps to documents, and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli import console as ui
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.store import Origin


def what(
    run: ui.RunFile,
    step: Annotated[int, typer.Option(help="Step to look at.")],
    rank: Annotated[int | None, typer.Option(help="Only the slice of this rank.")] = None,
    world_size: Annotated[int | None, typer.Option(help="Number of ranks; default: 1.")] = None,
    micro_batch: Annotated[int, typer.Option(help="Rows of a micro-batch, by which a balanced run is dealt.")] = 1,
    text: Annotated[bool, typer.Option(help="Show the beginning of each span as text.")] = True,
    json: ui.AsJson = False,
    tokenizer: ui.TextsBy = None,
) -> None:
    """Show which documents and spans make up the batch of a step."""
    from tokenmill.loader import Layout, Loader, RankSlice
    from tokenmill.run.inspect import excerpt

    opened = ui.open_run(run, world_size or None)
    plan = opened.plan()
    uses = plan.what(step)
    if rank is not None:
        size = 1 if world_size is None else world_size
        if not 0 <= rank < size or len(uses) % size:
            raise ConfigError(
                f"--rank: must lie within 0:world_size, and world_size divide {len(uses)} rows, "
                f"got {rank} and {size}; fix one of them"
            )
        layout, balance = Layout(dp=(rank, size)), opened.config.run.balance is not None
        loader = Loader(plan, RankSlice(layout=layout, micro_batch=micro_batch, balance=balance))
        uses = tuple(uses[slot] for slot in loader.slots(step).tolist())
    tokenizers = {
        name: ui.tokenizer_for(store, tokenizer) if text else None for name, store in opened.stores.items()
    }
    rows, lines = [], []
    for use in uses:
        store, decoder = opened.stores[use.source], tokenizers[use.source]
        spans = []
        for span in use.spans:
            words = ui.printable(excerpt(store, span, decoder)).replace("\n", "") if decoder else None
            origin = store.origin(span.document)
            spans.append({**asdict(span), "origin": asdict(origin), "text": words})
            tokens = f"{span.start}:{span.start + span.length}"
            lines.append((use.slot, use.source, use.row, span.document, _shown(origin), tokens, words))
        rows.append({"slot": use.slot, "source": use.source, "row": use.row, "spans": spans})
    stage = plan.at(step).stage
    if json:
        ui.print_json({"step": step, "stage": stage, "rows": rows})
        return
    columns = ("slot", "source", "row", "document", "from", "tokens", "text")
    ui.console.print(ui.table(f"Step {step}, stage {stage!r}", columns, lines))


def _shown(origin: Origin) -> str:
    """Show where a document came from, and what was kept of its record."""
    kept = ", ".join(f"{name}={value}" for name, value in origin.kept.items())
    return ui.printable(f"{origin} {kept}".rstrip())


def when(
    run: ui.RunFile,
    source: Annotated[str, typer.Option(help="Name of the source.")],
    document: Annotated[int, typer.Option(help="Index of the document in the source, from 0.")],
    json: ui.AsJson = False,
    world_size: ui.WorldSize = None,
) -> None:
    """List all steps at which a document is seen, past and future."""
    opened = ui.open_run(run, world_size)
    uses = opened.plan().when(source, document)
    origin = opened.stores[source].origin(document)
    if json:
        found = [
            {
                "step": use.step,
                "slot": use.slot,
                "row": use.row,
                "spans": [{"start": span.start, "length": span.length} for span in use.spans],
            }
            for use in uses
        ]
        ui.print_json({"source": source, "document": document, "origin": asdict(origin), "uses": found})
        return
    rows = [
        (use.step, use.slot, use.row, ", ".join(f"{s.start}:{s.start + s.length}" for s in use.spans))
        for use in uses
    ]
    ui.print_line(f"from {_shown(origin)}")
    title = f"Document {document} of {source!r}: {len(rows)} uses"
    ui.console.print(ui.table(title, ("step", "slot", "row", "tokens of the document"), rows))
