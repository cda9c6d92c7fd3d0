"""The reference engines: Hugging Face tokenizers and tiktoken, slower, and right by definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.encode.json_file import JsonFile, refuse_other_ids
from tokenmill.encode.rank_file import RankFile, text_of
from tokenmill.encode.tokenizer import TokenizerIdentity, checked_ids, engine_errors, join, refuse_surrogates
from tokenmill.errors import TokenizerError
from tokenmill.types import Encoded

if TYPE_CHECKING:
    import numpy.typing as npt
    import tiktoken
    import tokenizers

_LAST = "there is no other engine: the file does not fit the text"


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceTokenizer:
    """A `tokenizer.json` run by Hugging Face tokenizers."""

    identity: TokenizerIdentity
    special_ids: Mapping[str, int]
    engine: str
    native: tokenizers.Tokenizer = field(repr=False)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the bare ids of each text as uint32."""
        refuse_surrogates(texts)
        # One text at a time: `encode_batch` starts threads, and some versions then print a warning at every fork.
        with engine_errors(self.engine, f"encode {len(texts)} texts", _LAST):
            return join(
                [
                    np.array(self.native.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
                    for text in texts
                ]
            )

    def decode(self, ids: npt.NDArray[Any]) -> str:
        """Return the text of ids."""
        array = checked_ids(ids, self.identity)
        with engine_errors(self.engine, "decode", _LAST):
            return str(self.native.decode(array.tolist(), skip_special_tokens=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class TiktokenTokenizer:
    """A rank file run by tiktoken."""

    identity: TokenizerIdentity
    special_ids: Mapping[str, int]
    engine: str
    native: tiktoken.Encoding = field(repr=False)
    strings: Mapping[int, bytes] = field(repr=False)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the bare ids of each text as uint32."""
        # tiktoken itself would put U+FFFD in place of a lone surrogate and say nothing.
        refuse_surrogates(texts)
        with engine_errors(self.engine, f"encode {len(texts)} texts", _LAST):
            return join(
                [self.native.encode_to_numpy(text, allowed_special=set(), disallowed_special=()) for text in texts]
            )

    def decode(self, ids: npt.NDArray[Any]) -> str:
        """Return the text of ids."""
        return text_of(checked_ids(ids, self.identity), self.strings)


def open_reference_json(file: JsonFile, identity: TokenizerIdentity) -> HuggingFaceTokenizer:
    """Give a `tokenizer.json` to Hugging Face tokenizers."""
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError(
            f"tokenizers: must be installed, it is the reference for {file.vocabulary.where!r}, got {error}; "
            "pip install tokenizers"
        ) from error
    engine = f"tokenizers {tokenizers.__version__}"
    with engine_errors(engine, f"load {file.vocabulary.where!r}", "is it a file of this kind, and whole?"):
        native = tokenizers.Tokenizer.from_str(file.text)
        native.encode_special_tokens = True
        # What the file says of cutting and padding is for inference; here no token may be lost or invented.
        native.no_truncation()
        native.no_padding()
        given = {token.content: id_ for id_, token in native.get_added_tokens_decoder().items()}
    refuse_other_ids(file.vocabulary.where, engine, file.added_ids, given)
    return HuggingFaceTokenizer(
        identity=identity, special_ids=file.vocabulary.special_ids, engine=engine, native=native
    )


def open_reference_ranks(file: RankFile, identity: TokenizerIdentity) -> TiktokenTokenizer:
    """Give a rank file to tiktoken."""
    try:
        import tiktoken
    except ImportError as error:
        raise TokenizerError(
            f"tiktoken: must be installed, it is the reference for {file.vocabulary.where!r}, got {error}; "
            "pip install 'tokenmill[tiktoken]'"
        ) from error
    engine = f"tiktoken {tiktoken.__version__}"
    with engine_errors(engine, f"load {file.vocabulary.where!r}", "is it a file of this kind, and whole?"):
        native = tiktoken.Encoding(
            file.path.name,
            pat_str=file.encoding.pattern,
            mergeable_ranks=file.ranks,
            special_tokens=dict(file.encoding.special_ids),
        )
    return TiktokenTokenizer(
        identity=identity,
        special_ids=file.vocabulary.special_ids,
        engine=engine,
        native=native,
        strings=file.strings(),
    )
