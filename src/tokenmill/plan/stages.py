"""Stages of training, as specified and as compiled.

A stage of the config is compiled to several parts, each a `Stage` here, where something changes in the middle of
it: a ramp ends, steps are skipped, documents are quarantined, or a source is used up. The parts share its name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.compiled import int64, kernel
from tokenmill.errors import ConfigError, PlanError, nearest, whole
from tokenmill.plan.mixture import STAIRS
from tokenmill.plan.order import WINDOW, EpochOrder, Shuffle
from tokenmill.plan.permute import derive, derived_key
from tokenmill.plan.rows import Rows
from tokenmill.types import ON_CHANGE, Int64Array, Uint64Array

if TYPE_CHECKING:
    from tokenmill.plan.mixture import Mixture

Weights = Mapping[str, float | Fraction]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ramp:
    """Steps over which the weights change little by little."""

    shape: str
    """`linear` or `cosine`."""
    begin: int
    end: int
    """Steps, the last exclusive; a stage may be cut within."""
    weights: Weights
    """Weights at the start; those at the end are the weights of the stage."""

    def describe(self) -> dict[str, Any]:
        """Return what decides the weights of its steps, as JSON."""
        return {
            "shape": self.shape,
            "begin": self.begin,
            "end": self.end,
            "stairs": min(STAIRS, self.end - self.begin),
            "weights": _plain(self.weights),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpec:
    """A run of steps with one mixture, sequence length and batch size; a stage, or a part of one."""

    name: str
    start_step: int
    """First step, inclusive. It ends where the next one starts."""
    global_batch_size: int
    """Rows of one optimizer step, over all ranks."""
    seq_len: int
    seed: int
    shuffle: Shuffle
    weights: Weights
    """Share of rows drawn from each source; need not sum to 1."""
    rows: Mapping[str, Rows]
    """The rows of each source that has a weight, here or where a ramp comes from."""
    on_change: str = "unseen"
    """Start of a source whose rows change with the stage, by another sequence length or packing: the rows that the
    stage before has not read (`unseen`), or its first row (`restart`)."""
    number: int = 0
    """Index of the stage, from 0; its parts share it."""
    lr_scale: float = 1.0
    """Factor of the learning rate in the stage; it does not change a batch."""
    ramp: Ramp | None = None
    skipped: str | None = None
    """Reason that its steps are skipped; None if they are trained on. Rows of skipped steps count as read."""
    drained: tuple[str, ...] | None = None
    """Sources that give their last rows, for the one step in which they do."""

    def __post_init__(self) -> None:
        if self.on_change not in ON_CHANGE:
            raise ConfigError(
                f"stage {self.name!r}: on_change must be one of {', '.join(ON_CHANGE)}, got {self.on_change!r}; "
                f"{nearest(self.on_change, ON_CHANGE)}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Sources that are drawn, sorted, so that the order in which a config lists them does not matter."""
        return tuple(sorted({*self.weights, *(self.ramp.weights if self.ramp else ())}))

    def describe(self) -> dict[str, Any]:
        """Return what decides the batches of the stage, as JSON. Its name does not."""
        described: dict[str, Any] = {
            "start_step": self.start_step,
            "global_batch_size": self.global_batch_size,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle.describe(),
            "weights": _plain(self.weights),
            "sources": {name: dict(self.rows[name].description) for name in self.names},
        }
        if self.ramp:
            described["ramp"] = self.ramp.describe()
        if self.skipped is not None:
            described["skipped"] = True
        if self.drained is not None:
            described["drained"] = list(self.drained)
        return described


def _plain(weights: Weights) -> dict[str, float | str]:
    """Return weights as JSON; fractions become text."""
    return {
        name: str(weight) if isinstance(weight, Fraction) else float(weight) for name, weight in weights.items()
    }


