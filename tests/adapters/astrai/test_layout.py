"""What Pipeline writes is AstrAI's layout: its readers take all of it, or nothing."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

import tokenmill as tm
from tokenmill.adapters.astrai import DatasetFactory, Pipeline, detect_format, layout
from tokenmill.errors import StoreCorruptError
from tokenmill.store import open_store, verify
from tokenmill.store.layout import JOURNAL_FOLDER

DTYPES = {"bool": "?", "int32": "<i4", "float32": "<f4"}


def write(path, start, count=6):
    lines = [{"prompt": f"{n}: ", "response": "ground " * (1 + n % 4), "site": "ab"[n % 2]} for n in range(count)]
    lines = [{**line, "prompt": f"{start}{line['prompt']}"} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recipe(storage="bin", **output):
    output = {"storage_format": storage, "max_tokens_per_shard": 60, **output}
    return {"preset": "instruction", "output": output}


@pytest.fixture
def made(tmp_path):
    """Make a store of several shards."""

    def make(storage="bin", **output):
        config = recipe(storage, **output)
        Pipeline(config, [write(tmp_path / "a.jsonl", "a")], tmp_path / "out", "bytes").run(workers=1)
        return tmp_path / "out"

    return make


def read_bin(folder):
    """Read a folder as AstrAI documents it: a meta.json at any depth, with a .bin file per key next to it."""
    arrays = {}
    for meta in sorted(Path(folder).glob("**/meta.json")):
        if any(part.startswith(".") for part in meta.relative_to(folder).parts):
            continue
        for key, entry in json.loads(meta.read_text()).items():
            values = np.memmap(
                meta.with_name(f"{key}.bin"), DTYPES[entry["dtype"]], "r", shape=tuple(entry["shape"])
            )
            arrays.setdefault(key, []).append(np.array(values))
    return {key: np.concatenate(parts).tolist() for key, parts in arrays.items()}


def read_h5(folder):
    """Read a folder as AstrAI does: all .h5 files in it, a group per key; also those in hidden folders."""
    arrays = {}
    for path in sorted(Path(folder).rglob("*.h5")):
        with h5py.File(path, "r") as file:
            for key in file:
                arrays.setdefault(key, []).extend(file[key][name][:] for name in file[key])
    return {key: np.concatenate(parts).tolist() for key, parts in arrays.items()}


def values_of(path):
    store = open_store(path)
    return {key: store.fetch(0, int(store.axes[store.axis(key)].values[-1]), key).tolist() for key in store.keys}


def test_a_meta_records_format_dtype_total_tokens_and_shape_of_every_key_of_a_shard(made):
    path = made()
    store = open_store(path)
    assert store.num_shards > 1
    for number, shard in enumerate(store.manifest.shards):
        (tokens,) = np.diff(store.token_begins)[number : number + 1].tolist()
        common = {"shape": [tokens], "format": "bin", "total_tokens": store.manifest.tokens}
        assert json.loads((path / shard.name / "meta.json").read_text()) == {
            "sequence": {**common, "dtype": "int32"},
            "loss_mask": {**common, "dtype": "bool"},
            "position_ids": {**common, "dtype": "int32"},
        }


@pytest.mark.parametrize(("storage", "read"), [("bin", read_bin), ("h5", read_h5)])
def test_readers_of_astrai_find_the_values_of_the_store(made, storage, read):
    path = made(storage)
    assert detect_format(path) == storage
    assert open_store(path).num_shards > 1
    assert read(path) == values_of(path)


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_the_manifest_lies_next_to_it(made, storage):
    """Checksums, the tokenizer and runs hold."""
    path = made(storage)
    assert verify(path).documents == 6
    assert open_store(path).manifest.tokenizer["kind"] == "bytes"
    run = path.with_name("run.toml")
    run.write_text(
        '[run]\nsteps = 1\nglobal_batch_size = 2\nseq_len = 16\n[[sources]]\nname = "a"\nstore = "out"\n'
    )
    assert tm.Run.from_toml(run).loader()[0]["input_ids"].shape == (2, 16)


def test_shards_are_read_in_place_without_the_manifest_too(made, tmp_path):
    path = made()
    shutil.copytree(path / "shard-00000", tmp_path / "theirs" / "__default__" / "shard_0000")
    first = DatasetFactory.load("sft", tmp_path / "theirs", 8)[1]
    assert {key: value.tolist() for key, value in first.items()} == {
        key: value.tolist() for key, value in DatasetFactory.load("sft", path, 8)[1].items()
    }


def test_pairs_have_the_offsets_of_their_records(tmp_path):
    pairs = [{"prompt": "a", "chosen": "b" * n, "rejected": "cc"} for n in (1, 2, 5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    Pipeline("dpo", [tmp_path / "a.jsonl"], tmp_path / "out", "bytes").run(workers=1)
    meta = json.loads((tmp_path / "out" / "shard-00000" / "meta.json").read_text())
    chosen, rejected = [0, 4, 9, 17], [0, 5, 10, 15]
    assert {key: entry["offsets"] for key, entry in meta.items()} == {
        "chosen": chosen,
        "chosen_mask": chosen,
        "rejected": rejected,
        "rejected_mask": rejected,
    }


def test_verify_finds_a_meta_that_says_something_else(made):
    path = made()
    meta = path / "shard-00001" / "meta.json"
    meta.write_text(meta.read_text().replace("int32", "int64"))
    with pytest.raises(
        StoreCorruptError, match=r"shard-00001/meta\.json: does not describe the arrays as manifest\.json does"
    ):
        verify(path)


@pytest.mark.parametrize(("storage", "read"), [("bin", read_bin), ("h5", read_h5)])
def test_more_files_are_added_to_the_layout(made, tmp_path, storage, read):
    path = made(storage)
    before = read(path)
    files = [tmp_path / "a.jsonl", write(tmp_path / "b.jsonl", "b")]
    Pipeline(recipe(storage), files, path, "bytes").run(workers=1)
    assert read(path) == values_of(path)
    assert len(read(path)["sequence"]) == 2 * len(before["sequence"])
    Pipeline(recipe(storage), files[1:], path, "bytes").run(workers=1, rebuild=True)
    assert read(path) == values_of(path)
    assert len(read(path)["sequence"]) == len(before["sequence"])


def test_domains_are_read_together_or_alone(made):
    path = made(domain_key="site")
    assert sorted(child.name for child in path.iterdir() if not child.name.startswith(".")) == ["a", "b"]
    for domain in "ab":
        assert read_bin(path / domain) == values_of(path / domain)
    assert len(read_bin(path)["sequence"]) == sum(len(values_of(path / domain)["sequence"]) for domain in "ab")


class _Killed(BaseException):
    """Ends a step as a kill does: nothing runs after it."""


@pytest.mark.parametrize("domains", [{}, {"domain_key": "site"}])
def test_wherever_it_is_killed_readers_find_all_of_a_store_or_nothing(made, monkeypatch, domains):
    """Shards are withdrawn before a build, and return after it, one file at a time."""
    path = made(max_tokens_per_shard=200, **domains)
    whole, states, done, step = read_bin(path), set(), False, 0
    while not done:
        step += 1
        left = [step]

        def killed(do, left=left):
            def call(*args, **options):
                left[0] -= 1
                if left[0] <= 0:
                    raise _Killed
                do(*args, **options)

            return call

        with monkeypatch.context() as patch:
            for name in ("write_atomically", "sync_folder"):
                patch.setattr(layout, name, killed(getattr(layout, name)))
            with suppress(_Killed), layout.withheld(path, "bin"):
                assert read_bin(path) == {}
            done = left[0] > 0
        try:
            states.add({0: "nothing", len(whole): "all"}[len(read_bin(path))])
            assert read_bin(path) in ({}, whole)
        except FileNotFoundError:
            states.add("barred")
        with layout.withheld(path, "bin"):
            assert read_bin(path) == {}
        assert read_bin(path) == whole
    assert states == {"nothing", "all", "barred"}


def test_readers_of_h5_files_fail_while_a_build_goes_on(made):
    path = made("h5")
    with layout.withheld(path, "h5"), pytest.raises(OSError, match=r"unfinished\.h5|file signature not found"):
        read_h5(path)
    assert read_h5(path) == values_of(path)


def test_a_build_that_is_to_go_on_stays_withdrawn(made):
    path = made("bin")
    with layout.withheld(path, "h5"):
        (path / JOURNAL_FOLDER / "build.json").write_text("{")
    assert read_bin(path) == {}
    assert (path / JOURNAL_FOLDER / "unfinished.h5").exists()


def test_a_build_that_does_not_begin_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match=r"no such file or folder: .*nowhere"):
        Pipeline(recipe("h5"), [tmp_path / "nowhere.jsonl"], tmp_path / "out", "bytes").run(workers=1)
    assert not (tmp_path / "out").exists()
