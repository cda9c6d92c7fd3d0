"""Loaders of a run: the arrays they deliver, checks of their options, and what the first rank records and logs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tokenmill.config.combine import check_combinations
from tokenmill.config.run import DEFAULT_ARRAYS, RunConfig
from tokenmill.errors import ConfigError
from tokenmill.loader import Layout, Loader, LoaderOptions, RankSlice, usual_arrays
from tokenmill.run.history import PlanRecord, explain, read_plan, record
from tokenmill.types import MASK_KEYS, RECORD_TYPES

if TYPE_CHECKING:
    from tokenmill.plan import Plan
    from tokenmill.run.run import Run
    from tokenmill.store import Store

logger = logging.getLogger("tokenmill")


def open_loader(run: Run, layout: Layout, micro_batch: int, options: LoaderOptions) -> Loader:
    """Return the loader of one rank. The first rank records the plan and logs what becomes of long records."""
    plan = run.plan()
    if options.pad_to != run.config.run.pad_to:
        check_combinations(run.config, is_open=True, records=run.sources.record_kind, pad_to=options.pad_to)
    check_columns(options.columns, options.arrays, run.stores)
    if layout.leads:
        if run.records_plans:
            record(run.folder, run.name, plan, run.config)
        _warn_of_long_records(run)
        if run.epochs is not None:
            logger.info("%s", run.epochs.sentence(plan.steps))
    part = RankSlice(layout=layout, micro_batch=micro_batch, balance=run.config.run.balance is not None)
    return Loader(plan, part, options, explain=lambda made_by, step: _explain(run, made_by, step))


def default_arrays(run: RunConfig, plan: Plan) -> tuple[str, ...]:
    """Return the arrays of a batch: those of the config for sequences, otherwise those of the training type."""
    usual = usual_arrays(plan)
    if set(usual) & set(DEFAULT_ARRAYS):
        return run.arrays
    if run.arrays != DEFAULT_ARRAYS:
        raise ConfigError(
            f"run: arrays = {list(run.arrays)} cannot be combined with these stores, whose batches have "
            f"{list(usual)}; remove it, or pass arrays to the loader"
        )
    return usual


def check_columns(columns: Sequence[str], arrays: Sequence[str], stores: Mapping[str, Store]) -> None:
    """Reject columns that a store does not keep, or whose rows are not records."""
    for name, store in stores.items() if columns else ():
        if store.manifest.kind not in RECORD_TYPES:
            raise ConfigError(
                "columns: only stores of records (pairs, groups, prompts) have some, and "
                f"{name!r} is a store of {store.manifest.kind}; remove columns"
            )
        kept = store.manifest.recipe.get("keep", [])
        for column in columns:
            if column in arrays:
                raise ConfigError(
                    f"columns: {column!r} is the name of an array of the batch; remove it, or choose the arrays"
                )
            if column not in kept:
                raise ConfigError(
                    f"columns: {store.path} does not keep {column!r}, only {kept}; prepare it with "
                    f'keep=["{column}"]'
                )


def warn_of_launcher() -> None:
    """Warn if a launcher started several processes and each would read all rows. Nothing else depends on it."""
    processes = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and processes.isdecimal() and int(processes) > 1:
        logger.warning(
            "run.loader() got no rank and world_size, so each of the %s processes of this job reads all rows; use "
            "torch_loader, or pass rank= and world_size= (rank=0, world_size=1 if that is meant)",
            processes,
        )


def _warn_of_long_records(run: Run) -> None:
    """Log what becomes of conversations, pairs and groups that do not fit a row."""
    if any(key in MASK_KEYS for store in run.stores.values() for key in store.keys):
        from tokenmill.run.warnings import long_records

        for sentence in long_records(run, count=False):
            logger.warning("%s", sentence)


def _explain(run: Run, made_by: str, step: int) -> str | None:
    """Return what changed since the plan that a state was made by, if that plan is on record."""
    old = read_plan(run.folder, made_by)
    return explain(old, PlanRecord.of(run.plan(), run.config), step) if old else None
