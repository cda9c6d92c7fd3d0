"""The ids and the mask of rendered conversations: control ids only where the template wrote them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tokenmill.encode.chat.refusal import Refusal
from tokenmill.encode.chat.render import Rendered
from tokenmill.encode.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy.typing as npt

Ids: TypeAlias = "npt.NDArray[np.uint32]"
Mask: TypeAlias = "npt.NDArray[np.uint8]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A control string, or the ordinary text between two of them."""

    begin: int
    end: int
    id: int | None
    """Of a control string; None for ordinary text."""
    edges: tuple[int, ...]
    """Characters inside the text where what is trained on begins or ends."""
    trained: bool
    """Whether its first character is trained on; it changes at every edge."""


def control_pattern(special_ids: Mapping[str, int]) -> re.Pattern[str] | None:
    """Return what finds control strings: the first, and of those that start together the longest."""
    names = sorted((name for name in special_ids if name), key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, names))) if names else None


def pieces_of(rendered: Rendered, pattern: re.Pattern[str] | None, special_ids: Mapping[str, int]) -> list[Piece]:
    """Cut a text at the control strings that the template wrote; those of the record are ordinary text."""
    bounds = [edge for both in rendered.supervised for edge in both]
    pieces: list[Piece] = []

    def add(begin: int, end: int, id_: int | None) -> None:
        if begin < end:
            inner = tuple(edge for edge in bounds if begin < edge < end)
            if id_ is not None and inner:
                raise Refusal("straddles", f"what is trained on begins or ends inside {rendered.text[begin:end]!r}")
            trained = any(first <= begin < last for first, last in rendered.supervised)
            pieces.append(Piece(begin=begin, end=end, id=id_, edges=inner, trained=trained))

    done = 0
    for first, last in rendered.authored if pattern is not None else ():
        assert pattern is not None
        for match in pattern.finditer(rendered.text, first, last):
            add(done, match.start(), None)
            add(match.start(), match.end(), special_ids[match.group()])
            done = match.end()
    add(done, len(rendered.text), None)
    return pieces


def encode_all(
    rendered: Sequence[Rendered], tokenizer: Tokenizer, pattern: re.Pattern[str] | None
) -> list[tuple[Ids, Mask] | Refusal]:
    """Encode several conversations in one call of the tokenizer, and once more where a token straddles an edge."""
    cut: list[list[Piece] | Refusal] = []
    for one in rendered:
        try:
            cut.append(pieces_of(one, pattern, tokenizer.special_ids))
        except Refusal as error:
            cut.append(error)
    plain = [
        (one.text, piece)
        for one, pieces in zip(rendered, cut, strict=True)
        if not isinstance(pieces, Refusal)
        for piece in pieces
        if piece.id is None
    ]
    texts = iter(_encoded_texts(plain, tokenizer))
    results: list[tuple[Ids, Mask] | Refusal] = []
    for pieces in cut:
        if isinstance(pieces, Refusal):
            results.append(pieces)
            continue
        parts = [_control(piece) if piece.id is not None else next(texts) for piece in pieces]
        refused = next((part for part in parts if isinstance(part, Refusal)), None)
        results.append(refused if refused is not None else _joined(parts))
    return results


def _joined(parts: Sequence[tuple[Ids, Mask] | Refusal]) -> tuple[Ids, Mask]:
    kept = [part for part in parts if not isinstance(part, Refusal)]
    ids = [ids for ids, _ in kept]
    masks = [mask for _, mask in kept]
    return (
        np.concatenate([np.empty(0, np.uint32), *ids]).astype(np.uint32, copy=False),
        np.concatenate([np.empty(0, np.uint8), *masks]),
    )


def _control(piece: Piece) -> tuple[Ids, Mask]:
    assert piece.id is not None
    return np.array([piece.id], np.uint32), np.array([piece.trained], np.uint8)


def _encoded_texts(plain: Sequence[tuple[str, Piece]], tokenizer: Tokenizer) -> list[tuple[Ids, Mask] | Refusal]:
    """Encode ordinary text: each piece as a whole, and what stands before each of its edges."""
    texts = [text[piece.begin : end] for text, piece in plain for end in (*piece.edges, piece.end)]
    ids = _encode(texts, tokenizer)
    done: list[tuple[Ids, Mask] | Refusal] = []
    straddled: list[int] = []
    at = 0
    for index, (_, piece) in enumerate(plain):
        *before, whole = ids[at : at + len(piece.edges) + 1]
        at += len(before) + 1
        if all(np.array_equal(part, whole[: part.size]) for part in before):
            lengths = np.diff([0, *(part.size for part in before), whole.size])
            done.append((whole, _alternating(piece, lengths)))
        else:
            straddled.append(index)
            done.append((whole, np.empty(0, np.uint8)))
    _cut_at_edges(plain, straddled, done, tokenizer)
    return done


def _cut_at_edges(
    plain: Sequence[tuple[str, Piece]],
    straddled: list[int],
    done: list[tuple[Ids, Mask] | Refusal],
    tokenizer: Tokenizer,
) -> None:
    """Encode both sides of an edge on their own where a token would straddle it, as the model meets them.

    A tokenizer that puts a mark before every text would add a blank there; such a conversation is refused.
    """
    texts = []
    for index in straddled:
        text, piece = plain[index]
        bounds = (piece.begin, *piece.edges, piece.end)
        texts += [text[begin:end] for begin, end in pairwise(bounds)]
    ids = _encode(texts, tokenizer)
    at = 0
    for index in straddled:
        text, piece = plain[index]
        sides = ids[at : at + len(piece.edges) + 1]
        at += len(sides)
        joined = np.concatenate(sides)
        whole = done[index]
        assert not isinstance(whole, Refusal)
        if tokenizer.decode(joined) == tokenizer.decode(whole[0]):
            done[index] = (joined, _alternating(piece, np.array([side.size for side in sides])))
        else:
            shown = text[piece.edges[0] - 8 : piece.edges[0] + 8]
            done[index] = Refusal("straddles", f"a token lies across an edge of what is trained on, in {shown!r}")


def _alternating(piece: Piece, lengths: npt.NDArray[np.int64]) -> Mask:
    trained = (np.arange(lengths.size) % 2 == 0) == piece.trained
    return np.repeat(trained, lengths).astype(np.uint8)


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[Ids]:
    if not texts:
        return []
    encoded = tokenizer.encode(texts)
    ids = encoded.ids.astype(np.uint32, copy=False)
    return [ids[begin:end] for begin, end in zip(encoded.offsets[:-1], encoded.offsets[1:], strict=True)]
