"""Documents and records of a store as Python objects: by number, as a lazy slice, in order, by a kept field."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, overload

import msgspec
import numpy as np

from tokenmill.errors import ConfigError, PlanError, nearest, whole
from tokenmill.hooks import attached
from tokenmill.store.layout import token_keys
from tokenmill.types import MASK_KEYS, STORED_ARRAYS, Int64Array

if TYPE_CHECKING:
    from tokenmill.store.origins import Origin
    from tokenmill.store.store import Store, Value


class Viewer(Protocol):
    """A running viewer."""

    address: str

    def close(self) -> None:
        """Stop serving."""


Text: TypeAlias = "str | list[str]"
"""Text of one array of a record; of a group of responses, a list of texts."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Record:
    """One document, conversation, pair, group or prompt of a store, with its arrays in memory."""

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
        """Token ids; of a pair those of the chosen side, of a group those of the prompt."""
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

    def find(self, **fields: object) -> Int64Array:
        """Return the numbers of the documents whose kept fields have these values, in order.

        All kept fields are read, in blocks, and no token. A text of more than 1,000 characters is stored shortened:
        pass it as it is stored.

        Args:
            fields: Value of each field, such as `url="https://..."`; a list or set matches any of its values. A
                document must match all fields. For a field like `meta.url`, pass `**{"meta.url": ...}`.

        Raises:
            ConfigError: The store does not keep such a field.
        """
        store = cast("Store", self)
        wanted = {name: {key_of(name, value) for value in _values(given)} for name, given in fields.items()}
        return np.array([document for document, _ in matches(store, wanted)], np.int64)

    def _repr_html_(self) -> str | None:
        """Show facts, lengths and examples in a notebook; of a remote store the repr is shown."""
        return cast("str | None", attached("store_html")(self))

    def view(self, *, port: int = 0, browser: bool | None = None) -> Viewer:
        """Serve the store in the viewer, from this process and to this machine alone.

        Args:
            port: Port to listen at; 0 takes a free one.
            browser: Whether to open a browser; by default everywhere but in a notebook.

        Returns:
            The viewer: `print(viewer)` prints its address, `viewer.close()` stops it.

        Raises:
            MissingExtraError: `tokenmill[view]` is not installed.
        """
        return cast("Viewer", attached("open_viewer")(self, port=port, browser=browser))


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


def matches(store: Store, wanted: Mapping[str, Collection[bytes]]) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield the documents whose kept fields have one of the wanted values each, see `key_of`, and these values."""
    from tokenmill.store.origins import kept_fields  # late: notes are read by maps themselves

    if not wanted:
        raise ConfigError('find: no field to look for; pass one, such as url="https://..."')
    kept = store.manifest.recipe.get("keep") or []
    # The recipe is that of the first store, where several were joined.
    joined = any("/" in shard.name for shard in store.manifest.shards)
    missing = [name for name in wanted if name not in kept]
    if missing and not joined:
        raise _unknown(store, missing[0], kept)
    for document, fields in enumerate(kept_fields(store, 0, store.num_documents) if store.num_documents else ()):
        if missing:
            missing = [name for name in missing if name not in fields]
        keys = {name: key_of(name, fields[name]) for name in wanted if name in fields}
        if len(keys) == len(wanted) and all(keys[name] in values for name, values in wanted.items()):
            yield document, keys
    if missing:
        raise _unknown(store, missing[0], kept)


def _unknown(store: Store, name: str, kept: Collection[str]) -> ConfigError:
    return ConfigError(
        f"{store.where}: unknown field {name!r}; "
        + nearest(name, kept, f"it keeps {', '.join(kept) or 'no fields'}; prepare it again with keep=['{name}']")
    )


def key_of(name: str, value: object) -> bytes:
    """Return one text for equal values of a kept field; the text "1", the number 1 and True are three values."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, str):
        return b'"' + value.encode("utf-8", "surrogatepass")
    if isinstance(value, bool | int | float | list | dict):
        return msgspec.json.encode(value, order="sorted")
    raise ConfigError(f"find: {name}: expected text or a number, got {value!r}; pass the value that was kept")


def keys_of_text(name: str, text: str) -> set[bytes]:
    """Return the values that a text may stand for where only texts can be written: itself, or a number."""
    keys = {key_of(name, text)}
    with suppress(ValueError):  # it is no number
        keys.add(key_of(name, msgspec.json.decode(text, type=bool | int | float)))
    return keys


def _values(given: object) -> Collection[object]:
    return given if isinstance(given, list | tuple | set | frozenset | np.ndarray) else (given,)


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
