"""Proving what raw files hold by what their numbers can be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.store.foreign.parts import real_file, sample_blocks

if TYPE_CHECKING:
    import numpy.typing as npt


def proven_dtype(files: Sequence[Path], vocab_size: int | None) -> np.dtype[Any]:
    """Return the one dtype that files can have if all ids are below `vocab_size`; refuse if it is not the only one.

    A size proves nothing: half the files of 16-bit ids are as long as a file of 32-bit ids. An id outside the
    vocabulary disproves a dtype; so does a vocabulary that it cannot hold. A sample of every file is looked at;
    that the whole obeys what is left is checked when documents are found.
    """
    where = files[0] if len(files) == 1 else files[0].parent
    if vocab_size is None:
        raise StoreError(
            f"{where}: the dtype of files without a header must be said, got none; add dtype = uint16 or uint32, "
            "or vocab_size, which may prove it"
        )
    widths = {"uint8": 1 << 8, "uint16": 1 << 16, "uint32": 1 << 32}
    least = next(bound for bound in widths.values() if vocab_size <= bound)
    found: dict[str, str] = {}
    for name, bound in widths.items():
        if bound < least:
            found[name] = f"cannot hold {vocab_size} ids"
        else:
            found[name] = next((why for file in files if (why := _disproof(file, name, vocab_size))), "")
    possible = [name for name, why in found.items() if not why]
    if len(possible) != 1:
        told = "; ".join(f"{name} {why or 'is possible'}" for name, why in found.items())
        raise StoreError(
            f"{where}: vocab_size {vocab_size} must leave one dtype possible to prove it, "
            f"got {len(possible)} ({told}); say dtype"
        )
    return np.dtype(possible[0]).newbyteorder("<")


def _disproof(file: Path, name: str, vocab_size: int) -> str:
    """Say why a file cannot hold ids of this dtype; nothing if it can."""
    real, size = real_file(file)
    dtype = np.dtype(name).newbyteorder("<")
    if size % dtype.itemsize:
        return f"does not divide the {size} bytes of {file.name}"
    for place, data in sample_blocks(real, 0, size):
        ids: npt.NDArray[Any] = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)
        if ids.size and int(ids.max()) >= vocab_size:
            return f"gives id {int(ids.max())} at byte {place + int(ids.argmax()) * dtype.itemsize} of {file.name}"
    return ""
