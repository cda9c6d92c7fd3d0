"""Train a bigram model in JAX on all devices; run it again, and it resumes from its state.

python examples/jax_train.py [FOLDER]
XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_train.py
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import tokenmill as tm
from tokenmill.adapters.jax import Arrays, JaxLoader, data_parallel
from tokenmill.demo import CORPUS_DIR

RUN = f"""
[run]
steps = 10
global_batch_size = 8
seq_len = 64
[[sources]]
name = "prose"
documents = ["{CORPUS_DIR}/prose.jsonl"]
tokenizer = "bytes"
"""


def loss_of(table: jax.Array, batch: Arrays) -> jax.Array:
    """Return the mean loss over the labels of the global batch; -100 marks tokens without a label."""
    labels = batch["labels"]
    scores = jnp.take_along_axis(jax.nn.log_softmax(table[batch["input_ids"]]), labels.clip(0)[..., None], -1)
    return -(scores[..., 0] * (labels >= 0)).sum() / (labels >= 0).sum()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    (folder / "run.toml").write_text(RUN, encoding="utf-8")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    rank, world_size = data_parallel(mesh)
    run = tm.Run.from_toml(folder / "run.toml")
    batches = JaxLoader(run.loader(rank=rank, world_size=world_size, micro_batch=8 // world_size), mesh=mesh)
    table, saved = jnp.zeros((259, 259)), folder / "state.json"
    if saved.exists():
        batches.set_state(json.loads(saved.read_text(encoding="utf-8")))
        table = jnp.array(np.load(folder / "table.npy"))
    step = jax.jit(jax.value_and_grad(loss_of))
    for batch in batches:
        loss, gradient = step(table, batch)
        table -= 50.0 * gradient
        logging.info("step %d loss %.4f", batches.step, loss)
        np.save(folder / "table.npy", table)
        saved.write_text(json.dumps(batches.get_state()), encoding="utf-8")
