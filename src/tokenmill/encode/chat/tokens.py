"""The ids and the mask of rendered conversations: control ids only where the template wrote them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tokenmill.encode.chat.controls import Controls, Ids
from tokenmill.encode.chat.refusal import Refusal
from tokenmill.encode.chat.render import Rendered
from tokenmill.encode.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy.typing as npt

Mask: TypeAlias = "npt.NDArray[np.uint8]"


@dataclass(kw_only=True, slots=True)
class Piece:
    """A control string, or the ordinary text between two of them."""

    text: str
    edges: Sequence[int]
    """Characters inside an ordinary text where what is trained on begins or ends."""
    trained: bool
    """Whether its first character is trained on; it changes at every edge."""
    parts: list[Ids] = field(default_factory=list)
    """The ids, of a text in as many parts as its edges make."""


def pieces_of(rendered: Rendered, controls: Controls) -> list[Piece]:
    """Cut a text at the control strings that the template wrote; those of the record are ordinary text."""
    text = rendered.text
    bounds = [edge for both in rendered.supervised for edge in both]
    pieces: list[Piece] = []

    def add_text(begin: int, end: int) -> None:
        if begin < end:
            edges = [edge - begin for edge in bounds[bisect_right(bounds, begin) : bisect_left(bounds, end)]]
            pieces.append(Piece(text=text[begin:end], edges=edges, trained=bisect_right(bounds, begin) % 2 == 1))

    done = 0
    for control in controls.find(text, rendered.authored):
        add_text(done, control.begin)
        before, shown = bisect_right(bounds, control.at), text[control.at : control.stop]
        if before < len(bounds) and bounds[before] < control.stop:
            raise Refusal("straddles", f"what is trained on begins or ends inside {shown!r}")
        pieces.append(Piece(text=shown, edges=(), trained=before % 2 == 1, parts=[control.ids]))
        done = control.end
    add_text(done, len(text))
    return pieces


def encode_all(
    rendered: Sequence[Rendered], tokenizer: Tokenizer, controls: Controls
) -> list[tuple[Ids, Mask] | Refusal]:
    """Encode several conversations in one call of the tokenizer, and once more where a token straddles an edge."""
    cut: list[list[Piece] | Refusal] = []
    for one in rendered:
        try:
            cut.append(pieces_of(one, controls))
        except Refusal as error:
            cut.append(error)
    texts = [piece for pieces in cut if isinstance(pieces, list) for piece in pieces if not piece.parts]
    _encode_whole(texts, tokenizer)
    _encode_parts([piece for piece in texts if not piece.parts], tokenizer)
    return [pieces if isinstance(pieces, Refusal) else _joined(pieces) for pieces in cut]


def _joined(pieces: list[Piece]) -> tuple[Ids, Mask] | Refusal:
    ids: list[Ids] = [np.empty(0, np.uint32)]
    trained: list[bool] = [False]
    for piece in pieces:
        if not piece.parts:
            shown = piece.text[max(0, piece.edges[0] - 8) : piece.edges[0] + 8]
            return Refusal("straddles", f"a token lies across an edge of what is trained on, in {shown!r}")
        ids += piece.parts
        trained += [(at % 2 == 0) == piece.trained for at in range(len(piece.parts))]
    return np.concatenate(ids), np.repeat(np.array(trained, np.uint8), [part.size for part in ids])


def _encode_whole(pieces: list[Piece], tokenizer: Tokenizer) -> None:
    """Encode texts as a whole, and what stands before each edge; those where a token straddles are left out."""
    texts = [piece.text[:end] for piece in pieces for end in (*piece.edges, len(piece.text))]
    ids = _encode(texts, tokenizer)
    at = 0
    for piece in pieces:
        *before, whole = ids[at : at + len(piece.edges) + 1]
        at += len(before) + 1
        if all(np.array_equal(part, whole[: part.size]) for part in before):
            ends = [0, *(part.size for part in before), whole.size]
            piece.parts = [whole[begin:end] for begin, end in pairwise(ends)]


def _encode_parts(pieces: list[Piece], tokenizer: Tokenizer) -> None:
    """Encode both sides of an edge on their own where a token would straddle it, as the model meets them.

    A tokenizer that puts a mark before every text would add a blank there; such texts are left out.
    """
    texts = [
        text
        for piece in pieces
        for text in (
            piece.text,
            *(piece.text[begin:end] for begin, end in pairwise((0, *piece.edges, len(piece.text)))),
        )
    ]
    ids = _encode(texts, tokenizer)
    at = 0
    for piece in pieces:
        whole, *sides = ids[at : at + len(piece.edges) + 2]
        at += len(sides) + 1
        if tokenizer.decode(np.concatenate(sides)) == tokenizer.decode(whole):
            piece.parts = sides


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[Ids]:
    if not texts:
        return []
    encoded = tokenizer.encode(texts)
    ids = encoded.ids.astype(np.uint32, copy=False)
    return [ids[begin:end] for begin, end in pairwise(encoded.offsets.tolist())]
