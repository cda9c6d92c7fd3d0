"""The rules that keep the house in order: who may import whom, and how large things may grow."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import tokenmill
from tokenmill.hooks import attached

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tokenmill"
MODULES = sorted(PACKAGE.rglob("*.py"))
FLOOR = {
    "errors",
    "types",
    "fingerprint",
    "fields",
    "reasons",
    "tables",
    "caches",
    "compiled",
    "hooks",
    "progress",
    "__version__",
}
"""What every room stands on; these know one another alone."""
MAKING = {"documents", "encode", "store", "plan", "packing", "loader", "live", "config", "build"}
MAY_IMPORT = {
    "documents": set(),
    "encode": set(),
    "store": set(),
    "plan": set(),
    "packing": {"store", "plan"},
    "loader": {"store", "plan", "packing"},
    "live": {"documents", "encode", "store", "plan", "packing", "loader"},
    "config": {"plan"},
    "build": {"documents", "encode", "store", "config"},
    "run": {*MAKING, "inspect"},
    "inspect": {*MAKING, "run"},
    "adapters": {*MAKING, "run"},
    "view": {"plan", "run", "inspect", "store", "build"},
    "cli": {*MAKING, "run", "inspect", "adapters", "view", "demo"},
    "demo": set(),
    "torch": {"adapters"},
    "__main__": {"cli"},
    "__init__": {*MAKING, "run"},
    **{part: set() for part in FLOOR},
}
"""Room -> rooms that it may import beside itself and the floor: at the top, in functions and for type checkers."""
FRAMEWORKS = {"torch", "jax", "transformers", "lightning", "pytorch_lightning", "torchdata", "torchtitan"}


def part_of(path: Path) -> str:
    """Return the part of the house that a file belongs to: its folder, or its own name at the top."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes of a tree; walking it takes longer than reading the file."""
    return list(ast.walk(tree))


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Yield the full name of everything imported, at the top, in functions and for type checkers alike."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports must be absolute"
            assert node.module is not None
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def parts_imported(tree: ast.AST) -> set[str]:
    """Return the parts of tokenmill that are imported."""
    names = [name.split(".") for name in imports_of(tree) if name.split(".")[0] == "tokenmill"]
    return {name[1] for name in names if len(name) > 1}


def external_imports(tree: ast.AST) -> set[str]:
    return {name.split(".")[0] for name in imports_of(tree)} - {"tokenmill"}


def without_type_checking(tree: ast.Module) -> ast.Module:
    """Leave out what only a type checker imports."""
    body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    return ast.Module(body=body, type_ignores=[])


def names_used(tree: ast.AST) -> set[str]:
    """Return the dotted names that a module reads or calls."""
    return {ast.unparse(node) for node in nodes_of(tree) if isinstance(node, ast.Name | ast.Attribute)}


def test_the_reader_of_imports_sees_all_of_them():
    tree = ast.parse(
        "import os.path as p\nfrom tokenmill.store import open_store\nfrom tokenmill import plan\n"
        "def f():\n    import torch\n    from jax import numpy\n"
    )
    assert list(imports_of(tree)) == [
        "os.path",
        "tokenmill.store.open_store",
        "tokenmill.plan",
        "torch",
        "jax.numpy",
    ]
    assert parts_imported(tree) == {"store", "plan"}
    assert external_imports(tree) == {"os", "torch", "jax"}


def test_rooms_import_only_what_the_map_allows():
    broken = [
        f"{path.relative_to(PACKAGE)} imports {part}"
        for path in MODULES
        for part in sorted(parts_imported(tree_of(path)) - MAY_IMPORT[part_of(path)] - FLOOR - {part_of(path)})
    ]
    assert broken == []


IMPURE = {
    *("os", "io", "pathlib", "shutil", "tempfile", "glob", "mmap", "socket", "subprocess", "urllib", "http"),
    *("time", "datetime", "random", "secrets", "uuid", "platform", "sys", "threading", "multiprocessing", "locale"),
    *("ctypes", "importlib", "pickle", "sqlite3", "logging", "warnings"),
}


