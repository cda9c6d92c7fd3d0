from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tokenmill as tm
from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.run.run import Run
from tokenmill.store import check_store, open_store, read_manifest
from tokenmill.store.layout import MANIFEST, manifest_bytes
from tokenmill.store.lease import leased_folder
from tokenmill.store.verify import sums_file

RUN = """
[run]
steps = 20
global_batch_size = 8
seq_len = 64

[[sources]]
name = "web"
store = "web"
verify_pages = {verify}
"""


def flip(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(bytes(data))


@pytest.fixture
def store(make_store):
    return make_store("web", [100] * 400, max_tokens_per_shard=15_000)[0]


def run_of(tmp_path, verify):
    (tmp_path / "run.toml").write_text(RUN.format(verify=str(verify).lower()))
    return Run.from_toml(tmp_path / "run.toml")


def test_page_sums_are_side_files_and_change_no_other_but_a_key_of_the_manifest(store):
    fingerprint = open_store(store).fingerprint
    before = {file: file.read_bytes() for file in store.rglob("*") if file.is_file()}
    tm.verify(store, add_page_sums=True)
    after = {file: file.read_bytes() for file in store.rglob("*") if file.is_file()}
    added = sorted(file.relative_to(store).as_posix() for file in set(after) - set(before))
    assert added == [".sums/shard-00000.bin", ".sums/shard-00001.bin", ".sums/shard-00002.bin"]
    manifest = store / MANIFEST
    assert {file: after[file] for file in before if file != manifest} == {
        file: data for file, data in before.items() if file != manifest
    }
    assert after[manifest] == manifest_bytes(replace(read_manifest(store), page_sums=True))
    assert before[manifest] == manifest_bytes(replace(read_manifest(store), page_sums=False))
    assert open_store(store).fingerprint == fingerprint
    tm.verify(store, add_page_sums=True)
    assert manifest.read_bytes() == after[manifest]
    assert tm.verify(store).shards == 3


def test_page_sums_that_the_manifest_promises_and_that_are_gone_are_named_and_can_be_added_again(store):
    tm.verify(store, add_page_sums=True)
    file = store / sums_file("shard-00001")
    expected = file.read_bytes()
    file.unlink()
    with pytest.raises(
        StoreCorruptError, match=r"shard-00001.bin: page sums not found, .*verify --add-page-sums"
    ) as caught:
        tm.verify(store)
    assert len(str(caught.value).splitlines()) == 1
    tm.verify(store, add_page_sums=True)
    assert file.read_bytes() == expected


def test_a_store_whose_manifest_says_nothing_of_its_page_sums_reads_and_gets_the_key(store):
    before = (store / MANIFEST).read_bytes()
    tm.verify(store, add_page_sums=True)
    marked = (store / MANIFEST).read_bytes()
    (store / MANIFEST).write_bytes(before)
    assert tm.verify(store).shards == 3
    assert (store / MANIFEST).read_bytes() == before
    tm.verify(store, add_page_sums=True)
    assert (store / MANIFEST).read_bytes() == marked


def test_the_manifest_of_a_store_that_is_being_built_gets_no_key(store):
    with leased_folder(store), pytest.raises(StoreError, match=r"another build writes to it"):
        tm.verify(store, add_page_sums=True)
    assert not read_manifest(store).page_sums


def test_documents_that_are_added_have_no_page_sums_until_they_are_verified(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "by the mill"}\n' * 9)
    options = {"out": tmp_path / "st", "tokenizer": "bytes", "workers": 1, "progress": False}
    tm.prepare(tmp_path / "a.jsonl", **options)
    tm.verify(tmp_path / "st", add_page_sums=True)
    tm.prepare(tmp_path / "a.jsonl", **options)
    assert read_manifest(tmp_path / "st").page_sums
    tm.prepare([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], **options)
    assert not read_manifest(tmp_path / "st").page_sums
    assert tm.verify(tmp_path / "st").shards == 2
    tm.verify(tmp_path / "st", add_page_sums=True)
    assert read_manifest(tmp_path / "st").page_sums


def test_a_damaged_shard_gets_no_page_sums(store):
    flip(store / "shard-00001" / "sequence.bin", 5000)
    assert len(check_store(store, add_page_sums=True).problems) == 1
    assert not read_manifest(store).page_sums
    assert sorted(path.name for path in (store / ".sums").iterdir()) == ["shard-00000.bin", "shard-00002.bin"]


@pytest.mark.parametrize("place", [0, 100, -1, -20])
def test_a_changed_byte_of_page_sums_is_found(store, place):
    tm.verify(store, add_page_sums=True)
    flip(store / sums_file("shard-00001"), place)
    with pytest.raises(StoreCorruptError, match=r"shard-00001\.bin"):
        tm.verify(store)


def test_batches_are_the_same_with_proven_pages(store, tmp_path):
    expected = [batch["input_ids"].copy() for batch in run_of(tmp_path, False).loader(micro_batch=4)]
    tm.verify(store, add_page_sums=True)
    found = [batch["input_ids"].copy() for batch in run_of(tmp_path, True).loader(micro_batch=4)]
    assert all(map(np.array_equal, found, expected))
    assert len(found) == len(expected)


def test_bit_rot_in_the_middle_of_a_run_gives_no_wrong_token(store, tmp_path):
    """[N1.d]"""
    tm.verify(store, add_page_sums=True)
    stream = iter(run_of(tmp_path, True).loader(micro_batch=8, threads=0))
    next(stream)
    for shard in range(3):
        flip(store / f"shard-0000{shard}" / "sequence.bin", 4096 + 100)
    with pytest.raises(
        StoreCorruptError, match=r"sequence.bin: bytes \d+:\d+ must be what their checksums say.*page 1"
    ):
        list(stream)


def test_without_page_sums_the_way_to_get_them_is_told(store, tmp_path):
    with pytest.raises(StoreError, match=r"must have page sums.*verify --add-page-sums"):
        run_of(tmp_path, True).loader()
    assert store.exists()


def test_sums_of_another_shard_are_refused(store, tmp_path):
    tm.verify(store, add_page_sums=True)
    folder = store / ".sums"
    (folder / "shard-00000.bin").write_bytes((folder / "shard-00001.bin").read_bytes())
    with pytest.raises(StoreCorruptError, match=r"shard-00000\.bin: must have the checksums of the pages"):
        list(run_of(tmp_path, True).loader())
