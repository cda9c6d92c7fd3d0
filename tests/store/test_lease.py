"""A lease has one holder at a time: on any number of machines, with processes killed, paused and late."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from tokenmill.errors import StoreBusyError, StoreError
from tokenmill.store import lease as lease_module
from tokenmill.store.layout import LEASE
from tokenmill.store.lease import Lease, find_holder, has_ended, leased_folder, this_machine, this_process

START = """
import sys, time
from pathlib import Path
from tokenmill.store.lease import Lease
held = Lease(Path(sys.argv[1]))
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def start():
    """Return a function that starts a process which takes the lease of a folder and keeps it."""
    started = []

    def start(folder):
        process = subprocess.Popen([sys.executable, "-c", START, folder], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def no_locks(monkeypatch):
    """Make the file system one without locks, such as an NFS mount without a lock daemon."""

    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)


def as_another_machine(folder):
    """Make a lease look as if a process of another machine held it."""
    file = folder / LEASE
    record = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode({**record, "process": "0000-12-34", "host": "node7", "number": 12}))


def test_a_lease_has_one_holder_and_leaves_no_file(tmp_path):
    with leased_folder(tmp_path) as held:
        held.check()
        assert find_holder(tmp_path)[1]
        with pytest.raises(StoreBusyError, match=rf"another build writes to it: process {os.getpid()}; wait for"):
            Lease(tmp_path)
        held.check()
    assert list(tmp_path.iterdir()) == []
    assert find_holder(tmp_path) == (None, False)
    Lease(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_the_lease_of_a_killed_process_is_free_at_once(tmp_path, start):
    """[C1.d] Also of one that ran on another machine: the lock ended with it."""
    for _ in range(3):
        process = start(tmp_path)
        with pytest.raises(StoreBusyError, match=f"process {process.pid};"):
            Lease(tmp_path)
        process.kill()
        process.wait()
        holder, is_held = find_holder(tmp_path)
        assert (holder.number, is_held) == (process.pid, False)
    as_another_machine(tmp_path)
    begin = time.monotonic()
    with leased_folder(tmp_path):
        assert time.monotonic() - begin < 1
    assert list(tmp_path.iterdir()) == []


def test_a_paused_process_keeps_its_lease(tmp_path, start):
    process = start(tmp_path)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreBusyError):
        Lease(tmp_path)
    assert find_holder(tmp_path)[1]


def test_a_forked_process_neither_keeps_nor_releases_the_lease(tmp_path):
    lease = Lease(tmp_path)
    ready, child_ready = os.pipe()
    done, child_done = os.pipe()
    child = os.fork()
    if child == 0:
        lease.release()
        os.write(child_ready, b".")
        os.read(done, 1)
        os._exit(0)
    os.read(ready, 1)
    lease.check()
    assert find_holder(tmp_path)[1]
    lease.release()
    with leased_folder(tmp_path):
        pass
    os.write(child_done, b".")
    assert os.waitpid(child, 0)[1] == 0
    for descriptor in (ready, child_ready, done, child_done):
        os.close(descriptor)


def test_a_lease_whose_file_was_removed_is_lost(tmp_path):
    lease = Lease(tmp_path)
    (tmp_path / LEASE).unlink()
    with pytest.raises(StoreError, match=r"the lease of this build was removed while it ran; wait until"):
        lease.check()
    with leased_folder(tmp_path) as other:
        lease.release()  # must not take the lease from the next holder
        other.check()
    assert list(tmp_path.iterdir()) == []


