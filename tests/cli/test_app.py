from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill as package

COMMANDS = [
    "init",
    "demo",
    "prepare",
    "import",
    "export",
    "inspect",
    "verify",
    "plan",
    "batches",
    "what",
    "when",
    "diff",
    "fork",
    "warm",
    "doctor",
]
ENTRY = Path(sys.executable).parent / "tokenmill"


def start(*arguments: object, entry: tuple[str, ...] = (str(ENTRY),)) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*entry, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_help_lists_the_commands_in_the_order_of_the_data_flow(tokenmill):
    shown = tokenmill("--help")
    assert shown.code == 0
    assert [
        word for word in re.findall(r"^\W*(\w+)\s{2,}", shown.out, re.MULTILINE) if word in COMMANDS
    ] == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(tokenmill, command):
    shown = tokenmill(command, "-h")
    assert shown.code == 0
    assert f"tokenmill {command}" in shown.out


def test_no_command_shows_the_help(tokenmill):
    assert "prepare" in tokenmill().out


def test_version(tokenmill):
    assert tokenmill("--version").out == f"tokenmill {package.__version__}\n"


@pytest.mark.parametrize("arguments", [["nonsense"], ["plan", "a.toml", "--nonsense"], ["what", "a.toml"]])
def test_a_wrong_command_or_option_is_told_with_exit_code_2(tokenmill, arguments):
    done = tokenmill(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert "Traceback" not in done.err


def test_an_error_is_one_line_on_stderr_and_exit_code_1():
    done = start("verify", "nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: nowhere: a store must be a folder with manifest.json, or token files of another project, "
        "got nothing there; run `tokenmill prepare` or fix the path\n"
    )


def test_python_m_is_the_same_command():
    done = start("plan", "nowhere.toml", entry=(sys.executable, "-m", "tokenmill"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: nowhere.toml: a run must be described in a TOML file, got nothing there; fix the path\n"
    )


def test_a_reader_that_leaves_early_causes_no_traceback(run_toml):
    done = subprocess.run(
        ["bash", "-c", f"'{ENTRY}' batches '{run_toml}' --digest | true"],
        capture_output=True,
        text=True,
        check=False,
    )
    # Where nothing is compiled yet, a process says that it compiles kernels, or waits for one that does.
    assert [line for line in done.stderr.splitlines() if "kernels" not in line] == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_an_error_and_no_traceback(tokenmill, run_toml):
    run_toml.chmod(0)
    done = tokenmill("plan", run_toml)
    assert done.code == 1
    assert re.fullmatch(r"error: .*run\.toml: .*, got Permission denied; .*\n", done.err)


def test_a_folder_in_place_of_a_file_is_an_error_and_no_traceback(tokenmill, folder):
    for arguments, got in (
        (["what", folder, "--step", 0], "got a folder"),
        (["batches", folder], "got a folder"),
        (["batches", folder / "run.toml", "--state", folder], "got Is a directory"),
    ):
        done = tokenmill(*arguments)
        assert (done.code, done.out) == (1, "")
        assert re.fullmatch(rf"error: .*: .*, {got}; .*\n", done.err)
