"""What a config of the torchtitan fork with data stages says of data, in native tables."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenmill.config.dialects.table import (
    DEFAULT_FIELD,
    DEFAULT_SPLIT,
    Table,
    add_facts,
    free_name,
    path_notes,
    plain_name,
    table_of,
    text_source,
)
from tokenmill.errors import ConfigError, nearest

# The data stages of the torchtitan fork, checked by its rules.

TYPES = ("huggingface", "nanoset", "preprocessed", "packed_memmap")
_PLACES = {"huggingface": "dataset", "nanoset": "dataset_folders"}
"""Which field a type of dataset requires; the others require dataset_path."""
_FROM_TRAINING = ("dataset", "dataset_path", "dataset_folders", "dataset_weights")
_DATA = (*_FROM_TRAINING, "dataset_type", "dataset_random_seed")
_STAGE = ("name", "start_step", "end_step", "seq_len", *_DATA)
_SEED = 1234
_SEQ_LEN = 2048
_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class DataStage:
    """A stage as the fork describes it."""

    name: str
    start_step: int
    end_step: int | None
    """First step after it; None: it ends where the next one starts."""
    dataset_type: str
    places: tuple[str, ...]
    """Folders, or the one dataset or path."""
    has_path: bool
    """Whether a dataset is named by dataset_path."""
    weights: tuple[float, ...]
    """One for each place."""
    seed: int
    seq_len: int


def data_stages(training: Table, steps: int, notes: list[str]) -> list[DataStage]:
    """Read the stages of [training]: those it lists, and a `default` one for the steps before them."""
    known = ("data_stages", *_DATA)
    for name in training.values:
        # Other keys belong to training; one of these misspelt would silently train on other data.
        if name.startswith(("dataset", "data_stage")) and name not in known:
            raise ConfigError(f"{training.where}: keys must be known, got {name!r}; {nearest(name, known)}")
    seed = training.whole("dataset_random_seed", _SEED, least=0)
    stages = [_stage(table, steps, seed, notes) for table in training.tables("data_stages")]
    if not stages or stages[0].start_step > 0:
        stages.insert(0, _default(training, steps, seed, stages, notes))
    else:
        notes += [
            f"training.{name}: not read, the stages start at step 0"
            for name in (*_FROM_TRAINING, "dataset_type", "seq_len")
            if name in training
        ]
    _check_order(training.where, stages, steps)
    return stages


def _default(training: Table, steps: int, seed: int, stages: Sequence[DataStage], notes: list[str]) -> DataStage:
    values = {name: training.values[name] for name in _FROM_TRAINING if name in training}
    values |= {
        "name": "default",
        "start_step": 0,
        "dataset_type": training.text("dataset_type", "huggingface"),
        "seq_len": training.whole("seq_len", _SEQ_LEN, least=1),
    }
    if stages:
        notes.append(f"stage 'default': made of [training] for the steps before {stages[0].start_step}")
    return _stage(Table(where=training.where, values=values), steps, seed, notes)


def _stage(table: Table, steps: int, seed: int, notes: list[str]) -> DataStage:
    table.only(_STAGE)
    table.need("name", "start_step", "dataset_type", "seq_len")
    name = table.text("name")
    if not name:
        raise ConfigError(f"{table.where}: name must not be empty, got {table.values['name']!r}; name the stage")
    start = table.whole("start_step", 0, least=0)
    if start >= steps:
        raise ConfigError(
            f"{table.where}: start_step must be below the {steps} steps of training, got {start}; "
            "lower it, or leave the stage out"
        )
    places = _places(table)
    return DataStage(
        name=name,
        start_step=start,
        end_step=_end(table, start, steps),
        dataset_type=table.text("dataset_type"),
        places=places,
        has_path=bool(table.text("dataset_path")),
        weights=_weights(table, places, notes),
        seed=table.whole("dataset_random_seed", seed, least=0),
        seq_len=table.whole("seq_len", 0, least=1),
    )


def _end(table: Table, start: int, steps: int) -> int | None:
    if "end_step" not in table:
        return None
    end = table.whole("end_step", 0, least=0)
    if end <= start:
        raise ConfigError(f"{table.where}: end_step must be above start_step {start}, got {end}; raise it")
    if end > steps:
        raise ConfigError(
            f"{table.where}: end_step must be at most the {steps} steps of training, got {end}; "
            "lower it, or leave it out"
        )
    return end


def _places(table: Table) -> tuple[str, ...]:
    kind = table.text("dataset_type")
    if kind not in TYPES:
        raise ConfigError(
            f"{table.where}: dataset_type must be one of {', '.join(TYPES)}, got {kind!r}; {nearest(kind, TYPES)}"
        )
    needed = _PLACES.get(kind, "dataset_path")
    found = table.texts(needed) if needed == "dataset_folders" else [table.text(needed)]
    if not any(found):
        raise ConfigError(
            f"{table.where}: {needed} must be given for dataset_type {kind}, got nothing; add {needed} = ..."
        )
    if kind == "huggingface" and table.text("dataset_path"):
        found = [table.text("dataset_path")]
    return tuple(found)


def _weights(table: Table, places: tuple[str, ...], notes: list[str]) -> tuple[float, ...]:
    where = table.where
    weights = table.numbers("dataset_weights")
    if weights:
        if min(weights) < 0:
            raise ConfigError(
                f"{where}: dataset_weights must not be negative, got {weights}; 0 leaves a folder out"
            )
        if max(weights) > 1:
            raise ConfigError(f"{where}: dataset_weights must be at most 1.0, got {weights}; divide by their sum")
        if abs(sum(weights) - 1) > _TOLERANCE:
            raise ConfigError(
                f"{where}: dataset_weights must sum to 1.0, got {weights} with {sum(weights):.6g}; "
                "divide by their sum"
            )
    if table.text("dataset_type") != "nanoset":
        notes += [
            f"stage {table.text('name')!r}: {name} has no effect, as there is one place"
            for name in ("dataset_folders", "dataset_weights")
            if table.values.get(name)
        ]
        return (1.0,)
    if weights and len(weights) != len(places):
        raise ConfigError(
            f"{where}: dataset_weights must be as many as the {len(places)} dataset_folders, got {len(weights)}; "
            "give one to each"
        )
    if not weights and len(places) > 1:
        # There the sizes of the folders stand for weights, which a config does not say.
        raise ConfigError(
            f"{where}: dataset_weights must be given for {len(places)} dataset_folders, got none; "
            "add the share of each, such as its share of all tokens"
        )
    return tuple(weights) or (1.0,)


def _check_order(where: str, stages: Sequence[DataStage], steps: int) -> None:
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: names of data_stages must differ, got {name!r} twice; rename one")
    for before, after in pairwise(stages):
        if after.start_step <= before.start_step:
            raise ConfigError(
                f"{where}: data_stages must be in the order of start_step, got {after.name!r} at "
                f"{after.start_step} after {before.name!r} at {before.start_step}; order them"
            )
        end = after.start_step if before.end_step is None else before.end_step
        if end < after.start_step:
            raise ConfigError(
                f"{where}: data_stages must leave no gap, got none for steps {end} to {after.start_step - 1} "
                f"between {before.name!r} and {after.name!r}; leave out the end_step of {before.name!r}"
            )
        if end > after.start_step:
            raise ConfigError(
                f"{where}: data_stages must not overlap, got steps {after.start_step} to {end - 1} in "
                f"{before.name!r} and {after.name!r}; leave out the end_step of {before.name!r}"
            )
    last = stages[-1]
    if last.end_step is not None and last.end_step < steps:
        raise ConfigError(
            f"{where}: data_stages must leave no gap, got none for steps {last.end_step} to {steps - 1} after "
            f"{last.name!r}; leave out the end_step of {last.name!r}"
        )


_LOCAL_BATCH_SIZE = 8
_BY_RANK = -1
"""The global_batch_size that stands for local_batch_size times the ranks."""
_DATASETS = {
    "c4": ("allenai/c4", "en", DEFAULT_SPLIT),
    "c4_test": ("tests/assets/c4_test", "", DEFAULT_SPLIT),
    "c4_validation": ("allenai/c4", "en", "validation"),
}
"""Names that torchtitan knows -> dataset, config, split."""


def from_torchtitan(
    tables: Mapping[str, Any], *, where: str, world_size: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Return native tables and notes for the tables of a config of the torchtitan fork."""
    training = table_of(tables, "training", where)
    training.need("steps")
    notes: list[str] = []
    steps = training.whole("steps", 0, least=1)
    rows = _global_batch_size(training, world_size, notes)
    stages = data_stages(training, steps, notes)
    tokenizer = _tokenizer(table_of(tables, "model", where), stages)
    sources: list[dict[str, Any]] = []
    mixtures = [_mixture(stage, tokenizer, sources, notes) for stage in stages]
    run = {
        "steps": steps,
        "global_batch_size": rows,
        "seq_len": stages[0].seq_len,
        "seed": _seed(table_of(tables, "debug", where), training, stages),
        "packing": "concat",
        "positions": "row",
    }
    # Labels that cross documents, as there, would leave no way to go on with the rest of an epoch in longer rows.
    notes.append("rows are the stream of tokens cut, as there, but no document is trained to predict the next")
    native = [
        {"name": stage.name, "start_step": stage.start_step, "seq_len": stage.seq_len, "seed": stage.seed}
        | ({"weights": weights} if len(sources) > 1 else {})
        for stage, weights in zip(stages, mixtures, strict=True)
    ]
    if len({stage.seed for stage in stages}) > 1:
        notes.append(
            "dataset_random_seed: a new one orders a source from its next epoch on, so that nothing repeats"
        )
    notes += add_facts(sources, tables, where)
    notes += path_notes(sources)
    return {"run": run, "sources": sources, "stages": native}, notes


