"""A config is taken for what it is, never for two things at once; its sources have names and facts that fit."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config import dialects
from tokenmill.config.dialects import free_name, hub_name, plain_name, text_source, translate
from tokenmill.config.run import SourceConfig, Translation
from tokenmill.errors import ConfigError

RUN = {"steps": 10, "global_batch_size": 8, "seq_len": 16}
WEB = {"name": "web", "store": "stores/web"}
NATIVE = {"run": RUN, "sources": [WEB]}
KEMPNERFORGE = {"data": {"dataset_path": "/data/web"}}
TORCHTITAN = {"training": {"steps": 10, "dataset_type": "preprocessed", "dataset_path": "/data/web"}}


@pytest.mark.parametrize(
    "tables", [NATIVE, {"run": RUN}, {"sources": [WEB]}, {"stages": []}, NATIVE | {"modle": 1}, {"run": 3}]
)
def test_native_tables_stay_as_they_are(tables):
    assert translate(tables, where="run.toml") == Translation(tables=tables)


@pytest.mark.parametrize(
    ("tables", "dialect"),
    [
        (KEMPNERFORGE, "KempnerForge"),
        (KEMPNERFORGE | {"model": {"dim": 4}, "optimizer": {}}, "KempnerForge"),
        (TORCHTITAN, "torchtitan"),
        (TORCHTITAN | {"model": {"name": "llama3"}, "optimizer": {}}, "torchtitan"),
    ],
)
def test_a_foreign_config_is_told_by_its_tables(tables, dialect):
    found = translate(tables, where="run.toml", world_size=1)
    assert (found.dialect, list(found.tables)) == (dialect, ["run", "sources", "stages"])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            NATIVE | KEMPNERFORGE,
            "x.toml: must be a config of one kind, got [run] (native) and [data] (KempnerForge); "
            "keep the tables of one",
        ),
        (
            KEMPNERFORGE | TORCHTITAN,
            "x.toml: must be a config of one kind, got [data] (KempnerForge) and [training] (torchtitan); "
            "keep the tables of one",
        ),
        (
            {},
            "x.toml: must have [run] and [[sources]] (native), [data] (KempnerForge), or [training] (torchtitan), "
            "got no table; add one of them",
        ),
        (
            {"model": {}, "optimizer": {}},
            "x.toml: must have [run] and [[sources]] (native), [data] (KempnerForge), or [training] (torchtitan), "
            "got [model], [optimizer]; add one of them",
        ),
        (
            {"traning": {}},
            "x.toml: must have [run] and [[sources]] (native), [data] (KempnerForge), or [training] (torchtitan), "
            "got [traning]; did you mean 'training'?",
        ),
        ({"data": 3}, "x.toml: data: expected a table, got 3; write [data]"),
        ({"training": [1]}, "x.toml: training: expected a table, got [1]; write [training]"),
    ],
)
def test_a_config_of_several_kinds_or_none_is_refused(tables, message):
    """[A1.a]"""
    with pytest.raises(ConfigError) as caught:
        translate(tables, where="x.toml")
    assert str(caught.value) == message


def test_a_world_without_ranks_is_refused():
    with pytest.raises(ConfigError) as caught:
        translate(KEMPNERFORGE, where="x.toml", world_size=0)
    assert str(caught.value) == "world_size: must be at least 1, got 0; leave it out for one rank"


@pytest.mark.parametrize("path", sorted(Path(dialects.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_translating_opens_no_file_and_knows_no_store(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    ours = {name for name in imported if name.startswith("tokenmill")}
    others = {name for name in ours if not name.startswith("tokenmill.config.dialects")}
    assert others <= {"tokenmill.config.run", "tokenmill.errors", "tokenmill.tables"}
    allowed = {
        "__future__",
        "collections.abc",
        "dataclasses",
        "glob",
        "itertools",
        "math",
        "posixpath",
        "re",
        "typing",
    }
    assert imported - ours <= allowed
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"open", "print", "glob.glob", "glob.iglob", "posixpath.exists", "posixpath.abspath"}


def test_edits_of_a_config_of_others_are_made_in_its_native_form():
    with pytest.raises(ConfigError) as error:
        translate({"data": {"dataset_path": "x"}, "skip": [{"steps": "1:2"}]}, where="run.toml")
    assert str(error.value) == (
        "run.toml: must be a config of one kind, got [skip] (native) and [data] (KempnerForge); "
        "print it as our own with `tokenmill plan --to-native` and edit that"
    )


def test_a_native_config_does_not_load_the_dialects(tmp_path):
    (tmp_path / "run.toml").write_text(
        'run = {steps = 1, global_batch_size = 1, seq_len = 1}\nsources = [{name = "web", store = "x"}]\n'
    )
    code = (
        f"import sys, tokenmill; tokenmill.Run.from_toml({str(tmp_path / 'run.toml')!r}); "
        "print([name for name in sys.modules if 'dialects' in name])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


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
    from tokenmill.documents.hugging_face import parse

    assert hub_name("org/name", config, split) == spelled
    assert text_source(spelled, tokenizer="tok", text_field="text") == {"documents": [spelled], "tokenizer": "tok"}
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
    dialects._add_facts([source for source in made if "store" in source], tables, mixed=len(made) > 1)
    assert made == [source | more for source, more in zip(sources, added, strict=True)]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"vocabsize": 3}, "tokenmill: unknown key: 'vocabsize'; did you mean 'vocab_size'?"),
        ({"eos_id": -1}, "tokenmill.eos_id: expected a whole number from 0 to 2^40, got -1; change it"),
        ({"eos_id": True}, "tokenmill.eos_id: expected a whole number from 0 to 2^40, got True; change its type"),
        ({"dtype": 16}, "tokenmill.dtype: expected a string, got 16; change its type"),
    ],
)
def test_our_own_table_is_checked(table, message):
    with pytest.raises(ConfigError) as caught:
        dialects._add_facts([dict(FILES)], {"tokenmill": table}, mixed=False)
    assert str(caught.value) == message
