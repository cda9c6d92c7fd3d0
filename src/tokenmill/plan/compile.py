"""Compiling a plan: stages are laid end to end, and each source continues where the stage before left it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import ceil, floor, gcd

import numpy as np

from tokenmill.errors import ConfigError
from tokenmill.fingerprint import key64
from tokenmill.plan.mixture import (
    MAX_TOTAL,
    Mixture,
    build_mixture,
    build_ramp,
    exact_weight,
    in_order,
    integer_weights,
    share_out,
)
from tokenmill.plan.order import Shuffle
from tokenmill.plan.permute import derived_key
from tokenmill.plan.plan import Plan
from tokenmill.plan.rows import EpochProgress, Rows
from tokenmill.plan.stages import CARRY, NO_EPOCH, OLD_EPOCH, Stage, StageSpec

MAX_ROWS = 1 << 62
"""Upper bound of the rows of a run, so that a position fits 64 bits."""


def compile_plan(
    stages: Sequence[StageSpec],
    *,
    sources: Sequence[str],
    steps: int,
    max_epochs: Mapping[str, float] | None = None,
    stops: Mapping[str, float] | None = None,
    contract: Mapping[str, str] | None = None,
) -> Plan:
    """Compile stages into a plan; contradictions are refused here, before the first step.

    A source of `max_epochs` must not be read more often than that, one of `stops` leaves the mixture then.
    """
    check_order([(stage.name, stage.start_step) for stage in stages], steps)
    rows = steps * max(stage.global_batch_size for stage in stages)
    if rows >= MAX_ROWS:
        raise ConfigError(f"run: steps * global_batch_size must be below 2^62, got {rows}; lower one of the two")
    plan = Plan(
        sources=tuple(sources),
        stages=_compile_stages(
            stages, sources, steps, {name: exact_weight(limit) for name, limit in (stops or {}).items()}
        ),
        max_epochs=dict(max_epochs or {}),
        contract=dict(contract or {}),
    )
    _check_epochs(plan)
    return plan


def check_order(stages: Sequence[tuple[str, int]], steps: int) -> None:
    """Raise if stages, given as (name, start_step), do not cover the run in order from step 0."""
    if not stages:
        raise ConfigError("stages: the run has no stage; add [[stages]] or sources with weights")
    name, start = stages[0]
    if start != 0:
        raise ConfigError(
            f"stage {name!r}: the first stage must start at step 0, got {start}; "
            "start it at 0 or put a stage before it"
        )
    for (before, earlier), (after, later) in pairwise(stages):
        if later <= earlier:
            raise ConfigError(
                f"stage {after!r}: start_step must be above {earlier} of stage {before!r}, got {later}; "
                "order the stages by start_step"
            )
    name, start = stages[-1]
    if start >= steps:
        raise ConfigError(
            f"stage {name!r}: start_step must be below run.steps {steps}, got {start}; "
            "raise run.steps or remove the stage"
        )


def _check_epochs(plan: Plan) -> None:
    """Raise if a plan reads a source more often than the run allows."""
    for stage in plan.stages:
        for name in stage.names:
            allowed = plan.max_epochs.get(name)
            if allowed is not None and stage.epochs(name) > exact_weight(allowed):
                index = stage.rows[name]
                over = ceil((stage.epochs(name) - exact_weight(allowed)) * index.num_rows)
                raise ConfigError(
                    f"source {name!r}: max_epochs must not be passed, got {float(stage.epochs(name)):.3f} epochs "
                    f"against {allowed:g} by the end of stage {stage.spec.name!r}, {over} rows "
                    f"({over * index.row_slots} tokens) too many; lower its weight, add documents, raise max_epochs"
                )


@dataclass(slots=True)
class SourceProgress:
    """Progress of a source, and the order of its current epoch."""

    index: Rows
    repeats_from: int = 0
    era: int = 0
    """Number of times that the rows have changed; every epoch of every era has its own order."""
    epochs_before: Fraction = Fraction(0)
    left: Fraction = Fraction(0)
    """Fraction of an epoch left when the rows changed. It is above 0 without rows if all were quarantined."""
    consumed: int = 0
    epochs_read: Fraction = Fraction(0)
    key: int = 0
    shuffle: Shuffle | None = None

    def epoch(self) -> tuple[int, int, int]:
        """Return the current epoch, its rows, and how many of them were drawn; the rest counts as epoch -1."""
        rows = self.index
        if self.consumed < rows.num_rest:
            return -1, rows.num_rest, self.consumed
        epoch, drawn = divmod(self.consumed - rows.num_rest, rows.num_rows)
        return epoch, rows.num_rows, drawn

    @property
    def is_within_epoch(self) -> bool:
        """Whether the source is within an epoch, not between two."""
        return self.epoch()[2] > 0

    def seen(self) -> EpochProgress:
        """Return the rows of the current epoch that were drawn."""
        epoch, size, drawn = self.epoch()
        rows = self.index
        assert self.shuffle is not None
        key = int(derived_key(np.uint64(self.key), epoch))
        starts = rows.window_starts(rest=epoch < 0)
        return EpochProgress(rest=epoch < 0, size=size, drawn=drawn, key=key, shuffle=self.shuffle, starts=starts)


_GRAIN = 1 << 40


@dataclass(slots=True)
class _Mixing:
    """The current mixture, and the lead of each source over its share."""

    ahead: dict[str, Fraction] = field(default_factory=dict)
    """Lead of each source over its share when the mixture began."""
    mixture: Mixture | None = None
    asked: tuple[object, ...] | None = None
    """Weights and sources that the mixture was built for."""
    names: tuple[str, ...] = ()
    drawn: int = 0
    """Positions of it."""

    def mixture_of(self, spec: StageSpec) -> Mixture:
        """Return the mixture of a stage: the current one, if the stage asks for the same."""
        ramp, names = spec.ramp, spec.names
        weights = [exact_weight(spec.weights.get(name, 0)) for name in names]
        asked: tuple[object, ...]
        if ramp is None:
            whole = integer_weights(spec.weights)
            asked = (names, *(whole[name] for name in names))
        else:
            batch = spec.global_batch_size
            asked = (names, batch, ramp.shape, ramp.begin, ramp.end, *weights, *ramp.weights.items())
        if self.mixture is not None and asked == self.asked:
            return self.mixture
        self.finish()
        leads = [self.ahead.get(name, Fraction(0)) for name in names]
        if ramp is None:
            self.mixture = build_mixture(tuple(whole[name] for name in names), leads)
        else:
            # Where its sources change in the middle of it, a ramp goes on with the others from where it stands.
            self.mixture = build_ramp(
                [exact_weight(ramp.weights.get(name, 0)) for name in names],
                weights,
                steps=range(spec.start_step - ramp.begin, ramp.end - ramp.begin),
                batch=spec.global_batch_size,
                shape=ramp.shape,
                leads=leads,
            )
        self.asked, self.names, self.drawn = asked, names, 0
        return self.mixture

    def finish(self) -> None:
        """Finish the mixture, and record the leads of its sources."""
        if self.mixture is not None:
            leads = [self.ahead.get(name, Fraction(0)) for name in self.names]
            ahead = self.mixture.rounded_leads(self.drawn, leads, _GRAIN)
            self.ahead |= dict(zip(self.names, ahead, strict=True))
        self.mixture = self.asked = None


def _compile_stages(
    specs: Sequence[StageSpec], sources: Sequence[str], steps: int, stops: Mapping[str, Fraction]
) -> tuple[Stage, ...]:
    """Compile stages; a source of `stops` leaves the mixture after that number of epochs."""
    progress: dict[str, SourceProgress] = {}
    mixing = _Mixing()
    begun: set[tuple[int, str, str]] = set()
    stages: list[Stage] = []
    ends = [*(spec.start_step for spec in specs[1:]), steps]
    waiting = deque(zip(specs, ends, strict=True))
    while waiting:
        spec, end = waiting.popleft()
        # A change in the middle of a stage does not start a source again that the stage has drawn from.
        fresh = {name for name in spec.names if (spec.number, spec.name, name) not in begun}
        restarted = frozenset(name for name in fresh if _restarts(progress.get(name), spec, name))
        started = {name: _start_source(progress.get(name), spec, name, name in restarted) for name in spec.names}
        place = _StagePlace(
            index=len(stages),
            end=end,
            position=stages[-1].first_position + stages[-1].num_positions if stages else 0,
            sources=sources,
            restarted=restarted,
        )
        mixture = mixing.mixture_of(spec)
        stage = _compile_stage(spec, place, started, mixture, mixing.drawn)
        rows_left_of = {name: rows_left(stage, name, limit) for name, limit in stops.items() if name in stage.names}
        first_short = _first_short(stage, rows_left_of)
        if first_short is None:
            mixing.drawn += stage.num_positions
        elif first_short:
            at = spec.start_step + first_short
            waiting.extendleft([(replace(spec, start_step=at), end), (spec, at)])
            continue
        elif not all(rows_left_of.values()):
            waiting.appendleft((_without(spec, [name for name in rows_left_of if not rows_left_of[name]]), end))
            continue
        else:
            stage = _compile_last_draws(
                stage, rows_left_of, replace(place, end=spec.start_step + 1), started, mixing
            )
            if stage.end_step < end:
                waiting.appendleft((replace(spec, start_step=stage.end_step), end))
        stages.append(stage)
        for line, (name, drawn) in enumerate(stage.draws.items()):
            # A stage that draws nothing of a source leaves it as it was, with what is still owed of it.
            if drawn or name not in progress:
                _advance(started[name], stage, line, drawn)
                progress[name] = started[name]
            if drawn:
                begun.add((spec.number, spec.name, name))
    return tuple(stages)


def compile_in_turn(spec: StageSpec, sources: Sequence[str]) -> Stage:
    """Compile one stage that draws the whole of each source, one after another in the order of `sources`."""
    progress = {name: SourceProgress(index=spec.rows[name]) for name in spec.names}
    sizes = {name: rows.num_rows for name, rows in spec.rows.items()}
    ends = dict(zip(sources, accumulate(sizes[name] for name in sources), strict=True))
    steps, rest = divmod(ends[sources[-1]], spec.global_batch_size)
    assert steps
    assert not rest, "rows must fill whole batches"
    mixture = in_order([ends[name] - sizes[name] for name in spec.names], [sizes[name] for name in spec.names])
    place = _StagePlace(index=0, end=steps, position=0, sources=sources, restarted=frozenset())
    return replace(_compile_stage(spec, place, progress, mixture, 0), rotate=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StagePlace:
    """Place of a stage in the run."""

    index: int
    end: int
    """Step at which it ends."""
    position: int
    sources: Sequence[str]
    restarted: frozenset[str]
    """Sources that it starts again."""


def _without(spec: StageSpec, names: Sequence[str]) -> StageSpec:
    """Return a stage without sources that are used up."""
    weights = {name: weight for name, weight in spec.weights.items() if name not in names}
    if not weights:
        raise ConfigError(
            f"stage {spec.name!r}: its sources must last until it ends, got all of them used up "
            f"(on_exhausted = stop) at step {spec.start_step}; end the run there, or add documents"
        )
    ramp = spec.ramp
    if ramp is not None:
        left = {name: weight for name, weight in ramp.weights.items() if name not in names}
        ramp = replace(ramp, weights=left) if left else None
    return replace(spec, weights=weights, ramp=ramp)


def _compile_last_draws(
    stage: Stage,
    rows_left_of: Mapping[str, int],
    place: _StagePlace,
    started: Mapping[str, SourceProgress],
    mixing: _Mixing,
) -> Stage:
    """Return the one step in which sources give their last rows."""
    spec = stage.spec
    mixing.finish()
    first = stage.origin
    shares = dict(zip(stage.names, stage.mixture.shares(first, first + spec.global_batch_size), strict=True))
    where = f"stage {spec.name!r}, step {spec.start_step}"
    quotas = share_out(spec.global_batch_size, shares, rows_left_of, mixing.ahead, where)
    ended = tuple(sorted(name for name in quotas if quotas[name] == rows_left_of.get(name)))
    others = [name for name in quotas if name not in ended]
    rows, total = sum(quotas[name] for name in others), sum(shares[name] for name in others)
    for name in others:
        mixing.ahead[name] = mixing.ahead.get(name, Fraction(0)) + quotas[name] - rows * shares[name] / total
    drawn = {name: number for name, number in sorted(quotas.items()) if number}
    shared = gcd(*drawn.values())
    if sum(drawn.values()) // shared > MAX_TOTAL:
        raise ConfigError(
            f"{where}: global_batch_size must be at most {MAX_TOTAL} where a source stops, "
            f"got {spec.global_batch_size}; lower it, or use on_exhausted = error"
        )
    return _compile_stage(
        replace(spec, weights=drawn, ramp=None, drained=ended),
        place,
        started,
        build_mixture(tuple(number // shared for number in drawn.values())),
        0,
    )


def _restarts(before: SourceProgress | None, spec: StageSpec, name: str) -> bool:
    """Return whether a stage restarts a source in the middle of an epoch, because its rows changed."""
    if before is None or spec.on_change != "restart" or not before.is_within_epoch:
        return False
    return dict(before.index.epoch_description) != dict(spec.rows[name].description)


def _start_source(before: SourceProgress | None, spec: StageSpec, name: str, restarts: bool) -> SourceProgress:
    """Return the progress of a source at the start of a stage."""
    index = spec.rows[name]
    if index.num_rows < 1:
        if "quarantined" in index.description:
            raise ConfigError(
                f"stage {spec.name!r}: a source must have documents left at step {spec.start_step}, got all of "
                f"{name!r} in quarantine; quarantine the whole source: leave out documents and file"
            )
        raise ConfigError(
            f"stage {spec.name!r}: a source must have at least one row of {spec.seq_len + 1} tokens, "
            f"got none from {name!r}; shorten seq_len or add documents"
        )
    size = index.num_rows
    if before is None:
        return SourceProgress(index=index, repeats_from=size)
    if dict(before.index.epoch_description) == dict(index.description):
        return before
    if not before.consumed:
        return SourceProgress(index=index, repeats_from=size, era=before.era)
    if restarts or not before.is_within_epoch:
        return SourceProgress(index=index, era=before.era + 1, epochs_before=before.epochs_read)
    if index.cross_document_labels:
        raise ConfigError(
            f"stage {spec.name!r}: labels of {name!r} that cross documents know no rest of an epoch, got "
            "cross_document_labels with a change of rows; use on_change = restart, or leave it out"
        )
    seen = before.seen()
    following = index.following(before.index, seen)
    left = (1 - Fraction(seen.drawn, seen.size)) * (before.left if seen.rest else 1)
    return SourceProgress(
        index=following,
        repeats_from=following.num_rest if before.consumed <= before.repeats_from else 0,
        era=before.era + 1,
        epochs_before=before.epochs_read,
        left=left,
    )


def _compile_stage(
    spec: StageSpec,
    place: _StagePlace,
    progress: Mapping[str, SourceProgress],
    mixture: Mixture,
    origin: int,
) -> Stage:
    names = spec.names
    bases = tuple(mixture.counts(origin))
    table = np.zeros((len(names), 11), np.int64)
    keys = np.zeros((len(names), 2), np.uint64)
    for line, name in enumerate(names):
        source = progress[name]
        rest, size = source.index.num_rest, source.index.num_rows if source.index.has_epochs else 0
        numbers = spec.shuffle.numbers
        table[line, :OLD_EPOCH] = [place.sources.index(name), source.consumed, rest, size, *numbers]
        table[line, CARRY] -= bases[line]
        table[line, OLD_EPOCH] = NO_EPOCH
        keys[line] = key64(spec.seed, "rows", name, *([source.era] if source.era else []))
        epoch, _, drawn = source.epoch()
        if drawn and source.shuffle is not None:
            table[line, OLD_EPOCH:] = [epoch, *source.shuffle.numbers]
            keys[line, 1] = source.key
    used = {name: progress[name] for name in names}
    return Stage(
        spec=spec,
        index=place.index,
        end_step=place.end,
        first_position=place.position,
        mixture=mixture,
        origin=origin,
        bases=bases,
        names=names,
        rows={name: progress[name].index for name in names},
        repeats_from={name: source.repeats_from for name, source in used.items()},
        epochs_before={name: source.epochs_before for name, source in used.items()},
        rest_epochs={name: source.left for name, source in used.items()},
        table=table,
        keys=keys,
        rotation_key=np.uint64(key64(spec.seed, "rotation")),
        rotate=len(names) > 1,
        restarted=place.restarted,
    )


def _advance(progress: SourceProgress, stage: Stage, line: int, drawn: int) -> None:
    if not drawn:
        return
    progress.consumed += drawn - 1
    epoch, _, _ = progress.epoch()
    progress.consumed += 1
    progress.epochs_read = stage.epochs(stage.names[line])
    if epoch != int(stage.table[line, OLD_EPOCH]):
        progress.key = int(stage.keys[line, 0])
        progress.shuffle = stage.spec.shuffle


# Sources that may not be read any further: at which step they run out, and what that step draws instead.


def rows_left(stage: Stage, name: str, limit: Fraction) -> int:
    """Return the number of rows of a source that a stage may read until `limit` epochs."""
    before, index = stage.epochs_before[name], stage.rows[name]
    left = stage.rest_epochs[name]
    if not index.num_rest:
        rows = floor((limit - before - left) * index.num_rows)
    elif limit < before + left:
        rows = floor((limit - before) / left * index.num_rest)
    else:
        rows = index.num_rest + floor((limit - before - left) * index.num_rows)
    return max(0, rows - stage.carry(name))


def _first_short(stage: Stage, rows_left_of: Mapping[str, int]) -> int | None:
    """Return the first step of a stage, counted from its start, that needs more rows than a source has left."""
    # The draw after the last that there is a row for.
    over = {name: left for name, left in rows_left_of.items() if stage.draws[name] > left}
    positions = [int(stage.positions_of(name, np.array([left]))[0]) for name, left in over.items()]
    return min(positions) // stage.spec.global_batch_size if positions else None
