"""How a store is told by the names of its files, how large they are, and what its manifest may say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import StoreCorruptError, StoreError, StoreMissingError
from tokenmill.fingerprint import canonical
from tokenmill.store import Manifest, ShardInfo, detect_format, import_store, open_store, read_manifest, verify
from tokenmill.store.layout import FileInfo, document_file_bytes, is_ours, manifest_bytes, num_anchors, stores_below


@pytest.mark.parametrize(("tokens", "anchors"), [(0, 0), (1, 1), (1024, 1), (1025, 2), (2048, 2), (2049, 3)])
def test_there_is_an_anchor_for_every_1024th_token(tokens, anchors):
    assert num_anchors(tokens) == anchors
    assert document_file_bytes(3, tokens) == 4 * 8 + anchors * 4


@pytest.mark.parametrize("left", [".prepare", ".tmp-shards", ".tmp-pid", ".tmp-manifest.json", "shard-00000"])
def test_what_a_build_leaves_makes_a_folder_a_store_that_was_begun(tmp_path, left):
    (tmp_path / "web" / left).mkdir(parents=True)
    (tmp_path / "web" / ".notes").touch()
    assert is_ours(tmp_path / "web")
    with pytest.raises(
        StoreMissingError, match=r"\(no manifest.json\); if `tokenmill prepare` was interrupted there"
    ):
        open_store(tmp_path / "web")
    (tmp_path / "web" / "a.npy").touch()
    assert not is_ours(tmp_path / "web")


@pytest.mark.parametrize("hidden", [None, ".rows", ".git"])
def test_an_empty_folder_is_no_store_and_holds_no_token_files(tmp_path, hidden):
    (tmp_path / "web" / (hidden or "")).mkdir(parents=True)
    assert not is_ours(tmp_path / "web")
    for look in (open_store, detect_format, verify, lambda path: import_store(path, out=tmp_path / "out")):
        with pytest.raises(
            StoreMissingError,
            match=r"no store at this path: .*web \(the folder is empty\); run `tokenmill prepare`, or fix the path",
        ):
            look(tmp_path / "web")


def test_a_manifest_makes_a_folder_a_store_whatever_stands_beside_it(make_store):
    path, _, _ = make_store("web", [3])
    (path / "README").touch()
    assert is_ours(path)
    assert open_store(path).num_tokens == 3


def test_stores_that_were_not_finished_count_only_beside_finished_ones(make_store, tmp_path):
    for name in ("train", "val"):
        make_store(f"out/{name}", [3])
    (tmp_path / "out" / "val" / "manifest.json").unlink()
    assert [store.name for store in stores_below(tmp_path / "out")] == ["train", "val"]
    (tmp_path / "out" / "train" / "manifest.json").unlink()
    assert stores_below(tmp_path / "out") == []


def test_hidden_folders_hold_no_stores(make_store, tmp_path):
    make_store("out/.old/train", [3])
    np.save(tmp_path / "out" / "a.npy", np.array([1, 2], np.uint16))
    assert stores_below(tmp_path / "out") == []
    assert open_store(tmp_path / "out").num_tokens == 2


GOLDEN = Path(__file__).parent / "golden" / "v1"
GOLDEN_DOCUMENTS = [
    [256, 72, 105, 257],
    [256, 257],
    [],
    [256, 84, 111, 107, 101, 110, 115, 33, 257],
]


def manifest_of(num_shards: int) -> Manifest:
    files = {
        "sequence.bin": FileInfo(bytes=8, xxh3="0" * 32),
        "documents.bin": FileInfo(bytes=document_file_bytes(2, 4), xxh3="1" * 32),
    }
    return Manifest(
        kind="seq",
        keys={"sequence": "<u2"},
        tokenizer={"vocab_size": 300},
        recipe={"name": "text"},
        inputs=({"name": "a.jsonl"},),
        skipped={"counts": {"bad_json": 1}},
        shards=tuple(
            ShardInfo(name=f"shard-{i:05d}", documents=2, tokens=4, files=files) for i in range(num_shards)
        ),
    )


def test_golden_store_of_version_1_reads_back_to_the_listed_values():
    store = open_store(GOLDEN)
    assert [store.fetch_record(i, "sequence").tolist() for i in range(store.num_documents)] == GOLDEN_DOCUMENTS
    assert store.fetch(0, store.num_tokens, "sequence").tolist() == [id_ for ids in GOLDEN_DOCUMENTS for id_ in ids]
    assert store.manifest.fingerprint == "ebd4d8db528e72dee610781533f5f2df"
    assert verify(GOLDEN).tokens == 15


def test_golden_files_are_the_bytes_of_the_specification():
    """A reader written from docs/reference/store-format.md alone: u64 offsets, then a u32 per 1,024 tokens."""
    first, second = GOLDEN / "shard-00000", GOLDEN / "shard-00001"
    assert (first / "sequence.bin").read_bytes() == np.array([256, 72, 105, 257, 256, 257], "<u2").tobytes()
    assert (second / "sequence.bin").read_bytes() == np.array(GOLDEN_DOCUMENTS[3], "<u2").tobytes()
    assert (first / "documents.bin").read_bytes() == (
        np.array([0, 4, 6, 6], "<u8").tobytes() + np.array([0], "<u4").tobytes()
    )
    assert (second / "documents.bin").read_bytes() == (
        np.array([0, 9], "<u8").tobytes() + np.array([0], "<u4").tobytes()
    )


def test_manifest_reads_back_what_was_written(tmp_path):
    manifest = manifest_of(3)
    (tmp_path / "manifest.json").write_bytes(manifest_bytes(manifest))
    assert read_manifest(tmp_path) == manifest
    assert manifest_bytes(read_manifest(tmp_path)) == manifest_bytes(manifest)


def test_counts_are_the_sums_over_shards():
    assert (manifest_of(3).documents, manifest_of(3).tokens) == (6, 12)
    assert (manifest_of(0).documents, manifest_of(0).tokens) == (0, 0)


def test_fingerprint_depends_on_the_tokens_and_not_on_where_they_came_from():
    manifest = manifest_of(2)
    same = replace(
        manifest,
        inputs=(),
        skipped={},
        recipe={"other": 1},
        shards=tuple(replace(shard, name=f"shard-1{i:04d}") for i, shard in enumerate(manifest.shards)),
    )
    assert same.fingerprint == manifest.fingerprint
    others = [
        manifest_of(1),
        replace(manifest, tokenizer={"vocab_size": 301}),
        replace(manifest, keys={"sequence": "<u4"}),
        replace(manifest, kind="sft"),
        replace(manifest, shards=(replace(manifest.shards[0], documents=1), manifest.shards[1])),
    ]
    assert len({manifest.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_opening_1000_shards_reads_one_manifest_and_nothing_else(tmp_path):
    """[S1.a]"""
    # There are no shard folders at all: a look into one would fail.
    (tmp_path / "manifest.json").write_bytes(manifest_bytes(manifest_of(1000)))
    program = """
