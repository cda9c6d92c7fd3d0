"""Items of many records end to end: their tokens, which of them are trained, and whose they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenmill.encode.frame import place
from tokenmill.encode.recipe.extract import PlainItems
from tokenmill.encode.tokenizer import TokenizerIdentity
from tokenmill.types import BoolArray, Encoded, Int64Array, Uint8Array, Uint32Array, UnsignedArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Ragged:
    """Items end to end."""

    ids: UnsignedArray
    mask: Uint8Array
    """1 where a token is trained."""
    offsets: Int64Array
    """Where each item starts, and the end of the last."""
    owners: Int64Array
    """Which record each item belongs to; never less than the item before it."""

    @classmethod
    def empty(cls) -> Ragged:
        """Return no items."""
        no_ids, no_items = np.empty(0, np.uint32), np.zeros(1, np.int64)
        return cls(ids=no_ids, mask=np.empty(0, np.uint8), offsets=no_items, owners=no_items[:0])

    @property
    def lengths(self) -> Int64Array:
        """Tokens of each item."""
        return np.diff(self.offsets)

    @property
    def trained(self) -> BoolArray:
        """Say of each item whether any of its tokens is trained."""
        some = np.zeros(self.owners.size, np.bool_)
        filled = np.flatnonzero(self.lengths)  # reduceat takes an empty run for its first neighbour
        if filled.size:
            some[filled] = np.maximum.reduceat(self.mask, self.offsets[filled]) > 0
        return some

    @property
    def positions(self) -> Uint32Array:
        """Of each token, how many of its item stand before it."""
        return (np.arange(self.ids.size) - np.repeat(self.offsets[:-1], self.lengths)).astype("<u4")

    def taken(self, items: Int64Array) -> Ragged:
        """Return these items, in this order."""
        if items.size == self.owners.size and np.array_equal(items, np.arange(items.size)):
            return self
        return self.sliced(items, self.offsets[items], self.offsets[items + 1])

    def sliced(self, items: Int64Array, starts: Int64Array, ends: Int64Array) -> Ragged:
        """Return a run of tokens of each of these items."""
        offsets = offsets_of(ends - starts)
        index = np.repeat(starts - offsets[:-1], ends - starts) + np.arange(int(offsets[-1]))
        return Ragged(ids=self.ids[index], mask=self.mask[index], offsets=offsets, owners=self.owners[items])

    def merged(self, other: Ragged) -> Ragged:
        """Bring the items of two into the order of their records."""
        if not other.owners.size:
            return self
        if not self.owners.size:
            return other
        both = Ragged(
            ids=np.concatenate([self.ids, other.ids]),
            mask=np.concatenate([self.mask, other.mask]),
            offsets=np.concatenate([self.offsets, other.offsets[1:] + self.offsets[-1]]),
            owners=np.concatenate([self.owners, other.owners]),
        )
        return both.taken(np.argsort(both.owners, kind="stable"))

    def shortened(self, most: int, *, keep_end: bool, bos_id: int | None) -> Ragged:
        """Cut every item to `most` tokens; one that began with BOS still does."""
        long = self.lengths > most
        if not long.any():
            return self
        starts, ends = self.offsets[:-1], self.offsets[1:]
        if not keep_end:
            return self.sliced(np.arange(long.size), starts, np.minimum(ends, starts + most))
        cut = self.sliced(np.arange(long.size), np.maximum(starts, ends - most), ends)
        if bos_id is not None:
            began = long & (self.ids[np.minimum(starts, self.ids.size - 1)] == bos_id)
            cut.ids[cut.offsets[:-1][began]] = bos_id
            cut.mask[cut.offsets[:-1][began]] = 0
        return cut

    def trained_run(self) -> tuple[Int64Array, Int64Array]:
        """Return of each item where its first trained token is and where its last ends; each must have one."""
        trained = np.flatnonzero(self.mask)
        first = trained[np.searchsorted(trained, self.offsets[:-1])]
        last = trained[np.searchsorted(trained, self.offsets[1:]) - 1]
        return first, last + 1

    def same_as_first(self) -> BoolArray:
        """Say of each item whether it is, token for token, the first item of its record."""
        _, first, inverse = np.unique(self.owners, return_index=True, return_inverse=True)
        model = first[inverse.reshape(-1)]
        same: BoolArray = np.equal(self.lengths, self.lengths[model])
        own = np.flatnonzero(same)
        left, right = self.taken(own), self.taken(model[own])
        differs = np.zeros(left.ids.size + 1, np.int64)
        np.cumsum(left.ids != right.ids, out=differs[1:])
        same[own] = np.diff(differs[left.offsets]) == 0
        return same


def offsets_of(lengths: Int64Array) -> Int64Array:
    """Return where items of these lengths start, and the end of the last."""
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def lay_out(encoded: Encoded, items: PlainItems, identity: TokenizerIdentity, *, close: bool) -> Ragged:
    """Lay the texts of every item end to end, BOS before each that begins anew and EOS where one ends.

    An EOS shares the fate of the text before it; a BOS is never trained. No token straddles two texts, as each was
    encoded on its own. What is not to `close` gets no EOS: something else goes on behind it.
    """
    last = np.cumsum(np.array(items.counts, np.int64)) - 1
    anew = np.array(items.anew, np.bool_)
    ends = np.zeros(anew.size, np.bool_)
    ends[:-1] = anew[1:]
    ends[last] = True
    needs_bos = anew & identity.add_bos
    placed = place(encoded, needs_bos, ends & (identity.add_eos and close), identity)
    mask = np.repeat(np.array(items.trained, np.uint8), np.diff(placed.offsets))
    mask[placed.offsets[:-1][needs_bos]] = 0
    return Ragged(
        ids=placed.ids,
        mask=mask,
        offsets=np.concatenate([placed.offsets[:1], placed.offsets[last + 1]]),
        owners=np.array(items.owners, np.int64),
    )
