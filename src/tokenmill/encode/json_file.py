"""What a `tokenizer.json` and the files beside it say: vocabulary, control strings, BOS, EOS and PAD."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from tokenmill.encode.tokenizer import content_digest
from tokenmill.encode.vocabulary import BOS_NAMES, EOS_NAMES, PAD_NAMES, Vocabulary, well_known
from tokenmill.errors import TokenizerError

# Beside the tokenizer, in order of authority.
SIBLINGS = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonFile:
    """A `tokenizer.json`, read but not yet given to an engine."""

    text: str
    vocabulary: Vocabulary
    added_ids: Mapping[str, int]
    """All added tokens, those that are no control strings as well: the engines must give them these ids."""
    unknown: str | None
    """What the model gives for text that it has no token for, if it has such a token."""


def read_json_file(path: Path, where: str) -> JsonFile:
    """Read a `tokenizer.json`; whatever would make its ids ambiguous raises `TokenizerError`."""
    data = path.read_bytes()
    value = _parse(data, path)
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


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise TokenizerError(f"{path}: must be JSON, got {error}; is the download whole?") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: must be a JSON object, got {type(value).__name__}; is it the right file?")
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
        value = _parse(sibling.read_bytes(), sibling)
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
