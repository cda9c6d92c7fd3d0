"""Which of how many data-parallel ranks this process is."""

from __future__ import annotations

import os

import torch.distributed as dist

from tokenmill.errors import ConfigError


def find_rank(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Return rank and number of ranks: as given, else as torch.distributed or the launcher says, else 0 of 1."""
    if dist.is_available() and dist.is_initialized():
        found = dist.get_rank(), dist.get_world_size()
    else:
        found = _number("RANK", 0), _number("WORLD_SIZE", 1)
    rank = found[0] if rank is None else rank
    num_replicas = found[1] if num_replicas is None else num_replicas
    if not 0 <= rank < num_replicas:
        raise ConfigError(
            f"rank: must lie within 0 and the {num_replicas} ranks, got {rank}; give both rank and number of ranks"
        )
    return rank, num_replicas


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{name}: must be a whole number in the environment, got {text!r}; unset it")
    return int(text) if text else default
