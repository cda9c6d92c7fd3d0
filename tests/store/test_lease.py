"""A lease has one holder at a time: on any number of machines, with processes killed, paused and late."""

import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from tokenmill.errors import StoreError, StoreExistsError
from tokenmill.store import lease as lease_module
from tokenmill.store.layout import LEASE
from tokenmill.store.lease import Lease, LeaseWatch, has_ended, leased_folder, this_process


def as_another_machine(folder, name=LEASE):
    """Make a lease look as if a process of another machine held it."""
    file = folder / name
    record = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode({**record, "process": "0000-12-34", "host": "node7", "number": 12}))


@pytest.fixture
def quick(monkeypatch):
    """Leases are stale soon; those of this process are not touched, as if it were paused."""
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 60)
    monkeypatch.setattr(lease_module, "STALE_SECONDS", 0.5)


def test_a_lease_is_had_by_one_and_leaves_nothing_behind(tmp_path):
    with leased_folder(tmp_path) as held:
        held.check()
        with pytest.raises(
            StoreExistsError, match=rf"one build .* at a time, got another .*process {os.getpid()};"
        ):
            Lease(tmp_path)
    assert list(tmp_path.iterdir()) == []
    Lease(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_the_lease_of_a_killed_process_of_this_machine_is_taken_over_at_once(tmp_path):
    script = "import sys, time; from pathlib import Path; from tokenmill.store.lease import Lease\n"
    script += "held = Lease(Path(sys.argv[1])); print(flush=True); time.sleep(60)"
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            with pytest.raises(StoreExistsError, match=f"process {process.pid};"):
                Lease(tmp_path)
            process.kill()
    begin = time.monotonic()
    with leased_folder(tmp_path):
        assert time.monotonic() - begin < 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_a_paused_process_of_this_machine_keeps_its_lease(tmp_path):
    script = "import sys, time; from pathlib import Path; from tokenmill.store.lease import Lease\n"
    script += "held = Lease(Path(sys.argv[1])); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(2 * lease_module.STALE_SECONDS)
        with pytest.raises(StoreExistsError):
            Lease(tmp_path)
        process.kill()


@pytest.mark.usefixtures("quick")
def test_a_lease_of_another_machine_is_refused_when_it_is_touched_and_taken_over_when_it_is_not(tmp_path):
    zombie = Lease(tmp_path)
    as_another_machine(tmp_path)
    touching = threading.Event()

    def touch():
        while not touching.wait(0.05):
            os.utime(tmp_path / LEASE)

    thread = threading.Thread(target=touch)
    thread.start()
    with pytest.raises(StoreExistsError, match="in process 12 on node7; wait for it"):
        Lease(tmp_path)
    touching.set()
    thread.join()
    begin = time.monotonic()
    heir = Lease(tmp_path)
    assert time.monotonic() - begin > lease_module.STALE_SECONDS
    heir.check()
    with pytest.raises(StoreError, match=r"must keep its lease, got it taken over .*; let that one finish"):
        zombie.check()
    zombie.release()  # which must not take the lease from its heir
    heir.check()
    with pytest.raises(StoreExistsError, match=f"process {os.getpid()};"):
        Lease(tmp_path)
    heir.release()
    assert list(tmp_path.iterdir()) == []


def test_a_late_heir_of_a_lease_that_is_gone_does_not_drive_out_the_next_holder(tmp_path, monkeypatch):
    """It saw a holder that had ended, and was paused before it took over; meanwhile all was done and given back."""
    Lease(tmp_path)
    as_another_machine(tmp_path)
    first = msgspec.json.decode((tmp_path / LEASE).read_bytes())
    create, late = lease_module._create, []

    def paused(file, holder):
        if file.name.endswith(first["token"]) and not late:
            (tmp_path / LEASE).unlink()
            late.append(None)
            late[0] = Lease(tmp_path)
        return create(file, holder)

    monkeypatch.setattr(lease_module, "STALE_SECONDS", 0.1)
    monkeypatch.setattr(lease_module, "_create", paused)
    with pytest.raises(StoreExistsError):
        Lease(tmp_path)
    late[0].check()
    late[0].release()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_touches_its_lease_and_none_that_it_lost(tmp_path, monkeypatch):
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
    with pytest.raises(StoreError, match="must keep its lease"):
        held.check()


def test_a_lease_that_was_copied_with_its_folder_holds_nothing(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with leased_folder(tmp_path / "a"):
        (tmp_path / "b" / LEASE).write_bytes((tmp_path / "a" / LEASE).read_bytes())
    with leased_folder(tmp_path / "b"):
        pass
    assert list((tmp_path / "b").iterdir()) == []


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("data", [b"", b"{}", b'{"token": "../../x", "process": "", "host": "", "number": 1}'])
def test_a_lease_that_cannot_be_read_is_taken_over_when_nobody_touches_it(tmp_path, data):
    (tmp_path / LEASE).write_bytes(data)
    holders, lives = LeaseWatch(tmp_path).look()
    assert (len(holders), lives) == (1, None)
    with leased_folder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


RACE = """
import os, random, sys, time
from pathlib import Path
from tokenmill.errors import StoreExistsError
from tokenmill.store.lease import Lease
folder, log, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
dice, had = random.Random(seed), 0
end = time.monotonic() + float(sys.argv[4])
while time.monotonic() < end:
    try:
        lease = Lease(folder)
    except StoreExistsError:
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
