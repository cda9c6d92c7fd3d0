"""What KempnerForge's [data] says, with its names and defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tokenmill.errors import ConfigError, nearest


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
