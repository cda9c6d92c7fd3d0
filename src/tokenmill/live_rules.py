"""Rules for sources of live text in a config, and how many lanes they have."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from tokenmill.checks import check_choice, check_positive
from tokenmill.errors import ConfigError
from tokenmill.types import ON_ERROR

if TYPE_CHECKING:
    from tokenmill.config import Config, SourceConfig, StageConfig

_LIVE_KEYS = ("lanes", "window_bytes", "on_error")
_COUNTED_KEYS = ("max_epochs", "on_exhausted")


def check_live_source(source: SourceConfig) -> None:
    """Refuse keys of a source that do not go with live text, or only with it."""
    where = f"source {source.name!r}"
    if not source.live:
        for key in _LIVE_KEYS:
            if getattr(source, key) is not None:
                raise ConfigError(f"{where}: {key} is for live text, got no live; add live = true, or leave it out")
        return
    if not source.documents:
        raise ConfigError(f"{where}: live text must have documents and a tokenizer, got a store; leave out live")
    for key in _COUNTED_KEYS:
        if getattr(source, key) is not None:
            raise ConfigError(
                f"{where}: {key} needs the rows of an epoch counted, got it with live = true; leave out live, and "
                "the documents are prepared once"
            )
    for key in ("lanes", "window_bytes"):
        if getattr(source, key) is not None:
            check_positive(where, key, getattr(source, key))
    if source.on_error is not None:
        check_choice(where, "on_error", source.on_error, ON_ERROR)


def check_live(config: Config, stages: tuple[StageConfig, ...]) -> None:
    """Refuse what needs the rows of a source to be known beforehand, where it draws from live text."""
    live = [source.name for source in config.sources if source.live]
    for edit in config.quarantine:
        if edit.source in live and not edit.whole:
            raise ConfigError(
                f"quarantine of {edit.source!r}: documents must have numbers, got some of live text, which has "
                "none; put the whole source aside, or leave out live = true"
            )
    for stage in stages:
        where = f"stage {stage.name!r}"
        drawn = [name for name in live if name in _drawn(stage)]
        if not drawn:
            continue
        if stage.weigh_by == "tokens":
            raise ConfigError(
                f'{where}: weigh_by = "tokens" needs the tokens of a row counted, got live text in {drawn[0]!r}; '
                "weigh by rows, or leave out live = true"
            )
        for key in ("seed", "shuffle"):
            if getattr(stage, key) != getattr(config.run, key):
                raise ConfigError(
                    f"{where}: {key} must be that of [run] where live text is drawn, as its lanes go through an "
                    f"epoch at their own pace, got {getattr(stage, key)!r}; leave it out"
                )


def num_lanes(config: Config, source: SourceConfig) -> int:
    """Return how many streams a source of live text has: as it says, or as many as divide every batch."""
    batches = [stage.global_batch_size or 1 for stage in config.resolved_stages() if source.name in _drawn(stage)]
    if source.lanes is None:
        return gcd(*batches) if batches else 1
    for batch in batches:
        if batch % source.lanes:
            raise ConfigError(
                f"source {source.name!r}: lanes must divide the global_batch_size of every stage that draws from "
                f"it, got {source.lanes} and {batch}; use {gcd(*batches)}, or leave it out"
            )
    return source.lanes


def _drawn(stage: StageConfig) -> set[str]:
    return {*(stage.weights or ()), *(stage.ramp_from or ())}
