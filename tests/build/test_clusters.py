"""One corpus gives one store, whatever runs its units: JSONL and Parquet, chats, duplicates, domains, a split."""

import concurrent.futures
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.build.clusters import CHATS, bad_records, build, digest_of, write_bad, write_corpus

from tokenmill.build import PrepareOptions, plan_units, prepare, run_part
from tokenmill.build.job import asked_for
from tokenmill.build.journal import Journal, RunningBuild
from tokenmill.build.schedule import MAX_IN_FLIGHT, run_by
from tokenmill.build.tasks import Task, error_of, write_list
from tokenmill.demo import TOKENIZER_DIR
from tokenmill.documents import cut_files, find_files
from tokenmill.errors import (
    ConfigError,
    DocumentError,
    StoreCorruptError,
    StoreMissingError,
    TokenmillError,
    WorkerLostError,
)
from tokenmill.store import read_manifest

pytestmark = pytest.mark.filterwarnings("ignore")  # of the engines themselves


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write the corpus, and a file with bad records."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    write_bad(folder)
    return folder


@pytest.fixture(scope="module")
def wanted(corpus):
    return build(corpus / "in", corpus / "one worker", workers=1)


@pytest.fixture(scope="module")
def wanted_of_bad(corpus):
    return bad_records(corpus / "bad.jsonl", corpus / "bad, one worker", workers=1)


