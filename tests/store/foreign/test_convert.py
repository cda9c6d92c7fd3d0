from __future__ import annotations

import numpy as np
import pytest

from tokenmill.errors import ConfigError, StoreCorruptError, StoreError, StoreExistsError
from tokenmill.store import ForeignOptions, import_store, open_store, verify
from tokenmill.store.foreign import convert


def test_an_imported_store_is_verified_and_equal(write, name, tmp_path):
    made = write(name)
    report = import_store(made.path, out=tmp_path / "ours", options=ForeignOptions(**made.options))
    store = open_store(tmp_path / "ours")
    assert store.fetch(0, store.num_tokens, "sequence").tolist() == made.tokens
    assert store.document_offsets(0, store.num_documents).tolist() == made.offsets
    assert verify(tmp_path / "ours").fingerprint == report.fingerprint == store.fingerprint
    assert (report.format, report.tokens, report.documents) == (
        made.format,
        len(made.tokens),
        len(made.offsets) - 1,
    )
    assert report.compared == len(made.tokens) * len(report.keys)
    if made.mask is not None:
        assert store.fetch(0, store.num_tokens, "loss_mask").tolist() == made.mask


def test_documents_are_copied_in_batches_and_shards_like_any(write, tmp_path, monkeypatch):
    made = write("bin")
    import_store(made.path, out=tmp_path / "whole", options=ForeignOptions(**made.options), max_tokens_per_shard=50)
    monkeypatch.setattr(convert, "BATCH_TOKENS", 16)
    import_store(made.path, out=tmp_path / "parts", options=ForeignOptions(**made.options), max_tokens_per_shard=50)
    stores = [open_store(tmp_path / name) for name in ("whole", "parts")]
    assert stores[0].fingerprint == stores[1].fingerprint
    assert stores[0].num_shards > 5


def test_a_difference_leaves_no_store(write, tmp_path, monkeypatch):
    """[S.f]"""
    made = write("npy")
    cast = convert._cast

    def wrong(part, key, starts, dtype):
        numbers = cast(part, key, starts, dtype).copy()
        numbers[-1] ^= 1
        return numbers

    monkeypatch.setattr(convert, "_cast", wrong)
    with pytest.raises(StoreCorruptError, match="sequence must be read back as written, got other numbers than in"):
        import_store(made.path, out=tmp_path / "ours")
    assert not (tmp_path / "ours" / "manifest.json").exists()


def test_a_failed_rebuild_leaves_the_old_store(write, tmp_path, monkeypatch):
    """[S.f] Neither a file that cannot be converted nor one that is read back differently takes it away."""
    made = write("npy")
    import_store(made.path, out=tmp_path / "ours", options=ForeignOptions(**made.options))
    before = {file: file.read_bytes() for file in (tmp_path / "ours").rglob("*") if file.is_file()}
    np.array([1, 2, 3], "<u2").tofile(tmp_path / "a.ds")
    np.array([3], "<u8").tofile(tmp_path / "a.ds.index")
    np.array([1, 2, 1], "<u1").tofile(tmp_path / "a.ds.loss")  # 2 is no mask
    with pytest.raises(StoreError, match="loss_mask must be 0 or 1"):
        import_store(tmp_path / "a.ds", out=tmp_path / "ours", options=ForeignOptions(dtype="uint16"), rebuild=True)
    cast = convert._cast
    monkeypatch.setattr(convert, "_cast", lambda *args: cast(*args) ^ 1)
    with pytest.raises(StoreCorruptError, match="must be read back as written"):
        import_store(made.path, out=tmp_path / "ours", rebuild=True)
    assert {file: file.read_bytes() for file in (tmp_path / "ours").rglob("*") if file.is_file()} == before
    assert verify(tmp_path / "ours").tokens == len(made.tokens)


def test_a_finished_store_is_replaced_only_when_asked(write, tmp_path):
    made = write("npy")
    import_store(made.path, out=tmp_path / "ours")
    with pytest.raises(StoreExistsError, match="rebuild=True"):
        import_store(made.path, out=tmp_path / "ours")
    import_store(made.path, out=tmp_path / "ours", rebuild=True)


def test_a_store_of_ours_needs_no_import(make_store, tmp_path):
    path, _, _ = make_store("web", [4])
    with pytest.raises(StoreError, match="must be of another format, got a store of tokenmill; use it as it is"):
        import_store(path, out=tmp_path / "ours")


def test_with_its_tokenizer_a_store_mixes_with_others(write, tmp_path, tokenizer_identity):
    made = write("npy")
    identity = {**tokenizer_identity(50_000), "eos_id": 1}
    import_store(made.path, out=tmp_path / "ours", tokenizer=identity)
    store = open_store(tmp_path / "ours")
    assert store.manifest.tokenizer == {**identity, "add_eos": True}
    assert store.document_offsets(0, store.num_documents).tolist() == made.offsets
    with pytest.raises(ConfigError, match="eos_id: must be that of the tokenizer, 1, got 2"):
        import_store(made.path, out=tmp_path / "b", tokenizer=identity, options=ForeignOptions(eos_id=2))
    with pytest.raises(StoreError, match="below the vocabulary size 1000, got"):
        import_store(made.path, out=tmp_path / "b", tokenizer={**identity, "vocab_size": 1000})


@pytest.mark.parametrize(
    ("largest", "dtype"), [(255, "|u1"), (256, "<u2"), (65_535, "<u2"), (65_536, "<u4"), (2**32 - 1, "<u4")]
)
def test_the_smallest_dtype_that_holds_the_ids_is_written(tmp_path, largest, dtype):
    np.save(tmp_path / "a.npy", np.array([0, largest], np.int64))
    assert import_store(tmp_path / "a.npy", out=tmp_path / "ours").keys == {"sequence": dtype}
    assert open_store(tmp_path / "ours").fetch(0, 2, "sequence").tolist() == [0, largest]


@pytest.mark.parametrize("odd", [-1, 2**32, 2**63 - 1])
def test_what_is_no_id_is_refused(tmp_path, odd):
    np.save(tmp_path / "a.npy", np.array([0, odd], np.int64))
    with pytest.raises(StoreError, match=r"ids of sequence must not be negative|ids must be below 2\*\*32, got"):
        import_store(tmp_path / "a.npy", out=tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_progress_goes_through_looking_writing_and_comparing(write, tmp_path):
    made = write("npy")
    told = []
    import_store(made.path, out=tmp_path / "ours", progress=lambda *step: told.append(step))
    total = len(made.tokens)
    assert list(dict.fromkeys(what for what, _, _ in told)) == ["look", "write", "compare"]
    assert [done for what, done, all_ in told if done == all_ == total] == [total] * 3
