"""KempnerForge's data package: its names, parameters and state, on top of tokenmill.

1. In: folders of token files, Hugging Face datasets, a `DataConfig`; a rank and a number of ranks.
2. Does: reads samples in place, computes their order, assigns them to ranks, and counts the delivered ones, so that
   a resume is exact.
3. Out: datasets, samplers and loaders that work with torch's and with each other, and their states.
"""

from tokenmill.adapters import need

need("torch", extra="torch", adapter="tokenmill.adapters.kempnerforge")

from tokenmill.adapters.kempnerforge.config import DataConfig
from tokenmill.adapters.kempnerforge.dataloader import (
    StatefulDataLoader,
    StreamingDataLoader,
    build_dataloader,
    merge_states,
)
from tokenmill.adapters.kempnerforge.dataset import (
    HuggingFaceDataset,
    MemoryMappedDataset,
    MixtureDataset,
    StreamingHuggingFaceDataset,
)
from tokenmill.adapters.kempnerforge.sampler import DistributedSampler, MixtureSampler
from tokenmill.config.dialects.kempnerforge import DatasetSource, TrainingPhase

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
    "TrainingPhase",
    "build_dataloader",
    "merge_states",
]
