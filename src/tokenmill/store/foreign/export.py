"""Writing a store in third-party formats: streamed, and compared with the store after reading it back.

A format that has no place for a mask does not get the store at all, unless the mask is given up explicitly.
The folder gets its name after all files were read back and compared with the store.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError, StoreExistsError, writing
from tokenmill.store.files import new_folder
from tokenmill.store.foreign.convert import BATCH_TOKENS, Progress, counted
from tokenmill.store.foreign.files import MEGATRON_MAGIC, META, ForeignOptions
from tokenmill.store.foreign.formats import MEGATRON_HEADER
from tokenmill.store.foreign.open import SIDECAR
from tokenmill.store.hdf5 import astrai_dtype, import_h5py
from tokenmill.store.layout import UNKNOWN, token_keys
from tokenmill.store.opening import open_store
from tokenmill.store.origins import kept_fields
from tokenmill.store.store import Store
from tokenmill.store.writer import POSITION_IDS
from tokenmill.tables import check_callable, check_instance, check_option, check_types, path_of
from tokenmill.types import MASK_KEYS, AnyArray, Int64Array

_BLOCK = 1 << 22
"""Values, or documents, that are copied at a time."""
_IDS = np.dtype("<i4")
"""Of ids where a project reads them into tensors: unsigned ones have few operations there."""
_ROWS = 1 << 12
"""Records of a row group of Parquet, at most."""
_COLUMNS = {"sequence": "input_ids"}
"""Arrays that others know by another name."""
Advance = Callable[[int], None]
"""Takes the number of values that were just written or compared."""
Column: TypeAlias = tuple[str, AnyArray, "Sequence[int] | AnyArray"]
"""Array, values, and the lengths of the items of these values."""
Write = Callable[[Store, Sequence[str], Path, Advance], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """Result of an export."""

    path: str
    format: str
    out: str
    documents: int
    tokens: int
    files: int
    keys: tuple[str, ...]
    """Arrays of the store that were written."""
    compared: int
    """Numbers that were read back, all equal to those of the store."""
    notes: tuple[str, ...]
    """Facts of the store that the format cannot hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFormat:
    """A format that stores can be written in."""

    write: Write
    kinds: Mapping[str, tuple[str, ...]]
    """Training type -> arrays that have a place."""
    opened_as: str | None
    """Name of the format for `open_store`; None if it cannot be opened in place."""
    boundaries: tuple[str, ...] = ()
    """Training types whose documents can be distinguished by more than their EOS."""


def export_store(
    path: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    format: str,
    drop_masks: bool = False,
    options: ForeignOptions | None = None,
    progress: Progress = lambda _what, _done, _total: None,
) -> ExportReport:
    """Write a store in a third-party format, read the files back, and compare.

    Args:
        path: Folder of the store, or third-party token files.
        out: New or empty folder.
        format: `megatron`, `nanoset`, `npy`, `astrai-bin`, `astrai-h5` or `hf`.
        drop_masks: Leave out arrays that the format cannot hold. Without it they are an error.
        options: Facts that third-party token files do not record.
        progress: Function that is called with the name of a step, the finished amount and the whole amount.

    Returns:
        Numbers of documents, tokens and files.

    Raises:
        ConfigError: The format is unknown, or an argument is wrong.
        StoreExistsError: `out` has files.
        StoreError: The format cannot hold the store, or the files differ from it. Nothing is kept.

    Examples:
        >>> import tokenmill as tm
        >>> tm.export_store("stores/demo", out="export/npy", format="npy").tokens
        134693
    """
    check_option("format", format, EXPORTS)
    check_types(drop_masks=(drop_masks, bool))
    check_callable("progress", progress)
    if options is not None:
        check_instance("options", options, ForeignOptions, "leave it out for a store of tokenmill")
    store, target = open_store(path, **asdict(options or ForeignOptions())), Path(path_of("out", out))
    keys, notes = _chosen_keys(store, format, drop_masks=drop_masks)
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise StoreExistsError(
            f"{target}: must be a new or an empty folder, got one with files; choose another path"
        )
    total = sum(_num_values(store, key) for key in keys)
    with new_folder(target) as folder, writing(target):
        EXPORTS[format].write(store, keys, folder, counted(progress, "write", total))
        more_notes = _compare(store, keys, format, folder, counted(progress, "compare", total))
    files = sum(len(names) for _, _, names in os.walk(target))
    return ExportReport(
        path=str(path),
        format=format,
        out=str(out),
        documents=store.num_documents,
        tokens=store.manifest.tokens,
        files=files,
        keys=tuple(keys),
        compared=total,
        notes=(*notes, *more_notes),
    )


