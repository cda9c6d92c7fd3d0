"""Config files of other projects as native ones.

1. In: the tables of a TOML file: KempnerForge's, or those of the torchtitan fork with data stages.
2. Does: recognises which of them it is, checks what concerns data by the rules of its own project, and writes the
   same in native tables. What both have in common is in this file.
3. Out: native tables for `config.parse_config`, and notes on what was taken how.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from tokenmill.config.run import NATIVE, TABLES, Translation
from tokenmill.errors import ConfigError, met_in, nearest
from tokenmill.tables import Count, Positive, as_json, read_table

T = TypeVar("T")
KEMPNERFORGE, TORCHTITAN = "KempnerForge", "torchtitan"
_MARKS = {NATIVE: TABLES, KEMPNERFORGE: ("data", "train"), TORCHTITAN: ("training",)}
"""Tables that only one kind of config has."""
OURS = "tokenmill"
"""A table that a foreign config may have for us: what neither it nor its token files say."""
DEFAULT_SPLIT = "train"
DEFAULT_FIELD = "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Translator:
    """What is known outside of a foreign config while it is translated, and the notes on how that was done."""

    world_size: int | None
    """Data-parallel ranks, if the caller knows how many there are."""
    is_store: Callable[[str], bool]
    """Whether a path is a store of ours."""
    notes: list[str] = field(default_factory=list)
    """What was taken how, or ignored; a sentence each."""
    warnings: list[str] = field(default_factory=list)
    """Those of the notes that decide what is trained on."""

    def warn(self, note: str) -> None:
        """Add a note that should not be overlooked, as it decides what is trained on."""
        self.notes.append(note)
        self.warnings.append(note)

    def count_ranks(self, shard: int, replicate: int, *, keys: str) -> int:
        """Return the number of data-parallel ranks: the caller's, else the product of the config's degrees, else 1.

        A `shard` of -1 stands for all ranks that there are.
        """
        if shard == 0 or shard < -1 or replicate < 1:
            raise ConfigError(
                f"{keys}: must be at least 1, or -1 for the first, got {shard} and {replicate}; raise them"
            )
        in_config = shard * replicate if shard > 0 else None
        if self.world_size is None and in_config is None:
            self.warn(
                "the rows of a step are those of one rank, as the config does not say how many there are; "
                "give world_size=N"
            )
        elif self.world_size is not None and in_config not in (None, self.world_size):
            self.warn(f"{keys}: not read, as {self.world_size} ranks were asked for, got {in_config} there")
        return self.world_size or in_config or 1


def translate(
    tables: Mapping[str, Any],
    *,
    where: str,
    world_size: int | None = None,
    is_store: Callable[[str], bool] = lambda _: False,
) -> Translation:
    """Return a config in native tables; one that is native stays as it is.

    Other projects count the rows of a step by rank, so that theirs need `world_size`, the number of data-parallel
    ranks; where neither it nor the config says it, one is assumed, with a warning. `is_store` says whether a path
    is a store of ours, which needs nothing to be said of its tokens; no file is opened here.
    """
    if world_size is not None and world_size < 1:
        raise ConfigError(f"world_size: must be at least 1, got {world_size}; leave it out for one rank")
    dialect = _dialect(tables, where)
    if dialect == NATIVE:
        return Translation(dialect=dialect, tables=dict(tables))
    if dialect == KEMPNERFORGE:
        from tokenmill.config.dialects.kempnerforge import from_kempnerforge as read
    else:
        from tokenmill.config.dialects.torchtitan import from_torchtitan as read
    translator = Translator(world_size=world_size, is_store=is_store)
    try:
        native = read(tables, translator)
        files = [source for source in native["sources"] if "store" in source and not is_store(source["store"])]
        translator.notes.extend(_add_facts(files, tables, mixed=len(native["sources"]) > 1))
    except ConfigError as error:
        raise met_in(where, error) from None
    notes = (*translator.notes, *_path_notes(native["sources"]))
    return Translation(dialect=dialect, tables=native, notes=notes, warnings=tuple(translator.warnings))


def _dialect(tables: Mapping[str, Any], where: str) -> str:
    marks = {kind: [name for name in names if name in tables] for kind, names in _MARKS.items()}
    kinds = [kind for kind, names in marks.items() if names]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        got = " and ".join(f"[{marks[kind][0]}] ({kind})" for kind in kinds)
        edited = "skip" in tables or "quarantine" in tables
        way_out = "print it as our own with `tokenmill plan --to-native` and edit that"
        raise ConfigError(
            f"{where}: must be a config of one kind, got {got}; {way_out if edited else 'keep the tables of one'}"
        )
    known = "[run] and [[sources]] (native), [data] (KempnerForge), or [training] (torchtitan)"
    # For a single table with a misspelt name, suggest the nearest; a file of many is of another kind altogether.
    hint = nearest(next(iter(tables)), ["run", "data", "training"]) if len(tables) == 1 else "add one of them"
    got = ", ".join(f"[{name}]" for name in tables) or "no table"
    raise ConfigError(f"{where}: must have {known}, got {got}; {hint}")


# Tables


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFacts:
    """The table [tokenmill] of a foreign config."""

    dtype: str | None = None
    vocab_size: Count | None = None
    eos_id: Count | None = None
    bos_id: Count | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTable:
    """The keys of [model] that concern data."""

    vocab_size: Positive | None = None
    hf_assets_path: str = ""
    tokenizer_path: str = ""


def table_of(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table of a file; an empty one where there is none."""
    value = tables.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: expected a table, got {value!r}; write [{name}]")
    return value