SOURCE, CARRY, REST, SIZE, MODE, BLOCK_ROWS, WINDOW_BLOCKS = range(7)
OLD_EPOCH, OLD_MODE, OLD_BLOCK_ROWS, OLD_WINDOW_BLOCKS = range(7, 11)
"""Columns of a stage's table, which has one line per source. CARRY plus a draw of the mixture is the ordinal of a
row, from 0. The rows are the REST of an earlier epoch, which counts as epoch -1, then epochs of SIZE rows. The
epoch that was current when the stage began ends in its own order (OLD_...), so a change of seed or shuffle neither
loses nor repeats a row. SIZE is 0 for a source without epochs, whose rows are known by their ordinals alone."""
NO_EPOCH = -2
_SOME_ROWS = 1 << 20
"""Rows of whole batches that are searched together."""
_KEPT_ORDERS = 64
"""Orders of epochs that a stage caches."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage, or a part of one, with everything that the kernels need to compute its rows."""

    spec: StageSpec
    index: int
    end_step: int
    first_position: int
    """Position of its first row in the order of the whole run."""
    mixture: Mixture
    origin: int
    """Positions of the mixture that stages before this one have drawn."""
    bases: tuple[int, ...]
    """Draws of each source at these positions."""
    names: tuple[str, ...]
    """Sources of the mixture, in the order of `table`."""
    rows: Mapping[str, Rows]
    """The rows of each source, after what earlier stages used."""
    repeats_from: Mapping[str, int]
    """Rows of a source that may be drawn before one is seen for the second time, counted as `carry` counts."""
    epochs_before: Mapping[str, Fraction]
    """Epochs of each source when its rows last changed."""
    rest_epochs: Mapping[str, Fraction]
    """Fraction of an epoch that the rest of each source is."""
    table: Int64Array
    keys: Uint64Array
    """For each source: the key of epochs that begin in this stage, and of the current epoch when it began."""
    rotation_key: np.uint64
    rotate: bool
    """Whether each batch is rotated by a pseudo-random offset, so that no rank always gets the same source."""
    restarted: frozenset[str]
    """Sources that start again with other rows, in the middle of an epoch."""

    @property
    def is_trained(self) -> bool:
        """Whether its steps are trained on; the rows of skipped steps count as read."""
        return self.spec.skipped is None

    @property
    def num_steps(self) -> int:
        """Number of steps of the stage."""
        return self.end_step - self.spec.start_step

    @property
    def num_positions(self) -> int:
        """Number of rows of all its batches."""
        return self.num_steps * self.spec.global_batch_size

    @property
    def row_slots(self) -> int:
        """Number of input slots of a row in its batches, whose sources share one shape."""
        return max(rows.row_slots for rows in self.rows.values())

    @property
    def step_slots(self) -> int:
        """Number of input slots of one step."""
        return self.spec.global_batch_size * self.row_slots

    @property
    def segment_multiple(self) -> int:
        """Number of columns: segments are padded to a multiple of it."""
        return max(rows.segment_multiple for rows in self.rows.values())

    @cached_property
    def draws(self) -> dict[str, int]:
        """Number of rows that the stage reads from each source."""
        return self.drawn(self.end_step)

    def drawn(self, step: int) -> dict[str, int]:
        """Return how many rows the stage has drawn from each source before a step."""
        counts = self.mixture.counts(self.origin + (step - self.spec.start_step) * self.spec.global_batch_size)
        return {name: after - before for name, after, before in zip(self.names, counts, self.bases, strict=True)}

    @cached_property
    def description(self) -> Mapping[str, Any]:
        """Description of its batches, given the stages before, as JSON."""
        return {
            **self.spec.describe(),
            "on_change": "restart" if self.restarted else "unseen",
            "restarted": sorted(self.restarted),
        }

    def continues(self, before: Stage) -> bool:
        """Return whether this part continues the previous one, so that batches do not depend on the edge.

        A source that this part restarts was restarted by the previous one, which did not read from it.
        """
        of_the_edge = ("start_step", "on_change", "restarted")
        old, new = (
            {name: value for name, value in stage.description.items() if name not in of_the_edge}
            for stage in (before, self)
        )
        again = {name for name in self.restarted if name in before.restarted and not before.draws.get(name)}
        return old == new and again == self.restarted

    def draws_like(self, other: Stage) -> bool:
        """Return whether both read the same rows at the same steps, by comparing the inputs of the kernels.

        Stages with other inputs may read the same rows, too.
        """
        batch = self.spec.global_batch_size
        return (
            batch == other.spec.global_batch_size
            and self.origin - self.spec.start_step * batch == other.origin - other.spec.start_step * batch
            and (self.names, self.rotate, self.rotation_key) == (other.names, other.rotate, other.rotation_key)
            and all(np.array_equal(mine, theirs) for mine, theirs in zip(self._order, other._order, strict=True))
            and all(dict(self.rows[name].description) == dict(other.rows[name].description) for name in self.names)
            and all(
                np.array_equal(getattr(self.mixture, item.name), getattr(other.mixture, item.name))
                for item in fields(self.mixture)
            )
        )

    @cached_property
    def _order(self) -> tuple[Int64Array, Uint64Array]:
        """The table and keys, where all that changes no order is the same for every stage."""
        table, keys = self.table.copy(), self.keys.copy()
        table[:, SOURCE] = 0  # which number a source has says nothing of its rows
        # An epoch under way that ends in the order in which all others are needs no order of its own.
        plain = (table[:, OLD_EPOCH + 1 :] == table[:, MODE:OLD_EPOCH]).all(axis=1) & (keys[:, 0] == keys[:, 1])
        unused = plain | (table[:, OLD_EPOCH] == NO_EPOCH)
        table[unused, OLD_EPOCH:] = NO_EPOCH
        keys[unused, 1] = 0
        return table, keys

    @cached_property
    def _orders(self) -> dict[tuple[int, int], EpochOrder]:
        return {}

    @cached_property
    def _last_batches(self) -> dict[bytes, tuple[Int64Array, Int64Array, Int64Array]]:
        """The whole batches that were computed last, by steps: a rank asks for its own rows, and for costs."""
        return {}

    def order(self, line: int, epoch: int) -> EpochOrder:
        """Return the order of one epoch of a source, known by its line of the table; -1 is the rest."""
        order = self._orders.get((line, epoch))
        if order is None:
            rows = self.rows[self.names[line]]
            old = int(epoch == self.table[line, OLD_EPOCH])
            first = OLD_MODE if old else MODE
            mode, block_rows, window_blocks = self.table[line, first : first + 3].tolist()
            order = EpochOrder(
                size=int(self.table[line, REST if epoch < 0 else SIZE]),
                key=np.uint64(derived_key(self.keys[line, old], epoch)),
                numbers=(mode, block_rows, window_blocks),
                starts=rows.window_starts(rest=epoch < 0) if mode == WINDOW else None,
            )
            if len(self._orders) >= _KEPT_ORDERS:
                self._orders.clear()
            self._orders[line, epoch] = order
        return order

    @cached_property
    def by_block(self) -> bool:
        """Whether the rows of each source are ordered by block within a batch."""
        return self.spec.shuffle.mode == "window"

    def asked(self) -> dict[str, Fraction]:
        """Return the share of rows that the weights ask for, over all steps of the stage."""
        return dict(
            zip(self.names, self.mixture.shares(self.origin, self.origin + self.num_positions), strict=True)
        )

    def shares(self, step: int) -> dict[str, float]:
        """Return the share of rows that the weights ask for at a step."""
        batch = self.spec.global_batch_size
        first = self.origin + (step - self.spec.start_step) * batch
        shares = self.mixture.shares(first, first + batch)
        return {name: float(share) for name, share in zip(self.names, shares, strict=True)}

    def positions_of(self, name: str, drawn: Int64Array) -> Int64Array:
        """Return the positions within the stage of draws of a source, counted from the first of the stage."""
        line = self.names.index(name)
        return self.mixture.positions_of(line, drawn + self.bases[line]) - self.origin

    def epochs(self, name: str, drawn: int | None = None) -> Fraction:
        """Return the epochs of a source by the end of the stage, or after some draws of it.

        The rest of an epoch completes it.
        """
        before, index = self.epochs_before[name], self.rows[name]
        total = self.carry(name) + (self.draws[name] if drawn is None else drawn)
        left = self.rest_epochs[name]
        if not index.num_rest:
            return before + (left if total else 0) + Fraction(total, index.num_rows)
        if total <= index.num_rest:
            return before + left * Fraction(total, index.num_rest)
        return before + left + Fraction(total - index.num_rest, index.num_rows)

    def carry(self, name: str) -> int:
        """Return how many rows of a source were drawn before the stage."""
        line = self.names.index(name)
        return int(self.table[line, CARRY]) + self.bases[line]


