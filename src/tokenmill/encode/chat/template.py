"""Chat templates: where they come from, and what makes two of them the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
import numpy as np

from tokenmill.encode.engines import kind_of
from tokenmill.encode.files import SIBLINGS, read_json_file, read_rank_file
from tokenmill.encode.tokenizer import Vocabulary, bytes_vocabulary
from tokenmill.errors import ConfigError, nearest
from tokenmill.fingerprint import digest
from tokenmill.types import Uint32Array

# The control strings of a tokenizer, and the white space around them that goes with them.

Ids: TypeAlias = "Uint32Array"

BLANKS = frozenset("\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | set(
    map(chr, range(0x2000, 0x200B))
)
"""White space to Hugging Face tokenizers; Python takes four control characters for it as well."""
_LOCAL = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
"""Normalizers under which a control string is found wherever it stands, and which change nothing around it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Habit:
    """What a tokenizer's files say of a control string beyond its id."""

    lstrip: bool = False
    """Whether it takes the white space before it away."""
    rstrip: bool = False
    """Whether it takes the white space behind it away."""
    unlike: str = ""
    """What else it does that is not done here: a conversation that needs it raises `ConfigError`."""


def read_habits(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Habit]:
    """Return the added tokens of a `tokenizer.json` that are more to a template than a string and an id.

    Where the `tokenizer_config.json` beside it lists a control string, that counts, as it does for transformers.
    """
    added = {token["content"]: token for token in tokenizer.get("added_tokens") or []}
    listed = config.get("added_tokens_decoder")
    tokens = listed.values() if isinstance(listed, dict) else ()
    said = {token["content"]: token for token in tokens if isinstance(token, dict) and "content" in token}
    local = _is_local(tokenizer.get("normalizer"))
    made: dict[str, Habit] = {}
    for name in sorted({**added, **said}):
        known, token = added.get(name), said.get(name, added.get(name, {}))
        if known is None:
            made[name] = Habit(unlike="is a token by tokenizer_config.json alone")
        elif known.get("special"):
            made[name] = _habit(token, local)
        elif _habit(token, True) != _habit(known, True):
            # No control string: the engine finds it, and reads tokenizer.json only.
            made[name] = Habit(unlike="takes other white space away than tokenizer.json says")
    return {name: habit for name, habit in made.items() if habit != Habit()}


def _habit(token: Mapping[str, Any], local: bool) -> Habit:
    unlike = "stands only as a word of its own (single_word)" if token.get("single_word") else ""
    if token.get("normalized") and not local:
        unlike = "is looked for in normalized text (normalized)"
    return Habit(lstrip=bool(token.get("lstrip")), rstrip=bool(token.get("rstrip")), unlike=unlike)


def _is_local(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is None or normalizer.get("type") in _LOCAL:
        return True
    return normalizer.get("type") == "Sequence" and all(map(_is_local, normalizer["normalizers"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A control string that stands in a text, with the white space that it takes away."""

    begin: int
    end: int
    at: int
    """First character of the string itself."""
    stop: int
    """One after its last."""
    ids: Ids
    """Its id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Controls:
    """Finds the control strings of a tokenizer."""

    ids: Mapping[str, Ids]
    habits: Mapping[str, Habit]
    where: str
    _pattern: re.Pattern[str] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The first that stands somewhere, and of those that start together the longest, as Hugging Face does.
        odd = [name for name, habit in self.habits.items() if habit.unlike]
        names = sorted({*self.ids, *odd} - {""}, key=lambda name: (-len(name), name))
        object.__setattr__(self, "_pattern", re.compile("|".join(map(re.escape, names))) if names else None)

    @classmethod
    def of(cls, special_ids: Mapping[str, int], habits: Mapping[str, Habit], where: str) -> Controls:
        """Make one for a tokenizer."""
        ids = {name: np.array([id_], np.uint32) for name, id_ in special_ids.items()}
        return cls(ids=ids, habits=habits, where=where)

    def find(self, text: str, ranges: Iterable[tuple[int, int]]) -> list[Control]:
        """Return the control strings that lie within one of the ranges; white space around them may go beyond."""
        found: list[Control] = []
        done = 0
        for first, last in ranges if self._pattern is not None else ():
            assert self._pattern is not None
            for match in self._pattern.finditer(text, first, last):
                (begin, end), name = match.span(), match.group()
                if name in self.habits:
                    begin, end = self._with_blanks(text, done, match, self.habits[name])
                at, stop = match.span()
                found.append(Control(begin=begin, end=end, at=at, stop=stop, ids=self.ids[name]))
                done = end
        return found

    def _with_blanks(self, text: str, done: int, match: re.Match[str], habit: Habit) -> tuple[int, int]:
        if habit.unlike:
            raise ConfigError(
                f"chat template {self.where}: what it writes must have the ids that transformers gives, got "
                f"{match.group()!r}, which by the tokenizer's files {habit.unlike}; "
                "change that in a copy of the files, and use the copy wherever the model is used"
            )
        begin, end = match.span()
        while habit.lstrip and begin > done and text[begin - 1] in BLANKS:
            begin -= 1
        while habit.rstrip and end < len(text) and text[end] in BLANKS:
            end += 1
        return begin, end


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
        value = msgspec.json.decode(path.read_bytes())
    except (ValueError, RecursionError) as error:
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
    habits = read_habits(msgspec.json.decode(file.text), _parsed(config) if config.is_file() else {})
    return file.vocabulary, habits
