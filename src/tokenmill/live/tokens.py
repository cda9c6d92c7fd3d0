"""A window as tokens: read, tokenized, put in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from tokenmill.compiled import kernel
from tokenmill.documents import RULES, read_unit
from tokenmill.encode.frame import frame, token_dtype
from tokenmill.errors import DocumentError
from tokenmill.live.windows import Window, record_name
from tokenmill.plan.permute import permute_all
from tokenmill.types import Encoded, Int64Array, UnsignedArray

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
    return Tokenized(
        window=window,
        epoch=epoch,
        encoded=in_order([no_documents(tokenizer), *(part.encoded for part in parts)], order),
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
                parts.append(_Part(frame(tokenizer.encode(texts), tokenizer.identity), places))
            documents += len(batch.texts)
    except DocumentError as error:
        _check_sizes(window)
        if options.on_error == "stop":
            raise _placed(error, window) from None
        skipped[:] = [Skipped(reason=BROKEN, place=str(window))]
        return []
    return parts


def no_documents(tokenizer: Tokenizer) -> Encoded:
    """Return no document at all, with ids as the tokenizer's are kept."""
    return Encoded(ids=np.empty(0, token_dtype(tokenizer.identity.vocab_size)), offsets=np.zeros(1, np.int64))


def in_order(parts: Sequence[Encoded], order: Int64Array) -> Encoded:
    """Put documents in an order; those of all parts are counted through, from 0."""
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    offsets = np.zeros(order.size + 1, np.int64)
    np.cumsum(lengths[order], out=offsets[1:])
    targets = np.empty(order.size, np.int64)
    targets[order] = offsets[:-1]
    ids = np.empty(int(offsets[-1]), parts[0].ids.dtype)
    first = 0
    for part in parts:
        source = part.ids.view()
        source.flags.writeable = False  # as that of some engines is: one kernel for all
        _copy_documents(source, part.offsets, targets[first : first + part.num_documents], ids)
        first += part.num_documents
    return Encoded(ids=ids, offsets=offsets)


@kernel
def _copy_documents(ids: UnsignedArray, offsets: Int64Array, targets: Int64Array, copied: UnsignedArray) -> None:
    """Copy each document of `ids` to its place in `copied`."""
    for document in range(targets.size):
        source = ids[offsets[document] : offsets[document + 1]]
        target = copied[targets[document] : targets[document] + source.size]
        for k in range(source.size):
            target[k] = source[k]


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
