"""What runs units: killed, interrupted, paused; nothing is left running and nothing wrong is left behind."""

import importlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.build.corpus import files_of, some_texts, write_file

from tokenmill.build import PrepareOptions, plan_units, prepare
from tokenmill.build.engines import LocalExecutor
from tokenmill.build.journal import Journal, unit_result
from tokenmill.build.notes import read_failure, read_note
from tokenmill.build.status import build_status
from tokenmill.build.tasks import read_list, run_index
from tokenmill.errors import ConfigError, StoreMissingError, WorkerLostError
from tokenmill.store import read_manifest

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")

# Not guarded by `if __name__ == "__main__"`: workers must not run the script of their parent again.
SCRIPT = """
import sys
from tokenmill.build import PrepareOptions, plan_units, prepare
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
    wait_for(lambda: list((store / ".prepare" / "units").glob(".tmp-*/*")) or process.poll() is not None)
    assert process.poll() is None
    return wait_for(lambda: children_of(process.pid))


@pytest.mark.parametrize(
    ("victim", "sign", "message"),
    [
        ("parent", signal.SIGINT, "KeyboardInterrupt"),
        ("parent", signal.SIGKILL, ""),
        ("parent of a stuck worker", signal.SIGTERM, ""),
    ],
)
def test_killed_build_leaves_no_process_and_no_store(start, tmp_path, victim, sign, message):
    """The next start needs no clean-up [C1.d]."""
    process = start()
    workers = amid_work(process, tmp_path / "store")
    if victim == "parent of a stuck worker":
        attempts = (tmp_path / "store" / ".prepare" / "units").glob(".tmp-*/*")
        os.kill(next(int(attempt.name.split("-")[1]) for attempt in attempts), signal.SIGSTOP)
    os.kill(process.pid, sign)
    _, shown = process.communicate(timeout=30)
    assert process.returncode != 0
    assert message in shown
    wait_for(lambda: all(is_gone(pid) for pid in workers))
    with pytest.raises(StoreMissingError):
        read_manifest(tmp_path / "store")


KILLED = """
import os, signal
from pathlib import Path

def once(record):
    if record["text"].startswith("deadly"):
        try:
            Path("killed").touch(exist_ok=False)
        except FileExistsError:
            return record
        os.kill(os.getpid(), signal.SIGKILL)
    return record

def always(record):
    if record["text"].startswith("deadly"):
        with open("killed", "a") as file:
            file.write("again ")
        os.kill(os.getpid(), signal.SIGKILL)
    return record
