"""What "the same" means: canonical JSON, and a digest of it."""

from __future__ import annotations

from itertools import zip_longest
from math import isfinite
from typing import Any

import msgspec
import xxhash


def canonical(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """Return the one JSON text of a value: keys sorted, no white space; a number that is not finite is refused.

    >>> canonical({"b": 1, "a": [True, None]})
    b'{"a":[true,null],"b":1}'
    """
    _check(value)
    return msgspec.json.encode(value, order="sorted")


def _check(value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Refuse what would look like another value: NaN and infinities are written as null, other keys as strings."""
    if isinstance(value, float):
        assert isfinite(value), value
    elif isinstance(value, dict):
        for key, item in value.items():
            assert isinstance(key, str), key
            _check(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check(item)


def digest(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return 32 hex digits that stand for a JSON value, on any machine and Python.

    >>> digest({"a": 1}) == digest({"a": 1}), digest({"a": 1}) == digest({"a": 2})
    (True, False)
    """
    return xxhash.xxh3_128_hexdigest(canonical(value))


def key64(*parts: int | str) -> int:
    """Derive an unsigned 64-bit key from names and numbers.

    Names, never list positions, so that adding a source or stage leaves the keys of the others alone.
    """
    return xxhash.xxh3_64_intdigest(canonical(list(parts)))


def first_difference(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any] | None:  # noqa: ANN401
    """Return the path of the first place where two JSON values differ, with both sides; None where they agree.

    A side that is not there is the string "(absent)".

    >>> first_difference({"stages": [{"w": 1}]}, {"stages": [{"w": 2}]})
    ('stages[0].w', 1, 2)
    """
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys(), key=lambda key: (key not in _TELLING, key))
        prefix = f"{path}." if path else ""
        parts = [(f"{prefix}{key}", old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in keys]
    elif isinstance(old, list) and isinstance(new, list):
        pairs = zip_longest(old, new, fillvalue=_ABSENT)
        parts = [(f"{path}[{index}]", left, right) for index, (left, right) in enumerate(pairs)]
    else:
        return None if type(old) is type(new) and old == new else (path, old, new)
    differences = (first_difference(left, right, inner) for inner, left, right in parts)
    return next((difference for difference in differences if difference), None)


_ABSENT = "(absent)"
_TELLING = ("kind", "content", "store", "packing", "seq_len", "weights")
"""Keys that are compared before the others, as they say best what is different."""
