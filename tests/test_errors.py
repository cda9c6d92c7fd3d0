from __future__ import annotations

import ast
import inspect
import re
import shutil
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

import tokenmill as tm
from tokenmill import errors
from tokenmill.demo import TOKENIZER_DIR
from tokenmill.errors import StoreCorruptError, TokenmillError, met_in, nearest

PACKAGE = Path(errors.__file__).parent
CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, TokenmillError)]


def test_the_drawn_tree_is_the_tree_of_classes():
    drawn: dict[str, tuple[str, str]] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"([ │├└─]+)(\w+Error)(?:\((\w+)\))?", line)
        if found:
            depth = (len(found[1]) - 4) // 4
            parents[depth:] = [found[2]]
            drawn[found[2]] = (parents[depth - 1] if depth else "Exception", found[3] or "")
    real = {}
    for kind in CLASSES:
        first, *others = kind.__bases__
        real[kind.__name__] = (first.__name__, "".join(other.__name__ for other in others))
    assert drawn == real


def test_errors_of_ours_are_caught_as_the_builtins_that_they_are():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.StoreMissingError, FileNotFoundError)
    assert issubclass(errors.StoreExistsError, FileExistsError)
    assert issubclass(errors.PlanError, IndexError)
    assert all(issubclass(kind, TokenmillError) and kind.__doc__ for kind in CLASSES)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_prints_its_message_and_nothing_else(kind):
    # An OSError with one argument does; with two it would print [Errno ...].
    assert str(kind("file not found: a.bin; look elsewhere")) == ("file not found: a.bin; look elsewhere")


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("seqlen", ["seq_len", "seed"], "did you mean 'seq_len'?"),
        ("zzz", ["seq_len", "seed"], "known: seq_len, seed"),
        ("seed", iter(["seq_len", "seeds"]), "did you mean 'seeds'?"),
        ("x", [], "known: "),
    ],
)
def test_nearest_names_the_known_one_or_all(name, known, text):
    assert nearest(name, known) == text


def test_an_error_that_was_met_in_a_place_keeps_its_kind_and_its_words():
    error = met_in("a.parquet: row group 3", StoreCorruptError("a.bin: must be whole, got half; make it again"))
    assert type(error) is StoreCorruptError
    assert str(error) == "a.parquet: row group 3: a.bin: must be whole, got half; make it again"


