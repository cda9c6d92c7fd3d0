from __future__ import annotations

import numpy as np
import pytest

import tokenmill as tm
from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.run.run import Run
from tokenmill.store import check_store
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


def test_page_sums_are_side_files_and_change_no_other(store):
    before = {file: file.read_bytes() for file in store.rglob("*") if file.is_file()}
    tm.verify(store, add_page_sums=True)
    after = {file: file.read_bytes() for file in store.rglob("*") if file.is_file()}
    added = sorted(file.relative_to(store).as_posix() for file in set(after) - set(before))
    assert added == [".sums/shard-00000.bin", ".sums/shard-00001.bin", ".sums/shard-00002.bin"]
    assert {file: after[file] for file in before} == before
    tm.verify(store, add_page_sums=True)
    assert tm.verify(store).shards == 3


def test_a_damaged_shard_gets_no_page_sums(store):
    flip(store / "shard-00001" / "sequence.bin", 5000)
    assert len(check_store(store, add_page_sums=True).problems) == 1
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
