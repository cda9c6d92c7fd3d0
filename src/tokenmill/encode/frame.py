"""Where BOS and EOS stand in each document, and the dtype that its ids are kept in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numba
import numpy as np
from numba import types

from tokenmill.encode.tokenizer import Tokenizer, TokenizerIdentity
from tokenmill.errors import TokenizerError
from tokenmill.types import AnyArray, BoolArray, Encoded, Int64Array, Uint32Array

Needs: TypeAlias = "tuple[BoolArray, BoolArray]"
"""Which documents are to be given BOS, and which EOS."""
_LONG = 400
"""Tokens a document from which on it is cheaper to copy documents one by one."""


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest little-endian unsigned dtype that holds every id below `vocab_size`.

    >>> token_dtype(256), token_dtype(257), token_dtype(65536), token_dtype(65537)
    (dtype('uint8'), dtype('uint16'), dtype('uint16'), dtype('uint32'))
    """
    for width in (1, 2, 4):
        if 1 <= vocab_size <= 256**width:
            return np.dtype(f"<u{width}")
    raise TokenizerError(
        f"token dtype: vocab_size must be from 1 to 2**32, got {vocab_size}; it is one more than the largest id"
    )


def frame(encoded: Encoded, identity: TokenizerIdentity, *, compiled: bool = False) -> Encoded:
    """Place BOS and EOS as the identity says, and cast the ids to `token_dtype`.

    A document that already starts with BOS, or ends with EOS, gets no second one, so framing twice is framing once.
    An id outside the vocabulary raises `TokenizerError`. About half a nanosecond a token, 1.5 where documents are
    short; a third of one, if `compiled`, which takes time to load.
    """
    if compiled and encoded.ids.dtype == np.uint32:
        needed = needs(encoded, identity)
        return placed([encoded], [needed], np.arange(encoded.num_documents), identity)
    dtype = token_dtype(identity.vocab_size)
    refuse_overflow(encoded, identity.vocab_size)
    ids = encoded.ids
    needs_bos, needs_eos = needs(encoded, identity)
    offsets = encoded.offsets.astype(np.int64)
    offsets[1:] += np.cumsum(needs_bos.astype(np.int64) + needs_eos)
    if int(offsets[-1]) == ids.size:
        framed = ids.astype(dtype, copy=False)
    elif ids.size >= _LONG * encoded.num_documents:
        framed = _joined(ids.astype(dtype, copy=False), encoded.offsets, needs_bos, needs_eos, identity)
    else:
        framed = _spread(ids, dtype, offsets, needs_bos, needs_eos, identity)
    return Encoded(ids=framed, offsets=offsets)


def encode_framed(tokenizer: Tokenizer, texts: Sequence[str], *, compiled: bool = False) -> Encoded:
    """Encode texts and frame them: the same as the two in turn, but without a copy where the engine can do both."""
    identity = tokenizer.identity
    framing: Callable[[Sequence[str]], Encoded | None] | None = getattr(tokenizer, "encode_framed", None)
    encoded = framing(texts) if framing is not None else None
    if encoded is None or not _is_framed_once(encoded, identity):
        return frame(tokenizer.encode(texts), identity, compiled=compiled)
    refuse_overflow(encoded, identity.vocab_size)
    ids = encoded.ids.astype(token_dtype(identity.vocab_size), copy=False)
    return Encoded(ids=ids, offsets=encoded.offsets)


def _is_framed_once(encoded: Encoded, identity: TokenizerIdentity) -> bool:
    """Tell whether each document has what the identity adds, and had none of it before, as a text may have."""
    ids, starts, ends = encoded.ids, encoded.offsets[:-1], encoded.offsets[1:]
    sizes, added = ends - starts, identity.add_bos + identity.add_eos
    if np.count_nonzero(sizes < added):
        return False
    filled = sizes > added
    all_filled = np.count_nonzero(filled) == filled.size
    for add, token, at, inwards in (
        (identity.add_bos, identity.bos_id, starts, 1),
        (identity.add_eos, identity.eos_id, ends - 1, -1),
    ):
        inner = (at if all_filled else at[filled]) + inwards
        if add and (np.count_nonzero(ids[at] != token) or np.count_nonzero(ids[inner] == token)):
            return False
    return True


def needs(encoded: Encoded, identity: TokenizerIdentity) -> Needs:
    """Return which documents are to be given BOS, and which EOS."""
    starts, ends = encoded.offsets[:-1], encoded.offsets[1:]
    return (
        _lacks(encoded.ids, starts, starts < ends, identity.bos_id if identity.add_bos else None),
        _lacks(encoded.ids, ends - 1, starts < ends, identity.eos_id if identity.add_eos else None),
    )


def placed(
    parts: Sequence[Encoded], needed: Sequence[Needs], order: Int64Array, identity: TokenizerIdentity
) -> Encoded:
    """Put documents of several parts, of ids of 32 bits, in an order, with BOS and EOS around those that need them.

    `order` are the documents of all parts, counted through, one after the other as they are to stand.
    """
    lengths = [np.diff(part.offsets) + bos + eos for part, (bos, eos) in zip(parts, needed, strict=True)]
    offsets = np.zeros(order.size + 1, np.int64)
    np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths])[order], out=offsets[1:])
    places = np.empty(order.size, np.int64)
    places[order] = offsets[:-1]
    framed = np.empty(int(offsets[-1]), token_dtype(identity.vocab_size))
    tokens, first = (identity.bos_id or 0, identity.eos_id or 0), 0
    for part, need in zip(parts, needed, strict=True):
        own = places[first : first + part.num_documents]
        first += part.num_documents
        if place_documents(part.ids, part.offsets, need, own, tokens, framed) >= identity.vocab_size:
            refuse_overflow(part, identity.vocab_size)
    return Encoded(ids=framed, offsets=offsets)


