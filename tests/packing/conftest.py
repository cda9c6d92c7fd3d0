"""Stores with a loss mask, and of pairs and groups, as the tests of packing need them."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tokenmill.store import StoreSpec, StoreWriter, open_store


@pytest.fixture
def make_masked(tmp_path, tokenizer_identity):
    """Return a function that writes a store with a random loss mask and gives (path, mask, offsets)."""

    def make(lengths, seed=0, *, size=10**6, share=0.5, name="sft"):
        rng = np.random.default_rng(seed)
        offsets = np.cumsum([0, *lengths])
        ids = rng.integers(2, 300, offsets[-1]).astype("<u2")
        ids[offsets[:-1][np.diff(offsets) > 0]] = 1
        mask = (rng.random(offsets[-1]) < share).astype("|u1")
        if (tmp_path / name).exists():
            shutil.rmtree(tmp_path / name)
        spec = StoreSpec(
            kind="sft",
            keys={"sequence": "<u2", "loss_mask": "|u1"},
            tokenizer=tokenizer_identity(300) | {"add_bos": True, "bos_id": 1},
            recipe={},
            max_tokens_per_shard=size,
        )
        with StoreWriter(tmp_path / name, spec) as writer:
            writer.append({"sequence": ids, "loss_mask": mask}, offsets)
            writer.commit()
        return tmp_path / name, mask, offsets

    return make


@pytest.fixture
def make_records(tmp_path, tokenizer_identity):
    """Return a function that writes the records `kept` of a number of random ones, and opens the store.

    A record has the same values whichever others are kept.
    """

    def make(kind, kept, *, masked=True, name="records"):
        main, other, mask = ("chosen", "rejected", "chosen_mask") if kind == "dpo" else ("prompts", "responses", "")
        axes = ("chosen", "rejected") if kind == "dpo" else ("prompts", "groups", "responses")
        masks = {"dpo": {mask: main, "rejected_mask": other}, "grpo": {"masks": other}}[kind] if masked else {}
        values = {key: [] for key in (main, other, *masks)}
        sizes = {axis: [] for axis in axes}
        for record in kept:
            rng = np.random.default_rng(record)
            members = 1 if kind == "dpo" else int(rng.integers(0, 4))
            for key, count in ((main, 1), (other, members)):
                for length in rng.integers(0, 9, count).tolist():
                    values[key].append(rng.integers(0, 300, length))
                    sizes[key].append(length)
            if kind == "grpo":
                sizes["groups"].append(members)
        for key, of in masks.items():
            values[key] = [ids % 2 for ids in values[of]]
        dtypes = dict.fromkeys((main, other), "<u2") | dict.fromkeys(masks, "|u1")
        arrays = {key: np.concatenate([[], *values[key]]).astype(dtype) for key, dtype in dtypes.items()}
        if kind == "grpo":
            dtypes["rewards"] = "<f4"
            arrays["rewards"] = np.arange(sum(sizes["groups"]), dtype="<f4")
        if (tmp_path / name).exists():
            shutil.rmtree(tmp_path / name)
        spec = StoreSpec(
            kind=kind, keys=dtypes, tokenizer=tokenizer_identity(300), recipe={}, max_tokens_per_shard=60
        )
        with StoreWriter(tmp_path / name, spec) as writer:
            writer.append(arrays, {axis: np.cumsum([0, *sizes[axis]]) for axis in axes})
            writer.commit()
        return open_store(tmp_path / name)

    return make
