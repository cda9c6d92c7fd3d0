"""From a training type and a path to a dataset."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar

from tokenmill.adapters.astrai.dataset import BaseDataset, SEQDataset, SFTDataset
from tokenmill.adapters.astrai.formats import check_name, refuse_unknown
from tokenmill.adapters.astrai.records import DPODataset, GRPODataset


class DatasetFactory:
    """Datasets by training type."""

    datasets: ClassVar[Mapping[str, type[BaseDataset]]] = {
        "seq": SEQDataset,
        "sft": SFTDataset,
        "dpo": DPODataset,
        "grpo": GRPODataset,
    }

    @classmethod
    def create(cls, train_type: str, window_size: int, stride: int | None = None, **unknown: object) -> BaseDataset:
        """Return a dataset that is yet to be loaded."""
        check_name("train_type", train_type, cls.datasets)
        refuse_unknown("DatasetFactory.create", unknown, ("train_type", "window_size", "stride"))
        return cls.datasets[train_type](window_size, stride)

    @classmethod
    def load(
        cls,
        train_type: str,
        load_path: str | os.PathLike[str],
        window_size: int,
        stride: int | None = None,
        storage_type: str | None = None,
        **unknown: object,
    ) -> BaseDataset:
        """Open a store as a dataset: `train_type` is seq, sft, dpo or grpo.

        `window_size` is the longest input, `stride` the distance between windows, by default the same.
        """
        known = ("train_type", "load_path", "window_size", "stride", "storage_type")
        refuse_unknown("DatasetFactory.load", unknown, known)
        dataset = cls.create(train_type, window_size, stride)
        dataset.load(load_path, storage_type)
        return dataset
