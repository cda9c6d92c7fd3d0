"""Keys of a run and a stage that cannot be combined: one table, checked before the first step.

Rules for `on_long` are in `long_documents`, because evals have that key too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tokenmill.config.schedule import check_multiple
from tokenmill.errors import ConfigError
from tokenmill.types import WHOLE_PACKINGS

if TYPE_CHECKING:
    from tokenmill.config.run import Config, RunConfig
    from tokenmill.config.schedule import ResolvedStage


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """Everything about one stage that rules ask for."""

    run: RunConfig
    stage: ResolvedStage
    live: str | None
    """A source of live text that the stage draws from."""
    records: str | None
    """Training type of the stores if their records are rows (pairs, groups, prompts)."""
    says_tokens: bool
    """Whether the config gives any length in tokens."""
    pad_to: str
    is_open: bool
    """Whether stores are open, so that `records` is known."""

    def differs(self, key: str) -> bool:
        """Return whether the stage has another value of a key than [run]."""
        return bool(getattr(self.stage, key) != getattr(self.run, key))


Clash = Callable[[Combination], str | None]
"""Returns what a key cannot be combined with, as the error names it; None if the stage has none of it."""


def _live(item: Combination) -> str | None:
    return None if item.live is None else f"live text in {item.live!r}"


def _records(item: Combination) -> str | None:
    return None if item.records is None else f"stores of {item.records}"


def _packing(*allowed: str) -> Clash:
    """Return the clash with all packings but those `allowed`."""

    def other(item: Combination) -> str | None:
        packing = item.stage.packing if item.records is None else "padded"
        return None if packing in allowed else f"packing = {packing!r}"

    return other


class Rule(NamedTuple):
    """A key with a value that cannot be combined with something else."""

    key: str
    """Key as the error names it, with its value where only that value is affected."""
    is_set: Callable[[Combination], bool]
    clash: Clash
    way_out: str = "remove one of them"


_STAGE_OF_LIVE = "remove it, because lanes read an epoch in one order"
RULES = (
    Rule(
        "horizon",
        lambda item: item.run.horizon > 1,
        lambda item: "cross_document_labels" if item.run.cross_document_labels else None,
        "remove one of them, because labels beyond the next token end with their document",
    ),
    Rule("horizon", lambda item: item.run.horizon > 1, _records),
    Rule("cross_document_labels", lambda item: item.run.cross_document_labels, _packing("concat")),
    Rule("packing", lambda item: item.stage.packing not in WHOLE_PACKINGS, _records, "remove packing"),
    Rule("balance", lambda item: item.run.balance is not None, _live, "remove balance, or live = true"),
    Rule("balance", lambda item: item.run.balance is not None, _records),
    Rule("segment_multiple", lambda item: item.run.segment_multiple > 1, _records),
    Rule("segment_multiple", lambda item: item.run.segment_multiple > 1, _packing(*WHOLE_PACKINGS)),
    Rule("segment_multiple", lambda item: item.run.segment_multiple > 1, _live),
    Rule(
        'pad_to = "batch"',
        lambda item: item.pad_to == "batch",
        lambda item: f"segment_multiple = {item.run.segment_multiple}" if item.run.segment_multiple > 1 else None,
    ),
    Rule('pad_to = "batch"', lambda item: item.pad_to == "batch", _live),
    Rule('pad_to = "batch"', lambda item: item.is_open and item.pad_to == "batch", _packing("padded")),
    Rule("a length in tokens", lambda item: item.says_tokens, _records, "use steps"),
    Rule(
        "num_loss_tokens",
        lambda item: "num_loss_tokens" in item.run.arrays,
        _live,
        "remove it, and sum the labels of all ranks",
    ),
    Rule("weights by size", lambda item: item.stage.sizes is not None, _live, "write numbers"),
    Rule('weigh_by = "tokens"', lambda item: item.stage.weigh_by == "tokens", _live, "weigh by rows"),
    Rule("seed of a stage", lambda item: item.differs("seed"), _live, _STAGE_OF_LIVE),
    Rule("shuffle of a stage", lambda item: item.differs("shuffle"), _live, _STAGE_OF_LIVE),
)


def check_combinations(
    config: Config, *, is_open: bool = False, records: str | None = None, pad_to: str | None = None
) -> None:
    """Reject keys that cannot be combined in a stage; once stores are open, also with the kind of their `records`.

    A loader passes its `pad_to`, which overrides that of the config.
    """
    live = {source.name for source in config.sources if source.live}
    for stage in config.resolved_stages:
        item = Combination(
            run=config.run,
            stage=stage,
            live=next((name for name in config.source_names if name in live & stage.sources), None),
            records=records,
            says_tokens=config.says_tokens,
            pad_to=pad_to or config.run.pad_to,
            is_open=is_open,
        )
        for rule in RULES:
            other = rule.clash(item) if rule.is_set(item) else None
            if other is not None:
                raise ConfigError(
                    f"stage {stage.name!r}: {rule.key} cannot be combined with {other}; {rule.way_out}"
                )
        if is_open and config.run.segment_multiple > 1:
            check_multiple(f"stage {stage.name!r}", stage.seq_len, config.run.segment_multiple)
