"""Which states a loader can go on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.errors import ResumeError

STATE_VERSION = 1
_KEYS = (
    *("version", "epoch", "batches_yielded", "sampler"),
    *("position", "batches", "batch_size", "grad_accum_steps", "phases"),
)


def check_state(state: Mapping[str, Any], fingerprint: str | None) -> None:
    """Refuse what is no state of such a loader, or one of other samples."""
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise ResumeError(
            f"state: must have {', '.join(_KEYS)}, got none of {missing}; use a state of this loader: the order of "
            "KempnerForge's own is another"
        )
    if state["version"] != STATE_VERSION:
        raise ResumeError(
            f"state: version must be {STATE_VERSION}, got {state['version']!r}; resume where it was saved"
        )
    for key in ("epoch", "batches_yielded", "position", "batches"):
        if isinstance(state[key], bool) or not isinstance(state[key], int) or state[key] < 0:
            raise ResumeError(
                f"state: {key} must be a whole number, got {state[key]!r}; use a state that was not edited"
            )
    if not isinstance(state["sampler"], Mapping) or "num_replicas" not in state["sampler"]:
        raise ResumeError(
            f"state: sampler must be the state of a sampler, got {state['sampler']!r}; use a state that was not "
            "edited"
        )
    if state.get("dataset", fingerprint) != fingerprint:
        raise ResumeError(
            f"state: the samples must be those of dataset {state['dataset'][:12]}, got "
            f"{(fingerprint or 'none')[:12]}; put the files back as they were, or start anew"
        )


def batches_of(state: Mapping[str, Any], grad_accum_steps: int | None, samples: int) -> int:
    """Return the batches of the run that were handed out, by a loader's own count of batches a step.

    `samples` is what a batch has over all ranks. In the middle of a step neither may be another than it was.
    """
    then = state["grad_accum_steps"]
    if (then is None) != (grad_accum_steps is None):
        raise ResumeError(
            f"state: grad_accum_steps must be given or left out as when it was saved, {then}, "
            f"got {grad_accum_steps}; without it the loader does not know the step"
        )
    made = (int(then or 1), int(state["batch_size"]) * int(state["sampler"]["num_replicas"]))
    here = (grad_accum_steps or 1, samples)
    steps, begun = divmod(int(state["batches"]), made[0])
    if begun and made != here:
        raise ResumeError(
            f"state: was saved in the middle of step {steps}, so it must go on with {made[0]} batches a step of "
            f"{made[1]} samples over all ranks, got {here[0]} of {here[1]}; resume with those, or from a state "
            "saved between two steps"
        )
    return steps * here[0] + begun
