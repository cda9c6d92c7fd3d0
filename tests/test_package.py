"""What is handed to users: a wheel that works where nothing but a temporary folder can be written to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import tokenmill

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def distributions(made_once: Callable[[str, Callable[[Path], None]], Path]) -> tuple[Path, Path]:
    """Build the wheel and the sdist."""

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    folder = made_once("distributions", build)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(distributions):
    wheel, _ = distributions
    assert wheel.name == f"tokenmill-{tokenmill.__version__}-py3-none-any.whl"
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = ROOT / "src" / "tokenmill"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert names == {path.relative_to(package.parent).as_posix() for path in files}
    assert {"tokenmill/py.typed", "tokenmill/demo/corpus/prose.jsonl"} <= names


@pytest.mark.slow
def test_the_sdist_holds_what_it_takes_to_test_it(distributions):
    _, sdist = distributions
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ("pyproject.toml", "README.md", "LICENSE", "Makefile", "src/tokenmill/cli/app.py", "tests/conftest.py")
    assert [name for name in wanted if name not in names] == []
    assert [name for name in names if re.search(r"__pycache__|\.venv|\.nb[ic]$", name)] == []


@pytest.mark.slow
def test_the_demo_of_the_wheel_runs_without_a_home_in_a_folder_that_cannot_be_written_to(
    distributions, tmp_path, read_only
):
    """[A1.c] Outside the checkout, in an environment of its own; dependencies are those of this one."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    (packages,) = place.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in others))
    install = ["-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([sys.executable, *install, str(distributions[0])], check=True, capture_output=True)

    (tmp_path / "tmp").mkdir()
    elsewhere = tmp_path / "work"
    elsewhere.mkdir()
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "LANG"}}
    environment = {**kept, "HOME": "/nonexistent", "TMPDIR": str(tmp_path / "tmp"), "COLUMNS": "120"}
    started = [*read_only(place), str(python)]
    run = {"cwd": elsewhere, "env": environment, "capture_output": True, "text": True}
    where = subprocess.run([*started, "-c", "import tokenmill; print(tokenmill.__file__)"], check=False, **run)
    assert where.stdout.strip() == str(packages / "tokenmill" / "__init__.py")
    done = subprocess.run([*started, str(place / "bin" / "tokenmill"), "demo", "--out", "demo"], check=False, **run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"\bholds\b", done.stdout)) == 3
    assert (elsewhere / "demo" / "run.toml").is_file()
    assert list(packages.rglob("*.nbi")) == []
    assert list((tmp_path / "tmp").glob("tokenmill-kernels-*/**/*.nbi"))
