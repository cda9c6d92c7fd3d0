from __future__ import annotations

import os

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import tokenmill as tm
from tokenmill.errors import StoreCorruptError
from tokenmill.run.run import Run
from tokenmill.store import check_store, read_manifest
from tokenmill.store.files import Checksums
from tokenmill.store.sums import read_sums, sums_file

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


def sums_of(data):
    """Return the sums of pages of 4 KiB as docs/reference/store-format.md describes them."""
    return [xxhash.xxh3_64_intdigest(data[begin : begin + 4096]) for begin in range(0, len(data), 4096)]


@given(st.lists(st.sampled_from([0, 1, 100, 4095, 4096, 4097, 9000]), max_size=6))
def test_checksums_depend_on_the_bytes_not_on_their_blocks(sizes):
    data = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8).tobytes()
    checksums, begin = Checksums(), 0
    for size in sizes:
        checksums.update(memoryview(data)[begin : begin + size])
        begin += size
    assert checksums.info.bytes == len(data)
    assert checksums.info.xxh3 == xxhash.xxh3_128_hexdigest(data)
    assert checksums.pages.tolist() == sums_of(data)


def test_a_writer_adds_the_page_sums_of_every_file_of_a_shard(store):
    assert sorted(os.listdir(store / ".sums")) == ["shard-00000.bin", "shard-00001.bin", "shard-00002.bin"]
    for shard in read_manifest(store).shards:
        sums = read_sums(store / sums_file(shard.name), shard)
        assert sorted(sums) == sorted(f"{shard.name}/{name}" for name in shard.files)
        for name, pages in sums.items():
            assert pages.tolist() == sums_of((store / name).read_bytes())


def test_a_build_adds_the_page_sums_of_each_unit_and_of_files_that_are_added(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "by the mill"}\n' * 900)
    options = {"out": tmp_path / "st", "tokenizer": "bytes", "workers": 1, "progress": False}
    tm.prepare(tmp_path / "a.jsonl", **options)
    tm.prepare([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], **options)
    assert sorted(os.listdir(tmp_path / "st" / ".sums")) == ["shard-00000.bin", "shard-00001.bin"]
    assert tm.verify(tmp_path / "st").shards == 2


def test_page_sums_that_are_missing_are_named(store):
    (store / sums_file("shard-00001")).unlink()
    with pytest.raises(StoreCorruptError, match=r"\.sums/shard-00001\.bin: page sums not found; copy") as caught:
        tm.verify(store)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("place", [0, 100, -1, -20])
def test_a_changed_byte_of_page_sums_is_found(store, place):
    flip(store / sums_file("shard-00001"), place)
    with pytest.raises(StoreCorruptError, match=r"shard-00001\.bin: .*page sums"):
        tm.verify(store)


def test_page_sums_of_a_page_that_changed_with_its_checksum_are_found(store, monkeypatch):
    """Page sums are compared with the bytes of the file, not only with their own checksum."""
    monkeypatch.setattr(Checksums, "pages", property(lambda self: np.zeros(-(-self.bytes // 4096), np.uint64)))
    problems = [str(problem) for problem in check_store(store).problems]
    assert len(problems) == 3
    assert "shard-00000.bin: wrong sum of page 0 of shard-00000/" in problems[0]


@pytest.mark.usefixtures("store")
def test_batches_are_the_same_with_verified_pages(tmp_path):
    expected = [batch["input_ids"].copy() for batch in run_of(tmp_path, False).loader(micro_batch=4)]
    found = [batch["input_ids"].copy() for batch in run_of(tmp_path, True).loader(micro_batch=4)]
    assert all(map(np.array_equal, found, expected))
    assert len(found) == len(expected)


def test_bit_rot_in_the_middle_of_a_run_gives_no_wrong_token(store, tmp_path):
    """[N1.d]"""
    stream = iter(run_of(tmp_path, True).loader(micro_batch=8, threads=0))
    next(stream)
    for shard in range(3):
        flip(store / f"shard-0000{shard}" / "sequence.bin", 4096 + 100)
    with pytest.raises(
        StoreCorruptError, match=r"sequence.bin: bytes \d+:\d+ do not match their checksums, first in page 1"
    ):
        list(stream)


def test_without_page_sums_the_way_out_is_named(store, tmp_path):
    for file in (store / ".sums").iterdir():
        file.unlink()
    (store / ".sums").rmdir()
    with pytest.raises(StoreCorruptError, match=r"\.sums: page sums not found.*verify_pages = false"):
        run_of(tmp_path, True).loader()


def test_sums_of_another_shard_are_rejected(store, tmp_path):
    folder = store / ".sums"
    (folder / "shard-00000.bin").write_bytes((folder / "shard-00001.bin").read_bytes())
    with pytest.raises(StoreCorruptError, match=r"shard-00000\.bin: page sums of another "):
        list(run_of(tmp_path, True).loader())
