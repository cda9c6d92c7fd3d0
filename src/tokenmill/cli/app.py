"""The command `tokenmill`."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import typer

from tokenmill import errors
from tokenmill.cli import console as ui
from tokenmill.cli.batches import batches, what, when
from tokenmill.cli.demo import demo
from tokenmill.cli.inspect import inspect, verify, view
from tokenmill.cli.plan import diff, fork, plan, quarantine
from tokenmill.cli.prepare import export, import_, prepare, upload
from tokenmill.cli.setup import doctor, init, warm
from tokenmill.errors import FULL, TokenmillError
from tokenmill.tables import check_public

app = typer.Typer(
    name="tokenmill",
    help="From raw text to the tensors of every training step of a language model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of the data flow, as --help lists them.
for command in (
    *(init, demo, prepare, import_, export, upload, inspect, verify),
    *(plan, batches, what, when, diff, fork, quarantine, view, warm, doctor),
):
    app.command(command.__name__.strip("_"), no_args_is_help=command not in (demo, warm, doctor))(command)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        from tokenmill import __version__

        sys.stdout.write(f"tokenmill {__version__}\n")
        raise typer.Exit


def main() -> None:
    """Run the command line; an error of ours, or of a path, is one message and not a traceback."""
    ui.take_over()
    errors.wording = _worded
    try:
        ui.apply_log_variable()
        for argument in sys.argv[1:]:
            check_public(argument)
        code = app(ui.with_new_names(sys.argv[1:]), standalone_mode=False)
        sys.stdout.flush()
    except TokenmillError as error:
        _fail(_worded(str(error)), ui.exit_code(error))
    except BrokenPipeError:
        _stop_writing()
    except SystemExit as stop:  # rich and typer exit with 1
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        _stop_writing()
    except OSError as error:
        if error.filename is None:
            raise
        if error.errno in FULL:
            why = os.strerror(error.errno).lower()
            _fail(f"{error.filename}: {why}; free some space, then run the same command again", 1)
        why = f"the system must allow its use, got {error.strerror}; fix the path or its rights"
        _fail(f"{error.filename}: {why}", ui.exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        _refuse_usage(error)
    finally:
        errors.wording = str
    sys.exit(code if isinstance(code, int) else 0)


def _stop_writing() -> NoReturn:
    """Exit without an error: the reader of a pipe, such as `head`, has read all that it wants."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    sys.exit(0)


def _worded(message: str) -> str:
    """Return a message with the flags of the running command, or else of `prepare`, for arguments of Python."""
    commands = getattr(typer.main.get_command(app), "commands", {})
    return ui.in_flags(message, *(commands[name] for name in (*sys.argv[1:2], "prepare") if name in commands))


def _refuse_usage(error: Any) -> NoReturn:  # noqa: ANN401 - typer has no public name for it
    """Print which argument is wrong; a command without any shows its help."""
    message = error.format_message()
    if not message or error.__class__.__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        context = getattr(error, "ctx", None)
        hint = f"; see {context.command_path} --help" if context is not None else ""
        ui.show_error(f"{message.rstrip('.')}{hint}")
    sys.exit(error.exit_code)


def _fail(message: str, code: int) -> NoReturn:
    ui.show_error(message)
    # As with diff(1), 1 means that two runs differ.
    sys.exit(2 if sys.argv[1:2] == ["diff"] else code)


if __name__ == "__main__":
    main()
