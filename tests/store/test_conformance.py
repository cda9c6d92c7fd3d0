"""One suite for every training type and every way to keep a store."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.config.run import parse_config
from tokenmill.errors import PlanError, StoreCorruptError, StoreError
from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter, open_store, read_manifest, verify
from tokenmill.store.layout import axis_of

VOCAB = 300
STORAGES = ("bin", "h5")
KEYS = {
    "seq": {"sequence": "<u2"},
    "sft": {"sequence": "<u4", "loss_mask": "|u1"},
    "sft+positions": {"sequence": "<u2", "loss_mask": "|u1", "position_ids": "<u4"},
    "dpo": {"chosen": "<u2", "rejected": "<u2", "chosen_mask": "|u1", "rejected_mask": "|u1"},
    "grpo": {"prompts": "<u2", "responses": "<u2", "masks": "|u1", "rewards": "<f4"},
}
GROUPED = ("responses", "masks")
few = settings(max_examples=max(4, settings.default.max_examples // 3))
"""For tests that write many files an example."""

every_store = pytest.mark.parametrize("storage", STORAGES)
every_kind = pytest.mark.parametrize("case", list(KEYS))


def spec_of(case, *, storage="bin", size=10**6):
    return StoreSpec(
        kind=case.split("+")[0],
        keys=KEYS[case],
        tokenizer={"vocab_size": VOCAB, "add_bos": False},
        recipe={"name": "test"},
        max_tokens_per_shard=size,
        storage=storage,
    )


def value_of(rng, dtype, size):
    if dtype == "<f4":
        return rng.normal(size=size).astype(dtype)
    return rng.integers(0, 2 if dtype == "|u1" else VOCAB, size).astype(dtype)


def make_records(case, shapes, seed):
    """Make a record of each shape: the lengths of its axes, and of a group the length of every response."""
    rng = np.random.default_rng(seed)
    kind = case.split("+")[0]
    records = []
    for shape in shapes:
        sizes = {"rejected": shape[1]} | dict.fromkeys(("documents", "chosen", "prompts"), shape[0])
        responses = shape[2:]
        record = {}
        for key, dtype in KEYS[case].items():
            if key in GROUPED:
                record[key] = [value_of(rng, dtype, length) for length in responses]
            else:
                axis = axis_of(kind, key)
                record[key] = value_of(rng, dtype, len(responses) if axis == "groups" else sizes[axis])
        records.append(record)
    return records


lengths = st.one_of(st.integers(0, 9), st.sampled_from([0, 1, 1100]))
shapes = st.lists(st.lists(lengths, min_size=3, max_size=6), max_size=7)
"""Each record at least as long as dpo needs; grpo takes the first as a prompt and from the third on responses."""
sizes = st.sampled_from([1, 12, 1500, 10**6])


def columns_of(case, records):
    """Return values and offsets of records end to end, as `append` takes them."""
    kind = case.split("+")[0]
    values, offsets = {}, {}
    for key, dtype in KEYS[case].items():
        parts = [record[key] for record in records]
        if key in GROUPED:
            parts = [response for group in parts for response in group]
        values[key] = np.concatenate([np.empty(0, dtype), *parts])
        offsets[axis_of(kind, key)] = np.cumsum([0, *(len(part) for part in parts)])
    return values, offsets


def write(path, case, records, *, cuts=(), **options):
    """Write records, one `append` between two cuts."""
    if path.exists():
        shutil.rmtree(path)
    with StoreWriter(path, spec_of(case, **options)) as writer:
        for first, last in pairwise([0, *sorted(min(cut, len(records)) for cut in cuts), len(records)]):
            writer.append(*columns_of(case, records[first:last]))
        writer.commit()
    return path


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def same(found, wanted):
    """Whether two values of a record are equal in dtype, order and every bit."""
    if isinstance(wanted, list):
        assert isinstance(found, list)
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes()


@every_store
@every_kind
@few
@given(shapes=shapes, cuts=st.lists(st.integers(0, 7), max_size=3), size=sizes, seed=st.integers(0, 9))
def test_records_read_back_as_they_were_written(tmp_path, storage, case, shapes, cuts, size, seed):
    records = make_records(case, shapes, seed)
    store = open_store(write(tmp_path / "s", case, records, cuts=cuts, storage=storage, size=size))
    assert store.num_documents == len(records)
    for index, record in enumerate(records):
        found = store.fetch_record(index)
        assert list(found) == list(KEYS[case])
        assert all(same(found[key], record[key]) for key in record)
        for key in record:
            assert same(store.fetch_record(index, key), record[key])
    values, offsets = columns_of(case, records)
    rng = np.random.default_rng(seed)
    for key, array in values.items():
        assert same(store.fetch(0, array.size, key), array)
        begin, end = sorted(rng.integers(0, array.size + 1, 2).tolist())
        assert same(store.fetch(begin, end, key), array[begin:end])
        with pytest.raises(PlanError, match=rf"a range must lie within 0:{array.size}, got 0:{array.size + 1}"):
            store.fetch(0, array.size + 1, key)
        axis = store.axis(key)
        if len(offsets[axis]) > 1:
            assert store.offsets(axis, 0, len(offsets[axis]) - 1).tolist() == offsets[axis].tolist()
    for outside in (-1, len(records)):
        with pytest.raises(PlanError, match=r"must lie within 0:\d+, got"):
            store.fetch_record(outside)
    if records:  # an empty store has no shard, and so nothing that tells how it would be kept
        assert store.manifest.storage == storage
    assert verify(tmp_path / "s").documents == len(records)
    assert read_manifest(tmp_path / "s").tokens == sum(shard.tokens for shard in store.manifest.shards)


@every_store
@every_kind
@few
@given(shapes=shapes, cuts=st.lists(st.integers(0, 7), max_size=5), size=sizes)
def test_the_files_depend_on_the_records_alone(tmp_path, storage, case, shapes, cuts, size):
    """[T2.c] Not on how records were grouped when they were written."""
    records = make_records(case, shapes, 0)
    once = files_of(write(tmp_path / "once", case, records, storage=storage, size=size))
    often = files_of(write(tmp_path / "often", case, records, cuts=cuts, storage=storage, size=size))
    assert often == once


@every_kind
@few
@given(shapes=shapes, size=sizes)
def test_both_ways_to_keep_a_store_have_one_fingerprint(tmp_path, case, shapes, size):
    """So that a run resumes when its store was kept in the other way."""
    records = make_records(case, shapes, 1)
    found = [open_store(write(tmp_path / s, case, records, storage=s, size=size)) for s in STORAGES]
    assert found[0].fingerprint == found[1].fingerprint
    names = [name for shard in found[0].manifest.shards[:1] for name in shard.files]
    shards = [
        [(shard.documents, shard.tokens, shard.axes, {n: shard.files[n].xxh3 for n in names}) for shard in m]
        for m in (store.manifest.shards for store in found)
    ]
    assert shards[0] == shards[1]


@every_store
def test_positions_that_are_not_given_are_numbered_through_the_shard(tmp_path, storage):
    case = "sft+positions"
    records = make_records(case, [[4, 0, 0], [0, 0, 0], [3, 0, 0], [5, 0, 0]], 0)
    values, offsets = columns_of(case, records)
    with StoreWriter(tmp_path / "s", spec_of(case, storage=storage, size=7)) as writer:
        writer.append({key: values[key] for key in ("sequence", "loss_mask")}, offsets["documents"])
        writer.commit()
    store = open_store(tmp_path / "s")
    found = [store.fetch_record(i, "position_ids").tolist() for i in range(4)]
    assert found == [[0, 1, 2, 3], [], [4, 5, 6], [0, 1, 2, 3, 4]]
    assert verify(tmp_path / "s").tokens == 12


@every_store
def test_empty_groups_and_responses_keep_their_places(tmp_path, storage):
    """A group of none, one of an empty response, and none again, across shards."""
    wanted = [[2, 0], [1, 0, 0], [0, 0, 3, 0, 2], [0, 0], [0, 0, 0, 0]]
    records = make_records("grpo", wanted, 0)
    store = open_store(write(tmp_path / "s", "grpo", records, storage=storage, size=4))
    assert [[len(r) for r in store.fetch_record(i, "responses")] for i in range(5)] == [
        shape[2:] for shape in wanted
    ]
    assert [store.fetch_record(i, "rewards").size for i in range(5)] == [0, 1, 3, 0, 2]
    assert [store.fetch_record(i, "prompts").size for i in range(5)] == [2, 1, 0, 0, 0]
    assert store.num_documents == 5


def test_responses_without_rewards_have_no_records():
    keys = {"prompts": "<u2", "responses": "<u2"}
    with pytest.raises(StoreError, match=r"store keys: responses need rewards, .*got \['prompts', 'responses'\]"):
        StoreSpec(kind="grpo", keys=keys, tokenizer={"vocab_size": 3}, recipe={})


@every_store
def test_a_store_is_replaced_by_one_kept_in_either_way(tmp_path, storage):
    """[C1.d] And nothing of the old one is left."""
    records = make_records("dpo", SHAPES, 0)
    fresh = files_of(write(tmp_path / "fresh", "dpo", records[:1], storage=storage))
    for old in STORAGES:
        path = write(tmp_path / old, "dpo", records, storage=old, size=1)
        (path / "manifest.json").unlink()  # as a build leaves it that was killed just before its end
        with StoreWriter(path, spec_of("dpo", storage=storage)) as writer:
            writer.append(*columns_of("dpo", records[:1]))
            writer.commit()
        assert files_of(path) == fresh


@pytest.mark.parametrize("content", [b"", b"notes", b"\x89HDF\r\n\x1a\n and measurements of years"])
def test_a_file_with_the_name_of_a_shard_but_another_content_is_not_deleted(tmp_path, content):
    """[C1.d]"""
    (tmp_path / "shard-00000").write_bytes(content)
    with pytest.raises(StoreError, match=r"shard-00000: a file with the name of a shard"):
        StoreWriter(tmp_path, spec_of("dpo", storage="h5"))
    assert (tmp_path / "shard-00000").read_bytes() == content


# What is damaged or forged.

SHAPES = [[3, 2, 2, 0, 1], [0, 4, 1], [5, 1]]


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Return a function that gives the path of a small store of several shards, written once."""
    made: dict[tuple[str, str], Path] = {}

    def get(case, storage):
        if (case, storage) not in made:
            path = tmp_path_factory.mktemp("whole") / "s"
            made[case, storage] = write(path, case, make_records(case, SHAPES, 5), storage=storage, size=7)
            assert len(read_manifest(path).shards) >= 2
        return made[case, storage]

    return get


