"""Write the generated parts of the reference pages: config keys, commands, errors, and the Python API.

A page marks such a part. Readers of the bare page see the text inside; the site has generated text in its place.

    <!-- generated: config run -->
    - `seq_len`: Inputs per row.
    <!-- end -->

In a part of the config, such a list adds to the texts of the records.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import tokenmill as tm

PART = re.compile(
    r"^<!-- generated: (?P<kind>[\w-]+)(?P<names>[^\n]*) -->\n(?P<shown>.*?)^<!-- end -->\n", re.M | re.S
)
_NOTE = re.compile(r"^- `(\w+)`: (.*(?:\n  .*)*)", re.MULTILINE)


def fill(page: str) -> str:
    """Return a page with its generated parts."""
    return PART.sub(lambda part: GENERATORS[part["kind"]](part["names"].split(), part["shown"]), page)


# Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A key of a table of the config."""

    name: str
    kind: str
    """Its type, in words."""
    default: str
    text: str
    """The text below the field of the record, as one paragraph."""


TABLES: Mapping[str, str] = {
    "run": "tokenmill.config.run.RunConfig",
    "sources": "tokenmill.config.run.SourceConfig",
    "stages": "tokenmill.config.schedule.StageConfig",
    "skip": "tokenmill.config.schedule.SkipConfig",
    "quarantine": "tokenmill.config.schedule.QuarantineConfig",
    "evals": "tokenmill.config.evals.EvalConfig",
    "evals.sources": "tokenmill.config.evals.EvalSource",
    "remote": "tokenmill.types.RemoteOptions",
}
"""Table -> its record."""
KINDS = {
    "int": "whole number",
    "float": "number",
    "Number": "number",
    "str": "string",
    "bool": "true or false",
    "Tokens": 'number of tokens, such as `"2T"`',
    "BatchSize": "whole number, or a table",
    "Sizes": '`"tokens"`, `"rows"` or `"documents"`',
    "Mapping[str, Number]": "table of numbers",
    "Mapping[str, Any]": "table",
    "tuple[str, ...]": "list of strings",
    "tuple[int, ...]": "list of whole numbers",
    "tuple[EvalSource, ...]": "list of tables",
    "Literal['attention']": '`"attention"`',
}
"""Hint of a field -> words."""


def keys_of(table: str) -> list[Key]:
    """Return the keys of a table in the order of its record.

    >>> [key.name for key in keys_of("skip")]
    ['steps', 'tokens', 'reason']
    """
    home, name = TABLES[table].rsplit(".", 1)
    record = getattr(__import__(home, fromlist=[name]), name)
    hints, texts = _texts_of(Path(inspect.getfile(record)), name)
    return [
        Key(
            name=each.name,
            kind=_kind(hints[each.name]),
            default=_default(each.default),
            text=texts.get(each.name, ""),
        )
        for each in fields(record)
        if each.init and not each.name.startswith("_") and each.name in hints
    ]


