"""Evals of a run: the tables [[evals]], and the documents that they keep out of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np

from tokenmill.config.schedule import Tokens, long_documents, read_numbers, read_range, read_tokens
from tokenmill.config.spelling import takes_old_keys
from tokenmill.errors import ConfigError, nearest
from tokenmill.tables import Number, check_choice, check_fields, check_name, check_positive
from tokenmill.types import WHOLE_PACKINGS, Int64Array

MAX_DOCUMENTS = 1 << 28
"""Maximum size of a range of documents. Their numbers take 2 GiB of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSource:
    """A store that an eval takes documents from, or a source of the run that is then not trained on them."""

    name: str = ""
    """Name in batches and reports. By default that of the store or source."""
    store: str | tuple[str, ...] | None = None
    """Path or address of the store, as in [[sources]]."""
    source: str | None = None
    """Name of a source of the run. What is taken of it is held out: no step trains on it."""
    documents: str | tuple[int, ...] | None = None
    """Numbers of its documents: `a:b`, b exclusive, or a list. Without this and `file`, all documents."""
    file: str | None = None
    """File with such numbers, one a line; a relative path counts from the folder of the config."""
    weight: Number | None = None
    """Share of the rows; where no source has one, all rows are taken."""

    def check(self, where: str) -> None:
        """Reject keys that cannot be combined."""
        if (self.store is None) == (self.source is None):
            got = "neither" if self.store is None else "both"
            raise ConfigError(
                f"{where}: must have a store, or a source of the run, got {got}; for example "
                'store = "stores/web/val"'
            )
        if self.documents is not None and self.file is not None:
            raise ConfigError(f"{where}: `documents` cannot be combined with `file`; remove one")
        if self.weight is not None and not 0 < self.weight < inf:
            raise ConfigError(f"{where}: weight must be positive, got {self.weight}; leave out the source instead")
        if self.documents is not None and self.file is None:
            self._listed(where)

    @property
    def whole(self) -> bool:
        """Whether the eval takes all documents."""
        return self.documents is None and self.file is None

    def numbers(self, folder: Path, where: str) -> Int64Array:
        """Return the documents, ascending, each once; reads the file, if there is one."""
        return self._listed(where) if self.file is None else read_numbers(folder / self.file, where)

    def _listed(self, where: str) -> Int64Array:
        if isinstance(self.documents, str):
            begin, end = read_range(self.documents) or (0, 0)
            if end - begin > MAX_DOCUMENTS:
                raise ConfigError(
                    f"{where}: documents must be at most {MAX_DOCUMENTS:,}, got {self.documents!r}, which are "
                    f"{end - begin:,}; name those that are evaluated on"
                )
            numbers = np.arange(begin, end, dtype=np.int64)
        else:
            numbers = np.unique(np.array(self.documents or (), np.int64))
        if not numbers.size or int(numbers[0]) < 0:
            raise ConfigError(
                f"{where}: documents must be a:b with a below b, or a list of numbers from 0 on, got "
                f'{self.documents!r}; for example documents = "0:1000"'
            )
        return numbers


@takes_old_keys
@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """A table of [[evals]]: documents to evaluate on. They are the same each time, each is read once, in order.

    The arguments are the keys of [[evals]] in docs/reference/config.md. `name` is required, and `store`,
    `source` or `sources`.

    Raises:
        ConfigError: A value has the wrong type, is out of range, or contradicts another one.

    Examples:
        >>> EvalConfig(name="held-out", source="web", documents="0:100").packing
        'best_fit'
    """

    name: str
    store: str | tuple[str, ...] | None = None
    """The only source, if the eval has one: this field and the next three are those of `sources`."""
    source: str | None = None
    documents: str | tuple[int, ...] | None = None
    file: str | None = None
    sources: tuple[EvalSource, ...] = ()
    """Several places that documents come from, one after another."""
    seq_len: int | None = None
    """Tokens per row; by default that of [run]."""
    packing: str = "best_fit"
    """Packing of documents into rows: `best_fit`, or `padded` with one document per row."""
    on_long: str | None = None
    """Fate of a document longer than a row, with the values and defaults of [run]."""
    rows: int | None = None
    """Number of rows, from the first one; by default all."""
    every: int | None = None
    """Number of steps between evaluations, passed on to the trainer."""
    every_tokens: Tokens | None = None
    """Number of input slots of the run between evaluations, instead of steps."""

    def __post_init__(self) -> None:
        check_fields(self, "evals.")
        where = f"eval {self.name!r}"
        check_name("evals.name", self.name)
        check_choice(where, "packing", self.packing, WHOLE_PACKINGS)
        long_documents(where, self.on_long, self.packing)
        for key in ("seq_len", "rows", "every"):
            if getattr(self, key) is not None:
                check_positive(where, key, getattr(self, key))
        if self.every_tokens is not None:
            read_tokens(where, "every_tokens", self.every_tokens)
            if self.every is not None:
                raise ConfigError(
                    f"{where}: must have every or every_tokens, got {self.every} and {self.every_tokens}; "
                    "leave one of the two out"
                )
        own = [key for key in ("store", "source", "documents", "file") if getattr(self, key) is not None]
        if own and self.sources:
            raise ConfigError(f"{where}: {own[0]} is for one source, got sources as well; leave one of the two out")
        for part in self.parts:
            part.check(where)
        names = [part.name for part in self.parts]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"{where}: names of sources must differ, got {twice!r} twice; give name = ... to one")
        weighed = [part for part in self.parts if part.weight is not None]
        if weighed and len(weighed) < len(self.parts):
            raise ConfigError(
                f"{where}: all {len(self.parts)} sources must have a weight, or none, got {len(weighed)} that have "
                "one; give one to each"
            )

    @property
    def parts(self) -> tuple[EvalSource, ...]:
        """Places that documents come from, in order, each with its name."""
        own = EvalSource(
            name=self.name, store=self.store, source=self.source, documents=self.documents, file=self.file
        )
        return tuple(
            replace(part, name=part.name or part.source or _last_name(part.store))
            for part in (self.sources or (own,))
        )

    def check(self, sources: Sequence[str], live: Sequence[str]) -> None:
        """Reject sources that the run does not have, or that are live text."""
        where = f"eval {self.name!r}"
        for name in (part.source for part in self.parts if part.source is not None):
            if name not in sources:
                raise ConfigError(
                    f"{where}: source must be one of the run's, got {name!r}; {nearest(name, sources)}"
                )
            if name in live:
                raise ConfigError(
                    f"{where}: documents must have numbers, got live text in {name!r}, which has none; leave out "
                    "live = true, or prepare a store for the eval"
                )

    @property
    def held_whole(self) -> set[str]:
        """The sources of the run of which it takes all."""
        return {part.source for part in self.parts if part.source is not None and part.whole}

    def held_out(self, folder: Path) -> Iterator[tuple[str, Int64Array]]:
        """Yield the sources of the run of which it takes some documents, and which, ascending."""
        for part in self.parts:
            if part.source is not None and not part.whole:
                yield part.source, part.numbers(folder, f"eval {self.name!r}")


def _last_name(store: str | tuple[str, ...] | None) -> str:
    return Path(store if isinstance(store, str) else store[0]).name if store else ""
