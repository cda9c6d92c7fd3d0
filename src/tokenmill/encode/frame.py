"""Where BOS and EOS stand in each document, and the dtype that its ids are kept in."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenmill.encode.tokenizer import TokenizerIdentity
from tokenmill.errors import TokenizerError
from tokenmill.types import AnyArray, BoolArray, Encoded, Int64Array


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


def frame(encoded: Encoded, identity: TokenizerIdentity) -> Encoded:
    """Place BOS and EOS as the identity says, and cast the ids to `token_dtype`.

    A document that already starts with BOS, or ends with EOS, gets no second one, so framing twice is framing once.
    An id outside the vocabulary raises `TokenizerError`. About half a nanosecond a token, one where documents have
    some 50 tokens: a kernel would take half of that, and 0.4 s to load in every worker of a build.
    """
    _refuse_overflow(encoded, identity.vocab_size)
    starts, ends = encoded.offsets[:-1], encoded.offsets[1:]
    needs_bos = _lacks(encoded.ids, starts, starts < ends, identity.bos_id if identity.add_bos else None)
    needs_eos = _lacks(encoded.ids, ends - 1, starts < ends, identity.eos_id if identity.add_eos else None)
    return place(encoded, needs_bos, needs_eos, identity)


def place(encoded: Encoded, needs_bos: BoolArray, needs_eos: BoolArray, identity: TokenizerIdentity) -> Encoded:
    """Put BOS before some documents and EOS behind some, and cast the ids to `token_dtype`."""
    dtype = token_dtype(identity.vocab_size)
    offsets = encoded.offsets.astype(np.int64)
    offsets[1:] += np.cumsum(needs_bos.astype(np.int64) + needs_eos)
    if int(offsets[-1]) == encoded.ids.size:
        return Encoded(ids=encoded.ids.astype(dtype, copy=False), offsets=offsets)
    at_bos = offsets[:-1][needs_bos]
    at_eos = offsets[1:][needs_eos] - 1
    framed = np.empty(int(offsets[-1]), dtype)
    is_bare = np.ones(framed.size, np.bool_)
    is_bare[at_bos] = False
    is_bare[at_eos] = False
    framed[is_bare] = encoded.ids  # casts on the way, without an array of its own
    framed[at_bos] = identity.bos_id or 0
    framed[at_eos] = identity.eos_id or 0
    return Encoded(ids=framed, offsets=offsets)


def _lacks(ids: AnyArray, at: Int64Array, filled: BoolArray, wanted: int | None) -> BoolArray:
    """Return for which documents the id at `at` is not yet the wanted one; none where nothing is wanted."""
    if wanted is None:
        return np.zeros(at.size, np.bool_)
    lacks = np.ones(at.size, np.bool_)
    lacks[filled] = ids[at[filled]] != wanted
    return lacks


def _refuse_overflow(encoded: Encoded, vocab_size: int) -> None:
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


def with_second_bos(ids: AnyArray, offsets: Int64Array, identity: TokenizerIdentity) -> list[int]:
    """Return the documents in which BOS stands twice in a row, which control strings in a text may spell."""
    if not identity.add_bos or identity.bos_id == identity.eos_id:
        return []
    is_bos = ids == identity.bos_id
    at = np.flatnonzero(is_bos[1:] & is_bos[:-1]) + 1
    documents = np.searchsorted(offsets, at[~np.isin(at, offsets)], side="right") - 1
    second: list[int] = np.unique(documents).tolist()
    return second
