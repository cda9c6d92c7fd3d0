"""Reports on runs, stores and object storage as tables, which the command line prints and the viewer draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.inspect.audit import Audit
    from tokenmill.inspect.stores import StoreContents
    from tokenmill.plan.report import PlanReport, SourceShare, StageFacts
    from tokenmill.run.reading import ReadingReport
    from tokenmill.run.report import Costs, EvalFacts, RunReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A title, the names of columns, and rows of values."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    names: int = 1
    """First columns, which identify a row."""
    clipped: bool = False
    """Whether each row is one line on a terminal: long texts are shortened, not wrapped."""


FACTS = ("what", "value")
"""Columns of a table of facts, which has no header on a terminal."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Value that is drawn as a bar: its length, relative to the longest."""

    share: float


def is_numeric(values: Sequence[object]) -> bool:
    """Whether a column has only numbers, which are aligned right."""
    return bool(values) and all(isinstance(value, int | float | None) for value in values)


def cell(value: object) -> str:
    """Format a value: thousands with a comma, None as a dash.

    >>> cell(1234567), cell(None), cell(0.5)
    ('1,234,567', '–', '0.5')
    """
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def megabytes(count: int) -> str:
    """Format a number of bytes.

    >>> megabytes(1_500_000)
    '1.5 MB'
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


# Runs


def plan_tables(report: RunReport) -> Iterator[Table]:
    """Yield the report as tables, without columns and tables that have only defaults."""
    yield stage_table(report, horizon=report.horizon, segment_multiple=report.segment_multiple)
    if report.changes:
        listed = report.changes if len(report.changes) <= _MOST_CHANGES else report.changes[: _MOST_CHANGES - 1]
        rows: list[tuple[object, ...]] = [(c.stage, c.step, c.tokens, c.what) for c in listed]
        if len(listed) < len(report.changes):
            rows.append(("–", None, None, f"{len(report.changes) - len(listed):,} more, in --json"))
        columns = ("stage", "from step", "tokens before", "what")
        yield Table(title="Changes within stages", columns=columns, rows=rows)
    yield _mixture(report.shares)
    yield _drawn(report.shares)
    yield _sources(report)
    if report.quarantined:
        yield Table(
            title="Quarantined",
            columns=("source", "from step", "documents", "tokens", "why"),
            rows=[
                (q.source, q.from_step, q.documents, q.tokens, q.reason or ("all of it" if q.whole else "–"))
                for q in report.quarantined
            ],
        )
    if report.evals:
        yield _evals(report.evals)
    yield fates(report)
    audits = [(source, audit) for source, audits in report.supervision.items() for audit in audits]
    if audits:
        yield Table(
            title="Supervision",
            columns=("source", "array", "records", "supervised %", "fully masked %"),
            rows=[
                (source, a.key, a.items, _rounded(a.supervised_percent), _rounded(a.fully_masked_percent))
                for source, a in audits
            ],
            names=2,
        )
    if report.imbalance:
        yield Table(
            title="Step time with waiting ranks, relative to equal work",
            columns=("stage", "ranks", "rows in order", "rows by cost"),
            rows=[(i.stage, i.ranks, round(i.in_order, 3), round(i.dealt, 3)) for i in report.imbalance],
        )
    yield _costs(report.costs)


def plan_notes(report: RunReport, reading: ReadingReport | None = None) -> Iterator[tuple[str, str]]:
    """Yield the lines below the tables, each with its kind: warnings, history, totals."""
    if reading is not None:
        link, prices = reading.link, reading.prices
        yield (
            "object storage",
            f"nodes {link.nodes}, {link.latency_ms:g} ms a request, {link.concurrency} at a time, "
            f"{link.gbit:g} Gbit/s; {prices.thousand_requests:g} $ for 1,000 requests, {prices.gigabyte:g} $ a GB "
            "(defaults: S3 Standard, read within its region)",
        )
    yield from (("warning", warning) for warning in report.warnings)
    yield from (("history", line) for line in report.history)
    if report.epochs is not None:
        yield "", report.epochs.sentence(report.steps)
    seconds = f"compiled in {report.costs.compile_seconds:.2f} s, about what a start takes"
    yield "", f"plan {report.fingerprint}  {totals(report)}, {seconds}"


def totals(report: PlanReport) -> str:
    """Format the size of a run."""
    skipped = f", {report.skipped_steps:,} steps skipped" if report.skipped_steps else ""
    return f"{report.steps:,} steps, {report.rows:,} rows, {report.tokens:,} tokens{skipped}"


_MOST_CHANGES = 24
"""Limit for changes within stages: a batch may grow in thousands of steps."""
_DEFAULTS = {
    "ramp until": None,
    "tokens before": 0,
    "lr_scale": 1,
    "labels per input": 1,
    "segments padded to": 1,
    "fill-in-the-middle": None,
    "lanes": None,
    "held out": 0,
    "every": None,
    "used up from step": None,
    "steps skipped": 0,
    "rows skipped": 0,
    "tokens skipped": 0,
    "of them skipped": 0,
}
"""Value by column; the column is left out if all its cells have this value."""


def _columns(title: str, columns: Sequence[tuple[str, Sequence[object]]], names: int = 1) -> Table:
    """Make a table from columns, each a header and cells, without columns that have only defaults."""
    shown = [(name, cells) for name, cells in columns if name not in _DEFAULTS or set(cells) != {_DEFAULTS[name]}]
    rows = list(zip(*(cells for _, cells in shown), strict=True))
    return Table(title=title, columns=[name for name, _ in shown], rows=rows, names=names)


def stage_table(report: PlanReport, *, horizon: int = 1, segment_multiple: int = 1) -> Table:
    """Return the facts of the stages, one per line."""
    stages = report.stages
    return _columns(
        "Stages",
        [
            ("stage", [s.name for s in stages]),
            ("first step", [s.start_step for s in stages]),
            ("end step", [s.end_step for s in stages]),
            ("ramp until", [s.ramp_end for s in stages]),
            ("tokens before", [s.start_tokens for s in stages]),
            ("batch", [batch_size(s) for s in stages]),
            ("seq_len", [s.seq_len for s in stages]),
            ("labels per input", [horizon for _ in stages]),
            ("segments padded to", [segment_multiple for _ in stages]),
            ("lr_scale", [s.lr_scale for s in stages]),
            ("rows", [s.rows for s in stages]),
            ("tokens", [s.tokens for s in stages]),
            ("steps skipped", [s.skipped_steps for s in stages]),
            ("rows skipped", [s.skipped_rows for s in stages]),
            ("tokens skipped", [s.skipped_tokens for s in stages]),
        ],
    )


def batch_size(facts: StageFacts) -> int | str:
    """Return the batch size of a stage, or the first and the last one if it grows."""
    first, last = facts.global_batch_size, facts.last_batch_size
    return first if first == last else f"{first:,} to {last:,}"


def _mixture(shares: Sequence[SourceShare]) -> Table:
    return _columns(
        "Mixture",
        [
            ("stage", [s.stage for s in shares]),
            ("source", [s.source for s in shares]),
            ("asked %", [_rounded(100 * s.asked) for s in shares]),
            ("got %", [_rounded(100 * s.realised) for s in shares]),
            ("tokens asked %", [_rounded(100 * s.asked_tokens) for s in shares]),
            ("tokens got %", [_rounded(100 * s.realised_tokens) for s in shares]),
        ],
        names=2,
    )


def _drawn(shares: Sequence[SourceShare]) -> Table:
    def figures(name: str) -> list[object]:
        values = [(share, getattr(share, name)) for share in shares]
        return [value if share.counted else f"about {value:,}" for share, value in values]

    return _columns(
        "Rows and labels",
        [
            ("stage", [s.stage for s in shares]),
            ("source", [s.source for s in shares]),
            ("rows", [s.rows for s in shares]),
            ("labels", figures("trained")),
            ("no label", figures("unlabelled")),
            ("padding", figures("padding")),
            ("epochs so far", [_rounded(s.epochs) for s in shares]),
            ("rows skipped", [s.skipped_rows for s in shares]),
        ],
        names=2,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _sources(report: RunReport) -> Table:
    sources = report.sources
    return _columns(
        "Sources",
        [
            ("source", [s.name for s in sources]),
            ("rows per epoch", ["live" if s.rows is None else s.rows for s in sources]),
            ("at seq_len", [s.seq_len for s in sources]),
            ("lanes", [s.lanes for s in sources]),
            ("fill-in-the-middle", [report.fim.get(s.name) for s in sources]),
            ("rows drawn", [s.drawn for s in sources]),
            ("of them skipped", [s.skipped for s in sources]),
            ("epochs", [_rounded(s.epochs) for s in sources]),
            ("first repeat", [s.first_repeat for s in sources]),
            ("used up from step", [s.gone_from for s in sources]),
        ],
    )


def _evals(evals: Sequence[EvalFacts]) -> Table:
    return _columns(
        "Evals",
        [
            ("eval", [e.name for e in evals]),
            ("documents", [e.documents for e in evals]),
            ("held out", [e.held_out for e in evals]),
            ("rows", [e.rows for e in evals]),
            ("seq_len", [e.seq_len for e in evals]),
            ("labels", [e.labels for e in evals]),
            ("every", [e.every if e.every_tokens is None else f"{e.every_tokens:,} tokens" for e in evals]),
            ("trained on", [_trained_on(e) for e in evals]),
        ],
    )


def _trained_on(facts: EvalFacts) -> str:
    """Return how many documents of an eval are trained on, by source, and the sources where this is unknown."""
    known = ", ".join(f"{o.documents:,} in {o.source}" for o in facts.overlaps if o.documents)
    unknown = ", ".join(f"{o.source} not known" for o in facts.overlaps if o.unknown is not None)
    return ", ".join(text for text in (known, unknown) if text) or "none"


def fates(report: PlanReport) -> Table:
    """Return the fate of the tokens of each source in an epoch, as packed by the last stage that uses it."""
    return Table(
        title="Fate of the tokens of an epoch",
        columns=("source", "tokens", "= trained", "+ masked", "+ dropped", "why", "padding"),
        rows=[
            (
                s.name,
                s.fates.tokens,
                s.fates.trained,
                s.fates.masked,
                sum(s.fates.dropped.values()),
                ", ".join(f"{reason} {number:,}" for reason, number in s.fates.dropped.items()) or "–",
                s.fates.padding,
            )
            for s in report.sources
            if s.fates
        ],
    )


def _costs(costs: Costs) -> Table:
    most = max(costs.read_bytes_a_step, key=lambda name: costs.read_bytes_a_step[name])
    about = "" if costs.read_bytes_exact else "about "
    rows = [
        ("read by the whole run", about + megabytes(costs.read_bytes), "tokens and masks, over all ranks"),
        ("read by a step", about + megabytes(costs.read_bytes_a_step[most]), f"in stage {most}"),
        ("row indexes in memory", megabytes(costs.index_bytes), "for each process"),
    ]
    if costs.mapped_index_bytes:
        rows.append(("row indexes in files", megabytes(costs.mapped_index_bytes), "mapped, read as needed"))
    rows.append(("kept ready by a loader", megabytes(costs.loader_bytes), "for each row of a micro-batch"))
    return Table(title="Reading and memory", columns=("what", "bytes", "of"), rows=rows)


def reading_tables(report: ReadingReport) -> Iterator[Table]:
    """Yield the requests of each stage to object storage, and those of an epoch of each source."""
    lines = report.readings
    shuffles = [f"{r.shuffle}, as planned" if r.is_planned else r.shuffle for r in lines]
    names = [("stage", [r.stage for r in lines]), ("source", [r.source for r in lines]), ("shuffle", shuffles)]
    for title, readings in (
        ("Object storage, per stage", lines),
        ("Object storage, per epoch", [r.an_epoch for r in lines]),
    ):
        yield _columns(
            title,
            [
                *names,
                ("requests", [r.requests for r in readings]),
                ("bytes", [megabytes(r.bytes) for r in readings]),
                ("per request", [megabytes(round(r.mean_request_bytes)) for r in lines]),
                ("mirror per node", [megabytes(r.mirror_bytes) if r.mirror_bytes else "–" for r in lines]),
                ("hours", [_rounded(r.seconds / 3600) for r in readings]),
                ("$", [_rounded(r.dollars) for r in readings]),
            ],
            names=3,
        )


# Stores


def store_tables(name: str, store: StoreContents, *, inputs: bool) -> Iterator[Table]:
    """Yield the content of a store as tables, with its input files, of which there may be many."""
    yield Table(title=f"Store {name}", columns=FACTS, rows=_facts(store))
    yield supervision(store.audit)
    for key, bins in store.lengths.items():
        title = "Document lengths" if key == "sequence" else f"Lengths of {key}"
        yield bars(title, ("tokens", "documents" if key == "sequence" else key), bins)
    if store.reasons:
        title = f"{sum(each.records for each in store.reasons):,} skipped records, an example of each reason"
        columns = ("reason", "records", "file", "line", "detail", "way out")
        rows = [(r.reason, r.records, r.file, r.line, r.detail, r.way_out) for r in store.reasons]
        yield Table(title=title, columns=columns, rows=rows)
    if store.notes:
        title = "Notes of the build, and the first document of each"
        notes = [(note.name, note.records, note.document, note.meaning) for note in store.notes]
        yield Table(title=title, columns=("name", "records", "document", "meaning"), rows=notes)
    if inputs and store.inputs:
        keys = ("name", "documents", "tokens")
        files = [[file.get(key) for key in keys] for file in store.inputs]
        yield Table(title="Input files", columns=keys, rows=files)


def bars(title: str, columns: Sequence[str], counts: Mapping[str, int]) -> Table:
    """Return counts as bars, with their numbers."""
    most = max(counts.values(), default=1) or 1
    rows = [(name, count, Bar(count / most)) for name, count in counts.items()]
    return Table(title=title, columns=(*columns, ""), rows=rows)


def _facts(store: StoreContents) -> list[tuple[str, object]]:
    counts = store.skipped.get("counts", {})
    item = "document" if list(store.longest) == ["sequence"] else "record"
    return [
        ("kind", store.kind),
        (f"{item}s", store.documents),
        ("tokens", store.tokens),
        (f"tokens per {item}", round(store.tokens / max(1, store.documents), 1)),
        *(
            ("longest document" if key == "sequence" else f"longest {key.removesuffix('s')}", longest)
            for key, longest in store.longest.items()
        ),
        ("shards", f"{store.shards:,}, {megabytes(store.bytes)}"),
        ("arrays", ", ".join(f"{key} {dtype}" for key, dtype in store.keys.items())),
        ("tokenizer", _tokenizer(store.tokenizer)),
        ("BOS / EOS", f"{_placed(store, 'bos')} / {_placed(store, 'eos')}"),
        ("recipe", _recipe(store.recipe)),
        ("input files", len(store.inputs)),
        ("skipped", ", ".join(f"{reason} {count:,}" for reason, count in counts.items()) or "none"),
        ("fingerprint", store.fingerprint),
    ]


def _tokenizer(identity: Mapping[str, Any]) -> str:
    from tokenmill.store.layout import GIVEN, UNKNOWN

    kind, size, content = identity.get("kind", UNKNOWN), identity["vocab_size"], identity.get("content")
    if kind == UNKNOWN:
        return f"unknown, ids below {size:,}"
    if kind == GIVEN:
        return f"not named, {size:,} ids"
    return f"{kind}, {size:,} ids" + (f", content {str(content)[:12]}" if content else "")


def _recipe(recipe: Mapping[str, Any]) -> str:
    if "imported" in recipe:
        return f"imported from {recipe['imported']}"
    if "name" in recipe:
        fim = recipe.get("recipe", {}).get("fim")
        cut = f", fill-in-the-middle {fim['rate']:g} (suffix first {fim['spm_rate']:g})" if fim else ""
        function = recipe.get("map")
        mapped = f", records through {function['name']} (source {function['source'][:12]})" if function else ""
        return f"{recipe['name']}{cut}{mapped}"
    return f"{recipe['format']}, read in place" if recipe.get("format") else "none"


def _placed(store: StoreContents, which: str) -> str:
    """Return the id that starts or ends documents, and whether `prepare` added it or third-party files have it."""
    from tokenmill.inspect.audit import has_chat_template

    identity, recipe = store.tokenizer, store.recipe
    number, added = identity.get(f"{which}_id"), identity.get(f"add_{which}")
    if number is None:
        return "none"
    string = store.bos if which == "bos" else store.eos
    named = f"id {number}" if string is None else f"{string!r} (id {number})"
    if "name" not in recipe and ("imported" in recipe or "format" in recipe):
        verb, end = ("starts", "start") if which == "bos" else ("ends", "end")
        return f"{named}, {verb} every document" if added else f"{named}, not at the {end} of every document"
    if has_chat_template(recipe):
        begun = [audit for audit in store.audit if audit.with_bos is not None] if which == "bos" else []
        if begun:
            started, items = sum(audit.with_bos or 0 for audit in begun), sum(audit.audited for audit in begun)
            return f"{named}, before {started:,} of {items:,} texts"
        return f"{named}, {'added where no chat template is' if added else 'not added'}"
    return f"{named}, {'added' if added else 'not added'}"


def supervision(audits: Sequence[Audit]) -> Table:
    """Return the trained share of each array of token ids, and signs of mistakes."""
    rows = []
    for audit in audits:
        items = audit.items if audit.audited == audit.items else f"{audit.items:,} ({audit.audited:,} audited)"
        masks = (audit.supervised_percent, audit.fully_masked_percent)
        shares = (*masks, audit.truncated_percent, audit.without_eos_percent, audit.unended_turns_percent)
        rounded = (None if share is None else round(share, 2) for share in shares)
        rows.append((audit.key, items, *rounded, audit.turns))
    measures = ("supervised %", "fully masked %", "truncated %", "without EOS %", "turns without end %", "turns")
    columns = ("array", "rows", *measures)
    return Table(title="Supervision", columns=columns, rows=rows)
