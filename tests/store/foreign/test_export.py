"""Exports are read back by tokenmill and by the other projects, to the last token, boundary and mask."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from tests.store.foreign.readers import read_by

from tokenmill.build import PrepareOptions, prepare
from tokenmill.errors import ConfigError, StoreError, StoreExistsError
from tokenmill.store import ForeignOptions, StoreSpec, StoreWriter, export_store, open_store

EOS = 1
IDENTITY = {
    "kind": "bytes",
    "content": "x",
    "vocab_size": 50_000,
    "bos_id": None,
    "eos_id": EOS,
    "pad_id": None,
    "add_bos": False,
    "add_eos": True,
}
KEYS = {
    "seq": {"sequence": "<u2"},
    "sft": {"sequence": "<u2", "loss_mask": "|u1"},
    "dpo": {"chosen": "<u2", "rejected": "<u2", "chosen_mask": "|u1", "rejected_mask": "|u1"},
    "grpo": {"prompts": "<u2", "responses": "<u2", "masks": "|u1", "rewards": "<f4"},
}
RECORDS = 30


def offsets_of(rng, count, least=1):
    return np.concatenate([[0], np.cumsum(rng.integers(least, 20, count))])


@pytest.fixture
def make(tmp_path):
    """Return a function that writes a store of a kind in three or more shards; every item ends with EOS."""

    def write(kind, keys=None, **identity):
        rng = np.random.default_rng(7)
        keys, path = keys or KEYS[kind], tmp_path / kind
        spec = StoreSpec(
            kind=kind, keys=keys, tokenizer={**IDENTITY, **identity}, recipe={}, max_tokens_per_shard=150
        )
        offsets = {axis: offsets_of(rng, RECORDS) for axis in spec.axes if axis != "responses"}
        if kind == "grpo":
            offsets["groups"] = np.concatenate([[0], np.cumsum(rng.integers(0, 4, RECORDS))])
            offsets["responses"] = offsets_of(rng, int(offsets["groups"][-1]))
        arrays = {}
        for key, dtype in keys.items():
            axis = {"rewards": "groups", "masks": "responses"}.get(key, key.removesuffix("_mask"))
            starts = offsets.get(axis, next(iter(offsets.values())))
            if "mask" in key:
                arrays[key] = rng.integers(0, 2, starts[-1]).astype(dtype)
            elif key == "rewards":
                arrays[key] = rng.random(starts[-1]).astype(dtype)
            else:
                arrays[key] = rng.integers(2, spec.tokenizer["vocab_size"], starts[-1]).astype(dtype)
                arrays[key][starts[1:] - 1] = EOS
        with StoreWriter(path, spec) as writer:
            writer.append(arrays, offsets)
            assert len(writer.commit().shards) >= 3
        return path

    return write


def columns_of(store, keys):
    """Return key -> its value in each record."""
    records = records_of(store, keys)
    return {key: [record[key] for record in records] for key in keys}


def records_of(store, keys):
    return [
        {key: np.asarray(store.fetch_record(number, key)).tolist() for key in keys}
        for number in range(store.num_documents)
    ]


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("seq", "npy"),
        ("seq", "astrai-bin"),
        ("seq", "astrai-h5"),
        ("sft", "nanoset"),
        ("sft", "astrai-bin"),
        ("sft", "astrai-h5"),
        ("dpo", "astrai-bin"),
        ("dpo", "astrai-h5"),
    ],
)
def test_what_is_exported_reads_back_as_the_same_records(make, tmp_path, kind, format):
    path = make(kind)
    report = export_store(path, out=tmp_path / "out", format=format)
    store, written = open_store(path), open_store(tmp_path / "out", eos_id=EOS)
    assert records_of(written, KEYS[kind]) == records_of(store, KEYS[kind])
    assert (report.documents, report.tokens, report.keys) == (RECORDS, store.manifest.tokens, tuple(KEYS[kind]))
    assert report.compared == sum(int(store.axes[store.axis(key)].values[-1]) for key in KEYS[kind])
    assert report.files == sum(len(names) for _, _, names in os.walk(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["|u1", pytest.param("<u4", marks=pytest.mark.deep)])
def test_megatron_reads_its_export_by_itself(make, tmp_path, dtype):
    """megatron-core, in a process of its own, finds every token and boundary."""
    path = make("seq", {"sequence": dtype}, vocab_size=256 if dtype == "|u1" else 50_000)
    report = export_store(path, out=tmp_path / "out", format="megatron")
    assert report.notes == ()
    assert sorted(os.listdir(tmp_path / "out")) == ["tokens.bin", "tokens.idx"]
    store, written = open_store(path), open_store(tmp_path / "out" / "tokens")
    assert records_of(written, ["sequence"]) == records_of(store, ["sequence"])
    assert read_by("megatron", tmp_path / "out") == columns_of(store, ["sequence"])


def test_numpy_reads_its_export_by_itself(make, tmp_path):
    path = make("seq")
    export_store(path, out=tmp_path / "out", format="npy")
    store = open_store(path)
    expected = store.fetch(0, store.num_tokens, "sequence").tolist()
    assert read_by("npy", tmp_path / "out") == {"sequence": expected}


@pytest.fixture
def needed(tmp_path, monkeypatch):
    """Stand in for what datatrove needs to be imported and may not be there: a logger, words for a number."""
    (tmp_path / "stubs").mkdir()
    logger = (
        "class Quiet:\n    def __getattr__(self, name):\n        return lambda *_, **__: None\nlogger = Quiet()\n"
    )
    (tmp_path / "stubs" / "loguru.py").write_text(logger)
    (tmp_path / "stubs" / "humanize.py").write_text("metric = precisedelta = str\n")
    monkeypatch.syspath_prepend(tmp_path / "stubs")
    return tmp_path / "stubs"


@pytest.mark.usefixtures("needed")
def test_datatrove_reads_tokens_and_masks_of_its_export_by_itself(make, tmp_path):
    path = make("sft")
    export_store(path, out=tmp_path / "out", format="nanoset")
    assert read_by("nanoset", tmp_path / "out") == columns_of(open_store(path), ["sequence", "loss_mask"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_datasets_reads_its_export_by_itself(make, tmp_path, kind):
    path = make(kind)
    export_store(path, out=tmp_path / "out", format="hf")
    import pyarrow.parquet as pq

    rows = pq.read_table(tmp_path / "out" / "data").to_pylist()
    store = open_store(path)
    for number, row in enumerate(rows):
        for key in KEYS[kind]:
            value = store.fetch_record(number, key)
            value = [part.tolist() for part in value] if isinstance(value, list) else value.tolist()
            assert row["input_ids" if key == "sequence" else key] == value
    assert len(rows) == RECORDS
    named = [{"sequence" if key == "input_ids" else key: value for key, value in row.items()} for row in rows]
    assert read_by("hf", tmp_path / "out") == {key: [row[key] for row in named] for key in named[0]}


@pytest.mark.parametrize("format", ["megatron", "npy"])
def test_a_mask_is_refused_where_it_has_no_place_and_given_up_only_by_name(make, tmp_path, format):
    path = make("sft")
    with pytest.raises(
        StoreError, match=r"got loss_mask, for which it has none; export it as nanoset or .*drop_masks=True"
    ):
        export_store(path, out=tmp_path / "out", format=format)
    assert sorted(os.listdir(tmp_path)) == ["sft"]
    if format == "npy":
        report = export_store(path, out=tmp_path / "out", format=format, drop_masks=True)
        assert report.notes == ("loss_mask was given up: there, every token is trained on",)


@pytest.mark.parametrize(
    ("kind", "format", "fitting"),
    [("dpo", "megatron", "astrai-bin or astrai-h5 or hf"), ("grpo", "astrai-h5", "hf")],
)
def test_records_that_a_format_does_not_have_are_refused(make, tmp_path, kind, format, fitting):
    with pytest.raises(StoreError, match=rf"got one of {kind}; export it as {fitting}$"):
        export_store(make(kind), out=tmp_path / "out", format=format)


def test_boundaries_that_are_not_told_by_eos_are_noted(tmp_path, make_store):
    path, _, _ = make_store("plain", [4, 5, 6], vocab_size=300)
    report = export_store(path, out=tmp_path / "out", format="npy")
    assert report.notes == ("the format has no boundaries: whoever cuts documents after EOS finds 1, not 3",)


def test_what_a_file_does_not_say_stands_beside_it(make, tmp_path):
    export_store(make("seq"), out=tmp_path / "out", format="npy")
    store = open_store(tmp_path / "out")  # no word of EOS or the vocabulary
    assert (store.num_documents, store.manifest.tokenizer["vocab_size"]) == (RECORDS, 50_000)


def test_files_of_another_project_are_exported_too(tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, 6, 1, 7, 1], np.uint16))
    report = export_store(
        tmp_path / "a.npy", out=tmp_path / "out", format="astrai-bin", options=ForeignOptions(eos_id=1)
    )
    assert (report.documents, report.tokens) == (2, 5)


def test_an_export_that_is_interrupted_leaves_nothing(make, tmp_path):
    path = make("seq")

    def stop(what, _done, _total):
        if what == "compare":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_store(path, out=tmp_path / "out", format="npy", progress=stop)
    assert sorted(os.listdir(tmp_path)) == ["seq"]


def test_two_exports_to_one_folder_do_not_disturb_each_other(make, tmp_path):
    """One of them succeeds; the other one finds the folder, and deletes nothing of it."""
    path, second = make("seq"), []

    def export_again(what, _done, _total):
        if what == "compare" and not second:
            second.append(export_store(path, out=tmp_path / "out", format="npy"))

    with pytest.raises(StoreExistsError, match="out: another process filled this folder"):
        export_store(path, out=tmp_path / "out", format="npy", progress=export_again)
    assert (
        read_by("npy", tmp_path / "out")["sequence"]
        == open_store(path).fetch(0, second[0].tokens, "sequence").tolist()
    )
    assert sorted(os.listdir(tmp_path)) == ["out", "seq"]


def test_the_rest_of_a_killed_export_is_removed_by_the_next(make, tmp_path):
    path = make("seq")
    program = (
        "import os, signal, tokenmill as tm\n"
        f"tm.export_store({str(path)!r}, out={str(tmp_path / 'out')!r}, format='npy', "
        "progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert len([name for name in os.listdir(tmp_path) if name.startswith(".tmp-out-")]) == 1
    export_store(path, out=tmp_path / "out", format="npy")
    assert sorted(os.listdir(tmp_path)) == ["out", "seq"]


def test_an_export_replaces_nothing(make, tmp_path):
    path = make("seq")
    (tmp_path / "out").mkdir()
    export_store(path, out=tmp_path / "out", format="npy")
    with pytest.raises(StoreExistsError, match="must be a new or an empty folder"):
        export_store(path, out=tmp_path / "out", format="npy")
    with pytest.raises(ConfigError, match=r"format: expected one of megatron, .*did you mean 'nanoset'"):
        export_store(path, out=tmp_path / "other", format="nanosets")


def test_ids_that_a_signed_number_cannot_hold_are_refused(tmp_path):
    spec = StoreSpec(keys={"sequence": "<u4"}, tokenizer={"vocab_size": 1 << 32}, recipe={})
    with StoreWriter(tmp_path / "web", spec) as writer:
        writer.append({"sequence": np.array([1, 1 << 31], np.uint32)}, np.array([0, 2]))
        writer.commit()
    with pytest.raises(StoreError, match=r"ids must be below 2\*\*31 for this format, got 2147483648"):
        export_store(tmp_path / "web", out=tmp_path / "out", format="astrai-bin")


def test_kept_fields_become_columns(tmp_path):
    """Of one type where all values have it, else JSON; a field with the name of an array gets another name."""
    import pyarrow.parquet as pq

    rows = [
        {"text": f"text {n}", "url": f"https://a/{n}", "id": n, "score": [0.5, 1][n % 2], "ok": n % 3 == 0}
        | {"meta": {"n": [n]}, "mixed": ["a", 1][n % 2], "input_ids": "x", "large": 1 << 62}
        for n in range(9)
    ]
    del rows[4]["url"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = PrepareOptions(
        keep=("url", "id", "score", "ok", "meta", "mixed", "input_ids", "large"), chunk_bytes=300
    )
    prepare(tmp_path / "in.jsonl", out=tmp_path / "a", workers=1, progress=False, options=options)
    prepare(tmp_path / "in.jsonl", out=tmp_path / "b", workers=1, progress=False)
    for path, kept in ((tmp_path / "a", True), (tmp_path / "b", False)):
        export_store(path, out=tmp_path / f"{path.name}-hf", format="hf")
        table = pq.read_table(tmp_path / f"{path.name}-hf" / "data")
        store = open_store(path)
        assert table["input_ids"].to_pylist() == [store.fetch_record(n, "sequence").tolist() for n in range(9)]
        assert (table.column_names == ["input_ids"]) is not kept
    assert store.num_shards == 1
    table = pq.read_table(tmp_path / "a-hf" / "data")
    assert open_store(tmp_path / "a").num_shards > 2
    types = {field.name: str(field.type) for field in table.schema}
    assert types.pop("input_ids") == "list<element: int32>"
    assert types == {
        "url": "string", "id": "int64", "score": "double", "ok": "bool", "meta": "string", "mixed": "string",
        "kept_input_ids": "string", "large": "int64",
    }  # fmt: skip
    for number, row in enumerate(table.to_pylist()):
        wanted = rows[number]
        assert row["url"] == wanted.get("url")
        assert (row["id"], row["score"], row["ok"], row["large"]) == (
            number,
            wanted["score"],
            wanted["ok"],
            1 << 62,
        )
        assert (json.loads(row["meta"]), json.loads(row["mixed"])) == (wanted["meta"], wanted["mixed"])
        assert row["kept_input_ids"] == "x"
