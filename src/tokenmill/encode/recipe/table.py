"""A table of a recipe, read key by key: names, presence and types are checked, and errors say where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

from tokenmill.errors import ConfigError, nearest

MAX_NUMBER = 1 << 40
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Table:
    """A table that may hold the known keys only; a key that is null counts as left out."""

    value: Mapping[str, object]
    where: str
    known: tuple[str, ...]

    def __post_init__(self) -> None:
        for key in self.value:
            if key not in self.known:
                raise ConfigError(f"{self.where}: keys must be known, got {key!r}; {nearest(str(key), self.known)}")

    def narrowed(self, known: tuple[str, ...]) -> Table:
        """Return the same table with its keys checked."""
        return Table(self.value, self.where, known)

    @overload
    def text(self, key: str, default: str) -> str: ...
    @overload
    def text(self, key: str, default: str | None) -> str | None: ...
    def text(self, key: str, default: str | None) -> str | None:
        """Return a string."""
        value = self.value.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    @overload
    def path(self, key: str) -> str: ...
    @overload
    def path(self, key: str, default: None) -> str | None: ...
    def path(self, key: str, default: str | None = "") -> str | None:
        """Return the name of a field, dots going down; without a default it must be given."""
        value = self.text(key, default)
        if value == "" and key not in self.value:
            raise ConfigError(f"{self.where}: {key} must be given, got nothing; name a field of the records")
        if value is not None and not all(value.split(".")):
            raise ConfigError(f"{self.where}: {key} must name a field, got {value!r}; write name or outer.inner")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.value.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    @overload
    def whole(self, key: str, default: int, least: int = 0) -> int: ...
    @overload
    def whole(self, key: str, default: None, least: int = 0) -> int | None: ...
    def whole(self, key: str, default: int | None, least: int = 0) -> int | None:
        """Return a whole number, at least `least`."""
        value = self.value.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "a whole number", value)
        if not least <= value <= MAX_NUMBER:
            raise ConfigError(
                f"{self.where}: {key} must be from {least} to {MAX_NUMBER}, got {value}; leave it out"
            )
        return value

    def share(self, key: str) -> float:
        """Return a share: from 0, which it is by default, to below 1."""
        value = self.value.get(key, 0.0)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number", value)
        if not 0 <= value < 1:
            raise ConfigError(
                f"{self.where}: {key} must be at least 0 and below 1, got {value}; leave it out for 0"
            )
        return float(value)

    def choice(self, key: str, choices: Sequence[str], default: str | None = "*first") -> str:
        """Return one of the choices: by default the first; with None it must be given."""
        value = self.text(key, choices[0] if default == "*first" else default)
        if value is None:
            raise ConfigError(f"{self.where}: {key} must be given, got nothing; write one of {', '.join(choices)}")
        if value not in choices and value != default:
            raise ConfigError(
                f"{self.where}: {key} must be one of {', '.join(choices)}, got {value!r}; {nearest(value, choices)}"
            )
        return value

    def anything(self, key: str) -> dict[str, object]:
        """Return a table of any values."""
        value = self.value.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self._wrong(key, "a table", value)
        return dict(value)

    def strings(self, key: str) -> dict[str, str]:
        """Return a table of strings."""
        inner = self.anything(key)
        return {name: Table(inner, f"{self.where}: {key}", tuple(inner)).text(name, "") for name in inner}

    def choices(self, key: str, choices: Sequence[str]) -> dict[str, str]:
        """Return a table whose values are of the choices."""
        inner = self.anything(key)
        return {name: Table(inner, f"{self.where}: {key}", tuple(inner)).choice(name, choices) for name in inner}

    def table(self, key: str, known: tuple[str, ...]) -> Table:
        """Return a table within it, empty where it is left out."""
        return Table(self.anything(key), f"{self.where}: {key}", known)

    def tables(self, key: str) -> list[Table]:
        """Return a list of tables, at least one; their keys are not yet checked."""
        value = self.value.get(key)
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise self._wrong(key, "a list of at least one table", value)
        for index, item in enumerate(value):
            if not isinstance(item, Mapping):
                raise self._wrong(f"{key}[{index}]", "a table", item)
        return [Table(item, f"{self.where}: {key}[{index}]", tuple(item)) for index, item in enumerate(value)]

    def _wrong(self, key: str, wanted: str, value: object) -> ConfigError:
        return ConfigError(f"{self.where}: {key} must be {wanted}, got {value!r}; change it")
