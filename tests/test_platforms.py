"""Local stores on systems that lack what only Linux or POSIX has. The names are removed in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import builtins, mmap, os, signal, stat, sys
import asyncio, concurrent.futures, multiprocessing, random, shutil, socket, tempfile, threading  # as they are here
import numba, numpy, pyarrow

for module, names in {
    os: "pread preadv pwrite pwritev O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_CLOEXEC fchmod sched_getaffinity getuid "
        "register_at_fork posix_fadvise fork statvfs",
    mmap: "MAP_ANONYMOUS MAP_ANON MAP_PRIVATE MAP_NORESERVE MADV_RANDOM MADV_NOHUGEPAGE MADV_DONTNEED",
    signal: "SIGKILL SIGPROF SIGVTALRM SIGBUS setitimer ITIMER_PROF ITIMER_VIRTUAL",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
shutil._use_fd_functions = False
os.supports_fd = os.supports_fd - {os.utime}
sys.modules["fcntl"] = sys.modules["resource"] = None

real_open, real_os_open, real_utime = builtins.open, os.open, os.utime

def open_without_proc(file, *arguments, **options):
    if str(file).startswith("/proc"):
        raise FileNotFoundError(2, "no such file", str(file))
    return real_open(file, *arguments, **options)

def open_no_folder(path, *arguments, **options):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(2, "no such file", str(path))
    if os.path.isdir(path):
        raise PermissionError(13, "permission denied", str(path))
    return real_os_open(path, *arguments, **options)

def utime_by_name(path, *arguments, **options):
    assert not isinstance(path, int), "no time of a descriptor"
    return real_utime(path, *arguments, **options)

builtins.open, os.open, os.utime = open_without_proc, open_no_folder, utime_by_name
"""
USE = r"""
import json, tokenmill as tm
from pathlib import Path
from tokenmill.cli.app import main
from tokenmill.store.lease import this_process

texts = [Path(f"{number}.jsonl") for number in range(3)]
for text in texts:
    text.write_text("".join(json.dumps({"text": f"{text} {line} " * 9}) + "\n" for line in range(20)))
texts[2].write_text("no JSON\n")
try:
    tm.prepare(texts, out="store", workers=1)
except ValueError as error:
    print("stopped:", "JSON" in str(error))
texts[2].write_text(json.dumps({"text": "mended"}) + "\n")
tm.prepare(texts, out="store", workers=1)
print(tm.open_store("store").num_documents)
sys.argv = ["tokenmill", "verify", "store"]
try:
    main()
except SystemExit as end:
    print("verified:", end.code or 0)
Path("run.toml").write_text(
    "[run]\nseq_len = 32\nglobal_batch_size = 4\nsteps = 6\n"
    "[[sources]]\nname = 'web'\nstore = 'store'\n"
)
run = tm.Run.from_toml("run.toml")
print(run.plan().fingerprint)
loader = run.loader(rank=0, world_size=1)
for step, batch in enumerate(loader):
    print(step, batch["input_ids"].tolist())
    if step == 2:
        state = loader.state_dict()
again = tm.Run.from_toml("run.toml").loader(rank=0, world_size=1)
again.load_state_dict(state)
for step, batch in enumerate(again, start=3):
    print(step, batch["input_ids"].tolist())
try:
    tm.open_store("s3://bucket/store?endpoint=http://127.0.0.1:9")
except Exception as error:
    print(error)
"""


def run(folder: Path, script: str) -> list[str]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="the other systems lack these names by themselves")
def test_local_stores_need_nothing_that_only_linux_has(tmp_path):
    *simple, refusal = run(tmp_path / "without", WITHOUT + USE)
    *full, _ = run(tmp_path / "with", "import sys\n" + USE.replace("s3://", "/none/"))
    assert simple == full
    assert len(simple) > 12
    assert refusal == (
        "s3://bucket/store: stores in object storage can only be read on Linux, got linux; copy the store "
        "to a local disk and open that copy"
    )
