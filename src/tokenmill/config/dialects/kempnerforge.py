"""What a config of KempnerForge says of data, in native tables."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenmill.config.dialects.table import (
    DEFAULT_FIELD,
    DEFAULT_SPLIT,
    OURS,
    Table,
    add_facts,
    free_name,
    path_notes,
    plain_name,
    table_of,
    text_source,
)
from tokenmill.errors import ConfigError, nearest

_FILES = ("dataset_path", "file_pattern")
_TEXTS = ("hf_dataset_name", "hf_dataset_config", "hf_dataset_split", "hf_dataset_text_field", "hf_streaming")
_MIXING = ("datasets", "mix_temperature", "phases", "anneal_start_step", "anneal_weights", "pack_sequences")
_LOADING = {
    "num_workers": "batches are assembled by threads",
    "pin_memory": "the loader of the adapter decides it",
    "prefetch_factor": "the loader says how many batches are made ahead",
}
"""What is not needed, and why."""
_DATA = (*_FILES, "tokenizer_path", *_LOADING, *_TEXTS, *_MIXING)
_IMAGES = ("hf_dataset_image_field", "hf_dataset_prompt_field", "hf_image_size")
_DATASET = ("path", "weight", "name", "hf_name", "hf_config")
_PHASE = ("start_step", "dataset_weights", "lr_scale")
_TRAIN = {"batch_size": 8, "seq_len": 2048, "max_steps": 100_000, "grad_accum_steps": 1}
_SEED = 42


@dataclass(frozen=True, kw_only=True, slots=True)
class _Dataset:
    """One of [[data.datasets]], or the only one of [data]."""

    source: dict[str, Any]
    """A native source."""
    weight: float
    alias: str
    """What phases call it there: its name, or its path where it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """One of [[data.phases]], or the annealing."""

    table: Table
    key: str
    """Where its weights are in the table."""
    name: str
    start_step: int
    lr_scale: float


