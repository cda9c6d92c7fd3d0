"""Making finished units a store: a transaction that whoever comes next can finish."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenmill.prepare.journal import Journal, read_signed, write_signed
from tokenmill.prepare.unit import route_folder
from tokenmill.store.durable import sync_folder, write_atomically
from tokenmill.store.layout import MANIFEST
from tokenmill.store.manifest import Manifest, ShardInfo, manifest_bytes, read_manifest, shard_from_json
from tokenmill.store.writer import JOURNAL_FOLDER, clear, publish_shard

PUBLISH = "publish.json"
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


def finish_publish(journal: Journal) -> dict[str, Manifest] | None:
    """Do what `begin_publish` wrote down, from wherever an earlier try stopped; None if there is nothing to do.

    Every step may be done twice. A reader sees the old store, none, or the new one; never a mixture.
    """
    plan = read_signed(journal.folder / PUBLISH)
    if plan is None:
        return None
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
            store.mkdir(parents=True, exist_ok=True)
            there = shards.setdefault(route, [])
            for shard in listed:
                there.append(publish_shard(shard_from_json(shard), folder, store, len(there)))
    manifests = {route: _write_manifest(journal.out / route, plan, there) for route, there in shards.items()}
    write_signed(journal.folder / "inputs.json", {**plan["ledger"], "routes": sorted(shards)})
    journal.drop()
    shutil.rmtree(journal.folder / "fates", ignore_errors=True)
    (journal.folder / PUBLISH).unlink()
    sync_folder(journal.folder)
    return manifests


def _write_manifest(store: Path, plan: Mapping[str, Any], shards: Sequence[ShardInfo]) -> Manifest:
    sync_folder(store)
    inputs = plan["ledger"]["inputs"][:MAX_INPUTS]
    ledger = plan["ledger"]
    manifest = Manifest(
        **plan["manifest"],
        shards=tuple(shards),
        inputs=tuple({key: entry[key] for key in ("name", "bytes", "documents", "tokens")} for entry in inputs),
        skipped={
            **({"counts": ledger["counts"], "first": ledger["listed"]} if ledger["counts"] else {}),
            **({"truncated": ledger["truncated"]} if ledger["truncated"] else {}),
        },
    )
    write_atomically(store / MANIFEST, manifest_bytes(manifest))
    return manifest


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
