"""What `inspect` and `plan` tell as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.cli.console import cell
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.cli.audit import Example

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --trained: #0a7d33; --dim: #888; --bar: #4c8bf5; }
@media (prefers-color-scheme: dark) { :root { --trained: #58d68d; --dim: #888; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0;
text-align: left; vertical-align: top; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.bar { background: var(--bar); height: .8rem; display: inline-block; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); padding: .8rem; }
.masked { color: var(--dim); } .trained { color: var(--trained); font-weight: 600; }
code { overflow-wrap: anywhere; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
"""


def check_file(option: str, file: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is read; None is one that is not wanted."""
    if file is None:
        return
    if file.is_dir():
        name = f"report{'.svg' if option == '--svg' else '.html'}"
        raise ConfigError(f"{option}: must be a file, got the folder {file}; name a file in it, such as {name}")
    if not file.absolute().parent.is_dir():
        raise ConfigError(
            f"{option}: must be a file in a folder that is there, got {file}; make {file.parent} first"
        )


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole page."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n{''.join(parts)}</body></html>\n"
    )


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a heading."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    return f"<h2>{escape(title)}</h2>\n<table><tr>{head}</tr>\n{body}</table>\n"


def html_list(title: str, lines: Iterable[str]) -> str:
    """Return a list with a heading."""
    return f"<h2>{escape(title)}</h2>\n<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>\n"


def _cell(value: object) -> str:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return f'<td class="number">{cell(value)}</td>' if numeric else f"<td>{escape(cell(value))}</td>"


def html_histogram(title: str, counts: Mapping[str, int]) -> str:
    """Return bars, one a bin."""
    most = max(counts.values(), default=1)
    rows = "".join(
        f'<tr><td>{escape(label)}</td><td class="number">{count:,}</td>'
        f'<td><span class="bar" style="width:{20 * count / most:.2f}rem"></span></td></tr>\n'
        for label, count in counts.items()
    )
    return f"<h2>{escape(title)}</h2>\n<table>{rows}</table>\n"


def html_examples(examples: Sequence[Example]) -> str:
    """Return examples with what is trained on standing out."""
    parts = ["<h2>Examples</h2><p><span class='trained'>trained</span>, <span class='masked'>masked</span></p>\n"]
    for example in examples:
        runs = "".join(
            f'<span class="{"trained" if trained else "masked"}">{escape(text)}</span>'
            for trained, text in example.runs
        )
        parts.append(
            f"<p>{escape(example.key)} {example.item:,}: {example.tokens:,} tokens, "
            f"{example.supervised:,} trained</p><pre>{runs}{'…' if example.cut else ''}</pre>\n"
        )
    return "".join(parts)
