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


def test_an_error_is_one_line_on_stderr_and_exit_code_2():
    done = start("verify", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: no store at this path: nowhere (the folder does not exist); "
        "run `tokenmill prepare`, or fix the path\n"
    )


def test_python_m_is_the_same_command():
    done = start("plan", "nowhere.toml", entry=(sys.executable, "-m", "tokenmill"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("error: config not found: nowhere.toml; fix the path\n")


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
    assert re.fullmatch(r"error: permission denied: .*run\.toml; fix the path or its permissions\n", done.err)


def test_a_folder_in_place_of_a_file_is_an_error_and_no_traceback(tokenmill, folder):
    for arguments, got in (
        (["what", folder, "--step", 0], "[^;]* got a folder"),
        (["batches", folder], "[^;]* got a folder"),
        (["batches", folder / "run.toml", "--state", folder], "is a directory: [^;]*"),
    ):
        done = tokenmill(*arguments)
        assert (done.code, done.out) == (2, "")
        assert re.fullmatch(rf"error: {got}; .*\n", done.err)


def test_old_spellings_of_options_are_accepted_with_a_warning(tokenmill, run_toml):
    new = tokenmill("fork", run_toml, "--at", 4, "--out", run_toml.with_name("a.toml"))
    for number, arguments in enumerate(
        (["--to", run_toml.with_name("b.toml")], [f"--to={run_toml.with_name('c.toml')}"])
    ):
        old = tokenmill("fork", run_toml, "--at", 4, *arguments)
        assert (new.code, old.code, new.err) == (0, 0, "")
        assert old.err == "warning: --to is deprecated; use --out\n"
        assert old.out.replace(f"{'bc'[number]}.", "a.") == new.out
    store = run_toml.with_name("stores") / "web"
    done = tokenmill("verify", store, "--hashes")
    assert (done.code, done.err) == (0, "warning: --hashes is deprecated; use --add-hashes\n")
    # The address is no address, and the viewer may not be installed: the option was read before.
    done = tokenmill("view", run_toml, "--host", "no such host", "--i-know")
    assert done.err.startswith("warning: --i-know is deprecated; use --expose\nerror: ")
    assert "No such option" not in done.err
    assert tokenmill("plan", "--", "--to").err.count("deprecated") == 0


def test_what_takes_the_step_as_an_argument_or_as_an_option(tokenmill, run_toml):
    by_argument = tokenmill("what", run_toml, 5, "--no-text")
    assert (by_argument.code, by_argument.err) == (0, "")
    assert by_argument == tokenmill("what", run_toml, "--step", 5, "--no-text")
    twice = tokenmill("what", run_toml, 5, "--step", 5)
    assert twice.err.startswith("error: what: two steps given: 5 and --step 5; name one step, such as")


def test_short_flags_mean_the_long_ones(tokenmill, folder):
    done = tokenmill("prepare", folder / "web.jsonl", "-o", folder / "new", "-t", "bytes", "-j", 1, "--json")
    assert done.json["documents"] == 60
    assert tokenmill("verify", folder / "new").code == 0


def test_shell_completion_is_offered(tokenmill):
    assert "--install-completion" in tokenmill("--help").out


def test_a_failure_is_1_and_wrong_usage_or_a_missing_path_is_2(tokenmill, folder):
    store = folder / "stores" / "web"
    run = folder / "run.toml"
    missing = folder / "nowhere"
    for arguments in (
        ["verify", missing],
        ["verify", missing, "--json"],
        ["inspect", missing],
        ["plan", missing.with_suffix(".toml")],
        ["prepare", missing, "--out", folder / "new"],
        ["batches", run, "--steps", "99"],
        ["what", run, 99],
        ["diff", run, missing.with_suffix(".toml")],
        ["view", run, "--host", "0.0.0.0"],
    ):
        assert tokenmill(*arguments).code == 2, arguments
    (folder / "bad.jsonl").write_text("{", encoding="utf-8")
    (store / "shard-00000" / "sequence.bin").unlink()
    for arguments in (
        ["verify", store],
        ["verify", store, "--json"],
        ["batches", run],
        ["prepare", folder / "bad.jsonl", "--out", folder / "new"],
    ):
        assert tokenmill(*arguments).code == 1, arguments


@pytest.mark.parametrize("reader", ["true", "head -1 > /dev/null"])
@pytest.mark.parametrize(
    "arguments", ["--help", "prepare --help", "--version", "plan run.toml --full", "what run.toml 5"]
)
def test_a_reader_that_leaves_is_no_error(folder, arguments, reader):
    command = f"set -o pipefail; {ENTRY} {arguments} | {reader}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_that_is_not_there_is_named_with_exit_code_2(tokenmill, run_toml):
    done = tokenmill("quarantine", run_toml, "--file", "no.txt")
    assert (done.code, done.err) == (2, "error: file not found: no.txt; fix the path\n")
