"""The built-in tokenizer: one id a byte of UTF-8, and BOS, EOS, PAD above them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.encode.tokenizer import TokenizerIdentity, checked_ids, content_digest, refuse_surrogates
from tokenmill.encode.vocabulary import Vocabulary
from tokenmill.types import Encoded

if TYPE_CHECKING:
    import numpy.typing as npt

BYTES_SPECIAL_IDS: Mapping[str, int] = MappingProxyType({"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258})


def bytes_vocabulary() -> Vocabulary:
    """Return the vocabulary of the built-in tokenizer: 259 ids."""
    return Vocabulary(
        where="bytes",
        kind="bytes",
        content=content_digest(b"bytes-v1"),
        vocab_size=259,
        ids=BYTES_SPECIAL_IDS,
        special_ids=BYTES_SPECIAL_IDS,
        bos="<|bos|>",
        eos="<|eos|>",
        pad="<|pad|>",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteTokenizer:
    """Ids 0 to 255 are bytes; every text is encodable, nothing is unknown."""

    identity: TokenizerIdentity
    engine: str = "bytes"
    special_ids: Mapping[str, int] = field(default_factory=lambda: BYTES_SPECIAL_IDS)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the UTF-8 bytes of each text, as uint8 ids."""
        try:
            encoded = [text.encode() for text in texts]
        except UnicodeEncodeError:
            refuse_surrogates(texts)
            raise
        offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)), out=offsets[1:])
        return Encoded(ids=np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets=offsets)

    def decode(self, ids: npt.NDArray[Any]) -> str:
        """Return the text of the bytes, control ids as their strings."""
        array = checked_ids(ids, self.identity)
        if not array.size or int(array.max()) < 256:
            return array.astype(np.uint8).tobytes().decode(errors="replace")
        strings = {id_: name for name, id_ in self.special_ids.items()}
        # Cut at the control ids, so that one inside a character leaves U+FFFD on both sides of it.
        cuts = np.flatnonzero(array >= 256)
        pieces: list[str] = []
        start = 0
        for cut in cuts.tolist():
            pieces.append(array[start:cut].astype(np.uint8).tobytes().decode(errors="replace"))
            pieces.append(strings[int(array[cut])])
            start = cut + 1
        pieces.append(array[start:].astype(np.uint8).tobytes().decode(errors="replace"))
        return "".join(pieces)
