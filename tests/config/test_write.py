"""Native tables become the text of a file, and the file becomes the same tables."""

import json
import tomllib

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config.run import parse_config, to_toml

TABLES = {
    "stages": [
        {"name": "base", "start_step": 0, "weights": {"web": 0.9, "a.b": 1e-05}},
        {"name": "late", "start_step": 8, "seq_len": 32},
    ],
    "sources": [
        {"name": "web", "store": 'data\\"web"'},
        {"name": "a.b", "store": "stores/größe\t🌾", "max_epochs": 2.0},
    ],
    "run": {"steps": 10, "global_batch_size": 8, "seq_len": 16, "cross_document_labels": True, "packing": "concat"},
}


def test_tables_are_written_in_the_order_of_the_flow_and_lists_of_them_can_be_added_to():
    lines = to_toml(TABLES).splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        "[run]",
        "[[sources]]",
        "[[sources]]",
        "[[stages]]",
        "[stages.weights]",
        "[[stages]]",
    ]
    assert lines[:3] == ["[run]", "steps = 10", "global_batch_size = 8"]


def test_what_is_written_is_read_as_the_same_run():
    assert tomllib.loads(to_toml(TABLES)) == TABLES
    assert parse_config(tomllib.loads(to_toml(TABLES))) == parse_config(TABLES)


texts = st.text(st.characters(codec="utf-8"), max_size=12)
numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
weights = st.dictionaries(texts, numbers, max_size=4)
values = st.one_of(
    texts, numbers, st.booleans(), st.lists(texts, max_size=5), st.lists(numbers, max_size=9), weights
)
rows = st.lists(st.dictionaries(texts, values, max_size=4), max_size=3)
native = st.fixed_dictionaries(
    {"run": st.dictionaries(texts, values, max_size=6)},
    optional={"sources": rows, "stages": rows, "skip": rows, "quarantine": rows},
)


@given(native)
def test_tables_survive_the_way_through_a_file(tables):
    read = tomllib.loads(to_toml(tables))
    assert read == tables
    # 1 == 1.0 == True, so that types are compared too.
    assert json.dumps(read, sort_keys=True) == json.dumps(tables, sort_keys=True)