def _chosen_keys(store: Store, format: str, *, drop_masks: bool) -> tuple[list[str], list[str]]:
    """Return the arrays that are written, and a note for each of the others; refuse what would be lost."""
    kind, export = store.manifest.kind, EXPORTS[format]
    if not store.num_documents:
        raise StoreError(f"{store.path}: must hold a document to be exported, got none; check the store")
    if kind not in export.kinds:
        fitting = [name for name, other in EXPORTS.items() if kind in other.kinds]
        raise StoreError(
            f"{store.path}: a store of {' or '.join(export.kinds)} can be written as {format}, got one of {kind}; "
            f"export it as {' or '.join(fitting)}"
        )
    keys = [key for key in store.keys if key in export.kinds[kind]]
    # Positions follow from the documents, so nothing is lost where a format has no place for them.
    lost = [key for key in store.keys if key not in keys and key != POSITION_IDS]
    if lost and not drop_masks:
        fitting = [name for name, other in EXPORTS.items() if set(lost) <= set(other.kinds.get(kind, ()))]
        raise StoreError(
            f"{store.path}: {format} must have a place for all arrays, got {', '.join(lost)}, for which it has "
            f"none; export it as {' or '.join(fitting) or 'another format'}, or give them up with drop_masks=True"
        )
    return keys, [f"{key} was given up: there, every token is trained on" for key in lost]


def _num_values(store: Store, key: str) -> int:
    return int(store.axes[store.axis(key)].values[-1])


# What formats are made of: blocks of values, and lengths of documents.


def _blocks(store: Store, key: str, shard: int | None = None) -> Iterator[AnyArray]:
    """Yield the values of a shard, or of all, a bounded number at a time."""
    begins = store.axes[store.axis(key)].values
    begin, end = (0, int(begins[-1])) if shard is None else (int(begins[shard]), int(begins[shard + 1]))
    for first in range(begin, end, _BLOCK):
        yield store.fetch(first, min(end, first + _BLOCK), key)


def _ends(store: Store, axis: str, shard: int | None = None) -> Iterator[Int64Array]:
    """Yield where the items of an axis end, counted from the start of a shard or of all, some at a time."""
    items, values = store.axes[axis].items, store.axes[axis].values
    begin, end, base = 0, int(items[-1]), 0
    if shard is not None:
        begin, end, base = int(items[shard]), int(items[shard + 1]), int(values[shard])
    for first in range(begin, end, _BLOCK):
        yield store.offsets(axis, first, min(end, first + _BLOCK))[1:] - base


def _cast(values: AnyArray, dtype: np.dtype[Any], where: Path) -> AnyArray:
    cast = values.astype(dtype)
    if not np.array_equal(cast, values):
        raise StoreError(
            f"{where}: ids must be below 2**31 for this format, got {int(values.max())}; choose another"
        )
    return cast


def _write_blocks(
    file: BinaryIO, blocks: Iterable[AnyArray], dtype: np.dtype[Any], where: Path, advance: Advance
) -> None:
    for block in blocks:
        file.write(_cast(block, dtype, where).data.cast("B"))
        advance(block.size)