def as_step(step: object) -> int:
    """Return a step as a number of Python."""
    way_out = "pass one step at a time" if isinstance(step, slice) else "count from 0"
    return whole("step", step, PlanError, way_out)


def stage_at(stages: Sequence[Stage], starts: Sequence[int], step: int) -> Stage:
    """Return the stage that `step` belongs to; `starts` are their first steps, which belong to the new stage."""
    last = stages[-1].end_step
    if not 0 <= step < last:
        way_out = "count from 0" if step < 0 else "raise run.steps to continue"
        raise PlanError(f"step: must lie within 0:{last}, got {step}; {way_out}")
    return stages[bisect_right(starts, step) - 1]


# From steps to rows, and from rows back to steps: the kernels that join mixture and shuffle.


def rows_at(
    stage: Stage, steps: Int64Array, slots: Int64Array, *, rotate: bool = True
) -> tuple[Int64Array, Int64Array]:
    """Return (source, row) for many (step, slot of the global batch) of one stage.

    Without `rotate`, slots are in the order in which the mixture draws them.
    """
    if not stage.by_block:
        lines, ordinals = _draw(stage, steps, slots, rotate=rotate)
        return stage.table[lines, SOURCE], _rows(stage, lines, ordinals)
    batches, index = np.unique(steps, return_inverse=True)
    key = bytes([rotate]) + batches.tobytes()
    kept = stage._last_batches.get(key)
    if kept is None:
        kept = _batches(stage, batches, rotate)
        stage._last_batches.clear()
        stage._last_batches[key] = kept
    lines, _, rows = kept
    chosen = index * stage.spec.global_batch_size + slots
    return stage.table[lines[chosen], SOURCE], rows[chosen]


