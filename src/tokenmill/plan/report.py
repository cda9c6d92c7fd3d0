"""What a plan will do, counted before its first step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.plan.mixture import positions_of

if TYPE_CHECKING:
    from tokenmill.plan.plan import Plan
    from tokenmill.plan.stages import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """What one stage draws from one source."""

    stage: str
    source: str
    asked: float
    """Share of rows that the weights ask for."""
    realised: float
    """Share of rows that the stage draws."""
    rows: int
    tokens: int
    """Input tokens."""
    epochs: float
    """How often the source has been read by the end of the stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFacts:
    """One stage at a glance."""

    name: str
    start_step: int
    end_step: int
    global_batch_size: int
    seq_len: int
    rows: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """One source over the whole run."""

    name: str
    rows: int
    """Rows of one epoch."""
    drawn: int
    epochs: float
    first_repeat: int | None
    """Step at which a row of the source is seen for the second time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """The compiler's report."""

    fingerprint: str
    steps: int
    rows: int
    tokens: int
    stages: tuple[StageFacts, ...]
    shares: tuple[SourceShare, ...]
    sources: tuple[SourceFacts, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)


def report(plan: Plan) -> PlanReport:
    """Count what the plan draws; closed form, so a run of any length is reported at once."""
    stages = tuple(_stage_facts(stage) for stage in plan.stages)
    return PlanReport(
        fingerprint=plan.fingerprint,
        steps=plan.steps,
        rows=sum(stage.rows for stage in stages),
        tokens=sum(stage.tokens for stage in stages),
        stages=stages,
        shares=tuple(share for stage in plan.stages for share in _shares(stage)),
        sources=tuple(_source_facts(plan, name) for name in plan.sources),
    )


def _stage_facts(stage: Stage) -> StageFacts:
    return StageFacts(
        name=stage.spec.name,
        start_step=stage.spec.start_step,
        end_step=stage.end_step,
        global_batch_size=stage.spec.global_batch_size,
        seq_len=stage.spec.seq_len,
        rows=stage.num_positions,
        tokens=stage.num_positions * stage.spec.seq_len,
    )


def _shares(stage: Stage) -> list[SourceShare]:
    # What the user asked for, before rounding to whole weights.
    total = sum(stage.spec.weights.values())
    return [
        SourceShare(
            stage=stage.spec.name,
            source=name,
            asked=stage.spec.weights[name] / total,
            realised=drawn / stage.num_positions,
            rows=drawn,
            tokens=drawn * stage.spec.seq_len,
            epochs=(stage.carry(name) + drawn) / stage.spec.rows[name].num_rows,
        )
        for name, drawn in stage.draws.items()
    ]


def _source_facts(plan: Plan, name: str) -> SourceFacts:
    using = [stage for stage in plan.stages if name in stage.names]
    if not using:
        return SourceFacts(name=name, rows=0, drawn=0, epochs=0.0, first_repeat=None)
    size = using[-1].spec.rows[name].num_rows
    drawn = sum(stage.draws[name] for stage in using)
    return SourceFacts(
        name=name, rows=size, drawn=drawn, epochs=drawn / size, first_repeat=_first_repeat(using, name, size)
    )


def _first_repeat(using: list[Stage], name: str, size: int) -> int | None:
    for stage in using:
        earlier = size - stage.carry(name)
        if 0 <= earlier < stage.draws[name]:
            line = stage.names.index(name)
            position = positions_of(line, np.array([earlier]), stage.mixture.nodes, stage.mixture.leaf_parent)[0]
            return int(position) // stage.spec.global_batch_size + stage.spec.start_step
    return None
