"""KempnerForge's [data] with its names, defaults and rules, and a config of it in native tables."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from math import inf
from typing import Any

from tokenmill.config.dialects import (
    DEFAULT_FIELD,
    DEFAULT_SPLIT,
    OURS,
    Translator,
    free_name,
    hub_name,
    plain_name,
    read_known,
    table_of,
    text_source,
)
from tokenmill.errors import ConfigError, nearest
from tokenmill.tables import Number, Positive, Seed, check_keys, read_table


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """One of several sources that are mixed: a folder of token files, or a dataset of Hugging Face."""

    path: str = ""
    weight: Number = 1.0
    """Share of the samples, relative to the other sources."""
    name: str = ""
    """What phases and metrics call it; empty: its path, or its name at Hugging Face."""
    hf_name: str = ""
    hf_config: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.weight < inf:
            raise ConfigError(
                f"dataset {self.called!r}: weight must be positive, got {self.weight}; leave it out of the list"
            )

    @property
    def called(self) -> str:
        """What phases and metrics call it."""
        return self.name or self.path or self.hf_name


@dataclass(frozen=True, slots=True)
class TrainingPhase:
    """Other weights, and another scale of the learning rate, from a step on."""

    start_step: int = 0
    """First step of the phase, inclusive."""
    dataset_weights: Mapping[str, Number] = field(default_factory=dict)
    """By the name of a source; one that is not named keeps its own weight, and 0 leaves it out."""
    lr_scale: Number = 1.0

    def __post_init__(self) -> None:
        where = f"phase at step {self.start_step}"
        if self.start_step < 0:
            raise ConfigError(f"phase: start_step must be at least 0, got {self.start_step}; raise it")
        if not 0 < self.lr_scale < inf:
            raise ConfigError(f"{where}: lr_scale must be positive, got {self.lr_scale}; leave it out for 1")
        bad = {name: weight for name, weight in self.dataset_weights.items() if not 0 <= weight < inf}
        if bad:
            raise ConfigError(
                f"{where}: dataset_weights must be at least 0 and finite, got {bad}; 0 leaves a source out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTable:
    """Where data comes from and how it is loaded, with KempnerForge's defaults."""

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
    """Whether documents are kept apart: -100 at labels that cross them, and `doc_ids`."""
    hf_dataset_name: str | None = None
    hf_dataset_config: str | None = None
    hf_dataset_split: str = DEFAULT_SPLIT
    hf_dataset_text_field: str = DEFAULT_FIELD
    hf_streaming: bool = False
    datasets: Sequence[DatasetSource] = field(default_factory=list)
    """Sources that are mixed; they go before `dataset_path` and `hf_dataset_name`."""
    mix_temperature: Number = 1.0
    """Weights are raised to 1 / temperature: above 1 they are more alike."""
    phases: Sequence[TrainingPhase] = field(default_factory=list)
    anneal_start_step: int = 0
    """First step of the annealing, which is a single phase; 0: there is none."""
    anneal_weights: Mapping[str, Number] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_workers < 0 or self.prefetch_factor < 1:
            raise ConfigError(
                "data: num_workers must be at least 0 and prefetch_factor at least 1, got "
                f"{self.num_workers} and {self.prefetch_factor}; raise them"
            )
        for source in self.datasets:
            if bool(source.path) == bool(source.hf_name):
                got = "both" if source.path else "none"
                raise ConfigError(
                    f"dataset {source.called!r}: must have either path or hf_name, got {got}; keep one"
                )
        if not 0 < self.mix_temperature < inf:
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

    @property
    def all_datasets(self) -> tuple[DatasetSource, ...]:
        """The datasets that are mixed, or the single one: that of a path goes before that of Hugging Face."""
        if self.datasets:
            return tuple(self.datasets)
        if self.dataset_path:
            return (DatasetSource(path=self.dataset_path),)
        if self.hf_dataset_name:
            return (DatasetSource(hf_name=self.hf_dataset_name, hf_config=self.hf_dataset_config or ""),)
        raise ConfigError(
            "data: dataset_path, hf_dataset_name or datasets must be given, got none; "
            "add the one that says where the data is"
        )

    def tokenizer_for(self, dataset: DatasetSource) -> str:
        """Return the tokenizer that text is encoded by, or whose EOS ends the documents of token files."""
        if not self.tokenizer_path:
            way_out = f", or eos_id = ... under [{OURS}]" if dataset.path else ""
            why = "with pack_sequences, as its EOS ends the documents" if dataset.path else "to read the text"
            raise ConfigError(
                f"data.tokenizer_path: must be given {why} of {dataset.called!r}, got nothing; "
                f"add the folder of a tokenizer{way_out}"
            )
        return self.tokenizer_path

    @property
    def all_phases(self) -> tuple[TrainingPhase, ...]:
        """The phases, or the annealing as one."""
        if self.anneal_start_step:
            return (TrainingPhase(start_step=self.anneal_start_step, dataset_weights=self.anneal_weights),)
        return tuple(self.phases)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTable:
    """The keys of [train] that concern data."""

    batch_size: Positive = 8
    seq_len: Positive = 2048
    max_steps: Positive = 100_000
    grad_accum_steps: Positive = 1
    seed: Seed = 42
    data_seed: Seed | None = None
    """Of the order of data alone; None: `seed`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedTable:
    """The keys of [distributed] that concern data: the data-parallel ranks are the product."""

    dp_shard: int = -1
    dp_replicate: int = 1


_TRAINING = (
    "grad_clip_norm",
    "compile_model",
    "mixed_precision",
    "activation_checkpointing",
    "loss_fn",
    "z_loss_weight",
    "ce_chunk_size",
    "shutdown_timeout_sec",
    "nccl_health_check_interval",
)
"""Keys of [train] that do not concern data: a misspelt one of the others would train on other data."""

_IMAGES = ("hf_dataset_image_field", "hf_dataset_prompt_field", "hf_image_size")
_LOADING = {
    "num_workers": "batches are assembled by threads",
    "pin_memory": "the loader of the adapter decides it",
    "prefetch_factor": "the loader says how many batches are made ahead",
}
"""Keys that are not needed, and why."""


def from_kempnerforge(tables: Mapping[str, Any], translator: Translator) -> dict[str, Any]:
    """Return native tables for the tables of a config of KempnerForge."""
    table = table_of(tables, "data")
    for name in _IMAGES:
        if name in table:
            raise ConfigError(
                f"data: must be a config of text, got {name}, which is for images; leave it out if the run has none"
            )
    data = read_table(DataTable, table, "data")
    run, notes = _run(data, tables, translator), translator.notes
    for name, why in _LOADING.items():
        if name in table:
            shown = str(table[name]).lower() if name == "pin_memory" else table[name]
            notes.append(f"data.{name} = {shown}: not needed, {why}")
    before = "datasets" if data.datasets else "dataset_path"
    single = [name for name in ("dataset_path", "hf_dataset_name") if getattr(data, name)]
    notes += [
        f"data.{name}: not read, {before} goes before it" for name in (single if data.datasets else single[1:])
    ]
    datasets = _named(data.all_datasets, translator)
    ends_known = not data.pack_sequences or "eos_id" in table_of(tables, OURS)
    sources = [
        {"name": name, **_source(data, dataset, translator, ends_known=ends_known)}
        for name, dataset in datasets.items()
    ]
    stages = _stages(data, datasets, run["steps"], translator)
    drawn = {name for stage in stages for name in stage.get("weights", datasets)}
    for name in datasets:
        if name not in drawn:
            translator.warn(f"dataset {name!r}: left out, no phase draws from it")
    notes.append(
        "data.pack_sequences = true: rows are the stream of tokens cut, labels and positions end at documents"
        if data.pack_sequences
        else "data.pack_sequences = false: rows are the stream of tokens cut, and labels cross documents"
    )
    sources = [source for source in sources if source["name"] in drawn]
    return {"run": run, "sources": sources, "stages": stages}


def _run(data: DataTable, tables: Mapping[str, Any], translator: Translator) -> dict[str, Any]:
    train, written = read_known(TrainTable, tables, "train"), table_of(tables, "train")
    check_keys("train", written, (*(field.name for field in fields(TrainTable)), *_TRAINING))
    names = ("batch_size", "seq_len", "max_steps", "grad_accum_steps")
    defaults = [f"{name} = {getattr(train, name)}" for name in names if name not in written]
    if defaults:
        translator.notes.append(f"train: taken as there by default, {', '.join(defaults)}")
    parallel = read_known(DistributedTable, tables, "distributed")
    keys = "distributed.dp_shard, dp_replicate"
    ranks = translator.count_ranks(parallel.dp_shard, parallel.dp_replicate, keys=keys)
    run: dict[str, Any] = {
        "steps": train.max_steps,
        "global_batch_size": train.batch_size * train.grad_accum_steps * ranks,
        "seq_len": train.seq_len,
        "seed": train.seed if train.data_seed is None else train.data_seed,
        "packing": "concat",
    }
    if not data.pack_sequences:
        run |= {"cross_document_labels": True, "positions": "row"}
    return run if data.mix_temperature == 1 else {**run, "temperature": data.mix_temperature}


def _named(datasets: Sequence[DatasetSource], translator: Translator) -> dict[str, DatasetSource]:
    """Return datasets by the names of their sources."""
    renamed: dict[str, str] = {}
    for number, dataset in enumerate(datasets):
        if dataset.name in renamed:
            raise ConfigError(f"data.datasets[{number}]: names must differ, got {dataset.name!r} twice; rename one")
        if dataset.name:
            # A name is kept as far as it can be; those that are only derived must make way for it.
            renamed[dataset.name] = free_name(plain_name(dataset.name), renamed.values())
    translator.notes.extend(f"dataset {old!r}: called {new!r}" for old, new in renamed.items() if old != new)
    named: dict[str, DatasetSource] = {}
    for dataset in datasets:
        derived = free_name(plain_name(dataset.path or dataset.hf_name), {*renamed.values(), *named})
        named[renamed.get(dataset.name, derived)] = dataset
    return named


def _source(data: DataTable, dataset: DatasetSource, translator: Translator, *, ends_known: bool) -> dict[str, Any]:
    """Return the native source of a dataset, without a name."""
    if dataset.path and translator.is_store(dataset.path):
        return {"store": dataset.path}
    if dataset.path:
        # What is special in a glob is not, in the name of a folder.
        source = {"store": f"{glob.escape(dataset.path.rstrip('/'))}/{data.file_pattern or '*.npy'}"}
        return source if ends_known else {**source, "tokenizer": data.tokenizer_for(dataset)}
    source = text_source(
        hub_name(dataset.hf_name, dataset.hf_config, data.hf_dataset_split or DEFAULT_SPLIT),
        tokenizer=data.tokenizer_for(dataset),
        text_field=data.hf_dataset_text_field or DEFAULT_FIELD,
    )
    return {**source, "live": True} if data.hf_streaming else source


def _stages(
    data: DataTable, datasets: Mapping[str, DatasetSource], steps: int, translator: Translator
) -> list[dict[str, Any]]:
    if data.anneal_start_step and not data.anneal_weights:
        raise ConfigError("data: anneal_weights must be given with anneal_start_step, got none; add the weights")
    if data.anneal_weights and not data.anneal_start_step:
        translator.warn("data.anneal_weights: no effect, as anneal_start_step is 0")
    stages: list[dict[str, Any]] = []
    if not data.all_phases or data.all_phases[0].start_step > 0:
        stages.append({"name": "base", "start_step": 0})
        if data.datasets:
            stages[0]["weights"] = {name: dataset.weight for name, dataset in datasets.items()}
    for number, phase in enumerate(data.all_phases):
        name, where, prefix = f"phase-{number + 1}", f"data.phases[{number}]", "dataset"
        if data.anneal_start_step:
            name, where, prefix = "anneal", "data", "anneal"
        if phase.start_step >= steps:
            raise ConfigError(
                f"{where}: {'anneal_' if data.anneal_start_step else ''}start_step must be below the {steps} steps "
                f"of train.max_steps, got {phase.start_step}; lower it, or leave it out"
            )
        stage: dict[str, Any] = {"name": name, "start_step": phase.start_step}
        if data.datasets:
            stage["weights"] = _phase_weights((where, f"{prefix}_weights"), phase.dataset_weights, datasets)
        elif phase.dataset_weights:
            translator.warn(f"stage {name!r}: {prefix}_weights has no effect, as there is one source")
        stages.append(stage | ({"lr_scale": phase.lr_scale} if phase.lr_scale != 1 else {}))
    return stages


def _phase_weights(
    place: tuple[str, str], weights: Mapping[str, Number], datasets: Mapping[str, DatasetSource]
) -> dict[str, Number]:
    """Return what a phase draws: by its own weights, else by those of the datasets; 0 is left out."""
    where, key = place
    called = [dataset.called for dataset in datasets.values()]
    # A name that two datasets share stands for neither.
    names = {name: name for name in datasets}
    names |= {dataset.called: name for name, dataset in datasets.items() if called.count(dataset.called) == 1}
    merged = {name: dataset.weight for name, dataset in datasets.items()}
    for alias, weight in weights.items():
        if alias not in names:
            raise ConfigError(f"{where}: {key} must name datasets, got {alias!r}; {nearest(alias, names)}")
        merged[names[alias]] = weight
    drawn = {name: weight for name, weight in merged.items() if weight > 0}
    if not drawn:
        raise ConfigError(
            f"{where}: {key} must leave a source with a weight above 0, got {dict(weights)}; raise one"
        )
    return drawn
