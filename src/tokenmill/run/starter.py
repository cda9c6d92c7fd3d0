"""The first config of a run: a table per store, and a commented TOML with sizes that fit the stores."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

import tomli_w

from tokenmill.errors import ConfigError
from tokenmill.tables import check_instance, is_address
from tokenmill.types import RECORD_TYPES

if TYPE_CHECKING:
    from tokenmill.store import Store

StorePath: TypeAlias = str | os.PathLike[str]
Stores: TypeAlias = StorePath | Sequence[StorePath] | Mapping[str, StorePath]
"""One store, several, or a mapping from source name to store."""

MIN_STEPS = 100
"""Steps per epoch that a starter config aims for: small corpora get shorter rows and smaller batches."""
SIZES = ((64, 2048), (32, 1024), (16, 512), (8, 256), (8, 128))
"""Candidates for (global_batch_size, seq_len), largest first."""


def source_tables(stores: Stores) -> list[dict[str, Any]]:
    """Return a [[sources]] table per store. A store without a name is named after the end of its path.

    >>> source_tables(["stores/web", "s3://bucket/old/web/"])
    [{'name': 'web', 'store': 'stores/web'}, {'name': 'web-2', 'store': 's3://bucket/old/web/'}]
    """
    if isinstance(stores, Mapping):
        return [{"name": name, "store": _as_text(path)} for name, path in stores.items()]
    tables: list[dict[str, Any]] = []
    paths = [stores] if isinstance(stores, str | os.PathLike) else stores
    check_instance("stores", paths, Sequence, "give a path, a list of paths, or a mapping from name to path")
    for path in paths:
        store = _as_text(path)
        base = _name_of(store)
        taken = {table["name"] for table in tables}
        names = (base, *(f"{base}-{number}" for number in range(2, len(taken) + 2)))
        tables.append({"name": next(name for name in names if name not in taken), "store": store})
    return tables


def _as_text(path: object) -> str:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(
            f"stores: expected a path or an address of a store, got {path!r}; pass a string or a Path"
        )
    return str(os.fspath(path))


def _name_of(store: str) -> str:
    """Return a valid source name: the last part of a path, with other characters replaced."""
    last = PurePosixPath(store if is_address(store) else Path(store).absolute().as_posix()).name
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in last).strip("-.") or "source"


def starter_toml(stores: Sequence[tuple[str, Store]]) -> str:
    """Return a commented config that reads all documents of the stores about once.

    `stores` are pairs of the path as the config shall name it, and the open store. The batch size and sequence
    length are the largest of `SIZES` with at least `MIN_STEPS` steps in an epoch.
    """
    opened = [store for _, store in stores]
    documents = sum(store.num_documents for store in opened)
    tokens = sum(store.num_tokens for store in opened)
    if not tokens:
        raise ConfigError(f"{opened[0].where}: the store has no tokens; prepare documents first")
    is_records = any(store.manifest.kind in RECORD_TYPES for store in opened)

    def steps_of(batch: int, seq_len: int) -> int:
        return -(-documents // batch) if is_records else -(-tokens // (batch * seq_len))

    batch, seq_len = next((size for size in SIZES if steps_of(*size) >= MIN_STEPS), SIZES[-1])
    kind = "records" if is_records else "documents"
    run: list[tuple[str, object, str]] = [
        ("steps", steps_of(batch, seq_len), f"about one epoch of {documents:,} {kind}, {tokens:,} tokens"),
        ("global_batch_size", batch, "rows per optimizer step, over all ranks"),
        ("seq_len", seq_len, "tokens per row"),
        ("seed", 0, "decides the order of all rows"),
    ]
    if len(stores) > 1:
        run.append(("weights", "tokens", "share per source: by size, or { web = 0.7, code = 0.3 }"))
    lines = [
        "# A training run of tokenmill. Check it with `tokenmill plan`, then train:",
        '# for batch in tokenmill.Run.from_toml("run.toml").loader(micro_batch=8): ...',
        "# Relative paths start at the folder of this file. Reference of all keys: docs/reference/config.md",
        "",
        "[run]",
        *_commented(run),
    ]
    for table, (_, store) in zip(source_tables([path for path, _ in stores]), stores, strict=True):
        size = f"{store.manifest.kind}: {store.num_documents:,} documents, {store.num_tokens:,} tokens"
        entries = [("name", table["name"], ""), ("store", table["store"], size)]
        lines += ["", "[[sources]]", *_commented(entries)]
    lines += [
        "",
        "# Change the mixture or the sequence length at an exact step:",
        "# [[stages]]",
        '# name = "main"',
        "# start_step = 0",
        "",
        "# [[stages]]",
        '# name = "long-context"',
        f"# start_step = {steps_of(batch, seq_len) * 9 // 10}",
        f"# seq_len = {2 * seq_len}",
        f"# global_batch_size = {max(1, batch // 2)}",
        "",
        "# Hold documents out of training, and evaluate on the same batches each time:",
        "# [[evals]]",
        '# name = "held-out"',
        f'# source = "{source_tables(stores[0][0])[0]["name"]}"',
        f'# documents = "0:{max(1, min(1000, opened[0].num_documents // 100))}"',
        "",
    ]
    return "\n".join(lines)


def _commented(entries: Sequence[tuple[str, object, str]]) -> list[str]:
    """Return lines of TOML with their comments in one column."""
    lines = [tomli_w.dumps({key: value}).rstrip("\n") for key, value, _ in entries]
    width = max(map(len, lines))
    return [
        f"{line:<{width}}  # {comment}" if comment else line
        for line, (_, _, comment) in zip(lines, entries, strict=True)
    ]