def test_every_function_that_is_attached_is_in_a_room_above():
    """A method of a lower room may call it without importing its room; it resolves when it is first called."""
    tree = tree_of(PACKAGE / "__init__.py")
    (call,) = (node for node in nodes_of(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "attach")
    homes = ast.literal_eval(call.args[0])
    assert {home.split(".")[1] for home in homes.values()} <= {"run", "inspect", "view"}
    for name in homes:
        assert callable(attached(name))


def test_the_plan_is_pure():
    for path in MODULES:
        if part_of(path) != "plan":
            continue
        tree = tree_of(path)
        external = external_imports(tree)
        assert external <= {"numpy", "numba"} | sys.stdlib_module_names, path
        assert not external & IMPURE, path
        called = {ast.unparse(node.func) for node in nodes_of(tree) if isinstance(node, ast.Call)}
        assert not called & {"open", "print", "input", "exec", "eval", "__import__", "hash", "id"}, path
        impure = r"(np|numpy)\.(random|load|save|memmap|fromfile|genfromtxt|loadtxt)\b|.*\.(tofile|environ|getenv)$"
        assert [name for name in names_used(tree) if re.match(impure, name)] == [], path


def test_only_adapters_may_import_a_framework():
    """[F1.a]"""
    importers = [path for path in MODULES if external_imports(tree_of(path)) & FRAMEWORKS]
    assert [path for path in importers if part_of(path) != "adapters"] == []


ENVIRONMENT_READERS = {"adapters", "cli", "build/engines.py", "build/tasks.py", "run/loading.py"}
"""Files of build pass their environment to workers, and keep each to one core. The file of run only warns."""


def test_nothing_but_adapters_and_the_command_line_reads_the_environment():
    for path in MODULES:
        if part_of(path) in ENVIRONMENT_READERS or str(path.relative_to(PACKAGE)) in ENVIRONMENT_READERS:
            continue
        tree = tree_of(path)
        names = [name for name in names_used(tree) if re.match(r"os\.(environ|getenv|putenv)", name)]
        assert names == [], path
        assert not {"os.environ", "os.getenv"} & set(imports_of(tree)), path


def test_every_logger_is_that_of_the_package_or_a_child_of_it():
    names = [
        ast.unparse(node.args[0]) if node.args else ""
        for path in MODULES
        for node in nodes_of(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger")
    ]
    assert len(names) > 10
    assert [name for name in names if not re.match(r"'tokenmill(\.\w+)*'$|LOGGER$", name)] == []


def test_no_file_or_class_has_a_name_that_says_nothing():
    empty = {"utils", "util", "common", "helpers", "helper", "base", "misc", "core", "shared"}
    assert [str(path) for path in PACKAGE.rglob("*") if path.stem.lower() in empty] == []
    classes = [
        f"{path.name}: {node.name}"
        for path in MODULES
        if path.relative_to(PACKAGE).parts[:2] != ("adapters", "astrai")  # must offer the names of its users
        for node in nodes_of(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and re.search(r"(Manager|Factory|Helper|Util|Utils|Base|Mixin)$", node.name)
    ]
    assert classes == []


def test_a_file_is_read_at_one_sitting_and_a_function_on_one_page():
    for path in MODULES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 900, path
        for node in nodes_of(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                # A command's options are its signature; a docstring of the front door is a reference page.
                documented = ast.get_docstring(node) is not None and len(node.body) > 1
                first = node.body[documented].lineno if part_of(path) == "cli" or documented else node.lineno
                assert node.end_lineno - first + 1 < 60, f"{path}: {node.name}"


def test_a_module_says_in_one_sentence_what_it_is():
    for path in MODULES:
        first = " ".join((ast.get_docstring(tree_of(path)) or "").split("\n\n")[0].split())
        assert re.search(r"[.:?!]$", first), path
        assert re.search(r"[.?!]\s", first) is None, f"{path}: one sentence, got {first!r}"


def strays(tree: ast.AST) -> list[int]:
    """Return the lines of texts that document nothing: neither first in their body, nor right under a value."""
    lines = []
    for node in nodes_of(tree):
        statements = getattr(node, "body", None)
        pairs = pairwise(statements) if isinstance(statements, list) else ()
        for before, statement in pairs:
            is_text = isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str)
            under_a_value = isinstance(before, ast.Assign | ast.AnnAssign)
            if is_text and not (under_a_value and statement.lineno == before.end_lineno + 1):
                lines.append(statement.lineno)
    return lines


def test_every_docstring_stands_under_what_it_speaks_of():
    assert strays(ast.parse('A = 1\n"""of A"""\nB = 2\n\n"""of none"""\n"""nor this"""\n')) == [5, 6]
    found = {str(path.relative_to(PACKAGE)): strays(tree_of(path)) for path in MODULES}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_folder_says_what_comes_in_what_it_does_and_what_goes_out():
    for path in MODULES:
        if path.name == "__init__.py" and part_of(path) not in {"__init__", "cli", "demo"}:
            text = ast.get_docstring(tree_of(path)) or ""
            assert re.findall(r"^(\d)\. (\w+):", text, re.MULTILINE) == [
                ("1", "In"),
                ("2", "Does"),
                ("3", "Out"),
            ], path


FORBIDDEN = re.compile(
    r"\b(c?pickle|dill|cloudpickle|marshal|shelve|joblib)\b|allow_pickle(?!\s*=\s*False)"
    r"|torch\.load(?!\([^)]*weights_only=True)|trust_remote_code(?!\s*=\s*False)|\byaml\.(unsafe_)?load\b"
    r"|\b(eval|exec)\(|shell\s*=\s*True"
)


def test_nothing_is_pickled_or_executed():
    """[S.a]"""
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert [match.group() for match in FORBIDDEN.finditer(text)] == [], path


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "np.load(x, allow_pickle=True)",
        "torch.load(x)",
        "f(trust_remote_code=True)",
        "marshal.loads(x)",
    ],
)
def test_the_search_for_pickle_finds_it(text):
    """[S.a]"""
    assert FORBIDDEN.search(text)


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    # The first process after a change compiles kernels, or waits for one that does, with a line that says so.
    errors = [line for line in done.stderr.splitlines() if " kernels" not in line]
    assert (done.returncode, errors) == (0, [])
    return done.stdout


HEAVY = [
    "numba",
    "pyarrow",
    "tokenizers",
    "fastokens",
    "rich",
    "typer",
    "jinja2",
    "ray",
    "h5py",
    "numpy",
    *FRAMEWORKS,
]


def test_importing_tokenmill_is_light():
    """[F1.a]"""
    program = f"import sys, tokenmill; print([name for name in {sorted(HEAVY)} if name in sys.modules])"
    assert run(program) == "[]\n"


FIRST_BATCH = """
import sys
from pathlib import Path
import numpy as np
import tokenmill as tm
from tokenmill.store import StoreSpec, StoreWriter

folder = Path(sys.argv[1])
spec = StoreSpec(keys={"sequence": "<u2"}, tokenizer={"vocab_size": 500}, recipe={})
with StoreWriter(folder / "web", spec) as writer:
    writer.append({"sequence": np.arange(90, dtype="<u2")}, np.arange(0, 91, 9))
    writer.commit()
(folder / "run.toml").write_text('''
[run]
steps = 4
global_batch_size = 2
seq_len = 8
[[sources]]
name = "web"
store = "web"
''')
next(iter(tm.Run.from_toml(folder / "run.toml").loader()))
"""


def test_the_first_batch_of_a_store_loads_nothing_that_reads_text(tmp_path):
    program = f"import sys; sys.argv = ['', {str(tmp_path)!r}]\n" + FIRST_BATCH
    unwanted = sorted({*HEAVY, "datasets", "pandas"} - {"numba", "numpy"})
    rooms = ["tokenmill.documents", "tokenmill.encode", "tokenmill.live", "tokenmill.build", "tokenmill.cli"]
    program += f"print([name for name in {[*unwanted, *rooms]} if name in sys.modules])"
    assert run(program) == "[]\n"


def test_importing_tokenmill_changes_nothing():
    program = """
import os, sys, threading, warnings, signal, random
def look():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    return dict(os.environ), list(sys.path), threading.active_count(), handlers, random.getstate(), os.getcwd()
before = look()
import tokenmill
print(before == look())
"""
    assert run(program) == "True\n"


def test_every_public_name_resolves():
    assert [name for name in tokenmill.__all__ if getattr(tokenmill, name, None) is None] == []
    assert dir(tokenmill) == sorted(tokenmill.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Lodaer'"):
        _ = tokenmill.Lodaer
    for name in tokenmill.__all__:
        if name != "__version__":
            assert getattr(tokenmill, name).__doc__, name


def test_every_public_name_is_told_to_type_checkers():
    tree = tree_of(PACKAGE / "__init__.py")
    offered = (name for name in imports_of(tree) if name.startswith("tokenmill.") and "hooks" not in name)
    told = [name.rsplit(".", 1)[1] for name in offered]
    assert sorted(told) == sorted(set(tokenmill.__all__) - {"__version__"})


@pytest.mark.parametrize("adapters", [False, pytest.param(True, marks=pytest.mark.slow)])  # they import torch
def test_every_name_that_a_folder_offers_resolves(adapters):
    for path in MODULES:
        if path.name == "__init__.py" and (part_of(path) == "adapters") is adapters:
            name = ".".join(("tokenmill", *path.parent.relative_to(PACKAGE).parts))
            module = __import__(name, fromlist=["*"])
            assert [item for item in getattr(module, "__all__", []) if not hasattr(module, item)] == []


def test_the_version_is_set_in_the_package_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"] == {"path": "src/tokenmill/__init__.py"}
    assert f"\nversion: {tokenmill.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def module_of(requirement: str) -> str:
    """Return the module that a requirement installs: named as it is, but for one."""
    name = re.split(r"[^A-Za-z0-9_-]", requirement)[0]
    return {"pysimdjson": "simdjson"}.get(name, name)


def test_there_are_no_upper_pins_and_every_import_is_a_dependency():
    """[F1.a, F1.b]"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {module_of(line) for line in project["dependencies"]}
    extras = {module_of(line) for group in project["optional-dependencies"].values() for line in group}
    assert [line for line in project["dependencies"] if "<" in line or "==" in line] == []
    used = set().union(*(external_imports(without_type_checking(tree_of(path))) for path in MODULES))
    used -= sys.stdlib_module_names
    assert sorted(used - required - extras) == []


def test_every_dependency_of_the_core_is_used_by_more_than_adapters():
    """What one framework needs is an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {module_of(line) for line in project["dependencies"]}
    core = [path for path in MODULES if part_of(path) not in {"adapters", "torch"}]
    assert required - set().union(*(external_imports(tree_of(path)) for path in core)) == set()


def test_every_extra_but_that_of_developers_is_imported_somewhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    used = set().union(*(external_imports(tree_of(path)) for path in MODULES))
    unused = {
        extra
        for extra, lines in project["optional-dependencies"].items()
        if extra not in ("all", "dev") and not {re.split(r"[^A-Za-z0-9_-]", line)[0] for line in lines} & used
    }
    assert unused == set()


WITHOUT_FRAMEWORKS = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FRAMEWORKS:
            raise ImportError(f"{name} is refused in this test")

FRAMEWORKS = {"torch", "jax", "transformers", "lightning"}
sys.meta_path.insert(0, Refuse())
from pathlib import Path
import tokenmill as tm

folder = Path(sys.argv[1])
(folder / "a.jsonl").write_text("".join('{"text": "document %d of the mill"}\\\\n' % i for i in range(40)))
report = tm.prepare(folder / "a.jsonl", out=folder / "web", tokenizer="bytes", workers=1, progress=False)
(folder / "run.toml").write_text('''
[run]
steps = 4
global_batch_size = 4
seq_len = 16
[[sources]]
name = "web"
store = "web"
''')
run = tm.Run.from_toml(folder / "run.toml")
loader = run.loader(rank=0, world_size=2, micro_batch=2)
batches = [batch["input_ids"].shape for batch in loader]
tm.verify(folder / "web")
print(report.documents, batches, loader.state_dict()["step"], sorted(FRAMEWORKS & set(sys.modules)))
"""


def test_the_whole_path_works_without_torch(tmp_path):
    """[F1.a]"""
    program = f"import sys; sys.argv = ['', {str(tmp_path)!r}]\n" + WITHOUT_FRAMEWORKS.replace("\\\\n", "\\n")
    assert run(program) == "40 [(2, 16), (2, 16), (2, 16), (2, 16)] 4 []\n"
