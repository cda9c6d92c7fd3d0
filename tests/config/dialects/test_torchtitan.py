"""A config of the torchtitan fork becomes sources and stages; a folder is one source, whatever stages name it."""

import tomllib

import pytest

from tokenmill.config.dialects import translate
from tokenmill.errors import ConfigError

CUT = "rows are the stream of tokens cut, as there, but no document is trained to predict the next"
FOLDERS = ["/data/web", "/data/books", "/data/code"]


def nanoset(name, start, weights=(0.7, 0.2, 0.1), **changes):
    return {
        "name": name,
        "start_step": start,
        "dataset_type": "nanoset",
        "dataset_folders": FOLDERS,
        "dataset_weights": list(weights),
        "seq_len": 4096,
    } | changes


def taken(*stages, **training):
    other = training.pop("tables", {})
    tables = {"training": {"steps": 100, "local_batch_size": 4} | training, **other}
    if stages:
        tables["training"]["data_stages"] = list(stages)
    return translate(tables, where="tt.toml", world_size=2)


def weights_of(found):
    return [stage.get("weights") for stage in found.tables["stages"]]


def test_a_change_of_mixture_is_two_stages_of_the_same_sources():
    """[M1.c] The pattern of the fork that changes weights alone."""
    found = taken(nanoset("pretrain", 0, end_step=60), nanoset("annealing", 60, (0.4, 0.3, 0.3)))
    assert found.dialect == "torchtitan"
    assert found.tables == {
        "run": {
            "steps": 100,
            "global_batch_size": 8,
            "seq_len": 4096,
            "seed": 1234,
            "packing": "concat",
            "positions": "row",
        },
        "sources": [
            {"name": "web", "store": "/data/web"},
            {"name": "books", "store": "/data/books"},
            {"name": "code", "store": "/data/code"},
        ],
        "stages": [
            {
                "name": "pretrain",
                "start_step": 0,
                "seq_len": 4096,
                "seed": 1234,
                "weights": {"web": 0.7, "books": 0.2, "code": 0.1},
            },
            {
                "name": "annealing",
                "start_step": 60,
                "seq_len": 4096,
                "seed": 1234,
                "weights": {"web": 0.4, "books": 0.3, "code": 0.3},
            },
        ],
    }
    assert found.notes == (
        CUT,
        "token files do not say their vocabulary, without which only stores of tokenmill can be mixed: "
        "add vocab_size = ... under [tokenmill]",
    )


def test_context_extension_changes_the_sequence_length_alone():
    found = taken(nanoset("base", 0), nanoset("long_context", 90, seq_len=32768))
    assert [stage["seq_len"] for stage in found.tables["stages"]] == [4096, 32768]
    assert found.tables["run"]["seq_len"] == 4096
    assert len(found.tables["sources"]) == 3


def test_seeds_are_those_of_the_stages_else_that_of_training_else_their_default():
    found = taken(nanoset("a", 0, dataset_random_seed=1), nanoset("b", 50), dataset_random_seed=7)
    assert [stage["seed"] for stage in found.tables["stages"]] == [1, 7]
    assert [stage["seed"] for stage in taken(nanoset("a", 0)).tables["stages"]] == [1234]
    assert (
        "dataset_random_seed: a new one orders a source from its next epoch on, so that nothing repeats"
        in found.notes
    )


@pytest.mark.parametrize(
    ("tables", "training", "seed"),
    [({}, {}, 1234), ({}, {"seed": 5}, 5), ({"debug": {"seed": 3}}, {"seed": 5}, 3), ({"debug": {}}, {}, 1234)],
)
def test_the_seed_of_the_run_is_that_of_debug_else_of_training(tables, training, seed):
    assert taken(nanoset("a", 0), tables=tables, **training).tables["run"]["seed"] == seed


ABLATION = """
[training]
steps = 10
dataset = "c4_test"
dataset_type = "huggingface"
seq_len = 512

[[training.data_stages]]
name = "ablation_stage"
start_step = 5
dataset = "c4_test"
dataset_type = "huggingface"
seq_len = 512
dataset_random_seed = 9999

[model]
hf_assets_path = "/assets/tokenizer"
"""


