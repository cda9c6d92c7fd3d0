"""Mirrors on disks that are full, rotten or cleaned, and beside processes that were stopped: the same batches."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tokenmill.errors import ConfigError
from tokenmill.run.run import Run
from tokenmill.store.remote.mirror import PAGE_ROOM, PageFile

PAGE = 4096
RUN = """
[run]
seed = 1
steps = 12
global_batch_size = 8
seq_len = 512
[remote]
mirror = "{mirror}"
deadline = {deadline}
{remote}
[[sources]]
name = "web"
store = "{store}"
"""
DRAW = """
import hashlib, json, logging, resource, sys
from tokenmill.run.run import Run
logging.basicConfig(format="LOG %(message)s", stream=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
for config in sys.argv[2:]:
    for batch in Run.from_toml(config).loader(micro_batch=8):
        print(hashlib.sha256(batch["input_ids"].tobytes()).hexdigest(), flush=True)
"""


@pytest.fixture
def make_run(make_store, tmp_path):
    """Make a run over a store of about 60 pages at an address; and give the batches of the local one."""
    made = {}

    def make(*, sums=True, mirror=None, deadline=20.0, remote="", name="away"):
        remote += "" if sums else "\nverify_pages = false"
        if not made:
            lengths = [int(n) for n in np.random.default_rng(0).integers(1, 500, 500)]
            path, _, _ = make_store("web", lengths, max_tokens_per_shard=70_000)
            (tmp_path / "local.toml").write_text(RUN.format(mirror="none", deadline=1, remote="", store="web"))
            made["expected"] = digests(Run.from_toml(tmp_path / "local.toml"))[0]
            made["path"] = path
        config = tmp_path / f"{name}.toml"
        store = f"file://{made['path']}"
        mirror = mirror or tmp_path / "mirror"
        config.write_text(RUN.format(mirror=mirror, deadline=deadline, remote=remote, store=store))
        return Run.from_toml(config), made["expected"]

    return make


def digests(run):
    loader = run.loader(micro_batch=8)
    return [hashlib.sha256(batch["input_ids"].tobytes()).hexdigest() for batch in loader], loader.network


def page_files(mirror: Path) -> list[Path]:
    return sorted(mirror.glob("*/pages/*/*.pages"))


def flip_bits(file: Path) -> None:
    """Flip a bit in each page."""
    data = bytearray(file.read_bytes())
    for at in range(100, len(data) // PAGE_ROOM * PAGE, PAGE):
        data[at] ^= 16
    file.write_bytes(bytes(data))


def zero_pages(file: Path) -> None:
    with file.open("r+b") as data:
        data.write(bytes(file.stat().st_size // PAGE_ROOM * PAGE))


def swap_pages(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[PAGE : 2 * PAGE] + data[:PAGE] + data[2 * PAGE :])


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def cut_by_a_byte(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def grow(file: Path) -> None:
    os.truncate(file, file.stat().st_size + 1)


@pytest.mark.parametrize("damage", [flip_bits, zero_pages, swap_pages])
def test_a_page_that_rotted_in_the_mirror_is_fetched_again_and_replaced(make_run, tmp_path, damage, caplog):
    """[N1.d]"""
    run, expected = make_run()
    assert digests(run)[0] == expected
    for file in page_files(tmp_path / "mirror"):
        damage(file)
    found, network = digests(make_run()[0])
    assert found == expected
    assert network.counters.corrupt > 0
    assert len([line for line in caplog.messages if "is not what its checksum says" in line]) == 1
    found, network = digests(make_run()[0])
    assert found == expected
    assert (network.counters.corrupt, network.counters.hits > 0) == (0, True)


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("damage", [os.unlink, cut, cut_by_a_byte, empty, grow])
def test_a_file_of_the_mirror_that_is_lost_or_cut_is_made_anew(make_run, tmp_path, damage, sums):
    """[N1.d]"""
    run, expected = make_run(sums=sums)
    assert digests(run)[0] == expected
    for file in page_files(tmp_path / "mirror"):
        damage(file)
    found, network = digests(make_run()[0])
    assert (found, network.counters.corrupt) == (expected, 0)
    found, network = digests(make_run()[0])
    assert found == expected
    assert network.counters.hits > 100_000


def test_a_small_file_that_rotted_in_the_mirror_is_fetched_again(make_run, tmp_path):
    """[N1.d]"""
    run, expected = make_run()
    assert digests(run)[0] == expected
    small = [
        file
        for pattern in ("manifest.json", "shard-*/documents.bin", ".sums/*.bin")
        for file in (tmp_path / "mirror").glob(f"*/{pattern}")
    ]
    assert len(small) == 5
    for file in small:
        good = file.read_bytes()
        for place in (0, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            assert digests(make_run()[0])[0] == expected
            assert file.read_bytes() == good


def test_a_mirror_that_is_removed_in_the_middle_of_a_run_changes_no_batch(make_run, tmp_path):
    for remote in ("", "limit_bytes = 100000"):
        run, expected = make_run(remote=f"{remote}\nhorizon_bytes = 4096")
        found = []
        for batch in run.loader(micro_batch=8, threads=0):
            if len(found) == 3:
                while (tmp_path / "mirror").exists():
                    shutil.rmtree(tmp_path / "mirror", ignore_errors=True)  # requests under way write to it
            found.append(hashlib.sha256(batch["input_ids"].tobytes()).hexdigest())
        assert found == expected


# Full disks.


def draw(*configs, prefix=(), limit=-1):
    """Draw all batches in a process of its own, that may write no file larger than the limit."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", DRAW, str(limit), *map(str, configs)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), [line for line in done.stderr.splitlines() if line.startswith("LOG")]


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("pages", [2, 20, 25])
def test_a_disk_that_takes_a_part_of_a_write_gives_no_wrong_token(make_run, tmp_path, pages, sums):
    """[N1.d] The limit of a process is the end of the disk: a write to it is cut short, the next one fails."""
    run, expected = make_run(sums=sums)
    digests(run)  # makes the files
    for file in page_files(tmp_path / "mirror"):
        size = file.stat().st_size
        os.truncate(file, 0)
        os.truncate(file, size)
    found, log = draw(tmp_path / "away.toml", limit=pages * PAGE + 1000)
    assert found == expected
    assert len([line for line in log if "nothing more can be stored in this mirror" in line]) == 1
    found, network = digests(make_run()[0])
    assert (found, network.counters.corrupt) == (expected, 0)