def _global_batch_size(training: Table, world_size: int | None, notes: list[str]) -> int:
    rows = training.whole("local_batch_size", _LOCAL_BATCH_SIZE, least=1)
    size = training.whole("global_batch_size", _BY_RANK, least=_BY_RANK)
    if size != _BY_RANK:
        return training.whole("global_batch_size", _BY_RANK, least=1)
    if world_size is None:
        notes.append(
            f"global_batch_size = {rows}: local_batch_size of one rank, as the config does not say how many there "
            "are; give --world-size N, or world_size=N"
        )
    return rows * (world_size or 1)


def _seed(debug: Table, training: Table, stages: Sequence[DataStage]) -> int:
    """Return the seed of the run; each stage has its own, so that it only stands there for the reader."""
    table = debug if "seed" in debug else training
    return table.whole("seed", stages[0].seed, least=0)


def _tokenizer(model: Table, stages: Sequence[DataStage]) -> str:
    found = model.text("hf_assets_path") or model.text("tokenizer_path")
    texts = [stage for stage in stages if stage.dataset_type == "huggingface"]
    if texts and not found:
        raise ConfigError(
            f"{model.where}: hf_assets_path must be given to read the text of stage {texts[0].name!r}, "
            "got nothing; add the folder of a tokenizer"
        )
    return found


