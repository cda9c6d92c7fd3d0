"""The data of a config of the torchtitan fork with data stages, in native tables."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.config.dialects import (
    DEFAULT_FIELD,
    DEFAULT_SPLIT,
    ModelTable,
    Translator,
    free_name,
    hub_name,
    plain_name,
    read_known,
    table_of,
    text_source,
)
from tokenmill.errors import ConfigError
from tokenmill.tables import Count, Number, Positive, Seed, check_choice, check_keys

_NEEDED = {
    "huggingface": "dataset",
    "nanoset": "dataset_folders",
    "preprocessed": "dataset_path",
    "packed_memmap": "dataset_path",
}
"""Type of dataset -> the key that says where it is; `dataset` will do for `preprocessed`, too."""
_DATASETS = {
    "c4": ("allenai/c4", "en", DEFAULT_SPLIT),
    "c4_test": ("tests/assets/c4_test", "", DEFAULT_SPLIT),
    "c4_validation": ("allenai/c4", "en", "validation"),
}
"""Names that torchtitan knows -> dataset, config, split."""
_PACKINGS = {"packed_memmap": "best_fit"}
"""Type of dataset -> how its documents become rows, where that is not `concat`."""
_PLACES = ("dataset", "dataset_path", "dataset_folders", "dataset_weights")
_DEFAULT = "default"
"""Name of the stage that is made of [training]."""
_BY_RANK = -1
"""The global_batch_size that stands for local_batch_size times the ranks."""
_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class DataStage:
    """One of [[training.data_stages]]."""

    name: str
    start_step: Count
    end_step: Count | None = None
    """First step after it; None: it ends where the next one starts."""
    dataset_type: str
    dataset: str = ""
    dataset_path: str = ""
    dataset_folders: tuple[str, ...] = ()
    dataset_weights: tuple[Number, ...] = ()
    """One for each folder."""
    seq_len: Positive
    dataset_random_seed: Seed | None = None
    """None: that of [training]."""

    def __post_init__(self) -> None:
        where = "training" if self.name == _DEFAULT else f"stage {self.name!r}"
        if not self.name.strip():
            raise ConfigError(f"training.data_stages: name must not be empty, got {self.name!r}; name the stage")
        if self.end_step is not None and self.end_step <= self.start_step:
            raise ConfigError(
                f"{where}: end_step must be above start_step {self.start_step}, got {self.end_step}; raise it"
            )
        check_choice(where, "dataset_type", self.dataset_type, tuple(_NEEDED))
        needed = _NEEDED[self.dataset_type]
        if not getattr(self, needed) and not (self.dataset_type == "preprocessed" and self.dataset):
            raise ConfigError(
                f"{where}: {needed} must be given for dataset_type {self.dataset_type}, got nothing; "
                f"add {needed} = ..."
            )
        if not all(folder.strip() for folder in self.dataset_folders):
            raise ConfigError(
                f"{where}: dataset_folders must not be empty strings, got {list(self.dataset_folders)}; "
                "leave them out"
            )
        self._check_weights(where)

    def _check_weights(self, where: str) -> None:
        weights, folders = list(self.dataset_weights), len(self.dataset_folders)
        if not all(0 <= weight <= 1 for weight in weights):
            raise ConfigError(
                f"{where}: dataset_weights must lie within 0 and 1, got {weights}; divide by their sum, 0 leaves a "
                "folder out"
            )
        if weights and abs(sum(weights) - 1) > _TOLERANCE:
            raise ConfigError(
                f"{where}: dataset_weights must sum to 1.0, got {weights} with {sum(weights):.6g}; "
                "divide by their sum"
            )
        if self.dataset_type == "nanoset" and weights and len(weights) != folders:
            raise ConfigError(
                f"{where}: dataset_weights must be as many as the {folders} dataset_folders, got {len(weights)}; "
                "give one to each"
            )

    @property
    def places(self) -> list[tuple[str, Number]]:
        """Folders, or the one dataset or path, each with its weight."""
        if self.dataset_type != "nanoset":
            return [(self.dataset_path or self.dataset, 1.0)]
        weights = self.dataset_weights or (1.0,) * len(self.dataset_folders)
        return list(zip(self.dataset_folders, weights, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingTable:
    """The keys of [training] that concern data."""

    steps: Positive
    local_batch_size: Positive = 8
    global_batch_size: int = _BY_RANK
    seq_len: Positive = 2048
    seed: Seed | None = None
    dataset_type: str = "huggingface"
    dataset: str = ""
    dataset_path: str = ""
    dataset_folders: tuple[str, ...] = ()
    dataset_weights: tuple[Number, ...] = ()
    dataset_random_seed: Seed = 1234
    data_stages: tuple[DataStage, ...] = ()

    def __post_init__(self) -> None:
        if self.global_batch_size < 1 and self.global_batch_size != _BY_RANK:
            raise ConfigError(
                f"training: global_batch_size must be at least 1, or {_BY_RANK} for local_batch_size by rank, "
                f"got {self.global_batch_size}; raise it"
            )
        self._check_stages()

    def _check_stages(self) -> None:
        """Refuse stages that do not follow one another, without a gap, to the last step."""
        stages = self.data_stages
        names = [stage.name for stage in stages]
        if stages and stages[0].start_step > 0:
            names.append(_DEFAULT)
        limits = [(stage.start_step, f"stage {stage.name!r} starts") for stage in stages[1:]]
        limits.append((self.steps, "training ends"))
        for stage, (limit, event) in zip(stages, limits, strict=False):
            where = f"stage {stage.name!r}"
            if names.count(stage.name) > 1:
                raise ConfigError(f"{where}: names of data_stages must differ, got it twice; rename one")
            if stage.start_step >= limit:
                raise ConfigError(
                    f"{where}: start_step must be below {limit}, where {event}, got {stage.start_step}; "
                    "order the stages, or leave it out"
                )
            if stage.end_step not in (None, limit):
                raise ConfigError(
                    f"{where}: end_step must be {limit}, where {event}, as stages leave no gap and do not overlap, "
                    f"got {stage.end_step}; leave it out"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugTable:
    """The keys of [debug] that concern data."""

    seed: Seed | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelTable:
    """The keys of [parallelism] that concern data: the data-parallel ranks are the product."""

    data_parallel_shard_degree: int = -1
    data_parallel_replicate_degree: int = 1


def from_torchtitan(tables: Mapping[str, Any], translator: Translator) -> dict[str, Any]:
    """Return native tables for the tables of a config of the torchtitan fork."""
    table = table_of(tables, "training")
    # Other keys belong to training; one of these misspelt would silently train on other data.
    own = {key: value for key, value in table.items() if key.startswith(("dataset", "data_stage"))}
    check_keys("training", own, ("data_stages", *_PLACES, "dataset_type", "dataset_random_seed"))
    training = read_known(TrainingTable, tables, "training")
    rows = training.global_batch_size
    if rows == _BY_RANK:
        parallel = read_known(ParallelTable, tables, "parallelism")
        degrees = (parallel.data_parallel_shard_degree, parallel.data_parallel_replicate_degree)
        keys = "parallelism.data_parallel_shard_degree, data_parallel_replicate_degree"
        rows = training.local_batch_size * translator.count_ranks(*degrees, keys=keys)
    notes = translator.notes
    stages = _all_stages(training, table, notes)
    tokenizer = _tokenizer(tables, stages)
    sources: list[dict[str, Any]] = []
    mixtures = [_mixture(stage, tokenizer, sources, notes) for stage in stages]
    packings = [_PACKINGS.get(stage.dataset_type, "concat") for stage in stages]
    # Labels that cross documents, as there, would leave no way to go on with the rest of an epoch in longer rows.
    if "concat" in packings:
        notes.append("rows are the stream of tokens cut, as there, but no document is trained to predict the next")
    if "best_fit" in packings:
        notes.append("packed_memmap: sequences that fit into a row are kept whole, as those of chats are there")
    default = training.dataset_random_seed
    seeds = [default if stage.dataset_random_seed is None else stage.dataset_random_seed for stage in stages]
    if len(set(seeds)) > 1:
        notes.append(
            "dataset_random_seed: a new one orders a source from its next epoch on, so that nothing repeats"
        )
    # Each stage has a seed of its own, so that the one of the run is only there for the reader.
    of_run = [seed for seed in (read_known(DebugTable, tables, "debug").seed, training.seed) if seed is not None]
    run = {
        "steps": training.steps,
        "global_batch_size": rows,
        "seq_len": stages[0].seq_len,
        "seed": [*of_run, seeds[0]][0],
        "packing": packings[0],
        "positions": "row",
    }
    native = [
        {"name": stage.name, "start_step": stage.start_step, "seq_len": stage.seq_len, "seed": seed}
        | ({"packing": packing} if packing != packings[0] else {})
        | ({"weights": _weights(stage, weights, len(sources))} if len(sources) > 1 else {})
        for stage, seed, packing, weights in zip(stages, seeds, packings, mixtures, strict=True)
    ]
    return {"run": run, "sources": sources, "stages": native}


def _weights(stage: DataStage, weights: dict[str, Number], sources: int) -> dict[str, Number] | str:
    """Return the weights of a stage; the sizes of several folders stand for them where it has none, as there."""
    folders = len(stage.dataset_folders)
    if stage.dataset_type != "nanoset" or stage.dataset_weights or folders < 2:
        return weights
    if not folders == len(weights) == sources:
        raise ConfigError(
            f"stage {stage.name!r}: dataset_weights must be given for {folders} of {sources} folders, got none; "
            "add the share of each, such as its share of all tokens"
        )
    return "tokens"


def _all_stages(training: TrainingTable, table: Mapping[str, Any], notes: list[str]) -> tuple[DataStage, ...]:
    """Return the stages that are listed, and before them one made of [training] itself, unless they start at 0."""
    stages = training.data_stages
    if stages and stages[0].start_step == 0:
        notes += [
            f"training.{name}: not read, the stages start at step 0"
            for name in (*_PLACES, "dataset_type", "seq_len")
            if name in table
        ]
    else:
        if stages:
            notes.append(f"stage {_DEFAULT!r}: made of [training] for the steps before {stages[0].start_step}")
        first = DataStage(
            name=_DEFAULT,
            start_step=0,
            dataset_type=training.dataset_type or "huggingface",
            seq_len=training.seq_len,
            **{name: getattr(training, name) for name in _PLACES},
        )
        stages = (first, *stages)
    for stage in stages:
        if stage.dataset_type != "nanoset":
            notes += [
                f"stage {stage.name!r}: {name} has no effect, as there is one place"
                for name in ("dataset_folders", "dataset_weights")
                if getattr(stage, name)
            ]
    return stages


def _tokenizer(tables: Mapping[str, Any], stages: Sequence[DataStage]) -> str:
    model = read_known(ModelTable, tables, "model")
    path = model.hf_assets_path or model.tokenizer_path
    texts = [stage for stage in stages if stage.dataset_type == "huggingface"]
    if texts and not path:
        raise ConfigError(
            f"model: hf_assets_path must be given to read the text of stage {texts[0].name!r}, "
            "got nothing; add the folder of a tokenizer"
        )
    return path


def _mixture(
    stage: DataStage, tokenizer: str, sources: list[dict[str, Any]], notes: list[str]
) -> dict[str, Number]:
    """Return the weights of a stage by source; a place that no stage before had becomes a new source."""
    weights: dict[str, Number] = {}
    for place, weight in stage.places:
        if weight == 0:
            continue
        source = _source(stage, place, tokenizer, notes)
        name = next((known["name"] for known in sources if {**source, "name": known["name"]} == known), None)
        if name is None:
            name = free_name(plain_name(place), {known["name"] for known in sources})
            sources.append({"name": name, **source})
        weights[name] = weights.get(name, 0.0) + weight
    return weights


def _source(stage: DataStage, place: str, tokenizer: str, notes: list[str]) -> dict[str, Any]:
    """Return the native source of a place, without a name; one place has one, whatever type a stage gives it."""
    if stage.dataset_type == "preprocessed" and not stage.dataset_path:
        return {"store": hub_name(place)}
    if stage.dataset_type != "huggingface":
        return {"store": posixpath.normpath(place)}
    dataset, config, split = place, "", DEFAULT_SPLIT
    if place in _DATASETS and not stage.dataset_path:
        dataset, config, split = _DATASETS[place]
        note = f"dataset = {place!r}: taken as {dataset}{f', config {config}' * bool(config)}, split {split}"
        if note not in notes:
            notes.append(note)
    return text_source(hub_name(dataset, config, split), tokenizer=tokenizer, text_field=DEFAULT_FIELD)