"""


@pytest.fixture
def killers(tmp_path, monkeypatch):
    """Return a module with functions that kill the worker which calls them, and a corpus with a record for them."""
    (tmp_path / "killers.py").write_text(KILLED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    texts = some_texts(200)
    write_file(tmp_path / "in.jsonl", [*texts[:150], "deadly " + texts[150], *texts[150:]])
    yield importlib.import_module("killers")
    del sys.modules["killers"]


def test_a_unit_whose_worker_is_killed_is_tried_once_more(killers, tmp_path, capsys):
    """[D1.a]"""
    options = PrepareOptions(chunk_bytes=4096)
    for name in ("first", "second"):  # the second time nobody is killed
        prepare("in.jsonl", out=tmp_path / name, workers=2, map=killers.once, options=options, progress=False)
        warnings = capsys.readouterr().err
        assert warnings.count("got an end by SIGKILL (the system does this when memory runs out)") == (
            name == "first"
        )
        assert warnings.count("its unit is tried once more") == (name == "first")
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")


def test_a_unit_that_kills_two_workers_ends_the_build_and_the_state_says_why(killers, tmp_path):
    options = PrepareOptions(chunk_bytes=4096)
    lost = (
        r"in\.jsonl: the worker process \d+ must live until its unit is done, got an end by SIGKILL .*; run again"
    )
    with pytest.raises(WorkerLostError, match=lost):
        prepare("in.jsonl", out="store", workers=2, map=killers.always, options=options, progress=False)
    assert (tmp_path / "killed").read_text() == "again again "
    status = build_status("store")
    assert (status.state, status.seconds_left) == ("stopped", None)
    assert re.search(lost, status.reason)


def test_build_after_a_killed_one_gives_the_same_bytes_and_runs_the_script_once(start, corpus, tmp_path):
    """A kill leaves no trace in what comes after it [C1, D1.a]."""
    killed = start()
    amid_work(killed, tmp_path / "store")
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() != 0
    (tmp_path / "log").unlink()
    assert start().wait() == 0
    assert (tmp_path / "log").read_text() == "once "
    prepare(corpus, out=tmp_path / "straight", workers=1, options=PrepareOptions(chunk_bytes=1 << 20))
    assert files_of(tmp_path / "store") == files_of(tmp_path / "straight")


# Units that make no progress.


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "deduplicate"), [("local", True), ("processes", False)])
def test_a_unit_whose_worker_is_stuck_is_told_of_and_ends_the_build_in_time(
    tmp_path, monkeypatch, capfd, engine, deduplicate
):
    """Which unit, and for how long; what its worker was at is done when the build goes on."""
    monkeypatch.setattr("tokenmill.build.schedule.STALL_SECONDS", 1)
    corpus = write_file(tmp_path / "input.jsonl", some_texts(2000) * 20)
    options = PrepareOptions(chunk_bytes=1 << 20, deduplicate=deduplicate)
    journal = tmp_path / "store" / ".prepare"
    stopped = []

    def stop_a_worker(_):
        for worker in [] if stopped else journal.glob("workers/*"):
            pid = int(worker.name.split("-")[1])
            os.kill(pid, signal.SIGSTOP)
            noted = read_note(worker)
            if noted is None or any((journal / place / noted.key).exists() for place in ("units", "scans")):
                os.kill(pid, signal.SIGCONT)  # it was between two units
            else:
                stopped.append(pid)
                break

    with ExitStack() as stack:
        given = {"workers": 2}
        if engine == "processes":
            given = {"executor": stack.enter_context(ProcessPoolExecutor(2, multiprocessing.get_context("spawn")))}
        stack.callback(lambda: [os.kill(pid, signal.SIGKILL) for pid in stopped if not is_gone(pid)])
        stuck = r"input\.jsonl, unit \d+ from byte [\d,]+ on: "
        with pytest.raises(WorkerLostError, match=rf"{stuck}no progress for 5 s, and unit_timeout is 5 s;"):
            prepare(
                corpus,
                out=tmp_path / "store",
                options=options,
                unit_timeout=5,
                progress=False,
                on_progress=stop_a_worker,
                **given,
            )
    assert stopped
    assert re.search(stuck + "no progress for 1 s; unit_timeout=", capfd.readouterr().err)
    report = prepare(corpus, out=tmp_path / "store", workers=1, progress=False, options=options)
    straight = prepare(corpus, out=tmp_path / "straight", workers=1, progress=False, options=options)
    assert report.fingerprint == straight.fingerprint


def test_a_timeout_must_be_a_number_of_seconds(tmp_path):
    with pytest.raises(ConfigError, match=r"unit_timeout: must be more than 0 seconds, got 0; leave it out"):
        prepare(write_file(tmp_path / "a.jsonl", ["a"]), out=tmp_path / "store", unit_timeout=0)


# Two attempts at one unit.


def unit_of(tmp_path, **options):
    """Return the arguments by which a worker writes the only unit of a build, its key, and the folder of units."""
    corpus = write_file(tmp_path / "input.jsonl", some_texts(400) * 3)
    out = tmp_path / "store"
    plan_units(corpus, out=out, options=PrepareOptions(max_tokens_per_shard=20_000, **options))
    tasks = read_list(Journal(out))
    ((index, key),) = [(index, task.key) for index, task in enumerate(tasks.tasks()) if task.kind == "write"]
    return (str(out), tasks.head.checksum, index), key, out / ".prepare" / "units"


def attempt_at_once(workers, work, units, dice):
    """Have two workers do one unit at once, each paused and resumed at random; return whether the build was over.

    Now and then one is paused until the other has finished, and the build is over.
    """
    futures = [workers.submit(run_index, *work) for _ in range(2)]
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
    for future in futures:
        future.result()
    return over


@pytest.mark.parametrize("rounds", [6, pytest.param(1000, marks=[pytest.mark.deep, pytest.mark.timeout(1200)])])
def test_two_attempts_at_a_unit_leave_one_that_is_whole(tmp_path, rounds):
    """[C1, D1.a] Whoever is second finds the unit done; one that wakes after the build is over harms nothing."""
    work, key, units = unit_of(tmp_path)
    journal = Journal(tmp_path / "store")
    run_index(*work)
    whole = files_of(units / key)
    shutil.rmtree(units / key)
    dice = random.Random(rounds)
    workers = LocalExecutor()
    workers.grow(2)
    late = 0
    try:
        for number in range(rounds):
            over = attempt_at_once(workers, work, units, dice)
            late += over
            folder = units.with_name("gone") if over else units
            assert files_of(folder / key) == whole, number
            if over:
                assert unit_result(units, key) is not None or not (units / key).exists()
                failure = read_failure(journal.folder, key)
                assert failure is None or failure.error == "StoreError", failure
                shutil.rmtree(folder)
            else:
                assert read_failure(journal.folder, key) is None, number
            assert list((units / f".tmp-{key}").glob("*")) == [] or over, number
            shutil.rmtree(units)
            units.mkdir()
    finally:
        workers.close()
    assert rounds < 100 or late > 50
