"""Chat templates: files and built-in ones, their identity, and the sandbox that they run in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill.encode.chat.tracked import (
    Tracked,
    authored,
    between,
    generated,
    join,
    text_of,
    tojson,
)
from tokenmill.encode.files import CONFIG, SIBLINGS, JsonFile, is_beside, kind_of, read_object, read_tokenizer_file
from tokenmill.encode.hub import local_spec
from tokenmill.encode.tokenizer import Vocabulary, bytes_vocabulary
from tokenmill.errors import ConfigError, nearest
from tokenmill.fingerprint import digest
from tokenmill.tables import MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES, read_bytes, read_text

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
_RULES = 3
"""Version of the rules for texts and masks. It is raised when they change, so stores of two versions differ."""
NAME_ONE = "set chat_template=...: chatml, or the path of a .jinja file"
"""Way out for a tokenizer without a template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StripRule:
    """White space rules of a special token in a tokenizer's files."""

    lstrip: bool = False
    """Whether it removes the white space before it."""
    rstrip: bool = False
    """Whether it removes the white space after it."""
    unlike: str = ""
    """Another rule, which is not supported: a conversation that needs it raises `ConfigError`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """The source of a template, and the special tokens that it reads by name."""

    source: str = field(repr=False)
    where: str
    """Name that the user gave it, for messages."""
    special_tokens: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Special tokens by role, such as bos_token and eos_token, without those that the tokenizer lacks."""
    tokenizer: str | None = None
    """Content of the `tokenizer.json` that it was loaded for."""
    strip_rules: Mapping[str, StripRule] = field(default_factory=lambda: MappingProxyType({}))
    """Special tokens of that tokenizer that remove white space, or have another rule."""
    built_in: bool = False
    """Whether it is part of tokenmill. Such a template works with any tokenizer, which adds BOS."""

    @property
    def compiled(self) -> Compiled:
        """The compiled template."""
        return compile_template(self.source, self.where)

    def fields(self) -> dict[str, Any]:
        """Return its fields as JSON values, to create it again in another process."""
        rules = {name: asdict(rule) for name, rule in self.strip_rules.items()}
        plain = {name: getattr(self, name) for name in ("source", "where", "tokenizer", "built_in")}
        return {**plain, "special_tokens": dict(self.special_tokens), "strip_rules": rules}

    def to_json(self) -> dict[str, object]:
        """Return the part of a recipe's fingerprint that depends on the template."""
        return {
            "content": digest(self.source),
            "special_tokens": dict(self.special_tokens),
            "habits": {name: asdict(rule) for name, rule in self.strip_rules.items()},
            "rules": _RULES,
        }


def load_template(spec: str, *, tokenizer: str | None) -> ChatTemplate:
    """Load and compile a template: `chatml`, a `.jinja` file, or `tokenizer` for that of the tokenizer's folder.

    A folder with several takes the one named `default`, or the one that `tokenizer:<name>` names.
    """
    if spec in _BUILT_IN:
        source, where = _BUILT_IN[spec], repr(spec)
    elif spec == "tokenizer" or spec.startswith("tokenizer:"):
        source, where = _of_tokenizer(tokenizer, spec.partition(":")[2] or "default")
    else:
        source, where = _of_file(spec), repr(spec)
    compile_template(source, where)
    built_in = spec in _BUILT_IN
    if tokenizer is None:
        return ChatTemplate(source=source, where=where, built_in=built_in)
    file = None if tokenizer == "bytes" else read_tokenizer_file(tokenizer)
    vocabulary = bytes_vocabulary() if file is None else file.vocabulary
    if not isinstance(file, JsonFile):
        tokens = _special_tokens(vocabulary, {})
        return ChatTemplate(source=source, where=where, special_tokens=tokens, built_in=built_in)
    beside = {name: _object_in(file.path.parent / name) for name in SIBLINGS}
    return ChatTemplate(
        source=source,
        where=where,
        special_tokens=_special_tokens(vocabulary, beside),
        tokenizer=vocabulary.content,
        strip_rules=MappingProxyType(_strip_rules(msgspec.json.decode(file.text), beside[CONFIG])),
        built_in=built_in,
    )


def has_template(tokenizer: str) -> bool:
    """Return whether there is a chat template next to a tokenizer; it may be unusable."""
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
        return read_text(path, MAX_CONFIG_BYTES)
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat template {path}: must be UTF-8, got {error.reason}; save it as UTF-8") from error


def _of_tokenizer(tokenizer: str | None, name: str) -> tuple[str, str]:
    folder = _folder(tokenizer)
    template = None if folder is None else _find(folder, name)
    if template is None:
        place = f"for {tokenizer!r}" if folder is None else f"in {folder}"
        raise ConfigError(f"chat template 'tokenizer': the tokenizer must have one, got none {place}; {NAME_ONE}")
    return template


