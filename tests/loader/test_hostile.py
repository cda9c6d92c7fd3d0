"""Files that change after rows were made of them, and row indexes that were forged: an error of ours, or batches.

Nothing is written or read out of bounds. Writes behind an array are seen in the guards around it; what kernels read
and write by index is seen where numba checks bounds, for which all of this runs once more in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import tokenmill.packing.rows as packed
from tokenmill.errors import StoreCorruptError, StoreError, TokenmillError
from tokenmill.packing.packers import NUM_COUNTS
from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter, read_manifest

CHECKED = os.environ.get("NUMBA_BOUNDSCHECK") == "1"
KERNEL_TESTS = (
    "packing/test_packed.py",
    "packing/test_concat.py",
    "packing/test_packers.py",
    "loader/test_blocks.py",
    "loader/test_balance.py",
    "loader/test_segments.py",
    "plan/test_mixture.py",
    "plan/test_stages.py",
    "plan/test_provenance.py",
    "live/test_lanes.py",
)
CUT = "test_a_file_that_is_truncated_while_it_is_read_ends_the_run"
GUARD = 1 << 13
"""Numbers of 64 bits before and behind every array."""
ALL = ("input_ids", "labels", "position_ids", "doc_ids", "loss_mask", "cu_seqlens", "max_seqlen")
POLICIES = [("concat", None), ("best_fit", "split"), ("bos_best_fit", None), ("padded", "truncate_start")]
RUN = """
[run]
steps = 4
global_batch_size = 8
seq_len = 12
packing = "{packing}"
{more}
[[sources]]
name = "data"
store = "data"
"""


@pytest.fixture(autouse=True)
def keep_indexes(monkeypatch):
    """Keep every index in a file, however small the store is."""
    monkeypatch.setattr(packed, "IN_MEMORY_DOCUMENTS", 0)


@pytest.fixture
def make_run(tmp_path, tokenizer_identity):
    """Return a function that writes a store of random records, and a run over it."""

    def make(kind="sft", packing="best_fit", on_long=None):
        rng = np.random.default_rng(0)
        keys, values, offsets = {}, {}, {}

        def add(key, axis, lengths):
            offsets[axis] = np.cumsum([0, *lengths])
            keys[key], values[key] = "<u2", rng.integers(1, 300, offsets[axis][-1]).astype("<u2")

        def mask(key, of):
            keys[key], values[key] = "|u1", rng.integers(0, 2, values[of].size).astype("|u1")

        if kind == "sft":
            add("sequence", "documents", rng.integers(1, 30, 120))
            mask("loss_mask", "sequence")
        elif kind == "dpo":
            add("chosen", "chosen", rng.integers(0, 20, 40))
            add("rejected", "rejected", rng.integers(0, 20, 40))
            mask("chosen_mask", "chosen")
        else:
            groups = rng.integers(1, 4, 40)
            add("prompts", "prompts", rng.integers(0, 20, 40))
            add("responses", "responses", rng.integers(0, 20, groups.sum()))
            offsets["groups"] = np.cumsum([0, *groups])
            keys["rewards"], values["rewards"] = "<f4", np.arange(groups.sum(), dtype="<f4")
        tokenizer = tokenizer_identity(300) | {"add_bos": True, "bos_id": 1}
        if not (tmp_path / "data").exists():
            spec = StoreSpec(kind=kind, keys=keys, tokenizer=tokenizer, recipe={}, max_tokens_per_shard=400)
            with StoreWriter(tmp_path / "data", spec) as writer:
                writer.append(values, offsets if kind != "sft" else offsets["documents"])
                writer.commit()
        (tmp_path / "run.toml").write_text(
            RUN.format(packing=packing, more=f'on_long = "{on_long}"' if on_long else "")
        )
        return Run.from_toml(tmp_path / "run.toml")

    return make


def guarded(layout):
    """Return arrays, and the buffers in whose middle they lie."""
    arrays, buffers = {}, []
    for name, (shape, dtype) in layout.items():
        size = -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 8)
        buffer = np.full(size + 2 * GUARD, 0x5A5A5A5A5A5A5A5A, np.int64)
        arrays[name] = buffer[GUARD : GUARD + size].view(dtype)[: int(np.prod(shape))].reshape(shape)
        buffers.append(buffer)
    return arrays, buffers


def draw(loader):
    """Return all batches of a run, as bytes; see that nothing around their arrays was written to."""
    batches = []
    for stage in loader.plan.stages:
        count = stage.num_steps * loader.part.batches(stage)
        block = loader._block(stage, 0, count)
        try:
            for number in range(count):
                arrays, buffers = guarded(block.shapes(loader.part.micro_batch))
                batch = block.batch(number, arrays)
                for buffer in buffers:
                    assert (buffer[:GUARD] == 0x5A5A5A5A5A5A5A5A).all()
                    assert (buffer[-GUARD:] == 0x5A5A5A5A5A5A5A5A).all()
                batches.append({name: array.tobytes() for name, array in batch.items()})
        finally:
            block.release()
    return batches


def overwrite(file, data):
    """Change a file in place, so that who has mapped it sees it."""
    with file.open("r+b") as out:
        out.write(data)
        out.truncate(len(data))


def damaged(data, rng):
    """Return bytes with a few bits or numbers changed."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, len(data)))
        kind = rng.integers(0, 4)
        if kind == 3:  # two numbers whose difference wraps around to a likely length
            at -= at % 8
            pair = np.array([2**62, -(2**63)]).tobytes()
            data[at : at + 16] = pair[: len(data) - at]
        elif kind == 0:
            data[at] ^= 1 << int(rng.integers(0, 8))
        else:
            at -= at % 8
            number = int(rng.choice([0, 1, -1, 2**62, -(2**63), 2**31, 13, 500, int(rng.integers(0, 10**4))]))
            data[at : at + 8] = number.to_bytes(8, "little", signed=True)[: len(data) - at]
    return bytes(data)


