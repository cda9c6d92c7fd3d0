"""Fields of records: where a name with dots leads, kinds of JSON values, and lone surrogates in strings.

Readers, recipes and builds use these functions, so a field name has one meaning in every format.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any


def field_path(name: str, fields: Container[str]) -> list[str]:
    """Return the path of a field: the field of that very name if there is one, else the names between the dots.

    >>> field_path("meta.text", ["id", "meta"]), field_path("meta.text", ["meta", "meta.text"])
    (['meta', 'text'], ['meta.text'])
    """
    return [name] if name in fields else name.split(".")


def field_of(record: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a field, None if the record does not have it.

    >>> field_of({"meta": {"text": "nested"}}, "meta.text"), field_of({"meta": "a"}, "meta.text")
    ('nested', None)
    """
    if name in record:  # nearly always, and four times as fast
        return record[name]
    value: Any = record
    for part in field_path(name, record):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def top_fields(names: Iterable[str]) -> list[str]:
    """Return the top-level fields that are needed to read these fields, each once.

    >>> top_fields(["id", "meta.text"])
    ['id', 'meta.text', 'meta']
    """
    return list(dict.fromkeys(top for name in names for top in (name, name.split(".")[0])))


def json_kind(value: object) -> str:
    """Return the kind of a JSON value in words, for messages.

    >>> json_kind(None), json_kind([1]), json_kind(True)
    ('null', 'a list', 'true or false')
    """
    kinds: Mapping[type, str] = {
        **{bool: "true or false", int: "a number", float: "a number", str: "a string", type(None): "null"},
        **{dict: "an object", list: "a list"},
    }
    return next((words for kind, words in kinds.items() if isinstance(value, kind)), type(value).__name__)


def surrogate_in(text: str) -> int | None:
    """Return the index of the first lone surrogate, which UTF-8 cannot encode; None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
