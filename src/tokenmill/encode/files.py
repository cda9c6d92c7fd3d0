"""Files that define a tokenizer: a `tokenizer.json` and the files next to it, a rank file, or a `.model`."""

from __future__ import annotations

import binascii
import hashlib
import re
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.encode.hub import local_spec, suggestion
from tokenmill.encode.tokenizer import BOS_NAMES, EOS_NAMES, PAD_NAMES, Vocabulary, content_digest, engine_errors
from tokenmill.errors import TokenizerError, TokenizerMissingError, TokenmillError, nearest
from tokenmill.fingerprint import canonical
from tokenmill.tables import MAX_TOKENIZER_BYTES, Count, read_bytes, read_table
from tokenmill.types import AnyArray

if TYPE_CHECKING:
    import sentencepiece

CONFIG = "tokenizer_config.json"
SIBLINGS = (CONFIG, "special_tokens_map.json")
"""Files next to a `tokenizer.json`, in order of authority."""
MODEL_SUFFIX = ".model"
"""Of files of SentencePiece, and of the rank file that Meta publishes with Llama 3."""
_TIKTOKEN = "tiktoken:"


def kind_of(spec: str) -> str:
    """Return the kind of tokenizer that a spec names; of a `.model` the first line is read."""
    if spec == "bytes":
        return "bytes"
    spec = local_spec(spec)
    if spec.startswith(_TIKTOKEN):
        return "tiktoken"
    path = _in_folder(Path(spec))
    if path.suffix != MODEL_SUFFIX or not path.is_file():
        return "tokenizer.json"
    with path.open("rb") as file:
        return "tiktoken" if re.fullmatch(rb"[A-Za-z0-9+/]+=* [0-9]+\s*", file.readline(4096)) else "sentencepiece"


def read_tokenizer_file(spec: str) -> JsonFile | RankFile | ModelFile:
    """Read the file that a spec names; `bytes` has none."""
    where, spec = spec, local_spec(spec)
    kind = kind_of(spec)
    if kind == "tokenizer.json":
        return read_json_file(_json_path(spec), where)
    if kind == "sentencepiece":
        return read_model_file(_in_folder(Path(spec)), where)
    path, encoding = _rank_path(spec)
    return read_rank_file(path, encoding, where)


def _read(path: Path) -> bytes:
    return read_bytes(path, MAX_TOKENIZER_BYTES, TokenizerError)


def is_beside(path: Path) -> bool:
    """Return whether a file exists next to a tokenizer; a broken symlink is an error, as the file may name BOS.

    Model caches are symlinks to files that may have been removed.
    """
    if not path.is_file() and (path.is_symlink() or path.exists()):
        kind = "a broken symlink" if path.is_symlink() else "not a regular file"
        raise TokenizerError(f"{path}: {kind}; copy the tokenizer again, or remove it")
    return path.is_file()


def _rank_path(spec: str) -> tuple[Path, str | None]:
    """Return the rank file that a spec names, and its encoding if that is said."""
    name, mark, encoding = spec.removeprefix(_TIKTOKEN).partition("?encoding=")
    path = _in_folder(Path(name))
    if not path.is_file():
        raise TokenizerError(
            f"tokenizer {spec!r}: must name a rank file, got {name!r}, which is no file; "
            "write tiktoken:<path of the .tiktoken file>"
        )
    return path, encoding if mark else None


def copy_of(spec: str) -> dict[str, bytes]:
    """Return the files that open a tokenizer again from a folder of their own, by name; none for `bytes`."""
    spec = local_spec(spec)
    kind = kind_of(spec)
    if kind == "bytes":
        return {}
    if kind == "tokenizer.json":
        path = _json_path(spec)
        beside = [path.parent / name for name in SIBLINGS]
        return {path.name: _read(path) for path in beside if is_beside(path)} | {"tokenizer.json": _read(path)}
    if kind == "sentencepiece":
        return {f"tokenizer{MODEL_SUFFIX}": _read(_in_folder(Path(spec)))}
    path, encoding = _rank_path(spec)
    data = _read(path)
    if encoding is not None and encoding.endswith(".json"):
        return {"own.tiktoken": data, "own.json": _read(Path(encoding))}
    return {f"{_recognise(data, path, encoding)}.tiktoken": data}


