"""A full disk: one message that names a file and the way out, and the same command works once there is room."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

from tokenmill.store import StoreSpec, StoreWriter, open_store, verify

TOKENS = 60_000


def write_store(path):
    spec = StoreSpec(keys={"sequence": "<u2"}, tokenizer={"vocab_size": 300}, recipe={})
    with StoreWriter(path, spec) as writer:
        writer.append({"sequence": np.arange(TOKENS, dtype="<u2") % 300}, np.arange(0, TOKENS + 1, 10))
        writer.commit()
    return path


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of its own, and give its folder with a function that leaves it so many bytes of room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system")

    def leave(room):
        filler = folder / "filler"
        filler.unlink(missing_ok=True)
        if room is not None:
            with filler.open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    file.truncate(max(0, file.tell() - room))

    yield folder, leave
    subprocess.run(["umount", str(folder)], check=True)


def commands(big, disk, run):
    """Return each command with the room that is left to it."""
    small = disk / "small"
    exports = ("npy", "astrai-h5", "hf")
    return [
        (["verify", "--add-hashes", small], 4096),
        (["import", big.parent / "big.npy", "--out", disk / "imported"], 8192),
        (["import", big.parent / "big.npy", "--out", disk / "imported"], 0),
        *(
            (["export", big, "--out", disk / name, "--format", name], 0 if name == "hf" else 4096)
            for name in exports
        ),
        (["plan", run, "--html", disk / "plan.html"], 0),
        (["plan", run, "--svg", disk / "plan.svg"], 0),
        (["inspect", big, "--html", disk / "inspect.html"], 0),
        (["fork", run, "--at", 2, "--out", disk / "new.toml"], 0),
        (["upload", big, f"file://{disk}/uploaded"], 4096),
    ]


def test_a_full_disk_is_told_with_the_file_and_the_same_command_works_with_room(tokenmill, tmp_path, disk):
    disk, leave = disk
    big = write_store(tmp_path / "big")
    np.save(tmp_path / "big.npy", open_store(big).fetch(0, TOKENS, "sequence"))
    run = tmp_path / "run.toml"
    run.write_text(
        '[run]\nsteps = 4\nglobal_batch_size = 2\nseq_len = 8\n\n[[sources]]\nname = "big"\nstore = "big"\n'
    )
    told = {}
    for command, room in commands(big, disk, run):
        names = {entry.name for entry in disk.iterdir()}
        if command[0] == "verify":
            write_store(disk / "small")
            (disk / "small" / ".hashes" / "00000.bin").unlink()
        leave(room)
        done = tokenmill(*command)
        assert (done.code, done.out) == (1, ""), (command, done)
        assert done.err.count("error: ") == done.err.count("\n") == 1, (command, done)
        assert str(disk) in done.err
        told[command[0], room] = done.err.replace(str(disk), "DISK")
        leave(None)
        done = tokenmill(*command)
        assert done.code == 0, (command, done)
        for entry in {entry.name for entry in disk.iterdir()} - names:
            subprocess.run(["rm", "-r", str(disk / entry)], check=True)
    assert told["import", 8192].startswith("error: DISK/imported/.tmp-shards/0/")
    for name in ("verify", "import", "export", "plan", "inspect", "fork"):
        texts = [text for (command, _), text in told.items() if command == name]
        way_out = ": no space left on device; free some space, then run the same command again\n"
        assert [text for text in texts if not text.endswith(way_out)] == []
    assert told["upload", 4096].endswith(": the disk is full; free some space, then run the same command again\n")


def test_a_rebuild_that_fills_the_disk_leaves_the_old_store(tokenmill, tmp_path, disk):
    """[C1.a]"""
    disk, leave = disk
    before = verify(write_store(disk / "store")).fingerprint
    np.save(tmp_path / "new.npy", np.arange(TOKENS, dtype="<u2") % 299)
    leave(65536)
    command = ["import", tmp_path / "new.npy", "--out", disk / "store", "--rebuild"]
    assert tokenmill(*command).code == 1
    assert verify(disk / "store").fingerprint == before
    leave(None)
    assert tokenmill(*command).code == 0
    assert verify(disk / "store").fingerprint != before
