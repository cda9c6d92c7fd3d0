"""The command `tokenmill`."""

from __future__ import annotations

import faulthandler
import inspect
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from tokenmill import errors
from tokenmill.cli import console as ui
from tokenmill.cli.batches import batches, check, what, when
from tokenmill.cli.demo import demo
from tokenmill.cli.inspect import inspect as inspect_
from tokenmill.cli.inspect import verify, view
from tokenmill.cli.plan import diff, fork, plan, quarantine
from tokenmill.cli.prepare import export, import_, prepare, upload
from tokenmill.cli.setup import doctor, init, warm
from tokenmill.errors import FULL, TokenmillError
from tokenmill.tables import check_public


class _PlainHelp:
    """Mixed into commands: their help shows metavars, and no types of Python."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - typer has no public name for it
        """Return all parameters, without the types that help would show."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.param_type_name == "argument":
                param.display_type_rich = _no_type
            elif param.metavar is None:
                param.metavar = ""
            param._get_number_range_help_str = _no_range
            param.help = (param.help or "").removesuffix(".")
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401
        """Return the parts of the usage line; required arguments have no braces."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "") for piece in pieces]


def _no_type(ctx: object) -> None:
    del ctx


def _no_range() -> str:
    """Leave limits of numbers to the error of a number outside of them."""
    return ""


class _Command(_PlainHelp, TyperCommand):
    pass


class _Group(_PlainHelp, TyperGroup):
    pass


app = typer.Typer(
    name="tokenmill",
    cls=_Group,
    help="From raw text to the tensors of every training step of a language model",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add_command(command: Callable[..., None]) -> None:
    """Add a command; its help is its docstring, whose first line is a phrase here."""
    phrase, *more = (" ".join(part.split()) for part in (inspect.getdoc(command) or "").split("\n\n"))
    app.command(
        command.__name__.strip("_"),
        cls=_Command,
        help="\n\n".join((phrase.removesuffix("."), *more)),
        no_args_is_help=command not in (demo, warm, doctor),
    )(ui.with_loudness(command))


# In the order of the data flow, as --help lists them.
for each in (
    *(init, demo, prepare, import_, export, upload, inspect_, verify),
    *(plan, batches, what, when, diff, fork, check, quarantine, view, warm, doctor),
):
    _add_command(each)


def _print_version() -> None:
    from tokenmill import __version__

    sys.stdout.write(f"tokenmill {__version__}\n")


app.command("version", hidden=True, cls=_Command)(_print_version)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and stop")) -> None:
    if version:
        _print_version()
        raise typer.Exit


def main() -> None:
    """Run the command line; an error of ours, or of a path, is one message and not a traceback."""
    with suppress(OSError, ValueError):  # stderr may be closed, or no file
        faulthandler.enable()
    ui.take_over()
    errors.wording = _worded
    logger = logging.getLogger("tokenmill")
    level = logger.level
    try:
        ui.apply_log_variable()
        for argument in sys.argv[1:]:
            check_public(argument)
        with _exit_on_sigterm():
            code = app(ui.with_new_names(sys.argv[1:]), prog_name="tokenmill", standalone_mode=False)
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
        _fail(*_path_problem(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        _refuse_usage(error)
    finally:
        errors.wording = str
        logger.setLevel(level)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM end this process in order, as Ctrl-C does, with code 143."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
        help_command = f"{context.command_path} --help" if context is not None else ""
        ui.show_error(_sentence(message, _possibility(error), help_command))
    sys.exit(error.exit_code)


def _possibility(error: Any) -> str:  # noqa: ANN401 - typer has no public name for it
    """Return the known option or command that is nearest to an unknown one."""
    unknown_command = re.match(r"No such command '(.*?)'", error.message)
    if unknown_command:
        names = getattr(typer.main.get_command(app), "commands", {})
        return next((f"'{name}'" for name in get_close_matches(unknown_command[1], names, 1)), "")
    known = getattr(error, "possibilities", None) or ()
    return next(iter(get_close_matches(getattr(error, "option_name", ""), known, 1)), "")


def _sentence(message: str, possibility: str, help_command: str) -> str:
    """Return a message of typer in the form of our errors: the problem, then the way out.

    >>> _sentence("No such command 'pla'. Did you mean 'plan', 'fork'?", "'plan'", "tokenmill --help")
    "no such command 'pla'; did you mean 'plan'?"
    >>> _sentence("Missing option '--out' / '-o'.", "", "tokenmill prepare --help")
    "missing option '--out' / '-o'; see tokenmill prepare --help"
    """
    wrong = re.split(r"\.? \(?(?:Did you mean|Possible options)", message)[0].rstrip(".")
    hint = f"did you mean {possibility}?" if possibility else f"see {help_command}" if help_command else ""
    return "; ".join(filter(None, (wrong[:1].lower() + wrong[1:], hint)))


def _path_problem(error: OSError) -> tuple[str, int]:
    """Return the message and the exit code of an error of a path."""
    if isinstance(error, FileNotFoundError):
        return f"file not found: {error.filename}; fix the path", 2
    if error.errno in FULL:
        reason = os.strerror(error.errno).lower()
        return f"{error.filename}: {reason}; free some space, then run the same command again", 1
    reason = str(error.strerror).lower()
    return f"{reason}: {error.filename}; fix the path or its permissions", ui.exit_code(error)


def _fail(message: str, code: int) -> NoReturn:
    ui.show_error(message)
    # As with diff(1), 1 means that two runs differ.
    sys.exit(2 if sys.argv[1:2] == ["diff"] else code)


if __name__ == "__main__":
    main()
