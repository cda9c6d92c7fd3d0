"""From what names a tokenizer to an open one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from tokenmill.encode.byte_tokenizer import ByteTokenizer, bytes_vocabulary
from tokenmill.encode.fast import open_fast_json, open_fast_ranks
from tokenmill.encode.json_file import JsonFile, read_json_file
from tokenmill.encode.rank_file import read_rank_file
from tokenmill.encode.reference import open_reference_json, open_reference_ranks
from tokenmill.encode.tokenizer import Tokenizer, TokenizerIdentity
from tokenmill.encode.vocabulary import Wanted, identify
from tokenmill.errors import TokenizerError, nearest

# The engines of each kind: the fast one, which "auto" stands for, then the reference.
ENGINES: dict[str, tuple[str, ...]] = {
    "bytes": ("bytes",),
    "tokenizer.json": ("fastokens", "tokenizers"),
    "tiktoken": ("fastokens", "tiktoken"),
}

_TIKTOKEN = "tiktoken:"


def open_tokenizer(
    spec: str,
    *,
    add_bos: bool | None = None,
    add_eos: bool | None = None,
    bos_token: str | None = None,
    eos_token: str | None = None,
    engine: str = "auto",
) -> Tokenizer:
    """Open a tokenizer: `bytes`, a `tokenizer.json`, a folder holding one, or `tiktoken:<rank file>`.

    `tiktoken:<rank file>?encoding=cl100k_base` says which encoding a rank file is where neither its hash nor
    its name does. The fast engine is taken on trust here; `agreement.trusted` proves it.
    """
    kind = kind_of(spec)
    name = ENGINES[kind][0] if engine == "auto" else engine
    if name not in ENGINES[kind]:
        known = ("auto", *ENGINES[kind])
        raise TokenizerError(
            f"tokenizer {spec!r}: its engine must be one of {', '.join(known)}, got {engine!r}; "
            f"{nearest(engine, known)}"
        )
    wanted = Wanted(add_bos=add_bos, add_eos=add_eos, bos_token=bos_token, eos_token=eos_token)
    if kind == "bytes":
        return ByteTokenizer(identity=identify(bytes_vocabulary(), wanted))
    if kind == "tiktoken":
        return _open_ranks(spec, wanted, name)
    return _open_json(spec, wanted, name)


def kind_of(spec: str) -> str:
    """Return the kind of tokenizer that a spec names, without opening anything."""
    if spec == "bytes":
        return "bytes"
    return "tiktoken" if spec.startswith(_TIKTOKEN) else "tokenizer.json"


def _open_json(spec: str, wanted: Wanted, engine: str) -> Tokenizer:
    file = read_json_file(_json_path(spec), spec)
    identity = identify(file.vocabulary, wanted)
    tokenizer: Tokenizer
    if engine == "tokenizers":
        tokenizer = open_reference_json(file, identity)
    else:
        tokenizer = open_fast_json(file, identity, partial(_open_json, spec, wanted, "tokenizers"))
    _refuse_spelled(tokenizer, _controls(file, identity), spec)
    return tokenizer


def _controls(file: JsonFile, identity: TokenizerIdentity) -> dict[str, int]:
    """Return what raw text must not be able to spell: the control strings, BOS and EOS."""
    framing = {identity.bos_id, identity.eos_id} - {None}
    controls = dict(file.vocabulary.special_ids)
    controls.update({name: id_ for name, id_ in file.vocabulary.ids.items() if id_ in framing})
    # Text that the model has no token for may well become the unknown token, unless that is also BOS or EOS.
    if file.unknown is not None and controls.get(file.unknown) not in framing:
        controls.pop(file.unknown, None)
    return controls


def _open_ranks(spec: str, wanted: Wanted, engine: str) -> Tokenizer:
    name, mark, encoding = spec.removeprefix(_TIKTOKEN).partition("?encoding=")
    path = Path(name)
    if not path.is_file():
        raise TokenizerError(
            f"tokenizer {spec!r}: must name a rank file, got {name!r}, which is no file; "
            "write tiktoken:<path of the .tiktoken file>"
        )
    file = read_rank_file(path, encoding if mark else None, spec)
    identity = identify(file.vocabulary, wanted)
    if engine == "tiktoken":
        return open_reference_ranks(file, identity)
    return open_fast_ranks(file, identity, partial(_open_ranks, spec, wanted, "tiktoken"))


def _json_path(spec: str) -> Path:
    path = Path(spec)
    if path.suffix == ".tiktoken":
        raise TokenizerError(
            f"tokenizer {spec!r}: a rank file must be named as one, got a bare path; write 'tiktoken:{spec}'"
        )
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            held = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
            raise TokenizerError(
                f"tokenizer {spec!r}: the folder must hold a tokenizer.json, got {held}; save it with "
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


def _refuse_spelled(tokenizer: Tokenizer, controls: dict[str, int], spec: str) -> None:
    """Raise `TokenizerError` if raw text that spells a control string gets its control id.

    The engines are told not to match control strings, but a model that holds one as a word (WordLevel, Unigram) or
    has learned to merge one (BPE without a pattern) still makes it, and any web page could then end a document.
    """
    names = list(controls)
    encoded = tokenizer.encode([shown for name in names for shown in (name, f"x{name}y", f"a {name} b")])
    for index, name in enumerate(names):
        ids = encoded.ids[encoded.offsets[3 * index] : encoded.offsets[3 * index + 3]]
        if np.any(ids == controls[name]):
            raise TokenizerError(
                f"tokenizer {spec!r}: raw text must not give control ids, "
                f"got id {controls[name]} for the text {name!r} from {tokenizer.engine}; "
                "mark it as special in the file and take away the merge or word of the model that spells it"
            )
