"""Ranks of a DeviceMesh."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tokenmill.adapters.torch import mesh_layout, torch_loader
from tokenmill.errors import ConfigError
from tokenmill.loader import Layout

NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@pytest.fixture
def fake_rank():
    """Be some rank of 48, without any other process."""

    def start(rank, world_size=48):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield start
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 1, 7, 23, 30, 47])
def test_a_mesh_says_where_a_process_stands(fake_rank, rank):
    """Data-parallel dimensions are one group, in their order."""
    fake_rank(rank)
    mesh = init_device_mesh("cpu", (2, 2, 3, 2, 2), mesh_dim_names=NAMES)
    pp, rest = divmod(rank, 24)
    dp, rest = divmod(rest, 4)
    cp, tp = divmod(rest, 2)
    expected = {"dp": (dp, 6), "cp": (cp, 2), "tp": (tp, 2), "pp": (pp, 2)}
    assert mesh_layout(mesh) == Layout(**expected)
    assert mesh_layout(mesh, cut="contiguous", needs="labels") == Layout(
        **expected, cut="contiguous", needs="labels"
    )


def test_a_loader_takes_the_layout_of_a_mesh(fake_rank, run_over_web):
    fake_rank(5, 8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("fsdp", "cp", "tp"))
    run = run_over_web(steps=3, batch=4, seq_len=16)
    loader = torch_loader(run, layout=mesh_layout(mesh), micro_batch=2)
    assert loader.loader.part.layout == Layout(dp=(1, 2), cp=(0, 2), tp=(1, 2))
    whole = run.loader(rank=1, world_size=2, micro_batch=2)
    assert next(iter(loader))["labels"].tolist() == [
        [*row[:4], *row[12:]] for row in next(iter(whole))["labels"].tolist()
    ]


def test_names_that_are_not_known_are_asked_for(fake_rank):
    fake_rank(3, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ep"))
    with pytest.raises(
        ConfigError, match=r"named after what they are for, got 'ep'; pass .* names=\{\"ep\": \"dp\"\}"
    ):
        mesh_layout(mesh)
    assert mesh_layout(mesh, names={"ep": "dp"}) == Layout(dp=(3, 4))
    with pytest.raises(ConfigError, match="must name its dimensions, got none"):
        mesh_layout(init_device_mesh("cpu", (4,)))


def test_a_layout_and_a_rank_are_refused_together(run_over_web):
    with pytest.raises(ConfigError, match="got both, rank 0 of None; say it in the layout"):
        torch_loader(run_over_web(steps=3, batch=4, seq_len=16), layout=Layout(), rank=0)
