import numpy as np
import pytest

from tokenmill.loader import IGNORE
from tokenmill.store import open_store


def row_by_hand(tokens, offsets, row, seq_len, *, crossing):
    """Return what a row must deliver, token by token from the stream."""
    begin = row * seq_len
    starts = set(offsets[:-1][np.diff(offsets) > 0].tolist())
    ids, labels, positions, documents = [], [], [], []
    position = document = 0
    for token in range(begin, begin + seq_len):
        if token in starts and token > begin:
            position = 0
            document += 1
        ids.append(int(tokens[token]))
        labels.append(int(tokens[token + 1]) if crossing or token + 1 not in starts else IGNORE)
        positions.append(position)
        documents.append(document)
        position += 1
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "doc_ids": documents}


@pytest.mark.parametrize("crossing", [False, True])
@pytest.mark.parametrize("dtype", ["|u1", "<u2", "<u4"])
@pytest.mark.parametrize("shard_tokens", [5, 700, 10**9])
def test_every_array_is_what_the_stream_says(make_run, crossing, dtype, shard_tokens):
    """[P1.c] From one source of truth, for every token width and across shard edges."""
    run = make_run(crossing=str(crossing).lower(), dtype=dtype, vocab_size=250, max_tokens_per_shard=shard_tokens)
    loader = run.loader(arrays=("input_ids", "labels", "position_ids", "doc_ids", "source"))
    streams = {}
    for name, store in run.stores.items():
        streams[name] = store.fetch(0, store.num_tokens, "sequence"), store.document_offsets(0, store.num_documents)
    for step in range(0, 30, 7):
        batch = loader[step]
        sources, rows = loader.plan.rows(step)
        assert batch["source"].tolist() == sources.tolist()
        for slot, (source, row) in enumerate(zip(sources.tolist(), rows.tolist(), strict=True)):
            expected = row_by_hand(*streams[loader.plan.sources[source]], row, 16, crossing=crossing)
            assert {name: batch[name][slot].tolist() for name in expected} == expected


def test_labels_never_cross_a_document_by_default(make_run):
    """[P1.c] The label at every document's last position is -100, and nowhere else."""
    batch = make_run().loader()[3]
    last = np.diff(batch["doc_ids"], axis=1) > 0
    assert (batch["labels"][:, :-1][last] == IGNORE).all()
    assert (batch["labels"][:, :-1][~last] != IGNORE).all()
    assert last.any()
    assert (batch["position_ids"][:, 1:][last] == 0).all()


def test_dtypes_are_ready_for_torch_without_a_copy(make_run):
    torch = pytest.importorskip("torch")
    batch = make_run().loader()[0]
    assert {name: str(array.dtype) for name, array in batch.items()} == {
        "input_ids": "int64",
        "labels": "int64",
        "position_ids": "int64",
        "doc_ids": "int32",
    }
    for array in batch.values():
        tensor = torch.from_numpy(array)
        assert tensor.data_ptr() == array.ctypes.data
        assert tensor.is_contiguous()


def test_a_subset_of_arrays_is_the_same_as_of_all(make_run):
    run = make_run()
    whole = run.loader()[5]
    for name, array in whole.items():
        assert np.array_equal(run.loader(arrays=(name,))[5][name], array)


def test_many_more_shards_than_maps_give_the_same_batches(make_run, global_batches):
    """[S1.a] Never more than 64 files are mapped, and nothing else changes."""
    run = make_run(max_tokens_per_shard=8)
    assert sum(store.num_shards for store in run.stores.values()) > 150
    drawn = global_batches(run, micro_batch=12, threads=0)
    maps = run.stores["web"]._maps
    assert maps is run.stores["books"]._maps
    assert len(maps._maps) <= 64
    whole = open_store(run.folder / "web")
    assert whole.num_shards > 100
    assert drawn == global_batches(run, world_size=4, micro_batch=3, threads=2)
