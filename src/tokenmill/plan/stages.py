"""Which stage of training a step belongs to, and what a stage is compiled to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import ConfigError, PlanError
from tokenmill.fingerprint import digest, key64
from tokenmill.plan.mixture import Mixture, build_mixture, integer_weights
from tokenmill.plan.shuffle import MODES, Shuffle

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.plan.rows import RowIndex


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpec:
    """A run of steps with one mixture, sequence length and batch size."""

    name: str
    start_step: int
    """First step of the stage, inclusive. It ends where the next one starts."""
    global_batch_size: int
    """Rows of one optimizer step, over all ranks."""
    seq_len: int
    seed: int
    shuffle: Shuffle
    weights: Mapping[str, float]
    """Share of rows drawn from each source; need not sum to 1."""
    rows: Mapping[str, RowIndex]
    """The rows of each source that has a weight."""

    def describe(self) -> dict[str, Any]:
        """Return what decides the batches of the stage, as JSON. Its name does not."""
        shuffle: dict[str, Any] = {"mode": self.shuffle.mode}
        if self.shuffle.mode == "block":
            shuffle |= {"block_rows": self.shuffle.block_rows, "window_blocks": self.shuffle.window_blocks}
        return {
            "start_step": self.start_step,
            "global_batch_size": self.global_batch_size,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": shuffle,
            "weights": {name: float(weight) for name, weight in self.weights.items()},
            "sources": {name: dict(self.rows[name].description) for name in self.weights},
        }


SOURCE, CARRY, SIZE, MODE, BLOCK_ROWS, WINDOW_BLOCKS = range(6)
OLD_EPOCH, OLD_MODE, OLD_BLOCK_ROWS, OLD_WINDOW_BLOCKS = range(6, 10)
"""Columns of a stage's table: one line a source. An epoch that was under way when the stage began ends in
the order in which it began (OLD_...), so that a change of seed or shuffle loses and repeats no row."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage with everything that the kernels need to compute its rows."""

    spec: StageSpec
    index: int
    end_step: int
    first_position: int
    """Position of its first row in the order of the whole run."""
    mixture: Mixture
    names: tuple[str, ...]
    """Sources of the mixture, in the order of `table`."""
    table: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]
    """For each source: the key of epochs that begin in this stage, and of the one under way before it."""
    rotation_key: np.uint64
    rotate: bool
    """Whether each batch is turned by a keyed number of places, so that no rank always gets the same source."""

    @property
    def num_steps(self) -> int:
        """How many steps the stage has."""
        return self.end_step - self.spec.start_step

    @property
    def num_positions(self) -> int:
        """How many rows all its batches have."""
        return self.num_steps * self.spec.global_batch_size

    @property
    def draws(self) -> dict[str, int]:
        """How many rows the stage draws from each source."""
        return dict(zip(self.names, self.mixture.counts(self.num_positions), strict=True))

    def carry(self, name: str) -> int:
        """Return how many rows of a source were drawn before the stage."""
        return int(self.table[self.names.index(name), CARRY])


@dataclass(slots=True)
class _Progress:
    """How far a source has been read, and the order of the epoch that is under way."""

    consumed: int = 0
    key: int = 0
    shuffle: Shuffle | None = None


def compile_stages(specs: Sequence[StageSpec], sources: Sequence[str], steps: int) -> tuple[Stage, ...]:
    """Lay the stages end to end; each source goes on in a stage where the stage before left it."""
    progress: dict[str, _Progress] = {}
    stages: list[Stage] = []
    position = 0
    for index, spec in enumerate(specs):
        end = specs[index + 1].start_step if index + 1 < len(specs) else steps
        stage = _compile_stage(spec, index, end, position, (progress, sources))
        stages.append(stage)
        position += stage.num_positions
        for line, (name, drawn) in enumerate(stage.draws.items()):
            _advance(progress[_identity(spec, name)], stage, line, drawn)
    return tuple(stages)


def _compile_stage(
    spec: StageSpec, index: int, end: int, position: int, context: tuple[dict[str, _Progress], Sequence[str]]
) -> Stage:
    progress, sources = context
    # Sorted by name, so that the order in which a config lists its sources does not matter.
    names = tuple(sorted(spec.weights))
    whole = integer_weights(spec.weights)
    table = np.zeros((len(names), 10), np.int64)
    keys = np.zeros((len(names), 2), np.uint64)
    for line, name in enumerate(names):
        if spec.rows[name].num_rows < 1:
            raise ConfigError(
                f"stage {spec.name!r}: a source must have at least one row of {spec.seq_len + 1} tokens, "
                f"got none from {name!r}; shorten seq_len or add documents"
            )
        here = progress.setdefault(_identity(spec, name), _Progress())
        size = spec.rows[name].num_rows
        table[line, :OLD_EPOCH] = [sources.index(name), here.consumed, size, *_shuffle_numbers(spec.shuffle)]
        table[line, OLD_EPOCH] = -1
        keys[line] = key64(spec.seed, "rows", name)
        if here.consumed % size and here.shuffle is not None:
            table[line, OLD_EPOCH:] = [here.consumed // size, *_shuffle_numbers(here.shuffle)]
            keys[line, 1] = here.key
    return Stage(
        spec=spec,
        index=index,
        end_step=end,
        first_position=position,
        mixture=build_mixture(tuple(whole[name] for name in names)),
        names=names,
        table=table,
        keys=keys,
        rotation_key=np.uint64(key64(spec.seed, "rotation")),
        rotate=len(names) > 1 and spec.shuffle.mode != "none",
    )


def _identity(spec: StageSpec, name: str) -> str:
    return digest([name, dict(spec.rows[name].description)])


def _shuffle_numbers(shuffle: Shuffle) -> tuple[int, int, int]:
    return MODES[shuffle.mode], shuffle.block_rows, shuffle.window_blocks


def _advance(progress: _Progress, stage: Stage, line: int, drawn: int) -> None:
    size = int(stage.table[line, SIZE])
    old_epoch = int(stage.table[line, OLD_EPOCH])
    progress.consumed += drawn
    if drawn and (progress.consumed - 1) // size != old_epoch:
        progress.key = int(stage.keys[line, 0])
        progress.shuffle = stage.spec.shuffle


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """Return the stage that `step` belongs to; a boundary belongs to the new stage."""
    last = stages[-1].end_step
    if not 0 <= step < last:
        raise PlanError(f"step: must lie within 0:{last}, got {step}; raise run.steps to go on")
    starts = [stage.spec.start_step for stage in stages]
    return stages[bisect_right(starts, step) - 1]
