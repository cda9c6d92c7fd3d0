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
PLACE = "training.data_stages[0]"


def tables_of(*stages):
    return {"training": {"steps": 100, "data_stages": [dict(stage) for stage in stages]}}


def without(name):
    return {key: value for key, value in FIRST.items() if key != name}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        *(
            (without(name), f"{PLACE}: missing key: {name}; add {name} = ...")
            for name in ("name", "start_step", "dataset_type", "seq_len")
        ),
        (FIRST | {"name": " "}, "training.data_stages: name must not be empty, got ' '; name the stage"),
        (
            FIRST | {"dataset_type": "nanosets"},
            "stage 'a': dataset_type must be one of huggingface, nanoset, preprocessed, packed_memmap, got "
            "'nanosets'; "
            "did you mean 'nanoset'?",
        ),
        (
            FIRST | {"dataset_type": "huggingface"},
            "stage 'a': dataset must be given for dataset_type huggingface, got nothing; add dataset = ...",
        ),
        (
            without("dataset_folders"),
            "stage 'a': dataset_folders must be given for dataset_type nanoset, got nothing; "
            "add dataset_folders = ...",
        ),
        (
            FIRST | {"dataset_type": "preprocessed"},
            "stage 'a': dataset_path must be given for dataset_type preprocessed, got nothing; "
            "add dataset_path = ...",
        ),
        (
            FIRST | {"dataset_type": "packed_memmap"},
            "stage 'a': dataset_path must be given for dataset_type packed_memmap, got nothing; "
            "add dataset_path = ...",
        ),
        (
            FIRST | {"dataset_folders": ["/web", " "]},
            "stage 'a': dataset_folders must not be empty strings, got ['/web', ' ']; leave them out",
        ),
        (
            FIRST | {"dataset_weights": [1.5, -0.5]},
            "stage 'a': dataset_weights must lie within 0 and 1, got [1.5, -0.5]; "
            "divide by their sum, 0 leaves a folder out",
        ),
        (
            FIRST | {"dataset_weights": [2, 1]},
            "stage 'a': dataset_weights must lie within 0 and 1, got [2, 1]; "
            "divide by their sum, 0 leaves a folder out",
        ),
        (
            FIRST | {"dataset_weights": [0.5, 0.4]},
            "stage 'a': dataset_weights must sum to 1.0, got [0.5, 0.4] with 0.9; divide by their sum",
        ),
        (
            FIRST | {"dataset_weights": [0.5, 0.50001]},
            "stage 'a': dataset_weights must sum to 1.0, got [0.5, 0.50001] with 1.00001; divide by their sum",
        ),
        (
            FIRST | {"dataset_weights": [0.5, float("nan")]},
            "stage 'a': dataset_weights must lie within 0 and 1, got [0.5, nan]; "
            "divide by their sum, 0 leaves a folder out",
        ),
        (
            FIRST | {"dataset_weights": [0.5, 0.25, 0.25]},
            "stage 'a': dataset_weights must be as many as the 2 dataset_folders, got 3; give one to each",
        ),
        (FIRST | {"seq_len": 0}, f"{PLACE}.seq_len: expected a whole number from 1 to 2^40, got 0; change it"),
        (
            FIRST | {"seq_len": 64.0},
            f"{PLACE}.seq_len: expected a whole number from 1 to 2^40, got 64.0; change its type",
        ),
        (
            FIRST | {"dataset_random_seed": -1},
            f"{PLACE}.dataset_random_seed: expected a whole number from 0 to 2^63 - 1, got -1; change it",
        ),
        (
            FIRST | {"start_step": -1},
            f"{PLACE}.start_step: expected a whole number from 0 to 2^40, got -1; change it",
        ),
        (
            FIRST | {"start_step": 100},
            "stage 'a': start_step must be below 100, where training ends, got 100; "
            "order the stages, or leave it out",
        ),
        (
            FIRST | {"start_step": 20, "end_step": 20},
            "stage 'a': end_step must be above start_step 20, got 20; raise it",
        ),
        (
            FIRST | {"end_step": 101},
            "stage 'a': end_step must be 100, where training ends, as stages leave no gap and do not overlap, got "
            "101; leave it out",
        ),
        (FIRST | {"seqlen": 64}, f"{PLACE}: unknown key: 'seqlen'; did you mean 'seq_len'?"),
    ],
)
def test_a_stage_is_checked(stage, message):
    """[A1.a]"""
    with pytest.raises(ConfigError) as caught:
        translate(tables_of(stage), where="tt.toml")
    assert str(caught.value) == f"tt.toml: {message}"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [FIRST | {"end_step": 40}, SECOND],
            "stage 'a': end_step must be 50, where stage 'b' starts, as stages leave no gap and do not overlap, "
            "got 40; leave it out",
        ),
        (
            [FIRST, SECOND | {"end_step": 90}],
            "stage 'b': end_step must be 100, where training ends, as stages leave no gap and do not overlap, "
            "got 90; leave it out",
        ),
        (
            [FIRST | {"end_step": 60}, SECOND],
            "stage 'a': end_step must be 50, where stage 'b' starts, as stages leave no gap and do not overlap, "
            "got 60; leave it out",
        ),
        (
            [FIRST, SECOND, SECOND | {"name": "c", "start_step": 20}],
            "stage 'b': start_step must be below 20, where stage 'c' starts, got 50; "
            "order the stages, or leave it out",
        ),
        (
            [FIRST, FIRST | {"name": "b"}],
            "stage 'a': start_step must be below 0, where stage 'b' starts, got 0; "
            "order the stages, or leave it out",
        ),
        (
            [FIRST, SECOND | {"name": "a"}],
            "stage 'a': names of data_stages must differ, got it twice; rename one",
        ),
        (
            [SECOND],
            "training: dataset must be given for dataset_type huggingface, got nothing; add dataset = ...",
        ),
    ],
)
def test_stages_are_checked_together(stages, message):
    """[A1.a]"""
    with pytest.raises(ConfigError) as caught:
        translate(tables_of(*stages), where="tt.toml")
    assert str(caught.value) == f"tt.toml: {message}"