def _draw(stage: Stage, steps: Int64Array, slots: Int64Array, *, rotate: bool) -> tuple[Int64Array, Int64Array]:
    """Return the line of the table, and the ordinal of the row, for many (step, slot)."""
    batch = stage.spec.global_batch_size
    if rotate and stage.rotate:
        slots = slots + rotations(stage.rotation_key, steps, batch)
        slots -= batch * (slots >= batch)
    lines, drawn = stage.mixture.draw(stage.origin + (steps - stage.spec.start_step) * batch + slots)
    return lines, drawn + stage.table[:, CARRY][lines]


def _batches(stage: Stage, steps: Int64Array, rotate: bool = True) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return (line of the table, ordinal of the row, row) of whole batches of a stage that is ordered by block.

    The mixture decides the slots of a source. The rows that it draws for a step fill them in the order of blocks.
    So a rank, which has a slice of the batch, gets a share of every source and few blocks of it.
    """
    batch = stage.spec.global_batch_size
    all_steps = np.repeat(steps, batch)
    lines, ordinals = _draw(stage, all_steps, np.tile(np.arange(batch), steps.size), rotate=rotate)
    arranged = _arrange(stage, lines, ordinals)
    places, order = _by_block(lines.reshape(-1, batch), arranged.reshape(-1, batch), len(stage.names))
    if places is None:
        ordinals, arranged = ordinals[order], arranged[order]
    else:
        ordinals[places], arranged[places] = ordinals[order], arranged[order]
    return lines, ordinals, _rows_of_arranged(stage, lines, arranged)


def _by_block(lines: Int64Array, arranged: Int64Array, num_lines: int) -> tuple[Int64Array | None, Int64Array]:
    """Return the places of each line of the table in a batch, batch by batch, and the draws to put there.

    Of one line all places are its own: None.
    """
    batches, batch = lines.shape
    index, begins = np.arange(batch), np.arange(0, lines.size, batch)[:, None]
    index_bits, bits = batch.bit_length(), int(arranged.max(initial=0)).bit_length()
    if num_lines.bit_length() + bits + index_bits < 64:
        # Numbers without an equal are sorted several times as fast as they are ranked.
        keys = np.sort((lines << bits | arranged) << index_bits | index, axis=1)
        order = (keys & (1 << index_bits) - 1) + begins
        if num_lines == 1:
            return None, order.ravel()
        places = (np.sort(lines << index_bits | index, axis=1) & (1 << index_bits) - 1) + begins
        return places.ravel(), order.ravel()
    each, flat = np.repeat(np.arange(batches), batch), lines.ravel()
    return np.lexsort((flat, each)), np.lexsort((arranged.ravel(), flat, each))


def _rows(stage: Stage, lines: Int64Array, ordinals: Int64Array) -> Int64Array:
    """Return the row of each draw, given by its line of the table and its ordinal."""
    rows = ordinals.copy()
    for places, order, begin, first in _epochs(stage, lines, ordinals):
        rows[places] = first + order.rows(ordinals[places] - begin)
    return rows


def _arrange(stage: Stage, lines: Int64Array, ordinals: Int64Array) -> Int64Array:
    """Return the ordinal that each draw would have if blocks were read one after another."""
    arranged = ordinals.copy()
    for places, order, begin, _ in _epochs(stage, lines, ordinals):
        arranged[places] = begin + order.arranged(ordinals[places] - begin)
    return arranged


def _rows_of_arranged(stage: Stage, lines: Int64Array, arranged: Int64Array) -> Int64Array:
    """Return the row of each draw, given by its line of the table and what `_arrange` returned."""
    rows = arranged.copy()
    for places, order, begin, first in _epochs(stage, lines, arranged):
        rows[places] = first + order.settled(arranged[places] - begin)
    return rows


def _epochs(
    stage: Stage, lines: Int64Array, ordinals: Int64Array
) -> Iterator[tuple[Int64Array | slice, EpochOrder, int, int]]:
    """Yield the indices of the draws of each epoch, its order, its first ordinal and its first row."""
    for line, places in _by_line(lines, len(stage.names)):
        rest, size = (int(stage.table[line, column]) for column in (REST, SIZE))
        if not size:
            continue  # without epochs, a row is known by its ordinal alone
        drawn = ordinals[places]
        first, last = (_epoch_of(int(ordinal), rest, size) for ordinal in (drawn.min(), drawn.max()))
        for epoch in range(first, last + 1):
            begin, end = (rest + epoch * size, rest + (epoch + 1) * size) if epoch >= 0 else (0, rest)
            chosen = places
            if first < last:
                inside = np.flatnonzero((drawn >= begin) & (drawn < end))
                chosen = inside if isinstance(places, slice) else places[inside]
            yield chosen, stage.order(line, epoch), begin, size if epoch < 0 else 0


def _by_line(lines: Int64Array, num_lines: int) -> Iterator[tuple[int, Int64Array | slice]]:
    """Yield each line of the table that occurs, and the indices at which it does, ascending."""
    if not lines.size:
        return
    if num_lines == 1:
        yield 0, slice(None)
        return
    # numpy sorts numbers of 16 bits by radix.
    order = np.argsort(lines.astype(np.uint16) if num_lines <= 1 << 16 else lines, kind="stable")
    ends = np.cumsum(np.bincount(lines, minlength=num_lines)).tolist()
    for line, (begin, end) in enumerate(pairwise([0, *ends])):
        if begin < end:
            yield line, order[begin:end]


def _epoch_of(ordinal: int, rest: int, size: int) -> int:
    """Return the epoch of the row with an ordinal; -1 for the rest."""
    return (ordinal - rest) // size if ordinal >= rest else -1


def drawn_rows(stage: Stage, name: str, draws: range) -> Int64Array:
    """Return the rows of some draws of a source, counted from the first of the stage."""
    ordinals = stage.carry(name) + np.arange(draws.start, draws.stop)
    return _rows(stage, np.full_like(ordinals, stage.names.index(name)), ordinals)


def uses_in_stage(stage: Stage, name: str, rows: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return (step, slot, row) of every use of the given rows of one source in a stage, by step and slot."""
    line = stage.names.index(name)
    carry = stage.carry(name)
    rest, size = (int(stage.table[line, column]) for column in (REST, SIZE))
    end = carry + stage.draws[name]
    epochs = range(max(0, carry - rest) // size, max(0, -(-(end - rest) // size)))
    full, left = rows[rows < size], rows[rows >= size]
    uses = [(stage.order(line, epoch).places(full) + rest + epoch * size, full) for epoch in epochs if full.size]
    if left.size:
        uses.append((stage.order(line, -1).places(left - size), left))
    if not uses:
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    ordinals = np.concatenate([ordinal for ordinal, _ in uses])
    used = np.concatenate([row for _, row in uses])
    inside = (ordinals >= carry) & (ordinals < end)
    positions = stage.positions_of(name, ordinals[inside] - carry)
    used = used[inside]
    batch = stage.spec.global_batch_size
    steps = positions // batch + stage.spec.start_step
    slots = positions % batch
    if stage.by_block:
        slots = _slots_by_block(stage, line, steps, ordinals[inside])
    elif stage.rotate:
        slots = (slots - rotations(stage.rotation_key, steps, batch)) % batch
    order = np.lexsort((slots, steps))
    return steps[order], slots[order], used[order]


def _slots_by_block(stage: Stage, line: int, steps: Int64Array, ordinals: Int64Array) -> Int64Array:
    """Return the slots of draws of a source in batches that are ordered by block."""
    slots = np.empty_like(steps)
    batch = stage.spec.global_batch_size
    batches = np.unique(steps)
    some = max(1, _SOME_ROWS // batch)
    for first in range(0, batches.size, some):
        group = batches[first : first + some]
        lines, drawn, _ = _batches(stage, group)
        mine = np.flatnonzero(lines == line)
        mine = mine[np.argsort(drawn[mine])]
        asked = np.flatnonzero((steps >= group[0]) & (steps <= group[-1]))
        slots[asked] = mine[np.searchsorted(drawn[mine], ordinals[asked])] % batch
    return slots


LAST_STEP = np.iinfo(np.int64).max
"""Stands for a step that does not exist."""


def next_steps(stage: Stage, name: str, rows: Int64Array, after: int) -> Int64Array:
    """Return the first step of a stage after `after` that draws each of some rows; LAST_STEP where none does."""
    line, batch = stage.names.index(name), stage.spec.global_batch_size
    rest, size = (int(stage.table[line, column]) for column in (REST, SIZE))
    carry, end = stage.carry(name), stage.carry(name) + stage.draws[name]
    first = carry + stage.drawn(min(max(after + 1, stage.spec.start_step), stage.end_step))[name]
    ordinals = np.full(rows.size, LAST_STEP, np.int64)
    left = rows >= size
    if left.any():
        ordinals[left] = stage.order(line, -1).places(rows[left] - size)
    # A row comes once an epoch: in the one under way, or else in the next.
    epoch = max(0, first - rest) // size
    for number in (epoch, epoch + 1):
        due = ~left & ((ordinals < first) | (ordinals == LAST_STEP))
        if due.any():
            ordinals[due] = stage.order(line, number).places(rows[due]) + rest + number * size
    drawn = (ordinals >= first) & (ordinals < end)
    steps = np.full(rows.size, LAST_STEP, np.int64)
    steps[drawn] = stage.positions_of(name, ordinals[drawn] - carry) // batch + stage.spec.start_step
    return steps


@kernel
def rotations(rotation_key: np.uint64, steps: Int64Array, batch: int) -> Int64Array:
    """Return the number of slots by which the batch of each step is rotated."""
    out = np.empty_like(steps)
    last, rotation = int64(-1), int64(0)
    for i in range(steps.size):
        if steps[i] != last:
            last = steps[i]
            rotation = int64(derive(rotation_key, last) % np.uint64(batch))
        out[i] = rotation
    return out
