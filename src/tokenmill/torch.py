"""What torch users need, in one import: tensors, ranks, and datasets, samplers and loaders as torch has them."""

from __future__ import annotations

from tokenmill.adapters.kempnerforge import (
    DataConfig,
    DatasetSource,
    DistributedSampler,
    HuggingFaceDataset,
    MemoryMappedDataset,
    MixtureDataset,
    MixtureSampler,
    StatefulDataLoader,
    StreamingDataLoader,
    StreamingHuggingFaceDataset,
    TrainingPhase,
    build_dataloader,
)
from tokenmill.adapters.torch import TorchLoader, find_rank, lr_scheduler, mesh_layout, to_torch, torch_loader

__all__ = [
    "DataConfig",
    "DatasetSource",
    "DistributedSampler",
    "HuggingFaceDataset",
    "MemoryMappedDataset",
    "MixtureDataset",
    "MixtureSampler",
    "StatefulDataLoader",
    "StreamingDataLoader",
    "StreamingHuggingFaceDataset",
    "TorchLoader",
    "TrainingPhase",
    "build_dataloader",
    "find_rank",
    "lr_scheduler",
    "mesh_layout",
    "to_torch",
    "torch_loader",
]
