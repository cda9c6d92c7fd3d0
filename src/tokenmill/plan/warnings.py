"""What is legal in a plan, but seldom meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from tokenmill.plan.mixture import integer_weights

if TYPE_CHECKING:
    from tokenmill.plan.plan import Plan
    from tokenmill.plan.report_facts import PlanReport, SourceShare
    from tokenmill.plan.stages import Stage

MANY_EPOCHS = 4
"""Tokens that are repeated more often are worth less and less to a model."""
FEW_STEPS = 10
MUCH_PADDING = 0.01
FAR_OFF = 0.02
"""Of a share of tokens from that of rows."""


def warnings(plan: Plan, facts: PlanReport, weigh_by: Mapping[str, str]) -> list[str]:
    """Return what a user should look at, a sentence each: where: what is odd; the way out.

    `weigh_by` says of each stage what its weights are shares of, `rows` or `tokens`.
    """
    return [
        *_unused(plan, facts),
        *_epochs(facts),
        *_short(plan, facts),
        *_scales(plan),
        *_padding(plan, facts),
        *_token_shares(facts, weigh_by),
    ]


def _unused(plan: Plan, facts: PlanReport) -> Iterator[str]:
    used = {name for part in plan.stages for name in part.names}
    used |= {aside.source for aside in facts.quarantined if aside.whole}  # the config says why it is not used
    for name in plan.sources:
        if name not in used:
            yield f"source {name!r}: no stage uses it; give it a weight, or remove it from the run"


def _epochs(facts: PlanReport) -> Iterator[str]:
    for source in facts.sources:
        if source.epochs is not None and source.epochs > MANY_EPOCHS:
            stage = next(
                share.stage
                for share in facts.shares
                if share.source == source.name and (share.epochs or 0) > MANY_EPOCHS
            )
            yield (
                f"source {source.name!r}: it is read {source.epochs:.2f} times, more than {MANY_EPOCHS} times from "
                f'stage {stage!r} on; lower its weight, add documents, or set max_epochs with on_exhausted = "stop"'
            )


def _short(plan: Plan, facts: PlanReport) -> Iterator[str]:
    for stage in facts.stages:
        steps = stage.end_step - stage.start_step
        if steps < FEW_STEPS and len(facts.stages) > 1:
            yield (
                f"stage {stage.name!r}: it has only {_steps(steps)}; check its start_step and that of the stage "
                "after it"
            )
    ramps = {part.spec.number: part for part in plan.stages if part.spec.ramp}
    for part in ramps.values():
        assert part.spec.ramp is not None
        if part.spec.ramp.end - part.spec.ramp.begin < 2:
            yield (
                f"stage {part.spec.name!r}: a ramp of 1 step is a switch with one odd step; raise ramp_steps, or "
                "leave the ramp out"
            )


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


def _scales(plan: Plan) -> Iterator[str]:
    stages = [list(parts) for _, parts in groupby(plan.stages, key=lambda part: part.spec.number)]
    first = stages[0][0].spec
    if first.lr_scale != 1:
        yield (
            f"stage {first.name!r}: lr_scale {first.lr_scale:g} scales the run from its first step; set the "
            "learning rate of the trainer instead"
        )
    for before, after in pairwise(stages):
        old, new = before[-1].spec, after[0].spec
        if new.lr_scale != old.lr_scale and _draws_alike(before[-1], after[0]):
            yield (
                f"stage {new.name!r}: lr_scale goes from {old.lr_scale:g} to {new.lr_scale:g} and the data stays "
                "as it is; leave that to the schedule of the trainer, or change the data with it"
            )


def _draws_alike(before: Stage, after: Stage) -> bool:
    """Say whether a stage draws the same rows in the same shares as the one before."""
    old, new = before.spec, after.spec
    if after.spec.ramp or old.names != new.names:
        return False
    return (
        (old.seq_len, old.global_batch_size, old.seed, old.shuffle)
        == (new.seq_len, new.global_batch_size, new.seed, new.shuffle)
        and integer_weights(old.weights) == integer_weights(new.weights)
        and all(dict(old.rows[name].description) == dict(new.rows[name].description) for name in new.names)
    )


def _padding(plan: Plan, facts: PlanReport) -> Iterator[str]:
    for stage, shares in _by_stage(facts):
        slots, padding = sum(share.tokens for share in shares), sum(share.padding for share in shares)
        if padding > MUCH_PADDING * slots:
            worst = max(shares, key=lambda share: share.padding)
            part = next(part for part in plan.stages if part.spec.name == stage and worst.source in part.names)
            yield (
                f"stage {stage!r}: {padding / slots:.1%} of its input slots are padding, most of it in "
                f"{worst.source!r}; {_less_padding(str(part.rows[worst.source].description.get('packing')))}"
            )


def _less_padding(packing: str) -> str:
    if packing == "padded":
        return 'packing = "best_fit" puts several documents into a row'
    if packing == "best_fit":
        return 'packing = "concat" or "bos_best_fit" has none, a longer seq_len less'
    return "shorten seq_len"


def _token_shares(facts: PlanReport, weigh_by: Mapping[str, str]) -> Iterator[str]:
    for stage, shares in _by_stage(facts):
        worst = max(shares, key=lambda share: abs(share.realised_tokens - share.asked))
        if weigh_by.get(stage) == "rows" and abs(worst.realised_tokens - worst.asked) > FAR_OFF:
            yield (
                f"stage {stage!r}: {worst.source!r} has {worst.asked:.1%} of the rows but "
                f'{worst.realised_tokens:.1%} of the tokens, as rows are not equally full; weigh_by = "tokens" '
                "makes weights shares of tokens"
            )


def _by_stage(facts: PlanReport) -> Iterator[tuple[str, Sequence[SourceShare]]]:
    for stage, shares in groupby(facts.shares, key=lambda share: share.stage):
        found = list(shares)
        if sum(share.tokens for share in found):
            yield stage, found
