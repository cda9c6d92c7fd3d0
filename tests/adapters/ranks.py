"""Let a function of a test be called by all ranks of a job, each a process, without an import of torch for each.

Imports cost more than all that the ranks do. So multiprocessing's fork server imports, once for all tests of a
process, the frameworks that this process has. A job is a fork of it, which imports its test and forks into ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from typing import Any

FRAMEWORKS = ("torch.distributed.checkpoint", "tokenmill.adapters.torch", "tokenmill.adapters.trl")
MOST_SECONDS = 240
"""A rank that waits for one that has failed is ended then, and the others with it."""


def call_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, **environment: str) -> list[Any]:
    """Call a function of a module on so many ranks at once, and return what each of them returns.

    As under torchrun, the environment tells a rank which one it is: RANK, WORLD_SIZE, MASTER_ADDR and the like.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    job = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in FRAMEWORKS if name in sys.modules])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_fork, world_size, job | environment, function, arguments).result()


def _fork(
    world_size: int, environment: Mapping[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> list[Any]:
    """Be a job: fork into ranks, and wait for all of them, or for the first that fails."""
    os.environ.update(environment)
    with ProcessPoolExecutor(world_size, multiprocessing.get_context("fork")) as pool:
        ranks = [pool.submit(_be_rank, rank, function, arguments) for rank in range(world_size)]
        failed = [rank for rank in wait(ranks, return_when=FIRST_EXCEPTION).done if rank.exception()]
        return [rank.result() for rank in failed or ranks]


def _be_rank(rank: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch

    signal.alarm(MOST_SECONDS)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return function(*arguments)