def _mixture(stage: DataStage, tokenizer: str, sources: list[dict[str, Any]], notes: list[str]) -> dict[str, float]:
    """Return the weights of a stage by source; a place that no stage before had becomes a new source."""
    weights: dict[str, float] = {}
    for place, weight in zip(stage.places, stage.weights, strict=True):
        source = _source(stage, place, tokenizer, notes)
        same = next((known for known in sources if {**source, "name": known["name"]} == known), None)
        if same is None and weight > 0:
            same = {"name": free_name(plain_name(place), {known["name"] for known in sources}), **source}
            sources.append(same)
        if same is not None and weight > 0:
            weights[same["name"]] = weights.get(same["name"], 0.0) + weight
    return weights


def _source(stage: DataStage, place: str, tokenizer: str, notes: list[str]) -> dict[str, Any]:
    """Return the native source of a place, without a name; one place has one, whatever type a stage gives it."""
    if stage.dataset_type != "huggingface":
        return {"store": posixpath.normpath(place)}
    dataset, config, split = place, "", DEFAULT_SPLIT
    if place in _DATASETS and not stage.has_path:
        dataset, config, split = _DATASETS[place]
        told = f"dataset = {place!r}: taken as {dataset}{f', config {config}' * bool(config)}, split {split}"
        if told not in notes:
            notes.append(told)
    return text_source(dataset, config=config, split=split, tokenizer=tokenizer, text_field=DEFAULT_FIELD)
