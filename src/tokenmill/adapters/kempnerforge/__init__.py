"""KempnerForge's data package: its names, parameters and state, with our engine under them.

1. In: folders of token files, datasets of Hugging Face, a `DataConfig`; a rank and a number of ranks.
2. Does: reads samples where they lie, puts them into an order that is computed and not kept, deals it to ranks,
   and counts what was handed out, so that a resume is exact.
3. Out: datasets, samplers and loaders that work with torch's own and with each other, and their states.
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
