"""What is trained on in a render: found by its generation blocks or by comparing renders, and proven."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.encode.chat.render import Fragment, Range, Record, Scene, Trace
from tokenmill.encode.chat.turns import (
    at,
    closing_of,
    closings,
    empty_turn,
    header_end,
    header_ends,
    origin_at,
    own_range,
    shown_by_sample,
)
from tokenmill.encode.refusal import Refusal


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
        if not (scene.compiled.has_generation and record.roles[index] == "assistant"):
            found = _turn_range(scene, full, index)
            ranges += [found] if found[0] < found[1] else []
    ranges = _merged(ranges)
    _verify(full, record, ranges, trained)
    return tuple(ranges)


def _merged(ranges: list[Range]) -> list[Range]:
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if merged and begin < merged[-1][1]:
            raise Refusal("overlap", f"a turn from character {begin}, where the one before it has not ended")
        if merged and begin == merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def _verify(full: Trace, record: Record, ranges: list[Range], trained: list[int]) -> None:
    """Refuse ranges that hold a character of another message, or leave out one of a trained message."""
    if not ranges:
        raise Refusal("no_supervision", "nothing in the render is trained on")
    ours = set(trained)
    for begin, end in ranges:
        for one in full.within(begin, end):
            if one.owner not in ours:
                shown = at(full, max(begin, one.begin))
                raise Refusal("foreign", f"what is trained on would hold {shown} of another message")
    outside = [0, *(edge for both in ranges for edge in both), len(full.text)]
    for begin, end in zip(outside[::2], outside[1::2], strict=True):
        for one in full.within(begin, end) if begin < end else ():
            if one.owner in ours and not record.labels[one.string]:
                raise Refusal("uncovered", f"what is trained on would leave out {at(full, max(begin, one.begin))}")


def _block_ranges(full: Trace, record: Record, trained: list[int], last_only: bool) -> list[Range]:
    blocks = full.generation
    if not blocks:
        raise Refusal("no_generation", "the template has generation blocks, and this conversation reached none")
    if not last_only:
        return list(blocks)
    last = trained[-1]
    own: Sequence[Fragment] = full.of_message.get(last, ())
    earlier = max((one.end - 1 for one in full.fragments if 0 <= one.owner < last), default=None)
    answers = earlier is not None and record.roles[last - 1] != "assistant" and last - 1 in full.of_message
    kept = []
    for begin, end in blocks:
        owners = {one.owner for one in full.within(begin, end)}
        if last in owners or (own and begin > own[0].begin):
            kept.append((begin, end))
        elif not owners and begin > (-1 if earlier is None else earlier):
            if not answers and earlier is not None:
                raise Refusal("no_proof", f"the block with {at(full, begin)} may be of either of two messages")
            kept.append((begin, end))
    return kept


def _turn_range(scene: Scene, full: Trace, index: int) -> Range:
    """Return from where to where a message has to be produced, its end of turn included."""
    record = scene.record
    asks = record.roles[index] == "assistant"
    own = own_range(full, record, index)
    if own is None:
        _refuse_missing(full, record, index)
        if not asks:
            return (0, 0)
        begin = empty_turn(scene, full, index)
        return begin, begin + len(_closing(full, record, closings(scene, index, None), index, begin))
    first, after = own
    if any(one.owner != index for one in full.within(first, after)):
        raise Refusal("interleaved", f"{record.named(index)} in parts, with others between them")
    # What a sample shows counts where the render has the same; else renders of the conversation itself decide.
    known = shown_by_sample(scene, index)
    begin, end = first, None
    if asks:
        ends = header_ends(full, record, known.header, first) if known and known.header else []
        shown = known is not None and bool(ends) and full.text[ends[-1] : first] in ("", *known.leads)
        begin = ends[-1] if shown else header_end(scene, full, index, first)
    last = origin_at(full, after - 1)
    if known is not None and known.last == last:
        end = closing_of(full, known.tails, after)
    if end is None:
        end = _closing(full, record, closings(scene, index, last), index, after)
    return begin, after + len(end)


def _closing(full: Trace, record: Record, tails: tuple[str, ...], index: int, after: int) -> str:
    end = closing_of(full, tails, after)
    if end is None:
        raise Refusal("end_of_turn", f"{at(full, after)} behind {record.named(index)}")
    return end


def _refuse_missing(full: Trace, record: Record, index: int) -> None:
    if index in full.of_message:
        return
    match record.parts_of(index):
        case ():
            return
        case ("text", *_):
            detail = f"the template writes nothing of {record.named(index)}"
        case parts:
            what = " and no ".join(parts)
            detail = f"the template writes no {what}, and {record.named(index)} has nothing else"
    raise Refusal("missing", detail)
