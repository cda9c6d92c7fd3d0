"""Worker processes: killed, interrupted, orphaned; nothing is left running and nothing wrong is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.build.corpus import files_of, some_texts, write_file

from tokenmill.build import PrepareOptions, prepare
from tokenmill.errors import StoreExistsError, StoreMissingError
from tokenmill.store import durable, read_manifest

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")

# Not guarded by `if __name__ == "__main__"`: workers must not run the script of their parent again.
SCRIPT = """
import sys
from tokenmill.build import PrepareOptions, prepare
with open(sys.argv[3], "a") as log:
    log.write("once ")
prepare(sys.argv[1], out=sys.argv[2], workers=2, options=PrepareOptions(chunk_bytes=1 << 20))
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """About 80 MB, two seconds of work: enough to be killed in the middle."""
    path = tmp_path_factory.mktemp("corpus") / "input.jsonl"
    return write_file(path, some_texts(5000) * 80)


@pytest.fixture
def start(corpus, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    started = []

    def start():
        command = [sys.executable, script, corpus, tmp_path / "store", tmp_path / "log"]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def children_of(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return value


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def amid_work(process, store):
    """Wait until a build has begun to write units, and return its workers."""
    wait_for(lambda: list((store / ".prepare" / "units").glob(".tmp-*")) or process.poll() is not None)
    assert process.poll() is None
    return wait_for(lambda: children_of(process.pid))


@pytest.mark.parametrize(
    ("victim", "sign", "message"),
    [
        ("worker", signal.SIGKILL, "got an end by SIGKILL (the system does this when memory runs out)"),
        ("parent", signal.SIGINT, "KeyboardInterrupt"),
        ("parent", signal.SIGKILL, ""),
    ],
)
def test_killed_build_leaves_no_process_and_no_store(start, tmp_path, victim, sign, message):
    """The next start needs no clean-up [C1.d]."""
    process = start()
    workers = amid_work(process, tmp_path / "store")
    os.kill(workers[0] if victim == "worker" else process.pid, sign)
    _, shown = process.communicate(timeout=30)
    assert process.returncode != 0
    assert message in shown
    wait_for(lambda: all(is_gone(pid) for pid in workers))
    with pytest.raises(StoreMissingError):
        read_manifest(tmp_path / "store")


def test_build_after_a_killed_one_gives_the_same_bytes_and_runs_the_script_once(start, corpus, tmp_path):
    """A kill leaves no trace in what comes after it [C1, D1.a]."""
    killed = start()
    os.kill(amid_work(killed, tmp_path / "store")[0], signal.SIGKILL)
    assert killed.wait() != 0
    (tmp_path / "log").unlink()
    assert start().wait() == 0
    assert (tmp_path / "log").read_text() == "once "
    prepare(corpus, out=tmp_path / "straight", workers=1, options=PrepareOptions(chunk_bytes=1 << 20))
    assert files_of(tmp_path / "store") == files_of(tmp_path / "straight")


ORPHANED = """
import os, subprocess, sys
from pathlib import Path
from tokenmill.store.durable import lock_folder
lock = lock_folder(Path(sys.argv[1]))
worker = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=(lock,))
print(worker.pid, flush=True)
os._exit(0)
"""


def test_no_build_begins_while_a_worker_of_a_killed_one_lives(tmp_path, monkeypatch):
    """[C1.c] The worker would write to the same files as the new build; it is waited for, but not for ever."""
    command = [sys.executable, "-c", ORPHANED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as gone:
        worker = int(gone.stdout.readline())
        assert gone.wait() == 0
        monkeypatch.setattr(durable, "ORPHAN_SECONDS", 0.1)
        told = rf"under way in workers of process {gone.pid}, which has ended; wait"
        with pytest.raises(StoreExistsError, match=told), durable.locked_folder(tmp_path):
            pass
        monkeypatch.setattr(durable, "ORPHAN_SECONDS", 30.0)
        gone.stdin.close()
        with durable.locked_folder(tmp_path):
            assert is_gone(worker)


def test_workers_hold_the_lock_of_the_build(start, tmp_path):
    """[C1.c] So that it outlives the process that took it."""
    workers = amid_work(start(), tmp_path / "store")
    assert [str(tmp_path / "store") in map(os.readlink, Path(f"/proc/{pid}/fd").iterdir()) for pid in workers] == [
        True
    ] * len(workers)
