"""Samples of a step with other ranks, after a resume with other ranks, and after new weights.

    python benchmarks/samplers.py [--tiny] [--json] [CHECKOUT OF KEMPNERFORGE]

Two datasets of 6,000 and 2,000 samples, mixed 3 to 1, in steps of 8 samples. KempnerForge's samplers are measured
as well if the folder of a checkout is given. Only `kempnerforge/data/sampler.py` is imported from it. The part of
its loader is done here as its code does it: a state counts batches, a resume skips as many times `batch_size`
samples of the rank, and new weights start a new iteration that skips what was read.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenmill.adapters import kempnerforge as ours

SIZES = [0, 6000, 8000]
WEIGHTS = [0.75, 0.25]
STEP = 8
"""Samples of a step, over all ranks."""
STEPS = 40 if "--tiny" in sys.argv else 400
HALF = STEPS // 2
Order = Callable[[int, int, int], Iterator[int]]
"""(rank, ranks, samples of the rank that were read) -> the samples that come next."""


def mixture(module: Any) -> Order:
    """Return the order of two datasets that are mixed."""

    def order(rank: int, ranks: int, read: int) -> Iterator[int]:
        sampler = module.MixtureSampler(SIZES, WEIGHTS, num_replicas=ranks, rank=rank, seed=42)
        sampler.set_skip(read)
        return iter(sampler)

    return order


def single(module: Any) -> Order:
    """Return the order of one dataset."""

    def order(rank: int, ranks: int, read: int) -> Iterator[int]:
        sampler = module.DistributedSampler(range(SIZES[-1]), num_replicas=ranks, rank=rank, seed=42)
        sampler.set_skip(read)
        return iter(sampler)

    return order


def steps(order: Order, ranks: int, *, read: int = 0, count: int = STEPS) -> list[Counter[int]]:
    """Return the samples of each step, over all ranks."""
    orders = [order(rank, ranks, read) for rank in range(ranks)]
    return [Counter(sample for each in orders for sample in islice(each, STEP // ranks)) for _ in range(count)]


def equal(order: Order) -> int:
    """Return in how many steps two ranks train on what one rank alone does."""
    return sum(one == two for one, two in zip(steps(order, 1), steps(order, 2), strict=True))


def repeated(order: Order, skip: int) -> int:
    """Return how many samples are read twice when two ranks stop half-way, and one resumes `skip` samples.

    The batch of a rank stays at 4 samples, so the one rank takes two of them per step.
    """
    before = steps(order, 2, count=HALF)
    after = steps(order, 1, read=skip, count=HALF)
    return sum((sum(before, Counter()) & sum(after, Counter())).values())


def again(module: Any) -> int:
    """Return how many samples are read twice when weights change half-way, though no dataset is used up."""
    sampler = module.MixtureSampler(SIZES, WEIGHTS, num_replicas=1, rank=0, seed=42)
    before = list(islice(iter(sampler), HALF * STEP))
    sampler.update_weights([0.5, 0.5])
    sampler.set_skip(len(before))
    after = list(islice(iter(sampler), HALF * STEP))
    return len(before + after) - len({*before, *after})


def measure(module: Any, skip: int) -> dict[str, int]:
    """Return the figures of our samplers or of KempnerForge's."""
    return {
        "steps": STEPS,
        "steps_equal_with_two_ranks": equal(mixture(module)),
        "steps_equal_with_two_ranks_of_one_dataset": equal(single(module)),
        "samples_repeated_by_a_resume_with_one_rank": repeated(single(module), skip),
        "samples_repeated_by_new_weights": again(module),
    }


def load(checkout: Path) -> ModuleType:
    """Load KempnerForge's samplers, and nothing else of it."""
    spec = importlib.util.spec_from_file_location(
        "their_sampler", checkout / "kempnerforge" / "data" / "sampler.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # Our state counts the samples of all ranks, theirs the batches of one: of 4 samples each, in both runs.
    figures = {"tokenmill": measure(ours, HALF * STEP)}
    if options.checkout is not None:
        figures["KempnerForge"] = measure(load(options.checkout), HALF * 4)
    if options.json:
        print(json.dumps(figures))
        return
    for name, found in figures.items():
        print(name, *(f"  {key}: {value}" for key, value in found.items()), sep="\n")


if __name__ == "__main__":
    main()
