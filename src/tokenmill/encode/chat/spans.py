"""What is trained on in a render: found by its generation blocks or by comparing renders, and proven."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tokenmill.encode.chat.record import NOBODY, Record
from tokenmill.encode.chat.refusal import Refusal
from tokenmill.encode.chat.scene import Scene, Trace

if TYPE_CHECKING:
    import numpy.typing as npt

Range: TypeAlias = tuple[int, int]
"""First character and the one after the last."""

# A generation prompt may go on to open, or open and close, the reasoning. A header ends before that: the template
# writes the same into the turn itself, and there it is what the model has to produce.
_REASONING = re.compile(
    r"(?:<think>|<thinking>|<\|channel>thought|<\|START_THINKING\|>|\[THINK\]|<seed:think>)\s*"
    r"(?:</think>|</thinking>|<channel\|>|<\|END_THINKING\|>|\[/THINK\]|</seed:think>)?\s*\Z"
)
_MARKUP = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Za-z_]{1,32}\]")


def find_ranges(scene: Scene, trained_roles: Sequence[str], last_only: bool) -> tuple[Range, ...]:
    """Return the sorted, disjoint ranges that are trained on; what cannot be proven is refused."""
    record = scene.record
    full = scene.trace(len(record.messages), False)
    trained = [index for index, role in enumerate(record.roles) if role in trained_roles]
    if not trained:
        raise Refusal(
            "no_trained_message", f"no message is of the roles {list(trained_roles)}, only {record.roles}"
        )
    trained = trained[-1:] if last_only else trained
    by_block = [index for index in trained if scene.compiled.has_generation and record.roles[index] == "assistant"]
    for index in by_block:
        _refuse_missing(full, record, index)
    ranges = _block_ranges(full, record, by_block, last_only) if by_block else []
    for index in trained:
        if index not in by_block:
            found = _turn_range(scene, full, index)
            ranges += [found] if found[0] < found[1] else []
    ranges = _merged(ranges)
    _verify(full, record, ranges, trained)
    return tuple(ranges)


def _merged(ranges: list[Range]) -> list[Range]:
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if merged and begin < merged[-1][1]:
            raise Refusal("overlap", f"the turns of two messages overlap at character {begin}")
        if merged and begin == merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def _verify(full: Trace, record: Record, ranges: list[Range], trained: list[int]) -> None:
    """Refuse ranges that hold a character of another message, or leave out one of a trained message."""
    if not ranges:
        raise Refusal("no_supervision", "nothing in the render is trained on")
    inside = np.zeros(len(full.text), np.bool_)
    for begin, end in ranges:
        inside[begin:end] = True
    ours = np.isin(full.owner, trained)
    foreign = np.flatnonzero(inside & ~ours & (full.owner != NOBODY))
    if foreign.size:
        raise Refusal(
            "foreign", f"what is trained on would hold {_around(full, int(foreign[0]))} of another message"
        )
    labels = np.array([*record.labels, True])
    left_out = np.flatnonzero(~inside & ours & ~labels[full.string])
    if left_out.size:
        raise Refusal("uncovered", f"what is trained on would leave out {_around(full, int(left_out[0]))}")


def _around(full: Trace, at: int) -> str:
    return repr(full.text[at : at + 24])


def _block_ranges(full: Trace, record: Record, trained: list[int], last_only: bool) -> list[Range]:
    blocks = runs(full.generation)
    if not blocks:
        raise Refusal("no_generation", "the template has generation blocks, and this conversation reached none")
    if not last_only:
        return blocks
    last = trained[-1]
    own = np.flatnonzero(full.owner == last)
    earlier = np.flatnonzero((full.owner >= 0) & (full.owner < last))
    answers = bool(earlier.size) and record.roles[last - 1] != "assistant" and last - 1 in full.owner
    kept = []
    for begin, end in blocks:
        owners = np.unique(full.owner[begin:end])
        if last in owners or (own.size and begin > own[0]):
            kept.append((begin, end))
        elif owners.tolist() == [NOBODY] and begin > (earlier[-1] if earlier.size else -1):
            if not answers and earlier.size:
                raise Refusal("no_proof", f"the block with {_around(full, begin)} may be of either of two messages")
            kept.append((begin, end))
    return kept


def runs(mask: npt.NDArray[np.bool_]) -> list[Range]:
    """Return the ranges in which a mask is set."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def _turn_range(scene: Scene, full: Trace, index: int) -> Range:
    """Return from where to where a message has to be produced, its end of turn included."""
    role = scene.record.roles[index]
    own = _own(full, scene.record, index)
    if own.size:
        after = int(own[-1]) + 1
        foreign = np.flatnonzero((full.owner[own[0] : after] != NOBODY) & (full.owner[own[0] : after] != index))
        if foreign.size:
            raise Refusal("interleaved", f"message {index} is written in parts, with others between them")
        begin = _header_end(scene, full, index, int(own[0])) if role == "assistant" else int(own[0])
    elif role != "assistant":
        _refuse_missing(full, scene.record, index)
        return (0, 0)
    else:
        _refuse_missing(full, scene.record, index)
        begin = after = _empty_turn(scene, full, index)
    return begin, after + len(_closing(scene, full, index, after))


def _refuse_missing(full: Trace, record: Record, index: int) -> None:
    if record.has_text(index) and index not in full.owner:
        raise Refusal("missing", f"the template writes nothing of message {index}, which has text")


