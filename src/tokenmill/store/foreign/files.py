"""Files of other projects: which a path stands for, of what format they are, and the arrays in them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from glob import glob, has_magic
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import xxhash

from tokenmill.errors import ConfigError, StoreCorruptError, StoreError, StoreMissingError
from tokenmill.store.layout import is_ours, read_at, stores_below
from tokenmill.store.maps import FileRequest
from tokenmill.store.ranges import read_range
from tokenmill.tables import check_option, path_of
from tokenmill.types import MASK_KEYS, STORED_ARRAYS, TOKEN_KEYS, AnyArray, Int64Array, natural_key

META = "meta.json"
FORMATS: Mapping[str, tuple[str, ...]] = {
    "tokenmill": (),
    "npy": (".npy",),
    "bin": (".bin",),
    "nanogpt": (".bin",),
    "llmc": (".bin",),
    "megatron": (".bin", ".idx"),
    "datatrove": (".ds",),
    "olmo": (".npy",),
    "astrai-bin": (META,),
    "astrai-h5": (".h5", ".hdf5"),
    "packed-memmap": ("_token.npy", "_mask.npy", "_index.npy"),
    "preprocessed": (".arrow", ".parquet"),
}
"""Every format that can be opened, with the endings of its files; the first is ours."""
DTYPE_NAMES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
MAX_NAMED = 8
"""Stores that an error lists by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignOptions:
    """What is known of token files beside what they say; None where nothing is."""

    dtype: str | None = None
    """A name such as `uint16`, for files that do not say it."""
    vocab_size: int | None = None
    """All ids must be below; can prove the dtype of raw files."""
    eos_id: int | None = None
    """Ends every document, where the format has no boundaries of its own."""
    bos_id: int | None = None
    """Starts every document; cuts them where there are neither boundaries nor an EOS."""
    format: str | None = None
    """One of `FORMATS`; None: detected from the files."""

    def __post_init__(self) -> None:
        for name, value, choices in (("dtype", self.dtype, DTYPE_NAMES), ("format", self.format, FORMATS)):
            if value is not None:
                check_option(name, value, choices)
        if self.vocab_size is not None and not 1 <= self.vocab_size <= 1 << 32:
            raise ConfigError(
                f"vocab_size: must be from 1 to 2**32, got {self.vocab_size}; it is one more than the largest id"
            )
        bound = self.vocab_size or 1 << 32
        for name, number in (("eos_id", self.eos_id), ("bos_id", self.bos_id)):
            if number is not None and not 0 <= number < bound:
                raise ConfigError(
                    f"{name}: must be from 0 to below the vocabulary size {bound}, got {number}; "
                    "count control ids in vocab_size"
                )

    @property
    def given(self) -> dict[str, int | str]:
        """The options that are not None, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def check_dtype(self, where: Path, dtype: np.dtype[Any]) -> None:
        """Refuse a dtype that the file itself contradicts."""
        if self.dtype is not None and np.dtype(self.dtype) != dtype.newbyteorder("="):
            raise ConfigError(
                f"{where}: dtype must be that of the file, {dtype.name}, got {self.dtype}; leave it out"
            )


# From a path to files of one format.


def detect_format(path: str | os.PathLike[str]) -> str:
    """Return the name of the format of a store or of token files. Only the first bytes of files are read.

    Args:
        path: A file, folder or glob, or the prefix of a Megatron dataset.

    Returns:
        `tokenmill`, or a format that `open_store` and `import_store` take.

    Raises:
        StoreError: Nothing is there, or the format is unknown. The message lists the files.

    Examples:
        >>> import tokenmill as tm
        >>> tm.detect_format("stores/demo")
        'tokenmill'
    """
    place = Path(path_of("path", path))
    return "tokenmill" if is_ours(place) else find_files(place)[0]


def find_files(path: Path, format: str | None = None) -> tuple[str, list[Path]]:
    """Return the one format of what is at a path, and its files in an order that any machine agrees on.

    `format` is the user's word, which is not questioned here.
    """
    files = files_of(path)
    if format is not None:
        named = [file for file in files if file.name.lower().endswith(FORMATS[format])]
        chosen = named or (files if len(files) == 1 else [])
        _refuse_parts(format, chosen)
    else:
        formats = {file: _format_of(file) for file in files}
        names = sorted({name for name in formats.values() if name is not None})
        if len(names) > 1:
            raise StoreError(
                f"{path}: must hold files of one format, got {', '.join(names)}; name a file, a glob, or the format"
            )
        format = names[0] if names else ""
        chosen = [file for file, name in formats.items() if name is not None]
    if not chosen:
        endings = Counter(file.suffix or file.name for file in files).most_common(6)
        got = ", ".join(f"{count} of {ending}" for ending, count in endings)
        raise StoreError(
            f"{path}: must hold token files of a known format, got {got}; known: {', '.join(FORMATS)}. Texts "
            "become a store by `tokenmill prepare`"
        )
    if format == "megatron":  # a dataset is named once, by its .bin
        chosen = list(dict.fromkeys(file.with_suffix(".bin") for file in chosen))
    elif format == "packed-memmap":  # by the file of its tokens
        chosen = list(dict.fromkeys(memmap_tokens(file) or file for file in chosen))
    elif format == "astrai-bin":
        chosen = list(dict.fromkeys(file.with_name(META) for file in chosen))
    elif format == "nanogpt" and len({file.parent for file in chosen}) < len(chosen):
        raise StoreError(
            f"{path}: must name one split of nanoGPT, as one folder holds what is trained on and what is not, "
            f"got {', '.join(file.name for file in chosen[:4])}; name the file"
        )
    return format, chosen


def _refuse_parts(format: str, files: Sequence[Path]) -> None:
    """Refuse to read labels, or the ends of sequences, as the ids beside which they lie."""
    for file in files if format in ("npy", "olmo") else ():
        tokens = memmap_tokens(file)
        if tokens is not None and tokens != file:
            raise StoreError(
                f"{file}: belongs to {tokens.name} and has no ids of its own, got format {format!r}; "
                "leave the format out, or name files of ids alone"
            )


def files_of(path: Path) -> list[Path]:
    """List the files that a path stands for: itself, all below a folder, matches of a glob, or PREFIX.bin and .idx.

    Hidden files and folders are left alone.
    """
    text = os.fspath(path)
    if re.match(r"[a-z0-9]{2,}:/", text):
        raise StoreError(f"{path}: expected a path on this machine, got an address; download the files first")
    if path.is_file():
        return [path]
    prefixed = [Path(f"{text}{ending}") for ending in (".bin", ".idx")]
    if path.is_dir():
        matches = [path]
    elif all(file.is_file() for file in prefixed):
        return [prefixed[0]]
    else:
        matches = [Path(match) for match in glob(text, recursive=True)] if has_magic(text) else []
    folders = [match for match in matches if match.is_dir()]
    _refuse_stores(path, list(dict.fromkeys(store for folder in folders for store in stores_below(folder))))
    files: dict[Path, None] = {}
    for match in matches:
        files.update(dict.fromkeys(_files_below(match) if match.is_dir() else [match]))
    if not files:
        raise StoreMissingError(_missing(path))
    named = zip(names_of(list(files)), files, strict=True)
    return [file for _, file in sorted(named, key=lambda pair: natural_key(pair[0]))]


def _files_below(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place) / name for name in names if not name.startswith("."))


def _missing(path: Path) -> str:
    if path.is_dir():
        got = "the folder is empty"
    elif path.suffix or has_magic(os.fspath(path)):
        return f"no store or token file at this path: {path}; fix the path"
    else:
        got = "the folder does not exist"
    return f"no store at this path: {path} ({got}); run `tokenmill prepare`, or fix the path"


def _refuse_stores(path: Path, stores: list[Path]) -> None:
    """Refuse to take stores of ours for files of other projects, or several for one."""
    if not stores:
        return
    names = [os.path.relpath(store, path) if path.is_dir() else os.fspath(store) for store in stores[:MAX_NAMED]]
    more = [f"{len(stores) - MAX_NAMED} more"] if len(stores) > MAX_NAMED else []
    raise StoreError(
        f"{path}: must be one store, got the store{'s' * (len(stores) > 1)} {', '.join(names + more)} in it; "
        f"name one of them, such as {stores[0]}"
    )


def names_of(files: Sequence[Path]) -> list[str]:
    """Return what to call files: their paths below the folder that they share."""
    folder = os.path.commonpath([file.parent.absolute() for file in files])
    return [PurePath(os.path.relpath(file.absolute(), folder)).as_posix() for file in files]


# Which project wrote a file, by its content, never by its size.

LLMC_HEADER = 1024
LLMC_MAGICS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""(Magic number, version) -> dtype of the tokens."""
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
NPY_MAGIC = b"\x93NUMPY"
H5_MAGIC = b"\x89HDF\r\n\x1a\n"
_MARKS = {
    ".h5": ("astrai-h5", H5_MAGIC),
    ".hdf5": ("astrai-h5", H5_MAGIC),
    ".idx": ("megatron", MEGATRON_MAGIC),
}
"""Ending -> format, and the bytes that its files begin with."""


