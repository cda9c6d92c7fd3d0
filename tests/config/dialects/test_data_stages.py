"""The rules of data stages, each with its own message."""

import pytest

from tokenmill.config.dialects import translate
from tokenmill.errors import ConfigError

FIRST = {
    "name": "a",
    "start_step": 0,
    "dataset_type": "nanoset",
    "dataset_folders": ["/web", "/code"],
    "dataset_weights": [0.5, 0.5],
    "seq_len": 64,
}
SECOND = FIRST | {"name": "b", "start_step": 50}
PLACE = "tt.toml: training.data_stages[0]: "
TOP = "tt.toml: training: "


def tables_of(*stages):
    return {"training": {"steps": 100, "data_stages": [dict(stage) for stage in stages]}}


def without(name):
    return {key: value for key, value in FIRST.items() if key != name}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        *(
            (without(name), f"{name} must be given, got nothing; add {name} = ...")
            for name in ("name", "start_step", "dataset_type", "seq_len")
        ),
        (FIRST | {"name": " "}, "name must not be empty, got ' '; name the stage"),
        (
            FIRST | {"dataset_type": "nanosets"},
            "dataset_type must be one of huggingface, nanoset, preprocessed, packed_memmap, got 'nanosets'; "
            "did you mean 'nanoset'?",
        ),
        (
            FIRST | {"dataset_type": "huggingface"},
            "dataset must be given for dataset_type huggingface, got nothing; add dataset = ...",
        ),
        (
            without("dataset_folders"),
            "dataset_folders must be given for dataset_type nanoset, got nothing; add dataset_folders = ...",
        ),
        (
            FIRST | {"dataset_type": "preprocessed"},
            "dataset_path must be given for dataset_type preprocessed, got nothing; add dataset_path = ...",
        ),
        (
            FIRST | {"dataset_type": "packed_memmap"},
            "dataset_path must be given for dataset_type packed_memmap, got nothing; add dataset_path = ...",
        ),
        (
            FIRST | {"dataset_folders": ["/web", " "]},
            "dataset_folders must be a list of strings that are not empty, got ['/web', ' ']; change its type",
        ),
        (
            FIRST | {"dataset_weights": [1.5, -0.5]},
            "dataset_weights must not be negative, got [1.5, -0.5]; 0 leaves a folder out",
        ),
        (
            FIRST | {"dataset_weights": [2, 1]},
            "dataset_weights must be at most 1.0, got [2, 1]; divide by their sum",
        ),
        (
            FIRST | {"dataset_weights": [0.5, 0.4]},
            "dataset_weights must sum to 1.0, got [0.5, 0.4] with 0.9; divide by their sum",
        ),
        (
            FIRST | {"dataset_weights": [0.5, 0.50001]},
            "dataset_weights must sum to 1.0, got [0.5, 0.50001] with 1.00001; divide by their sum",
        ),
        (
            FIRST | {"dataset_weights": [0.5, float("nan")]},
            "dataset_weights must be finite numbers, got nan; change it",
        ),
        (
            FIRST | {"dataset_weights": [0.5, 0.25, 0.25]},
            "dataset_weights must be as many as the 2 dataset_folders, got 3; give one to each",
        ),
        (
            without("dataset_weights"),
            "dataset_weights must be given for 2 dataset_folders, got none; "
            "add the share of each, such as its share of all tokens",
        ),
        (FIRST | {"seq_len": 0}, "seq_len must be at least 1, got 0; raise it"),
        (FIRST | {"seq_len": 64.0}, "seq_len must be a whole number, got 64.0; change its type"),
        (FIRST | {"dataset_random_seed": -1}, "dataset_random_seed must be at least 0, got -1; raise it"),
        (FIRST | {"start_step": -1}, "start_step must be at least 0, got -1; raise it"),
        (
            FIRST | {"start_step": 100},
            "start_step must be below the 100 steps of training, got 100; lower it, or leave the stage out",
        ),
        (
            FIRST | {"start_step": 20, "end_step": 20},
            "end_step must be above start_step 20, got 20; raise it",
        ),
        (
            FIRST | {"end_step": 101},
            "end_step must be at most the 100 steps of training, got 101; lower it, or leave it out",
        ),
        (FIRST | {"seqlen": 64}, "keys must be known, got 'seqlen'; did you mean 'seq_len'?"),
    ],
)
def test_a_stage_is_checked(stage, message):
    """[A1.a]"""
    with pytest.raises(ConfigError) as caught:
        translate(tables_of(stage), where="tt.toml")
    assert str(caught.value) == PLACE + message


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [FIRST | {"end_step": 40}, SECOND],
            "data_stages must leave no gap, got none for steps 40 to 49 between 'a' and 'b'; "
            "leave out the end_step of 'a'",
        ),
        (
            [FIRST, SECOND | {"end_step": 90}],
            "data_stages must leave no gap, got none for steps 90 to 99 after 'b'; leave out the end_step of 'b'",
        ),
        (
            [FIRST | {"end_step": 60}, SECOND],
            "data_stages must not overlap, got steps 50 to 59 in 'a' and 'b'; leave out the end_step of 'a'",
        ),
        (
            [FIRST, SECOND, SECOND | {"name": "c", "start_step": 20}],
            "data_stages must be in the order of start_step, got 'c' at 20 after 'b' at 50; order them",
        ),
        (
            [FIRST, FIRST | {"name": "b"}],
            "data_stages must be in the order of start_step, got 'b' at 0 after 'a' at 0; order them",
        ),
        ([FIRST, SECOND | {"name": "a"}], "names of data_stages must differ, got 'a' twice; rename one"),
        (
            [SECOND | {"name": "default"}],
            "dataset must be given for dataset_type huggingface, got nothing; add dataset = ...",
        ),
    ],
)
def test_stages_are_checked_together(stages, message):
    """[A1.a]"""
    with pytest.raises(ConfigError) as caught:
        translate(tables_of(*stages), where="tt.toml")
    assert str(caught.value) == TOP + message


def test_a_stage_must_not_have_the_name_of_the_one_that_is_made():
    tables = tables_of(SECOND | {"name": "default"})
    tables["training"] |= {"dataset_type": "preprocessed", "dataset_path": "/web"}
    with pytest.raises(ConfigError) as caught:
        translate(tables, where="tt.toml")
    assert str(caught.value) == TOP + "names of data_stages must differ, got 'default' twice; rename one"


@pytest.mark.parametrize("end", [None, 50])
def test_a_stage_ends_where_the_next_one_starts_whether_it_says_so_or_not(end):
    first = FIRST if end is None else FIRST | {"end_step": end}
    plain = translate(tables_of(FIRST, SECOND | {"end_step": 100}), where="tt.toml", world_size=1)
    assert translate(tables_of(first, SECOND), where="tt.toml", world_size=1) == plain


def test_weights_may_miss_1_by_the_errors_of_floats():
    folders = [f"/{number}" for number in range(10)]
    stage = FIRST | {"dataset_folders": folders, "dataset_weights": [0.1] * 9 + [0.1 + 1e-7]}
    assert len(translate(tables_of(stage), where="tt.toml").tables["sources"]) == 10


def test_folders_and_weights_of_a_type_that_has_one_place_are_noted():
    stage = FIRST | {"dataset_type": "preprocessed", "dataset_path": "/web"}
    found = translate(tables_of(stage), where="tt.toml", world_size=1)
    assert found.notes[:2] == (
        "stage 'a': dataset_folders has no effect, as there is one place",
        "stage 'a': dataset_weights has no effect, as there is one place",
    )
