"""Native sources for the datasets and folders of other configs: names, and what is known of their tokens."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from tokenmill.dialects.table import table_of

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
