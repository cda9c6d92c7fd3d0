"""What a tiktoken rank file says, and what it leaves to be known: the pattern and the control strings."""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.encode.tokenizer import content_digest
from tokenmill.encode.vocabulary import Vocabulary
from tokenmill.errors import TokenizerError, nearest

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEncoding:
    """What a rank file does not hold."""

    pattern: str
    special_ids: Mapping[str, int]
    sha256: str
    """Of the rank file that OpenAI publishes."""
    preset: str | None = None
    """What fastokens calls the pattern: its own matcher for it is twice as fast as the regular expression."""


_EOT = "<|endoftext|>"
_R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_R50K_SHA = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
_P50K_SHA = "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069"
_O200K_SHA = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
_O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_HARMONY_RESERVED = (200000, 200001, 200004, 200009, 200010, 200011, *range(200013, 201088))

# As `tiktoken_ext.openai_public` defines them; the first whose hash or name fits is taken.
ENCODINGS: dict[str, RankEncoding] = {
    "r50k_base": RankEncoding(pattern=_R50K, special_ids={_EOT: 50256}, sha256=_R50K_SHA),
    "gpt2": RankEncoding(pattern=_R50K, special_ids={_EOT: 50256}, sha256=_R50K_SHA),
    "p50k_base": RankEncoding(pattern=_R50K, special_ids={_EOT: 50256}, sha256=_P50K_SHA),
    "p50k_edit": RankEncoding(
        pattern=_R50K,
        special_ids={_EOT: 50256, "<|fim_prefix|>": 50281, "<|fim_middle|>": 50282, "<|fim_suffix|>": 50283},
        sha256=_P50K_SHA,
    ),
    "cl100k_base": RankEncoding(
        pattern=r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        special_ids={
            _EOT: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
        sha256="223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        preset="cl100k_base",
    ),
    "o200k_base": RankEncoding(
        pattern=_O200K,
        special_ids={_EOT: 199999, "<|endofprompt|>": 200018},
        sha256=_O200K_SHA,
        preset="o200k_base",
    ),
    "o200k_harmony": RankEncoding(
        pattern=_O200K,
        special_ids={f"<|reserved_{id_}|>": id_ for id_ in _HARMONY_RESERVED}
        | {
            "<|startoftext|>": 199998,
            _EOT: 199999,
            "<|return|>": 200002,
            "<|constrain|>": 200003,
            "<|channel|>": 200005,
            "<|start|>": 200006,
            "<|end|>": 200007,
            "<|message|>": 200008,
            "<|call|>": 200012,
            "<|endofprompt|>": 200018,
        },
        sha256=_O200K_SHA,
        preset="o200k_base",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """A rank file, read but not yet given to an engine."""

    path: Path
    encoding: RankEncoding
    ranks: dict[bytes, int]
    vocabulary: Vocabulary

    def strings(self) -> dict[int, bytes]:
        """Return what each id stands for; ids that the encoding leaves unused are absent."""
        strings = {rank: token for token, rank in self.ranks.items()}
        strings.update({id_: name.encode() for name, id_ in self.encoding.special_ids.items()})
        return strings


def read_rank_file(path: Path, name: str | None, where: str) -> RankFile:
    """Read a rank file; `name` is its encoding, which is else known from its hash or its file name."""
    data = path.read_bytes()
    encoding = ENCODINGS[_recognise(data, path, name)]
    ranks = _parse(data, path)
    taken = set(encoding.special_ids.values()) & set(ranks.values())
    if taken:
        raise TokenizerError(
            f"{path}: its ranks must leave the control ids of the encoding free, got ranks {sorted(taken)}; "
            f"say which encoding it is: tiktoken:{path}?encoding=cl100k_base"
        )
    return RankFile(
        path=path,
        encoding=encoding,
        ranks=ranks,
        vocabulary=Vocabulary(
            where=where,
            kind="tiktoken",
            content=content_digest(data, b"\0", encoding.pattern.encode()),
            vocab_size=1 + max(*ranks.values(), *encoding.special_ids.values()),
            ids=encoding.special_ids,
            special_ids=encoding.special_ids,
            bos=None,
            eos=_EOT,
            pad=None,
        ),
    )


def text_of(ids: npt.NDArray[Any], strings: Mapping[int, bytes]) -> str:
    """Return the text of ids; one that the encoding leaves unused is U+FFFD."""
    return b"".join([strings.get(id_, b"\xef\xbf\xbd") for id_ in ids.tolist()]).decode(errors="replace")


def _recognise(data: bytes, path: Path, name: str | None) -> str:
    if name is not None and name not in ENCODINGS:
        raise TokenizerError(
            f"tiktoken:{path}: its encoding must be known, got {name!r}; {nearest(name, ENCODINGS)}"
        )
    sha256 = hashlib.sha256(data).hexdigest()
    same = [known for known, encoding in ENCODINGS.items() if encoding.sha256 == sha256]
    if name is not None:
        if same and name not in same:
            raise TokenizerError(
                f"tiktoken:{path}: its encoding must be {' or '.join(same)}, as its bytes say, got {name!r}; "
                "leave ?encoding= out"
            )
        return name
    if same:
        return same[0]
    for known in ENCODINGS:
        if path.name.removesuffix(".tiktoken") == known:
            return known
    raise TokenizerError(
        f"tiktoken:{path}: a rank file holds no pattern, and neither its hash nor its name is that of a known "
        f"encoding, got {path.name!r}; say which it is: tiktoken:{path}?encoding=cl100k_base "
        f"(or {', '.join(known for known in ENCODINGS if known != 'cl100k_base')})"
    )


@lru_cache(maxsize=1)  # a tokenizer and its reference read the same file; parsing o200k takes a third of a second
def _parse(data: bytes, path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[binascii.a2b_base64(token, strict_mode=True)] = int(rank)
        except ValueError as error:  # binascii.Error is one
            raise TokenizerError(
                f"{path}: line {number} must be 'base64 rank', got {line[:40]!r}; is it a rank file, and whole?"
            ) from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or min(ranks.values()) < 0 or len(set(ranks.values())) != len(ranks):
        raise TokenizerError(
            f"{path}: ranks must be unique, not negative, and cover every single byte, "
            f"got {len(ranks)} tokens without bytes {missing[:4]}; is the download whole?"
        )
    return ranks
