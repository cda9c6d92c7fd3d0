"""Facts about an installation and its machine, and a self-test: what a bug report needs."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

from tokenmill.errors import TokenmillError, without_secrets

_VARIABLES = (
    "TOKENMILL_",
    "NUMBA_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "TMPDIR",
    "PYTHONHASHSEED",
    "OMP_NUM_THREADS",
)
"""Beginnings of the names of environment variables that change what tokenmill does."""
_SECRET_NAME = re.compile("KEY|SECRET|TOKEN$|PASSWORD|CREDENTIAL", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """Result of a small build, run and resume on this machine."""

    passed: bool
    seconds: float
    error: str | None = None
    """Message of the check that failed, or of the error that ended the test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorReport:
    """What to paste into a bug report. It holds no secrets: paths, versions and numbers only."""

    tokenmill: str
    python: str
    platform: str
    cpu: str
    """Name of the processor, and the number of cores that this process may use."""
    packages: Mapping[str, str]
    """Required package -> installed version, or "not installed"."""
    extras: Mapping[str, Mapping[str, str]]
    """Optional extra -> its packages and their installed versions."""
    folders: Mapping[str, str | None]
    """Purpose -> folder; None where no folder can be written to."""
    free_bytes: Mapping[str, int]
    """Purpose -> free space on the disk of that folder."""
    environment: Mapping[str, str]
    """Environment variables that change what tokenmill does."""
    self_test: SelfTest | None
    """None if it was left out."""

    @property
    def problems(self) -> list[str]:
        """One sentence per problem, with the way out; empty if all is well."""
        found = [
            f"package not installed: {name}; run `pip install tokenmill` again"
            for name, installed in self.packages.items()
            if installed == _MISSING
        ]
        found += [
            f"no folder for {purpose} can be written to; set NUMBA_CACHE_DIR or TMPDIR to a folder of yours"
            for purpose, folder in self.folders.items()
            if folder is None
        ]
        if self.self_test is not None and not self.self_test.passed:
            found.append(f"self-test failed: {self.self_test.error}; report this output")
        return found


_MISSING = "not installed"


def diagnose(environment: Mapping[str, str], *, self_test: bool = True) -> DoctorReport:
    """Collect the facts, and run the self-test: under two seconds once kernels are compiled."""
    import tokenmill
    from tokenmill.caches import private_folder
    from tokenmill.compiled import writable_folder

    packages, extras = _requirements()
    kernels, rows = writable_folder(), private_folder("rows")
    folders = {
        "compiled kernels": None if kernels is None else str(kernels),
        "row indexes of read-only stores": None if rows is None else str(rows),
        "temporary files": tempfile.gettempdir(),
        "working directory": str(Path.cwd()),
    }
    places = {purpose: folder for purpose, folder in folders.items() if folder is not None}
    return DoctorReport(
        tokenmill=tokenmill.__version__,
        python=f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        platform=platform.platform(),
        cpu=f"{platform.processor() or platform.machine()}, {_cores()} cores",
        packages={name: _installed(name) for name in packages},
        extras={extra: {name: _installed(name) for name in names} for extra, names in extras.items()},
        folders=folders,
        free_bytes={purpose: shutil.disk_usage(folder).free for purpose, folder in places.items()},
        environment={
            name: "(hidden)" if _SECRET_NAME.search(name) else without_secrets(value)
            for name, value in sorted(environment.items())
            if name.startswith(_VARIABLES)
        },
        self_test=_test() if self_test else None,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of required packages, and of those of each extra, as the installed metadata lists them."""
    required: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in metadata("tokenmill").get_all("Requires-Dist") or ():
        name = re.split(r"[\s<>=!~;\[(]", line, maxsplit=1)[0]
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if extra is None:
            required.append(name)
        elif extra[1] not in ("dev", "all") and name != "tokenmill":
            extras.setdefault(extra[1], []).append(name)
    return required, extras


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return _MISSING


def _test() -> SelfTest:
    """Build a store, verify it, and check the batches of a run at two world sizes and after a resume."""
    began = time.perf_counter()
    error: str | None = None
    try:
        with tempfile.TemporaryDirectory(prefix="tokenmill-doctor-") as folder:
            _check_run(Path(folder))
    except (TokenmillError, OSError, AssertionError, ArithmeticError, LookupError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return SelfTest(passed=error is None, seconds=time.perf_counter() - began, error=error)


def _check_run(folder: Path) -> None:
    import json

    import numpy as np

    from tokenmill.build import prepare
    from tokenmill.run.run import Run
    from tokenmill.store import verify

    texts = [" ".join(f"word{k}" for k in range(number % 40)) for number in range(200)]
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    prepare(file, out=folder / "store", tokenizer="bytes", workers=1, progress=False)
    verify(folder / "store")
    run = Run.build(folder / "store", seq_len=64, global_batch_size=8, steps=12, folder=folder)
    whole = [batch["input_ids"] for batch in run.loader(micro_batch=8)]
    halves = [
        [batch["input_ids"] for batch in run.loader(rank=rank, world_size=2, micro_batch=4)] for rank in (0, 1)
    ]
    joined = [np.concatenate(pair) for pair in zip(*halves, strict=True)]
    if not all(map(np.array_equal, whole, joined)):
        raise TokenmillError("self-test: batches of world size 1 and 2 differ; report this")
    first = run.loader(micro_batch=8)
    for _, _ in zip(range(5), first, strict=False):
        pass
    resumed = run.loader(micro_batch=8)
    resumed.load_state_dict(first.state_dict())
    rest = [batch["input_ids"] for batch in resumed]
    if len(rest) != 7 or not all(map(np.array_equal, whole[5:], rest)):
        raise TokenmillError("self-test: batches after a resume differ; report this")
