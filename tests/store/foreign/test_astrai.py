from __future__ import annotations

import json

import numpy as np
import pytest

from tokenmill.errors import StoreCorruptError, StoreError, StoreMissingError
from tokenmill.run.run import Run
from tokenmill.store import import_store, open_store
from tokenmill.store.maps import FileRequest, MemoryRequest


def test_a_mask_of_a_byte_a_token_stays_where_it_is(tmp_path, tools):
    for number, dtype in enumerate((np.bool_, np.uint8, np.int8, np.int32, np.int64)):
        folder = tmp_path / str(number)
        folder.mkdir()
        tools.save_bin(
            folder, {"sequence": np.arange(4, dtype=np.int32), "loss_mask": np.array([0, 1, 1, 0], dtype)}
        )
        store = open_store(folder)
        assert store.fetch(0, 4, "loss_mask").tolist() == [0, 1, 1, 0]
        kind = FileRequest if np.dtype(dtype).itemsize == 1 else MemoryRequest
        assert isinstance(store.file(0, "loss_mask.bin"), kind)


def test_masked_tokens_are_no_labels(tmp_path, tools):
    """[T1.a]"""
    mask = np.array([0, 0, 1, 1, 0, 1, 0, 1], np.int32)
    tools.save_bin(tmp_path, {"sequence": np.arange(10, 18, dtype=np.int32), "loss_mask": mask})
    (tmp_path / "run.toml").write_text(
        '[run]\nsteps = 1\nglobal_batch_size = 1\nseq_len = 8\n[[sources]]\nname = "a"\nstore = "."\n'
    )
    batch = next(iter(Run.from_toml(tmp_path / "run.toml").loader()))
    assert batch["labels"][0].tolist() == [-100, 12, 13, -100, 15, -100, 17, -100]


def test_a_mask_of_other_numbers_is_refused(tmp_path, tools):
    tools.save_bin(
        tmp_path, {"sequence": np.arange(3, dtype=np.int32), "loss_mask": np.array([0, 1, -100], np.int32)}
    )
    with pytest.raises(StoreError, match=r"loss_mask must be 0 or 1, got \[-100\]"):
        open_store(tmp_path)


def test_records_of_a_meta_are_documents(tmp_path, tools):
    arrays = {"sequence": np.arange(6, dtype=np.int32)}
    tools.save_bin(tmp_path, arrays, offsets={"sequence": [0, 2, 2, 6]})
    assert open_store(tmp_path).document_offsets(0, 3).tolist() == [0, 2, 2, 6]


PAIRS = {"chosen": [0, 2, 5], "rejected": [0, 3, 4]}


def test_pairs_are_read_as_records(tmp_path, tools):
    arrays = {
        "chosen": np.arange(5, dtype=np.int32),
        "chosen_mask": np.array([0, 1, 0, 1, 1], np.int32),
        "rejected": np.arange(10, 14, dtype=np.int32),
        "rejected_mask": np.array([0, 0, 1, 1], np.int32),
    }
    tools.save_bin(tmp_path, arrays)
    with pytest.raises(StoreError, match=r"records of DPO must have offsets for chosen and rejected, got \[\]"):
        open_store(tmp_path)
    tools.save_bin(tmp_path, arrays, offsets={key: PAIRS[key.removesuffix("_mask")] for key in arrays})
    expected = {"chosen": [2, 3, 4], "chosen_mask": [0, 1, 1], "rejected": [13], "rejected_mask": [1]}
    import_store(tmp_path, out=tmp_path / "ours")
    for store in (open_store(tmp_path / "meta.json"), open_store(tmp_path / "ours")):
        assert (store.manifest.kind, store.num_documents) == ("dpo", 2)
        assert {key: value.tolist() for key, value in store.fetch_record(1).items()} == expected


