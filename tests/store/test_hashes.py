import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store import StoreSpec, StoreWriter, check_store, open_store, verify
from tokenmill.store.hashes import EMPTY, compute_hashes, hash_records, hashes_file, read_hashes, write_hashes
from tokenmill.store.sections import footer_bytes

LENGTHS = [5, 0, 9, 1, 30, 12, 9]


def hashes_of(store):
    return np.concatenate([read_hashes(store, shard) for shard in range(store.num_shards)])


def test_every_document_has_the_hash_of_its_tokens_in_32_bits(make_store):
    path, tokens, offsets = make_store("web", LENGTHS, max_tokens_per_shard=20)
    store = open_store(path)
    assert store.num_shards > 2
    wanted = [
        xxhash.xxh3_64_intdigest(tokens[begin:end].astype("<u4").tobytes()) for begin, end in pairwise(offsets)
    ]
    assert hashes_of(store).tolist() == wanted
    assert wanted[1] == EMPTY


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_width_and_frame_of_a_document_do_not_count(dtype):
    ids = np.array([7, 8, 9], dtype)
    framed = np.array([1, 7, 8, 9, 2, 1, 2], dtype)
    tokenizer = {"bos_id": 1, "eos_id": 2}
    plain = hash_records("seq", tokenizer, {"sequence": ids}, {"documents": np.array([0, 3, 3])})
    with_frame = hash_records("seq", tokenizer, {"sequence": framed}, {"documents": np.array([0, 5, 7])})
    assert plain.tolist() == with_frame.tolist() == [xxhash.xxh3_64_intdigest(ids.astype("<u4").tobytes()), EMPTY]


def test_a_record_of_several_arrays_has_one_hash_that_all_of_them_change():
    values = {"prompts": np.array([1, 2, 3]), "responses": np.array([4, 5, 6, 7])}
    offsets = {
        "prompts": np.array([0, 2, 3]),
        "groups": np.array([0, 2, 3]),
        "responses": np.array([0, 1, 3, 4]),
    }
    one = hash_records("grpo", {}, values, offsets)
    assert one.size == len(set(one.tolist())) == 2
    cut = {**offsets, "responses": np.array([0, 2, 3, 4])}
    other = hash_records("grpo", {}, values, cut)
    assert other[0] != one[0]
    assert other[1] == one[1]
    changed = hash_records("grpo", {}, {**values, "prompts": np.array([1, 2, 9])}, offsets)
    assert changed[0] == one[0]
    assert changed[1] != one[1]


def test_hashes_of_an_h5_store_are_those_of_a_folder(tmp_path, tokenizer_identity, make_store):
    path, tokens, offsets = make_store("web", LENGTHS)
    spec = StoreSpec(
        keys={"sequence": "<u2"}, tokenizer=tokenizer_identity(50_000), recipe={"kind": "text"}, storage="h5"
    )
    with StoreWriter(tmp_path / "h5", spec) as writer:
        writer.append({"sequence": tokens}, offsets)
        writer.commit()
    assert hashes_of(open_store(tmp_path / "h5")).tolist() == hashes_of(open_store(path)).tolist()


def test_an_old_store_gets_the_same_hashes_later_and_nothing_else_changes(make_store):
    path, _, _ = make_store("web", LENGTHS, max_tokens_per_shard=20)
    kept = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    shutil.rmtree(path / ".hashes")
    assert read_hashes(open_store(path), 0) is None
    verify(path)
    assert write_hashes(open_store(path)) == open_store(path).num_shards
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == kept
    assert write_hashes(open_store(path)) == 0


def test_hashes_of_several_stores_are_those_of_each(make_store):
    first, second = (make_store(name, LENGTHS, seed=seed)[0] for seed, name in enumerate(("a", "b")))
    joined = open_store([first, second])
    wanted = [*hashes_of(open_store(first)), *hashes_of(open_store(second))]
    assert hashes_of(joined).tolist() == wanted
    with pytest.raises(StoreError, match=r"hashes can be added to one store of ours, got .* several stores"):
        write_hashes(joined)


def test_a_file_of_another_shard_or_a_damaged_one_is_refused_and_mended(make_store):
    path, _, _ = make_store("web", LENGTHS, max_tokens_per_shard=20)
    first, second = hashes_file(path, 0), hashes_file(path, 1)
    shutil.copy(second, first)
    with pytest.raises(StoreCorruptError, match="hashes of another shard; delete it"):
        read_hashes(open_store(path), 0)
    first.write_bytes(second.read_bytes()[:-3])
    assert [str(problem) for problem in check_store(path).problems] == [
        f"{first}: damaged hashes; delete it, then run `tokenmill verify --add-hashes`"
    ]
    assert write_hashes(open_store(path)) == 1
    verify(path)


def test_verify_finds_a_hash_that_is_not_that_of_the_tokens(make_store):
    path, _, _ = make_store("web", LENGTHS)
    file = hashes_file(path, 0)
    data = bytearray(file.read_bytes())
    data[8] ^= 1
    file.write_bytes(data)
    assert "damaged hashes; delete it" in str(check_store(path).problems[0])
    with pytest.raises(StoreCorruptError, match=rf"{file}: damaged hashes; delete it"):
        read_hashes(open_store(path), 0)
    data[8:16] = data[16:24] = bytes(8)  # hashes of other tokens, whose checksum is right
    (end,) = np.frombuffer(data[-16:-8], "<u8")
    footer = json.loads(data[-16 - int(end) : -16])
    begin, size, _ = footer["sections"]["hashes"]
    footer["sections"]["hashes"][2] = xxhash.xxh3_128_hexdigest(data[begin : begin + size])
    file.write_bytes(data[: begin + size] + footer_bytes(footer))
    assert "hashes of other documents; delete it" in str(check_store(path).problems[0])
    assert np.concatenate(list(compute_hashes(open_store(path), 0))).size == len(LENGTHS)