def test_steps_before_the_first_stage_are_a_default_one_made_of_training():
    """The pattern of the fork that tries another mixture from a checkpoint on."""
    found = translate(tomllib.loads(ABLATION), where="tt.toml", world_size=8)
    assert found.tables["run"]["global_batch_size"] == 64
    assert found.tables["sources"] == [
        {"name": "c4_test", "documents": ["hf:tests/assets/c4_test"], "tokenizer": "/assets/tokenizer"}
    ]
    assert found.tables["stages"] == [
        {"name": "default", "start_step": 0, "seq_len": 512, "seed": 1234},
        {"name": "ablation_stage", "start_step": 5, "seq_len": 512, "seed": 9999},
    ]
    assert found.notes == (
        "stage 'default': made of [training] for the steps before 5",
        "dataset = 'c4_test': taken as tests/assets/c4_test, split train",
        CUT,
        "dataset_random_seed: a new one orders a source from its next epoch on, so that nothing repeats",
    )


def test_a_config_without_stages_is_one_default_stage():
    found = taken(dataset="org/corpus", seq_len=512, tables={"model": {"tokenizer_path": "/tok"}})
    assert found.tables["stages"] == [{"name": "default", "start_step": 0, "seq_len": 512, "seed": 1234}]
    assert found.tables["sources"] == [{"name": "corpus", "documents": ["hf:org/corpus"], "tokenizer": "/tok"}]


def test_stages_from_step_0_on_override_training():
    found = taken(nanoset("a", 0), dataset="c4", seq_len=512, dataset_type="huggingface")
    assert [source["name"] for source in found.tables["sources"]] == ["web", "books", "code"]
    assert found.notes[:3] == tuple(
        f"training.{name}: not read, the stages start at step 0" for name in ("dataset", "dataset_type", "seq_len")
    )


@pytest.mark.parametrize(
    ("dataset", "path", "documents", "name"),
    [
        ("c4", "", "hf:allenai/c4:en", "c4"),
        ("c4_validation", "", "hf:allenai/c4:en:validation", "c4_validation"),
        ("c4", "/local/c4", "hf:/local/c4", "c4"),
        ("org/corpus", "/local/other", "hf:/local/other", "other"),
    ],
)
def test_a_dataset_is_read_from_its_path_else_by_its_name(dataset, path, documents, name):
    found = taken(dataset=dataset, dataset_path=path, tables={"model": {"hf_assets_path": "/tok"}})
    assert [(source["name"], source["documents"]) for source in found.tables["sources"]] == [(name, [documents])]


@pytest.mark.parametrize("kind", ["preprocessed", "packed_memmap"])
def test_other_types_are_one_path(kind):
    found = taken(dataset_type=kind, dataset_path="/data/web/tokens.npy")
    assert found.tables["sources"] == [{"name": "tokens.npy", "store": "/data/web/tokens.npy"}]


@pytest.mark.parametrize("name", ["org/packed", "/data/packed"])
def test_the_name_of_a_dataset_is_enough_for_preprocessed(name):
    found = taken(dataset_type="preprocessed", dataset=name)
    assert found.tables["sources"] == [{"name": "packed", "store": f"hf:{name}"}]
    assert found.tables["run"]["packing"] == "concat"
    assert "relative" not in " ".join(found.notes)


def test_sequences_of_packed_memmap_are_kept_whole_in_their_stages_alone():
    chats = {"name": "b", "start_step": 10, "dataset_type": "packed_memmap", "dataset_path": "/chats", "seq_len": 8}
    found = taken(nanoset("a", 0, [1.0], dataset_folders=["/data/web"]), chats, nanoset("c", 20))
    assert found.tables["run"]["packing"] == "concat"
    assert [stage.get("packing") for stage in found.tables["stages"]] == [None, "best_fit", None]
    alone = taken(dataset_type="packed_memmap", dataset_path="/chats")
    assert alone.tables["run"]["packing"] == "best_fit"
    assert CUT not in alone.notes


def test_one_place_is_one_source_whatever_type_and_spelling_it_has():
    stages = [
        nanoset("a", 0, [1.0], dataset_folders=["/data/web"]),
        nanoset("b", 10, [0.5, 0.5], dataset_folders=["/data//web/", "/other/web"]),
        {"name": "c", "start_step": 20, "dataset_type": "preprocessed", "dataset_path": "/other/web", "seq_len": 8},
    ]
    found = taken(*stages)
    assert [(source["name"], source["store"]) for source in found.tables["sources"]] == [
        ("web", "/data/web"),
        ("web-2", "/other/web"),
    ]
    assert weights_of(found) == [{"web": 1.0}, {"web": 0.5, "web-2": 0.5}, {"web-2": 1.0}]


