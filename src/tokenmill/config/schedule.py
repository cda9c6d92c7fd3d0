"""From a config to the parts of its stages: wherever what is drawn changes, a part ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np

from tokenmill.config.evals import held_out
from tokenmill.config.run import Config, ResolvedStage, Sizes
from tokenmill.errors import ConfigError
from tokenmill.plan.mixture import exact_weight
from tokenmill.plan.shuffle import Shuffle
from tokenmill.plan.stages import Ramp, Rows, StageSpec, Weights
from tokenmill.tables import Number
from tokenmill.types import Int64Array

RowsOf = Callable[[str, ResolvedStage, Int64Array], Rows]
"""(source, stage, documents that are left out) -> the rows of the source in that stage."""

SizeOf = Callable[[str, Sizes, Rows], int]
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
    held = held_out(config.evals, folder)
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
