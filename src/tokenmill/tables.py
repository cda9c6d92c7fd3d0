"""Tables of a TOML file into dataclasses: names, presence and types are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from tokenmill.errors import ConfigError, nearest

T = TypeVar("T")


def read_list(kind: type[T], tables: Mapping[str, Any], key: str) -> tuple[T, ...]:
    """Fill a dataclass from each table of the list under a key; none where there is no such list."""
    value = tables.get(key, [])
    if not isinstance(value, list):
        raise ConfigError(f"{key}: must be a list of tables, got {type(value).__name__}; write [[{key}]]")
    return tuple(read_table(kind, item, f"{key}[{number}]") for number, item in enumerate(value))


def read_table(kind: type[T], table: Any, where: str) -> T:  # noqa: ANN401 - what TOML gives
    """Fill a dataclass from a table; names, presence and types are checked."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: must be a table, got {table!r}; write [{where}]")
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    check_keys(where, table, tuple(known))
    for name, item in known.items():
        if name not in table and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{where}: {name} must be given, got nothing; add {name} = ...")
    hints = get_type_hints(kind)
    values = {name: _convert(f"{where}.{name}", value, hints[name]) for name, value in table.items()}
    return kind(**values)


def _convert(where: str, value: Any, hint: Any) -> Any:  # noqa: ANN401 - what TOML gives, what a hint is
    """Return a TOML value as the type of its field, or refuse it."""
    text = str(hint)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if "Mapping" in text:
        ok = isinstance(value, Mapping) and all(
            isinstance(weight, int | float) and not isinstance(weight, bool) for weight in value.values()
        )
        wanted, result = "a table of numbers", value
    elif "tuple[int" in text:
        ok = isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        wanted, result = "a list of whole numbers", tuple(value) if ok else value
    elif "tuple" in text:
        ok = isinstance(value, list) and all(isinstance(item, str) for item in value)
        wanted, result = "a list of strings", tuple(value) if ok else value
    elif "bool" in text:
        ok, wanted, result = isinstance(value, bool), "true or false", value
    elif "float" in text:
        ok, wanted, result = number, "a number", value
    elif "int" in text:
        ok, wanted, result = number and isinstance(value, int), "a whole number", value
    else:
        ok, wanted, result = isinstance(value, str), "a string", value
    if not ok:
        raise ConfigError(f"{where}: must be {wanted}, got {value!r}; change its type")
    return result


def check_keys(where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse keys that are not known."""
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: keys must be known, got {key!r}; {nearest(key, known)}")