def test_where_no_file_can_be_made_training_continues_with_one_warning(make_run, tmp_path):
    _, expected = make_run()
    found, log = draw(tmp_path / "away.toml", limit=20_000)  # room for offsets, and for no file of pages
    assert found == expected
    (line,) = [line for line in log if "mirror" in line]
    assert "nothing more can be stored in this mirror: File too large; training continues" in line


def test_a_mirror_that_is_no_folder_is_named(make_run, tmp_path):
    (tmp_path / "taken").write_text("")
    run, _ = make_run(mirror=tmp_path / "taken")
    with pytest.raises(ConfigError, match=r"mirror must be a folder that can be written to, got .*/taken"):
        run.loader()


def own_mounts() -> list[str]:
    """Return what begins a command that may mount, out of sight of other processes; nothing if there is no way."""
    if shutil.which("unshare"):
        for prefix in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
            command = [*prefix, "mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/mnt"]
            if subprocess.run(command, check=False, capture_output=True).returncode == 0:
                return prefix
    return []


@pytest.mark.slow
@pytest.mark.parametrize("sums", [True, False])
def test_no_size_of_the_disk_gives_a_wrong_token_or_ends_a_run(make_run, tmp_path, sums, monkeypatch):
    """[N1.d] Each disk is read twice: what the first run stored on it is right."""
    prefix = own_mounts()
    if not prefix:
        pytest.skip("this user must not mount file systems")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for what has no room on the disk
    sizes = [4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 60, 100, 140, 148, 152, 200, 240, 400]
    configs, mounts = [], []
    for size in sizes:
        mirror = tmp_path / f"disk-{size}"
        mirror.mkdir()
        _, expected = make_run(sums=sums, mirror=mirror, deadline=5.0, name=f"away-{size}")
        mounts.append(f"mount -t tmpfs -o size={size}k tmpfs {mirror}")
        configs += 2 * [tmp_path / f"away-{size}.toml"]
    found, log = draw(*configs, prefix=[*prefix, "sh", "-c", " && ".join([*mounts, 'exec "$0" "$@"'])])
    assert found == 2 * len(sizes) * expected
    full = [line for line in log if "nothing more can be stored in this mirror: No space left" in line]
    assert len(sizes) < len(full) < 2 * len(sizes)  # once a run; the largest disks have room for all


