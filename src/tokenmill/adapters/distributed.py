"""Who is which rank under torch.distributed, and one state for all ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenmill.adapters.needs import need
from tokenmill.errors import ConfigError, ResumeError

need("torch", extra="torch", adapter="tokenmill.torch")

import torch.distributed as dist  # noqa: E402 - after the line that says what to install

if TYPE_CHECKING:
    from tokenmill.live import LiveLoader
    from tokenmill.live.share import Share
    from tokenmill.loader import Loader, RankSlice

_MID_STEP = ("batches", "micro_batch", "world_size")
_NESTED = ("made_of", "lanes", "skipped", "live")
"""What states of live text hold beside numbers and texts."""


def find_rank(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return rank and world size: of torch.distributed if it runs, else of RANK and WORLD_SIZE, else (0, 1)."""
    if is_running():
        return dist.get_rank(group), dist.get_world_size(group)
    said = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if not said:
        return 0, 1
    if len(said) == 1 or not all(value.isdecimal() for value in said.values()):
        raise ConfigError(
            f"environment: RANK and WORLD_SIZE must both be whole numbers, or not be set, got {said}; "
            "start with torchrun, or pass rank and world_size"
        )
    return int(said["RANK"]), int(said["WORLD_SIZE"])


def is_running() -> bool:
    """Say whether there is a process group."""
    return bool(dist.is_available() and dist.is_initialized())


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:  # noqa: ANN401 - any JSON value
    """Return the values of all ranks of a group, on each of them."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def whole_state(loader: Loader | LiveLoader, group: dist.ProcessGroup | None = None) -> dict[str, int | str]:
    """Return the state of a run: the same on every rank, with the same keys at any time, each a number or a text.

    A distributed checkpoint loads the keys that a fresh loader has, and no others. A rank of live text knows its
    own lanes alone: where torch.distributed runs, all ranks must ask together, and each gets the lanes of all.
    """
    state: dict[str, Any] = dict(loader.state_dict())
    if is_running() and any(isinstance(value, Mapping) for value in state.values()):
        state = _merged(loader, state, group)
    if "lanes" in state:  # what live text alone has at times
        state = {"skipped": {}, "global_batch_size": 0, **state}
    texts = {key: json.dumps(value) if isinstance(value, Mapping) else value for key, value in state.items()}
    return texts | {key: state.get(key, 0) for key in _MID_STEP}


def _merged(
    loader: Loader | LiveLoader, state: Mapping[str, Any], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    from tokenmill.live import merge_states

    part = part_of(loader)
    found: list[tuple[int, Mapping[str, Any]]] = gather((part.rank, state), group)
    missing = sorted(set(range(part.world_size)) - {rank for rank, _ in found})
    if missing:
        raise ResumeError(
            f"state: must have the lanes of all {part.world_size} ranks, got none of {missing} from the process "
            "group; pass the group that has every data-parallel rank"
        )
    return merge_states([one for _, one in found])


def part_of(loader: Loader | LiveLoader) -> RankSlice | Share:
    """Return which rank a loader was made for, of how many."""
    from tokenmill.loader import Loader

    return loader.part if isinstance(loader, Loader) else loader.share


def own_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state as the loaders have it; one that already is stays as it is."""
    if not isinstance(state, Mapping):
        return state  # the loader says what is wrong with it
    found = dict(state)
    for key in _NESTED:
        if isinstance(found.get(key), str):
            try:
                found[key] = json.loads(found[key])
            except ValueError as error:
                raise ResumeError(
                    f"state: {key} must be JSON, got {found[key]!r}; use a state that was not edited"
                ) from error
    return found
