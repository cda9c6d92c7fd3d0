"""One conversation under one template, rendered whole or in part, with the origin of every character."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2.environment import Template

from tokenmill.encode.chat.record import NOBODY, Record
from tokenmill.encode.chat.refusal import Refusal, budget
from tokenmill.encode.chat.sandbox import Compiled
from tokenmill.encode.chat.tracked import GENERATION, UNKNOWN, marks_of
from tokenmill.encode.chat.written import authored
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A render; all arrays have one item a character."""

    text: str
    origin: npt.NDArray[np.int64]
    """Number of the record's character, 0 where the template wrote it."""
    string: npt.NDArray[np.int64]
    """Which string of the record, -1 for none."""
    owner: npt.NDArray[np.int64]
    """Which message, `SETTING` or `NOBODY`."""
    generation: npt.NDArray[np.bool_]
    """Whether a generation block wrote it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A conversation to render."""

    compiled: Compiled
    where: str
    special_tokens: Mapping[str, str]
    record: Record
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
        text = self._run(self.compiled.plain, {name: _bare(value) for name, value in names.items()})
        if text != trace.text:
            raise Refusal("changed", "the text is another one when its characters are followed")

    def _traced(self, num_messages: int, add_generation_prompt: bool) -> Trace:
        rendered = self._run(self.compiled.tracked, self._names(num_messages, add_generation_prompt, authored))
        marks = marks_of(rendered)
        if np.any(marks == UNKNOWN):
            at = int(np.flatnonzero(marks == UNKNOWN)[0])
            raise Refusal(
                "untracked", f"the template makes {str.__str__(rendered)[at : at + 40]!r} in a way not followed"
            )
        origin = marks & (GENERATION - 1)
        string = np.where(origin > 0, self.record.field_of(origin), -1)
        owners = np.array([*self.record.owners, NOBODY], np.int64)
        return Trace(
            text=str.__str__(rendered),
            origin=origin,
            string=string,
            owner=owners[string],
            generation=(marks & GENERATION) > 0,
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
                raise Refusal("template_error", text) from error

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


def _bare(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a value with plain strings in place of tracked ones."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return {_bare(key): _bare(item) for key, item in value.items()}
    return [_bare(item) for item in value] if isinstance(value, list) else value
