from __future__ import annotations

import shutil
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ConfigError, PlanError, StoreCorruptError, StoreError, StoreMissingError
from tokenmill.store import StoreSpec, StoreWriter, open_store
from tokenmill.store.maps import MapCache
from tokenmill.store.remote.upload import upload
from tokenmill.types import RemoteOptions

LENGTHS = st.lists(st.integers(0, 12), max_size=20)


@given(lengths=LENGTHS, size=st.integers(1, 15), dtype=st.sampled_from(["|u1", "<u2", "<u4"]), data=st.data())
def test_fetch_across_shards_equals_the_stream(make_store, lengths, size, dtype, data):
    path, tokens, _ = make_store("web", lengths, max_tokens_per_shard=size, dtype=dtype)
    store = open_store(path, maps=MapCache(limit=2))
    for _ in range(5):
        begin = data.draw(st.integers(0, tokens.size))
        end = data.draw(st.integers(begin, tokens.size))
        found = store.fetch(begin, end, "sequence")
        assert found.dtype == np.dtype(dtype)
        assert found.tolist() == tokens[begin:end].tolist()


@given(lengths=LENGTHS, size=st.integers(1, 15))
def test_fetch_record_gives_every_document(make_store, lengths, size):
    path, tokens, offsets = make_store("web", lengths, max_tokens_per_shard=size)
    store = open_store(path, maps=MapCache(limit=2))
    assert store.num_documents == len(lengths)
    for document, (begin, end) in enumerate(pairwise(offsets.tolist())):
        assert store.document_bounds(document) == (begin, end)
        assert store.fetch_record(document, "sequence").tolist() == tokens[begin:end].tolist()


@given(lengths=LENGTHS.filter(bool), size=st.integers(1, 15), data=st.data())
def test_document_offsets_are_those_of_the_stream_for_any_range(make_store, lengths, size, data):
    path, _, offsets = make_store("web", lengths, max_tokens_per_shard=size)
    store = open_store(path)
    begin = data.draw(st.integers(0, len(lengths) - 1))
    end = data.draw(st.integers(begin + 1, len(lengths)))
    assert store.document_offsets(begin, end).tolist() == offsets[begin : end + 1].tolist()


def test_an_empty_store_opens_and_has_nothing(make_store):
    path, _, _ = make_store("empty", [])
    store = open_store(path)
    assert (store.num_shards, store.num_documents, store.num_tokens) == (0, 0, 0)
    assert store.fetch(0, 0, "sequence").tolist() == []
    assert store.fetch(0, 0, "sequence").dtype == np.dtype("<u2")
    with pytest.raises(PlanError, match=r"documents must lie within 0:0, got 0:1"):
        store.fetch_record(0, "sequence")


def test_a_store_of_empty_documents_only(make_store):
    path, _, _ = make_store("empty", [0, 0, 0])
    store = open_store(path)
    assert (store.num_documents, store.num_tokens) == (3, 0)
    assert [store.fetch_record(i, "sequence").tolist() for i in range(3)] == [[], [], []]


def test_several_keys_come_as_a_dict_in_the_order_asked_for(tmp_path):
    spec = StoreSpec(
        keys={"sequence": "<u2", "loss_mask": "|u1"},
        tokenizer={"vocab_size": 300},
        recipe={},
        kind="sft",
        max_tokens_per_shard=3,
    )
    arrays = {"sequence": np.array([5, 6, 299, 8], "<u2"), "loss_mask": np.array([0, 1, 1, 0], "|u1")}
    with StoreWriter(tmp_path / "chat", spec) as writer:
        writer.append(arrays, np.array([0, 2, 4]))
        writer.commit()
    store = open_store(tmp_path / "chat")
    assert store.keys == ("sequence", "loss_mask")
    found = store.fetch(1, 4, ["loss_mask", "sequence"])
    assert [(key, values.tolist()) for key, values in found.items()] == [
        ("loss_mask", [1, 1, 0]),
        ("sequence", [6, 299, 8]),
    ]
    record = store.fetch_record(1, ("sequence", "loss_mask"))
    assert [(key, values.tolist()) for key, values in record.items()] == [
        ("sequence", [299, 8]),
        ("loss_mask", [1, 0]),
    ]


def test_reads_are_copies_that_the_caller_may_change(make_store):
    path, tokens, _ = make_store("web", [4])
    store = open_store(path)
    found = store.fetch(0, 4, "sequence")
    found += 1
    assert store.fetch(0, 4, "sequence").tolist() == tokens.tolist()


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (0, 8), (5, 4), (8, 8), (-3, -1)])
def test_a_range_outside_the_stream_is_refused(make_store, begin, end):
    path, _, _ = make_store("web", [4, 3])
    with pytest.raises(PlanError, match=rf"a range must lie within 0:7, got {begin}:{end}; shorten it"):
        open_store(path).fetch(begin, end, "sequence")