@pytest.fixture
def engine(request, tmp_path):
    """Start what runs units; end it behind the test."""
    if request.param == "processes":
        with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            yield {"executor": pool}
    elif request.param == "threads":
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            yield {"executor": pool}
    elif request.param == "dask":
        distributed = pytest.importorskip("distributed")
        with (
            distributed.LocalCluster(
                n_workers=2,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address=None,
                local_directory=tmp_path,
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            yield {"executor": client.get_executor()}
    elif request.param == "submitit":
        submitit = pytest.importorskip("submitit")
        executor = submitit.AutoExecutor(folder=tmp_path / "jobs", cluster="local")
        executor.update_parameters(timeout_min=5, gpus_per_node=0)
        yield {"executor": executor}
    else:
        yield {"workers": 2}


ENGINES = ["two workers", "processes", "threads", "dask"]


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_every_engine_makes_the_same_store(corpus, wanted, wanted_of_bad, engine, tmp_path):
    """[D1.a] And says the same of bad records: the file and line that stopped it, how many were skipped."""
    assert build(corpus / "in", tmp_path / "out", **engine) == wanted
    told = bad_records(corpus / "bad.jsonl", tmp_path / "bad", **engine)
    assert told == wanted_of_bad
    assert "bad.jsonl:123: a text must be a string" in told["error"]
    assert (told["documents"], told["skipped"]) == (258, {"json": 1, "not_text": 1})


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["submitit"], indirect=True)
def test_an_executor_whose_futures_do_not_call_back_is_asked(corpus, engine, tmp_path):
    """Those of submitit; each unit is a process of its own there, so there are but few."""
    options = PrepareOptions(chunk_bytes=40_000, on_error="skip")
    assert build(corpus / "bad.jsonl", tmp_path / "out", options, **engine) == build(
        corpus / "bad.jsonl", tmp_path / "straight", options, workers=1
    )


def fingerprints(out):
    manifests = sorted(out.rglob("manifest.json"))
    return {str(path.parent.relative_to(out)): read_manifest(path.parent).fingerprint for path in manifests}


@pytest.mark.usefixtures("wanted")
def test_a_tokenizer_is_sent_by_content_and_may_be_gone(corpus, tmp_path):
    """[D1.a] Workers on other machines have no such path."""
    shutil.copytree(TOKENIZER_DIR, tmp_path / "tokenizer")
    planned = {"out": tmp_path / "out", "tokenizer": tmp_path / "tokenizer", "recipe": "chat", "options": CHATS}
    plan_units(corpus / "in", **planned)
    (tmp_path / "tokenizer").rename(tmp_path / "elsewhere")
    for _ in range(2):
        run_part(tmp_path / "out", "0/1", workers=2, progress=False)
    (tmp_path / "elsewhere").rename(tmp_path / "tokenizer")
    report = prepare(corpus / "in", progress=False, **planned)
    assert report.resumed_units == report.units
    assert {store.route: store.fingerprint for store in report.stores} == fingerprints(corpus / "one worker")


# Parts.


def test_parts_in_any_order_and_twice_make_the_same_store(corpus, wanted, tmp_path):
    """[D1.a] Records are hashed in a first round, as duplicates are looked for, and written in a second."""
    planned = plan_units(corpus / "in", out=tmp_path, tokenizer=TOKENIZER_DIR, recipe="chat", options=CHATS)
    assert (planned.phase, planned.done) == ("hash", 0)
    assert planned.units > 5
    parts = [f"{part}/3" for part in (2, 3, 1)]
    reports = [run_part(tmp_path, part, workers=1, progress=False) for part in parts]
    assert [report.phase for report in reports] == ["hash", "hash", "write"]
    reports = [run_part(tmp_path, part, workers=1, progress=False) for part in [*parts, *parts]]
    assert sum(report.units for report in reports[:3]) == planned.units
    assert all(report.resumed_units == report.units for report in reports[3:])
    assert build(corpus / "in", tmp_path) == wanted
    # One that comes late, as a task that was requeued may, finds nothing to do.
    assert run_part(tmp_path, parts[0]).phase == "finished"


def test_the_plain_command_does_what_parts_have_left(corpus, wanted, tmp_path):
    plan_units(corpus / "in", out=tmp_path, tokenizer=TOKENIZER_DIR, recipe="chat", options=CHATS)
    run_part(tmp_path, "0/3", workers=1, progress=False)
    assert build(corpus / "in", tmp_path, workers=1) == wanted


def test_a_bad_record_of_a_part_is_told_with_its_line_in_the_file(corpus, wanted_of_bad, tmp_path):
    """[D1.a] Though other parts have the lines before it, and have not been done."""
    options = PrepareOptions(chunk_bytes=5000)
    units = plan_units(corpus / "bad.jsonl", out=tmp_path, options=options).units
    told = []
    for part in reversed(range(units)):
        try:
            run_part(tmp_path, f"{part}/{units}", progress=False)
        except DocumentError as error:
            told.append(str(error))
    assert [len(told), told[-1]] == [2, wanted_of_bad["error"]]
    assert "bad.jsonl:192: a line must be one JSON object" in told[0]


def test_parts_are_refused_without_a_list_for_another_one_and_after_damage(corpus, tmp_path):
    with pytest.raises(StoreMissingError, match=r"there is no list of units; .*--plan-only` first"):
        run_part(tmp_path / "none", "1/2")
    with pytest.raises(ConfigError, match=r"part: must be a part of a number of parts, got '3/2'; write 3/64"):
        run_part(tmp_path, "3/2")
    out = tmp_path / "out"
    plan_units(corpus / "bad.jsonl", out=out)
    with pytest.raises(
        ConfigError, match=r"asked for as the list of units was, got tokenizer 'bytes' -> 'x'; give"
    ):
        run_part(out, "1/2", asked=asked_for(corpus / "bad.jsonl", "x", "text", PrepareOptions()))
    listed = out / ".prepare" / "units.jsonl"
    listed.write_bytes(listed.read_bytes().replace(b"bad.jsonl", b"bed.jsonl"))
    with pytest.raises(StoreCorruptError, match=r"units\.jsonl: its content is not what prepare wrote"):
        run_part(out, "1/2")


PART = """
import sys
from tokenmill.build import run_part
print(run_part(sys.argv[1], sys.argv[2], workers=2, progress=False).phase)
"""


def kill_parts(out, dice, kills):
    """Start parts, two at a time, perhaps the same twice, and kill them at random; return how many were killed."""
    killed = 0
    while killed < kills:
        parts = [
            subprocess.Popen([sys.executable, "-c", PART, out, f"{dice.randrange(3)}/3"], stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for part in parts:
            time.sleep(dice.uniform(0.5, 2.0))
            part.send_signal(signal.SIGKILL)
            killed += part.wait() == -signal.SIGKILL
            part.stdout.close()
    return killed


@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=[pytest.mark.deep, pytest.mark.timeout(900)])])
def test_parts_killed_at_random_end_with_the_same_store(corpus, wanted, tmp_path, kills):
    """[C1.a, D1.a]"""
    dice = random.Random(kills)
    plan_units(corpus / "in", out=tmp_path, tokenizer=TOKENIZER_DIR, recipe="chat", options=CHATS)
    kill_parts(tmp_path, dice, kills)
    assert build(corpus / "in", tmp_path, workers=1) == wanted


