"""The data stages of the torchtitan fork, checked by its rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenmill.dialects.table import Table
from tokenmill.errors import ConfigError, nearest

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
