"""What KempnerForge's [data] says, with its names and defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.adapters import distributed
from tokenmill.config.dialects.kempnerforge import DataTable, TrainingPhase
from tokenmill.errors import ConfigError, ResumeError, nearest
from tokenmill.tables import MAX_NUMBER


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(DataTable):
    """Where data comes from and how it is loaded. What is not said is as there."""

    dtype: str | None = None
    """Of files without a header, such as .bin: it is not guessed."""
    vocab_size: int | None = None
    """All ids of token files must be below; may prove the dtype of files without a header."""
    eos_token_id: int | None = None
    """Ends the documents of token files; None: the EOS of the tokenizer."""

    def __post_init__(self) -> None:
        DataTable.__post_init__(self)
        names = self.dataset_names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"data: names of datasets must differ, got {twice[0]!r} twice; rename one")
        for phase in self.all_phases:
            _check_names(f"phase at step {phase.start_step}", phase.dataset_weights, names)
        _check_names("anneal_weights", self.anneal_weights, names)

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """What phases and metrics call the sources that are mixed."""
        return tuple(source.called for source in self.datasets)

    def phase_at(self, step: int) -> TrainingPhase | None:
        """Return the phase that a step belongs to; None before the first."""
        begun = [phase for phase in self.all_phases if phase.start_step <= step]
        return begun[-1] if begun else None

    def lr_scale_at(self, step: int) -> float:
        """Return what the learning rate of a step is multiplied by."""
        phase = self.phase_at(step)
        return 1.0 if phase is None else phase.lr_scale

    def weights_at(self, step: int) -> list[float]:
        """Return the weights of the sources at a step, in their order."""
        phase = self.phase_at(step)
        said = {} if phase is None else phase.dataset_weights
        return [said.get(source.called, source.weight) for source in self.datasets]


def _check_names(where: str, weights: Mapping[str, float], names: Sequence[str]) -> None:
    for name in weights:
        if name not in names:
            way_out = nearest(name, names) if names else "add datasets, or leave the weights out"
            raise ConfigError(f"{where}: weights must name datasets, got {name!r}; {way_out}")


# How batches make up steps, and what phases say of a step.


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """What a batch and a step have."""

    batch_size: int
    """Samples of a batch, of one rank."""
    num_replicas: int
    grad_accum_steps: int | None
    """Batches of a step; None: nobody said it, and a batch counts as one."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batches < 1:
            raise ConfigError(
                f"loader: batch_size and grad_accum_steps must be at least 1, got {self.batch_size} and "
                f"{self.grad_accum_steps}; raise them"
            )

    @property
    def batches(self) -> int:
        """Batches of a step."""
        return 1 if self.grad_accum_steps is None else self.grad_accum_steps

    @property
    def samples(self) -> int:
        """Samples of a batch, of all ranks."""
        return self.batch_size * self.num_replicas

    @property
    def round(self) -> int:
        """Samples of a step, of all ranks."""
        return self.samples * self.batches

    def lr_scale(self, config: DataConfig, step: int) -> float:
        """Return what the phases of a config multiply the learning rate of a step by."""
        if self.grad_accum_steps is None and config.all_phases:
            raise ConfigError(
                "lr_scale: grad_accum_steps must be given to know the step of a batch, got none; give it, or ask "
                "config.lr_scale_at(step)"
            )
        return config.lr_scale_at(step)


# Which states a loader can go on from.

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


# Which of how many data-parallel ranks this process is.


def find_rank(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Return rank and number of ranks: as given, else as torch.distributed or the launcher says, else 0 of 1."""
    if rank is None or num_replicas is None:
        found = distributed.find_rank()
        rank = found[0] if rank is None else rank
        num_replicas = found[1] if num_replicas is None else num_replicas
    if not 0 <= rank < num_replicas:
        raise ConfigError(
            f"rank: must lie within 0 and the {num_replicas} ranks, got {rank}; give both rank and number of ranks"
        )
    return rank, num_replicas
