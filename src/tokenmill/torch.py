"""What torch users need, in one import: tensors, ranks, and datasets, samplers and loaders as torch has them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tokenmill.adapters.distributed import find_rank
from tokenmill.adapters.torch import TorchLoader, to_torch, torch_loader

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

# Late, as they bring kernels that a plain loop over batches does not need.
_DATASETS = (
    *("DataConfig", "DatasetSource", "TrainingPhase", "MemoryMappedDataset", "HuggingFaceDataset"),
    *("StreamingHuggingFaceDataset", "MixtureDataset", "DistributedSampler", "MixtureSampler"),
    *("StatefulDataLoader", "StreamingDataLoader", "build_dataloader"),
)

__all__ = [*_DATASETS, "TorchLoader", "find_rank", "to_torch", "torch_loader"]  # noqa: PLE0604 - one table of names


def __getattr__(name: str) -> object:
    if name not in _DATASETS:
        raise AttributeError(f"module 'tokenmill.torch' has no attribute {name!r}")
    value = getattr(import_module("tokenmill.adapters.kempnerforge"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
