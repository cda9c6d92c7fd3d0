"""From a config and its open sources to the compiled plan.

The stages of a config are cut wherever rows change: at the end of a ramp, at an edit, at another batch size. Each
part is specified by a `StageSpec`, which holds the rows of its sources, and compiled into a `Stage` of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, inf

import numpy as np

from tokenmill.config.combine import check_combinations
from tokenmill.config.run import Config
from tokenmill.config.schedule import ResolvedStage, limits, long_documents
from tokenmill.errors import ConfigError
from tokenmill.packing import Policy
from tokenmill.plan.compile import compile_plan
from tokenmill.plan.mixture import exact_weight
from tokenmill.plan.order import Shuffle
from tokenmill.plan.plan import Plan
from tokenmill.plan.rows import Rows
from tokenmill.plan.stages import Ramp, StageSpec, Weights
from tokenmill.run.sources import Sources
from tokenmill.tables import Number
from tokenmill.types import NO_DOCUMENTS, Int64Array

_DIGITS = 12
"""Digits of a weight raised to a power, because further digits depend on the machine."""


def compile_run(config: Config, sources: Sources) -> Plan:
    """Compile the plan of a config, and check it. No token is read."""
    errors, stops = limits(config)
    run = config.run
    horizon = {"horizon": f"{run.horizon} within the row"} if run.horizon > 1 else {}
    return compile_plan(
        list(stage_specs(config, sources)),
        sources=config.source_names,
        steps=config.steps,
        max_epochs=errors,
        stops=stops,
        contract={"positions": run.positions, **horizon},
    )


def stage_specs(config: Config, sources: Sources) -> Iterator[StageSpec]:
    """Yield the parts of all stages in order, each with the rows of its sources."""
    check_combinations(config)  # before documents are prepared and stores are opened
    check_combinations(config, is_open=True, records=sources.record_kind)
    number, last = 0, dict[str, Number | Fraction]()
    before: Weights = {}
    held_out = config.held_out(sources.folder)
    edits = [(edit, NO_DOCUMENTS if edit.whole else edit.numbers(sources.folder)) for edit in config.quarantine]
    skips = [(*skip.range(), skip.reason or "no reason given") for skip in config.skip]
    stages = config.resolved_stages
    for start, _ in pairwise(_edges(config)):
        stage_number = max(index for index, stage in enumerate(stages) if stage.start_step <= start)
        if stage_number != number:
            number, before = stage_number, last
        stage, excluded, removed = stages[number], dict(held_out), set[str]()
        for edit, documents in edits:
            if edit.from_step <= start and edit.whole:
                removed.add(edit.source)
            elif edit.from_step <= start:
                excluded[edit.source] = np.union1d(excluded.get(edit.source, NO_DOCUMENTS), documents)
        share = _Shares(stage=stage, sources=sources, removed=frozenset(removed))
        weights = last = share.of(share.written())
        if not weights:
            raise ConfigError(
                f"stage {stage.name!r}: no source is left at step {start}, because all of "
                f"{sorted(stage.weights)} are quarantined; end the run before, or add a source to the stage"
            )
        ramp = share.ramp(start, before)
        names = {*weights, *(ramp.weights if ramp else ())}
        yield StageSpec(
            name=stage.name,
            start_step=start,
            global_batch_size=stage.batch_at(start),
            seq_len=stage.seq_len,
            seed=stage.seed,
            shuffle=Shuffle(
                mode=stage.shuffle, block_rows=config.run.block_rows, window_blocks=config.run.window_blocks
            ),
            weights=weights,
            rows={name: stage_rows(sources, name, stage, excluded.get(name, NO_DOCUMENTS)) for name in names},
            on_change=stage.on_change,
            number=number,
            lr_scale=stage.lr_scale,
            ramp=ramp,
            skipped=next((reason for first, end, reason in skips if first <= start < end), None),
        )


def _edges(config: Config) -> list[int]:
    """Return the first step of each part, and the end of the run."""
    stages, steps = config.resolved_stages, config.steps
    edges = {0, steps}
    edges |= {stage.start_step for stage in stages}
    edges |= {stage.start_step + stage.ramp_steps for stage in stages}
    edges |= {step for stage in stages for step, _ in stage.batches}
    edges |= {edge for skip in config.skip for edge in skip.range()}
    edges |= {edit.from_step for edit in config.quarantine}
    return sorted(edge for edge in edges if edge <= steps)


# Rows


def stage_rows(sources: Sources, name: str, stage: ResolvedStage, excluded: Int64Array = NO_DOCUMENTS) -> Rows:
    """Return the rows of a source in a stage, without the `excluded` documents."""
    packing, kind = stage_packing(sources, stage), sources.record_kind
    policy = Policy(
        name=packing,
        split=long_documents(f"stage {stage.name!r}", stage.on_long, packing, kind),
        crop=stage.crop,
        multiple=sources.config.run.segment_multiple,
    )
    if name in sources.live:
        return sources.live[name].in_format(stage.seq_len, policy)
    return sources.rows(name, stage.seq_len, policy, excluded)


def stage_packing(sources: Sources, stage: ResolvedStage) -> str:
    """Return the packing of a stage. Pairs and groups are rows already, so they are padded."""
    return stage.packing if sources.record_kind is None else "padded"


# Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shares:
    """Shares of rows in a part of a stage, from the weights of the config."""

    stage: ResolvedStage
    sources: Sources
    removed: frozenset[str]
    """Sources that are quarantined as a whole."""

    def written(self) -> Mapping[str, Number]:
        """Return the weights of the stage, with sizes of sources counted where the config names what to count."""
        if self.stage.sizes is None:
            return self.stage.weights
        return {name: self._size(name, self.stage.sizes) for name in self.stage.weights}

    def _size(self, name: str, counted: str) -> int:
        rows = self._all_rows(name)
        manifest = self.sources.stores[name].manifest
        sizes = {"tokens": manifest.tokens, "documents": manifest.documents, "rows": rows.num_rows}
        if not sizes[counted]:
            raise ConfigError(
                f"source {name!r}: it has no {counted}, so weights = {counted!r} gives it no share; remove it"
            )
        return sizes[counted]

    def _all_rows(self, name: str) -> Rows:
        """Return the rows of a whole source: quarantines and evals do not change the shares of rows."""
        return stage_rows(self.sources, name, self.stage)

    def of(self, weights: Mapping[str, Number]) -> dict[str, Number | Fraction]:
        """Return the shares of rows that weights amount to."""
        stage = self.stage
        shares: dict[str, Number | Fraction] = {
            name: share for name, share in weights.items() if name not in self.removed
        }
        if stage.temperature != 1:
            power = 1 / stage.temperature
            try:
                shares = {name: float(f"{float(share) ** power:.{_DIGITS}g}") for name, share in shares.items()}
            except OverflowError:
                shares = dict.fromkeys(shares, inf)
            if not all(0 < share < inf for share in shares.values()):
                raise ConfigError(
                    f"stage {stage.name!r}: temperature = {stage.temperature} makes a weight 0 or infinite; choose "
                    "a value closer to 1"
                )
        if stage.weigh_by == "tokens":
            shares = {
                name: exact_weight(share) / tokens_of_a_row(self._all_rows(name)) for name, share in shares.items()
            }
        return shares

    def ramp(self, start: int, before: Weights) -> Ramp | None:
        """Return the ramp that the part belongs to, if there is one; `before` are weights of the previous stage."""
        stage = self.stage
        end = stage.start_step + stage.ramp_steps
        if stage.ramp is None or start >= end:
            return None
        if stage.ramp_from is not None:
            weights: Weights = self.of(stage.ramp_from)
        else:
            weights = {name: weight for name, weight in before.items() if name not in self.removed}
        if not weights:
            return None  # all sources that it starts from are quarantined
        return Ramp(shape=stage.ramp, begin=stage.start_step, end=end, weights=weights)


def tokens_of_a_row(rows: Rows) -> Fraction:
    """Return the mean number of tokens of a row, without padding."""
    fates = rows.fates()
    return Fraction(max(fates.rows * rows.row_slots - fates.padding, 1), max(fates.rows, 1))


# Epochs


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochCount:
    """Number of rows and steps that the epochs of a run amount to."""

    epochs: float
    rows: int
    """Rows of one epoch, over all sources."""
    filled: int
    """Rows of the last step after the end of these epochs: the first rows of the next epoch."""

    def sentence(self, steps: int) -> str:
        """Return a sentence that names epochs, rows and steps."""

        def several(number: float, name: str) -> str:
            return name if number == 1 else f"{name}s"

        filled = f"the last is filled with {self.filled:,} {several(self.filled, 'row')} of the next epoch"
        rows = f"{self.epochs:g} {several(self.epochs, 'epoch')} of {self.rows:,} {several(self.rows, 'row')}"
        verb = "is" if self.epochs == 1 else "are"
        return f"{rows} {verb} {steps:,} {several(steps, 'step')}: {filled if self.filled else 'all are full'}"


def count_epochs(config: Config, sources: Sources, epochs: Number) -> tuple[EpochCount, Config]:
    """Count the rows of an epoch; return the count, and the config with steps instead of epochs."""
    one_step = replace(config.run, steps=1, epochs=None, weights="rows")
    (spec,) = stage_specs(replace(config, run=one_step, skip=()), sources)
    rows = {name: each.num_rows for name, each in spec.rows.items() if each.has_epochs and each.num_rows}
    if not rows:
        raise ConfigError("run: no source has a row, so an epoch is empty; add documents")
    wanted, batch = ceil(exact_weight(epochs) * sum(rows.values())), config.clock.stretches[0].batch
    steps = -(-wanted // batch)
    run = replace(one_step, steps=steps, weights=rows if len(rows) > 1 else None)
    count = EpochCount(epochs=epochs, rows=sum(rows.values()), filled=steps * batch - wanted)
    return count, replace(config, run=run)
