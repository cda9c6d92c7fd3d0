"""What a tokenizer is, and what makes the ids of two tokenizers mean the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from tokenmill.errors import TokenizerError, nearest
from tokenmill.fingerprint import digest
from tokenmill.types import Encoded

if TYPE_CHECKING:
    import numpy.typing as npt

KINDS = ("bytes", "tokenizer.json", "tiktoken")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerIdentity:
    """What makes two token ids mean the same. The engine is no part of it: engines must agree."""

    kind: str
    """One of `KINDS`."""
    content: str
    """32 hex digits of the bytes that define the tokenizer: the file, or the rank file and its pattern."""
    vocab_size: int
    """One more than the largest id it can give, control ids included."""
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    add_bos: bool
    """Whether every document starts with BOS."""
    add_eos: bool
    """Whether every document ends with EOS."""

    def __post_init__(self) -> None:
        where = f"tokenizer identity of kind {self.kind!r}"
        if self.kind not in KINDS:
            raise TokenizerError(f"{where}: kind must be known, got {self.kind!r}; {nearest(self.kind, KINDS)}")
        if not re.fullmatch(r"[0-9a-f]{32}", self.content):
            raise TokenizerError(
                f"{where}: content must be 32 hex digits, got {self.content!r}; it is `content_digest` of the "
                "bytes that define the tokenizer"
            )
        if not 1 <= self.vocab_size <= 2**32:
            raise TokenizerError(
                f"{where}: vocab_size must be from 1 to 2**32, got {self.vocab_size}; "
                "it is one more than the largest id"
            )
        for name, value in (("bos_id", self.bos_id), ("eos_id", self.eos_id), ("pad_id", self.pad_id)):
            if value is not None and not 0 <= value < self.vocab_size:
                raise TokenizerError(
                    f"{where}: {name} must be below vocab_size {self.vocab_size}, got {value}; "
                    "count the control ids in vocab_size"
                )
        for name, added, value in (("BOS", self.add_bos, self.bos_id), ("EOS", self.add_eos, self.eos_id)):
            if added and value is None:
                raise TokenizerError(
                    f"{where}: to add {name} there must be one, got none; "
                    f"name it with {name.lower()}_token=..., or say add_{name.lower()}=False"
                )
        if self.add_bos and self.add_eos and self.bos_id == self.eos_id:
            raise TokenizerError(
                f"{where}: only one of BOS and EOS may be added where both are one id, got {self.bos_id} for both, "
                "two in a row between documents; say add_bos=False or add_eos=False"
            )

    def to_json(self) -> dict[str, int | str | bool | None]:
        """Return it as a JSON object, as a store's manifest holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> TokenizerIdentity:
        """Read what `to_json` wrote; a missing, unknown or mistyped key raises `TokenizerError`."""
        known = [field.name for field in fields(cls)]
        for key in value:
            if key not in known:
                raise TokenizerError(f"tokenizer identity: keys must be known, got {key!r}; {nearest(key, known)}")
        for name in known:
            if name not in value:
                raise TokenizerError(
                    f"tokenizer identity: {name!r} must be there, got {sorted(value)}; write it with to_json()"
                )
            if type(value[name]) not in _JSON_TYPES[name]:
                raise TokenizerError(
                    f"tokenizer identity: {name} has another type, got {value[name]!r}; write it with to_json()"
                )
        return cls(**value)  # type: ignore[arg-type]  # each type was checked by name above

    @property
    def digest(self) -> str:
        """32 hex digits that stand for the whole identity."""
        return digest(self.to_json())


_ID: tuple[type, ...] = (int, type(None))
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "content": (str,),
    "vocab_size": (int,),
    "bos_id": _ID,
    "eos_id": _ID,
    "pad_id": _ID,
    "add_bos": (bool,),
    "add_eos": (bool,),
}


class Tokenizer(Protocol):
    """Turns texts into ids and back."""

    @property
    def identity(self) -> TokenizerIdentity:
        """What its ids mean."""

    @property
    def engine(self) -> str:
        """Name and version of what does the work; the first word is what `open_tokenizer(engine=...)` takes."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Control strings and their ids. `encode` never gives these ids; `frame` and recipes place them."""

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the bare ids of each text: control strings as ordinary text, no BOS or EOS, nothing cut off.

        A text that is not valid Unicode (a lone surrogate) raises `TokenizerError` with its index.
        """

    def decode(self, ids: npt.NDArray[Any]) -> str:
        """Return the text of ids: U+FFFD for what is not UTF-8, control ids as their strings.

        An id outside the vocabulary raises `TokenizerError`.
        """


def content_digest(*parts: bytes) -> str:
    """Return the 32 hex digits that stand for the bytes that define a tokenizer."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def join(arrays: Sequence[npt.NDArray[Any]]) -> Encoded:
    """Lay the ids of several documents end to end."""
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([array.size for array in arrays], out=offsets[1:])
    ids = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.uint32)
    return Encoded(ids=ids, offsets=offsets)


def checked_ids(ids: npt.NDArray[Any], identity: TokenizerIdentity) -> npt.NDArray[Any]:
    """Return ids that `decode` may look up; one outside the vocabulary raises `TokenizerError`."""
    array = np.asarray(ids).reshape(-1)
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < identity.vocab_size:
        bad = array[(array < 0) | (array >= identity.vocab_size)]
        raise TokenizerError(
            f"decode: ids must be below the vocabulary size {identity.vocab_size}, got {int(bad[0])}; "
            "open the tokenizer that gave them"
        )
    return array


def refuse_surrogates(texts: Sequence[str]) -> None:
    """Raise `TokenizerError` with the index of the first text that cannot be written as UTF-8."""
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"encode: text {index} of the batch must be valid Unicode, got a lone surrogate "
                f"{text[error.start]!r} at character {error.start}; "
                "replace it with U+FFFD when the document is read"
            ) from error


@contextmanager
def engine_errors(engine: str, doing: str, way_out: str) -> Iterator[None]:
    """Turn whatever an engine throws into one `TokenizerError` line; its own errors have no common type."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        # A panic in Rust arrives as a BaseException that no module exports.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{engine}: must {doing}, got {error}; {way_out}") from error
