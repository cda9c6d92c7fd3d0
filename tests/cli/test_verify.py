from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.store import open_store

ENTRY = Path(sys.executable).parent / "tokenmill"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "flipped ids": (lambda s: flip(s / "shard-00000" / "sequence.bin"), "shard-00000/sequence.bin"),
    "flipped index": (lambda s: flip(s / "shard-00000" / "documents.bin"), "shard-00000/documents.bin"),
    "flipped manifest": (lambda s: flip(s / "manifest.json"), "manifest.json"),
    "truncated": (lambda s: (s / "shard-00000" / "sequence.bin").write_bytes(b"x"), "shard-00000/sequence.bin"),
    "missing file": (lambda s: (s / "shard-00000" / "sequence.bin").unlink(), "shard-00000/sequence.bin"),
    "missing shard": (lambda s: shutil.rmtree(s / "shard-00000"), "shard-00000/sequence.bin"),
    "renamed shard": (lambda s: (s / "shard-00000").rename(s / "shard-00001"), "shard-00001"),
    "missing manifest": (lambda s: (s / "manifest.json").unlink(), "manifest.json"),
}


def test_a_whole_store_is_said_to_be_ok(tokenmill, folder):
    store = folder / "stores" / "web"
    done = tokenmill("verify", store)
    assert (done.code, done.err) == (0, "")
    assert re.match(rf"ok  {re.escape(str(store))}: 2 files in 1 shards, .* 60 documents, [\d,]+ tokens;", done.out)


def test_json_reports_the_counts(tokenmill, folder):
    store = open_store(folder / "stores" / "web")
    files = [file for shard in store.manifest.shards for file in shard.files.values()]
    assert tokenmill("verify", store.path, "--json").json == {
        "path": str(store.path),
        "ok": True,
        "shards": 1,
        "files": 2,
        "bytes": sum(file.bytes for file in files),
        "documents": 60,
        "tokens": store.num_tokens,
        "fingerprint": store.manifest.fingerprint,
    }


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_store_gives_exit_code_1_and_the_name_of_the_file_on_stderr(tokenmill, folder, damage, json):
    """[S.f]"""
    change, name = DAMAGE[damage]
    change(folder / "stores" / "web")
    done = tokenmill("verify", folder / "stores" / "web", *(["--json"] if json else []))
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(rf"error: .*{re.escape(name)}.*, got .*; .*\n", done.err)


def test_the_exit_code_of_the_process_tells_a_whole_store_from_a_broken_one(folder):
    """[S.f]"""
    store = folder / "stores" / "web"
    whole = subprocess.run([ENTRY, "verify", store], capture_output=True, text=True, check=False)
    flip(store / "shard-00000" / "sequence.bin")
    broken = subprocess.run([ENTRY, "verify", store], capture_output=True, text=True, check=False)
    assert (whole.returncode, whole.stderr) == (0, "")
    assert (broken.returncode, broken.stdout) == (1, "")
    assert "shard-00000/sequence.bin: checksum must be" in broken.stderr
    assert "Traceback" not in broken.stderr


def test_a_path_with_brackets_is_shown_as_it_is(tokenmill, folder):
    store = (folder / "stores" / "web").rename(folder / "a[bold]b")
    assert f"ok  {store}: " in tokenmill("verify", store).out


@pytest.fixture
def split(tokenmill, folder):
    """Return a folder with the stores train and val, as `prepare --val-fraction` makes it."""
    arguments = ["--out", folder / "split", "--val-fraction", 0.3, "--workers", 1]
    assert tokenmill("prepare", folder / "web.jsonl", *arguments).code == 0
    return folder / "split"


def test_all_stores_of_a_folder_are_verified_one_after_the_other(tokenmill, split):
    done = tokenmill("verify", split)
    assert (done.code, done.err) == (0, "")
    assert [line.split(": ")[0] for line in done.lines] == [f"ok  {split}/train", f"ok  {split}/val"]
    found = tokenmill("verify", split, "--json").json
    assert (found["path"], found["ok"]) == (str(split), True)
    assert found["stores"] == [tokenmill("verify", split / name, "--json").json for name in ("train", "val")]
    assert sum(store["documents"] for store in found["stores"]) == 60


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda out: flip(out / "val" / "shard-00000" / "sequence.bin"), "val/shard-00000/sequence.bin"),
        (lambda out: (out / "val" / "manifest.json").unlink(), "val"),
    ],
)
def test_one_broken_store_of_a_folder_gives_exit_code_1(tokenmill, split, damage, name):
    """[S.f]"""
    damage(split)
    done = tokenmill("verify", split)
    assert done.code == 1
    assert [line.split(": ")[0] for line in done.lines] == [f"ok  {split}/train"]
    assert re.fullmatch(rf"error: {re.escape(str(split))}/{name}: .*, got .*; .*\n", done.err)
    done = tokenmill("verify", split, "--json")
    assert (done.code, done.out) == (1, "")
