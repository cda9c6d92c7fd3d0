"""Raw JSON values as documents: fast where all are good, one by one where some are not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from tokenmill.documents.lines import Unread
from tokenmill.documents.units import BadRecord, ReadOptions


class Values(NamedTuple):
    """What raw values are: documents, bad ones by index, and the indices of blank ones, which are neither."""

    documents: list[str] | list[Mapping[str, Any]]
    bad: list[BadRecord]
    blank: list[int]


class RecordError(Exception):
    """Why one record is bad: caught where its line is known."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def at(self, line: int) -> BadRecord:
        """Return it as the bad record at a line."""
        return BadRecord(line=line, reason=self.reason, detail=self.detail)


def read_values(raws: list[bytes], options: ReadOptions, *, bare_strings: bool = False) -> Values:
    """Return the documents of raw JSON values; with `bare_strings`, a value may be a text itself."""
    try:
        if options.text_field is None:
            return Values(_records(raws), [], [])
        if bare_strings and raws and raws[0].lstrip()[:1] == b'"':
            return Values(_strings(raws), [], [])
        return Values(_texts(raws, options.text_field), [], [])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return _one_by_one(raws, options, bare_strings=bare_strings)


def _texts(raws: list[bytes], text_field: str) -> list[str]:
    """Return the texts of values that are all good, else raise; one loop in C, as short lines are many."""
    field, *rest = text_field.split(".")
    texts = [record[field] for record in map(orjson.loads, raws)]
    for name in rest:
        texts = [text[name] for text in texts]
    if not set(map(type, texts)) <= {str}:
        raise TypeError
    return texts


def _strings(raws: list[bytes]) -> list[str]:
    texts = list(map(orjson.loads, raws))
    if not set(map(type, texts)) <= {str}:
        raise TypeError
    return texts


def _records(raws: list[bytes]) -> list[Mapping[str, Any]]:
    records = list(map(orjson.loads, raws))
    if not set(map(type, records)) <= {dict}:
        raise TypeError
    return records


def _one_by_one(raws: list[bytes], options: ReadOptions, *, bare_strings: bool) -> Values:
    documents: list[Any] = []
    bad: list[BadRecord] = []
    blank: list[int] = []
    for line, raw in enumerate(raws):
        try:
            if isinstance(raw, Unread):
                raise RecordError(raw.reason, raw.detail)
            if not raw.strip():
                blank.append(line)
                continue
            value, checked = load(raw)
            if not (bare_strings and isinstance(value, str) and options.text_field is not None):
                value = document_of(value, options)
            if not checked:
                refuse_surrogates(value)
            documents.append(value)
        except RecordError as error:
            bad.append(error.at(line))
    return Values(documents, bad, blank)


def load(raw: bytes) -> tuple[Any, bool]:
    """Parse one JSON value: (value, whether its strings are known to be Unicode text); raises RecordError.

    What orjson refuses is tried with the standard library, which takes NaN, Infinity and huge numbers, as many
    programs write them, and halves of surrogate pairs.
    """
    try:
        return orjson.loads(raw), True
    except orjson.JSONDecodeError as error:
        try:
            text = raw.decode()
        except UnicodeDecodeError as utf8:
            raise RecordError("utf8", utf8_detail(utf8)) from None
        try:
            return json.loads(text), False
        except RecursionError:
            raise RecordError("json", "an object that is nested too deeply") from None
        except ValueError:
            raise RecordError("json", f"{error.msg} at character {error.pos} of the record") from None


def document_of(value: object, options: ReadOptions) -> str | Mapping[str, Any]:
    """Return the text, or the whole record, of a parsed value; raises RecordError."""
    if options.text_field is not None:
        return text_of(value, options.text_field)
    if not isinstance(value, dict):
        raise RecordError("not_object", kind_of(value))
    if options.fields is not None:
        return {name: value[name] for name in options.fields if name in value}
    return value


def text_of(value: object, text_field: str) -> str:
    """Return the string at a dotted path of a parsed value; raises RecordError."""
    for name in text_field.split("."):
        if not isinstance(value, dict):
            raise RecordError("missing_field", f"no field {name!r} in {kind_of(value)}")
        if name not in value:
            raise RecordError("missing_field", f"no field {name!r} but {_names(value)}")
        value = value[name]
    if not isinstance(value, str):
        raise RecordError("not_text", f"field {text_field!r} is {kind_of(value)}")
    return value


def _names(value: Mapping[str, object]) -> str:
    """Name the fields of an object, a few of them."""
    names = [repr(str(name))[:40] for name in list(value)[:6]]
    return (", ".join(names) + (", ..." if len(value) > 6 else "")) or "none at all"


def refuse_surrogates(value: object) -> None:
    """Raise RecordError if a string in a parsed value cannot be written as UTF-8."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(error.object[error.start]):04X}"
        raise RecordError("surrogate", f"a lone {half} in a string") from None


def utf8_detail(error: UnicodeDecodeError) -> str:
    """Say where bytes are not UTF-8."""
    return f"{error.reason} at byte {error.start} of the record"


def kind_of(value: object) -> str:
    """Say what a parsed JSON value is.

    >>> kind_of(None), kind_of([1])
    ('null', 'a list')
    """
    kinds: Sequence[tuple[type, str]] = (
        (dict, "an object"),
        (list, "a list"),
        (str, "a string"),
        (bool, "true or false"),
        (int, "a number"),
        (float, "a number"),
        (type(None), "null"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), type(value).__name__)