def spec_of_copy(folder: Path) -> str | None:
    """Return the name of the tokenizer whose copy is in a folder; None if the folder has no copy."""
    for ranks in sorted(folder.glob("*.tiktoken")):
        encoding_file = ranks.with_suffix(".json")
        return f"{_TIKTOKEN}{ranks}?encoding={encoding_file if encoding_file.is_file() else ranks.stem}"
    return str(folder) if _in_folder(folder).is_file() else None


def _in_folder(path: Path) -> Path:
    """Return the tokenizer file of a folder: its `tokenizer.json`, otherwise its `tokenizer.model`."""
    if not path.is_dir():
        return path
    model = path / f"tokenizer{MODEL_SUFFIX}"
    return model if model.is_file() and not (path / "tokenizer.json").is_file() else path / "tokenizer.json"


def _json_path(spec: str) -> Path:
    path = _in_folder(Path(spec))
    if path.suffix == ".tiktoken":
        raise TokenizerError(
            f"tokenizer {spec!r}: a rank file must be named as one, got a bare path; write 'tiktoken:{spec}'"
        )
    if path.is_file():
        return path
    if Path(spec).is_dir():
        names = ", ".join(sorted(entry.name for entry in path.parent.iterdir())[:8]) or "nothing"
        raise TokenizerError(
            f"tokenizer {spec!r}: the folder must hold a tokenizer.json or a tokenizer.model, got {names}; save it "
            "with tokenizer.save_pretrained(folder) of a fast Hugging Face tokenizer"
        )
    raise TokenizerMissingError(
        f"tokenizer not found: {spec!r}; pass 'bytes', a tokenizer.json, a .model file or a folder with "
        f"one of them, tiktoken:RANKFILE, or hf:NAME to download it from the Hugging Face hub{suggestion(spec)}"
    )


# A `tokenizer.json`.


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonFile:
    """A `tokenizer.json`, read but not yet given to an engine."""

    path: Path
    text: str
    vocabulary: Vocabulary
    added_ids: Mapping[str, int]
    """All added tokens, control strings or not: the engines must give them these ids."""
    unknown: str | None
    """The token for text that the model does not know, if there is one."""
    model_ids: Mapping[str, int] = field(repr=False)
    """The words of the model."""
    merges: Sequence[str | Sequence[str]] | None = field(repr=False)
    """The only way in which the model makes words of more than one letter; None: it also looks words up."""
    normalized_controls: bool
    """Whether some control strings are looked for in normalized text."""

    def words(self, names: Iterable[str]) -> set[str]:
        """Return the names that are words of the model, so that it gives their ids to a text that spells them."""
        words = {name for name in names if name in self.model_ids}
        if not words or self.merges is None:
            return words
        merged = {"".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in self.merges}
        return {word for word in words if word in merged or len(word) == 1}


