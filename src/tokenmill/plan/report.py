"""What a plan will do, counted before its first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING

from tokenmill.plan.exhaust import room
from tokenmill.plan.mixture import exact_weight
from tokenmill.plan.report_count import held_rows, most_counted, step_of
from tokenmill.plan.report_facts import PlanReport, Quarantined, SourceFacts, SourceShare, StageFacts
from tokenmill.plan.rows import NOTHING, Held

if TYPE_CHECKING:
    from tokenmill.plan.plan import Plan
    from tokenmill.plan.rows import RowIndex
    from tokenmill.plan.stages import Stage
    from tokenmill.types import Fates

__all__ = ["PlanReport", "Quarantined", "SourceFacts", "SourceShare", "StageFacts", "report"]


def report(
    plan: Plan, *, stops: Mapping[str, float] | None = None, quarantined: Sequence[Quarantined] = ()
) -> PlanReport:
    """Count what the plan draws: whole epochs at once, so that a run of any length is reported soon.

    Reads no token, but masks where there are any. `stops` are the sources that leave the mixture, with how often
    they are read before; a plan does not know them, nor how large the documents are that were put aside.
    """
    stages = [list(parts) for _, parts in groupby(plan.stages, key=lambda part: part.spec.number)]
    facts = tuple(_stage_facts(parts) for parts in stages)
    return PlanReport(
        fingerprint=plan.fingerprint,
        steps=plan.steps,
        rows=sum(stage.rows for stage in facts),
        tokens=sum(stage.tokens for stage in facts),
        skipped_steps=sum(stage.skipped_steps for stage in facts),
        skipped_rows=sum(stage.skipped_rows for stage in facts),
        skipped_tokens=sum(stage.skipped_tokens for stage in facts),
        stages=facts,
        shares=tuple(
            share for number, parts in enumerate(stages) for share in _shares(parts, most_counted(stages, number))
        ),
        sources=tuple(_source_facts(plan, name, stops or {}) for name in plan.sources),
        quarantined=tuple(quarantined),
    )


def _stage_facts(parts: Sequence[Stage]) -> StageFacts:
    trained, skipped = _split(parts)
    spec = parts[0].spec
    return StageFacts(
        name=spec.name,
        start_step=spec.start_step,
        end_step=parts[-1].end_step,
        steps=sum(part.num_steps for part in trained),
        skipped_steps=sum(part.num_steps for part in skipped),
        global_batch_size=spec.global_batch_size,
        seq_len=spec.seq_len,
        lr_scale=spec.lr_scale,
        ramp_end=next((part.spec.ramp.end for part in parts if part.spec.ramp), None),
        rows=sum(part.num_positions for part in trained),
        tokens=sum(part.num_positions * _row_slots(part) for part in trained),
        skipped_rows=sum(part.num_positions for part in skipped),
        skipped_tokens=sum(part.num_positions * _row_slots(part) for part in skipped),
    )


def _split(parts: Sequence[Stage]) -> tuple[list[Stage], list[Stage]]:
    """Return the parts that are trained on, and those that are skipped."""
    return (
        [part for part in parts if part.spec.skipped is None],
        [part for part in parts if part.spec.skipped is not None],
    )


def _row_slots(part: Stage) -> int:
    """Return how many input slots a row has in the batches of a part: its sources share one shape."""
    return max(index.row_slots for index in part.rows.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Drawn:
    """What the parts of a stage draw from a source, added up."""

    asked: Fraction
    """Rows."""
    asked_tokens: Fraction
    rows: int
    slots: int
    held: Held
    counted: bool


def _drawn(parts: Sequence[Stage], name: str, most: int) -> _Drawn:
    held, counted = NOTHING, True
    for part in parts:
        more, exact = held_rows(part, name, most)
        held, counted = held + more, counted and exact
    asked = [(part.num_positions * part.asked()[name], part.rows[name]) for part in parts]
    return _Drawn(
        asked=sum((rows for rows, _ in asked), Fraction(0)),
        asked_tokens=sum((rows * _tokens_of_a_row(index) for rows, index in asked), Fraction(0)),
        rows=sum(part.draws[name] for part in parts),
        slots=sum(part.draws[name] * _row_slots(part) for part in parts),
        held=held,
        counted=counted,
    )


def _tokens_of_a_row(index: RowIndex) -> Fraction:
    fates = index.fates()
    return Fraction(fates.rows * index.row_slots - fates.padding, fates.rows)


def _shares(parts: Sequence[Stage], most: int) -> list[SourceShare]:
    names = sorted({name for part in parts for name in part.names})
    using = {name: [part for part in parts if name in part.names] for name in names}
    trained, skipped = _split(parts)
    drawn = {name: _drawn([part for part in trained if name in part.names], name, most) for name in names}
    rows, wanted, held = (
        sum(part.num_positions for part in trained),
        sum(one.asked_tokens for one in drawn.values()),
        sum(one.held.tokens for one in drawn.values()),
    )
    return [
        SourceShare(
            stage=parts[0].spec.name,
            source=name,
            asked=float(one.asked / rows) if rows else 0.0,
            realised=one.rows / rows if rows else 0.0,
            asked_tokens=float(one.asked_tokens / wanted) if wanted else 0.0,
            realised_tokens=one.held.tokens / held if held else 0.0,
            rows=one.rows,
            tokens=one.slots,
            epochs=None if _is_live(using[name][-1], name) else float(using[name][-1].epochs(name)),
            trained=one.held.trained,
            unlabelled=one.held.tokens - one.held.trained,
            padding=one.slots - one.held.tokens,
            counted=one.counted,
            dropped=dict(using[name][-1].rows[name].fates().dropped),
            skipped_rows=sum(part.draws[name] for part in skipped if name in part.names),
            skipped_tokens=sum(part.draws[name] * _row_slots(part) for part in skipped if name in part.names),
        )
        for name, one in drawn.items()
    ]


def _source_facts(plan: Plan, name: str, stops: Mapping[str, float]) -> SourceFacts:
    using = [part for part in plan.stages if name in part.names]
    live = bool(using) and _is_live(using[-1], name)
    return SourceFacts(
        name=name,
        rows=None if live else using[-1].rows[name].num_rows if using else 0,
        lanes=int(using[-1].rows[name].description["lanes"]) if live else None,
        drawn=sum(part.draws[name] for part in using),
        skipped=sum(part.draws[name] for part in _split(using)[1]),
        epochs=None if live else float(using[-1].epochs(name)) if using else 0.0,
        first_repeat=None if live else _first_repeat(using, name),
        gone_from=_gone_from(plan, using, name, exact_weight(stops[name])) if name in stops else None,
        fates=_fates(using[-1], name) if using and not live else None,
    )


def _is_live(part: Stage, name: str) -> bool:
    """Say whether a source is live text, of which nothing is counted before it is read."""
    return "live" in part.rows[name].description


def _fates(part: Stage, name: str) -> Fates:
    """Return the fates of a source, padded to the shape that the sources of a stage share."""
    index = part.rows[name]
    fates = index.fates()
    return replace(fates, padding=fates.padding + fates.rows * (_row_slots(part) - index.row_slots))


def _first_repeat(using: Sequence[Stage], name: str) -> int | None:
    """Return the first step at which a row, or a token of one, is drawn that was drawn before."""
    for part in using:
        earlier = max(0, part.repeats_from[name] - part.carry(name))
        if earlier < part.draws[name]:
            return step_of(part, name, earlier)
    return None


def _gone_from(plan: Plan, using: Sequence[Stage], name: str, limit: Fraction) -> int | None:
    """Return the step after the one that draws the last row that a source may give, if the run goes on then."""
    drawing = [part for part in using if part.draws[name]]
    if not drawing or room(drawing[-1], name, limit) > drawing[-1].draws[name]:
        return None
    step = step_of(drawing[-1], name, drawing[-1].draws[name] - 1) + 1
    return step if step < plan.steps else None
