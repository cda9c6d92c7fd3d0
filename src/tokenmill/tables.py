"""The one reader of tables: what TOML and JSON give becomes typed records, or an error that names the place.

A record is a frozen dataclass. Its hints say what a table may hold: `int`, `Number`, `str`, `bool`, `X | None`,
`X | UnsetType` (it may be left out, but not be null), `Sequence[X]`, `tuple[X, ...]`, `Mapping[str, X]`,
`Literal[...]`, `Annotated[X, msgspec.Meta(...)]` with limits, a `NamedTuple` for a list of certain values, and
records within records. An unknown key is refused, with the nearest that is known. Rules that go beyond that are
in the `__post_init__` of the record, whose errors keep their own text.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import numpy as np

from tokenmill.errors import ConfigError, TokenmillError, nearest, without_secrets

T = TypeVar("T")
MAX_NUMBER = 1 << 40
"""Steps and rows of a batch, so that positions of a run fit 64 bits many times over."""
Number: TypeAlias = int | float
"""A number as it was written: 1 stays 1, where `float` would make it 1.0."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER, description="a whole number from 0 to 2^40")]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER, description="a whole number from 1 to 2^40")]
Seed: TypeAlias = Annotated[
    int, msgspec.Meta(ge=0, le=(1 << 63) - 1, description="a whole number from 0 to 2^63 - 1")
]
"""Whole numbers with limits, which are checked where a table is read, and only there."""
Refuse: TypeAlias = Callable[[str], TokenmillError]
"""Message -> error: the class of an error, or what makes one."""
_NOTHING = (type(None), msgspec.UnsetType)
"""The two ways to have no value: null, and a missing key."""
_WORDS = {int: "whole numbers", float: "numbers", Number: "numbers", str: "strings", bool: "flags"}


def read_table(
    kind: type[T],
    value: object,
    where: str,
    *,
    error: type[TokenmillError] = ConfigError,
    way_out: str | None = None,
) -> T:
    """Return a table as a record of a kind; names, presence and types are checked, all the way down.

    `where` names the table in errors: keys follow it after a dot, or after a blank if it ends with a
    colon, as for a file: `run.steps: must be ...`, `a.json: steps: must be ...`. A `way_out` ends all of them in
    place of what to write, as for states, which nobody writes by hand.
    """

    def refuse(message: str) -> TokenmillError:
        return error(message if way_out is None else f"{message.rpartition('; ')[0]}; {way_out}")

    _check_tables(kind, value, where, refuse)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as problem:
        if isinstance(problem.__cause__, TokenmillError):
            raise problem.__cause__ from None
        raise _refusal(kind, value, where, refuse) from None


def read_list(kind: type[T], tables: Mapping[str, Any], key: str) -> tuple[T, ...]:
    """Return the tables of the list under a key as records; an empty tuple without the list."""
    value = tables.get(key, [])
    if not isinstance(value, list):
        raise ConfigError(f"{key}: expected a list of tables, got {type(value).__name__}; write [[{key}]]")
    return tuple(read_table(kind, item, f"{key}[{number}]") for number, item in enumerate(value))


def read_json(kind: type[T], text: bytes | str, where: str, *, error: type[TokenmillError] = ConfigError) -> T:
    """Return a JSON text as a record of a kind."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise error(f"{_shown(where)}: expected JSON, got {problem}; put back what was written there") from None
    return read_table(kind, value, where, error=error)


def as_json(record: object) -> Any:  # noqa: ANN401 - a JSON value
    """Return a record as JSON values, every field of it; `read_table` reads them back."""
    return msgspec.json.decode(msgspec.json.encode(record))  # `to_builtins` would leave tuples as they are


def plain_numbers(value: Any) -> Any:  # noqa: ANN401 - a value of a table
    """Return a value of a table with numbers of numpy, also within lists and tables, as numbers of Python."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain_numbers(item) for key, item in value.items()}
    return type(value)(map(plain_numbers, value)) if type(value) in (list, tuple) else value


