"""Sources that may not be read any further: at which step they run out, and what that step draws instead."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.plan.stages import Stage


def room(stage: Stage, name: str, limit: Fraction) -> int:
    """Return how many rows of a source a stage may draw until it has been read `limit` times."""
    before, index = stage.epochs_before[name], stage.rows[name]
    left = stage.rest_epochs[name]
    if not index.num_rest:
        rows = floor((limit - before - left) * index.num_rows)
    elif limit < before + left:
        rows = floor((limit - before) / left * index.num_rest)
    else:
        rows = index.num_rest + floor((limit - before - left) * index.num_rows)
    return max(0, rows - stage.carry(name))


def first_short(stage: Stage, rooms: Mapping[str, int]) -> int | None:
    """Return the first step of a stage, counted from its start, that needs more rows than a source has left."""
    # The draw after the last that there is a row for.
    over = {name: left for name, left in rooms.items() if stage.draws[name] > left}
    positions = [int(stage.positions_of(name, np.array([left]))[0]) for name, left in over.items()]
    return min(positions) // stage.spec.global_batch_size if positions else None


def drained(
    batch: int, shares: Mapping[str, Fraction], rooms: Mapping[str, int], ahead: Mapping[str, Fraction], where: str
) -> dict[str, int]:
    """Return how many rows a step draws from each source when some have too few: those give what they have.

    The others share the rest of the batch as their weights say, whole rows, those first that are most behind.
    """
    quotas: dict[str, int] = {}
    others = dict(shares)
    while True:
        free = batch - sum(quotas.values())
        if not others:
            if not free:
                return quotas
            raise ConfigError(
                f"{where}: its sources must last until it ends, got all of them used up (on_exhausted = stop), "
                f"{free} of {batch} rows too few; end the run before that step, or add documents"
            )
        total = sum(others.values())
        wanted = {
            name: max(Fraction(0), share / total * free - ahead.get(name, Fraction(0)))
            for name, share in others.items()
        }
        found = _apportion(wanted, free)
        short = [name for name, rows in found.items() if rows > rooms.get(name, rows)]
        if not short:
            return quotas | found
        for name in short:
            quotas[name] = rooms[name]
            del others[name]


def _apportion(wanted: Mapping[str, Fraction], free: int) -> dict[str, int]:
    """Round to whole rows that sum to `free`."""
    total = sum(wanted.values())
    if total:
        wanted = {name: value * free / total for name, value in wanted.items()}
    found = {name: floor(value) for name, value in wanted.items()}
    order = sorted(wanted, key=lambda name: (found[name] - wanted[name], name))
    left = free - sum(found.values())
    return {name: rows + (order.index(name) < left) for name, rows in found.items()}
