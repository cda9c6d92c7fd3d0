"""Batches for JAX: as numpy arrays here, and shared out over four devices in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from tokenmill.adapters.jax import JaxLoader, optax_schedule
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.live import LiveLoader, LiveOptions, open_live
from tokenmill.loader import LoaderOptions

STEPS, BATCH, SEQ_LEN, VOCAB = 6, 8, 16, 60


@pytest.fixture
def run(run_over_web):
    return run_over_web(documents=120, vocab_size=VOCAB, steps=STEPS, batch=BATCH, seq_len=SEQ_LEN)


def as_bytes(batch):
    return {name: (array.dtype.str, array.tobytes()) for name, array in batch.items()}


def test_without_a_mesh_the_batches_are_those_of_the_loader(run):
    batches = JaxLoader(run.loader(micro_batch=4))
    assert len(batches) == 2 * STEPS
    assert [as_bytes(batch) for batch in batches] == [as_bytes(batch) for batch in run.loader(micro_batch=4)]
    assert batches.step == STEPS
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("save", ["state_dict", "get_state"])
@pytest.mark.parametrize("load", ["load_state_dict", "set_state"])
def test_a_state_resumes_in_a_new_iterator_or_in_a_running_one(run, save, load):
    batches = JaxLoader(run.loader(micro_batch=4))
    for _ in range(6):
        next(batches)
    state = json.dumps(getattr(batches, save)())
    assert len(state) <= 200
    rest = [as_bytes(batch) for batch in batches]
    again = JaxLoader(run.loader(micro_batch=4))
    next(again)
    for iterator in (again, batches):
        getattr(iterator, load)(json.loads(state))
        assert iterator.step == 3
        assert [as_bytes(batch) for batch in iterator] == rest


def test_a_state_of_another_plan_is_refused(run, run_over_web):
    other = run_over_web("other", seed=4, steps=STEPS, batch=BATCH, seq_len=SEQ_LEN)
    batches = JaxLoader(run.loader(micro_batch=8))
    next(batches)
    with pytest.raises(ResumeError, match=r"stages\[0\].seed 3 -> 4"):
        JaxLoader(other.loader(micro_batch=8)).set_state(batches.get_state())


def test_live_text_resumes_as_well(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "document {i} of the mill"}}\n' for i in range(300)))

    def batches():
        source = open_live(tmp_path / "a.jsonl", tokenizer="bytes", options=LiveOptions(seq_len=SEQ_LEN))
        options = LoaderOptions(threads=0)
        return JaxLoader(LiveLoader(source, steps=4, global_batch_size=BATCH, micro_batch=4, options=options))

    straight = batches()
    for _ in range(4):
        next(straight)
    again = batches()
    again.set_state(json.loads(json.dumps(straight.get_state())))
    rest = [as_bytes(batch) for batch in straight]
    assert len(rest) == 4
    assert [as_bytes(batch) for batch in again] == rest


FOUR_DEVICES = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tokenmill.adapters.jax import JaxLoader, data_parallel
from tokenmill.errors import ConfigError
from tokenmill.run.run import Run

assert len(jax.devices()) == 4
run = Run.from_toml(sys.argv[1])
devices = np.array(jax.devices())
flat, square = Mesh(devices, ("data",)), Mesh(devices.reshape(2, 2), ("data", "model"))
ARRAYS = ["input_ids", "labels", "position_ids", "doc_ids", "source", "num_loss_tokens"]
for mesh, shards in ((flat, 4), (square, 2)):
    assert data_parallel(mesh) == (0, 1)
    batches = JaxLoader(run.loader(micro_batch=8, arrays=ARRAYS), mesh=mesh)
    for step, batch in enumerate(batches):
        whole = run.loader(micro_batch=8, arrays=ARRAYS)[step]
        assert list(batch) == list(whole) == ARRAYS
        for name, array in batch.items():
            assert isinstance(array, jax.Array)
            assert (array.dtype, array.shape) == (np.int32, whole[name].shape), (name, array.dtype)
            assert np.array_equal(np.asarray(array), whole[name])
            spec = PartitionSpec("data") if array.ndim else PartitionSpec()
            assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
        parts = batch["input_ids"].addressable_shards
        rows = sorted((part.index[0].start or 0, part.data.shape) for part in parts)
        assert rows == sorted((8 // shards * (i % shards), (8 // shards, 16)) for i in range(4))
    assert batches.step == run.plan().steps
    batches.set_state({**JaxLoader(run.loader(micro_batch=8)).get_state()})
    assert np.array_equal(next(batches)["input_ids"], run.loader(micro_batch=8)[0]["input_ids"])

# A batch that was handed out is not overwritten by later ones, while the device may still read it.
batches = JaxLoader(run.loader(micro_batch=8), mesh=flat)
kept = list(batches)
assert [np.asarray(batch["labels"]).tolist() for batch in kept] == [
    run.loader(micro_batch=8)[step]["labels"].tolist() for step in range(run.plan().steps)
]

said = []
for call in (
    lambda: data_parallel(flat, "dp"),
    lambda: JaxLoader(run.loader(micro_batch=2), mesh=flat),
    lambda: JaxLoader(run.loader(rank=1, world_size=2, micro_batch=4), mesh=flat),
    lambda: JaxLoader(run.loader(micro_batch=8, arrays=["input_ids", "cu_seqlens"]), mesh=flat),
):
    try:
        call()
    except ConfigError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def start(program, *arguments, devices):
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.usefixtures("run")
def test_with_a_mesh_each_device_has_its_rows_of_the_global_batch(tmp_path):
    """[A1.a] And what does not fit a mesh is refused with the way out."""
    process = start(FOUR_DEVICES, tmp_path / "run.toml", devices=4)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert json.loads(out) == [
        "axis: expected one of the mesh, data, got 'dp'; name one",
        "loader: micro_batch must be divisible by the 4 devices of a rank along 'data', got 2; use 4",
        "loader: must be that of rank 0 of 1 along 'data', got rank 1 of 2; pass it what data_parallel(mesh) says",
        "arrays: must be of one shape in every batch to be shared out, got cu_seqlens; doc_ids are segment ids",
    ]


TWO_PROCESSES = """
import json, sys
import jax, numpy as np
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
from jax.sharding import Mesh
from tokenmill.adapters.jax import JaxLoader, data_parallel
from tokenmill.errors import ConfigError
from tokenmill.run.run import Run

