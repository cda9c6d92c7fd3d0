"""From a config to the parts of its stages: wherever what is drawn changes, a part ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import ConfigError
from tokenmill.plan.mixture import exact_weight
from tokenmill.plan.shuffle import Shuffle
from tokenmill.plan.stages import Ramp, StageSpec, Weights
from tokenmill.types import Int64Array

if TYPE_CHECKING:
    from tokenmill.config.run import Config, StageConfig
    from tokenmill.plan.stages import RowIndex

RowsOf = Callable[[str, "StageConfig", "Int64Array"], "RowIndex"]
"""(source, stage, documents that are left out) -> the rows of the source in that stage."""

_DIGITS = 12
"""Of a weight raised to a power: more would depend on the machine."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A run of steps within a stage."""

    stage: StageConfig
    number: int
    start: int
    skipped: str | None
    gone: frozenset[str]
    """Sources that are put aside as a whole."""
    excluded: Mapping[str, Int64Array]
    """Documents that are put aside."""


def schedule(config: Config, folder: Path, rows_of: RowsOf) -> list[StageSpec]:
    """Return the parts of all stages in order, each with the rows of its sources."""
    specs: list[StageSpec] = []
    before: Weights = {}
    for part in _parts(config, folder):
        stage, specs_before = part.stage, specs[-1] if specs else None
        if specs_before is not None and specs_before.number != part.number:
            before = specs_before.weights
        where = f"stage {stage.name!r}"
        assert stage.weights is not None  # resolved_stages() has filled everything in
        weights = _weights(stage, stage.weights, part, rows_of)
        if not weights:
            raise ConfigError(
                f"{where}: a source must be left at step {part.start}, got all of {sorted(stage.weights)} in "
                "quarantine; end the run before, or give the stage another source"
            )
        ramp = _ramp(stage, part, before, rows_of)
        names = {*weights, *(ramp.weights if ramp else ())}
        specs.append(
            StageSpec(
                name=stage.name,
                start_step=part.start,
                global_batch_size=stage.global_batch_size or 0,
                seq_len=stage.seq_len or 0,
                seed=stage.seed or 0,
                shuffle=Shuffle(
                    mode=stage.shuffle or config.run.shuffle,
                    block_rows=config.run.block_rows,
                    window_blocks=config.run.window_blocks,
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


_NONE = np.empty(0, np.int64)


def _parts(config: Config, folder: Path) -> list[_Part]:
    """Cut the stages wherever a ramp ends, steps are skipped, or something is put aside."""
    stages, steps = config.resolved_stages(), config.run.steps
    skips = [(*skip.range(), skip.reason or "no reason given") for skip in config.skip]
    cuts = {0, steps}
    cuts |= {stage.start_step for stage in stages}
    cuts |= {stage.start_step + (stage.ramp_steps or 0) for stage in stages}
    cuts |= {edge for first, last, _ in skips for edge in (first, last)}
    cuts |= {edit.from_step for edit in config.quarantine}
    numbers = {edit: edit.numbers(folder) for edit in config.quarantine if not edit.whole}
    parts = []
    for start, _ in pairwise(sorted(cut for cut in cuts if cut <= steps)):
        number = max(index for index, stage in enumerate(stages) if stage.start_step <= start)
        edits = [edit for edit in config.quarantine if edit.from_step <= start]
        excluded: dict[str, Int64Array] = {}
        for edit in edits:
            if not edit.whole:
                excluded[edit.source] = np.union1d(excluded.get(edit.source, _NONE), numbers[edit])
        parts.append(
            _Part(
                stage=stages[number],
                number=number,
                start=start,
                skipped=next((reason for first, last, reason in skips if first <= start < last), None),
                gone=frozenset(edit.source for edit in edits if edit.whole),
                excluded=excluded,
            )
        )
    return parts


def _ramp(stage: StageConfig, part: _Part, before: Weights, rows_of: RowsOf) -> Ramp | None:
    """Return the ramp that a part belongs to, if its steps are of one."""
    if stage.ramp is None or stage.ramp_steps is None or part.start >= stage.start_step + stage.ramp_steps:
        return None
    begin = {name: weight for name, weight in before.items() if name not in part.gone}
    if stage.ramp_from is not None:
        begin = _weights(stage, stage.ramp_from, part, rows_of)
    if not begin:
        return None  # all that it comes from is in quarantine
    end = stage.start_step + stage.ramp_steps
    return Ramp(shape=stage.ramp, begin=stage.start_step, end=end, weights=begin)


def _weights(
    stage: StageConfig, weights: Mapping[str, float], part: _Part, rows_of: RowsOf
) -> dict[str, float | Fraction]:
    """Return the shares of rows that weights ask for."""
    found: dict[str, float | Fraction] = {name: weight for name, weight in weights.items() if name not in part.gone}
    if stage.temperature not in (None, 1):
        power = 1 / (stage.temperature or 1)
        try:
            found = {name: float(f"{float(weight) ** power:.{_DIGITS}g}") for name, weight in found.items()}
        except OverflowError:
            found = dict.fromkeys(found, float("inf"))
        if not all(0 < weight < float("inf") for weight in found.values()):
            raise ConfigError(
                f"stage {stage.name!r}: temperature must leave every weight above 0 and finite, got "
                f"{stage.temperature}; choose one nearer to 1"
            )
    if stage.weigh_by == "tokens":
        # Of the rows of the whole source: what is put aside later does not change the shares of rows.
        found = {
            name: exact_weight(weight) / tokens_of_a_row(rows_of(name, stage, _NONE))
            for name, weight in found.items()
        }
    return found


def tokens_of_a_row(index: RowIndex) -> Fraction:
    """Return how many tokens the rows of an epoch hold in the mean; padding is none."""
    fates = index.fates()
    return Fraction(max(fates.rows * index.row_slots - fates.padding, 1), max(fates.rows, 1))


def limits(config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """Return how often sources may be read: those that must not be read more often, and those that stop then."""
    errors: dict[str, float] = {}
    stops: dict[str, float] = {}
    for source in config.sources:
        policy = source.on_exhausted or ("repeat" if source.max_epochs is None else "error")
        if policy != "repeat":
            (errors if policy == "error" else stops)[source.name] = source.max_epochs or 1.0
    return errors, stops
