"""The fast engine: fastokens, for `tokenizer.json` and rank files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import filterfalse
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.encode.json_file import JsonFile, refuse_other_ids
from tokenmill.encode.rank_file import RankFile, text_of
from tokenmill.encode.tokenizer import (
    Tokenizer,
    TokenizerIdentity,
    checked_ids,
    engine_errors,
    refuse_surrogates,
)
from tokenmill.errors import TokenizerError
from tokenmill.types import Encoded

if TYPE_CHECKING:
    import numpy.typing as npt

# fastokens 0.3.5 splits texts that hold these unlike the references: the first is white space to its PCRE2 and
# to nobody else, the second is an 's' to the references where a pattern ignores case, as o200k does after an
# apostrophe. The first was found by comparing every character below U+323B0 under the patterns of nine known
# tokenizers, the second by random texts; there may be more, which is what `agreement` is for. Such texts are left
# to the reference: to look for them costs next to nothing, and else one of them would make a whole job slow.
DIVERGENT = ("\u180e", "\u017f")

_REFERENCE = "take the slower reference: engine='tokenizers', or 'tiktoken' for rank files"


@dataclass(frozen=True, kw_only=True, slots=True)
class FastTokenizer:
    """A tokenizer run by fastokens; texts that it is known to split differently go to the reference."""

    identity: TokenizerIdentity
    special_ids: Mapping[str, int]
    engine: str
    native: Any = field(repr=False)
    """`fastokens.Tokenizer`, which ships no types."""
    reference: Callable[[], Tokenizer] = field(repr=False)
    """Opens the reference when it is first needed, and keeps it."""
    to_text: Callable[[npt.NDArray[Any]], str] = field(repr=False)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the bare ids of each text as uint32."""
        if not _some_divergent(texts):
            return self._encode(list(texts))
        odd = [index for index, text in enumerate(texts) if _is_divergent(text)]
        refuse_surrogates(texts)
        left = list(texts)
        for index in odd:
            left[index] = ""
        return _spliced(self._encode(left), odd, self.reference().encode([texts[index] for index in odd]))

    def encode_framed(self, texts: Sequence[str]) -> Encoded | None:
        """Return the ids of each text between what the identity adds, as `encode_framed` of `frame` asks.

        None if one of the texts is left to the reference.
        """
        return None if _some_divergent(texts) else self._encode(list(texts), framed=True)

    def decode(self, ids: npt.NDArray[Any]) -> str:
        """Return the text of ids."""
        return self.to_text(checked_ids(ids, self.identity))

    def _encode(self, texts: list[str], *, framed: bool = False) -> Encoded:
        try:
            with engine_errors(self.engine, f"encode {len(texts)} texts", _REFERENCE):
                ids, offsets = self.native.encode_batch_flat(
                    texts, add_special_tokens=framed, split_special_tokens=True
                )
        except TokenizerError:
            refuse_surrogates(texts)
            raise
        return Encoded(
            ids=np.frombuffer(ids, dtype="<u4"),
            offsets=np.frombuffer(offsets, dtype="<u8").astype(np.int64),
        )


def _some_divergent(texts: Sequence[str]) -> bool:
    return any(map(_is_divergent, filterfalse(str.isascii, texts)))


def _is_divergent(text: str) -> bool:
    return any(character in text for character in DIVERGENT)


def open_fast_json(
    file: JsonFile, identity: TokenizerIdentity, open_reference: Callable[[], Tokenizer]
) -> FastTokenizer:
    """Give a `tokenizer.json` to fastokens; what it does not support raises `TokenizerError`."""
    engine = fast_engine()
    native_type = _native_type()
    with engine_errors(engine, f"load {file.vocabulary.where!r}", _REFERENCE):
        native = native_type.from_json_str(file.text)
        # What the file says of cutting and padding is for inference; here no token may be lost or invented.
        native.no_truncation()
        native.no_padding()
        native.post_processor = _frame_template(identity)
        given = {token["content"]: token["id"] for token in native.added_tokens()}
    refuse_other_ids(file.vocabulary.where, engine, file.added_ids, given)
    reference = _kept(open_reference, identity)
    return FastTokenizer(
        identity=identity,
        special_ids=file.vocabulary.special_ids,
        engine=engine,
        native=native,
        reference=reference,
        # Decoding is for people and may be slow; fastokens joins tokens otherwise where a file has no decoder.
        to_text=lambda ids: reference().decode(ids),
    )