def read_json_file(path: Path, where: str) -> JsonFile:
    """Read a `tokenizer.json`; whatever would make its ids ambiguous raises `TokenizerError`."""
    data = _read(path)
    value = read_object(data, path)
    model = value.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list) or not model["vocab"]:
        raise TokenizerError(
            f"{path}: must hold a model with a vocabulary, got keys {sorted(value)}; "
            "give the tokenizer.json that Hugging Face tokenizers writes"
        )
    _check_shape(value, path)
    if model.get("dropout"):
        raise TokenizerError(
            f"{path}: model.dropout must be null, got {model['dropout']}; "
            "with it the same text gets other ids each time: set it to null in a copy of the file"
        )
    vocab = _model_ids(model["vocab"])
    added_ids, special_ids = _added_ids(value, path)
    ids = ChainMap(added_ids, vocab)
    placed = {role: name for role, name in _placed(value.get("post_processor")).items() if name in ids}
    bos, eos, pad = (_named(role, path, placed, special_ids) for role in _ROLES)
    return JsonFile(
        path=path,
        text=data.decode(),
        vocabulary=Vocabulary(
            where=where,
            kind="tokenizer.json",
            content=content_digest(data),
            vocab_size=1 + max(chain(vocab.values(), added_ids.values())),
            ids=ids,
            special_ids=special_ids,
            bos=bos[0],
            eos=eos[0],
            pad=pad[0],
            named_by={"bos": bos[1], "eos": eos[1]},
            adds_bos="bos_token" in placed or not _says_no_bos(path.parent / CONFIG),
        ),
        added_ids=added_ids,
        unknown=_unknown(model),
        model_ids=vocab,
        merges=model.get("merges") if _only_merges(model) else None,
        normalized_controls=value.get("normalizer") is not None
        and any(token.get("special") and token.get("normalized") for token in value.get("added_tokens") or []),
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
        raise refusal(f"{path}: expected JSON, got {error}; is the download whole?") from error
    if not isinstance(value, dict):
        raise refusal(f"{path}: must be a JSON object, got {type(value).__name__}; is it the right file?")
    return value


def _check_shape(value: dict[str, Any], path: Path) -> None:
    """Refuse a file whose parts are of the wrong kinds: all that reads it further takes them for granted."""

    def require(ok: bool, rule: str, got: object) -> None:
        if not ok:
            shown = repr(got)
            raise TokenizerError(f"{path}: {rule}, got {shown[:80]}; correct the file, or download it again")

    added, model = value.get("added_tokens"), value.get("model")
    require(isinstance(added, list | None), "added_tokens must be a list", added)
    require(isinstance(model, dict), "model must be an object", model)
    assert isinstance(model, dict)
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        wrong = next((id_ for id_ in vocab.values() if type(id_) is not int or not 0 <= id_ < 1 << 32), None)
        require(wrong is None, "ids of the vocabulary must be whole numbers below 2^32", wrong)
    else:
        require(isinstance(vocab, list), "the vocabulary must be an object or a list", vocab)
        pieces = (entry for entry in vocab or [] if not (isinstance(entry, list) and len(entry) == 2))
        wrong = next(pieces, None)
        require(wrong is None, "a piece of the vocabulary must be a list of a text and a score", wrong)
        unknown = model.get("unk_id")
        number = type(unknown) is int and 0 <= unknown < len(vocab or [])
        require(unknown is None or number, "unk_id must be the place of a piece", unknown)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        require(isinstance(value.get(part), dict | None), f"{part} must be an object or null", value.get(part))


def _model_ids(vocab: dict[str, int] | list[list[Any]]) -> dict[str, int]:
    if isinstance(vocab, dict):
        return vocab
    # A Unigram model lists [piece, score]; the place in the list is the id.
    return {str(entry[0]): index for index, entry in enumerate(vocab)}


def _added_ids(value: dict[str, Any], path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ids of all added tokens, and of the special tokens among them."""
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


def _only_merges(model: dict[str, Any]) -> bool:
    """Return whether a model makes its words by merges only, as plain BPE does."""
    marks = ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    return model.get("type", "BPE") == "BPE" and not any(map(model.get, marks))


_ROLES: Mapping[str, tuple[str, ...]] = {"bos_token": BOS_NAMES, "eos_token": EOS_NAMES, "pad_token": PAD_NAMES}
"""What configs call BOS, EOS and PAD, and well-known names of them."""


def _named(
    role: str, path: Path, placed: Mapping[str, str], special_ids: Mapping[str, int]
) -> tuple[str | None, str]:
    """Return the string of BOS, EOS or PAD and the file that names it; null in a file means no such token."""
    for name in SIBLINGS:
        sibling = path.parent / name
        value = read_object(_read(sibling), sibling) if is_beside(sibling) else {}
        # AstrAI's folders have them under `special_tokens`, those of Hugging Face at the top.
        inner = value.get("special_tokens")
        for table, where in ((value, name), (inner, f"special_tokens of {name}")):
            if not isinstance(table, dict) or role not in table:
                continue
            token = table[role]
            content = token.get("content") if isinstance(token, dict) else token
            if not (content is None or isinstance(content, str)) or (content is None and token is not None):
                raise TokenizerError(
                    f"{sibling}: {role} must be a string, an object with 'content' or null, got {token!r}; "
                    "correct it, or move the file away"
                )
            return content, where
    if role in placed:
        return placed[role], f"the post-processor of {path.name}"
    return next((name for name in _ROLES[role] if name in special_ids), None), "its well-known name"


def _says_no_bos(config: Path) -> bool:
    """Tell whether a config has `add_bos_token: false`, as Yi's; a post-processor that adds BOS overrules it."""
    return is_beside(config) and read_object(_read(config), config).get("add_bos_token") is False


def _placed(post_processor: object) -> dict[str, str]:
    """Return the strings that a post-processor inserts before and after every text, by their roles."""
    if not isinstance(post_processor, dict):
        return {}
    placed: dict[str, str] = {}
    for inner in post_processor.get("processors") or ():  # of a sequence of them
        placed |= _placed(inner)
    cls, sep = post_processor.get("cls"), post_processor.get("sep")  # as BERT's and RoBERTa's have it
    if isinstance(cls, list) and isinstance(sep, list):
        placed |= {"bos_token": str(cls[0]), "eos_token": str(sep[0])}
    single = [part for part in post_processor.get("single") or () if isinstance(part, dict)]
    text = next((index for index, part in enumerate(single) if "Sequence" in part), None)
    if text is not None:
        for role, parts in (("bos_token", single[:text]), ("eos_token", single[text + 1 :])):
            # Where there are several, nothing says which of them is BOS or EOS.
            if len(parts) == 1 and isinstance(parts[0].get("SpecialToken"), dict):
                placed[role] = str(parts[0]["SpecialToken"].get("id"))
    return placed


# A tiktoken rank file, and what it does not say: the pattern and the control strings.


_EOT = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEncoding:
    """What a rank file does not hold."""

    pattern: str
    special_ids: Mapping[str, int]
    sha256: str = ""
    """Of the rank file that is published."""
    preset: str | None = None
    """What fastokens calls the pattern: its own matcher for it is twice as fast as the regular expression."""
    bos: str | None = None
    eos: str | None = _EOT


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

_LLAMA3_CONTROLS = (
    *("<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{index}|>" for index in range(4))),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{index}|>" for index in range(5, 251)),
)

# As `tiktoken_ext.openai_public` and Meta's `llama3` define them; the first whose hash or name fits is taken.
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
    "llama3": RankEncoding(
        pattern=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        special_ids={name: 128_000 + index for index, name in enumerate(_LLAMA3_CONTROLS)},
        sha256="82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
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
        """Return the bytes of each id; ids that the encoding leaves unused are absent."""
        strings = {rank: token for token, rank in self.ranks.items()}
        strings.update({id_: name.encode() for name, id_ in self.encoding.special_ids.items()})
        return strings


def read_rank_file(path: Path, name: str | None, where: str) -> RankFile:
    """Read a rank file; `name` is its encoding, or a file that holds it; None: its hash or its name says it."""
    data = _read(path)
    own = name is not None and name.endswith(".json")
    known = "" if own else _recognise(data, path, name)
    encoding = _read_encoding(Path(name or "")) if own else ENCODINGS[known]
    ranks = _parse_ranks(data, path)
    taken = sorted(set(encoding.special_ids.values()) & set(ranks.values()))
    if taken:
        ids = set(ranks.values())
        fitting = [key for key, other in ENCODINGS.items() if ids.isdisjoint(other.special_ids.values())]
        way_out = f"its {len(ranks)} ranks fit {', '.join(fitting)}, or a .json file of your own after ?encoding="
        raise TokenizerError(
            f"tiktoken:{path}: its ranks must leave the control ids of {name or known} free, got {taken[:4]}; "
            f"{'give them other ids' if own else way_out}"
        )
    return RankFile(
        path=path,
        encoding=encoding,
        ranks=ranks,
        vocabulary=Vocabulary(
            where=where,
            kind="tiktoken",
            content=content_digest(
                data, b"\0", encoding.pattern.encode(), canonical(dict(encoding.special_ids)) if own else b""
            ),
            vocab_size=1 + max(chain(ranks.values(), encoding.special_ids.values())),
            ids=encoding.special_ids,
            special_ids=encoding.special_ids,
            bos=encoding.bos,
            eos=encoding.eos,
            pad=None,
            named_by=dict.fromkeys(("bos", "eos"), str(name) if own else f"the encoding {known}"),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _EncodingTable:
    """What a rank file does not hold, as a user's own file says it."""

    pattern: str
    special_tokens: Mapping[str, Count] = field(default_factory=dict)
    bos_token: str | None = None
    eos_token: str | None = None


def _read_encoding(path: Path) -> RankEncoding:
    if not path.is_file():
        raise TokenizerError(
            f"tokenizer: ?encoding={path} must name a file, got none; write into it "
            '{"pattern": "...", "special_tokens": {"<|endoftext|>": 50000}, "eos_token": "<|endoftext|>"}'
        )
    written = read_table(_EncodingTable, read_object(_read(path), path), f"{path}:", error=TokenizerError)
    if len(set(written.special_tokens.values())) < len(written.special_tokens):
        raise TokenizerError(f"{path}: special_tokens must have different ids, got one twice; correct it")
    known = written.special_tokens
    for role, name in (("bos_token", written.bos_token), ("eos_token", written.eos_token)):
        if name is not None and name not in known:
            raise TokenizerError(
                f"{path}: {role} must be one of special_tokens, got {name!r}; {nearest(name, known)}"
            )
    return RankEncoding(
        pattern=written.pattern,
        special_ids=written.special_tokens,
        bos=written.bos_token,
        eos=written.eos_token,
    )


def text_of(ids: AnyArray, strings: Mapping[int, bytes]) -> str:
    """Return the text of ids; one that the encoding leaves unused is U+FFFD."""
    return b"".join([strings.get(id_, b"\xef\xbf\xbd") for id_ in ids.tolist()]).decode(errors="replace")


def _recognise(data: bytes, path: Path, name: str | None) -> str:
    """Return the name of the encoding of a rank file; `name` is what the user calls it."""
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
    if (stem := path.name.removesuffix(".tiktoken")) in ENCODINGS:
        return stem
    raise TokenizerError(
        f"tiktoken:{path}: a rank file holds no pattern, and neither its hash nor its name is that of a known "
        f"encoding, got {path.name!r}; say which it is: tiktoken:{path}?encoding=cl100k_base "
        f"(or {', '.join(known for known in ENCODINGS if known != 'cl100k_base')}, or the path of a .json file "
        "with its pattern and special_tokens)"
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


# A `.model` file of SentencePiece.


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFile:
    """A `.model` file, opened by SentencePiece, the only library that reads it."""

    path: Path
    native: sentencepiece.SentencePieceProcessor = field(repr=False)
    engine: str
    vocabulary: Vocabulary


def read_model_file(path: Path, where: str) -> ModelFile:
    """Read a `.model` file: BPE, Unigram, or any other model that SentencePiece trains."""
    try:
        import sentencepiece
    except ImportError as error:
        raise TokenizerError(
            f"sentencepiece: must be installed to read {where!r}, got {error}; "
            "pip install 'tokenmill[sentencepiece]'"
        ) from error
    data = _read(path)
    engine = f"sentencepiece {sentencepiece.__version__}"
    with engine_errors(engine, f"load {where!r}", "is it a file of this kind, and whole?"):
        native = sentencepiece.SentencePieceProcessor(model_proto=data)
    ids = {native.id_to_piece(id_): id_ for id_ in range(native.get_piece_size())}
    strings = {role: id_ for role, id_ in (("bos", native.bos_id()), ("eos", native.eos_id())) if id_ >= 0}
    return ModelFile(
        path=path,
        native=native,
        engine=engine,
        vocabulary=Vocabulary(
            where=where,
            kind="sentencepiece",
            content=content_digest(data),
            vocab_size=native.get_piece_size(),
            ids=ids,
            special_ids={name: id_ for name, id_ in ids.items() if native.is_control(id_)},
            bos=native.id_to_piece(strings["bos"]) if "bos" in strings else None,
            eos=native.id_to_piece(strings["eos"]) if "eos" in strings else None,
            pad=native.id_to_piece(native.pad_id()) if native.pad_id() >= 0 else None,
            named_by=dict.fromkeys(strings, path.name),
        ),
    )
