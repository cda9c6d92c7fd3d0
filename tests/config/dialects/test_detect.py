"""A config is taken for what it is, and never for two things at once."""

import ast
from pathlib import Path

import pytest

from tokenmill.config import dialects
from tokenmill.config.dialects import Translation, translate
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
    assert translate(tables, where="run.toml") == Translation(dialect="native", tables=tables, notes=())


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
        ({"data": 3}, "x.toml: data: must be a table, got 3; write [data]"),
        ({"training": [1]}, "x.toml: training: must be a table, got [1]; write [training]"),
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
    assert others <= {"tokenmill.errors", "tokenmill.tables"}
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
