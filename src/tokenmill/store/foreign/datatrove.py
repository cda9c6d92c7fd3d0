"""Reader of the tokenized files of datatrove and nanotron: .ds with .ds.index, .ds.metadata and .ds.loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store.foreign.detect import head
from tokenmill.store.foreign.files import names_of
from tokenmill.store.foreign.options import ForeignOptions
from tokenmill.store.foreign.parts import Flat, Part, Parts, flat_of
from tokenmill.store.foreign.prove import proven_dtype

if TYPE_CHECKING:
    import numpy.typing as npt

_SIZES = {"2": "<u2", "4": "<u4"}
_WAY_OUT = "copy the files again from where they are intact"


def read_datatrove(files: Sequence[Path], options: ForeignOptions) -> Parts:
    """Read .ds files; the size of a token is in .metadata, else the dtype is given or proven by the vocabulary."""
    names = names_of(list(files))
    losses = [_beside(file, ".loss").is_file() for file in files]
    if len(set(losses)) > 1:
        without = files[losses.index(False)]
        raise StoreError(
            f"{without}: all files must have a .loss or none, got none here; name those with and without apart"
        )
    known = [_metadata(file) for file in files]
    unsaid = [file for file, said in zip(files, known, strict=True) if said is None]
    if unsaid and options.dtype is None:
        default = proven_dtype(unsaid, options.vocab_size)
    else:
        default = np.dtype(options.dtype or "<u2").newbyteorder("<")
    parts = [
        _part(file, name, said, default, options) for file, name, said in zip(files, names, known, strict=True)
    ]
    tokenizers = sorted({said[0] for said in known if said is not None})
    return Parts(kind="sft" if losses[0] else "seq", parts=tuple(parts), facts={"tokenizers": tokenizers})


def _part(
    file: Path,
    name: str,
    said: tuple[str, np.dtype[Any], int] | None,
    default: np.dtype[Any],
    options: ForeignOptions,
) -> Part:
    if said is not None:
        options.check_dtype(file, said[1])
    flat = flat_of(file, said[1] if said else default, count=said[2] if said else None)
    arrays: dict[str, Flat] = {"sequence": flat}
    loss = _beside(file, ".loss")
    if loss.is_file():
        arrays["loss_mask"] = flat_of(loss, np.dtype("|u1"), count=flat.count)
    index = _beside(file, ".index")
    if not index.is_file():
        return Part(name=name, arrays=arrays)
    ends = flat_of(index, np.dtype("<u8"))
    return Part(
        name=name, arrays=arrays, ends={"documents": lambda: _ends(index, ends, flat.count)}, beside=(index,)
    )


def _beside(file: Path, ending: str) -> Path:
    return file.with_name(f"{file.name}{ending}")


def _metadata(file: Path) -> tuple[str, np.dtype[Any], int] | None:
    """Return tokenizer, dtype and number of tokens; None where the file does not exist."""
    path = _beside(file, ".metadata")
    if not path.is_file():
        return None
    text = head(path, 1 << 16).decode("utf-8", "replace")
    lines = text.splitlines()
    name, _, size = lines[0].rpartition("|") if lines else ("", "", "")
    if size not in _SIZES or len(lines) < 2 or not (lines[1].isascii() and lines[1].isdigit()):
        raise StoreCorruptError(
            f"{path}: must be TOKENIZER|2 or TOKENIZER|4, then the number of tokens, got {text[:80]!r}; {_WAY_OUT}"
        )
    return name, np.dtype(_SIZES[size]), int(lines[1][:20])


def _ends(path: Path, index: Flat, count: int) -> npt.NDArray[np.int64]:
    ends = index.mapped
    last = int(ends[-1]) if ends.size else 0
    if last != count or (ends[1:] < ends[:-1]).any():
        raise StoreCorruptError(
            f"{path}: ends of documents must rise to the {count} tokens of the .ds, got {last} at last; {_WAY_OUT}"
        )
    return ends.astype(np.int64)
