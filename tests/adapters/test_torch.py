"""Batches as tensors: the same values, on the device that is asked for, resumed as the loader itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.stateful import Stateful

import tokenmill.torch
from tokenmill import Run
from tokenmill.adapters.torch import TorchLoader, read_windows, to_device, to_torch, torch_loader
from tokenmill.errors import ConfigError
from tokenmill.store import open_store
from tokenmill.store.remote.upload import upload
from tokenmill.types import ARRAYS

TOML = """
[run]
seed = 1
steps = 12
global_batch_size = 8
seq_len = 16

[[sources]]
name = "web"
store = "web"

[[stages]]
name = "base"
start_step = 0

[[stages]]
name = "long"
start_step = 7
seq_len = 32
global_batch_size = 4
"""


@pytest.fixture
def run(make_store, tmp_path):
    rng = np.random.default_rng(0)
    make_store("web", [int(n) for n in rng.integers(1, 50, 200)], max_tokens_per_shard=900)
    (tmp_path / "run.toml").write_text(TOML)
    return Run.from_toml(tmp_path / "run.toml")


def plain(tensors):
    return {name: (tuple(tensor.shape), tensor.tolist()) for name, tensor in tensors.items()}


def test_the_tensors_hold_what_the_arrays_hold_in_the_same_memory(run):
    batch = run.loader(micro_batch=4, arrays=ARRAYS)[3]
    tensors = to_torch(batch)
    assert list(tensors) == list(batch)
    assert plain(tensors) == {name: (array.shape, array.tolist()) for name, array in batch.items()}
    assert {name: str(tensor.dtype) for name, tensor in tensors.items()} == {
        name: f"torch.{array.dtype.name}".replace("torch.bool_", "torch.bool") for name, array in batch.items()
    }
    batch["input_ids"][0, 0] += 1
    assert tensors["input_ids"][0, 0] == int(batch["input_ids"][0, 0])


def test_a_loader_of_tensors_gives_the_batches_of_the_loader_in_order(run):
    drawn = [plain(tensors) for tensors in TorchLoader(run.loader(micro_batch=2))]
    expected = [plain(to_torch(batch)) for batch in run.loader(micro_batch=2, threads=0)]
    assert drawn == expected
    assert len(drawn) == len(TorchLoader(run.loader(micro_batch=2))) == 7 * 4 + 5 * 2


def test_batches_that_are_kept_are_not_written_over(run):
    """The memory of a batch is used again only when no tensor holds it any more."""
    loader = TorchLoader(run.loader(micro_batch=2))
    kept = list(loader)
    assert [plain(tensors) for tensors in kept] == [
        plain(to_torch(batch)) for batch in run.loader(micro_batch=2, threads=0)
    ]


def test_tensors_go_to_the_device_that_is_asked_for(run):
    here = next(iter(TorchLoader(run.loader(micro_batch=2), device="cpu")))
    there = next(iter(TorchLoader(run.loader(micro_batch=2), device=torch.device("meta"))))
    assert {tensor.device.type for tensor in here.values()} == {"cpu"}
    assert {name: (tensor.device.type, tensor.shape, tensor.dtype) for name, tensor in there.items()} == {
        name: ("meta", tensor.shape, tensor.dtype) for name, tensor in here.items()
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_to_a_gpu_holds_the_same_values(run):
    batch = to_torch(run.loader(micro_batch=4)[0])
    copied = to_device(batch, torch.device("cuda"))
    torch.cuda.synchronize()
    assert plain({name: tensor.cpu() for name, tensor in copied.items()}) == plain(batch)


def test_a_loader_is_stateful_for_a_checkpoint_and_its_state_is_small_json(run):
    """[E1.c]"""
    loader = torch_loader(run, micro_batch=4)
    assert isinstance(loader, Stateful)
    state = loader.state_dict()
    assert len(json.dumps(state)) < 250
    assert json.loads(json.dumps(state)) == state
    assert {key: value for key, value in state.items() if value != 0} == {
        key: value for key, value in loader.loader.state_dict().items() if value != 0
    }


def test_a_run_goes_on_exactly_before_and_during_an_iteration(run):
    """[E1.a, A1.a] At another world size, from a state of tensors or of arrays."""
    loader = torch_loader(run, micro_batch=4, rank=0, world_size=1)
    stream = iter(loader)
    for _ in range(10):
        next(stream)
    state = loader.state_dict()
    assert (loader.step, state["step"]) == (5, 5)
    rest = [plain(tensors)["labels"][1] for tensors in stream]
    halves = [torch_loader(run, micro_batch=2, rank=rank, world_size=2) for rank in range(2)]
    streams = [iter(half) for half in halves]
    for stream in streams:
        next(stream)
    halves[0].load_state_dict(state)
    halves[1].load_state_dict({key: value for key, value in state.items() if value != 0})
    drawn = [[plain(tensors)["labels"][1] for tensors in stream] for stream in streams]
    # 8 rows a step, 4 from step 7 on: a rank has the first or the second half of them, by two.
    wide = [[drawn[rank][2 * step + half] for rank in range(2) for half in range(2)] for step in range(2)]
    narrow = [[drawn[rank][step] for rank in range(2)] for step in range(4, 9)]
    assert [row for step in [*wide, *narrow] for rows in step for row in rows] == [
        row for rows in rest for row in rows
    ]


def test_a_plain_loader_takes_the_state_of_tensors(run):
    loader = torch_loader(run, micro_batch=4)
    stream = iter(loader)
    for _ in range(3):
        next(stream)
    plain_loader = run.loader(micro_batch=4)
    plain_loader.load_state_dict(loader.state_dict())
    assert np.array_equal(next(iter(plain_loader))["labels"], next(stream)["labels"].numpy())


def test_the_arrays_that_are_asked_for_are_delivered(run):
    tensors = next(iter(torch_loader(run, micro_batch=2, arrays=("input_ids", "cu_seqlens", "max_seqlen"))))
    assert list(tensors) == ["input_ids", "cu_seqlens", "max_seqlen"]
    assert (tensors["max_seqlen"].ndim, tensors["cu_seqlens"].dtype) == (0, torch.int32)


def test_the_names_for_torch_users_resolve():
    assert [name for name in tokenmill.torch.__all__ if not hasattr(tokenmill.torch, name)] == []


def test_the_path_of_a_config_is_no_run_and_the_way_out_is_named():
    with pytest.raises(
        ConfigError, match=r"torch_loader: must be given a Run .*, got 'run.toml'; .* Run.from_toml"
    ):
        torch_loader("run.toml")


@pytest.mark.parametrize("is_remote", [False, True])
def test_windows_are_those_of_the_stream_wherever_shards_end(make_store, tmp_path, is_remote):
    place, tokens, _ = make_store("web", [7] * 20, max_tokens_per_shard=30)
    if is_remote:
        upload(place, f"file://{tmp_path}/away")
        place = f"file://{tmp_path}/away"
    begins = [*range(0, tokens.size - 9, 5)][::-1]
    store = open_store(place)
    assert (store._by_ranges, store.num_shards > 3) == (is_remote, True)
    windows = {index: values.tolist() for index, values in read_windows(store, "sequence", begins, 9)}
    assert [windows[index] for index in range(len(begins))] == [tokens[b : b + 9].tolist() for b in begins]