def _format_of(file: Path) -> str | None:
    """Name the format of one file; None for what is no token file."""
    suffix = file.suffix.lower()
    if suffix == ".ds":
        return "datatrove"
    if suffix in _MARKS:
        name, mark = _MARKS[suffix]
        return name if head(file, len(mark)) == mark else None
    if suffix == ".npy":
        return _format_of_npy(file)
    if suffix == ".bin" or file.name == META:
        return _format_of_bin(file)
    if suffix in FORMATS["preprocessed"]:
        from tokenmill.store.foreign.titan import is_preprocessed

        return "preprocessed" if is_preprocessed(file) else None
    return None


def _format_of_npy(file: Path) -> str:
    if memmap_tokens(file) is not None:
        return "packed-memmap"
    return "npy" if head(file, 6) == NPY_MAGIC else "olmo"


def memmap_tokens(file: Path) -> Path | None:
    """Return the X_token.npy that a file belongs to as a part of a packed_memmap; None where it is none.

    Two of the three parts tell: a single X_token.npy is an array like any other.
    """
    parts = FORMATS["packed-memmap"]
    for part in parts:
        if file.name.endswith(part):
            prefix = file.name.removesuffix(part)
            if sum(file.with_name(f"{prefix}{other}").is_file() for other in parts) > 1:
                return file.with_name(f"{prefix}{parts[0]}")
    return None