# Processes that were stopped, and hold locks.


def lock_all(files: list[Path]) -> list[int]:
    """Lock all pages, as a process that fetches them does."""
    opened = [os.open(file, os.O_RDWR) for file in files]
    for descriptor in opened:
        request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    return opened


@pytest.mark.parametrize("remote", ["", "limit_bytes = 1000000"])
def test_pages_that_somebody_locked_for_ever_are_fetched_after_the_deadline(make_run, tmp_path, remote, caplog):
    run, expected = make_run(deadline=1.0, remote=remote)
    digests(run)  # makes the files
    for file in page_files(tmp_path / "mirror"):
        with file.open("r+b") as data:
            PageFile(data.fileno(), file.stat().st_size // PAGE_ROOM).drop(0, file.stat().st_size // PAGE_ROOM)
    opened = lock_all(page_files(tmp_path / "mirror"))
    found, network = digests(make_run(deadline=1.0, remote=remote)[0])
    assert (found, network.counters.hits) == (expected, 0)
    assert (
        len([line for line in caplog.messages if "another process keeps pages of this mirror locked" in line]) == 1
    )
    for descriptor in opened:
        os.close(descriptor)
    digests(make_run(remote=remote)[0])
    found, network = digests(make_run(remote=remote)[0])
    assert found == expected
    assert network.counters.hits > 100_000


@pytest.mark.parametrize("name", [".mirror.lock", "*/.lock", "*/pages/.lock"])
def test_no_lock_of_a_stopped_process_is_waited_for_for_ever(make_run, tmp_path, name):
    run, expected = make_run(deadline=1.0, remote="limit_bytes = 100000")
    mirror = tmp_path / "mirror"
    digests(run)
    locks = list(mirror.glob(name))
    assert len(locks) == 1
    for file in [*mirror.glob("*/*/*.bin"), *page_files(mirror), *mirror.glob("*/pages/versions.json")]:
        file.unlink()
    with locks[0].open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert digests(make_run(deadline=1.0, remote="limit_bytes = 100000")[0])[0] == expected
    assert digests(make_run(remote="limit_bytes = 100000")[0])[0] == expected


def test_a_lock_that_is_taken_while_a_run_reads_ends_storing_alone(make_run, tmp_path, caplog):
    remote = "limit_bytes = 40960\nhorizon_bytes = 4096"
    run, expected = make_run(deadline=1.0, remote=remote)
    found = []
    with (tmp_path / "held").open("wb"):
        stream = iter(run.loader(micro_batch=8, threads=0))
        found.append(hashlib.sha256(next(stream)["input_ids"].tobytes()).hexdigest())
        with (tmp_path / "mirror" / ".mirror.lock").open("wb") as held, caplog.at_level(logging.WARNING):
            fcntl.flock(held, fcntl.LOCK_EX)
            found += [hashlib.sha256(batch["input_ids"].tobytes()).hexdigest() for batch in stream]
    assert found == expected
    (line,) = [line for line in caplog.messages if "mirror" in line]
    assert "nothing more can be stored in this mirror: another process holds this lock for too long" in line
