"""The one reader of tables: what TOML and JSON give becomes typed records, or an error that names the place.

A record is a frozen dataclass. Its hints say what a table may hold: `int`, `Number`, `str`, `bool`, `X | None`,
`tuple[X, ...]`, `Mapping[str, X]`, `Literal[...]`, and records within records. A key that is not known is refused,
with the nearest that is. Rules that go beyond types stand in the `__post_init__` of the record.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from tokenmill.errors import ConfigError, TokenmillError, nearest
from tokenmill.types import CROPS, PACKINGS, SPLITS, WEIGHINGS

T = TypeVar("T")
MAX_NUMBER = 1 << 40
"""Steps and rows of a batch, so that positions of a run fit 64 bits many times over."""
Number: TypeAlias = int | float
"""A number as it was written: 1 stays 1, where `float` would make it 1.0."""
_WORDS = {int: "whole numbers", float: "numbers", Number: "numbers", str: "strings", bool: "flags"}


def read_table(kind: type[T], value: object, where: str, *, error: type[TokenmillError] = ConfigError) -> T:
    """Return a table as a record of a kind; names, presence and types are checked, all the way down."""
    _check_keys(kind, value, where, error)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as problem:
        if isinstance(problem.__cause__, TokenmillError):
            raise problem.__cause__ from None
        raise _refusal(str(problem), kind, value, where, error) from None


def read_list(kind: type[T], tables: Mapping[str, Any], key: str) -> tuple[T, ...]:
    """Return the tables of the list under a key as records; none where there is no such list."""
    value = tables.get(key, [])
    if not isinstance(value, list):
        raise ConfigError(f"{key}: must be a list of tables, got {type(value).__name__}; write [[{key}]]")
    return tuple(read_table(kind, item, f"{key}[{number}]") for number, item in enumerate(value))


def read_json(kind: type[T], text: bytes | str, where: str, *, error: type[TokenmillError] = ConfigError) -> T:
    """Return a JSON text as a record of a kind."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise error(f"{where}: must be JSON, got {problem}; put back what was written there") from None
    return read_table(kind, value, where, error=error)


def as_json(record: object) -> Any:  # noqa: ANN401 - a JSON value
    """Return a record as JSON values, every field of it; `read_table` reads them back."""
    return msgspec.to_builtins(record)


def check_keys(
    where: str, table: Mapping[str, Any], known: Sequence[str], error: type[TokenmillError] = ConfigError
) -> None:
    """Refuse keys that are not known."""
    for key in table:
        if key not in known:
            raise error(f"{where}: keys must be known, got {key!r}; {nearest(str(key), known)}")


def _check_keys(hint: Any, value: object, where: str, error: type[TokenmillError]) -> None:  # noqa: ANN401
    """Refuse unknown keys of a table and of the tables in it, and tables that are none."""
    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise error(f"{where}: must be a table, got {value!r}; write [{where}]")
        hints = _hints(hint)
        check_keys(where, value, tuple(hints), error)
        for name, item in value.items():
            _check_keys(hints[name], item, f"{where}.{name}", error)
    elif origin in (Union, types.UnionType):
        # Of several records that a value may be none is known to be meant: a table has one kind at most.
        tables = [kind for kind in inner if is_dataclass(kind) or get_origin(kind) is not None]
        if value is not None and len(tables) == 1 and len(inner) - (type(None) in inner) == 1:
            _check_keys(tables[0], value, where, error)
    elif origin is tuple and isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check_keys(inner[0], item, f"{where}[{number}]", error)
    elif origin is not Literal and inner and isinstance(value, Mapping):
        for name, item in value.items():
            _check_keys(inner[-1], item, f"{where}.{name}", error)


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


def _refusal(problem: str, kind: type, value: Any, where: str, error: type[TokenmillError]) -> TokenmillError:  # noqa: ANN401
    """Say in our own form what msgspec found: where, the rule, the value, the way out."""
    text, _, path = problem.partition(" - at ")
    hint: Any = kind
    for name, number in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        inner = get_args(hint)
        if number and not is_dataclass(inner[0]):
            break  # a list of plain values is shown whole
        hint = _bare(inner[0] if number else _hints(hint)[name])
        value = value[int(number)] if number else value[name]
        where += f"[{number}]" if number else f".{name}"
    missing = re.fullmatch(r"Object missing required field `(.+)`", text)
    if missing:
        return error(f"{where}: {missing[1]} must be given, got nothing; add {missing[1]} = ...")
    return error(f"{where}: must be {_wanted(hint)}, got {value!r}; change its type")


def _bare(hint: Any) -> Any:  # noqa: ANN401 - what a hint is
    """Return a hint without `None`."""
    inner = [part for part in get_args(hint) if part is not type(None)]
    return inner[0] if get_origin(hint) in (Union, types.UnionType) and len(inner) == 1 else hint


def _wanted(hint: Any) -> str:  # noqa: ANN401 - what a hint is
    """Say in words what a hint asks for.

    >>> _wanted(tuple[int, ...]), _wanted(Mapping[str, float]), _wanted(bool)
    ('a list of whole numbers', 'a table of numbers', 'true or false')
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin is tuple:
        return f"a list of {_WORDS.get(inner[0], 'tables')}"
    if origin in (Union, types.UnionType) and hint != Number:
        return " or ".join(dict.fromkeys(_wanted(part) for part in inner if part is not type(None)))
    if origin is not None and hint != Number:
        return f"a table of {_WORDS.get(inner[-1], 'values')}"
    return "true or false" if hint is bool else f"a {_WORDS.get(hint, 'tables').removesuffix('s')}"


# Rules for single values.


def check_positive(where: str, name: str, value: int) -> None:
    """Refuse a number below 1, or above what positions can hold."""
    if value < 1:
        raise ConfigError(f"{where}: {name} must be at least 1, got {value}; raise it")
    if value > MAX_NUMBER:
        raise ConfigError(f"{where}: {name} must be at most {MAX_NUMBER}, got {value}; lower it")


def check_seed(where: str, seed: int) -> None:
    """Refuse a seed that is no unsigned 63-bit number."""
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"{where}: seed must lie within 0 and 2^63, got {seed}; choose a smaller one")


def check_packing(where: str, packing: str, split: str, crop: str) -> None:
    """Refuse choices of packing that do not go together."""
    check_choice(where, "packing", packing, PACKINGS)
    check_choice(where, "split", split, SPLITS)
    check_choice(where, "crop", crop, CROPS)
    if split != "allow" and packing not in ("best_fit", "padded"):
        raise ConfigError(
            f"{where}: split is for packing best_fit and padded, got {split!r} with {packing!r}; leave it out"
        )
    if crop != "return" and packing != "bos_best_fit":
        raise ConfigError(f"{where}: crop is for packing bos_best_fit, got {crop!r} with {packing!r}; leave it out")


def check_weighing(where: str, temperature: float | None, weigh_by: str | None) -> None:
    """Refuse a temperature or measure of weights that means nothing."""
    if temperature is not None and not 0 < temperature < float("inf"):
        raise ConfigError(f"{where}: temperature must be positive, got {temperature}; leave it out for 1")
    if weigh_by is not None:
        check_choice(where, "weigh_by", weigh_by, WEIGHINGS)


def check_choice(where: str, name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse what is not among the choices."""
    if value not in choices:
        raise ConfigError(
            f"{where}: {name} must be one of {', '.join(choices)}, got {value!r}; {nearest(value, choices)}"
        )