def _own(trace: Trace, record: Record, index: int) -> npt.NDArray[np.int64]:
    """Return where the characters of a message stand; a name that is written again is not counted again."""
    at = np.flatnonzero(trace.owner == index)
    at = at[np.argsort(trace.string[at], kind="stable")]
    groups = np.split(at, np.flatnonzero(np.diff(trace.string[at])) + 1) if at.size else []
    kept = []
    for group in groups:
        jumps, steps = np.diff(group), np.diff(trace.origin[group])
        apart = np.flatnonzero(jumps != 1)
        if record.labels[int(trace.string[group[0]])]:
            kept.append(group[: apart[0] + 1] if apart.size else group)
            continue
        if np.any(steps < 0) or np.any((steps == 0) & (jumps != 1)):
            raise Refusal(
                "rewritten", f"message {index} is written twice or out of order: {_around(trace, int(group[0]))}"
            )
        kept.append(group)
    return np.sort(np.concatenate(kept)) if kept else at


def _header_end(scene: Scene, full: Trace, index: int, before: int) -> int:
    """Return where a turn of the assistant begins: after what asks for it, at or before a character."""
    ends = _aligned_header_ends(scene, full, index, before)
    end = ends[-1] if ends else None
    if end is not None and (end == before or not _MARKUP.search(full.text, end, before)):
        return end
    # A template may also write the header where its prompt does not, as in a turn that goes on after a tool.
    header = _REASONING.sub("", _generation_prompt(scene, index) or "")
    others = np.flatnonzero((full.owner[:before] != NOBODY) & (full.owner[:before] != index))
    least = int(others[-1]) + 1 if others.size else 0
    at = full.text.rfind(header, least if end is None else end, before) if header.strip() else -1
    if at >= 0:
        return at + len(header)
    if end is None:
        raise Refusal("header", f"where message {index} begins cannot be told: {header!r} is not before it")
    return end


def _empty_turn(scene: Scene, trace: Trace, index: int) -> int:
    """Return where a turn of the assistant without any text begins."""
    ends = _aligned_header_ends(scene, trace, index, len(trace.text))
    if len(ends) != 1:
        raise Refusal("header", f"where message {index}, which is empty, begins cannot be told")
    return ends[0]


def _aligned_header_ends(scene: Scene, full: Trace, index: int, before: int) -> list[int]:
    """Return where the prompt for a message ends in the whole render; nothing if it is not the same there."""
    prompt = scene.try_trace(index, True)
    if prompt is None:
        return []
    written = np.flatnonzero(prompt.owner != NOBODY)
    tail_at = int(written[-1]) + 1 if written.size else 0
    header = _REASONING.sub("", prompt.text[tail_at:])
    begins = [0]
    if tail_at:
        begins = (np.flatnonzero(full.origin[:before] == prompt.origin[tail_at - 1]) + 1).tolist()
    return [
        begin + len(header)
        for begin in begins
        if full.text.startswith(header, begin)
        and begin + len(header) <= before
        and _authored(full, begin, begin + len(header))
    ]


def _authored(trace: Trace, begin: int, end: int) -> bool:
    return bool(np.all(trace.owner[begin:end] == NOBODY))


def _generation_prompt(scene: Scene, index: int) -> str | None:
    """Return what a template adds to ask for a message: for this one, else for another of the conversation.

    Behind a message of the assistant a template may write another end when it is asked for more, so such a place
    counts only if nothing but the prompt is added.
    """
    roles = scene.record.roles
    for num_messages in (index, *range(1, len(roles) + 1)):
        asked, bare = scene.try_trace(num_messages, True), scene.try_trace(num_messages, False)
        if asked is None or bare is None:
            continue
        prompt = _difference(asked.text, bare.text)
        after_assistant = num_messages > 0 and roles[num_messages - 1] == "assistant"
        if prompt.strip() and (not after_assistant or asked.text.startswith(bare.text)):
            return prompt
    return None


def _difference(longer: str, shorter: str) -> str:
    """Return what a text has after what it has in common with another; markup is not split."""
    pairs = enumerate(zip(longer, shorter, strict=False))
    common = next((at for at, (one, other) in pairs if one != other), min(len(longer), len(shorter)))
    for match in _MARKUP.finditer(longer, max(0, common - 66), common + 66):
        if match.start() < common < match.end():
            common = match.start()
    return longer[common:]


def _closing(scene: Scene, full: Trace, index: int, after: int) -> str:
    """Return what the template writes behind a message to end its turn, without the white space after it.

    A template may write an end behind the last message that no other has (EOS after the conversation, or another
    end of turn), so two renders that end with the message are looked at: as it is, and asking for one more.
    """
    ended = _tail(scene, scene.try_trace(index + 1, False), full, index, after)
    asked = _tail(scene, scene.try_trace(index + 1, True), full, index, after)
    known = [tail for tail in (ended,) if tail is not None]
    if asked is not None and (ended is None or not asked.startswith(ended)):
        prompt = _generation_prompt(scene, index)
        known += [asked.removesuffix(prompt)] if prompt and asked.endswith(prompt) else []
    fitting = [tail for tail in known if full.text.startswith(tail, after)]
    if not fitting:
        raise Refusal(
            "end_of_turn", f"where message {index} ends cannot be told: {_around(full, after)} follows it"
        )
    return min((tail for tail in fitting if tail.strip()), key=len, default="").rstrip()


def _tail(scene: Scene, trace: Trace | None, full: Trace, index: int, after: int) -> str | None:
    """Return what a render that ends with a message has behind it; None if it is not the same message there."""
    if trace is None:
        return None
    own = _own(trace, scene.record, index)
    if own.size:
        same = after > 0 and trace.origin[own[-1]] == full.origin[after - 1]
        return trace.text[int(own[-1]) + 1 :] if same else None
    return trace.text[_empty_turn(scene, trace, index) :]
