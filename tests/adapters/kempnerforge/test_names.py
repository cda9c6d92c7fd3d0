"""Every name, parameter and state key that KempnerForge documents is there."""

import inspect
import json
from dataclasses import fields
from importlib import import_module

import numpy as np
import pytest
from torch.utils.data import Dataset, IterableDataset, Sampler

from tokenmill.adapters import kempnerforge
from tokenmill.adapters.kempnerforge import (
    DataConfig,
    DatasetSource,
    DistributedSampler,
    HuggingFaceDataset,
    MemoryMappedDataset,
    MixtureDataset,
    MixtureSampler,
    StatefulDataLoader,
    StreamingHuggingFaceDataset,
    TrainingPhase,
)

NEEDED = inspect.Parameter.empty

PARAMETERS = {
    "DistributedSampler": {
        "dataset": NEEDED,
        "num_replicas": None,
        "rank": None,
        "shuffle": True,
        "seed": 0,
        "drop_last": True,
    },
    "HuggingFaceDataset": {
        "dataset_name": NEEDED,
        "split": NEEDED,
        "text_field": NEEDED,
        "seq_len": NEEDED,
        "tokenizer_path": NEEDED,
        "dataset_config": None,
        "pack_sequences": False,
    },
    "MemoryMappedDataset": {
        "data_dir": NEEDED,
        "seq_len": NEEDED,
        "file_pattern": "*.npy",
        "pack_sequences": False,
        "eos_token_id": None,
    },
    "StatefulDataLoader": {
        "dataset": NEEDED,
        "batch_size": NEEDED,
        "sampler": None,
        "config": None,
        "collate_fn": None,
    },
    "DatasetSource": {"path": "", "weight": 1.0, "name": "", "hf_name": "", "hf_config": ""},
    "MixtureDataset": {"datasets": NEEDED, "names": NEEDED},
    "MixtureSampler": {
        "cumulative_sizes": NEEDED,
        "weights": NEEDED,
        "num_replicas": None,
        "rank": None,
        "shuffle": True,
        "seed": 0,
        "drop_last": True,
        "temperature": 1.0,
    },
    "StreamingHuggingFaceDataset": {
        "dataset_name": NEEDED,
        "split": NEEDED,
        "text_field": NEEDED,
        "seq_len": NEEDED,
        "tokenizer_path": NEEDED,
        "dataset_config": None,
        "rank": None,
        "world_size": None,
        "seed": 42,
        "shuffle_buffer_size": 10_000,
        "pack_sequences": False,
    },
}
METHODS = {
    "DistributedSampler": ["set_epoch", "set_skip", "state_dict", "load_state_dict", "__len__", "__iter__"],
    "MixtureSampler": ["set_epoch", "set_skip", "update_weights", "state_dict", "load_state_dict"],
    "HuggingFaceDataset": ["state_dict", "load_state_dict", "__getitem__", "__getitems__", "__len__"],
    "MemoryMappedDataset": ["state_dict", "load_state_dict", "close", "__getitem__", "__getitems__", "__len__"],
    "MixtureDataset": ["cumulative_sizes", "dataset_names", "state_dict", "load_state_dict", "__getitems__"],
    "StreamingHuggingFaceDataset": ["state_dict", "load_state_dict", "__iter__"],
    "StatefulDataLoader": ["state_dict", "load_state_dict", "__iter__", "__next__", "__len__"],
}
DATA_CONFIG = {
    "dataset_path": "",
    "file_pattern": "*.npy",
    "tokenizer_path": "",
    "num_workers": 4,
    "pin_memory": True,
    "prefetch_factor": 2,
    "pack_sequences": False,
    "hf_dataset_name": None,
    "hf_dataset_config": None,
    "hf_dataset_split": "train",
    "hf_dataset_text_field": "text",
    "hf_streaming": False,
    "datasets": [],
    "mix_temperature": 1.0,
    "phases": [],
    "anneal_start_step": 0,
    "anneal_weights": {},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_stand_in_the_documented_order_with_their_defaults(name):
    found = inspect.signature(getattr(kempnerforge, name)).parameters
    positional = {
        parameter.name: parameter.default
        for parameter in found.values()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    assert list(positional.items()) == list(PARAMETERS[name].items())


@pytest.mark.parametrize("name", METHODS)
def test_documented_methods_are_there(name):
    assert [method for method in METHODS[name] if not hasattr(getattr(kempnerforge, name), method)] == []


def test_parameters_of_methods_are_the_documented_ones():
    def names(method):
        return list(inspect.signature(method).parameters)[1:]

    for sampler in (DistributedSampler, MixtureSampler):
        assert names(sampler.set_epoch) == ["epoch"]
        assert names(sampler.set_skip) == ["skip"]
        assert names(sampler.load_state_dict) == ["state"]
    assert names(MixtureSampler.update_weights) == ["weights", "temperature"]
    assert names(StatefulDataLoader.load_state_dict) == ["state"]


def test_classes_have_the_documented_bases():
    bases = {
        Sampler: [DistributedSampler, MixtureSampler],
        Dataset: [MemoryMappedDataset, HuggingFaceDataset, MixtureDataset],
        IterableDataset: [StreamingHuggingFaceDataset],
    }
    assert [kind for base, kinds in bases.items() for kind in kinds if not issubclass(kind, base)] == []


def test_a_stream_has_no_length():
    assert hasattr(StreamingHuggingFaceDataset, "__iter__")
    assert not hasattr(StreamingHuggingFaceDataset, "__len__")


def test_fields_of_the_config_have_the_documented_names_and_defaults():
    config = DataConfig()
    assert {name: getattr(config, name) for name in DATA_CONFIG} == DATA_CONFIG
    assert [item.name for item in fields(DatasetSource)] == ["path", "weight", "name", "hf_name", "hf_config"]
    assert TrainingPhase(20, {"web": 1.0}, 0.5) == TrainingPhase(
        start_step=20, dataset_weights={"web": 1.0}, lr_scale=0.5
    )
    assert [item.name for item in fields(TrainingPhase)] == ["start_step", "dataset_weights", "lr_scale"]


@pytest.mark.usefixtures("hub")
def test_states_are_json_and_have_the_documented_keys(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(800, dtype=np.uint16))
    dataset = MemoryMappedDataset(str(tmp_path), 8)
    mixture = MixtureDataset([dataset, dataset], ["a", "b"])
    sampler = DistributedSampler(dataset)
    mixed = MixtureSampler(mixture.cumulative_sizes, [1, 2])
    loader = StatefulDataLoader(dataset, 4, sampler, DataConfig(num_workers=0))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text('{"text": "a miller and his grain"}\n' * 9)
    text = HuggingFaceDataset(
        str(tmp_path / "text"), "train", "text", 8, "bytes", cache_dir=str(tmp_path / "stores")
    )
    documented = [
        (dataset, ["epoch", "total_samples"]),
        (text, ["epoch", "sample_idx", "total_sequences"]),
        (sampler, ["epoch", "seed", "num_replicas", "rank"]),
        (mixed, ["epoch", "seed", "num_replicas", "rank"]),
        (loader, ["epoch", "batches_yielded", "sampler"]),
        (mixture, ["dataset_0", "dataset_1"]),
    ]
    for thing, keys in documented:
        state = thing.state_dict()
        assert [key for key in keys if key not in state] == [], type(thing).__name__
        assert json.loads(json.dumps(state)) == state
        assert len(json.dumps(state)) < 1000


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "dataset",
            ["MemoryMappedDataset", "HuggingFaceDataset", "StreamingHuggingFaceDataset", "MixtureDataset"],
        ),
        ("sampler", ["DistributedSampler", "MixtureSampler"]),
        ("dataloader", ["StatefulDataLoader"]),
    ],
)
def test_modules_have_the_documented_names(module, names):
    found = import_module(f"tokenmill.adapters.kempnerforge.{module}")
    assert [getattr(found, name) for name in names] == [getattr(kempnerforge, name) for name in names]


def test_every_name_offered_has_words_about_it():
    assert [name for name in kempnerforge.__all__ if not getattr(kempnerforge, name).__doc__] == []
