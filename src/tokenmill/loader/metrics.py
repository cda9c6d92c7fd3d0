"""Metrics of a loader as one flat dict of numbers, which W&B, TensorBoard and MLflow take as it is."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from tokenmill.loader.layout import Layout, RankSlice
from tokenmill.plan.seen import total

if TYPE_CHECKING:
    from tokenmill.loader.drawn import Lanes
    from tokenmill.loader.loader import Loader


class Meter:
    """Seconds that the caller of a loader waits, and the input slots that it is given in a second."""

    def __init__(self) -> None:
        self.waited = 0.0
        self._mark: tuple[float, int, int] | None = None
        """Time, micro-batches drawn and jumps when the rate was last asked for, or an iteration began."""

    def begin(self, loader: Loader) -> None:
        """Measure the rate from now on."""
        self._mark = (monotonic(), loader.num_drawn, loader.num_jumps)

    def rate(self, loader: Loader) -> float | None:
        """Return input slots per second since the last call; None if the loader was not iterated over since."""
        mark, now = self._mark, monotonic()
        if mark is None or mark[2] != loader.num_jumps or now <= mark[0]:
            return None
        self.begin(loader)
        return slots_between(loader, mark[1], loader.num_drawn) / (now - mark[0])


def slots_between(loader: Loader, first: int, last: int) -> int:
    """Return the input slots of micro-batches `first` to `last`; a context-parallel rank has a part of each."""
    edges, slots = loader.first_batches, 0
    for index in range(max(0, bisect_right(edges, first) - 1), len(loader.plan.stages)):
        begin, end = max(first, edges[index]), min(last, edges[index + 1])
        if begin >= last:
            break
        each = loader.part.micro_batch * loader.plan.stages[index].row_slots // loader.part.layout.cp[1]
        slots += max(0, end - begin) * each
    return slots


def measure(
    loader: Loader, prefix: str, *, labels: bool = True, texts: bool = False, digest: bool = False
) -> dict[str, int | float | str]:
    """Return what `Loader.metrics` documents."""
    plan, step = loader.plan, loader.step
    stage = plan.stage(min(step, plan.steps - 1))
    shares = stage.shares(min(step, plan.steps - 1))
    seen = plan.seen(step, held=labels)
    slots = sum(source.slots for source in seen.values())
    tokens = total(source.tokens for source in seen.values() if source.rows)
    values: dict[str, int | float | str | None] = {
        "step": step,
        "stage": stage.spec.number,
        "rows": sum(source.rows for source in seen.values()),
        "tokens": slots,
        "labels": total(source.trained for source in seen.values() if source.rows) if labels else None,
        "padding": (1 - tokens / slots if slots else 0.0) if labels and tokens is not None else None,
        "waited": loader.waited,
        "tokens_per_second": loader.meter.rate(loader),
        "stage_name": stage.spec.name if texts else None,
        "plan": plan.fingerprint[:16] if texts else None,
        "digest": global_digest(loader, step) if digest else None,
    }
    for name, source in seen.items():
        lanes = loader.lanes.get(name)
        values |= {
            f"rows_by_source/{name}": source.rows,
            f"tokens_by_source/{name}": source.slots,
            f"labels_by_source/{name}": source.trained,
            f"epochs/{name}": source.epochs if lanes is None else _epochs_of(lanes),
            f"share/{name}": shares.get(name, 0.0),
            f"left_out/{name}": None if lanes is None else sum(lanes.skipped.counts.values()),
        }
    return {prefix + name: value for name, value in values.items() if value is not None}


def _epochs_of(lanes: Lanes) -> float:
    """Return how often the lanes of a rank were read, on average; a window counts when the next one is begun."""
    positions = lanes.positions()
    return sum(each.epoch + each.turn / max(1, lanes.num_turns(lane)) for lane, each in positions.items()) / max(
        1, len(positions)
    )


def global_digest(loader: Loader, step: int) -> str | None:
    """Return the digest of the global batch of the last step before `step` that was trained on.

    None if there is none, or if rows are live text, of which a rank has its own alone.
    """
    from tokenmill.loader.digests import batch_digest, row_digests
    from tokenmill.loader.loader import Loader, usual_arrays

    last = loader.plan.last_trained(step)
    if last is None or loader.lanes:
        return None
    options = replace(loader.options, arrays=usual_arrays(loader.plan), threads=0, columns=(), pad_to="row")
    whole = Loader(loader.plan, RankSlice(layout=Layout(), micro_batch=1), options)
    return batch_digest(row_digests(whole[last]))