@pytest.mark.parametrize("document", [-1, 2, 10**12])
def test_a_document_outside_the_store_is_refused(make_store, document):
    path, _, _ = make_store("web", [4, 3])
    with pytest.raises(PlanError, match=rf"documents must lie within 0:2, got {document}:.*; count from 0"):
        open_store(path).fetch_record(document, "sequence")


@pytest.mark.parametrize("end", [0, 4])
def test_an_unknown_key_names_the_nearest(make_store, end):
    path, _, _ = make_store("web", [4, 3])
    with pytest.raises(StoreError, match=r"no such array: 'sequenec'; did you mean 'sequence'"):
        open_store(path).fetch(0, end, "sequenec")


def test_a_store_may_be_moved_and_opened_by_a_relative_path(make_store, tmp_path, monkeypatch):
    path, tokens, _ = make_store("web", [4, 3])
    fingerprint = open_store(path).manifest.fingerprint
    shutil.move(path, tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    store = open_store("elsewhere")
    assert store.fetch(0, 7, "sequence").tolist() == tokens.tolist()
    assert store.manifest.fingerprint == fingerprint


@pytest.mark.parametrize("name", ["sequence.bin", "documents.bin"])
@pytest.mark.parametrize("change", [-1, -2, +1, +2, "empty"])
def test_a_file_whose_size_changed_is_an_error_and_never_tokens(make_store, name, change):
    """[S.e, S.f]"""
    path, tokens, _ = make_store("web", [4, 3, 2], max_tokens_per_shard=4)
    file = path / "shard-00001" / name
    data = file.read_bytes()
    file.write_bytes(b"" if change == "empty" else data[:change] if change < 0 else data + b"\0" * change)
    store = open_store(path)
    with pytest.raises(StoreCorruptError, match=rf"shard-00001/{name}: must have {len(data)} bytes, got "):
        store.fetch_record(1, "sequence")
    if name == "sequence.bin":
        with pytest.raises(StoreCorruptError, match=r"shard-00001/sequence\.bin"):
            store.fetch(0, 9, "sequence")
    # The shards that are whole still read.
    assert store.fetch_record(0, "sequence").tolist() == tokens[:4].tolist()
    assert store.fetch_record(2, "sequence").tolist() == tokens[7:].tolist()


def test_a_missing_shard_is_an_error_that_names_its_file(make_store):
    """[S.f]"""
    path, _, _ = make_store("web", [4, 3], max_tokens_per_shard=4)
    shutil.rmtree(path / "shard-00001")
    with pytest.raises(StoreMissingError, match=r"shard-00001/sequence\.bin: must exist, .*; copy the store again"):
        open_store(path).fetch(0, 7, "sequence")
    with pytest.raises(StoreMissingError, match=r"shard-00001/documents\.bin: must exist"):
        open_store(path).fetch_record(1, "sequence")


def test_a_shard_that_is_a_link_out_of_the_store_is_not_followed(make_store, tmp_path):
    """[S.d]"""
    path, _, _ = make_store("web", [4])
    shutil.move(path / "shard-00000", tmp_path / "outside")
    (path / "shard-00000").symlink_to(tmp_path / "outside")
    with pytest.raises(StoreCorruptError, match=r"shard-00000: must be a folder of the store, got a link"):
        open_store(path).fetch(0, 4, "sequence")


def test_offsets_that_point_outside_the_shard_are_an_error(make_store):
    """[S.f]"""
    path, _, _ = make_store("web", [4, 3])
    file = path / "shard-00000" / "documents.bin"
    data = bytearray(file.read_bytes())
    data[8:16] = (2**63 + 5).to_bytes(8, "little")
    file.write_bytes(data)
    store = open_store(path)
    for document in (0, 1):
        with pytest.raises((PlanError, StoreCorruptError), match=r"web"):
            store.fetch_record(document, "sequence")


@pytest.mark.parametrize("where", ["local", "joined"])
def test_offsets_are_verified_before_they_are_used(make_store, where):
    """[S.f] A flipped bit may leave offsets that are in order, and then only the checksum tells."""
    path, tokens, _ = make_store("web", [4, 3, 2], max_tokens_per_shard=7)
    stores = [path] if where == "local" else [make_store("first", [1])[0], path]
    flip_an_offset(open_store(stores))
    store = open_store(stores)
    begin = store.num_documents - 3
    assert store.fetch_record(begin + 2, "sequence").tolist() == tokens[7:].tolist()  # its shard is intact
    for _ in range(2):
        with pytest.raises(StoreCorruptError, match=r"checksum must be \w+, got \w+; copy the store again"):
            store.fetch_record(begin, "sequence")


def test_the_copy_of_remote_offsets_is_downloaded_again_where_it_is_damaged(make_store, tmp_path):
    """[S.f]"""
    path, tokens, _ = make_store("web", [4, 3, 2], max_tokens_per_shard=7)
    address, remote = f"file://{tmp_path}/remote", RemoteOptions(mirror=str(tmp_path / "mirror"))
    upload(path, address)
    flip_an_offset(open_store(address, remote=remote))
    for _ in range(2):
        assert open_store(address, remote=remote).fetch_record(0, "sequence").tolist() == tokens[:4].tolist()


def flip_an_offset(store):
    """Let the first document of the last shard but one end a token later."""
    request = store.file(store.num_shards - 2, "documents.bin")
    data = bytearray(request.path.read_bytes())
    data[request.begin + 8] ^= 1  # 4 tokens, then 5
    request.path.write_bytes(data)


def test_a_store_is_shown_in_one_line_whatever_its_shards(make_store):
    path, _, _ = make_store("web", [300] * 40, max_tokens_per_shard=300, dtype="<u2")
    shown = f"<Store {path}: seq, 40 documents, 12,000 tokens, 40 shards, sequence uint16>"
    assert repr(open_store(path)) == shown


@given(lengths=st.lists(LENGTHS, min_size=2, max_size=4), size=st.integers(1, 15), data=st.data())
def test_several_stores_are_read_as_one(make_store, lengths, size, data):
    made = [
        make_store(f"part{number}", part, seed=number, max_tokens_per_shard=size)
        for number, part in enumerate(lengths)
    ]
    store = open_store([path for path, _, _ in made], maps=MapCache(limit=2))
    stream = np.concatenate([tokens for _, tokens, _ in made])
    documents = [
        tokens[begin:end].tolist() for _, tokens, offsets in made for begin, end in pairwise(offsets.tolist())
    ]
    assert [store.fetch_record(number, "sequence").tolist() for number in range(store.num_documents)] == documents
    begin = data.draw(st.integers(0, stream.size))
    assert store.fetch(begin, stream.size, "sequence").tolist() == stream[begin:].tolist()


def test_stores_that_are_joined_stand_for_what_one_store_of_their_shards_would(make_store, tmp_path):
    """[S1.a] Of the same documents in the same shards, the fingerprint is the same, wherever they lie."""
    whole, tokens, offsets = make_store("whole", [5, 7] * 4, max_tokens_per_shard=12)
    spec = StoreSpec(
        keys={"sequence": "<u2"},
        tokenizer=open_store(whole).manifest.tokenizer,
        recipe={},
        max_tokens_per_shard=12,
    )
    parts = [tmp_path / "part-9", tmp_path / "part-10"]
    for path, first in zip(parts, (0, 4), strict=True):
        starts = offsets[first : first + 5]
        with StoreWriter(path, spec) as writer:
            writer.append({"sequence": tokens[starts[0] : starts[-1]]}, starts - starts[0])
            writer.commit()
    assert open_store(parts).fingerprint == open_store(whole).fingerprint
    assert open_store(tmp_path / "part-*").fingerprint == open_store(whole).fingerprint  # 9 before 10
    assert open_store(parts[::-1]).fingerprint != open_store(whole).fingerprint
    assert open_store(parts[:1]).fingerprint == open_store(parts[0]).fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"vocab_size": 301},
            "other: stores of one source must be alike, got 301 as its vocab_size where .*web has 300",
        ),
        ({"dtype": "<u4"}, "got {'sequence': '<u4'} as its keys where .*; make a source of each"),
    ],
)
def test_stores_that_are_not_alike_are_not_joined(make_store, options, message):
    paths = [
        make_store("web", [5], **{"vocab_size": 300})[0],
        make_store("other", [5], **{"vocab_size": 300} | options)[0],
    ]
    with pytest.raises(ConfigError, match=message):
        open_store(paths)
    with pytest.raises(ConfigError, match="store: must name at least one, got an empty list"):
        open_store([])
    with pytest.raises(ConfigError, match="web: the store is named twice in a source"):
        open_store([paths[0], paths[0].parent / "we[b]"])
