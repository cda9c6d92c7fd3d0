"""The files that define a tokenizer: a `tokenizer.json` and what stands beside it, or a tiktoken rank file."""

from __future__ import annotations

import binascii
import hashlib
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.encode.tokenizer import BOS_NAMES, EOS_NAMES, PAD_NAMES, Vocabulary, content_digest, well_known
from tokenmill.errors import TokenizerError, TokenmillError, nearest
from tokenmill.types import AnyArray

CONFIG = "tokenizer_config.json"
SIBLINGS = (CONFIG, "special_tokens_map.json")
"""Beside a `tokenizer.json`, in order of authority."""
_TIKTOKEN = "tiktoken:"


def kind_of(spec: str) -> str:
    """Return the kind of tokenizer that a spec names, without opening anything."""
    if spec == "bytes":
        return "bytes"
    return "tiktoken" if spec.startswith(_TIKTOKEN) else "tokenizer.json"


def read_tokenizer_file(spec: str) -> JsonFile | RankFile:
    """Read the file that a spec names; `bytes` has none."""
    if kind_of(spec) == "tokenizer.json":
        return read_json_file(_json_path(spec), spec)
    name, mark, encoding = spec.removeprefix(_TIKTOKEN).partition("?encoding=")
    path = Path(name)
    if not path.is_file():
        raise TokenizerError(
            f"tokenizer {spec!r}: must name a rank file, got {name!r}, which is no file; "
            "write tiktoken:<path of the .tiktoken file>"
        )
    return read_rank_file(path, encoding if mark else None, spec)


def _json_path(spec: str) -> Path:
    path = Path(spec)
    if path.suffix == ".tiktoken":
        raise TokenizerError(
            f"tokenizer {spec!r}: a rank file must be named as one, got a bare path; write 'tiktoken:{spec}'"
        )
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            names = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
            raise TokenizerError(
                f"tokenizer {spec!r}: the folder must hold a tokenizer.json, got {names}; save it with "
                "tokenizer.save_pretrained(folder) of a fast Hugging Face tokenizer"
            )
        return path / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"tokenizer {spec!r}: must be 'bytes', a tokenizer.json, a folder holding one, or "
            "'tiktoken:<rank file>', got a path that does not exist; nothing is downloaded: "
            "save the tokenizer to a folder first"
        )
    return path


# A `tokenizer.json`.


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonFile:
    """A `tokenizer.json`, read but not yet given to an engine."""

    path: Path
    text: str
    vocabulary: Vocabulary
    added_ids: Mapping[str, int]
    """All added tokens, those that are no control strings as well: the engines must give them these ids."""
    unknown: str | None
    """What the model gives for text that it has no token for, if it has such a token."""


def read_json_file(path: Path, where: str) -> JsonFile:
    """Read a `tokenizer.json`; whatever would make its ids ambiguous raises `TokenizerError`."""
    data = path.read_bytes()
    value = read_object(data, path)
    model = value.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list) or not model["vocab"]:
        raise TokenizerError(
            f"{path}: must hold a model with a vocabulary, got keys {sorted(value)}; "
            "give the tokenizer.json that Hugging Face tokenizers writes"
        )
    if model.get("dropout"):
        raise TokenizerError(
            f"{path}: model.dropout must be null, got {model['dropout']}; "
            "with it the same text gets other ids each time: set it to null in a copy of the file"
        )
    vocab = _model_ids(model["vocab"])
    added_ids, special_ids = _added_ids(value, path)
    named = _siblings(path)
    return JsonFile(
        path=path,
        text=data.decode(),
        vocabulary=Vocabulary(
            where=where,
            kind="tokenizer.json",
            content=content_digest(data),
            vocab_size=1 + max(chain(vocab.values(), added_ids.values())),
            ids=ChainMap(added_ids, vocab),
            special_ids=special_ids,
            bos=named["bos_token"] if "bos_token" in named else well_known(BOS_NAMES, special_ids),
            eos=named["eos_token"] if "eos_token" in named else well_known(EOS_NAMES, special_ids),
            pad=named["pad_token"] if "pad_token" in named else well_known(PAD_NAMES, special_ids),
        ),
        added_ids=added_ids,
        unknown=_unknown(model),
    )


def refuse_other_ids(path: str, engine: str, file_ids: Mapping[str, int], engine_ids: Mapping[str, int]) -> None:
    """Raise `TokenizerError` if an engine gives an added token another id than the file says.

    Hugging Face tokenizers numbers added tokens itself where the ids of a file leave a gap, and only logs it.
    """
    for name, id_ in file_ids.items():
        if engine_ids.get(name) != id_:
            raise TokenizerError(
                f"tokenizer {path!r}: added token {name!r} has id {id_} in the file, "
                f"got {engine_ids.get(name)} from {engine}; "
                "number the added tokens of the file without gaps and as its vocabulary has them"
            )


def read_object(data: bytes, path: Path, refusal: type[TokenmillError] = TokenizerError) -> dict[str, Any]:
    """Return the JSON object that a file holds."""
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise refusal(f"{path}: must be JSON, got {error}; is the download whole?") from error
    if not isinstance(value, dict):
        raise refusal(f"{path}: must be a JSON object, got {type(value).__name__}; is it the right file?")
    return value


def _model_ids(vocab: dict[str, int] | list[list[Any]]) -> dict[str, int]:
    if isinstance(vocab, dict):
        return vocab
    # A Unigram model lists [piece, score]; the place in the list is the id.
    return {str(entry[0]): index for index, entry in enumerate(vocab)}


def _added_ids(value: dict[str, Any], path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ids of all added tokens, and of those that are control strings."""
    added: dict[str, int] = {}
    special: dict[str, int] = {}
    for token in value.get("added_tokens") or []:
        if not isinstance(token, dict) or type(token.get("id")) is not int or type(token.get("content")) is not str:
            raise TokenizerError(
                f"{path}: an added token must have an 'id' and a 'content', got {token!r}; correct the file"
            )
        added[token["content"]] = token["id"]
        if token.get("special"):
            special[token["content"]] = token["id"]
    return added, special


def _unknown(model: dict[str, Any]) -> str | None:
    if isinstance(model.get("unk_id"), int):
        return str(model["vocab"][model["unk_id"]][0])
    token = model.get("unk_token")
    return token if isinstance(token, str) else None


def _siblings(path: Path) -> dict[str, str | None]:
    """Return what the files beside the tokenizer call BOS, EOS and PAD; a null there means that it has none."""
    named: dict[str, str | None] = {}
    for name in SIBLINGS:
        sibling = path.parent / name
        if not sibling.is_file():
            continue
        value = read_object(sibling.read_bytes(), sibling)
        for role in ("bos_token", "eos_token", "pad_token"):
            if role in named or role not in value:
                continue
            token = value[role]
            content = token.get("content") if isinstance(token, dict) else token
            if not (content is None or isinstance(content, str)) or (content is None and token is not None):
                raise TokenizerError(
                    f"{sibling}: {role} must be a string, an object with 'content' or null, got {token!r}; "
                    "correct it, or move the file away"
                )
            named[role] = content
    return named


# A tiktoken rank file, and what it leaves to be known: the pattern and the control strings.


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
    ranks = _parse_ranks(data, path)
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


def text_of(ids: AnyArray, strings: Mapping[int, bytes]) -> str:
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
def _parse_ranks(data: bytes, path: Path) -> dict[bytes, int]:
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