def _find(folder: Path, name: str) -> tuple[str, str] | None:
    """Find a template in the files that Hugging Face libraries look for, in their order."""
    lone = folder / "chat_template.jinja"
    if is_beside(lone) and name == "default":
        return _read(lone), str(lone)
    for path in (folder / "chat_template.json", folder / CONFIG):
        template = _object_in(path).get("chat_template")
        if isinstance(template, str) and name == "default":
            return template, str(path)
        if isinstance(template, list):
            for entry in template:
                pair = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else ()
                if not pair or not all(isinstance(text, str) for text in pair):
                    raise ConfigError(
                        f"{path}: chat_template must be a text, or a list of objects with a name and a template, "
                        f"got {str(entry)[:80]!r} in it; {NAME_ONE}"
                    )
            named = {entry["name"]: entry["template"] for entry in template}
            if name not in named:
                raise ConfigError(
                    f"{path}: there must be a template named {name!r}, got {sorted(named)}; "
                    "write tokenizer:<name> for one of them"
                )
            return named[name], f"{path} ({name})"
    return None


def _folder(tokenizer: str | None) -> Path | None:
    if tokenizer is None or kind_of(tokenizer) not in ("tokenizer.json", "sentencepiece"):
        return None
    path = Path(local_spec(tokenizer))
    return path if path.is_dir() else path.parent


def _object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; an empty one if the file does not exist."""
    return read_object(read_bytes(path, MAX_TOKENIZER_BYTES), path, ConfigError) if is_beside(path) else {}


# Special tokens in the files of a tokenizer.


def _special_tokens(vocabulary: Vocabulary, beside: Mapping[str, Mapping[str, Any]]) -> Mapping[str, str]:
    """Return the special tokens that templates read by name."""
    tokens = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos, "pad_token": vocabulary.pad}
    for value in beside.values():
        for role in _TOKENS:
            token = value.get(role)
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                tokens.setdefault(role, content)
    return MappingProxyType({role: token for role, token in tokens.items() if token is not None})


def _strip_rules(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, StripRule]:
    """Return the added tokens of a `tokenizer.json` that have white space rules.

    If `tokenizer_config.json` in the same folder lists a special token, its entry counts, as in transformers.
    """
    added = {token["content"]: token for token in tokenizer.get("added_tokens") or []}
    decoder = config.get("added_tokens_decoder")
    tokens = decoder.values() if isinstance(decoder, dict) else ()
    listed = {token["content"]: token for token in tokens if isinstance(token, dict) and "content" in token}
    local = _is_local(tokenizer.get("normalizer"))
    rules: dict[str, StripRule] = {}
    for name in sorted({**added, **listed}):
        known, token = added.get(name), listed.get(name, added.get(name, {}))
        if known is None:
            rules[name] = StripRule(unlike="is a token by tokenizer_config.json alone")
        elif known.get("special"):
            rules[name] = _strip_rule(token, local)
        elif _strip_rule(token, True) != _strip_rule(known, True):
            # No control string: the engine finds it, and reads tokenizer.json only.
            rules[name] = StripRule(unlike="takes other white space away than tokenizer.json says")
    return {name: rule for name, rule in rules.items() if rule != StripRule()}


def _strip_rule(token: Mapping[str, Any], local: bool) -> StripRule:
    unlike = "stands only as a word of its own (single_word)" if token.get("single_word") else ""
    if token.get("normalized") and not local:
        unlike = "is looked for in normalized text (normalized)"
    return StripRule(lstrip=bool(token.get("lstrip")), rstrip=bool(token.get("rstrip")), unlike=unlike)


def _is_local(normalizer: Mapping[str, Any] | None) -> bool:
    """Return whether a special token is found in any place, with the text around it unchanged."""
    if normalizer is None or normalizer.get("type") in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"):
        return True
    return normalizer.get("type") == "Sequence" and all(map(_is_local, normalizer["normalizers"]))


# The sandbox that templates run in, and a compiler that lets every string keep its origin.

_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items"),
    *("join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace"),
    *("reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "tojson", "trim"),
    *("unique", "upper"),
)
"""Filters whose result depends on nothing else: no `random`."""
_GLOBALS = ("range", "dict", "namespace", "cycler", "joiner")
_UNSAFE_OF_STRINGS = frozenset(
    ("format", "format_map", "center", "ljust", "rjust", "zfill", "expandtabs", "translate", "encode", "maketrans")
)
_OF_DICTS = frozenset(dir(dict))
_READING_DICTS = frozenset(("get", "items", "keys", "values"))
_MAX_SOURCE = 1 << 17
"""Characters of a template. Common ones have at most 20,000, and this many compile in up to ten seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A template, ready to run."""

    tracked: Template
    """Tracks the origin of every character."""
    plain: Template
    """Runs on plain strings, as in every other library. Both must return the same text."""
    has_generation: bool
    """Whether `{% generation %}` blocks mark the trained text."""
    names: frozenset[str]
    """Names that the template reads, from its arguments or its own variables."""


def compile_template(source: str, where: str) -> Compiled:
    """Compile a template once; an invalid one raises `ConfigError` with its line."""
    if len(source) > _MAX_SOURCE:
        raise ConfigError(
            f"chat template {where}: must have at most {_MAX_SOURCE:,} characters, got {len(source):,}; "
            "take a shorter one"
        )
    try:
        return _compiled(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"chat template {where}: must compile, got {error.message!r} at line {error.lineno}; "
            "correct the template"
        ) from error
    except (RecursionError, SyntaxError, ValueError, OverflowError) as error:
        # A template can be right for jinja and too deep or too large for Python.
        raise ConfigError(
            f"chat template {where}: must compile, got {type(error).__name__}: {error}; correct the template"
        ) from error


@lru_cache(maxsize=256)
def _compiled(source: str) -> Compiled:
    tracked, plain = TrackedEnvironment(), PlainEnvironment()
    tree = plain.parse(source)
    blocks = tree.find_all(nodes.ExtensionAttribute)
    return Compiled(
        tracked=tracked.from_string(source),
        plain=plain.from_string(source),
        has_generation=any(node.identifier == GenerationBlock.identifier for node in blocks),
        names=frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"),
    )


class GenerationBlock(Extension):
    """The tag `{% generation %}`, which marks text that the assistant produced."""

    tags = {"generation"}  # noqa: RUF012 - as jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        """Make it a call block, as transformers does: names that are set inside are not visible outside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("produced"), [], [], body).set_lineno(line)

    def produced(self, caller: Callable[[], str]) -> str:
        """Return the text of the block, marked where strings are tracked."""
        return generated(caller())