import os, sys
from tokenmill.store import open_store
opened = []
looks = ("open", "os.listdir", "os.scandir")
sys.addaudithook(lambda event, arguments: event in looks and opened.append(arguments))
store = open_store(sys.argv[1])
print(store.num_shards, store.num_tokens, [os.path.basename(str(arguments[0])) for arguments in opened])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("1000 4000 ['manifest.json']\n", "")


@pytest.mark.parametrize("what", ["nothing", "empty folder", "file"])
def test_a_path_without_a_store_says_what_is_missing_and_the_way_out(tmp_path, what):
    path = tmp_path / "web"
    if what == "empty folder":
        path.mkdir()
    elif what == "file":
        path.write_text("x")
    with pytest.raises(
        StoreMissingError,
        match=r"no store at this path: .*web \((no manifest.json|the folder does not exist)\); .*run",
    ):
        read_manifest(path)


def test_a_manifest_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(StoreError, match=r"manifest.json: must be"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"1",
        b'"manifest"',
        b"\xff\xfe",
        b'{"checksum": 1}',
        b"[" * 10_000,
        b"\x00" * 64,
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path, text):
    """[S.f]"""
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(StoreError, match=r"manifest\.json: must be .*, got .*; .*prepare it again"):
        read_manifest(tmp_path)


