"""What was found is kept: opening a large file again reads samples, not the file."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import xxhash

from tokenmill.store import open_store
from tokenmill.store.maps import FileRequest, MemoryRequest

COUNT = 1 << 20


@pytest.fixture
def large(tmp_path):
    """Make a file of a million ids with an EOS after every hundredth."""
    tokens = np.random.default_rng(0).integers(2, 30_000, COUNT).astype(np.uint16)
    tokens[99::100] = 1
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "a.npy", tokens)
    return tmp_path / "data" / "a.npy"


def offsets_of(store):
    return store.document_offsets(0, store.num_documents).tolist()


EXPECTED = [*range(0, COUNT, 100), COUNT]


def test_a_large_index_is_kept_beside_the_data_and_a_small_one_in_memory(large, tmp_path):
    store = open_store(large, eos_id=1)
    request = store.file(0, "documents.bin")
    assert isinstance(request, FileRequest)
    assert request.path.parent == large.parent / ".tokenmill"
    assert offsets_of(store) == EXPECTED
    np.save(tmp_path / "b.npy", np.arange(50, dtype=np.uint16))
    assert isinstance(open_store(tmp_path / "b.npy", eos_id=1).file(0, "documents.bin"), MemoryRequest)
    assert not (tmp_path / ".tokenmill").exists()


def test_opening_again_does_not_read_the_data(large):
    """[S1.a] Only samples: 64 blocks of 4 KiB, whatever the size of the file."""
    program = """
import os, sys
import tokenmill.store.foreign.index as index
from tokenmill.store import open_store
looks = []
look = index._look
index._look = lambda *arguments, **options: looks.append(1) or look(*arguments, **options)
read = 0
pread = os.pread
def counted(descriptor, size, place):
    global read
    data = pread(descriptor, size, place)
    read += len(data)
    return data
os.pread = counted
store = open_store(sys.argv[1], eos_id=1)
print(len(looks), read <= 64 * 4096 + 8, store.num_documents, store.fingerprint)
"""
    lines = [
        subprocess.run(
            [sys.executable, "-c", program, str(large)], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    first, second = (line.split() for line in lines)
    assert (first[0], second[0]) == ("1", "0")
    assert first[1:] == second[1:]
    assert second[1:3] == ["True", str(len(EXPECTED) - 1)]


def test_other_options_or_other_bytes_are_not_mistaken_for_the_kept_ones(large):
    assert offsets_of(open_store(large, eos_id=1)) == EXPECTED
    assert open_store(large).num_documents == 1
    tokens = np.load(large)
    tokens[99::100] = 2
    tokens[49::50] = 1
    np.save(large, tokens)
    assert open_store(large, eos_id=1).num_documents == -(-COUNT // 50)


@pytest.mark.parametrize("damage", ["cut", "flip an offset", "flip the footer", "empty", "junk"])
def test_a_damaged_index_is_made_again(large, damage):
    path = open_store(large, eos_id=1).file(0, "documents.bin").path
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[:-5]
    elif damage == "empty":
        data = bytearray()
    elif damage == "junk":
        data = bytearray(b"\xff" * 400)
    else:
        data[1000 if damage == "flip an offset" else -40] ^= 1
    path.write_bytes(data)
    assert offsets_of(open_store(large, eos_id=1)) == EXPECTED


def test_an_index_of_other_sizes_is_made_again_even_if_its_checksums_are_right(large):
    """[S.e] Kernels read by address: a forged file must not lead them past its end."""
    path = open_store(large, eos_id=1).file(0, "documents.bin").path
    data = path.read_bytes()
    length = int.from_bytes(data[-16:-8], "little")
    footer = msgspec.json.decode(data[-16 - length : -16])
    for forged in (
        {**footer, "facts": {**footer["facts"], "items": {"documents": 10**9}}},
        {**footer, "facts": {"items": 3}},
        {**footer, "sections": {}},
    ):
        text = msgspec.json.encode(forged)
        path.write_bytes(
            data[: -16 - length] + text + len(text).to_bytes(8, "little") + xxhash.xxh3_64_digest(text)
        )
        assert offsets_of(open_store(large, eos_id=1)) == EXPECTED


def test_a_large_mask_is_copied_once_with_a_byte_a_token(tmp_path, tools):
    flags = (np.arange(COUNT) % 3 > 0).astype(np.int32)
    tools.save_bin(tmp_path, {"sequence": np.zeros(COUNT, np.int32), "loss_mask": flags})
    for _ in range(2):
        store = open_store(tmp_path)
        request = store.file(0, "loss_mask.bin")
        assert (request.path.parent.name, request.wanted) == (".tokenmill", COUNT)
        assert np.array_equal(store.fetch(0, COUNT, "loss_mask"), flags)
    assert len(list((tmp_path / ".tokenmill").iterdir())) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where nobody may")
def test_a_folder_that_cannot_be_written_to_is_left_alone_when_read_only(large):
    large.parent.chmod(0o555)
    try:
        assert open_store(large, eos_id=1).num_documents == len(EXPECTED) - 1
    finally:
        large.parent.chmod(0o755)


def test_where_nothing_can_be_kept_beside_the_data_a_folder_of_the_users_is_used(large, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (large.parent / ".tokenmill").write_text("in the way")
    request = open_store(large, eos_id=1).file(0, "documents.bin")
    assert request.path.parent == tmp_path / "temporary" / f"tokenmill-foreign-{os.getuid()}"
    assert request.path.parent.stat().st_mode & 0o777 == 0o700
    before = request.path.stat().st_mtime_ns
    assert offsets_of(open_store(large, eos_id=1)) == EXPECTED
    assert request.path.stat().st_mtime_ns == before


def test_processes_that_open_at_once_agree(large):
    """[C1.c]"""
    program = (
        "import sys\nfrom tokenmill.store import open_store\nprint(open_store(sys.argv[1], eos_id=1).fingerprint)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(large)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    found = {process.communicate()[0] for process in running}
    assert found == {open_store(large, eos_id=1).fingerprint + "\n"}
    assert [file.suffix for file in (large.parent / ".tokenmill").iterdir()] == [".index"]
