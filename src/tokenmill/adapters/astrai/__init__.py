"""The data API of AstrAI, over stores of ours and of AstrAI.

1. In: the path of a store of ours, of AstrAI's `.bin` files with their `meta.json`, or of its `.h5` files; for
   `Pipeline`, records and a recipe.
2. Does: offers AstrAI's names: stores, datasets of the four training types, the sampler, the pipeline.
   `formats` tells what is at a path and opens it, `positions` adds the positions that AstrAI wrote, `store` reads;
   `dataset` makes windows, `records` pairs and groups, `factory` either, `collate` pads records; `sampler` says
   which item is next; `pipeline` prepares.
3. Out: items as dicts of tensors, for a plain DataLoader and any sampler.
"""

from tokenmill.adapters import need

need("torch", extra="torch", adapter="tokenmill.adapters.astrai")

from tokenmill.adapters.astrai.dataset import (
    BaseDataset,
    DatasetFactory,
    DPODataset,
    GRPODataset,
    Pipeline,
    SEQDataset,
    SFTDataset,
    dpo_collate_fn,
    grpo_collate_fn,
)
from tokenmill.adapters.astrai.sampler import ResumableDistributedSampler
from tokenmill.adapters.astrai.store import H5Store, MmapStore, Store, StoreFactory, detect_format

__all__ = [
    "BaseDataset",
    "DPODataset",
    "DatasetFactory",
    "GRPODataset",
    "H5Store",
    "MmapStore",
    "Pipeline",
    "ResumableDistributedSampler",
    "SEQDataset",
    "SFTDataset",
    "Store",
    "StoreFactory",
    "detect_format",
    "dpo_collate_fn",
    "grpo_collate_fn",
]
