from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError, StoreMissingError
from tokenmill.store import check_store, open_store, verify

GOLDEN = Path(__file__).parent / "golden" / "v1"
FILES = [
    "manifest.json",
    "shard-00000/sequence.bin",
    "shard-00000/documents.bin",
    "shard-00001/sequence.bin",
    "shard-00001/documents.bin",
]


@pytest.fixture
def golden(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "web"))


def test_the_report_counts_what_was_read(golden):
    seen: list[int] = []
    report = verify(golden, progress=seen.append)
    assert (report.shards, report.files, report.documents, report.tokens) == (2, 4, 4, 15)
    assert report.bytes == sum((GOLDEN / name).stat().st_size for name in FILES[1:]) == sum(seen)
    assert report.fingerprint == open_store(golden).manifest.fingerprint


def test_all_that_is_wrong_is_told_at_once_and_each_file_once(golden):
    """[S.f]"""
    (golden / "shard-00000" / "sequence.bin").unlink()
    (golden / "shard-00000" / "documents.bin").write_bytes(b"short")
    ids = np.fromfile(golden / "shard-00001" / "sequence.bin", "<u2")
    ids[-1] = 60_000  # a wrong checksum, and an id above the vocabulary
    ids.tofile(golden / "shard-00001" / "sequence.bin")
    (golden / "shard-00007").mkdir()
    report = check_store(golden)
    assert [str(problem).split(": ")[0].removeprefix(f"{golden}/") for problem in report.problems] == [
        "shard-00007",
        "shard-00000/sequence.bin",
        "shard-00000/documents.bin",
        "shard-00001/sequence.bin",
    ]
    assert (report.documents, report.tokens) == (4, 15)
    with pytest.raises(StoreCorruptError) as caught:
        verify(golden)
    assert str(caught.value).splitlines() == [str(problem) for problem in report.problems]


def test_a_damaged_index_is_the_only_problem_of_its_shard(golden):
    """[S.f] The ids of the shard are read and right, although nothing says where documents start."""
    file = golden / "shard-00000" / "documents.bin"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    (problem,) = check_store(golden).problems
    assert str(problem).startswith(f"{file}: checksum must be ")


def test_the_message_of_an_error_stays_readable(make_store):
    path, _, _ = make_store("web", [1] * 30, max_tokens_per_shard=1)
    for file in path.glob("*/sequence.bin"):
        file.unlink()
    assert len(check_store(path).problems) == 30
    with pytest.raises(StoreMissingError) as caught:
        verify(path)
    assert str(caught.value).splitlines()[20:] == ["and 10 more"]


def test_a_whole_store_has_no_problems_and_a_missing_one_has_one(golden, tmp_path):
    assert check_store(golden) == verify(golden)
    report = check_store(tmp_path / "nothing")
    assert [type(problem) for problem in report.problems] == [StoreMissingError]


@pytest.mark.parametrize("name", FILES)
def test_any_change_of_any_byte_is_found_and_the_file_is_named(golden, name):
    """[S.f]"""
    file = golden / name
    good = file.read_bytes()
    # In place, as a failing disk would: each byte, one bit of it, another for the next byte.
    with file.open("r+b") as handle:
        for position in range(len(good)):
            for bit in {position % 8, (position * 5 + 3) % 8}:
                handle.seek(position)
                handle.write(bytes([good[position] ^ (1 << bit)]))
                handle.flush()
                with pytest.raises(StoreError) as caught:
                    verify(golden)
                assert name in str(caught.value), (position, bit)
            handle.seek(position)
            handle.write(good[position : position + 1])
            handle.flush()
    assert verify(golden).tokens == 15


@pytest.mark.deep
@pytest.mark.parametrize("name", FILES)
def test_any_change_of_any_bit_is_found(golden, name):
    """[S.f]"""
    file = golden / name
    good = file.read_bytes()
    for position in range(len(good)):
        for bit in range(8):
            file.write_bytes(good[:position] + bytes([good[position] ^ (1 << bit)]) + good[position + 1 :])
            with pytest.raises(StoreError, match=name):
                verify(golden)


