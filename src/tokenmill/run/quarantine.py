"""Adding a quarantine to a run: values of a kept field become document numbers once, before any start."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.config.run import TABLES, read_tables, to_toml
from tokenmill.errors import ConfigError, TokenmillError, writing
from tokenmill.run.run import Run
from tokenmill.run.uses import source_store
from tokenmill.store.files import write_atomically
from tokenmill.store.records import keys_of_text, matches
from tokenmill.tables import MAX_LIST_BYTES, read_text

if TYPE_CHECKING:
    from tokenmill.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    """Documents that values of a kept field lead to, and the edit that was made of them."""

    source: str
    from_step: int
    values: int
    """Number of different values."""
    documents: int
    """Number of documents that have one of them."""
    added: int
    """Number of documents that were not quarantined before."""
    missing: tuple[str, ...]
    """Values that no document has."""
    file: Path | None
    """File with the added numbers; None if nothing was written."""
    edit: str
    """TOML that was added to the config; empty if nothing was written."""


def quarantine(
    config: Path,
    values: Sequence[str],
    *,
    source: str | None = None,
    field: str = "url",
    from_step: int = 0,
    reason: str = "",
    skip_missing: bool = False,
) -> Quarantine:
    """Put the documents with these values of a kept field into quarantine from a step on.

    Their numbers are written to a new file next to the config, and a `[[quarantine]]` that names it is added to the
    end of the config. Nothing is written where a value is in no document, unless `skip_missing`, or where the run
    could not be compiled with the edit.
    """
    tables = read_tables(config)
    if not tables.keys() <= set(TABLES):
        raise ConfigError(
            f"{config}: quarantine needs a native config; write one with `tokenmill plan --to-native`"
        )
    run = Run.from_toml(config)
    source = source or only_source(run)
    store = source_store(run, source)
    values = list(dict.fromkeys(values))
    if not values:
        raise ConfigError(f"quarantine of {source!r}: the list of values is empty; write one per line")
    documents, missing = _resolved(store, field, values)
    before = {
        number
        for edit in run.config.quarantine
        if edit.source == source and edit.from_step <= from_step
        for number in (range(store.num_documents) if edit.whole else edit.numbers(run.folder).tolist())
    }
    added = {number: value for number, value in documents.items() if number not in before}
    file, edit = None, ""
    if added and (skip_missing or not missing):
        file, edit = _write(
            config, tables, run, added, {"source": source, "from_step": from_step, "reason": reason}
        )
    return Quarantine(
        source=source,
        from_step=from_step,
        values=len(values),
        documents=len(documents),
        added=len(added) if file else 0,
        missing=missing,
        file=file,
        edit=edit,
    )


def read_values(file: Path) -> list[str]:
    """Return the values that a file lists, one per line; blank lines are left out."""
    try:
        return [line.strip() for line in read_text(file, MAX_LIST_BYTES).split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: expected text in UTF-8, got {error}; write one value per line") from None


def only_source(run: Run) -> str:
    """Return the name of the only stored source; several are an error that names them."""
    names = list(run.stores)
    if len(names) != 1:
        raise ConfigError(f"source: the run has {len(names)} stored sources; name one of {', '.join(names)}")
    return names[0]


def _resolved(store: Store, field: str, values: Sequence[str]) -> tuple[dict[int, str], tuple[str, ...]]:
    """Return each document that has one of some values, with it, and the values that none has."""
    value_of = {key: value for value in values for key in keys_of_text(field, value)}
    documents = {number: value_of[keys[field]] for number, keys in matches(store, {field: value_of.keys()})}
    present = set(documents.values())
    return documents, tuple(value for value in values if value not in present)


def _write(
    config: Path, tables: Mapping[str, Any], run: Run, added: Mapping[int, str], facts: Mapping[str, Any]
) -> tuple[Path, str]:
    """Write the numbers to a new file and the edit to the config; neither stays if the run cannot be compiled."""
    target = config.resolve()
    lines = [f"{number}  # {_one_line(value)}\n" for number, value in sorted(added.items())]
    file = _write_new(target, facts["source"], "".join(lines).encode())
    try:
        table = {"source": facts["source"], "from_step": facts["from_step"], "file": file.name}
        table |= {"reason": facts["reason"]} if facts["reason"] else {}
        edit = to_toml({"quarantine": [table]})
        old = target.read_bytes()
        new = old + (b"" if old.endswith(b"\n") or not old else b"\n") + b"\n" + edit.encode()
        edited = _parsed(config, new)
        if edited != {**tables, "quarantine": [*tables.get("quarantine", []), table]}:
            raise ConfigError(f"{config}: quarantine cannot be added at its end; write it as [[quarantine]] tables")
        Run.from_tables(edited, folder=run.folder, name=run.name, where=str(config)).plan()
    except (TokenmillError, OSError):
        file.unlink()
        raise
    mode = stat.S_IMODE(target.stat().st_mode)
    with writing(target):
        write_atomically(target, new)
    os.chmod(target, mode)
    return file, edit


def _parsed(config: Path, text: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(text.decode())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{config}: quarantine cannot be added at its end: {error}; write it as [[quarantine]] tables"
        ) from None


def _write_new(config: Path, source: str, data: bytes) -> Path:
    """Write a file of the first free name, so that no edit of the past changes."""
    name = re.sub(r"[^\w.-]+", "-", source)
    for number in count(1):
        file = config.with_name(f"{config.stem}-quarantine-{name}-{number}.txt")
        try:
            with writing(file), file.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
        except FileExistsError:
            continue
        return file
    raise AssertionError("names do not end")


def _one_line(value: str) -> str:
    return "".join(character if character.isprintable() else "\ufffd" for character in value)
