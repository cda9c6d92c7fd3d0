"""What a signal leaves of a running command: its exit code, no process, and work that the next run completes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tokenmill.demo import TOKENIZER_DIR

WORDS = "the mill by the river grinds grain all day, and its wheel turns with the water"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a file of several units, which the slow engine needs seconds for."""
    file = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    line = " ".join([WORDS] * 8)
    file.write_text("".join(json.dumps({"text": f"{number} {line}"}) + "\n" for number in range(16_000)))
    return file


def command(corpus: Path, out: Path, *options: str) -> list[str]:
    tokenizer = ("-t", str(TOKENIZER_DIR), "--tokenizer-engine", "tokenizers")
    return [
        sys.executable,
        "-m",
        "tokenmill",
        "prepare",
        str(corpus),
        "-o",
        str(out),
        "-j",
        "2",
        *tokenizer,
        *options,
    ]


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """Return the bytes of a store of a run that nothing ended."""
    store = tmp_path_factory.mktemp("straight") / "store"
    subprocess.run(command(corpus, store), check=True, capture_output=True)
    return bytes_of(store)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def is_running(group: int) -> bool:
    """Return whether a process of a group still runs."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def bytes_of(store: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(store)): file.read_bytes()
        for file in sorted(store.rglob("*"))
        if file.is_file() and ".prepare" not in file.parts
    }


@pytest.mark.parametrize(
    ("sign", "code", "options"),
    [(signal.SIGINT, 130, ()), (signal.SIGTERM, 143, ()), (signal.SIGTERM, 143, ("-q",))],
)
def test_a_signal_ends_prepare_with_its_code_and_the_next_run_gives_the_same_bytes(
    corpus, straight, tmp_path, sign, code, options
):
    arguments = command(corpus, tmp_path / "store", *options)
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        units = tmp_path / "store" / ".prepare" / "units"
        wait_for(lambda: list(units.glob(".tmp-*/*")) or process.poll() is not None)
        assert process.poll() is None
        process.send_signal(sign)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (code, "")
        assert "Traceback" not in err
        hint = [line for line in err.splitlines() if line.startswith("interrupted")]
        assert hint == ([] if options else ["interrupted; run the same command again to resume"])
        wait_for(lambda: not is_running(process.pid))
    assert not (tmp_path / "store" / "manifest.json").exists()
    subprocess.run(arguments, check=True, capture_output=True)
    assert bytes_of(tmp_path / "store") == straight


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_other_commands_without_a_traceback(run_toml, sign, code):
    run_toml.write_text(run_toml.read_text().replace("steps = 10", "steps = 10_000_000"))
    arguments = [sys.executable, "-m", "tokenmill", "batches", str(run_toml), "--digest"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("0\t")
        process.send_signal(sign)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert [line for line in err.splitlines() if "kernels" not in line] == []