@given(text=st.binary(max_size=200))
def test_random_bytes_are_no_manifest(tmp_path, text):
    """[S.f]"""
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(StoreError, match=r"manifest\.json: must be"):
        read_manifest(tmp_path)


def test_a_later_version_says_what_to_do(small_store, edit_manifest):
    edit_manifest(small_store, lambda body: body.update(version=3))
    with pytest.raises(StoreError, match=r"version 1 to 2, got .* version 3; open it with the tokenmill"):
        read_manifest(small_store)


FIELDS = [
    "format",
    "version",
    "kind",
    "keys",
    "documents",
    "tokens",
    "tokenizer",
    "recipe",
    "inputs",
    "skipped",
    "shards",
    "checksum",
]


def test_the_list_of_fields_is_complete(small_store):
    assert list(json.loads((small_store / "manifest.json").read_bytes())) == FIELDS


@pytest.mark.parametrize("value", ["absent", None, "x", -1, 10**18, [1], {"a": 1}, 0.5, True])
@pytest.mark.parametrize("field", FIELDS)
def test_an_edited_field_is_found_by_the_checksum(small_store, edit_manifest, field, value):
    """[S.f]"""
    edit_manifest(
        small_store, lambda body: body.pop(field) if value == "absent" else body.update({field: value}), sign=False
    )
    with pytest.raises(StoreError, match=r"manifest\.json: "):
        read_manifest(small_store)


@pytest.mark.parametrize("value", ["absent", None, "x", -1, 10**18, [1], {"a": 1}, 0.5])
@pytest.mark.parametrize(
    "field", [field for field in FIELDS if field not in ("kind", "recipe", "inputs", "skipped", "checksum")]
)
def test_a_forged_field_is_refused_even_with_a_valid_checksum(small_store, edit_manifest, field, value):
    """[S.f, S.e]"""
    edit_manifest(small_store, lambda body: body.pop(field) if value == "absent" else body.update({field: value}))
    with pytest.raises(
        StoreError, match=r"manifest\.json: (.* )?(must|missing key|expected)|manifest\.json: .*: expected"
    ):
        read_manifest(small_store)


@pytest.mark.parametrize("value", ["absent", None, "x", -1, 1, [1], 0.5])
@pytest.mark.parametrize("field", ["kind", "recipe", "inputs", "skipped"])
def test_a_forged_description_is_refused_or_read_as_it_stands(small_store, edit_manifest, field, value):
    """[S.f]"""
    edit_manifest(small_store, lambda body: body.pop(field) if value == "absent" else body.update({field: value}))
    with suppress(StoreCorruptError):
        verify(small_store)
    with suppress(StoreCorruptError):
        assert open_store(small_store).fetch(0, 3, "sequence").tolist() == [7, 8, 9]


