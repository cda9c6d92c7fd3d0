"""The sandbox that templates run in, and a compiler that lets every string keep its origin."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill.encode import Refusal
from tokenmill.encode.chat.tracked import Tracked, authored, charge, charge_size, generated, join, text_of, tojson
from tokenmill.errors import ConfigError

_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items"),
    *("join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace"),
    *("reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "tojson", "trim"),
    *("unique", "upper"),
)
"""Those that give the same every time and cannot be told to make something huge: no `random`, no `center`."""
_GLOBALS = ("range", "dict", "namespace", "cycler", "joiner")
_UNSAFE_OF_STRINGS = frozenset(
    ("format", "format_map", "center", "ljust", "rjust", "zfill", "expandtabs", "translate", "encode", "maketrans")
)
_OF_DICTS = frozenset(dir(dict))
_MAX_BITS = 4096
"""Size of the numbers that a template may make."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A template, ready to run."""

    tracked: Template
    """Follows every character."""
    plain: Template
    """Runs on plain strings, as any other library would; the text of the two must be the same."""
    has_generation: bool
    """Whether it says itself, by `{% generation %}`, what is trained on."""
    words: frozenset[str]
    """All of its literals: what a text may be compared with."""
    names: frozenset[str]
    """What it reads by name: what it is given, and what it sets itself."""


def compiled(source: str, where: str) -> Compiled:
    """Compile a template, once; one that cannot be compiled raises `ConfigError` with the line."""
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
    words = _strings(tree)
    return Compiled(
        tracked=tracked.from_string(source),
        plain=plain.from_string(source),
        has_generation=any(node.identifier == GenerationBlock.identifier for node in blocks),
        words=frozenset(words),
        names=frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"),
    )


def _strings(node: nodes.Node) -> set[str]:
    constants = [node] if isinstance(node, nodes.Const) else list(node.find_all(nodes.Const))
    return {constant.value for constant in constants if isinstance(constant.value, str)}


class GenerationBlock(Extension):
    """The tag `{% generation %}`, which says what the assistant produced."""

    tags = {"generation"}  # noqa: RUF012 - as jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        """Make it a call block, as transformers does: names set inside it are not seen outside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("produced"), [], [], body).set_lineno(line)

    def produced(self, caller: Callable[[], str]) -> str:
        """Return what the block wrote, marked where strings are tracked."""
        text = caller()
        return generated(text) if isinstance(self.environment, TrackedEnvironment) else text


class _NoConstantFolding(CodeGenerator):
    """Leaves all work to the time when it is counted; jinja would work out constants while it compiles."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:  # noqa: ANN401
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class PlainEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with the names that chat templates expect.

    It has no limits of its own: a template runs here only after it has run tracked.
    """

    code_generator_class: type[CodeGenerator] = _NoConstantFolding

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[GenerationBlock, LoopControlExtension],
        )
        self._safe: dict[tuple[type, str], bool] = {}
        self.filters = {name: self.filters[name] for name in _FILTERS}
        self.filters["tojson"] = _plain_json
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals["raise_exception"] = _raise

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - as jinja has it
        """Return an attribute or item, as jinja does; items of objects, which are most, without detours."""
        if type(obj) is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Refuse what the sandbox refuses, and methods that can make something huge."""
        # All that is asked below depends on the type alone; to ask it each time took a fifth of a render.
        key = (type(obj), attr)
        if key not in self._safe:
            self._safe[key] = (
                not (isinstance(obj, str) and attr in _UNSAFE_OF_STRINGS)
                and not isinstance(obj, int | float | bytes)
                and super().is_safe_attribute(obj, attr, value)
            )
        return self._safe[key]

    def wrap_str_format(self, value: object) -> None:
        """Leave `str.format` to `is_safe_attribute`, which refuses it."""


class _Code(_NoConstantFolding):
    """Makes the literals of a template tracked, and counts loops."""

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


class TrackedEnvironment(PlainEnvironment):
    """A sandbox in which all strings are tracked, and all work is counted."""

    code_generator_class = _Code
    concat = staticmethod(join)
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__()
        self.literals: list[Tracked] = []
        self.finalize = text_of
        self.filters |= {"tojson": tojson, "string": text_of, "safe": text_of, "join": self._join}
        self.filters["counted"] = Counted
        self.globals["dict"] = _made_dict

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None).set_lineno(loop.lineno)
            loop.iter.set_environment(self)
        return tree

    @staticmethod
    def joined(values: Iterable[object]) -> Tracked:
        """Do what the operator `~` does."""
        return join(map(text_of, values))

    @staticmethod
    def sized(value: Any) -> Any:  # noqa: ANN401 - given back as it is
        """Count all that a list, tuple or dict holds, however deep: shared parts count each time they occur."""
        open_ = [value]
        while open_:
            inner = open_.pop()
            if isinstance(inner, Mapping):
                inner = [*inner, *inner.values()]
            if isinstance(inner, list | tuple):
                charge(1 + len(inner))
                open_ += [item for item in inner if isinstance(item, list | tuple | Mapping)]
        return value

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as jinja has it
        """Call a macro, method or function; every call is 16 steps."""
        charge(16)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401, ARG002
        """Add, multiply, raise or format, if the result is not huge."""
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
        if operator == "%" and isinstance(left, str) and not isinstance(left, Tracked):
            left = Tracked(left)
        value = self.binop_table[operator](left, right)
        return self.sized(value) if isinstance(value, list | tuple) else value

    def _join(self, value: Iterable[object], d: str = "", attribute: str | int | None = None) -> Tracked:
        items = value if attribute is None else map(make_attrgetter(self, attribute), value)
        separator = text_of(d)
        return separator.join(text_of(item) for item in items)


class Counted:
    """What a loop goes over; every round is a step."""

    def __init__(self, values: Iterable[object]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[object]:
        for value in self._values:
            charge()
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # a TypeError is what jinja expects of an iterator


def _made_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 - as `dict`
    value: dict[Any, Any] = TrackedEnvironment.sized(dict(*args, **kwargs))
    return value


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
