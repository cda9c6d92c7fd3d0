"""What a run costs before it trains: bytes to read, memory of row indexes and of a loader, time to compile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenmill.loader.buffers import Layout
    from tokenmill.plan import Plan, RowIndex, Stage
    from tokenmill.plan.report import PlanReport, SourceShare
    from tokenmill.run import Run
    from tokenmill.store import Store

PREFETCH = 8
"""Micro-batches that a loader keeps ready, if nobody says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Bytes and seconds."""

    read_bytes: int
    """Tokens and masks of all steps that are trained on, over all ranks; live text is not among them."""
    read_bytes_exact: bool
    """Otherwise a little more than will be read: rows that are not full are taken to have one token more."""
    read_bytes_a_step: Mapping[str, int]
    """Of each stage, in the mean."""
    index_bytes: int
    """Row indexes in memory."""
    mapped_index_bytes: int
    """Row indexes in files, which are mapped as they are needed."""
    loader_bytes: int
    """Micro-batches of one row that a loader keeps ready, and the one that is used; in the largest stage."""
    compile_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return them as JSON values."""
        return asdict(self)


def costs(run: Run, facts: PlanReport, compile_seconds: float) -> Costs:
    """Return what a run costs, from what is known of its rows; nothing is read."""
    plan = run.plan()
    widths = {name: _token_bytes(store) for name, store in run.stores.items()}
    read: dict[str, int] = {stage.name: 0 for stage in facts.stages}
    for share in facts.shares:
        if share.source in widths:  # what live text takes to be read is not known
            read[share.stage] += _read_tokens(plan, share) * widths[share.source]
    memory = {id(rows): sizes for part in plan.stages for rows, sizes in _indexes(part)}
    return Costs(
        read_bytes=sum(read.values()),
        read_bytes_exact=all(_is_stream(index) for part in plan.stages for index in part.rows.values()),
        read_bytes_a_step={s.name: read[s.name] // s.steps if s.steps else 0 for s in facts.stages},
        index_bytes=sum(size for size, mapped in memory.values() if not mapped),
        mapped_index_bytes=sum(size for size, mapped in memory.values() if mapped),
        loader_bytes=(PREFETCH + 1) * max(_batch_bytes(run, part) for part in plan.stages),
        compile_seconds=compile_seconds,
    )


def _token_bytes(store: Store) -> int:
    """Return what a token takes on disk, with its mask."""
    from tokenmill.types import TOKEN_KEYS

    masks = ("loss_mask", "chosen_mask", "masks")
    keys = [key for key in store.keys if key in TOKEN_KEYS][:1] + [key for key in store.keys if key in masks]
    return sum(np.dtype(store.manifest.keys[key]).itemsize for key in keys)


def _read_tokens(plan: Plan, share: SourceShare) -> int:
    """Return how many tokens the rows of a share have; those of sequences have one more than inputs."""
    from tokenmill.packing import RecordRows

    parts = [part for part in plan.stages if share.source in part.names]
    records = isinstance(parts[0].rows[share.source], RecordRows)
    return share.held + (0 if records else share.rows)


def _is_stream(rows: RowIndex) -> bool:
    from tokenmill.packing import ConcatRows

    return isinstance(rows, ConcatRows)


def _indexes(part: Stage) -> Iterator[tuple[RowIndex, tuple[int, bool]]]:
    """Yield what a part has of row indexes, each with its bytes and whether they are mapped."""
    from tokenmill.packing import PackedRows, RecordRows
    from tokenmill.packing.following import FollowingRows

    waiting = list(part.rows.values())
    while waiting:
        rows = waiting.pop()
        if isinstance(rows, FollowingRows):
            waiting += [rows.full, rows.rest]
        elif isinstance(rows, PackedRows):
            yield rows, (rows.index.table.nbytes + rows.index.data.nbytes, rows.index.checked is not None)
        elif isinstance(rows, RecordRows):
            yield rows, (rows.rest.nbytes, False)


def _batch_bytes(run: Run, part: Stage) -> int:
    """Return how large the arrays of one row are in a batch."""
    from tokenmill.loader import RECORD_ARRAYS
    from tokenmill.loader.assemble import layout
    from tokenmill.loader.records import record_layout
    from tokenmill.packing import RecordRows

    rows = list(part.rows.values())
    shapes: Layout
    if isinstance(rows[0], RecordRows):
        kind = rows[0].store.manifest.kind
        group = max(index.largest_group for index in rows if isinstance(index, RecordRows))
        shapes = record_layout(kind, RECORD_ARRAYS[kind], (1, group, part.spec.seq_len))
    else:
        shapes = layout(run.config.run.arrays, 1, part.spec.seq_len)
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())
