"""Compiles all kernels before they are needed: a rehearsal of builds, runs and live text on a few documents."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.types import ARRAYS, PACKINGS

RUN = {"steps": 12, "global_batch_size": 4, "seq_len": 24}
STAGES = [
    {"name": "first", "start_step": 0},
    {"name": "longer", "start_step": 3, "seq_len": 32},
    {"name": "mixed", "start_step": 6, "weights": {"answers": 0.7, "web": 0.3}, "ramp": "cosine", "ramp_steps": 4},
]
"""Stages with full rows, with the rest of an epoch, and with changing weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmReport:
    """Kernels that were compiled, and their folder."""

    folder: str | None
    """Folder of compiled kernels. None if no folder is writable."""
    compiled: Mapping[str, float]
    """Kernel -> seconds that it took."""
    loaded: int
    """Number of kernels that were compiled before."""
    seconds: float
    """Seconds of the whole rehearsal."""


def warm() -> WarmReport:
    """Compile what a build, a run and live text may need, and keep it for processes to come.

    What is compiled fits the kind of CPU that this machine has. The folder is the one that NUMBA_CACHE_DIR names,
    else one in the package, else one in the temporary folder.
    """
    from tokenmill.compiled import known_kernels, record_compiled, writable_folder
    from tokenmill.plan.mixture import build_mixture

    begin = time.perf_counter()
    temporary = tempfile.TemporaryDirectory(prefix="tokenmill-warm-")
    with temporary as folder, _log_of_kernels_only(), record_compiled() as compiled:
        _build(Path(folder))
        for tables in _runs():
            _rehearse(tables, Path(folder))
        build_mixture((1, 2)).draw(np.arange(4))  # as samplers of adapters do
    place = writable_folder()
    present = [name for name, signatures in known_kernels().items() if signatures]
    return WarmReport(
        folder=None if place is None else str(place),
        compiled=dict(sorted(compiled.items(), key=lambda item: -item[1])),
        loaded=len(set(present) - set(compiled)),
        seconds=time.perf_counter() - begin,
    )


@contextmanager
def _log_of_kernels_only() -> Iterator[None]:
    """Keep warnings about the rehearsal's own data out of the log: they mean nothing to a user."""

    def concerns_kernels(record: logging.LogRecord) -> bool:
        return record.module == "compiled" or record.levelno >= logging.ERROR

    logger = logging.getLogger("tokenmill")
    logger.addFilter(concerns_kernels)
    try:
        yield
    finally:
        logger.removeFilter(concerns_kernels)


def _build(folder: Path) -> None:
    """Build a small store of every training type."""
    from tokenmill.build import prepare

    texts = [" ".join(f"word{k}" for k in range(number % 17)) for number in range(60)]
    records: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": text} for text in texts],
        "instruction": [{"prompt": "a " + text, "response": "b " + text} for text in texts],
        "dpo": [{"prompt": "a", "chosen": "b " + text, "rejected": "c"} for text in texts],
        "grpo": [{"prompt": "a", "responses": ["b", "c " + text], "rewards": [0.0, 1.0]} for text in texts],
    }
    for recipe, name in zip(records, ("web", "answers", "pairs", "groups"), strict=True):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records[recipe]), encoding="utf-8")
        prepare(file, out=folder / name, tokenizer="bytes", recipe=recipe, workers=1, progress=False)


def _runs() -> Iterator[dict[str, Any]]:
    """Yield the tables of runs that use every packing, array and order, over stores and live text."""
    stores = [{"name": name, "store": name} for name in ("web", "answers")]
    live = {"name": "talk", "documents": ["web.jsonl"], "tokenizer": "bytes", "live": True}
    for packing in PACKINGS:
        run = {**RUN, "packing": packing, **({"on_long": "truncate_end"} if packing == "padded" else {})}
        stored = {**run, "arrays": list(ARRAYS), "weights": {"web": 0.6, "answers": 0.4}}
        yield {"run": stored, "sources": stores, "stages": STAGES}
        mixed = {**run, "shuffle": "window", "weights": {"web": 0.5, "talk": 0.5}}
        yield {"run": mixed, "sources": [stores[0], live]}
    for packing in ("best_fit", "concat"):
        ordered = {**RUN, "packing": packing, "shuffle": "window", "weights": {"web": 0.6, "answers": 0.4}}
        yield {"run": ordered, "sources": stores, "stages": STAGES}
    yield {"run": {**RUN, "horizon": 2, "balance": "attention", "arrays": list(ARRAYS)}, "sources": stores[:1]}
    for name in ("pairs", "groups"):
        yield {"run": {**RUN, "on_long": "truncate_end"}, "sources": [{"name": name, "store": name}]}


def _rehearse(tables: Mapping[str, Any], folder: Path) -> None:
    """Draw all batches of a run, and ask it what can be asked."""
    from tokenmill.config.run import parse_config
    from tokenmill.loader.fetch import next_uses
    from tokenmill.run.run import Run

    run = Run(config=parse_config(tables), folder=folder)
    loader = run.loader(rank=0, world_size=1, micro_batch=2, threads=0)
    for _ in loader:
        pass
    loader.load_state_dict(loader.state_dict())
    run.report()
    if not run.live:  # which documents a row of live text holds is known when it is read
        run.plan().what(step=1)
        run.plan().when(run.config.sources[0].name, document=1)
        for store in run.stores.values():  # as a mirror asks what it may let go
            axis, value = store.axis(store.manifest.token_key), np.zeros(1, np.int64)
            next_uses(run.plan(), store, axis, 0, (value, value + 1), after=0)
