"""How far a build is, read off its folder while it runs and after it was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import tokenmill as tm
from tokenmill.build.status import build_status
from tokenmill.errors import DocumentError

SLOW = """
import sys, time
import tokenmill as tm
from tokenmill.build import notes

def slow(write):
    def noted(*arguments):
        write(*arguments)
        time.sleep(0.05)
    return noted

notes.SECONDS_BETWEEN_NOTES = 0.0
notes.WorkerNotes.write = slow(notes.WorkerNotes.write)
options = tm.PrepareOptions(chunk_bytes=4096)
tm.prepare(sys.argv[1], out=sys.argv[2], tokenizer="bytes", workers=1, progress=False, options=options)
"""


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} words"}) + "\n" for n in range(4000)), encoding="utf-8")
    return path


def test_nothing_and_a_finished_store_are_told_apart(corpus, tmp_path):
    assert build_status(tmp_path / "store").state == "empty"
    tm.prepare(corpus, out=tmp_path / "store", tokenizer="bytes", workers=1, progress=False)
    status = build_status(tmp_path / "store")
    assert (status.state, status.units_done, status.workers) == ("finished", 0, ())


def test_a_build_is_followed_while_it_runs_and_after_a_kill(corpus, tmp_path):
    out = tmp_path / "store"
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(corpus), str(out)])
    seen = []
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end and (not seen or seen[-1].units_done < 3):
        seen.append(build_status(out))
        time.sleep(0.02)
    running = seen[-1]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert running.units_done >= 3, [each.state for each in seen]
    assert running.state == "running"
    assert running.units > running.units_done
    assert running.units_under_way <= 1
    assert running.input_bytes == corpus.stat().st_size
    assert [each.units_done for each in seen] == sorted(each.units_done for each in seen)
    assert running.exact
    assert 0 < running.documents < 4000
    (worker,) = running.workers
    assert (worker.state, worker.unit_bytes) == ("at work", 4096)
    assert max(each.bytes for status in seen for each in status.workers) > 0
    killed = build_status(out)
    assert (killed.state, killed.reason, killed.seconds_left) == (
        "stopped",
        f"process {process.pid} was killed",
        None,
    )
    assert {worker.state for worker in killed.workers} <= {"ended"}  # none where it was between two units
    assert killed.units_left_over <= 1
    assert killed.documents >= running.documents
    tm.prepare(
        corpus,
        out=out,
        tokenizer="bytes",
        workers=1,
        progress=False,
        options=tm.PrepareOptions(chunk_bytes=4096),
    )
    assert build_status(out).state == "finished"


def test_a_unit_that_fails_is_told_as_failed_until_it_is_done(corpus, tmp_path):
    whole = corpus.read_text(encoding="utf-8")
    corpus.write_text(whole + "no record\n", encoding="utf-8")
    options = tm.PrepareOptions(chunk_bytes=4096)
    out = tmp_path / "store"
    with pytest.raises(DocumentError, match="must be one JSON object"):
        tm.prepare(corpus, out=out, tokenizer="bytes", workers=1, progress=False, options=options)
    status = build_status(out)
    assert (len(status.failed), status.units_left_over) == (1, 0)
    assert (status.state, status.seconds_left) == ("stopped", None)
    assert re.match(rf"{corpus}:4001: a line must be one JSON object", status.reason)
    assert next(iter(status.failed.values())).startswith(f"{corpus}: json, unexpected character")
    corpus.write_text(whole, encoding="utf-8")
    tm.prepare(corpus, out=out, tokenizer="bytes", workers=1, progress=False, options=options)
    assert build_status(out).failed == {}


def test_the_reason_of_a_unit_that_fails_is_that_of_its_first_bad_record(corpus, tmp_path):
    """As the error of the build names it."""
    corpus.write_text('{"text": "a"}\n{"text": 1}\n{"text": "b"}\nno record\n', encoding="utf-8")
    with pytest.raises(DocumentError, match=r"a\.jsonl:2: a text must be"):
        tm.prepare(corpus, out=tmp_path / "store", tokenizer="bytes", workers=1, progress=False)
    (why,) = build_status(tmp_path / "store").failed.values()
    assert why.startswith(f"{corpus}: not_text, ")


def test_an_interrupted_build_says_so_and_one_that_goes_on_does_not(corpus, tmp_path):
    out, seen = tmp_path / "store", []

    def interrupt(progress):
        if progress.what == "prepare":
            seen.append(build_status(out))
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            tm.prepare(corpus, out=out, tokenizer="bytes", workers=1, progress=False, on_progress=interrupt)
        assert (seen[-1].state, seen[-1].reason) == ("running", None)
        assert (build_status(out).state, build_status(out).reason) == ("stopped", "KeyboardInterrupt")
    tm.prepare(corpus, out=out, tokenizer="bytes", workers=1, progress=False)
    assert (build_status(out).state, build_status(out).reason) == ("finished", None)
    assert not (out / ".prepare" / "stopped.txt").exists()
