"""A table of a config file whose values are checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from tokenmill.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What TOML gave for a table, and where it stands."""

    where: str
    """File and table, as messages begin."""
    values: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def only(self, known: Sequence[str]) -> None:
        """Refuse keys that are not known; name the nearest that is."""
        for name in self.values:
            if name not in known:
                raise ConfigError(f"{self.where}: keys must be known, got {name!r}; {nearest(name, known)}")

    def need(self, *names: str) -> None:
        """Refuse a table in which one of the names is missing."""
        for name in names:
            if name not in self.values:
                raise ConfigError(f"{self.where}: {name} must be given, got nothing; add {name} = ...")

    def whole(self, name: str, default: int, *, least: int) -> int:
        """Read a whole number that is not below `least`."""
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._refuse(name, "a whole number")
        if value < least:
            raise ConfigError(f"{self.where}: {name} must be at least {least}, got {value}; raise it")
        return value

    def positive(self, name: str, default: float) -> float:
        """Read a number above 0."""
        value = self._number(name, self.values.get(name, default))
        if not value > 0:
            raise ConfigError(f"{self.where}: {name} must be above 0, got {value}; raise it")
        return value

    def text(self, name: str, default: str = "") -> str:
        """Read a string; what stands for none there, the empty one, is the default."""
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self._refuse(name, "a string")
        return value.strip() or default

    def flag(self, name: str, default: bool) -> bool:
        """Read true or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self._refuse(name, "true or false")
        return value

    def texts(self, name: str) -> list[str]:
        """Read a list of strings, none of which is empty; [] where there is none."""
        value = self.values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
            raise self._refuse(name, "a list of strings that are not empty")
        return list(value)

    def numbers(self, name: str) -> list[float]:
        """Read a list of finite numbers; [] where there is none."""
        value = self.values.get(name, [])
        if not isinstance(value, list):
            raise self._refuse(name, "a list of numbers")
        return [self._number(name, item, "finite numbers") for item in value]

    def weights(self, name: str) -> dict[str, float]:
        """Read a table of numbers that are not negative; {} where there is none."""
        value = self.values.get(name, {})
        if not isinstance(value, Mapping):
            raise self._refuse(name, "a table of numbers")
        weights = {key: self._number(name, weight, "finite numbers") for key, weight in value.items()}
        bad = {key: weight for key, weight in weights.items() if weight < 0}
        if bad:
            raise ConfigError(f"{self.where}: {name} must not be negative, got {bad}; 0 leaves a source out")
        return weights

    def tables(self, name: str) -> list[Table]:
        """Read a list of tables; [] where there is none."""
        value = self.values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self._refuse(name, "a list of tables")
        return [Table(where=f"{self.where}.{name}[{index}]", values=item) for index, item in enumerate(value)]

    def _number(self, name: str, value: object, wanted: str = "a finite number") -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
            raise ConfigError(f"{self.where}: {name} must be {wanted}, got {value!r}; change it")
        return value

    def _refuse(self, name: str, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} must be {wanted}, got {self.values[name]!r}; change its type")


def table_of(tables: Mapping[str, Any], name: str, where: str) -> Table:
    """Return a table of a file; an empty one where there is none."""
    value = tables.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {name} must be a table, got {value!r}; write [{name}]")
    return Table(where=f"{where}: {name}", values=value)
