"""A power cut keeps what was synced and nothing else; the next build ends with the same bytes all the same."""

import os
import shutil
import stat
import threading
from pathlib import Path

import msgspec
import pytest
from tests.build.corpus import files_of, some_texts

from tokenmill.build import PrepareOptions, prepare
from tokenmill.store import open_store, verify

TEXTS = some_texts(60)


class Disk:
    """What a disk would hold after a power cut: files and names of folders as they were when last synced.

    It is as forgetful as a file system may be: a new name is lost unless its folder was synced after it. But a file
    that was moved has one name, not two.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[int, bytes] = {}
        self.names: dict[int, dict[str, tuple[int, bool]]] = {}
        self.held: list[int] = []
        self.cuts: list[dict[str, bytes | None]] = []
        self.turn = threading.Lock()
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
            self.held.append(os.open(folder, os.O_RDONLY))  # as below
            self.take_folder(folder)
            for child in folder.iterdir():
                if child.is_file():
                    self.files[child.stat().st_ino] = child.read_bytes()

    def take_folder(self, folder: Path) -> None:
        children = {child.name: (child.stat().st_ino, child.is_dir()) for child in folder.iterdir()}
        moved = set(children.values())
        for number, names in self.names.items():
            self.names[number] = {name: child for name, child in names.items() if child not in moved}
        self.names[folder.stat().st_ino] = children

    def sync(self, descriptor: int) -> None:
        """Stand in for `os.fsync`; the moment after it is one at which the power may be cut."""
        with self.turn:
            self.take(descriptor)

    def take(self, descriptor: int) -> None:
        # Kept open, so that no other file gets its number.
        self.held.append(os.dup(descriptor))
        found = os.fstat(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if stat.S_ISDIR(found.st_mode):
            self.take_folder(path)
        else:
            self.files[found.st_ino] = path.read_bytes()
        cut: dict[str, bytes | None] = {}
        self.look(self.root.stat().st_ino, "", cut)
        if not self.cuts or cut != self.cuts[-1]:
            self.cuts.append(cut)

    def look(self, folder: int, prefix: str, found: dict[str, bytes | None]) -> None:
        for name, (number, is_folder) in self.names.get(folder, {}).items():
            # What was never synced is a folder without names, or a file without bytes.
            found[prefix + name] = None if is_folder else self.files.get(number, b"")
            if is_folder:
                self.look(number, f"{prefix}{name}/", found)

    def close(self) -> None:
        for descriptor in self.held:
            os.close(descriptor)


def put(folder: Path, cut: dict[str, bytes | None]) -> None:
    """Write down what a cut left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in cut.items():
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)


def write_records(path: Path, texts, first: int) -> None:
    path.parent.mkdir(exist_ok=True)
    records = [{"text": text or "empty", "site": "ab"[i % 2]} for i, text in enumerate(texts, first)]
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def contents(out: Path) -> dict[str, bytes]:
    """Return the tokens of all stores of a build."""
    found = {}
    for manifest in sorted(out.rglob("manifest.json")):
        store = open_store(manifest.parent)
        found[str(manifest.parent.relative_to(out))] = store.fetch(0, store.num_tokens, "sequence").tobytes()
    return found


PLAIN = {"max_tokens_per_shard": 1000}
ALL = {
    **PLAIN,
    "storage_format": "h5",
    "domain_key": "site",
    "val_fraction": 0.3,
    "deduplicate": True,
    "max_items": 55,
}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the files of descriptors in /proc")
@pytest.mark.parametrize("chosen", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("mode", ["fresh", "append", "rebuild"])
def test_nothing_counts_before_it_is_on_the_disk(tmp_path, monkeypatch, mode, chosen):
    """[C1.a, D1.a] After a cut at any moment a store is whole or not there, and the next build gives the same."""
    write_records(tmp_path / "in" / "a.jsonl", TEXTS[:30], 0)
    write_records(tmp_path / "in" / "b.jsonl", [*TEXTS[20:], *TEXTS[:5]], 30)
    options = PrepareOptions(chunk_bytes=2500, **chosen)
    root = tmp_path / "disk"
    root.mkdir()

    def build(inputs, out, rebuild=False):
        return prepare(inputs, out=out, workers=1, rebuild=rebuild, progress=False, options=options)

    out = root / "deep" / "store"
    monkeypatch.setattr(os, "fsync", lambda _: None)  # of no use before the power is cut, and slow
    if mode != "fresh":
        build(tmp_path / "in" / "a.jsonl", out)
    old = contents(out)
    disk = Disk(root)
    monkeypatch.setattr(os, "fsync", disk.sync)
    build(tmp_path / "in", out, rebuild=mode == "rebuild")
    monkeypatch.setattr(os, "fsync", lambda _: None)
    disk.close()
    new, wanted = contents(out), files_of(out)

    states = []
    for number, cut in enumerate(disk.cuts):
        put(tmp_path / "cut", cut)
        found = contents(tmp_path / "cut" / "deep" / "store")
        assert all(data in (old.get(route), new[route]) for route, data in found.items()), number
        states.append(found)
        build(tmp_path / "in", tmp_path / "cut" / "deep" / "store", rebuild=mode == "rebuild")
        assert files_of(tmp_path / "cut" / "deep" / "store") == wanted, number
    # What was reported as done stays.
    assert states[-1] == new
    assert len(disk.cuts) > 8
    for route in new:
        verify(out / route)
