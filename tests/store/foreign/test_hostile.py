"""Files that an accident or an attacker changed: an error of ours, or a store within its bounds, nothing else."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tokenmill.errors import TokenmillError
from tokenmill.store import open_store


def damage(file, rng):
    """Cut a file, lengthen it, or change bytes, mostly near its start, where headers are."""
    data = bytearray(file.read_bytes())
    kind = rng.integers(0, 6)
    if kind == 0:
        data = data[: int(rng.integers(0, len(data) + 1))]
    elif kind == 1:
        data += rng.bytes(int(rng.integers(1, 40)))
    else:
        for _ in range(int(rng.integers(1, 4))):
            if data:
                reach = len(data) if kind == 2 else min(len(data), 64 << int(rng.integers(0, 5)))
                data[int(rng.integers(0, reach))] = int(rng.choice([0, 1, 127, 128, 255, rng.integers(0, 256)]))
    file.write_bytes(data)


def survive(made, rounds, seed):
    """Damage files over and over; return how often they were refused."""
    folder = made.path if made.path.is_dir() else made.path.parent
    clean = folder.with_name("clean")
    shutil.copytree(folder, clean)
    rng = np.random.default_rng(seed)
    refused = 0
    for _ in range(rounds):
        shutil.rmtree(folder)
        shutil.copytree(clean, folder)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        damage(files[int(rng.integers(0, len(files)))], rng)
        try:
            store = open_store(made.path, **made.options)
            tokens = store.fetch(0, store.num_tokens, "sequence")
            offsets = store.document_offsets(0, store.num_documents)
            assert int(offsets[-1]) == store.num_tokens == tokens.size
        except TokenmillError:
            refused += 1
    return refused


def test_damage_is_refused_or_harmless(write, name):
    """[S.d, S.e, S.f]"""
    assert survive(write(name), 25, seed=1) > 0


@pytest.mark.deep
def test_much_damage_is_refused_or_harmless(write, name):
    """[S.d, S.e, S.f]"""
    assert survive(write(name), 1500, seed=2) > 0
