"""A window as tokens: read, tokenized, put in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from tokenmill.documents import RULES, read_unit
from tokenmill.encode.frame import Needs, needs, placed, refuse_overflow
from tokenmill.errors import DocumentError
from tokenmill.live.windows import Window, record_name
from tokenmill.plan.permute import permute_all
from tokenmill.types import Encoded, Int64Array

if TYPE_CHECKING:
    from tokenmill.encode.tokenizer import Tokenizer
    from tokenmill.live.source import LiveOptions

CHECK_DIGITS = 8
BROKEN = "broken"
"""Why a window is left out, beside the reasons of records."""
Beat = Callable[[], None]
"""Called whenever some work is done: it shows that a thread lives, and ends work that nobody wants any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """Something that was left out."""

    reason: str
    place: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokenized:
    """The documents of a window as tokens, in the order of an epoch."""

    window: Window
    epoch: int
    encoded: Encoded
    places: Int64Array
    """(piece, line) of each document."""
    skipped: tuple[Skipped, ...]

    @cached_property
    def check(self) -> str:
        """Digest of the tokens: a state has it, so that other text is not taken for that of a window."""
        return xxhash.xxh3_64_hexdigest(self.encoded.ids.data)[:CHECK_DIGITS]


class _Part(NamedTuple):
    """Some documents of a window, in the order of the file."""

    encoded: Encoded
    needs: Needs
    places: Int64Array


def tokenize_window(
    window: Window, epoch: int, tokenizer: Tokenizer, options: LiveOptions, beat: Beat = lambda: None
) -> Tokenized:
    """Read the documents of a window, tokenize them and put them in order; how they are packed does not matter.

    A batch is tokenized while it is in the caches of the core that has read it, and its texts are let go: tokens
    are put in order, not texts.
    """
    skipped: list[Skipped] = []
    parts = _parts(window, tokenizer, options, skipped, beat)
    places = np.concatenate([np.empty((0, 2), np.int64), *(part.places for part in parts)])
    order = np.arange(len(places))
    if options.shuffle and order.size:
        order = permute_all(order, order.size, window.key(options.seed, epoch, "documents"))
    encoded = placed([part.encoded for part in parts], [part.needs for part in parts], order, tokenizer.identity)
    return Tokenized(
        window=window,
        epoch=epoch,
        encoded=encoded,
        places=places[order],
        skipped=tuple(skipped),
    )


def _parts(
    window: Window, tokenizer: Tokenizer, options: LiveOptions, skipped: list[Skipped], beat: Beat
) -> list[_Part]:
    """Read and tokenize the documents of a window.

    A file that is not there, or not as large as it was, ends the run whatever `on_error` says: with other files the
    rest of the run would not be the one that its state stands for.
    """
    _check_sizes(window)
    parts: list[_Part] = []
    documents = bad = 0
    try:
        for batch in read_unit(window.unit, options.reading):
            beat()
            for record in batch.bad:
                where = record_name(window.unit.pieces[batch.piece], record.line)
                if options.on_error == "stop":
                    raise DocumentError(
                        f"{where}: {RULES[record.reason]}, got {record.detail}; mend it, or say on_error='skip'"
                    )
                if window.holds(bad):  # so that each is counted by one of the parts
                    skipped.append(Skipped(reason=record.reason, place=where))
                bad += 1
            places = np.empty((len(batch.texts), 2), np.int64)
            places[:, 0], places[:, 1] = batch.piece, batch.lines
            texts = batch.texts
            if not window.holds_all:
                held = [number for number in range(len(texts)) if window.holds(documents + number)]
                texts, places = [texts[number] for number in held], places[held]
            if texts:
                parts.append(_encode(texts, places, tokenizer))
            documents += len(batch.texts)
    except DocumentError as error:
        _check_sizes(window)
        if options.on_error == "stop":
            raise _placed(error, window) from None
        skipped[:] = [Skipped(reason=BROKEN, place=str(window))]
        return []
    return parts


def _encode(texts: Sequence[str], places: Int64Array, tokenizer: Tokenizer) -> _Part:
    encoded = tokenizer.encode(texts)
    if encoded.ids.dtype != np.uint32:
        refuse_overflow(encoded, tokenizer.identity.vocab_size)  # before an id is cut to fit
    ids = np.ascontiguousarray(encoded.ids, np.uint32)
    return _Part(Encoded(ids=ids, offsets=encoded.offsets), needs(encoded, tokenizer.identity), places)


def _check_sizes(window: Window) -> None:
    for file in {piece.file.path: piece.file for piece in window.unit.pieces}.values():
        try:
            size = os.stat(file.path).st_size
        except OSError as error:
            raise DocumentError(
                f"{file.path}: must stay readable while it is trained on, got {error.strerror}; put it back"
            ) from None
        if size != file.bytes:
            raise DocumentError(
                f"{file.path}: must keep its {file.bytes} bytes while it is trained on, got {size}; "
                "let nothing write to it, and put it back as it was"
            )


def _placed(error: DocumentError, window: Window) -> DocumentError:
    """Say which part of a file was being read, where the error names the file alone."""
    for path in {piece.file.path for piece in window.unit.pieces}:
        if str(error).startswith(f"{path}: "):
            return DocumentError(f"{window}{str(error).removeprefix(path)}")
    return error
