"""The loader: batches of one rank, in order, from any step, resumed exactly."""

from __future__ import annotations

import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from tokenmill.errors import ConfigError, nearest
from tokenmill.loader.assemble import (
    RECORD_ARRAYS,
    Block,
    RecordBlock,
    StoredRows,
    layout,
    record_layout,
    row_slots,
)
from tokenmill.loader.buffers import BufferPool
from tokenmill.loader.state import Explain, Position, load_state, save_state
from tokenmill.packing.exclude import LOSS_MASK
from tokenmill.packing.records import RecordRows
from tokenmill.types import ARRAYS, POSITIONS, Int64Array

if TYPE_CHECKING:
    from tokenmill.plan.plan import Plan
    from tokenmill.plan.stages import Stage
    from tokenmill.types import Batch


# What is logged of a plan: a line for each stage when an iteration starts, and one when a stage begins.

logger = logging.getLogger("tokenmill")


def announce_plan(plan: Plan, step: int) -> None:
    """Log the stages of a plan, and where the run stands."""
    if not logger.isEnabledFor(logging.INFO):
        return
    logger.info("plan %s: %s steps, now at step %s", plan.fingerprint[:16], f"{plan.steps:,}", f"{step:,}")
    for line in stage_lines(plan):
        logger.info("%s", line)


def announce_stage(plan: Plan, before: int, after: int) -> None:
    """Log that a stage has begun, if the steps belong to different ones, or that steps were skipped."""
    if not logger.isEnabledFor(logging.INFO):
        return
    old, new = plan.stage(before).spec, plan.stage(after).spec
    for stage in plan.stages:
        if stage.spec.skipped is not None and before < stage.spec.start_step <= after:
            logger.info(
                "steps %s:%s skipped: %s",
                f"{stage.spec.start_step:,}",
                f"{stage.end_step:,}",
                stage.spec.skipped or "no reason given",
            )
    if old.number != new.number:
        shown = _facts(plan.stage(after))
        logger.info("step %s: stage %r -> %r: %s", f"{after:,}", old.name, new.name, shown)


def stage_lines(plan: Plan) -> Iterator[str]:
    """Yield a line for each stage: its steps, batch, sequence length and weights."""
    for number, parts in groupby(plan.stages, key=lambda stage: stage.spec.number):
        stages = list(parts)
        first, last = stages[0], stages[-1]
        rows = sum(stage.num_positions for stage in stages if stage.spec.skipped is None)
        tokens = rows * max(index.row_slots for index in last.rows.values())
        yield (
            f"stage {number} {first.spec.name!r}: steps {first.spec.start_step:,}:{last.end_step:,}, "
            f"{tokens:,} tokens, {_facts(last)}"
        )


def _facts(stage: Stage) -> str:
    spec = stage.spec
    total = float(sum(spec.weights.values()))
    shares = ", ".join(f"{name} {weight / total:.1%}" for name, weight in sorted(spec.weights.items()))
    scale = f", lr_scale {spec.lr_scale:g}" if spec.lr_scale != 1 else ""
    ramp = f" by a {spec.ramp.shape} ramp until step {spec.ramp.end:,}" if spec.ramp else ""
    return f"batch {spec.global_batch_size:,}, seq_len {spec.seq_len:,}, {shares}{ramp}{scale}"


