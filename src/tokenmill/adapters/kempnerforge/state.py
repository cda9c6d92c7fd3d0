"""Which states a loader can go on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.adapters.kempnerforge.steps import StepShape
from tokenmill.checks import MAX_NUMBER
from tokenmill.errors import ResumeError

STATE_VERSION = 2
EDITED = "use a state that was not edited"
_KEYS = (
    *("version", "epoch", "batches_yielded", "sampler"),
    *("position", "begin", "batches", "batch_size", "grad_accum_steps", "phases"),
)


def check_mapping(state: object, keys: Sequence[str] = ()) -> None:
    """Refuse what is no dict, or has not all of some keys."""
    if not isinstance(state, Mapping):
        raise ResumeError(f"state: must be the dict that state_dict() gave, got {type(state).__name__}; pass that")
    missing = [key for key in keys if key not in state]
    if missing:
        raise ResumeError(
            f"state: must have {', '.join(keys)}, got none of {missing}; use a state of such a loader: the order "
            "of KempnerForge's own is another"
        )


def read_count(state: Mapping[str, Any], key: str, *, least: int = 0, default: int | None = None) -> int:
    """Return a whole number of a state, or refuse what is none or beyond all reason."""
    value = state.get(key, default)
    if type(value) is not int or not least <= value <= MAX_NUMBER:
        raise ResumeError(
            f"state: {key} must be a whole number within {least} and {MAX_NUMBER}, got {value!r}; {EDITED}"
        )
    return value


def check_state(state: Mapping[str, Any], fingerprint: str | None) -> None:
    """Refuse what is no state of such a loader, or one of other samples."""
    check_mapping(state)
    if state.get("version", STATE_VERSION) != STATE_VERSION:
        raise ResumeError(
            f"state: version must be {STATE_VERSION}, got {state['version']!r}; resume where it was saved"
        )
    check_mapping(state, _KEYS)
    for key in ("epoch", "batches_yielded", "position", "begin", "batches"):
        read_count(state, key)
    if not isinstance(state["sampler"], Mapping) or "num_replicas" not in state["sampler"]:
        raise ResumeError(f"state: sampler must be the state of a sampler, got {state['sampler']!r}; {EDITED}")
    if state.get("dataset") != fingerprint:
        said, own = (
            value[:12] if isinstance(value, str) else value for value in (state.get("dataset"), fingerprint)
        )
        raise ResumeError(
            f"state: the samples must be those of dataset {said!r}, got {own!r}; put the files back as they were, "
            "or start anew"
        )


def shape_of(state: Mapping[str, Any], ranks: Mapping[str, Any], key: str) -> StepShape:
    """Return how batches made up steps where a state was saved; `key` of `ranks` says the number of ranks."""
    accumulated = state["grad_accum_steps"]
    return StepShape(
        batch_size=read_count(state, "batch_size", least=1),
        num_replicas=read_count(ranks, key, least=1),
        grad_accum_steps=None if accumulated is None else read_count(state, "grad_accum_steps", least=1),
    )


def batches_of(batches: int, made: StepShape, here: StepShape, *, inside: bool = False) -> int:
    """Return how many batches were handed out, by the batches that a step has here.

    In the middle of a step, be it by this count or because a state is said to be `inside` of one, steps must be
    what they were.
    """
    if (made.grad_accum_steps is None) != (here.grad_accum_steps is None):
        raise ResumeError(
            f"state: grad_accum_steps must be given or left out as when it was saved, {made.grad_accum_steps}, "
            f"got {here.grad_accum_steps}; without it the loader does not know the step"
        )
    steps, begun = divmod(batches, made.batches)
    if (begun or inside) and (made.batches, made.samples) != (here.batches, here.samples):
        raise ResumeError(
            f"state: was saved in the middle of step {steps}, so it must go on with {made.batches} batches a step "
            f"of {made.samples} samples over all ranks, got {here.batches} of {here.samples}; resume with those, "
            "or from a state saved between two steps"
        )
    return steps * here.batches + begun


def check_place(state: Mapping[str, Any], made: StepShape, bounds: tuple[int, int]) -> None:
    """Refuse a place that is outside of its epoch, or that its batches do not lead to."""
    position, begin, yielded = state["position"], state["begin"], state["batches_yielded"]
    if begin + yielded * made.samples != position or (state["batches"] - yielded) % made.batches:
        raise ResumeError(
            f"state: position must be {yielded} batches of {made.samples} samples behind {begin}, and batches as "
            f"far in a step of {made.batches}, got {position} and {state['batches']}; {EDITED}"
        )
    if not bounds[0] <= begin <= position <= bounds[1]:
        raise ResumeError(
            f"state: position must lie within {bounds[0]} and {bounds[1]}, which epoch {state['epoch']} has, got "
            f"{position}; {EDITED}"
        )