def from_kempnerforge(
    tables: Mapping[str, Any], *, where: str, world_size: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Return native tables and notes for the tables of a config of KempnerForge."""
    data, train = table_of(tables, "data", where), table_of(tables, "train", where)
    _refuse_images(data)
    data.only(_DATA)
    notes: list[str] = []
    run = _run(data, train, world_size, notes)
    _note_loading(data, notes)
    datasets = _datasets(data, notes)
    stages = _stages(data, datasets, run["steps"], notes)
    drawn = {name for stage in stages for name in stage.get("weights", ())}
    sources = [dataset.source for dataset in datasets]
    if drawn:
        unused = [source["name"] for source in sources if source["name"] not in drawn]
        notes += [f"dataset {name!r}: left out, no phase draws from it" for name in unused]
        sources = [source for source in sources if source["name"] in drawn]
    notes += add_facts(sources, tables, where)
    notes += _packing_notes(data, sources)
    notes += path_notes(sources)
    return {"run": run, "sources": sources, "stages": stages}, notes


def _refuse_images(data: Table) -> None:
    for name in _IMAGES:
        if name in data:
            raise ConfigError(
                f"{data.where}: must be a config of text, got {name}, which is for images; "
                "leave it out if the run has none"
            )


def _run(data: Table, train: Table, world_size: int | None, notes: list[str]) -> dict[str, Any]:
    numbers = {name: train.whole(name, default, least=1) for name, default in _TRAIN.items()}
    unsaid = [f"{name} = {numbers[name]}" for name in _TRAIN if name not in train]
    if unsaid:
        notes.append(f"train: taken as there by default, {', '.join(unsaid)}")
    rows = numbers["batch_size"] * numbers["grad_accum_steps"]
    if world_size is None:
        notes.append(
            f"global_batch_size = {rows}: batch_size * grad_accum_steps of one rank, as the config does not say "
            "how many there are; give --world-size N, or world_size=N"
        )
    run: dict[str, Any] = {
        "steps": numbers["max_steps"],
        "global_batch_size": rows * (world_size or 1),
        "seq_len": numbers["seq_len"],
        "seed": train.whole("seed", _SEED, least=0),
        "packing": "concat",
    }
    if not data.flag("pack_sequences", False):
        run |= {"cross_document_labels": True, "positions": "row"}
    temperature = data.positive("mix_temperature", 1.0)
    return run if temperature == 1.0 else {**run, "temperature": temperature}


def _note_loading(data: Table, notes: list[str]) -> None:
    data.whole("num_workers", 4, least=0)
    data.flag("pin_memory", True)
    data.whole("prefetch_factor", 2, least=1)
    notes += [
        f"data.{name} = {_shown(data.values[name])}: not needed, {why}"
        for name, why in _LOADING.items()
        if name in data
    ]


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _datasets(data: Table, notes: list[str]) -> list[_Dataset]:
    """Return the sources: [[data.datasets]], else the files of dataset_path, else the one of Hugging Face."""
    listed = data.tables("datasets")
    path, hf_name = data.text("dataset_path"), data.text("hf_dataset_name")
    single = [name for name in ("dataset_path", "hf_dataset_name") if data.text(name)]
    if not listed and not single:
        raise ConfigError(
            f"{data.where}: dataset_path, hf_dataset_name or datasets must be given, got none; "
            "add the one that says where the data is"
        )
    if listed:
        notes += [f"data.{name}: not read, datasets goes before it" for name in single]
        found = _listed(data, listed, notes)
    else:
        if len(single) > 1:
            notes.append("data.hf_dataset_name: not read, dataset_path goes before it")
        source = _files(data, path) if path else _texts(data, hf_name, data.text("hf_dataset_config"), data.where)
        name = plain_name(path or hf_name)
        found = [_Dataset(source={"name": name, **source}, weight=1.0, alias=name)]
    if data.flag("hf_streaming", False):
        for dataset in found:
            if "documents" in dataset.source:
                dataset.source["live"] = True
    return found


def _listed(data: Table, tables: Sequence[Table], notes: list[str]) -> list[_Dataset]:
    given: dict[str, str] = {}
    for table in tables:
        table.only(_DATASET)
        name = table.text("name")
        if name:
            if name in given:
                raise ConfigError(f"{table.where}: names must differ, got {name!r} twice; rename one")
            # A name is kept as far as it can be; those that are only derived must make way for it.
            given[name] = free_name(plain_name(name), given.values())
    notes += [f"dataset {said!r}: called {name!r}" for said, name in given.items() if said != name]
    taken = set(given.values())
    found = []
    for table in tables:
        path, hf_name = table.text("path"), table.text("hf_name")
        if bool(path) == bool(hf_name):
            got = "both" if path else "none"
            raise ConfigError(f"{table.where}: must have either path or hf_name, got {got}; keep one")
        said = table.text("name")
        name = given[said] if said else free_name(plain_name(path or hf_name), taken)
        taken.add(name)
        source = _files(data, path) if path else _texts(data, hf_name, table.text("hf_config"), table.where)
        found.append(
            _Dataset(
                source={"name": name, **source},
                weight=table.positive("weight", 1.0),
                alias=said or path or hf_name,
            )
        )
    return found


def _files(data: Table, folder: str) -> dict[str, Any]:
    """Return the source of a folder of token files; what is special in a glob is not, in the name of a folder."""
    return {"store": f"{glob.escape(folder.rstrip('/'))}/{data.text('file_pattern', '*.npy')}"}


def _texts(data: Table, name: str, config: str, where: str) -> dict[str, Any]:
    tokenizer = data.text("tokenizer_path")
    if not tokenizer:
        raise ConfigError(
            f"{where}: data.tokenizer_path must be given to read text of Hugging Face, got nothing; "
            "add the folder of a tokenizer"
        )
    return text_source(
        name,
        config=config,
        split=data.text("hf_dataset_split", DEFAULT_SPLIT),
        tokenizer=tokenizer,
        text_field=data.text("hf_dataset_text_field", DEFAULT_FIELD),
    )


def _stages(data: Table, datasets: Sequence[_Dataset], steps: int, notes: list[str]) -> list[dict[str, Any]]:
    phases = _phases(data, steps, notes)
    mixed = bool(data.tables("datasets"))
    original = {dataset.source["name"]: dataset.weight for dataset in datasets}
    stages: list[dict[str, Any]] = []
    if not phases or phases[0].start_step > 0:
        stages.append({"name": "base", "start_step": 0} | ({"weights": original} if mixed else {}))
    for phase in phases:
        stage: dict[str, Any] = {"name": phase.name, "start_step": phase.start_step}
        weights = phase.table.weights(phase.key)
        if mixed:
            stage["weights"] = _phase_weights(phase, weights, datasets, original)
        elif weights:
            notes.append(f"stage {phase.name!r}: {phase.key} has no effect, as there is one source")
        stages.append(stage | ({"lr_scale": phase.lr_scale} if phase.lr_scale != 1.0 else {}))
    return stages


def _phases(data: Table, steps: int, notes: list[str]) -> list[_Phase]:
    tables = data.tables("phases")
    anneal = data.whole("anneal_start_step", 0, least=0)
    weights = data.weights("anneal_weights")
    if tables and anneal:
        raise ConfigError(
            f"{data.where}: phases and anneal_start_step must not be given both, got {len(tables)} phases and "
            f"step {anneal}; make the annealing one of the phases"
        )
    if anneal and not weights:
        raise ConfigError(
            f"{data.where}: anneal_weights must be given with anneal_start_step, got none; add the weights"
        )
    if weights and not anneal:
        notes.append("data.anneal_weights: no effect, as anneal_start_step is 0")
    found = [_phase(table, f"phase-{index}") for index, table in enumerate(tables, 1)]
    for before, after in pairwise(found):
        if after.start_step <= before.start_step:
            raise ConfigError(
                f"{after.table.where}: start_step must rise from phase to phase, got {after.start_step} after "
                f"{before.start_step}; put them in order"
            )
    if anneal:
        found = [_Phase(table=data, key="anneal_weights", name="anneal", start_step=anneal, lr_scale=1.0)]
    for phase in found:
        if phase.start_step >= steps:
            key = "anneal_start_step" if anneal else "start_step"
            raise ConfigError(
                f"{phase.table.where}: {key} must be below the {steps} steps of train.max_steps, "
                f"got {phase.start_step}; lower it, or leave it out"
            )
    return found


def _phase(table: Table, name: str) -> _Phase:
    table.only(_PHASE)
    return _Phase(
        table=table,
        key="dataset_weights",
        name=name,
        start_step=table.whole("start_step", 0, least=0),
        lr_scale=table.positive("lr_scale", 1.0),
    )


def _phase_weights(
    phase: _Phase, said: Mapping[str, float], datasets: Sequence[_Dataset], original: Mapping[str, float]
) -> dict[str, float]:
    """Return what a phase draws: the weights that it says, else the original ones; 0 is left out."""
    aliases = [dataset.alias for dataset in datasets]
    # What two datasets are called alike names neither of them.
    names = {dataset.alias: dataset.source["name"] for dataset in datasets if aliases.count(dataset.alias) == 1}
    names = {name: name for name in original} | names
    weights = dict(original)
    for alias, weight in said.items():
        if alias not in names:
            raise ConfigError(
                f"{phase.table.where}: {phase.key} must name datasets, got {alias!r}; {nearest(alias, names)}"
            )
        weights[names[alias]] = weight
    drawn = {name: weight for name, weight in weights.items() if weight > 0}
    if not drawn:
        raise ConfigError(
            f"{phase.table.where}: {phase.key} must leave a source with a weight above 0, got {dict(said)}; "
            "raise one"
        )
    return drawn


def _packing_notes(data: Table, sources: Sequence[Mapping[str, Any]]) -> list[str]:
    if not data.flag("pack_sequences", False):
        return ["data.pack_sequences = false: rows are the stream of tokens cut, and labels cross documents"]
    notes = ["data.pack_sequences = true: rows are the stream of tokens cut, labels and positions end at documents"]
    if any("store" in source and "eos_id" not in source for source in sources):
        notes.append(
            "the config does not say the id of EOS: an array of two dimensions has a document a row, any other "
            f"file is one document; add eos_id = ... under [{OURS}]"
        )
    return notes
