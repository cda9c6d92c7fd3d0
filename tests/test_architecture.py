"""The rules that keep the house in order: who may import whom, and how large things may grow."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokenmill

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tokenmill"
MODULES = sorted(PACKAGE.rglob("*.py"))
IDS = [str(path.relative_to(PACKAGE)) for path in MODULES]
RAW = {"documents", "encode", "store"}
JOINERS = {"prepare", "live", "cli", "engines", "viewer", "adapters", "__init__"}
FRAMEWORKS = {"torch", "jax", "transformers", "lightning", "pytorch_lightning", "torchdata", "torchtitan"}


def part_of(path: Path) -> str:
    """Return the part of the house that a file belongs to: its folder, or its own name at the top."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Yield the full name of everything imported, at the top, in functions and for type checkers alike."""
    for node in ast.walk(tree):
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
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)}


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


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_documents_encode_and_store_do_not_know_each_other(path):
    part, known = part_of(path), parts_imported(tree_of(path)) & RAW
    if part in RAW:
        assert known <= {part}
    elif part not in JOINERS:
        assert known <= {"store"}, "only prepare, live and the command line join documents, encode and store"


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) in RAW], ids=lambda path: path.name)
def test_documents_encode_and_store_know_nothing_of_what_comes_after_them(path):
    assert parts_imported(tree_of(path)) <= {part_of(path), "errors", "types", "fingerprint", "natural"}


PLAN_MODULES = [path for path in MODULES if part_of(path) == "plan"]
IMPURE = {
    *("os", "io", "pathlib", "shutil", "tempfile", "glob", "mmap", "socket", "subprocess", "urllib", "http"),
    *("time", "datetime", "random", "secrets", "uuid", "platform", "sys", "threading", "multiprocessing", "locale"),
    *("ctypes", "importlib", "pickle", "sqlite3", "logging", "warnings"),
}


@pytest.mark.parametrize("path", PLAN_MODULES, ids=lambda path: path.name)
def test_the_plan_is_pure(path):
    tree = tree_of(path)
    assert parts_imported(tree) <= {"errors", "types", "fingerprint", "plan"}
    external = external_imports(tree)
    assert external <= {"numpy", "numba"} | sys.stdlib_module_names
    assert not external & IMPURE
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"open", "print", "input", "exec", "eval", "__import__", "hash", "id"}
    impure = r"(np|numpy)\.(random|load|save|memmap|fromfile|genfromtxt|loadtxt)\b|.*\.(tofile|environ|getenv)$"
    assert [name for name in names_used(tree) if re.match(impure, name)] == []


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_only_adapters_may_import_a_framework(path):
    """[F1.a]"""
    if part_of(path) != "adapters":
        assert not external_imports(tree_of(path)) & FRAMEWORKS


ENVIRONMENT_READERS = {
    "adapters",
    "cli",
    "prepare/pool.py",
}  # the last hands its own on to the workers that it starts


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_nothing_but_adapters_and_the_command_line_reads_the_environment(path):
    if part_of(path) in ENVIRONMENT_READERS or str(path.relative_to(PACKAGE)) in ENVIRONMENT_READERS:
        return
    tree = tree_of(path)
    read = {name for name in names_used(tree) if re.match(r"os\.(environ|environb|getenv|getenvb|putenv)\b", name)}
    assert read == set()
    assert not {"os.environ", "os.getenv"} & set(imports_of(tree))


def test_no_file_or_class_has_a_name_that_says_nothing():
    empty = {"utils", "util", "common", "helpers", "helper", "base", "misc", "core", "shared"}
    assert [str(path) for path in PACKAGE.rglob("*") if path.stem.lower() in empty] == []
    classes = [
        f"{path.name}: {node.name}"
        for path in MODULES
        if path.relative_to(PACKAGE).parts[:2] != ("adapters", "astrai")  # must offer the names of its users
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and re.search(r"(Manager|Factory|Helper|Util|Utils|Base|Mixin)$", node.name)
    ]
    assert classes == []


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_files_and_functions_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 400
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            # A command's options are its signature.
            first = node.body[0].lineno if part_of(path) == "cli" else node.lineno
            assert node.end_lineno - first + 1 < 60, node.name
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
            assert len(names) <= 8 or part_of(path) == "cli", node.name


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_a_module_says_in_one_sentence_what_it_is(path):
    text = ast.get_docstring(tree_of(path))
    assert text, "a module must have a docstring"
    first = " ".join(text.split("\n\n")[0].split())
    assert re.search(r"[.:?!]$", first), first
    assert re.search(r"[.?!]\s", first) is None, f"one sentence, got {first!r}"


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.name == "__init__.py"], ids=lambda p: p.parent.name
)
def test_a_folder_says_what_comes_in_what_it_does_what_goes_out_and_what_it_must_not_know(path):
    text = ast.get_docstring(tree_of(path)) or ""
    if part_of(path) in {"__init__", "cli", "demo"}:
        return
    assert re.findall(r"^(\d)\. ", text, re.MULTILINE) == ["1", "2", "3", "4"]
    assert re.search(r"^4\. Must not know: ", text, re.MULTILINE)


FORBIDDEN = re.compile(
    r"\b(c?pickle|dill|cloudpickle|marshal|shelve|joblib)\b|allow_pickle(?!\s*=\s*False)"
    r"|torch\.load(?!\([^)]*weights_only=True)|trust_remote_code(?!\s*=\s*False)|\byaml\.(unsafe_)?load\b"
    r"|\b(eval|exec)\(|shell\s*=\s*True"
)


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_nothing_is_pickled_or_executed(path):
    """[S.a]"""
    text = path.read_text(encoding="utf-8")
    assert [match.group() for match in FORBIDDEN.finditer(text)] == []


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
    assert (done.returncode, done.stderr) == (0, "")
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
    told = [name.rsplit(".", 1)[1] for name in imports_of(tree) if name.startswith("tokenmill.")]
    assert sorted(told) == sorted(set(tokenmill.__all__) - {"__version__"})


def test_every_name_that_a_folder_offers_resolves():
    for path in MODULES:
        if path.name == "__init__.py":
            name = ".".join(("tokenmill", *path.parent.relative_to(PACKAGE).parts))
            module = __import__(name, fromlist=["*"])
            assert [item for item in getattr(module, "__all__", []) if not hasattr(module, item)] == []


def test_the_version_is_said_in_one_place_or_agrees():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == tokenmill.__version__


def test_there_are_no_upper_pins_and_every_import_is_a_dependency():
    """[F1.a, F1.b]"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.split(r"[^A-Za-z0-9_-]", line)[0] for line in project["dependencies"]}
    groups = project["optional-dependencies"].values()
    extras = {re.split(r"[^A-Za-z0-9_-]", line)[0] for group in groups for line in group}
    assert [line for line in project["dependencies"] if "<" in line or "==" in line] == []
    used = set().union(*(external_imports(without_type_checking(tree_of(path))) for path in MODULES))
    used -= sys.stdlib_module_names
    assert sorted(used - required - extras) == []


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