AnyBlock: TypeAlias = Block | RecordBlock
FIRST_BLOCK_ROWS = 32
BLOCK_TOKENS = 1 << 24
BLOCK_ROWS = 2048
"""Rows whose spans are found at a time; more gain little (benchmarks/loader.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """What a loader delivers and how it works ahead; neither changes which tokens a batch holds."""

    arrays: tuple[str, ...] = ("input_ids", "labels", "position_ids", "doc_ids")
    threads: int = 1
    """Threads that assemble batches ahead of the caller; 0 assembles each one when it is asked for."""
    prefetch: int = 8
    """Micro-batches that are kept ready."""
    positions: str = "document"
    """Where `position_ids` start from 0: at every `document`, or only at the start of the `row`."""
    timeout: float = 30.0
    """Seconds after which a thread that reads live text, and comes to nothing, is given up."""

    def __post_init__(self) -> None:
        if self.positions not in POSITIONS:
            raise ConfigError(
                f"positions: must be one of {', '.join(POSITIONS)}, got {self.positions!r}; "
                f"{nearest(self.positions, POSITIONS)}"
            )
        if self.threads < 0 or self.prefetch < 1 or not self.timeout > 0:
            raise ConfigError(
                "loader: threads must be at least 0, prefetch at least 1 and timeout more than 0, got "
                f"{self.threads}, {self.prefetch} and {self.timeout}; use threads=0 to do without prefetching"
            )


class Loader:
    """Batches of one rank.

    `for batch in loader` goes on from where the loader stands to the end of the run, one micro-batch
    at a time; `loader[step]` is this rank's slice of any step; `state_dict` and `load_state_dict`
    may be called at any time, before or during an iteration.
    """

    def __init__(
        self, plan: Plan, part: RankSlice, options: LoaderOptions | None = None, explain: Explain | None = None
    ) -> None:
        part.check(plan)
        self.plan = plan
        self.part = part
        self.options = options or LoaderOptions(arrays=usual_arrays(plan))
        _check_arrays(self.options.arrays, _kind(plan))
        self._explain = explain
        self._first_batch = np.cumsum([0, *(self._num_batches(stage) for stage in plan.stages)])
        self._pools: dict[tuple[int, ...], BufferPool] = {}
        self._drawn = 0
        self._jumps = 0
        self._iterations = 0

    def __len__(self) -> int:
        """Return the number of micro-batches of the whole run; the same on every rank."""
        return int(self._first_batch[-1])

    def __getitem__(self, step: int) -> Batch:
        """Return this rank's whole slice of the batch of a step."""
        stage = self.plan.trained_stage(step)
        first = (step - stage.spec.start_step) * self.part.batches(stage)
        block = self._block(stage, first, self.part.batches(stage))
        try:
            shapes = block.layout(block.num_rows)
            out = block.fill(0, {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()})
            return block.complete(0, block.num_rows, out)
        finally:
            block.release()

    def __iter__(self) -> Iterator[Batch]:
        self._iterations += 1
        return _Batches(self, self._iterations)

    @property
    def step(self) -> int:
        """The step that the next batch belongs to."""
        return self._position().step

    def state_dict(self) -> dict[str, int | str]:
        """Return where the loader stands: at most 200 bytes of JSON, the same on every rank."""
        return save_state(self.plan, self._position(), self.part)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state says; a running iteration goes on from there."""
        self._go_to(load_state(state, self.plan, self.part, self._explain))

    def seek(self, step: int) -> None:
        """Go to the start of a step, or to the end of the run; a running iteration goes on from there."""
        if step != self.plan.steps:
            self.plan.stage(step)
        self._go_to(Position(step=step))

    def _go_to(self, position: Position) -> None:
        # Skipped steps have no batches: who goes to one of them stands at the next that has.
        position = Position(step=self.plan.next_trained(position.step), batch=position.batch)
        if position.step == self.plan.steps:
            self._drawn = len(self)
        else:
            stage = self.plan.stage(position.step)
            steps = position.step - stage.spec.start_step
            self._drawn = int(self._first_batch[stage.index]) + steps * self.part.batches(stage) + position.batch
        self._jumps += 1

    def _position(self) -> Position:
        if self._drawn == len(self):
            return Position(step=self.plan.steps)
        index = int(np.searchsorted(self._first_batch, self._drawn, side="right")) - 1
        stage = self.plan.stages[index]
        steps, batch = divmod(self._drawn - int(self._first_batch[index]), self.part.batches(stage))
        return Position(step=stage.spec.start_step + steps, batch=batch)

    def _block(self, stage: Stage, first: int, count: int) -> AnyBlock:
        places = self.part.places(stage, first, count)
        if isinstance(next(iter(stage.rows.values())), RecordRows):
            index = {self.plan.sources.index(name): cast(RecordRows, rows) for name, rows in stage.rows.items()}
            return RecordBlock(stage, index, places, self.options.arrays, _max_maps(stage))
        block = self._find(stage, places, self.options.arrays)
        if "num_loss_tokens" in self.options.arrays:
            block.set_loss_tokens(self._count_labels(stage, block, first, count))
        return block

    def _find(self, stage: Stage, places: tuple[Int64Array, Int64Array], arrays: Sequence[str]) -> Block:
        index = {self.plan.sources.index(name): cast(StoredRows, rows) for name, rows in stage.rows.items()}
        return Block(stage, index, places, arrays, _max_maps(stage), continuous=self.options.positions == "row")

    def _count_labels(self, stage: Stage, block: Block, first: int, count: int) -> dict[int, int]:
        """Count the labels of the global batches of a block: what the loss of all ranks together is divided by."""
        per_step = self.part.batches(stage)
        masked = any(LOSS_MASK in cast(StoredRows, rows).store.keys for rows in stage.rows.values())
        if self.part.world_size == 1 and first % per_step == 0 and count % per_step == 0 and not masked:
            return block.labels_by_step()  # it holds the whole of its steps
        steps = np.array(block.steps)
        slots = np.arange(stage.spec.global_batch_size)
        counts: dict[int, int] = {}
        # Labels under a mask are laid out to be counted: one step at a time, to bound the memory.
        for part in np.split(steps, steps.size) if masked else [steps]:
            places = (np.repeat(part, slots.size), np.tile(slots, part.size))
            whole = self._find(stage, places, ("labels",) if masked else ("source",))
            try:
                counts |= whole.labels_by_step()
            finally:
                whole.release()
        return counts

    def _runs(self, drawn: int) -> Iterator[tuple[Stage, int, int]]:
        """Yield (stage, its first micro-batch, number of them) for the blocks from a point of the run on.

        The first ones are small, so that the first batch does not wait for rows that are needed much later.
        """
        rows = FIRST_BLOCK_ROWS
        for stage, begin in zip(self.plan.stages, self._first_batch.tolist(), strict=False):
            first, end = max(0, drawn - begin), self._num_batches(stage)
            while first < end:
                count = min(end - first, max(1, rows // self.part.micro_batch))
                yield stage, first, count
                first += count
                rows = min(self._block_rows(stage), 4 * rows)

    def _num_batches(self, stage: Stage) -> int:
        """Return how many micro-batches the steps of a stage have; those that are skipped have none."""
        return 0 if stage.spec.skipped is not None else stage.num_steps * self.part.batches(stage)

    def _block_rows(self, stage: Stage) -> int:
        """Return how many rows a block of a stage has: fewer where rows are long or shards too many to be held."""
        stores = {id(store): store for store in (cast(StoredRows, rows).store for rows in stage.rows.values())}
        records = isinstance(next(iter(stage.rows.values())), RecordRows)
        crowded = sum(s.num_shards * (len(s.keys) if records else 1) for s in stores.values()) > _max_maps(stage)
        slots = row_slots(stage) if records else stage.spec.seq_len
        return max(1, min(BLOCK_ROWS // 8 if crowded else BLOCK_ROWS, BLOCK_TOKENS // slots))

    def _batch(self, block: AnyBlock, number: int) -> Batch:
        """Return a micro-batch of a block, in memory that is used again when nobody holds it any more."""
        micro = self.part.micro_batch
        out = block.fill(number * micro, self._pool(block, micro).batch())
        return block.complete(number, micro, out)

    def _pool(self, block: AnyBlock, rows: int) -> BufferPool:
        key = (*block.shape, rows)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = BufferPool(block.layout(rows))
        return pool


def _max_maps(stage: Stage) -> int:
    """Return how many maps a block may hold: half; the rest are for offsets, which are held only briefly."""
    return cast(StoredRows, next(iter(stage.rows.values()))).store.maps.limit // 2


def _kind(plan: Plan) -> str | None:
    """Return the training type of a plan's records; None where it trains on sequences."""
    rows = next(iter(plan.stages[0].rows.values()))
    return rows.store.manifest.kind if isinstance(rows, RecordRows) else None


