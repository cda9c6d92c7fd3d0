"""What torch users need, in one import."""

from __future__ import annotations

from tokenmill.adapters.torch import TorchLoader, to_torch

__all__ = ["TorchLoader", "to_torch"]