class _PlainCode(CodeGenerator):
    """Leaves all work of a template to its render, because a render can be limited and compiling cannot."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:  # noqa: ANN401
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class PlainEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of jinja, with the names that chat templates expect."""

    code_generator_class: type[CodeGenerator] = _PlainCode

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[GenerationBlock, LoopControlExtension],
        )
        self._safe: dict[tuple[type, str], bool] = {}
        self.filters = {name: self.filters[name] for name in _FILTERS} | {"tojson": _plain_json}
        self.globals = {name: self.globals[name] for name in _GLOBALS} | {"raise_exception": _raise}

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - as jinja has it
        """Return an attribute or item, as jinja does; items of objects, the most common case, directly."""
        if type(obj) is dict:
            if attribute not in _OF_DICTS:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
            if attribute in _READING_DICTS:
                return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: ANN401 - as jinja has it
        """Return an item or attribute, as jinja does; items of objects, there or not, directly."""
        if type(obj) is dict and isinstance(argument, str):
            if argument in obj:
                return obj[argument]
            if argument not in _OF_DICTS:
                return self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Reject everything that the sandbox of jinja rejects, and methods that can make a huge text."""
        # The answer depends on the type alone; to work it out each time took a fifth of a render.
        key = (type(obj), attr)
        if key not in self._safe:
            self._safe[key] = (
                not (isinstance(obj, str) and attr in _UNSAFE_OF_STRINGS)
                and attr != "fromkeys"
                and not isinstance(obj, int | float | bytes)
                and super().is_safe_attribute(obj, attr, value)
            )
        return self._safe[key]

    def wrap_str_format(self, value: object) -> None:
        """Leave `str.format` to `is_safe_attribute`, which rejects it."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(nodes.EvalContextModifier):
            # Escaped text has another class, whose characters cannot be tracked.
            raise TemplateSyntaxError("autoescape is not supported", node.lineno)
        return tree


class _TrackedCode(_PlainCode):
    """Makes the literals of a template tracked, and what the operator `~` joins."""

    environment: TrackedEnvironment

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(self._literal(value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:  # noqa: ARG002
        self.write(self._literal(node.data))

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(group))

    def _literal(self, text: str) -> str:
        self.environment.literals.append(authored(text))
        return f"environment.literals[{len(self.environment.literals) - 1}]"


class TrackedEnvironment(PlainEnvironment):
    """A sandbox in which all strings are tracked."""

    code_generator_class = _TrackedCode
    concat = staticmethod(join)

    def __init__(self) -> None:
        super().__init__()
        self.literals: list[Tracked] = []
        self.finalize = text_of
        self.filters |= {"tojson": tojson, "string": text_of, "safe": text_of, "join": self._join}

    @staticmethod
    def joined(values: Iterable[object]) -> Tracked:
        """Do what the operator `~` does."""
        return join(map(text_of, values))

    def _join(self, value: Iterable[object], d: str = "", attribute: str | int | None = None) -> Tracked:
        items = value if attribute is None else map(make_attrgetter(self, attribute), value)
        return self.joined(between(text_of(d), items))


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _plain_json(
    x: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