def test_a_stage_must_not_have_the_name_of_the_one_that_is_made():
    tables = tables_of(SECOND | {"name": "default"})
    tables["training"] |= {"dataset_type": "preprocessed", "dataset_path": "/web"}
    with pytest.raises(ConfigError) as caught:
        translate(tables, where="tt.toml")
    assert (
        str(caught.value) == "tt.toml: stage 'default': names of data_stages must differ, got it twice; rename one"
    )


@pytest.mark.parametrize("end", [None, 50])
def test_a_stage_ends_where_the_next_one_starts_whether_it_says_so_or_not(end):
    first = FIRST if end is None else FIRST | {"end_step": end}
    plain = translate(tables_of(FIRST, SECOND | {"end_step": 100}), where="tt.toml", world_size=1)
    assert translate(tables_of(first, SECOND), where="tt.toml", world_size=1) == plain


def test_without_weights_the_sizes_of_all_folders_stand_for_them():
    stages = translate(tables_of(without("dataset_weights"), SECOND), where="tt.toml", world_size=1).tables[
        "stages"
    ]
    assert [stage["weights"] for stage in stages] == ["tokens", {"web": 0.5, "code": 0.5}]
    other = SECOND | {"dataset_folders": ["/web", "/books"]}
    with pytest.raises(ConfigError) as caught:
        translate(tables_of(without("dataset_weights"), other), where="tt.toml", world_size=1)
    assert str(caught.value) == (
        "tt.toml: stage 'a': dataset_weights must be given for 2 of 3 folders, got none; "
        "add the share of each, such as its share of all tokens"
    )


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
