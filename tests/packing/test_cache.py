import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import tokenmill.packing.rows as packed
from tokenmill.errors import StoreCorruptError
from tokenmill.packing import Policy, pack_rows
from tokenmill.store import open_store

LENGTHS = np.random.default_rng(0).integers(0, 40, 40_000).tolist()


@pytest.fixture
def small_store(make_store, monkeypatch):
    """Give a store of three windows whose index is kept in a file, however small it is."""
    monkeypatch.setattr(packed, "IN_MEMORY_DOCUMENTS", 0)
    path, _, _ = make_store("web", LENGTHS)
    return path


def all_spans(path, seq_len=64):
    rows = pack_rows(open_store(path), seq_len=seq_len, policy=Policy())
    spans = rows.spans(np.arange(rows.num_rows))
    return [array.tolist() for array in (spans.first, spans.count, spans.document, spans.start, spans.length)]


def files(path):
    return sorted(
        file.name for file in (path / ".rows").iterdir() if file.suffix == ".rows" and file.name[0] != "."
    )


def test_a_cached_index_gives_the_rows_of_one_in_memory(small_store, monkeypatch):
    built = all_spans(small_store)
    assert len(files(small_store)) == 1
    read = all_spans(small_store)
    monkeypatch.setattr(packed, "IN_MEMORY_DOCUMENTS", 1 << 40)
    assert built == read == all_spans(small_store)


def test_an_index_is_a_few_bytes_a_document(small_store):
    all_spans(small_store)
    (name,) = files(small_store)
    assert (small_store / ".rows" / name).stat().st_size < 8 * len(LENGTHS)


def test_each_sequence_length_has_a_file_of_its_own(small_store):
    assert all_spans(small_store, 64) != all_spans(small_store, 65)
    assert len(files(small_store)) == 2


SCRIPT = """
import sys
import tokenmill.packing.rows as packed
from tokenmill.packing import Policy, pack_rows
from tokenmill.store import open_store
packed.IN_MEMORY_DOCUMENTS = 0
print(pack_rows(open_store(sys.argv[1]), seq_len=64, policy=Policy()).num_rows)
"""


@pytest.mark.slow
def test_many_processes_at_once_get_one_result(small_store):
    """[C1.c]"""
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(small_store)], stdout=subprocess.PIPE) for _ in range(6)
    ]
    outputs = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 6
    assert len(outputs) == 1
    assert len(files(small_store)) == 1
    assert not [name for name in os.listdir(small_store / ".rows") if name.startswith(".tmp-")]


def test_a_killed_builder_leaves_nothing_that_is_trusted(small_store):
    """[C1.d] Killed while it builds; the next one needs no clean-up."""
    slow = SCRIPT.replace(
        "packed.IN_MEMORY_DOCUMENTS = 0",
        "packed.IN_MEMORY_DOCUMENTS = 0\nimport time\nreal = packed.pack_one\n"
        "def pack_one(window, *rest):\n    time.sleep(0.3 + 30 * (window == 2))\n    return real(window, *rest)\n"
        "packed.pack_one = pack_one",
    )
    process = subprocess.Popen([sys.executable, "-c", slow, str(small_store)])
    deadline = time.monotonic() + 60
    while not list((small_store / ".rows").glob(".tmp-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert files(small_store) == []
    assert all_spans(small_store)
    assert len(files(small_store)) == 1
    assert not list((small_store / ".rows").glob(".tmp-*"))


@pytest.mark.parametrize("where", ["end", "footer", "table", "cut", "empty"])
def test_a_damaged_index_is_built_again(small_store, where):
    rows = all_spans(small_store)
    file = small_store / ".rows" / files(small_store)[0]
    whole = file.read_bytes()
    data = bytearray(whole)
    footer = 16 + int.from_bytes(data[-16:-8], "little")
    if where in ("cut", "empty"):
        data = data[:-100] if where == "cut" else bytearray()
    else:
        data[{"end": -1, "footer": -40, "table": -footer - 20}[where]] ^= 1
    file.write_bytes(data)
    assert all_spans(small_store) == rows
    assert file.read_bytes() == whole


def damage_a_section(path):
    file = path / ".rows" / files(path)[0]
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)


def test_a_damaged_window_is_built_again_with_a_word(small_store, caplog):
    rows = all_spans(small_store)
    whole = (small_store / ".rows" / files(small_store)[0]).read_bytes()
    damage_a_section(small_store)
    assert all_spans(small_store) == rows
    assert (
        "the index of its rows has other bytes than its checksum says in window 0; it is built again" in caplog.text
    )
    assert (small_store / ".rows" / files(small_store)[0]).read_bytes() == whole
    caplog.clear()
    assert all_spans(small_store) == rows
    assert caplog.text == ""


def test_an_index_is_not_built_again_of_other_documents(small_store):
    """The rows would be others than those of every other process."""
    all_spans(small_store)
    damage_a_section(small_store)
    (file,) = small_store.glob("*/documents.bin")
    data = bytearray(file.read_bytes())
    data[8 * 777] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreCorruptError, match=r"documents\.bin: checksum must be \w+, got \w+; copy the store"):
        all_spans(small_store)


FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
"""


def test_an_index_that_does_not_fit_the_disk_is_held_in_memory(small_store):
    process = subprocess.run(
        [sys.executable, "-c", FULL + SCRIPT, str(small_store)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert "an index of rows cannot be kept, each process makes its own: " in process.stderr
    assert not list((small_store / ".rows").glob(".tmp-*"))
    assert files(small_store) == []
    rows = pack_rows(open_store(small_store), seq_len=64, policy=Policy())
    assert int(process.stdout) == rows.num_rows


def test_where_no_folder_can_be_written_to_an_index_is_held_in_memory(small_store, tmp_path, monkeypatch):
    rows = all_spans(small_store)
    shutil.rmtree(small_store / ".rows")
    (small_store / ".rows").write_text("in the way")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setenv("HOME", os.devnull)
    assert all_spans(small_store) == rows


def test_others_may_read_an_index(small_store):
    all_spans(small_store)
    assert (small_store / ".rows" / files(small_store)[0]).stat().st_mode & 0o444 == 0o444


def test_a_store_that_cannot_be_written_to_is_packed_elsewhere(small_store, tmp_path, monkeypatch):
    (small_store / ".rows").write_text("in the way")
    (tmp_path / "private").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "private"))
    first = all_spans(small_store)
    assert list((tmp_path / "private").rglob("*.rows"))
    assert all_spans(small_store) == first
