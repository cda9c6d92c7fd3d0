"""What a command says of a config that was written for another project, and the options that it takes for one."""

import io
import json
import logging
import subprocess
import sys
import time
import tomllib

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tokenmill import errors
from tokenmill.build import PrepareOptions, prepare
from tokenmill.cli.app import _worded
from tokenmill.cli.console import ToNative, WorldSize, busy, megabytes, print_native, progress, show_notes
from tokenmill.config.dialects import Translation, translate
from tokenmill.errors import DocumentError

TABLES = {"data": {"dataset_path": "/data/[web]", "num_workers": 2}, "train": {"seed": 1}}


@pytest.fixture
def translation():
    return translate(TABLES, where="kf.toml", world_size=4)


def test_what_a_foreign_config_was_taken_for_goes_to_stderr(translation, capsys):
    show_notes(translation)
    out, err = capsys.readouterr()
    assert out == ""
    first, *notes = err.splitlines()
    assert first == "taken as a KempnerForge config:"
    assert notes == [f"  - {note}" for note in translation.notes]
    assert "data.num_workers = 2: not needed, batches are assembled by threads" in translation.notes


def test_a_note_is_printed_as_it_is(capsys):
    """Brackets are no markup, and a long line is not broken."""
    note = "[red] 'a[1]' " + "x" * 300
    show_notes(Translation(dialect="torchtitan", tables={}, notes=(note,)))
    assert capsys.readouterr().err == f"taken as a torchtitan config:\n  - {note}\n"


def test_nothing_is_said_of_a_native_config(capsys):
    show_notes(translate({"run": {}}, where="run.toml"))
    assert capsys.readouterr() == ("", "")


def test_the_native_config_goes_to_stdout_alone(translation, capsys):
    print_native(translation)
    out, err = capsys.readouterr()
    assert (tomllib.loads(out), err) == (translation.tables, "")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "None False"),
        (["--world-size", "8"], "8 False"),
        (["--to-native"], "None True"),
    ],
)
def test_the_options_are_those_of_a_command(arguments, shown):
    app = typer.Typer()

    @app.command()
    def plan(world_size: WorldSize = None, to_native: ToNative = False) -> None:
        typer.echo(f"{world_size} {to_native}")

    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (0, f"{shown}\n")


def test_a_world_without_ranks_is_refused():
    app = typer.Typer()

    @app.command()
    def plan(world_size: WorldSize = None) -> None:
        typer.echo(f"{world_size}")

    done = CliRunner().invoke(app, ["--world-size", "0"])
    assert done.exit_code == 2
    assert "--world-size" in done.stderr


def test_without_a_terminal_a_line_now_and_then_says_how_far_a_command_is(capsys, monkeypatch):
    clock = iter([0.0, 10.0, 31.0, 31.0, 40.0, 62.0, 62.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with progress(megabytes) as tell:
        for done in (1_000_000, 2_000_000, 3_000_000):
            tell("verify", done, 8_000_000)
        tell("rows compared", 9_000, None)
    assert capsys.readouterr() == ("", "verify: 2 MB of 8 MB, 25%\nrows compared: 9 kB\n")


def test_on_a_terminal_a_bar_does_and_is_gone_at_the_end(monkeypatch):
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=100)
    monkeypatch.setattr("tokenmill.cli.console.errors", terminal)
    with progress() as tell:
        tell("look", 5_000, 10_000)
        tell("write", 1, None)
    assert "look" in written.getvalue()
    assert "5,000 of 10,000" in written.getvalue()
    assert written.getvalue().endswith("\x1b[2K")


def test_work_without_a_known_end_is_told_every_so_often_and_no_more_when_it_is_done(capsys, monkeypatch):
    monkeypatch.setattr("tokenmill.progress.LINE_SECONDS", 0.05)
    with busy("compiling the plan"):
        time.sleep(0.18)
    told = capsys.readouterr().err
    assert set(told.splitlines()) == {"compiling the plan: 0 s so far"}
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_short_work_says_nothing(capsys):
    with busy("compiling the plan"):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("command", "message", "shown"),
    [
        ("prepare", 'a.jsonl:1: skip it with on_error="skip"', "a.jsonl:1: skip it with --on-error skip"),
        ("prepare", "name it with text_field=..., or choose", "name it with --text-field, or choose"),
        ("prepare", "start over with rebuild=True", "start over with --rebuild"),
        ("prepare", "say add_bos=True or add_eos=False", "say --bos or --no-eos"),
        ("prepare", "take engine='tokenizers', or workers=1", "take --tokenizer-engine tokenizers, or --workers 1"),
        ("import", 'say dtype="uint16", or vocab_size=...', "say --dtype uint16, or --vocab-size"),
        ("export", "give them up with drop_masks=True", "give them up with --drop-masks"),
        ("plan", "give world_size=N", "give --world-size N"),
        ("plan", 'prepare it with keep=["id"]', "prepare it with --keep id"),
        ("inspect", "name it with tokenizer=...", "name it with --tokenizer"),
        ("prepare", "a.map_field=3, nothing=..., max_seq_len = 3", "a.map_field=3, nothing=..., max_seq_len = 3"),
    ],
)
def test_arguments_of_python_are_printed_as_flags(monkeypatch, command, message, shown):
    monkeypatch.setattr("sys.argv", ["tokenmill", command])
    assert _worded(message) == shown