def test_pairs_of_h5_are_a_dataset_a_record(tmp_path, tools):
    values = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    keys = ("chosen", "chosen_mask", "rejected", "rejected_mask")
    flags = [np.ones(2, np.int32), np.ones(1, np.int32)]
    tools.save_h5(tmp_path / "a.h5", {key: flags if "mask" in key else values for key in keys})
    store = open_store(tmp_path)
    assert [store.fetch_record(i, "rejected").tolist() for i in range(2)] == [[1, 2], [3]]
    import_store(tmp_path, out=tmp_path / "ours")
    assert open_store(tmp_path / "ours").fetch_record(1, "chosen_mask").tolist() == [1]


def test_groups_are_refused_as_their_responses_have_no_boundaries(tmp_path, tools):
    arrays = {key: np.arange(4, dtype=np.int32) for key in ("prompts", "responses", "masks", "rewards")}
    tools.save_bin(tmp_path, arrays)
    with pytest.raises(StoreError, match="got grpo, whose responses are written without boundaries"):
        open_store(tmp_path)


def meta(**change):
    return json.dumps({"sequence": {"shape": [4], "dtype": "int32", **change}}).encode()


FORGED = {
    "no JSON": (b"{", "must be a JSON object of objects"),
    "a list": (b"[1]", "must be a JSON object of objects"),
    "numbers": (b'{"sequence": 4}', "must be a JSON object of objects"),
    "no keys": (b"{}", r"must have the key sequence, or chosen and rejected, got \[\]"),
    "objects": (meta(dtype="object"), "a dtype of whole numbers, got .* 'object'"),
    "dtype of fields": (meta(dtype="i4,O"), "a dtype of whole numbers"),
    "two dimensions": (meta(shape=[2, 2]), "a shape of one dimension"),
    "negative": (meta(shape=[-4]), "a shape of one dimension"),
    "true": (meta(shape=[True]), "a shape of one dimension"),
    "longer": (meta(shape=[2**62]), "must hold 4611686018427387904 numbers of int32 .* got 16 bytes"),
    "shorter": (meta(shape=[3]), "must hold 3 numbers"),
    "another dtype": (meta(dtype="int64"), "must hold 4 numbers of int64 .* got 16 bytes"),
    "offsets past the end": (meta(offsets=[0, 5]), "must rise from 0 to 4"),
    "offsets backwards": (meta(offsets=[0, 3, 2, 4]), "must rise from 0 to 4"),
    "offsets of 80 bits": (meta(offsets=[0, 2**63, 4]), "must rise from 0 to 4"),
    "offsets of words": (meta(offsets=["0", "4"]), "must rise from 0 to 4"),
    "no offsets": (meta(offsets=[]), "must rise from 0 to 4"),
}


@pytest.mark.parametrize(("data", "message"), FORGED.values(), ids=FORGED)
def test_a_forged_meta_is_refused(tmp_path, tools, data, message):
    """[S.d, S.e]"""
    tools.save_bin(tmp_path, {"sequence": np.arange(4, dtype=np.int32)})
    (tmp_path / "meta.json").write_bytes(data)
    with pytest.raises(StoreError, match=message):
        open_store(tmp_path)


def test_a_key_leads_to_no_other_folder(tmp_path, tools):
    """[S.d] Only keys of a training type are read, whatever else a meta.json names."""
    (tmp_path / "d").mkdir()
    np.arange(4, dtype=np.int32).tofile(tmp_path / "secret.bin")
    tools.save_bin(tmp_path / "d", {"sequence": np.arange(4, dtype=np.int32)})
    table = json.loads((tmp_path / "d" / "meta.json").read_text())
    (tmp_path / "d" / "meta.json").write_text(json.dumps({**table, "../secret": {"shape": [4], "dtype": "int32"}}))
    assert open_store(tmp_path / "d").keys == ("sequence",)


def test_a_missing_array_is_named(tmp_path, tools):
    tools.save_bin(tmp_path, {"sequence": np.arange(4, dtype=np.int32), "loss_mask": np.ones(4, np.int32)})
    (tmp_path / "loss_mask.bin").unlink()
    with pytest.raises(StoreMissingError, match=r"loss_mask\.bin: must exist, as meta\.json lists it"):
        open_store(tmp_path)


