"""Sources have names that a native config accepts, and say what is known of their tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config.dialects.sources import add_facts, free_name, plain_name, text_source
from tokenmill.config.run import SourceConfig
from tokenmill.errors import ConfigError


@given(st.text(max_size=20))
def test_every_path_gives_a_name_that_a_source_may_have(path):
    name = plain_name(path)
    assert SourceConfig(name=name, store="x").name == name
    assert plain_name(name) == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/web", "web"),
        ("/data/web/", "web"),
        ("C:\\data\\web", "web"),
        ("allenai/c4", "c4"),
        ("/data/größe 2", "größe-2"),
        ("/", "data"),
        ("...", "data"),
    ],
)
def test_a_name_is_the_last_part_of_the_path(path, name):
    assert plain_name(path) == name


def test_doubled_names_are_numbered():
    taken = ["web"]
    for _ in range(2):
        taken.append(free_name("web", taken))
    assert taken == ["web", "web-2", "web-3"]


@pytest.mark.parametrize(
    ("config", "split", "spelled"),
    [
        ("", "train", "hf:org/name"),
        ("en", "train", "hf:org/name:en"),
        ("", "validation", "hf:org/name::validation"),
        ("en", "validation", "hf:org/name:en:validation"),
    ],
)
def test_a_dataset_is_spelled_as_documents_are(config, split, spelled):
    from tokenmill.documents.inputs import parse

    source = text_source("org/name", config=config, split=split, tokenizer="tok", text_field="text")
    assert source == {"documents": [spelled], "tokenizer": "tok"}
    assert parse(spelled) == ("org/name", config or None, None if split == "train" else split)


FILES, TEXTS = {"name": "web", "store": "/web/*.npy"}, {"name": "hub", "documents": ["hf:x"], "tokenizer": "t"}
RAW = {"name": "raw", "store": "/raw/*.bin"}
MODEL = {"model": {"vocab_size": 50}}


@pytest.mark.parametrize(
    ("sources", "tables", "added"),
    [
        ([FILES], MODEL, [{}]),  # nothing hangs on it, and all ids would be looked at
        ([RAW], MODEL, [{"vocab_size": 50}]),
        ([FILES, RAW], MODEL, [{"vocab_size": 50}] * 2),
        ([FILES, TEXTS], MODEL, [{"vocab_size": 50}, {}]),
        ([TEXTS], MODEL | {"tokenmill": {"eos_id": 3}}, [{}]),
        ([FILES], MODEL | {"tokenmill": {"eos_id": 3}}, [{"eos_id": 3}]),
        (
            [RAW, FILES],
            MODEL | {"tokenmill": {"vocab_size": 60, "dtype": "uint16", "bos_id": 0}},
            [{"vocab_size": 60, "bos_id": 0, "dtype": "uint16"}] * 2,
        ),
    ],
)
def test_what_is_known_of_tokens_goes_to_sources_of_token_files(sources, tables, added):
    made = [dict(source) for source in sources]
    add_facts(made, tables)
    assert made == [source | more for source, more in zip(sources, added, strict=True)]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"vocabsize": 3}, "tokenmill: keys must be known, got 'vocabsize'; did you mean 'vocab_size'?"),
        ({"eos_id": -1}, "tokenmill.eos_id: must be a whole number from 0 to 2^40, got -1; change it"),
        ({"eos_id": True}, "tokenmill.eos_id: must be a whole number from 0 to 2^40, got True; change its type"),
        ({"dtype": 16}, "tokenmill.dtype: must be a string, got 16; change its type"),
    ],
)
def test_our_own_table_is_checked(table, message):
    with pytest.raises(ConfigError) as caught:
        add_facts([dict(FILES)], {"tokenmill": table})
    assert str(caught.value) == message
