"""The loader: batches of one rank, in order, resumed exactly; and from any step, unless rows are drawn."""

from __future__ import annotations

import os
import sys
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cached_property, partial
from itertools import accumulate
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tokenmill.errors import ConfigError, PlanError, ResumeError, nearest
from tokenmill.fingerprint import digest, first_difference
from tokenmill.loader import buffers, fetch
from tokenmill.loader.attribution import Attribution, attribute
from tokenmill.loader.balance import BALANCE_VERSION, Balancer
from tokenmill.loader.blocks import Block, RecordBlock, SequenceBlock
from tokenmill.loader.drawn import DrawnSources, Lanes, live_rows
from tokenmill.loader.layout import RankSlice
from tokenmill.loader.log import announce_plan, announce_stage
from tokenmill.loader.metrics import Meter, measure
from tokenmill.loader.options import LoaderOptions
from tokenmill.loader.state import Position, State, check_position, read_state, save_state
from tokenmill.packing.stored import LOSS_MASK, StoredRows, stored_rows
from tokenmill.plan.plan import Plan, TokensSeen
from tokenmill.plan.stages import Stage, as_step, rows_at
from tokenmill.store.layout import PAGE_BYTES
from tokenmill.tables import check_types
from tokenmill.types import ARRAYS, Batch, Int64Array, distinct

if TYPE_CHECKING:
    from tokenmill.store import Store
    from tokenmill.store.remote.fetch import Network

T = TypeVar("T")
B = TypeVar("B")
Explain = Callable[[str, int], str | None]
"""(digest of the plan that made a state, step) -> the first difference to this run's plan, if it is on record."""
FIRST_BLOCK_ROWS = 32
BLOCK_TOKENS = 1 << 24
BLOCK_ROWS = 2048
"""Rows whose spans are computed together; more gain little (benchmarks/loader.py)."""
_NAME_LENGTH = 24
"""Characters of a stage name in a state."""

_forks = 0
"""Number of forks between this process and the one that imported the module. No thread survives a fork."""