@pytest.fixture
def copied(whole, tmp_path):
    """Return a function that gives a copy of such a store."""
    return lambda case, storage: Path(shutil.copytree(whole(case, storage), tmp_path / "s"))


def mutate_and_verify(path: Path, step: int) -> int:
    """Change every so many bytes of every file, one at a time, in small files more of them; return how many.

    Each must be found, and the file named.
    """
    tried = 0
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        good = file.read_bytes()
        name = str(file.relative_to(path))
        with file.open("r+b") as handle:
            for position in range(0, len(good), step if len(good) > 600 else max(1, step // 9)):
                handle.seek(position)
                handle.write(bytes([good[position] ^ (1 << (position % 8))]))
                handle.flush()
                with pytest.raises(StoreError) as caught:
                    verify(path)
                assert name in str(caught.value), (name, position)
                handle.seek(position)
                handle.write(good[position : position + 1])
                handle.flush()
                tried += 1
    verify(path)
    return tried


@pytest.mark.slow
@every_store
@pytest.mark.parametrize("case", ["sft+positions", "dpo", "grpo"])
def test_a_changed_byte_of_any_file_is_found_and_the_file_is_named(copied, case, storage):
    """[S.f] What HDF5 itself keeps in a file included; a sample of all bytes."""
    assert mutate_and_verify(copied(case, storage), 61) > 50


@pytest.mark.deep
@every_store
@every_kind
def test_every_changed_byte_of_every_file_is_found(copied, case, storage):
    """[S.f]"""
    mutate_and_verify(copied(case, storage), 1)


@every_store
@every_kind
def test_files_that_were_cut_or_lengthened_are_found(copied, case, storage):
    """[S.f, S.e]"""
    path = copied(case, storage)
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        good = file.read_bytes()
        name = str(file.relative_to(path))
        for data in {good[: len(good) * i // 7] for i in range(7)} | {good[:-1], good + b"\0", good + good}:
            if data != good:
                file.write_bytes(data)
                with pytest.raises(StoreError) as caught:
                    verify(path)
                assert name in str(caught.value)
        if file.parent.name != ".hashes":  # without which a store is whole
            file.unlink()
            with pytest.raises(StoreError):
                verify(path)
        file.write_bytes(good)
    verify(path)


@pytest.mark.parametrize("case", ["dpo", "grpo"])
@every_store
def test_a_damaged_file_gives_an_error_and_no_wrong_record(copied, case, storage):
    """[S.f] Offsets that run backwards or past the end are refused by the reader as well."""
    path = copied(case, storage)
    manifest = read_manifest(path)
    axis = {"dpo": "rejected", "grpo": "responses"}[case]
    file = path / manifest.shards[0].name / f"{axis}-index.bin"
    data = bytearray(file.read_bytes())
    data[8:16] = (10**6).to_bytes(8, "little")
    file.write_bytes(data)
    key = {"dpo": "rejected", "grpo": "responses"}[case]
    with pytest.raises(StoreCorruptError, match="checksum must be"):
        open_store(path).fetch_record(0, key)


def test_a_file_that_is_a_link_is_refused_but_a_link_to_the_store_is_not(copied, tmp_path):
    """[S.d]"""
    path = copied("dpo", "h5")
    (tmp_path / "link").symlink_to(path)
    assert verify(tmp_path / "link").documents == 3
    assert open_store(tmp_path / "link").fetch_record(0, "chosen").size == 3
    (path / "shard-00001").rename(tmp_path / "moved")
    (path / "shard-00001").symlink_to(tmp_path / "moved")
    with pytest.raises(StoreCorruptError, match=r"shard-00001"):
        verify(path)
    with pytest.raises(StoreCorruptError, match=r"shard-00001: must be a folder of the store, got a link"):
        open_store(path).fetch_record(1, "chosen")


def first_shard(change):
    return lambda body: change(body["shards"][0])


def first_file(change):
    return lambda body: change(next(iter(body["shards"][0]["files"].values())))


FORGERIES = {
    "no axes": first_shard(lambda shard: shard.pop("axes")),
    "empty axes": first_shard(lambda shard: shard.update(axes={})),
    "axes are no table": first_shard(lambda shard: shard.update(axes=[1, 2])),
    "axes are nothing": first_shard(lambda shard: shard.update(axes=None)),
    "another axis": first_shard(lambda shard: shard["axes"].update(documents=[2, 8])),
    "an axis with a path": first_shard(lambda shard: shard["axes"].update({"../x": [2, 8]})),
    "an axis is missing": first_shard(lambda shard: shard["axes"].pop(next(iter(shard["axes"])))),
    "an axis of one number": first_shard(lambda shard: shard["axes"].update({axis: [2] for axis in shard["axes"]})),
    "an axis of three": first_shard(
        lambda shard: shard["axes"].update({axis: [2, 5, 1] for axis in shard["axes"]})
    ),
    "an axis of words": first_shard(lambda shard: shard["axes"].update(dict.fromkeys(shard["axes"], "ab"))),
    "negative items": first_shard(lambda shard: [size.__setitem__(0, -1) for size in shard["axes"].values()]),
    "negative values": first_shard(lambda shard: [size.__setitem__(1, -4) for size in shard["axes"].values()]),
    "more items": first_shard(lambda shard: [size.__setitem__(0, size[0] + 1) for size in shard["axes"].values()]),
    "more values": first_shard(lambda shard: [size.__setitem__(1, size[1] + 1) for size in shard["axes"].values()]),
    "huge values": first_shard(lambda shard: [size.__setitem__(1, 2**60) for size in shard["axes"].values()]),
    "half an item": first_shard(lambda shard: [size.__setitem__(0, 0.5) for size in shard["axes"].values()]),
    "more records": lambda body: (
        body["shards"][0].update(documents=body["shards"][0]["documents"] + 1),
        body.update(documents=body["documents"] + 1),
    ),
    "more tokens": lambda body: (
        body["shards"][0].update(tokens=body["shards"][0]["tokens"] + 1),
        body.update(tokens=body["tokens"] + 1),
    ),
    "a file less": first_shard(lambda shard: shard["files"].pop(next(iter(shard["files"])))),
    "a file more": first_shard(lambda shard: shard["files"].update({"x.bin": {"bytes": 0, "xxh3": ""}})),
    "another size": first_file(lambda file: file.update(bytes=file["bytes"] + 1)),
    "another kind": lambda body: body.update(kind="seq"),
    "an array less": lambda body: body["keys"].pop(next(iter(body["keys"]))),
    "ids that are floats": lambda body: body["keys"].update(dict.fromkeys(body["keys"], "<f4")),
}


@pytest.mark.parametrize("forgery", FORGERIES)
@every_store
@pytest.mark.parametrize("case", ["dpo", "grpo"])
def test_a_forged_manifest_is_refused_before_anything_is_mapped(copied, edit_manifest, case, storage, forgery):
    """[S.d, S.e] Its checksum is right, and the shards are gone: a look at one would give another error."""
    path = copied(case, storage)
    for shard in path.glob("shard-*"):
        shutil.rmtree(shard) if shard.is_dir() else shard.unlink()
    edit_manifest(path, FORGERIES[forgery])
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: .*, got .*; copy the store again"):
        open_store(path)


def test_responses_that_no_group_cuts_are_refused(copied, edit_manifest):
    """[S.e]"""

    def change(body):
        del body["keys"]["rewards"]
        for shard in body["shards"]:
            del shard["axes"]["groups"]
            del shard["files"]["rewards.bin"]
            del shard["files"]["groups-index.bin"]

    path = copied("grpo", "bin")
    edit_manifest(path, change)
    with pytest.raises(StoreCorruptError, match=r"must have rewards, which cut responses into records"):
        open_store(path)


@pytest.mark.parametrize("size", [10**7, 2**40])
def test_an_hdf5_file_of_another_size_is_found(copied, edit_manifest, size):
    """[S.e]"""
    path = copied("dpo", "h5")
    edit_manifest(path, first_shard(lambda shard: shard["files"]["arrays.h5"].update(bytes=size)))
    with pytest.raises(StoreCorruptError, match=rf"shard-00000/arrays\.h5: must have {size} bytes, got \d+"):
        verify(path)


def test_a_flipped_byte_of_an_hdf5_file_is_found(copied):
    """[S.f]"""
    path = copied("dpo", "h5")
    file = path / "shard-00000" / "arrays.h5"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreCorruptError, match=r"shard-00000/arrays\.h5: checksum must be"):
        verify(path)


def test_a_store_with_hdf5_shards_of_an_earlier_tokenmill_names_the_way_out(copied, edit_manifest):
    path = copied("dpo", "h5")
    edit_manifest(path, first_shard(lambda shard: shard.update(container={"bytes": 9, "xxh3": "0" * 32})))
    with pytest.raises(StoreError, match=r"HDF5 shards of an earlier tokenmill; prepare the store again"):
        open_store(path)


def test_a_version_that_does_not_fit_is_found(copied, edit_manifest):
    """[S.f]"""
    path = copied("dpo", "bin")
    edit_manifest(path, lambda body: body.update(version=1))
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: not formatted as tokenmill writes it"):
        verify(path)


@every_store
@every_kind
def test_the_oldest_version_that_can_say_it_is_written(whole, case, storage):
    body = json.loads((whole(case, storage) / "manifest.json").read_bytes())
    assert body["version"] == (1 if storage == "bin" and case in ("seq", "sft", "sft+positions") else 2)


# What others see.


@every_kind
def test_plain_h5py_finds_a_group_for_each_array_with_its_values(whole, case):
    """The layout of AstrAI: a dataset per record of pairs, else one per shard, and no other group."""
    records = make_records(case, SHAPES, 5)
    values, _ = columns_of(case, records)
    path = whole(case, "h5")
    files = [h5py.File(file, "r") for file in sorted(path.glob("shard-*/arrays.h5"))]
    shards = read_manifest(path).shards
    for key, array in values.items():
        counts = [shard.documents if case == "dpo" else 1 for shard in shards]
        assert [len(file[key]) for file in files] == counts
        found = [file[key][f"data_{n}"][:] for file, count in zip(files, counts, strict=True) for n in range(count)]
        assert np.array_equal(np.concatenate(found), array)
        kinds = {"loss_mask": "b", "chosen_mask": "b", "rejected_mask": "b", "masks": "b"}
        assert {part.dtype.kind for part in found} == {kinds.get(key, array.dtype.kind)} or array.dtype == "<u4"
        if case == "dpo":
            assert [part.tolist() for part in found] == [record[key].tolist() for record in records]
    assert [sorted(file) for file in files] == [sorted(values)] * len(files)
    for file in files:
        file.close()


def test_reading_needs_no_h5py(whole, monkeypatch):
    path = whole("grpo", "h5")
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    assert open_store(path).fetch_record(0, "prompts").size == 3
    assert verify(path).documents == 3


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_a_run_over_either_gives_the_same_batches(tmp_path, packing):
    """And a state saved over one goes on over the other."""
    rng = np.random.default_rng(0)
    records = make_records("sft", [[int(n), 0, 0] for n in rng.integers(0, 40, 60)], 0)
    found, states, plans = [], [], []
    for storage in STORAGES:
        write(tmp_path / storage / "web", "sft", records, storage=storage, size=200)
        tables = {
            "run": {"steps": 12, "global_batch_size": 4, "seq_len": 16, "packing": packing},
            "sources": [{"name": "web", "store": "web"}],
        }
        run = Run(config=parse_config(tables), folder=tmp_path / storage)
        loader = run.loader(micro_batch=4, arrays=("input_ids", "labels", "loss_mask", "num_loss_tokens"))
        found.append([{k: v.tobytes() for k, v in batch.items()} for batch in loader])
        loader.seek(5)
        states.append(loader.state_dict())
        plans.append(run.plan().fingerprint)
    assert found[0] == found[1]
    assert states[0] == states[1]
    assert plans[0] == plans[1]


# What was written once must be read for ever.

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_DPO = [
    {
        "chosen": [256, 72, 105, 257],
        "rejected": [256, 72, 257],
        "chosen_mask": [0, 0, 1, 1],
        "rejected_mask": [0, 0, 1],
    },
    {"chosen": [], "rejected": [256, 257], "chosen_mask": [], "rejected_mask": [0, 1]},
    {"chosen": [256, 33, 257], "rejected": [], "chosen_mask": [0, 1, 1], "rejected_mask": []},
]
GOLDEN_GRPO = [
    {"prompts": [256, 72], "responses": [[105, 257], []], "masks": [[1, 1], []], "rewards": [1.0, -0.5]},
    {"prompts": [256], "responses": [], "masks": [], "rewards": []},
    {"prompts": [256, 84, 111], "responses": [[107, 101, 110, 257]], "masks": [[1, 1, 0, 1]], "rewards": [0.25]},
]


def plain(record):
    return {
        key: [part.tolist() for part in value] if isinstance(value, list) else value.tolist()
        for key, value in record.items()
    }


@pytest.mark.parametrize(
    ("name", "records", "fingerprint"),
    [
        ("v2-dpo", GOLDEN_DPO, "1d76c32a629e2b19494b9a30bc635771"),
        ("v2-grpo", GOLDEN_GRPO, "dfdc92840730e89d0ec8cc0424bb9ad4"),
    ],
)
def test_golden_stores_of_version_2_read_back_to_the_listed_values(name, records, fingerprint):
    store = open_store(GOLDEN / name)
    assert [plain(store.fetch_record(i)) for i in range(store.num_documents)] == records
    assert store.num_shards == 2
    assert store.fingerprint == fingerprint
    assert verify(GOLDEN / name).documents == 3
    assert json.loads((GOLDEN / name / "manifest.json").read_bytes())["version"] == 2


def test_golden_files_of_pairs_are_the_bytes_of_the_specification():
    """A reader written from docs/reference/store-format.md: an index per axis, u64 offsets, u32 anchors."""
    first, second = GOLDEN / "v2-dpo" / "shard-00000", GOLDEN / "v2-dpo" / "shard-00001"
    assert (
        sorted(os.listdir(first))
        == sorted(os.listdir(second))
        == [
            "chosen-index.bin",
            "chosen.bin",
            "chosen_mask.bin",
            "rejected-index.bin",
            "rejected.bin",
            "rejected_mask.bin",
        ]
    )
    assert (first / "chosen.bin").read_bytes() == np.array([256, 72, 105, 257], "<u2").tobytes()
    assert (first / "rejected.bin").read_bytes() == np.array([256, 72, 257, 256, 257], "<u2").tobytes()
    assert (first / "rejected_mask.bin").read_bytes() == bytes([0, 0, 1, 0, 1])
    anchor = np.array([0], "<u4").tobytes()
    assert (first / "chosen-index.bin").read_bytes() == np.array([0, 4, 4], "<u8").tobytes() + anchor
    assert (first / "rejected-index.bin").read_bytes() == np.array([0, 3, 5], "<u8").tobytes() + anchor
    assert (second / "rejected-index.bin").read_bytes() == np.array([0, 0], "<u8").tobytes()


def golden_records(name):
    case = {"v2-dpo": "dpo", "v2-grpo": "grpo"}[name]
    records = []
    for record in {"v2-dpo": GOLDEN_DPO, "v2-grpo": GOLDEN_GRPO}[name]:
        made = {}
        for key, dtype in KEYS[case].items():
            value = record[key]
            made[key] = [np.array(v, dtype) for v in value] if key in GROUPED else np.array(value, dtype)
        records.append(made)
    return case, records


def write_golden(path, name):
    case, records = golden_records(name)
    spec = replace(spec_of(case, size=9), recipe={"name": case})
    with StoreWriter(path, spec) as writer:
        writer.append(*columns_of(case, records))
        writer.commit(inputs=[{"name": f"{case}.jsonl", "documents": 3}])
    return path


@pytest.mark.parametrize("name", ["v2-dpo", "v2-grpo"])
def test_writing_the_golden_stores_again_gives_the_same(tmp_path, name):
    write_golden(tmp_path / name, name)
    shutil.rmtree(tmp_path / name / ".hashes")  # which stores have had since
    assert read_manifest(tmp_path / name).fingerprint == read_manifest(GOLDEN / name).fingerprint
    assert files_of(tmp_path / name) == files_of(GOLDEN / name)