def usual_arrays(plan: Plan) -> tuple[str, ...]:
    """Return what a loader of a plan delivers if nobody says otherwise."""
    kind = _kind(plan)
    return LoaderOptions().arrays if kind is None else RECORD_ARRAYS[kind]


def _check_arrays(arrays: Sequence[str], kind: str | None) -> None:
    """Refuse arrays that batches of a training type do not have."""
    known = ARRAYS if kind is None else (*RECORD_ARRAYS[kind], "source")
    for name in arrays:
        if name not in known:
            raise ConfigError(f"arrays: must be among {', '.join(known)}, got {name!r}; {nearest(name, known)}")
    shapes = layout(arrays, 1, 1) if kind is None else record_layout(kind, arrays, (1, 1, 1))
    if len(set(arrays)) != len(arrays) or not shapes:
        raise ConfigError(
            f"arrays: must name each array once, and one that has a line for every row, "
            f"got {list(arrays)}; name {' and '.join(known[:2])} at least"
        )


class _Batches(Iterator["Batch"]):
    """One iteration over a loader; follows it when a state is loaded meanwhile."""

    def __init__(self, loader: Loader, number: int) -> None:
        self._loader = loader
        self._number = number
        self._jumps = -1
        self._edge = -1
        """Number of batches drawn at which the next stage begins."""
        self._step = -1
        """Step of the batch for which something was last logged."""
        self._stream: Iterator[Batch] = iter(())
        self._stop: Callable[[], object] = lambda: None

    def __next__(self) -> Batch:
        loader = self._loader
        if self._number != loader._iterations:
            self._stop()
            raise ConfigError(
                "loader: there must be one iteration at a time, got a newer one; "
                "go on with that, or make a second loader"
            )
        if self._jumps != loader._jumps:
            self._jumps = loader._jumps
            self._announce(loader)
            self._start()
        elif loader._drawn == self._edge:
            self._announce(loader)
        try:
            batch = next(self._stream)
        except StopIteration:
            raise
        except BaseException:
            self._jumps = -1  # whoever tries again gets this batch, or the error again, not the end of the run
            raise
        loader._drawn += 1
        return batch

    def _announce(self, loader: Loader) -> None:
        """Log the plan where an iteration starts, and then every stage that begins; rank 0 alone."""
        step, edges = loader.step, loader._first_batch
        after = int(np.searchsorted(edges, loader._drawn, side="right"))
        self._edge = int(edges[after]) if after < edges.size else -1
        if loader.part.rank or step == loader.plan.steps:
            return
        if self._step < 0:
            announce_plan(loader.plan, step)
        elif step > self._step:
            announce_stage(loader.plan, self._step, step)
        self._step = step

    def _start(self) -> None:
        self._stop()
        threads = self._loader.options.threads
        if not threads:
            self._stream = _inline(self._loader)
            return
        executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenmill")
        self._stop = weakref.finalize(self, executor.shutdown, wait=False, cancel_futures=True)
        self._stream = _ahead(self._loader, executor)


