"""Chat templates: where they come from, what makes two of them the same, and the sandbox that they run in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, wraps
from pathlib import Path
from types import BuiltinMethodType, MappingProxyType, MethodType
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.environment import Template
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill.encode import Refusal
from tokenmill.encode.chat.tracked import (
    LONG,
    MAX_STEPS,
    Tracked,
    authored,
    between,
    charge,
    charge_size,
    charge_text,
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
_RULES = 2
"""Raised whenever texts or spans come out otherwise, so that two versions are never taken for the same."""
NAME_ONE = "set chat_template=...: chatml, or the path of a .jinja file"
"""What to do about a tokenizer that has no template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StripRule:
    """What a tokenizer's files say of a control string beyond its id."""

    lstrip: bool = False
    """Whether it takes the white space before it away."""
    rstrip: bool = False
    """Whether it takes the white space behind it away."""
    unlike: str = ""
    """What else it does that is not done here: a conversation that needs it raises `ConfigError`."""


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
    strip_rules: Mapping[str, StripRule] = field(default_factory=lambda: MappingProxyType({}))
    """Control strings of that tokenizer that take white space away, or do more."""
    built_in: bool = False
    """Whether it comes with tokenmill: such a template is made for any tokenizer, and leaves BOS to it."""

    @property
    def compiled(self) -> Compiled:
        """What runs it."""
        return compile_template(self.source, self.where)

    def fields(self) -> dict[str, Any]:
        """Return all that it holds, as JSON has it, to be made again in another process."""
        rules = {name: asdict(rule) for name, rule in self.strip_rules.items()}
        plain = {name: getattr(self, name) for name in ("source", "where", "tokenizer", "built_in")}
        return {**plain, "special_tokens": dict(self.special_tokens), "strip_rules": rules}

    def to_json(self) -> dict[str, object]:
        """Return what a recipe's fingerprint must hold of it."""
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
    """Return the JSON object of a file; an empty one where there is no such file."""
    return read_object(read_bytes(path, MAX_TOKENIZER_BYTES), path, ConfigError) if is_beside(path) else {}


# What the files of a tokenizer say of its control strings.


def _special_tokens(vocabulary: Vocabulary, beside: Mapping[str, Mapping[str, Any]]) -> Mapping[str, str]:
    """Return the control strings that templates refer to by name."""
    tokens = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos, "pad_token": vocabulary.pad}
    for value in beside.values():
        for role in _TOKENS:
            token = value.get(role)
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                tokens.setdefault(role, content)
    return MappingProxyType({role: token for role, token in tokens.items() if token is not None})


def _strip_rules(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, StripRule]:
    """Return the added tokens of a `tokenizer.json` that do more than stand for an id.

    Where the `tokenizer_config.json` beside it lists a control string, that counts, as it does for transformers.
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
    """Say whether a control string is found wherever it stands, and nothing around it is changed."""
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
"""Filters that always give the same and cannot be told to make something huge: no `random`, no `center`."""
_GLOBALS = ("range", "dict", "namespace", "cycler", "joiner")
_UNSAFE_OF_STRINGS = frozenset(
    ("format", "format_map", "center", "ljust", "rjust", "zfill", "expandtabs", "translate", "encode", "maketrans")
)
_OF_DICTS = frozenset(dir(dict))
_READING_DICTS = frozenset(("get", "items", "keys", "values"))
_QUICK = frozenset(("abs", "count", "d", "default", "first", "last", "length"))
"""Filters that take the same time for any value; all others are counted."""
_OF_TEXTS = frozenset(("replace", "safe", "string", "title", "tojson"))
"""Filters that write any value as a text."""
_OF_WHOLE_TEXTS = _OF_TEXTS | {"float", "int", "reverse", "round"}
"""Filters that take a text as one value; all others go through its characters."""
_COMPARING = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))
"""Filters that compare values, or copies of them in lower case: all characters count, however deep."""
_OF_NUMBERS = frozenset(("divisibleby", "even", "odd"))
"""Tests that divide; of a text they would make a longer one, as `%` does."""
_MAX_SOURCE = 1 << 17
"""Characters of a template: compiling this many takes up to ten seconds; common ones have 20,000 at most."""
_MAX_WIDTH = 64
"""Of white space in JSON."""
_MAX_DIGITS = 4096
"""Of a string that becomes a number: the time grows with their square."""
_CONTAINERS = frozenset((list, tuple, dict))
_ITEMS = 16
"""Items that are read in one step; of characters it is `LONG`."""
_MAX_PRECISION = 400
"""Places that a number is rounded to; more than a float has."""
_MAX_BITS = 4096
"""Size of the numbers that a template may make."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A template, ready to run."""

    tracked: Template
    """Follows every character."""
    plain: Template
    """Runs on plain strings, as every other library does; both must give the same text."""
    has_generation: bool
    """Whether it says itself, by `{% generation %}`, what is trained on."""
    names: frozenset[str]
    """Names that it reads: of what it is given, and of what it sets itself."""


