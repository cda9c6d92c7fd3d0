"""What a config of the torchtitan fork with data stages says of data, in native tables."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.dialects.data_stages import DataStage, data_stages
from tokenmill.dialects.sources import (
    DEFAULT_FIELD,
    DEFAULT_SPLIT,
    add_facts,
    free_name,
    path_notes,
    plain_name,
    text_source,
)
from tokenmill.dialects.table import Table, table_of
from tokenmill.errors import ConfigError

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
