"""Documents and records of a store as Python objects: one by its number, a lazy slice, or all in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast, overload

from tokenmill.errors import PlanError, whole
from tokenmill.hooks import attached
from tokenmill.store.layout import token_keys
from tokenmill.types import MASK_KEYS, STORED_ARRAYS

if TYPE_CHECKING:
    from tokenmill.store.notes import Origin
    from tokenmill.store.reader import Store, Value

Text: TypeAlias = "str | list[str]"
"""Text of one array of a record; of a group of responses, a list of texts."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Record:
    """One document, conversation, pair, group or prompt of a store, with its arrays in memory.

    >>> open_store("stores/web")[0].fields
    {'url': 'https://example.org/0'}
    """

    store: Store
    document: int
    """Its number in the store, from 0."""
    arrays: Mapping[str, Value]
    """All its arrays by name; responses are a list of arrays."""

    def __repr__(self) -> str:
        """Describe it in one line."""
        sizes = ", ".join(
            f"{key} {sum(part.size for part in value) if isinstance(value, list) else value.size:,}"
            for key, value in self.arrays.items()
        )
        return f"<Record {self.document:,} of {self.store.where}: {sizes}, from {self.origin}>"

    @property
    def ids(self) -> Value:
        """Token ids: of a pair the first of its arrays, see `arrays`; of responses a list of arrays."""
        return self.arrays[self.store.manifest.token_key]

    @property
    def mask(self) -> Value | None:
        """1 for each of these ids that is trained on, 0 for the others; None where the store has no mask."""
        known = STORED_ARRAYS.get(self.store.manifest.token_key)
        return None if known is None or known.mask is None else self.arrays.get(known.mask)

    @property
    def masks(self) -> dict[str, Value]:
        """All masks by name."""
        return {key: value for key, value in self.arrays.items() if key in MASK_KEYS}

    @property
    def text(self) -> Text:
        """Text of `ids`, special tokens included, decoded by the tokenizer kept with the store.

        Raises:
            TokenizerError: The tokenizer is not available.
        """
        return self._decoded(self.ids)

    @property
    def texts(self) -> dict[str, Text]:
        """Text of every array of token ids, by name."""
        return {key: self._decoded(self.arrays[key]) for key in token_keys(self.store.keys)}

    def _decoded(self, ids: Value) -> Text:
        text_of = attached("text_of")
        if isinstance(ids, list):
            return [text_of(self.store, part) for part in ids]
        return cast("str", text_of(self.store, ids))

    @property
    def origin(self) -> Origin:
        """Input file and place that it came from."""
        return self.store.origin(self.document)

    @property
    def fields(self) -> Mapping[str, Any]:
        """Fields that `prepare --keep` stored of it."""
        return self.origin.kept


class Records:
    """Numbered access to the records of a store; nothing is read before a record is asked for."""

    __slots__ = ()

    def __len__(self) -> int:
        """Return the number of documents or records."""
        return cast("Store", self).num_documents

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> RecordSlice: ...
    def __getitem__(self, index: int | slice) -> Record | RecordSlice:
        """Return one record, counted from the end if negative, or a lazy slice.

        Raises:
            PlanError: There is no such record. It is an IndexError as well.
        """
        store = cast("Store", self)
        if isinstance(index, slice):
            return RecordSlice(store, _range(range(len(self)), index))
        document = _place(store, index, len(self))
        return Record(store=store, document=document, arrays=store.fetch_record(document))

    def __iter__(self) -> Iterator[Record]:
        """Yield all records in order."""
        return (self[document] for document in range(len(self)))


@dataclass(frozen=True, slots=True, repr=False)
class RecordSlice:
    """Some records of a store, read one at a time."""

    store: Store
    documents: range
    """Their numbers in the store."""

    def __repr__(self) -> str:
        """Describe it in one line."""
        return f"<RecordSlice of {self.store.where}: {len(self.documents):,} records, {self.documents}>"

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.documents)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> RecordSlice: ...
    def __getitem__(self, index: int | slice) -> Record | RecordSlice:
        """Return one record of the slice, or a slice of it."""
        if isinstance(index, slice):
            return RecordSlice(self.store, _range(self.documents, index))
        return self.store[self.documents[_place(self.store, index, len(self))]]

    def __iter__(self) -> Iterator[Record]:
        """Yield the records in order."""
        return (self.store[document] for document in self.documents)


def _place(store: Store, index: int, size: int) -> int:
    """Return the place that an index names, which may count from the end."""
    number = whole("index", index, PlanError, "use store[3] or store[3:9]")
    if not -size <= number < size:
        raise PlanError(f"{store.where}: index out of range: {number}; there are {size:,} records, counted from 0")
    return number % size


def _range(numbers: range, chosen: slice) -> range:
    for name in ("start", "stop", "step"):
        if (value := getattr(chosen, name)) is not None:
            whole(f"slice {name}", value, PlanError, "use store[3:9]")
    if chosen.step is not None and int(chosen.step) == 0:
        raise PlanError("slice step: must not be 0; leave it out")
    return numbers[chosen]
