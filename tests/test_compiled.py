"""Kernels are compiled once on a machine, kept where that is possible, and never stale."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tokenmill
from tokenmill.compiled import _stamp

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
from some_numbers import START
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
    (tmp_path / "some_numbers.py").write_text("START = 0\n")
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


def test_what_is_kept_is_loaded_without_all_that_compiles(folder):
    """Numba takes longer to import that than a warm start takes in all. Fails with a numba that was not tested."""
    (folder / "some_kernels.py").write_text(
        KERNELS + "import atexit, sys\natexit.register(lambda: print('numba.np.linalg' in sys.modules))\n"
    )
    assert output(start(folder, cache=folder / "cache")).endswith("True\n")
    assert output(start(folder, cache=folder / "cache")).endswith("False\n")


@pytest.mark.parametrize(
    ("file", "old", "new", "results"),
    [
        ("some_numbers.py", "START = 0", "START = 100", [110, 111]),
        ("some_kernels.py", "return a + b", "return a + 2 * b", [20, 21]),
    ],
    ids=["a constant of another file", "a function that kernels call"],
)
def test_an_edit_of_what_a_kernel_uses_compiles_it_again(folder, file, old, new, results):
    assert output(start(folder, cache=folder / "cache")) == f"[10, 11] {ALL}\n"
    (folder / file).write_text((folder / file).read_text().replace(old, new))
    assert output(start(folder, cache=folder / "cache")) == f"{results} {ALL}\n"


def test_a_first_start_that_takes_long_says_why(folder):
    slow = start(folder, cache=folder / "cache", at_end="time.sleep(1.1)")
    assert slow.communicate(timeout=120)[0] == f"{COMPILING}[10, 11] {ALL}\n"


def test_a_comment_compiles_nothing_again(folder):
    assert output(start(folder, cache=folder / "cache")) == f"[10, 11] {ALL}\n"
    (folder / "some_kernels.py").write_text("# A comment.\n\n" + KERNELS)
    assert output(start(folder, cache=folder / "cache")) == "[10, 11] []\n"


def test_a_damaged_file_is_compiled_again(folder):
    assert output(start(folder, cache=folder / "cache")) == f"[10, 11] {ALL}\n"
    for file in folder.rglob("*.nb[ci]"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert output(start(folder, cache=folder / "cache")) == f"[10, 11] {ALL}\n"
    assert output(start(folder, cache=folder / "cache")) == "[10, 11] []\n"


def test_processes_that_start_together_compile_each_kernel_once(folder):
    processes = [start(folder, cache=folder / "cache", at_end="time.sleep(0.6)") for _ in range(3)]
    outputs = [output(process) for process in processes]
    assert all("[10, 11] " in text for text in outputs)
    compiled = "".join(outputs)
    assert [compiled.count(f"'{name}'") for name in ALL] == [1, 1, 1]
    waited = [text.count(f"{folder / 'cache' / 'tokenmill'}: waiting for another process") for text in outputs]
    assert sum(waited) >= 1
    assert max(waited) == 1, "a process says so once"


def test_a_killed_process_keeps_nobody_waiting(folder):
    holder = start(folder, cache=folder / "cache", at_end='print("compiling", flush=True); time.sleep(100)')
    assert holder.stdout is not None
    assert holder.stdout.readline() == "compiling\n"
    waiting = start(folder, cache=folder / "cache")
    time.sleep(1.5)
    assert waiting.poll() is None
    holder.send_signal(signal.SIGKILL)
    assert output(waiting).endswith(f"[10, 11] {ALL}\n")
    holder.communicate()


def test_where_locks_do_not_work_everyone_compiles(folder):
    broken = "def lockf(*_): raise OSError('no locks')\nLOCK_EX = LOCK_NB = 0\n"
    (folder / "fcntl.py").write_text(broken)
    # The standard library has it built in; this one is found first where it is not.
    lines = "import sys; sys.modules.pop('fcntl', None); import importlib.machinery as m\n"
    lines += f"sys.modules['fcntl'] = m.SourceFileLoader('fcntl', {str(folder / 'fcntl.py')!r}).load_module()\n"
    (folder / "some_numbers.py").write_text(f"{lines}START = 0\n")
    # One is in the middle of its first kernel for as long as the other takes for all.
    stop = 'print("compiling", flush=True); time.sleep(100)'
    holder = start(folder, cache=folder / "cache", at_end=stop, stderr=-3)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "compiling\n"
    assert output(start(folder, cache=folder / "cache", stderr=-3)) == f"[10, 11] {ALL}\n"
    assert holder.poll() is None
    holder.kill()
    holder.communicate()


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
    assert list((installed / "__pycache__").glob("*.nbi"))
    prefix = read_only(installed)
    assert output(start(folder, cache=None, package=installed, prefix=prefix)) == "[10, 11] []\n"


def test_a_read_only_installation_keeps_kernels_in_the_temporary_folder(folder, installed, read_only):
    prefix = read_only(installed)
    assert output(start(folder, cache=None, package=installed, prefix=prefix)) == f"[10, 11] {ALL}\n"
    assert output(start(folder, cache=None, package=installed, prefix=prefix)) == "[10, 11] []\n"
    assert len(list(folder.glob("tokenmill-kernels-*/*.nbi"))) == 2


def test_a_chosen_folder_comes_first(folder, installed):
    assert output(start(folder, cache=folder / "chosen", package=installed)) == f"[10, 11] {ALL}\n"
    assert len(list((folder / "chosen" / "tokenmill").glob("*.nbi"))) == 2
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
    assert len(list((folder / ".cache" / "tokenmill" / "kernels").glob("*.nbi"))) == 2
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


def test_the_digest_of_a_kernel_knows_all_that_it_uses():
    def make(constant: int, step: int) -> Callable[..., int]:
        names: dict[str, object] = {}
        text = (
            f"C = {constant}\ndef called(x):\n    return x + {step}\ndef function(x):\n    return called(x) * C\n"
        )
        exec(text, names)
        names["called"] = type("Dispatcher", (), {"py_func": names["called"], "targetoptions": {}})()
        return names["function"]  # type: ignore[return-value]

    assert _stamp(make(1, 1)) == _stamp(make(1, 1))
    assert len({_stamp(make(1, 1)), _stamp(make(2, 1)), _stamp(make(1, 2))}) == 3