def _dtype(store: Store, key: str) -> np.dtype[Any]:
    """Return what tensors of other projects hold: ids of 32 bits, masks as flags."""
    if key in MASK_KEYS:
        return np.dtype(np.bool_)
    return store.dtype(key) if store.dtype(key).kind == "f" else _IDS


# The formats.


def _write_npy(store: Store, keys: Sequence[str], folder: Path, advance: Advance) -> None:
    """Write an array a shard, and beside them what they do not say."""
    dtype = store.dtype(keys[0])
    for shard in range(store.num_shards):
        count = int(np.diff(store.token_begins)[shard])
        with open(folder / f"tokens-{shard:05d}.npy", "wb") as file:
            header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
            np.lib.format.write_array_header_1_0(file, header)
            _write_blocks(file, _blocks(store, keys[0], shard), dtype, folder, advance)
    identity = store.manifest.tokenizer
    names = ["eos_id", "bos_id"] if identity.get("kind") == UNKNOWN else ["vocab_size", "eos_id", "bos_id"]
    words = {name: identity[name] for name in names if identity.get(name) is not None}
    (folder / SIDECAR).write_text(json.dumps(words), encoding="utf-8")


def _write_megatron(store: Store, keys: Sequence[str], folder: Path, advance: Advance) -> None:
    """Write one dataset with the prefix `tokens`, a sequence a document."""
    axis = store.axis(keys[0])
    # As its own builder chooses: 16 bits where they do, else signed 32 bits.
    code, dtype = (8, np.dtype("<u2")) if store.dtype(keys[0]).itemsize < 4 else (4, _IDS)
    with open(folder / "tokens.bin", "wb") as file:
        _write_blocks(file, _blocks(store, keys[0]), dtype, folder, advance)
    with open(folder / "tokens.idx", "wb") as file:
        count = store.num_documents
        file.write(MEGATRON_HEADER.pack(MEGATRON_MAGIC, 1, code, count, count + 1))
        last = 0
        for ends in _ends(store, axis):
            lengths = np.diff(ends, prepend=last)
            file.write(_cast(lengths, _IDS, folder).data.cast("B"))
            last = int(ends[-1])
        last = 0
        for ends in _ends(store, axis):
            starts = np.concatenate([[last], ends[:-1]])
            file.write((starts * dtype.itemsize).astype("<i8").data.cast("B"))
            last = int(ends[-1])
        for first in range(0, count + 1, _BLOCK):
            file.write(np.arange(first, min(count + 1, first + _BLOCK), dtype="<i8").data.cast("B"))


def _write_nanoset(store: Store, keys: Sequence[str], folder: Path, advance: Advance) -> None:
    """Write a .ds a shard with its .index and .metadata, and its .loss where there is a mask."""
    ids = token_keys(keys)[0]
    dtype = np.dtype("<u2") if store.dtype(ids).itemsize < 4 else np.dtype("<u4")
    name = store.manifest.recipe.get("tokenizer") or "Unknown Tokenizer"
    for shard in range(store.num_shards):
        place = folder / f"{shard:05d}_tokens.ds"
        with open(place, "wb") as file:
            _write_blocks(file, _blocks(store, ids, shard), dtype, folder, advance)
        with open(f"{place}.index", "wb") as file:
            for ends in _ends(store, store.axis(ids), shard):
                file.write(ends.astype("<u8").data.cast("B"))
        for mask in keys:
            if mask != ids:
                with open(f"{place}.loss", "wb") as file:
                    _write_blocks(file, _blocks(store, mask, shard), np.dtype("|u1"), folder, advance)
        count = int(np.diff(store.token_begins)[shard])
        Path(f"{place}.metadata").write_text(f"{name}|{dtype.itemsize}\n{count}\n{count:,} T", encoding="utf-8")


