"""Records of unequal length made one batch: padded with 0, and with masks that are false there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tokenmill.adapters.astrai.dataset import Item
    from tokenmill.adapters.astrai.store import Value

_DTYPES = {"chosen_mask": torch.bool, "rejected_mask": torch.bool, "masks": torch.bool, "rewards": torch.float32}
"""Others are int64."""


def dpo_collate_fn(batch: Sequence[Item]) -> dict[str, torch.Tensor]:
    """Return pairs as tensors (B, T), where T is the longest of all, chosen or rejected."""
    length = max(len(item[key]) for item in batch for key in ("chosen", "rejected"))
    return _collate(batch, dict.fromkeys(("chosen", "rejected", "chosen_mask", "rejected_mask"), (length,)))


def grpo_collate_fn(batch: Sequence[Item]) -> dict[str, torch.Tensor]:
    """Return groups as tensors: `prompts` (B, P), `responses` and `masks` (B, G, R), `rewards` (B, G).

    P, G and R are the largest of the batch: no response is left out. Those that a smaller group lacks have reward 0
    and a mask that is false.
    """
    group = max(len(item["responses"]) for item in batch)
    response = max((len(each) for item in batch for each in item["responses"]), default=0)
    prompt = max(len(item["prompts"]) for item in batch)
    shapes: dict[str, tuple[int, ...]] = {
        "prompts": (prompt,),
        "responses": (group, response),
        "masks": (group, response),
        "rewards": (group,),
    }
    return _collate(batch, shapes)


def _collate(batch: Sequence[Item], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    whole = {}
    for key, shape in shapes.items():
        whole[key] = torch.zeros((len(batch), *shape), dtype=_DTYPES.get(key, torch.int64))
        for row, item in zip(whole[key], batch, strict=True):
            _fill(row, item[key])
    return whole


def _fill(row: torch.Tensor, values: Value) -> None:
    if not isinstance(values, list):
        row[: len(values)] = values
        return
    for line, value in zip(row, values, strict=False):  # a smaller group leaves lines of zeros
        line[: len(value)] = value
