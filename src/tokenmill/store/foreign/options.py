"""What a user may say of token files that do not say it themselves."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tokenmill.store.manifest import Manifest

DTYPE_NAMES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
FORMATS = (
    "tokenmill",
    "npy",
    "bin",
    "nanogpt",
    "llmc",
    "megatron",
    "datatrove",
    "olmo",
    "astrai-bin",
    "astrai-h5",
)
"""Every format that can be opened; the first is ours."""


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
    """One of `FORMATS`; None: told by the files."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPE_NAMES:
            raise ConfigError(
                f"dtype: must be one of {', '.join(DTYPE_NAMES)}, got {self.dtype!r}; "
                f"{nearest(self.dtype, DTYPE_NAMES)}"
            )
        if self.format is not None and self.format not in FORMATS:
            raise ConfigError(
                f"format: must be one of {', '.join(FORMATS)}, got {self.format!r}; {nearest(self.format, FORMATS)}"
            )
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
        """What was said, by name."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def check_dtype(self, where: Path, found: np.dtype[Any]) -> None:
        """Refuse a dtype that the file itself contradicts."""
        if self.dtype is not None and np.dtype(self.dtype) != found.newbyteorder("="):
            raise ConfigError(
                f"{where}: dtype must be that of the file, {found.name}, got {self.dtype}; leave it out"
            )


def check_ours(path: Path, manifest: Manifest, options: ForeignOptions) -> None:
    """Refuse what contradicts the manifest of a store of ours."""
    tokenizer = manifest.tokenizer
    said: dict[str, object] = {
        "format": "tokenmill",
        "dtype": np.dtype(manifest.keys[manifest.token_key]).name,
        **{name: tokenizer.get(name) for name in ("vocab_size", "eos_id", "bos_id")},
    }
    for name, value in options.given.items():
        if value != said[name]:
            raise ConfigError(
                f"{path}: {name} must be as the manifest says, {said[name]!r}, got {value!r}; leave it out"
            )
