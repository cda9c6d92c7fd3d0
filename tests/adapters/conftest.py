"""What the tests of all adapters need: models too small for threads, runs over a store of short documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenmill.run.run import Run

RUN = """
[run]
seed = {seed}
steps = {steps}
global_batch_size = {batch}
seq_len = {seq_len}

[[sources]]
name = "web"
store = "web"
"""


@pytest.fixture(autouse=True)
def one_thread():
    """Compute in one thread: such models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run_over_web(make_store, tmp_path):
    """Make a run over one store of documents of 2 to 39 tokens; `more` is added to its config."""

    def make(name="run", more="", *, documents=60, vocab_size=60, **numbers):
        if not (tmp_path / "web").exists():
            lengths = np.random.default_rng(0).integers(2, 40, documents)
            make_store("web", [int(n) for n in lengths], vocab_size=vocab_size)
        (tmp_path / f"{name}.toml").write_text(RUN.format(**{"seed": 3, **numbers}) + more)
        return Run.from_toml(tmp_path / f"{name}.toml")

    return make
