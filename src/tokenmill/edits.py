"""What is changed in a run under way: steps that are skipped, documents and sources that are put aside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.checks import MAX_NUMBER
from tokenmill.errors import ConfigError, nearest

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipConfig:
    """Steps that are not trained on; those after them keep their numbers and batches."""

    steps: str
    """`a:b`, b exclusive."""
    reason: str = ""

    def range(self) -> tuple[int, int]:
        """Return the first step and the one after the last."""
        first, _, last = self.steps.partition(":")
        numbers = [part.strip() for part in (first, last)]
        if not all(part.isascii() and part.isdecimal() for part in numbers) or int(first) >= int(last):
            raise ConfigError(
                f"skip: steps must be a:b with a below b, got {self.steps!r}; for example steps = '1200:1240'"
            )
        return int(first), int(last)

    def __post_init__(self) -> None:
        self.range()


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantineConfig:
    """Documents of a source, or the whole of it, that are not trained on from a step on."""

    source: str
    from_step: int
    documents: tuple[int, ...] | None = None
    """Their numbers in the store; the whole source, where neither these nor a file are given."""
    file: str | None = None
    """File with such numbers, one a line; a relative path counts from the folder of the config."""
    reason: str = ""

    def __post_init__(self) -> None:
        where = f"quarantine of {self.source!r}"
        if self.from_step < 0:
            raise ConfigError(f"{where}: from_step must not be negative, got {self.from_step}; count from 0")
        if self.documents is not None and self.file is not None:
            raise ConfigError(f"{where}: must have documents or a file of them, got both; leave one of the two out")
        if self.documents is not None and not self.documents:
            raise ConfigError(
                f"{where}: documents must name some, got an empty list; leave the quarantine out, "
                "or documents to put the whole source aside"
            )
        bad = [number for number in self.documents or () if not 0 <= number < MAX_NUMBER]
        if bad:
            raise ConfigError(f"{where}: documents must be numbers from 0 on, got {bad[0]}; count from 0")

    @property
    def whole(self) -> bool:
        """Whether all of the source is meant."""
        return self.documents is None and self.file is None

    def numbers(self, folder: Path) -> npt.NDArray[np.int64]:
        """Return the documents, sorted, each once; reads the file, if there is one."""
        if self.file is None:
            return np.unique(np.array(self.documents or (), np.int64))
        file = folder / self.file
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"quarantine of {self.source!r}: file must be a text with numbers of documents, got {error}; fix it"
            ) from None
        found = []
        for number, line in enumerate(lines, 1):
            text = line.partition("#")[0].strip()
            if text and not (text.isascii() and text.isdecimal() and int(text) < MAX_NUMBER):
                raise ConfigError(
                    f"{file}, line {number}: must be the number of a document, got {line.strip()!r}; "
                    "write one a line, what follows # is not read"
                )
            found += [int(text)] if text else []
        return np.unique(np.array(found, np.int64))


def check_edits(
    skips: Sequence[SkipConfig], quarantines: Sequence[QuarantineConfig], sources: Sequence[str], steps: int
) -> None:
    """Refuse edits that do not fit the run."""
    end = 0
    for first, last in sorted(skip.range() for skip in skips):
        if last > steps:
            raise ConfigError(f"skip {first}:{last}: steps must lie within 0:{steps}, got {last}; shorten it")
        if first < end:
            raise ConfigError(
                f"skip {first}:{last}: steps must be skipped once, got those before {end} twice; join the two"
            )
        end = last
    if sum(last - first for first, last in (skip.range() for skip in skips)) >= steps:
        raise ConfigError(f"skip: a run must train on some step, got all {steps} skipped; shorten it")
    for edit in quarantines:
        if edit.source not in sources:
            raise ConfigError(
                f"quarantine: source must be one of the run's, got {edit.source!r}; {nearest(edit.source, sources)}"
            )
        if edit.from_step >= steps:
            raise ConfigError(
                f"quarantine of {edit.source!r}: from_step must be below run.steps {steps}, "
                f"got {edit.from_step}; leave it out"
            )