def test_python_and_the_command_line_name_the_same_option_each_in_its_words(tokenmill, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n')
    with pytest.raises(DocumentError, match=r'with text_field=\.\.\., .*with recipe=\.\.\. .*on_error="skip"$'):
        prepare(tmp_path / "a.jsonl", out=tmp_path / "a", workers=1, progress=False)
    done = tokenmill("prepare", tmp_path / "a.jsonl", "--out", tmp_path / "b", "--workers", 1)
    assert done.err.endswith(
        "; name the field of the text with --text-field, or the recipe with --recipe (chat, dpo), "
        "or skip bad ones with --on-error skip\n"
    )
    # Warnings too, and after the command Python has its own words again.
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 99}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    options = ("--recipe", "chat", "--chat-template", "chatml", "--max-seq-len", 60, "--workers", 1)
    done = tokenmill("prepare", tmp_path / "chat.jsonl", "--out", tmp_path / "c", *options)
    assert "raise it, --on-long drop leaves such records out, --on-long stop refuses them" in done.err
    assert errors.wording is str
    prepare(
        tmp_path / "chat.jsonl",
        out=tmp_path / "d",
        recipe="chat",
        workers=1,
        progress=False,
        options=PrepareOptions(chat_template="chatml", max_seq_len=60),
    )
    assert 'raise it, on_long="drop" leaves such records out' in capsys.readouterr().err


# Log levels


LOGS = """
import logging
from tokenmill.cli import console
console.take_over()
console.apply_log_variable()
for name in ("tokenmill", "tokenmill.config", "tokenmills", "other"):
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger(name), level)(f"{name} {level}")
"""


@pytest.mark.parametrize(
    ("level", "ours"),
    [
        (None, ["warning", "error"]),
        ("", ["warning", "error"]),
        ("debug", ["debug", "info", "warning", "error"]),
        ("INFO", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_the_variable_sets_the_level_of_our_loggers_alone(level, ours, monkeypatch):
    monkeypatch.delenv("TOKENMILL_LOG", raising=False)
    if level is not None:
        monkeypatch.setenv("TOKENMILL_LOG", level)
    done = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, check=True)
    others = ["warning", "error"]
    levels = {"tokenmill": ours, "tokenmill.config": ours, "tokenmills": others, "other": others}
    assert done.stderr.splitlines() == [f"{name} {each}" for name, own in levels.items() for each in own]


def test_a_level_that_there_is_not_is_an_error_of_one_line(monkeypatch):
    monkeypatch.setenv("TOKENMILL_LOG", "inof")
    command = [sys.executable, "-m", "tokenmill", "plan", "run.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = "TOKENMILL_LOG: expected one of debug, info, warning, error, got 'inof'; did you mean 'info'?"
    assert done.returncode != 0
    assert (done.stdout, done.stderr) == ("", f"error: {expected}\n")


# --quiet and --verbose


@pytest.mark.parametrize(
    ("variable", "flag", "told"),
    [
        ("", "", ["now at"]),
        ("", "-v", ["plan", "now at"]),
        ("error", "-v", ["plan", "now at"]),
        ("debug", "", ["plan", "now at"]),
        ("debug", "-q", []),
        ("error", "", []),
    ],
)
def test_the_flags_override_the_variable(run_toml, monkeypatch, variable, flag, told):
    monkeypatch.setenv("TOKENMILL_LOG", variable)
    command = [sys.executable, "-m", "tokenmill", "batches", run_toml, "--steps", ":2", *filter(None, [flag])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 2
    assert [words for words in ("plan", "now at") if f"\n{words} " in f"\n{done.stderr}"] == told


def test_the_level_is_that_of_one_command(tokenmill, run_toml):
    batches = ("batches", run_toml, "--steps", ":2")
    plain = tokenmill(*batches)
    assert tokenmill(*batches, "-q").err == ""
    assert tokenmill(*batches) == plain
    assert "now at step 2" in plain.err


def test_quiet_leaves_out_warnings_and_keeps_results_and_errors(tokenmill, tmp_path):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 99}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    options = ("--recipe", "chat", "--chat-template", "chatml", "--max-seq-len", 60, "--workers", 1)
    prepare = ("prepare", tmp_path / "chat.jsonl", *options)
    assert "warning: " in tokenmill(*prepare, "--out", tmp_path / "a").err
    done = tokenmill(*prepare, "--out", tmp_path / "b", "--quiet")
    assert (done.code, done.err) == (0, "")
    assert "cut to max_seq_len" in done.out
    again = tokenmill(*prepare, "--out", tmp_path / "b", "--quiet", "--on-long", "drop")
    assert again.code != 0
    assert again.err.startswith("error: ")
    both = tokenmill("plan", "a.toml", "-q", "-v")
    assert (both.code, both.err) == (2, "error: --quiet: cannot be combined with --verbose; remove one\n")


def test_quiet_shows_no_progress(capsys, monkeypatch):
    monkeypatch.setattr("tokenmill.progress.LINE_SECONDS", 0.0)
    logger = logging.getLogger("tokenmill")
    for level, shown in ((logging.ERROR, False), (logging.WARNING, True)):
        monkeypatch.setattr(logger, "level", level)
        logger.setLevel(level)
        with busy("compiling the plan"), progress() as tell:
            time.sleep(0.02)
            tell("verify", 1, 2)
        assert ("verify: 1 of 2, 50%" in capsys.readouterr().err) == shown
