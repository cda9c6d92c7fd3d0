"""Stores of ours by the pipeline, and files as AstrAI writes them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tokenmill.adapters.astrai import Pipeline

TEXTS = [{"text": f"document {number} of the mill, " + "ground fine " * (number % 5)} for number in range(30)]
CHATS = [{"prompt": f"{number} + 1 = ", "response": str(number + 1)} for number in range(20)]
PAIRS = [{"prompt": f"{number}: ", "chosen": "yes " * (1 + number % 3), "rejected": "no"} for number in range(9)]
GROUPS = [
    {
        "prompt": f"{number} + 1 = ",
        "responses": [str(number + 1), *["wrong"] * (number % 3)],
        "rewards": [1.0, *[0.25] * (number % 3)],
    }
    for number in range(7)
]
RECORDS = {"seq": ("text", TEXTS), "sft": ("instruction", CHATS), "dpo": ("dpo", PAIRS), "grpo": ("grpo", GROUPS)}


def save_bin(folder: Path, arrays: dict[str, Any], offsets: dict[str, list[int]] | None = None) -> Path:
    """Write what AstrAI's save_bin writes."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {}
    for key, values in arrays.items():
        meta[key] = {"shape": list(values.shape), "dtype": values.dtype.name}
        if offsets and key in offsets:
            meta[key]["offsets"] = offsets[key]
        values.tofile(folder / f"{key}.bin")
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def save_h5(file: Path, arrays: dict[str, list[Any]], **options: Any) -> Path:
    """Write what AstrAI's save_h5 writes."""
    import h5py

    file.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(file, "w") as opened:
        for key, values in arrays.items():
            group = opened.create_group(key)
            for index, value in enumerate(values):
                group.create_dataset(f"data_{index}", data=value, **options)
    return file


def documents(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, length).astype(np.int32) for length in lengths]


@pytest.fixture(scope="session")
def astrai() -> SimpleNamespace:
    """Return the writers of this file."""
    return SimpleNamespace(save_bin=save_bin, save_h5=save_h5, documents=documents, RECORDS=RECORDS)


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Make a store of every training type and storage type, of several shards each."""
    root = tmp_path_factory.mktemp("astrai")
    made = {}
    for kind, (preset, records) in RECORDS.items():
        file = root / f"{kind}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        for storage in ("bin", "h5"):
            config = {"preset": preset, "output": {"storage_format": storage, "max_tokens_per_shard": 60}}
            made[kind, storage] = root / f"{kind}-{storage}"
            Pipeline(config, [file], made[kind, storage], "bytes").run(workers=1)
    return made


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
