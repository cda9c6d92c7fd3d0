"""Which project wrote some files: told by their content, never by their size."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import StoreError
from tokenmill.store.foreign.files import files_of, is_ours
from tokenmill.store.foreign.options import FORMATS
from tokenmill.types import AXES, TOKEN_KEYS

LLMC_HEADER = 1024
LLMC_MAGICS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""(Magic number, version) -> dtype of the tokens."""
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
NPY_MAGIC = b"\x93NUMPY"
H5_MAGIC = b"\x89HDF\r\n\x1a\n"
META = "meta.json"
_ASTRAI_KEYS = {key for keys in AXES.values() for key in keys}
_SUFFIXES = {
    "npy": (".npy",),
    "olmo": (".npy",),
    "bin": (".bin",),
    "nanogpt": (".bin",),
    "llmc": (".bin",),
    "megatron": (".bin", ".idx"),
    "datatrove": (".ds",),
    "astrai-bin": (META,),
    "astrai-h5": (".h5", ".hdf5"),
}
"""Which files of a folder belong to a format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Files of one format, in order."""

    format: str
    files: tuple[Path, ...]


def detect_format(path: str | os.PathLike[str]) -> str:
    """Name the format of what is at a path: a file, folder, glob, or the prefix of a Megatron dataset.

    Reads the first bytes of files at most. What is not known is an error that lists what was found.
    """
    return "tokenmill" if is_ours(Path(path)) else find(Path(path)).format


def find(path: Path, format: str | None = None) -> Found:
    """Find the files of the one format at a path; `format` is the user's word, which is not questioned here."""
    files = files_of(path)
    if format is not None:
        named = [file for file in files if file.name.lower().endswith(_SUFFIXES[format])]
        chosen = named or (files if len(files) == 1 else [])
    else:
        formats = [(file, _format_of(file)) for file in files]
        told = sorted({name for _, name in formats if name is not None})
        if len(told) > 1:
            raise StoreError(
                f"{path}: must hold files of one format, got {', '.join(told)}; name a file, a glob, or the format"
            )
        format = told[0] if told else ""
        chosen = [file for file, name in formats if name is not None]
    if not chosen:
        raise StoreError(
            f"{path}: must hold token files of a known format, got {_listed(files)}; known: {', '.join(FORMATS)}"
        )
    chosen = _as_named(format, chosen)
    if format == "nanogpt" and len({file.parent for file in chosen}) < len(chosen):
        names = ", ".join(file.name for file in chosen[:4])
        raise StoreError(
            f"{path}: must name one split of nanoGPT, as one folder holds what is trained on and what is not, "
            f"got {names}; name the file"
        )
    return Found(format=format, files=tuple(chosen))


def _as_named(format: str, files: list[Path]) -> list[Path]:
    """Name a Megatron dataset once, by its .bin, and files of AstrAI by their meta.json."""
    if format == "megatron":
        return list(dict.fromkeys(file.with_suffix(".bin") for file in files))
    if format == "astrai-bin":
        return list(dict.fromkeys(file.with_name(META) for file in files))
    return files


def _format_of(file: Path) -> str | None:
    """Name the format of one file; None for what is no token file."""
    suffix = file.suffix.lower()
    if suffix in (".h5", ".hdf5"):
        return "astrai-h5" if head(file, 8) == H5_MAGIC else None
    if suffix == ".ds":
        return "datatrove"
    if suffix == ".idx":
        return "megatron" if head(file, 9) == MEGATRON_MAGIC else None
    if suffix == ".npy":
        return "npy" if head(file, 6) == NPY_MAGIC else "olmo"
    if file.name == META:
        return "astrai-bin" if any(file.with_name(f"{key}.bin").is_file() for key in TOKEN_KEYS) else None
    return _format_of_bin(file) if suffix == ".bin" else None


def _format_of_bin(file: Path) -> str:
    if file.with_suffix(".idx").is_file() and head(file.with_suffix(".idx"), 9) == MEGATRON_MAGIC:
        return "megatron"
    start = head(file, 8)
    if (int.from_bytes(start[:4], "little"), int.from_bytes(start[4:], "little")) in LLMC_MAGICS:
        return "llmc"
    if file.stem in _ASTRAI_KEYS and file.with_name(META).is_file():
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


def _listed(files: Sequence[Path]) -> str:
    endings = Counter(file.suffix or file.name for file in files)
    return ", ".join(f"{count} of {ending}" for ending, count in endings.most_common(6)) or "an empty folder"