def open_fast_ranks(
    file: RankFile, identity: TokenizerIdentity, open_reference: Callable[[], Tokenizer]
) -> FastTokenizer:
    """Give a rank file to fastokens; what it does not support (a gap in the ranks) raises `TokenizerError`."""
    engine = fast_engine()
    native_type = _native_type()
    special_ids = dict(file.encoding.special_ids)
    pattern = {"encoding": file.encoding.preset} if file.encoding.preset else {"pattern": file.encoding.pattern}
    strings = cache(file.strings)  # tens of MB that only decoding needs
    with engine_errors(engine, f"load {file.vocabulary.where!r}", _REFERENCE):
        native = native_type.from_tiktoken(str(file.path), special_tokens=special_ids, **pattern)
        native.post_processor = _frame_template(identity)
    return FastTokenizer(
        identity=identity,
        special_ids=special_ids,
        engine=engine,
        native=native,
        reference=_kept(open_reference, identity),
        to_text=lambda ids: text_of(ids, strings()),
    )


def fast_engine() -> str:
    """Return the name and version of the engine, whether or not it can be used."""
    try:
        return f"fastokens {version('fastokens')}"
    except PackageNotFoundError:
        return "fastokens (not installed)"


def _frame_template(identity: TokenizerIdentity) -> str:
    """Return the post-processor that places what the identity adds, instead of what the file says."""
    ids = {
        **({"bos": identity.bos_id} if identity.add_bos else {}),
        **({"eos": identity.eos_id} if identity.add_eos else {}),
    }
    parts = {name: [{"SpecialToken": {"id": name, "type_id": 0}}] for name in ids}
    single = [*parts.get("bos", []), {"Sequence": {"id": "A", "type_id": 0}}, *parts.get("eos", [])]
    return json.dumps(
        {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]} for name, token in ids.items()},
        }
    )


def _native_type() -> Any:  # noqa: ANN401 - fastokens ships no types
    try:
        from fastokens import Tokenizer as Native
    except ImportError as error:
        raise TokenizerError(
            f"fastokens: must be installed for engine='fastokens', got {error}; pip install fastokens, "
            f"or {_REFERENCE}"
        ) from error
    return Native


def _kept(open_reference: Callable[[], Tokenizer], identity: TokenizerIdentity) -> Callable[[], Tokenizer]:
    """Return a function that opens the reference once, and only if it is still the same tokenizer."""

    @cache
    def opened() -> Tokenizer:
        reference = open_reference()
        if reference.identity != identity:
            raise TokenizerError(
                f"{reference.engine}: the file must stay as it was when the tokenizer was opened, "
                f"got content {reference.identity.content} after {identity.content}; start the job again"
            )
        return reference

    return opened


def _spliced(most: Encoded, places: list[int], few: Encoded) -> Encoded:
    """Put the documents of `few` into `most` at `places`, where `most` holds empty ones."""
    lengths = np.diff(most.offsets)
    lengths[places] = np.diff(few.offsets)
    pieces: list[npt.NDArray[Any]] = []
    start = 0
    for index, place in enumerate(places):
        pieces.append(most.ids[start : most.offsets[place]])
        pieces.append(few.ids[few.offsets[index] : few.offsets[index + 1]])
        start = int(most.offsets[place])
    pieces.append(most.ids[start:])
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Encoded(ids=np.concatenate(pieces), offsets=offsets)
