"""A table of a config file whose values are checked as they are read."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
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


# Native sources for the datasets and folders of other configs: names, and what is known of their tokens.

HUGGING_FACE = "hf:"
OURS = "tokenmill"
"""A table that a foreign config may have for us: what neither it nor its token files say."""
DEFAULT_SPLIT = "train"
DEFAULT_FIELD = "text"
_FACTS = ("dtype", "vocab_size", "eos_id", "bos_id")


def plain_name(text: str) -> str:
    """Return the last part of a path or of the name of a dataset, as a source can be called.

    >>> plain_name("/data/web v2/"), plain_name("allenai/c4"), plain_name("..")
    ('web-v2', 'c4', 'data')
    """
    last = re.split(r"[/\\]", text.rstrip("/\\"))[-1]
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in last)
    return name if any(letter.isalnum() for letter in name) else "data"


def free_name(wanted: str, taken: Container[str]) -> str:
    """Return the name, or with -2, -3, ... behind it the first that nobody has.

    >>> free_name("web", {"web", "web-2"})
    'web-3'
    """
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}-{number}"
    return name


def text_source(dataset: str, *, config: str, split: str, tokenizer: str, text_field: str) -> dict[str, Any]:
    """Return a source of a Hugging Face dataset, without a name; what is as usual is left out."""
    parts = [config, "" if split == DEFAULT_SPLIT else split]
    spelled = ":".join([dataset, *parts]).rstrip(":")
    source: dict[str, Any] = {"documents": [f"{HUGGING_FACE}{spelled}"], "tokenizer": tokenizer}
    return source if text_field == DEFAULT_FIELD else {**source, "text_field": text_field}


def add_facts(sources: Sequence[dict[str, Any]], tables: Mapping[str, Any], where: str) -> list[str]:
    """Add to sources of token files what their config says of the tokens; return what there is to note.

    [tokenmill] is for all of them. The vocabulary of [model] is taken only where something hangs on it, since all
    ids are then looked at once.
    """
    said = table_of(tables, OURS, where)
    said.only(_FACTS)
    facts: dict[str, Any] = {
        name: said.whole(name, 0, least=0) for name in ("vocab_size", "eos_id", "bos_id") if name in said
    }
    if "dtype" in said:
        facts["dtype"] = said.text("dtype")
    files = [source for source in sources if "store" in source]
    raw = [source for source in files if source["store"].endswith(".bin")]
    notes = []
    model = table_of(tables, "model", where)
    wanted = len(sources) > 1 or bool(raw)
    if files and wanted and "vocab_size" not in facts and "vocab_size" in model:
        facts["vocab_size"] = model.whole("vocab_size", 1, least=1)
        notes.append(
            f"model.vocab_size = {facts['vocab_size']}: taken as the vocabulary of all token files, "
            "whose ids are looked at once"
        )
    for source in files:
        source.update(facts)
    unknown = "vocab_size" not in facts
    if raw and unknown and "dtype" not in facts:
        notes.append(
            "files that end in .bin do not say their dtype, and no size proves it: "
            f'add dtype = "uint16" or "uint32" under [{OURS}]'
        )
    if files and len(sources) > 1 and unknown:
        notes.append(
            "token files do not say their vocabulary, without which only stores of tokenmill can be mixed: "
            f"add vocab_size = ... under [{OURS}]"
        )
    return notes


def path_notes(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    """Note what is otherwise with paths here: where relative ones count from, and that nothing is downloaded."""
    stores = [source["store"] for source in sources if "store" in source and _is_relative(source["store"])]
    tokenizers = [source["tokenizer"] for source in sources if _is_relative(source.get("tokenizer", "/"))]
    notes = [f"{stores[0]!r}: relative paths count from the folder of the config"] if stores else []
    if tokenizers:
        notes.append(
            f"tokenizer {tokenizers[0]!r}: taken as a file or folder, from the folder of the config; "
            "none is downloaded"
        )
    return notes


def _is_relative(path: str) -> bool:
    return not path.startswith(("/", "~")) and path != "bytes"


# Native tables as the text of a TOML file.

_ORDER = ("run", "sources", "stages", "skip", "quarantine")
_WIDTH = 100
"""Longer lists are written with an item a line."""
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def to_toml(tables: Mapping[str, Any]) -> str:
    """Write tables so that a TOML reader gives equal ones back; the usual ones first, in the order of the flow."""
    names = [*(name for name in _ORDER if name in tables), *(name for name in tables if name not in _ORDER)]
    inline = [name for name in names if not _has_header(tables[name])]
    # Before the first header, or they would belong to its table.
    blocks = ["".join(f"{_key(name)} = {_value(tables[name], name)}\n" for name in inline)] if inline else []
    for name in names:
        if isinstance(tables[name], Mapping):
            blocks.append(_block(f"[{_key(name)}]", tables[name], name))
        elif name not in inline:
            blocks += [_block(f"[[{_key(name)}]]", item, name) for item in tables[name]]
    return "\n".join(blocks)


def _has_header(value: object) -> bool:
    rows = isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
    return rows or isinstance(value, Mapping)


def _block(header: str, table: Mapping[str, Any], where: str) -> str:
    lines = [f"{_key(name)} = {_value(value, f'{where}.{name}')}" for name, value in table.items()]
    return "\n".join([header, *lines]) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def _string(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(letter) or _letter(letter) for letter in text) + '"'


def _letter(letter: str) -> str:
    if letter.isprintable():
        return letter
    return f"\\u{ord(letter):04x}" if ord(letter) < 1 << 16 else f"\\U{ord(letter):08x}"


def _value(value: object, where: str, *, wide: bool = True) -> str:
    """Write a value in a line, or a list that is too long for one, where `wide` lines may be broken, in several."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        # No line may be broken within: TOML 1.0 has an inline table end in its line.
        items = [f"{_key(name)} = {_value(item, where, wide=False)}" for name, item in value.items()]
        return f"{{ {', '.join(items)} }}" if items else "{}"
    if isinstance(value, list | tuple):
        items = [_value(item, where, wide=False) for item in value]
        line = f"[{', '.join(items)}]"
        return "[\n" + "".join(f"    {item},\n" for item in items) + "]" if wide and len(line) > _WIDTH else line
    raise ConfigError(
        f"{where}: must be a string, number, true or false, list or table, got {value!r}; leave it out"
    )
