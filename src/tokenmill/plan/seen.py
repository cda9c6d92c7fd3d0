"""What a run has seen before a step, in tokens, and a learning rate that follows tokens in place of steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from math import cos, pi
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import ConfigError, nearest
from tokenmill.plan.stages import CountedRows, Stage, drawn_rows
from tokenmill.types import Float64Array

if TYPE_CHECKING:
    from tokenmill.plan.plan import Plan

DECAYS = ("cosine", "linear", "none")
"""How a learning rate can go down."""
_BLOCK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensSeen:
    """What the model was trained on before a step; skipped steps do not count."""

    slots: int
    """Input slots of all rows, over all their arrays, padding among them."""
    count_labels: Callable[[], int | None] = field(repr=False, compare=False)

    @property
    def trained(self) -> int | None:
        """Labels of these rows that masks leave; None where a run draws from live text.

        Counted when it is asked for: whole epochs at once, of others every row since the step that was last asked
        for, at about a microsecond each; masks are read for it.
        """
        return self.count_labels()


def slots_before(plan: Plan, step: int, *, skipped: bool) -> int:
    """Return the input slots of all steps before one; those of skipped ones, if they are wanted."""
    total = 0
    for stage in plan.stages:
        if stage.spec.start_step >= step:
            break
        if skipped or stage.spec.skipped is None:
            steps = min(step, stage.end_step) - stage.spec.start_step
            total += steps * stage.spec.global_batch_size * stage.row_slots
    return total


def labels_before(plan: Plan, step: int, known: dict[int, int | None]) -> int | None:
    """Return the labels of all rows before a step; `known` has those of other steps, and gets this one's."""
    if step not in known:
        steps = sorted(known)
        begin = steps[bisect_right(steps, step) - 1] if steps and steps[0] <= step else 0
        total = known.get(begin, 0)
        for stage in plan.stages:
            first, last = max(stage.spec.start_step, begin), min(stage.end_step, step)
            if total is None or stage.spec.skipped is not None or first >= last:
                continue
            for line, name in enumerate(stage.names):
                index = stage.rows[name].counted
                if index is None:
                    total = None
                    break
                draws = range(_drawn(stage, line, first), _drawn(stage, line, last))
                total += _labels(stage, name, index, draws)
        known[step] = total
    return known[step]


def _drawn(stage: Stage, line: int, step: int) -> int:
    """Return how many rows of a source a stage draws before a step."""
    positions = stage.origin + (step - stage.spec.start_step) * stage.spec.global_batch_size
    return stage.mixture.counts(positions)[line] - stage.bases[line]


def _labels(stage: Stage, name: str, index: CountedRows, draws: range) -> int:
    """Return the labels of some draws of a source, counted from the first of the stage."""
    size, first = index.num_rows, index.num_rest - stage.carry(name)  # draw at which the first whole epoch begins
    whole = range(-((first - max(draws.start, first)) // size), (draws.stop - first) // size)
    if len(whole) < 1:
        return _count(stage, name, index, draws)
    before, after = range(draws.start, first + whole.start * size), range(first + whole.stop * size, draws.stop)
    counted = sum(_count(stage, name, index, part) for part in (before, after))
    return counted + len(whole) * index.fates().trained


def _count(stage: Stage, name: str, index: CountedRows, draws: range) -> int:
    parts = (draws[begin : begin + _BLOCK] for begin in range(0, len(draws), _BLOCK))
    # In ascending order, so that neighbours on disk are read together.
    return sum(index.held(np.sort(drawn_rows(stage, name, part))).trained for part in parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSchedule:
    """What the learning rate is multiplied by at each step: `schedule(step)`, from 0 on.

    It goes by the tokens before a step, in input slots and with those of skipped steps, so that it comes to its end
    with the last step, whatever batch ramps and stages do, and no skip moves it. `lr_scale` of stages is in it.
    """

    plan: Plan
    warmup: int = 0
    """Tokens over which it rises to 1, linearly; the first step has its part."""
    decay: str = "cosine"
    """How it goes down: `cosine`, `linear`, or `none`."""
    decay_tokens: int | None = None
    """Last tokens of the run over which it goes down; None: all behind the warm-up."""
    final: float = 0.1
    """What it is at the last step, without `lr_scale`."""

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise ConfigError(
                f"lr_schedule: decay must be one of {', '.join(DECAYS)}, got {self.decay!r}; "
                f"{nearest(self.decay, DECAYS)}"
            )
        total = slots_before(self.plan, self.plan.steps, skipped=True)
        if not 0 <= self.warmup + (self.decay_tokens or 0) <= total or not 0 <= self.final <= 1:
            raise ConfigError(
                f"lr_schedule: warm-up and decay must fit the {total} tokens of the run, and final lie within 0 "
                f"and 1, got {self.warmup}, {self.decay_tokens} and {self.final}; shorten them"
            )

    def __call__(self, step: int) -> float:
        """Return the factor of a step; behind the last it stays as it is there."""
        last = self.plan.steps - 1
        step = min(step, last)
        scale = self.plan.stage(step).spec.lr_scale
        before, after, end = (slots_before(self.plan, s, skipped=True) for s in (step, step + 1, last))
        factor = min(1.0, after / self.warmup) if self.warmup else 1.0
        begin = self.warmup if self.decay_tokens is None else max(self.warmup, end - self.decay_tokens)
        if self.decay == "none" or before < begin:
            return factor * scale
        way = (before - begin) / (end - begin) if end > begin else 1.0
        left = (1 + cos(pi * way)) / 2 if self.decay == "cosine" else 1 - way
        return min(factor, self.final + (1 - self.final) * left) * scale

    def nth(self, number: int) -> float:
        """Return the factor of the n-th step that is trained on, from 0: as optimizers count, which skip none."""
        for stage in self.plan.stages:
            if stage.spec.skipped is None:
                if number < stage.num_steps:
                    return self(stage.spec.start_step + number)
                number -= stage.num_steps
        return self(self.plan.steps - 1)

    def table(self) -> Float64Array:
        """Return the factors of all steps that are trained on, for frameworks that look them up."""
        trained = [stage for stage in self.plan.stages if stage.spec.skipped is None]
        return np.array([self(step) for stage in trained for step in range(stage.spec.start_step, stage.end_step)])