def test_a_folder_without_weight_is_left_out_and_one_named_twice_has_both_weights():
    found = taken(nanoset("a", 0, [0.0, 0.5, 0.5], dataset_folders=["/data/none", "/data/web", "/data/web"]))
    assert [source["name"] for source in found.tables["sources"]] == ["web"]
    assert weights_of(found) == [None]
    assert weights_of(taken(nanoset("a", 0, [0.0, 0.5, 0.5]), nanoset("b", 5))) == [
        {"books": 0.5, "code": 0.5},
        {"web": 0.7, "books": 0.2, "code": 0.1},
    ]


@pytest.mark.parametrize(
    ("training", "world_size", "rows", "noted"),
    [
        ({}, None, 8, True),
        ({}, 4, 32, False),
        ({"local_batch_size": 2}, 4, 8, False),
        ({"global_batch_size": -1}, 4, 32, False),
        ({"global_batch_size": 24}, None, 24, False),
        ({"global_batch_size": 24}, 4, 24, False),
    ],
)
def test_the_global_batch_is_said_or_counted_by_ranks(training, world_size, rows, noted):
    """[A1.b]"""
    tables = {"training": {"steps": 10, "dataset_type": "preprocessed", "dataset_path": "/web"} | training}
    found = translate(tables, where="tt.toml", world_size=world_size)
    assert found.tables["run"]["global_batch_size"] == rows
    told = (
        "the rows of a step are those of one rank, as the config does not say how many there are; give world_size=N"
    )
    assert (told in found.notes, found.warnings) == (noted, (told,) if noted else ())


def test_the_ranks_are_those_of_parallelism_where_it_says_them():
    tables = {
        "training": {"steps": 10, "dataset_type": "preprocessed", "dataset_path": "/web", "local_batch_size": 2},
        "parallelism": {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2},
    }
    found = translate(tables, where="tt.toml")
    assert (found.tables["run"]["global_batch_size"], found.warnings) == (16, ())


def test_tokens_of_many_sources_get_the_vocabulary_that_is_said():
    found = taken(nanoset("a", 0), tables={"tokenmill": {"vocab_size": 128256}})
    assert [source["vocab_size"] for source in found.tables["sources"]] == [128256] * 3
    assert found.notes == (CUT,)


def test_relative_paths_are_noted():
    found = taken(dataset_type="preprocessed", dataset_path="./web/")
    assert found.tables["sources"] == [{"name": "web", "store": "web"}]
    assert found.notes[-1] == "'web': relative paths count from the folder of the config"


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"steps": None}, "tt.toml: training: missing key: steps; add steps = ..."),
        ({"steps": 0}, "tt.toml: training.steps: expected a whole number from 1 to 2^40, got 0; change it"),
        (
            {"local_batch_size": 0},
            "tt.toml: training.local_batch_size: expected a whole number from 1 to 2^40, got 0; change it",
        ),
        (
            {"global_batch_size": 0},
            "tt.toml: training: global_batch_size must be at least 1, or -1 for local_batch_size by rank, got 0; "
            "raise it",
        ),
        (
            {"global_batch_size": -2},
            "tt.toml: training: global_batch_size must be at least 1, or -1 for local_batch_size by rank, got -2; "
            "raise it",
        ),
        (
            {},
            "tt.toml: training: dataset must be given for dataset_type huggingface, got nothing; add dataset = ...",
        ),
        (
            {"dataset": "c4"},
            "tt.toml: model: hf_assets_path must be given to read the text of stage 'default', got nothing; "
            "add the folder of a tokenizer",
        ),
        (
            {"dataset_folder": ["/web"]},
            "tt.toml: training: unknown key: 'dataset_folder'; did you mean 'dataset_folders'?",
        ),
        (
            {"data_stage": []},
            "tt.toml: training: unknown key: 'data_stage'; did you mean 'data_stages'?",
        ),
        (
            {"data_stages": {"name": "a"}},
            "tt.toml: training.data_stages: expected a list of tables, got {'name': 'a'}; change its type",
        ),
    ],
)
def test_the_table_of_training_is_checked(training, message):
    """[A1.a]"""
    tables = {"steps": 100} | training
    with pytest.raises(ConfigError) as caught:
        translate({"training": {k: v for k, v in tables.items() if v is not None}}, where="tt.toml")
    assert str(caught.value) == message


def test_keys_that_belong_to_training_are_ignored():
    plain = taken(nanoset("a", 0))
    other = taken(
        nanoset("a", 0),
        max_norm=1.0,
        data_parallel_shard_degree=-1,
        tables={"optimizer": {"lr": 1e-3}, "checkpoint": {"folder": "x"}},
    )
    assert plain == other
