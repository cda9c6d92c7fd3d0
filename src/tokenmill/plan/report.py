"""What a plan will do, counted before its first step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.plan.mixture import positions_of
from tokenmill.plan.order import rows_in_order

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.plan.plan import Plan
    from tokenmill.plan.stages import Stage
    from tokenmill.types import Fates, Spans


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
    """Input slots of the rows: trained + unlabelled + padding."""
    epochs: float
    """How often the source has been read by the end of the stage."""
    trained: int
    """Labels that the rows have."""
    unlabelled: int
    """Tokens whose next one is no label: the last of a document, or of a row that is not full."""
    padding: int
    """Input slots of the rows that hold no token."""
    counted: bool
    """Whether `trained` and `padding` were counted row by row, or taken from the mean of an epoch."""


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
    fates: Fates | None
    """What becomes of its tokens in an epoch, as the last stage that uses it packs them."""


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
        shares=_shares(plan),
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


def _shares(plan: Plan) -> tuple[SourceShare, ...]:
    shares = []
    for stage in plan.stages:
        total = sum(stage.spec.weights.values())
        for name, drawn in stage.draws.items():
            shares.append(
                SourceShare(
                    stage=stage.spec.name,
                    source=name,
                    asked=stage.spec.weights[name] / total,
                    realised=drawn / stage.num_positions,
                    rows=drawn,
                    tokens=drawn * stage.spec.seq_len,
                    epochs=float(stage.epochs(name)),
                    **_held(stage, name, drawn),
                )
            )
    return tuple(shares)


def _source_facts(plan: Plan, name: str) -> SourceFacts:
    using = [stage for stage in plan.stages if name in stage.names]
    return SourceFacts(
        name=name,
        rows=using[-1].rows[name].num_rows if using else 0,
        drawn=sum(stage.draws[name] for stage in using),
        epochs=float(using[-1].epochs(name)) if using else 0.0,
        first_repeat=_first_repeat(using, name),
        fates=using[-1].rows[name].fates() if using else None,
    )


COUNTED_ROWS = 1 << 20
"""Up to so many rows of a stage are counted one by one; beyond, only what is not a whole epoch would be."""


def _held(stage: Stage, name: str, drawn: int) -> dict[str, Any]:
    """Return what the rows that a stage draws from a source hold."""
    index = stage.rows[name]
    if drawn > COUNTED_ROWS:
        fates = index.fates()
        scale = drawn / max(1, fates.rows)
        return _slots(
            drawn * index.seq_len, round(fates.trained * scale), round(fates.padding * scale), counted=False
        )
    trained = padding = 0
    line = stage.names.index(name)
    for begin in range(0, drawn, _BLOCK):
        numbers = np.arange(begin, min(begin + _BLOCK, drawn))
        positions = positions_of(line, numbers, stage.mixture.nodes, stage.mixture.leaf_parent)
        _, rows = rows_in_order(stage, positions)
        spans = index.spans(rows)
        used = _sums(spans.length, spans)
        crossing = bool(index.description.get("cross_document_labels", False))
        segments = (
            np.ones_like(spans.count) if crossing else spans.count - _sums(spans.joined.astype(np.int64), spans)
        )
        trained += int((used - segments).sum())
        padding += int(np.maximum(0, index.seq_len - used).sum())
    return _slots(drawn * index.seq_len, trained, padding, counted=True)


def _slots(slots: int, trained: int, padding: int, *, counted: bool) -> dict[str, Any]:
    return {
        "trained": trained,
        "unlabelled": slots - trained - padding,
        "padding": padding,
        "counted": counted,
    }


_BLOCK = 1 << 16


def _sums(values: npt.NDArray[np.int64], spans: Spans) -> npt.NDArray[np.int64]:
    """Add up the values of the spans of each row."""
    ends = np.concatenate([[0], np.cumsum(values)])
    sums: npt.NDArray[np.int64] = ends[spans.first + spans.count] - ends[spans.first]
    return sums


def _first_repeat(using: list[Stage], name: str) -> int | None:
    """Return the first step at which a row, or a token of one, is drawn that was drawn before."""
    for stage in using:
        earlier = max(0, stage.repeats_from[name] - stage.carry(name))
        if earlier < stage.draws[name]:
            line = stage.names.index(name)
            drawn = np.array([earlier])
            position = positions_of(line, drawn, stage.mixture.nodes, stage.mixture.leaf_parent)[0]
            return int(position) // stage.spec.global_batch_size + stage.spec.start_step
    return None
