"""A config that contradicts itself is refused, with the way out."""

import tomllib
from dataclasses import asdict, fields

import pytest

from tokenmill.adapters.kempnerforge import (
    DataConfig,
    DatasetSource,
    StatefulDataLoader,
    TrainingPhase,
    build_dataloader,
)
from tokenmill.config.dialects import translate
from tokenmill.config.dialects.kempnerforge import DataTable
from tokenmill.errors import ConfigError

WEB, CODE = DatasetSource(path="data/web", name="web"), DatasetSource(hf_name="org/code", weight=0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DatasetSource(path="a", weight=0), "dataset 'a': weight must be positive, got 0"),
        (
            lambda: DataConfig(datasets=[DatasetSource(name="x")]),
            "dataset 'x': must have either path or hf_name, got none",
        ),
        (
            lambda: DataConfig(datasets=[DatasetSource("a", hf_name="b")]),
            "must have either path or hf_name, got both",
        ),
        (lambda: TrainingPhase(start_step=-1), "start_step must be at least 0, got -1"),
        (lambda: TrainingPhase(lr_scale=0), "lr_scale must be positive, got 0"),
        (lambda: TrainingPhase(dataset_weights={"a": -1}), "must be at least 0 and finite, got {'a': -1}"),
        (lambda: DataConfig(num_workers=-1), "num_workers must be at least 0 .* got -1 and 2"),
        (lambda: DataConfig(prefetch_factor=0), "got 4 and 0"),
        (lambda: DataConfig(mix_temperature=0), "mix_temperature must be positive, got 0"),
        (lambda: DataConfig(anneal_start_step=-5), "anneal_start_step must be at least 0, got -5"),
        (
            lambda: DataConfig(phases=[TrainingPhase(start_step=5), TrainingPhase(start_step=5)]),
            "phases must rise, got start_step 5 after 5",
        ),
        (
            lambda: DataConfig(phases=[TrainingPhase(start_step=5)], anneal_start_step=9),
            "phases and anneal_start_step must not be given both",
        ),
        (lambda: DataConfig(datasets=[WEB, WEB]), "names of datasets must differ, got 'web' twice"),
        (
            lambda: DataConfig(datasets=[WEB], anneal_start_step=3, anneal_weights={"wbe": 1}),
            "phase at step 3: weights must name datasets, got 'wbe'; did you mean 'web'",
        ),
        (
            lambda: DataConfig(datasets=[WEB], anneal_weights={"wbe": 1}),
            "anneal_weights: weights must name datasets, got 'wbe'; did you mean 'web'",
        ),
        (
            lambda: build_dataloader(DataConfig(anneal_weights={"zzz": 1.0}), batch_size=1, seq_len=8),
            "anneal_weights: weights must name datasets, got 'zzz'; add datasets, or leave the weights out",
        ),
        (
            lambda: StatefulDataLoader(
                range(8), 2, None, DataConfig(hf_dataset_name="x", phases=[TrainingPhase(dataset_weights={"x": 1})])
            ),
            "phase at step 0: weights must name datasets, got 'x'; add datasets",
        ),
    ],
)
def test_a_config_that_cannot_be_right_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


DOCUMENTED = """
[data]
dataset_path = ""
file_pattern = "*.npy"
tokenizer_path = ""
num_workers = 4
pin_memory = true
prefetch_factor = 2
pack_sequences = false
hf_dataset_name = ""
hf_dataset_config = ""
hf_dataset_split = "train"
hf_dataset_text_field = "text"
hf_streaming = false
datasets = []
mix_temperature = 1.0
phases = []
anneal_start_step = 0
anneal_weights = {}
"""


def test_the_documented_table_is_taken_key_by_key_and_has_the_defaults():
    """By the class and by a config file; names that are None by default may be empty."""
    table = tomllib.loads(DOCUMENTED)["data"]
    names = {"hf_dataset_name": None, "hf_dataset_config": None}
    assert {**asdict(DataConfig(**table)), **names} == asdict(DataConfig())
    assert list(table) == [item.name for item in fields(DataTable)]
    found = translate({"train": {}, "data": table | {"dataset_path": "tokens"}}, where="kf.toml", world_size=1)
    assert [source["store"] for source in found.tables["sources"]] == ["tokens/*.npy"]


@pytest.mark.parametrize(
    ("step", "weights", "scale"), [(0, [1, 0.5], 1), (9, [1, 0.5], 1), (10, [0, 0.5], 0.3), (20, [1, 4], 1)]
)
def test_a_phase_holds_from_its_first_step_and_names_only_what_it_changes(step, weights, scale):
    config = DataConfig(
        datasets=[WEB, CODE],
        phases=[
            TrainingPhase(start_step=10, dataset_weights={"web": 0}, lr_scale=0.3),
            TrainingPhase(start_step=20, dataset_weights={"org/code": 4}),
        ],
    )
    assert (config.weights_at(step), config.lr_scale_at(step)) == (weights, scale)


def test_annealing_is_a_phase():
    config = DataConfig(datasets=[WEB, CODE], anneal_start_step=7, anneal_weights={"web": 2})
    assert config.all_phases == (TrainingPhase(start_step=7, dataset_weights={"web": 2}),)
    assert [config.weights_at(step) for step in (6, 7)] == [[1, 0.5], [2, 0.5]]
    assert DataConfig().phase_at(100) is None
