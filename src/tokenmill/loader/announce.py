"""What is logged of a plan: a line for each stage when an iteration starts, and one when a stage begins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.plan.plan import Plan
    from tokenmill.plan.stages import Stage

logger = logging.getLogger("tokenmill")


def announce_plan(plan: Plan, step: int) -> None:
    """Log the stages of a plan, and where the run stands."""
    if not logger.isEnabledFor(logging.INFO):
        return
    logger.info("plan %s: %s steps, now at step %s", plan.fingerprint[:16], f"{plan.steps:,}", f"{step:,}")
    for line in stage_lines(plan):
        logger.info("%s", line)


def announce_stage(plan: Plan, before: int, after: int) -> None:
    """Log that a stage has begun, if the steps belong to different ones, or that steps were skipped."""
    if not logger.isEnabledFor(logging.INFO):
        return
    old, new = plan.stage(before).spec, plan.stage(after).spec
    for stage in plan.stages:
        if stage.spec.skipped is not None and before < stage.spec.start_step <= after:
            logger.info(
                "steps %s:%s skipped: %s",
                f"{stage.spec.start_step:,}",
                f"{stage.end_step:,}",
                stage.spec.skipped or "no reason given",
            )
    if old.number != new.number:
        shown = _facts(plan.stage(after))
        logger.info("step %s: stage %r -> %r: %s", f"{after:,}", old.name, new.name, shown)


def stage_lines(plan: Plan) -> Iterator[str]:
    """Yield a line for each stage: its steps, batch, sequence length and weights."""
    for number, parts in groupby(plan.stages, key=lambda stage: stage.spec.number):
        stages = list(parts)
        first, last = stages[0], stages[-1]
        rows = sum(stage.num_positions for stage in stages if stage.spec.skipped is None)
        tokens = rows * max(index.row_slots for index in last.rows.values())
        yield (
            f"stage {number} {first.spec.name!r}: steps {first.spec.start_step:,}:{last.end_step:,}, "
            f"{tokens:,} tokens, {_facts(last)}"
        )


def _facts(stage: Stage) -> str:
    spec = stage.spec
    total = float(sum(spec.weights.values()))
    shares = ", ".join(f"{name} {weight / total:.1%}" for name, weight in sorted(spec.weights.items()))
    scale = f", lr_scale {spec.lr_scale:g}" if spec.lr_scale != 1 else ""
    ramp = f" by a {spec.ramp.shape} ramp until step {spec.ramp.end:,}" if spec.ramp else ""
    return f"batch {spec.global_batch_size:,}, seq_len {spec.seq_len:,}, {shares}{ramp}{scale}"