def _inline(loader: Loader) -> Iterator[Batch]:
    """Assemble each batch when it is asked for."""
    for stage, first, count in loader._runs(loader._drawn):
        block = loader._block(stage, first, count)
        try:
            for number in range(count):
                yield loader._batch(block, number)
        finally:
            block.release()


def _ahead(loader: Loader, executor: ThreadPoolExecutor) -> Iterator[Batch]:
    """Assemble batches in threads, a bounded number of them, and hand them out in order."""
    # A few batches a task, so that handing over costs little; at least two tasks a thread, so that none idles.
    size = max(1, loader.options.prefetch // (2 * loader.options.threads))
    waiting: deque[tuple[Future[AnyBlock], Future[list[Batch]], bool]] = deque()
    blocks: deque[Future[AnyBlock]] = deque()

    def copy(block: Future[AnyBlock], begin: int, end: int) -> list[Batch]:
        return [loader._batch(block.result(), number) for number in range(begin, end)]

    def take() -> list[Batch]:
        _, batches, last = waiting.popleft()
        found = batches.result()
        if last:
            blocks.popleft().result().release()
        return found

    try:
        for stage, first, count in loader._runs(loader._drawn):
            blocks.append(executor.submit(loader._block, stage, first, count))
            for begin in range(0, count, size):
                end = min(begin + size, count)
                waiting.append((blocks[-1], executor.submit(copy, blocks[-1], begin, end), end == count))
                if len(waiting) * size >= loader.options.prefetch:
                    yield from take()
        while waiting:
            yield from take()
    finally:
        # An iteration that is given up must not keep its maps; at the end of the interpreter nothing matters.
        if not sys.is_finalizing():
            executor.shutdown(wait=True, cancel_futures=True)
            for block in blocks:
                if not block.cancelled() and block.exception() is None:
                    block.result().release()


def count_tokens(batch: Batch) -> tuple[int, int]:
    """Return how many tokens a batch has room for, and how many are trained on; of a batch with all its arrays."""
    if "labels" in batch:
        return batch["input_ids"].size, int((batch["labels"] >= 0).sum())
    if "chosen" in batch:
        # The first token of a sequence is no label, whatever its mask says.
        trained = sum(int(batch[name][:, 1:].sum()) for name in ("chosen_mask", "rejected_mask"))
        return batch["chosen"].size + batch["rejected"].size, trained
    unprompted = batch["masks"][batch["prompt_len"] == 0]
    trained = int(batch["masks"].sum()) - int(unprompted[..., 0].sum())
    return batch["prompts"].size + batch["responses"].size, trained


def stack(batches: Sequence[Batch]) -> Batch:
    """Join batches row by row, as the slices of all ranks make up the global batch."""
    joined: Batch = {}
    for name in batches[0]:
        parts = [batch[name] for batch in batches]
        if name == "cu_seqlens":
            ends = np.cumsum([0, *(int(part[-1]) for part in parts)])
            shifted = [part[:-1] + end for part, end in zip(parts, ends[:-1], strict=True)]
            joined[name] = np.concatenate([*shifted, ends[-1:]]).astype(np.int32)
        elif name == "max_seqlen":
            joined[name] = np.max(parts)
        elif name == "num_loss_tokens":
            joined[name] = parts[0]
        else:
            joined[name] = np.concatenate(parts)
    return joined


# Which rows of a global batch a rank takes, and in which micro-batches.


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlice:
    """One rank's part: rank r of R takes the r-th of R equal runs of every global batch."""

    rank: int
    world_size: int
    micro_batch: int
    """Rows that are delivered at a time."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank: must lie within 0:world_size, got rank {self.rank} of {self.world_size}; "
                "pass the rank and size of the data-parallel group"
            )
        if self.micro_batch < 1:
            raise ConfigError(f"micro_batch: must be at least 1, got {self.micro_batch}; leave it out for 1")

    def check(self, plan: Plan) -> None:
        """Refuse a slicing that does not divide the batch of every stage, before the first step."""
        share = self.world_size * self.micro_batch
        for stage in plan.stages:
            batch = stage.spec.global_batch_size
            if batch % share:
                raise ConfigError(
                    f"stage {stage.spec.name!r}: global_batch_size must be divisible by world_size * micro_batch, "
                    f"got {batch} and {self.world_size} * {self.micro_batch}; {self._way_out(batch)}"
                )

    def _way_out(self, batch: int) -> str:
        share = self.world_size * self.micro_batch
        below, above = batch // share * share, -(-batch // share) * share
        batches = f"use global_batch_size {' or '.join(str(size) for size in (below, above) if size)}"
        name, fixed = (
            ("micro_batch", self.world_size) if batch % self.world_size == 0 else ("world_size", self.micro_batch)
        )
        legal = [size for size in range(1, batch + 1) if batch % (size * fixed) == 0]
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
        """Return (step, slot) of every row of `count` micro-batches from the stage's `first`-th on."""
        rows = self.rows(stage)
        begin = first * self.micro_batch
        index = np.arange(begin, begin + count * self.micro_batch)
        return index // rows + stage.spec.start_step, index % rows + self.rank * rows
