"""Where a run stands: one small JSON record, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.errors import ResumeError, nearest

if TYPE_CHECKING:
    from tokenmill.loader.loader import RankSlice
    from tokenmill.plan.plan import Plan

STATE_VERSION = 1
_KEYS = ("version", "step", "fingerprint", "plan")
_MID_STEP_KEYS = ("batches", "micro_batch", "world_size")
_TOLD_KEYS = ("stage_idx", "stage_name", "live")
"""For people to read, and lanes of live text that this run has no more; a state goes by step and fingerprints."""
_NAME_LENGTH = 24

Explain = Callable[[str, int], str | None]
"""(digest of the plan that made a state, step) -> the first difference to this run's plan, if it is on record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The next batch of a rank."""

    step: int
    batch: int = 0
    """Micro-batches of the step that were already drawn."""

    @property
    def covered(self) -> int:
        """The step before which all batches must be those of the state: the next one, if this one has begun."""
        return self.step + (self.batch > 0)


def save_state(plan: Plan, position: Position, part: RankSlice) -> dict[str, int | str]:
    """Return the record for a position. Between steps it says nothing of ranks or micro-batches."""
    state: dict[str, int | str] = {
        "version": STATE_VERSION,
        "step": position.step,
        "fingerprint": plan.fingerprint_at(position.covered),
        "plan": plan.fingerprint[:16],
    }
    spec = plan.stage(min(position.step, plan.steps - 1)).spec
    state |= {"stage_idx": spec.number, "stage_name": spec.name[:_NAME_LENGTH]}
    if position.batch:
        state |= {"batches": position.batch, "micro_batch": part.micro_batch, "world_size": part.world_size}
    return state


def load_state(state: Mapping[str, Any], plan: Plan, part: RankSlice, explain: Explain | None = None) -> Position:
    """Return the position that a record stands for, or refuse it with the reason."""
    _check_shape(state)
    position = Position(step=int(state["step"]), batch=int(state.get("batches", 0)))
    step, batch = position.step, position.batch
    if position.covered > plan.steps:
        raise ResumeError(
            f"state: step must be at most run.steps {plan.steps}, got {step}; raise run.steps to go on"
        )
    if state["fingerprint"] != plan.fingerprint_at(position.covered):
        raise ResumeError(_refusal(state, position.covered, plan, explain))
    if batch:
        then = (state["world_size"], state["micro_batch"])
        if then != (part.world_size, part.micro_batch):
            raise ResumeError(
                f"state: was saved in the middle of step {step}, so world_size and micro_batch must stay "
                f"{then[0]} and {then[1]}, got {part.world_size} and {part.micro_batch}; "
                "resume with those, or from a state saved between two steps"
            )
        if batch >= part.batches(plan.stage(step)):
            raise ResumeError(
                f"state: batches must lie within step {step}, got {batch}; use a state that was not edited"
            )
    return position


def _check_shape(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise ResumeError(f"state: must be the dict that state_dict() gave, got {type(state).__name__}; pass that")
    for key in state:
        known = (*_KEYS, *_MID_STEP_KEYS, *_TOLD_KEYS)
        if key not in known:
            raise ResumeError(f"state: keys must be known, got {key!r}; {nearest(key, known)}")
    missing = [key for key in _KEYS if key not in state]
    missing += [key for key in _MID_STEP_KEYS if key not in state and "batches" in state]
    if missing:
        raise ResumeError(f"state: must have {', '.join(_KEYS)}, got none of {missing}; use a state of this loader")
    if state["version"] != STATE_VERSION:
        raise ResumeError(
            f"state: version must be {STATE_VERSION}, got {state['version']!r}; resume where it was saved"
        )
    for key in ("step", "batches", "micro_batch", "world_size"):
        value = state.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ResumeError(
                f"state: {key} must be a whole number, got {value!r}; use a state that was not edited"
            )


def _refusal(state: Mapping[str, Any], step: int, plan: Plan, explain: Explain | None) -> str:
    known = explain(str(state["plan"]), step) if explain else None
    difference = known or "not known here, as that plan was not recorded beside this run"
    return (
        f"state: batches before step {step} must be those of this run, but the state was made by plan "
        f"{str(state['fingerprint'])[:12]} and this run is {plan.fingerprint_at(step)[:12]}; "
        f"first difference: {difference}; resume with the config that made it, or start at step 0"
    )
