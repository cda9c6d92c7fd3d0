"""Help texts of all commands: short phrases, plain metavars, groups."""

from __future__ import annotations

import re

import pytest
import typer

from tokenmill.cli.app import app

COMMANDS = {name: command for name, command in typer.main.get_command(app).commands.items() if not command.hidden}
MOST_IN_A_GROUP = 12


def options_of(name):
    return [param for param in COMMANDS[name].params if not getattr(param, "hidden", False)]


def is_phrase(text):
    return (
        bool(text)
        and len(text.split()) <= 10
        and not text.endswith(".")
        and not re.match(r"(What|Of|Those)\b", text)
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_description_and_option_is_a_phrase_of_at_most_ten_words(name):
    phrase, *more = COMMANDS[name].help.split("\n\n")
    assert is_phrase(phrase)
    assert [part for part in more if not part.endswith(".")] == []
    assert [(param.name, param.help) for param in options_of(name) if not is_phrase(param.help)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_with_a_value_has_a_plain_metavar(tokenmill, name):
    plain = re.compile(
        r"[A-Z0-9|./:=]+(\.(toml|html|svg))?|RUN\d?\.toml|STORE\|RUN\.toml|RUN\.toml\|STORE|[A-Z]+\.(html|svg|toml)"
    )
    values = [param for param in options_of(name) if not getattr(param, "is_flag", False)]
    assert [(param.name, param.metavar) for param in values if not plain.fullmatch(param.metavar or "")] == []
    text = tokenmill(name, "--help").out
    assert not re.search(r"<(int|str|bool|float|path|list|file)", text)
    assert "{" not in text
    assert not re.search(r"\[\d?\.?\d*x?[<>]=?", text)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_group_of_options_is_longer_than_a_glance(tokenmill, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for panel in re.split(r"╭─", tokenmill(name, "--help").out)[1:]:
        assert len(re.findall(r"^│ \*? *--", panel, re.MULTILINE)) <= MOST_IN_A_GROUP


def test_the_help_has_one_line_for_each_command_and_no_full_stop(tokenmill, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listed = tokenmill("--help").out.partition("Commands")[2]
    assert re.findall(r"^│ (\S+) ", listed, re.MULTILINE) == list(COMMANDS)
    assert not re.search(r"\. +│$", tokenmill("--help").out, re.MULTILINE)


def test_options_that_mean_the_same_have_the_same_short_flag():
    short = {"--tokenizer": "-t", "--out": "-o", "--workers": "-j", "--quiet": "-q", "--verbose": "-v"}
    for name in COMMANDS:
        for param in options_of(name):
            for long in set(param.opts) & set(short):
                assert short[long] in param.opts, (name, long)
        assert {"--quiet", "--verbose"} <= {opt for param in options_of(name) for opt in param.opts}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["versoin"], "no such command 'versoin'; did you mean 'version'?"),
        (["xyz"], "no such command 'xyz'; see tokenmill --help"),
        (["plan", "a.toml", "--htm", "b"], "no such option: --htm; did you mean --html?"),
        (["plan", "a.toml", "--xyz"], "no such option: --xyz; see tokenmill plan --help"),
        (["prepare", "a"], "missing option '--out' / '-o'; see tokenmill prepare --help"),
    ],
)
def test_an_error_of_usage_has_one_way_out_and_one_mark(tokenmill, arguments, message):
    done = tokenmill(*arguments)
    assert (done.code, done.out, done.err) == (2, "", f"error: {message}\n")


def test_version_is_an_option_and_a_command(tokenmill):
    assert tokenmill("version").out == tokenmill("--version").out
    assert tokenmill("version").code == 0