HOSTILE_NAMES = [
    "..",
    ".",
    "",
    "../web2",
    "/etc",
    "//etc",
    "a/b",
    "a\\b",
    "C:\\x",
    "shard-00000/../../x",
    "shard\x00",
    "shard\n",
    "shard-00000\n",
    " shard",
    "shard\u2215x",
    "shard\uff0fx",
    "shard\u2044x",
    "..\u2215x",
    "\uff0e\uff0e",
    ".hidden",
    "sh\u00e4rd",
    "\u202eshard",
    "~",
    "~root",
    "$HOME",
    "shard*",
    None,
    5,
    ["a"],
    {"a": 1},
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_hostile_shard_name_is_refused(small_store, edit_manifest, name):
    """[S.d]"""
    edit_manifest(small_store, lambda body: body["shards"][0].update(name=name))
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: "):
        read_manifest(small_store)


@pytest.mark.parametrize("name", [name for name in HOSTILE_NAMES if isinstance(name, str)])
@pytest.mark.parametrize("place", ["key", "file"])
def test_a_hostile_key_or_file_name_is_refused(small_store, edit_manifest, name, place):
    """[S.d]"""

    def change(body):
        files = body["shards"][0]["files"]
        if place == "key":
            body["keys"] = {name: "<u2"}
            files[f"{name}.bin"] = files.pop("sequence.bin")
        else:
            files[name] = files.pop("sequence.bin")

    edit_manifest(small_store, change)
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: "):
        read_manifest(small_store)


@given(name=st.text(min_size=1, max_size=12))
def test_only_plain_names_pass(tmp_path, name):
    """[S.d]"""
    manifest = manifest_of(1)
    shard = replace(manifest.shards[0], name=name)
    try:
        (tmp_path / "manifest.json").write_bytes(manifest_bytes(replace(manifest, shards=(shard,))))
    except (TypeError, ValueError):
        return  # a lone surrogate is no JSON
    plain = all(c.isascii() and (c.isalnum() or c in "._-") for c in name) and not name.startswith(".")
    if plain:
        assert read_manifest(tmp_path).shards[0].name == name
    else:
        with pytest.raises(StoreCorruptError, match="a shard name must be a plain name"):
            read_manifest(tmp_path)


def test_a_shard_listed_twice_is_refused(small_store, edit_manifest):

    def change(body):
        body["shards"] *= 2
        body["documents"], body["tokens"] = 2, 6

    edit_manifest(small_store, change)
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: shard names must differ, got 'shard-00000'"):
        read_manifest(small_store)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("documents", -1),
        ("documents", 2),
        ("documents", 1.5),
        ("documents", "1"),
        ("documents", None),
        ("documents", 2**63),
        ("tokens", -3),
        ("tokens", 4),
        ("tokens", True),
        ("tokens", 2**63),
        ("tokens", 1e300),
        ("tokens", "x"),
        ("files", {}),
        ("files", None),
        ("files", {"sequence.bin": {"bytes": 6, "xxh3": "0" * 32}}),
    ],
)
def test_a_forged_shard_is_refused(small_store, edit_manifest, field, value):
    """[S.e]"""
    edit_manifest(small_store, lambda body: body["shards"][0].update({field: value}))
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: "):
        read_manifest(small_store)


@pytest.mark.parametrize("tokens", [2**40, 2**52, 2**62, 2**63 - 1])
def test_a_consistent_lie_about_sizes_is_refused_before_anything_is_allocated(small_store, edit_manifest, tokens):
    """[S.e]"""

    def change(body):
        shard = body["shards"][0]
        body["tokens"] = shard["tokens"] = tokens
        shard["files"]["sequence.bin"]["bytes"] = 2 * tokens
        shard["files"]["documents.bin"]["bytes"] = document_file_bytes(1, tokens)

    edit_manifest(small_store, change)
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: |sequence\.bin: must have \d+ bytes, got 6"):
        open_store(small_store).fetch(0, tokens, "sequence")
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: |documents\.bin: must have \d+ bytes, got 20"):
        open_store(small_store).document_offsets(0, 1)
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: |sequence\.bin: must have \d+ bytes, got 6"):
        verify(small_store)


@pytest.mark.parametrize("dtype", ["<u8", ">u2", "<i2", "O", "|O", "<f4", "uint16", "", None, ["<u2"], "|V2", "S2"])
def test_a_dtype_that_is_not_ours_is_refused(small_store, edit_manifest, dtype):
    """[S.a]"""
    edit_manifest(small_store, lambda body: body["keys"].update(sequence=dtype))
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: (a dtype must be one|keys: expected a table) of"):
        read_manifest(small_store)


