"""What runs units: killed, interrupted, paused; nothing is left running and nothing wrong is left behind."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.build.corpus import files_of, some_texts, write_file

from tokenmill.build import PrepareOptions, prepare
from tokenmill.build.engines import LocalExecutor
from tokenmill.build.journal import unit_result
from tokenmill.build.tasks import Task, read_answer, run_unit
from tokenmill.errors import StoreError, StoreMissingError
from tokenmill.store import read_manifest

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


# Two attempts at one unit.


def unit_of(tmp_path, **options):
    """Return a job and its only task, as they are sent to workers, and the folder of its units."""
    corpus = write_file(tmp_path / "input.jsonl", some_texts(400) * 3)
    sent = []

    class Nobody:
        def submit(self, _, job, task):
            sent.append((job, task))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(
            corpus,
            out=tmp_path / "store",
            progress=False,
            executor=Nobody(),
            options=PrepareOptions(checkpoint_seconds=0, max_tokens_per_shard=20_000, **options),
        )
    return *sent[0], tmp_path / "store" / ".prepare" / "units"


def attempt_at_once(workers, job, task, units, dice):
    """Have two workers do one unit at once, each paused and resumed at random; return what they answer.

    Now and then one is paused until the other has finished, and the build is over.
    """
    futures = [workers.submit(run_unit, job, task) for _ in range(2)]
    processes = [worker.process for worker in workers._workers]
    zombie = dice.choice([None, None, *processes])
    over = False
    while not all(future.done() for future in futures):
        victim = dice.choice(processes)
        victim.send_signal(signal.SIGSTOP)
        time.sleep(dice.random() / 200)
        if victim is zombie:
            wait_for(lambda: any(future.done() for future in futures))
            if dice.random() < 0.5:
                over = True
                units.rename(units.with_name("gone"))
                units.mkdir()
            zombie = None
        victim.send_signal(signal.SIGCONT)
        time.sleep(dice.random() / 200)
    return [read_answer(future.result()) for future in futures], over


@pytest.mark.parametrize("rounds", [6, pytest.param(1000, marks=[pytest.mark.deep, pytest.mark.timeout(1200)])])
def test_two_attempts_at_a_unit_leave_one_that_is_whole(tmp_path, rounds):
    """[C1, D1.a] Whoever is second finds the unit done; one that wakes after the build is over harms nothing."""
    job, task, units = unit_of(tmp_path)
    key = msgspec.json.decode(task, type=Task).key
    known = read_answer(run_unit(job, task))
    whole = files_of(units / key)
    shutil.rmtree(units / key)
    dice = random.Random(rounds)
    workers = LocalExecutor()
    workers.grow(2)
    late = 0
    try:
        for number in range(rounds):
            answers, over = attempt_at_once(workers, job, task, units, dice)
            late += over
            folder = units.with_name("gone") if over else units
            assert files_of(folder / key) == whole, number
            assert known in answers, number
            if over:
                assert all(answer == known or isinstance(answer, StoreError) for answer in answers), answers
                assert unit_result(units, key) is not None or not (units / key).exists()
                shutil.rmtree(folder)
            else:
                assert answers == [known, known], number
            assert list((units / f".tmp-{key}").glob("*")) == [] or over, number
            shutil.rmtree(units)
            units.mkdir()
    finally:
        workers.close()
    assert rounds < 100 or late > 50