@pytest.mark.parametrize("name", FILES)
def test_truncated_lengthened_and_cut_files_are_found_at_every_length(golden, name):
    """[S.f, S.e]"""
    file = golden / name
    good = file.read_bytes()
    for length in range(0, len(good), 1 if len(good) < 64 else 37):
        file.write_bytes(good[:length])
        with pytest.raises(StoreCorruptError, match=name):
            verify(golden)
    for more in (b"\0", b"\n", b" ", good):
        file.write_bytes(good + more)
        with pytest.raises(StoreCorruptError, match=name):
            verify(golden)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_is_found(golden, name):
    """[S.f]"""
    (golden / name).unlink()
    with pytest.raises(StoreMissingError, match=rf"{name}: must exist.*; copy the store again"):
        verify(golden)


def test_a_missing_manifest_or_store_is_found(golden):
    """[S.f]"""
    (golden / "manifest.json").unlink()
    with pytest.raises(StoreMissingError, match=r"no store at this path: .*web \("):
        verify(golden)
    shutil.rmtree(golden)
    with pytest.raises(
        StoreMissingError, match=r"web \(the folder does not exist\); run `tokenmill prepare`, or fix the path"
    ):
        verify(golden)


@pytest.mark.parametrize(("shard", "found"), [("shard-00000", r"shard-00007"), ("shard-00001", r"shard-00007")])
def test_a_renamed_shard_is_found(golden, shard, found):
    """[S.f]"""
    (golden / shard).rename(golden / "shard-00007")
    with pytest.raises(StoreError, match=found):
        verify(golden)
    (golden / "shard-00007").rename(golden / "old")
    with pytest.raises(StoreMissingError, match=rf"{shard}/sequence\.bin: must exist"):
        verify(golden)


def test_swapped_shards_are_found(make_store):
    """[S.f]"""
    # Of equal sizes, so that only the content tells.
    path, _, _ = make_store("web", [4, 4], max_tokens_per_shard=4)
    for name in ("sequence.bin", "documents.bin"):
        assert (path / "shard-00000" / name).stat().st_size == (path / "shard-00001" / name).stat().st_size
    (path / "shard-00000").rename(path / "x")
    (path / "shard-00001").rename(path / "shard-00000")
    (path / "x").rename(path / "shard-00001")
    with pytest.raises(
        StoreCorruptError, match=r"shard-00000/sequence\.bin: checksum must be \w{32}, got \w{32}; copy"
    ):
        verify(path)


def test_swapped_files_of_one_shard_are_found(golden):
    """[S.f]"""
    shard = golden / "shard-00000"
    (shard / "sequence.bin").rename(shard / "x")
    (shard / "documents.bin").rename(shard / "sequence.bin")
    (shard / "x").rename(shard / "documents.bin")
    with pytest.raises(StoreCorruptError, match=r"shard-00000/sequence\.bin: must have 12 bytes, got 36"):
        verify(golden)


def test_a_file_of_another_store_is_found(make_store):
    """[S.f]"""
    path, _, _ = make_store("web", [5, 4])
    other, _, _ = make_store("other", [5, 4], seed=1)
    shutil.copy(other / "shard-00000" / "sequence.bin", path / "shard-00000" / "sequence.bin")
    with pytest.raises(StoreCorruptError, match=r"web/shard-00000/sequence\.bin: checksum"):
        verify(path)


def test_a_shard_that_is_not_listed_is_found(golden):
    """[S.f]"""
    shutil.copytree(golden / "shard-00000", golden / "shard-00002")
    with pytest.raises(StoreCorruptError, match=r"shard-00002: not listed in manifest\.json; if"):
        verify(golden)


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000", "shard-00001/sequence.bin"])
def test_a_link_in_the_store_is_found_even_if_it_leads_to_the_right_bytes(golden, tmp_path, name):
    """[S.d]"""
    (golden / name).rename(tmp_path / "moved")
    (golden / name).symlink_to(tmp_path / "moved")
    with pytest.raises(StoreCorruptError, match=name):
        verify(golden)