def test_arrays_of_unequal_length_are_refused(tmp_path, tools):
    tools.save_bin(tmp_path, {"sequence": np.arange(4, dtype=np.int32), "loss_mask": np.ones(3, np.int32)})
    with pytest.raises(StoreCorruptError, match="arrays of documents must be equally long, got"):
        open_store(tmp_path)


@pytest.mark.parametrize("options", [{"chunks": (4,)}, {"compression": "gzip"}], ids=["chunked", "compressed"])
def test_chunked_datasets_are_imported(tmp_path, tools, options):
    docs = tools.documents(1)
    tools.save_h5(tmp_path / "a.h5", {"sequence": [np.array(tools.joined(docs)[0], np.int64)]}, **options)
    with pytest.raises(StoreError, match=r"it is chunked or compressed; convert it with `tokenmill import`"):
        open_store(tmp_path)
    from tokenmill.store import ForeignOptions

    import_store(tmp_path, out=tmp_path / "ours", options=ForeignOptions(eos_id=tools.EOS))
    store = open_store(tmp_path / "ours")
    assert store.document_offsets(0, store.num_documents).tolist() == tools.joined(docs)[1]
    assert store.manifest.tokenizer["add_eos"] is True


def test_links_out_of_an_h5_file_are_refused(tmp_path, tools):
    """[S.d]"""
    import h5py

    tools.save_h5(tmp_path / "secret.hdf", {"sequence": [np.arange(4, dtype=np.int32)]})
    for number, link in enumerate((h5py.ExternalLink("secret.hdf", "/sequence"), h5py.SoftLink("/other"))):
        file = tmp_path / f"{number}.h5"
        with h5py.File(file, "w") as opened:
            opened["sequence"] = link
        with pytest.raises(StoreError, match=r"'sequence' must be a group of datasets .* in this file"):
            open_store(file)
    with h5py.File(tmp_path / "2.h5", "w") as opened:
        opened.create_group("sequence")["data_0"] = h5py.ExternalLink("secret.hdf", "/sequence/data_0")
    with pytest.raises(StoreError, match="in this file, got others or links"):
        open_store(tmp_path / "2.h5")
    with h5py.File(tmp_path / "3.h5", "w") as opened:
        opened.create_group("sequence").create_dataset("data_0", (2,), "<i4", external=[("secret.hdf", 0, 8)])
    with pytest.raises(StoreError, match="must be whole numbers in one dimension inside the file"):
        open_store(tmp_path / "3.h5")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_cut_h5_file_is_refused(tmp_path, tools, share):
    file = tmp_path / "a.h5"
    tools.save_h5(file, {"sequence": [np.arange(1000, dtype=np.int32)]})
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(StoreCorruptError, match=r"a\.h5: .*got"):
        open_store(file)


def test_a_record_that_is_missing_is_noticed(tmp_path, tools):
    import h5py

    file = tmp_path / "a.h5"
    tools.save_h5(file, {"sequence": [np.arange(4, dtype=np.int32)] * 3})
    with h5py.File(file, "a") as opened:
        del opened["sequence"]["data_1"]
    with pytest.raises(StoreCorruptError, match="every key must have datasets data_0, data_1"):
        open_store(file)


def test_too_many_records_to_map_are_pointed_to_import(tmp_path, tools, monkeypatch):
    tools.save_h5(tmp_path / "a.h5", {"sequence": [np.arange(4, dtype=np.int32)] * 5})
    monkeypatch.setattr("tokenmill.store.foreign.open.MAX_RECORDS", 4)
    with pytest.raises(StoreError, match="at most 4 datasets can be mapped one by one, got 5; convert it"):
        open_store(tmp_path)
    import_store(tmp_path, out=tmp_path / "ours")
    assert open_store(tmp_path / "ours").num_documents == 5


def test_a_dataset_that_declares_what_was_never_written_is_refused(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_group("sequence").create_dataset("data_0", (10**12,), "<u2", chunks=(1024,))
    assert (tmp_path / "data.h5").stat().st_size < 10_000
    with pytest.raises(StoreCorruptError, match=r"data_0 must hold what it declares, got 10{12} numbers in 0"):
        import_store(tmp_path / "data.h5", out=tmp_path / "out")
