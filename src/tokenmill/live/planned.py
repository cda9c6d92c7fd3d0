"""Live text as a source of a plan: rows that are told apart only when they are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from tokenmill.errors import ConfigError, PlanError
from tokenmill.fingerprint import digest, key64
from tokenmill.live.options import Format, LiveOptions
from tokenmill.live.source import open_live
from tokenmill.live_rules import num_lanes
from tokenmill.plan.rows import Held
from tokenmill.types import Fates

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tokenmill.config import Config, SourceConfig
    from tokenmill.live.source import LiveSource
    from tokenmill.packing.policy import Policy
    from tokenmill.plan.rows import RowIndex, Seen
    from tokenmill.types import Spans

NUM_ROWS = 1 << 40
"""More than a run draws: a plan never comes to a second epoch of live text, the lanes do that on their own."""


@dataclass(frozen=True, kw_only=True)
class LiveRows:
    """What a plan is told of live text: when rows of it are drawn, not which."""

    source: LiveSource
    lanes: int
    format: Format
    cross_document_labels: bool
    num_rows: int = NUM_ROWS
    num_rest: int = 0

    @property
    def seq_len(self) -> int:
        """How many tokens of a row are inputs."""
        return self.format.seq_len

    @property
    def row_slots(self) -> int:
        """How many input slots a row has."""
        return self.format.seq_len

    @cached_property
    def description(self) -> Mapping[str, int | str | bool]:
        """What decides the rows of every lane, as JSON."""
        made_of = self.source.made_of(self.lanes)
        return {
            "live": self.source.fingerprint(self.lanes, formats=False),
            "files": digest(made_of["files"])[:16],
            "tokenizer": str(made_of["tokenizer"]["content"])[:16],
            **self.source.options.in_format(self.format).describe(self.lanes),
            "cross_document_labels": self.cross_document_labels,
        }

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """What decides the rows."""
        return self.description

    def following(self, previous: RowIndex, seen: Seen) -> RowIndex:  # noqa: ARG002 - the lanes know what is left
        """Return these rows: each lane packs what it has left of its window in the new way."""
        if self.cross_document_labels:
            raise ConfigError(
                f"{self.source.files[0].path}: labels that cross documents know no rest of a window, got "
                "cross_document_labels with a change of rows; use on_change = restart, or leave it out"
            )
        return self

    def fates(self) -> Fates:
        """Return the fates of a full row, as no other is known beforehand."""
        return Fates(rows=1, tokens=self.seq_len, trained=self.seq_len, masked=0, dropped={}, padding=0, added=0)

    def held(self, rows: npt.NDArray[np.int64]) -> Held:
        """Return what so many full rows would hold."""
        return Held(tokens=rows.size * self.seq_len, trained=rows.size * self.seq_len)

    def spans(self, rows: npt.NDArray[np.int64]) -> Spans:  # noqa: ARG002
        """Refuse to tell."""
        self._refuse()

    def rows_of(self, document: int) -> npt.NDArray[np.int64]:  # noqa: ARG002
        """Refuse to tell."""
        self._refuse()

    def made(self, seq_len: int, policy: Policy) -> LiveRows:
        """Return the same text with rows made in another way."""
        if policy.name == "bos_best_fit" and not self.source.tokenizer.identity.add_bos:
            raise ConfigError(
                f"{self.source.files[0].path}: packing bos_best_fit needs documents that start with BOS, got a "
                "tokenizer that adds none; use packing = best_fit"
            )
        format = Format(seq_len, policy.name, policy.split, policy.crop)
        return self if format == self.format else replace(self, format=format)

    def _refuse(self) -> NoReturn:
        raise PlanError(
            f"{self.source.files[0].path}: which documents a row holds must be known from a store, got live text, "
            "which is packed as it is read; leave out live = true, and it is prepared once"
        )


def open_rows(config: Config, source: SourceConfig, texts: list[str], tokenizer: str) -> LiveRows:
    """List the files of a source and open its tokenizer; rows are made as [run] says, unless a stage says more."""
    run = config.run
    lanes = num_lanes(config, source)
    options = LiveOptions(
        seq_len=run.seq_len,
        packing=run.packing,
        split=run.split,
        crop=run.crop,
        seed=key64(run.seed, "live", source.name) >> 1,  # or sources of one size would be walked in step
        shuffle=run.shuffle != "none",
        text_field=source.text_field,
        lanes=lanes,
        on_error=source.on_error or "stop",
        window_bytes=source.window_bytes,
    )
    return LiveRows(
        source=open_live(texts, tokenizer=tokenizer, options=options),
        lanes=lanes,
        format=options.format,
        cross_document_labels=run.cross_document_labels,
    )
