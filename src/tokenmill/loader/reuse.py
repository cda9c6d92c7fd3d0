"""When a run needs a part of a store again: what a mirror goes by when it must let pages go.

From values of an array to the rows that hold them, and from rows to the next step that draws them: both are
computed, over epochs, stages and edits alike, so nothing is remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.packing.stored import is_stored
from tokenmill.plan.stages import LAST_STEP, next_steps
from tokenmill.types import Int64Array

if TYPE_CHECKING:
    from tokenmill.plan.plan import Plan
    from tokenmill.store.reader import Store


def next_uses(
    plan: Plan, store: Store, axis: str, shard: int, values: tuple[Int64Array, Int64Array], after: int
) -> Int64Array:
    """Return for runs of values of a shard, (begins, ends), the first step behind `after` that needs any of them.

    It is LAST_STEP where none does. All ranks count, as any of them may be on this machine.
    """
    begins, ends = values
    found = np.full(begins.size, LAST_STEP, np.int64)
    for stage in plan.stages:
        if stage.end_step <= after + 1 or stage.spec.skipped is not None:
            continue
        open_runs = np.flatnonzero(found == LAST_STEP)
        if not open_runs.size:
            break
        for name in stage.names:
            rows = stage.rows[name]
            if is_stored(rows) and rows.store is store:
                held, owner = rows.rows_within_shard(axis, shard, begins[open_runs], ends[open_runs])
                steps = next_steps(stage, name, held, after)
                np.minimum.at(found, open_runs[owner], steps)
    return found