# Scripts of the guide.


def script_of(name):
    """Return a file of the guide on clusters."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "clusters.md"
    found = re.search(rf"<!-- file: {re.escape(name)} -->\n```\w+\n(.*?)```", page.read_text(), re.DOTALL)
    return found[1]


@pytest.mark.parametrize("system", ["slurm", "kubernetes"])
def test_the_scripts_of_the_guide_do_every_part(corpus, tmp_path, system):
    """As far as they can be run without those systems: each part, with what the system would tell it."""
    out = tmp_path / "out"
    options = PrepareOptions(chunk_bytes=5000, on_error="skip")
    units = plan_units(corpus / "bad.jsonl", out=out, options=options).units
    if system == "slurm":
        commands = ["bash", "-c", script_of("prepare.sbatch")]
        told = [{"SLURM_ARRAY_TASK_ID": str(part), "SLURM_ARRAY_TASK_COUNT": "2"} for part in range(2)]
    else:
        yaml = pytest.importorskip("yaml")
        job = yaml.safe_load(script_of("prepare.yaml"))["spec"]
        assert (job["completionMode"], job["completions"]) == ("Indexed", 64)
        commands = job["template"]["spec"]["containers"][0]["command"]
        told = [{"JOB_COMPLETION_INDEX": str(part)} for part in range(64) if part < units]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for each in told[:2] if system == "kubernetes" else told:
        environment = {**os.environ, "PATH": path, "STORE": str(out), **each}
        done = subprocess.run(commands, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    report = prepare(corpus / "bad.jsonl", out=out, options=options, progress=False)
    assert report.resumed_units == (units if system == "slurm" else 2)


# Systems that listen on all interfaces, in a network of their own.


def in_a_network_of_its_own(command, folder, **environment):
    """Run a command with no network but a loopback of its own."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip, to keep daemons off the network")
    probe = subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"needs the right to a network namespace, to keep daemons off the network: {probe.stderr}")
    done = subprocess.run(
        ["unshare", "-n", *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def short_path(tmp_path):
    """Give the test's own folder under a short path: sockets have paths of 107 bytes at most."""
    link = Path(tempfile.mkdtemp(prefix="tm-"))
    link.rmdir()
    link.symlink_to(tmp_path)
    yield link
    link.unlink()


@pytest.mark.slow
def test_an_array_of_real_slurm_makes_the_same_store(corpus, wanted, tmp_path, short_path):
    """[D1.a] With the script of the guide; twice, as records are hashed first."""
    root = os.environ.get("SLURM_ROOT")
    if root is None:
        pytest.skip("needs SLURM_ROOT, a folder with Debian's packages of Slurm unpacked: tests/build/slurm.sh")
    out = tmp_path / "out"
    planned = plan_units(corpus / "in", out=out, tokenizer=TOKENIZER_DIR, recipe="chat", options=CHATS)
    (tmp_path / "prepare.sbatch").write_text(script_of("prepare.sbatch"))
    (tmp_path / "daemons").mkdir()
    submit = """
        array() { sbatch --parsable --array=0-3 --cpus-per-task=1 --output=%x-%A-%a.log "$@" prepare.sbatch; }
        first=$(array)
        second=$(array --dependency=afterany:$first)
        sbatch --wait --dependency=afterany:$second --output=/dev/null --wrap true
        cat prepare-*.log
        squeue --noheader
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = Path(__file__).with_name("slurm.sh")
    command = ["timeout", "200", "bash", script, root, short_path / "daemons", "bash", "-c", submit]
    told = in_a_network_of_its_own(command, tmp_path, STORE=str(out), PATH=path)
    assert len(list(tmp_path.glob("prepare-*.log"))) == 8, told
    assert (tmp_path / "out" / ".prepare" / "units.jsonl").exists()
    report = prepare(corpus / "in", out=out, tokenizer=TOKENIZER_DIR, recipe="chat", options=CHATS, progress=False)
    assert report.resumed_units == report.units == planned.units, told
    assert digest_of(out) == wanted


# Ray.


def run_on_ray(corpus, folder, kills):
    pytest.importorskip("ray")
    for name in ("in", "bad.jsonl"):
        (folder / name).symlink_to(corpus / name)
    command = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    command += [sys.executable, Path(__file__).with_name("clusters.py"), folder, str(kills)]
    told = in_a_network_of_its_own(command, folder, RAY_TMPDIR=str(folder))
    assert (folder.resolve() / "ray").is_dir()  # its temporary folders
    return json.loads(told.splitlines()[-1])


@pytest.mark.slow
def test_ray_makes_the_same_store_on_one_node_and_two_with_workers_and_raylets_killed(
    corpus, wanted, wanted_of_bad, short_path
):
    """[C1.a, D1.a] Lost work is done again by Ray; a bad record is not, and is told as everywhere.

    Ctrl-C cancels what is under way, and the next build goes on.
    """
    told = run_on_ray(corpus, short_path, 2)
    assert (told["one node"], told["two nodes"], told["nodes"]) == (wanted, wanted, 2)
    assert told["interrupted"] == [True, 0, wanted]
    assert told["killed"] == ["worker", "raylet"]
    assert set(told["digests"]) == {wanted}
    assert told["bad"]["error"].rpartition("/")[2] == wanted_of_bad["error"].rpartition("/")[2]
    for name in ("skipped", "documents"):
        assert told["bad"][name] == wanted_of_bad[name]


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_ray_makes_the_same_store_through_many_kills(corpus, wanted, short_path):
    """[C1.a, D1.a]"""
    told = run_on_ray(corpus, short_path, 60)
    assert len(told["killed"]) == 60
    assert {"worker", "raylet"} == set(told["killed"])
    assert set(told["digests"]) == {wanted}


# The loop that hands out units.


def tasks_of(folder, count):
    """Write a list of tasks of which nothing is done; return the journal and the list."""
    path = folder / "in.txt"
    path.write_text("text")
    (unit,) = cut_files(find_files(path).files, chunk_bytes=1 << 20)
    journal = Journal(folder / "out")
    journal.begin(RunningBuild(identity={}, chunk_bytes=1, rebuild=False))
    tasks = [Task(kind="write", unit=unit, key=str(number)) for number in range(count)]
    return journal, write_list(journal, "write", tasks, b"{}", {}, {})


class Backwards:
    """Does tasks in the wrong order, when as many are in progress as may be; counts those."""

    def __init__(self, wrong=()):
        self.waiting, self.most, self.wrong = [], 0, wrong

    def submit(self, _, __, ___, index):
        future = concurrent.futures.Future()
        self.waiting.append((future, index))
        self.most = max(self.most, len(self.waiting))
        return future

    def tick(self):
        while self.waiting:
            future, index = self.waiting.pop()
            if not future.set_running_or_notify_cancel():
                continue
            if index in self.wrong:
                future.set_exception(ConnectionError(f"lost {index}"))
            else:
                future.set_result(None)


def test_results_come_in_order_whatever_the_order_of_an_engine(tmp_path):
    engine = Backwards()
    journal, tasks = tasks_of(tmp_path, MAX_IN_FLIGHT + 100)
    indices = range(len(tasks))
    assert list(run_by(engine, journal, tasks, indices, engine.tick)) == list(indices)
    assert engine.most == MAX_IN_FLIGHT


def test_work_that_an_engine_lost_is_told_as_such_and_the_first_in_order_counts(tmp_path):
    """To try again may help, which is not so for a bad record: those are of other classes."""
    engine = Backwards(wrong=(7, 3, 5))
    found = []
    journal, tasks = tasks_of(tmp_path, 10)
    with pytest.raises(WorkerLostError, match=r"in\.txt: a worker must live .* ConnectionError: lost 3; run again"):
        found.extend(run_by(engine, journal, tasks, range(10), engine.tick))
    assert found in ([], [0, 1, 2])
    assert not issubclass(DocumentError, WorkerLostError)


def test_an_error_of_an_unknown_class_is_raised_all_the_same():
    assert type(error_of("DocumentError", "why")) is DocumentError
    for name in ("Refusal", "warn", "re"):
        assert (type(error_of(name, "why")), str(error_of(name, "why"))) == (TokenmillError, "why")


def test_what_is_no_executor_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"executor: must have submit\(function, \*args\).*got 5; leave it out"):
        prepare(tmp_path, out=tmp_path / "out", executor=5)


def test_a_process_pool_that_breaks_is_named(corpus, tmp_path):
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        pool.submit(os.getpid).result()
        for process in pool._processes.values():
            process.kill()
        with pytest.raises(WorkerLostError, match=r"got BrokenProcessPool: .*run again: it goes on from there"):
            build(corpus / "in", tmp_path, executor=pool)
