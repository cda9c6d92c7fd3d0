"""A file that is cut under a map is an error that names it, and other signals go where they went before."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tokenmill.errors import StoreCorruptError
from tokenmill.faults import MAX_WATCHED, num_faults
from tokenmill.store.reader import FileRequest, MapCache, map_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere sizes alone are checked")


def make_file(path, size=10 * 4096):
    path.write_bytes(b"\1" * size)
    return FileRequest(path, size)


def test_pages_that_are_gone_read_as_zeros_and_are_refused(tmp_path):
    request = make_file(tmp_path / "file")
    file = map_file(request)
    os.truncate(request.path, 4096 + 100)
    assert int(file.data.sum()) == 4096 + 100
    assert num_faults(file.watched) == 8
    with pytest.raises(StoreCorruptError, match=r"file: must keep its 40960 bytes while it is read, got 4196"):
        file.check()


def test_a_file_that_was_cut_and_written_again_is_refused_as_well(tmp_path):
    """As `cp` does over a file that is there: its size is right again when it is looked at."""
    request = make_file(tmp_path / "file")
    file = map_file(request)
    os.truncate(request.path, 0)
    assert not file.data.any()
    make_file(request.path)
    with pytest.raises(StoreCorruptError, match="got 40960 after it was cut"):
        file.check()


def test_what_was_borrowed_of_a_cut_file_is_refused_and_the_file_mapped_anew(tmp_path):
    maps, request = MapCache(), make_file(tmp_path / "file")

    def read_while_it_is_cut():
        with maps.borrow([request]) as (file,):
            os.truncate(request.path, 0)
            file.data.sum()

    with pytest.raises(StoreCorruptError, match="file: must keep its 40960 bytes"):
        read_while_it_is_cut()
    assert len(maps._maps) == 0
    make_file(request.path)
    with maps.borrow([request]) as (file,):
        assert int(file.data.sum()) == 40960


def test_only_the_cut_file_among_many_is_refused(tmp_path):
    files = [map_file(make_file(tmp_path / f"{number}")) for number in range(40)]
    os.truncate(tmp_path / "17", 0)
    sums = [int(file.data.sum()) for file in files]
    assert [number for number, total in enumerate(sums) if total != 40960] == [17]
    assert [number for number, file in enumerate(files) if num_faults(file.watched)] == [17]


def test_a_place_is_used_again_once_its_map_is_gone(tmp_path):
    request = make_file(tmp_path / "file")
    places = {map_file(request).watched for _ in range(2 * MAX_WATCHED)}
    assert len(places) == 1


def test_threads_may_read_while_a_file_is_cut_and_written(tmp_path):
    """Whatever moment it is cut in, the process lives, and hears of it."""
    request = make_file(tmp_path / "file", 64 * 4096)
    stop = threading.Event()

    def cut():
        while not stop.is_set():
            os.truncate(request.path, 0)
            os.truncate(request.path, request.bytes)

    thread = threading.Thread(target=cut)
    thread.start()
    refused = 0
    try:
        for _ in range(200):
            try:
                file = map_file(request)
                file.data.sum()
                file.check()
            except StoreCorruptError:
                refused += 1
    finally:
        stop.set()
        thread.join()
    assert refused > 0


OTHERS = """
import faulthandler, mmap, os, sys
import numpy as np
from pathlib import Path
from tokenmill.store.reader import FileRequest, map_file
if sys.argv[1] == "before":
    faulthandler.enable()
Path("watched").write_bytes(b"1" * 4096)
file = map_file(FileRequest(Path("watched"), 4096))
if sys.argv[1] == "after":
    faulthandler.enable()
    file = map_file(FileRequest(Path("watched"), 4096))
if sys.argv[2] == "sent":
    os.kill(os.getpid(), 7)
with open("other", "w+b") as other:
    other.write(b"1" * 4096)
    other.flush()
    data = np.frombuffer(mmap.mmap(other.fileno(), 4096), np.uint8)
    other.truncate(0)
    print(data[0])
"""


@pytest.mark.parametrize("order", ["before", "after", "without"])
@pytest.mark.parametrize("how", ["sent", "read"])
def test_other_signals_go_to_who_answered_them_before(tmp_path, order, how):
    command = [sys.executable, "-c", OTHERS, order, how]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert process.returncode == -7
    assert process.stdout == ""
    assert process.stderr.count("Fatal Python error: Bus error") == (order != "without")
