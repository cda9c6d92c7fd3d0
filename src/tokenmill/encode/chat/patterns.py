"""What a template writes of a message in some place, known from conversations before it: most are rendered once.

To follow every character of a conversation costs several times a plain render. But what a template writes of a
message depends on the kind of the message, and on the kinds of the few others that its sample has (`sample`). So
the render of a conversation that was followed is cut into parts, one a message, which are kept by these kinds. The
text of another conversation is put together of such parts, with its own texts in them. It counts if a plain render
gives the same text, with generation blocks in the same places, without looking into a text: then what
was proven of the parts is true here as well. Else the conversation is followed, and so is

- one in which an answer is also the text of another message, or a text has a control string: the same characters
  could be written by either of two;
- one with a turn that no sample shows, so that renders of the whole conversation have to.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from jinja2 import nodes
from jinja2.environment import Template

from tokenmill.encode import Refusal
from tokenmill.encode.chat.conversation import LABELS, MAX_DEPTH, ROLES, SETTING, Message, Range, plain_text
from tokenmill.encode.chat.render import (
    Form,
    Loss,
    Rendered,
    best_form,
    forms_of,
    may_have_forms,
    notes_of,
    says_of_training,
    trained_messages,
    unsaid_of,
    with_reasoning,
)
from tokenmill.encode.chat.sample import first_call, neighbours
from tokenmill.encode.chat.template import ChatTemplate, PlainEnvironment
from tokenmill.encode.chat.tracked import BLOCK_BEGIN, BLOCK_END, MAX_STEPS, budget, during, showing_blocks
from tokenmill.encode.tokenizer import control_pattern
from tokenmill.fields import surrogate_in

_MAX_PARTS = _MAX_SHAPES = 1 << 14
_MAX_CHARS, _MAX_MESSAGES, _MAX_STEPS = 1 << 18, 256, MAX_STEPS // 16
"""Longer ones are always followed: a limit of what a render may take must not depend on which came first."""
_TRAINED, _AUTHORED, _GENERATED = 1, 2, 4
_ROLES = frozenset(ROLES)
_NOTHING_LOST = Loss(set(), (), 0)


class _Place(NamedTuple):
    """A place in a text: so many characters after its begin, or after its core."""

    after_core: bool
    offset: int


class _Piece(NamedTuple):
    """What a template writes in one go."""

    flags: int
    """Whether it is trained on, whether the template wrote it, whether a generation block did."""
    fixed: str
    """A text that is always the same; empty for one of the conversation."""
    message: int = 0
    """Among those that the part depends on, which has the text."""
    string: int = 0
    """Among the strings of the message, which it is."""
    begin: _Place = _Place(False, 0)
    end: _Place = _Place(False, 0)


class _Part(NamedTuple):
    """What a template writes of a message: from the end of the turn before it to the end of its own."""

    pieces: tuple[_Piece, ...]
    loss: Loss


class _MustBeFollowed(Exception):
    """A conversation that is always followed."""


class _Text(NamedTuple):
    text: str
    core: Range | None
    """What is another in each conversation, without white space at its ends; None if nothing is."""

    def place(self, at: int) -> _Place | None:
        """Return what a place is in all alike texts; None if it is inside of the core."""
        if self.core is None or at <= self.core[0]:
            return _Place(False, at)
        return _Place(True, at - self.core[1]) if at >= self.core[1] else None

    def at(self, place: _Place) -> int:
        """Return where a place of alike texts is in this one."""
        return place.offset + (self.core[1] if place.after_core and self.core else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """What a message has in common with all that are alike, and its texts."""

    number: int
    says: bool | None
    """Whether it is to be trained on, as far as it says so itself."""
    texts: list[_Text]
    free: list[str]
    """Those of them that are neither names nor fixed."""
    labels: list[str]
    """Names and ids among them, which other messages may have as well."""
    names: list[str]
    """All of them that are no free text."""


_Kinds: TypeAlias = dict[int, tuple[Message, _Kind]]
"""Of the messages of a conversation, by their identity: its forms have most of them in common."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _KeyedConversation:
    """A conversation, by the kinds of its messages."""

    messages: Sequence[Message]
    texts: list[list[_Text]]
    """Of each message, in the order in which they are marked."""
    near: list[list[int]]
    """The messages up to each on which it depends what is written of it."""
    keys: list[tuple[int, ...]]
    """Of each part: one a message, and what stands behind all of them."""
    cores: Set[str]
    """All texts, without white space at their ends."""
    open_texts: Sequence[Set[str]]
    """Texts that the template may look into, as they are the same in all alike: names, tools, its own, roles."""

    def size_of(self, message: int, string: int) -> int:
        """Return the characters of a string of a message."""
        return len(self.texts[message][string].text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Patterns:
    """Renders conversations with one template, and follows every character only where it must."""

    template: ChatTemplate
    kwargs: Mapping[str, Any]
    train_on: Sequence[str]
    last_only: bool
    controls: re.Pattern[str] = field(default_factory=lambda: control_pattern(()))
    """Control strings, which are ids or text by who wrote them: a text that has one is followed."""
    _parts: dict[tuple[int, ...], _Part] = field(default_factory=dict, repr=False)
    _refused: set[frozenset[int]] = field(default_factory=set, repr=False)
    """Kinds of all messages that may have other forms, where the template took such another form alone."""
    _kinds: dict[tuple[str, ...], int] = field(default_factory=dict, repr=False)
    _says: dict[int, bool | None] = field(default_factory=dict, repr=False)
    """By kind, whether such a message is to be trained on, as far as it says so itself; no text of it counts."""
    _tool_texts: dict[int, frozenset[str]] = field(default_factory=dict, repr=False)
    """By the number of tools, all texts in them."""

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered:
        """Do as `render` does, within the limits that the caller has set."""
        try:
            known = self._composed(messages, tools)
        except _MustBeFollowed:
            known = None
        if known is not None:
            return known
        rendered, forms = best_form(
            self.template, messages, tools, self.kwargs, False, self.train_on, self.last_only
        )
        self._learn(messages, tools, forms)
        return rendered

    def _composed(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Rendered | None:
        """Put the text together of known parts; None if one is not, or the template writes another text."""
        kinds: _Kinds = {}
        best: tuple[int, _KeyedConversation, list[_Part], tuple[str, ...]] | None = None
        for form_messages, notes in forms_of(with_reasoning(messages)):
            if self._refused and self._kinds_with_forms(form_messages, kinds) in self._refused:
                continue
            keyed = self._keyed(form_messages, tools, kinds)
            known = [self._parts[key] for key in keyed.keys if key in self._parts]
            if len(known) < len(keyed.keys):
                return None
            unsaid = unsaid_of([part.loss for part in known], keyed.size_of)
            if best is None or unsaid < best[0]:
                best = unsaid, keyed, known, notes
            if not unsaid:
                break
        if best is None:
            return None
        unsaid, keyed, known, notes = best
        text, ends, flags = _joined(keyed, known)
        supervised = _ranges(ends, flags, _TRAINED)
        if len(text) > _MAX_CHARS or not supervised:
            return None
        if not self._writes(_with_blocks(text, _ranges(ends, flags, _GENERATED)), keyed, tools):
            return None
        return Rendered(
            text=text,
            supervised=supervised,
            authored=_ranges(ends, flags, _AUTHORED),
            notes=(*notes, *notes_of(part.loss for part in known)),
            unsaid=unsaid,
        )

    def _writes(self, text: str, keyed: _KeyedConversation, tools: Sequence[Any] | None) -> bool:
        """Say whether the template makes a text, with the marks of generation blocks, of a conversation."""
        try:
            with showing_blocks(), budget(_MAX_STEPS), _opaque_texts(keyed.cores, keyed.open_texts):
                opaque = _opaque_template(self.template.source)
                plain = plain_text(self.template, opaque, keyed.messages, tools, self.kwargs, False)
        except Refusal:
            return False
        return plain.replace(BLOCK_END + BLOCK_BEGIN, "") == text

    def _learn(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, forms: Sequence[Form | None]
    ) -> None:
        """Keep the parts of a conversation that was followed, in all forms that were tried."""
        kinds: _Kinds = {}
        for (form_messages, _), form in zip(forms_of(with_reasoning(messages)), forms, strict=False):
            try:
                if form is None:
                    self._refused.add(self._kinds_with_forms(form_messages, kinds))
                    continue
                keyed = self._keyed(form_messages, tools, kinds)
            except _MustBeFollowed:
                continue
            trace = form.renderer.trace(len(form_messages), False)
            if not self._writes(_with_blocks(trace.text, trace.generation), keyed, tools):
                continue
            # What renders of the conversation itself showed of a turn may be otherwise in another one. What is
            # written of an empty message is in the part of the next.
            unsure = {at for index in form.renderer.unsampled for at in (index, index + 1)}
            for index, (key, part) in enumerate(zip(keyed.keys, _cut(form, keyed), strict=False)):
                if index not in unsure:
                    self._parts[key] = part
        while len(self._parts) > _MAX_PARTS:
            del self._parts[next(iter(self._parts))]
        if len(self._refused) > _MAX_PARTS:
            self._refused.clear()

    # What makes messages alike.

    def _keyed(self, messages: Sequence[Message], tools: Sequence[Any] | None, kinds: _Kinds) -> _KeyedConversation:
        """Return what a conversation has in common with others; `kinds` keeps what is known of its messages."""
        if not isinstance(messages, list | tuple) or not 0 < len(messages) <= _MAX_MESSAGES:
            raise _MustBeFollowed
        own = [self._kind(message, kinds) for message in messages]
        roles = [message["role"] for message in messages]
        try:
            trained = trained_messages(roles, [kind.says for kind in own], self.train_on, self.last_only)
        except Refusal as error:
            raise _MustBeFollowed from error
        numbers = [kind.number * 2 for kind in own]
        answers: set[str] = set()
        for index in trained:
            numbers[index] += 1
            answers.update(own[index].free)
        others = (kind for number, kind in zip(numbers, own, strict=True) if number % 2 == 0)
        if any(not answers.isdisjoint(kind.free) for kind in others):
            raise _MustBeFollowed
        names = {name for kind in own for name in kind.names}
        setting = self._setting(tools)
        tool_texts, words = self._tool_texts[setting], self.template.compiled.words
        free = {text for kind in own for text in kind.free}
        if not names.isdisjoint(free) or not tool_texts.isdisjoint(free):
            raise _MustBeFollowed
        near, behind = neighbours(roles, first_call(roles, messages))
        keys = []
        for index, (before, after) in enumerate(zip(near, behind, strict=True)):
            labels = [label for at in (*before, *after) for label in own[at].labels]
            keys.append(
                (
                    setting,
                    len(before) > index,  # whether there are no others before it
                    *[numbers[at] for at in before],
                    -1,
                    *[numbers[at] for at in after],
                    -1,
                    *[labels.index(label) for label in labels],  # which of them are the same
                )
            )
        return _KeyedConversation(
            messages=messages,
            texts=[kind.texts for kind in own],
            near=near,
            keys=[*keys, (*keys[-1], -1)],
            cores=free | names,
            open_texts=(names, tool_texts, words, _ROLES),
        )

    def _kinds_with_forms(self, messages: Sequence[Message], kinds: _Kinds) -> frozenset[int]:
        """Return the kinds of messages that a template may want in another form."""
        if not isinstance(messages, list | tuple):
            raise _MustBeFollowed
        return frozenset(self._kind(message, kinds).number for message in messages if may_have_forms(message))

    def _setting(self, tools: Sequence[Any] | None) -> int:
        """Return a number of tools, whose texts are kept by it."""
        setting = self._number((repr(tools),))
        if setting not in self._tool_texts:
            self._tool_texts[setting] = frozenset(_texts_in(tools))
        return setting

    def _number(self, shape: tuple[str, ...]) -> int:
        if len(self._kinds) >= _MAX_SHAPES and shape not in self._kinds:
            for known in (self._kinds, self._parts, self._refused, self._says, self._tool_texts):
                known.clear()
            raise _MustBeFollowed  # some of the conversation have numbers of before
        return self._kinds.setdefault(shape, len(self._kinds))

    def _kind(self, message: Message, kinds: _Kinds) -> _Kind:
        if id(message) in kinds:
            return kinds[id(message)][1]
        if type(message) is not dict or type(message.get("role")) is not str:
            raise _MustBeFollowed
        shape = _Shape(words=self.template.compiled.words, controls=self.controls)
        shape.add(message)
        number = self._number(tuple(shape.parts))
        if number not in self._says:
            try:
                self._says[number] = says_of_training(message)
            except Refusal as error:
                raise _MustBeFollowed from error
        kind = _Kind(
            number=number,
            says=self._says[number],
            texts=shape.texts,
            free=shape.free,
            labels=shape.labels,
            names=[*shape.labels, *(each.text for each in shape.texts if each.core is None)],
        )
        kinds[id(message)] = message, kind
        return kind


@dataclass(kw_only=True, slots=True)
class _Shape:
    """All that alike messages share, and the texts that they do not."""

    words: frozenset[str]
    controls: re.Pattern[str]
    parts: list[str] = field(default_factory=list)
    texts: list[_Text] = field(default_factory=list)
    free: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def add(self, value: Any, depth: int = 0, name: str = "") -> None:  # noqa: ANN401 - any JSON value
        """Add a value; what is no JSON, or a text that the template may compare with, must be followed."""
        kind = type(value)
        if kind is str:
            self._add_text(value, name)
        elif value is None or kind in (bool, int, float):
            self.parts.append(repr(value))
        elif kind not in (dict, list) or depth > MAX_DEPTH:
            raise _MustBeFollowed
        elif kind is list:
            self.parts.append("[")
            for item in value:
                self.add(item, depth + 1, name)
            self.parts.append("]")
        else:
            self.parts.append("{")
            for key, item in value.items():
                if type(key) is not str:
                    raise _MustBeFollowed
                self.parts.append(key)
                if depth == 0 and key == "role":  # which is not marked
                    self.parts.append(item)
                    continue
                if key:
                    self.texts.append(_Text(key, None))
                self.add(item, depth + 1, key)
            self.parts.append("}")

    def _add_text(self, text: str, name: str) -> None:
        if not text:
            self.parts.append("=")
            return
        if not text.isascii() and surrogate_in(text) is not None:
            raise _MustBeFollowed
        core, is_label = text.strip(), name in LABELS
        if self.controls.search(text):
            raise _MustBeFollowed
        if not core or name == "type" or (is_label and core in self.words):
            self.parts.append(f"={text}")
            self.texts.append(_Text(text, None))
            return
        if core in self.words or core in _ROLES:
            raise _MustBeFollowed
        begin = text.index(core[0])
        end = begin + len(core)
        self.parts.append(f'"{text[:begin]}\0{text[end:]}')
        self.texts.append(_Text(text, (begin, end)))
        (self.labels if is_label else self.free).append(core)


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (str(key), *_texts_in(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item)


# Renders as parts.


def _cut(form: Form, keyed: _KeyedConversation) -> list[_Part]:
    """Cut a render into parts, one a message and one for what is behind them; nothing where that cannot be done."""
    conversation = form.renderer.conversation
    trace = form.renderer.trace(len(conversation.messages), False)
    trained = [edge for both in form.rendered.supervised for edge in both]
    generated = [edge for both in trace.generation for edge in both]
    edges = sorted({*trained, *generated})

    def pieces(begin: int, end: int, own: int) -> list[_Piece]:
        inner = edges[bisect_right(edges, begin) : bisect_left(edges, end)]
        bounds = (begin, *inner, end) if begin < end else ()
        return [_Piece(flags(first, own), trace.text[first:last]) for first, last in pairwise(bounds)]

    def flags(at: int, own: int) -> int:
        is_trained, is_generated = bisect_right(trained, at) % 2, bisect_right(generated, at) % 2
        return own + _TRAINED * is_trained + _GENERATED * is_generated

    parts: list[list[_Piece]] = [[] for _ in range(len(keyed.near) + 1)]
    at = current = 0
    pending: list[_Piece] = []
    for each in trace.fragments:
        pending += pieces(at, each.begin, _AUTHORED)
        at = each.end
        if each.owner == SETTING:
            pending += pieces(each.begin, at, 0)  # of tools or options, which are the same in all
            continue
        if each.owner > current:
            pending = _without_end(parts[current], pending)
            current = each.owner
        parts[current] += pending
        pending = []
        string = each.string - conversation.firsts[each.owner]
        origin = each.origin - conversation.starts[each.string]
        text = keyed.texts[each.owner][string]
        begin, end = text.place(origin), text.place(origin + at - each.begin)
        is_cut = bisect_right(edges, each.begin) != bisect_left(edges, at)
        is_escaped = at > each.begin + 1 and not each.step
        if begin is None or end is None or is_cut or is_escaped or each.owner not in keyed.near[current]:
            return []
        message = keyed.near[current].index(each.owner)
        parts[current].append(_Piece(flags(each.begin, 0), "", message, string, begin, end))
    parts[-1] = _without_end(parts[-2], pending + pieces(at, len(trace.text), _AUTHORED))
    return [_Part(tuple(each), loss) for each, loss in zip(parts, (*form.losses, _NOTHING_LOST), strict=True)]


def _without_end(part: list[_Piece], behind: list[_Piece]) -> list[_Piece]:
    """Add what ends a turn to its part; return what is left of the pieces that stand behind it."""
    size = next((at for at, piece in enumerate(behind) if not piece.flags & _TRAINED), len(behind))
    part += behind[:size]
    return behind[size:]


def _joined(keyed: _KeyedConversation, parts: Sequence[_Part]) -> tuple[str, list[int], list[int]]:
    """Return the text that parts make, where each piece ends in it, and the flags of each."""
    written: list[str] = []
    ends: list[int] = []
    all_flags: list[int] = []
    size = 0
    for part, near in zip(parts, (*keyed.near, ()), strict=True):
        for flags, fixed, message, string, begin, end in part.pieces:
            piece = fixed
            if not piece:
                text = keyed.texts[near[message]][string]
                piece = text.text[text.at(begin) : text.at(end)]
            written.append(piece)
            size += len(piece)
            ends.append(size)
            all_flags.append(flags)
    return "".join(written), ends, all_flags


def _with_blocks(text: str, generation: Iterable[Range]) -> str:
    """Return a text with marks around what generation blocks wrote; one that has such marks is never the same."""
    marked: list[str] = []
    done = 0
    for begin, end in generation:
        marked += [text[done:begin], BLOCK_BEGIN, text[begin:end], BLOCK_END]
        done = end
    return "".join([*marked, text[done:]])


def _ranges(ends: Sequence[int], flags: Sequence[int], flag: int) -> tuple[Range, ...]:
    """Return the ranges of pieces that have a flag."""
    ranges: list[Range] = []
    begin, before = 0, 0
    inside = False
    for end, own in zip(ends, flags, strict=True):
        if bool(own & flag) != inside:
            if inside:
                ranges.append((begin, before))
            begin, inside = before, not inside
        before = end
    if inside:
        ranges.append((begin, before))
    return tuple(ranges)


# Renders that stop where a template looks into a text.
#
# What a template writes of a message is known from another message only if it does the same with both. So it may
# write a text, strip it, look for strings that are not in it, and compare it with the template's own. It may not
# find a string in it, ask for its length or for some of its characters, take it for a number, or compare it with
# another text. A text that the template made of its own strings and those of a record may hold what only its own
# have.

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
class _OpaqueTexts:
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


_texts_now: ContextVar[_OpaqueTexts | None] = ContextVar("texts that must not be looked into", default=None)


def _opaque_texts(texts: Set[str], open_texts: Sequence[Set[str]]) -> AbstractContextManager[None]:
    """Refuse renders that look into a text which is not open, or find something that a text has given."""
    return during(_texts_now, _OpaqueTexts(all=texts, open=open_texts))


@lru_cache(maxsize=256)
def _opaque_template(source: str) -> Template:
    """Compile a template that heeds `_opaque_texts`."""
    return _OpaqueEnvironment().from_string(source)


def _looks_into() -> Refusal:
    return Refusal("template_error", "the template looks into a text")


class _OpaqueEnvironment(PlainEnvironment):
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
        if _constant(compare.expr) is not None and operators <= {"in", "notin"}:
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
        if operators <= {"in", "notin"} and _is_constant_text(sides[-1]):
            return
        if len(compare.ops) == 1 and operators <= {"eq", "ne"}:
            compare.ops[0].expr = self._filtered(compare.ops[0].expr, "compared", compare.expr)
            return
        compare.expr = self._filtered(compare.expr, "looked_into", nodes.Const("items"))
        for operand in compare.ops:
            operand.expr = self._filtered(operand.expr, "looked_into", nodes.Const("items"))

    def _guard(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.Getitem):
            if _constant(node.arg) is None:
                node.node = self._filtered(node.node, "looked_into")
        elif isinstance(node, nodes.Filter) and node.node is not None:
            self._guard_filter(node)
        elif isinstance(node, nodes.Test):
            with_word = node.name in _TESTS_WITH_A_WORD and all(_constant(arg) is not None for arg in node.args)
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
        elif method.attr in _STRIPPING and all((_constant(arg) or "?").isspace() for arg in call.args):
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


def _constant(node: nodes.Node) -> str | None:
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def _is_constant_text(node: nodes.Node) -> bool:
    """Say whether a node is a text of the template, or a list of them."""
    items = node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]
    return all(_constant(item) is not None for item in items)


def _is_zero(sides: list[nodes.Expr]) -> bool:
    return len(sides) == 2 and any(isinstance(side, nodes.Const) and side.value == 0 for side in sides)


def _is_plain_choice(node: nodes.Filter) -> bool:
    """Say whether items are chosen, or mapped, by nothing that looks into texts."""
    if node.name == "map":
        return not node.args and {keyword.key for keyword in node.kwargs} <= {"attribute", "default"}
    args = [_constant(arg) for arg in node.args[1 if node.name.endswith("attr") else 0 :]]
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
            raise _looks_into()
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
            raise _looks_into()
    return value
