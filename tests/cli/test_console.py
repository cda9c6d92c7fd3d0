"""What a command says of a config that was written for another project, and the options that it takes for one."""

import tomllib

import pytest
import typer
from typer.testing import CliRunner

from tokenmill.cli.console import ToNative, WorldSize, print_native, tell
from tokenmill.config.dialects import Translation, translate

TABLES = {"data": {"dataset_path": "/data/[web]", "num_workers": 2}, "train": {"seed": 1}}


@pytest.fixture
def translation():
    return translate(TABLES, where="kf.toml", world_size=4)


def test_what_a_foreign_config_was_taken_for_goes_to_stderr(translation, capsys):
    tell(translation)
    out, err = capsys.readouterr()
    assert out == ""
    first, *notes = err.splitlines()
    assert first == "taken as a KempnerForge config:"
    assert notes == [f"  - {note}" for note in translation.notes]
    assert "data.num_workers = 2: not needed, batches are assembled by threads" in translation.notes


def test_a_note_is_printed_as_it_is(capsys):
    """Brackets are no markup, and a long line is not broken."""
    note = "[red] 'a[1]' " + "x" * 300
    tell(Translation(dialect="torchtitan", tables={}, notes=(note,)))
    assert capsys.readouterr().err == f"taken as a torchtitan config:\n  - {note}\n"


def test_nothing_is_said_of_a_native_config(capsys):
    tell(translate({"run": {}}, where="run.toml"))
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
