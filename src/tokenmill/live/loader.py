"""The loader of live text: batches of one rank, in order, resumed exactly."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from tokenmill.errors import ConfigError
from tokenmill.live.assemble import Assembler, check_arrays
from tokenmill.live.lanes import AheadOptions, Lanes, SkippedText, padding_id
from tokenmill.live.share import Share
from tokenmill.live.state import Standing, load_state, save_state

if TYPE_CHECKING:
    from tokenmill.live.source import LiveSource
    from tokenmill.types import Batch


@dataclass(eq=False, repr=False)
class LiveLoader:
    """Batches of one rank.

    `for batch in loader` goes on from where the loader stands to the end of the run, one micro-batch at a time;
    `state_dict` and `load_state_dict` may be called at any time, before or during an iteration.
    """

    source: LiveSource
    steps: int = field(kw_only=True)
    """The run ends after so many; sources repeat, epoch after epoch."""
    global_batch_size: int = field(kw_only=True)
    """Rows of one step, over all ranks; each is given by one of the lanes."""
    rank: int = field(default=0, kw_only=True)
    world_size: int = field(default=1, kw_only=True)
    micro_batch: int = field(default=1, kw_only=True)
    threads: int = field(default=1, kw_only=True)
    """Threads that read and tokenize; 0 does it when a row is asked for."""
    ahead: int | None = field(default=None, kw_only=True)
    """Windows that are made before they are needed, beside the one that each lane holds; at least `threads`. None:
    one more than `threads`."""
    arrays: tuple[str, ...] = field(default=("input_ids", "labels", "position_ids", "doc_ids"), kw_only=True)
    timeout: float = field(default=30.0, kw_only=True)
    """Seconds after which a thread that does nothing is given up."""
    epochs: int | None = field(default=None, kw_only=True)
    """Refused: see the message."""

    def __post_init__(self) -> None:
        self._check()
        options = self.source.options
        self.share = Share(
            lanes=options.lanes or self.global_batch_size,
            global_batch_size=self.global_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            micro_batch=self.micro_batch,
        )
        self.windows = self.source.windows(self.share.lanes)
        me = weakref.proxy(self)  # or the two would keep each other, and the threads, alive
        self.lanes = Lanes(
            self.source,
            self.windows,
            self.share.own,
            AheadOptions(threads=self.threads, windows=self.ahead, timeout=self.timeout),
            lambda number: int(me._rows_left(number)),
        )
        self._assembler = Assembler(
            arrays=self.arrays,
            rows=self.micro_batch,
            seq_len=options.seq_len,
            pad=padding_id(self.source.tokenizer.identity),
        )
        self._format = options.format
        self._lanes_of = cache(self.share.lanes_of)
        self._drawn = 0
        self._picked = 0
        """Rows of the batch that is being drawn."""
        self._iterations = 0

    @property
    def waited(self) -> float:
        """Seconds that the caller had to wait for text."""
        return self.lanes.waited

    @property
    def skipped(self) -> SkippedText:
        """What was left out of what this loader has delivered."""
        return self.lanes.skipped

    def _check(self) -> None:
        if self.epochs is not None:
            raise ConfigError(
                f"epochs: must be left out for live text, got {self.epochs}: no rank knows how many rows the lanes "
                "of the others have, so it could not end where they end; say steps, or give the documents and the "
                "tokenizer as a source of a run, which prepares them once (eager)"
            )
        too_few = self.ahead is not None and self.ahead < 1
        if self.steps < 1 or self.threads < 0 or too_few or not self.timeout > 0:
            raise ConfigError(
                "loader: steps and ahead must be at least 1, threads at least 0 and timeout more than 0, got "
                f"{self.steps}, {self.ahead}, {self.threads} and {self.timeout}; raise them"
            )
        check_arrays(self.arrays)

    def __len__(self) -> int:
        """Return the number of micro-batches of the whole run; the same on every rank."""
        return self.steps * self.share.batches

    def __iter__(self) -> Iterator[Batch]:
        self._iterations += 1
        return _Batches(self, self._iterations)

    @property
    def step(self) -> int:
        """The step that the next batch belongs to."""
        return self._drawn // self.share.batches

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands: its lanes, as JSON; `merge_states` joins those of all ranks."""
        step, batch = divmod(self._drawn, self.share.batches)
        standing = Standing(
            step=step, batch=batch, cursors=self.lanes.cursors, skipped=dict(sorted(self.skipped.counts.items()))
        )
        return save_state(self.source, standing, self.share)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state says; a running iteration goes on from there."""
        standing = load_state(state, self.source, self.share, self.windows, self.steps)
        self.lanes.stand(standing.cursors)
        self.lanes.count_skipped(standing.skipped)
        self._drawn = standing.step * self.share.batches + standing.batch

    def close(self) -> None:
        """Stop the threads and let go of all windows; who goes on drawing starts them again."""
        self.lanes.close()

    def _draw(self) -> Batch:
        """Return the next micro-batch; if that fails, nothing has been drawn."""
        lanes = self._lanes_of(self._drawn % self.share.batches)
        before = self.lanes.mark(lanes)
        rows = []
        try:
            for self._picked, number in enumerate(
                lanes, 1
            ):  # before the row is taken: a lane then asks for its next
                rows.append(self.lanes.next_row(number, self._format))
            batch = self._assembler.batch(rows)
        except BaseException:
            self.lanes.back(before)  # a thread may hang: who tries again gets others
            raise
        finally:
            self._picked = 0
        self._drawn += 1
        return batch

    def _rows_left(self, number: int) -> int:
        """Return how many rows a lane has still to give to this run."""
        each = self.share.rows_per_lane
        taken = self._drawn % self.share.batches * self.micro_batch + self._picked
        given = min(max(0, taken - (number - self.share.own.start) * each), each)
        return (self.steps - self.step) * each - given


class _Batches(Iterator["Batch"]):
    """One iteration over a loader; follows it when a state is loaded meanwhile."""

    def __init__(self, loader: LiveLoader, number: int) -> None:
        self._loader = loader
        self._number = number

    def __next__(self) -> Batch:
        loader = self._loader
        if self._number != loader._iterations:
            raise ConfigError(
                "loader: there must be one iteration at a time, got a newer one; "
                "go on with that, or make a second loader"
            )
        if loader._drawn == len(loader):
            loader.close()
            raise StopIteration
        return loader._draw()