def _format_of_bin(file: Path) -> str | None:
    if file.name == META:
        return "astrai-bin" if any(file.with_name(f"{key}.bin").is_file() for key in TOKEN_KEYS) else None
    if head(file.with_suffix(".idx"), 9) == MEGATRON_MAGIC:
        return "megatron"
    start = head(file, 8)
    if (int.from_bytes(start[:4], "little"), int.from_bytes(start[4:], "little")) in LLMC_MAGICS:
        return "llmc"
    if file.stem in STORED_ARRAYS and file.with_name(META).is_file():
        return "astrai-bin"
    # What nanoGPT keeps in meta.pkl could run code when opened; that it is there is all we need.
    if file.with_name("meta.pkl").is_file() or file.name in ("train.bin", "val.bin"):
        return "nanogpt"
    return "bin"


def head(file: Path, size: int) -> bytes:
    """Return the first bytes of a file; fewer if it is shorter, none of what is no plain file."""
    if not file.is_file():
        return b""
    with file.open("rb") as opened:
        return opened.read(size)


# The nouns that all readers of foreign files speak in: arrays, and shards made of them.

BLOCK = 1 << 22
"""Numbers that are looked at together."""
SAMPLE_BLOCKS = 64
SAMPLE_BYTES = 4096
IMPORT = "convert it with `tokenmill import`"


