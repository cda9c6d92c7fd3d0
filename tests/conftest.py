"""What all tests share: hypothesis profiles, and tiny real stores."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from tests.object_server import (
    AZURE_ACCOUNT,
    AZURE_KEY,
    ObjectServer,
    make_bucket,
    missing_program,
    running_azurite,
    running_server,
)

from tokenmill.store import StoreSpec, StoreWriter

# A fixture such as tmp_path is one folder for all examples of a test: what one writes there, the next replaces.
_CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "fast", max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=_CHECKS
)
settings.register_profile("few", settings.get_profile("fast"), max_examples=5)
settings.register_profile("deep", max_examples=300, deadline=None, suppress_health_check=_CHECKS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

MadeStore = tuple[Path, npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what `tokenmill init --demo` writes: corpus/, stores/demo and run.toml. Tests copy it."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "tokenmill", "init", "--demo"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let every worker of the test runner begin with its share of slow tests; none is left alone with them."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    quick = [item for item in items if not item.get_closest_marker("slow")]
    size = -(-len(quick) // workers)
    items[:] = [
        item
        for worker in range(workers)
        for item in (*slow[worker::workers], *quick[worker * size : (worker + 1) * size])
    ]


@pytest.fixture(scope="session")
def tokenizer_identity() -> Callable[[int], dict[str, int | str | bool | None]]:
    """Return a function that makes the identity of a tokenizer with so many ids, as manifests keep it."""

    def identity(vocab_size: int) -> dict[str, int | str | bool | None]:
        return {
            "kind": "tokenizer.json",
            "content": "0123456789abcdef0123456789abcdef",
            "vocab_size": vocab_size,
            "bos_id": None,
            "eos_id": None,
            "pad_id": None,
            "add_bos": False,
            "add_eos": False,
        }

    return identity


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Return a function that gives a folder of this name, filled once for all workers of the test runner."""
    base = tmp_path_factory.getbasetemp()
    place = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str, fill: Callable[[Path], None]) -> Path:
        folder = place / f"once-{name}"
        with open(place / f"once-{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                unfinished = place / f"once-{name}.tmp"
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                fill(unfinished)
                unfinished.rename(folder)
        return folder

    return made


@pytest.fixture
def make_store(
    tmp_path: Path, tokenizer_identity: Callable[[int], dict[str, int | str | bool | None]]
) -> Callable[..., MadeStore]:
    """Return a function that writes a store of random ids under tmp_path and gives (path, tokens, offsets).

    `tokens` is the whole stream in the store's dtype, `offsets` where each document starts and the last one ends.
    A store of the same name is replaced.
    """

    def make(
        name: str,
        lengths: Sequence[int],
        *,
        max_tokens_per_shard: int = 10**9,
        dtype: str = "<u2",
        vocab_size: int | None = None,
        seed: int = 0,
        add_bos: bool = False,
    ) -> MadeStore:
        size = vocab_size or {"|u1": 256, "<u2": 50_000, "<u4": 200_000}[dtype]
        offsets = np.cumsum([0, *lengths], dtype=np.int64)
        tokens = np.random.default_rng(seed).integers(0, size, int(offsets[-1])).astype(dtype)
        identity = tokenizer_identity(size)
        if add_bos:
            identity |= {"add_bos": True, "bos_id": 1}
            tokens[tokens == 1] = 2
            tokens[offsets[:-1][np.diff(offsets) > 0]] = 1
        path = tmp_path / name
        if path.exists():
            shutil.rmtree(path)
        spec = StoreSpec(
            keys={"sequence": dtype},
            tokenizer=identity,
            recipe={"kind": "text"},
            max_tokens_per_shard=max_tokens_per_shard,
        )
        with StoreWriter(path, spec) as writer:
            writer.append({"sequence": tokens}, offsets)
            writer.commit()
        return path, tokens, offsets

    return make


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], list[str]]]:
    """Return a function of a folder that gives a prefix for commands that must not write below it, even as root."""
    folders: list[Path] = []

    def prefix(folder: Path) -> list[str]:
        if os.getuid():
            folders.append(folder)
            subprocess.run(["chmod", "-R", "a-w", str(folder)], check=True)
            return []
        script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", script, str(folder)]
        if (
            not shutil.which("unshare")
            or subprocess.run([*command, "true"], capture_output=True, check=False).returncode
        ):
            pytest.skip("root may write everywhere, and this system mounts nothing read-only")
        return command

    yield prefix
    for folder in folders:
        subprocess.run(["chmod", "-R", "u+w", str(folder)], check=True)


@pytest.fixture(scope="session")
def _object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    reason = missing_program()
    if reason is not None:
        pytest.skip(reason)
    with running_server(tmp_path_factory.mktemp("objects")) as server:
        make_bucket(server)
        yield server


@pytest.fixture
def object_server(_object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """Return a real S3 server that is shared by all tests of a process, with the credentials in the environment."""
    for name, value in _object_server.environment.items():
        monkeypatch.setenv(name, value)
    return _object_server


@pytest.fixture
def azure(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the endpoint of a server that stands for Azure, with the credentials in the environment."""
    if shutil.which("azurite-blob") is None:
        pytest.skip("azurite-blob is not installed: npm install azurite")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURE_ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
    with running_azurite(tmp_path_factory.mktemp("azure")) as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def few_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores have 64 maps open instead of 1,024, so that small ones meet the limit."""
    monkeypatch.setattr("tokenmill.store.maps.MAX_MAPS", 64)
