"""What torch users need, in one import."""

from __future__ import annotations

from tokenmill.adapters.distributed import find_rank
from tokenmill.adapters.torch import TorchLoader, to_torch, torch_loader

__all__ = ["TorchLoader", "find_rank", "to_torch", "torch_loader"]