@dataclass(frozen=True, kw_only=True)
class ForeignArray:
    """One array of a foreign file, in one dimension."""

    path: Path
    """The file itself, links resolved."""
    file_bytes: int
    begin: int
    """First byte of the array."""
    count: int
    dtype: np.dtype[Any]
    obstacle: str = ""
    """Why it cannot be mapped; empty if it can."""
    is_copied: bool = False
    """Whether ids that cannot be mapped are copied once, as masks are; else they have to be imported."""
    read: Callable[[int, int], AnyArray] | None = field(default=None, compare=False)
    """How to read numbers `begin` to `end` where mapping does not give them."""

    @property
    def bytes(self) -> int:
        """How many bytes the array has."""
        return self.count * self.dtype.itemsize

    @property
    def request(self) -> FileRequest:
        """Where its bytes are."""
        return FileRequest(self.path, self.file_bytes, self.begin, self.bytes)

    def numbers(self, begin: int, end: int) -> AnyArray:
        """Return numbers `begin` to `end` (exclusive), read and not mapped: the file may be cut meanwhile."""
        if self.read is not None:
            return self.read(begin, end)
        width = self.dtype.itemsize
        return read_range(self.request, begin * width, (end - begin) * width).view(self.dtype)

    def blocks(self) -> Iterator[AnyArray]:
        """Yield all numbers, a bounded number at a time."""
        for begin in range(0, self.count, BLOCK):
            yield self.numbers(begin, min(self.count, begin + BLOCK))

    @cached_property
    def sample(self) -> str:
        """Digest of up to 64 blocks of 4 KiB, evenly spread, the first and the last among them."""
        if self.read is not None:
            return sample_digest(self.path, 0, self.file_bytes)
        return sample_digest(self.path, self.begin, self.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignShard:
    """What becomes one shard: arrays of equal length on each axis, and where their documents end."""

    name: str
    """Path below the folder that was named."""
    arrays: Mapping[str, ForeignArray]
    """Key -> array."""
    ends: Mapping[str, Callable[[], Int64Array]] = field(default_factory=dict)
    """Axis -> where each of its documents ends, ascending; an axis that is not here has no boundaries."""
    beside: tuple[Path, ...] = ()
    """Other files that say where documents end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignFiles:
    """What a reader of a format returns."""

    kind: str = "seq"
    """Training type."""
    shards: tuple[ForeignShard, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the files say of how they were made."""


def real_file(path: Path) -> tuple[Path, int]:
    """Return a file with its links resolved, and its size; data may be linked to, unlike files of our stores."""
    real = Path(os.path.realpath(path))
    if not real.is_file():
        raise StoreCorruptError(f"{path}: not a regular file, or a broken symlink; restore it")
    return real, real.stat().st_size


def array_of(path: Path, dtype: np.dtype[Any], *, begin: int = 0, count: int | None = None) -> ForeignArray:
    """Describe an array that fills a file from `begin` on; `count` is what a header claims."""
    real, size = real_file(path)
    room = size - begin
    if room < 0 or room % dtype.itemsize or (count is not None and count * dtype.itemsize != room):
        claimed = f"{count} numbers" if count is not None else "whole numbers"
        raise StoreCorruptError(
            f"{path}: must hold {claimed} of {dtype.name} after {begin} bytes of header, "
            f"got {room} bytes there; copy the file again, or fix dtype"
        )
    obstacle = "its numbers are big-endian" if dtype.byteorder == ">" else ""
    return ForeignArray(
        path=real, file_bytes=size, begin=begin, count=room // dtype.itemsize, dtype=dtype, obstacle=obstacle
    )


def sample_digest(path: Path, begin: int, size: int) -> str:
    """Digest up to 64 blocks of 4 KiB of a part of a file, evenly spread, the first and the last among them."""
    state = xxhash.xxh3_128(size.to_bytes(8, "little"))
    for place, data in sample_blocks(path, begin, size):
        state.update(place.to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def sample_blocks(path: Path, begin: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield (place, bytes) of the blocks of a sample, all of what is small; places are multiples of 8."""
    last = max(0, size - SAMPLE_BYTES)
    places = [last * i // (SAMPLE_BLOCKS - 1) & ~7 for i in range(SAMPLE_BLOCKS)]
    if size <= SAMPLE_BLOCKS * SAMPLE_BYTES:
        places = list(range(0, size, SAMPLE_BYTES))
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        for place in places:
            # The last block may begin up to 7 bytes early, so it is read to the end.
            wanted = size - place if place >= last else SAMPLE_BYTES
            yield place, read_at(descriptor, wanted, begin + place)
    finally:
        os.close(descriptor)


def stored_dtype(key: str, array: ForeignArray) -> tuple[str, str]:
    """Return the dtype under which a key is offered, and why it cannot be mapped under it, or nothing.

    A signed array is mapped as unsigned; that none of its numbers is negative is proven elsewhere.
    """
    kind, size = array.dtype.kind, array.dtype.itemsize
    if key in MASK_KEYS:
        return "|u1", array.obstacle or ("" if size == 1 else "its mask has more than a byte a token")
    if kind not in "iu":
        return "", f"its ids are {array.dtype.name}"
    if size > 4:
        wide = "<u4" if array.is_copied else ""
        return wide, array.obstacle or f"its ids are {array.dtype.name}, 8 bytes each"
    dtype = {1: "|u1", 2: "<u2", 4: "<u4"}[size]
    if not array.obstacle and array.begin % size:
        return dtype, "its ids do not begin at a multiple of their size"
    return dtype, array.obstacle
