"""Rows of a run's batches with the documents in them, as text and by their kept fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.errors import ConfigError, PlanError, nearest
from tokenmill.inspect.examples import span_ids
from tokenmill.inspect.stores import text_of
from tokenmill.plan.uses import as_row_uses
from tokenmill.types import AnyArray, Span

if TYPE_CHECKING:
    from tokenmill.plan.uses import RowUse
    from tokenmill.run.run import Run
    from tokenmill.store import Origin, Record, Store


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class BatchSpan(Span):
    """A range of tokens of one document in a row of a batch. Tokens are read on access."""

    store: Store

    def __repr__(self) -> str:
        """Describe it in one line."""
        return f"<BatchSpan {self.start}:{self.start + self.length} of document {self.document}>"

    @property
    def record(self) -> Record:
        """The whole document or record, with all its arrays."""
        return self.store[self.document]

    @property
    def ids(self) -> AnyArray:
        """Token ids. For a pair those of the chosen side, for a group those of the prompt."""
        return span_ids(self.store, self)

    @property
    def text(self) -> str:
        """Text of the tokens, special tokens included, decoded by the tokenizer kept with the store.

        Raises:
            TokenizerError: The tokenizer is not available.
        """
        return text_of(self.store, self.ids)

    @property
    def origin(self) -> Origin:
        """Input file and place that the document came from."""
        return self.store.origin(self.document)

    @property
    def fields(self) -> Mapping[str, Any]:
        """Fields that `prepare --keep` stored of the document."""
        return self.origin.kept


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRow:
    """One row of a global batch."""

    step: int
    slot: int
    """Index of the row in the global batch."""
    source: str
    row: int
    """Index of the row in its source."""
    spans: tuple[BatchSpan, ...]

    @property
    def text(self) -> str:
        """Text of all spans."""
        return "".join(span.text for span in self.spans)


def with_texts(run: Run, uses: tuple[RowUse, ...]) -> tuple[BatchRow, ...]:
    """Return rows of a plan with the stores that their spans can be read from."""
    return tuple(
        BatchRow(
            step=use.step,
            slot=use.slot,
            source=use.source,
            row=use.row,
            spans=tuple(
                BatchSpan(
                    document=span.document, start=span.start, length=span.length, store=run.stores[use.source]
                )
                for span in use.spans
            ),
        )
        for use in uses
    )


def source_store(run: Run, source: str) -> Store:
    """Return the store of a source."""
    if source in run.live:
        raise PlanError(f"source {source!r}: live text has no numbered documents; use its files")
    if source not in run.stores:
        raise PlanError(f"unknown source: {source!r}; {nearest(source, run.stores)}")
    return run.stores[source]


def find_uses(run: Run, source: str, document: int | None, fields: Mapping[str, object]) -> tuple[BatchRow, ...]:
    """Return all uses of a document, or of those with some kept fields, in the order of steps."""
    if (document is None) == (not fields):
        raise ConfigError("when: expected a document number, or kept fields; pass 17, or url='https://...'")
    if document is not None:
        return with_texts(run, run.plan().when(source, document))
    documents = source_store(run, source).find(**fields)
    uses = run.plan().when_many(source, documents)
    return with_texts(run, tuple(sorted(as_row_uses(uses, source), key=lambda use: (use.step, use.slot))))