devices = np.array(sorted(jax.devices(), key=lambda device: device.process_index))
mesh = Mesh(devices.reshape(4), ("data",))
rank, world_size = data_parallel(mesh)
assert (rank, world_size) == (jax.process_index(), 2)
# Where the model is split between processes, both need the same rows.
assert data_parallel(Mesh(devices.reshape(2, 2).T, ("data", "model"))) == (0, 1)
try:
    data_parallel(Mesh(devices[[0, 2, 1, 3]], ("data",)))
except ConfigError as error:
    assert "must be neighbours along 'data'" in str(error)
else:
    raise SystemExit("a scattered mesh was taken")
run = Run.from_toml(sys.argv[1])
batches = JaxLoader(run.loader(rank=rank, world_size=world_size, micro_batch=2), mesh=mesh)
total = jax.jit(lambda array: (array * np.arange(1, array.size + 1).reshape(array.shape)).sum())
out = []
for number, batch in enumerate(batches):
    if number == 5:
        batches.set_state(batches.get_state())
    out.append([batch["input_ids"].shape[0], int(total(batch["input_ids"]))])
state = batches.get_state()
if rank == 0:
    print(json.dumps([out, state["step"]]))
"""


@pytest.mark.deep
def test_two_processes_make_one_global_array(run, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    group = [start(TWO_PROCESSES, tmp_path / "run.toml", address, rank, devices=2) for rank in (0, 1)]
    done = [(*process.communicate(timeout=120), process.returncode) for process in group]
    assert [code for *_, code in done] == [0, 0], [errors for _, errors, _ in done]
    expected = []
    for step in range(STEPS):
        ids = run.loader(micro_batch=8)[step]["input_ids"]
        for half in (0, 2):  # the first micro-batches of both ranks, then the second ones
            rows = ids[[half, half + 1, 4 + half, 5 + half]]
            weights = np.arange(1, rows.size + 1).reshape(rows.shape)
            expected.append([4, int((rows * weights).sum())])
    assert json.loads(done[0][0].splitlines()[-1]) == [expected, STEPS]  # after what gloo says


def test_the_checks_name_what_is_wrong_before_a_batch_is_drawn(run):
    """[A1.a] Also on the one device of this process."""
    import jax
    from jax.sharding import Mesh

    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    with pytest.raises(ConfigError, match=r"must be that of rank 0 of 1 along 'data', got rank 1 of 2"):
        JaxLoader(run.loader(rank=1, world_size=2, micro_batch=2), mesh=mesh)


def test_every_round_of_an_eval_is_the_same(run_over_web):
    more = '[[evals]]\nname = "held"\nsource = "web"\ndocuments = "0:9"\n'
    run = run_over_web(more=more, steps=4, batch=4, seq_len=16)
    loader = JaxLoader(run.evals["held"].loader(micro_batch=2))
    first = [as_bytes(batch) for batch in loader]
    next(iter(loader))
    assert [as_bytes(batch) for batch in loader] == first
    assert len(first) == len(loader)


def test_a_learning_rate_as_optax_takes_it_follows_tokens(run):
    schedule = run.lr_schedule(warmup_tokens=200, final=0.25)
    rate = optax_schedule(schedule, peak=2.0)
    found = [float(jax.jit(rate)(step)) for step in (0, 1, STEPS - 1, 1000)]
    assert found == pytest.approx([2.0 * schedule(step) for step in (0, 1, STEPS - 1, STEPS - 1)], rel=1e-6)
    loader = JaxLoader(run.loader(micro_batch=BATCH))
    next(loader)
    assert loader.tokens_seen.slots == BATCH * SEQ_LEN
