"""Log of a plan: a line per stage when an iteration starts, and a line when a stage begins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import groupby

from tokenmill.plan.plan import Plan
from tokenmill.plan.stages import Stage, StageSpec

logger = logging.getLogger("tokenmill")


def announce_plan(plan: Plan, step: int) -> None:
    """Log the stages of a plan and the next step."""
    if not logger.isEnabledFor(logging.INFO):
        return
    logger.info("plan %s: %s steps, now at step %s", plan.fingerprint[:16], f"{plan.steps:,}", f"{step:,}")
    for line in _stage_lines(plan):
        logger.info("%s", line)


def announce_stage(plan: Plan, before: int, after: int) -> None:
    """Log the steps skipped between two steps, and the stage that begins if it is another one."""
    if not logger.isEnabledFor(logging.INFO):
        return
    old, new = plan.stage(before).spec, plan.stage(after).spec
    for stage in plan.stages:
        if not stage.is_trained and before < stage.spec.start_step <= after:
            logger.info(
                "steps %s:%s skipped: %s",
                f"{stage.spec.start_step:,}",
                f"{stage.end_step:,}",
                stage.spec.skipped or "no reason given",
            )
    if old.number != new.number:
        shown, changes = _facts(plan.stage(after)), ", ".join(_changes(old, new)) or "none"
        logger.info("step %s: stage %r -> %r: %s; changes: %s", f"{after:,}", old.name, new.name, shown, changes)


def _stage_lines(plan: Plan) -> Iterator[str]:
    """Yield a line for each stage: its steps, batch, sequence length and weights."""
    for number, parts in groupby(plan.stages, key=lambda stage: stage.spec.number):
        stages = list(parts)
        first, last = stages[0], stages[-1]
        rows = sum(stage.num_positions for stage in stages if stage.is_trained)
        tokens = rows * last.row_slots
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


def _changes(old: StageSpec, new: StageSpec) -> Iterator[str]:
    """Yield the differences of two stages that change batches or that trainers use."""
    names = [", ".join(sorted(spec.weights)) for spec in (old, new)]
    if names[0] != names[1]:
        yield f"sources ({names[0]} -> {names[1]})"
    shares = [
        {name: weight / sum(spec.weights.values()) for name, weight in spec.weights.items()} for spec in (old, new)
    ]
    if shares[0] != shares[1]:
        yield "weights"
    values = {
        "batch": (f"{old.global_batch_size:,}", f"{new.global_batch_size:,}"),
        "seq_len": (f"{old.seq_len:,}", f"{new.seq_len:,}"),
        "packing": (_packing(old), _packing(new)),
        "shuffle": (old.shuffle.mode, new.shuffle.mode),
        "seed": (str(old.seed), str(new.seed)),
        "lr_scale": (f"{old.lr_scale:g}", f"{new.lr_scale:g}"),
    }
    yield from (f"{name} {before} -> {after}" for name, (before, after) in values.items() if before != after)


def _packing(spec: StageSpec) -> str:
    return ", ".join(sorted({str(rows.description.get("packing")) for rows in spec.rows.values()}))
