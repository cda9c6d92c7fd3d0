"""Renders that stop where a template looks into a text: for all others a text could be any other of its kind.

What a template writes of a message can be known from another message only if it does the same with both. So it may
write a text, strip it, look for strings that are not in it, and compare it with the template's own. It may not find
a string in it, ask for its length or for some of its characters, take it for a number, or compare it with another.
A text that the template made of its own strings and those of a record may hold what only its own have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jinja2 import nodes
from jinja2.environment import Template

from tokenmill.encode import Refusal
from tokenmill.encode.chat.sandbox import PlainEnvironment

_HARMLESS_FILTERS = frozenset(("d", "default", "dictsort", "items", "safe", "string", "tojson", "trim"))
_OWN_FILTERS = frozenset(("compared", "looked_into", "lowered", "num_items", "searched"))
_FILTERS_OF_LISTS = frozenset(("map", "reject", "rejectattr", "select", "selectattr"))
_COMPARING_FILTERS = frozenset(("groupby", "max", "min", "sort", "unique"))
_TESTS_OF_TYPES = frozenset(
    ("boolean", "callable", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number")
) | {"sequence", "string", "true", "undefined"}
_TESTS_WITH_A_WORD = frozenset(("==", "eq", "equalto", "!=", "ne"))
_STRIPPING = frozenset(("lstrip", "rstrip", "strip"))
_SEARCHING = frozenset(("endswith", "partition", "replace", "rpartition", "rsplit", "split", "startswith"))
_OF_STRINGS = frozenset(dir(str)) - frozenset(dir(dict)) - frozenset(dir(list)) | {"count", "index"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Texts:
    """The texts of a conversation, without white space at their ends."""

    all: Set[str]
    open: Sequence[Set[str]]
    """Those that may be looked into."""
    _given: dict[str, bool] = field(default_factory=dict)

    def has_open(self, text: str) -> bool:
        core = text.strip()
        return not core or any(core in texts for texts in self.open)

    def may_give(self, needle: str) -> bool:
        """Say whether a text holds a string, or may be a part of one where the template writes the rest."""
        if needle not in self._given:
            edges = range(1, len(needle))
            begins, ends = tuple(needle[:at] for at in edges), tuple(needle[at:] for at in edges)
            self._given[needle] = any(
                needle in text or text in needle or text.endswith(begins) or text.startswith(ends)
                for text in self.all
            )
        return self._given[needle]


_texts_now: ContextVar[_Texts | None] = ContextVar("texts that must not be looked into", default=None)


@contextmanager
def opaque_texts(texts: Set[str], open_texts: Sequence[Set[str]]) -> Iterator[None]:
    """Refuse renders that look into a text which is not open, or find something that a text has given."""
    token = _texts_now.set(_Texts(all=texts, open=open_texts))
    try:
        yield
    finally:
        _texts_now.reset(token)


@lru_cache(maxsize=256)
def opaque_template(source: str) -> Template:
    """Compile a template that heeds `opaque_texts`."""
    return OpaqueEnvironment().from_string(source)


def _refuse() -> Refusal:
    return Refusal("template_error", "the template looks into a text")


class OpaqueEnvironment(PlainEnvironment):
    """The sandbox of plain strings, in which looking into a text is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.filters |= {"compared": _compared, "looked_into": _looked_into, "searched": _searched}
        self.filters |= {"num_items": self.filters["length"], "lowered": self.filters["lower"]}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for compare in list(tree.find_all(nodes.Compare)):
            self._guard_compare(compare)
        for node in list(tree.find_all((nodes.Getitem, nodes.Filter, nodes.Test, nodes.Call))):
            self._guard(node)
        return tree

    def _guard_compare(self, compare: nodes.Compare) -> None:
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        operators = {operand.op for operand in compare.ops}
        if _text(compare.expr) is not None and operators <= {"in", "notin"}:
            searched = compare.ops[0].expr
            lowered = searched if isinstance(searched, nodes.Filter) and searched.name == "lower" else None
            if lowered is not None:
                lowered.name = "lowered"
            is_lower = nodes.Const(lowered is not None)
            compare.ops[0].expr = self._filtered(searched, "searched", compare.expr, is_lower)
            return
        for side in sides:
            # To ask whether there are any items is to ask whether a text is empty.
            if isinstance(side, nodes.Filter) and side.name in ("count", "length") and _is_zero(sides):
                side.name = "num_items"
        if operators <= {"eq", "ne"} and any(isinstance(side, nodes.Const) for side in sides):
            return
        if operators <= {"in", "notin"} and _texts(sides[-1]) is not None:
            return
        if len(compare.ops) == 1 and operators <= {"eq", "ne"}:
            compare.ops[0].expr = self._filtered(compare.ops[0].expr, "compared", compare.expr)
            return
        compare.expr = self._filtered(compare.expr, "looked_into", nodes.Const("items"))
        for operand in compare.ops:
            operand.expr = self._filtered(operand.expr, "looked_into", nodes.Const("items"))

    def _guard(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.Getitem):
            if _text(node.arg) is None:
                node.node = self._filtered(node.node, "looked_into")
        elif isinstance(node, nodes.Filter) and node.node is not None:
            self._guard_filter(node)
        elif isinstance(node, nodes.Test):
            with_word = node.name in _TESTS_WITH_A_WORD and all(_text(arg) is not None for arg in node.args)
            if node.name not in _TESTS_OF_TYPES and not with_word:
                node.node = self._filtered(node.node, "looked_into")
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            self._guard_method(node, node.node)

    def _guard_filter(self, node: nodes.Filter) -> None:
        assert node.node is not None
        compares = node.name in _COMPARING_FILTERS or (node.name == "dictsort" and (node.args or node.kwargs))
        if compares or (node.name in _FILTERS_OF_LISTS and not _is_plain_choice(node)):
            node.node = self._filtered(node.node, "looked_into", nodes.Const("all"))
        elif node.name == "replace" and node.args:
            node.node = self._filtered(node.node, "searched", node.args[0])
        elif node.name not in _HARMLESS_FILTERS | _FILTERS_OF_LISTS | _OWN_FILTERS:
            node.node = self._filtered(node.node, "looked_into")

    def _guard_method(self, call: nodes.Call, method: nodes.Getattr) -> None:
        """Guard the text that a method is called of; of other values nothing is looked into."""
        if method.attr == "changed":  # of a loop, which compares
            everything = nodes.Const("all")
            call.args = [self._filtered(argument, "looked_into", everything) for argument in call.args]
        elif method.attr in _STRIPPING and not "".join(_text(argument) or "?" for argument in call.args).strip():
            return
        elif method.attr in _SEARCHING and call.args:
            method.node = self._filtered(method.node, "searched", call.args[0])
        elif method.attr in _OF_STRINGS and method.attr != "join":
            method.node = self._filtered(method.node, "looked_into")

    def _filtered(self, value: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
        node = nodes.Filter(value, name, list(args), [], None, None)
        node.set_lineno(value.lineno)
        node.set_environment(self)
        return node


def _text(node: nodes.Node) -> str | None:
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def _texts(node: nodes.Node) -> list[str] | None:
    """Return the text, or all of them, that a constant has; None for anything else."""
    items = node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]
    texts = [text for text in map(_text, items) if text is not None]
    return texts if len(texts) == len(items) else None


