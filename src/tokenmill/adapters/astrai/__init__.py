"""AstrAI's data API, over stores of tokenmill and of AstrAI.

1. In: the path of a tokenmill store, of AstrAI's `.bin` files with their `meta.json`, or of its `.h5` files; for
   `Pipeline`, records and a recipe.
2. Does: offers AstrAI's names. `pipeline` prepares a store that AstrAI can read too (`layout`); `store` opens and
   reads a path; `dataset` makes windows and records of a store; `sampler` orders the items; `files` reads and
   writes AstrAI's `.bin` files.
3. Out: items as dicts of tensors, for a plain DataLoader and any sampler.
"""

from tokenmill.adapters import need

need("torch", extra="torch", adapter="tokenmill.adapters.astrai")

from tokenmill.adapters.astrai.dataset import (
    BaseDataset,
    DatasetFactory,
    DPODataset,
    GRPODataset,
    SEQDataset,
    SFTDataset,
    dpo_collate_fn,
    grpo_collate_fn,
)
from tokenmill.adapters.astrai.files import load_bin, save_bin
from tokenmill.adapters.astrai.pipeline import Pipeline
from tokenmill.adapters.astrai.sampler import ResumableDistributedSampler
from tokenmill.adapters.astrai.store import H5Store, JsonlStore, MmapStore, Store, StoreFactory, detect_format

RDSampler = ResumableDistributedSampler
"""Its name in AstrAI's newest version."""

__all__ = [
    "BaseDataset",
    "DPODataset",
    "DatasetFactory",
    "GRPODataset",
    "H5Store",
    "JsonlStore",
    "MmapStore",
    "Pipeline",
    "RDSampler",
    "ResumableDistributedSampler",
    "SEQDataset",
    "SFTDataset",
    "Store",
    "StoreFactory",
    "detect_format",
    "dpo_collate_fn",
    "grpo_collate_fn",
    "load_bin",
    "save_bin",
]
