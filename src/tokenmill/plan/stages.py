"""Which stage of training a step belongs to, and what a stage is compiled to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import ConfigError, PlanError, nearest
from tokenmill.fingerprint import key64
from tokenmill.plan.mixture import Mixture, build_mixture, integer_weights
from tokenmill.plan.permute import derive
from tokenmill.plan.rows import Seen
from tokenmill.plan.shuffle import MODES, Shuffle
from tokenmill.types import ON_CHANGE

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
    on_change: str = "unseen"
    """Where the rows of a source are not those of the stage before (another sequence length or packing): go on with
    what that stage has not used (`unseen`), or `restart` the source."""

    def __post_init__(self) -> None:
        if self.on_change not in ON_CHANGE:
            raise ConfigError(
                f"stage {self.name!r}: on_change must be one of {', '.join(ON_CHANGE)}, got {self.on_change!r}; "
                f"{nearest(self.on_change, ON_CHANGE)}"
            )

    def describe(self) -> dict[str, Any]:
        """Return what decides the batches of the stage, as JSON. Its name does not."""
        return {
            "start_step": self.start_step,
            "global_batch_size": self.global_batch_size,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle.describe(),
            "on_change": self.on_change,
            "weights": {name: float(weight) for name, weight in self.weights.items()},
            "sources": {name: dict(self.rows[name].description) for name in self.weights},
        }


SOURCE, CARRY, REST, SIZE, MODE, BLOCK_ROWS, WINDOW_BLOCKS = range(7)
OLD_EPOCH, OLD_MODE, OLD_BLOCK_ROWS, OLD_WINDOW_BLOCKS = range(7, 11)
"""Columns of a stage's table: one line a source. Its rows are the REST of an earlier epoch, which counts as epoch
-1, then epochs of SIZE rows. An epoch that was under way when the stage began ends in the order in which it began
(OLD_...), so that a change of seed or shuffle loses and repeats no row."""
NO_EPOCH = -2


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
    rows: Mapping[str, RowIndex]
    """The rows of each source, after what earlier stages used."""
    repeats_from: Mapping[str, int]
    """How many rows of a source may be drawn before one is seen for the second time, counted as `table` counts."""
    epochs_before: Mapping[str, Fraction]
    """How often each source had been read when its rows last changed."""
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

    def epochs(self, name: str) -> Fraction:
        """Return how often a source has been read by the end of the stage; the rest of an epoch completes it."""
        before, index = self.epochs_before[name], self.rows[name]
        drawn = self.carry(name) + self.draws[name]
        if not index.num_rest:
            return before + Fraction(drawn, index.num_rows)
        left = Fraction(floor(before) + 1) - before
        if drawn <= index.num_rest:
            return before + left * Fraction(drawn, index.num_rest)
        return before + left + Fraction(drawn - index.num_rest, index.num_rows)

    def carry(self, name: str) -> int:
        """Return how many rows of a source were drawn before the stage."""
        return int(self.table[self.names.index(name), CARRY])


@dataclass(slots=True)
class _Progress:
    """How far a source has been read, and the order of the epoch that is under way."""

    index: RowIndex
    repeats_from: int
    era: int = 0
    """How often the rows have changed; every epoch of every era has an order of its own."""
    epochs_before: Fraction = Fraction(0)
    consumed: int = 0
    epochs_read: Fraction = Fraction(0)
    key: int = 0
    shuffle: Shuffle | None = None

    def epoch(self) -> tuple[int, int, int]:
        """Return (epoch under way, its rows, how many of them were drawn); the rest counts as epoch -1."""
        if self.consumed < self.index.num_rest:
            return -1, self.index.num_rest, self.consumed
        epoch, drawn = divmod(self.consumed - self.index.num_rest, self.index.num_rows)
        return epoch, self.index.num_rows, drawn

    def seen(self) -> Seen | None:
        """Return how far the epoch under way was read; None between two epochs."""
        epoch, size, drawn = self.epoch()
        if not drawn or self.shuffle is None:
            return None
        key = int(derive(np.uint64(self.key), epoch))
        return Seen(rest=epoch < 0, size=size, drawn=drawn, key=key, shuffle=self.shuffle)


def compile_stages(specs: Sequence[StageSpec], sources: Sequence[str], steps: int) -> tuple[Stage, ...]:
    """Lay the stages end to end; each source goes on in a stage where the stage before left it."""
    progress: dict[str, _Progress] = {}
    stages: list[Stage] = []
    position = 0
    for index, spec in enumerate(specs):
        end = specs[index + 1].start_step if index + 1 < len(specs) else steps
        arrived = {name: _arrive(progress.get(name), spec, name) for name in spec.weights}
        stage = _compile_stage(spec, (index, end, position), arrived, sources)
        stages.append(stage)
        position += stage.num_positions
        for line, (name, drawn) in enumerate(stage.draws.items()):
            # A stage that draws nothing of a source leaves it as it was, with what is still owed of it.
            if drawn or name not in progress:
                _advance(arrived[name], stage, line, drawn)
                progress[name] = arrived[name]
    return tuple(stages)


def _arrive(before: _Progress | None, spec: StageSpec, name: str) -> _Progress:
    """Return where a source stands at the start of a stage."""
    index = spec.rows[name]
    if index.num_rows < 1:
        raise ConfigError(
            f"stage {spec.name!r}: a source must have at least one row of {spec.seq_len + 1} tokens, "
            f"got none from {name!r}; shorten seq_len or add documents"
        )
    if before is None:
        return _Progress(index=index, repeats_from=index.num_rows)
    if dict(before.index.epoch_description) == dict(index.description):
        return before
    if not before.consumed:
        return _Progress(index=index, repeats_from=index.num_rows, era=before.era)
    seen = before.seen()
    if spec.on_change == "restart" or seen is None:
        return _Progress(index=index, repeats_from=0, era=before.era + 1, epochs_before=before.epochs_read)
    following = index.following(before.index, seen)
    return _Progress(
        index=following,
        repeats_from=following.num_rest if before.consumed <= before.repeats_from else 0,
        era=before.era + 1,
        epochs_before=before.epochs_read,
    )


def _compile_stage(
    spec: StageSpec, place: tuple[int, int, int], progress: Mapping[str, _Progress], sources: Sequence[str]
) -> Stage:
    number, end, position = place
    # Sorted by name, so that the order in which a config lists its sources does not matter.
    names = tuple(sorted(spec.weights))
    whole = integer_weights(spec.weights)
    table = np.zeros((len(names), 11), np.int64)
    keys = np.zeros((len(names), 2), np.uint64)
    for line, name in enumerate(names):
        here = progress[name]
        index = here.index
        table[line, :OLD_EPOCH] = [
            sources.index(name),
            here.consumed,
            index.num_rest,
            index.num_rows,
            *_shuffle_numbers(spec.shuffle),
        ]
        table[line, OLD_EPOCH] = NO_EPOCH
        keys[line] = key64(spec.seed, "rows", name, *([here.era] if here.era else []))
        epoch, _, drawn = here.epoch()
        if drawn and here.shuffle is not None:
            table[line, OLD_EPOCH:] = [epoch, *_shuffle_numbers(here.shuffle)]
            keys[line, 1] = here.key
    return Stage(
        spec=spec,
        index=number,
        end_step=end,
        first_position=position,
        mixture=build_mixture(tuple(whole[name] for name in names)),
        names=names,
        rows={name: progress[name].index for name in names},
        repeats_from={name: progress[name].repeats_from for name in names},
        epochs_before={name: progress[name].epochs_before for name in names},
        table=table,
        keys=keys,
        rotation_key=np.uint64(key64(spec.seed, "rotation")),
        rotate=len(names) > 1,
    )


def _shuffle_numbers(shuffle: Shuffle) -> tuple[int, int, int]:
    return MODES[shuffle.mode], shuffle.block_rows, shuffle.window_blocks


def _advance(progress: _Progress, stage: Stage, line: int, drawn: int) -> None:
    if not drawn:
        return
    progress.consumed += drawn - 1
    epoch, _, _ = progress.epoch()
    progress.consumed += 1
    progress.epochs_read = stage.epochs(stage.names[line])
    if epoch != int(stage.table[line, OLD_EPOCH]):
        progress.key = int(stage.keys[line, 0])
        progress.shuffle = stage.spec.shuffle


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """Return the stage that `step` belongs to; a boundary belongs to the new stage."""
    last = stages[-1].end_step
    if not 0 <= step < last:
        way_out = "count from 0" if step < 0 else "raise run.steps to go on"
        raise PlanError(f"step: must lie within 0:{last}, got {step}; {way_out}")
    starts = [stage.spec.start_step for stage in stages]
    return stages[bisect_right(starts, step) - 1]
