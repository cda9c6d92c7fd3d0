"""A function of the user over records: who it is, and how a worker process finds it.

It stands in the manifest by its name and a hash of its source, so that a store says what made its records, and a
build with another function is another build. It is never pickled: a worker imports it by its module.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import xxhash

from tokenmill.encode import Refusal
from tokenmill.errors import ConfigError

Record: TypeAlias = Mapping[str, Any]
MapRecord: TypeAlias = Callable[[dict[str, Any]], "Record | None"]
"""A record to the one that the recipe reads, or to None, which leaves it out."""
LEFT_OUT_BY_MAP = "map"
"""Why a record is left out that the function made None of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MapIdentity:
    """Which function it is."""

    module: str
    name: str
    source: str
    """Hash of its source text."""


def identify(function: MapRecord) -> MapIdentity:
    """Return which function it is; one that cannot be told from others is refused."""
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None) or ""
    if not inspect.isfunction(function):
        raise ConfigError(f"map: must be a function of a record, got {function!r}; write it with def")
    if function.__closure__:
        raise ConfigError(
            f"map: must depend on nothing but the record, so that its source says what it does, got {name} with "
            f"{', '.join(function.__code__.co_freevars)} from around it; write them into it"
        )
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise ConfigError(
            f"map: must be written in a file, so that its source can be hashed, got {name} without one; do so"
        ) from None
    return MapIdentity(module=module, name=name, source=xxhash.xxh3_128_hexdigest(source.encode()))


def is_importable(identity: MapIdentity) -> bool:
    """Say whether another process can import the function: one of a script that was started it cannot."""
    return identity.module != "__main__" and "<" not in identity.name and "." not in identity.name


def load_map(identity: MapIdentity) -> MapRecord:
    """Import a function by its module and name; another source than that of the build is refused."""
    try:
        module = sys.modules.get(identity.module) or importlib.import_module(identity.module)
        function: MapRecord = getattr(module, identity.name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"map: workers must be able to import {identity.module}.{identity.name}, got {error}; put its folder "
            "on PYTHONPATH, or use workers=1"
        ) from error
    if identify(function) != identity:
        raise ConfigError(
            f"map: {identity.module}.{identity.name} must be the same for all workers, got another source; let "
            "nothing write to it, and run again"
        )
    return function


def apply_map(function: MapRecord, records: Sequence[Record]) -> list[Record | Refusal]:
    """Return what a function makes of records: each, or why there is none."""
    made: list[Record | Refusal] = []
    for record in records:
        try:
            result = function(dict(record))
        except Exception as error:  # whatever a function of the user raises is about its record
            made.append(Refusal("map_failed", f"{type(error).__name__}: {error}"[:200]))
            continue
        if result is None:
            made.append(Refusal(LEFT_OUT_BY_MAP, "left out"))
        elif isinstance(result, Mapping):
            made.append(result)
        else:
            made.append(Refusal("map_failed", f"it returned {type(result).__name__}, neither a dict nor None"))
    return made
