from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tokenmill.errors import StoreCorruptError, StoreMissingError
from tokenmill.store import StoreSpec, StoreWriter, open_store
from tokenmill.store.maps import MAX_MAPS, FileRequest, MapCache, map_file

NUM_SHARDS = 200


@pytest.fixture
def files(tmp_path):
    requests = []
    for i in range(10):
        path = tmp_path / f"{i}.bin"
        path.write_bytes(bytes([i] * (i + 1)))
        requests.append(FileRequest(path, i + 1))
    return requests


def mapped_in_this_process(folder: Path) -> int:
    """Count the files below a folder that the system says are mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list the maps of a process")
    return len({line.split()[-1] for line in maps.read_text().splitlines() if f"{folder}/" in line})


def test_the_limit_is_1024():
    """[S1.a]"""
    assert MAX_MAPS == 1024
    assert MapCache().limit == 64  # as the tests have it


def test_maps_come_in_the_order_of_the_requests(files):
    cache = MapCache()
    requests = [files[3], files[0], files[3]]
    opened = cache.open(requests)
    assert [file.path for file in opened] == [request.path for request in requests]
    assert [file.data.tolist() for file in opened] == [[3, 3, 3, 3], [0], [3, 3, 3, 3]]
    assert [file.address for file in opened] == [file.data.ctypes.data for file in opened]
    assert opened[0] is opened[2]
    assert len(cache._maps) == 2


def test_a_map_is_read_only(files):
    (file,) = MapCache().open(files[:1])
    with pytest.raises(ValueError, match="read-only"):
        file.data[0] = 1


def test_an_empty_file_has_no_address(tmp_path):
    (tmp_path / "empty").touch()
    file = map_file(FileRequest(tmp_path / "empty", 0))
    assert (file.data.size, file.address) == (0, 0)


def test_the_least_recently_used_map_is_evicted(files):
    cache = MapCache(limit=2)
    for request in (files[0], files[1], files[0], files[2]):
        cache.open([request])
    assert list(cache._maps) == [files[0], files[2]]


def test_an_evicted_map_stays_valid_for_its_readers_and_is_closed_after_the_last(files):
    """[S1.a, S.g]"""
    cache = MapCache(limit=2)
    opened = cache.open(files[:5])
    assert list(cache._maps) == files[3:5]
    assert [file.data.tolist() for file in opened] == [[i] * (i + 1) for i in range(5)]
    folder = files[0].path.parent
    assert mapped_in_this_process(folder) == 5
    del opened[1:3]
    assert mapped_in_this_process(folder) == 3
    del opened
    assert mapped_in_this_process(folder) == 2


def test_one_map_serves_all_readers(files):
    cache = MapCache()
    (first,), (second,) = cache.open(files[:1]), cache.open(files[:1])
    assert first is second


def test_a_failed_opening_keeps_no_more_maps_than_the_limit(files, tmp_path):
    cache = MapCache(limit=2)
    for _ in range(3):
        with pytest.raises(StoreMissingError, match="missing"):
            cache.open([*files[:4], FileRequest(tmp_path / "missing", 1)])
    gc.collect()
    assert mapped_in_this_process(files[0].path.parent) == 2


def test_what_was_read_of_a_truncated_file_is_refused_and_the_file_mapped_again(tmp_path):
    """[S.g]"""
    path = tmp_path / "file"
    path.write_bytes(b"\1" * 5000)
    maps, request = MapCache(), FileRequest(path, 5000)

    opened = maps.open([request])
    os.truncate(path, 100)
    assert int(opened[0].data[:4096].sum()) == 100  # a part of a page reads as zeros
    with pytest.raises(StoreCorruptError, match="file: must keep its 5000 bytes while it is read, got 100;"):
        maps.check(opened)
    assert len(maps._maps) == 0
    path.write_bytes(b"\1" * 5000)
    assert int(maps.open([request])[0].data.sum()) == 5000


def test_a_file_that_was_truncated_since_it_was_mapped_is_not_handed_out(tmp_path):
    """[S.g]"""
    path = tmp_path / "file"
    path.write_bytes(b"\1" * 5000)
    maps, request = MapCache(), FileRequest(path, 5000)
    maps.open([request])
    os.truncate(path, 0)
    with pytest.raises(StoreCorruptError, match="file: must keep its 5000 bytes while it is read, got 0;"):
        maps.open([request])
    assert len(maps._maps) == 0


def test_reading_stores_changes_no_signal_handler(tmp_path):
    """[S.g] In a training process SIGBUS belongs to the user, as to torch's workers."""
    (tmp_path / "file").write_bytes(b"1")
    code = """if True:
        import sys
        from pathlib import Path
        import tokenmill
        from tokenmill.store.maps import FileRequest, map_file
        file = map_file(FileRequest(Path(sys.argv[1]), 1))
        print(next(line for line in open("/proc/self/status") if line.startswith("SigCgt")))
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not list the handlers of a process")
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    caught = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[1], 16)
    assert not caught >> (signal.SIGBUS - 1) & 1


def test_a_missing_file_is_named_with_the_way_out(tmp_path):
    """[S.f]"""
    for path in (tmp_path / "no.bin", tmp_path / "no" / "no.bin"):
        with pytest.raises(
            StoreMissingError, match=r"no\.bin: must exist, .*got nothing there; copy the store again"
        ):
            map_file(FileRequest(path, 4))
    (tmp_path / "file").touch()
    with pytest.raises(StoreMissingError, match=r"file/x\.bin: must exist"):
        map_file(FileRequest(tmp_path / "file" / "x.bin", 4))


@pytest.mark.parametrize("size", [0, 3, 5, 4096])
def test_a_file_of_another_size_is_never_mapped(tmp_path, size):
    """[S.e, S.f]"""
    path = tmp_path / "a.bin"
    path.write_bytes(b"\1" * size)
    with pytest.raises(StoreCorruptError, match=rf"a\.bin: must have 4 bytes, got {size}; copy"):
        map_file(FileRequest(path, 4))


def test_a_link_in_place_of_a_file_or_folder_is_not_followed(tmp_path):
    """[S.d]"""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.bin").write_bytes(b"1234")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.bin").symlink_to(tmp_path / "out" / "a.bin")
    (tmp_path / "folder").symlink_to(tmp_path / "out")
    with pytest.raises(StoreCorruptError, match=r"in/a\.bin: must be a plain file, got a link"):
        map_file(FileRequest(tmp_path / "in" / "a.bin", 4))
    with pytest.raises(StoreCorruptError, match=r"folder: must be a folder of the store, got a link"):
        map_file(FileRequest(tmp_path / "folder" / "a.bin", 4))


@pytest.mark.parametrize("size", [0, 4])
def test_a_pipe_or_folder_in_place_of_a_file_is_refused_at_once(tmp_path, size):
    """[S.d]"""
    os.mkfifo(tmp_path / "pipe.bin")
    (tmp_path / "folder.bin").mkdir()
    for name in ("pipe.bin", "folder.bin"):
        with pytest.raises(StoreCorruptError, match=rf"{name}: must be a plain file"):
            map_file(FileRequest(tmp_path / name, size))


@pytest.fixture(scope="module")
def wide_store(tmp_path_factory):
    """Write a store of 200 shards of 3 tokens."""
    tokens = np.arange(3 * NUM_SHARDS, dtype="<u2")
    spec = StoreSpec(keys={"sequence": "<u2"}, tokenizer={"vocab_size": 1000}, recipe={}, max_tokens_per_shard=3)
    path = tmp_path_factory.mktemp("wide") / "wide"
    with StoreWriter(path, spec) as writer:
        writer.append({"sequence": tokens}, np.arange(0, tokens.size + 1, 3))
        writer.commit()
    return path, tokens


def test_at_most_64_maps_are_open_however_many_shards_are_read(wide_store):
    """[S1.a, K1.a]"""
    path, tokens = wide_store
    store = open_store(path)
    assert store.num_shards == NUM_SHARDS
    for document in range(NUM_SHARDS):
        assert store.fetch_record(document, "sequence").tolist() == tokens[3 * document : 3 * document + 3].tolist()
        assert len(store._maps._maps) <= 64
        assert mapped_in_this_process(path) <= 64
    assert store.fetch(0, store.num_tokens, "sequence").tolist() == tokens.tolist()
    assert store.document_offsets(0, NUM_SHARDS).tolist() == list(range(0, tokens.size + 1, 3))
    assert len(store._maps._maps) == 64
    assert mapped_in_this_process(path) == 64
    del store
    gc.collect()
    assert mapped_in_this_process(path) == 0


def test_at_most_64_maps_are_open_with_several_threads_and_stores(wide_store):
    """[S1.a]"""
    path, tokens = wide_store
    maps = MapCache()
    stores = [open_store(path, maps=maps) for _ in range(2)]
    most, start = [], threading.Barrier(8)

    def read(seed: int) -> None:
        start.wait()
        for document in np.random.default_rng(seed).integers(0, NUM_SHARDS, 150).tolist():
            found = stores[seed % 2].fetch_record(document, "sequence")
            assert found.tolist() == tokens[3 * document : 3 * document + 3].tolist()
            most.append(len(maps._maps))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(read, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert (len(most), max(most)) == (8 * 150, 64)
    assert mapped_in_this_process(path) == 64
