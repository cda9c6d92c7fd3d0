"""A conversation as one text, with what is trained on and who wrote each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenmill.encode.chat.record import read_record

if TYPE_CHECKING:
    from tokenmill.encode.chat.template import ChatTemplate

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """The text of a conversation; ranges are (first character, one after the last), sorted and disjoint."""

    text: str
    supervised: tuple[tuple[int, int], ...]
    """What is trained on."""
    authored: tuple[tuple[int, int], ...]
    """What the template wrote: control strings are control tokens there, and ordinary text elsewhere."""


def render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] = NO_OPTIONS,
    add_generation_prompt: bool = False,
    train_on: Sequence[str] = ("assistant",),
    last_only: bool = False,
) -> Rendered:
    """Render a conversation; one that cannot be rendered or proven raises `Refusal`, which is a `DocumentError`.

    With `add_generation_prompt` it is a prompt, in which nothing is trained on. `kwargs` are names that the
    template reads, such as `enable_thinking`; `now`, a date in ISO form, is what templates get for today.
    """
    from tokenmill.encode.chat.sandbox import compiled
    from tokenmill.encode.chat.scene import Scene
    from tokenmill.encode.chat.spans import find_ranges

    record = read_record(messages, tools, kwargs, train_on)
    scene = Scene(
        compiled=compiled(template.source, template.where),
        where=template.where,
        special_tokens=template.special_tokens,
        record=record,
    )
    full = scene.trace(len(record.messages), add_generation_prompt)
    scene.refuse_other_text(full, add_generation_prompt)
    return Rendered(
        text=full.text,
        supervised=() if add_generation_prompt else find_ranges(scene, train_on, last_only),
        authored=tuple(full.authored()),
    )
