"""Batches as torch tensors, for a plain training loop, alone or under torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenmill.adapters import need

need("torch", extra="torch", adapter="tokenmill.torch")

import torch

from tokenmill.adapters.distributed import RankCheck, find_rank, flat_state, own_state

if TYPE_CHECKING:
    import torch.distributed as dist

    from tokenmill.loader import Loader
    from tokenmill.run.run import Run
    from tokenmill.types import Batch

Tensors = dict[str, torch.Tensor]


def to_torch(batch: Batch) -> Tensors:
    """Return the arrays of a batch as tensors; they share its memory."""
    return {name: torch.from_numpy(array) if array.ndim else torch.tensor(array) for name, array in batch.items()}


def to_device(tensors: Tensors, device: torch.device) -> Tensors:
    """Copy tensors to a device; to a GPU from pinned memory, so that the caller does not wait for the copy."""
    if device.type == "cuda":
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


class TorchLoader:
    """The batches of a loader as tensors; saved and resumed as the loader itself, by any world size.

    It is Stateful, as torch.distributed.checkpoint wants it: `dcp.save({"loader": loader, ...}, ...)`.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        device: torch.device | str | None = None,
        check_ranks: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.loader = loader
        self.device = torch.device(device) if device is not None else None
        self.group = group
        """All data-parallel ranks; None: all there are."""
        self._check = RankCheck(loader, group) if check_ranks else None

    def __len__(self) -> int:
        """Return the number of micro-batches of the whole run; the same on every rank."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Tensors]:
        for batch in self.loader if self._check is None else self._check.batches():
            tensors = to_torch(batch)
            yield tensors if self.device is None else to_device(tensors, self.device)

    @property
    def step(self) -> int:
        """The step that the next batch belongs to."""
        return self.loader.step

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands, as JSON, the same on every rank.

        Under torch.distributed the ranks of live text must call it together, as each knows its own lanes alone.
        """
        return dict(flat_state(self.loader, self.group))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state says, its own or the loader's; a running iteration goes on from there."""
        self.loader.load_state_dict(own_state(state))


def torch_loader(
    run: Run,
    *,
    micro_batch: int = 1,
    rank: int | None = None,
    world_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    check_ranks: bool = False,
    arrays: Sequence[str] | None = None,
) -> TorchLoader:
    """Return the loader of this process.

    Rank and world size are those of torch.distributed if it runs (of `group`, the data-parallel one), else of the
    environment that torchrun sets, else one rank alone; those that are given win.
    """
    rank, world_size = find_rank(group, rank=rank, world_size=world_size)
    loader = run.loader(rank=rank, world_size=world_size, micro_batch=micro_batch, arrays=arrays)
    return TorchLoader(loader, device=device, check_ranks=check_ranks, group=group)