SHAPES = [
    *(("sft", packing, on_long) for packing, on_long in POLICIES),
    ("dpo", "best_fit", "truncate_start"),
    ("grpo", "best_fit", "truncate_end"),
]


@pytest.mark.parametrize(("kind", "packing", "on_long"), SHAPES)
def test_offsets_that_change_under_a_run_are_refused_or_harmless(make_run, tmp_path, kind, packing, on_long):
    """A length is trusted by nobody, though it was right when the index of rows was made."""
    run = make_run(kind, packing, on_long)
    options = {"micro_batch": 4, "arrays": ALL} if kind == "sft" else {"micro_batch": 4}
    loader = run.loader(**options)
    whole = draw(loader)
    files = sorted(file for file in (tmp_path / "data").glob("*/*.bin") if file.stem not in run.stores["data"].keys)
    assert files
    rng = np.random.default_rng(1)
    errors = []
    for _ in range(25 if CHECKED else 60):
        file = files[rng.integers(0, len(files))]
        content = file.read_bytes()
        overwrite(file, damaged(content, rng))
        try:
            draw(loader)
            draw(make_run(kind, packing, on_long).loader(**options))
        except TokenmillError as error:
            errors.append(str(error))
        overwrite(file, content)
    assert errors or packing == "concat"  # of a stream, most offsets may be anything between others
    assert [error for error in errors if str(tmp_path / "data") not in error] == []
    assert draw(loader) == draw(make_run(kind, packing, on_long).loader(**options)) == whole


def test_a_mask_may_hold_any_byte(make_run, tmp_path):
    loader = make_run().loader(micro_batch=4, arrays=ALL)
    draw(loader)
    for file in (tmp_path / "data").glob("*/loss_mask.bin"):
        overwrite(file, np.random.default_rng(2).bytes(file.stat().st_size))
    assert len(draw(loader)) == 8


def forged(data, rng):
    """Return a row index with other numbers, and all checksums as if they were right."""
    footer_size = int.from_bytes(data[-16:-8], "little")
    footer = json.loads(data[-16 - footer_size : -16])
    begin = len(data) - 16 - footer_size - 40 * (footer["windows"] + 1)
    sections = bytearray(data[:begin])
    table = np.frombuffer(data[begin : -16 - footer_size], np.int64).reshape(-1, 5).copy()
    where = rng.integers(0, 4)
    odd = [0, 1, -1, 2**20, 2**31, 2**40, 2**61, -(2**62), int(rng.integers(0, 1000))]
    if where == 0:
        sections[:] = damaged(sections, rng)
    elif where == 1:
        table[rng.integers(0, len(table)), rng.integers(0, 4)] = rng.choice(odd)
    elif where == 2:
        footer["counts"][rng.integers(0, len(footer["counts"]))] = int(rng.choice(odd))
    else:
        footer |= [{"windows": int(rng.choice(odd))}, {"counts": [1] * int(rng.integers(0, NUM_COUNTS + 3))}][
            rng.integers(0, 2)
        ]
    for window in range(len(table) - 1):
        section = bytes(sections[max(0, table[window, 1]) : max(0, table[window + 1, 1])])
        table[window, 4] = int.from_bytes(xxhash.xxh3_64_digest(section), "little", signed=True)
    footer["table"] = xxhash.xxh3_64_hexdigest(table.tobytes())
    text = json.dumps(footer).encode()
    return bytes(sections) + table.tobytes() + text + len(text).to_bytes(8, "little") + xxhash.xxh3_64_digest(text)


@pytest.mark.parametrize(("packing", "on_long"), POLICIES[1:])
def test_a_forged_row_index_is_refused_or_harmless(make_run, tmp_path, packing, on_long):
    loader = make_run("sft", packing, on_long).loader(micro_batch=4, arrays=ALL)
    whole = draw(loader)
    (file,) = (tmp_path / "data" / ".rows").glob("[!.]*.rows")
    content = file.read_bytes()
    rng, errors = np.random.default_rng(3), []
    for _ in range(25 if CHECKED else 80):
        file.unlink()
        file.write_bytes(forged(content, rng))
        try:
            run = make_run("sft", packing, on_long)
            draw(run.loader(micro_batch=4, arrays=ALL))
            run.plan().what(1)
            run.plan().when("data", 3)
            run.report()
        except StoreError as error:
            errors.append(str(error))
    assert [error for error in errors if str(tmp_path / "data") not in error] == []
    file.unlink()
    assert draw(make_run("sft", packing, on_long).loader(micro_batch=4, arrays=ALL)) == whole