@cache
def _texts_of(file: Path, name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the hints of the fields of a class, and the texts below them."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)
    hints, texts = {}, {}
    for at, node in enumerate(body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        hints[node.target.id] = ast.unparse(node.annotation)
        after = body[at + 1] if at + 1 < len(body) else None
        if (
            isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            texts[node.target.id] = " ".join(after.value.value.split())
    return hints, texts


def _kind(hint: str) -> str:
    parts = [part.strip() for part in hint.split("|") if part.strip() not in ("None", "UnsetType")]
    return " or ".join(KINDS.get(part, f"`{part}`") for part in parts)


def _default(value: object) -> str:
    if value is MISSING:
        return "required"
    if value is None or value == () or (isinstance(value, int) and value < 0) or value == "":
        return "optional"
    if isinstance(value, bool):
        return f"default `{str(value).lower()}`"
    if isinstance(value, tuple):
        return "default " + ", ".join(f"`{item}`" for item in value)
    return f'default `"{value}"`' if isinstance(value, str) else f"default `{value}`"


def _config(names: list[str], shown: str) -> str:
    """Write one entry per key of a table, with an anchor: its text, and what the page adds to it."""
    (table,) = names
    notes = {key: " ".join(text.split()) for key, text in _NOTE.findall(shown)}
    keys = keys_of(table)
    unknown = notes.keys() - {key.name for key in keys}
    if unknown:
        raise ValueError(f"[{table}] has no key {min(unknown)!r}")
    return "\n".join(_entry(table, key, notes.get(key.name, "")) for key in keys)


def _entry(table: str, key: Key, note: str) -> str:
    text = " ".join(part for part in (key.text, note) if part)
    if not text:
        raise ValueError(f"[{table}] {key.name}: nothing describes it; add a text below the field, or a note")
    return f"### `{key.name}` {{ #{table}.{key.name} }}\n\n*{key.kind}; {key.default}*\n\n{text}\n"


# Commands


def commands() -> Iterator[tuple[str, Any]]:
    """Yield name and command of all commands that --help lists."""
    import typer

    from tokenmill.cli.app import app

    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        if not command.hidden:
            yield name, command


def _commands(names: list[str], shown: str) -> str:
    """Write usage, arguments and options of every command, with an anchor for each command and option."""
    del names, shown
    import click

    text = []
    for name, command in commands():
        context: Any = command.make_context(name, [], resilient_parsing=True)
        context.info_name = f"tokenmill {name}"
        usage = " ".join(command.collect_usage_pieces(context))
        text += [f"## tokenmill {name} {{ #{name} }}", "", f"{_closed(command.help or '')}", ""]
        text += ["```text", f"tokenmill {name} {usage}", "```", ""]
        panels: dict[str, list[Any]] = {}
        for param in command.get_params(context):
            if not getattr(param, "hidden", False):
                kind = (
                    "Arguments" if isinstance(param, click.Argument) or param.param_type_name == "argument" else ""
                )
                panels.setdefault(kind or getattr(param, "rich_help_panel", None) or "Options", []).append(param)
        for panel, params in sorted(panels.items(), key=lambda item: item[0] == "Options"):
            text += [f"| {panel.lower()} | meaning | default |", "|---|---|---|"]
            text += [_option(name, param) for param in params]
            text.append("")
    return "\n".join(text)


def _option(command: str, param: Any) -> str:  # noqa: ANN401 - one of typer, which has no public name for it
    """Write the row of an argument or option."""
    if param.param_type_name == "argument":
        spelled, anchor = [param.metavar or param.name.upper()], param.name
    else:
        spelled = [*param.opts, *param.secondary_opts]
        anchor = next(word for word in param.opts if word.startswith("--")).strip("-")
        if param.metavar and not param.is_flag:
            spelled[0] += f" {param.metavar}"
    words = ", ".join(f"`{word}`" for word in spelled)
    default = "required" if param.required else ""
    if not default:
        value = getattr(param, "show_default", None)
        if isinstance(value, str):
            default = value
        elif param.default not in (None, False, (), []) and not callable(param.default):
            default = f"`{param.default}`"
    help_text = (param.help or "").replace("|", "\\|").removesuffix(".")
    help_text = re.sub(r"<(\\\|\w+\\\|)>", r"`<\1>`", help_text)
    return f'| <span id="{command}.{anchor}"></span>{words} | {help_text} | {default} |'


def _closed(text: str) -> str:
    """Return paragraphs that end with a full stop."""
    parts = [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
    return "\n\n".join(part if part.endswith((".", ":")) else f"{part}." for part in parts)


# Errors


def errors() -> Iterator[type[tm.TokenmillError]]:
    """Yield all classes of errors, each before the narrower ones."""

    def below(kind: type[tm.TokenmillError]) -> Iterator[type[tm.TokenmillError]]:
        yield kind
        for narrower in kind.__subclasses__():
            if narrower.__module__ == "tokenmill.errors":
                yield from below(narrower)

    yield from dict.fromkeys(below(tm.TokenmillError))


def _errors(names: list[str], shown: str) -> str:
    """Write one entry per class of errors: its text, the classes that it also is, and the exit code."""
    del names, shown
    from tokenmill.cli.console import exit_code

    text = []
    for kind in errors():
        bases = [base for base in kind.__mro__[1:] if issubclass(base, Exception) and base is not Exception]
        also = ", ".join(f"`{base.__name__}`" for base in bases if base is not tm.TokenmillError) or "none"
        text += [
            f"### {kind.__name__} {{ #{kind.__name__} }}",
            "",
            inspect.getdoc(kind) or "",
            "",
            f"Also caught as: {also}. Exit code of commands: {exit_code(kind('x'))}.",
            "",
        ]
    return "\n".join(text)


# The Python API


MEMBERS: Mapping[str, tuple[str, ...]] = {
    "tokenmill.Run": (
        *("build", "from_toml", "from_tables", "to_toml", "stores", "plan", "report", "reading", "loader", "evals"),
        *("what", "when", "diff", "fork", "lasting", "lr_schedule", "view"),
    ),
    "tokenmill.Store": (
        *("keys", "num_documents", "num_tokens", "num_shards", "fetch", "fetch_record", "find", "origin", "view"),
    ),
    "tokenmill.Plan": ("steps", "fingerprint", "fingerprint_at", "at", "rows", "what", "when", "tokens_seen"),
    "tokenmill.Loader": (
        *("step", "state_dict", "load_state_dict", "seek", "batch_at", "tokens_seen", "metrics", "waited", "close"),
    ),
    "tokenmill.Layout": ("dp", "tp", "cp", "pp", "cut"),
    **dict.fromkeys((f"tokenmill.{name}" for name in dir(tm) if name.endswith("Config")), ()),
}
"""Class -> members that belong to the API, in the order of the page; those of other classes are all there. Keys of
config records are on the page of the config."""


def _python(names: list[str], shown: str) -> str:
    """Write the directives that mkdocstrings replaces by signatures and docstrings."""
    del shown
    text = []
    for name in names:
        text.append(f"::: {name}")
        if name in MEMBERS:
            listed = "".join(f"\n        - {member}" for member in MEMBERS[name])
            text.append(f"    options:\n      members: {listed or 'false'}")
        text.append("")
    return "\n".join(text)


def _bare(names: list[str], shown: str) -> str:
    """Leave out what is for readers of the bare page alone."""
    del names, shown
    return ""


GENERATORS = {"bare": _bare, "config": _config, "commands": _commands, "errors": _errors, "python": _python}
"""Kind of a generated part -> its writer, which is given the names of the mark and the text inside."""
