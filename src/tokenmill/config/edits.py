"""Edits of a run: the tables [[skip]] and [[quarantine]]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tokenmill.config.evals import read_numbers, read_range
from tokenmill.config.schedule import UNSAID, TokenClock, Tokens, agreed, read_tokens
from tokenmill.errors import ConfigError
from tokenmill.tables import MAX_NUMBER
from tokenmill.types import Int64Array


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipConfig:
    """Steps that are not trained on; those after them keep their numbers and batches."""

    steps: str = ""
    """`a:b`, b exclusive."""
    tokens: str | None = None
    """In place of steps: `a:b` in input slots of the run, such as "10B:11B"."""
    reason: str = ""

    def __post_init__(self) -> None:
        if self.tokens is None or self.steps:
            self.range()

    def resolved(self, clock: TokenClock) -> SkipConfig:
        """Return it with the steps that its tokens come to."""
        if self.tokens is None:
            return self
        begin, _, end = self.tokens.partition(":")
        first, last = (
            clock.step_at(read_tokens("skip", "tokens", part) if part.strip("0 ") else 0) for part in (begin, end)
        )
        counted = f"{first}:{last}"
        if self.steps not in ("", counted):
            raise ConfigError(
                f"skip: steps must be what the tokens come to, {counted}, got {self.steps}; "
                "leave one of the two out"
            )
        return replace(self, steps=counted)

    def range(self) -> tuple[int, int]:
        """Return the first step and the one after the last."""
        steps = read_range(self.steps)
        if steps is None:
            raise ConfigError(
                f"skip: steps must be a:b with a below b, got {self.steps!r}; for example steps = '1200:1240'"
            )
        return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantineConfig:
    """Documents of a source, or the whole of it, that are not trained on from a step on."""

    source: str
    from_step: int = UNSAID
    """This, or `from_tokens`."""
    from_tokens: Tokens | None = None
    """In place of a step: after so many input slots of the run."""
    documents: tuple[int, ...] | None = None
    """Their numbers in the store; the whole source, where neither these nor a file are given."""
    file: str | None = None
    """File with such numbers, one a line; a relative path counts from the folder of the config."""
    reason: str = ""

    def __post_init__(self) -> None:
        where = f"quarantine of {self.source!r}"
        if self.from_step < 0 and self.from_tokens is None:
            raise ConfigError(f"{where}: from_step must not be negative, got {self.from_step}; count from 0")
        if self.documents is not None and self.file is not None:
            raise ConfigError(f"{where}: must have documents or a file of them, got both; leave one of the two out")
        if self.documents is not None and not self.documents:
            raise ConfigError(
                f"{where}: documents must name some, got an empty list; leave the quarantine out, "
                "or documents to quarantine the whole source"
            )
        bad = [number for number in self.documents or () if not 0 <= number < MAX_NUMBER]
        if bad:
            raise ConfigError(f"{where}: documents must be numbers from 0 on, got {bad[0]}; count from 0")

    def resolved(self, clock: TokenClock) -> QuarantineConfig:
        """Return it with the step that its tokens come to."""
        if self.from_tokens is None:
            return self
        where = f"quarantine of {self.source!r}"
        counted = clock.step_at(read_tokens(where, "from_tokens", self.from_tokens))
        written = None if self.from_step < 0 else self.from_step
        return replace(self, from_step=agreed(where, "from_step", written, counted))

    @property
    def whole(self) -> bool:
        """Whether all of the source is meant."""
        return self.documents is None and self.file is None

    def numbers(self, folder: Path) -> Int64Array:
        """Return the documents, sorted, each once; reads the file, if there is one."""
        if self.file is None:
            return np.unique(np.array(self.documents or (), np.int64))
        return read_numbers(folder / self.file, f"quarantine of {self.source!r}")
