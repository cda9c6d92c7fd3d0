"""The views as HTML, in which every text goes through `text_of`: documents, names and paths are hostile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from tokenmill.build.status import BuildStatus
from tokenmill.inspect.examples import DocumentPart, Example
from tokenmill.inspect.steps import MAX_ROWS, StepContents, StepDeal, StepRow, Strip, StripToken
from tokenmill.inspect.stores import StoreContents
from tokenmill.run.reading import ReadingReport
from tokenmill.run.report import RunReport
from tokenmill.view.picture import COLOURS, text_of
from tokenmill.view.tables import (
    Bar,
    Table,
    bars,
    cell,
    is_numeric,
    megabytes,
    plan_notes,
    plan_tables,
    reading_tables,
    store_tables,
)
from tokenmill.view.views import (
    DOCUMENTS_A_PAGE,
    ArraysView,
    DiffView,
    DocumentView,
    PackingView,
    StepView,
    StoreView,
    StripView,
    TimelineView,
)


def link(view: str, words: str, current: str = "", /, **parameters: object) -> str:
    """Return a link to a view, relative to any page."""
    query = urlencode({name: value for name, value in parameters.items() if value is not None})
    mark = ' aria-current="page"' if view == current else ""
    return f'<a href="{text_of(view + (f"?{query}" if query else ""))}"{mark}>{words}</a>'


def shell(name: str, views: Sequence[str], view: str, body: str) -> str:
    """Return a whole page around the body of a view, with links to others."""
    choice = "".join(f"<li>{link(each, each.capitalize(), view)}</li>" for each in views)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>tokenmill: {text_of(name)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="stylesheet" href="static/style.css">'
        '<script type="module" src="static/app.js"></script></head>\n'
        '<body><a class="skip" href="#main">To the content</a>'
        f'<header><strong>{text_of(name)}</strong><nav aria-label="Views"><ul>{choice}</ul></nav></header>\n'
        f'<main id="main" tabindex="-1">{body}</main>\n'
        '<output id="about" aria-live="polite"></output></body></html>\n'
    )


def problem(message: str, step: int | None = None) -> str:
    """Return the body of a page for an error; where a step cannot be shown, with links to those beside it."""
    turn = ""
    if step is not None:
        before, after = link("step", "← earlier", step=max(0, step - 1)), link("step", "later →", step=step + 1)
        turn = f'<p class="turn">{before} {after}</p>'
    return f'<h1>This cannot be shown</h1><p class="problem" role="alert">{text_of(message)}</p>{turn}'


class Html(str):
    """A text that is HTML already; every other is escaped."""

    __slots__ = ()


STEP_COLUMNS = {"first step", "from step", "first repeat", "used up from step", "step"}
"""Columns whose numbers lead to a step."""


def table(data: Table, *, links: bool = False) -> str:
    """Draw a table; numbers stand to the right. With links, those of steps lead to them."""
    values = [[row[place] for row in data.rows] for place in range(len(data.columns))]
    kinds = [' class="number"' if is_numeric(column) else "" for column in values]
    columns = list(zip(data.columns, kinds, strict=True))
    lines = [
        "<tr>"
        + "".join(
            f"<td{kind}>{_cell(name, value, links=links)}</td>"
            for (name, kind), value in zip(columns, row, strict=True)
        )
        + "</tr>"
        for row in data.rows
    ]
    head = "".join(f'<th scope="col"{kind}>{text_of(name)}</th>' for name, kind in columns)
    body = "".join(lines) or f'<tr><td class="none" colspan="{len(data.columns)}">none</td></tr>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text_of(data.title)}">'
        f"<table><caption>{text_of(data.title)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(column: str, value: object, *, links: bool) -> str:
    if isinstance(value, Html):
        return value
    if isinstance(value, Bar):
        return (
            '<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect width="{100 * value.share:.2f}" height="1" class="c0"/></svg>'
        )
    if links and column in STEP_COLUMNS and isinstance(value, int):
        return link("step", f"{value:,}", step=value)
    return text_of(cell(value))


def facts(items: Iterable[tuple[str, object]]) -> str:
    """Return names and values as a list."""
    shown = "".join(f"<div><dt>{text_of(name)}</dt><dd>{text_of(cell(value))}</dd></div>" for name, value in items)
    return f'<dl class="facts">{shown}</dl>'


# Pages that stand by themselves


def standalone(title: str, body: str) -> str:
    """Return a page that needs nothing else and runs nothing, drawn as those of the server are."""
    style = (Path(__file__).parent / "static" / "style.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text_of(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>\n'
        f"<body><main><h1>{text_of(title)}</h1>\n{body}</main></body></html>\n"
    )


def plan_html(report: RunReport, reading: ReadingReport | None = None, *, links: bool = False) -> str:
    """Draw all that `tokenmill plan --full` prints, below its picture."""
    notes = "".join(
        f"<p{' class=problem' * (kind == 'warning')}>{text_of(': '.join(filter(None, (kind, sentence))))}</p>\n"
        for kind, sentence in plan_notes(report, reading)
    )
    shown = (*plan_tables(report), *(reading_tables(reading) if reading else ()))
    return notes + "".join(table(each, links=links) for each in shown)


def stores_html(shown: Sequence[tuple[str, StoreContents, Sequence[Example]]], fates: Table | None) -> str:
    """Draw all that `tokenmill inspect` shows."""
    parts = []
    for name, contents, texts in shown:
        parts += [table(each) for each in store_tables(name, contents, inputs=True)]
        parts += [f"<h2>Examples of {text_of(name)}</h2>{examples_html(texts)}"] if texts else []
    return "".join([*parts, *([table(fates)] if fates else [])])


# Strips: the page is sent what to draw as numbers, and draws what is on the screen (static/app.js)

LINES_A_CANVAS = 64
LEGEND = (
    '<p class="legend"><span><i class="key t"></i> trained</span><span><i class="key m"></i> not trained</span>'
    '<span><i class="key pad"></i> padding</span><span><i class="key edge"></i> a document begins</span>'
    '<span><i class="key bos"></i> BOS</span><span><i class="key eos"></i> EOS</span></p>'
)


def strip_numbers(strip: Strip) -> list[object]:
    """Return what is drawn of a strip: room, (column, document, start, length) of spans, trained runs, BOS, EOS.

    Runs and marks that are less than a 4,096th of the strip behind the one before would share its pixel: they are
    left out, or joined to it, so that no document makes a page long.
    """
    least = strip.room // 4096
    trained: list[int] = []
    for first, end in strip.trained:
        if trained and first - trained[-1] < least:
            trained[-1] = end
        else:
            trained += (first, end)
    spans = zip(strip.places, strip.spans, strict=True)
    return [
        strip.room,
        [number for column, span in spans for number in (column, span.document, span.start, span.length)],
        trained,
        *(
            [column for before, column in pairwise((-strip.room, *columns)) if column - before >= least]
            for columns in (strip.bos, strip.eos)
        ),
    ]


def strips(
    step: int,
    rows: Sequence[StepRow],
    side: str = "slot",
    equal: Mapping[int, str] | None = None,
    base: str = "",
    headings: Mapping[int, str] | None = None,
) -> str:
    """Draw rows of a step; each is a link to its tokens, and to the row that is `equal` to it, if there is one.

    `base` stands before addresses of another run, `headings` before the rows of these slots.
    """
    parts: list[str] = []
    lines: list[str] = []
    numbers: list[object] = []
    for row in rows:
        if lines and (len(lines) >= LINES_A_CANVAS or (headings and row.slot in headings)):
            parts.append(_lines(step, base, lines, numbers))
            lines, numbers = [], []
        if headings and row.slot in headings:
            parts.append(f"<h3>{text_of(headings[row.slot])}</h3>")
        source = text_of(row.source)
        twin = f' <a href="#{equal[row.slot]}">same</a>' if equal and row.slot in equal else ""
        for place, strip in enumerate(row.strips):
            name = text_of(_named(strip))
            first = f' id="{side}-{row.slot}"' if place == 0 else ""
            lines.append(
                f'<li{first} data-at="{row.slot},{place},{source}"><a href="{base}strip?step={step}&amp;'
                f'slot={row.slot}&amp;strip={place}" aria-label="slot {row.slot}, {source} {name}: '
                f'{_described(strip)}">{row.slot} <b>{source}</b> {name}</a>{twin}</li>'
            )
            numbers.append(strip_numbers(strip))
    parts += [_lines(step, base, lines, numbers)] if lines else []
    return f"{LEGEND}{''.join(parts) or EMPTY_STEP}"


EMPTY_STEP = '<p class="empty">There is no row here.</p>'


def _lines(step: int, base: str, lines: Sequence[str], numbers: Sequence[object]) -> str:
    """Return some rows, with their numbers for the canvas beside them."""
    drawn = msgspec.json.encode(numbers).decode()
    return f'<ol class="strips" data-step="{step}" data-base="{base}" data-strips="{drawn}">{"".join(lines)}</ol>'


def _described(strip: Strip) -> str:
    documents = f"{len(strip.spans)} span{'s' if len(strip.spans) != 1 else ''}"
    return f"{documents}, {strip.length} of {strip.room} tokens, {strip.num_trained} trained"


def _named(strip: Strip) -> str:
    if strip.key == "tokens":
        return ""
    return strip.key if strip.reward is None else f"reward {strip.reward:g}"


def step_page(view: StepView) -> str:
    """Show a step."""
    contents = view.contents
    last = contents.steps - 1
    ranks, each = (view.deal.ranks, view.deal.micro_batch) if view.deal else (None, None)
    kept = {"world_size": ranks, "micro_batch": each}
    before = link("step", "← earlier", step=max(0, contents.step - 1), **kept)
    after = link("step", "later →", step=min(last, contents.step + 1), **kept)
    edges = "".join(f'<option value="{start}" label="{text_of(name)}"></option>' for name, start in view.stages)
    control = (
        '<form action="step" class="controls">'
        f'<label>Step <input name="step" type="number" min="0" max="{last}" value="{contents.step}"></label>'
        f'<label class="wide">of {contents.steps:,} <input type="range" min="0" max="{last}" '
        f'value="{contents.step}" list="stages" data-for="step" aria-label="Step"></label>'
        f'<datalist id="stages">{edges}</datalist>'
        f'<label>Ranks <input name="world_size" type="number" min="1" value="{ranks or ""}"></label>'
        f'<label>Micro-batch <input name="micro_batch" type="number" min="1" value="{each or ""}">'
        f'</label><button>Show</button> <span class="turn">{before} {after}</span></form>'
    )
    shares = ", ".join(f"{name} {share:.1%}" for name, share in sorted(contents.shares.items()))
    rows = contents.rows
    about = facts(
        [
            ("stage", f"{contents.stage}, {contents.progress:.1%} of it behind"),
            ("rows", contents.global_batch_size),
            ("seq_len", contents.seq_len),
            ("shares asked for", shares),
            ("lr_scale", contents.lr_scale),
            ("tokens shown", sum(strip.length for row in rows for strip in row.strips)),
            ("of them trained", sum(strip.num_trained for row in rows for strip in row.strips)),
        ]
    )
    body, headings = "", {}
    if view.deal is not None:
        body = _deal(view.deal)
        by_slot = {row.slot: row for row in rows}
        members = [(each, [by_slot[slot] for slot in each.slots if slot in by_slot]) for each in view.deal.used]
        rows = tuple(row for _, own in members for row in own)
        headings = {
            own[0].slot: f"rank {each.rank}, micro-batch {each.micro_batch}: cost {each.cost:.3f} of the mean"
            for each, own in members
            if own
        }
    drawn = strips(contents.step, rows, headings=headings)
    others = _other_rows(contents, kept)
    return f"<h1>Step {contents.step:,}</h1>{control}{about}{body}{others}{drawn}"


def _other_rows(contents: StepContents, kept: Mapping[str, object]) -> str:
    """Return links to the rows of a step that are not shown, where there are too many for one page."""
    size = contents.global_batch_size
    if len(contents.rows) == size:
        return ""
    links = [
        link("step", f"slots {begin} to {min(begin + MAX_ROWS, size) - 1}", step=contents.step, first=begin, **kept)
        for begin in range(0, size, MAX_ROWS)
        if begin != contents.first
    ]
    return f'<p class="more">{" ".join(links[:64])}</p>'


def _deal(deal: StepDeal) -> str:
    """Show which rank takes which rows, and how long ranks wait for the most expensive ones."""
    used, other = deal.used, deal.in_order if deal.balanced else deal.dealt
    how = "by cost" if deal.balanced else "in order"
    lines = [
        (
            member.rank,
            member.micro_batch,
            ", ".join(map(str, member.slots)),
            round(member.cost, 3),
            round(alike.cost, 3),
        )
        for member, alike in zip(used, other, strict=True)
    ]
    columns = ("rank", "micro-batch", "slots", "cost", "in order" if deal.balanced else "dealt by cost")
    waits = (
        f"Ranks that wait for one another take {deal.waiting_in_order:.3f} of the mean in order, "
        f"{deal.waiting_dealt:.3f} dealt by cost."
    )
    return f"{table(Table(title=f'Who takes which rows, {how}', columns=columns, rows=lines))}<p>{waits}</p>"


# Tokens as text


ShownToken = tuple[str | None, bool, bool, str, bool]
"""Text (None where it only continues the character of the token before), whether it is trained, whether it is a
control token, what is shown on pointing at it, whether a span begins there."""
TOKENS_LEGEND = (
    '<p class="legend"><span class="k t">trained</span> <span class="k">not trained</span> '
    '<span class="k c">control token</span> <span class="k first">a span begins</span> '
    '<span class="k">· continues a character</span></p>'
)


CONTINUES = "part of the character before"


def tokens_html(tokens: Sequence[ShownToken]) -> str:
    """Return tokens as text."""
    return f'{TOKENS_LEGEND}<pre class="tokens">{_spelled(tokens)}</pre>'


def _spelled(tokens: Sequence[ShownToken]) -> str:
    parts = []
    for text, trained, control, about, begins in tokens:
        kinds = f"k{' t' if trained else ''}{' c' if control else ''}{' first' if begins else ''}"
        if text is None:
            kinds += " j"
        shown = "" if text is None else text_of(text.replace("\n", "⏎\n")) or "∅"
        parts.append(f'<span class="{kinds}" title="{text_of(about)}">{shown}</span>')
    return "".join(parts)


def strip_page(view: StripView) -> str:
    """Show one strip of a row, token by token."""
    strip, controls = view.tokens, set(view.controls)

    def line(token: StripToken) -> ShownToken:
        state = "trained" if token.trained else "not trained"
        about = f"id {token.id}, document {token.document}, position {token.position}, {state}"
        text = f"{token.id} " if token.text is None else token.text
        if token.continues:
            return None, token.trained, False, f"{CONTINUES}, {about}", token.position == 0
        return text, token.trained, token.id in controls, about, token.position == 0

    documents = dict.fromkeys(token.document for token in strip.tokens)
    links = ", ".join(
        link("document", str(document), source=strip.source, document=document) for document in documents
    )
    back = link("step", f"step {strip.step:,}", step=strip.step)
    turn = paging(
        "strip", strip.first, len(strip.tokens), strip.length, step=strip.step, slot=strip.slot, strip=strip.strip
    )
    return (
        f"<h1>Slot {strip.slot} of {back}: {text_of(strip.source)}, {text_of(strip.key)}</h1>"
        f"{facts([('tokens', strip.length), ('room', strip.room)])}<p>Documents: {links}</p>"
        f"<p>{link('arrays', 'Its arrays as numbers', step=strip.step, slot=strip.slot)}</p>"
        f"{_no_text(view.no_text)}{turn}{tokens_html([line(token) for token in strip.tokens])}"
    )


def arrays_page(view: ArraysView) -> str:
    """Show the arrays of one row as numbers, a place a line."""
    names, shown = list(view.arrays), max((len(values) for values in view.arrays.values()), default=0)
    rows = [
        (
            view.first + place,
            *(str(values[place]) if place < len(values) else "" for values in view.arrays.values()),
        )
        for place in range(shown)
    ]
    back = link("strip", f"slot {view.slot} of step {view.step:,}", step=view.step, slot=view.slot)
    turn = paging("arrays", view.first, shown, view.length, step=view.step, slot=view.slot)
    numbers = Table(title="As the loader delivers them", columns=("place", *names), rows=rows)
    return f"<h1>Arrays of {back}</h1>{turn}{table(numbers)}"


def _no_text(why: str | None) -> str:
    return f'<p class="problem">{text_of(why)}</p>' if why else ""


def paging(view: str, first: int, shown: int, total: int, **parameters: object) -> str:
    """Return links to what stands before and behind what is shown."""
    if shown >= total:
        return ""
    before = link(view, "← previous", first=max(0, first - shown), **parameters) if first else ""
    after = link(view, "next →", first=first + shown, **parameters) if first + shown < total else ""
    return f'<p class="turn">{first:,} to {first + shown - 1:,} of {total:,} {before} {after}</p>'


# The run as a whole


def timeline_page(view: TimelineView) -> str:
    """Show shares, stages, edits and epochs over the whole run."""
    choice = " ".join(
        f"<li>{link('timeline', f'by {by}', 'timeline' if by == view.by else '', by=by)}</li>"
        for by in ("steps", "tokens")
    )
    return (
        f'<h1>Timeline</h1><ul class="choice">{choice}</ul>'
        f'<figure class="timeline" tabindex="0">{view.picture}</figure>{plan_html(view.report, links=True)}'
    )


def packing_page(view: PackingView) -> str:
    """Show what becomes of the tokens of each source, and how rows are filled."""
    parts = ["<h1>Packing</h1>"]
    for source in view.report.sources:
        if source.fates is not None:
            fates = source.fates
            counts = {"trained": fates.trained, "masked": fates.masked, **fates.dropped}
            parts.append(_balance(f"{source.name}: the {fates.tokens:,} tokens of an epoch", counts, fates.tokens))
    for packed in view.sources:
        name = f"{packed.source} in {packed.stage}, {packed.packing}, {packed.sampled:,} of {packed.rows:,} rows"
        fill = {f"{10 * part}%": count for part, count in enumerate(packed.fill)}
        parts.append(
            f'<h2>{text_of(name)}</h2><div class="beside">'
            f"{table(bars('Rows by how full they are', ('filled to', 'rows'), fill))}"
            f"{table(bars('Spans a row', ('spans', 'rows'), packed.spans))}"
            f"{table(bars('Tokens a span', ('tokens', 'spans'), packed.lengths))}</div>"
        )
    if len(parts) == 1:
        parts.append(
            '<p class="empty">All text is live: it is packed as it is read, and nothing is known before.</p>'
        )
    return "".join(parts)


def _balance(title: str, counts: Mapping[str, int], total: int) -> str:
    """Draw counts that sum to a total as one bar."""
    drawn, begin = [], 0.0
    for place, count in enumerate(counts.values()):
        width = 1000 * count / max(total, 1)
        drawn.append(f'<rect x="{begin:.3f}" width="{width:.3f}" height="10" class="c{place % len(COLOURS)}"/>')
        begin += width
    keys = "".join(
        f'<span><svg class="swatch" viewBox="0 0 1 1" aria-hidden="true"><rect width="1" height="1" '
        f'class="c{place % len(COLOURS)}"/></svg> {text_of(name)} {count:,}</span>'
        for place, (name, count) in enumerate(counts.items())
    )
    words = f"{sum(counts.values()):,} = {total:,}"
    return (
        f"<h2>{text_of(title)}</h2>"
        f'<svg class="strip" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" aria-label="{words}">'
        f'{"".join(drawn)}</svg><p class="legend">{keys} <span>{words}</span></p>'
    )


# Stores


def examples_html(shown: Sequence[Example]) -> str:
    """Show examples with what is trained on."""
    parts = []
    for example in shown:
        runs = []
        for piece in example.runs:
            gap = f" … {piece.left_out:,} tokens … " if piece.left_out else ""
            runs += [(gap, False, False, example.title, False)] if gap else []
            runs.append((piece.text, piece.trained, piece.control, example.title, False))
        parts.append(f"<h3>{text_of(example.title)}</h3>{tokens_html(runs)}")
    return "".join(parts)


def store_page(view: StoreView) -> str:
    """Show a store and a page of its documents."""
    contents = view.contents
    others = " ".join(
        f"<li>{link('store', text_of(name), 'store' if name == view.name else '', source=name)}</li>"
        for name in view.names
    )
    about, *tables = (table(each) for each in store_tables(view.name, contents, inputs=False))
    search = (
        f'<form action="document" class="controls"><input type="hidden" name="source" value="{text_of(view.name)}">'
        f'<label>Document <input name="document" type="number" min="0" max="{max(0, contents.documents - 1)}" '
        "required></label><button>Show</button></form>"
    )
    if view.keep:
        field, value = view.sought or (view.keep[0], "")
        options = "".join(f"<option{' selected' * (name == field)}>{text_of(name)}</option>" for name in view.keep)
        search += (
            f'<form action="store" class="controls">'
            f'<input type="hidden" name="source" value="{text_of(view.name)}">'
            f'<label>Field <select name="field">{options}</select></label> <label>Value <input name="value" '
            f'value="{text_of(value)}" required></label><button>Find</button></form>'
        )
    listed = [
        (
            Html(link("document", f"{each.document:,}", source=view.name, document=each.document)),
            each.tokens,
            each.text,
        )
        for each in view.documents
    ]
    title, pages = "Documents", paging("store", view.first, len(listed), contents.documents, source=view.name)
    if view.sought:
        most = ", the first listed" if len(listed) == DOCUMENTS_A_PAGE else ""
        title, pages = f"Documents with {view.sought[0]} = {view.sought[1]}: {len(listed)}{most}", ""
    documents = Table(title=title, columns=("document", "tokens", "beginning"), rows=listed)
    return (
        f'<h1>Store {text_of(view.name)}</h1><ul class="choice">{others}</ul>{_no_text(view.no_text)}{search}'
        f"{pages}{table(documents)}{examples_html(view.examples)}{''.join(tables)}{about}"
    )


def document_page(view: DocumentView) -> str:
    """Show one document, and the steps that see it."""
    contents, document = view.contents, view.contents.document
    kept = [(name, str(value)) for name, value in contents.origin.kept.items()]
    parts = "".join(_part(part, view, place) for place, part in enumerate(contents.parts))
    steps = [
        (
            use.step,
            Html(link("strip", str(use.slot), step=use.step, slot=use.slot)),
            use.row,
            ", ".join(f"{start}:{start + length}" for start, length in use.spans),
        )
        for use in view.uses
    ]
    seen = ""
    if view.in_run:
        title = f"Seen {view.num_uses:,} time{'s' * (view.num_uses != 1)}" + (
            "" if view.num_uses == len(view.uses) else ", the first listed"
        )
        columns = ("step", "slot", "row", "tokens of the document")
        seen = table(Table(title=title, columns=columns, rows=steps), links=True)
    turn = " ".join(
        link("document", words, source=view.source, document=other)
        for words, other in (("← previous", document - 1), ("next →", document + 1))
        if 0 <= other < view.num_documents
    )
    longest = max((part.length for part in contents.parts), default=0)
    shown = max((len(part.ids) for part in contents.parts), default=0)
    pages = paging("document", view.first, shown, longest, source=view.source, document=document)
    back = link("store", text_of(view.source), source=view.source)
    return (
        f'<h1>Document {document:,} of {back}</h1><p class="turn">{turn}</p>'
        f"{facts([('from', str(contents.origin)), *kept])}{_no_text(view.no_text)}{pages}"
        f'<div class="beside">{parts}</div>{seen}'
    )


def _part(part: DocumentPart, view: DocumentView, place: int) -> str:
    """Show one array of a document: tokens as text, each with its id and mask; a chat message by message."""
    strings = part.strings or [f"{number} " for number in part.ids]
    controls, rewards = part.control or [False] * len(part.ids), view.contents.rewards
    cuts = {start for use in view.uses for start, _ in use.spans if start}
    tokens = [
        (
            None if continues else text,
            trained,
            control,
            f"{CONTINUES + ', ' if continues else ''}id {number}, position {view.first + at}, "
            f"{'trained' if trained else 'not trained'}",
            view.first + at in cuts,
        )
        for at, (text, number, trained, control, continues) in enumerate(
            zip(strings, part.ids, part.trained, controls, part.continues or [False] * len(strings), strict=True)
        )
    ]
    first = next(at for at, each in enumerate(view.contents.parts) if each.key == part.key)
    reward = f", reward {rewards[place - first]:g}" if rewards and part.key == "responses" else ""
    heading = f"{part.key}{reward}: {part.length:,} tokens, {sum(part.trained):,} of those shown trained"
    return f"<section><h2>{text_of(heading)}</h2>{tokens_html(tokens)}</section>"


# Two runs


def diff_page(view: DiffView) -> str:
    """Show where two runs part, and why."""
    others = "".join(f"<li>{link('diff', text_of(name), **{'with': name})}</li>" for name in view.others)
    choice = f'<p>Compare with a config beside this one:</p><ul class="choice">{others}</ul>'
    if not others:
        choice = '<p class="empty">There is no other config beside this one; name one with --diff OTHER.toml.</p>'
    if view.difference is None:
        return f"<h1>Diff</h1>{choice}"
    difference = view.difference
    first = difference["first_step"]
    if first is None:
        words = (
            "All batches are the same." if difference["same"] else "No difference was found in what was compared."
        )
    else:
        cause = difference["cause"]
        words = (
            f"The first step that differs is {first:,}, in stage {difference['stage']}. The plans differ first in "
            f"{cause['path']}: {cause['old']} and {cause['new']}."
        )
    changes = [(c["path"], c["old"], c["new"]) for c in difference["changes"]]
    twins = (
        {left: f"there-{right}" for left, right in view.equal},
        {right: f"here-{left}" for left, right in view.equal},
    )
    bases = ("", f"with/{quote(view.other, safe='')}/")
    columns = []
    for name, side, place, equal, base in zip(
        view.names, view.sides, ("here", "there"), twins, bases, strict=False
    ):
        if isinstance(side, str):
            drawn = f'<p class="empty">{text_of(side)}</p>'
        else:
            drawn = strips(side.step, side.rows, place, equal, base)
        columns.append(f"<section><h2>{text_of(name)}</h2>{drawn}</section>")
    turn = ""
    if view.step is not None:
        kept = {"with": view.other}
        before, after = (
            link("diff", words, step=min(max(0, view.step + way), view.steps - 1), **kept)
            for words, way in (("← earlier", -1), ("later →", 1))
        )
        turn = f'<h2>Step {view.step:,}</h2><p class="turn">{before} {after}</p>'
    why = Table(title="Changed keys", columns=("key", "here", "there"), rows=changes)
    counted = f"{difference['differing_rows']:,} of {difference['compared_rows']:,} rows that were compared differ"
    return (
        f"<h1>{text_of(view.names[0])} and {text_of(view.names[1])}</h1>{choice}<p>{text_of(words)} "
        f"{text_of(counted)}.</p>{table(why, links=True)}"
        f'{turn}<div class="beside">{"".join(columns)}</div>'
    )


def build_page(status: BuildStatus) -> str:
    """Show how far a build is; the page asks again by itself until it is finished."""
    shown = [
        ("state", status.state),
        ("because", status.reason),
        ("units done", status.units_done),
        ("of", status.units),
        ("failed", len(status.failed)),
        ("left over by killed workers", status.units_left_over),
        ("documents", status.documents),
        ("tokens", status.tokens),
        (
            "so far",
            f"{megabytes(round(status.text_bytes / status.seconds))}/s of text" if status.seconds > 0 else None,
        ),
        ("time so far", duration(status.seconds)),
        ("time left, about", duration(status.seconds_left)),
        *((f"left out: {reason}", count) for reason, count in status.skipped.items()),
    ]
    counts = {
        "done": status.units_done,
        "under way": status.units_under_way,
        "failed": len(status.failed),
        "left over": status.units_left_over,
    }
    counts["to do"] = max(0, (status.units or 0) - sum(counts.values()))
    bar = _balance("Units", counts, sum(counts.values())) if status.units else ""
    workers = [
        (
            *(each.name, each.state, each.unit[:12], Bar(each.bytes / max(each.unit_bytes, 1))),
            f"{megabytes(each.bytes)} of {megabytes(each.unit_bytes)}",
            *(each.documents, each.tokens, duration(each.silent_seconds)),
        )
        for each in status.workers
    ]
    columns = (*("worker", "state", "unit", "", "of its unit", "documents", "tokens", "last heartbeat"),)
    failed = [(key[:12], why) for key, why in status.failed.items()]
    about = "" if status.exact else "<p>Documents and tokens are in proportion to some units.</p>"
    again = ' data-again="2"' if status.state in ("running", "stopped", "publishing") else ""
    tables = [Table(title="Workers", columns=columns, rows=workers)]
    tables += [
        Table(title="Units that failed; the same command tries them again", columns=("unit", "why"), rows=failed)
    ]
    return f"<h1{again}>Build</h1>{facts(shown)}{about}{bar}{''.join(map(table, tables if failed else tables[:1]))}"


def duration(seconds: float | None) -> str | None:
    """Show how long something takes.

    >>> duration(5.0), duration(3700.0), duration(None)
    ('5.0 s', '1 h 2 min', None)
    """
    if seconds is None:
        return None
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


PAGES: Mapping[str, Callable[[Any], str]] = {
    "step": step_page,
    "strip": strip_page,
    "arrays": arrays_page,
    "timeline": timeline_page,
    "packing": packing_page,
    "store": store_page,
    "document": document_page,
    "diff": diff_page,
    "build": build_page,
}
"""Name of a view -> how its record is drawn."""