def names_of(key: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return a list of names; reject one name alone, which would be taken for a list of letters."""
    if isinstance(names, str):
        raise ConfigError(f"{key}: expected a list of names, got {names!r}; say {key}=[{names!r}]")
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{key}: expected a list of names, got {names!r}; say {key}=[...]")
    return tuple(names)


def check_keys(where: str, table: Mapping[str, Any], known: Sequence[str], error: Refuse = ConfigError) -> None:
    """Raise for the first unknown key."""
    for key in table:
        if key not in known:
            raise error(f"{_shown(where)}: unknown key: {key!r}; {nearest(str(key), known)}")


def _check_tables(hint: Any, value: object, where: str, error: Refuse) -> None:  # noqa: ANN401
    """Refuse unknown keys of a table and of the tables in it, and other values where a table must be."""
    kind = _bare(hint)
    if _is_record(kind) and (value is not None or kind is hint):
        if not isinstance(value, Mapping):
            name, listed, _ = where.rpartition(": ")[2].partition("[")
            header = "{...}" if where.endswith(":") else f"[[{name}]]" if listed else f"[{name}]"
            raise error(f"{_shown(where)}: expected a table, got {value!r}; write {header}")
        check_keys(where, value, list(_hints(kind)), error)
    for inner, item, place in _parts(kind, value, where):
        if _has_records(inner):  # most values have none, and a manifest has 10,000 shards of them
            _check_tables(inner, item, place, error)


@cache
def _has_records(hint: Any) -> bool:  # noqa: ANN401 - what a hint is
    kind = _bare(hint)
    return _is_record(kind) or any(map(_has_records, get_args(kind)))


def _parts(kind: Any, value: object, where: str) -> Iterator[tuple[Any, Any, str]]:  # noqa: ANN401 - a hint
    """Yield hint, value and place of the parts of a value: fields of a record, items of a list or table.

    A value that may be of several kinds has no parts: which of them is meant is not known.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(value, Mapping):
        join = f"{where} " if where.endswith(":") else f"{where}."
        if _is_record(kind):
            hints = _hints(kind)
            yield from ((hints[name], item, f"{join}{name}") for name, item in value.items() if name in hints)
        elif isinstance(origin, type) and issubclass(origin, Mapping):
            yield from ((inner[1], item, f"{join}{name}") for name, item in value.items())
    elif origin in (tuple, Sequence) and isinstance(value, list | tuple):
        yield from ((inner[0], item, f"{where}[{number}]") for number, item in enumerate(value))


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {item.name: hints[item.name] for item in fields(kind)}


def _refusal(hint: Any, value: Any, where: str, error: Refuse) -> TokenmillError:  # noqa: ANN401
    """Find what is wrong in a value; return an error that says where, the rule, the value and the way out."""
    kind = _bare(hint)
    for inner, item, place in _parts(kind, value, where):
        # A list or table of plain values is shown whole.
        if (_is_record(kind) or inner not in _WORDS) and not _fits(inner, item):
            return _refusal(inner, item, place, error)
    where = _shown(where)
    if _is_record(kind) and isinstance(value, Mapping):
        for key in fields(kind):
            is_needed = key.default is MISSING and key.default_factory is MISSING
            if is_needed and key.name not in value:
                return error(f"{where}: missing key: {key.name}; add {key.name} = ...")
    way_out = "change its type"
    choices = [name for part in (kind, *get_args(kind)) if get_origin(part) is Literal for name in get_args(part)]
    if choices and isinstance(value, str):
        way_out = nearest(value, map(str, choices), "choose one of them")
    elif kind in (int, float, Number) and isinstance(value, str) and re.fullmatch(r"[0-9_]+(\.[0-9]+)?", value):
        way_out = "leave out the quotes"
    elif _fits(kind, value):
        way_out = "change it"
    return error(f"{where}: expected {_wanted(hint)}, got {value!r}; {way_out}")


def _fits(hint: Any, value: object) -> bool:  # noqa: ANN401 - what a hint is
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as problem:
        if isinstance(problem.__cause__, TokenmillError):
            raise problem.__cause__ from None
        return False
    return True


@cache
def _bare(hint: Any) -> Any:  # noqa: ANN401 - what a hint is
    """Return a hint without None and Unset, and without limits."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = [part for part in get_args(hint) if part not in _NOTHING]
        return _bare(inner[0]) if len(inner) == 1 else hint
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _is_record(kind: object) -> TypeGuard[type]:
    return isinstance(kind, type) and is_dataclass(kind)


def _shown(where: str) -> str:
    return where.removesuffix(":")


def _wanted(hint: Any) -> str:  # noqa: ANN401, PLR0911 - what a hint is; a line a kind
    """Return in words what a hint asks for.

    >>> _wanted(tuple[int, ...]), _wanted(Mapping[str, float]), _wanted(bool), _wanted(Literal["bin", "h5"])
    ('a list of whole numbers', 'a table of numbers', 'true or false', 'one of bin, h5')
    >>> _wanted(Annotated[int, msgspec.Meta(ge=1, le=9)])
    'a whole number that is at least 1 and at most 9'
    >>> from typing import NamedTuple
    >>> _wanted(NamedTuple("Place", [("file", str), ("line", int)]))
    'a list of file, line'
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        base, meta = inner
        limits = {"at least": meta.ge, "above": meta.gt, "at most": meta.le, "below": meta.lt}
        words = " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)
        words = f" that is {words}" if words else f", {meta.min_length} or more" if meta.min_length else ""
        return meta.description or f"{_wanted(base)}{words}"
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if hasattr(hint, "_fields"):
        return f"a list of {', '.join(hint._fields)}"
    if origin in (tuple, Sequence):
        return f"a list of {_WORDS.get(_bare(inner[0]), 'values' if inner[0] is Any else 'tables')}"
    if origin in (Union, types.UnionType) and hint != Number:
        return " or ".join(dict.fromkeys(_wanted(part) for part in inner if part not in _NOTHING))
    if origin is not None and hint != Number:
        return f"a table of {_WORDS[inner[-1]]}" if inner[-1] in _WORDS else "a table"
    return "true or false" if hint is bool else f"a {_WORDS.get(hint, 'tables').removesuffix('s')}"


# Texts of files, which may be of any size.

MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES, MAX_LIST_BYTES = 1 << 24, 1 << 28, 1 << 30
"""Of a config, recipe, template or state; of a file of a tokenizer; of a list of documents, or of shards."""


def read_text(file: Path, most: int) -> str:
    """Return the text of a file; one of more than `most` bytes is refused."""
    return read_bytes(file, most).decode("utf-8")


def read_bytes(file: Path, most: int, error: type[TokenmillError] = ConfigError) -> bytes:
    """Return the content of a file; one of more than `most` bytes is refused."""
    with file.open("rb") as stream:
        data = stream.read(min(most, 1 << 20) + 1)
        while len(data) <= most and (block := stream.read(min(len(data), most + 1 - len(data)))):
            data += block
    if len(data) > most:
        raise error(f"file too large: {file}, more than {most} bytes; name another file")
    return data


# Rules for single values.


def check_types(**values: tuple[object, Any]) -> None:
    """Raise for the first argument that does not fit its type: name -> value and hint."""
    for name, (value, hint) in values.items():
        if not _fits(hint, value):
            raise _refusal(hint, value, name, ConfigError)


def check_fields(record: object, where: str = "") -> None:
    """Check the types of all fields of a record that Python made; `where` begins the errors, such as `run.`.

    Paths become strings, and numbers of numpy numbers of Python, which JSON can hold.
    """
    kind: type = type(record)
    for name, hint in _hints(kind).items():
        value = given = getattr(record, name)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        elif isinstance(value, np.generic | np.ndarray | Mapping | list | tuple):
            value = plain_numbers(value)
        if value is not given:
            object.__setattr__(record, name, value)
        if not _has_records(hint):
            check_types(**{f"{where}{name}": (value, hint)})


def check_instance(name: str, value: object, kind: type | tuple[type, ...], way_out: str) -> None:
    """Check that an argument is an object of a class; the way out says how to get one."""
    if not isinstance(value, kind):
        names = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise ConfigError(f"{name}: expected {names}, got {value!r}; {way_out}")


def check_callable(name: str, value: object) -> None:
    """Check that an argument can be called."""
    if not callable(value):
        raise ConfigError(f"{name}: expected a function, got {value!r}; leave it out")


def is_address(path: object) -> bool:
    """Return whether a path is an address in object storage: it has a scheme.

    >>> is_address("s3://bucket/web"), is_address("stores/web"), is_address("hf:org/data")
    (True, False, False)
    """
    return isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def check_public(path: str) -> None:
    """Refuse an address with a user or a password, also where a path is wanted: it would be written to disk."""
    if "@" in path and " " not in path and without_secrets(path) != path:
        raise ConfigError(
            f"{path}: the address contains a user or a password; remove it, credentials are taken from "
            "the environment"
        )


def path_of(name: str, value: object) -> str:
    """Return a path as a string; raise for anything else."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{name}: expected a path, got {value!r}; give a string or a pathlib.Path")
    check_public(path)
    return path


def check_positive(where: str, name: str, value: int) -> None:
    """Refuse a number below 1, or above what positions can hold."""
    if value < 1:
        raise ConfigError(f"{where}: {name} must be at least 1, got {value}; raise it")
    if value > MAX_NUMBER:
        raise ConfigError(f"{where}: {name} must be at most {MAX_NUMBER}, got {value}; lower it")


def check_seed(where: str, seed: int) -> None:
    """Raise for a seed that is not an unsigned 63-bit number."""
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"{where}: seed must lie within 0 and 2^63, got {seed}; choose a smaller one")


def check_name(where: str, name: str) -> None:
    """Raise for a name that file names or keys cannot contain on every system."""
    if not name or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigError(f"{where}: must be letters, digits, - _ . only, got {name!r}; rename it")


def check_choice(where: str, name: str, value: str, choices: Iterable[str]) -> None:
    """Raise for a value of a table that is not one of the choices."""
    _refuse_others(where, f"{name} must be", value, list(choices))


def check_option(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise for an argument that is not one of the choices."""
    _refuse_others(name, "expected", value, list(choices))


def _refuse_others(where: str, rule: str, value: str, choices: list[str]) -> None:
    if value not in choices:
        way_out = nearest(value, choices, "choose one of them")
        raise ConfigError(f"{where}: {rule} one of {', '.join(choices)}, got {value!r}; {way_out}")
