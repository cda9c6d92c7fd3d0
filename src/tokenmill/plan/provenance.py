"""What a step is made of, and when a document is seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.plan.order import rows_at, uses_in_stage
from tokenmill.types import Span

if TYPE_CHECKING:
    from tokenmill.plan.stages import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class RowUse:
    """One row of one batch."""

    step: int
    slot: int
    """Index of the row in the global batch of the step."""
    source: str
    row: int
    """Index of the row in its source."""
    spans: tuple[Span, ...]


def what(stage: Stage, step: int, sources: tuple[str, ...]) -> tuple[RowUse, ...]:
    """Return the rows of a step of this stage, in the order of the global batch."""
    slots = np.arange(stage.spec.global_batch_size)
    source_ids, rows = rows_at(stage, np.full_like(slots, step), slots)
    spans: dict[int, tuple[Span, ...]] = {}
    for source in np.unique(source_ids):
        chosen = np.flatnonzero(source_ids == source)
        found = stage.rows[sources[source]].spans(rows[chosen])
        spans |= {int(slot): found.row(i) for i, slot in enumerate(chosen)}
    return tuple(
        RowUse(
            step=step, slot=int(slot), source=sources[source_ids[slot]], row=int(rows[slot]), spans=spans[int(slot)]
        )
        for slot in slots
    )


def when(stages: tuple[Stage, ...], source: str, document: int) -> Iterator[RowUse]:
    """Yield every use of a document over the whole run, in order; only its own spans are named."""
    for stage in stages:
        if source not in stage.names or stage.spec.skipped is not None:
            continue
        index = stage.rows[source]
        rows = index.rows_of(document)
        if not rows.size:
            continue
        found = index.spans(rows)
        own = {
            int(row): tuple(span for span in found.row(i) if span.document == document)
            for i, row in enumerate(rows)
        }
        for step, slot, row in zip(*(part.tolist() for part in uses_in_stage(stage, source, rows)), strict=True):
            yield RowUse(step=step, slot=slot, source=source, row=row, spans=own[row])
