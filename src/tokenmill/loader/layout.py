"""Part of a global batch that a process gets: its rows, in which micro-batches, and which columns of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt
from numbers import Integral
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tokenmill.errors import ConfigError, nearest
from tokenmill.types import MASK_KEYS, TOKEN_KEYS, Int32Array, Int64Array, counted_from

if TYPE_CHECKING:
    from tokenmill.plan.plan import Plan
    from tokenmill.plan.stages import Stage

GroupRank: TypeAlias = tuple[int, int]
"""A rank among the members of a group, and how many there are."""
CUTS = ("zigzag", "contiguous", "segments")
"""Ways to cut a row for the members of a context-parallel group."""
_LEFT_OUT = {
    "everything": frozenset[str](),
    "inputs": frozenset(("labels", "loss_mask")),
    "labels": frozenset(("input_ids",)),
    "bounds": frozenset(("input_ids", "labels", "num_loss_tokens", *TOKEN_KEYS, *MASK_KEYS, "rewards")),
}
NEEDS = (*_LEFT_OUT, "nothing")
"""Parts of a batch that a process can need."""

MAX_MICRO_BATCH = 1 << 24
"""Rows of a micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Place of a process in its parallel groups: a rank and a size for each kind of group.

    Args:
        dp: Data parallel: members share the rows of a batch.
        cp: Context parallel: each member has a part of every row.
        tp: Tensor parallel: all members have the same batch.
        pp: Pipeline parallel: all members have the same batch.
        cut: How a row is cut for `cp`: "zigzag", "contiguous" or "segments".
        needs: Arrays that the process needs: "everything", "inputs", "labels" or "nothing".

    Raises:
        ConfigError: A rank is not below the size of its group, or a choice is unknown.

    Examples:
        >>> layout = Layout(dp=(1, 4), cp=(0, 2))
        >>> layout.columns(16)
        (slice(0, 4, None), slice(12, 16, None))
    """

    dp: GroupRank = (0, 1)
    """Data parallel: members share out the rows of a batch."""
    cp: GroupRank = (0, 1)
    """Context parallel: each member has a part of every row."""
    tp: GroupRank = (0, 1)
    """Tensor parallel: all members have the same batch."""
    pp: GroupRank = (0, 1)
    """Pipeline parallel: all members have the same batch."""
    cut: str = "zigzag"
    """How a row is cut for `cp` of C members. `zigzag`: into 2 C chunks, of which member r gets the r-th from the
    head and the r-th from the tail, so that causal attention costs each the same; `contiguous`: into C chunks.
    `segments`: each segment as zigzag cuts a row; all must be multiples of 2 C. It is what Transformer Engine's
    `thd_get_partitioned_indices` gives (transformer_engine/common/fused_attn/context_parallel.cu)"""
    needs: str = "everything"
    """Arrays that the process needs: `everything`, `inputs` (no labels), `labels` (no inputs), `bounds` (positions,
    document ids and segment bounds, for which no token is read), or `nothing`. Other arrays are not read."""

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "tp", "pp"):
            place = getattr(self, name)
            if (
                not isinstance(place, tuple | list)
                or [isinstance(number, Integral) for number in place] != [True] * 2
            ):
                raise ConfigError(
                    f"layout: {name} must be a rank and the number of members, got {place!r}; write {name}=(0, 2)"
                )
            rank, size = place
            if size < 1 or not 0 <= rank < size:
                what = "rank" if name == "dp" else name
                kind = {"dp": "data", "cp": "context", "tp": "tensor", "pp": "pipeline"}[name]
                raise ConfigError(
                    f"{what}: must lie within 0:world_size, got rank {rank} of {size}; "
                    f"pass the rank and size of the {kind}-parallel group"
                )
        for name, value, known in (("cut", self.cut, CUTS), ("needs", self.needs, NEEDS)):
            if value not in known:
                raise ConfigError(
                    f"layout: {name} must be one of {', '.join(known)}, got {value!r}; {nearest(value, known)}"
                )

    @property
    def leads(self) -> bool:
        """Whether the process is the first of all, which logs and records."""
        return not any(rank for rank, _ in (self.dp, self.cp, self.tp, self.pp))

    def arrays(self, arrays: Sequence[str]) -> tuple[str, ...]:
        """Return those of the arrays of a batch that the process needs."""
        if self.needs == "nothing":
            return ()
        return tuple(name for name in arrays if name not in _LEFT_OUT[self.needs])

    def columns(self, seq_len: int) -> tuple[slice, ...]:
        """Return the columns of a row that the member of the context-parallel group has, in their order.

        >>> Layout(cp=(1, 2)).columns(16), Layout(cp=(1, 2), cut="contiguous").columns(16)
        ((slice(4, 8, None), slice(8, 12, None)), (slice(8, 16, None),))
        """
        rank, size = self.cp
        if size == 1:
            return (slice(0, seq_len),)
        chunk = seq_len // self._num_chunks
        chunks = (rank,) if self.cut == "contiguous" else (rank, 2 * size - 1 - rank)
        return tuple(slice(index * chunk, (index + 1) * chunk) for index in chunks)

    def segment_columns(self, bounds: Int32Array) -> Int64Array:
        """Return the columns that the member has of segments with these bounds, each cut in a zigzag."""
        rank, size = self.cp
        chunk = np.diff(bounds.astype(np.int64)) // (2 * size)
        first = bounds[:-1, None] + chunk[:, None] * np.array([rank, 2 * size - 1 - rank])
        return counted_from(first.ravel(), np.repeat(chunk, 2))

    def width(self, seq_len: int) -> int:
        """Return how many columns of a row the process has."""
        return seq_len // self.cp[1]

    @property
    def _num_chunks(self) -> int:
        return self.cp[1] * (1 if self.cut == "contiguous" else 2)

    def check(self, stage: Stage) -> None:
        """Raise if rows cannot be cut into chunks of one length."""
        seq_len, chunks = stage.spec.seq_len, self._num_chunks
        if self.cp[1] > 1 and seq_len % chunks:
            below = seq_len // chunks * chunks
            nearby = " or ".join(str(size) for size in (below, below + chunks) if size)
            raise ConfigError(
                f"stage {stage.spec.name!r}: seq_len must be divisible by {chunks} to be cut for {self.cp[1]} "
                f"context-parallel ranks ({self.cut}), got {seq_len}; use seq_len {nearby}"
            )
        multiples = [rows.segment_multiple for rows in stage.rows.values()]
        if self.cp[1] > 1 and self.cut == "segments" and any(multiple % chunks for multiple in multiples):
            raise ConfigError(
                f"stage {stage.spec.name!r}: segments must be filled up to a multiple of {chunks} to be cut for "
                f"{self.cp[1]} context-parallel ranks each, got {min(multiples)}; say segment_multiple = {chunks}"
            )


def find_layout(layout: Layout | None, rank: int, world_size: int) -> Layout:
    """Return a layout, or the one of data-parallel ranks alone; refuse both at once."""
    if layout is not None and (rank, world_size) != (0, 1):
        raise ConfigError(
            f"loader: layout cannot be combined with rank {rank} of {world_size}; "
            f"set dp=({rank}, {world_size}) in the layout"
        )
    if layout is not None and not isinstance(layout, Layout):
        raise ConfigError(f"layout: expected a Layout, got {layout!r}; write tm.Layout(dp=(0, 2))")
    return layout or Layout(dp=(rank, world_size))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlice:
    """One rank's part: rank r of R takes the r-th of R equal runs of every global batch, or of how it was dealt."""

    layout: Layout = Layout()
    micro_batch: int = 1
    """Rows that are delivered at a time."""
    balance: bool = False
    """Whether the rows of a step are dealt by what they cost, in place of runs of them."""

    def __post_init__(self) -> None:
        if not isinstance(self.micro_batch, Integral) or self.micro_batch < 1:
            raise ConfigError(f"micro_batch: must be at least 1, got {self.micro_batch!r}; leave it out for 1")
        if self.micro_batch > MAX_MICRO_BATCH:
            raise ConfigError(
                f"micro_batch: must be at most {MAX_MICRO_BATCH} rows, which a process holds at once, got "
                f"{self.micro_batch}; lower it, a step has as many micro-batches as it takes"
            )

    @property
    def rank(self) -> int:
        """The data-parallel rank."""
        return self.layout.dp[0]

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.layout.dp[1]

    def of_rank(self, rank: int) -> RankSlice:
        """Return the part of another data-parallel rank."""
        return replace(self, layout=replace(self.layout, dp=(rank, self.world_size)))

    def check(self, plan: Plan) -> None:
        """Raise if the slice does not divide the batch of every stage."""
        share = self.world_size * self.micro_batch
        for stage in plan.stages:
            batch = stage.spec.global_batch_size
            if batch % share:
                raise ConfigError(
                    f"stage {stage.spec.name!r}: global_batch_size must be divisible by world_size * micro_batch, "
                    f"got {batch} and {self.world_size} * {self.micro_batch}; {self._way_out(batch)}"
                )
            self.layout.check(stage)

    def _way_out(self, batch: int) -> str:
        share = self.world_size * self.micro_batch
        below, above = batch // share * share, -(-batch // share) * share
        batches = f"use global_batch_size {' or '.join(str(size) for size in (below, above) if size)}"
        name, fixed = (
            ("micro_batch", self.world_size) if batch % self.world_size == 0 else ("world_size", self.micro_batch)
        )
        legal = _divisors(batch // fixed) if batch % fixed == 0 else []
        wanted: int = getattr(self, name)
        near = [*[size for size in legal if size < wanted][-1:], *[size for size in legal if size > wanted][:1]]
        return f"{batches}, or {name} {' or '.join(map(str, near))}" if near else batches

    def rows(self, stage: Stage) -> int:
        """Return how many rows of a step this rank takes."""
        return stage.spec.global_batch_size // self.world_size

    def batches(self, stage: Stage) -> int:
        """Return how many micro-batches a step has."""
        return self.rows(stage) // self.micro_batch

    def places(self, stage: Stage, first: int, count: int) -> tuple[Int64Array, Int64Array]:
        """Return (step, slot) of every row of `count` micro-batches from the stage's `first`-th on.

        Where rows are dealt by cost, slots are places in the order in which ranks take the rows of the step.
        """
        rows = self.rows(stage)
        begin = first * self.micro_batch
        index = np.arange(begin, begin + count * self.micro_batch)
        return index // rows + stage.spec.start_step, index % rows + self.rank * rows


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending, after as many divisions as its square root.

    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