def _write_astrai_bin(store: Store, keys: Sequence[str], folder: Path, advance: Advance) -> None:
    """Write a folder a shard, with a meta.json and a KEY.bin a key; of pairs it has the offsets, as AstrAI does."""
    for shard in range(store.num_shards):
        place, meta = folder / f"shard_{shard:04d}", {}
        place.mkdir()
        for key, dtype, blocks in _astrai_arrays(store, keys, shard):
            with open(place / f"{key}.bin", "wb") as file:
                _write_blocks(file, blocks, dtype, folder, advance if key in keys else _nothing)
                meta[key] = {"shape": [file.tell() // dtype.itemsize], "dtype": dtype.name}
            if store.manifest.kind == "dpo":
                ends = [np.zeros(1, np.int64), *_ends(store, store.axis(key), shard)]
                meta[key]["offsets"] = np.concatenate(ends).tolist()
        (place / META).write_text(json.dumps(meta), encoding="utf-8")


def meta_of(store: Store, shard: int) -> bytes:
    """Return the `meta.json` by which AstrAI reads a shard of ours in place, where ids have at most 31 bits.

    Pairs have the offsets of their records. Groups have none, as AstrAI has no place for them in `.bin` files.
    """
    table: dict[str, dict[str, object]] = {}
    for key in store.keys:
        dtype, axis = store.dtype(key), store.axis(key)
        count = int(np.diff(store.axes[axis].values)[shard])
        name = astrai_dtype(key, dtype.str)  # of the same bytes
        table[key] = {"shape": [count], "dtype": name, "format": "bin", "total_tokens": store.manifest.tokens}
        if store.manifest.kind == "dpo":
            table[key]["offsets"] = np.concatenate([np.zeros(1, np.int64), *_ends(store, axis, shard)]).tolist()
    return json.dumps(table, indent=None if store.manifest.kind == "dpo" else 2).encode()


def _nothing(_count: int) -> None:
    pass


def _astrai_arrays(
    store: Store, keys: Sequence[str], shard: int
) -> Iterator[tuple[str, np.dtype[Any], Iterable[AnyArray]]]:
    """Yield name, dtype and blocks of what AstrAI expects of a shard; positions are numbered through it."""
    for key in keys:
        yield key, _dtype(store, key), _blocks(store, key, shard)
    if store.manifest.kind == "sft" and POSITION_IDS not in keys:
        count = int(np.diff(store.token_begins)[shard])
        blocks = (np.arange(first, min(count, first + _BLOCK)) for first in range(0, count, _BLOCK))
        yield POSITION_IDS, _IDS, blocks


def _write_astrai_h5(store: Store, keys: Sequence[str], folder: Path, advance: Advance) -> None:
    """Write an HDF5 file a shard: a group a key, in it the shard as one dataset, or of pairs a dataset a record."""
    h5py = import_h5py("export to astrai-h5")
    for shard in range(store.num_shards):
        with h5py.File(folder / f"data_{shard:04d}.h5", "w") as file:
            for key, dtype, blocks in _astrai_arrays(store, keys, shard):
                if store.manifest.kind == "dpo":
                    first, last = store.axes[store.axis(key)].items[shard : shard + 2].tolist()
                    for number, record in enumerate(range(first, last)):
                        values = np.asarray(store.fetch_record(record, key))
                        file.create_dataset(f"{key}/data_{number}", data=_cast(values, dtype, folder))
                        advance(values.size)
                    continue
                count = int(np.diff(store.token_begins)[shard])
                dataset = file.create_dataset(f"{key}/data_0", (count,), dtype)
                begin = 0
                for block in blocks:
                    dataset[begin : begin + block.size] = _cast(block, dtype, folder)
                    begin += block.size
                    advance(block.size if key in keys else 0)


def _write_hf(store: Store, keys: Sequence[str], folder: Path, advance: Advance) -> None:
    """Write a Parquet file a shard, a row a record, under `data/` as a dataset of the Hugging Face hub has it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "data").mkdir()
    kept = _kept_columns(store)
    facts = {"kind": store.manifest.kind, "tokenizer": dict(store.manifest.tokenizer)}
    fields = []
    for key in keys:
        kind = pa.list_(pa.from_numpy_dtype(np.dtype("|u1") if key in MASK_KEYS else _dtype(store, key)))
        fields.append((_COLUMNS.get(key, key), pa.list_(kind) if store.axis(key) == "responses" else kind))
    fields += [(name, getattr(pa, "string" if type_ == "json" else type_)()) for name, (_, type_) in kept.items()]
    schema = pa.schema(fields, metadata={"tokenmill": json.dumps(facts)})
    for shard in range(store.num_shards):
        name = f"train-{shard:05d}-of-{store.num_shards:05d}.parquet"
        with pq.ParquetWriter(folder / "data" / name, schema, compression="zstd") as file:
            for begin, end in _ranges(store, *store.document_begins[shard : shard + 2].tolist()):
                columns = []
                for key, field in zip(keys, schema, strict=False):  # kept fields come last
                    flat, levels = _ragged(store, key, begin, end)
                    kinds, type_ = [], field.type
                    for _ in levels:
                        kinds.append(type_)
                        type_ = type_.value_type
                    column = pa.array(_cast(flat, np.dtype(type_.to_pandas_dtype()), folder))
                    for kind, offsets in zip(reversed(kinds), reversed(levels), strict=True):
                        column = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), column, type=kind)
                    columns.append(column)
                    advance(flat.size)
                values = _kept_values(store, kept, begin, end)
                columns += [pa.array(values[name], schema.field(name).type) for name in kept]
                file.write_batch(pa.record_batch(columns, schema=schema))


KeptColumns: TypeAlias = Mapping[str, tuple[str, str]]
"""Column -> the kept field that it holds, and the Arrow type of its values, or `json` for texts in JSON."""


def _kept_columns(store: Store) -> KeptColumns:
    """Return the columns for the fields that `prepare --keep` stored of the records; reads all of them."""
    kinds: dict[str, set[str]] = {}
    for fields in kept_fields(store, 0, store.num_documents):
        for name, value in fields.items():
            kinds.setdefault(name, set()).update(() if value is None else (_kind_of(value),))
    taken = {*store.keys, *_COLUMNS.values()}
    return {f"kept_{name}" if name in taken else name: (name, _arrow_type(found)) for name, found in kinds.items()}


def _kind_of(value: object) -> str:
    if type(value) is int:
        return "exact" if abs(value) <= 1 << 53 else "int64" if -(1 << 63) <= value < 1 << 63 else "json"
    return {bool: "bool_", float: "float64", str: "string"}.get(type(value), "json")


def _arrow_type(kinds: Set[str]) -> str:
    """Return the type of a column; values of several types, and tables, become JSON.

    >>> _arrow_type({"exact", "float64"}), _arrow_type({"string"}), _arrow_type({"string", "exact"})
    ('float64', 'string', 'json')
    """
    if kinds <= {"exact", "int64"}:
        return "int64" if kinds else "string"
    if kinds <= {"exact", "float64"}:
        return "float64"
    return next(iter(kinds)) if len(kinds) == 1 else "json"


def _kept_values(store: Store, kept: KeptColumns, begin: int, end: int) -> dict[str, list[Any]]:
    """Return the values of each column for some documents."""
    fields = list(kept_fields(store, begin, end)) if kept else []
    values: dict[str, list[Any]] = {}
    for column, (name, type_) in kept.items():
        found = [each.get(name) for each in fields]
        if type_ == "json":
            found = [None if value is None else json.dumps(value, ensure_ascii=False) for value in found]
        values[column] = (
            [None if value is None else float(value) for value in found] if type_ == "float64" else found
        )
    return values


def _ranges(store: Store, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut records into ranges of a bounded number of tokens of the main array, one record at least."""
    while begin < end:
        offsets = store.document_offsets(begin, min(end, begin + _ROWS))
        last = begin + max(1, int(np.searchsorted(offsets[1:], offsets[0] + BATCH_TOKENS, side="right")))
        yield begin, last
        begin = last


def _ragged(store: Store, key: str, begin: int, end: int) -> tuple[AnyArray, list[Int64Array]]:
    """Return the values of records end to end, and where they start: for responses, groups of them come first."""
    axis = store.axis(key)
    if axis != "responses":
        offsets = store.offsets(axis, begin, end)
        return store.fetch(int(offsets[0]), int(offsets[-1]), key), [offsets - offsets[0]]
    groups = store.offsets("groups", begin, end)
    if groups[0] == groups[-1]:
        return np.empty(0, store.dtype(key)), [groups - groups[0], np.zeros(1, np.int64)]
    offsets = store.offsets(axis, int(groups[0]), int(groups[-1]))
    return store.fetch(int(offsets[0]), int(offsets[-1]), key), [groups - groups[0], offsets - offsets[0]]


_TEXT = {"seq": ("sequence",), "sft": ("sequence",)}
_WITH_MASK = {"seq": ("sequence",), "sft": ("sequence", "loss_mask")}
_PAIRS = ("chosen", "rejected", "chosen_mask", "rejected_mask")
_ASTRAI = {"seq": ("sequence",), "sft": ("sequence", "loss_mask", POSITION_IDS), "dpo": _PAIRS}
EXPORTS: Mapping[str, ExportFormat] = {
    "megatron": ExportFormat(write=_write_megatron, kinds=_TEXT, opened_as="megatron", boundaries=("seq", "sft")),
    "nanoset": ExportFormat(
        write=_write_nanoset,
        kinds=_WITH_MASK,
        opened_as="datatrove",
        boundaries=("seq", "sft"),
    ),
    "npy": ExportFormat(write=_write_npy, kinds=_TEXT, opened_as="npy"),
    "astrai-bin": ExportFormat(write=_write_astrai_bin, kinds=_ASTRAI, opened_as="astrai-bin", boundaries=("dpo",)),
    "astrai-h5": ExportFormat(write=_write_astrai_h5, kinds=_ASTRAI, opened_as="astrai-h5", boundaries=("dpo",)),
    "hf": ExportFormat(
        write=_write_hf,
        kinds={
            "seq": ("sequence",),
            "sft": ("sequence", "loss_mask", POSITION_IDS),
            "dpo": _PAIRS,
            "grpo": ("prompts", "responses", "masks", "rewards"),
        },
        opened_as=None,
        boundaries=("seq", "sft", "dpo", "grpo"),
    ),
}


# Reading back. An array is right if the digests of its values and of the lengths of its items are the same.


class _Digest:
    """Two digests per key, of its values and of the lengths of its items, independent of block boundaries."""

    def __init__(self) -> None:
        self.states: dict[str, tuple[xxhash.xxh3_128, xxhash.xxh3_128]] = {}

    def add(self, key: str, values: AnyArray, lengths: AnyArray | Sequence[int] = ()) -> None:
        """Add values, and how long the items are that they are of."""
        of_values, of_lengths = self.states.setdefault(key, (xxhash.xxh3_128(), xxhash.xxh3_128()))
        of_values.update(np.ascontiguousarray(values, "<f4" if values.dtype.kind == "f" else "<i8").data)
        of_lengths.update(np.ascontiguousarray(lengths, "<i8").data)

    def to_json(self) -> dict[str, list[str]]:
        """Return key -> digest of values, digest of lengths."""
        return {key: [state.hexdigest() for state in states] for key, states in self.states.items()}


def _store_digest(store: Store, keys: Sequence[str], advance: Advance) -> dict[str, list[str]]:
    digest, nothing = _Digest(), np.empty(0, np.int64)
    for key in keys:
        for block in _blocks(store, key):
            digest.add(key, block)
            advance(block.size)
        levels = {"": store.axis(key)} | ({"/groups": "groups"} if store.axis(key) == "responses" else {})
        for name, axis in levels.items():
            last = 0
            for ends in _ends(store, axis):
                digest.add(key + name, nothing, np.diff(ends, prepend=last))
                last = int(ends[-1])
    return digest.to_json()


def _kept_digest(store: Store) -> dict[str, list[str]]:
    """Return the digests of the columns of kept fields."""
    digest, kept = _Digest(), _kept_columns(store)
    for begin in range(0, store.num_documents if kept else 0, _ROWS):
        for name, values in _kept_values(store, kept, begin, min(begin + _ROWS, store.num_documents)).items():
            digest.add(name, *_texts_of(values))
    return digest.to_json()


def _texts_of(values: Sequence[object]) -> tuple[AnyArray, list[int]]:
    """Return values of any kind as JSON: bytes end to end, and the length of each."""
    texts = [json.dumps(value).encode() for value in values]
    return np.frombuffer(b"".join(texts), np.uint8), [len(text) for text in texts]


def _compare(store: Store, keys: Sequence[str], format: str, folder: Path, advance: Advance) -> list[str]:
    """Read a folder back, compare it with the store, and return notes on what the format cannot hold."""
    export, kind = EXPORTS[format], store.manifest.kind
    expected = _store_digest(store, keys, advance)
    if export.opened_as is None:
        digest = _Digest()
        for part in _read_parquet(folder):
            digest.add(*part)
        _require_same(format, expected | _kept_digest(store), digest.to_json(), kind)
        return []
    eos_id = None if kind in export.boundaries else store.manifest.tokenizer.get("eos_id")
    written = open_store(folder, format=export.opened_as, eos_id=eos_id)
    # Positions are not read from AstrAI's files, because they follow from the documents.
    known = {key: expected[key] for key in keys if key != POSITION_IDS}
    _require_same(format, known, _store_digest(written, list(known), _nothing), kind)
    if kind in export.boundaries or written.num_documents == store.num_documents:
        return []
    return [
        f"the format has no boundaries: whoever cuts documents after EOS finds {written.num_documents:,}, "
        f"not {store.num_documents:,}"
    ]


def _require_same(
    format: str, expected: Mapping[str, list[str]], actual: Mapping[str, list[str]], kind: str
) -> None:
    compared = 2 if kind in EXPORTS[format].boundaries else 1  # values and lengths, or values alone
    for key, digests in expected.items():
        if actual.get(key, [])[:compared] != digests[:compared]:
            raise StoreCorruptError(
                f"export to {format}: {key} differs from the store after it was read back; check the disk, and "
                "export again"
            )


def _read_parquet(folder: Path) -> Iterator[Column]:
    """Yield name, values and item lengths of the columns of each batch of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in sorted((folder / "data").glob("*.parquet")):
        for batch in pq.ParquetFile(file).iter_batches(1024):
            yield from _lists(pa.Table.from_batches([batch]))


def _lists(table: Any) -> Iterator[Column]:  # noqa: ANN401 - pyarrow ships no types
    """Yield the columns of an Arrow table of lists, and of lists of lists their groups too."""
    import pyarrow as pa
    import pyarrow.compute as pc

    keys = {column: key for key, column in _COLUMNS.items()}
    for column in table.column_names:
        key = keys.get(column, column)
        if not pa.types.is_list(table[column].type):  # a kept field
            yield key, *_texts_of(table[column].to_pylist())
            continue
        lengths, values = pc.list_value_length(table[column]).to_numpy(), pc.list_flatten(table[column])
        if pa.types.is_list(values.type):
            yield f"{key}/groups", np.empty(0, np.int64), lengths
            lengths, values = pc.list_value_length(values).to_numpy(), pc.list_flatten(values)
        yield key, values.to_numpy(), lengths
