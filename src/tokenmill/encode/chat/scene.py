"""One conversation under one template, rendered whole or in part, with the origin of every character."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from jinja2.environment import Template

from tokenmill.encode.chat.record import Record
from tokenmill.encode.chat.refusal import Refusal, budget
from tokenmill.encode.chat.sandbox import Compiled
from tokenmill.encode.chat.tracked import GENERATION, UNKNOWN, runs_of
from tokenmill.encode.chat.written import authored
from tokenmill.errors import ConfigError

Range: TypeAlias = tuple[int, int]
"""First character and the one after the last."""


class Fragment(NamedTuple):
    """Characters of a render that stand together in one string of the record."""

    begin: int
    end: int
    origin: int
    """The first character's number in the record."""
    step: int
    """1 where each further character has the next number; 0 where all have one, as what an escape makes of it."""
    string: int
    owner: int
    """Which message, or `SETTING`."""

    @property
    def last_origin(self) -> int:
        """The last character's number in the record."""
        return self.origin + (self.end - self.begin - 1) * self.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A render; what is in no fragment the template wrote."""

    text: str
    fragments: list[Fragment]
    """In the order of the text."""
    begins: list[int]
    """Of each fragment."""
    of_message: Mapping[int, list[Fragment]]
    generation: list[Range]
    """What generation blocks wrote; ranges do not touch."""

    def before(self, at: int) -> list[Fragment]:
        """Return the fragments that begin before a character."""
        return self.fragments[: bisect_left(self.begins, at)]

    def within(self, begin: int, end: int) -> list[Fragment]:
        """Return the fragments that have a character in a range."""
        if begin >= end:
            return []
        first = bisect_right(self.begins, begin)
        first -= first > 0 and self.fragments[first - 1].end > begin
        return self.fragments[first : bisect_left(self.begins, end)]

    def authored(self) -> list[Range]:
        """Return what the template wrote."""
        edges = [0, *(edge for one in self.fragments for edge in (one.begin, one.end)), len(self.text)]
        return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A conversation to render."""

    compiled: Compiled
    where: str
    special_tokens: Mapping[str, str]
    record: Record
    striking: list[list[int]] = field(default_factory=list)
    """Kept by `sample`, once it is known: messages with what the template may look for."""
    _kept: dict[tuple[int, bool], Trace | Refusal] = field(default_factory=dict)

    def trace(self, num_messages: int, add_generation_prompt: bool) -> Trace:
        """Render the first messages and follow every character; each render is done once."""
        key = (num_messages, add_generation_prompt)
        if key not in self._kept:
            try:
                self._kept[key] = self._traced(*key)
            except Refusal as error:
                self._kept[key] = error
        kept = self._kept[key]
        if isinstance(kept, Refusal):
            raise kept
        return kept

    def try_trace(self, num_messages: int, add_generation_prompt: bool) -> Trace | None:
        """Render the first messages, if the template takes a conversation that ends there."""
        try:
            return self.trace(num_messages, add_generation_prompt)
        except Refusal:
            return None

    def refuse_other_text(self, trace: Trace, add_generation_prompt: bool) -> None:
        """Refuse if plain strings, which every other library renders with, give another text."""
        names = self._names(len(self.record.messages), add_generation_prompt, str)
        text = self._run(self.compiled.plain, {name: bare(value) for name, value in names.items()})
        if text != trace.text:
            raise Refusal("changed", "the text is another one when its characters are followed")

    def _traced(self, num_messages: int, add_generation_prompt: bool) -> Trace:
        rendered = self._run(self.compiled.tracked, self._names(num_messages, add_generation_prompt, authored))
        text = str.__str__(rendered)
        fragments: list[Fragment] = []
        generation: list[Range] = []
        of_message: dict[int, list[Fragment]] = {}
        at = 0
        for size, first, step in runs_of(rendered):
            if first == UNKNOWN:
                raise Refusal("untracked", f"the template makes {text[at : at + 40]!r} in a way not followed")
            if first & GENERATION:
                begin = generation.pop()[0] if generation and generation[-1][1] == at else at
                generation.append((begin, at + size))
            origin = first & (GENERATION - 1)
            if origin:
                string = self.record.string_of(origin)
                owner = self.record.owners[string]
                fragments.append(Fragment(at, at + size, origin, step, string, owner))
                of_message.setdefault(owner, []).append(fragments[-1])
            at += size
        return Trace(
            text=text,
            fragments=fragments,
            begins=[one.begin for one in fragments],
            of_message=of_message,
            generation=generation,
        )

    def _names(self, num_messages: int, prompt: bool, own: Callable[[str], str]) -> dict[str, Any]:
        """Return what the template may refer to; `own` makes a string the template's."""
        record = self.record
        return {
            **{name: own(token) for name, token in self.special_tokens.items()},
            "strftime_now": lambda form: own(self._now().strftime(form)),
            **record.options,
            "messages": record.messages[:num_messages],
            "tools": record.tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }

    def _run(self, template: Template, names: dict[str, Any]) -> str:
        with budget():
            try:
                return template.render(names)
            except (Refusal, ConfigError):
                raise
            except Exception as error:
                # A template may fail in any way that Python can; here it costs the record, not the job.
                text = f"{type(error).__name__}: {error}".replace("'Tracked'", "'str'")
                raise Refusal("template_error", f"the template fails with {text}") from error

    def _now(self) -> datetime:
        given = self.record.options.get("now")
        if given is None:
            raise ConfigError(
                f"chat template {self.where}: it writes today's date, and data must not depend on the clock, "
                'got no date; give one among the options of the template: now = "2025-01-31"'
            )
        try:
            return datetime.fromisoformat(str.__str__(given))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"chat template {self.where}: now must be a date in ISO form, got {given!r}; "
                'write it as "2025-01-31"'
            ) from error


def bare(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a value with plain strings in place of tracked ones."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return {str.__str__(key): bare(item) for key, item in value.items()}
    return [bare(item) for item in value] if isinstance(value, list) else value