def _joined(
    ids: AnyArray,
    offsets: Int64Array,
    needs_bos: BoolArray,
    needs_eos: BoolArray,
    identity: TokenizerIdentity,
) -> AnyArray:
    """Join documents and what frames them, as bytes: a copy a document, which is what memory can do."""
    memory = np.ascontiguousarray(ids).data
    documents: list[bytes | memoryview] = [memory[begin:end] for begin, end in pairwise(offsets.tolist())]
    bos, eos = (np.array([token or 0], ids.dtype).tobytes() for token in (identity.bos_id, identity.eos_id))
    if needs_bos.all() == needs_bos.any() and needs_eos.all() == needs_eos.any():
        # As nearly always: between two documents stands the same.
        bos, eos = bos if needs_bos.any() else b"", eos if needs_eos.any() else b""
        documents[0] = bos + documents[0]
        documents[-1] = bytes(documents[-1]) + eos
        return np.frombuffer(bytearray(eos + bos).join(documents), ids.dtype)
    parts: list[bytes | memoryview] = [b""] * (3 * needs_bos.size)
    parts[0::3] = [bos if needed else b"" for needed in needs_bos.tolist()]
    parts[1::3] = documents
    parts[2::3] = [eos if needed else b"" for needed in needs_eos.tolist()]
    return np.frombuffer(bytearray().join(parts), ids.dtype)


def _spread(
    ids: AnyArray,
    dtype: np.dtype[np.unsignedinteger[Any]],
    offsets: Int64Array,
    needs_bos: BoolArray,
    needs_eos: BoolArray,
    identity: TokenizerIdentity,
) -> AnyArray:
    """Place all tokens by one mask, where documents are so short that a copy each is dearer."""
    at_bos = offsets[:-1][needs_bos]
    at_eos = offsets[1:][needs_eos] - 1
    framed = np.empty(int(offsets[-1]), dtype=dtype)
    bare = np.ones(framed.size, dtype=np.bool_)
    bare[at_bos] = False
    bare[at_eos] = False
    framed[bare] = ids  # casts on the way, without an array of its own
    framed[at_bos] = identity.bos_id or 0
    framed[at_eos] = identity.eos_id or 0
    return framed


def _lacks(ids: AnyArray, at: Int64Array, filled: BoolArray, wanted: int | None) -> BoolArray:
    """Return for which documents the id at `at` is not yet the wanted one; none where nothing is wanted."""
    if wanted is None:
        return np.zeros(at.size, dtype=np.bool_)
    if filled.all():
        there: BoolArray = ids[at] != wanted
        return there
    lacks = np.ones(at.size, dtype=np.bool_)
    lacks[filled] = ids[at[filled]] != wanted
    return lacks


def with_second_bos(ids: AnyArray, offsets: Int64Array, identity: TokenizerIdentity) -> list[int]:
    """Return the documents in which BOS stands twice in a row, which control strings in a text may spell."""
    if not identity.add_bos or identity.bos_id == identity.eos_id:
        return []
    found = ids == identity.bos_id
    at = np.flatnonzero(found[1:] & found[:-1]) + 1
    documents = np.searchsorted(offsets, at[~np.isin(at, offsets)], side="right") - 1
    second: list[int] = np.unique(documents).tolist()
    return second


def refuse_overflow(encoded: Encoded, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary."""
    ids = encoded.ids
    if not ids.size or (int(ids.max()) < vocab_size and (ids.dtype.kind == "u" or int(ids.min()) >= 0)):
        return
    token = int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
    document = int(np.searchsorted(encoded.offsets, token, side="right")) - 1
    raise TokenizerError(
        f"document {document} of the batch: ids must be below the vocabulary size {vocab_size}, "
        f"got {int(ids[token])} at token {token - int(encoded.offsets[document])}; "
        "frame with the identity of the tokenizer that gave them"
    )


# The kernel that copies documents to their places, with BOS and EOS around them.

_numba: Any = types
_IDS = _numba.Array(_numba.uint32, 1, "C", readonly=True)
"""What engines give may be memory that must not be written to."""
_FLAGS, _NUMBERS, _NUMBER = _numba.boolean[::1], _numba.int64[::1], _numba.int64
_SIGNATURES = [
    _NUMBER(_IDS, _NUMBERS, _numba.UniTuple(_FLAGS, 2), _NUMBERS, _numba.UniTuple(_NUMBER, 2), width[::1])
    for width in (_numba.uint8, _numba.uint16, _numba.uint32)
]


@numba.njit(_SIGNATURES, cache=True, nogil=True)
def place_documents(
    ids: Uint32Array,
    offsets: Int64Array,
    needs: tuple[BoolArray, BoolArray],
    places: Int64Array,
    tokens: tuple[int, int],
    framed: AnyArray,
) -> int:
    """Copy each document to its place in `framed`, and return the largest id, which may be too large for that.

    `needs` says which documents are to be given BOS, and which EOS; `tokens` are the two.
    """
    needs_bos, needs_eos = needs
    bos, eos = tokens
    largest = np.uint32(0)
    for document in range(offsets.size - 1):
        at = places[document]
        if needs_bos[document]:
            framed[at] = bos
            at += 1
        source = ids[offsets[document] : offsets[document + 1]]
        target = framed[at : at + source.size]
        for k in range(source.size):
            target[k] = source[k]
            largest = max(largest, source[k])
        if needs_eos[document]:
            framed[at + source.size] = eos
    return int(largest)