def _count_fork() -> None:
    global _forks  # noqa: PLW0603 - one number of the process
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Loader:
    """Batches of one rank. `Run.loader` makes one.

    `for batch in loader` yields one micro-batch at a time, from the current position to the end of the run.
    `loader[step]` is this rank's slice of any step. `state_dict` and `load_state_dict` may be called at any time,
    before or during an iteration. For live text, batches are available in order only.

    Args:
        plan: Compiled plan of the run.
        part: Slice of this rank and its micro-batch size.
        options: Arrays, threads and prefetch.
        explain: Function that returns the first difference between this run and the plan of a state.

    Raises:
        ConfigError: A batch of the plan does not divide by the ranks, or does not have such arrays.

    Examples:
        >>> import tokenmill as tm
        >>> loader = tm.Run.from_toml("run.toml").loader(rank=0, world_size=2, micro_batch=4)
        >>> batch = next(iter(loader))
        >>> batch["input_ids"].shape, loader.step
        ((4, 128), 1)
        >>> len(loader)
        132
    """

    def __init__(
        self, plan: Plan, part: RankSlice, options: LoaderOptions | None = None, explain: Explain | None = None
    ) -> None:
        if not isinstance(plan, Plan) or not isinstance(part, RankSlice):
            raise ConfigError(
                f"Loader: expected a Plan and a RankSlice, got {plan!r} and {part!r}; use Run.loader(...)"
            )
        self.part = part
        self.options = options or LoaderOptions(arrays=usual_arrays(plan))
        self.arrays = part.layout.arrays(self.options.arrays)
        """Arrays of its batches: those of the options that its layout needs."""
        self._use(plan)
        self._explain = explain
        self._pools: dict[tuple[int, ...], buffers.BufferPool] = {}
        self.announces = True
        """Whether the plan and its stages are logged."""
        self.num_drawn = 0
        """Micro-batches before the next one."""
        self.meter = Meter()
        self.num_jumps = 0
        """Number of times that the position was set."""
        self._iterations = 0
        self._forks = _forks
        self._finishes = self.options.pad_to == "batch" or bool(self.options.columns)
        """Whether batches are changed after they are copied (`_finished`)."""

    def _use(self, plan: Plan) -> None:
        """Check a plan, and read its batches from now on."""
        self.part.check(plan)
        self.plan = plan
        self._check_options()
        is_drawn = any(live_rows(stage) for stage in plan.stages)
        if is_drawn:
            self._check_drawn()
        self.first_batches = list(accumulate((self._num_batches(stage) for stage in plan.stages), initial=0))
        """Micro-batches before each stage, and of all."""
        self._drawn = DrawnSources(plan, self.part, self.options) if is_drawn else None
        """None: all rows are in stores."""
        self._balancer = Balancer(self.part) if self.part.balance else None

    def replan(self, plan: Plan) -> None:
        """Continue with another plan; a running iteration reads its batches from the current position on.

        Args:
            plan: Plan with the same batches before the current position, such as one with later weights changed.

        Raises:
            ResumeError: Earlier batches of the plan are others. The loader keeps its plan.
            ConfigError: A batch of the plan does not divide by the ranks. The loader keeps its plan.

        Examples:
            >>> import tokenmill as tm
            >>> loader = tm.Run.from_toml("run.toml").loader()
            >>> loader.replan(tm.Run.from_toml("run.toml").plan())
            >>> loader.step
            0
        """
        if not isinstance(plan, Plan):
            raise ConfigError(f"replan: expected a Plan, got {plan!r}; pass run.plan()")
        step = self.position.covered
        if plan.fingerprint_at(step) != self.plan.fingerprint_at(step):
            place = first_difference(self.plan.describe(step), plan.describe(step))
            assert place is not None, "the fingerprint covers what is described"
            raise ResumeError(
                f"replan: batches before step {step} differ: {place[0]} {place[1]!r} -> {place[2]!r}; "
                "change the plan from a later step on"
            )
        state, before = self.state_dict(), self.plan
        self.close()
        try:
            self._use(plan)
            self.load_state_dict(state)
        except BaseException:
            self._use(before)
            self.load_state_dict(state)
            raise
        self.__dict__.pop("network", None)  # stores may be others

    def __repr__(self) -> str:
        """Describe which slice of which plan it delivers, and where it is."""
        part, options = self.part, self.options
        return (
            f"<Loader of plan {self.plan.fingerprint[:8]}: at step {self.step:,} of {self.plan.steps:,}, "
            f"rank {part.rank} of {part.world_size}, micro_batch {part.micro_batch}\n"
            f" arrays {', '.join(self.arrays) or 'none'}; threads {options.threads}, prefetch {options.prefetch}>"
        )

    def __len__(self) -> int:
        """Return the number of micro-batches of the whole run; the same on every rank."""
        return self.first_batches[-1]

    def __getitem__(self, step: int) -> Batch:
        """Return this rank's whole slice of the batch of a step, as `batch_at` does."""
        return self.batch_at(step)

    def batch_at(self, step: int) -> Batch:
        """Return this rank's whole slice of the batch of a step; the position of the loader stays as it is.

        Raises:
            PlanError: The run has no such step, skips it, or reads live text.
        """
        step = as_step(step)
        self._refuse_drawn(step)
        self._notice_fork()
        stage = self.plan.trained_stage(step)
        if not self.arrays:
            return {}
        first = (step - stage.spec.start_step) * self.part.batches(stage)
        block = self._block(stage, first, self.part.batches(stage))
        try:
            batch = block.batch(0, {name: np.empty(*kind) for name, kind in block.shapes(block.num_rows).items()})
            return batch | block.columns(0, block.num_rows, self.options.columns)
        finally:
            block.release()

    def attribution(self, step: int) -> Attribution:
        """Return which tokens of which documents this rank trains on in a step, as arrays.

        Only the spans of rows are computed: no token is read. For live text, the entry of a row has document -1.

        Raises:
            PlanError: The run has no such step, or skips it.
        """
        step = as_step(step)
        stage = self.plan.trained_stage(step)
        batches = self.part.batches(stage)
        (steps, slots), source_rows = self._places(stage, (step - stage.spec.start_step) * batches, batches)
        return attribute(self._stored(stage), slots, *(source_rows or rows_at(stage, steps, slots)))

    def _finished(self, block: Block, number: int, batch: Batch) -> Batch:
        """Return a batch without the padding that none of its rows needs, and with the columns of its records."""
        if self.options.pad_to == "batch":
            batch = block.trimmed(number, batch)
        return batch | block.columns(number, self.part.micro_batch, self.options.columns)

    def __iter__(self) -> Iterator[Batch]:
        self._iterations += 1
        return _Batches(self, self._iterations)

    @property
    def step(self) -> int:
        """The step that the next batch belongs to."""
        return self.position.step

    @property
    def position(self) -> Position:
        """The next batch: its step, and how many of the step lie before it."""
        if self.num_drawn == len(self):
            return Position(step=self.plan.steps)
        index = bisect_right(self.first_batches, self.num_drawn) - 1
        stage = self.plan.stages[index]
        steps, batch = divmod(self.num_drawn - self.first_batches[index], self.part.batches(stage))
        return Position(step=stage.spec.start_step + steps, batch=batch)

    @property
    def tokens_seen(self) -> TokensSeen:
        """Input slots and labels of all ranks before the step of the next batch."""
        return self.plan.tokens_seen(self.step)

    @property
    def lanes(self) -> Mapping[str, Lanes]:
        """The lanes of this rank, of each source of live text; of a run of stores none."""
        return self._drawn.lanes if self._drawn else {}

    @property
    def waited(self) -> float:
        """Seconds that the caller has waited for batches."""
        return self.meter.waited

    def metrics(
        self, *, prefix: str | None = None, labels: bool = True, texts: bool = False, digest: bool = False
    ) -> dict[str, int | float | str]:
        """Return the progress of the run as a flat dict of numbers, for W&B, TensorBoard or MLflow.

        docs/how-to/metrics.md documents each key. Counts are those before the step of the next batch. They follow
        from the plan and the step, so they are equal on all ranks and exact after a resume. Times are those of this
        rank, and so are epochs of live text. Unknown values are left out.

        Keys begin with `prefix`, by default `data/`. `labels=False` omits labels and padding, which are counted row
        by row. `texts` adds the name of the stage and the fingerprint of the plan. `digest` reads the last global
        batch again and adds its digest.
        """
        prefix = self.metrics_prefix if prefix is None else prefix
        check_types(prefix=(prefix, str))
        return measure(self, prefix, labels=labels, texts=texts, digest=digest)

    @property
    def metrics_prefix(self) -> str:
        """Beginning of the keys of `metrics`."""
        return "data/"

    @cached_property
    def network(self) -> Network | None:
        """Network shared by the stores in object storage; None without such stores."""
        stores = [rows.store for stage in self.plan.stages for rows in self._stored(stage).values()]
        return next((files.network for store in stores for files in store._remotes), None)

    @property
    def _horizon(self) -> int:
        """Number of bytes of blocks to prefetch."""
        return self.network.options.horizon_bytes if self.network else 0

    def _wait(self, block: Block, ready: Callable[[], T]) -> T:
        """Return what is made of a block, and note for how long the network kept the caller waiting."""
        if self.network is None or block.is_here:
            return ready()
        began = monotonic()
        try:
            return ready()
        finally:
            self.network.record_wait(monotonic() - began)

    def describe(self) -> dict[str, Any]:
        """Return what the loaders of all ranks must have in common, as JSON."""
        common = {"arrays": list(self.options.arrays), "world_size": self.part.world_size}
        return {**self.plan.describe(), "steps": self.plan.steps, **common}

    def close(self) -> None:
        """Stop the threads that read live text and let go of it; the next batch starts them again."""
        if self._drawn:
            self._drawn.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position as at most 200 bytes of JSON, the same on every rank.

        For live text, the state has the lanes of this rank; `merge_states` joins the states of all ranks.

        Examples:
            >>> import tokenmill as tm
            >>> run = tm.Run.from_toml("run.toml")
            >>> loader = run.loader(micro_batch=8)
            >>> batch = next(iter(loader))
            >>> resumed = run.loader(micro_batch=2)
            >>> resumed.load_state_dict(loader.state_dict())
            >>> resumed.step
            1
        """
        position = self.position
        state = save_state(position, self.part, self._made_by(position))
        return {**state, "live": self._drawn.state(position.batch)} if self._drawn else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the position of a state. A running iteration continues from there.

        Args:
            state: What `state_dict` returned, for any number of ranks.

        Raises:
            ResumeError: The state is damaged, or of a run with other batches before its step.
        """
        saved = read_state(state)
        check_position(saved, self.plan, self.part)
        self._check_made_by(saved)
        if self._drawn:  # or the run has no more of the live text that the state has lanes of
            self._drawn.load(saved.position, saved.live)
        self._go_to(saved.position)

    def seek(self, step: int) -> None:
        """Move to the start of a step, or to the end of the run. A running iteration continues from there.

        Args:
            step: Step of the run, from 0. For live text it must be 0.

        Raises:
            PlanError: The run has no such step, or reads live text.
        """
        step = as_step(step)
        if step != self.plan.steps:
            self.plan.stage(step)
        if step == 0 and self._drawn:
            self._drawn.begin()
        elif self.position != Position(step=step):
            self._refuse_drawn(step)
        self._go_to(Position(step=step))

    def _check_options(self) -> None:
        """Raise if batches of the plan cannot have the arrays, labels or padding of the options."""
        plan, arrays = self.plan, self.arrays
        kind = buffers.record_type(plan.stages[0])
        known = ARRAYS if kind is None else (*buffers.RECORD_ARRAYS[kind], "source")
        for name in self.options.arrays:
            if name not in known:
                raise ConfigError(f"arrays: must be among {', '.join(known)}, got {name!r}; {nearest(name, known)}")
        lines = buffers.stage_shapes(plan.stages[0], arrays, 1)
        if len(set(arrays)) != len(arrays) or not (lines or self.part.layout.needs == "nothing"):
            raise ConfigError(
                f"arrays: must name each array once, and one that has a line for every row, "
                f"got {list(arrays)}; name {' and '.join(known[:2])} at least"
            )
        for_sequences = {
            "horizon": self.options.horizon > 1,
            "context parallel": self.part.layout.cp[1] > 1,
            "balance": self.part.balance,
        }
        wanted = next((name for name, is_wanted in for_sequences.items() if is_wanted), None)
        if kind is not None and wanted is not None:
            raise ConfigError(f"loader: {wanted} cannot be combined with {kind} stores; remove it")
        if self.options.pad_to == "batch" and self.part.layout.cp[1] > 1:
            raise ConfigError(
                'pad_to: must be "row" where a row is cut for context-parallel ranks, all alike, got '
                '"batch"; leave it out'
            )

    def _check_drawn(self) -> None:
        """Raise if an option needs rows that are known before they are read."""
        assert not self.part.balance, "rows must be known before they are dealt"
        if "num_loss_tokens" in self.options.arrays:
            raise ConfigError(
                "arrays: num_loss_tokens cannot be combined with live text, because a rank knows its own rows only"
                "; sum the labels of each rank with an all-reduce"
            )
        if self.options.pad_to == "batch":
            raise ConfigError('pad_to: must be "row" for live text, whose rows are full, got "batch"; leave it out')
        if not self.arrays:
            raise ConfigError(
                'layout: needs = "nothing" is for stores, got live text, whose lanes stand where they were drawn '
                "from; give a loader to one rank of each group alone, and let it send the others its batches"
            )

    def _refuse_drawn(self, step: int) -> None:
        if self._drawn:
            raise PlanError(
                f"step: must be 0 or come from a state where a run draws from live text, got {step}; load a state, "
                "or leave out live = true, and the text is prepared once"
            )

    def _made_by(self, position: Position) -> dict[str, Any]:
        """Return what a state says of the run that made it."""
        spec = self.plan.stage(min(position.step, self.plan.steps - 1)).spec
        return {
            "fingerprint": self._fingerprint(position),
            "plan": self.plan.fingerprint[:16],
            "stage_idx": spec.number,
            "stage_name": spec.name[:_NAME_LENGTH],
        }

    def _check_made_by(self, state: State) -> None:
        """Raise if a state is of a run with other batches."""
        step = state.position.covered
        fingerprint = self._fingerprint(state.position)
        if state.fingerprint == self._fingerprint(state.position, balance=not self.part.balance) != fingerprint:
            raise ResumeError(
                f"state: was saved in the middle of step {state.step}, so its rows must be dealt as they were, got "
                f"{'a balance' if self.part.balance else 'none'} now and {'none' if self.part.balance else 'one'} "
                "then; resume as it was saved, or from a state saved between two steps"
            )
        if state.fingerprint != fingerprint:
            difference = self._explain(state.plan, step) if self._explain else None
            then, now = state.plan, self.plan.fingerprint  # as `tokenmill plan` shows them
            if not then or now.startswith(then):
                then, now = state.fingerprint, fingerprint
            raise ResumeError(
                f"state: batches before step {step} must be those of this run, but the state was made by plan "
                f"{then[:12]} and this run is {now[:12]}; first difference: "
                f"{difference or 'not known here, as that plan was not recorded beside this run'}; "
                "resume with the config that made it, or start at step 0"
            )

    def _fingerprint(self, position: Position, *, balance: bool | None = None) -> str:
        """Return the digest of what decides the batches before a position, and how a step under way was dealt."""
        fingerprint = self.plan.fingerprint_at(position.covered)
        balance = self.part.balance if balance is None else balance
        return digest(["balance", BALANCE_VERSION, fingerprint]) if balance and position.batch else fingerprint

    def _go_to(self, position: Position) -> None:
        # Skipped steps have no batches: instead of one of them comes the next that has.
        position = Position(step=self.plan.next_trained(position.step), batch=position.batch)
        if position.step == self.plan.steps:
            self.num_drawn = len(self)
        else:
            stage = self.plan.stage(position.step)
            steps = position.step - stage.spec.start_step
            self.num_drawn = self.first_batches[stage.index] + steps * self.part.batches(stage) + position.batch
        self.num_jumps += 1

    def _block(self, stage: Stage, first: int, count: int, *, ahead: bool = False) -> Block:
        """Find the rows of `count` micro-batches of a stage, from its `first`-th on."""
        places, source_rows = self._places(stage, first, count)
        kind, fetching = buffers.record_type(stage), self._fetch_options(ahead)
        if kind is not None:
            return RecordBlock(stage, self._stored(stage), places, self.arrays, kind, fetching)
        block = self._sequences(stage, places, self.arrays, fetching, source_rows)
        if "num_loss_tokens" in self.arrays:
            block.set_loss_tokens(self._count_labels(stage, block, first, count))
        return block

    def _fetch_options(self, ahead: bool) -> fetch.FetchOptions:
        """Return how a block fetches what is not on this machine."""
        limited = self.network is not None and bool(self.network.options.limit_bytes)
        return fetch.FetchOptions(ahead=ahead, plan=self.plan if limited else None)

    def slots(self, step: int) -> Int64Array:
        """Return which slots of the batch of a step this rank has, in order: what `what` names rows by."""
        stage = self.plan.trained_stage(step)
        batches = self.part.batches(stage)
        return self._places(stage, (step - stage.spec.start_step) * batches, batches)[0][1]

    def _places(
        self, stage: Stage, first: int, count: int
    ) -> tuple[tuple[Int64Array, Int64Array], tuple[Int64Array, Int64Array] | None]:
        """Return (step, slot) of every row of `count` micro-batches of a stage, from its `first`-th on.

        With them comes (source, row), where these had to be found to deal the rows.
        """
        steps, slots = self.part.places(stage, first, count)
        if self._balancer is None:
            return (steps, slots), None
        dealt = self._balancer.rows(stage, self._stored(stage), int(steps[0]), int(steps[-1]) + 1)
        lines, columns = steps - steps[0], slots - self.part.rank * self.part.rows(stage)
        slots, sources, rows = (table[lines, columns] for table in dealt)  # in one piece each, as kernels take them
        return (steps, slots), (sources, rows)

    def _sequences(
        self,
        stage: Stage,
        places: tuple[Int64Array, Int64Array],
        arrays: Sequence[str],
        fetching: fetch.FetchOptions | None = None,
        source_rows: tuple[Int64Array, Int64Array] | None = None,
    ) -> SequenceBlock:
        return SequenceBlock(
            stage,
            self._stored(stage),
            places,
            arrays,
            options=self.options,
            pad=self._drawn.pad if self._drawn else None,
            layout=self.part.layout,
            fetching=fetching,
            source_rows=source_rows,
        )

    def _stored(self, stage: Stage) -> dict[int, StoredRows]:
        """Return the sources of a stage that stand in stores, by their ids."""
        names = self.plan.sources
        return {names.index(name): rows for name, rows in stored_rows(stage).items()}

    def _count_labels(self, stage: Stage, block: SequenceBlock, first: int, count: int) -> dict[int, Int64Array]:
        """Count the labels of the global batches of a block: what the loss of all ranks together is divided by."""
        per_step = self.part.batches(stage)
        masked = any(LOSS_MASK in rows.store.keys for rows in self._stored(stage).values())
        if self.part.world_size == 1 and first % per_step == 0 and count % per_step == 0 and not masked:
            return block.labels_by_step()  # it holds the whole of its steps
        steps = distinct(block.steps)
        slots = np.arange(stage.spec.global_batch_size)
        counts: dict[int, Int64Array] = {}
        # Labels under a mask are laid out to be counted: one step at a time, to bound the memory.
        for part in np.split(steps, steps.size) if masked else [steps]:
            places = (np.repeat(part, slots.size), np.tile(slots, part.size))
            whole = self._sequences(stage, places, ("labels",) if masked else ("source",))
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
        for stage, begin in zip(self.plan.stages, self.first_batches, strict=False):
            first, end = max(0, drawn - begin), self._num_batches(stage)
            while first < end:
                count = min(end - first, max(1, min(rows, self._block_rows(stage)) // self.part.micro_batch))
                yield stage, first, count
                first += count
                rows = min(BLOCK_ROWS, 4 * rows)

    def _begun(self, begin: Callable[[Stage, int, int], B]) -> Iterator[tuple[B, int]]:
        """Yield blocks from where the loader stands on, in order, each with its number of micro-batches.

        Those after it have been begun by then, as many as the horizon holds: of stores on this machine none. While
        the horizon fills, one goes out for every two that are begun, so that the first batch does not wait for it.
        """
        waiting: deque[tuple[B, int, int]] = deque()
        ahead = 0
        for ordinal, (stage, first, count) in enumerate(self._runs(self.num_drawn)):
            size = count * self.part.micro_batch * self._row_bytes(stage)
            waiting.append((begin(stage, first, count), count, size))
            ahead += size
            is_early = ordinal % 2 == 1
            while waiting and (is_early or ahead - waiting[0][2] >= self._horizon):
                block, number, size = waiting.popleft()
                ahead -= size
                is_early = False
                yield block, number
        for block, number, _ in waiting:
            yield block, number

    def _row_bytes(self, stage: Stage) -> int:
        stores = [rows.store for rows in self._stored(stage).values()] if self._horizon else ()
        return max((held_bytes(store, stage.row_slots) for store in stores), default=0)

    def _num_batches(self, stage: Stage) -> int:
        """Return how many micro-batches the steps of a stage have; those that are skipped have none."""
        return stage.num_steps * self.part.batches(stage) * stage.is_trained

    def _block_rows(self, stage: Stage) -> int:
        """Return how many rows a block of a stage has: fewer where rows are long or shards too many to be held."""
        mapped = [rows.store for rows in self._stored(stage).values() if not rows.store._by_ranges]
        stores = {id(store): store for store in mapped}
        # Of records every array is mapped.
        files = sum(s.num_shards * (len(s.keys) if buffers.record_type(stage) else 1) for s in stores.values())
        crowded = any(files > store._maps.limit // 2 for store in stores.values())
        most = block_rows(stage.row_slots, self._row_bytes(stage), self._horizon)
        return min(BLOCK_ROWS // 8, most) if crowded else most

    def _notice_fork(self) -> None:
        """Go on in a process that was forked: threads stayed behind, and with them the locks that they held."""
        if self._forks != _forks:
            self._forks = _forks
            self._pools = {}
            for stage in self.plan.stages:
                for rows in self._stored(stage).values():
                    rows.store._maps.renew_lock()

    def _pool(self, block: Block) -> buffers.BufferPool:
        """Return memory for the micro-batches of a block, used again when nobody holds them any more."""
        key = (*block.shape, self.part.micro_batch)
        if key not in self._pools:
            self._pools[key] = buffers.BufferPool(block.shapes(self.part.micro_batch))
        return self._pools[key]


def usual_arrays(plan: Plan) -> tuple[str, ...]:
    """Return what a loader of a plan delivers if nobody says otherwise."""
    kind = buffers.record_type(plan.stages[0])
    return LoaderOptions().arrays if kind is None else buffers.RECORD_ARRAYS[kind]


def held_bytes(store: Store, row_slots: int) -> int:
    """Return about how many bytes of memory a row takes that is not on this machine: whole pages."""
    width = sum(store.dtype(key).itemsize for key in store.keys)
    spans = 1 + row_slots * store.num_documents // max(1, store.num_tokens)
    return row_slots * width + spans * len(store.keys) * PAGE_BYTES


def block_rows(row_slots: int, row_bytes: int, horizon: int) -> int:
    """Return how many rows a block has at most; where a horizon bounds what is held in memory, a quarter of it."""
    most = horizon // max(1, 4 * row_bytes) if horizon else BLOCK_ROWS
    return max(1, min(BLOCK_ROWS, BLOCK_TOKENS // row_slots, most))


class _Batches(Iterator[Batch]):
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
        self._forks = loader._forks

    def __next__(self) -> Batch:
        loader = self._loader
        if self._forks != _forks:
            loader._notice_fork()
            self._forks, self._jumps, self._stop = _forks, -1, lambda: None
        if self._number != loader._iterations:
            self._stop()
            raise ConfigError(
                "loader: there must be one iteration at a time, got a newer one; "
                "go on with that, or make a second loader"
            )
        if self._jumps != loader.num_jumps:
            self._jumps = loader.num_jumps
            self._announce(loader)
            self._start()
            loader.meter.begin(loader)
        elif loader.num_drawn == self._edge:
            self._announce(loader)
        began = monotonic()
        try:
            batch = next(self._stream)
        except StopIteration:
            raise
        except BaseException:
            self._jumps = -1  # a further `next` gives this batch, or the error again, not the end of the run
            raise
        finally:
            loader.meter.waited += monotonic() - began
        loader.num_drawn += 1
        return batch

    def _announce(self, loader: Loader) -> None:
        """Log the plan where an iteration starts, and then every stage that begins; only rank 0 does."""
        step, edges = loader.step, loader.first_batches
        after = bisect_right(edges, loader.num_drawn)
        self._edge = edges[after] if after < len(edges) else -1
        if not loader.announces or not loader.part.layout.leads or step == loader.plan.steps:
            return
        if self._step < 0:
            announce_plan(loader.plan, step)
        elif step > self._step:
            announce_stage(loader.plan, self._step, step)
        self._step = step

    def _start(self) -> None:
        self._stop()
        if not self._loader.arrays:
            self._stream = ({} for _ in range(len(self._loader) - self._loader.num_drawn))
            return
        threads = self._loader.options.threads
        # Live rows are drawn when they are delivered; their threads read and tokenize ahead.
        if not threads or self._loader.lanes:
            self._stream = _assemble(self._loader, _Inline(), ahead=1)
            return
        executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenmill")
        self._stop = weakref.finalize(self, executor.shutdown, wait=False, cancel_futures=True)
        self._stream = _assemble(self._loader, executor, ahead=self._loader.options.prefetch)


class _Inline(Executor):
    """Executor that runs each call at once, in the thread that submits it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:  # noqa: ANN401
        return _Result(fn(*args, **kwargs))


class _Result(Future[T]):
    """Result of a call that ran at once. It has no lock, which takes a fifth of the time of a batch."""

    def __init__(self, value: T) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> T:  # noqa: ARG002 - as all futures have it
        return self._value

    def exception(self, timeout: float | None = None) -> None:  # noqa: ARG002 - as all futures have it
        return None

    def done(self) -> bool:
        return True

    def cancelled(self) -> bool:
        return False


def _assemble(loader: Loader, executor: Executor, ahead: int) -> Iterator[Batch]:
    """Assemble batches in the threads of an executor, up to `ahead` of them, and yield them in order."""
    # A task has a few batches, so that handing over costs little; each thread has two tasks, so that none idles.
    size = max(1, ahead // max(2, 2 * loader.options.threads))
    waiting: deque[tuple[Future[Block], Future[list[Batch]], bool]] = deque()
    forks = _forks
    begun: deque[Future[Block]] = deque()
    pools: dict[Block, buffers.BufferPool] = {}
    """Memory for the batches of each block that was begun."""
    is_waited_for = isinstance(executor, _Inline) and loader.network is not None

    def begin(stage: Stage, first: int, count: int) -> Future[Block]:
        begun.append(executor.submit(loader._block, stage, first, count, ahead=bool(begun)))
        return begun[-1]

    def copy(block: Future[Block], begin: int, end: int) -> list[Batch]:
        rows = block.result()
        pool = pools.get(rows) or pools.setdefault(rows, loader._pool(rows))
        fill = partial(loader._drawn.batch, rows) if loader._drawn else rows.batch
        if is_waited_for:
            batches = [loader._wait(rows, partial(fill, number, pool.batch())) for number in range(begin, end)]
        else:
            batches = [fill(number, pool.batch()) for number in range(begin, end)]
        if not loader._finishes:
            return batches
        return [loader._finished(rows, number, batch) for number, batch in enumerate(batches, begin)]

    def take() -> list[Batch]:
        block, batches, last = waiting.popleft()
        ready = batches.result() if batches.done() else loader._wait(block.result(), batches.result)
        if last:
            done = begun[0].result()
            done.finish()
            pools.pop(done, None)
            begun.popleft()
        return ready

    try:
        for block, count in loader._begun(begin):
            for first in range(0, count, size):
                end = min(first + size, count)
                waiting.append((block, executor.submit(copy, block, first, end), end == count))
                if len(waiting) * size >= ahead:
                    yield from take()
        while waiting:
            yield from take()
    finally:
        # An iteration that is given up must not keep its maps; at the end of the interpreter nothing matters, and
        # in a process that was forked no thread would ever answer.
        if not sys.is_finalizing() and forks == _forks:
            executor.shutdown(wait=True, cancel_futures=True)
            for block in begun:
                if not block.cancelled() and block.exception() is None:
                    block.result().release()
    loader.close()