@given(position=st.floats(0, 0.99), bit=st.integers(0, 7))
def test_a_damaged_section_of_an_index_is_built_again(make_run, tmp_path, position, bit):
    whole = draw(make_run().loader(micro_batch=4, arrays=ALL))
    (file,) = (tmp_path / "data" / ".rows").glob("[!.]*.rows")
    content = bytearray(file.read_bytes())
    content[int(position * 400)] ^= 1 << bit  # the sections come first
    file.write_bytes(content)
    assert draw(make_run().loader(micro_batch=4, arrays=ALL)) == whole
    assert file.read_bytes() != content


TRUNCATED = """
import os, sys, time
import tokenmill.packing.rows as packed
from tokenmill.errors import StoreCorruptError
from tokenmill.run.run import Run
packed.IN_MEMORY_DOCUMENTS = 0
loader = Run.from_toml(sys.argv[1]).loader(micro_batch=4, threads=0)
batches = iter(loader)
next(batches)
os.truncate(sys.argv[2], int(sys.argv[3]))
try:
    for _ in range(2):
        list(batches)
        loader.seek(0)
except StoreCorruptError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["*/sequence.bin", "*/documents.bin", "*/loss_mask.bin", ".rows/[!.]*.rows"])
@pytest.mark.parametrize("size", [0, 8])
def test_a_file_that_is_truncated_while_it_is_read_ends_the_run(make_run, tmp_path, name, size):
    """[S.g] With an error, or with the signal that the system sends to a process that reads a missing page.

    The last page of a truncated file reads as zeros, so sizes are checked as well.
    """
    make_run().plan()
    for file in sorted((tmp_path / "data").glob(name))[:1]:
        content = file.read_bytes()
        arguments = [sys.executable, "-c", TRUNCATED, str(tmp_path / "run.toml"), str(file), str(size)]
        process = subprocess.run(arguments, capture_output=True, text=True, check=False)
        file.write_bytes(content)
        if process.returncode != -signal.SIGBUS:
            assert process.returncode == 0, process.stderr
            assert re.search(
                rf"{re.escape(str(file))}: must .* {len(content)} bytes.*, got {size};", process.stdout
            )


@pytest.mark.slow
@pytest.mark.skipif(CHECKED, reason="it is what runs this")
def test_no_kernel_reads_or_writes_out_of_bounds():
    """Everything above, and tests of every module with kernels, with numba's own checks of every index."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-m", "not slow and not deep", "--deselect", f"{__file__}::{CUT}", __file__]
    command += [str(root / "tests" / name) for name in KERNEL_TESTS]
    # Which indexes a kernel computes hardly depends on the example; the deep tests take all that they know.
    profile = "deep" if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else "few"
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "HYPOTHESIS_PROFILE": profile}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=root)
    assert process.returncode == 0, process.stdout[-3000:]


def test_a_row_that_is_too_long_is_refused_by_name(make_run):
    run = make_run("sft", "padded", "truncate_end")
    loader = run.loader(micro_batch=4)
    draw(loader)
    store = run.stores["data"]
    for shard, documents in enumerate(np.diff(store.document_begins).tolist()):
        file = store.file(shard, "documents.bin").path
        content = file.read_bytes()
        offsets = np.frombuffer(content[: 8 * (documents + 1)], np.int64).copy()
        lengths = np.diff(offsets)
        short = (lengths[:-1] <= 13) & (lengths[1:] <= 13) & (lengths[:-1] + lengths[1:] > 13)
        # One of two documents that fill rows of their own now has the tokens of both.
        offsets[1:-1][short] = offsets[2:][short]
        overwrite(file, offsets.tobytes() + content[8 * (documents + 1) :])
    with pytest.raises(StoreCorruptError, match=r"data: a row must have at most 13 values of sequence, got"):
        draw(loader)


@pytest.mark.parametrize(("kind", "packing", "on_long"), SHAPES)
def test_a_flipped_byte_in_an_index_is_an_error_even_with_kept_rows(make_run, tmp_path, kind, packing, on_long):
    """[S.f] Batches are those of the plan or there are none, though an intact store left its row index there."""
    whole, errors = draw(make_run(kind, packing, on_long).loader(micro_batch=4)), set()
    arrays = read_manifest(tmp_path / "data").keys
    files = [file for file in (tmp_path / "data").glob("*/*.bin") if file.stem not in arrays]
    files = [file for file in files if not file.parent.name.startswith(".")]
    for file in files:
        content = file.read_bytes()
        for position in (8, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            try:
                assert draw(make_run(kind, packing, on_long).loader(micro_batch=4)) == whole
            except StoreCorruptError as error:
                assert re.match(rf"{file}: checksum must be \w+, got \w+; copy the store", str(error))  # noqa: PT017
                errors.add((file, position))
        file.write_bytes(content)
    assert len(errors) > 2 * len(files)  # four steps do not need every shard
