"""Whether the ids of two stores can be taken to mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.fingerprint import first_difference

UNKNOWN, GIVEN = "unknown", "given"
"""Kinds of tokenizers of foreign files: nothing is known, or the user gave the size of the vocabulary."""


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any, str] | None:
    """Return the first thing in which two tokenizers differ, both sides and the way out; None if ids mean the same.

    Foreign files do not say which tokenizer made them. Giving their vocab_size is the user's word that it was the
    one of the other sources: then vocab_size must agree, and eos_id and bos_id where both say them. Without that
    word they mix with nothing.
    """
    kinds = one.get("kind"), other.get("kind")
    if UNKNOWN in kinds:
        return "kind", *kinds, "give the vocab_size of files of other projects"
    if GIVEN not in kinds:
        found = first_difference(dict(one), dict(other))
        return (*found, "prepare one of them again") if found else None
    found = first_difference({"vocab_size": one["vocab_size"]}, {"vocab_size": other["vocab_size"]})
    names = [name for name in ("eos_id", "bos_id") if one.get(name) is not None and other.get(name) is not None]
    found = found or first_difference({name: one[name] for name in names}, {name: other[name] for name in names})
    return (*found, "fix what is said of the files of another project") if found else None
