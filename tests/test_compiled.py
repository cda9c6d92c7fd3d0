"""Kernels are compiled once on a machine, kept where that is possible, and never stale."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill

pytestmark = pytest.mark.slow  # each starts processes that compile

PROGRAM = """
import sys, time
sys.path[:0] = {paths!r}
import logging
logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stdout)
from numba.core import event
class Count(event.Listener):
    names = []
    def on_start(self, event):
        self.names.append(event.data["dispatcher"].py_func.__name__)
    def on_end(self, event):
        {at_end}
event.register("numba:compile", Count())
import some_kernels
print([some_kernels.total(5), some_kernels.shifted(5)], list(dict.fromkeys(Count.names)))
"""
KERNELS = """
from tokenmill.compiled import inner, kernel
START = 0
@inner
def add(a, b):
    return a + b
@kernel
def total(number):
    result = START
    for i in range(number):
        result = add(result, i)
    return result
@kernel
def shifted(number):
    return total(number) + 1
"""
ALL = ["total", "add", "shifted"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "some_kernels.py").write_text(KERNELS)
    return tmp_path


def start(
    folder: Path,
    *,
    cache: Path | None,
    package: Path | None = None,
    at_end: str = "pass",
    home: str | Path = os.devnull,
    **more: object,
) -> subprocess.Popen[str]:
    """Start a process that calls the kernels of a folder and prints what it compiled."""
    package = package or Path(tokenmill.__file__).parent
    program = PROGRAM.format(paths=[str(folder), str(package.parent)], at_end=at_end)
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"TMPDIR": str(folder), "NUMBA_CACHE_DIR": str(cache) if cache else "", "HOME": str(home)}
    command = [*more.pop("prefix", ()), sys.executable, "-c", program]  # type: ignore[misc]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload]


COMPILING = "compiling kernels for this CPU, once: later starts load them\n"


def output(process: subprocess.Popen[str]) -> str:
    """Return what a process printed, without the line that a busy machine makes it print."""
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return out.replace(COMPILING, "")


def test_a_second_process_loads_what_the_first_has_compiled(folder):
    assert output(start(folder, cache=folder / "cache")) == f"[10, 11] {ALL}\n"
    assert output(start(folder, cache=folder / "cache")) == "[10, 11] []\n"


@pytest.mark.parametrize("file", ["tokenmill/types.py", "some_kernels.py"])
def test_an_edit_of_the_package_or_of_the_file_of_a_kernel_compiles_it_again(folder, installed, file):
    """Kernels use constants and functions of other files of the package, which numba does not look at."""
    assert output(start(folder, cache=folder / "cache", package=installed)) == f"[10, 11] {ALL}\n"
    assert output(start(folder, cache=folder / "cache", package=installed)) == "[10, 11] []\n"
    path = folder / file if file == "some_kernels.py" else installed.parent / file
    path.write_text(path.read_text().replace("return a + b", "return a + 2 * b") + "\n# Edited.\n")
    results = [20, 21] if file == "some_kernels.py" else [10, 11]
    assert output(start(folder, cache=folder / "cache", package=installed)) == f"{results} {ALL}\n"


def test_a_first_start_that_takes_long_says_why(folder):
    slow = start(folder, cache=folder / "cache", at_end="time.sleep(1.1)")
    assert slow.communicate(timeout=120)[0] == f"{COMPILING}[10, 11] {ALL}\n"


def test_processes_that_start_together_load_what_the_last_one_keeps(folder):
    outputs = [output(process) for process in [start(folder, cache=folder / "cache") for _ in range(3)]]
    assert all(text.startswith("[10, 11] ") for text in outputs)
    assert output(start(folder, cache=folder / "cache")) == "[10, 11] []\n"


@pytest.fixture
def installed(tmp_path_factory):
    """Return a copy of the package as it is installed, with nothing compiled."""
    folder = tmp_path_factory.mktemp("installed") / "tokenmill"
    source = Path(tokenmill.__file__).parent
    for file in source.glob("*.py"):
        folder.mkdir(exist_ok=True)
        shutil.copy(file, folder)
    return folder


def test_kernels_of_an_image_are_loaded_where_nothing_can_be_written(folder, installed, read_only):
    assert output(start(folder, cache=None, package=installed)) == f"[10, 11] {ALL}\n"
    assert list((installed / "__pycache__").rglob("*.nbi"))
    prefix = read_only(installed)
    assert output(start(folder, cache=None, package=installed, prefix=prefix)) == "[10, 11] []\n"


def test_a_read_only_installation_keeps_kernels_in_the_temporary_folder(folder, installed, read_only):
    prefix = read_only(installed)
    assert output(start(folder, cache=None, package=installed, prefix=prefix)) == f"[10, 11] {ALL}\n"
    assert output(start(folder, cache=None, package=installed, prefix=prefix)) == "[10, 11] []\n"
    assert len(list(folder.glob("tokenmill-kernels-*/**/*.nbi"))) == 2


def test_a_chosen_folder_comes_first(folder, installed):
    assert output(start(folder, cache=folder / "chosen", package=installed)) == f"[10, 11] {ALL}\n"
    assert len(list((folder / "chosen" / "tokenmill").rglob("*.nbi"))) == 2
    assert list(installed.rglob("*.nbi")) == []


def test_what_another_user_may_have_written_is_not_loaded(folder, installed, read_only):
    """Whoever owns the temporary folder of our name first could make us run anything."""
    (folder / "elsewhere").mkdir()
    (folder / f"tokenmill-kernels-{os.getuid()}").symlink_to(folder / "elsewhere")
    prefix = read_only(installed)
    text = output(start(folder, cache=None, package=installed, prefix=prefix))
    assert (
        text
        == f"no folder for compiled kernels can be written to: every process compiles its own\n[10, 11] {ALL}\n"
    )
    assert output(start(folder, cache=None, package=installed, prefix=prefix, home=folder)) == f"[10, 11] {ALL}\n"
    assert len(list((folder / ".cache" / "tokenmill" / "kernels").rglob("*.nbi"))) == 2
    assert list((folder / "elsewhere").iterdir()) == []


def test_a_run_needs_no_home_and_no_installation_that_can_be_written_to(folder, make_store, read_only):
    path, _, _ = make_store("web", [30] * 40)
    (path.parent / "run.toml").write_text(
        '[run]\nsteps = 3\nglobal_batch_size = 2\nseq_len = 8\n[[sources]]\nname = "web"\nstore = "web"\n'
    )
    program = (
        "import sys, tokenmill as tm\nrun = tm.Run.from_toml(sys.argv[1])\n"
        "print(run.plan().steps, sum(batch['labels'].size for batch in run.loader(micro_batch=2)))"
    )
    package = Path(tokenmill.__file__).parent
    environment = {**os.environ, "HOME": os.devnull, "TMPDIR": str(folder), "NUMBA_CACHE_DIR": ""}
    command = [*read_only(package), sys.executable, "-c", program, str(path.parent / "run.toml")]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.stdout == "3 48\n", process.stderr
