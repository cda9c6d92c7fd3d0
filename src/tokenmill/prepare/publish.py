"""Making finished units a store: a transaction that whoever comes next can finish."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenmill.errors import StoreCorruptError
from tokenmill.prepare.journal import LEDGER, PUBLISH, Journal, read_signed, write_signed
from tokenmill.prepare.unit import route_folder
from tokenmill.store.durable import make_folder, sync_folder, write_atomically
from tokenmill.store.layout import MANIFEST
from tokenmill.store.manifest import Manifest, ShardInfo, manifest_bytes, read_manifest, shard_from_json
from tokenmill.store.writer import JOURNAL_FOLDER, clear, publish_shard

MAX_INPUTS = 1000
"""How many input files a manifest lists; `.prepare/inputs.json` has them all."""


def begin_publish(
    journal: Journal,
    *,
    units: Sequence[Mapping[str, Any]],
    base: Mapping[str, Sequence[Mapping[str, Any]]],
    cleared: Sequence[str] | None,
    manifest: Mapping[str, Any],
    ledger: Mapping[str, Any],
) -> None:
    """Write down all that it takes to finish: `units` to move in order, behind the shards of `base` by route.

    `cleared` are the routes of the store that is replaced, None where nothing is.
    """
    value = {
        "phase": "clear" if cleared is not None else "move",
        "cleared": list(cleared or ()),
        "units": [{"key": unit["key"], "shards": unit["shards"]} for unit in units],
        "base": {route: list(shards) for route, shards in base.items()},
        "manifest": dict(manifest),
        "ledger": dict(ledger),
    }
    write_signed(journal.folder / PUBLISH, value)


def finish_publish(journal: Journal) -> None:
    """Do what `begin_publish` wrote down, if anything, from wherever an earlier try stopped.

    Every step may be done twice. A reader sees the old store, none, or the new one; never a mixture.
    """
    plan = read_signed(journal.folder / PUBLISH)
    if plan is None:
        return
    if plan["phase"] == "clear":
        for route in plan["cleared"]:
            _clear_store(journal.out, route)
        plan["phase"] = "move"
        write_signed(journal.folder / PUBLISH, plan)
    shards: dict[str, list[ShardInfo]] = {
        route: [shard_from_json(shard) for shard in listed] for route, listed in plan["base"].items()
    }
    for unit in plan["units"]:
        for route, listed in unit["shards"].items():
            folder = route_folder(journal.units / unit["key"], route)
            store = journal.out / route
            make_folder(store)
            there = shards.setdefault(route, [])
            for shard in listed:
                there.append(publish_shard(shard_from_json(shard), folder, store, len(there)))
    for route, there in shards.items():
        _write_manifest(journal.out, route, plan, there)
    write_signed(journal.folder / LEDGER, {**plan["ledger"], "routes": sorted(shards)})
    journal.drop()
    _drop_scans(journal, plan["ledger"]["scans"])
    # The rest must be gone for good before the word that it is to go.
    sync_folder(journal.folder)
    (journal.folder / PUBLISH).unlink()
    sync_folder(journal.folder)


def give_up_publish(journal: Journal) -> None:
    """Do what `begin_publish` wrote down if it can be done, or forget it: for a store that is built anew."""
    try:
        finish_publish(journal)
    except StoreCorruptError:
        (journal.folder / PUBLISH).unlink(missing_ok=True)


def _drop_scans(journal: Journal, kept: Sequence[str]) -> None:
    """Remove what was found out of records for this build alone."""
    shutil.rmtree(journal.folder / "fates", ignore_errors=True)
    known = set(kept)
    for file in list(journal.scans.iterdir()) if journal.scans.is_dir() else []:
        if file.name not in known:
            file.unlink()
    if journal.scans.is_dir() and not known:
        journal.scans.rmdir()


def _write_manifest(out: Path, route: str, plan: Mapping[str, Any], shards: Sequence[ShardInfo]) -> None:
    """Write the manifest of one store; its inputs say what each file gave to this store, not to the others."""
    store = out / route
    sync_folder(store)
    ledger = plan["ledger"]
    inputs = []
    for entry in ledger["inputs"][:MAX_INPUTS]:
        documents, tokens = entry["taken"].get(route, (0, 0))
        inputs.append({"name": entry["name"], "bytes": entry["bytes"], "documents": documents, "tokens": tokens})
    manifest = Manifest(
        **plan["manifest"],
        shards=tuple(shards),
        inputs=tuple(inputs),
        skipped={
            **({"counts": ledger["counts"], "first": ledger["listed"]} if ledger["counts"] else {}),
            **({"truncated": ledger["truncated"]} if ledger["truncated"] else {}),
            **({"notes": ledger["notes"]} if ledger["notes"] else {}),
        },
    )
    write_atomically(store / MANIFEST, manifest_bytes(manifest))


def _clear_store(out: Path, route: str) -> None:
    """Take the old store of a route away; in `out` itself the journal stays."""
    store = out / route
    if store.is_dir():
        clear(store, keep=(JOURNAL_FOLDER,))
    if route:
        # Folders of routes that the new store may not have.
        for folder in (store, *store.parents):
            if folder == out or not folder.is_dir() or any(folder.iterdir()):
                break
            folder.rmdir()


def published(journal: Journal, routes: Sequence[str]) -> dict[str, Manifest]:
    """Read the manifests of the finished stores."""
    return {route: read_manifest(journal.out / route) for route in routes}
