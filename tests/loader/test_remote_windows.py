"""Window shuffle from object storage: blocks come whole into a mirror, and batches are the same."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.config.run import parse_config
from tokenmill.packing.packers import MAX_DOCUMENTS
from tokenmill.run.run import Run
from tokenmill.store.remote.upload import upload


def digests(run, **options):
    loader = run.loader(micro_batch=8, threads=1, **options)
    found = [{name: array.copy() for name, array in batch.items()} for batch in loader]
    return found, loader.network


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
@pytest.mark.parametrize("limit", [None, 10**9, 40_000])
def test_windows_come_whole_into_a_mirror_and_batches_are_those_of_local_stores(
    make_store, tmp_path, packing, limit
):
    """With too small a mirror rows are read one by one, and the batches are the same."""
    lengths = np.random.default_rng(2).integers(1, 9, 4 * MAX_DOCUMENTS).tolist()
    path, *_ = make_store("web", lengths, max_tokens_per_shard=100_000)
    upload(path, f"file://{tmp_path}/away")
    options = {"steps": 12, "global_batch_size": 64, "seq_len": 31, "packing": packing, "shuffle": "window"}
    tables = {"run": {**options, "window_blocks": 2}, "sources": [{"name": "web", "store": "web"}]}
    local, _ = digests(Run(config=parse_config(tables), folder=tmp_path))
    tables["sources"] = [{"name": "web", "store": f"file://{tmp_path}/away"}]
    tables["remote"] = {"mirror": str(tmp_path / "mirror"), **({} if limit is None else {"limit_bytes": limit})}
    away, network = digests(Run(config=parse_config(tables), folder=tmp_path))
    assert len(local) == len(away) == 96
    for ours, theirs in zip(local, away, strict=True):
        assert {name: array.tobytes() for name, array in ours.items()} == {
            name: array.tobytes() for name, array in theirs.items()
        }
    counters = network.counters
    if limit != 40_000:
        # Two windows, or two blocks of 1,024 rows, in parts of shards; the rest are small files.
        assert counters.requests < 30
        assert counters.hits > 12 * 64 * 31 * 2  # all tokens of all rows come from the mirror
