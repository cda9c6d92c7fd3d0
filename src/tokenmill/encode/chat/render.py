"""A conversation as one text, with what is trained on and who wrote each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenmill.encode.chat.record import Record, read_record, with_reasoning
from tokenmill.encode.chat.refusal import Refusal

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
    lost: tuple[str, ...] = ()
    """What the conversation has and the text has not, by the names of `losses`."""
    unsaid: int = 0
    """Characters of contents, and of their parts, of which none is in the text."""


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
    template reads, such as `enable_thinking`; `now`, a date in ISO form, is what templates get for today. A content
    that is a list of texts is given to the template as it is or, if the template does not know such, as one text.
    Reasoning is given under each name that templates read.
    """
    from tokenmill.encode.chat.losses import flattened

    def rendered(given: Sequence[Mapping[str, Any]]) -> Rendered:
        record = read_record(with_reasoning(given), tools, kwargs, train_on)
        return _rendered(template, record, add_generation_prompt, train_on, last_only)

    texts = flattened(messages)
    if texts is None:
        return rendered(messages)
    made: list[Rendered] = []
    refused: list[Refusal] = []
    for given in (messages, texts):
        try:
            made.append(rendered(given))
        except Refusal as error:
            refused.append(error)
        if made and not made[-1].unsaid:
            return made[-1]
    if not made:
        raise refused[0]
    # A template may leave out a message however it is given; that form is right in which it leaves out less.
    return min(made, key=lambda one: one.unsaid)


def _rendered(
    template: ChatTemplate, record: Record, add_generation_prompt: bool, train_on: Sequence[str], last_only: bool
) -> Rendered:
    from tokenmill.encode.chat.losses import losses_of
    from tokenmill.encode.chat.sandbox import compiled
    from tokenmill.encode.chat.scene import Scene
    from tokenmill.encode.chat.spans import find_ranges

    scene = Scene(
        compiled=compiled(template.source, template.where),
        where=template.where,
        special_tokens=template.special_tokens,
        record=record,
    )
    full = scene.trace(len(record.messages), add_generation_prompt)
    scene.refuse_other_text(full, add_generation_prompt)
    losses = losses_of(record, full)
    return Rendered(
        text=full.text,
        supervised=() if add_generation_prompt else find_ranges(scene, train_on, last_only),
        authored=tuple(full.authored()),
        lost=losses.names,
        unsaid=losses.unsaid,
    )
