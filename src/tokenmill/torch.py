"""Batches of a run as torch tensors, for one process or under torch.distributed."""

# ruff: noqa: PLC0414 - an alias to itself marks a name that may be imported from here

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tokenmill.adapters.torch import TorchLoader, find_rank, lr_scheduler, mesh_layout, to_torch, torch_loader

if TYPE_CHECKING:
    from tokenmill.adapters.kempnerforge import DataConfig as DataConfig
    from tokenmill.adapters.kempnerforge import DatasetSource as DatasetSource
    from tokenmill.adapters.kempnerforge import DistributedSampler as DistributedSampler
    from tokenmill.adapters.kempnerforge import HuggingFaceDataset as HuggingFaceDataset
    from tokenmill.adapters.kempnerforge import MemoryMappedDataset as MemoryMappedDataset
    from tokenmill.adapters.kempnerforge import MixtureDataset as MixtureDataset
    from tokenmill.adapters.kempnerforge import MixtureSampler as MixtureSampler
    from tokenmill.adapters.kempnerforge import StatefulDataLoader as StatefulDataLoader
    from tokenmill.adapters.kempnerforge import StreamingDataLoader as StreamingDataLoader
    from tokenmill.adapters.kempnerforge import StreamingHuggingFaceDataset as StreamingHuggingFaceDataset
    from tokenmill.adapters.kempnerforge import TrainingPhase as TrainingPhase
    from tokenmill.adapters.kempnerforge import build_dataloader as build_dataloader

__all__ = ["TorchLoader", "find_rank", "lr_scheduler", "mesh_layout", "to_torch", "torch_loader"]

_NOT_HERE = {"merge_states"}
"""Names of the KempnerForge adapter that mean something else for other loaders."""


def __getattr__(name: str) -> object:
    """Return a name of `tokenmill.adapters.kempnerforge`, which may be imported from here as well."""
    if not name.startswith("_") and name not in _NOT_HERE:
        adapter = import_module("tokenmill.adapters.kempnerforge")
        if name in adapter.__all__:
            value: object = getattr(adapter, name)
            return value
    raise AttributeError(f"module 'tokenmill.torch' has no attribute {name!r}")
