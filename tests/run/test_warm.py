from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.run.warm import warm
from tokenmill.types import PACKINGS

RUNS = """
import sys
from pathlib import Path
from tokenmill.compiled import record_compiled
import tokenmill as tm

folder = Path(sys.argv[1])
(folder / "a.jsonl").write_text("".join('{"text": "document %d of the mill"}\\n' % i for i in range(90)))
with record_compiled() as compiled:
    tm.prepare(folder / "a.jsonl", out=folder / "web", tokenizer="bytes", workers=1, progress=False)
    for packing in sys.argv[2:]:
        for source in ('store = "web"', 'documents = ["a.jsonl"]\\ntokenizer = "bytes"\\nlive = true'):
            (folder / "run.toml").write_text(
                '[run]\\nsteps = 9\\nglobal_batch_size = 4\\nseq_len = 30\\npacking = "%s"\\n'
                '[[sources]]\\nname = "web"\\n%s\\n' % (packing, source)
            )
            for batch in tm.Run.from_toml(folder / "run.toml").loader(micro_batch=2):
                pass
print(compiled)
"""


def start(cache: Path, *arguments: object) -> str:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "COLUMNS": "100"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kernels(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.rglob("*.nbi"))


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """Return a folder that was warmed, and what the command printed."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, json.loads(start(cache, "-m", "tokenmill", "warm", "--json"))


def test_it_says_what_was_compiled_and_where_it_lies(warmed):
    cache, report = warmed
    assert [report["folder"]] == [str(folder) for folder in (cache / "tokenmill").glob("kernels-*")]
    assert len(report["compiled"]) == len(kernels(cache)) > 20
    assert all(seconds > 0 for seconds in report["compiled"].values())
    assert report["loaded"] == 0


def test_afterwards_no_run_compiles_anything(warmed, tmp_path):
    """For every packing, over stores and over live text; and no build does."""
    cache, _ = warmed
    before = kernels(cache)
    assert start(cache, "-c", RUNS, tmp_path, *PACKINGS) == "{}\n"
    assert kernels(cache) == before


def test_every_kernel_is_compiled_for_one_signature(warmed):
    """A second one would be compiled in some run and not in others."""
    cache, _ = warmed
    program = (
        "from tokenmill.compiled import known_kernels\nfrom tokenmill.run.warm import warm\n"
        "warm()\nprint({name: count for name, count in known_kernels().items() if count != 1})"
    )
    assert start(cache, "-c", program) == "{}\n"
    assert {len(list(cache.rglob(f"{name[:-4]}.*.nbc"))) for name in kernels(cache)} == {1}


def test_a_second_time_it_compiles_nothing(warmed):
    cache, report = warmed
    out = start(cache, "-m", "tokenmill", "warm")
    assert out.startswith(f"0 kernels compiled, {len(report['compiled'])} were there, in ")
    assert out.endswith(f" s: {report['folder']}\n")


def test_it_warns_of_no_store_of_its_own(caplog):
    """Its rehearsal cuts records on purpose; a user who reads of them would look for them."""
    warm()
    assert [record.getMessage() for record in caplog.records if record.module != "compiled"] == []
    logging.getLogger("tokenmill").warning("told again afterwards")
    assert caplog.messages[-1] == "told again afterwards"