def read_known(kind: type[T], tables: Mapping[str, Any], name: str) -> T:
    """Read those keys of a table that a record has; the others do not concern data."""
    known = get_type_hints(kind)
    return read_table(kind, {key: value for key, value in table_of(tables, name).items() if key in known}, name)


# Sources


def plain_name(text: str) -> str:
    """Return the last part of a path or of the name of a dataset, as a source can be called.

    >>> plain_name("/data/web v2/"), plain_name("allenai/c4"), plain_name("..")
    ('web-v2', 'c4', 'data')
    """
    last = re.split(r"[/\\]", text.rstrip("/\\"))[-1]
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in last)
    return name if any(letter.isalnum() for letter in name) else "data"


def free_name(wanted: str, taken: Container[str]) -> str:
    """Return the name, or the first of name-2, name-3, ... that is not taken.

    >>> free_name("web", {"web", "web-2"})
    'web-3'
    """
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}-{number}"
    return name


def hub_name(dataset: str, config: str = "", split: str = DEFAULT_SPLIT) -> str:
    """Return how a dataset of Hugging Face is called among `documents`.

    >>> hub_name("allenai/c4", "en"), hub_name("x", split="test")
    ('hf:allenai/c4:en', 'hf:x::test')
    """
    return f"hf:{dataset}:{config}:{'' if split == DEFAULT_SPLIT else split}".rstrip(":")


def text_source(documents: str, *, tokenizer: str, text_field: str) -> dict[str, Any]:
    """Return a source of text, without a name; defaults are left out."""
    source: dict[str, Any] = {"documents": [documents], "tokenizer": tokenizer}
    return source if text_field == DEFAULT_FIELD else {**source, "text_field": text_field}


def _add_facts(files: Sequence[dict[str, Any]], tables: Mapping[str, Any], *, mixed: bool) -> list[str]:
    """Add to sources of token files what their config knows of the tokens; return notes on it.

    [tokenmill] is for all of them. The vocabulary of [model] is taken only where it is needed, as all ids are then
    checked once.
    """
    table = as_json(read_table(TokenFacts, table_of(tables, OURS), OURS))
    facts: dict[str, Any] = {name: value for name, value in table.items() if value is not None}
    raw = [source for source in files if source["store"].endswith(".bin")]
    notes = []
    vocab_size = read_known(ModelTable, tables, "model").vocab_size
    if files and (mixed or raw) and "vocab_size" not in facts and vocab_size is not None:
        facts["vocab_size"] = vocab_size
        notes.append(
            f"model.vocab_size = {vocab_size}: taken as the vocabulary of all token files, "
            "whose ids are looked at once"
        )
    for source in files:
        source.update(facts)
    unknown = "vocab_size" not in facts
    if raw and unknown and "dtype" not in facts:
        notes.append(
            "files that end in .bin do not say their dtype, and no size proves it: if no file beside them does, "
            f'add dtype = "uint16" or "uint32" under [{OURS}]'
        )
    if files and mixed and unknown:
        notes.append(
            "token files do not say their vocabulary, without which only stores of tokenmill can be mixed: "
            f"add vocab_size = ... under [{OURS}]"
        )
    return notes


def _path_notes(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes on relative paths, which count from another folder there, and that nothing is downloaded."""
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
    return not path.startswith(("/", "~", "hf:")) and path != "bytes"
