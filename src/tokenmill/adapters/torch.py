"""Batches as torch tensors, for a plain training loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tokenmill.adapters.needs import need

need("torch", extra="torch", adapter="tokenmill.torch")

import torch  # noqa: E402 - after the line that says what to install

if TYPE_CHECKING:
    from tokenmill.live import LiveLoader
    from tokenmill.loader import Loader
    from tokenmill.types import Batch

Tensors = dict[str, torch.Tensor]


def to_torch(batch: Batch) -> Tensors:
    """Return the arrays of a batch as tensors; they share its memory."""
    return {name: torch.from_numpy(array) if array.ndim else torch.tensor(array) for name, array in batch.items()}


class TorchLoader:
    """The batches of a loader as tensors; saved and resumed as the loader itself."""

    def __init__(self, loader: Loader | LiveLoader, *, device: torch.device | str | None = None) -> None:
        self.loader = loader
        self.device = torch.device(device) if device is not None else None

    def __len__(self) -> int:
        """Return the number of micro-batches of the whole run; the same on every rank."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Tensors]:
        for batch in self.loader:
            tensors = to_torch(batch)
            if self.device is not None:
                tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
            yield tensors

    @property
    def step(self) -> int:
        """The step that the next batch belongs to."""
        return self.loader.step

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, as JSON."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state says; a running iteration goes on from there."""
        self.loader.load_state_dict(state)
