"""Chat templates: where they come from, and what makes two of them the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

from tokenmill.encode.byte_tokenizer import bytes_vocabulary
from tokenmill.encode.chat.controls import Habit, read_habits
from tokenmill.encode.json_file import SIBLINGS, read_json_file
from tokenmill.encode.load import kind_of
from tokenmill.encode.rank_file import read_rank_file
from tokenmill.encode.vocabulary import Vocabulary
from tokenmill.errors import ConfigError, nearest
from tokenmill.fingerprint import digest

CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- set content -%}
        {%- if message.content is string -%}
            {{- message.content -}}
        {%- elif message.content is not none -%}
            {%- for part in message.content -%}
                {{- part if part is string else part.text -}}
            {%- endfor -%}
        {%- endif -%}
    {%- endset -%}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}
            {{- content + '<|im_end|>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- content + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""The plain form of ChatML: no default system prompt, no tools."""

_BUILT_IN = {"chatml": CHATML}
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_RULES = 2
"""Raised when texts or spans are made in another way, so that two versions are never taken for the same."""
NAME_ONE = "name one with --chat-template: chatml, or the path of a .jinja file"
"""What to do about a tokenizer that has no template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """The source of a template and the control strings that it is given by name."""

    source: str = field(repr=False)
    where: str
    """What the user called it, for messages."""
    special_tokens: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Such as bos_token and eos_token; one that the tokenizer does not have is not there."""
    tokenizer: str | None = None
    """Content of the `tokenizer.json` that it was loaded for."""
    habits: Mapping[str, Habit] = field(default_factory=lambda: MappingProxyType({}))
    """Control strings of that tokenizer that take white space away, or do more."""

    @property
    def content(self) -> str:
        """32 hex digits that stand for the source."""
        return digest(self.source)

    def to_json(self) -> dict[str, str | int | dict[str, str] | dict[str, dict[str, bool | str]]]:
        """Return what a recipe's fingerprint must hold of it."""
        return {
            "content": self.content,
            "special_tokens": dict(self.special_tokens),
            "habits": {name: asdict(habit) for name, habit in self.habits.items()},
            "rules": _RULES,
        }


def load_template(spec: str, *, tokenizer: str | None) -> ChatTemplate:
    """Load and compile a template: `chatml`, a `.jinja` file, or `tokenizer` for that of the tokenizer's folder.

    A folder with several takes the one named `default`, or the one that `tokenizer:<name>` names.
    """
    from tokenmill.encode.chat.sandbox import compiled

    if spec in _BUILT_IN:
        source, where = _BUILT_IN[spec], repr(spec)
    elif spec == "tokenizer" or spec.startswith("tokenizer:"):
        source, where = _of_tokenizer(tokenizer, spec.partition(":")[2] or "default")
    else:
        source, where = _of_file(spec), repr(spec)
    compiled(source, where)
    if tokenizer is None:
        return ChatTemplate(source=source, where=where)
    vocabulary, habits = _vocabulary(tokenizer)
    return ChatTemplate(
        source=source,
        where=where,
        special_tokens=_special_tokens(tokenizer, vocabulary),
        tokenizer=vocabulary.content if vocabulary.kind == "tokenizer.json" else None,
        habits=MappingProxyType(habits),
    )


def has_template(tokenizer: str) -> bool:
    """Say whether there is a chat template beside a tokenizer; it may be one that cannot be used."""
    folder = _folder(tokenizer)
    return folder is not None and _find(folder, "default") is not None


def _of_file(spec: str) -> str:
    path = Path(spec)
    if not path.is_file():
        known = (*_BUILT_IN, "tokenizer")
        raise ConfigError(
            f"chat template {spec!r}: must be a .jinja file, 'tokenizer' or a built-in name, got no such file; "
            f"{nearest(spec, known)}"
        )
    return _read(path)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat template {path}: must be UTF-8, got {error.reason}; save it as UTF-8") from error


def _of_tokenizer(tokenizer: str | None, name: str) -> tuple[str, str]:
    folder = _folder(tokenizer)
    found = None if folder is None else _find(folder, name)
    if found is None:
        place = f"for {tokenizer!r}" if folder is None else f"in {folder}"
        raise ConfigError(f"chat template 'tokenizer': the tokenizer must have one, got none {place}; {NAME_ONE}")
    return found


def _find(folder: Path, name: str) -> tuple[str, str] | None:
    """Find a template in the files that Hugging Face libraries look for, in their order."""
    lone = folder / "chat_template.jinja"
    if lone.is_file() and name == "default":
        return _read(lone), str(lone)
    for file in ("chat_template.json", "tokenizer_config.json"):
        path = folder / file
        found = _parsed(path).get("chat_template") if path.is_file() else None
        if isinstance(found, str) and name == "default":
            return found, str(path)
        if isinstance(found, list):
            named = {entry["name"]: entry["template"] for entry in found}
            if name not in named:
                raise ConfigError(
                    f"{path}: there must be a template named {name!r}, got {sorted(named)}; "
                    "write tokenizer:<name> for one of them"
                )
            return named[name], f"{path} ({name})"
    return None


def _folder(tokenizer: str | None) -> Path | None:
    if tokenizer is None or kind_of(tokenizer) != "tokenizer.json":
        return None
    path = Path(tokenizer)
    return path if path.is_dir() else path.parent


def _parsed(path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}: must be JSON, got {error}; is the download whole?") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must be a JSON object, got {type(value).__name__}; is it the right file?")
    return value


def _special_tokens(tokenizer: str, vocabulary: Vocabulary) -> Mapping[str, str]:
    """Return the control strings that templates refer to by name."""
    known = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos, "pad_token": vocabulary.pad}
    folder = _folder(tokenizer)
    for file in SIBLINGS if folder is not None else ():
        path = folder / file if folder is not None else Path(file)
        value = _parsed(path) if path.is_file() else {}
        for role in _TOKENS:
            token = value.get(role)
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                known.setdefault(role, content)
    return MappingProxyType({role: token for role, token in known.items() if token is not None})


def _vocabulary(tokenizer: str) -> tuple[Vocabulary, dict[str, Habit]]:
    """Return what a tokenizer's files say, and of which control strings they say more than the id."""
    kind = kind_of(tokenizer)
    if kind == "bytes":
        return bytes_vocabulary(), {}
    if kind == "tiktoken":
        name, mark, encoding = tokenizer.removeprefix("tiktoken:").partition("?encoding=")
        return read_rank_file(Path(name), encoding if mark else None, tokenizer).vocabulary, {}
    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    file = read_json_file(path, tokenizer)
    config = path.parent / "tokenizer_config.json"
    habits = read_habits(orjson.loads(file.text), _parsed(config) if config.is_file() else {})
    return file.vocabulary, habits
