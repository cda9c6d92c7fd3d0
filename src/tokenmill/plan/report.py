"""What a plan will do, counted before its first step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.plan.mixture import positions_of
from tokenmill.plan.order import rows_in_order
from tokenmill.plan.rows import NOTHING, Held

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.plan.plan import Plan
    from tokenmill.plan.rows import RowIndex
    from tokenmill.plan.stages import Stage
    from tokenmill.types import Fates


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
    """Input slots of the rows, over all their arrays: trained + unlabelled + padding."""
    epochs: float
    """How often the source has been read by the end of the stage."""
    trained: int
    """Labels that the rows have, less those that a mask leaves out."""
    unlabelled: int
    """Tokens whose next one is no label: the last of a document, or of a row that is not full, and one before a
    token that a mask leaves out. Of pairs and groups: tokens that are not trained on."""
    padding: int
    """Input slots of the rows that hold no token."""
    counted: bool
    """Whether the three above are exact, or taken in part from the mean of an epoch."""


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
    """Input slots of its rows, over all their arrays."""


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
    """Count what the plan draws: whole epochs at once, so that a run of any length is reported soon.

    Reads no token, but masks where there are any.
    """
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
        tokens=stage.num_positions * _row_slots(stage),
    )


def _row_slots(stage: Stage) -> int:
    """Return how many input slots a row has in the batches of a stage: its sources share one shape."""
    return max(index.row_slots for index in stage.rows.values())


def _shares(plan: Plan) -> tuple[SourceShare, ...]:
    shares = []
    for stage in plan.stages:
        total = sum(stage.spec.weights.values())
        for name, drawn in stage.draws.items():
            held, counted = _held(stage, name)
            slots = drawn * _row_slots(stage)
            shares.append(
                SourceShare(
                    stage=stage.spec.name,
                    source=name,
                    asked=stage.spec.weights[name] / total,
                    realised=drawn / stage.num_positions,
                    rows=drawn,
                    tokens=slots,
                    epochs=float(stage.epochs(name)),
                    trained=held.trained,
                    unlabelled=held.tokens - held.trained,
                    padding=slots - held.tokens,
                    counted=counted,
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
        fates=_fates(using[-1], name) if using else None,
    )


def _fates(stage: Stage, name: str) -> Fates:
    """Return the fates of a source, padded to the shape that the sources of a stage share."""
    index = stage.rows[name]
    fates = index.fates()
    return replace(fates, padding=fates.padding + fates.rows * (_row_slots(stage) - index.row_slots))


COUNTED_ROWS = 1 << 20
"""Of the epochs that a stage does not draw whole, up to so many rows are counted; for more, the mean must do."""
_BLOCK = 1 << 16


def _held(stage: Stage, name: str) -> tuple[Held, bool]:
    """Return what the rows that a stage draws from a source hold, and whether all of it was counted."""
    index = stage.rows[name]
    epochs, parts = _epochs(stage, name)
    rows = sum(len(part) for part in parts)
    if rows > COUNTED_ROWS:
        return _mean(index, epochs * index.num_rows + rows), False
    held = _mean(index, epochs * index.num_rows) if epochs else NOTHING
    # In ascending order, so that neighbours on disk are read together.
    drawn = np.sort(np.concatenate([_rows(stage, name, part) for part in parts]))
    for begin in range(0, rows, _BLOCK):
        held += index.held(drawn[begin : begin + _BLOCK])
    return held, True


def _epochs(stage: Stage, name: str) -> tuple[int, tuple[range, range]]:
    """Return how many whole epochs of a source a stage draws, and its draws before and after them."""
    carry, drawn, index = stage.carry(name), stage.draws[name], stage.rows[name]
    # Draws are counted from the first of the stage, epochs from the end of the rest before them.
    first = index.num_rest - carry
    first += -(min(0, first) // index.num_rows) * index.num_rows
    epochs = max(0, (drawn - first) // index.num_rows)
    begin = min(first, drawn)
    return epochs, (range(begin), range(begin + epochs * index.num_rows, drawn))


def _mean(index: RowIndex, rows: int) -> Held:
    """Return what so many rows hold if they are like those of an epoch: exact for whole epochs."""
    fates = index.fates()
    tokens = fates.rows * index.row_slots - fates.padding
    return Held(tokens=rows * tokens // fates.rows, trained=rows * fates.trained // fates.rows)


def _rows(stage: Stage, name: str, draws: range) -> npt.NDArray[np.int64]:
    """Return the rows of some draws of a source, counted from the first of the stage."""
    line = stage.names.index(name)
    numbers = np.arange(draws.start, draws.stop)
    positions = positions_of(line, numbers, stage.mixture.nodes, stage.mixture.leaf_parent)
    return rows_in_order(stage, positions)[1]


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