def compile_template(source: str, where: str) -> Compiled:
    """Compile a template, once; one that cannot be compiled raises `ConfigError` with the line."""
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
    """The tag `{% generation %}`, which says what the assistant produced."""

    tags = {"generation"}  # noqa: RUF012 - as jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        """Make it a call block, as transformers does: names that are set inside are not seen outside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("produced"), [], [], body).set_lineno(line)

    def produced(self, caller: Callable[[], str]) -> str:
        """Return what the block wrote, marked where strings are tracked."""
        return generated(caller())


class _LimitedCode(CodeGenerator):
    """Counts what a template joins, compares and puts together."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:  # noqa: ANN401
        # Jinja would work out constants while it compiles, when nothing is counted.
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._sized(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._sized(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._sized(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _sized(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.sized(")
        visit(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.copied(")
        self.visit(node.node, frame)
        self.write(")[")
        self.visit(node.arg, frame)
        self.write("]")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        # To compare with a constant takes no time; to search for one in a value does.
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        constant = any(isinstance(side, nodes.Const) for side in (node.expr, *(each.expr for each in node.ops)))
        self._weighing = searches or not constant
        super().visit_Compare(node, frame)

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        if not self._weighing or isinstance(node.expr, nodes.Const):
            super().visit_Operand(node, frame)
            return
        weighed = "searched" if node.op in ("in", "notin") else "weighed"
        self.write(f" {operators[node.op]} environment.{weighed}(")
        self.visit(node.expr, frame)
        self.write(")")

    _weighing = False


class PlainEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with the names that chat templates expect, in which all work is counted."""

    code_generator_class: type[CodeGenerator] = _LimitedCode
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[GenerationBlock, LoopControlExtension],
        )
        self._safe: dict[tuple[type, str], bool] = {}
        self.filters = {name: self.filters[name] for name in _FILTERS}
        self._set_filters(**self.filters | {"tojson": _plain_json, "join": self._join, "sum": self._sum})
        self.filters |= {name: _by_method(name) for name in ("capitalize", "lower", "upper")}
        self.filters["trim"] = _by_method("strip")
        self.finalize = self.text
        self.filters["counted"] = Counted
        self.tests = {name: _charged_test(name, test) for name, test in self.tests.items()}
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals["raise_exception"] = _raise
        self.globals["dict"] = _made_dict

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
        if type(argument) in _CONTAINERS:
            charge_text(argument)  # an error names what is not there
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Refuse what the sandbox of jinja refuses, and methods that can make something huge."""
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
        """Leave `str.format` to `is_safe_attribute`, which refuses it."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(nodes.EvalContextModifier):
            # It makes a longer copy of every text that is printed, which nothing would count.
            raise TemplateSyntaxError("autoescape is not supported", node.lineno)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None).set_lineno(loop.lineno)
            loop.iter.set_environment(self)
        return tree

    def _set_filters(self, **filters: Callable[..., Any]) -> None:
        self.filters |= {name: each if name in _QUICK else _charged(name, each) for name, each in filters.items()}

    @staticmethod
    def text(value: object) -> str:
        """Return what a template prints for a value."""
        if type(value) is str:
            return value
        charge_text(value)
        return str(value)

    @classmethod
    def joined(cls, values: Iterable[object]) -> str:
        """Do what the operator `~` does."""
        return cls.concat(map(cls.text, values))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Lay end to end all that a template, a macro or a block has written."""
        parts = list(pieces)
        charge_size(sum(map(len, parts)), len(parts))
        return "".join(parts)

    def _join(self, value: Iterable[object], d: str = "", attribute: str | int | None = None) -> str:
        items = value if attribute is None else map(make_attrgetter(self, attribute), value)
        return self.joined(between(self.text(d), items))

    def _sum(self, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:  # noqa: ANN401
        if isinstance(start, str):
            raise TypeError("sum() can't sum strings")
        for item in iterable if attribute is None else map(make_attrgetter(self, attribute), iterable):
            start = self.call_binop(None, "+", start, item)
        return start

    @staticmethod
    def formatted(form: str, values: object) -> str:
        """Do what the operator `%` does, within the limits of tracked strings."""
        return str.__str__(Tracked(form) % values)

    @staticmethod
    def weighed(value: Any) -> Any:  # noqa: ANN401 - given back as it is
        """Count the work of reading all of a value."""
        if isinstance(value, str):
            if len(value) > LONG:
                charge(len(value) // LONG)
        elif isinstance(value, list | tuple | Mapping):
            _weigh(value)
        return value

    @classmethod
    def searched(cls, value: Any) -> Any:  # noqa: ANN401 - given back as it is
        """Count the work of searching a value; a key of an object is found at once."""
        if type(value) is dict:
            charge()
            return value
        return cls.weighed(value)

    @staticmethod
    def copied(value: Any) -> Any:  # noqa: ANN401 - given back as it is
        """Count the work of copying a string, list or tuple, or a part of it."""
        if isinstance(value, str):
            charge_size(len(value))
        elif isinstance(value, list | tuple):
            charge(len(value))
        return value

    @staticmethod
    def sized(value: Any) -> Any:  # noqa: ANN401 - given back as it is
        """Count all that a list, tuple or dict holds, however deep; a shared part counts each time it occurs."""
        if isinstance(value, list | tuple | Mapping):
            _charge_items(value)
        return value

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as jinja has it
        """Call a macro, method or function; a call takes 16 steps, and more with a long text.

        Methods of values are called directly: `getattr` has checked them.
        """
        charge(16 + len(args))
        for arg in args:
            if type(arg) in _CONTAINERS:
                charge(len(arg))
                if getattr(obj, "__name__", "") == "changed":  # of a loop, which compares
                    self.weighed(arg)
        if type(obj) is BuiltinMethodType or (type(obj) is MethodType and isinstance(obj.__self__, str)):
            owner = obj.__self__
            if isinstance(owner, str):
                self.copied(owner)
                if obj.__name__ == "join" and args and not isinstance(args[0], list | tuple):
                    args = (list(Counted(args[0])), *args[1:])
                if type(owner) is not Tracked:
                    _charge_made(obj.__name__, owner, args)
            elif isinstance(owner, list | tuple | Mapping):
                looked_for = _weigh(args[0]) if args and isinstance(args[0], list | tuple | Mapping) else 0
                if obj.__name__ not in _READING_DICTS:
                    self.weighed(owner)
                    charge(len(owner) * (1 + looked_for // _ITEMS))
            for name in ("_loop_vars", "_block_vars"):  # which jinja adds for functions that take the context
                kwargs.pop(name, None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401, ARG002
        """Add, multiply, raise to a power or format, if the result is not huge."""
        if operator == "+" and type(left) is Tracked and type(right) is Tracked:
            return join((left, right))
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        if operator == "+" and len(sizes) == 2:
            charge_size(sum(sizes))
        elif operator == "*" and sizes:
            charge_size(sizes[0] * max(0, int(left if isinstance(left, int) else right)))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise Refusal("too_large", f"the template makes a number of {bits} bits")
        if operator == "%" and isinstance(left, str):
            return self.formatted(left, right)
        value = self.binop_table[operator](left, right)
        return self.sized(value) if isinstance(value, list | tuple) else value


class _Code(_LimitedCode):
    """Makes the literals of a template tracked as well."""

    environment: TrackedEnvironment

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
    """A sandbox in which all strings are tracked, and all work is counted."""

    code_generator_class = _Code
    text = staticmethod(text_of)
    concat = staticmethod(join)

    def __init__(self) -> None:
        super().__init__()
        self.literals: list[Tracked] = []
        self._set_filters(tojson=tojson, string=text_of, safe=text_of)

    @staticmethod
    def formatted(form: str, values: object) -> str:
        """Do what the operator `%` does."""
        return (form if isinstance(form, Tracked) else Tracked(form)) % values


class Counted:
    """Values that a loop goes over; every round is a step."""

    def __init__(self, values: Iterable[object]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[object]:
        for value in self._values:
            charge()
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # a TypeError is what jinja expects of an iterator


def _charge_items(value: Any) -> None:  # noqa: ANN401 - a list or table
    """Count all items that a value holds, however deep."""
    pending = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, Mapping):
            inner = [*inner, *inner.values()]
        charge(1 + len(inner))
        pending += [item for item in inner if isinstance(item, list | tuple | Mapping)]


def _weigh(value: Any) -> int:  # noqa: ANN401 - a list or table
    """Count the work of comparing a value, while it is looked through; return how many items it holds.

    A long text counts as many items as take the same time.
    """
    charge()
    pending, total, paid = [value], 0, 0
    while pending and total <= _ITEMS * MAX_STEPS:  # more than any budget has
        inner = pending.pop()
        if isinstance(inner, Mapping):
            inner = [*inner, *inner.values()]
        total += 1 + len(inner)
        total += sum(_ITEMS * (len(item) // LONG) for item in inner if isinstance(item, str))
        pending += [item for item in inner if isinstance(item, list | tuple | Mapping)]
        steps = total // _ITEMS - paid
        if steps > 256 or not pending:  # a value that shares its parts may take for ever: the limits must see it
            charge(steps)
            paid += steps
    return total


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts its work before it does it."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0
    makes_text = name in _OF_TEXTS

    @wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as jinja has it
        value = args[place]
        for argument in (*args[place + 1 :], *kwargs.values()):
            if isinstance(argument, str) and len(argument) > LONG:
                charge(argument.count(".") + argument.count(","))  # jinja splits the name of an attribute there
        if isinstance(value, str):
            _charge_filter(name, value, args[place + 1 :], kwargs)
        elif makes_text:
            _charge_filter(name, PlainEnvironment.text(value), args[place + 1 :], kwargs)
        elif name in _COMPARING and isinstance(value, Iterable) and not isinstance(value, Undefined):
            items = value if isinstance(value, list | tuple | Mapping) else list(Counted(value))
            charge_text(items)
            args = (*args[:place], items, *args[place + 1 :])
        elif isinstance(value, list | tuple | Mapping):
            PlainEnvironment.weighed(value)
            charge(len(value))
        elif isinstance(value, Iterable) and not isinstance(value, Undefined):
            args = (*args[:place], iter(Counted(value)), *args[place + 1 :])
        elif name == "round":
            precision = kwargs.get("precision", *args[place + 1 : place + 2] or (0,))
            if abs(precision) > _MAX_PRECISION:
                raise Refusal("too_large", f"the template rounds to {precision} places")
        result = function(*args, **kwargs)
        if type(result) is str and len(result) > LONG:
            charge_size(len(result))
        return result

    return charged


def _by_method(name: str) -> Callable[..., Any]:
    """Return a filter that calls a method of a text; any other value is written as a text first."""

    def filter_(value: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as jinja has it
        text = PlainEnvironment.copied(value) if isinstance(value, str) else PlainEnvironment.text(value)
        return getattr(text, name)(*args, **kwargs)

    return filter_


def _charged_test(name: str, test: Any) -> Callable[..., bool]:  # noqa: ANN401 - as jinja has it
    """Return a test that counts its work before it does it."""
    place = 1 if hasattr(test, "jinja_pass_arg") else 0

    @wraps(test)
    def charged(*args: Any) -> bool:  # noqa: ANN401
        if name in _OF_NUMBERS and isinstance(args[place], str):
            raise TypeError(f"a text is not {name}")
        if name in ("lower", "upper"):
            PlainEnvironment.text(args[place])
        for value in args[place:]:
            PlainEnvironment.weighed(value)
        return bool(test(*args))

    return charged


def _charge_filter(name: str, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Count the work of a filter on a text."""
    if name not in _OF_WHOLE_TEXTS:
        charge(len(text))
    elif name == "title":
        charge(len(text) // 2)  # as many words at most
    elif name == "replace":
        _charge_made(name, text, [kwargs.get(key, *args[at : at + 1]) for at, key in enumerate(("old", "new"))])
    elif name in ("int", "float") and len(text) > _MAX_DIGITS:
        raise Refusal("too_large", f"the template makes a number of {len(text)} characters")
    charge(1 + len(text) // LONG)


def _charge_made(name: str, text: str, args: Sequence[Any]) -> None:
    """Count the work of a method of a plain string."""
    if name == "join" and args and isinstance(args[0], list | tuple):
        items = args[0]
        charge_size(len(text) * len(items) + sum(len(item) for item in items if isinstance(item, str)), len(items))
    elif name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        count = text.count(args[0]) if args[0] else len(text) + 1
        charge_size(len(text) + count * max(0, len(args[1]) - len(args[0])))
    elif name in ("split", "rsplit", "splitlines"):
        # A part takes more memory than its characters do.
        separator = args[0] if name != "splitlines" and args and isinstance(args[0], str) else ""
        charge(text.count(separator) if separator else len(text) // 2)


def _made_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 - as `dict`
    value: dict[Any, Any] = PlainEnvironment.sized(dict(*args, **kwargs))
    return value


def _raise(message: object) -> NoReturn:
    raise TemplateError(PlainEnvironment.text(message))


def _plain_json(
    x: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    widths = (indent if isinstance(indent, int) else len(indent or ""), *map(len, separators or ()))
    if max(widths) > _MAX_WIDTH:
        raise Refusal("too_large", f"the template sets values apart by {max(widths)} characters")
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
