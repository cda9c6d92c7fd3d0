"""Tools to damage stores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tokenmill.fingerprint import canonical
from tokenmill.store import StoreSpec, StoreWriter


@pytest.fixture
def edit_manifest() -> Callable[..., Path]:
    """Return a function that edits the JSON of a manifest; with a valid checksum unless asked not to."""

    def edit(store: Path, change: Callable[[dict[str, Any]], object], *, sign: bool = True) -> Path:
        file = store / "manifest.json"
        body = json.loads(file.read_bytes())
        change(body)
        if sign:
            body.pop("checksum", None)
            body["checksum"] = xxhash.xxh3_128_hexdigest(canonical(body))
        file.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return file

    return edit


@pytest.fixture(scope="session")
def _small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "web"
    spec = StoreSpec(keys={"sequence": "<u2"}, tokenizer={"vocab_size": 500}, recipe={"name": "text"})
    with StoreWriter(path, spec) as writer:
        writer.append({"sequence": np.array([7, 8, 9], "<u2")}, np.array([0, 3]))
        writer.commit()
    return path


@pytest.fixture
def small_store(_small_store: Path, tmp_path: Path) -> Path:
    """Return the path of a fresh copy of a store with one document, [7, 8, 9], in one shard."""
    return Path(shutil.copytree(_small_store, tmp_path / "web"))
