"""Config files of other projects as native ones.

1. In: the tables of a TOML file: ours, KempnerForge's, or those of the torchtitan fork with data stages.
2. Does: tells which of them it is, checks what it says of data by the rules of its own project, and says the same
   in native tables.
3. Out: native tables for `config.parse_config`, and notes on what was taken how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.config.dialects.kempnerforge import from_kempnerforge
from tokenmill.config.dialects.torchtitan import from_torchtitan
from tokenmill.errors import ConfigError, met_in, nearest

NATIVE, KEMPNERFORGE, TORCHTITAN = "native", "KempnerForge", "torchtitan"
_MARKS = {
    NATIVE: ("run", "sources", "stages", "skip", "quarantine"),
    KEMPNERFORGE: ("data", "train"),
    TORCHTITAN: ("training",),
}
"""Tables that only one kind of config has."""
_READERS = {KEMPNERFORGE: from_kempnerforge, TORCHTITAN: from_torchtitan}


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A config in native tables."""

    dialect: str
    """`native`, `KempnerForge` or `torchtitan`."""
    tables: dict[str, Any]
    """What `config.parse_config` reads."""
    notes: tuple[str, ...]
    """What was taken how, or ignored; a sentence each."""


def translate(tables: Mapping[str, Any], *, where: str, world_size: int | None = None) -> Translation:
    """Return a config in native tables; one that is native stays as it is.

    Other projects count the rows of a step by rank, so that theirs need `world_size`, the number of data-parallel
    ranks; without it one is assumed, and noted.
    """
    if world_size is not None and world_size < 1:
        raise ConfigError(f"world_size: must be at least 1, got {world_size}; leave it out for one rank")
    dialect = _dialect(tables, where)
    if dialect == NATIVE:
        return Translation(dialect=dialect, tables=dict(tables), notes=())
    try:
        native, notes = _READERS[dialect](tables, world_size)
    except ConfigError as error:
        raise met_in(where, error) from None
    return Translation(dialect=dialect, tables=native, notes=tuple(notes))


def _dialect(tables: Mapping[str, Any], where: str) -> str:
    marks = {kind: [name for name in names if name in tables] for kind, names in _MARKS.items()}
    kinds = [kind for kind, names in marks.items() if names]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        got = " and ".join(f"[{marks[kind][0]}] ({kind})" for kind in kinds)
        edited = "skip" in tables or "quarantine" in tables
        way_out = "print it as our own with `tokenmill plan --to-native` and edit that"
        raise ConfigError(
            f"{where}: must be a config of one kind, got {got}; {way_out if edited else 'keep the tables of one'}"
        )
    known = "[run] and [[sources]] (native), [data] (KempnerForge), or [training] (torchtitan)"
    # A single table under a misspelt name is told the nearest; a file of many is of another kind altogether.
    hint = nearest(next(iter(tables)), ["run", "data", "training"]) if len(tables) == 1 else "add one of them"
    got = ", ".join(f"[{name}]" for name in tables) or "no table"
    raise ConfigError(f"{where}: must have {known}, got {got}; {hint}")
