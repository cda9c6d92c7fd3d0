"""Native tables become the text of a file, and the file becomes the same tables."""

import datetime
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config.dialects import to_toml
from tokenmill.config.run import parse_config
from tokenmill.errors import ConfigError

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
TEXT = """\
[run]
steps = 10
global_batch_size = 8
seq_len = 16
cross_document_labels = true
packing = "concat"

[[sources]]
name = "web"
store = "data\\\\\\"web\\""

[[sources]]
name = "a.b"
store = "stores/größe\\t🌾"
max_epochs = 2.0

[[stages]]
name = "base"
start_step = 0
weights = { web = 0.9, "a.b" = 1e-05 }

[[stages]]
name = "late"
start_step = 8
seq_len = 32
"""


def test_tables_are_written_in_the_order_of_the_flow():
    assert to_toml(TABLES) == TEXT


def test_what_is_written_is_read_as_the_same_run():
    assert tomllib.loads(to_toml(TABLES)) == TABLES
    assert parse_config(tomllib.loads(to_toml(TABLES))) == parse_config(TABLES)


def test_a_long_list_has_an_item_a_line():
    documents = [f"data/part-{number:03}.jsonl" for number in range(6)]
    tables = {"sources": [{"name": "web", "documents": documents}]}
    written = to_toml(tables)
    assert written.splitlines()[2:4] == ["documents = [", '    "data/part-000.jsonl",']
    assert tomllib.loads(written) == tables


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
    assert repr(sorted(read.items())) == repr(sorted(tables.items()))


@pytest.mark.parametrize("value", [None, datetime.date(2025, 1, 1), {1, 2}, b"x"])
def test_what_no_config_holds_is_refused(value):
    with pytest.raises(ConfigError, match=r"run\.seed: must be a string, number, .*, got .*; leave it out"):
        to_toml({"run": {"seed": value}})
