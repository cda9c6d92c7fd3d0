"""Which of how many data-parallel ranks this process is."""

from __future__ import annotations

from tokenmill.adapters import distributed
from tokenmill.errors import ConfigError


def find_rank(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Return rank and number of ranks: as given, else as torch.distributed or the launcher says, else 0 of 1."""
    if rank is None or num_replicas is None:
        found = distributed.find_rank()
        rank = found[0] if rank is None else rank
        num_replicas = found[1] if num_replicas is None else num_replicas
    if not 0 <= rank < num_replicas:
        raise ConfigError(
            f"rank: must lie within 0 and the {num_replicas} ranks, got {rank}; give both rank and number of ranks"
        )
    return rank, num_replicas
