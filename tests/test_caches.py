"""Folders for what can be made again: this user's alone, or none."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys

import pytest

from tokenmill.caches import SharedFolder, private_folder, writable


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Give a temporary folder and a home, both empty."""
    for name in ("temporary", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    own = tmp_path / "temporary" / f"tokenmill-rows-{os.getuid()}"
    return own, tmp_path / "home" / ".cache" / "tokenmill" / "rows"


def test_a_folder_is_made_for_this_user_alone(places):
    own, _ = places
    assert private_folder("rows", make=False) is None
    assert not own.exists()
    assert private_folder("rows") == private_folder("rows", make=False) == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def plant_link(own):
    (own.parent / "elsewhere").mkdir(mode=0o700)
    own.symlink_to(own.parent / "elsewhere")


def plant_open_folder(own):
    own.mkdir()
    own.chmod(0o777)


def plant_folder_of_a_group(own):
    own.mkdir()
    own.chmod(0o770)


def plant_file(own):
    own.write_text("in the way")


def plant_folder_of_another(own):
    if os.getuid():
        pytest.skip("only root can give a folder away")
    own.mkdir(mode=0o700)
    os.chown(own, 12345, 12345)


@pytest.mark.parametrize(
    "plant", [plant_link, plant_open_folder, plant_folder_of_a_group, plant_file, plant_folder_of_another]
)
def test_what_another_user_may_have_planted_is_passed_over(places, plant):
    """What lies in such a folder would be mapped, or even run."""
    own, home = places
    plant(own)
    assert private_folder("rows", make=False) is None
    assert private_folder("rows") == private_folder("rows", make=False) == home
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_where_nothing_is_private_there_is_none(places, monkeypatch):
    own, home = places
    plant_open_folder(own)
    monkeypatch.setenv("HOME", os.devnull)
    assert private_folder("rows") is None
    assert not home.exists()


def test_a_folder_that_cannot_be_written_to_is_none(tmp_path):
    assert writable(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "file").write_text("in the way")
    assert writable(tmp_path / "file") is None
    assert writable(tmp_path / "no" / "such") is None


def test_the_last_user_of_a_shared_folder_removes_its_files(tmp_path):
    first, second = SharedFolder(tmp_path / "a"), SharedFolder(tmp_path / "a")
    (tmp_path / "a" / "copies").mkdir()
    (tmp_path / "a" / "copies" / "offsets").write_bytes(b"8")
    del first
    assert (tmp_path / "a" / "copies" / "offsets").exists()
    del second
    assert list(tmp_path.iterdir()) == []


def test_what_a_shared_folder_keeps_outlives_its_users(tmp_path):
    folder = SharedFolder(tmp_path / "a", keep=("rows",))
    (tmp_path / "a" / "rows").mkdir()
    (tmp_path / "a" / "offsets").write_bytes(b"8")
    del folder
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["a", "a/rows"]


def test_the_files_of_a_killed_user_are_removed_by_the_next_one_of_any_folder(tmp_path):
    program = (
        "import os, signal; from pathlib import Path; from tokenmill.caches import SharedFolder\n"
        f"folder = SharedFolder(Path({str(tmp_path / 'a')!r})); (folder.path / 'offsets').write_bytes(b'8')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert (tmp_path / "a" / "offsets").exists()
    folder = SharedFolder(tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert folder.path.is_dir()
