"""The schedule of a run: which steps its tokens come to, and the parts of its stages.

A token is an input slot: a step has `global_batch_size` * `seq_len` of them, padding and skipped steps included, so
that no edit of a run moves a step. What is said in tokens begins with the first step before which so many, or more,
have passed. A batch ramp cuts a stage into runs of steps, each with a batch size of its own. Wherever what is drawn
changes, a part of a stage ends, and another begins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tokenmill.errors import ConfigError
from tokenmill.tables import MAX_NUMBER, Number, check_keys, check_positive
from tokenmill.types import Int64Array

if TYPE_CHECKING:
    from tokenmill.config.run import Config, ResolvedStage, RunConfig, Sizes, StageConfig
    from tokenmill.plan.stages import Ramp, Rows, StageSpec, Weights

Tokens: TypeAlias = int | str
"""A number of tokens: 2000000, "2M", "1.5B", "800B", "2T"."""
BatchSize: TypeAlias = int | Mapping[str, int | str]
"""Rows of a step; or a ramp: `from`, `to`, `step`, and `over_tokens` or `over_steps`."""
UNSAID = -1
"""A step that is said in tokens."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST_SIZES = 4096
"""Sizes that a batch ramp may have: each is a part of the plan."""


def read_tokens(where: str, key: str, value: Tokens) -> int:
    """Return how many tokens are meant.

    >>> read_tokens("run", "tokens", "1.5B"), read_tokens("run", "tokens", 4096)
    (1500000000, 4096)
    """
    text = str(value).strip().replace("_", "")
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    try:
        number = Decimal(text[: len(text) - len(unit)]) * _UNITS.get(unit, 0)
    except InvalidOperation:
        number = Decimal(0)
    if not number.is_finite() or number < 1 or number != int(number) or isinstance(value, bool):
        raise ConfigError(
            f'{where}: {key} must be a whole number of tokens, as 2000000, "2M", "1.5B" or "2T", got {value!r}; '
            "write it so"
        )
    return int(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRamp:
    """A batch size that grows from one to another, in equal stretches of tokens, or of steps."""

    first: int
    last: int
    by: int
    over: int
    """Tokens, or steps, after which the last size is reached."""
    in_tokens: bool

    def sizes(self) -> list[int]:
        """Return all sizes, in order."""
        way = range(self.first, self.last, self.by if self.last > self.first else -self.by)
        return [*way, self.last]


def read_batch(where: str, value: BatchSize) -> int | BatchRamp:
    """Return a batch size as it is meant."""
    if isinstance(value, int):
        check_positive(where, "global_batch_size", value)
        return value
    check_keys(f"{where}.global_batch_size", value, ("from", "to", "step", "over_tokens", "over_steps"))
    over = [key for key in ("over_tokens", "over_steps") if key in value]
    missing = next((key for key in ("from", "to") if key not in value), None if over else "over_tokens")
    if missing is not None or len(over) > 1:
        raise ConfigError(
            f"{where}: global_batch_size must be a number, or have from, to, step, and over_tokens or over_steps, "
            f'got {", ".join(value) or "neither"}; for example {{ from = 256, to = 2048, over_tokens = "100B", '
            "step = 256 }"
        )
    numbers = {key: value.get(key, value["from"]) for key in ("from", "to", "step")}
    for key, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_NUMBER:
            raise ConfigError(
                f"{where}.global_batch_size: {key} must be a whole number from 1 on, got {number!r}; change it"
            )
    first, last, by = (int(numbers[key]) for key in ("from", "to", "step"))
    if first == last or abs(last - first) // by > _MOST_SIZES:
        raise ConfigError(
            f"{where}: global_batch_size must go from one size to another in at most {_MOST_SIZES} sizes, got "
            f"{first} to {last} by {by}; raise step, or say one number"
        )
    return BatchRamp(
        first=first,
        last=last,
        by=by,
        over=read_tokens(where, over[0], value[over[0]]),
        in_tokens=over[0] == "over_tokens",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A run of steps of one batch size and sequence length, to the start of the next."""

    step: int
    tokens: int
    """Before its first step."""
    batch: int
    seq_len: int

    def step_at(self, tokens: int) -> int:
        """Return its first step before which at least so many tokens have passed, were it without an end."""
        return self.step + max(0, -(-(tokens - self.tokens) // (self.batch * self.seq_len)))

    def tokens_at(self, step: int) -> int:
        """Return how many tokens have passed before a step, were it without an end."""
        return self.tokens + (step - self.step) * self.batch * self.seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenClock:
    """How many tokens have passed before each step of a run, in closed form."""

    stretches: tuple[Stretch, ...]
    """In order, from step 0 on; the last has no end."""

    def tokens_at(self, step: int) -> int:
        """Return how many tokens have passed before a step."""
        return self.stretches[bisect_right(self.stretches, step, key=lambda s: s.step) - 1].tokens_at(step)

    def batches(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return (first step, batch size) of each stretch from a step, at which one begins, to another."""
        return tuple((s.step, s.batch) for s in self.stretches if start <= s.step < end)

    def step_at(self, tokens: int) -> int:
        """Return the first step before which at least so many tokens have passed."""
        index = max(0, bisect_right(self.stretches, tokens, key=lambda s: s.tokens) - 1)
        return self.stretches[index].step_at(tokens)


def wind_clock(run: RunConfig, stages: Sequence[StageConfig]) -> tuple[TokenClock, list[int]]:
    """Return the clock of a run, and the first step of each of its stages."""
    stretches: list[Stretch] = []
    starts: list[int] = []
    of_run = read_batch("run", run.global_batch_size)
    for stage in stages:
        where = f"stage {stage.name!r}"
        clock = TokenClock(stretches=tuple(stretches)) if stretches else None
        start = stage.start_step
        if stage.start_tokens is not None:
            tokens = read_tokens(where, "start_tokens", stage.start_tokens) if stage.start_tokens else 0
            found = clock.step_at(tokens) if clock else tokens
            start = agreed(where, "start_step", None if start < 0 else start, found)
        starts.append(start)
        begun = clock.tokens_at(start) if clock and start >= 0 else 0
        stretches = [stretch for stretch in stretches if stretch.step < start]
        own = None if stage.global_batch_size is None else read_batch(where, stage.global_batch_size)
        seq_len = stage.seq_len or run.seq_len
        origin = (start, begun) if own is not None else (0, 0)  # that of [run] is counted from its first step
        stretches += _stretches(of_run if own is None else own, start, begun, seq_len, origin)
    return TokenClock(stretches=tuple(stretches)), starts


def _stretches(
    batch: int | BatchRamp, step: int, tokens: int, seq_len: int, origin: tuple[int, int]
) -> list[Stretch]:
    """Return the stretches of a stage that begins at a step, of a batch that counts from an origin."""
    if isinstance(batch, int):
        return [Stretch(step=step, tokens=tokens, batch=batch, seq_len=seq_len)]
    sizes = batch.sizes()
    found: list[Stretch] = []
    for number, size in enumerate(sizes):
        stretch = Stretch(step=step, tokens=tokens, batch=size, seq_len=seq_len)
        # The n-th of so many sizes lasts until its part of the way, counted in tokens or steps, is behind.
        edge = -(-batch.over * (number + 1) // (len(sizes) - 1))
        if number == len(sizes) - 1:
            return [*found, stretch]
        end = stretch.step_at(origin[1] + edge) if batch.in_tokens else max(step, origin[0] + edge)
        if end > step:
            found.append(stretch)
            step, tokens = end, stretch.tokens_at(end)
    return found


def agreed(where: str, key: str, said: int | None, found: int) -> int:
    """Return the step that tokens come to; refuse another that is said beside them."""
    if said not in (None, found):
        raise ConfigError(
            f"{where}: {key} must be what the tokens come to, {found}, got {said}; leave one of the two out"
        )
    return found


# From a config to the parts of its stages

RowsOf: TypeAlias = "Callable[[str, ResolvedStage, Int64Array], Rows]"
"""(source, stage, documents that are left out) -> the rows of the source in that stage."""

SizeOf: TypeAlias = "Callable[[str, Sizes, Rows], int]"
"""(source, what is counted, its rows in the stage) -> how much of that the source has."""

_DIGITS = 12
"""Of a weight raised to a power: more would depend on the machine."""
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A run of steps within a stage."""

    stage: ResolvedStage
    number: int
    start: int
    skipped: str | None
    gone: frozenset[str]
    """Sources that are in quarantine as a whole."""
    excluded: Mapping[str, Int64Array]
    """Documents that are in quarantine or held out by evals, by source."""


def schedule(config: Config, folder: Path, rows_of: RowsOf, size_of: SizeOf) -> list[StageSpec]:
    """Return the parts of all stages in order, each with the rows of its sources."""
    from tokenmill.plan.shuffle import Shuffle
    from tokenmill.plan.stages import StageSpec

    specs: list[StageSpec] = []
    weights_before: Weights = {}
    for part in _parts(config, folder):
        stage = part.stage
        if specs and specs[-1].number != part.number:
            weights_before = specs[-1].weights
        written: Mapping[str, Number] = stage.weights
        if stage.sizes is not None:
            written = {name: size_of(name, stage.sizes, rows_of(name, stage, _NONE)) for name in written}
        weights = _weights(stage, written, part, rows_of)
        if not weights:
            raise ConfigError(
                f"stage {stage.name!r}: a source must be left at step {part.start}, got all of "
                f"{sorted(stage.weights)} in quarantine; end the run before, or give the stage another source"
            )
        ramp = _ramp(part, weights_before, rows_of)
        names = {*weights, *(ramp.weights if ramp else ())}
        specs.append(
            StageSpec(
                name=stage.name,
                start_step=part.start,
                global_batch_size=stage.batch_at(part.start),
                seq_len=stage.seq_len,
                seed=stage.seed,
                shuffle=Shuffle(
                    mode=stage.shuffle, block_rows=config.run.block_rows, window_blocks=config.run.window_blocks
                ),
                weights=weights,
                rows={name: rows_of(name, stage, part.excluded.get(name, _NONE)) for name in names},
                on_change=stage.on_change,
                number=part.number,
                lr_scale=stage.lr_scale,
                ramp=ramp,
                skipped=part.skipped,
            )
        )
    return specs


def _parts(config: Config, folder: Path) -> list[_Part]:
    """Cut the stages wherever a ramp ends, skipped steps begin or end, or a quarantine begins."""
    stages, steps = config.resolved_stages, config.steps
    skips = [(*skip.range(), skip.reason or "no reason given") for skip in config.skip]
    cuts = {0, steps}
    cuts |= {stage.start_step for stage in stages}
    cuts |= {stage.start_step + stage.ramp_steps for stage in stages}
    cuts |= {step for stage in stages for step, _ in stage.batches}
    cuts |= {edge for first, last, _ in skips for edge in (first, last)}
    cuts |= {edit.from_step for edit in config.quarantine}
    numbers = {edit: edit.numbers(folder) for edit in config.quarantine if not edit.whole}
    held = config.held_out(folder)
    parts = []
    for start, _ in pairwise(sorted(cut for cut in cuts if cut <= steps)):
        number = max(index for index, stage in enumerate(stages) if stage.start_step <= start)
        excluded = dict(held)
        for edit, documents in numbers.items():
            if edit.from_step <= start:
                excluded[edit.source] = np.union1d(excluded.get(edit.source, _NONE), documents)
        parts.append(
            _Part(
                stage=stages[number],
                number=number,
                start=start,
                skipped=next((reason for first, last, reason in skips if first <= start < last), None),
                gone=frozenset(edit.source for edit in config.quarantine if edit.whole and edit.from_step <= start),
                excluded=excluded,
            )
        )
    return parts


def _ramp(part: _Part, weights_before: Weights, rows_of: RowsOf) -> Ramp | None:
    """Return the ramp that the steps of a part belong to, if there is one."""
    from tokenmill.plan.stages import Ramp

    stage = part.stage
    end = stage.start_step + stage.ramp_steps
    if stage.ramp is None or part.start >= end:
        return None
    if stage.ramp_from is not None:
        begin = _weights(stage, stage.ramp_from, part, rows_of)
    else:
        begin = {name: weight for name, weight in weights_before.items() if name not in part.gone}
    if not begin:
        return None  # all that it comes from is in quarantine
    return Ramp(shape=stage.ramp, begin=stage.start_step, end=end, weights=begin)


def _weights(
    stage: ResolvedStage, weights: Mapping[str, float], part: _Part, rows_of: RowsOf
) -> dict[str, float | Fraction]:
    """Return the shares of rows that weights ask for."""
    from tokenmill.plan.mixture import exact_weight

    shares: dict[str, float | Fraction] = {name: share for name, share in weights.items() if name not in part.gone}
    if stage.temperature != 1:
        power = 1 / stage.temperature
        try:
            shares = {name: float(f"{float(share) ** power:.{_DIGITS}g}") for name, share in shares.items()}
        except OverflowError:
            shares = dict.fromkeys(shares, inf)
        if not all(0 < share < inf for share in shares.values()):
            raise ConfigError(
                f"stage {stage.name!r}: temperature must leave every weight above 0 and finite, got "
                f"{stage.temperature}; choose one nearer to 1"
            )
    if stage.weigh_by == "tokens":
        # Of the rows of the whole source: a later quarantine does not change the shares of rows.
        shares = {
            name: exact_weight(share) / tokens_of_a_row(rows_of(name, stage, _NONE))
            for name, share in shares.items()
        }
    return shares


def tokens_of_a_row(rows: Rows) -> Fraction:
    """Return how many tokens the rows of an epoch hold in the mean; padding is none."""
    assert rows.counted is not None, "the config refuses such weights for live text"
    fates = rows.counted.fates()
    return Fraction(max(fates.rows * rows.row_slots - fates.padding, 1), max(fates.rows, 1))


def limits(config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """Return how often sources may be read: those that must not be read more often, and those that stop then."""
    errors: dict[str, float] = {}
    stops: dict[str, float] = {}
    for source in config.sources:
        policy = source.on_exhausted or ("repeat" if source.max_epochs is None else "error")
        if policy != "repeat":
            (errors if policy == "error" else stops)[source.name] = source.max_epochs or 1.0
    return errors, stops