def _is_zero(sides: list[nodes.Expr]) -> bool:
    return len(sides) == 2 and any(isinstance(side, nodes.Const) and side.value == 0 for side in sides)


def _is_plain_choice(node: nodes.Filter) -> bool:
    """Say whether items are chosen, or mapped, by nothing that looks into texts."""
    if node.name == "map":
        return not node.args and {keyword.key for keyword in node.kwargs} <= {"attribute", "default"}
    args = [_text(arg) for arg in node.args[1 if node.name.endswith("attr") else 0 :]]
    test = args[0] if args else None
    is_type = len(args) == 1 and test in _TESTS_OF_TYPES
    return not args or is_type or (len(args) == 2 and test in _TESTS_WITH_A_WORD and args[1] is not None)


def _looked_into(value: Any, items: str = "") -> Any:  # noqa: ANN401 - given back as it is
    """Refuse a text that is not open; with `items` also such a text in a list, and with `all` however deep."""
    texts = _texts_now.get()
    if texts is None or not value:
        return value
    if isinstance(value, str):
        if not texts.has_open(value):
            raise _refuse()
    elif items and isinstance(value, list | tuple):
        for item in value:
            _looked_into(item, items if items == "all" else "")
    elif items == "all" and isinstance(value, dict):
        for item in (*value, *value.values()):
            _looked_into(item, items)
    return value


def _compared(value: Any, other: Any) -> Any:  # noqa: ANN401 - given back as it is
    """Refuse texts that are compared, unless they are one and the same."""
    if value is not other:
        _looked_into(other, "items")
        _looked_into(value, "items")
    return value


def _searched(value: Any, needle: Any, is_lower: bool = False) -> Any:  # noqa: ANN401 - given back as it is
    """Refuse a text that holds what is looked for, if that is not all the template's own."""
    texts = _texts_now.get()
    if texts is None or not isinstance(value, str):
        return value
    core = value.strip()
    for each in needle if isinstance(needle, tuple) else (needle,):
        # White space at the ends of a text is a part of its kind, and other white space is not.
        text = value if isinstance(each, str) and each.strip() else core
        if not isinstance(each, str) or (
            each in text and not texts.has_open(value) and (is_lower or texts.may_give(each))
        ):
            raise _refuse()
    return value