@pytest.mark.parametrize("dtype", ["|u1", "<u4"])
def test_another_dtype_does_not_fit_the_sizes(small_store, edit_manifest, dtype):
    """[T2.a]"""
    edit_manifest(small_store, lambda body: body["keys"].update(sequence=dtype))
    with pytest.raises(StoreCorruptError, match=r"shard-00000/sequence\.bin must have \d+ bytes, got 6"):
        read_manifest(small_store)


def test_a_key_named_as_the_index_is_refused(small_store, edit_manifest):

    def change(body):
        body["keys"] = {"documents": "<u2"}
        del body["shards"][0]["files"]["sequence.bin"]

    edit_manifest(small_store, change)
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: a key must .*'documents'"):
        read_manifest(small_store)


@pytest.mark.parametrize("vocab_size", [0, -1, None, "x", [], 0.5, "absent"])
def test_a_vocabulary_size_that_bounds_nothing_is_refused(small_store, edit_manifest, vocab_size):
    """[T2.a]"""

    def change(body):
        body["tokenizer"].pop("vocab_size")
        if vocab_size != "absent":
            body["tokenizer"]["vocab_size"] = vocab_size

    edit_manifest(small_store, change)
    with pytest.raises(
        StoreCorruptError, match=r"manifest\.json: vocab_size must be a whole number from 1 to 2\^32"
    ):
        read_manifest(small_store)


def test_opening_a_hostile_store_runs_nothing(small_store, edit_manifest):
    """[S.a]"""
    planted = small_store / "planted"
    edit_manifest(
        small_store,
        lambda body: body.update(
            recipe={"py/reduce": [{"py/function": "os.mkdir"}, [str(planted)]], "__reduce__": f"mkdir {planted}"},
            inputs=[{"name": "$(touch planted)"}],
        ),
    )
    assert open_store(small_store).num_tokens == 3
    assert not planted.exists()
    assert sorted(os.listdir(small_store)) == [".hashes", ".sums", "manifest.json", "shard-00000"]


@pytest.mark.parametrize(
    ("place", "value", "rule"),
    [
        (("tokenizer", "pad_id"), "258", "pad_id must be a whole number below vocab_size"),
        (("tokenizer", "pad_id"), 2**70, "pad_id must be a whole number below vocab_size"),
        (("tokenizer", "eos_id"), -1, "eos_id must be a whole number below vocab_size"),
        (("tokenizer", "bos_id"), True, "bos_id must be a whole number below vocab_size"),
        (("tokenizer", "add_bos"), 1, "add_bos must be true or false"),
        (("tokenizer", "vocab_size"), 2**33, r"vocab_size must be a whole number from 1 to 2\^32"),
        (("inputs",), [{"name": "a", "documents": -1}], "documents of an input must be a whole number"),
        (("inputs",), [{"name": 3}], "the name of an input must be a string"),
        (("skipped",), {"truncated": "1"}, "truncated must be a whole number"),
        (("skipped",), {"counts": {"empty": 0.5}}, "counts of skipped must be a table of whole numbers"),
        (("skipped",), {"first": ["line 3"]}, "first of skipped must be a list of tables"),
        (("recipe",), {"recipe": 3}, "the recipe within recipe must be a table"),
    ],
)
def test_every_value_of_a_manifest_that_is_used_has_its_range(tmp_path, place, value, rule):
    """Also where the checksum is right: it is soon forged."""
    body = json.loads((GOLDEN / "manifest.json").read_bytes())
    del body["checksum"]
    table = body
    for name in place[:-1]:
        table = table[name]
    table[place[-1]] = value
    body["checksum"] = xxhash.xxh3_128_hexdigest(canonical(body))
    (tmp_path / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(StoreCorruptError, match=rf"manifest\.json: {rule}.*, got "):
        read_manifest(tmp_path)


def test_a_manifest_that_is_a_pipe_or_a_link_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: must be a plain file, got another kind"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").symlink_to(GOLDEN / "manifest.json")
    with pytest.raises(StoreCorruptError, match=r"manifest\.json: must be a plain file, got a link"):
        read_manifest(tmp_path)