def test_a_store_behind_a_link_to_its_folder_is_whole(golden, tmp_path):
    (tmp_path / "link").symlink_to(golden)
    assert verify(tmp_path / "link").tokens == 15


def test_an_edited_manifest_is_found_even_when_only_its_white_space_changed(golden):
    """[S.f]"""
    file = golden / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"kind": "seq"', b'"kind":  "seq"'))
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: not formatted as tokenmill writes it"):
        verify(golden)


def sign(store: Path, name: str, edit_manifest) -> None:
    """Give a changed file a right checksum, as a forger or a faulty writer would."""
    shard, file = name.split("/")
    data = (store / name).read_bytes()

    def change(body):
        entry = next(item for item in body["shards"] if item["name"] == shard)
        entry["files"][file] = {"bytes": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}

    edit_manifest(store, change)


def test_a_forged_checksum_of_good_files_is_found(golden, edit_manifest):
    """[S.f]"""
    edit_manifest(golden, lambda body: body["shards"][1]["files"]["sequence.bin"].update(xxh3="0" * 32))
    with pytest.raises(StoreCorruptError, match=r"shard-00001/sequence\.bin: checksum must be 0{32}, got"):
        verify(golden)


def test_an_id_above_the_vocabulary_is_found(golden, edit_manifest):
    """[T2.a]"""
    edit_manifest(golden, lambda body: body["tokenizer"].update(vocab_size=257, eos_id=None, pad_id=None))
    with pytest.raises(
        StoreError, match=r"shard-00000/sequence\.bin: token ids must be below .* 257, got 257; prepare"
    ):
        verify(golden)


def test_a_signed_id_above_the_vocabulary_is_found_in_the_last_shard(golden, edit_manifest):
    """[T2.a]"""
    ids = np.fromfile(golden / "shard-00001" / "sequence.bin", "<u2")
    ids[-1] = 259
    ids.tofile(golden / "shard-00001" / "sequence.bin")
    sign(golden, "shard-00001/sequence.bin", edit_manifest)
    with pytest.raises(StoreError, match=r"shard-00001/sequence\.bin: token ids must be below .* 259, got 259"):
        verify(golden)


@pytest.mark.parametrize(
    ("offsets", "anchor", "rule"),
    [
        ([1, 4, 6, 6], 0, "offsets must start at 0, got 1"),
        ([0, 4, 6, 5], 0, "offsets must end at 6, got 5"),
        ([0, 4, 6, 7], 0, "offsets must end at 6, got 7"),
        ([0, 5, 4, 6], 0, "offsets must not decrease"),
        ([0, 2**64 - 1, 6, 6], 0, "offsets must not decrease"),
        ([0, 4, 6, 6], 1, "anchors must name the document"),
        ([0, 4, 6, 6], 2, "anchors must name the document"),
        ([0, 4, 6, 6], 3, "anchors must name the document"),
        ([0, 4, 6, 6], 2**32 - 1, "anchors must name the document"),
        ([0, 0, 6, 6], 0, "anchors must name the document"),
    ],
)
def test_a_signed_index_that_cannot_be_right_is_found(golden, edit_manifest, offsets, anchor, rule):
    """[S.f, S.e]"""
    data = np.array(offsets, "<u8").tobytes() + np.array([anchor], "<u4").tobytes()
    (golden / "shard-00000" / "documents.bin").write_bytes(data)
    sign(golden, "shard-00000/documents.bin", edit_manifest)
    with pytest.raises(StoreCorruptError, match=rf"shard-00000/documents\.bin: {rule}"):
        verify(golden)


def test_a_store_of_several_megabytes_is_verified_in_blocks(make_store):
    """[S.f]"""
    path, tokens, _ = make_store("web", [10, 5_000_000, 0, 7], dtype="<u4")
    seen: list[int] = []
    report = verify(path, progress=seen.append)
    assert report.tokens == tokens.size == 5_000_017
    assert max(seen) <= 1 << 24
    assert len(seen) == 5
    file = path / "shard-00000" / "sequence.bin"
    with file.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        handle.write(b"\xff")
    with pytest.raises(StoreCorruptError, match=r"sequence\.bin: checksum"):
        verify(path)