def test_a_lease_that_was_copied_with_its_folder_holds_nothing(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with leased_folder(tmp_path / "a"):
        (tmp_path / "b" / LEASE).write_bytes((tmp_path / "a" / LEASE).read_bytes())
        with leased_folder(tmp_path / "b"):
            pass
    assert list((tmp_path / "b").iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"token": 1}'])
def test_a_damaged_lease_that_nobody_holds_is_taken(tmp_path, data):
    (tmp_path / LEASE).write_bytes(data)
    assert not find_holder(tmp_path)[1]
    with leased_folder(tmp_path) as lease:
        lease.check()
    assert list(tmp_path.iterdir()) == []


# File systems without locks.


@pytest.mark.usefixtures("no_locks")
def test_without_locks_one_process_creates_the_file(tmp_path):
    with leased_folder(tmp_path) as held:
        held.check()
        assert find_holder(tmp_path)[1]
        with pytest.raises(StoreBusyError, match=rf"process {os.getpid()}, which wrote its last heartbeat 0 s ago"):
            Lease(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_error_says_how_to_remove_a_stale_lease(tmp_path):
    """[C1.d] Nobody takes it over: without a lock two processes could do so at once."""
    Lease(tmp_path)
    as_another_machine(tmp_path)
    os.utime(tmp_path / LEASE, (time.time() - 90, time.time() - 90))
    assert not find_holder(tmp_path)[1]
    with pytest.raises(StoreBusyError) as error:
        Lease(tmp_path)
    assert re.search(r"process 12 on node7, which wrote its last heartbeat 9\d s ago", str(error.value))
    assert str(error.value).endswith(f"if that process is gone, remove {tmp_path / LEASE} and run again")
    (tmp_path / LEASE).unlink()
    with leased_folder(tmp_path):
        pass


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_holder_that_has_ended_is_named_as_such(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        pass
    Lease(tmp_path)
    record = msgspec.json.decode((tmp_path / LEASE).read_bytes())
    ended = f"{this_machine()}-{process.pid}-123"
    (tmp_path / LEASE).write_bytes(msgspec.json.encode({**record, "process": ended}))
    with pytest.raises(StoreBusyError, match=r"which has ended; wait .* remove"):
        Lease(tmp_path)


@pytest.mark.usefixtures("no_locks")
def test_a_lease_of_a_machine_without_locks_is_respected_by_one_with_locks(tmp_path, monkeypatch):
    with leased_folder(tmp_path) as held:
        monkeypatch.undo()
        with pytest.raises(StoreBusyError, match=r"last heartbeat .* remove"):
            Lease(tmp_path)
        held.check()


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_holder_touches_its_lease_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.02)
    held = Lease(tmp_path)
    before = (tmp_path / LEASE).stat().st_mtime_ns
    time.sleep(0.3)
    assert (tmp_path / LEASE).stat().st_mtime_ns > before
    record = msgspec.json.decode((tmp_path / LEASE).read_bytes())
    (tmp_path / LEASE).write_bytes(msgspec.json.encode({**record, "token": "another"}))
    time.sleep(0.1)
    before = (tmp_path / LEASE).stat().st_mtime_ns
    time.sleep(0.1)
    assert (tmp_path / LEASE).stat().st_mtime_ns == before
    (tmp_path / LEASE).unlink()
    time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError, match="was removed while it ran"):
        held.check()


RACE = """
import os, random, sys, time
from pathlib import Path
from tokenmill.errors import StoreBusyError
from tokenmill.store.lease import Lease
folder, log, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
dice, had = random.Random(seed), 0
end = time.monotonic() + float(sys.argv[4])
while time.monotonic() < end:
    try:
        lease = Lease(folder)
    except StoreBusyError:
        time.sleep(dice.random() / 500)
        continue
    os.close(os.open(log, os.O_CREAT | os.O_EXCL))  # fails if there are two holders
    time.sleep(dice.random() / 500)
    lease.check()
    os.unlink(log)
    lease.release()
    had += 1
print(had)
"""


def test_processes_that_all_want_a_lease_have_it_one_after_the_other(tmp_path):
    """[C1.c] Each creates, while it holds the lease, a file that must not be there."""
    (tmp_path / "folder").mkdir()
    command = [sys.executable, "-c", RACE, tmp_path / "folder", tmp_path / "log"]
    processes = [
        subprocess.Popen([*command, str(seed), "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in range(4)
    ]
    told = [process.communicate() for process in processes]
    assert [errors for _, errors in told] == [""] * 4
    assert sum(int(had) for had, _ in told) > 20
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_process_is_known_to_have_ended_only_on_this_machine():
    assert not has_ended(this_process())
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        pass
    machine, _, _ = this_process().split("-")
    assert has_ended(f"{machine}-{process.pid}-123")
    assert has_ended(f"{machine}-{os.getpid()}-1")  # another one had the number before
    assert not has_ended("0000-1-1")
    assert not has_ended("")
