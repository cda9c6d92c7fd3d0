"""What KempnerForge's [data] says, with its names and defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tokenmill.adapters import distributed
from tokenmill.errors import ConfigError, ResumeError, nearest
from tokenmill.tables import MAX_NUMBER


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSource:
    """One of several sources that are mixed: a folder of token files, or a dataset of Hugging Face."""

    path: str = ""
    weight: float = 1.0
    """Share of the samples, relative to the other sources."""
    name: str = ""
    """What phases and metrics call it; empty: its path, or its name at Hugging Face."""
    hf_name: str = ""
    hf_config: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ConfigError(
                f"dataset {self.called!r}: weight must be positive, got {self.weight}; leave it out of the list"
            )
        if bool(self.path) == bool(self.hf_name):
            got = "both" if self.path else "none"
            raise ConfigError(f"dataset {self.name!r}: must have either path or hf_name, got {got}; keep one")

    @property
    def called(self) -> str:
        """What phases and metrics call it."""
        return self.name or self.path or self.hf_name


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPhase:
    """Other weights, and another scale of the learning rate, from a step on."""

    start_step: int = 0
    """First step of the phase, inclusive."""
    dataset_weights: Mapping[str, float] = field(default_factory=dict)
    """By the name of a source; one that is not named keeps the weight of its own, and 0 leaves it out."""
    lr_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.start_step < 0:
            raise ConfigError(f"phase: start_step must be at least 0, got {self.start_step}; raise it")
        if not 0 < self.lr_scale < float("inf"):
            raise ConfigError(f"phase: lr_scale must be positive, got {self.lr_scale}; leave it out for 1")
        bad = {name: weight for name, weight in self.dataset_weights.items() if not 0 <= weight < float("inf")}
        if bad:
            raise ConfigError(f"phase: dataset_weights must be at least 0 and finite, got {bad}; raise them")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where data comes from and how it is loaded. What is not said is as there."""

    dataset_path: str = ""
    """Folder of token files."""
    file_pattern: str = "*.npy"
    tokenizer_path: str = ""
    """A tokenizer.json or a folder that holds one; nothing is downloaded."""
    num_workers: int = 4
    """Processes that read samples. It changes no batch; text that is streamed is read by threads instead."""
    pin_memory: bool = True
    """Has no effect where there is no accelerator."""
    prefetch_factor: int = 2
    pack_sequences: bool = False
    """Whether documents are told apart: -100 at labels that cross them, and `doc_ids`."""
    hf_dataset_name: str | None = None
    hf_dataset_config: str | None = None
    hf_dataset_split: str = "train"
    hf_dataset_text_field: str = "text"
    hf_streaming: bool = False
    datasets: Sequence[DatasetSource] = ()
    """Sources that are mixed; they go before `dataset_path` and `hf_dataset_name`."""
    mix_temperature: float = 1.0
    """Weights are raised to 1 / temperature: above 1 they are more alike."""
    phases: Sequence[TrainingPhase] = ()
    anneal_start_step: int = 0
    """First step of the annealing, which is a single phase; 0: there is none."""
    anneal_weights: Mapping[str, float] = field(default_factory=dict)
    dtype: str | None = None
    """Of files without a header, such as .bin: it is not guessed."""
    vocab_size: int | None = None
    """All ids of token files must be below; may prove the dtype of files without a header."""
    eos_token_id: int | None = None
    """Ends the documents of token files; None: the EOS of the tokenizer."""

    def __post_init__(self) -> None:
        if self.num_workers < 0 or self.prefetch_factor < 1:
            raise ConfigError(
                "data: num_workers must be at least 0 and prefetch_factor at least 1, got "
                f"{self.num_workers} and {self.prefetch_factor}; raise them"
            )
        if not 0 < self.mix_temperature < float("inf"):
            raise ConfigError(f"data: mix_temperature must be positive, got {self.mix_temperature}; use 1")
        if self.anneal_start_step < 0:
            raise ConfigError(f"data: anneal_start_step must be at least 0, got {self.anneal_start_step}; raise it")
        if self.phases and self.anneal_start_step:
            raise ConfigError(
                f"data: phases and anneal_start_step must not be given both, got {len(self.phases)} phases and "
                f"step {self.anneal_start_step}; make the annealing one of the phases"
            )
        for before, after in pairwise(phase.start_step for phase in self.phases):
            if after <= before:
                raise ConfigError(f"data: phases must rise, got start_step {after} after {before}; sort them")
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

    @property
    def all_phases(self) -> tuple[TrainingPhase, ...]:
        """The phases, or the annealing as one."""
        if self.anneal_start_step:
            return (TrainingPhase(start_step=self.anneal_start_step, dataset_weights=self.anneal_weights),)
        return tuple(self.phases)

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