def texts_of(path: Path) -> list[str]:
    """Return every text in a file but its docstrings, with {} for what is filled in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append(
                "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found.append(node.value)
    return found


def test_what_python_says_names_no_flag_of_the_command_line():
    """A whole command in backticks is for everybody: `tokenmill verify --hashes`."""
    flags = [
        (str(path.relative_to(PACKAGE)), text)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in ("cli", "demo", "view")
        for text in texts_of(path)
        if re.search(r"(?<![\w-])--[a-z]", re.sub(r"`tokenmill [^`]*`", "", text))
    ]
    assert flags == []


def messages() -> list[tuple[str, str]]:
    """Return every message that is raised, with {...} for what is filled in."""
    found = []
    names = {kind.__name__ for kind in CLASSES}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = node.exc.args[0]
                if ast.unparse(node.exc.func) in names and isinstance(text, ast.JoinedStr | ast.Constant):
                    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                    shown = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)
                    found.append((f"{path.relative_to(PACKAGE)}:{node.lineno}", shown))
    return found


def test_every_message_says_what_is_wrong_and_the_way_out():
    """[A1.a]"""
    all_messages = messages()
    assert len(all_messages) > 50
    form = re.compile(r".+; .+", re.DOTALL)
    assert [(place, text) for place, text in all_messages if not form.match(text)] == []


NO_PATHS = [None, 5, 1.5, b"x", True, {}]
ENTRIES = {
    "prepare inputs": lambda value: tm.prepare(value, out="store"),
    "prepare an input": lambda value: tm.prepare([value], out="store"),
    "prepare out": lambda value: tm.prepare("a.jsonl", out=value),
    "prepare tokenizer": lambda value: tm.prepare("a.jsonl", out="store", tokenizer=value),
    "open_store": tm.open_store,
    "verify": tm.verify,
    "import_store": lambda value: tm.import_store(value, out="store"),
    "detect_format": tm.detect_format,
    "open_tokenizer": tm.open_tokenizer,
    "Run.from_toml": tm.Run.from_toml,
}


@pytest.mark.parametrize(
    ("entry", "value"),
    [(entry, value) for entry in ENTRIES for value in NO_PATHS if (entry, value) != ("prepare an input", {})],
    ids=repr,
)
def test_what_is_no_path_is_refused_at_every_front_door(tmp_path, monkeypatch, entry, value):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(
        tm.TokenmillError, match=r"^\w+: (expected a path|must name at least one file), got .*; give a"
    ):
        ENTRIES[entry](value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": "2"}, "workers: expected a whole number, got '2'; leave out the quotes"),
        ({"workers": 1.5}, "workers: expected a whole number, got 1.5; change its type"),
        ({"rebuild": "yes"}, "rebuild: expected true or false, got 'yes'; change its type"),
        ({"recipe": 5}, "recipe: expected a path, got 5; give a string or a pathlib.Path"),
        ({"options": {"min_chars": 3}}, "options: must be PrepareOptions, got {'min_chars': 3}; write"),
    ],
)
def test_arguments_of_another_type_are_refused_before_anything_is_read(arguments, message):
    with pytest.raises(tm.ConfigError, match=re.escape(message)):
        tm.prepare("nowhere.jsonl", out="nowhere", **arguments)


WRONG = [None, 5.5, b"x", {}, [], object(), -1, slice(0, 2), float("nan"), ("a",)]
BUILT = {"seq_len": 128, "global_batch_size": 8, "steps": 10}
DOORS = {
    "Run": tm.Run,
    "Run.from_tables": tm.Run.from_tables,
    "Run.from_tables folder": lambda value: tm.Run.from_tables({"run": {}}, folder=value),
    **{
        f"Run.build {name}": lambda value, name=name: tm.Run.build(
            **{"stores": "stores/demo", **BUILT, name: value}
        )
        for name in inspect.signature(tm.Run.build).parameters
    },
    **{
        f"{record.__name__} {name}": lambda value, record=record, given=given, name=name: record(
            **{**given, name: value}
        )
        for record, given in (
            (tm.RunConfig, BUILT),
            (tm.SourceConfig, {"name": "a", "store": "b"}),
            (tm.StageConfig, {"name": "a", "start_step": 0}),
            (tm.SkipConfig, {"steps": "0:1"}),
            (tm.QuarantineConfig, {"source": "a", "from_step": 0}),
            (tm.EvalConfig, {"name": "a", "source": "b"}),
            (tm.Layout, {}),
        )
        for name in (item.name for item in fields(record))
    },
    **{
        f"{function.__name__} {name}": lambda value, function=function, given=given, name=name: function(
            **{**given, name: value}
        )
        for function, given in (
            (tm.open_store, {"path": "stores/demo"}),
            (tm.open_tokenizer, {"spec": "bytes"}),
            (tm.verify, {"path": "stores/demo"}),
            (tm.detect_format, {"path": "stores/demo"}),
            (tm.import_store, {"path": "stores/demo", "out": "out"}),
            (tm.export_store, {"path": "stores/demo", "out": "out", "format": "npy"}),
            (tm.upload, {"store": "stores/demo", "address": "file:///nowhere/at/all"}),
        )
        for name in inspect.signature(function).parameters
    },
}
OPENED = {
    **{
        f"Run.loader {name}": lambda value, run, name=name: run.loader(**{name: value})
        for name in inspect.signature(tm.Run.loader).parameters
        if name != "self"
    },
    "loader[...]": lambda value, loader: loader[value],
    "loader.batch_at": lambda value, loader: loader.batch_at(value),
    "loader.seek": lambda value, loader: loader.seek(value),
    "loader.load_state_dict": lambda value, loader: loader.load_state_dict(value),
    "loader.metrics": lambda value, loader: loader.metrics(prefix=value),
    "run.what": lambda value, run: run.what(value),
    "run.when source": lambda value, run: run.when(value, 17),
    "run.when document": lambda value, run: run.when("demo", value),
    "run.diff": lambda value, run: run.diff(value),
    "run.fork at": lambda value, run: run.fork(at=value, to="new.toml"),
    "run.fork to": lambda value, run: run.fork(at=5, to=value),
    "run.to_toml": lambda value, run: run.to_toml(value),
    "run.record_batches": lambda value, run: run.record_batches(value, 0, 1),
    "run.check_batches": lambda value, run: run.check_batches(value),
    "run.evals[...]": lambda value, run: run.evals[value],
    "run.lr_schedule": lambda value, run: run.lr_schedule(warmup_tokens=value),
    "plan.rows": lambda value, run: run.plan().rows(value),
    "plan.what": lambda value, run: run.plan().what(value),
    "plan.when": lambda value, run: run.plan().when(value, 1),
    "plan.tokens_seen": lambda value, run: run.plan().tokens_seen(value),
    "store[...]": lambda value, store: store[value],
    "store.find": lambda value, store: store.find(url=value),
    "store.fetch": lambda value, store: store.fetch(value, 5, "sequence"),
    "store.fetch key": lambda value, store: store.fetch(0, 5, value),
    "store.fetch_record": lambda value, store: store.fetch_record(value),
    "store.origin": lambda value, store: store.origin(value),
}


@pytest.fixture(scope="module")
def objects(demo_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("doors")
    shutil.copytree(demo_folder, folder, dirs_exist_ok=True)
    run = tm.Run.from_toml(folder / "run.toml")
    return {
        "folder": folder,
        "run": run,
        "loader": run.loader(),
        "store": tm.open_store(folder / "stores" / "demo"),
    }


@pytest.mark.parametrize("door", [*DOORS, *OPENED])
def test_no_front_door_answers_with_an_error_of_python(objects, monkeypatch, door):
    monkeypatch.chdir(objects["folder"])
    call = DOORS.get(door) or OPENED[door]
    taken = {name: value for name, value in objects.items() if name in inspect.signature(call).parameters}
    for value in WRONG:
        with suppress(tm.TokenmillError):  # some values are right, such as None for what may be left out
            call(value, **taken)


@pytest.mark.parametrize("field", fields(tm.PrepareOptions), ids=lambda field: field.name)
def test_every_option_says_which_type_it_takes(field):
    wrong = 5 if field.name == "mask" else {}
    with pytest.raises(tm.ConfigError, match=rf"^{field.name}: expected (a|true) .*, got {wrong}; change its type"):
        tm.PrepareOptions(**{field.name: wrong})


def test_paths_may_be_pathlib_s(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a mill"}\n')
    (tmp_path / "own.toml").write_text('preset = "text"\n')
    report = tm.prepare(
        [tmp_path / "a.jsonl"],
        out=tmp_path / "store",
        tokenizer=Path(TOKENIZER_DIR),
        recipe=tmp_path / "own.toml",
        progress=False,
    )
    identity = tm.open_tokenizer(Path(TOKENIZER_DIR)).identity.to_json()
    assert tm.open_store(report.path).manifest.tokenizer == identity
